"""What a slow run waits for, by a clock that the test moves."""

from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.uno.data.test_stream import CONFIG, batches, stream
from tests.uno.small_run import CPU, discovery_step, fresh_state, lines
from uno import training
from uno.data import stream as streaming
from uno.data.files import Storage
from uno.runs import DISCOVER
from uno.runs.journal import read_journal
from uno.training import LocalWorker, Phase, fit


@pytest.fixture
def clock(monkeypatch):
    """Seconds, in a list; time stands still unless somebody moves it."""
    now = [0.0]
    time = SimpleNamespace(perf_counter=lambda: now[0], monotonic=lambda: now[0])
    for module in (training, streaming):
        monkeypatch.setattr(module, "time", time)
    return now


def test_the_share_of_waiting_is_that_of_data_slowed_on_purpose(
    tmp_path, clock, monkeypatch
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
        clock[0] += 1.5
        found = discovery_step(state, *rest)
        clock[0] += 0.5
        return found

    monkeypatch.setattr(streaming, "THREAD_ROWS", 24)
    storage, config = Storage(str(tmp_path / "run")), CONFIG
    phase = Phase(DISCOVER, config.discover, 8, 24, 8, step)
    with closing(batches(replace(train, crop=slowly), last=8)) as found:
        fit(config, phase, fresh_state(config), found, LocalWorker(CPU), storage)
    first, second = read_journal(storage)
    assert (first["step"], second["step"]) == (4, 8)
    assert first["data_wait"] == pytest.approx(3 / 5, abs=0.05)
    assert second["data_wait"] == pytest.approx(1 / 3, abs=0.05)
    assert first["step_ms"] == pytest.approx(5000) and second[
        "images_per_s"
    ] == pytest.approx(24 / 3)
    assert first["grad_norm"] > 0 and not any(
        key.startswith(("rank_ms", "slow", "peak")) for key in first
    )
    assert [set(line) & {"data_wait", "step_ms"} for line in lines(storage)] == [
        set(),
        set(),
    ]


@pytest.mark.parametrize(
    ("own", "slow"), [([2.0, 2.1, 3.0], 2), ([2.0, 2.1, 2.2], None)]
)
def test_the_slow_rank_is_named(clock, monkeypatch, own, slow):
    """A rank's own time ends with its forward pass. Kills: the time of a step, which
    all ranks have alike, a rank named at random, the mean of ranks for the one that all
    wait for.
    """
    state, seen = fresh_state(CONFIG), []

    def global_rows(mine, dim):
        seen.extend(mine.tolist())
        return torch.tensor(
            [[1000 * seconds, 0.1 * rank, 0.0] for rank, seconds in enumerate(own)]
        )

    monkeypatch.setattr(training.distributed, "gather_rows", global_rows)

    with closing(training.StepTimer(state, SimpleNamespace(waited_s=0.0))) as found:
        for _ in range(4):
            found.begin_step()
            clock[0] += 2.0
            state.forward([torch.zeros(2, 3, 32, 32)])
            clock[0] += 5.0  # the others are late
            state.step += 1
        line = found.collect(30)
    assert seen == [[2000.0, 0.0, 0.0]]
    expected = {
        "rank_ms_min": 1000 * own[0],
        "rank_ms_median": 2100,
        "rank_ms_max": 1000 * own[2],
    }
    assert (
        line.items()
        >= {name: pytest.approx(value) for name, value in expected.items()}.items()
    )
    assert line.get("slow_rank") == slow and line["data_wait"] == pytest.approx(0.2)
    assert line["images_per_s_per_device"] == pytest.approx(30 / 7 / 3)
    assert not state.forward._forward_hooks
