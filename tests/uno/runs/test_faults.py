"""The injector itself, and what a run without Ray makes of its faults."""

import logging

import pytest

from tests import faults
from tests.faults import Fault, planned
from tests.uno.small_run import (
    assert_same,
    copied_tensors,
    lines,
    small_config,
    train_both,
    wasted_steps,
)
from uno.data.files import Storage
from uno.errors import ConfigError, StorageError
from uno.runs import hooks
from uno.runs.checkpoint import checkpoint_steps, load_newest
from uno.runs.hooks import hooked


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    storage = Storage(str(tmp_path_factory.mktemp("undisturbed")))
    return copied_tensors(train_both(small_config(), storage)), lines(storage)


def test_without_the_variable_nothing_is_wrapped_and_with_it_nothing_ignored(
    tmp_path, monkeypatch
):
    """Kills: a hook that costs every run something, a file in every run directory,
    faults nobody makes.
    """
    monkeypatch.delenv(faults.VARIABLE, raising=False)
    storage = Storage(str(tmp_path))
    monkeypatch.setattr(hooks, "INJECTOR", "tests.no_such_module")
    assert hooked("in_training", pytest.fail, "discover", 0, storage) is pytest.fail
    assert (
        hooked("in_driver", pytest.fail, storage) is pytest.fail
        and hooked("announced", []) == []
    )
    assert storage.list() == []
    monkeypatch.setenv(faults.VARIABLE, "nan:step=9")
    with pytest.raises(
        ConfigError,
        match=r"^UNO_FAULTS is set, but tests\.no_such_module.* not installed; .*$",
    ):
        hooked("announced", [])


def test_every_fault_is_announced(monkeypatch):
    monkeypatch.setenv(faults.VARIABLE, "nan:step=9;sigterm:step=3")
    assert hooked("announced", []) == [
        "warning: UNO_FAULTS is set: nan of rank 0 at discover 9",
        "warning: UNO_FAULTS is set: sigterm of rank 0 at discover 3",
    ]


def test_what_the_variable_says():
    text = (
        "kill-worker:rank=1,step=7; nan:phase=pretrain,step=2 ;full-disk:checkpoint=2"
    )
    faults = [
        ("kill-worker", "discover", 7, 1),
        ("nan", "pretrain", 2, 0),
        ("full-disk", "discover", 2, 0),
    ]
    assert planned(text) == [Fault(*fault) for fault in faults]
    drawn = [
        planned(f"kill-worker:step=5..80,times=3,seed={seed}") for seed in (0, 0, 1)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert all(
        len(set(few)) == 3 and all(5 <= fault.at <= 80 for fault in few)
        for few in drawn
    )


@pytest.mark.parametrize(
    "text",
    [
        "explode:step=1",
        "nan",
        "nan:",
        "nan:step=x",
        "nan:step=-1",
        "nan:checkpoint=1",
        "sigterm:rank=1,step=2",
        "full-disk:step=2",
        "nan:step=1,phase=evaluate",
        "nan:step=3..4,times=3",
        "nan:step=4..3",
        "nan:step=1,rank=one",
        "kill-worker:step=1,seed",
    ],
)
def test_a_mistake_is_one_line(text):
    with pytest.raises(ConfigError, match=r"^UNO_FAULTS: .*$"):
        planned(text)


def test_a_batch_that_is_not_a_number_is_rolled_back(
    tmp_path, undisturbed, monkeypatch, caplog
):
    """At the next look (BatchNorm's statistics are spoiled); the same numbers as if
    it had not happened.
    """
    monkeypatch.setenv(faults.VARIABLE, "nan:step=9")
    storage = Storage(str(tmp_path))
    with caplog.at_level(logging.WARNING):
        state = train_both(small_config(), storage)
    assert "non-finite loss at discover step 12; rolled back to step 6" in caplog.text
    assert_same(copied_tensors(state), undisturbed[0])
    assert lines(storage) == undisturbed[1]
    assert wasted_steps(storage) == [3]


REASONS = {"full-disk": "No space left on device", "read-only": "Read-only file system"}


@pytest.mark.parametrize(
    "kind", ["full-disk", pytest.param("read-only", marks=pytest.mark.slow)]
)
def test_a_disk_that_takes_no_checkpoint(tmp_path, undisturbed, monkeypatch, kind):
    """One line that names the file; the older checkpoint stays; with room again the
    run goes on.
    """
    monkeypatch.setenv(faults.VARIABLE, f"{kind}:checkpoint=2")
    storage = Storage(str(tmp_path))
    with pytest.raises(
        StorageError, match=rf"^cannot write .*step_00000012.*{REASONS[kind]}$"
    ):
        train_both(small_config(), storage)
    assert checkpoint_steps(storage, "discover") == [6]
    assert_same(copied_tensors(train_both(small_config(), storage)), undisturbed[0])
    assert wasted_steps(storage) == [6]  # steps between two checkpoints
    assert load_newest(storage, "discover").step == 18


DAMAGE = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "bit flipped": lambda path: path.write_bytes(
        path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1])
    ),
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize(
    "damage",
    [
        "truncated",
        *(
            pytest.param(how, marks=pytest.mark.slow)
            for how in ("bit flipped", "missing")
        ),
    ],
)
def test_a_damaged_newest_checkpoint_costs_one_interval(
    tmp_path, undisturbed, monkeypatch, damage
):
    """The older one is taken; the end is the same. Kills: a start at step 0, damaged
    weights trained on.
    """
    storage = Storage(str(tmp_path))
    train_both(small_config(), storage)
    DAMAGE[damage](tmp_path / "checkpoints/discover/step_00000018.safetensors")
    monkeypatch.setenv(faults.VARIABLE, "nan:step=999")  # only to have the start noted
    assert_same(copied_tensors(train_both(small_config(), storage)), undisturbed[0])
    assert [event["step"] for event in faults.read_events(storage)] == [18 - 6]
    assert lines(storage) == undisturbed[1]


def test_wasted_steps_are_counted_from_the_next_start_of_the_phase(tmp_path):
    storage = Storage(str(tmp_path))
    for event, phase, step in (
        ("start", "discover", 0),
        ("fault", "discover", 9),
        ("start", "pretrain", 2),
        ("start", "discover", 6),
        ("fault", "discover", 17),
    ):
        faults._note(storage, {"event": event, "phase": phase, "step": step})
    assert wasted_steps(storage) == [3, 0]
