"""How far does a recipe get, and in which time? On classes that are known: rows of the CPU track's design.

    python -m benchmarks.cpu_track --splits 0 --threads 2 --every 2 -- --preset cifar10 --data parquet:DIR \
        --known-classes first:5 --model.encoder resnet_small --model.width 32

After ``--``: options of uno discover. Two of its five known classes stay known, the others play novel
(``benchmarks.held_out``), and their labels score alone; no row is read that has no label there. Prints one
JSON row a split: minutes of pretraining, k-means on what it learnt, and [epoch, minutes since the start,
accuracy of the head with the lowest loss] after every ``--every`` epochs of discovery, in percent.
"""

import argparse
import json
import shlex
import tempfile
import time
from typing import Any

import torch
from sklearn.cluster import KMeans

from benchmarks.held_out import accuracy, hold_out, read, score, words
from benchmarks.measure import environment
from uno.config import Config, override
from uno.data.files import Storage
from uno.data.plan import largest_batch
from uno.data.resident import TrainSet
from uno.model import features_of
from uno.runs import DISCOVER, PRETRAIN
from uno.runs.checkpoint import checkpoint_steps, load_checkpoint
from uno.runs.run import run_phase
from uno.state import TrainState, load_state_
from uno.train import LocalWorker

SCORED_ROWS = 5_000


def timed(
    config: Config, phase: str, train: TrainSet, storage: Storage
) -> tuple[TrainState, dict[int, float]]:
    """The trained state, and minutes after which each step was done that has a line of metrics."""
    start, minutes = time.perf_counter(), {0: 0.0}

    def note(metrics: dict[str, Any]) -> None:
        minutes[metrics["step"]] = (time.perf_counter() - start) / 60

    return run_phase(config, phase, train, LocalWorker(torch.device("cpu"), note), storage), minutes


def measure(config: Config, every: TrainSet, split: int) -> dict[str, Any]:
    """The row of one split, which is the seed, too."""
    train, truth = hold_out(every, split)
    kind, size = config.data.composition, config.train.batch_size
    batch = largest_batch(kind, size, len(train.labels), train.num_unlabeled, 0)
    config = override(config, {"seed": split, "train.batch_size": batch, "train.keep_checkpoints": 10_000})
    chosen = torch.randperm(train.num_unlabeled, generator=torch.Generator().manual_seed(0))[:SCORED_ROWS]
    truth, images = truth[chosen], train.unlabeled_images[chosen]
    with tempfile.TemporaryDirectory() as folder:
        storage = Storage(folder)
        start, minutes = timed(config, PRETRAIN, train, storage)
        before = max(minutes.values())
        features = features_of(start.model.eval(), images, config).numpy()
        clusters = KMeans(train.num_novel, n_init=10, random_state=0).fit(features).labels_
        state, minutes = timed(config, DISCOVER, train, storage)
        curve, last = [], state.step
        for step in checkpoint_steps(storage, DISCOVER):
            load_state_(state, load_checkpoint(storage, DISCOVER, step).tensors, step)
            epoch, found = config.discover.epochs * step / last, score(state, images, truth, config)
            curve.append([round(epoch, 1), round(before + minutes[step], 2), found])
    kmeans = accuracy(truth, torch.from_numpy(clusters))
    return {"split": split, "pretrain_minutes": round(before, 2), "kmeans": kmeans, "curve": curve}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--splits", type=int, nargs="+", default=[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--every", type=int, default=2)
    before, own = words()
    options = parser.parse_args(before)
    torch.set_num_threads(options.threads)
    config, every = read(own)
    config = override(
        config, {"compute.threads": options.threads, "train.checkpoint_every_epochs": options.every}
    )
    for split in options.splits:
        row = {"options": shlex.join(own), "threads": options.threads, **measure(config, every, split)}
        print(json.dumps(row | environment()), flush=True)


if __name__ == "__main__":
    main()
