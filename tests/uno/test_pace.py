"""What a slow run waits for, by a clock that the test moves."""

from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from tests.uno.data.test_stream import CONFIG, batches, stream
from tests.uno.small_run import HERE, discovery_step, fresh_state
from uno import training
from uno.data import stream as streaming
from uno.runs import DISCOVER
from uno.runs.journal import read_journal
from uno.training import Phase, fit


@pytest.fixture
def clock(monkeypatch):
    """Seconds, in a list; time stands still unless somebody moves it."""
    now = [0.0]
    time = SimpleNamespace(perf_counter=lambda: now[0], monotonic=lambda: now[0])
    for module in (training, streaming):
        monkeypatch.setattr(module, "time", time)
    return now


def test_the_share_of_waiting_is_that_of_data_slowed_on_purpose(
    tmp_path, storage, clock, monkeypatch
):
    """Data takes 3 s of 5 in steps 1-4, 1 s of 3 later. Kills: a share of the wrong
    line or of the whole run, augmentation taken for waiting, a step's time for the
    data's.
    """
    monkeypatch.setattr(
        streaming, "prefetch_map", lambda do, items, *_: (do(item) for item in items)
    )
    train, left = stream(tmp_path), iter([3.0] * 4 + [1.0] * 20)

    def slowly(job):
        job.chunk_rows = 24
        with closing(streaming.crop_local(job, 1)) as chunks:
            for chunk in chunks:
                clock[0] += next(left)
                yield chunk

    def step(state, *rest):
        clock[0] += 2
        return discovery_step(state, *rest)

    monkeypatch.setattr(streaming, "THREAD_ROWS", 24)
    phase = Phase(DISCOVER, CONFIG.discover, 8, 24, 8, step)
    with closing(batches(replace(train, crop=slowly), last=8)) as found:
        fit(CONFIG, phase, fresh_state(CONFIG), found, HERE, storage)
    first, second = read_journal(storage)
    assert (first["step"], second["step"]) == (4, 8)
    assert first["data_wait"] == pytest.approx(3 / 5, abs=0.05)
    assert second["data_wait"] == pytest.approx(1 / 3, abs=0.05)
    assert first["step_ms"] == pytest.approx(5000)
    assert second["images_per_s"] == pytest.approx(24 / 3)
    assert first["grad_norm"] > 0
    assert not any(key.startswith(("rank_ms", "slow", "peak")) for key in first)


@pytest.mark.parametrize(
    ("own", "slow"), [([2.0, 2.1, 3.0], 2), ([2.0, 2.1, 2.2], None)]
)
def test_the_slow_rank_is_named(clock, monkeypatch, own, slow):
    """A rank's own time ends with its forward pass. Kills: the time of a step, which
    all ranks have alike, a rank named at random, the mean of ranks for the one that all
    wait for.
    """
    of_ranks = [[1000 * seconds, 0.1 * rank, 0.0] for rank, seconds in enumerate(own)]
    gather_rows = Mock(return_value=torch.tensor(of_ranks))
    monkeypatch.setattr(training.distributed, "gather_rows", gather_rows)
    state = fresh_state(CONFIG)
    with closing(training.StepTimer(state, SimpleNamespace(waited_s=0.0))) as found:
        for _ in range(4):
            found.begin_step()
            clock[0] += 2.0
            state.forward([torch.zeros(2, 3, 32, 32)])
            clock[0] += 5.0  # the others are late
            state.step += 1
        line = found.collect(30)
    assert gather_rows.call_args.args[0].tolist() == [[2000.0, 0.0, 0.0]]
    times = [line[f"rank_ms_{name}"] for name in ("min", "median", "max")]
    assert times == pytest.approx([1000 * own[0], 2100, 1000 * own[2]])
    assert line.get("slow_rank") == slow
    assert line["data_wait"] == pytest.approx(0.2)
    assert line["images_per_s_per_device"] == pytest.approx(30 / 7 / 3)
    assert not state.forward._forward_hooks
