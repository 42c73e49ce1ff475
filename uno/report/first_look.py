"""The first page of a run, while it still computes: clusters of what the frozen
encoder sees, in pictures.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from uno.config import Config
from uno.data.decode import ok_mask
from uno.data.files import Storage
from uno.data.images import evenly_spaced
from uno.data.splits import Task
from uno.prototype_init import clusters_of
from uno.report.page import render
from uno.report.pictures import NUM_FIRST, NUM_LAST, Album
from uno.runs import REPORT_FILE

MAX_ROWS = 5_000  # of a kind, that are clustered: in seconds
MAX_PICTURES = 1_500


def write_first_look(
    config: Config,
    storage: Storage,
    task: Task,
    features: Tensor,
    reasons: Sequence[str | None],
) -> int:
    """Write the page as ``report.html``, which the report of the run replaces.
    ``features`` (N, D) of the evaluation views, ``reasons`` why a row has none. The
    clusters are those of
    :func:`uno.prototype_init.clusters_of`, and no true class of an unlabeled row takes
    part. Returns how many unlabeled rows were clustered: 0, and no page is written,
    where there are fewer than clusters.
    """
    ok, labels = ok_mask(list(reasons)), task.labels
    kinds = [
        np.flatnonzero(ok & task.is_train & own) for own in (labels >= 0, labels < 0)
    ]
    labeled, unlabeled = (rows[evenly_spaced(MAX_ROWS, len(rows))] for rows in kinds)
    num_clusters = task.num_novel + (
        task.num_known if config.data.setting == "gcd" else 0
    )
    if len(unlabeled) < num_clusters:
        return 0
    own, others = (features[torch.from_numpy(rows)] for rows in (unlabeled, labeled))
    known = torch.from_numpy(labels[labeled])
    found = clusters_of(
        own, others, known, task.num_novel, config.data.setting, config.seed
    )
    cosines = F.normalize(own.float(), dim=1) @ found.centers.T
    confidence = cosines.gather(1, found.assignment[:, None])[:, 0].numpy()
    groups = [
        np.flatnonzero(found.assignment.numpy() == k) for k in range(len(found.centers))
    ]
    groups = sorted(groups[-task.num_novel :], key=len, reverse=True)
    shown = [
        _typical(group, confidence, MAX_PICTURES // len(groups)) for group in groups
    ]
    album = Album(task.rows, unlabeled, confidence, shown)
    cards = [
        (len(group), album.gallery(some))
        for group, some in zip(groups, shown, strict=True)
    ]
    context = {
        "title": task.rows.source,
        "cards": cards,
        "task": task,
        "rows": unlabeled,
        "album": album,
        "clustered": len(unlabeled),
        "unlabeled": int((task.is_train & (labels < 0)).sum()),
        "elsewhere": len(unlabeled) - sum(map(len, groups)),
    }
    storage.write(REPORT_FILE, render("first_look.html", context).encode())
    return len(unlabeled)


def _typical(members: np.ndarray, confidence: np.ndarray, most: int) -> np.ndarray:
    """The members of a cluster that are nearest to its center, ``most`` of them but at
    least two, and where so many may be shown the farthest.
    """
    ranked = members[np.argsort(-confidence[members], kind="stable")]
    farthest = (
        ranked[NUM_FIRST:][-NUM_LAST:] if most >= NUM_FIRST + NUM_LAST else ranked[:0]
    )
    return np.concatenate([ranked[: max(2, min(most, NUM_FIRST))], farthest])
