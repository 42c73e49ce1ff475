"""Markdown, Parquet and HTML of a table: the same numbers, and nothing in them is obeyed as markup."""

import io
import json
import re
from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from tests.uno.reproduce.finished import finish, found, small
from uno.data.files import Storage
from uno.reproduce import page

EVIL = 'nan | in <script>alert("x")</script>\nline'


def accuracy(row, evaluation, group, seed):
    return {"uno": 0.9, "no-concat": 0.5}.get(row, 0.8) + 0.01 * seed


@pytest.fixture
def results(tmp_path):
    table = small("ablation")
    finish(tmp_path, table, 3, accuracy, skip=("digits-no-concat-seed2",))
    return found(tmp_path, table, 3, {"cells/digits-no-concat-seed2": EVIL})


def test_numbers_agree_in_all_formats(results, tmp_path):
    """Kills: a table that rounds, orders or drops differently in one of its formats."""
    page.write(Storage(str(tmp_path / "out")), results, "small", "uno reproduce ablation", [])
    text = (tmp_path / "out" / "ablation.md").read_text()
    lines = pq.read_table(io.BytesIO((tmp_path / "out" / "ablation.parquet").read_bytes())).to_pylist()
    html = (tmp_path / "out" / "ablation.html").read_text().replace("\xa0", " ")
    measured = [line for line in lines if line["mean"] is not None]
    assert len(measured) == 4 * 9 + 1
    for line in measured:
        shown = page.spread(line["mean"], line["sd"])
        name = re.escape(line["name"])
        row = next(r for r in text.splitlines() if re.match(rf"\| {name} \|", r) and shown in r)
        assert row and shown in html
        assert line["n"] == len(line["values"]) == len(line["seeds"])
    published = [line for line in lines if line["published"] is not None]
    assert len(published) == 2 * 4 * 6 and all(line["source"] for line in published)
    assert {line["scale"] for line in lines} == {"small"}
    verdicts = [line["verdict"] for line in measured if line["verdict"] is not None]
    assert len(verdicts) == 3 * 6 and all(v in text and v in html for v in verdicts)


def test_differences_have_a_sign():
    assert page.spread(-1.26, 0.5, signed=True) == f"{page.MINUS}1.3 ± 0.5"
    assert page.spread(1.2, None, signed=True) == "+1.2"
    assert page.spread(-0.04, None, signed=True) == "0.0"


def test_paper_and_measurement_stand_side_by_side(results):
    grid = page.results_grid(results)
    first = dict(zip(grid.head, grid.lines[0], strict=True))
    assert first["paper: CIFAR10, Tab. 2"] == "96.6 / 95.1 / 95.8"
    assert first["measured: digits (5 / 5)"] == "91.0 ± 1.0 / 91.0 ± 1.0 / 91.0 ± 1.0"
    assert (grid.lines[0][0], first["n"], first["minutes"]) == ("UNO", "3", "1.0")
    assert first["evaluation (known / novel / all)"] == "task-aware, test"


def test_a_failure_is_in_the_table_and_inert(results):
    """Kills: a failed cell nobody sees; a message that breaks the table or runs in a browser."""
    text = page.markdown_table(results)
    assert "; 1 of 3 failed" in text
    line = next(line for line in text.splitlines() if "seed2 failed" in line)
    assert "&lt;script>" in line and "nan \\| in" in line and "line" in line
    html = page.html(results, "uno <b>", [])
    assert "<script" not in html and "uno <b>" not in html
    assert all(line.count(" | ") == 6 for line in text.splitlines() if line.startswith("| UNO"))


def test_an_unfinished_table_says_so(results):
    assert "not finished" not in page.markdown_table(results)
    assert "1 cells have no result yet" in page.markdown_table(replace(results, missing=["cells/x"]))


def test_the_record(results, tmp_path):
    """Command, hardware, versions, raw values, decision: what a record needs."""
    page.write_record(Storage(str(tmp_path)), results, "small", "uno reproduce ablation", [])
    row = json.loads((tmp_path / "result.json").read_text())
    assert row["command"] == "uno reproduce ablation" and row["hardware"] == "Testium, 2 cores"
    values = [entry["values"] for entry in row["lines"] if entry["row"] == "uno" and "values" in entry]
    assert len(values) == 9 and values[0] == pytest.approx([90, 91, 92])
    assert row["failures"] and "torch 2.11" in row["versions"]
    text = (tmp_path / "README.md").read_text()
    assert text.startswith(f"# {results.table.question}\n\n    uno reproduce ablation\n")
    assert text.count(results.table.question) == 1
    assert page.decision(results) in text and "shown (6 of 6" in page.decision(results)


def test_curves_over_the_number_of_classes(tmp_path):
    """Accuracy and UNO's relative margin: 90 of UNO, 80 of RS -> 11.1 percent. Kills: a margin of points."""
    table = small("num-novel")
    finish(tmp_path, table, 2, lambda row, *_: 0.9 if row.startswith("uno") else 0.8)
    charts = page.charts(found(tmp_path, table, 2))
    assert [line.name for line in charts[0].lines] == ["UNO", "RS", "RS+", "chance"]
    assert {line.name: line.last for line in charts[1].lines} == {"RS": "11.1", "RS+": "11.1"}
    assert not any("point" in line.kind for line in charts[0].lines)
