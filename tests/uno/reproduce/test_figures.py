"""The maps of Fig. 4 and the appendix's figure, from untrained models in real checkpoints."""

import numpy as np
import pytest
import torch

from tests.uno.report.runs import hostile_task, small_config
from tests.uno.reproduce.finished import finish, found, small
from uno import methods
from uno.config import Config, dump_yaml
from uno.data.files import Storage
from uno.data.splits import Task
from uno.report.charts import EXTENT, Map
from uno.reproduce import figures, page
from uno.runs.checkpoint import Checkpoint, save_checkpoint


def at_once(title: str, caption: str, data: np.ndarray, seed: int) -> Map:
    """Instead of t-SNE: remembers what it was to draw."""
    SEEN.append(data.shape)
    return Map(title, caption, np.random.default_rng(seed).integers(0, EXTENT, (len(data), 2)))


SEEN: list[tuple[int, ...]] = []


def train_nothing(place: Storage, config: Config, num_known: int, num_novel: int) -> None:
    """A discovery checkpoint of the run's method."""
    model = methods.build_network(config, num_known, num_novel, 0)
    tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    tensors["head_losses"] = torch.arange(float(methods.num_heads(config)))
    save_checkpoint(place, "discover", Checkpoint(1, tensors, {}), dump_yaml(config))
    place.write("config.yaml", dump_yaml(config).encode())


@pytest.fixture
def results(tmp_path):
    """Finished cells of UNO and RS+ on the digits."""
    table = small("tsne")
    finish(tmp_path, table, 1, lambda *_: 0.5)
    for row, method in (("uno", "uno"), ("rs-plus", "rs_plus")):
        config = small_config(**{"method": method, "data.limit": 120, "model.num_heads": 2})
        train_nothing(Storage(str(tmp_path / "cells" / f"digits-{row}-seed0")), config, 5, 5)
    return found(tmp_path, table, 1)


def test_both_figures(results, monkeypatch):
    """Kills: unlabeled rows left out of Fig. 4, labeled ones in the appendix's, logits of one head."""
    monkeypatch.setattr(figures, "draw_map", at_once)
    SEEN.clear()
    said: list[str] = []
    four, appendix = figures.draw(results, said.append)
    assert len(said) == 2
    assert [panel.map.title for panel in four.panels] == [
        "UNO: shared feature space", "UNO: logits", "RS+: shared feature space", "RS+: logits",
    ]  # fmt: skip
    assert [panel.map.title for panel in appendix.panels] == [
        "Shared feature space", "Cluster-head logits", "Overclustering-head logits",
    ]  # fmt: skip
    # 120 of the training rows, 60 of them unlabeled; 2 heads of 5 clusters, 15 overclusters; RS+ has one head
    assert SEEN == [(120, 64), (120, 15), (120, 64), (120, 10), (60, 64), (60, 10), (60, 30)]
    assert all(len(panel.groups) == 10 for panel in four.panels)
    assert [g["kind"] for g in four.panels[0].groups] == ["known"] * 5 + ["novel"] * 5
    assert {g["kind"] for panel in appendix.panels for g in panel.groups} == {"novel"}
    assert sum(g["paths"][0].count("M") for g in four.panels[0].groups) == 120


def test_a_missing_run_leaves_its_maps_out(results, monkeypatch):
    monkeypatch.setattr(figures, "draw_map", at_once)
    (results.output / "cells" / "digits-rs-plus-seed0" / "metrics.json").unlink()
    four, appendix = figures.draw(results, lambda line: None)
    assert len(four.panels) == 2 and len(appendix.panels) == 3


def test_class_names_are_inert_on_the_page(results, monkeypatch):
    """Kills: a class name that runs in a browser."""
    monkeypatch.setattr(figures, "draw_map", at_once)

    def hostile(*_: object) -> Task:
        return hostile_task(small_config(), rows_per_class=20)

    monkeypatch.setattr(figures, "make_task", hostile)
    drawn = figures.draw(results, lambda line: None)
    html = page.html(results, "uno reproduce tsne", drawn)
    assert "&lt;/script&gt;" in html  # the names are there
    assert "<script" not in html and "<img" not in html
