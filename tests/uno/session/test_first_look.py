"""The first page of a run on frozen features."""

import re

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image

from tests.uno.small_run import small_config
from uno.config import override
from uno.data import features
from uno.data.files import Storage
from uno.data.sources import read_digits
from uno.encoder import build_encoder
from uno.report import first_look
from uno.report.first_look import write_first_look
from uno.runs import REPORT_FILE, run
from uno.session import job
from uno.session.data import read_task

FROZEN = {
    "model__finetune": "none",
    "augment__small__num_views": 0,
    "augment__num_cached_views": 2,
}


@pytest.fixture
def config(tmp_path):
    """Three hundred digits in a folder, whose pictures can be seen, and an encoder."""
    rows = read_digits()
    for i in range(300):
        path = tmp_path / "digits" / str(rows.labels[i]) / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rows.images.items[i]).save(path)
    given = small_config(data__limit=None, data__stored_size=8, **FROZEN)
    safetensors.torch.save_file(
        build_encoder(given.model).state_dict(), tmp_path / "w.safetensors"
    )
    return override(
        given,
        {
            "data.source": f"folder:{tmp_path / 'digits'}",
            "data.known_classes": "0,1,2,3,4",
            "compute.cache": str(tmp_path / "cache"),
            "model.weights": str(tmp_path / "w.safetensors"),
            "compute.threads": 1,
            "output": str(tmp_path / "run"),
            "discover.epochs": 1,
            "pretrain.epochs": 1,
        },
    )


def page_of(folder):
    return (folder / "run" / REPORT_FILE).read_text()


@pytest.mark.parametrize("setting", ["ncd", "gcd"])
def test_clusters_are_shown_before_random_views_and_training(
    tmp_path, config, capsys, monkeypatch, setting
):
    """And the report takes their place. Kills: a page after all views or of labeled
    images, one that is there for a run whose features are cached, or that wants no
    report, another sum of the sizes.
    """
    if setting == "gcd":
        config = override(
            config, {"data.setting": "gcd", "data.unlabeled_known_fraction": 0.5}
        )
    pages, have, encode = list[str](), list[int](), features.encode_rows

    def encoded(*rows):
        have.append(rows[6] if len(rows) > 6 else 0)  # views that are there
        if have[-1]:
            pages.append(page_of(tmp_path))
        return encode(*rows)

    monkeypatch.setattr(features, "encode_rows", encoded)
    monkeypatch.setattr(features, "SHARD_ROWS", 100)
    trained = run.run_phase
    monkeypatch.setattr(
        run, "run_phase", lambda *a: (pages.append(page_of(tmp_path)), trained(*a))[1]
    )
    job.discover(config, {})
    assert have == sorted(have) and set(have) == {0, 1} and len(pages) > have.count(1)
    [page] = set(pages)
    task = read_task(config.data)
    unlabeled = (task.labels < 0) & task.is_train
    sizes = [
        int(n.replace(",", ""))
        for n in re.findall(r'Cluster \d+ <span class="dim">([\d,]+) image', page)
    ]
    [more] = re.findall(r"(\d+) more fall to known classes", page) or ["0"]
    assert len(sizes) == task.num_novel and sum(sizes) + int(more) == unlabeled.sum()
    assert (setting == "gcd") == (more != "0") and sizes == sorted(sizes, reverse=True)
    shown = set(re.findall(r'title="(\d/\d+\.png)"', page))
    assert shown and shown <= {task.rows.ids[i] for i in np.flatnonzero(unlabeled)}
    assert page.count("data:image") >= len(shown)
    said = capsys.readouterr().out
    line = (
        f"first clusters, by k-means of {unlabeled.sum()} unlabeled images:"
        f" {tmp_path}/run/{REPORT_FILE}"
    )
    assert said.count(line) == 1 and "First clusters" not in page_of(tmp_path)
    monkeypatch.setattr(run, "run_phase", trained)
    job.discover(config, {}, overwrite=True)
    assert "first clusters" not in capsys.readouterr().out  # all features are cached
    (tmp_path / "cache").rename(tmp_path / "old")
    job.discover(config, {}, overwrite=True, report=False)
    assert "first clusters" not in capsys.readouterr().out


def test_the_clusters_are_those_of_the_features(tmp_path, config, monkeypatch):
    """Kills: rows without features, truth that takes part, a page of fewer rows than
    clusters, thousands of pictures for hundreds of clusters.
    """
    task = read_task(config.data)
    centers = torch.eye(10)[torch.from_numpy(task.eval_labels)]
    reasons = [None] * len(centers)
    unlabeled = np.flatnonzero((task.labels < 0) & task.is_train)
    reasons[unlabeled[0]] = "no image"
    storage = Storage(str(tmp_path / "run"))
    assert (
        write_first_look(config, storage, task, centers, reasons) == len(unlabeled) - 1
    )
    cards = page_of(tmp_path).split('<article class="card">')[1:]
    found = [set(re.findall(r'title="(\d)/\d+\.png"', card)) for card in cards]
    assert sorted(map(tuple, found)) == [
        (name,) for name in sorted(map(str, task.novel))
    ]
    assert (
        len(re.findall("<img", cards[0])) == first_look.NUM_FIRST + first_look.NUM_LAST
    )
    assert "Farthest" in cards[0]
    monkeypatch.setattr(first_look, "MAX_PICTURES", 5 * 7)
    write_first_look(config, storage, task, centers, reasons)
    assert page_of(tmp_path).count("<img") == 5 * 7 and "Farthest" not in page_of(
        tmp_path
    )
    reasons = ["no image"] * len(centers)
    assert (
        write_first_look(
            config, Storage(str(tmp_path / "none")), task, centers, reasons
        )
        == 0
    )
    assert not (tmp_path / "none" / REPORT_FILE).exists()
