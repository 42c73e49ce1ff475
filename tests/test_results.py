"""The results: no row without its origin, records that are folded in, cells."""

import gzip
import json
import shutil
from pathlib import Path

import pytest

from benchmarks import results
from pipelines import cli
from uno.errors import ConfigError

ROOT = Path(__file__).parent.parent


@pytest.fixture
def copy(tmp_path) -> Path:
    """The results, to be changed: ``benchmarks`` of a repository with its
    ``docs/results``.
    """
    shutil.copytree(ROOT / "docs" / "results", tmp_path / "docs" / "results")
    leave_out = shutil.ignore_patterns("*.py", "__pycache__", "cells", "records")
    return Path(
        shutil.copytree(results.HERE, tmp_path / "benchmarks", ignore=leave_out)
    )


def test_every_row_has_its_origin():
    assert results.check() == []


@pytest.mark.parametrize(
    "column",
    ["command", "commit", "system", "seed", "numerics", "value", "date", "status"],
)
def test_a_row_without_its_origin_is_refused(copy, column):
    rows = results.read("speed", copy)
    rows[3][column] = ""
    results.write("speed", rows, copy)
    name = rows[3]["experiment"]
    assert f"speed.csv:5: {name}: no {column}" in results.check(copy)


def test_unknown_systems_commands_statuses_and_experiments_are_refused(copy):
    rows = results.read("robustness", copy)
    rows[0] |= {
        "system": "abacus",
        "command": "x",
        "status": "old",
        "date": "2020-01-01",
    }
    results.write("robustness", rows, copy)
    found = "\n".join(results.check(copy))
    for text in (
        "unknown system abacus",
        "unknown command x",
        "unknown status 'old'",
        "no entry 2020-01-01",
    ):
        assert text in found


def record(tmp_path: Path, date: str, value: float) -> Path:
    line = {
        "row": "uno",
        "name": "UNO",
        "evaluation": "task-aware",
        "protocol": "task_aware",
        "split": "test",
        "data": "dots (1 / 1)",
        "group": "novel",
        "mean": value,
        "sd": 1.0,
        "n": 2,
        "values": [value, value + 1],
        "seeds": [0, 1],
        "minutes": 0.5,
        "numerics": 3,
        "table": "dots",
    }
    result = {
        "command": "uno reproduce dots",
        "commit": "abc1234",
        "hardware": "AMD EPYC, 2 cores",
        "lines": [line],
    }
    folder = tmp_path / f"{date}_reproduce-dots"
    folder.mkdir()
    (folder / "result.json").write_text(json.dumps(result | {"versions": "numerics 3"}))
    (folder / "cells.jsonl").write_text(
        json.dumps({"cell": f"cells/dots-{date}"}) + "\n"
    )
    return folder


def test_a_record_is_folded_in_and_the_one_before_superseded(copy, tmp_path):
    """Kills: rows added twice, an older one that stays current, cells that are lost."""
    for date, value in (
        ("2026-12-01", 50.0),
        ("2026-12-02", 60.0),
        ("2026-12-02", 70.0),
    ):
        folder = record(tmp_path, date, value)
        assert results.add(folder, root=copy) == 2
        shutil.rmtree(folder)
    rows = [
        row for row in results.read("accuracy", copy) if row["experiment"] == "dots"
    ]
    assert [(row["value"], row["status"]) for row in rows] == [
        ("50", "superseded by 2026-12-02"),
        ("51", "superseded by 2026-12-02"),
        ("70", "current"),
        ("71", "current"),
    ]
    assert results.mean_sd(results.find("dots", copy)) == (
        70.5,
        pytest.approx(0.7071, abs=1e-4),
    )
    assert {
        (row["commit"], row["numerics"], row["system"], row["minutes"]) for row in rows
    } == {("abc1234", "3", "epyc-2c", "0.5")}
    (copy / "LOG.md").write_text(
        "# Log\n\n## 2026-12-02 dots\n\n" + (copy / "LOG.md").read_text()
    )
    assert {problem.partition(": ")[2] for problem in results.check(copy)} == {
        "dots: LOG.md has no entry 2026-12-01 dots"
    }
    kept = gzip.decompress((copy / "cells" / "dots.jsonl.gz").read_bytes()).decode()
    assert [json.loads(line)["cell"] for line in kept.splitlines()] == [
        "cells/dots-2026-12-01",
        "cells/dots-2026-12-02",
    ]


def test_a_record_that_lacks_something_is_one_line(copy, tmp_path):
    folder = record(tmp_path, "2026-12-01", 1.0)
    full = json.loads((folder / "result.json").read_text())
    for key, text in (("command", "no command"), ("hardware", "unknown hardware")):
        (folder / "result.json").write_text(
            json.dumps({k: v for k, v in full.items() if k != key})
        )
        with pytest.raises(ConfigError, match=text):
            results.add(folder, root=copy)
    with pytest.raises(ConfigError, match="not a directory DATE_EXPERIMENT"):
        results.add(tmp_path, root=copy)


def test_figures_of_other_programs_are_rows():
    """Kills: settings as figures, raw values beside their mean, entries of a list
    that share a name.
    """
    tree = {
        "command": "python -m benchmarks.x",
        "batch": 7,
        "results": {"novel": {"mean": 0.5, "sd": 0.1, "values": [0.4, 0.6]}},
        "runs": [
            {"rows": 10, "seconds": 2.5},
            {"rows": 20, "seconds": 3.5, "ok": True},
        ],
        "ms": [1.0, 2.0],
    }
    found = [
        (r["method"], r["protocol"], r["seed"], r["value"], r["unit"])
        for r in results._leaves(tree)
    ]
    assert found == [
        ("results", "novel", "0", "40", "%"),
        ("results", "novel", "1", "60", "%"),
        ("runs / rows 10", "seconds", "0", "2.5", "s"),
        ("runs / rows 20", "seconds", "0", "3.5", "s"),
        ("", "ms", "0", "1", "1"),
        ("", "ms", "1", "2", "1"),
    ]


@pytest.mark.parametrize(
    "table, seeds, cells, kept",
    [
        ("ablation", 8, 32, 32),
        ("aggregation", 8, 24, 24),
        ("sota", 5, 70, 55),  # all but SimGCD and PIM
    ],
)
def test_the_cells_of_a_table_are_found_again(
    table, seeds, cells, kept, tmp_path, monkeypatch, capsys
):
    """Kills: settings that are hashed in another way, numerics that no change of
    these rows has raised.
    """
    monkeypatch.chdir(tmp_path)
    stored = str(results.HERE / "cells" / f"{table}.jsonl.gz")
    words = [
        "--seeds",
        str(seeds),
        "--datasets",
        "digits",
        "--record",
        stored,
        "--dry-run",
    ]
    assert cli.main(["reproduce", table, *words]) == 0
    assert f"{cells} cells, {kept} of them have a result" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
