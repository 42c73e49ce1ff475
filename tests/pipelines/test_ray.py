"""The commands through Ray Data and Ray Train on one shared cluster: equal to the
local path.
"""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from pipelines import cli, ray_data, ray_env
from tests.pipelines.small import (
    SHORT,
    SMALL,
    assert_same_weights,
    lines_of,
    refused,
    write_images,
)
from uno.data import array_files
from uno.data.embeddings import write_vectors

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


@pytest.mark.slow
def test_one_worker_equals_no_ray(tmp_path, capsys, monkeypatch):
    """Losses, weights and results, bit for bit, at one thread, where Ray's tasks
    decode.
    """
    monkeypatch.setattr(ray_data, "FEW_ROWS", 0)
    for workers in ("0", "1"):
        output = str(tmp_path / workers)
        assert (
            cli.main(["discover", *SMALL, "--output", output, "--workers", workers])
            == 0
        )
    capsys.readouterr()
    assert lines_of(tmp_path / "1") == lines_of(tmp_path / "0")
    assert_same_weights(tmp_path / "1", tmp_path / "0")
    here, there = (
        (tmp_path / workers / "metrics.json").read_bytes() for workers in ("0", "1")
    )
    assert here == there


def test_the_demo_is_complete_and_trains_nothing_again(short, capsys, monkeypatch):
    files = {path.name for path in short.iterdir()}
    assert files >= {"metrics.json", "metrics.jsonl", "model", "predictions"}
    assert not {"lock.json", "ray", "STOP"} & files
    results = json.loads((short / "metrics.json").read_text())
    assert results["train/known/task_aware/acc/best"] > 0.5
    monkeypatch.setattr(ray_env, "connect", pytest.fail)
    before = (short / "metrics.json").read_bytes()
    assert cli.main(["demo", *SHORT, "--output", str(short)]) == 0
    assert "is finished; nothing is trained again" in capsys.readouterr().out
    assert (short / "metrics.json").read_bytes() == before


@pytest.mark.release
def test_numerics_error_in_a_worker_is_code_3(tmp_path, capfd):
    """Pixels divided by 1e-38 overflow: the loss is never finite."""
    tiny = ("--data.std", "1e-38", "1e-38", "1e-38")
    assert (
        cli.main(
            [
                "pretrain",
                *SMALL,
                *tiny,
                "--workers",
                "1",
                "--output",
                str(tmp_path / "run"),
            ]
        )
        == 3
    )
    err = capfd.readouterr().err.splitlines()
    assert err[-1].startswith("uno: error: non-finite loss at pretrain step")
    assert not any("Traceback" in line for line in err)


@pytest.mark.slow
def test_unreadable_images_beyond_the_budget_stop_before_any_worker(
    tmp_path, capsys, monkeypatch
):
    from pipelines import train

    monkeypatch.setattr(train, "run_workers", pytest.fail)
    folder = write_images(tmp_path / "images", {"cat": 20, "dog": 20, "emu": 20})
    (folder / "emu" / "7.png").write_text("not an image")
    output = tmp_path / "run"
    argv = [
        "discover",
        *SMALL[2:],
        "--data",
        f"folder:{folder}",
        "--known-classes",
        "cat,dog",
    ]
    argv += [
        "--preset",
        "scratch",
        "--model.encoder",
        "resnet_small",
        "--batch-size",
        "12",
    ]
    line = refused(capsys, 2, *argv, "--workers", "2", "--output", output)
    assert line.startswith("uno: error: 1 of 60 images are unreadable")
    assert json.loads((output / "bad_samples.jsonl").read_text())["id"].endswith(
        "emu/7.png"
    )


@pytest.mark.release
def test_rays_dashboard_has_a_run_by_a_method_of_the_users_own(ray_cluster, tmp_path):
    """Kills: a configuration that only the process of the command can read, an empty
    Train tab.
    """
    from ray.train.v2._internal.state.state_actor import get_state_actor

    own = [
        "--method",
        "examples.my_method:METHOD",
        "--workers",
        "1",
        "--output",
        str(tmp_path),
    ]
    assert cli.main(["discover", *SMALL, *own]) == 0
    assert {line["phase"] for line in lines_of(tmp_path)} == {"pretrain", "discover"}
    runs = ray_cluster.get(get_state_actor().get_train_runs.remote()).values()
    (found,) = (each for each in runs if f"{tmp_path}/ray" in str(each))
    assert found.status.value == "FINISHED"


@pytest.mark.release
def test_two_workers_find_the_classes_of_vectors_that_one_process_finds(
    tmp_path, monkeypatch
):
    """Of vectors in a mapped file, to which steps add noise. k-means of
    the start is equal in every digit, as are the rows of every batch; BatchNorm sees
    half a batch on each worker, so losses are close, and 99% of the rows have the same
    class. Kills: rows, partners or shares that reach a worker in another order, views
    drawn by worker, vectors that a worker reads from elsewhere.
    """
    monkeypatch.setattr(array_files, "MAPPED_BYTES", 0)
    generator, truth = np.random.default_rng(0), np.arange(600) % 6
    values = 2 * generator.normal(size=(6, 16))[truth] + generator.normal(
        size=(600, 16)
    )
    labels = pa.array([f"c{c}" if c < 4 else None for c in truth])
    columns = {"label": labels, "eval_label": pa.array([f"c{c}" for c in truth])}
    write_vectors(
        f"{tmp_path}/v.parquet",
        torch.from_numpy(values).float()[:, None],
        np.ones(600, int),
        {"id": pa.array([f"r{row}" for row in range(600)]), **columns},
    )
    words = [
        "discover",
        "--data",
        f"vectors:{tmp_path}/v.parquet",
        "--num-novel",
        "2",
        "--batch-size",
        "96",
        "--data.validation-fraction",
        "0",
        "--discover.epochs",
        "5",
        "--compute.threads",
        "1",
        "--train.log-every",
        "1",
    ]
    for workers in ("0", "2"):
        assert (
            cli.main(
                [*words, "--workers", workers, "--output", str(tmp_path / workers)]
            )
            == 0
        )
    here, there = lines_of(tmp_path / "0"), lines_of(tmp_path / "2")
    assert (
        [line["step"] for line in here]
        == [line["step"] for line in there]
        == [*range(1, 31)]
    )
    assert [line["loss"] for line in there] == pytest.approx(
        [line["loss"] for line in here], rel=0.05
    )
    known, other = (
        json.loads((tmp_path / w / "metrics.json").read_text()) for w in ("0", "2")
    )
    starts = [key for key in known if key.startswith("baseline/")]
    assert starts and [known[key] for key in starts] == [other[key] for key in starts]
    classes = [
        pq.read_table(tmp_path / w / "predictions")["class_index"].to_numpy()
        for w in ("0", "2")
    ]
    assert np.mean(classes[0] == classes[1]) >= 0.99
