"""t-SNE maps of checkpoints: Fig. 4 (all classes, UNO beside RS+), the appendix's
figure (novel classes).
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from uno.config import Config, override
from uno.data.files import Storage
from uno.data.sources import read_rows
from uno.data.splits import Task, make_task
from uno.report.charts import COLORS, Map, choose_points, draw_map, map_groups
from uno.report.sample import Sample, open_model, score_sample
from uno.reproduce.experiments import REFERENCE, Cell
from uno.results.infer import decoder
from uno.runs.directory import read_config_tree
from uno.text import plural

# each map with its dots, of uno.report.charts.map_groups
Panels = list[tuple[Map, list[dict[str, Any]]]]
CAPTION_ALL = (
    "Training images, labeled and unlabeled, colored by their true class; PCA, then"
    " t-SNE. Squares are known classes, dots novel ones. Logits: those of the known"
    " head and of all novel heads."
)
CAPTION_NOVEL = (
    "Unlabeled training images, colored by their true class, in the spaces of UNO."
)


class Figure(NamedTuple):
    """Maps side by side."""

    title: str
    caption: str
    panels: Panels


def draw(
    cells: Sequence[Cell], output: Path, say: Callable[[str], None]
) -> list[Figure]:
    """Both figures from the runs of seed 0, for each data set; a run that is missing
    leaves its maps out.
    """
    figures = []
    for name in dict.fromkeys(cell.benchmark.name for cell in cells):
        all_classes, novel_classes = Panels(), Panels()
        for cell in cells:
            run = output / cell.name
            if (cell.benchmark.name, cell.seed) != (name, 0) or not (
                run / "metrics.json"
            ).exists():
                continue
            say(f"drawing the maps of {cell.row.name} on {name}")
            storage = Storage(str(run))
            config = override(Config(), read_config_tree(storage))
            task = make_task(read_rows(config.data), config.data)
            model = open_model(config, storage, task, "cpu")
            found, seed = (
                score_sample(task, model, decoder(model, task.rows)),
                config.seed,
            )
            novel = found.novel.reshape(len(found.novel), -1)
            spaces = {
                f"{cell.row.name}: shared feature space": found.features,
                f"{cell.row.name}: logits": np.concatenate(
                    [found.known, novel], axis=1
                ),
            }
            all_classes += _panels(spaces, task, found, task.is_train, seed)
            if cell.row.key == REFERENCE:
                spaces = {
                    "Shared feature space": found.features,
                    "Cluster-head logits": novel,
                }
                if found.over is not None:
                    spaces["Overclustering-head logits"] = found.over.reshape(
                        len(found.over), -1
                    )
                novel_classes = _panels(
                    spaces, task, found, task.is_train & (task.labels < 0), seed
                )
        figures += [
            Figure(f"All classes, {name} (paper, Fig. 4)", CAPTION_ALL, all_classes),
            Figure(
                f"Novel classes, {name} (paper, appendix's figure)",
                CAPTION_NOVEL,
                novel_classes,
            ),
        ]
    return [figure for figure in figures if figure.panels]


def _panels(
    spaces: Mapping[str, NDArray[np.float32]],
    task: Task,
    found: Sample,
    member: NDArray[np.bool_],
    seed: int,
) -> Panels:
    """One map for each space, of those rows of the task that are ``member``."""
    rows = np.flatnonzero(member[found.index])
    rows = rows[choose_points(len(rows), seed)]
    truth, names = task.eval_labels[found.index[rows]], [*task.known, *task.novel]
    colors = [i % COLORS for i in range(len(names))]
    drawn = [
        draw_map(title, f"{plural(len(rows), 'image')}.", data[rows], seed)
        for title, data in spaces.items()
    ]
    return [
        (m, map_groups(truth, names, task.num_known, colors, m.xy))
        for m in drawn
        if m is not None
    ]
