"""The maps of Fig. 4 and the appendix's figure, from untrained models in real
checkpoints.
"""

import numpy as np
import pytest
import torch

from tests.uno.report.runs import hostile_task, small_config
from tests.uno.reproduce.finished import finished, small
from uno.config import dump_yaml
from uno.data.files import Storage
from uno.methods import registry
from uno.report.charts import EXTENT, Map
from uno.reproduce import documents, figures
from uno.reproduce.experiments import cells
from uno.runs.checkpoint import Checkpoint, save_checkpoint


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Results and cells of UNO and RS+ on the digits, untrained; shapes of what is
    drawn, without t-SNE.
    """

    def at_once(title, caption, data, seed):
        shapes.append(data.shape)
        return Map(
            title,
            caption,
            np.random.default_rng(seed).integers(0, EXTENT, (len(data), 2)),
        )

    shapes: list[tuple[int, ...]] = []
    monkeypatch.setattr(figures, "draw_map", at_once)
    table = small("tsne")
    results, todo = (
        finished(tmp_path, table, 1, lambda *_: 0.5),
        cells(table, 1, {}, {})[0],
    )
    for cell in todo:
        config = small_config(
            **{"method": cell.config.method, "data.limit": 120, "model.num_heads": 2}
        )
        run, model = (
            Storage(str(tmp_path / cell.name)),
            registry.build_network(config, 5, 5, 0),
        )
        tensors = {
            f"model/{name}": tensor for name, tensor in model.state_dict().items()
        }
        tensors["head_losses"] = torch.arange(float(registry.num_heads(config)))
        save_checkpoint(run, "discover", Checkpoint(1, tensors, dump_yaml(config)))
        run.write("config.yaml", dump_yaml(config).encode())
    return results, todo, shapes


def test_both_figures(drawn, tmp_path):
    """Kills: unlabeled rows left out of Fig. 4, labeled ones in the appendix's,
    logits of one head.
    """
    _, todo, shapes = drawn
    said: list[str] = []
    four, appendix = figures.draw(todo, tmp_path, said.append)
    assert len(said) == 2 and [drawing.title for drawing, _ in four.panels] == [
        "UNO: shared feature space",
        "UNO: logits",
        "RS+: shared feature space",
        "RS+: logits",
    ]
    assert [drawing.title for drawing, _ in appendix.panels] == [
        "Shared feature space",
        "Cluster-head logits",
        "Overclustering-head logits",
    ]
    # 120 of the training rows, 60 of them unlabeled; 2 heads of 5 clusters, 15
    # overclusters; RS+ has one head
    assert shapes == [
        (120, 64),
        (120, 15),
        (60, 64),
        (60, 10),
        (60, 30),
        (120, 64),
        (120, 10),
    ]
    assert [g["kind"] for g in four.panels[0][1]] == ["known"] * 5 + ["novel"] * 5
    assert {g["kind"] for _, groups in appendix.panels for g in groups} == {"novel"}
    assert sum(g["path"].count("M") for g in four.panels[0][1]) == 120
    # a missing run leaves its maps out
    (tmp_path / todo[1].name / "metrics.json").unlink()
    four, appendix = figures.draw(todo, tmp_path, said.append)
    assert len(four.panels) == 2 and len(appendix.panels) == 3


def test_class_names_are_inert_on_the_page(drawn, tmp_path, monkeypatch):
    """Kills: a class name that runs in a browser."""
    results, todo, _ = drawn
    hostile = hostile_task(small_config(), rows_per_class=20)
    monkeypatch.setattr(figures, "make_task", lambda *_: hostile)
    html = documents.html(
        results, "uno reproduce tsne", figures.draw(todo, tmp_path, lambda line: None)
    )
    assert "&lt;/script&gt;" in html  # the names are there
    assert "<script" not in html and "<img" not in html
