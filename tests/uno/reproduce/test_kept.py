"""Cells of a record: what goes on elsewhere is what was measured, and nothing else."""

import json

import pytest

from tests.uno.reproduce.finished import finished, small
from uno.data.files import Storage
from uno.errors import ConfigError
from uno.reproduce import cell_store
from uno.reproduce.effects import read
from uno.reproduce.experiments import cells
from uno.runs import NUMERICS

TABLE = small("ablation")


def accuracy(row, evaluation, group, seed):
    return len(row) / 40 + seed / 7


def record_of(tmp_path, table=TABLE, seeds=2):
    """A record of cells of the present numerics, and what they say."""
    found = finished(tmp_path / "runs", table, seeds, accuracy)
    todo = cells(table, seeds, {}, {})[0]
    for cell in todo:
        environment = {
            "numerics": NUMERICS,
            "command": "uno /home/me/secret",
            "processor": "Testium",
        }
        (tmp_path / "runs" / cell.name / "environment.json").write_text(
            json.dumps(environment)
        )
    record = Storage(str(tmp_path / "record"))
    cell_store.write(
        record, todo, tmp_path / "runs", {cell.name: 60.0 for cell in todo}
    )
    return record, found


def test_a_record_goes_on_where_its_runs_are_gone(tmp_path):
    """With more seeds too. Kills: rounded numbers, seconds lost, paths of a machine
    published.
    """
    record, found = record_of(tmp_path)
    assert b"secret" not in record.read(cell_store.CELLS)
    todo, there = cells(TABLE, 3, {}, {})[0], tmp_path / "there"
    (there / todo[0].name).mkdir(parents=True)
    seconds = dict(cell_store.restore(record, todo, there))
    assert sum(name.startswith("cells/") for name in seconds) == len(todo) * 2 // 3 - 1
    assert not list((there / todo[0].name).iterdir()), (
        "a run that is there is left alone"
    )
    (there / todo[0].name).rmdir()
    seconds |= cell_store.restore(record, todo, there)
    again = read(TABLE, todo, there, {}, seconds, {}, {})
    machine = {"numerics": NUMERICS, "hardware": "Testium"}
    one, other = (
        [line | machine for line in results.lines] for results in (again, found)
    )
    assert one == other and again.total_minutes == found.total_minutes
    assert len(again.missing) == len(todo) // 3


@pytest.mark.parametrize(
    "changes", [{}, {"objective.epsilon": 0.1}, {"data.source": "cifar10:/there/c"}]
)
def test_only_cells_of_the_same_settings_are_taken(tmp_path, changes):
    """Kills: cells of another objective or data set taken for these."""
    record, _ = record_of(tmp_path)
    taken = list(
        cell_store.restore(record, cells(TABLE, 2, {}, changes)[0], tmp_path / "there")
    )
    assert bool(taken) == (not changes)


def test_a_smaller_table_loses_no_cell(tmp_path):
    """Kills: --seeds 1 into a record of two seeds that costs the second."""
    record, _ = record_of(tmp_path)
    before = sorted(record.read(cell_store.CELLS).splitlines())
    todo = cells(TABLE, 1, {}, {})[0]
    cell_store.write(
        record, todo, tmp_path / "runs", {cell.name: 60.0 for cell in todo}
    )
    assert sorted(record.read(cell_store.CELLS).splitlines()) == before


def test_where_the_data_lie_does_not_matter(tmp_path):
    names = (
        "cifar10:/a/b/cats",
        "cifar10:/c/cats",
        "folder:/c/cats",
        "cifar10:/c/dogs",
    )
    one, other, *rest = (
        cell_store.settings_hash(
            cells(TABLE, 1, {}, {"data.source": name})[0][0].config
        )
        for name in names
    )
    assert one == other and len({one, *rest}) == 3


def test_cells_of_other_numerics_are_run_again(tmp_path, monkeypatch):
    record, _ = record_of(tmp_path)
    monkeypatch.setattr(cell_store, "NUMERICS", NUMERICS + 1)
    assert not list(
        cell_store.restore(record, cells(TABLE, 2, {}, {})[0], tmp_path / "there")
    )


@pytest.mark.parametrize(
    "touched, found", [(("exif",), True), (("uno", "rs"), False), ((), False)]
)
def test_cells_that_no_later_change_touches_are_taken(
    tmp_path, monkeypatch, touched, found
):
    """Kills: a change of other rows that costs all cells, one without words that
    costs none.
    """
    record, _ = record_of(tmp_path)
    monkeypatch.setattr(cell_store, "NUMERICS", NUMERICS + 1)
    monkeypatch.setattr(cell_store, "TOUCHED", {NUMERICS + 1: touched})
    todo = [cell for cell in cells(TABLE, 2, {}, {})[0] if cell.row.key == "uno"]
    assert todo and (cell_store.stored(record, todo) == todo) == found


def test_a_record_may_be_one_file(tmp_path):
    record_of(tmp_path)
    todo, packed = cells(TABLE, 2, {}, {})[0], Storage(str(tmp_path / "TABLE.jsonl.gz"))
    cell_store.write(packed, todo, tmp_path / "runs", {})
    assert (
        cell_store.stored(packed, todo) == todo
        and (tmp_path / "TABLE.jsonl.gz").is_file()
    )
    (tmp_path / "TABLE.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(ConfigError, match=r"TABLE.jsonl.gz is damaged"):
        cell_store.stored(packed, todo)


def test_a_new_setting_changes_no_hash(monkeypatch):
    """Kills: defaults in the hash, with which a field of a later version would cost
    all cells.
    """
    config = cells(TABLE, 1, {}, {})[0][0].config
    before, settings = cell_store.settings_hash(config), cell_store.training_settings
    monkeypatch.setattr(
        cell_store,
        "training_settings",
        lambda config: settings(config) | {"new.key": 1},
    )
    assert cell_store.settings_hash(config) == before


@pytest.mark.parametrize(
    "damage", [b"{", b"\xff", b"[]", b"{}", b'{"cell": 1, "settings": 2}']
)
def test_a_damaged_record_is_one_line(tmp_path, damage):
    record, _ = record_of(tmp_path)
    record.append(cell_store.CELLS, damage + b"\n")
    number = len(record.read(cell_store.CELLS).splitlines())
    with pytest.raises(ConfigError, match=f"line {number} of cells.jsonl is damaged"):
        list(cell_store.restore(record, cells(TABLE, 2, {}, {})[0], tmp_path / "there"))
