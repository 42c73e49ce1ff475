"""``uno predict``, ``uno classes`` and ``uno export`` as a person runs them."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock, Mock

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch

from pipelines import backend, cli, ray_env
from tests.pipelines.small import refused, uno, wait_for, write_images
from tests.uno.data.builders import encoded, pixels
from tests.uno.data.test_tar import write_tar
from tests.uno.models import write_damaged, write_digits, write_model
from tests.uno.small_run import SMALL as SMALL_RUN
from uno.config import override
from uno.data.files import Storage
from uno.data.sources import read_digits
from uno.presets import preset
from uno.results.infer import load_classifier
from uno.results.predictions import FOLDER, read_columns
from uno.session.backend import LocalBackend, choose_backend
from uno.session.pipeline import discover
from uno.session.predict import predict_run
from uno.session.run import Run


@pytest.fixture
def run(tmp_path) -> Path:
    """A trained model of the digits with random weights."""
    write_model(tmp_path / "run")
    return tmp_path / "run"


def table_of(folder: Path) -> pa.Table:
    return pq.read_table(folder / FOLDER)


def test_predict_all_digits_and_again(run, tmp_path, capsys):
    out = tmp_path / "out"
    command = ["predict", run, "--data", "digits", "--embedding", "--output", out]
    uno(*command)
    assert "1,797 images, 1,797 ok, 0 bad" in capsys.readouterr().out
    assert len(table_of(out)) == 1797
    part = out / FOLDER / "part-000000.parquet"
    written = part.stat().st_mtime_ns
    uno(*command)
    assert part.stat().st_mtime_ns == written


@pytest.mark.parametrize("kind", ["folder", "table"])
def test_overwritten_images_are_predicted_again(run, tmp_path, caplog, kind):
    """Of the same names and sizes, to the same place. Kills: a table of images that
    are gone.
    """
    source, tables = tmp_path / "in", []
    source.mkdir()
    (source / "rows.csv").write_text("path\n0.bmp\n")
    data = source / "rows.csv" if kind == "table" else f"folder:{source}"
    for seed in (0, 100, None):
        if seed is not None:
            (source / "0.bmp").write_bytes(encoded(pixels(seed), "BMP"))
        uno("predict", run, "--data", data, "--output", tmp_path / "out")
        tables.append(table_of(tmp_path / "out")["probability"])
    assert tables[0] != tables[1] == tables[2]
    assert caplog.text.count("images were written to since they were predicted") == 1


class Workers(LocalBackend):
    """Workers that are this process, and the numbers of rows that they predict."""

    after_training = backend.RayBackend.after_training

    def __init__(self) -> None:
        self.predicted: list[int] = []

    def predict(self, run, model, writer, show):
        self.predicted.append(writer.num_rows)
        return super().predict(run, model, writer, show)


def test_workers_predict_the_rows_of_a_large_run(tmp_path, monkeypatch):
    """Kills: a head that runs the encoder of a large run."""
    monkeypatch.setattr(backend, "RAY_PAYS_ROWS", 1)
    workers, run = Workers(), tmp_path / "run"
    monkeypatch.setattr(backend, "RayBackend", lambda: workers)
    settings = {
        **SMALL_RUN,
        "data.loading": "streaming",
        "compute.num_workers": 1,
        "compute.threads": 1,
        "pretrain.epochs": 1,
        "discover.epochs": 1,
        "output": str(run),
    }
    discover(override(preset("digits"), settings), settings)
    assert workers.predicted == [400] and (run / "report.html").exists()


@pytest.mark.parametrize(
    ("num_rows", "is_decoded", "address", "is_on_ray"),
    [
        (20_000, False, None, True),
        (19_999, False, "head:6379", False),
        (20_000, True, None, False),
        (20_000, True, "head:6379", True),
    ],
)
def test_images_are_predicted_where_it_ends_sooner(
    monkeypatch, num_rows, is_decoded, address, is_on_ray
):
    """Kills: workers that start for a small run, or to decode images again that this
    machine has decoded.
    """
    monkeypatch.setattr(ray_env, "cluster_address", lambda: address)
    ray, task = backend.RayBackend(), Mock(rows=MagicMock())
    task.rows.__len__.return_value = num_rows
    decoded = torch.zeros(0, 3, 8, 8), []
    task.rows.images.prepared.return_value = decoded if is_decoded else None
    assert (ray.after_training(task) is ray) == is_on_ray


def test_commands_without_checks_say_what_a_source_leaves_out(run, tmp_path, capsys):
    """To predict and to pack, of a folder and of a shard."""
    folder, shard = write_images(tmp_path / "in", {"a": 1, "b": 1}), tmp_path / "t.tar"
    (folder / "3.heic").write_bytes(b"x")
    image = encoded(pixels(0))
    write_tar(shard, [("1.png", image), ("2.cls", b"a"), ("1.cls", b"a")])
    for command, source, name in (
        (["predict", run], folder, "3.heic"),
        (["data", "pack"], folder, "3.heic"),
        (["data", "pack"], shard, "2.cls"),
    ):
        output = tmp_path / f"{command[0]} {source.name}"
        uno(*command, "--data", source, "--output", output)
        assert re.search(f"^warning: 1 .*'{name}'", capsys.readouterr().out, re.M)


def test_own_data_goes_into_the_run_and_a_part_of_other_data_elsewhere(
    run, tmp_path, capsys
):
    uno("predict", run)
    assert len(table_of(run)) == 1797
    refused(capsys, 2, "predict", run, "--limit", 10)
    uno("predict", run, "--data", "digits", "--limit", 10, "--output", tmp_path / "out")
    first = table_of(tmp_path / "out")["id"].to_pylist()[:2]
    assert first == ["digits-0000", "digits-0179"]


@pytest.mark.parametrize(
    ("code", "words", "argv"),
    [
        (4, "no trained model", "nothing --data digits --output out"),
        (2, "need --output", "run --data digits"),
        (2, "need --output", "run --data digits --output none"),
        (2, "no such file or folder", "run --data /no/such --output out"),
        (
            2,
            "is fixed by the trained model",
            "run --data digits --output out --seed 1",
        ),
        (2, "unknown option --dry-run", "run --data digits --output out --dry-run"),
        (2, "greater than or equal to 1", "run --data digits --output out --limit 0"),
    ],
)
def test_mistakes_are_one_line(run, tmp_path, capsys, monkeypatch, code, words, argv):
    monkeypatch.chdir(tmp_path)
    assert words in refused(capsys, code, "predict", *argv.split())
    assert not Path("out").exists()


def test_a_run_whose_data_is_gone_still_predicts(tmp_path, capsys):
    write_model(tmp_path / "run", aligned=False, data__source="folder:/gone")
    uno("predict", tmp_path / "run", "--data", "digits", "--output", tmp_path / "out")
    assert table_of(tmp_path / "out")["head_agreement"].null_count == 1797


def test_classes_from_first_look_to_predictions(run, capsys):
    uno("predict", run)
    uno("export", run, "--format", "csv")
    before = table_of(run).to_pandas()
    uno("classes", run)
    classes = run / "classes.yaml"
    classes.write_text(classes.read_text().replace("novel-1", "sevens"))
    uno("classes", run)
    assert "is valid" in capsys.readouterr().out
    assert table_of(run).to_pandas().equals(before)  # only checked
    uno("classes", run, "--apply")
    after = table_of(run).to_pandas()
    assert after["class_name"].equals(before["class_name"].replace("novel-1", "sevens"))
    exported = pd.read_csv(run / "predictions.csv", dtype=str)
    assert exported["class_name"].equals(after["class_name"])


@pytest.fixture
def images(tmp_path) -> Path:
    """Two folders of images of equal names, and a file that is no image."""
    for folder in "ab":
        write_digits(tmp_path / "images" / folder, read_digits().images.items[:12])
    (tmp_path / "images" / "bad.png").write_bytes(b"no image")
    return tmp_path / "images"


def test_into_csv_and_folders(run, images, tmp_path, capsys):
    """Kills: a class name as a path, two files of one name, an unreadable file
    copied, bytes altered.
    """
    out = tmp_path / "out"
    hostile = "../../..\\ /etc/<x>"
    uno("classes", run, "--rename", *(f"{i}={hostile}{i}" for i in range(5, 10)))
    words = ["predict", run, "--data", images, "--output", out, "--csv", "--folders"]
    uno(*words)
    shown = capsys.readouterr().out
    assert f"as CSV: {out / 'predictions.csv'}" in shown
    assert f"sorted: {out / 'by_class'}" in shown
    table = table_of(out).to_pandas()
    assert len(pd.read_csv(out / "predictions.csv")) == len(table) == 25
    copies = [*out.rglob("*.png")]
    assert {path.parent.parent for path in copies} == {out / "by_class"}
    originals = sorted(path.read_bytes() for path in images.rglob("digit*"))
    assert sorted(path.read_bytes() for path in copies) == originals
    for path in copies:
        index, _, name = path.parent.name.partition("-")
        uris = table.uri[table.class_index == int(index)]
        assert path.read_bytes() in {Path(uri).read_bytes() for uri in uris}
        assert re.fullmatch(r"[\w.-]+", name)
    before = sorted(out.rglob("*"))
    # of a killed process
    for name in ("by_class/.made_from.json", "by_class/.digit.png", ".predictions.csv"):
        (out / f"{name}.0a1b2c3d").write_text("half")
    uno(*words)  # goes on
    assert sorted(out.rglob("*")) == before
    (out / "by_class" / "made_from.json").write_text("{}")
    assert "holds another folder of sorted images" in refused(capsys, 2, *words)


def test_images_that_cannot_be_copied_and_images_inside_tables(
    run, images, tmp_path, capsys, monkeypatch
):
    uno("predict", run, "--limit", 3, "--folders", "--output", tmp_path / "pixels")
    assert len([*(tmp_path / "pixels").rglob("*.png")]) == 3
    monkeypatch.setattr("uno.results.folders.MAX_IMAGE_BYTES", 10)
    words = [
        "predict",
        run,
        "--data",
        images,
        "--folders",
        "--output",
        tmp_path / "out",
    ]
    assert cli.main([str(word) for word in words]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "digit-0000.png cannot be copied: more than 10 bytes" in last


def test_copies_end_like_images_where_ids_do_not(run, images, tmp_path):
    """Also where the name with the number of the row is that of another image."""
    names = [f"{folder}/digit-000{i}.png" for folder in "ab" for i in range(4)]
    (images / "t.csv").write_text("path\n" + "\n".join(names))
    uno("predict", run, "--data", images / "t.csv", "--folders", "--output", tmp_path)
    copies = [path for path in (tmp_path / "by_class").rglob("*") if path.is_file()]
    assert len([path for path in copies if path.suffix == ".png"]) == 8

    ids = ["x.png", "2-x.png", "y/x.png"]
    rows = [f"a/digit-0000.png,{name}" for name in ids]
    (images / "u.csv").write_text("path,id\n" + "\n".join(rows))
    out = tmp_path / "names"
    uno("predict", run, "--data", images / "u.csv", "--folders", "--output", out)
    assert len([*(out / "by_class").rglob("*.png")]) == 3


def test_a_row_of_vectors_without_a_picture_is_named(tmp_path, capsys):
    rows = np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32)
    (tmp_path / "a.png").write_bytes(encoded(pixels(0)))
    table = {"embedding": list(rows), "label": [i % 2 or None for i in range(40)]}
    table["path"] = ["a.png"] * 39 + [None]
    pq.write_table(pa.table(table), tmp_path / "v.parquet")
    source = f"vectors:{tmp_path}/v.parquet"
    argv = ["--data", source, "--num-novel", 2, "--output", tmp_path / "run"]
    uno("discover", *argv, "--compute.threads", 1)
    argv = ["predict", tmp_path / "run", "--folders"]
    line = refused(capsys, 2, *argv)
    assert "the picture of row-39 cannot be copied: it has no path" in line


@pytest.mark.parametrize(
    "path", ["{}/a b/e.safetensors", "file://{}/a%20b/e.safetensors"]
)
def test_an_export_is_written_to_a_path_or_uri(run, tmp_path, path):
    """Into a folder that is made."""
    uno("export", run, "--format", "encoder", "--output", path.format(tmp_path))
    found = safetensors.torch.load_file(tmp_path / "a b" / "e.safetensors")
    assert "conv1.weight" in found


def test_classes_are_renamed_where_h5py_is_missing(run, capsys, caplog, monkeypatch):
    uno("predict", run, "--csv")
    (run / "predictions.h5ad").write_bytes(b"of another machine")
    monkeypatch.setitem(sys.modules, "h5py", None)
    uno("classes", run, "--rename", "5=nine")
    assert "predictions.csv" in capsys.readouterr().out
    assert "predictions.h5ad was not updated" in caplog.text
    assert "nine" in (run / "classes.yaml").read_text()


def test_classes_named_in_one_step(run, capsys):
    uno("predict", run)
    uno("classes", run, "--rename", "5=nine", "--rename", "novel-2=big cat")
    assert "applied to the model, predictions" in capsys.readouterr().out
    assert {"nine", "big cat"} & set(table_of(run)["class_name"].to_pylist())
    uno("classes", run, "--rename", "nine=9")  # by the name it has now
    names = [c.name for c in load_classifier(Storage(str(run))).classes]
    assert names[5:8] == ["9", "big cat", "novel-3"]


def test_predict_run_replaces_what_an_earlier_model_said(run):
    uno("predict", run)
    heads = run / "model" / "heads.safetensors"
    weights = safetensors.torch.load(heads.read_bytes())
    weights["known.weight"] *= -1
    heads.write_bytes(safetensors.torch.save(weights))
    uno("predict", run)
    model = load_classifier(Storage(str(run)))
    assert {*table_of(run)["model_hash"].to_pylist()} == {model.model_hash}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_run_of_gpu_workers_is_predicted_by_a_head_without_a_gpu(run):
    """Kills: a run that ends with an error after training, because its driver has no
    CUDA.
    """
    model = load_classifier(Storage(str(run)))
    config = override(
        model.config, {"compute.num_workers": 2, "compute.device": "cuda"}
    )
    opened = Run(config, Storage(str(run)), choose_backend(config))
    opened.backend = opened.backend.after_training(opened.task)
    assert predict_run(opened, model).ok == 1797


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_process_is_continued(run, tmp_path, number):
    """A real process, killed while it predicts: no row is lost and none is there
    twice.
    """
    for part in range(4):
        write_digits(tmp_path / "in" / str(part), read_digits().images.items)
    words = ["predict", str(run), "--data", str(tmp_path / "in"), "--output"]
    command = [sys.executable, "-m", "pipelines", *words, str(tmp_path / "out")]
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    shards = tmp_path / "out" / FOLDER
    wait_for(lambda: len(list(shards.glob("*.parquet"))) >= 3, pause=0.002)
    process.send_signal(number)
    assert process.wait(60) == (75 if number == signal.SIGTERM else -number)
    assert 3 <= len(list(shards.glob("*.parquet"))) < 15
    assert read_columns(Storage(str(tmp_path / "out")), ["id"]) is None
    for name in ("out", "whole"):
        uno(*words, tmp_path / name)
    table = table_of(tmp_path / "out")
    assert len(table["id"].unique()) == len(table) == 4 * 1797
    assert table.equals(table_of(tmp_path / "whole"))


@pytest.mark.ray
def test_ray_gives_the_same_table(run, tmp_path, ray_cluster):
    """Through decoding tasks, two actors. Kills: lost, repeated, reordered rows, a
    path that is no text.
    """
    folder = tmp_path / "in"
    write_digits(folder, read_digits().images.items[:900])
    write_damaged(folder)
    no_text = os.fsdecode(bytes(folder) + b"/caf\xe9.png")
    (folder / "digit-0000.png").rename(no_text)
    words = ["predict", run, "--data", folder, "--embedding", "--compute.threads", "1"]
    uno(*words, "--output", tmp_path / "here")
    uno(*words, "--output", tmp_path / "ray", "--workers", "2")
    here, there = (
        table_of(tmp_path / name).to_pandas().drop(columns="embedding")
        for name in ("here", "ray")
    )
    pd.testing.assert_frame_equal(there, here, rtol=0, atol=1e-5)
