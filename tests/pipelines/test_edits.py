"""Names, merges and drops, and whether every part of a run says the same after each."""

import json
import os
import re
import shlex
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from pipelines import cli
from tests.pipelines.small import ROOT, SMALL, refused, uno, write_images
from tests.pipelines.test_refusals import checksums
from tests.uno.data.builders import encoded, pixels
from uno.data.files import Storage
from uno.data.sources import read_rows
from uno.data.splits import Task, make_task
from uno.errors import ConfigError
from uno.results.infer import load_classifier
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


def task_of(run: Path) -> Task:
    data = load_classifier(Storage(str(run))).config.data
    return make_task(read_rows(data), data)


def write_actions(run: Path, actions: dict[int, str]) -> None:
    """Write the action of each class into classes.yaml; classes without one stay."""
    path = run / "classes.yaml"
    tree = yaml.safe_load(path.read_text())
    for entry in tree["classes"]:
        entry["action"] = actions.get(entry["index"], "keep")
    path.write_text(yaml.safe_dump(tree))


def edit(run: Path, actions: dict[int, str]) -> None:
    """As a person does it: other actions in the file, and ``--apply``."""
    write_actions(run, actions)
    uno("classes", run, "--apply")


def accuracies(table, task: Task, into: dict[int, int | None]) -> dict[str, float]:
    """Strict accuracy and rejected shares by the table of predictions."""
    index, found = table["class_index"].to_numpy(), {}
    num_known, gone = len(task.known), [i for i, t in into.items() if t is None]
    for split, member in (("train", task.is_train), ("test", ~task.is_train)):
        truth = np.where(member, task.eval_labels, -1)
        counts = confusion(truth, index, num_known + len(task.novel), len(into))
        kept = counts.copy()
        kept[:, gone] = 0
        novel = kept[num_known:, num_known:]
        right = matched_counts(novel, hungarian(novel)).sum()
        for name, rows, correct in (
            ("known", counts[:num_known], np.trace(counts[:num_known])),
            ("novel", counts[num_known:], right),
        ):
            key = f"{split}/{name}"
            if rows.sum():
                found[f"{key}/task_agnostic_strict/acc/best"] = correct / rows.sum()
            if rows.sum() and gone:
                found[f"{key}/rejected"] = rows[:, gone].sum() / rows.sum()
    return found


def assert_agree(run: Path) -> None:
    """Predictions, metrics, card and report are of the same classes.

    Python and ``uno predict`` are compared with the predictions in
    ``tests.test_agreement``.
    """
    task, table = task_of(run), pq.read_table(run / "predictions")
    classes = load_classifier(Storage(str(run))).classes
    into = {c.index: c.into for c in classes}
    is_taken = "rejected" in [c.name for c in classes]
    dropped = "rejected-1" if is_taken else "rejected", "rejected"
    calls = [dropped if c.into is None else (c.name, c.kind) for c in classes]
    labels = [task.known[i] if i >= 0 else None for i in task.labels]
    assert table["label"].to_pylist() == labels
    index = table["class_index"].to_pylist()
    named = zip(table["class_name"].to_pylist(), table["kind"].to_pylist(), strict=True)
    assert list(named) == [calls[i] for i in index]
    assert not {i for i in index if into[i] not in (None, i)}, "rows of a merged class"

    metrics = json.loads((run / "metrics.json").read_text())
    expected = accuracies(table, task, into)
    assert {key: metrics.get(key) for key in expected} == pytest.approx(expected)
    assert any("rejected" in key for key in metrics) == (None in into.values())
    card = (run / "model" / "README.md").read_text()
    known_accuracy = f"{100 * metrics['train/known/task_aware/acc/best']:.1f}"
    assert re.search(rf"^\| Task-aware \|.* {known_accuracy} \|", card, re.M)
    for c in classes:
        assert (f"`{c.name}` dropped" in card) == (c.into is None)
        if c.into not in (None, c.index):
            assert f"`{c.name}` merged into {classes[c.into].name}" in card

    rows = Counter(np.array(index)[task.is_train & (task.labels < 0)].tolist())
    novel = [c for c in classes if c.into == c.index and c.kind == "novel"]
    expected = {(str(c.index), c.name): rows[c.index] for c in novel}
    if rejected := sum(rows[c.index] for c in classes if c.into is None):
        expected[dropped[::-1]] = rejected
    pattern = (
        r'id="class-(\w+)">\s*<h4>.*?title="(.*?)".*?<span class="dim">([\d,]+) images'
    )
    shown = re.findall(pattern, (run / "report.html").read_text())
    known = {str(c.index) for c in classes if c.kind == "known"}
    shown = {(i, name): num for i, name, num in shown if i not in known}
    assert shown == {key: f"{num:,}" for key, num in expected.items()}


@pytest.mark.slow
def test_everything_agrees_after_each_edit(run):
    """Kills: metrics, report, card that know of no merge; dropped rows handed to
    neighbors, or right.
    """
    before = pq.read_table(run / "predictions").to_pandas()
    a, b, *_ = before.class_index[before.kind == "novel"].value_counts().index
    metrics = run / "metrics.json"
    first = metrics.read_bytes()
    uno("classes", run, "--rename", f"{a}=nine")
    assert_agree(run)
    for change in ({b: "merge into nine"}, {a: "drop", b: "merge into 3"}, {a: "drop"}):
        edit(run, change)
        assert_agree(run)
    now = pq.read_table(run / "predictions").to_pandas()
    assert (now.kind == "rejected").equals(before.class_index == a)
    assert now.class_index.equals(before.class_index)  # nobody else's class changes
    edited = metrics.read_bytes()
    uno("evaluate", run)
    assert metrics.read_bytes() == edited != first
    edit(run, {})
    assert metrics.read_bytes() == first


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
        return str([c.into for c in model.classes[4:8]]).encode()

    monkeypatch.setattr("uno.session.pipeline.export", fake)
    for name in ("model.pt2", "model.onnx"):
        (run / "model" / name).write_bytes(b"before")
    uno("classes", run)
    edit(run, {5: "merge into 4", 6: "drop"})
    assert (run / "model" / "model.pt2").read_text() == "[4, 4, None, 7]"
    said = "model.onnx was not updated and still has the previous classes: no onnx"
    assert said in capsys.readouterr().out


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
    before = checksums(run)
    gone = Mock(side_effect=ConfigError("the images are gone"))
    monkeypatch.setattr("uno.session.data.read_rows", gone)
    assert "the images are gone" in refused(capsys, 2, "classes", run, "--apply")
    assert checksums(run) == before


@pytest.mark.slow
def test_the_session_of_the_examples(tmp_path, monkeypatch):
    """``examples/session.sh``, line by line in this process; every part of the run
    agrees after each.
    """
    known = write_images(tmp_path / "known", dict.fromkeys(("cat", "dog", "emu"), 20))
    pile, run = write_images(tmp_path / "pile", {"": 80}), tmp_path / "run"
    values = {"KNOWN": known, "UNLABELED": pile, "RUN": run, "NUM": 4}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    text = (ROOT / "examples" / "session.sh").read_text()
    for line in re.findall(r"^(?:uno|sed) .*", text, re.M):
        if line.startswith("sed"):
            subprocess.run(["sh", "-ec", line], check=True)
            continue
        words = os.path.expandvars(line.replace('"$@"', " ".join(SMALL)))
        uno(*shlex.split(words)[1:])
        if run.exists():
            assert_agree(run)
    names = {c.name: c for c in load_classifier(Storage(str(run))).classes}
    assert names["novel-2"].into == names["first"].index
    assert names["novel-3"].into is None
    table = pq.read_table(tmp_path / "run-sorted" / "predictions").to_pandas()
    own = pq.read_table(run / "predictions").to_pandas().set_index("uri")
    assert table.class_name.to_list() == own.class_name[table.uri].to_list()


def train_on(source: Path, known: str, run: Path) -> None:
    """Train a small run on the images of a folder."""
    words = ["--data", f"folder:{source}", "--known-classes", known]
    words += ["--batch-size", "20", "--discover.epochs", "1"]
    uno("discover", *SMALL, *words, "--output", run)


def test_known_classes_may_have_the_names_of_discovered_ones(tmp_path, capsys):
    """A name means one class in predictions, classes.yaml, report, folders and
    exported models.
    """
    run, counts = tmp_path / "run", dict.fromkeys(("novel-1", "rejected", "x", "y"), 20)
    source = write_images(tmp_path / "in", counts)
    train_on(source, "novel-1,rejected", run)
    assert re.search(r"--rename novel-[23]=NAME", capsys.readouterr().out)
    uno("classes", run)
    uno("classes", run, "--rename", "3=owl")
    edit(run, {2: "drop"})
    assert_agree(run)
    uno("predict", run, "--data", source, "--folders", "--output", tmp_path / "out")
    names = [c.name for c in load_classifier(Storage(str(run))).classes]
    assert names == ["novel-1", "rejected", "novel-2", "owl"]
    folders = {path.parent.name for path in (tmp_path / "out").rglob("*.png")}
    assert folders <= {"000-novel-1", "001-rejected", "rejected", "003-owl"}


def test_an_edit_predicts_no_other_images_than_the_runs(tmp_path, capsys):
    """Another image was added, or an image overwritten by one of the same size. Kills:
    a table of two data sets.
    """
    source, run = tmp_path / "in", tmp_path / "run"
    for i in range(80):
        path = source / "abcd"[i // 20] / f"{i}.bmp"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(pixels(i), "BMP"))
    train_on(source, "a,b", run)
    uno("classes", run)
    before = checksums(run / "predictions")
    write_actions(run, {2: "drop"})
    more = source / "d" / "80.bmp"
    more.write_bytes(encoded(pixels(80), "BMP"))
    assert "fingerprint" in refused(capsys, 2, "classes", run, "--apply")
    more.unlink()
    (source / "a" / "5.bmp").write_bytes(encoded(pixels(999), "BMP"))
    assert "a/5.bmp" in refused(capsys, 2, "classes", run, "--apply")
    assert checksums(run / "predictions") == before
