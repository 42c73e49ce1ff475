"""The loop: resume to the bit, best head, non-finite steps, checkpoints."""

import logging
import random
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.uno.small_run import (
    CLOCKED,
    CPU,
    HERE,
    StopAt,
    assert_same,
    batches_of,
    check_resumes,
    copied_tensors,
    discovery_step,
    fresh_state,
    lines,
    small_config,
)
from tests.uno.test_steps import poison
from uno import training
from uno.data.files import Storage
from uno.errors import Interrupted, NumericsError, StorageError
from uno.runs import run
from uno.runs.checkpoint import checkpoint_steps, load_checkpoint, load_newest
from uno.runs.journal import Journal
from uno.training import MAX_SKIPPED_STEPS, LocalWorker, Phase, fit

CONFIG = small_config()  # discovery: 3 epochs of 6 steps; pretraining: 3 of 3
MORE_STOPS = [*random.Random(0).sample(range(2, 17), 3), 6, 17]
MORE_FAULTS = [
    ("statistics", 1),
    ("weights", 1),
    *((kind, 50) for kind in ("gradient", "statistics", "weights")),
]
MORE_CRASHES = random.Random(1).sample(range(7, 18), 2)


def discover(
    storage: Storage,
    config=CONFIG,
    step=discovery_step,
    batches=None,
    worker=HERE,
    max_steps=None,
):
    """The discovery phase from random weights; returns its final tensors."""
    state, phase = (
        fresh_state(config),
        Phase(run.DISCOVER, config.discover, 6, 32, max_steps, step),
    )
    fit(config, phase, state, batches or batches_of(config), worker, storage)
    return copied_tensors(state)


def assert_ends_as(clean, storage: Storage) -> None:
    """A run that goes on ends as the uninterrupted one, with its lines."""
    assert_same(discover(storage), clean[0])
    assert lines(storage) == clean[1]


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """(tensors, lines, storage) of the uninterrupted run."""
    storage = Storage(str(tmp_path_factory.mktemp("clean")))
    return discover(storage), lines(storage), storage


@pytest.mark.parametrize(
    "stop", [1, 12, *(pytest.param(s, marks=pytest.mark.slow) for s in MORE_STOPS)]
)
def test_a_stopped_run_resumes_to_the_bit(storage, clean, stop):
    """Weights, momentum, head losses, counters and metrics. Kills: momentum not stored,
    the mean of a line or an epoch started anew, randomness that depends on the process,
    lines written twice, a step repeated.
    """
    with pytest.raises(
        Interrupted, match=f"stopped at discover step {stop} of 18; resume"
    ) as caught:
        discover(storage, worker=StopAt(stop))
    assert caught.value.exit_code == 75
    assert load_newest(storage, run.DISCOVER).step == stop
    assert_ends_as(clean, storage)


@pytest.mark.parametrize(
    "crash", [3, *(pytest.param(s, marks=pytest.mark.slow) for s in MORE_CRASHES)]
)
def test_a_crashed_run_resumes_to_the_bit(storage, clean, crash):
    """Kills: lines after the last checkpoint kept and written again, a checkpoint of
    a later state.
    """
    batches = batches_of(CONFIG)

    def failing(step):
        if step == crash:
            raise RuntimeError("power cut")
        return batches(step)

    with pytest.raises(RuntimeError, match="power cut"):
        discover(storage, batches=failing)
    assert checkpoint_steps(storage, run.DISCOVER) == [
        step for step in (6, 12) if step <= crash
    ]
    assert_ends_as(clean, storage)


def test_a_run_whose_disk_fills_resumes_to_the_bit(storage, clean, monkeypatch):
    """Kills: an older checkpoint lost by the write that failed."""
    write = Storage.write

    def full(self, name, data):
        if "step_00000012" in name:
            raise StorageError("cannot write: No space left on device")
        write(self, name, data)

    monkeypatch.setattr(Storage, "write", full)
    with pytest.raises(StorageError, match="No space left"):
        discover(storage)
    monkeypatch.undo()
    assert checkpoint_steps(storage, run.DISCOVER) == [6]
    assert_ends_as(clean, storage)


@pytest.fixture
def store(monkeypatch):
    """An object store that begins to write the checkpoint of step 6 when
    ``may_write`` is set.
    """
    store, store_write = Storage("mock:///run"), Storage.write
    store.may_write = threading.Event()

    def write(self, name, data):
        late = self is store and "step_00000006" in name
        assert not late or store.may_write.wait(60), "training waits for the checkpoint"
        store_write(self, name, data)

    monkeypatch.setattr(Storage, "write", write)
    return store


def test_an_object_store_is_written_to_while_training_continues(store, storage, clean):
    """Kills: ranks that wait for an upload, one of what is there at its end, a phase
    that ends before.
    """
    config, batches = small_config(train__keep_checkpoints=9), batches_of(CONFIG)
    discover(
        store,
        config,
        batches=lambda step: (step == 9 and store.may_write.set(), batches(step))[1],
    )
    assert (
        checkpoint_steps(store, run.DISCOVER) == [6, 12, 18]
        and lines(store) == clean[1]
    )

    def checked(step):
        # on a disk it is there at once
        assert step != 6 or checkpoint_steps(storage, run.DISCOVER) == [6]
        return batches(step)

    discover(storage, config, batches=checked)
    for step in (6, 18):
        there, here = (
            load_checkpoint(place, run.DISCOVER, step).tensors
            for place in (store, storage)
        )
        assert_same(there, here)


def test_what_needs_a_checkpoint_waits_for_its_upload(store, clean, monkeypatch):
    """A roll-back, and the next checkpoint. Kills: a roll-back to an older one or to
    none; uploads that wait until they fill the memory.
    """
    saved, flush, save = [], Journal.flush, training.save_checkpoint
    monkeypatch.setattr(
        Journal, "flush", lambda self: (saved and store.may_write.set(), flush(self))
    )
    monkeypatch.setattr(
        training,
        "save_checkpoint",
        lambda *args: (saved.append(args[2].step), save(*args)),
    )
    found = discover(
        store, small_config(train__log_every=1), step=failing_at(range(7, 11))
    )
    assert_same(found | {"window_loss": clean[0]["window_loss"]}, clean[0])
    store.delete("checkpoints")
    store.may_write.clear()
    saved.clear()
    monkeypatch.setattr(
        training,
        "save_checkpoint",
        lambda *args: (saved.append(store.may_write.is_set()), save(*args)),
    )
    with pytest.raises(Interrupted):
        discover(store, worker=StopAt(8))
    assert saved == [False, True] and checkpoint_steps(store, run.DISCOVER) == [6, 8]


def test_a_damaged_newest_checkpoint_costs_one_interval(storage, clean, caplog):
    """Kills: a run that starts over, or from damaged weights."""
    with pytest.raises(Interrupted):
        discover(storage, worker=StopAt(14))
    name = "checkpoints/discover/step_00000014.safetensors"
    storage.write(name, storage.read(name)[:-100])
    assert_ends_as(clean, storage)
    assert "skipping checkpoint checkpoints/discover/step_00000014" in caplog.text


@pytest.mark.slow
def test_both_phases_resume_to_the_bit(tmp_path):
    """Kills: discovery from weights other than the pretrained ones after a resume."""
    check_resumes(CONFIG, tmp_path, (4, 5, 11))


def test_a_finished_phase_is_not_trained_again(clean):
    """Kills: a step after the end, a journal that grows."""
    tensors, _, storage = clean
    before = storage.read("metrics.jsonl")

    def never(*args):
        raise AssertionError("trained a finished phase")

    assert_same(discover(storage, step=never), tensors)
    assert storage.read("metrics.jsonl") == before


def test_a_long_epoch_is_saved_within(storage, clean, monkeypatch):
    """A minute a step, lines at every fourth and at epochs' ends. Kills: epochs alone,
    a checkpoint of each line or between two, a clock that goes on from the checkpoint
    before.
    """
    clock = [0.0]
    monkeypatch.setattr(training.time, "monotonic", lambda: clock[0])

    def step(*args):
        clock[0] += 60
        return discovery_step(*args)

    config = small_config(train__checkpoint_every_minutes=3, train__keep_checkpoints=9)
    found = discover(storage, config, step=step)
    assert checkpoint_steps(storage, run.DISCOVER) == [4, 6, 12, 16, 18]
    assert_same(found | {"window_loss": clean[0]["window_loss"]}, clean[0])


def test_max_steps_ends_a_phase_and_keeps_its_schedule(storage, clean):
    """Kills: max_steps that shortens the cosine, no checkpoint or head losses at an
    early end.
    """
    found = discover(storage, max_steps=8)
    last = lines(storage)[-1]
    assert last["step"] == last["total_steps"] == 8 and len(last["head_losses"]) == 2
    assert last["lr"] == next(line["lr"] for line in clean[1] if line["step"] == 8)
    assert load_newest(storage, run.DISCOVER).step == 8
    assert torch.isfinite(found["head_losses"]).all()


def test_a_phase_without_steps_ends_as_it_began(storage):
    """``--pretrain.epochs 0``. Kills: a phase that leaves no checkpoint for the next
    one to start from.
    """
    config = small_config(discover__epochs=0)
    found = discover(storage, config)
    assert_same(found, copied_tensors(fresh_state(config)))
    assert load_newest(storage, run.DISCOVER).step == 0


def test_lines_are_what_was_trained(storage):
    """``loss`` is the mean over the steps since the last line. Kills: the last step's
    loss, a mean over other steps, epochs counted from 0, a line missing.
    """
    losses, reported = [], []

    def recorded(*args):
        losses.append(float(discovery_step(*args)))

    discover(storage, step=recorded, worker=LocalWorker(CPU, reported.append))
    found = lines(storage)
    assert [line["step"] for line in found] == [4, 6, 8, 12, 16, 18]
    assert [line["event"] for line in found] == [
        "step",
        "epoch",
        "step",
        "epoch",
        "step",
        "epoch",
    ]
    assert [line["epoch"] for line in found] == [1, 1, 2, 2, 3, 3]
    for start, line in zip([0, 4, 6, 8, 12, 16], found, strict=True):
        assert line["loss"] == pytest.approx(
            np.mean(losses[start : line["step"]]), rel=1e-6
        )
    told = [line["step"] for line in reported if "loss" not in line]
    reported = [line for line in reported if "loss" in line]
    assert told == [1]  # and no slow step after it
    assert [
        {k: v for k, v in r.items() if not CLOCKED.match(k)} for r in reported
    ] == found
    assert all(line["images_per_s"] > 0 for line in reported)


def test_slow_steps_are_told_between_two_lines(storage, monkeypatch):
    """An ETA needs two. Kills: 50 steps of a minute in silence, a line at every
    step, one in the journal.
    """
    clock, reported = [0.0], []
    monkeypatch.setattr(
        "uno.training.time",
        SimpleNamespace(monotonic=lambda: clock[0], perf_counter=time.time),
    )

    def slow(state, *args):
        clock[0] += 6
        scripted([[1.0, 1.0]] * 18)(state, *args)

    discover(
        storage,
        small_config(train__log_every=50),
        step=slow,
        worker=LocalWorker(CPU, reported.append),
    )
    assert [line["step"] for line in reported] == [1, 3, 5, 6, 8, 10, 12, 14, 16, 18]
    assert [line["step"] for line in lines(storage)] == [6, 12, 18]


def scripted(per_step: list[list[float]]):
    """A step that only counts given head losses."""

    def step(state, batch, config, lr):
        state.epoch_losses += torch.tensor([*per_step[state.step], 1.0])
        state.window_loss += torch.tensor([1.0, 1.0])
        state.step += 1

    return step


def test_best_head_has_the_lowest_loss_over_the_last_epoch(storage):
    """Head 0 leads for two epochs and in the sum of all; head 1 in the last epoch,
    though not in its last step. Kills: a tracker never reset, one read after it was
    cleared, the last step's loss, the highest.
    """
    per_step = [[1.0, 5.0]] * 12 + [[4.0, 2.0]] * 5 + [[1.0, 2.5]]
    found = discover(storage, step=scripted(per_step))
    assert found["head_losses"].tolist() == pytest.approx([3.5, 12.5 / 6])
    assert found["epoch_losses"].tolist() == [0, 0, 0]
    assert torch.equal(
        load_newest(storage, run.DISCOVER).tensors["head_losses"], found["head_losses"]
    )
    per_epoch = [
        line["head_losses"] for line in lines(storage) if "head_losses" in line
    ]
    assert per_epoch == [
        [1.0, 5.0],
        [1.0, 5.0],
        [pytest.approx(3.5), pytest.approx(12.5 / 6)],
    ]
    model, best_head = run.load_trained(CONFIG, storage, 5, 5)
    assert best_head == 1 and not model.training


def test_an_interrupted_epoch_keeps_the_last_finished_one(storage):
    """Kills: head losses of a few steps taken for an epoch's, or lost when the run
    is stopped.
    """
    per_step = [[1.0, 5.0]] * 6 + [[9.0, 2.0]] * 12
    with pytest.raises(Interrupted):
        discover(storage, step=scripted(per_step), worker=StopAt(8))
    stored = load_newest(storage, run.DISCOVER).tensors
    assert stored["head_losses"].tolist() == [1, 5]
    assert stored["epoch_losses"].tolist() == [18, 4, 2]
    assert discover(storage, step=scripted(per_step))["head_losses"].tolist() == [9, 2]


def failing_at(steps, kind: str = "gradient", times: int = 1):
    """discovery_step whose gradient, or one running statistic, is NaN at ``steps``,
    each ``times`` times.
    """
    left = dict.fromkeys(steps, times)

    def step(state, batch, config, lr):
        bad = left.get(state.step, 0) > 0
        if bad:
            left[state.step] -= 1
        remove = (
            poison(state.model, float("nan"))
            if bad and kind == "gradient"
            else lambda: None
        )
        loss = discovery_step(state, batch, config, lr)
        remove()
        if bad and kind == "statistics":
            state.model.encoder.bn1.running_var[0] = float("nan")
        if bad and kind == "weights":
            state.model.encoder.bn1.weight.data[0] = float("inf")
        return loss

    return step


def all_checkpoints_are_finite(storage: Storage) -> bool:
    stored = (
        load_checkpoint(storage, run.DISCOVER, s)
        for s in checkpoint_steps(storage, run.DISCOVER)
    )
    return all(
        tensor.isfinite().all() for one in stored for tensor in one.tensors.values()
    )


def test_one_bad_step_is_skipped_and_counted(storage, caplog):
    """Kills: a NaN in the loss line or the head losses, a roll-back for a single
    step, silence.
    """
    with caplog.at_level(logging.WARNING):
        found = discover(
            storage, small_config(train__log_every=1), step=failing_at([0, 9])
        )
    assert found["skipped"] == 2 and all(
        tensor.isfinite().all() for tensor in found.values()
    )
    written = lines(storage)
    assert written[-1]["skipped_steps"] == 2
    # no step without a loss has a line
    assert 10 not in [line["step"] for line in written]
    assert all(line["loss"] < 10 for line in written)
    assert (
        "skipped 1 non-finite step before step 10" in caplog.text
        and "rolled back" not in caplog.text
    )


@pytest.mark.parametrize(
    ("kind", "log_every"),
    [
        ("gradient", 1),
        *(
            pytest.param(kind, every, marks=pytest.mark.slow)
            for kind, every in MORE_FAULTS
        ),
    ],
)
def test_a_passing_fault_is_rolled_back(storage, clean, caplog, kind, log_every):
    """After the roll-back the run is the clean one, bit for bit. Kills: NaN statistics
    saved, weights kept, counters or lines of the abandoned steps kept,
    MAX_SKIPPED_STEPS never reached when every step is logged.
    """
    config = small_config(train__log_every=log_every)
    with caplog.at_level(logging.WARNING):
        found = discover(
            storage,
            config,
            step=failing_at(range(7, 11) if kind == "gradient" else [7], kind),
        )
    assert "rolled back to step 6" in caplog.text
    assert_same(found | {"window_loss": clean[0]["window_loss"]}, clean[0])
    steps = [line["step"] for line in lines(storage)]
    assert steps == (list(range(1, 19)) if log_every == 1 else [6, 12, 18])
    assert all_checkpoints_are_finite(storage)


@pytest.mark.parametrize(
    ("kind", "first"),
    [("gradient", 0), ("gradient", 7), ("statistics", 7)],
)
def test_a_lasting_fault_stops_the_run(storage, kind, first):
    """Before and after a checkpoint. Kills: roll-backs without end or to nothing, an
    error without the step, a NaN checkpoint.
    """
    with pytest.raises(
        NumericsError, match=r"non-finite loss at discover step (4|8|12); lower"
    ) as caught:
        discover(storage, step=failing_at(range(first, 18), kind, times=99))
    assert caught.value.exit_code == 3
    assert checkpoint_steps(storage, run.DISCOVER) == ([6] if first else [])
    assert all_checkpoints_are_finite(storage)


def test_rare_bad_steps_do_not_add_up(storage, caplog):
    """Kills: a counter over the whole run compared with MAX_SKIPPED_STEPS."""
    config = small_config(
        discover__epochs=6, train__log_every=2, train__checkpoint_every_epochs=9
    )
    bad = range(2, 36, 6)
    assert len(bad) > MAX_SKIPPED_STEPS
    found = discover(storage, config, step=failing_at(bad))
    assert found["skipped"] == len(bad)
    assert "rolled back" not in caplog.text


def test_a_stop_never_saves_what_is_not_finite(storage, clean):
    """Kills: SIGTERM between two looks storing NaN as the newest checkpoint."""
    rarely = small_config(train__log_every=50)
    with pytest.raises(Interrupted):
        discover(storage, rarely, step=failing_at([8], "statistics"), worker=StopAt(10))
    assert checkpoint_steps(storage, run.DISCOVER) == [6]
    assert_same(discover(storage), clean[0])
