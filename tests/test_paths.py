"""The five paths of a newcomer, ``examples/paths/*.sh``, as far as a machine without a
network, pretrained weights or Kubernetes can take them.
"""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from pipelines import cli
from tests.pipelines.small import ROOT, SMALL, write_weights
from tests.shapes import CORNERS, NEW, draw_photos
from tests.uno.data.builders import cifar_files, publish_cifar, write_cifar
from uno.config import Config, override

PATHS = ROOT / "examples" / "paths"
KNOWN = {*CORNERS} - {*NEW}


def steps(name: str) -> list[str]:
    """Return the commands of a path, with continued lines joined."""
    text = (PATHS / f"{name}.sh").read_text().partition("\n\n")[2].replace("\\\n", " ")
    return [line for line in text.splitlines() if line and line[0] != "#"]


def take(command: str, *more: str, replaced: dict[str, str] | None = None) -> None:
    """Run a ``uno`` command of a path in this process, with what a user would add."""
    words = shlex.split(os.path.expandvars(command.replace('"$@"', shlex.join(more))))
    assert (
        words[0] == "uno"
        and cli.main([(replaced or {}).get(word, word) for word in words[1:]]) == 0
    ), words


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UNO_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_a_researcher_learns_the_cost_of_the_papers_table(
    tmp_path, capsys, monkeypatch
):
    """The dry run without data; the other commands on drawn files in CIFAR100's layout,
    as a dry run. Kills: a refusal before the download, a flag that does not exist.
    """
    cost, check, run = steps("paper")
    take(cost)
    assert (
        "CIFAR100-20: pretraining 200 epochs" in (out := capsys.readouterr().out)
        and "cost:" in out
    )
    files = cifar_files("cifar100", rows=600)
    publish_cifar(monkeypatch, "cifar100", files)
    write_cifar(tmp_path, "cifar100", files)
    monkeypatch.setenv("DATA", str(tmp_path))
    take(check, replaced={"true": "false"})  # data.download
    assert "80 known, 20 to discover" in capsys.readouterr().out
    take(run, "--dry-run", "--train.batch-size", "32")
    assert (
        "cifar100-20 uno seed 2" in (out := capsys.readouterr().out)
        and "not checked" not in out
    )


@pytest.mark.slow
def test_an_engineer_sorts_photos(tmp_path, capsys, monkeypatch):
    """With an untrained encoder's weights in the place of pretrained ones. Kills: a
    command that needs more than the path gives it; a run without truth that ends in
    tables of accuracy, or without what to do next.
    """
    draw_photos(tmp_path, 24)
    config = override(Config(), {"model.encoder": "torchvision:resnet18"})
    write_weights(tmp_path / "weights.safetensors", config.model)
    for name, value in (("KNOWN", "known"), ("UNLABELED", "new"), ("NUM", "2")):
        monkeypatch.setenv(name, value)
    check, discover, rename, predict = steps("photos")
    take(check)
    capsys.readouterr()
    more = (
        "--model.encoder",
        "torchvision:resnet18",
        "--image-size",
        "64",
        "--compute.threads",
        "1",
    )
    take(discover, *more, replaced={"pretrained": "weights.safetensors"})
    end = capsys.readouterr().out.partition("\nverdict: ")[2]
    assert "\n  expected accuracy on all unlabeled images: " in end
    assert "no label in training, new classes: " in end and "next: open " in end
    assert (
        "accuracy, %" not in end
        and f"uno classes {tmp_path}/runs/photos --rename novel-1=NAME" in end
    )
    take(rename)
    take(predict)
    folders = {
        path.name.partition("-")[2] for path in Path("runs/sorted/by_class").glob("*-*")
    }
    assert "first" in folders and folders <= {*KNOWN, "first", "novel-2"}


def test_a_platform_engineer_applies_the_job(tmp_path):
    """The script as it is, with tools that keep what they are given. Kills: a manifest
    without the image, a flag of the commands that got lost, a broken pipe.
    """
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("docker", "helm", "kubectl"):
        (tools / name).write_text(
            f'#!/bin/sh\necho {name} "$@" >> "$OUT/calls"\n[ "$2" != -f ] || cat >'
            ' "$OUT/$1"\n'
        )
        (tools / name).chmod(0o755)
    env = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "OUT": str(tmp_path)}
    script = ["sh", str(PATHS / "kuberay.sh"), "registry/uno:1"]
    subprocess.run(script, cwd=ROOT, env=env, check=True, stdin=subprocess.DEVNULL)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [" ".join(call.split()[:2]) for call in calls] == [
        *("docker build", "docker push", "helm install"),
        *("kubectl apply", "kubectl logs"),
    ]
    claim, job = yaml.safe_load_all((tmp_path / "apply").read_text())
    assert claim["kind"] == "PersistentVolumeClaim"
    images = re.findall(r"'image': '(.*?)'", str(job["spec"]["rayClusterSpec"]))
    assert set(images) == {"registry/uno:1"}
    assert job["metadata"]["name"] in calls[-1]


@pytest.mark.slow
def test_a_contributor_trains_a_method(tmp_path, monkeypatch):
    """Kills: an example that does not run as it is, settings of it that do not
    arrive.
    """
    copy, *rest = steps("method")
    monkeypatch.setenv("FOLDER", str(tmp_path / "mine"))
    subprocess.run(["sh", "-ec", copy], cwd=ROOT, check=True)
    monkeypatch.chdir(tmp_path / "mine")
    small = [word for word in SMALL if word not in ("--preset", "digits")]
    for command in rest:
        take(command, *small)
    assert (
        yaml.safe_load(Path("run/config.yaml").read_text())["distill"]["entropy_weight"]
        == 1
    )
    results = [
        json.loads(Path(run, "metrics.json").read_text()) for run in ("run", "run-uno")
    ]
    assert results[0].keys() & results[1].keys() >= {"train/novel/task_aware/acc/best"}


def test_embeddings_of_another_tool_get_classes(tmp_path, monkeypatch):
    """Kills: a table of embeddings that needs more than id, embedding and label; ids
    that get lost.
    """
    generator, truth = np.random.default_rng(0), np.repeat(np.arange(6), 40)
    centers = 4 * generator.normal(size=(6, 16))
    vectors = centers[truth] + generator.normal(size=(240, 16))
    labels = [f"kind {c}" if c < 4 and i % 2 else None for i, c in enumerate(truth)]
    ids = [f"asset-{i}" for i in range(240)]
    embeddings = list(vectors.astype("float32"))
    table = pa.table({"id": ids, "embedding": embeddings, "label": labels})
    pq.write_table(table, "them.parquet")
    monkeypatch.setenv("FILE", "them.parquet")
    monkeypatch.setenv("NUM", "2")
    small = ["--discover.epochs", "20", "--train.batch-size", "64"]
    for command in steps("embeddings"):
        take(command, *small, "--compute.threads", "1")
    rows = pd.read_csv("runs/classes/predictions.csv")
    assert rows["id"].tolist() == ids
    found = [set(rows["class_name"][truth == k]) for k in range(6)]
    assert found[:4] == [{f"kind {c}"} for c in range(4)]
    assert found[4] | found[5] == {"novel-1", "novel-2"}
