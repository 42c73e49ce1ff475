"""Runs that lose images, and runs whose rows cannot be enough: refused before work."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import save_file

import uno
from tests.uno.data.builders import write_images
from uno.data import features
from uno.data.embeddings import given_vectors
from uno.encoders.build import build_encoder
from uno.errors import ConfigError, Interrupted
from uno.session.configure import configure
from uno.training import LocalWorker

ENCODER = "tests.uno.toy_encoders:vit"
SHORT = {
    "model.width": 4,
    "model.num_heads": 1,
    "model.hidden_dim": 16,
    "model.projection_dim": 8,
    "pretrain.epochs": 1,
    "pretrain.warmup_epochs": 0,
    "discover.epochs": 1,
    "discover.warmup_epochs": 0,
    "compute.threads": 1,
    "data.validation_fraction": 0,
    "data.max_bad_fraction": 0.1,
}


def damage(path):
    """Cut an image in two, so that its header is fine and its pixels are not."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def settings_of(kind, root, classes="ab", new=12):
    """Write known classes of eight images each and ``new`` unlabeled images, and return
    the settings of a run: scratch, heads on frozen features, or clustering.
    """
    names = [f"known/{name}/{i:02}.png" for name in classes for i in range(8)]
    write_images(root, [*names, *(f"new/{i:02}.png" for i in range(new))])
    values = {
        "labeled": str(root / "known"),
        "unlabeled": str(root / "new"),
        "num_novel": 2,
        "output": str(root / "run"),
        "quiet": True,
    }
    if kind == "scratch":
        return values | {"preset": "scratch", "model.encoder": "resnet_small"} | SHORT
    values |= {"preset": "photos", "model.encoder": ENCODER, "image_size": 8}
    weights = root / "encoder.safetensors"
    config = configure({"data.source": "folder:x", "model.encoder": ENCODER})
    save_file(build_encoder(config.model).state_dict(), weights)
    values |= {"weights": str(weights), "compute.cache": str(root / "cache")}
    values |= {key: SHORT[key] for key in SHORT if key.startswith(("data.", "compute"))}
    if kind == "heads":
        values |= {"method": "uno", "augment.num_cached_views": 2}
        values |= {key: SHORT[key] for key in SHORT if key.startswith("discover")}
    return values


@pytest.mark.parametrize("kind", ["scratch", "heads", "clustering"])
def test_an_unreadable_image_is_left_out_and_the_run_goes_on(tmp_path, capsys, kind):
    settings = settings_of(kind, tmp_path) | {"quiet": False}
    damage(tmp_path / "new" / "03.png")
    model = uno.discover(**settings)
    assert model.metrics is not None and (tmp_path / "run" / "metrics.json").exists()
    (bad,) = (tmp_path / "run" / "bad_samples.jsonl").read_text().splitlines()
    assert json.loads(bad)["id"] == "unlabeled/03.png"
    said = capsys.readouterr().out
    assert ("batch size: 27" in said) == (kind != "clustering")
    assert uno.discover(**settings).model_hash == model.model_hash
    assert "is finished; nothing is trained again" in capsys.readouterr().out


def test_a_run_that_lost_an_image_resumes(tmp_path, monkeypatch):
    """The second start derives the same batch size from the same rows."""
    settings = settings_of("scratch", tmp_path)
    damage(tmp_path / "new" / "03.png")
    whole = uno.discover(**settings | {"output": str(tmp_path / "whole")})
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(LocalWorker, "should_stop", lambda self, step: True)
        uno.discover(**settings)
    assert uno.discover(**settings).metrics == whole.metrics


@pytest.mark.parametrize("kind", ["scratch", "heads"])
def test_a_given_batch_size_stays_and_the_line_names_the_fix(tmp_path, kind):
    settings = settings_of(kind, tmp_path)
    damage(tmp_path / "new" / "03.png")
    with pytest.raises(ConfigError) as refused:
        uno.discover(**settings, batch_size=28)
    for fact in ("1 unreadable image", "batch_size 28", "works: 27", "--overwrite"):
        assert fact in str(refused.value)


def test_a_known_class_without_a_readable_image_is_named(tmp_path):
    settings = settings_of("clustering", tmp_path) | {"data.max_bad_fraction": 0.5}
    for path in (tmp_path / "known" / "b").glob("*.png"):
        damage(path)
    with pytest.raises(ConfigError, match=r"known class .*no readable training.* b;"):
        uno.discover(**settings)


@pytest.mark.parametrize(
    ("kind", "written", "changes", "facts"),
    [
        (
            "clustering",
            {"new": 4},
            {},
            ["clustering", "(4)", "2 known + 2 new", "--setting ncd"],
        ),
        (
            "clustering",
            {"classes": "a"},
            {"num_novel": "auto"},
            ["known classes with images, found 1"],
        ),
        # the toy encoder has 16 features
        (
            "heads",
            {"new": 40},
            {"method": "dtc", "num_novel": 17},
            ["method dtc", "17", "only 16"],
        ),
    ],
)
def test_what_cannot_work_is_refused_before_features_are_computed(
    tmp_path, monkeypatch, kind, written, changes, facts
):
    settings = settings_of(kind, tmp_path, **written) | changes
    monkeypatch.setattr(features, "cached_features", lambda *_: pytest.fail("late"))
    with pytest.raises(ConfigError) as refused:
        uno.discover(**settings)
    for fact in facts:
        assert fact in str(refused.value)
    assert not Path(settings["output"]).exists()


def files_of(folder):
    """Return the content of all files below a folder by name."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize("kind", ["scratch", "clustering"])
def test_a_refused_overwrite_keeps_the_former_run(tmp_path, kind):
    """Too many unreadable images are known only after the new run has begun."""
    settings, output = settings_of(kind, tmp_path), tmp_path / "run"
    uno.discover(**settings)
    before = files_of(output)
    for number in range(6):
        damage(tmp_path / "new" / f"{number:02}.png")
    with pytest.raises(ConfigError, match="unreadable") as refused:
        uno.discover(**settings, overwrite=True)
    (listed,) = output.glob("*bad_samples.jsonl")
    assert str(listed) in str(refused.value)
    assert len(listed.read_text().splitlines()) == 6
    listed.unlink()
    assert files_of(output) == before


def test_overwrite_refuses_inputs_inside_the_former_run(tmp_path):
    """Their files would be moved away before they are read."""
    settings, output = settings_of("clustering", tmp_path), tmp_path / "run"
    uno.discover(**settings)
    weights = shutil.copy(settings["weights"], output)
    before = files_of(output)
    with pytest.raises(ConfigError, match=r"--weights .* is inside --output .*move it"):
        uno.discover(**settings | {"weights": weights}, overwrite=True)
    assert files_of(output) == before


@pytest.mark.parametrize("kind", ["folder", "classes", "vectors"])
def test_a_run_inside_a_source_that_reads_its_subfolders_is_refused(tmp_path, kind):
    settings = settings_of("clustering", tmp_path, classes="abc")
    labels = ["a"] * 8 + ["b"] * 8 + [None] * 8
    given_vectors(np.eye(24), labels).store(f"{tmp_path}/known/vectors.parquet")
    names = ("preset", "model.encoder", "weights", "compute.cache", "image_size")
    encoder = {name: settings[name] for name in names if kind != "vectors"}
    with pytest.raises(ConfigError, match="read as data the next time"):
        uno.discover(
            data=f"{kind}:{tmp_path}/known",
            known_classes="first:2",
            num_novel=1,
            output=f"{tmp_path}/known/run",
            quiet=True,
            **encoder,
        )
    assert not (tmp_path / "known" / "run").exists()


@pytest.mark.parametrize("inside", ["labeled", "unlabeled"])
def test_a_run_inside_one_of_two_folders_is_refused(tmp_path, inside):
    settings = settings_of("clustering", tmp_path, classes="abc")
    names = ("preset", "model.encoder", "weights", "compute.cache", "image_size")
    folders = {"labeled": f"{tmp_path}/known", "unlabeled": f"{tmp_path}/unknown"}
    shutil.copytree(tmp_path / "known", tmp_path / "unknown")
    output = Path(folders[inside]) / "run"
    with pytest.raises(ConfigError, match=f"inside --{inside} .* the next time"):
        uno.discover(
            **folders,
            num_novel=1,
            output=str(output),
            quiet=True,
            **{name: settings[name] for name in names},
        )
    assert not output.exists()
