"""What do the pairs that methods learn from say of novel classes?

    python -m benchmarks.pairs runs/reproduce-sota/cells/digits-mcl-seed?

reads finished runs and prints a JSON row: of all pairs of novel training rows, and of
known test rows, what share is of one class, what share each rule calls so, with what
precision and recall: the similarity network of KCL and MCL, where the run is theirs,
the ranks of the largest k features (RS: 5 of every 512), a cosine above .7, .8, .95
(NCL, OpenMix), equal winner-take-all codes (Jia et al.); and how well network and plain
cosine rank pairs (area under the curve). Of novel rows, too, what share the run's head
and k-means get right, and which classes share clusters. Features are those of the
trained encoder, or the cached ones of a frozen one behind the layer that NCL and Jia et
al. train there, under the evaluation view. Truth is for this table alone.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from sklearn.cluster import KMeans
from sklearn.metrics import roc_auc_score
from torch import Tensor

from benchmarks.measure import environment
from uno.config import Config, override
from uno.data.decode import ok_mask
from uno.data.files import Storage
from uno.data.resident import EvalSet, eval_sets
from uno.data.sources import read_rows
from uno.data.splits import Task, make_task
from uno.heads import unit
from uno.methods import jia
from uno.methods.method import MIN_COSINE, learned_features
from uno.methods.pairs import PairSimilarity
from uno.methods.rs import num_top, same_top_features
from uno.model import UnoModel, features_of, forward
from uno.results.metrics import cluster_accuracy, confusion, hungarian
from uno.runs.directory import read_config_tree
from uno.runs.run import load_trained
from uno.session.data import load_images

TOPS = (1, 2, 5)
COSINES = (0.7, 0.8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    runs = parser.parse_args().runs
    row = {
        "question": "what do the pairs that methods learn from say of novel classes?",
        "command": "python -m benchmarks.pairs " + " ".join(sys.argv[1:]),
        "n": len(runs),
        "rows": {run.name: of_run(run) for run in runs},
        **environment(runs=runs),
    }
    print(json.dumps(row, indent=1))


@torch.no_grad()
def of_run(run: Path) -> dict[str, Any]:
    """{"novel", "known"} -> what network, cosine and ranks say of these rows' pairs."""
    storage, config, task, sets = read_run(run)
    model, best = load_trained(config, storage, task.num_known, task.num_novel)
    network = getattr(model.novel, "auxiliary", None)
    network = network if isinstance(network, PairSimilarity) else None
    windows, found = jia.start(config, model, None)["windows"], {}
    for name, rows in (("novel", sets["train"]), ("known", sets["test"])):
        rows = rows.where((rows.truth >= task.num_known) == (name == "novel"))
        features = learned_features(model, features_of(model, rows.images, config))
        found[name] = of_features(features, rows.truth, windows, network)
        if name == "novel":
            found[name] |= of_clusters(model, best, config, rows, features)
    return found


def of_clusters(
    model: UnoModel, head: int, config: Config, rows: EvalSet, features: Tensor
) -> dict[str, Any]:
    """The share of novel ``rows`` that the head and k-means of the ``features`` get
    right, and how many of each class (a line) are in each cluster of the head, on the
    diagonal where they are right.
    """
    outputs = [
        forward(model, part, config).novel
        for part in rows.images.split(config.train.eval_batch_size)
    ]
    novel = torch.cat([part[0, head] for part in outputs if part is not None])
    truth, num = rows.truth - rows.truth.min(), novel.shape[-1]
    clusters = KMeans(num, n_init=10, random_state=0).fit(features.numpy()).labels_
    found = {"head": novel.argmax(dim=-1), "k-means": clusters}
    counts = {
        of: confusion(truth, predicted, num, num) for of, predicted in found.items()
    }
    return {
        "right": {
            of: _rounded(cluster_accuracy(of_it)) for of, of_it in counts.items()
        },
        "rows of classes in clusters": counts["head"][
            :, hungarian(counts["head"])
        ].tolist(),
    }


@torch.no_grad()
def of_features(
    features: Tensor,
    truth: Tensor,
    windows: Tensor,
    network: PairSimilarity | None = None,
) -> dict[str, Any]:
    """What cosine, ranks, codes of the ``windows`` and, where there is one, the
    similarity ``network`` say of the pairs of rows (N, D) whose classes are ``truth``
    (N,).
    """
    others = ~torch.eye(len(features), dtype=torch.bool)
    same = (truth[:, None] == truth[None])[others]
    scores, said = (
        {"cosine": (unit(features) @ unit(features).T)[others]},
        dict[str, Tensor](),
    )
    if network is not None:
        scores["network"] = torch.cat(
            [network(part, features) for part in features.split(64)]
        )[others]
        said["network"] = scores["network"] > 0
    for k in sorted({*TOPS, num_top(features.shape[1])}):
        said[f"ranks, k = {k}"] = same_top_features(features, features, k)[others]
    said |= {
        f"cosine above {least}": scores["cosine"] > least
        for least in (*COSINES, MIN_COSINE)
    }
    codes = jia.hash_codes(features, windows)
    equal = jia.agreement(codes, codes, jia.WINDOW)[others]
    said[f"equal codes above {jia.AGREEMENT}"] = equal > jia.AGREEMENT
    return {
        "of one class": _rounded(same.float().mean()),
        "area under the curve": {
            of: _rounded(roc_auc_score(same, s)) for of, s in scores.items()
        },
        **{of: _counted(similar, same) for of, similar in said.items()},
    }


def read_run(run: Path) -> tuple[Storage, Config, Task, dict[str, EvalSet]]:
    """A finished run, and {"train", "test"} -> the rows with a true class."""
    storage = Storage(str(run))
    config = override(Config(), read_config_tree(storage))
    task = make_task(read_rows(config.data), config.data)
    images, reasons = load_images(config, task, storage, lambda metrics: None)
    return storage, config, task, eval_sets(task, images, ok_mask(reasons))


def _counted(similar: Tensor, same: Tensor) -> dict[str, float | None]:
    """Shares of pairs (P,) bool: called similar, right among these, found among
    those of one class.
    """
    both = int((similar & same).sum())
    return {
        "called similar": _rounded(similar.float().mean()),
        "precision": _rounded(both / int(similar.sum())) if similar.any() else None,
        "recall": _rounded(both / int(same.sum())),
    }


def _rounded(value: Any) -> float:
    return round(float(value), 3)


if __name__ == "__main__":
    main()
