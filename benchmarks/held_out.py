"""What a constant that no paper gives does where truth may be looked at: on classes that are known.

    python -m benchmarks.held_out jia --set AGREEMENT=0.5 TEMPERATURE=0.1 --splits 0 1 2

prints one JSON row: accuracy on held-out classes in percent, and that of k-means where it starts. In split s
two of the five labeled digits, s and s + 1, stay known; the other three play novel, and their labels score
alone. No row of the digits 5 to 9 is read. ``--set`` changes constants of the method's module.
"""

import argparse
import json
import tempfile
from importlib import import_module

import torch
from sklearn.cluster import KMeans
from torch import Tensor

from benchmarks.measure import environment
from uno.config import override
from uno.data.decode import decode_many, readable
from uno.data.files import Storage
from uno.data.resident import TrainSet, assemble
from uno.data.sources import read_rows
from uno.data.splits import make_task
from uno.model import features_of, forward
from uno.presets import preset
from uno.results.metrics import cluster_accuracy, confusion
from uno.runs import DISCOVER, PRETRAIN
from uno.runs.run import run_phase
from uno.train import LocalWorker

NUM_KNOWN, NUM_NOVEL = 2, 3


def hold_out(train: TrainSet, split: int) -> tuple[TrainSet, Tensor]:
    """The labeled rows of ``train`` as a set of its own, and the true class, 0-2, of its unlabeled rows."""
    classes = [(split + i) % (NUM_KNOWN + NUM_NOVEL) for i in range(NUM_KNOWN + NUM_NOVEL)]
    place = torch.tensor([classes.index(int(label)) for label in train.labels])
    known, images = place < NUM_KNOWN, train.labeled_images
    held_out = TrainSet(images[known], place[known], images[~known], NUM_KNOWN, NUM_NOVEL)
    return held_out, place[~known] - NUM_KNOWN


def accuracy(truth: Tensor, predicted: Tensor) -> float:
    """Percent, by the best one-to-one match."""
    return round(100 * cluster_accuracy(confusion(truth, predicted, NUM_NOVEL, NUM_NOVEL)), 1)


def run(method: str, epochs: int, split: int) -> tuple[float, float]:
    """Percent of the held-out rows that the method and k-means get right; the split is the seed, too."""
    values = {"method": method, "seed": split, "discover.epochs": epochs, "compute.threads": 1}
    config = override(preset("digits"), values)
    task = make_task(read_rows(config.data), config.data)
    images, reasons = decode_many(task.rows.images, config.data.store_size, 1)
    train, truth = hold_out(assemble(task, images, readable(reasons)), split)
    worker = LocalWorker(torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        start = run_phase(config, PRETRAIN, train, worker, Storage(folder)).model.eval()
        features = features_of(start, train.unlabeled_images, config).numpy()
        clusters = KMeans(NUM_NOVEL, n_init=10, random_state=0).fit(features).labels_
        model = run_phase(config, DISCOVER, train, worker, Storage(folder)).model.eval()
    novel = forward(model, train.unlabeled_images, config).novel
    assert novel is not None
    return accuracy(truth, novel[0, 0].argmax(dim=-1)), accuracy(truth, torch.from_numpy(clusters))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("method")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=NUMBER")
    parser.add_argument("--splits", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    module, changed = import_module(f"uno.methods.{options.method}"), {}
    for name, _, value in (word.partition("=") for word in options.set):
        changed[name] = float(value)
        getattr(module, name)  # a name that it has
        setattr(module, name, float(value))
    found = [run(options.method, options.epochs, split) for split in options.splits]
    row = {"method": options.method, "set": changed, "splits": options.splits, "epochs": options.epochs}
    row |= {"accuracy": [one for one, _ in found], "kmeans": [other for _, other in found]}
    print(json.dumps(row | environment()))


if __name__ == "__main__":
    main()
