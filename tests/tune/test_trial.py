"""A trial without Ray: epochs in step, shared pretraining, and going on where a
killed one was.
"""

import json
from unittest.mock import Mock

import pytest

from tests.tune.tiny import CPU, claimed, folds_of, run_tiny, tiny_data, tiny_options
from tests.uno.small_run import assert_same
from tune import records, trial
from tune.records import PartStorage
from tune.score import make_folds
from tune.trial import (
    _mean_results,
    check_starts,
    missing_pretrainings,
    note_failure,
    pretrain,
    pretrain_path,
    pretrained_directory,
)
from uno.config import field_names, field_traits, override
from uno.data.files import Storage
from uno.errors import Interrupted, NumericsError, StorageError
from uno.runs import run
from uno.runs.checkpoint import load_newest
from uno.runs.lock import ClaimedStorage
from uno.training import LocalWorker


@pytest.fixture
def options(tmp_path):
    return tiny_options(tmp_path, "--folds", "1")


@pytest.fixture
def fold(options):
    return folds_of(tiny_data(options.config), options.config, num_folds=1)[0]


@pytest.fixture
def storage(tmp_path):
    with claimed(tmp_path / "a") as storage:
        yield storage


def newest(storage, phase):
    return load_newest(storage, phase).tensors


def test_epochs_one_by_one_are_the_training_of_uno_discover(
    options, fold, storage, tmp_path
):
    """Kills: a schedule that restarts with every epoch, a state that is not resumed."""
    run_tiny(options, tiny_data(options.config), storage)
    chunks = newest(PartStorage(storage, "trials/0000/fold0"), run.DISCOVER)
    whole = Storage(str(tmp_path / "b"))
    for phase in (run.PRETRAIN, run.DISCOVER):
        run.run_phase(options.config, phase, fold.train, LocalWorker(CPU), whole)
    assert_same(chunks, newest(whole, run.DISCOVER))


def test_a_killed_trial_goes_on_with_the_same_numbers(options, storage, tmp_path):
    data, seen = tiny_data(options.config), []
    whole = run_tiny(options, data, storage)
    assert run_tiny(options, data, storage) == whole  # it has ended
    with claimed(tmp_path / "b") as other:
        with pytest.raises(KeyboardInterrupt):
            run_tiny(options, data, other, report=Mock(side_effect=KeyboardInterrupt))
        assert len(records.read_epochs(other, 0)) == 1
        with (tmp_path / "b" / "trials" / "0000" / "epochs.jsonl").open("ab") as file:
            file.write(b'{"epoch": 2, "sc')  # a line cut short
        again = run_tiny(options, data, other, report=seen.append)
    # early stopping sees the earlier epoch too
    assert [(e["epoch"], e["score"]) for e in seen] == [
        (e["epoch"], e["score"]) for e in whole
    ]
    assert again == whole


def test_a_score_that_is_not_finite_is_a_numerics_error(options, storage, monkeypatch):
    diverges = {"objective.temperature": 1e-40}
    with pytest.raises(NumericsError):
        run_tiny(options, tiny_data(options.config), storage, diverges)
    result = {"score": float("nan"), "loss": 1.0, "rows": 1.0}
    monkeypatch.setattr(trial, "measure", lambda *args: result)
    with pytest.raises(NumericsError, match="epoch 1"):
        run_tiny(options, tiny_data(options.config), storage)


def test_a_trial_of_a_sweep_that_was_taken_over_writes_nothing(options, storage):
    Storage(storage.uri).write("lock.json", json.dumps({"token": "another"}).encode())
    with pytest.raises(StorageError, match="taken over"):
        run_tiny(options, tiny_data(options.config), storage)
    note_failure(storage, 0, ValueError("x"))
    assert not storage.exists("trials")


CHANGES = {
    "discover.base_lr": 0.3,
    "model.num_heads": 7,
    "model.overcluster_factor": 1,
    "model.hidden_dim": 8,
    "model.projection_dim": 4,
    "model.mlp_input": "raw",
    "objective.epsilon": 0.2,
    "objective.sinkhorn_iters": 5,
    "objective.aggregation": "average_logits",
    "objective.concat": False,
    "objective.pseudo_labels": "hard",
    "data.batch_sampling": "balanced",
    "data.num_novel": 2,
    "data.setting": "ncd",
    "objective.class_prior": "kmeans",
    "objective.iic_weight": 0.1,
    "objective.iic_view_weight": 0.1,
    "objective.rkd_weight": 0.1,
    "objective.rkd_temperature": 2.0,
    "objective.queue_size": 8,
    "model.prototype_init": "kmeans",
}


def test_pretraining_does_not_depend_on_the_keys_its_hash_leaves_out(
    options, fold, tmp_path
):
    """Kills: a key that changes pretraining and is left out: a trial would start
    from another's weights.
    """
    covered = {key for key in field_names() if field_traits(key).scope == "discover"}
    phase = {key for key in covered if key.startswith("discover.")}
    assert covered - phase == {*CHANGES, "method", "model.weights"} - phase
    found, paths = [], set()
    for changes in ({}, CHANGES, {"method": "rs"}):
        config = override(options.config, changes)
        storage = Storage(str(tmp_path / str(len(found))))
        run.run_phase(config, run.PRETRAIN, fold.train, LocalWorker(CPU), storage)
        found.append(newest(storage, run.PRETRAIN))
        paths.add(pretrain_path(config, fold.rows))
    assert_same(*found[:2])
    assert_same(*found[1:])
    assert len(paths) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"objective.temperature": 0.2},
        {"seed": 1},
        {"pretrain.base_lr": 0.2},
        {"augment.large.jitter": 0.1},
        {"train.batch_size": 16},
        {"model.width": 8},
    ],
)
def test_what_changes_pretraining_has_a_pretraining_of_its_own(options, fold, change):
    changed = override(options.config, change)
    assert pretrain_path(changed, fold.rows) != pretrain_path(options.config, fold.rows)


def test_results_of_an_epoch_are_means_over_the_folds_that_have_them():
    """A fold without held-out rows of known classes has no accuracy of these."""
    first = {"score": 0.5, "loss": 1.0, "rows": 10}
    second = {"score": 0.7, "loss": 3.0, "rows": 20, "known_best": 0.9}
    for parts in ([first, second], [second, first]):
        line = _mean_results(parts)
        assert (line["loss"], line["known_best"], line["rows"]) == (2.0, 0.9, 30)


def test_trials_share_the_pretrainings_that_their_values_leave_alone(
    options, fold, storage
):
    """What a searcher draws later is trained in the directory of the trial."""
    trials = [{"model.num_heads": 2}, {"model.num_heads": 3}, {"model.width": 8}]
    # too large for the fold, and refused by the configuration
    trials += [{"train.batch_size": 5000}, {"model.hidden_dim": 743.6}]
    rows = make_folds(tiny_data(options.config), "folds", 1, 0)
    jobs = missing_pretrainings(options, rows, trials, storage)
    assert [job.config.model.width for job in jobs] == [4, 8]
    worker, name = LocalWorker(CPU), jobs[0].path
    pretrain(jobs[0].config, fold, worker, PartStorage(storage, name))
    left = missing_pretrainings(options, rows, trials, storage)
    assert left == [jobs[1]]
    found = [
        pretrained_directory(
            override(options.config, values), fold, worker, storage, "trials/0007"
        )
        for values in trials[:3]
    ]
    assert found[0] == found[1] == storage.below(name)
    assert found[2] == storage.below(f"trials/0007/{jobs[1].path.replace('/', '-')}")


def test_a_trial_that_dies_in_one_epoch_again_and_again_is_ended(options, storage):
    """Deaths in other epochs, and starts of earlier commands, do not count."""
    trial_of = records.trial_name(0)
    for epoch in (1, 2):
        for _ in range(3):
            check_starts(storage, 0)
        storage.append(f"{trial_of}/epochs.jsonl", b'{"epoch": %d}\n' % epoch)
    for _ in range(3):
        check_starts(storage, 0)
    with pytest.raises(Interrupted, match="died 3 times in epoch 3"):
        check_starts(storage, 0)
    Storage(storage.uri).write("lock.json", b'{"token": "later"}')
    check_starts(ClaimedStorage(storage.uri, "later"), 0)
