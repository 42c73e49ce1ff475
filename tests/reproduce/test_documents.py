"""Markdown and JSON of a table: the same numbers, and nothing in them is obeyed as
markup.
"""

import json

import pytest

from reproduce import documents
from tests.reproduce.finished import finished, small
from uno.data.files import Storage

EVIL = 'nan | in <script>alert("x")</script>\nline'


def accuracy(row, evaluation, group, seed):
    return {"uno": 0.9, "no-concat": 0.5}.get(row, 0.8) + 0.01 * seed


@pytest.fixture
def results(tmp_path):
    lost = {("no-concat", 2): EVIL}
    return finished(tmp_path, small("ablation"), 3, accuracy, lost)


def test_numbers_agree_in_both_formats(results, tmp_path):
    """Kills: a format that rounds, orders or drops differently; a table without its
    command, hardware, versions or raw values.
    """
    documents.write(Storage(str(tmp_path)), results, "uno reproduce ablation")
    text = (tmp_path / "ablation.md").read_text()
    written = json.loads((tmp_path / "ablation.json").read_text())
    measured = [line for line in written["lines"] if "mean" in line]
    assert len(measured) == 4 * 9 + 1
    for line in measured:
        shown = documents.format_mean_sd(line["mean"], line["sd"])
        name = f"| {line['name']} "
        assert any(row.startswith(name) and shown in row for row in text.splitlines())
        assert line["n"] == len(line["values"]) == len(line["seeds"])
    published = [line for line in written["lines"] if "published" in line]
    assert len(published) == 2 * 4 * 6 and all(line["source"] for line in published)
    assert written["scale"] == "small" and written["failures"]
    for key, fact in (
        ("versions", "torch 2.11"),
        ("command", "uno reproduce ablation"),
        ("hardware", "Testium, 2 cores"),
    ):
        assert fact in written[key] and fact in text


@pytest.mark.parametrize(
    ("mean", "sd", "text"),
    [
        (-1.26, 0.5, f"{documents.MINUS}1.3 ± 0.5"),
        (1.2, None, "+1.2"),
        (-0.04, None, "0.0"),
    ],
)
def test_a_difference_has_its_sign(mean, sd, text):
    assert documents.format_mean_sd(mean, sd, signed=True) == text


def test_paper_and_measurement_stand_side_by_side(results):
    head, uno, *rows = documents.results_grid(results)
    first = dict(zip(head, uno, strict=True))
    assert first["paper: CIFAR10, Tab. 2"] == "96.6 / 95.1 / 95.8"
    assert first["measured: digits (5 / 5)"] == "91.0 ± 1.0 / 91.0 ± 1.0 / 91.0 ± 1.0"
    assert (uno[0], first["n"]) == ("UNO", "3")
    assert first["evaluation (known / novel / all)"] == "task-aware, test"
    cells = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    concat = cells["without concatenation (against UNO)"]
    each = f"50.5 ± 0.7 ({documents.MINUS}40.0 ± 0.0)"
    assert concat["measured: digits (5 / 5)"].startswith(f"{each} / {each} / {each}")


def test_a_failure_is_in_the_table_and_inert(results):
    """Kills: a failed cell nobody sees; a message that breaks the table."""
    text = documents.markdown(results)
    assert "; 1 of 3 failed" in text and "not finished" not in text
    (line,) = [line for line in text.splitlines() if "failed: " in line]
    assert "digits-no-concat-seed2" in line
    assert "&lt;script>" in line and "nan \\| in" in line and "line" in line
    assert all(
        line.count(" | ") == 5 for line in text.splitlines() if line.startswith("| UNO")
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
