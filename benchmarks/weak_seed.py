"""Why is a seed weak, when is that decided, and can it be told without a label?

    python -m benchmarks.weak_seed --seeds 0 1 2 3 4
    python -m benchmarks.weak_seed --held-out --seeds 0 1 2 3 4 --epochs 30

trains the digits preset once a seed, looks at every head at the end of every epoch, and
prints one JSON row. Truth is for this table alone. Of each head: accuracy, the largest
mistakes (true class, taken for, rows), the epoch from which on 95% of its rows stay
where they end, what Sinkhorn says of all unlabeled rows at once (``moved``: the share
whose cluster it changes; ``moved right``: the share of these that it moves to their
class), the sizes of clusters. Of a seed, signs without a label, the higher the better:
how far the chosen head agrees with the others, how far all heads agree, minus the
spread of their losses and minus the lowest, the silhouette of its clusters, the share
that Sinkhorn leaves where it is, the neighbors of
:mod:`uno.results.trust`; and what other ways to choose would give: the head that agrees
most with the others, and the mean of all heads' probabilities. Signs are ranked against
accuracy (Spearman). ``--held-out``: on three labeled digits that play novel instead
(:mod:`benchmarks.held_out`), where one may choose; seed s is split s mod 5.
"""

import argparse
import copy
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from sklearn.metrics import silhouette_score
from torch import Tensor, nn

from benchmarks.held_out import hold_out
from benchmarks.measure import environment
from uno.config import Config, override
from uno.data.decode import decode_many, ok_mask
from uno.data.files import Storage
from uno.data.resident import TrainSet, assemble, eval_sets
from uno.data.sources import read_rows
from uno.data.splits import make_task
from uno.model import Logits, UnoModel, forward
from uno.objective import sinkhorn
from uno.presets import preset
from uno.results.infer import align_heads
from uno.results.metrics import cluster_accuracy, confusion, hungarian
from uno.results.trust import neighbor_agreement
from uno.runs import DISCOVER, PRETRAIN
from uno.runs.run import run_phase
from uno.train import LocalWorker

STAYS = 0.95  # of rows, from when on a head counts as decided


class Observer(LocalWorker):
    """Keeps the outputs (H, N) of all heads for the unlabeled rows, at the end of
    each epoch of discovery.
    """

    def __init__(self, config: Config, rows: Tensor) -> None:
        super().__init__(torch.device("cpu"), self._look)
        self.config, self.rows, self.epochs = config, rows, list[Tensor]()

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model itself, which is looked at later."""
        self.model = model
        return model

    def _look(self, metrics: dict[str, Any]) -> None:
        if (
            metrics["phase"] == DISCOVER
            and metrics["event"] == "epoch"
            and "head_losses" in metrics
        ):
            self.epochs.append(
                look(copy.deepcopy(self.model), self.rows, self.config)[0].argmax(
                    dim=-1
                )
            )


def look(model: Any, rows: Tensor, config: Config) -> tuple[Tensor, Logits]:
    """Cosines (H, N, K) of unlabeled rows to their clusters, and all else that the
    model says.
    """
    assert isinstance(model, UnoModel)
    model.normalize_prototypes_()
    logits = forward(model.eval(), rows, config)
    assert logits.novel is not None
    return logits.novel[0], logits


def accuracy(truth: Tensor, output: Tensor) -> float:
    """Percent, by the best one-to-one match."""
    num = int(max(truth.max(), output.max())) + 1
    return round(100 * cluster_accuracy(confusion(truth, output, num, num)), 2)


def agreement(outputs: Tensor) -> Tensor:
    """(H, N) -> (H, H) shares of rows that two heads put alike, matched one to one."""
    num = int(outputs.max()) + 1
    shares = [
        [cluster_accuracy(confusion(a, b, num, num)) for b in outputs] for a in outputs
    ]
    return torch.tensor(shares)


def of_head(
    truth: Tensor, cosines: Tensor, epochs: Sequence[Tensor], config: Config
) -> dict[str, Any]:
    """One head: ``truth`` (N,), cosines (N, K) at the end, its outputs (N,) after
    each epoch.
    """
    num = cosines.shape[1]
    output, counts = (
        cosines.argmax(dim=-1),
        confusion(truth, cosines.argmax(dim=-1), num, num),
    )
    match = hungarian(counts)  # cluster of each class
    mistakes = sorted(
        (
            (int(counts[a, match[b]]), a, b)
            for a in range(num)
            for b in range(num)
            if a != b
        ),
        reverse=True,
    )
    stays = [float((epoch == output).float().mean()) >= STAYS for epoch in epochs]
    undecided = [epoch for epoch, stay in enumerate(stays, 1) if not stay]
    objective = config.objective
    moved_to = sinkhorn(cosines, objective.epsilon, objective.sinkhorn_iters).argmax(
        dim=-1
    )
    moved, right = moved_to != output, torch.from_numpy(match)[truth]
    return {
        "accuracy": accuracy(truth, output),
        "mistakes": [
            {"true": a, "taken for": b, "rows": rows}
            for rows, a, b in mistakes[:3]
            if rows
        ],
        "decided at epoch": (undecided[-1] if undecided else 0) + 1,
        "accuracy every 5 epochs": [accuracy(truth, epoch) for epoch in epochs[4::5]],
        "moved by Sinkhorn": round(float(moved.float().mean()), 4),
        "moved right": (
            round(float((moved_to == right)[moved].float().mean()), 3)
            if moved.any()
            else None
        ),
        "sizes": torch.bincount(output, minlength=num).tolist(),
    }


def watch(config: Config, train: TrainSet, truth: Tensor) -> dict[str, Any]:
    """Train and look: ``truth`` (N_u,) of the unlabeled rows."""
    observer = Observer(config, train.unlabeled_images[:])
    with tempfile.TemporaryDirectory() as folder:
        run_phase(config, PRETRAIN, train, observer, Storage(folder))
        state = run_phase(config, DISCOVER, train, observer, Storage(folder))
    cosines, logits = look(state.model, train.unlabeled_images[:], config)
    outputs, losses, best = cosines.argmax(dim=-1), state.head_losses, state.best_head
    epochs = torch.stack(observer.epochs)  # (E, H, N)
    heads = [
        of_head(truth, cosines[h], list(epochs[:, h]), config)
        for h in range(len(cosines))
    ]
    alike, num = agreement(outputs), len(outputs)
    with_others = (alike.sum(dim=1) - 1) / (num - 1)
    medoid = int(with_others.argmax())
    aligned = cosines.gather(
        2, align_heads(cosines, medoid)[:, None].expand(cosines.shape)
    )
    mean = (
        (aligned / config.objective.temperature)
        .softmax(dim=-1)
        .mean(dim=0)
        .argmax(dim=-1)
    )
    assert logits.features is not None
    features = logits.features[0].float()
    early = agreement(epochs[len(epochs) // 2])
    signs = {
        "chosen head with others": with_others[best],
        "all heads": with_others.mean(),
        "least alike head": with_others.min(),
        "all heads, half way": (early.sum() - num) / num / (num - 1),
        "spread of losses": -(losses.max() - losses.min()) / losses.mean(),
        "lowest loss": -losses.min(),
        "silhouette": silhouette_score(
            features.numpy(), outputs[best].numpy(), metric="cosine"
        ),
        "left by Sinkhorn": 1 - heads[best]["moved by Sinkhorn"],
        "neighbors": neighbor_agreement(features, outputs[best]),
    }
    every = [head["accuracy"] for head in heads]
    return {
        "accuracy": {
            "lowest loss": every[best],
            "mean of heads": round(float(np.mean(every)), 2),
            "most alike head": every[medoid],
            "mean of probabilities": accuracy(truth, mean),
            "worst head": min(every),
            "best head by truth": max(every),
        },
        "chosen": best,
        "most alike": medoid,
        "losses": [round(float(loss), 4) for loss in losses],
        "with others": [round(float(share), 4) for share in with_others],
        "signs": {name: round(float(sign), 4) for name, sign in signs.items()},
        "heads": heads,
    }


def of_seed(seed: int, epochs: int | None, held_out: bool) -> dict[str, Any]:
    """One run of the digits preset."""
    values = {"seed": seed, "compute.threads": 1} | (
        {"discover.epochs": epochs} if epochs else {}
    )
    config = override(preset("digits"), values)
    task = make_task(read_rows(config.data), config.data)
    images, reasons = decode_many(task.rows.images, config.data.stored_size, 1)
    train = assemble(task, images, ok_mask(reasons))
    if held_out:
        return watch(config, *hold_out(train, seed % 5))
    rows = eval_sets(task, images, ok_mask(reasons))["train"]
    return watch(config, train, rows.where(rows.unlabeled).truth - task.num_known)


def summary(seeds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean, deviation and least over seeds of every way to choose; how each sign
    ranks accuracy.
    """
    accuracies, ranks = {}, {}
    for name in seeds[0]["accuracy"]:
        values = [seed["accuracy"][name] for seed in seeds]
        spread = round(float(np.std(values, ddof=1)), 2) if len(values) > 1 else None
        accuracies[name] = {
            "mean": round(float(np.mean(values)), 2),
            "sd": spread,
            "min": min(values),
        }
    for name in seeds[0]["signs"] if len(seeds) > 2 else ():
        signs = [seed["signs"][name] for seed in seeds]
        ranks[name] = {
            of: round(
                float(spearmanr(signs, [seed["accuracy"][of] for seed in seeds])[0]), 2
            )
            for of in ("lowest loss", "mean of heads")
        }
    return {"accuracy": accuracies, "rank correlation of signs": ranks}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--held-out", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    with suppress(KeyboardInterrupt):  # the seeds that are done are printed
        for seed in options.seeds:
            found[seed] = of_seed(seed, options.epochs, options.held_out)
            print(
                f"seed {seed}: {found[seed]['accuracy']}", file=sys.stderr, flush=True
            )
    row = {
        "question": (
            "why is a seed weak, when is it decided, and can it be told without a"
            " label?"
        ),
        "command": "python -m benchmarks.weak_seed " + " ".join(sys.argv[1:]),
        "n": len(found),
        **summary(list(found.values())),
        "seeds": found,
        **environment(),
    }
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
