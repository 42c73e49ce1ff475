"""The numbers on README and the pages have records; the demo and the day after it run as they say."""

import json
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

import uno
from pipelines import cli
from tests.pages import PAGES, RECORD, ROOT, blocks, commands, page, section, table
from tests.uno.small_run import SMALL
from uno.reproduce.documents import format_mean_sd
from uno.runs import NUMERICS

README = page("README.md")
ACCURACY, SPEED, AFTER = "docs/results/accuracy.md", "docs/results/speed.md", "docs/guides/after-training.md"


def python_block(mark: str) -> str:
    """The Python example that holds ``mark``."""
    return next(block for name in PAGES for block in blocks(page(name), "python") if mark in block)


def recorded_rows(text: str) -> list[tuple[str, dict]]:
    """The table rows that link to a record, each with the record's result."""
    rows = [line for line in text.splitlines() if line.startswith("|") and RECORD.search(line)]
    records = [ROOT / RECORD.search(row)[2] for row in rows]
    results = [json.loads((record / "result.json").read_text()) for record in records]
    assert results and all(result["command"] for result in results)
    return list(zip(rows, results, strict=True))


def numbers(tree: object) -> list[float]:
    """All numbers in a JSON value."""
    if isinstance(tree, dict | list):
        return [n for part in (tree.values() if isinstance(tree, dict) else tree) for n in numbers(part)]
    return [float(tree)] if isinstance(tree, int | float) and not isinstance(tree, bool) else []


def test_speeds_have_records():
    """Every bold number of the table of speeds stands in the record of its row, rounded as it is there."""
    for row, result in recorded_rows(page(SPEED)):
        bold = re.findall(r"\*\*([0-9.]+)\*\*", row)
        assert bold, row
        for number in bold:
            digits = len(number.partition(".")[2])
            assert float(number) in {round(value, digits) for value in numbers(result)}, (number, row)


@pytest.mark.parametrize("text", [section("README.md", "Results"), section(ACCURACY, "First table")])
def test_numbers_have_records(text):
    """Every measured cell of the first table links to a record whose result holds that number."""
    rows = recorded_rows(text)
    assert len(rows) == 4
    for row, result in rows:
        percent = re.search(r"\*\*([0-9.]+)(?: ± ([0-9.]+))?\*\*", row)
        if "lines" in result:  # a table of uno reproduce, in percent
            (novel,) = (line for line in result["lines"] if line["row"] == "uno" and "mean" in line)
            assert (novel["protocol"], novel["group"]) == ("task_aware", "novel")
            mean, sd = novel["mean"], novel["sd"]
        else:
            novel = result["results"]["novel, task-aware, train"]
            mean, sd = 100 * novel["mean"], novel["sd"] and 100 * novel["sd"]
        assert float(percent[1]) == round(mean, 1)
        assert percent[2] is None if sd is None else float(percent[2]) == round(sd, 1)


CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
CHANGES = {
    int(number): {word.strip() for word in words.split(",") if word}
    for number, words in re.findall(r"\*\*numbers (\d+):? ?([\w, ]*)\*\*", CHANGELOG)
}
"""The changes that moved numbers, each with the words of what it touches; without any it touches all."""


def older_than_a_change(result: dict) -> list[int]:
    """The changes that came after a record was made and touch a row of it."""
    rows, found = [("", result)] if "numerics" in result else [], set[int]()
    rows += [(line["row"], line) for line in result.get("lines", ()) if "numerics" in line]
    assert rows, f"{result['command']}: no numerics"
    for name, row in rows:
        words = set(re.findall(r"\w+", f"{name} {result['command']}".replace("-", "_")))
        later = [number for number in CHANGES if number > row["numerics"]]
        found |= {number for number in later if not CHANGES[number] or CHANGES[number] & words}
    return sorted(found)


def test_changes_of_numbers_are_counted():
    """Kills: a change marked "numbers" without its number, or that ``NUMERICS`` does not know."""
    assert sorted(CHANGES) == list(range(1, NUMERICS + 1))
    assert "**numbers**" not in CHANGELOG


def test_quoted_records_are_of_these_numerics():
    """An accuracy that a page quotes is as new as the last change that touches its rows, or the link's text
    says of which "numerics" it is. Kills: a record left behind by a change marked "numbers".
    """
    speeds = "\n".join(line for line in page(SPEED).splitlines() if not line.startswith("|"))
    text = "\n".join([speeds, *(page(name) for name in PAGES if name != SPEED)])
    quoted = RECORD.findall(text)
    assert len(quoted) >= 5
    for words, record in quoted:
        result = json.loads((ROOT / record / "result.json").read_text())
        changes, said = older_than_a_change(result), f"numerics {result.get('numerics')}" in words
        assert said == bool(changes), f"{record}: changed after it: {changes}; the link says {words}"


def test_an_old_record_is_found_by_what_it_touches(monkeypatch):
    """Kills: changes of other rows counted, those without words left out, the table's number for a row's."""
    monkeypatch.setattr("tests.test_readme.CHANGES", {1: set(), 2: {"rs"}, 3: {"photos"}, 4: set()})
    lines = [{"row": "rs", "numerics": 1}, {"row": "rs-plus", "numerics": 4}]
    assert older_than_a_change({"command": "uno reproduce sota", "lines": lines}) == [2, 4]
    assert older_than_a_change({"command": "uno reproduce sota", "lines": lines[1:]}) == []
    assert older_than_a_change({"command": "python -m benchmarks.photos", "numerics": 2}) == [3, 4]


@pytest.mark.slow
def test_the_example_in_python_with_a_small_model(tmp_path, monkeypatch, capsys):
    """Kills: a keyword, a key of the metrics or an attribute that does not exist."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sklearn.manifold.TSNE.fit_transform", lambda self, points: points[:, :2])
    small = {key: value for key, value in SMALL.items() if "epochs" not in key} | {
        "max_steps": 1,
        "compute.threads": 1,
    }
    monkeypatch.setattr(uno, "discover", partial(uno.discover, quiet=True, **small), raising=False)
    run_example()
    assert "novel" in capsys.readouterr().out


def run_example() -> dict:
    """The names after README's example; it predicts the first twenty digits, two of each."""
    names: dict = {}
    exec(compile(python_block("uno.discover("), "README.md", "exec"), names)
    assert names["model"].run == str(Path.cwd() / "runs" / "python") and len(names["table"]) == 20
    assert Path(names["model"].report).exists() and "<img" in names["model"]._repr_html_()
    return names


def test_the_picture_is_small_and_says_nothing_else():
    """Kills: megabytes in every clone, a picture with somebody's metadata."""
    path = ROOT / re.search(r"!\[[^]]+\]\([^)]*?(docs/[^)]+)\)", README)[1]
    with Image.open(path) as picture:
        assert path.stat().st_size <= 300_000 and picture.width >= 900 and not picture.info


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_as_a_newcomer_gets_it(tmp_path, monkeypatch, capsys):
    """Without Ray, which changes no number (test_ray). Kills: a line that the quick start explains and the
    run does not print.
    """
    monkeypatch.setattr("sklearn.manifold.TSNE.fit_transform", lambda self, points: points[:, :2])
    here = ["--workers", "0", "--compute.threads", "1"]
    assert cli.main(["demo", *here, "--output", str(tmp_path / "run")]) == 0
    printed, explained = capsys.readouterr(), "\n".join(blocks(page("docs/start/quickstart.md"), "text"))
    starts = re.findall(r"^  [\w-]+(?= agrees)|^[\w ]+:", explained, re.M)
    assert len(starts) == 9
    assert [start for start in starts if not re.search(rf"^{start}", printed.out + printed.err, re.M)] == []
    results = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert results["train/novel/task_aware/acc/best"] > 0.96
    assert results["train/known/task_aware/acc/best"] > 0.99


@pytest.mark.slow
@pytest.mark.ray
def test_the_day_after_training(two, tmp_path, monkeypatch):
    """The commands of the page on a demo, in order, as they stand there."""
    monkeypatch.setattr("sklearn.manifold.TSNE.fit_transform", lambda self, points: points[:, :2])
    monkeypatch.chdir(tmp_path)
    shutil.copytree(two, "runs/demo")
    for _, *words in commands(page(AFTER), "uno classes runs/demo --apply"):
        words = ["digits" if word == "folder:DIR" else word for word in words]
        assert cli.main(words) == 0, words
    assert (tmp_path / "predictions" / "predictions.parquet").exists()
    assert (tmp_path / "runs" / "demo" / "report.html").exists()
    assert list((tmp_path / "runs" / "demo").rglob("*.pt2"))
    python = python_block("uno.load(")
    images = __import__("numpy").zeros((2, 8, 8, 3), "uint8")
    python = python.replace('["a.jpg", "b.png"]', "images")
    exec(compile(python, "README.md", "exec"), {"images": images})


def test_the_ablation_is_that_of_its_record():
    """Kills: a number or a verdict in the README that the record does not hold."""
    record = json.loads((ROOT / "benchmarks/records/2026-11-23_reproduce-ablation/result.json").read_text())
    assert record["n"] >= 3 and not record["missing"] and not record["failures"]
    lines = {(e["name"], e["protocol"], e["group"], e["data"]): e for e in record["lines"]}
    _, *rows = table(ACCURACY, "| digits | novel, task-aware |")
    assert rows[0][0] == "UNO" and len(rows) == 4
    for name, novel, every, change, verdict, paper in rows:
        aware = lines[name, "task_aware", "novel", "digits (5 / 5)"]
        agnostic = lines[name, "task_agnostic_official", "all", "digits (5 / 5)"]
        for text, entry in ((novel, aware), (every, agnostic)):
            assert text == format_mean_sd(entry["mean"], entry["sd"])
            assert len(entry["values"]) == record["n"]
        if name != "UNO":
            assert change == format_mean_sd(agnostic["effect"], agnostic["effect_sd"], signed=True)
            assert verdict == agnostic["verdict"]
            published = [lines[n, "task_agnostic_official", "all", "CIFAR10"] for n in (name, "UNO")]
            difference = published[0]["published"] - published[1]["published"]
            assert paper == format_mean_sd(difference, None, signed=True)


def test_the_methods_are_those_of_their_records():
    """Kills: a number in the table of methods that its record does not hold, a row of one left out."""
    (_, *titles), *shown = table(ACCURACY, "| method | digits")
    assert titles and shown
    for column, title in enumerate(titles, 1):
        link = RECORD.search(title)[2]
        record = json.loads((ROOT / link / "result.json").read_text())
        assert not record["missing"] and not record["failures"] and f"n = {record['n']}" in title
        lines = {entry["name"]: entry for entry in record["lines"] if "values" in entry}
        texts = {row[0]: row[column] for row in shown if row[column] != "–"}  # noqa: RUF001
        assert texts.keys() == lines.keys() - {"UNO, mean of heads"}
        for name, text in texts.items():
            assert text == format_mean_sd(lines[name]["mean"], lines[name]["sd"])
            assert len(lines[name]["values"]) == record["n"]
