"""The loop: resume to the bit, best head, non-finite steps, checkpoints."""

import random
from threading import Event, Timer
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tests.uno.small_run import (
    CPU,
    HERE,
    StopAt,
    assert_same,
    batches_of,
    copied_tensors,
    discovery_step,
    fresh_state,
    lines,
    small_config,
    without_clock,
)
from tests.uno.test_steps import poison
from uno import training
from uno.data.files import Storage
from uno.errors import Interrupted, NumericsError
from uno.runs import run
from uno.runs.checkpoint import checkpoint_steps, load_checkpoint, load_newest
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
    state = fresh_state(config)
    phase = Phase(run.DISCOVER, config.discover, 6, 32, max_steps, step)
    fit(config, phase, state, batches or batches_of(config), worker, storage)
    return copied_tensors(state)


def batches_with(action, at):
    """The batches of discovery; ``action`` is called once, before that of step
    ``at``.
    """
    batches, actions = batches_of(CONFIG), {at: action}

    def get_batch(step):
        actions.pop(step, int)()
        return batches(step)

    return get_batch


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
    line = f"stopped at discover step {stop} of 18; resume"
    with pytest.raises(Interrupted, match=line):
        discover(storage, worker=StopAt(stop))
    assert load_newest(storage, run.DISCOVER).step == stop
    assert_ends_as(clean, storage)


@pytest.mark.parametrize(
    "crash", [3, *(pytest.param(s, marks=pytest.mark.slow) for s in MORE_CRASHES)]
)
def test_a_crashed_run_resumes_to_the_bit(storage, clean, crash):
    """Kills: lines after the last checkpoint kept and written again, a checkpoint of
    a later state.
    """
    power_cut = Mock(side_effect=RuntimeError("power cut"))
    with pytest.raises(RuntimeError, match="power cut"):
        discover(storage, batches=batches_with(power_cut, at=crash))
    expected = [step for step in (6, 12) if step <= crash]
    assert checkpoint_steps(storage, run.DISCOVER) == expected
    assert_ends_as(clean, storage)


@pytest.fixture
def store(monkeypatch):
    """An object store that writes the checkpoint of step 6 only after ``may_write``
    is set; ``let_write_soon`` sets it a moment later.
    """
    store, store_write = Storage("mock:///run"), Storage.write
    store.may_write = Event()
    store.let_write_soon = Timer(0.3, store.may_write.set).start

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
    config = small_config(train__keep_checkpoints=9)
    discover(store, config, batches=batches_with(store.may_write.set, at=9))
    assert checkpoint_steps(store, run.DISCOVER) == [6, 12, 18]
    assert lines(store) == clean[1]
    discover(storage, config)
    for step in (6, 18):
        there, here = (
            load_checkpoint(place, run.DISCOVER, step).tensors
            for place in (store, storage)
        )
        assert_same(there, here)


def test_a_roll_back_waits_for_the_upload_of_its_checkpoint(store, clean):
    """Kills: a roll-back to an older checkpoint or to none."""
    config = small_config(train__log_every=1)
    batches = batches_with(store.let_write_soon, at=10)
    found = discover(store, config, failing_at(range(7, 11)), batches)
    assert_same(found | {"window_loss": clean[0]["window_loss"]}, clean[0])


def test_a_checkpoint_waits_for_the_upload_of_the_one_before(store, monkeypatch):
    """Kills: uploads that wait until they fill the memory."""
    was_uploaded, save = [], training.save_checkpoint

    def save_checkpoint(*args):
        was_uploaded.append(store.may_write.is_set())
        save(*args)

    monkeypatch.setattr(training, "save_checkpoint", save_checkpoint)
    batches = batches_with(store.let_write_soon, at=7)
    with pytest.raises(Interrupted):
        discover(store, batches=batches, worker=StopAt(8))
    assert was_uploaded == [False, True]
    assert checkpoint_steps(store, run.DISCOVER) == [6, 8]


def test_a_finished_phase_is_not_trained_again(clean):
    """Kills: a step after the end, a journal that grows."""
    tensors, _, storage = clean
    before, step = storage.read("metrics.jsonl"), Mock()
    assert_same(discover(storage, step=step), tensors)
    assert storage.read("metrics.jsonl") == before
    step.assert_not_called()


class Clock:
    """A clock that a step moves by ``step_seconds``."""

    now, step_seconds, get_batch = 0.0, 60.0, staticmethod(batches_of(CONFIG))

    def batches(self, step):
        self.now += self.step_seconds
        return self.get_batch(step)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(training.time, "monotonic", lambda: clock.now)
    return clock


def test_a_long_epoch_is_saved_within(storage, clean, clock):
    """A minute a step, lines at every fourth and at epochs' ends. Kills: epochs alone,
    a checkpoint of each line or between two, a clock that goes on from the checkpoint
    before.
    """
    config = small_config(train__checkpoint_every_minutes=3, train__keep_checkpoints=9)
    found = discover(storage, config, batches=clock.batches)
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
    assert [(line["event"], line["epoch"], line["step"]) for line in found] == [
        ("step", 1, 4),
        ("epoch", 1, 6),
        ("step", 2, 8),
        ("epoch", 2, 12),
        ("step", 3, 16),
        ("epoch", 3, 18),
    ]
    means = [np.mean(part) for part in np.split(losses, [4, 6, 8, 12, 16])]
    assert [line["loss"] for line in found] == pytest.approx(means, rel=1e-6)
    first, *others = reported  # and no slow step after the first one
    assert first["step"] == 1
    assert all(line["images_per_s"] > 0 for line in others)
    assert [without_clock(line) for line in others] == found


def test_slow_steps_are_told_between_two_lines(storage, clock):
    """An ETA needs two. Kills: 50 steps of a minute in silence, a line at every
    step, one in the journal.
    """
    reported = []
    clock.step_seconds = 6
    discover(
        storage,
        small_config(train__log_every=50),
        step=scripted([[1.0, 1.0]] * 18),
        batches=clock.batches,
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
    discover(storage, step=scripted([[1, 5]] * 12 + [[4, 2]] * 5 + [[1, 2.5]]))
    stored = load_newest(storage, run.DISCOVER).tensors
    last = pytest.approx([3.5, 12.5 / 6])
    assert stored["head_losses"].tolist() == last
    assert stored["epoch_losses"].tolist() == [0, 0, 0]
    told = [line["head_losses"] for line in lines(storage) if "head_losses" in line]
    assert told == [[1, 5], [1, 5], last]
    model, best_head = run.load_trained(CONFIG, storage, 5, 5)
    assert best_head == 1 and not model.training


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
    steps = checkpoint_steps(storage, run.DISCOVER)
    stored = [load_checkpoint(storage, run.DISCOVER, step).tensors for step in steps]
    return all(t.isfinite().all() for tensors in stored for t in tensors.values())


def test_one_bad_step_is_skipped_and_counted(storage, caplog):
    """Kills: a NaN in the loss line or the head losses, a roll-back for a single
    step, silence.
    """
    found = discover(storage, small_config(train__log_every=1), step=failing_at([0, 9]))
    assert found["skipped"] == lines(storage)[-1]["skipped_steps"] == 2
    assert all(tensor.isfinite().all() for tensor in found.values())
    # no step without a loss has a line
    assert 10 not in [line["step"] for line in lines(storage)]
    assert all(line["loss"] < 10 for line in lines(storage))
    assert "skipped 1 non-finite step before step 10" in caplog.text
    assert "rolled back" not in caplog.text


@pytest.mark.parametrize(
    ("kind", "log_every"),
    [
        ("gradient", 1),
        *(pytest.param(*fault, marks=pytest.mark.slow) for fault in MORE_FAULTS),
    ],
)
def test_a_passing_fault_is_rolled_back(storage, clean, caplog, kind, log_every):
    """After the roll-back the run is the clean one, bit for bit. Kills: NaN statistics
    saved, weights kept, counters or lines of the abandoned steps kept,
    MAX_SKIPPED_STEPS never reached when every step is logged.
    """
    config = small_config(train__log_every=log_every)
    steps = range(7, 11) if kind == "gradient" else [7]
    found = discover(storage, config, step=failing_at(steps, kind))
    assert "rolled back to step 6" in caplog.text
    assert_same(found | {"window_loss": clean[0]["window_loss"]}, clean[0])
    written = [line["step"] for line in lines(storage)]
    assert written == (list(range(1, 19)) if log_every == 1 else [6, 12, 18])
    assert all_checkpoints_are_finite(storage)


@pytest.mark.parametrize(
    ("kind", "first"),
    [("gradient", 0), ("gradient", 7), ("statistics", 7)],
)
def test_a_lasting_fault_stops_the_run(storage, kind, first):
    """Before and after a checkpoint. Kills: roll-backs without end or to nothing, an
    error without the step, a NaN checkpoint.
    """
    line = r"non-finite loss at discover step (4|8|12); lower"
    with pytest.raises(NumericsError, match=line):
        discover(storage, step=failing_at(range(first, 18), kind, times=99))
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
