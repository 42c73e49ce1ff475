"""What does each difference of DTC, KCL, MCL and UNO from their authors' code cost?

    python -m benchmarks.variants dtc dtc-baseline dtc-te dtc-tep dtc-anew dtc-rates dtc-labeled --seeds 0 1 2
    python -m benchmarks.variants kcl kcl-first kcl-norm mcl mcl-first mcl-norm --seeds 0 1 2
    python -m benchmarks.variants uno-crops uno-crops-by-view --seeds 0 1 2

trains the digits preset, from one pretraining a seed, and prints one JSON row: novel
accuracy, task-aware, training rows, last epoch, percent, and k-means of the pretrained
features beside it. ``dtc``, ``kcl`` and ``mcl`` are the methods as they stand.

Of DTC, after its authors' code: ``baseline`` has no consistency; ``te`` draws q to its
own average over past epochs, .6 of it the past's, instead of to the other view; ``tep``
makes its targets from that average and has no consistency; ``anew`` predicts all rows
when targets move; ``rates`` are theirs, .1 in the warm-up and .05 after it.
``labeled``: labeled rows train the known head on, which theirs do not.

Of KCL and MCL: ``first`` trains the similarity network on the pretrained features of
labeled rows, then freezes it on its own copy of the encoder, and unlabeled rows alone
train, as in their code; ``norm`` normalizes features over the batch, in the place of
the BatchNorm there. Truth is for this table alone.

Of UNO: ``crops`` has two small crops besides, in the proportions of v2 on CIFAR10;
``crops-by-view`` passes encoder and heads once a view, as the authors' code, where ours
share BatchNorm's statistics.
"""  # noqa: E501

import argparse
import copy
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from sklearn.cluster import KMeans
from torch import Tensor

from benchmarks.held_out import accuracy
from benchmarks.measure import environment
from uno.config import Config, override
from uno.data.decode import decode_many, ok_mask
from uno.data.files import Storage
from uno.data.resident import TrainSet, assemble, eval_sets
from uno.data.sources import read_rows
from uno.data.splits import make_task
from uno.methods import Method, dtc, kcl, mcl, pairs, uno
from uno.methods.method import NovelHead, forward_two_views
from uno.model import Logits, UnoModel, features_of, forward
from uno.presets import preset
from uno.runs import DISCOVER, PRETRAIN
from uno.runs.run import run_phase
from uno.schedule import sigmoid_rampup
from uno.state import TrainState
from uno.steps import Batch, labeled_loss, update_
from uno.train import LocalWorker

PAST = 0.6  # of an average over epochs
WARMUP_RATE, RATE = 0.1, 0.05
NETWORK_STEPS, NETWORK_RATE, NETWORK_ROWS = 500, 0.1, 128

# what a variant knows besides the state: configuration, set, networks of its own
Kept = dict[str, Any]


def dtc_step(
    kind: str, kept: Kept, state: TrainState, batch: Batch, config: Config, lr: float
) -> Tensor:
    """:func:`uno.methods.dtc.step` but for one difference."""
    assert batch.rows is not None
    extra, constants = state.extra, config.method_options
    since = state.step - round(constants.warmup * state.total_steps)
    interval = max(1, round(constants.update_interval * state.total_steps))
    num_steps = len(extra["probabilities"]) // len(batch.rows)  # of an epoch
    if kind in ("te", "tep") and since > 0 and since % num_steps == 0:
        extra["past"] = PAST * extra["past"] + (1 - PAST) * extra["probabilities"]
        extra["average"] = extra["past"] / (1 - PAST ** (since // num_steps))
    if since >= 0 and since % interval == 0:
        source = (
            extra["average"]
            if kind == "tep" and since >= num_steps
            else extra["probabilities"]
        )
        extra["targets"] = dtc.sharpened(
            predicted(kept, state) if kind == "anew" else source
        )
    num_labeled = len(batch.labels)
    views, labels = batch.views, batch.labels
    if kind != "labeled":
        views, labels = [view[num_labeled:] for view in views], labels[:0]
    known, novel, _ = forward_two_views(
        state, batch._replace(views=views, labels=labels)
    )
    q = novel[:, len(labels) :].log_softmax(dim=-1)
    dtc.remember_(extra["probabilities"], batch.rows, q[0].detach().exp())
    loss = F.kl_div(q[0], extra["targets"][batch.rows], reduction="none").mean()
    if since >= 0 and kind != "tep":
        other = extra["average"][batch.rows] if kind == "te" else q[1].exp()
        ramp = sigmoid_rampup(since / state.total_steps, constants.rampup)
        loss = loss + constants.consistency_weight * ramp * F.mse_loss(
            q[0].exp(), other
        )
    if kind == "labeled":
        loss = loss + labeled_loss(known, labels, config.objective.temperature)
    rate = (WARMUP_RATE if since < 0 else RATE) if kind == "rates" else lr
    return update_(state, loss, rate)


@torch.no_grad()
def predicted(kept: Kept, state: TrainState) -> Tensor:
    """q (N_u, K) of all unlabeled rows under the evaluation view."""
    novel = forward(
        state.model.eval(), kept["train"].unlabeled_images[:], kept["config"]
    ).novel
    state.model.train()
    assert novel is not None
    return novel[0, 0].softmax(dim=-1).clone()


def dtc_start(
    kept: Kept, config: Config, model: UnoModel, train: TrainSet
) -> dict[str, Tensor]:
    """As the method's, and averages that have seen nothing."""
    kept |= {"config": config, "train": train}
    extra = dtc.start(config, model, train)
    zeros = torch.zeros_like(extra["probabilities"])
    return extra | {"past": zeros, "average": zeros.clone()}


def with_dtc(kind: str) -> Method:
    """DTC but for one difference."""
    kept: Kept = {}
    return replace(
        dtc.METHOD, step=partial(dtc_step, kind, kept), start=partial(dtc_start, kept)
    )


class NormalizedSimilarity(pairs.PairSimilarity):
    """Features are normalized over the rows of the batch, not to length one."""

    def forward(self, features: Tensor, others: Tensor) -> Tensor:
        """(N, D) and (M, D) -> (N, M)."""
        one, other = (
            (rows - rows.mean(dim=0)) / (rows.var(dim=0) + 1e-5).sqrt()
            for rows in (features.float(), others.float())
        )
        hidden = torch.relu(self.left(one)[:, None] + self.right(other)[None])
        return self.output(hidden).squeeze(-1)


def first_start(
    kept: Kept, config: Config, model: UnoModel, train: TrainSet
) -> dict[str, Tensor]:
    """A similarity network that has learned pairs of labeled rows, and its own copy
    of the encoder.
    """
    network = pairs.PairSimilarity(model.known.weight.shape[1])
    features = features_of(model.eval(), train.labeled_images, config).clone()
    model.train()
    generator = torch.Generator().manual_seed(config.seed)
    optimizer = torch.optim.SGD(network.parameters(), NETWORK_RATE, momentum=0.9)
    for _ in range(NETWORK_STEPS):
        some = torch.randint(len(features), (2, NETWORK_ROWS), generator=generator)
        rows, labels = features[some[0]], train.labels[some[0]]
        same = (labels[:, None] == train.labels[some[1]][None]).float()
        loss = F.binary_cross_entropy_with_logits(
            network(rows, features[some[1]]), same
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    encoder = copy.deepcopy(model.encoder).eval().requires_grad_(False)
    kept |= {"network": network.requires_grad_(False), "encoder": encoder}
    return {}


def first_step(
    term: pairs.PairTerm,
    kept: Kept,
    state: TrainState,
    batch: Batch,
    config: Config,
    lr: float,
) -> Tensor:
    """The term of unlabeled pairs alone, as the network that stands still has them."""
    views = [view[len(batch.labels) :] for view in batch.views]
    known, novel, _ = forward_two_views(
        state, batch._replace(views=views, labels=batch.labels[:0])
    )
    with torch.no_grad():
        features = torch.stack([kept["encoder"](view) for view in views[:2]])
    first, second = (novel / config.objective.temperature).softmax(dim=-1)
    return update_(
        state, term(first, second, kept["network"], features) + 0 * known.sum(), lr
    )


def with_pairs(method: Method, term: pairs.PairTerm, kind: str) -> Method:
    """KCL or MCL but for one difference."""
    if kind == "norm":
        return replace(
            method, novel_head=lambda k, d: NovelHead(k, d, NormalizedSimilarity(d))
        )
    kept: Kept = {}
    start, step = partial(first_start, kept), partial(first_step, term, kept)
    return replace(method, novel_head=NovelHead, start=start, step=step)


def by_view(model: UnoModel, views: Sequence[Tensor]) -> Logits:
    """:meth:`UnoModel.forward`, one view at a time: BatchNorm's statistics are of a
    view's rows.
    """
    parts = zip(*(FORWARD(model, [view]) for view in views), strict=True)
    found = [None if part[0] is None else torch.cat(part) for part in parts]
    return Logits(*found)  # type: ignore[arg-type]


FORWARD = UnoModel.forward
VARIANTS: Mapping[str, Callable[[], Method]] = {
    "dtc": lambda: dtc.METHOD,
    "kcl": lambda: kcl.METHOD,
    "mcl": lambda: mcl.METHOD,
    "uno": lambda: uno.METHOD,
    **{
        f"dtc-{kind}": partial(with_dtc, kind)
        for kind in ("te", "tep", "anew", "rates", "labeled")
    },
    **{
        f"kcl-{kind}": partial(with_pairs, kcl.METHOD, kcl.contrast, kind)
        for kind in ("first", "norm")
    },
    **{
        f"mcl-{kind}": partial(with_pairs, mcl.METHOD, mcl.likelihood, kind)
        for kind in ("first", "norm")
    },
}
CROPS = {
    "augment.small.num_views": 2,
    "augment.small.size": 5,
    "augment.small.crop": "resized",
    "augment.small.crop_scale": (0.3, 0.8),
}
SETTINGS: Mapping[str, Any] = {
    "dtc-baseline": {"dtc.consistency_weight": 0.0},
    "uno-crops": CROPS,
    "uno-crops-by-view": CROPS,
}


def of_seed(seed: int, names: list[str], epochs: int) -> dict[str, float]:
    """Percent of novel training rows that each variant gets right, and k-means."""
    config = override(
        preset("digits"),
        {"seed": seed, "compute.threads": 1, "discover.epochs": epochs},
    )
    task = make_task(read_rows(config.data), config.data)
    images, reasons = decode_many(task.rows.images, config.data.stored_size, 1)
    ok = ok_mask(reasons)
    train, rows = assemble(task, images, ok), eval_sets(task, images, ok)["train"]
    truth, worker = (
        rows.where(rows.unlabeled).truth - task.num_known,
        LocalWorker(torch.device("cpu")),
    )
    found = {}
    with tempfile.TemporaryDirectory() as start:
        model = run_phase(config, PRETRAIN, train, worker, Storage(start)).model.eval()
        features = features_of(model, train.unlabeled_images, config).numpy()
        clusters = (
            KMeans(task.num_novel, n_init=10, random_state=0).fit(features).labels_
        )
        found["k-means"] = accuracy(truth, torch.from_numpy(clusters))
        for name in names:
            method = name.partition("-")[0]
            own = {"method": method, "model.weights": start, **SETTINGS.get(name, {})}
            changed = VARIANTS.get(name, VARIANTS[method])()
            with (
                tempfile.TemporaryDirectory() as folder,
                patch.object(import_module(f"uno.methods.{method}"), "METHOD", changed),
                patch.object(
                    UnoModel,
                    "forward",
                    by_view if name.endswith("by-view") else FORWARD,
                ),
            ):
                state = run_phase(
                    override(config, own), DISCOVER, train, worker, Storage(folder)
                )
            state.model.normalize_prototypes_()
            novel = forward(state.model.eval(), train.unlabeled_images[:], config).novel
            assert novel is not None
            found[name] = accuracy(truth, novel[0, state.best_head].argmax(dim=-1))
            print(f"seed {seed}, {name}: {found[name]}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("variants", nargs="+", choices=[*VARIANTS, *SETTINGS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds = [of_seed(seed, options.variants, options.epochs) for seed in options.seeds]
    results = {}
    for name in seeds[0]:
        values = [found[name] for found in seeds]
        spread = round(statistics.stdev(values), 1) if len(values) > 1 else None
        results[name] = {
            "mean": round(statistics.mean(values), 1),
            "sd": spread,
            "values": values,
        }
    row = {
        "question": "what does each difference from the authors' code cost?",
        "command": "python -m benchmarks.variants " + " ".join(sys.argv[1:]),
        "n": len(seeds),
        "results": results,
        **environment(),
    }
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
