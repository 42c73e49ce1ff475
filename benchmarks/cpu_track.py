"""How far does a recipe get, and in which time? On classes that are known: rows of the
CPU track's design.

    python -m benchmarks.cpu_track --splits 0 1 --known 3 --threads 1 --start DIR -- --preset cifar10 \
        --recipe cpu --data parquet:DIR --known-classes first:5 --discover.epochs 8

After ``--``: options of uno discover. ``--known`` of its classes stay known, the others
play novel (``benchmarks.held_out``), and their labels score alone; no row is read that
has no label there. A tenth of the rows of known classes is not trained on. ``--start``:
a directory that keeps each split's pretraining; one that it has is started from,
whatever the options. ``--set`` changes constants of the method's module.

Prints one JSON row a split: minutes of both phases; after each epoch of discovery the
accuracy of the head with the lowest loss; after both phases, of the features of the
classes that play novel, the accuracy of k-means, that of a logistic regression that is
told half of the labels, and what the rules of ``benchmarks.pairs`` say of a thousand;
and the accuracy on the held-out rows of known classes. In percent, but the pairs.
"""  # noqa: E501

import argparse
import json
import shlex
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from sklearn.cluster import KMeans
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from benchmarks.held_out import accuracy, change, hold_out, read, score, words
from benchmarks.measure import environment
from benchmarks.pairs import of_features
from uno.config import Config, override
from uno.data.files import Storage
from uno.data.plan import largest_batch
from uno.data.resident import TrainSet
from uno.methods import jia
from uno.model import features_of, forward
from uno.runs import DISCOVER, PRETRAIN
from uno.runs.checkpoint import checkpoint_steps, load_checkpoint
from uno.runs.run import run_phase
from uno.state import TrainState, load_state_
from uno.train import LocalWorker

SCORED_ROWS = 4_000
PAIRED_ROWS = 1_000


def timed(
    config: Config, phase: str, train: TrainSet, storage: Storage
) -> tuple[TrainState, float]:
    """The trained state, and the minutes that it took."""
    start = time.perf_counter()
    state = run_phase(config, phase, train, LocalWorker(torch.device("cpu")), storage)
    return state, (time.perf_counter() - start) / 60


def pretrained(config: Config, train: TrainSet, folder: Path) -> float:
    """The minutes of the pretraining in ``folder``, which is trained where it is not
    there.
    """
    minutes = folder / "minutes"
    if not minutes.exists():
        _, taken = timed(config, PRETRAIN, train, Storage(str(folder)))
        minutes.write_text(str(taken))
    return float(minutes.read_text())


def of_model(
    state: TrainState,
    images: Tensor,
    truth: Tensor,
    held_out: Tensor,
    labels: Tensor,
    config: Config,
) -> dict[str, Any]:
    """What stands after a phase, of classes that play novel and, "held_out", of
    known ones.
    """
    features, num = (
        features_of(state.model.eval(), images, config),
        int(truth.max()) + 1,
    )
    clusters = KMeans(num, n_init=10, random_state=0).fit(features.numpy()).labels_
    windows = jia.start(config, state.model, None)["windows"]
    state.model.normalize_prototypes_()
    known = forward(state.model, held_out, config).known[0].argmax(dim=-1)
    return {
        "kmeans": accuracy(truth, torch.from_numpy(clusters)),
        "told": told(features, truth),
        "held_out": round(100 * float((known == labels).float().mean()), 1),
        "pairs": of_features(features[:PAIRED_ROWS], truth[:PAIRED_ROWS], windows),
    }


def told(features: Tensor, truth: Tensor) -> float:
    """Percent that a logistic regression gets right, which is told the truth of half
    of the rows.
    """
    half, rows = len(truth) // 2, features.numpy()
    fitted = LogisticRegression(C=0.1, max_iter=300).fit(rows[:half], truth[:half])
    return round(100 * float(fitted.score(rows[half:], truth[half:])), 1)


def measure(
    config: Config, every: TrainSet, split: int, known: int, start: Path
) -> dict[str, Any]:
    """The row of one split, which is the seed, too; ``known`` classes stay known."""
    train, truth = hold_out(every, split, known)
    order = torch.randperm(
        len(train.labels), generator=torch.Generator().manual_seed(0)
    )
    out, rest = order.tensor_split([len(order) // 10])
    held_out = train.labeled_images[out], train.labels[out]
    train = TrainSet(
        train.labeled_images[rest],
        train.labels[rest],
        train.unlabeled_images,
        known,
        train.num_novel,
    )
    kind, size = config.data.batch_sampling, config.train.batch_size
    batch = largest_batch(kind, size, len(train.labels), train.num_unlabeled, 0)
    every_epoch = {"train.checkpoint_every_epochs": 1, "train.keep_checkpoints": 10_000}
    config = override(config, {"seed": split, "train.batch_size": batch, **every_epoch})
    chosen = torch.randperm(
        train.num_unlabeled, generator=torch.Generator().manual_seed(0)
    )[:SCORED_ROWS]
    truth, images = truth[chosen], train.unlabeled_images[chosen]
    row: dict[str, Any] = {"split": split, "known": known}
    row["pretrain_minutes"] = round(pretrained(config, train, start / f"{split}"), 2)
    with tempfile.TemporaryDirectory() as folder:
        storage = Storage(
            str(shutil.copytree(start / f"{split}", Path(folder) / "run"))
        )
        state, _ = timed(
            override(config, {"model.finetune": "full"}), PRETRAIN, train, storage
        )
        after = [of_model(state, images, truth, *held_out, config)]
        state, minutes = timed(config, DISCOVER, train, storage)
        row |= {"discover_minutes": round(minutes, 2), "curve": []}
        for step in checkpoint_steps(storage, DISCOVER):
            load_state_(state, load_checkpoint(storage, DISCOVER, step).tensors, step)
            row["curve"].append(score(state, images, truth, config))
        after.append(of_model(state, images, truth, *held_out, config))
    return row | {of: [found[of] for found in after] for of in after[0]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--splits", type=int, nargs="+", default=[0])
    parser.add_argument("--known", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--start", type=Path)
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=NUMBER")
    before, own = words()
    options = parser.parse_args(before)
    torch.set_num_threads(options.threads)
    config, every = read(own)
    config = override(config, {"compute.threads": options.threads})
    changed = change(config.method, options.set)
    for split in options.splits:
        with tempfile.TemporaryDirectory() as folder:
            row = measure(
                config, every, split, options.known, options.start or Path(folder)
            )
        facts = {
            "options": shlex.join(own),
            "set": changed,
            "threads": options.threads,
            **row,
        }
        print(json.dumps(facts | environment()), flush=True)


if __name__ == "__main__":
    main()
