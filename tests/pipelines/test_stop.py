"""Signals: who handles them, and for how long."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from unittest.mock import Mock

import pytest
import torch

from pipelines import ray_env, train
from uno import distributed
from uno.config import Config
from uno.data.files import Storage
from uno.errors import Interrupted, StorageError
from uno.session import console
from uno.session.console import STOP_SIGNALS, interrupt_on_signal, on_stop


@pytest.fixture
def fake_ray(monkeypatch):
    """A stand-in for the module ``ray``, which starts by ``init``."""
    ray = Mock()
    ray.is_initialized.return_value = False
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    for name, value in ray_env.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    return ray


@pytest.mark.parametrize(
    ("phases", "says"), [(("discover",), "resume with the same"), ((), "nothing was")]
)
def test_a_stop_after_the_last_step_on_ray_is_heard(
    fake_ray, monkeypatch, tmp_path, phases, says
):
    """Also during an evaluation. Kills: a stop that is announced and ignored."""
    monkeypatch.setattr(train, "Messages", Mock())
    monkeypatch.setattr(ray_env, "in_thread", lambda *_: {"metrics": {"acc": 1.0}})
    run = Mock(storage=Storage(str(tmp_path)), phases=phases)
    resources = {"CPU": 1.0}
    args = run, Config(), resources, {}, print
    with pytest.raises(Interrupted, match=says):
        train.run_workers(*args, give_up=lambda: True)
    assert train.run_workers(*args, give_up=lambda: False) == {"acc": 1.0}


def test_ray_does_not_take_sigterm_from_us(fake_ray):
    """Ray installs a handler that ends the process with code 15 and no line. Kills:
    predict and estimate that leave that way, a handler that stays after its block.
    """
    before, asked = signal.getsignal(signal.SIGTERM), Mock()
    fake_ray.init = lambda **_: signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))
    with on_stop(asked), ray_env.connect():
        signal.raise_signal(signal.SIGTERM)
    assert asked.call_count == 1 and signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_while_ray_starts_is_heard_afterwards(fake_ray, number):
    """Kills: Ctrl-C that nobody hears, and one that Ray's processes die of."""
    children, asked = [], Mock()

    def init(**_):
        children.append(subprocess.Popen(["sleep", "60"]))
        os.kill(children[0].pid, number)
        signal.raise_signal(number)
        assert not asked.called

    fake_ray.init = init
    with on_stop(asked), ray_env.connect():
        assert asked.call_count == 1 and children[0].poll() is None
        children[0].kill()
        assert children[0].wait() == -signal.SIGKILL
    assert fake_ray.shutdown.called and not signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.parametrize("first", STOP_SIGNALS)
@pytest.mark.parametrize("second", STOP_SIGNALS)
def test_the_first_signal_asks_and_the_second_leaves(first, second, capsys):
    """Kills: SIGHUP that ends the process without saving, a second signal that waits
    for a checkpoint.
    """
    before, asked = [signal.getsignal(number) for number in STOP_SIGNALS], Mock()
    with pytest.raises(KeyboardInterrupt), on_stop(asked, "stopping"):
        signal.raise_signal(first)
        assert asked.call_count == 1 and capsys.readouterr().out == "stopping\n"
        signal.raise_signal(second)
    after = [signal.getsignal(number) for number in STOP_SIGNALS]
    assert asked.call_count == 1 and after == before


@pytest.mark.parametrize(
    ("number", "times_asked"),
    [
        pytest.param(signal.SIGHUP, 0, id="nohup uno discover"),
        pytest.param(signal.SIGINT, 1, id="uno discover & in a script, then kill -INT"),
    ],
)
def test_of_the_signals_that_are_ignored_ctrl_c_alone_is_heard(number, times_asked):
    """Kills: a handler that takes SIGHUP from nohup, a run in the background that
    cannot be asked to stop.
    """
    before, asked = signal.signal(number, signal.SIG_IGN), Mock()
    with on_stop(asked):
        signal.raise_signal(number)
    assert asked.call_count == times_asked
    assert signal.signal(number, before) == signal.SIG_IGN


def test_a_line_that_nobody_can_read_does_not_keep_it_from_saving(monkeypatch):
    monkeypatch.setattr(console, "print_line", Mock(side_effect=BrokenPipeError))
    asked = Mock()
    with on_stop(asked, "stopping"):
        signal.raise_signal(signal.SIGHUP)
    asked.assert_called_once()


def test_a_stop_that_a_library_swallows_is_said_at_the_end():
    with (
        pytest.raises(Interrupted, match="resume"),
        interrupt_on_signal("resume"),
        suppress(Exception),
    ):
        signal.raise_signal(signal.SIGTERM)


class Rank(distributed.GroupWorker):
    def __init__(self, rank, asked_to_stop, device="cpu"):
        self.rank, self.world_size = rank, 2
        self.device, self.asked_to_stop = torch.device(device), asked_to_stop


def test_all_ranks_stop_at_the_same_step(monkeypatch):
    """Rank 0 looks, first in vain for its storage; the others follow its vote."""
    monkeypatch.setattr(distributed, "STOP_CHECK_S", 0.0)
    asked = Mock(side_effect=[StorageError("a moment"), False, True])
    first, other = Rank(0, asked), Rank(1, pytest.fail)
    reduce = Mock(side_effect=lambda vote: vote)
    monkeypatch.setattr(distributed, "all_reduce_sum_", reduce)
    assert [first.should_stop(step) for step in range(3)] == [False, False, True]
    reduce.side_effect = [call.args[0] for call in reduce.call_args_list]
    assert [other.should_stop(step) for step in range(3)] == [False, False, True]


def test_rank_0_does_not_look_at_every_step():
    asked = Mock(return_value=False)
    rank = Rank(0, asked)
    assert not any(rank.should_stop(step) for step in range(100))
    asked.assert_called_once()


def test_ranks_on_gpus_vote_at_few_steps(monkeypatch):
    reduce = Mock(return_value=torch.tensor(0))
    monkeypatch.setattr(distributed, "all_reduce_sum_", reduce)
    rank = Rank(1, pytest.fail, "meta")
    assert not any(rank.should_stop(step) for step in range(5, 105))
    assert reduce.call_count == 10
