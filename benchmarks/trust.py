"""Which signs that need no label of a new class tell a run that works from one that
fails?

    python -m benchmarks.trust --photos DIR --known-classes FILE --cifar10-jpeg DIR --weights FILE \\
        --output runs/bench-trust

trains runs from failing to working, on photographs, digits and CIFAR10-JPEG, in novel
and mixed piles, and prints one JSON row: of each run the true accuracy on the unlabeled
rows of new classes, the score and verdict of :mod:`uno.results.trust`, and other signs;
of each sign Spearman's rank correlation with the true accuracy, over all runs and
within groups. ``--weights`` is that of timm's tf_efficientnet_lite0. A finished run is
kept in ``--output``; ``--only WORDS`` trains those whose names hold all of the words,
and prints what is there.
"""  # noqa: E501

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F
from scipy.stats import spearmanr

from benchmarks.measure import environment
from uno.clustering import silhouette
from uno.config import Config, override
from uno.data.decode import ok_mask
from uno.data.files import Storage
from uno.data.resident import EvalSet, TrainSet, assemble, eval_sets
from uno.data.sources import read_rows
from uno.data.splits import make_task
from uno.encoder import build_encoder
from uno.model import features_of, forward
from uno.presets import preset
from uno.results import metrics
from uno.results.evaluate import evaluate_run
from uno.results.trust import HELD_OUT, KMEANS, NEAR, SCORE, verdict
from uno.runs import DISCOVER, PRETRAIN, run
from uno.session.data import load_images
from uno.train import LocalWorker
from uno.weights import describe_encoder

ENCODER = "timm:tf_efficientnet_lite0"
SIGNS = {"held out": HELD_OUT, "k-means": KMEANS, "neighbors": NEAR, "score": SCORE}
STRICT, NEW = (
    "train/novel/task_agnostic_strict/acc/best",
    "train/unlabeled/gcd/new/best",
)
GROUPS = ("", "photos", "digits", "cifar", "mixed", "novel", "right number")


def pretrained(side: int, epochs: int = 15) -> dict[str, Any]:
    """The frozen encoder on images of ``side`` pixels: the fewer, the worse."""
    own = {
        **describe_encoder(ENCODER).settings(side),
        "model.encoder": ENCODER,
        "discover.epochs": epochs,
    }
    return (
        own
        if side == 224
        else own | {"data.stored_size": side, "augment.num_cached_views": 2}
    )


def untrained(side: int) -> dict[str, Any]:
    """A frozen ResNet18 that has learned nothing."""
    return {
        "model.encoder": "resnet18",
        "model.stem": "imagenet",
        "augment.large.size": side,
        "data.stored_size": side,
        "augment.num_cached_views": 2,
        "discover.epochs": 15,
    }


def scratch(epochs: int) -> dict[str, Any]:
    """A small network from these images alone, at 32 px."""
    return {
        "preset": "scratch",
        "model.encoder": "resnet_small",
        "model.hidden_dim": 512,
        "model.projection_dim": 128,
        "train.batch_size": 128,
        "data.validation_fraction": 0.1,
        "pretrain.epochs": epochs,
        "discover.epochs": epochs,
        "pretrain.warmup_epochs": 1,
        "discover.warmup_epochs": 1,
    }


def digits(pretrain: int, discover: int, **more: Any) -> dict[str, Any]:
    """The digits preset, of other lengths."""
    own = {"preset": "digits", "pretrain.epochs": pretrain, "discover.epochs": discover}
    own |= {
        "pretrain.warmup_epochs": min(3, pretrain / 4),
        "discover.warmup_epochs": min(3, discover / 4),
    }
    return own | {f"data.{key}": value for key, value in more.items()}


RUNS: dict[str, dict[str, Any]] = {
    **{f"photos pretrained {side}": pretrained(side) for side in (32, 48, 64, 96, 224)},
    **{
        f"photos pretrained {side} mixed": pretrained(side)
        for side in (32, 64, 96, 224)
    },
    "photos pretrained 96, 4 for 8 classes": pretrained(96) | {"data.num_novel": 4},
    "photos pretrained 96, 16 for 8 classes": pretrained(96) | {"data.num_novel": 16},
    "photos untrained 64": untrained(64),
    "photos untrained 64 mixed": untrained(64),
    "photos scratch 10 epochs": scratch(10),
    "photos scratch 2 epochs": scratch(2),
    "photos scratch 10 epochs mixed": scratch(10),
    "digits 30+20 epochs": digits(30, 20),
    "digits 30+1 epochs": digits(30, 1),
    "digits 2+3 epochs": digits(2, 3),
    "digits 20+10 epochs mixed": digits(20, 10),
    "digits 2+2 epochs mixed": digits(2, 2),
    "digits 10+10 epochs, two known": digits(10, 10, known_classes="first:2"),
    "digits 10+10 epochs, 3 for 5 classes": digits(10, 10, num_novel=3),
    "digits 10+10 epochs, 10 for 5 classes": digits(10, 10, num_novel=10),
    "cifar pretrained 32": pretrained(32),
    "cifar pretrained 96": pretrained(96),
    "cifar pretrained 96 mixed": pretrained(96),
    "cifar untrained 32": untrained(32),
    "cifar scratch 6 epochs": scratch(6),
}


def configured(name: str, given: argparse.Namespace) -> Config:
    """The configuration of a run; an untrained encoder is written to a file first."""
    own = dict(RUNS[name])
    config = preset(str(own.pop("preset", "photos")))
    if name.startswith("photos"):
        own |= {
            "data.source": f"folder:{given.photos}",
            "data.known_classes": given.known_classes,
        }
    elif name.startswith("cifar"):
        own |= {
            "data.source": f"parquet:{given.cifar10_jpeg}",
            "data.known_classes": "first:5",
            "data.limit": 2000,
        }
    if "mixed" in name:
        own |= {"data.unlabeled_known_fraction": 0.5}
    if "pretrained" in name:
        own |= {"model.weights": given.weights}
    elif "untrained" in name:
        path = Path(given.output) / "untrained.safetensors"
        own |= {"model.weights": str(path.absolute())}
        if not path.exists():
            torch.manual_seed(0)
            encoder = build_encoder(
                override(
                    Config(), {k: own[k] for k in ("model.encoder", "model.stem")}
                ).model
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            safetensors.torch.save_file(
                {k: t.contiguous() for k, t in encoder.state_dict().items()}, path
            )
    here = {"compute.device": "cpu", "compute.threads": 1, "data.loading": "memory"}
    here |= {"data.setting": "gcd" if "mixed" in name else "novel"}
    return override(
        config,
        own | here | {"compute.cache": str(Path(given.output).absolute() / "cache")},
    )


def signs(name: str, given: argparse.Namespace) -> dict[str, float]:
    """Train a run, unless it has been, and look at it."""
    config = configured(name, given)
    storage = Storage(str(Path(given.output) / name.replace(" ", "_").replace(",", "")))
    if storage.exists("signs.json"):
        return dict(json.loads(storage.read("signs.json")))
    task = make_task(read_rows(config.data), config.data)
    images, reasons = load_images(config, task, storage, lambda metrics: None)
    ok, worker = ok_mask(reasons), LocalWorker(torch.device("cpu"))
    train, sets = assemble(task, images, ok), eval_sets(task, images, ok)
    for phase in (PRETRAIN, DISCOVER) if config.model.weights is None else (DISCOVER,):
        run.run_phase(config, phase, train, worker, storage)
    values = evaluate_run(
        config, storage, train, sets, len(task.known) + len(task.novel), worker
    )
    found = {sign: values[key] for sign, key in SIGNS.items()}
    found |= {"truth": values[NEW if "mixed" in name else STRICT]}
    found |= others(config, storage, train, sets["test"]) | {
        k: v for k, v in values.items() if "trust/" in k
    }
    storage.write("signs.json", json.dumps(found, indent=1).encode())
    return found


def others(
    config: Config, storage: Storage, train: TrainSet, test: EvalSet
) -> dict[str, float]:
    """Signs that were not chosen."""
    from sklearn.cluster import KMeans

    def agreement(one: Any, other: Any) -> float:
        num = int(max(one.max(), other.max())) + 1
        return metrics.cluster_accuracy(metrics.confusion(one, other, num, num))

    model, best = run.load_trained(config, storage, train.num_known, train.num_novel)
    logits = [
        forward(model, part, config) for part in train.unlabeled_images.split(512)
    ]
    known, novel = (
        torch.cat([getattr(one, k)[0] for one in logits], dim=-2)
        for k in ("known", "novel")
    )
    # (H, N, C)
    joint = torch.cat([known.expand(len(novel), *known.shape), novel], dim=-1)
    votes, sure = (
        joint.argmax(dim=-1),
        (joint[best] / config.objective.temperature).softmax(dim=-1).amax(dim=-1),
    )
    features = F.normalize(features_of(model, train.unlabeled_images, config), dim=1)
    held = test.where(test.truth < train.num_known)
    unseen = F.normalize(features_of(model, held.images, config), dim=1)
    apart = KMeans(train.num_known, n_init=10, random_state=0).fit_predict(
        unseen.numpy()
    )
    halves = [
        KMeans(train.num_novel, n_init=3, random_state=0)
        .fit(features[half::2].numpy())
        .predict(features.numpy())
        for half in (0, 1)
    ]
    rest = [
        agreement(votes[best].numpy(), votes[h].numpy())
        for h in range(len(votes))
        if h != best
    ]
    return {
        "heads agree": float(np.mean(rest)),
        "confidence": float(sure.median()),
        "silhouette": silhouette(features, votes[best], 2000, 0),
        "k-means of two halves agree": agreement(*halves),
        "k-means finds known classes": agreement(held.truth.numpy(), apart),
    }


def belongs(name: str, group: str) -> bool:
    """Whether a run is in a group of GROUPS."""
    if group == "right number":
        return " for " not in name
    return ("mixed" not in name) if group == "novel" else group in name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("photos", "known-classes", "cifar10-jpeg", "weights"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--output", default="runs/bench-trust")
    parser.add_argument("--only", nargs="+", default=[])
    given = parser.parse_args()
    torch.set_num_threads(1)
    runs = {}
    for name in RUNS:
        if all(word in name for word in given.only):
            runs[name] = signs(name, given)
            print(
                name,
                {key: round(value, 3) for key, value in runs[name].items()},
                file=sys.stderr,
                flush=True,
            )
    titles = [
        key
        for key in next(iter(runs.values()))
        if key != "truth" and not key.startswith("trust/")
    ]
    ranks: dict[str, dict[str, float]] = {title: {} for title in titles}
    for title, group in ((title, group) for title in titles for group in GROUPS):
        own = [found for name, found in runs.items() if belongs(name, group)]
        if len(own) > 3 and len({found[title] for found in own}) > 1:
            rank = spearmanr(
                [found[title] for found in own], [found["truth"] for found in own]
            )[0]
            ranks[title][f"{group or 'all'} ({len(own)})"] = round(float(rank), 2)
    row = {
        "question": (
            "which sign without a label of a new class ranks runs as their true"
            " accuracy does?"
        ),
        "command": "python -m benchmarks.trust " + " ".join(sys.argv[1:]),
        "n": len(runs),
        "spearman": ranks,
        "runs": {
            name: (
                {"verdict": str(verdict(found)).partition(":")[0]}
                | {key: round(found[key], 3) for key in ("truth", *titles)}
            )
            for name, found in sorted(runs.items(), key=lambda item: item[1]["truth"])
        },
        **environment(),
    }
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
