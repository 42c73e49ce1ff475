"""How far is the default of frozen features above clusterings of the same, on sets nobody tuned it for?

    python -m benchmarks.sets FOLDER/NAME... --encoder timm:NAME --weights FILE

reads each folder of images, or of Parquet, whose known classes are in FOLDER/NAME-known.txt, computes or
finds its features as ``uno discover`` does, and appends to OUTPUT/lines.jsonl a line for every set, setting
(ncd: new classes alone; gcd: half of the known images among them) and seed: accuracy of unlabeled training
rows, of new classes (ncd) or of all (gcd), under one matching; what the method ``choice`` expected; seconds.
Lines that are there are not computed again. The truth of new classes is read after everything is decided.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import environment
from uno.choice import CANDIDATES, SMOOTHED, SPECTRAL, find, matched, partition_of, principal_space
from uno.clustering import FREE
from uno.data.files import Storage
from uno.data.sources import read_rows
from uno.data.splits import make_task
from uno.prototype_init import clusters_of
from uno.session.data import load_features
from uno.session.resolve import with_data, with_full_path
from uno.session.settings import configured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sets", nargs="+")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--output", default="runs/sets")
    parser.add_argument("--encoder", required=True)
    parser.add_argument("--weights", required=True)
    given = parser.parse_args()
    encoder = {"model.encoder": given.encoder, "model.weights": given.weights}
    file = Path(given.output) / "lines.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    done = {(line["set"], line["setting"], line["seed"]) for line in lines}
    for path in map(Path, given.sets):
        for setting in ("ncd", "gcd"):
            seeds = [n for n in range(given.seeds) if (path.name, setting, n) not in done]
            rows = rows_of(path, setting, encoder) if seeds else None
            for seed in seeds:
                line = {"set": path.name, "setting": setting, "seed": seed, **measure(*rows, setting, seed)}
                lines.append(line)
                with file.open("a") as out:
                    out.write(json.dumps(line) + "\n")
                print(json.dumps(line), flush=True)
    print(json.dumps({"lines": lines, **environment()}, indent=1))


def rows_of(path: Path, setting: str, encoder: dict[str, str]) -> tuple[Tensor, Tensor, Tensor, int, int]:
    """Features (N, D) of the training rows, their labels or FREE, their classes, and C_l, C_u."""
    kind = "folder" if any(child.is_dir() for child in path.iterdir()) else "parquet"
    own: dict[str, Any] = {
        **encoder,
        "data.source": f"{kind}:{path}",
        "data.known_classes": f"{path}-known.txt",
    }
    own |= {"data.unlabeled_known_fraction": 0.5} if setting == "gcd" else {}
    config = with_full_path(configured(own, choose=True))
    task = make_task(read_rows(config.data), config.data)
    features, _ = load_features(with_data(config, setting="gcd"), task, Storage("."), lambda metrics: None)
    train = torch.from_numpy(task.is_train)
    labels, truth = torch.from_numpy(task.labels)[train], torch.from_numpy(task.eval_labels)[train]
    return features[train, 0], labels, truth, task.num_known, task.num_novel


def measure(
    features: Tensor, labels: Tensor, truth: Tensor, num_known: int, num_novel: int, setting: str, seed: int
) -> dict[str, Any]:
    """A line's numbers, fractions 0-1 and seconds."""
    free, gcd, start = labels == FREE, setting == "gcd", time.perf_counter()
    parts = features[~free], labels[~free], features[free]
    choice, space, found = find(*parts, num_novel, gcd, seed)
    cosines = space(features[free]) @ found.T
    if not gcd:
        cosines[:, :num_known] = -torch.inf
    outputs, seconds = {"choice": cosines.argmax(dim=1)}, time.perf_counter() - start
    num, first = (num_known + num_novel, 0) if gcd else (num_novel, num_known)
    plain = clusters_of(parts[2], *parts[:2], num_novel, "gcd" if gcd else "ncd", seed)
    outputs["seeded k-means" if gcd else "k-means"] = first + plain.assignment
    rows = F.normalize(principal_space(features)(features), dim=1)
    for kind in (SMOOTHED, SPECTRAL):
        outputs[kind] = first + partition_of(rows, labels, num, gcd, kind, 10, seed)
    true = truth[free]
    right = {name: matched(true, own, num_known + num_novel).float() for name, own in outputs.items()}
    new = true >= num_known
    expected = choice.expected()
    return {
        "accuracy": {name: round(float(own.mean()), 4) for name, own in right.items()},
        "new": {name: round(float(own[new].mean()), 4) for name, own in right.items()},
        "chosen": str(CANDIDATES[choice.candidate]), "expected": expected and [round(v, 4) for v in expected],
        "rows": len(features), "seconds": round(seconds, 1),
    }  # fmt: skip


if __name__ == "__main__":
    main()
