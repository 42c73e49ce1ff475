"""How far is the default of frozen features above clusterings of the same, on sets nobody tuned it for?

    python -m benchmarks.sets FOLDER/NAME... --encoder timm:NAME --weights FILE

reads each folder of images, or of Parquet, whose known classes are in FOLDER/NAME-known.txt, computes or
finds its features as ``uno discover`` does, and appends to OUTPUT/lines.jsonl a line for every seed, set,
setting (ncd: new classes alone; gcd: half of the known images among them) and factor, by which the number of
new classes is wrong: what the method ``choice``, its every candidate and k-means make of the unlabeled
training rows, how many new classes are left, and the scores of hidden known classes. Lines that are there
are not computed again. The truth of new classes is read after everything is decided. At the end it prints a
table.
"""

import argparse
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.measure import environment
from uno.choice import (
    CANDIDATES,
    PLAIN,
    SAFE,
    STARTS,
    Choice,
    decide,
    decided,
    joined_prototypes,
    principal_space,
    prototypes,
)
from uno.clustering import FREE
from uno.config import Config, override
from uno.data.files import Storage
from uno.data.sources import read_rows
from uno.data.splits import make_task
from uno.prototype_init import clusters_of
from uno.results.metrics import PARTS, class_recall, confusion, hungarian, matched_counts
from uno.session.data import load_features
from uno.session.resolve import with_data, with_full_path
from uno.session.settings import completed

Rows = tuple[Tensor, Tensor, Tensor, int, int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sets", nargs="+")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--settings", nargs="+", default=["ncd", "gcd"])
    parser.add_argument("--factors", type=float, nargs="+", default=[1.0])
    parser.add_argument("--output", default="runs/sets")
    parser.add_argument("--encoder", required=True)
    parser.add_argument("--weights", required=True)
    given = parser.parse_args()
    encoder = {"model.encoder": given.encoder, "model.weights": given.weights}
    file = Path(given.output) / "lines.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    done = {key_of(line) for line in read(file)}
    kept: dict[tuple[Path, str], Rows] = {}
    for seed in given.seeds:
        for place in ((path, setting) for path in map(Path, given.sets) for setting in given.settings):
            for factor in given.factors:
                key = {"set": place[0].name, "setting": place[1], "seed": seed, "factor": factor}
                if key_of(key) in done:
                    continue
                if place not in kept:
                    kept[place] = rows_of(*place, encoder)
                with file.open("a") as out:
                    out.write(json.dumps(key | measure(kept[place], place[1], seed, factor)) + "\n")
    for line in table(read(file)):
        print(line)
    print(json.dumps(environment()))


def read(file: Path) -> list[dict[str, Any]]:
    """The lines that are there."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def key_of(line: dict[str, Any]) -> tuple[Any, ...]:
    """What a line is of."""
    return tuple(line[name] for name in ("set", "setting", "seed", "factor"))


def rows_of(path: Path, setting: str, encoder: dict[str, str]) -> Rows:
    """Features (N, D) of the training rows, their labels or FREE, their classes, and C_l, C_u."""
    kind = "folder" if any(child.is_dir() for child in path.iterdir()) else "parquet"
    own: dict[str, Any] = {
        **encoder,
        "data.source": f"{kind}:{path}",
        "data.known_classes": f"{path}-known.txt",
    }
    own |= {"data.unlabeled_known_fraction": 0.5} if setting == "gcd" else {}
    config = with_full_path(override(Config(), completed(own, choose=True)))
    task = make_task(read_rows(config.data), config.data)
    features, _ = load_features(with_data(config, setting="gcd"), task, Storage("."), lambda metrics: None)
    train = torch.from_numpy(task.is_train)
    labels, truth = torch.from_numpy(task.labels)[train], torch.from_numpy(task.eval_labels)[train]
    return features[train, 0], labels, truth, task.num_known, task.num_novel


def measure(given: Rows, setting: str, seed: int, factor: float) -> dict[str, Any]:
    """A line's numbers, fractions 0-1 and seconds of this process and of the clock."""
    features, labels, truth, num_known, num_true = given
    free, gcd, num_novel = labels == FREE, setting == "gcd", round(factor * num_true)
    start, clock = time.process_time(), time.perf_counter()
    rows = principal_space(features)(features)
    choice, limit = decided(rows[~free], labels[~free], num_novel, gcd, seed)
    found = joined_prototypes(rows, labels, num_novel, gcd, CANDIDATES[choice.candidate], limit, seed)
    made = {"choice": found}
    seconds = [time.process_time() - start, time.perf_counter() - clock]
    left = int(made["choice"][1][num_known:].any(dim=1).sum())
    for candidate in CANDIDATES:
        made[str(candidate)] = prototypes(rows, labels, num_novel, gcd, candidate, STARTS, seed)
    outputs = {}
    for name, (white, found) in made.items():
        cosines = (rows[free] @ white) @ found.T
        cosines[:, : 0 if gcd else num_known] = -torch.inf
        outputs[name] = cosines.argmax(dim=1)
    kind, parts = ("gcd" if gcd else "ncd"), (features[free], features[~free], labels[~free])
    plain = clusters_of(*parts, num_novel, kind, seed).assignment
    outputs["k-means"] = plain if gcd else num_known + plain
    sizes = num_known + num_true, num_known + num_novel
    return {
        "results": {name: scores(truth[free], found, num_known, sizes) for name, found in outputs.items()},
        "right": choice.scores.tolist(), "right_new": choice.new.tolist(), "hidden": choice.num_hidden,
        "joined": choice.joined.tolist(),
        "rows": len(features), "seconds": [round(s, 1) for s in seconds],
        "num_novel": num_novel, "left": left,
    }  # fmt: skip


def scores(truth: Tensor, outputs: Tensor, num_known: int, sizes: tuple[int, int]) -> dict[str, float]:
    """Of unlabeled rows under one matching: ``all``, ``new`` and ``old`` that are right, means of the recall
    of new classes, and the share of their rows on ``absorbed`` known outputs.
    """
    joint = confusion(truth, outputs, *sizes)
    right, rows = matched_counts(joint, hungarian(joint)), joint.sum(axis=1)
    new = {name: class_recall(right[num_known:], rows[num_known:], part) for name, part in PARTS.items()}
    found = {"all": right.sum() / rows.sum(), "new": right[num_known:].sum() / rows[num_known:].sum(), **new}
    if rows[:num_known].any():
        found["old"] = right[:num_known].sum() / rows[:num_known].sum()
        found["absorbed"] = joint[num_known:, :num_known].sum() / rows[num_known:].sum()
    return {name: round(float(value), 4) for name, value in found.items()}


def choice_of(line: dict[str, Any]) -> Choice:
    """What the draws of a line decide."""
    shape = (-1, len(CANDIDATES))
    right, new = (torch.tensor(line[name]).reshape(shape) for name in ("right", "right_new"))
    return decide(right, new, line["hidden"])._replace(joined=torch.tensor(line.get("joined", [])))


def table(lines: Iterable[dict[str, Any]]) -> list[str]:
    """Of every set, setting and factor percents, mean and standard deviation over seeds: accuracy of all
    unlabeled rows by the choice, k-means, the other clusterings of features as they are, and the best
    candidate; of new classes what was expected and true, and balanced accuracy of choice and k-means.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in lines:
        groups.setdefault((line["set"], line["setting"], line["factor"]), []).append(line)
    found = []
    plain = [str(own) for own in CANDIDATES if own.shrinkage is None and own != CANDIDATES[PLAIN]]
    for key, own in groups.items():
        chosen = [choice_of(line) for line in own]
        names = [str(CANDIDATES[choice.candidate]) for choice in chosen]
        columns: dict[str, list[float]] = {
            "choice": [line["results"]["choice"]["all"] for line in own],
            "balanced": [line["results"]["choice"]["balanced"] for line in own],
            "new": [line["results"]["choice"]["new"] for line in own],
            "k-means balanced": [line["results"]["k-means"]["balanced"] for line in own],
            "best": [max(one["all"] for one in line["results"].values()) for line in own],
        }
        columns |= {name: [line["results"][name]["all"] for line in own] for name in ("k-means", *plain)}
        columns["safe"] = [line["results"][str(CANDIDATES[SAFE])]["all"] for line in own]
        cells = {
            n: f"{100 * np.mean(v):.1f} ± {100 * np.std(v, ddof=len(v) > 1):.1f}" for n, v in columns.items()
        }
        ranges = [choice.expected() for choice in chosen]
        cells["expected"] = str([[round(100 * v, 1) for v in one] for one in ranges if one])
        left = [line["left"] for line in own]
        found.append(
            json.dumps({"of": key, "n": len(own), **cells, "chosen": sorted(set(names)), "left": left})
        )
    return found


def mean_sd(values: list[float]) -> str:
    """Percents of fractions."""
    return f"{100 * np.mean(values):.1f} ± {100 * np.std(values, ddof=len(values) > 1):.1f}"


if __name__ == "__main__":
    main()
