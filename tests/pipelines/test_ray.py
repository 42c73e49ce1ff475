"""The commands through Ray Data and Ray Train on one shared cluster: equal to the
local path.
"""

import json

import pytest

from pipelines import cli, ray_data, ray_env
from tests.pipelines.small import (
    SHORT,
    SMALL,
    assert_same_weights,
    lines_of,
    refused,
    write_images,
)

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
