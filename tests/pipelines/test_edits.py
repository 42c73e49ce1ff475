"""Names, merges and drops, and whether every part of a run says the same after each."""

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

import uno as api
from pipelines import cli
from tests.pipelines.small import ROOT, SMALL, refused, write_images
from tests.uno.data.builders import encoded, pixels
from uno.config import Config, override
from uno.data.sources import read_rows
from uno.data.splits import Task, make_task
from uno.errors import ConfigError
from uno.results.metrics import confusion, hungarian, matched_counts


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A finished run of 200 digits and three heads."""
    output = tmp_path_factory.mktemp("edits") / "run"
    words = ["--model.num-heads", "3", "--output", str(output)]
    assert cli.main(["discover", *SMALL, *words]) == 0
    return output


@pytest.fixture
def run(finished, tmp_path) -> Path:
    """A copy of the finished run that a test may change."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def uno(*argv) -> None:
    assert cli.main([str(word) for word in argv]) == 0


def task_of(run: Path) -> Task:
    config = override(Config(), yaml.safe_load((run / "config.yaml").read_text()))
    return make_task(read_rows(config.data), config.data)


def write_actions(run: Path, actions: dict[int, str]) -> None:
    """Write the action of each class into classes.yaml; classes without one stay."""
    path = run / "classes.yaml"
    tree = yaml.safe_load(path.read_text())
    for entry in tree["classes"]:
        entry["action"] = actions.get(entry["index"], "keep")
    path.write_text(yaml.safe_dump(tree))


def edit(run: Path, change) -> None:
    """As a person does it: ``--rename``, or other actions in the file and
    ``--apply``.
    """
    if isinstance(change, list):
        return uno("classes", run, *change)
    write_actions(run, change)
    return uno("classes", run, "--apply")


def accuracies(table, task: Task, into: dict[int, int | None]) -> dict[str, float]:
    """Strict accuracy and rejected shares by the table of predictions."""
    index, found = table["class_index"].to_numpy(), {}
    num_known, gone = len(task.known), [i for i, t in into.items() if t is None]
    num_true = num_known + len(task.novel)
    for split, member in (("train", task.is_train), ("test", ~task.is_train)):
        truth = np.where(member, task.eval_labels, -1)
        counts = confusion(truth, index, num_true, len(into))
        known, novel = counts[:num_known], counts[num_known:]
        given = novel[:, num_known:].copy()
        given[:, [i - num_known for i in gone]] = 0
        right = matched_counts(given, hungarian(given)).sum()
        for name, rows, correct in (
            ("known", known, np.trace(known)),
            ("novel", novel, right),
        ):
            if rows.sum():
                found[f"{split}/{name}/task_agnostic_strict/acc/best"] = (
                    correct / rows.sum()
                )
            if rows.sum() and gone:
                found[f"{split}/{name}/rejected"] = rows[:, gone].sum() / rows.sum()
    return found


def assert_agree(run: Path) -> None:
    """Predictions, the model in Python, metrics, card and report are of the same
    classes.
    """
    task, table = task_of(run), pq.read_table(run / "predictions")
    model = api.load(run)
    into = {c.index: c.into for c in model.classes}
    dropped = (
        "rejected-1" if "rejected" in [c.name for c in model.classes] else "rejected",
        "rejected",
    )
    calls = {
        c.index: dropped if c.into is None else (c.name, c.kind) for c in model.classes
    }
    labels = [task.known[i] if i >= 0 else None for i in task.labels]
    assert table["label"].to_pylist() == labels
    index = table["class_index"].to_pylist()
    named = zip(table["class_name"].to_pylist(), table["kind"].to_pylist(), strict=True)
    assert list(named) == [calls[i] for i in index]
    assert not {i for i in index if into[i] not in (None, i)}, "rows of a merged class"

    images = [task.rows.images[i] for i in range(len(task.rows))]
    found = model.predict(images)
    assert (
        found.class_name == table["class_name"].to_pylist()
        and found.kind == table["kind"].to_pylist()
    )
    np.testing.assert_allclose(
        found.probability, table["probability"].to_numpy(), atol=1e-5
    )
    np.testing.assert_allclose(found.probabilities.sum(axis=1), 1, atol=1e-5)

    metrics = json.loads((run / "metrics.json").read_text())
    expected = accuracies(table, task, into)
    assert {key: metrics.get(key) for key in expected} == pytest.approx(expected)
    assert any("rejected" in key for key in metrics) == (None in into.values())
    card = (run / "model" / "README.md").read_text()
    table_of_card = card.split("## Measured")[1].split("| accuracy, %")[1].splitlines()
    (aware,) = (line for line in table_of_card if line.startswith("| Task-aware |"))
    at = table_of_card[0].split(" | ").index("training images: known")
    assert (
        aware.split(" | ")[at]
        == f"{100 * metrics['train/known/task_aware/acc/best']:.1f}"
    )
    for c in model.classes:
        assert (f"`{c.name}` dropped" in card) == (c.into is None)
        target = None if c.into in (None, c.index) else model.classes[c.into].name
        assert target is None or f"`{c.name}` merged into {target}" in card

    page = (run / "report.html").read_text()
    unlabeled = task.is_train & (task.labels < 0)
    pattern = (
        r'id="class-(\w+)">\s*<h4>.*?title="(.*?)".*?<span class="dim">([\d,]+) images'
    )
    cards = {
        (i, name): int(num.replace(",", ""))
        for i, name, num in re.findall(pattern, page)
    }
    rows = np.bincount(
        np.array(index)[unlabeled], minlength=len(model.classes)
    ).tolist()
    expected = {
        (str(i), c.name): rows[i]
        for i, c in enumerate(model.classes)
        if c.into == i and c.kind == "novel"
    }
    if rejected := sum(rows[i] for i, target in into.items() if target is None):
        expected[dropped[::-1]] = rejected
    known = [str(c.index) for c in model.classes if c.kind == "known"]
    assert {key: num for key, num in cards.items() if key[0] not in known} == expected


@pytest.mark.slow
def test_everything_agrees_after_each_edit(run):
    """Kills: metrics, report, card that know of no merge; dropped rows handed to
    neighbors, or right.
    """
    before = pq.read_table(run / "predictions").to_pandas()
    a, b, *_ = before.class_index[before.kind == "novel"].value_counts().index
    first = (run / "metrics.json").read_bytes()
    for change in (
        ["--rename", f"{a}=nine"],
        {b: "merge into nine"},
        {a: "drop", b: "merge into 3"},
        {a: "drop"},
    ):
        edit(run, change)
        assert_agree(run)
    now = pq.read_table(run / "predictions").to_pandas()
    assert (now.kind == "rejected").equals(before.class_index == a) and (
        now.kind == "rejected"
    ).sum() > 10
    assert now.class_index.equals(before.class_index)  # nobody else's class changes
    metrics = (run / "metrics.json").read_bytes()
    uno("evaluate", run)
    assert (run / "metrics.json").read_bytes() == metrics != first
    edit(run, {})
    assert (run / "metrics.json").read_bytes() == first


@pytest.mark.parametrize("last", ["merge into 3", "drop"])
def test_no_discovered_class_is_left(run, last):
    """Kills: chance of matching no cluster; a report and a card of none."""
    uno("classes", run)
    edit(run, dict.fromkeys(range(5, 9), "merge into 3") | {9: last})
    assert_agree(run)


@pytest.mark.release
def test_an_export_in_the_run_follows(run, capsys, monkeypatch):
    """Kills: an exported program left with the classes of before. What programs
    compute is tested there.
    """

    def fake(model, format):
        if format == "onnx":
            raise ConfigError("no onnx")
        return json.dumps([c.into for c in model.classes]).encode()

    monkeypatch.setattr("uno.session.pipeline.export", fake)
    for name in ("model.pt2", "model.onnx"):
        (run / "model" / name).write_bytes(b"before")
    uno("classes", run)
    edit(run, {5: "merge into 4", 6: "drop"})
    assert json.loads((run / "model" / "model.pt2").read_text())[4:8] == [4, 4, None, 7]
    assert (
        "model/model.onnx was not updated and still has the previous classes: no onnx"
        in capsys.readouterr().out
    )


@pytest.mark.slow
def test_an_edit_that_was_cut_short_is_finished_by_the_same_command(run, monkeypatch):
    """Kills: stale metrics taken for those of the new classes."""
    uno("classes", run)
    monkeypatch.setattr("uno.session.backend.evaluate_run", lambda *_: 1 / 0)
    write_actions(run, {5: "drop"})
    with pytest.raises(AssertionError):
        uno("classes", run, "--apply")
    monkeypatch.undo()
    uno("classes", run, "--apply")
    assert_agree(run)


def test_data_that_is_gone_stops_an_edit_before_anything_changes(
    run, monkeypatch, capsys
):
    uno("classes", run)
    write_actions(run, {5: "drop"})
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}

    def gone(_):
        raise ConfigError("the images are gone")

    monkeypatch.setattr("uno.session.data.read_rows", gone)
    assert "the images are gone" in refused(capsys, 2, "classes", run, "--apply")
    assert {
        path: path.read_bytes() for path in run.rglob("*") if path.is_file()
    } == before


@pytest.mark.slow
def test_the_session_of_the_examples(tmp_path, monkeypatch, capsys):
    """``examples/session.sh``, line by line in this process; every part of the run
    agrees after each.
    """
    known = write_images(tmp_path / "known", dict.fromkeys(("cat", "dog", "emu"), 20))
    pile = write_images(tmp_path, {"pile": 80})
    run = tmp_path / "run"
    for name, value in {
        "KNOWN": known,
        "UNLABELED": pile / "pile",
        "RUN": run,
        "NUM": 4,
    }.items():
        monkeypatch.setenv(name, str(value))
    lines = [
        line
        for line in (ROOT / "examples" / "session.sh").read_text().splitlines()
        if line[:4] in ("uno ", "sed ")
    ]
    assert len(lines) == 11
    for line in lines:
        if line.startswith("sed"):
            before = (run / "classes.yaml").read_text()
            subprocess.run(["sh", "-ec", line], check=True)
            assert (run / "classes.yaml").read_text() != before
            continue
        words = os.path.expandvars(
            line.removeprefix("uno ").replace('"$@"', " ".join(SMALL))
        )
        uno(*shlex.split(words))
        if run.exists():
            assert_agree(run)
    table = pq.read_table(tmp_path / "run-sorted" / "predictions").to_pandas()
    own = pq.read_table(run / "predictions").to_pandas()
    assert (
        table.class_name.to_list() == own.class_name[own.uri.isin(table.uri)].to_list()
    )
    assert not {"novel-1", "novel-2", "novel-3"} & set(table.class_name)


def test_known_classes_may_have_the_names_of_discovered_ones(tmp_path, capsys):
    """A name means one class in predictions, classes.yaml, report, folders and
    exported models.
    """
    run = tmp_path / "run"
    source = write_images(
        tmp_path / "in", {"novel-1": 20, "rejected": 20, "x": 20, "y": 20}
    )
    data = [
        "--data",
        f"folder:{source}",
        "--known-classes",
        "novel-1,rejected",
        "--limit",
        "80",
    ]
    data += ["--batch-size", "20", "--discover.epochs", "1"]
    uno("discover", *SMALL, *data, "--output", run)
    (next_name,) = re.findall(r"--rename (\S+)=NAME", capsys.readouterr().out)
    assert next_name in ("novel-2", "novel-3")
    uno("classes", run)
    uno("classes", run, "--rename", "3=owl")
    edit(run, {2: "drop"})
    assert_agree(run)
    uno("predict", run, "--data", source, "--folders", "--output", tmp_path / "out")
    names = [c.name for c in api.load(run).classes]
    assert names == ["novel-1", "rejected", "novel-2", "owl"]
    folders = {
        path.name for path in (tmp_path / "out" / "by_class").iterdir() if path.is_dir()
    }
    assert folders <= {"000-novel-1", "001-rejected", "rejected", "003-owl"}


def test_an_edit_predicts_no_other_images_than_the_runs(tmp_path, capsys):
    """Another image was added, or an image overwritten by one of the same size. Kills:
    a table of two data sets.
    """
    source, run = tmp_path / "in", tmp_path / "run"
    paths = [source / f"{'abcd'[i // 20]}" / f"{i}.bmp" for i in range(80)]
    for seed, path in enumerate(paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(pixels(seed), "BMP"))
    data = [
        "--data",
        f"folder:{source}",
        "--known-classes",
        "a,b",
        "--batch-size",
        "20",
    ]
    uno("discover", *SMALL, *data, "--discover.epochs", "1", "--output", run)
    uno("classes", run)
    before = pq.read_table(run / "predictions")
    write_actions(run, {2: "drop"})
    more = source / "d" / "80.bmp"
    more.write_bytes(encoded(pixels(80), "BMP"))
    assert "fingerprint" in refused(capsys, 2, "classes", run, "--apply")
    more.unlink()
    paths[5].write_bytes(encoded(pixels(999), "BMP"))
    assert "a/5.bmp" in refused(capsys, 2, "classes", run, "--apply")
    assert pq.read_table(run / "predictions") == before
