"""What do the pairs that methods learn from say of novel classes?

    python -m benchmarks.pairs runs/reproduce-sota/cells/digits-mcl-seed?

reads finished runs and prints a JSON row: of all pairs of novel training rows, and of known test rows, what
share is of one class, what share each rule calls so, with what precision and recall: the similarity network
of KCL and MCL, where the run is theirs, the ranks of the largest k features (RS: 5 of every 512), a cosine
above .95 (NCL, OpenMix), equal winner-take-all codes (Jia et al.); and how well network and plain cosine rank
pairs (area under the curve). Features are those of the trained encoder, or the cached ones of a frozen one,
under the evaluation view. Truth is for this table alone.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

from benchmarks.measure import environment
from pipelines.features import load_images
from uno.config import Config, override
from uno.data.decode import readable
from uno.data.files import Storage
from uno.data.resident import EvalSet, eval_sets
from uno.data.sources import read_rows
from uno.data.splits import Task, make_task
from uno.heads import unit
from uno.methods import jia
from uno.methods.ncl import THRESHOLD
from uno.methods.pairs import PairSimilarity
from uno.methods.rs import num_top, same_top_features
from uno.model import features_of
from uno.runs.directory import read_config_tree
from uno.runs.run import load_trained

TOPS = (1, 2, 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    runs = parser.parse_args().runs
    row = {
        "question": "what do the pairs that methods learn from say of novel classes?",
        "command": "python -m benchmarks.pairs " + " ".join(sys.argv[1:]),
        "n": len(runs), "rows": {run.name: of_run(run) for run in runs}, **environment(runs=runs),
    }  # fmt: skip
    print(json.dumps(row, indent=1))


@torch.no_grad()
def of_run(run: Path) -> dict[str, Any]:
    """{"novel", "known"} -> what network, cosine and ranks say of these rows' pairs."""
    storage, config, task, sets = read_run(run)
    model, _ = load_trained(config, storage, task.num_known, task.num_novel)
    found = {}
    for name, rows in (("novel", sets["train"]), ("known", sets["test"])):
        rows = rows.where((rows.truth >= task.num_known) == (name == "novel"))
        features = features_of(model, rows.images, config)
        others = ~torch.eye(len(features), dtype=torch.bool)
        same = (rows.truth[:, None] == rows.truth[None])[others]
        scores, said = {"cosine": (unit(features) @ unit(features).T)[others]}, dict[str, Tensor]()
        network = getattr(model.novel, "auxiliary", None)
        if isinstance(network, PairSimilarity):
            scores["network"] = torch.cat([network(part, features) for part in features.split(64)])[others]
            said["network"] = scores["network"] > 0
        for k in sorted({*TOPS, num_top(features.shape[1])}):
            said[f"ranks, k = {k}"] = same_top_features(features, features, k)[others]
        said[f"cosine above {THRESHOLD}"] = scores["cosine"] > THRESHOLD
        windows = jia.start(config, model, None)["windows"]
        codes = jia.hash_codes(features, windows)
        equal = jia.agreement(codes, codes, jia.WINDOW)[others]
        said[f"equal codes above {jia.AGREEMENT}"] = equal > jia.AGREEMENT
        found[name] = {
            "of one class": _rounded(same.float().mean()),
            "area under the curve": {of: _rounded(roc_auc_score(same, s)) for of, s in scores.items()},
            **{of: _counted(similar, same) for of, similar in said.items()},
        }
    return found


def read_run(run: Path) -> tuple[Storage, Config, Task, dict[str, EvalSet]]:
    """A finished run, and {"train", "test"} -> the rows with a true class."""
    storage = Storage(str(run))
    config = override(Config(), read_config_tree(storage))
    task = make_task(read_rows(config.data), config.data)
    images, reasons = load_images(config, task, storage, lambda metrics: None)
    return storage, config, task, eval_sets(task, images, readable(reasons))


def _counted(similar: Tensor, same: Tensor) -> dict[str, float | None]:
    """Shares of pairs (P,) bool: called similar, right among these, found among those of one class."""
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
