"""A command that is refused has changed no byte of what is there."""

import contextlib
import hashlib
import shutil

import numpy as np
import pytest

import uno
from pipelines import cli
from tests.pipelines.small import SMALL, vectors_of, write_images
from tests.tune.tiny import TINY, fake_sweep, tiny_options
from uno.errors import ConfigError

ENCODER = ["--model.encoder", "tests.uno.toy_encoders:vit", "--image-size", "8"]
GIVEN = {"num_novel": 2, "quiet": True}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """Make one output of every command below one folder, which the tests share."""
    root = tmp_path_factory.mktemp("outputs")
    vectors, labels = vectors_of()
    short = ["--pretrain.epochs", "1", "--discover.epochs", "2", "--output", "run"]
    commands = [
        ["discover", *SMALL, *short],
        ["predict", "run", "--data", "digits", "--limit", "9", "--output", "found"],
        ["data", "pack", "--data", "folder:photos", "--output", "pack"],
        ["classes", "run"],
    ]
    with contextlib.chdir(root):
        write_images(root / "photos", {"a": 12, "b": 12, "c": 12})
        assert [cli.main(argv) for argv in commands] == [0, 0, 0, 0]
        uno.discover(embeddings=vectors, labels=labels, output="cells", **GIVEN)
        fake_sweep(root / "sweep", tiny_options(root / "sweep"), [{"overrides": {}}])
    np.save(root / "vectors.npy", vectors)
    table = root / "cells" / "predictions" / "part-000000.parquet"
    shutil.copyfile(table, root / "table.parquet")
    for name in ("other/notes.txt", "foreign/predictions/a.parquet"):
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text("not ours")
    (root / "bad.yaml").write_text("classes: [nothing]\n")
    return root


def checksums(root):
    """Return the SHA-256 of every file below a folder, by its path."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


DISCOVER = ["discover", *SMALL, "--pretrain.epochs", "1", "--discover.epochs", "2"]
REFUSED = {
    "discover: other settings": [*DISCOVER, "--output", "run", "--seed", "7"],
    "discover: other data": [*DISCOVER, "--output", "run", "--data.limit", "150"],
    "discover: not a run": [*DISCOVER, "--output", "other"],
    "discover: not a run, overwrite": [*DISCOVER, "--output", "other", "--overwrite"],
    "discover: batch size, overwrite": [
        *[*DISCOVER, "--output", "run", "--overwrite"],
        *["--train.batch-size", "5000"],
    ],
    "discover: num_novel, overwrite": [
        *[*DISCOVER, "--output", "run", "--overwrite"],
        *["--num-novel", "5000"],
    ],
    "discover: logger, overwrite": [
        *[*DISCOVER, "--output", "run", "--overwrite"],
        *["--train.report-to", "nowhere"],
    ],
    "discover: weights, overwrite": [
        *[*DISCOVER, "--output", "run", "--overwrite"],
        *["--weights", "gone.safetensors"],
    ],
    "discover: auto, other settings": [
        *[*DISCOVER, "--output", "run", "--num-novel", "auto", "--seed", "7"],
    ],
    "discover: auto, other data": [
        *[*DISCOVER, "--output", "run", "--num-novel", "auto", "--data.limit", "150"],
    ],
    "discover: auto, not a run": [
        *[*DISCOVER, "--output", "other", "--num-novel", "auto"],
    ],
    "dry run, auto": [*DISCOVER, "--dry-run", "--num-novel", "auto", "--output", "run"],
    "pretrain: other settings": [
        "pretrain",
        *DISCOVER[1:],
        "--seed",
        "7",
        "--output",
        "run",
    ],
    "evaluate: not a run": ["evaluate", "other"],
    "evaluate: no such device": ["evaluate", "run", "--device", "tpu"],
    "predict: no output": ["predict", "run", "--data", "digits"],
    "predict: other data": [
        "predict",
        "run",
        "--data",
        "folder:photos",
        "--output",
        "found",
    ],
    "predict: not a table": [
        "predict",
        "run",
        "--data",
        "digits",
        "--output",
        "foreign",
    ],
    "predict: into another run": [
        "predict",
        "run",
        "--data",
        "digits",
        "--output",
        "cells",
    ],
    "predict: own data into another run": ["predict", "run", "--output", "cells"],
    "predict: data gone": [
        "predict",
        "run",
        "--data",
        "folder:gone",
        "--output",
        "found",
    ],
    "predict: vectors": [
        "predict",
        "run",
        "--data",
        "vectors:vectors.npy",
        "--output",
        "found",
    ],
    "predict: folders of vectors": ["predict", "cells", "--folders"],
    "report: not a run": ["report", "other"],
    "report: no such device": ["report", "run", "--device", "tpu"],
    "export: no such format": ["export", "run", "--format", "tflite"],
    "export: vectors have no encoder": ["export", "cells", "--format", "encoder"],
    "export: not a run": ["export", "other", "--format", "pt2"],
    "classes: no such class": ["classes", "run", "--rename", "novel-77=x"],
    "classes: a known class": ["classes", "run", "--rename", "0=x"],
    "classes: a taken name": ["classes", "run", "--rename", "5=novel-2"],
    "classes: a damaged file": ["classes", "run", "--apply", "--file", "bad.yaml"],
    "classes: no such file": ["classes", "run", "--apply", "--file", "gone.yaml"],
    "embed: not ours": [
        *["embed", "--data", "folder:photos", *ENCODER],
        *["--weights", "gone.safetensors", "--output", "table.parquet"],
    ],
    "pack: other data": ["data", "pack", "--data", "digits", "--output", "pack"],
    "pack: not a pack": [
        "data",
        "pack",
        "--data",
        "folder:photos",
        "--output",
        "other",
    ],
    "pack: a run": ["data", "pack", "--data", "folder:photos", "--output", "run"],
    "pack: vectors": [
        "data",
        "pack",
        "--data",
        "vectors:vectors.npy",
        "--output",
        "pack",
    ],
    "tune: other settings": ["tune", *TINY, "--output", "sweep", "--folds", "1"],
    "tune: other data": ["tune", *TINY, "--output", "sweep", "--data.limit", "150"],
    "tune: a run": ["tune", *TINY, "--output", "run"],
    "tune: not a sweep": ["tune", *TINY, "--output", "other"],
    "tune: batch size": ["tune", *TINY, "--output", "sweep", "--batch-size", "190"],
    "tune: report of a run": ["tune", "--report", "--output", "run"],
    "estimate: too few classes": [
        *["estimate-classes", "--data", "digits", "--known-classes", "first:2"],
        *["--output", "run"],
    ],
    "doctor: a directory without a cluster": ["doctor", "other"],
}


@pytest.mark.parametrize("argv", REFUSED.values(), ids=REFUSED.keys())
def test_a_refused_command_changes_nothing(outputs, monkeypatch, capsys, argv):
    monkeypatch.chdir(outputs)
    before = checksums(outputs)
    assert cli.main(argv) in (2, 4)
    assert "internal" not in capsys.readouterr().err
    assert checksums(outputs) == before


OTHERS = {
    "other embeddings": (lambda v, y: (-v, y), {}),
    "fewer rows": (lambda v, y: (v[:90], y[:90]), {}),
    "other labels": (lambda v, y: (v, [None, *y[1:]]), {}),
    "other settings": (lambda v, y: (v, y), {"seed": 7}),
}
WRONG = {
    "other lengths": (lambda v, y: (v, y[1:]), {}),
    "batch size": (lambda v, y: (-v, y), {"method": "uno", "batch_size": 5000}),
    "number of classes": (lambda v, y: (-v, y), {"num_novel": 5000}),
    "unusable vectors": (lambda v, y: (v * np.nan, y), {}),
}
CASES = {
    **{name: (*case, False) for name, case in (OTHERS | WRONG).items()},
    **{f"{name}, overwrite": (*case, True) for name, case in WRONG.items()},
}


@pytest.mark.parametrize(
    ("change", "settings", "overwrite"), CASES.values(), ids=CASES.keys()
)
def test_refused_embeddings_change_nothing(
    outputs, monkeypatch, change, settings, overwrite
):
    """Vectors may exist nowhere else than beside their run. The refused ones stay."""
    monkeypatch.chdir(outputs)
    before = checksums(outputs)
    vectors, labels = change(*vectors_of())
    given = GIVEN | settings | {"output": "cells", "overwrite": overwrite}
    with pytest.raises(ConfigError):
        uno.discover(embeddings=vectors, labels=labels, **given)
    assert checksums(outputs).items() >= before.items()


def test_overwritten_embeddings_are_stored_beside_the_earlier_ones(tmp_path):
    """The same call goes on with its file."""
    vectors, labels = vectors_of()
    output = tmp_path / "run"
    first = uno.discover(embeddings=vectors, labels=labels, output=output, **GIVEN)
    (stored,) = tmp_path.glob("run-vectors-*.parquet")
    again = uno.discover(embeddings=vectors, labels=labels, output=output, **GIVEN)
    assert again.model_hash == first.model_hash
    assert [*tmp_path.glob("run-vectors-*.parquet")] == [stored]
    more = GIVEN | {"overwrite": True}
    other = uno.discover(embeddings=-vectors, labels=labels, output=output, **more)
    assert other.model_hash != first.model_hash
    assert len([*tmp_path.glob("run-vectors-*.parquet")]) == 2
    assert cli.main(["evaluate", str(output)]) == 0
