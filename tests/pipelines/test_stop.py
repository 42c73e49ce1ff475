"""Signals: who handles them, and for how long."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch

from pipelines import ray_env
from uno import distributed
from uno.errors import Interrupted, StorageError
from uno.session import console
from uno.session.console import STOP_SIGNALS, interrupt_on_signal, on_stop


def test_ray_does_not_take_sigterm_from_us(monkeypatch):
    """Ray installs a handler that ends the process with code 15 and no line. Kills:
    predict and estimate that leave that way, a handler that stays after its block.
    """
    before = signal.getsignal(signal.SIGTERM)

    def init(**_):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))

    ray = SimpleNamespace(
        is_initialized=lambda: False, init=init, shutdown=lambda: None
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name, value in ray_env.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    asked = []
    with on_stop(lambda: asked.append(1)), ray_env.connect():
        signal.raise_signal(signal.SIGTERM)
    assert asked == [1] and signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_while_ray_starts_is_heard_afterwards(monkeypatch, number):
    """Kills: Ctrl-C that nobody hears, and one that Ray's processes die of."""
    children, ended, asked = [], [], []

    def init(**_):
        children.append(subprocess.Popen(["sleep", "60"]))
        os.kill(children[0].pid, number)
        signal.raise_signal(number)
        assert not asked

    ray = SimpleNamespace(
        is_initialized=lambda: False, init=init, shutdown=lambda: ended.append(1)
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    for name, value in ray_env.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with on_stop(lambda: asked.append(1)), ray_env.connect():
        assert asked == [1] and children[0].poll() is None
        children[0].kill()
        assert children[0].wait() == -signal.SIGKILL
    assert ended and not signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.parametrize("first", STOP_SIGNALS)
@pytest.mark.parametrize("second", STOP_SIGNALS)
def test_the_first_signal_asks_and_the_second_leaves(first, second, capsys):
    """Kills: SIGHUP that ends the process without saving, a second signal that waits
    for a checkpoint.
    """
    before, asked = [signal.getsignal(number) for number in STOP_SIGNALS], []
    with pytest.raises(KeyboardInterrupt), on_stop(lambda: asked.append(1), "stopping"):
        signal.raise_signal(first)
        assert asked == [1] and capsys.readouterr().out == "stopping\n"
        signal.raise_signal(second)
    assert (
        asked == [1] and [signal.getsignal(number) for number in STOP_SIGNALS] == before
    )


def test_what_is_ignored_stays_ignored():
    """``nohup uno discover``. Kills: a handler that takes SIGHUP from it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with on_stop(lambda: pytest.fail("asked")):
        signal.raise_signal(signal.SIGHUP)
    assert signal.signal(signal.SIGHUP, before) == signal.SIG_IGN


def test_ctrl_c_that_is_ignored_is_heard_again():
    """``uno discover &`` in a script, then kill -INT. Kills: such a run that cannot
    be asked to stop.
    """
    before, asked = signal.signal(signal.SIGINT, signal.SIG_IGN), []
    with on_stop(lambda: asked.append(1)):
        signal.raise_signal(signal.SIGINT)
    assert asked == [1] and signal.signal(signal.SIGINT, before) == signal.SIG_IGN


def test_a_line_that_nobody_can_read_does_not_keep_it_from_saving(monkeypatch):
    def closed(*_):
        raise BrokenPipeError

    monkeypatch.setattr(console, "print_line", closed)
    asked = []
    with on_stop(lambda: asked.append(1), "stopping"):
        signal.raise_signal(signal.SIGHUP)
    assert asked == [1]


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
    answers, votes = [StorageError("a moment"), False, True], []

    def asked_to_stop():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    first, other = Rank(0, asked_to_stop), Rank(1, pytest.fail)
    monkeypatch.setattr(
        distributed, "all_reduce_sum_", lambda vote: votes.append(vote) or vote
    )
    assert [first.should_stop(step) for step in range(3)] == [False, False, True]
    monkeypatch.setattr(
        distributed, "all_reduce_sum_", lambda vote: vote + votes.pop(0)
    )
    assert [other.should_stop(step) for step in range(3)] == [False, False, True]


def test_rank_0_does_not_look_at_every_step():
    looks = []
    rank = Rank(0, lambda: looks.append(1) or False)
    assert not any(rank.should_stop(step) for step in range(100))
    assert len(looks) == 1


def test_ranks_on_gpus_vote_at_few_steps(monkeypatch):
    votes = []
    monkeypatch.setattr(
        distributed, "all_reduce_sum_", lambda vote: votes.append(1) or torch.tensor(0)
    )
    rank = Rank(1, pytest.fail, "meta")
    assert not any(rank.should_stop(step) for step in range(5, 105))
    assert len(votes) == 10
