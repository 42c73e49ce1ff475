"""The numbers on README and the pages have records; the demo and the day after it
run as they say.
"""

import json
import re
import shutil
import statistics
from functools import cache, partial
from pathlib import Path

import pytest
from PIL import Image

import uno
from benchmarks import results
from pipelines import cli, tables
from tests.pages import PAGES, RECORD, ROOT, blocks, commands, page, section, table
from tests.uno.small_run import SMALL
from uno.reproduce.documents import format_mean_sd
from uno.reproduce.effects import verdict
from uno.runs import NUMERICS, TOUCHED

README = page("README.md")
find = cache(results.find)
ACCURACY, SPEED, AFTER = (
    "docs/results/accuracy.md",
    "docs/results/speed.md",
    "docs/guides/after-training.md",
)


def python_block(mark: str) -> str:
    """The Python example that holds ``mark``."""
    return next(
        block
        for name in PAGES
        for block in blocks(page(name), "python")
        if mark in block
    )


SETS = ("flowers12", "signs", "seedlings", "photos", "cub100", "plankton")


def recorded_rows(text: str) -> list[tuple[str, list[results.Row]]]:
    """The table rows that link to an experiment, each with its measured rows."""
    lines = [
        line
        for line in text.splitlines()
        if RECORD.search(line) and line.startswith("|")
    ]
    found = [(line, find(RECORD.search(line)[2])) for line in lines]
    assert found and all(rows for _, rows in found)
    return found


def test_speeds_have_records():
    """Every bold number of the table of speeds is among the results of its row,
    rounded as it is there.
    """
    for line, rows in recorded_rows(page(SPEED)):
        bold = re.findall(r"\*\*([0-9.]+)\*\*", line)
        assert bold, line
        for number in bold:
            digits = len(number.partition(".")[2])
            assert float(number) in {
                round(float(row["value"]), digits) for row in rows
            }, (number, line)


@pytest.mark.parametrize(
    "text", [section("README.md", "Results"), section(ACCURACY, "First table")]
)
def test_numbers_have_records(text):
    """Every measured cell of the first table is the mean and deviation of the
    results it links to.
    """
    found = recorded_rows(text)
    assert len(found) == 4
    for line, rows in found:
        percent = re.search(r"\*\*([0-9.]+(?: ± [0-9.]+)?)\*\*", line)
        keys = {("uno", "novel task_aware"), ("results", "novel, task-aware, train")}
        novel = [row for row in rows if (row["method"], row["protocol"]) in keys]
        assert novel and percent[1] == format_mean_sd(*results.mean_sd(novel)), line


CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
CHANGES = {
    int(number): {word.strip() for word in words.split(",") if word}
    for number, words in re.findall(r"\*\*numbers (\d+):? ?([\w, ]*)\*\*", CHANGELOG)
}
"""The changes that moved numbers, each with the words of what it touches; without
any it touches all.
"""


def older_than_a_change(rows: list[results.Row]) -> list[int]:
    """The changes that came after rows were measured and touch them."""
    found = set[int]()
    commands = json.loads((ROOT / "benchmarks/commands.json").read_text())
    for method, command, numerics in {
        (row["method"], row["command"], row["numerics"]) for row in rows
    }:
        command = commands.get(command, command)
        named = method if command.startswith("uno reproduce") else ""
        words = set(re.findall(r"\w+", f"{named} {command}".replace("-", "_")))
        later = [number for number in CHANGES if number > int(numerics)]
        found |= {
            number for number in later if not CHANGES[number] or CHANGES[number] & words
        }
    return sorted(found)


def test_changes_of_numbers_are_counted():
    """Kills: a change marked "numbers" without its number, or that ``NUMERICS`` does
    not know.
    """
    assert sorted(CHANGES) == list(range(1, NUMERICS + 1))
    assert "**numbers**" not in CHANGELOG
    assert all(set(words) == CHANGES[number] for number, words in TOUCHED.items())
    assert all(
        number in TOUCHED or not CHANGES[number]
        for number in CHANGES
        if number >= min(TOUCHED)
    )


def test_an_old_record_is_found_by_what_it_touches(monkeypatch):
    """Kills: changes of other rows counted, those without words left out, the
    table's number for a row's.
    """
    monkeypatch.setattr(
        "tests.test_readme.CHANGES", {1: set(), 2: {"rs"}, 3: {"photos"}, 4: set()}
    )
    rows = [
        {"method": "rs", "numerics": "1", "command": "uno reproduce sota"},
        {"method": "rs-plus", "numerics": "4", "command": "uno reproduce sota"},
    ]
    assert older_than_a_change(rows) == [2, 4]
    assert older_than_a_change(rows[1:]) == []
    photos = {"method": "", "numerics": "2", "command": "python -m benchmarks.photos"}
    assert older_than_a_change([photos]) == [3, 4]


@pytest.mark.slow
def test_the_example_in_python_with_a_small_model(tmp_path, monkeypatch, capsys):
    """Kills: a keyword, a key of the metrics or an attribute that does not exist."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "sklearn.manifold.TSNE.fit_transform", lambda self, points: points[:, :2]
    )
    small = {key: value for key, value in SMALL.items() if "epochs" not in key} | {
        "max_steps": 1,
        "compute.threads": 1,
    }
    monkeypatch.setattr(
        uno, "discover", partial(uno.discover, quiet=True, **small), raising=False
    )
    run_example()
    assert "novel" in capsys.readouterr().out


def run_example() -> dict:
    """The names after README's example; it predicts the first twenty digits, two of
    each.
    """
    names: dict = {}
    exec(compile(python_block("uno.discover("), "README.md", "exec"), names)
    assert (
        names["model"].run == str(Path.cwd() / "runs" / "python")
        and len(names["table"]) == 20
    )
    assert (
        Path(names["model"].report).exists() and "<img" in names["model"]._repr_html_()
    )
    return names


def test_the_picture_is_small_and_says_nothing_else():
    """Kills: megabytes in every clone, a picture with somebody's metadata."""
    path = ROOT / re.search(r"!\[[^]]+\]\([^)]*?(docs/[^)]+)\)", README)[1]
    with Image.open(path) as picture:
        assert (
            path.stat().st_size <= 300_000 and picture.width >= 900 and not picture.info
        )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_as_a_newcomer_gets_it(tmp_path, monkeypatch, capsys):
    """Without Ray, which changes no number (test_ray). Kills: a line that the quick
    start explains and the run does not print.
    """
    monkeypatch.setattr(
        "sklearn.manifold.TSNE.fit_transform", lambda self, points: points[:, :2]
    )
    here = ["--workers", "0", "--compute.threads", "1"]
    assert cli.main(["demo", *here, "--output", str(tmp_path / "run")]) == 0
    printed, explained = (
        capsys.readouterr(),
        "\n".join(blocks(page("docs/start/quickstart.md"), "text")),
    )
    starts = re.findall(r"^  [\w-]+(?= agrees)|^[\w ]+:", explained, re.M)
    assert len(starts) == 10
    assert [
        start
        for start in starts
        if not re.search(rf"^{start}", printed.out + printed.err, re.M)
    ] == []
    results = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert results["train/novel/task_aware/acc/best"] > 0.96
    assert results["train/known/task_aware/acc/best"] > 0.99


@pytest.mark.slow
@pytest.mark.ray
def test_the_day_after_training(two, tmp_path, monkeypatch):
    """The commands of the page on a demo, in order, as they stand there."""
    monkeypatch.setattr(
        "sklearn.manifold.TSNE.fit_transform", lambda self, points: points[:, :2]
    )
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


def by_seed(experiment: str, method: str, protocol: str) -> dict[int, float]:
    """Values of a row of ``uno reproduce`` by seed."""
    rows = find(experiment, method=method, protocol=protocol)
    return {int(row["seed"]): float(row["value"]) for row in rows}


def test_the_ablation_is_that_of_its_record():
    """Kills: a number or a verdict in the README that the results do not hold."""
    build = tables.build("ablation", "small")
    keys = {row.name: row for row in build.rows}
    _, *shown = table(ACCURACY, "| digits | novel, task-aware |")
    assert shown[0][0] == "UNO" and len(shown) == 4
    reference = by_seed("ablation", "uno", "all task_agnostic_official")
    published = next(column for column in build.published if column.data == "CIFAR10")
    official = next(
        e.name for e in build.evaluations if e.protocol == "task_agnostic_official"
    )
    index = build.groups.index("all")
    for name, novel, every, change, said, paper in shown:
        aware = by_seed("ablation", keys[name].key, "novel task_aware")
        agnostic = by_seed("ablation", keys[name].key, "all task_agnostic_official")
        for text, values in ((novel, aware), (every, agnostic)):
            assert text == format_mean_sd(
                statistics.fmean(values.values()), statistics.stdev(values.values())
            )
            assert len(values) == len(reference) >= 3
        if name != "UNO":
            differences = [value - reference[seed] for seed, value in agnostic.items()]
            effect = statistics.fmean(differences), statistics.stdev(differences)
            assert change == format_mean_sd(*effect, signed=True)
            # test images of the digits
            assert said == verdict(differences, keys[name].claim, 355)
            one, other = (
                published.read(key, official)[index][0]
                for key in (keys[name].key, "uno")
            )
            assert paper == format_mean_sd(one - other, None, signed=True)


def test_the_methods_are_those_of_their_records():
    """Kills: a number in the table of methods that its results do not hold, a row of
    one left out.
    """
    (_, *titles), *shown = table(ACCURACY, "| method | digits")
    names = {row.key: row.name for row in tables.build("sota", "small").rows}
    assert titles and shown
    for column, title in enumerate(titles, 1):
        rows = find(RECORD.search(title)[2])
        texts = {row[0]: row[column] for row in shown if row[column] != "–"}  # noqa: RUF001
        keys = {row["method"] for row in rows} - {"uno-avg"}
        assert texts.keys() == {names[key] for key in keys}
        for key in keys:
            own = [row for row in rows if row["method"] == key]
            assert texts[names[key]] == format_mean_sd(*results.mean_sd(own))
            assert f"n = {len(own)}" in title
