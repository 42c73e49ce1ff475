"""Runs that lose images, and runs whose rows cannot be enough: refused before work."""

import json

import numpy as np
import pytest
from safetensors.torch import save_file

import uno
from tests.uno.data.builders import write_images
from uno.data import features
from uno.data.embeddings import given_vectors
from uno.encoders.build import build_encoder
from uno.errors import ConfigError
from uno.runs import run
from uno.session.configure import configure

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


def write_folders(root, classes="ab", new=12):
    """Write known classes of eight images each and ``new`` unlabeled images."""
    names = [f"known/{name}/{i:02}.png" for name in classes for i in range(8)]
    write_images(root, [*names, *(f"new/{i:02}.png" for i in range(new))])
    return {
        "labeled": str(root / "known"),
        "unlabeled": str(root / "new"),
        "num_novel": 2,
    }


def damage(path):
    """Cut an image in two, so that its header is fine and its pixels are not."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def settings_of(kind, root):
    """Return the settings of a run: scratch, heads on frozen features, or choice."""
    if kind == "scratch":
        return {"preset": "scratch", "model.encoder": "resnet_small"} | SHORT
    values = {"preset": "photos", "model.encoder": ENCODER, "image_size": 8}
    config = configure(values | {"data.source": "folder:x"})
    weights = root / "encoder.safetensors"
    save_file(build_encoder(config.model).state_dict(), weights)
    values |= {"weights": str(weights), "compute.cache": str(root / "cache")}
    values |= {key: SHORT[key] for key in SHORT if key.startswith(("data.", "compute"))}
    if kind == "heads":
        values |= {"method": "uno", "augment.num_cached_views": 2}
        values |= {key: SHORT[key] for key in SHORT if key.startswith("discover")}
    return values


@pytest.mark.parametrize("kind", ["scratch", "heads", "clustering"])
def test_an_unreadable_image_is_left_out_and_the_run_goes_on(tmp_path, capsys, kind):
    folders = write_folders(tmp_path)
    settings = folders | settings_of(kind, tmp_path)
    damage(tmp_path / "new" / "03.png")
    output = tmp_path / "run"
    model = uno.discover(**settings, output=str(output), quiet=False)
    assert model.metrics is not None and (output / "metrics.json").exists()
    lines = (output / "bad_samples.jsonl").read_text().splitlines()
    bad = [json.loads(line) for line in lines]
    assert [entry["id"] for entry in bad] == ["unlabeled/03.png"]
    said = capsys.readouterr().out
    assert ("batch size: 27" in said) == (kind != "clustering")
    again = uno.discover(**settings, output=str(output))
    assert again.model_hash == model.model_hash
    assert "is finished; nothing is trained again" in capsys.readouterr().out


def test_a_run_that_lost_an_image_resumes(tmp_path, monkeypatch):
    """The second start derives the same batch size from the same rows."""
    settings = write_folders(tmp_path) | settings_of("scratch", tmp_path)
    damage(tmp_path / "new" / "03.png")
    whole = uno.discover(**settings, output=str(tmp_path / "whole"), quiet=True)
    before = run.run_phase

    def stopped(config, name, *rest):
        if name == "discover":
            raise RuntimeError("killed")
        return before(config, name, *rest)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
        patch.setattr(run, "run_phase", stopped)
        uno.discover(**settings, output=str(tmp_path / "killed"), quiet=True)
    resumed = uno.discover(**settings, output=str(tmp_path / "killed"), quiet=True)
    assert resumed.metrics == whole.metrics


@pytest.mark.parametrize("kind", ["scratch", "heads"])
def test_a_given_batch_size_stays_and_the_line_names_the_fix(tmp_path, kind):
    settings = write_folders(tmp_path) | settings_of(kind, tmp_path)
    damage(tmp_path / "new" / "03.png")
    with pytest.raises(ConfigError) as refused:
        uno.discover(**settings, output=str(tmp_path / "r"), batch_size=28, quiet=True)
    for fact in ("1 unreadable image", "batch_size 28", "works: 27", "--overwrite"):
        assert fact in str(refused.value)


def test_a_known_class_without_a_readable_image_is_named(tmp_path):
    settings = write_folders(tmp_path) | settings_of("clustering", tmp_path)
    for path in (tmp_path / "known" / "b").glob("*.png"):
        damage(path)
    with pytest.raises(ConfigError) as refused:
        output = str(tmp_path / "run")
        allowed = {"data.max_bad_fraction": 0.5}
        uno.discover(**settings | allowed, output=output, quiet=True)
    for fact in ("known class", "no readable training image", "b;"):
        assert fact in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "written", "changes", "output", "facts"),
    [
        (
            "clustering",
            {"new": 4},
            {},
            "run",
            ["clustering", "(4)", "2 known + 2 new", "--setting ncd"],
        ),
        (
            "clustering",
            {"classes": "a"},
            {"num_novel": "auto"},
            "run",
            ["known classes with images, found 1"],
        ),
        # the toy encoder has 16 features
        (
            "heads",
            {"new": 40},
            {"method": "dtc", "num_novel": 17},
            "run",
            ["method dtc", "17", "only 16"],
        ),
        # the directory would be a class without images when the run resumes
        (
            "clustering",
            {},
            {},
            "known/run",
            ["is inside --labeled", "another --output"],
        ),
    ],
)
def test_what_cannot_work_is_refused_before_features_are_computed(
    tmp_path, monkeypatch, kind, written, changes, output, facts
):
    settings = write_folders(tmp_path, **written) | settings_of(kind, tmp_path)
    settings |= changes
    monkeypatch.setattr(features, "cached_features", lambda *_: pytest.fail("late"))
    with pytest.raises(ConfigError) as refused:
        uno.discover(**settings, output=str(tmp_path / output), quiet=True)
    for fact in facts:
        assert fact in str(refused.value)
    assert not (tmp_path / output).exists()


def files_of(folder):
    """Return the content of all files below a folder by name."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize("kind", ["scratch", "clustering"])
def test_a_refused_overwrite_keeps_the_former_run(tmp_path, kind):
    """Too many unreadable images are known only after the new run has begun."""
    settings = write_folders(tmp_path) | settings_of(kind, tmp_path)
    output = tmp_path / "run"
    settings |= {"output": str(output), "quiet": True}
    first = uno.discover(**settings)
    before = files_of(output)
    for number in range(6):
        damage(tmp_path / "new" / f"{number:02}.png")
    with pytest.raises(ConfigError, match="unreadable") as refused:
        uno.discover(**settings, overwrite=True)
    listed = next(path for path in output.glob("*bad_samples.jsonl"))
    assert str(listed) in str(refused.value)
    assert len(listed.read_text().splitlines()) == 6
    listed.unlink()
    assert files_of(output) == before
    assert uno.load(str(output)).model_hash == first.model_hash


def test_overwrite_refuses_inputs_inside_the_former_run(tmp_path):
    """Their files would be moved away before they are read."""
    settings = write_folders(tmp_path) | settings_of("clustering", tmp_path)
    output = tmp_path / "run"
    settings |= {"output": str(output), "quiet": True}
    uno.discover(**settings)
    weights = output / "encoder.safetensors"
    weights.write_bytes((tmp_path / "encoder.safetensors").read_bytes())
    before = files_of(output)
    with pytest.raises(ConfigError, match=r"--weights .* is inside --output .*move it"):
        uno.discover(**settings | {"weights": str(weights)}, overwrite=True)
    assert files_of(output) == before


@pytest.mark.parametrize("kind", ["folder", "vectors"])
def test_a_run_inside_a_source_that_reads_its_subfolders_is_refused(tmp_path, kind):
    write_folders(tmp_path, classes="abc")
    labels = ["a"] * 8 + ["b"] * 8 + [None] * 8
    given_vectors(np.eye(24), labels).store(f"{tmp_path}/known/vectors.parquet")
    output = tmp_path / "known" / "run"
    with pytest.raises(ConfigError, match="read as data the next time"):
        uno.discover(
            data=f"{kind}:{tmp_path}/known",
            known_classes="first:2",
            num_novel=1,
            output=str(output),
            quiet=True,
            **(settings_of("clustering", tmp_path) if kind == "folder" else {}),
        )
    assert not output.exists()
