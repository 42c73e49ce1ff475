"""Markdown, JSON and HTML of a table: the same numbers, and nothing in them is
obeyed as markup.
"""

import json

import pytest

from tests.uno.reproduce.finished import finished, small
from uno.data.files import Storage
from uno.reproduce import documents

EVIL = 'nan | in <script>alert("x")</script>\nline'


def accuracy(row, evaluation, group, seed):
    return {"uno": 0.9, "no-concat": 0.5}.get(row, 0.8) + 0.01 * seed


@pytest.fixture
def results(tmp_path):
    lost = "cells/digits-no-concat-seed2"
    return finished(tmp_path, small("ablation"), 3, accuracy, (lost,), {lost: EVIL})


def test_numbers_agree_in_all_formats(results, tmp_path):
    """Kills: a table that rounds, orders or drops differently in one of its formats."""
    documents.write(Storage(str(tmp_path)), results, "uno reproduce ablation", [])
    text, html = (
        (tmp_path / f"ablation.{end}").read_text().replace("\xa0", " ")
        for end in ("md", "html")
    )
    lines = json.loads((tmp_path / "ablation.json").read_text())["lines"]
    measured = [line for line in lines if "mean" in line]
    assert len(measured) == 4 * 9 + 1
    for line in measured:
        shown, name = (
            documents.format_mean_sd(line["mean"], line["sd"]),
            f"| {line['name']} |",
        )
        assert (
            any(row.startswith(name) and shown in row for row in text.splitlines())
            and shown in html
        )
        assert line["n"] == len(line["values"]) == len(line["seeds"])
    published = [line for line in lines if "published" in line]
    assert len(published) == 2 * 4 * 6 and all(line["source"] for line in published)
    assert {line["scale"] for line in lines} == {"small"}
    verdicts = [line["verdict"] for line in measured if "verdict" in line]
    assert len(verdicts) == 3 * 6 and all(v in text and v in html for v in verdicts)
    # the end of a long explanation
    assert "where n is small a verdict is a hint." in html


def test_paper_and_measurement_stand_side_by_side(results):
    differences = (-1.26, 0.5), (1.2, None), (-0.04, None)
    assert [
        documents.format_mean_sd(*number, signed=True) for number in differences
    ] == [
        f"{documents.MINUS}1.3 ± 0.5",
        "+1.2",
        "0.0",
    ]
    head, uno, *_ = documents.results_grid(results)
    first = dict(zip(head, uno, strict=True))
    assert first["paper: CIFAR10, Tab. 2"] == "96.6 / 95.1 / 95.8"
    assert first["measured: digits (5 / 5)"] == "91.0 ± 1.0 / 91.0 ± 1.0 / 91.0 ± 1.0"
    assert (uno[0], first["n"], first["minutes"]) == ("UNO", "3", "1.0")
    assert first["evaluation (known / novel / all)"] == "task-aware, test"


def test_a_failure_is_in_the_table_and_inert(results):
    """Kills: a failed cell nobody sees; a message that breaks the table or runs in a
    browser.
    """
    text = documents.markdown(results)
    assert "; 1 of 3 failed" in text and "not finished" not in text
    line = next(line for line in text.splitlines() if "seed2 failed" in line)
    assert "&lt;script>" in line and "nan \\| in" in line and "line" in line
    html = documents.html(results, "uno <b>", [])
    assert "<script" not in html and "uno <b>" not in html
    assert all(
        line.count(" | ") == 6 for line in text.splitlines() if line.startswith("| UNO")
    )
    refused = documents.markdown(
        results._replace(refused={"digits-no-concat": "it makes | no sense"})
    )
    assert (
        "| refused | 0 |" in refused
        and "digits-no-concat is refused: it makes \\| no sense" in refused
    )
    unfinished = documents.markdown(results._replace(missing=["cells/x"]))
    assert "Cells without a result: 1; the table is not finished" in unfinished


def test_the_record(results, tmp_path):
    """Command, hardware, versions, raw values, decision: what a record needs."""
    documents.write(
        Storage(str(tmp_path)), results, "uno reproduce ablation", [], record=True
    )
    row = json.loads((tmp_path / "result.json").read_text())
    assert (
        row["command"] == "uno reproduce ablation"
        and row["hardware"] == "Testium, 2 cores"
    )
    values = [
        entry["values"]
        for entry in row["lines"]
        if entry["row"] == "uno" and "values" in entry
    ]
    assert len(values) == 9 and values[0] == pytest.approx([90, 91, 92])
    assert row["failures"] and "torch 2.11" in row["versions"]
    made_with = {
        entry["row"]: entry["numerics"] for entry in row["lines"] if "numerics" in entry
    }
    # the oldest cell of a row
    assert made_with["uno"] == 7 and made_with["no-concat"] == 0
    text = (tmp_path / "README.md").read_text()
    assert text.startswith(
        f"# {results.table.question}\n\n    uno reproduce ablation\n"
    )
    assert text.count(results.table.question) == 1
    assert documents.decision(
        results
    ) in text and "shown (6 of 6" in documents.decision(results)


def test_curves_over_the_number_of_classes(tmp_path):
    """Accuracy and UNO's relative margin: 90 of UNO, 80 of RS -> 11.1 percent.
    Kills: a margin of points.
    """
    results = finished(
        tmp_path,
        small("num-novel"),
        2,
        lambda row, *_: 0.9 if row.startswith("uno") else 0.8,
    )
    accuracies, margins = documents.charts(results)
    assert [line.name for line in accuracies.lines] == ["UNO", "RS", "RS+", "chance"]
    assert {line.name: line.last for line in margins.lines} == {
        "RS": "11.1",
        "RS+": "11.1",
    }
    assert not any("point" in line.kind for line in accuracies.lines)
