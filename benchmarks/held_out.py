"""What a constant that no paper gives does where truth may be looked at: on classes
that are known.

    python -m benchmarks.held_out jia --set AGREEMENT=0.5 TEMPERATURE=0.1 --splits 0 1 2
    python -m benchmarks.held_out rs ncl --epochs 100 -- --preset photos --data DIR --known-classes FILE \
        --model.encoder timm:NAME --weights FILE

prints one JSON row a method: accuracy on held-out classes in percent, and that of
k-means where it starts. In split s two of the five labeled digits, s and s + 1, stay
known; the other three play novel, and their labels score alone. No row of the digits 5
to 9 is read. ``--set`` changes constants of the method's module. After ``--``: options
of uno discover, on whose data half of the known classes play novel; no row is read that
has no label there.
"""  # noqa: E501

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from sklearn.cluster import KMeans
from torch import Tensor

from benchmarks.measure import environment
from pipelines.commands import DISCOVER as DISCOVER_COMMAND
from pipelines.options import parse
from uno.config import Config, override
from uno.data.decode import ok_mask
from uno.data.files import Storage
from uno.data.plan import largest_batch
from uno.data.resident import TrainSet, assemble
from uno.data.sources import read_rows
from uno.data.splits import make_task
from uno.methods.registry import settings
from uno.model import features_of, forward
from uno.presets import preset
from uno.results.metrics import cluster_accuracy, confusion
from uno.runs import DISCOVER, PRETRAIN
from uno.runs.run import run_phase
from uno.session.console import suppress_output
from uno.session.data import load_images
from uno.session.resolve import resolve
from uno.state import TrainState
from uno.train import LocalWorker


def hold_out(
    train: TrainSet, split: int, known: int | None = None
) -> tuple[TrainSet, Tensor]:
    """The labeled rows of ``train`` as a set of its own, of which ``known`` classes
    (default: half) stay known, and the true class of its unlabeled rows, from 0.
    """
    num, num_known = train.num_known, known or train.num_known // 2
    classes = [(split * max(1, num // 5) + i) % num for i in range(num)]
    place = torch.tensor([classes.index(int(label)) for label in train.labels])
    stays, images = place < num_known, train.labeled_images
    held_out = TrainSet(
        images[stays], place[stays], images[~stays], num_known, num - num_known
    )
    return held_out, place[~stays] - num_known


def accuracy(truth: Tensor, predicted: Tensor) -> float:
    """Percent, by the best one-to-one match."""
    num = int(max(truth.max(), predicted.max())) + 1
    return round(100 * cluster_accuracy(confusion(truth, predicted, num, num)), 1)


def read(options: Sequence[str]) -> tuple[Config, TrainSet]:
    """The digits, or the data of the ``options`` of uno discover, whose
    configuration is that of UNO.
    """
    config = preset("digits")
    with suppress_output():
        if options:
            given = parse(options, DISCOVER_COMMAND)
            config = resolve(
                override(given.config, {"output": None}), given.overrides, True
            ).config
        task = make_task(read_rows(config.data), config.data)
        images, reasons = load_images(config, task, Storage("."), lambda metrics: None)
    return config, assemble(task, images, ok_mask(reasons))


def run(config: Config, every: TrainSet, split: int) -> tuple[float, float]:
    """Percent of the held-out rows that the method and k-means get right; the split
    is the seed, too.
    """
    (train, truth), worker = hold_out(every, split), LocalWorker(torch.device("cpu"))
    batch = largest_batch(
        config.data.batch_sampling,
        config.train.batch_size,
        len(train.labels),
        train.num_unlabeled,
        0,
    )
    config = override(
        config, {"seed": split, "compute.threads": 1, "train.batch_size": batch}
    )
    with tempfile.TemporaryDirectory() as folder:
        if config.model.weights is None:
            start = run_phase(
                config, PRETRAIN, train, worker, Storage(folder)
            ).model.eval()
            features = features_of(start, train.unlabeled_images, config).numpy()
        else:
            features = train.unlabeled_images[:, 0].numpy()
        clusters = (
            KMeans(train.num_novel, n_init=10, random_state=0).fit(features).labels_
        )
        state = run_phase(config, DISCOVER, train, worker, Storage(folder))
    found = score(state, train.unlabeled_images[:], truth, config)
    return found, accuracy(truth, torch.from_numpy(clusters))


def score(state: TrainState, images: Tensor, truth: Tensor, config: Config) -> float:
    """Percent of the rows that the head with the lowest loss gets right."""
    state.model.normalize_prototypes_()
    novel = forward(state.model.eval(), images, config).novel
    assert novel is not None
    return accuracy(truth, novel[0, state.best_head].argmax(dim=-1))


def change(method: str, constants: Sequence[str]) -> dict[str, float]:
    """Sets constants, each ``NAME=NUMBER``, of the method's module."""
    module, changed = import_module(f"uno.methods.{method}"), {}
    for name, _, value in (word.partition("=") for word in constants):
        changed[name] = float(value)
        getattr(module, name)  # a name that it has
        setattr(module, name, float(value))
    return changed


def words() -> tuple[list[str], list[str]]:
    """Those of the command line before and after its ``--``."""
    given = [*sys.argv[1:], "--"]
    place = given.index("--")
    return given[:place], given[place + 1 : -1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("methods", nargs="+")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=NUMBER")
    parser.add_argument("--splits", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--lr", type=float)
    before, own = words()
    options = parser.parse_args(before)
    torch.set_num_threads(1)
    base, every = read(own)
    values: dict[str, Any] = {"discover.epochs": options.epochs}
    values |= {} if options.lr is None else {"discover.base_lr": options.lr}
    for method in options.methods:
        changed = change(method, options.set)
        config = override(
            base, {"method": method, **settings(method, base.preset), **values}
        )
        found = [run(config, every, split) for split in options.splits]
        row = {"method": method, "set": changed, "splits": options.splits, **values}
        row |= {
            "accuracy": [one for one, _ in found],
            "kmeans": [other for _, other in found],
        }
        print(json.dumps(row | environment()), flush=True)


if __name__ == "__main__":
    main()
