"""How much do batched heads, Sinkhorn and loss gain over loops over views and heads?

    python -m benchmarks.objective --repeats 15

prints one JSON row with CIFAR10, CIFAR100-20 and ImageNet sizes: time (forward +
backward) of each part, ours next to the straightforward way written below: one network
per head, called in turn, boolean masks, zero-padded targets, one float32 Sinkhorn per
view and head. Both give the same losses, which is checked before anything is timed.
Features are random; the encoder is not part of it.
"""

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measure import (
    CLASSES,
    add_timing_options,
    environment,
    medians,
    spread,
    take_turns,
)
from uno.config import Config, override
from uno.data.sampling import make_plan
from uno.model import Logits, build_network
from uno.objective import discovery_loss, global_targets
from uno.presets import preset

NUM_FEATURES = 512  # of ResNet18
PARTS = ("sinkhorn", "sinkhorn_and_loss", "heads", "all")


# ------------------------------------------------------------------------------------ the straightforward way  # noqa: E501
class LoopedHeads(nn.Module):
    """A known head, and a module for every cluster and overclustering head."""

    def __init__(self, config: Config, num_known: int, num_novel: int) -> None:
        super().__init__()
        sizes = config.model
        self.known = nn.Linear(NUM_FEATURES, num_known, bias=False)
        widths = [num_novel, sizes.overcluster_factor * num_novel]
        self.families = nn.ModuleList(
            nn.ModuleList(
                nn.Sequential(
                    nn.Linear(NUM_FEATURES, sizes.hidden_dim),
                    nn.BatchNorm1d(sizes.hidden_dim),
                    nn.ReLU(),
                    nn.Linear(sizes.hidden_dim, sizes.projection_dim),
                    Normalize(),
                    nn.Linear(sizes.projection_dim, width, bias=False),
                )
                for _ in range(sizes.num_heads)
            )
            for width in widths
        )

    def forward(self, features: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """V features (B, D) -> known (V, B, C_l) and per family (V, H, B, K)."""
        normalized = [F.normalize(view, dim=1) for view in features]
        known = torch.stack([self.known(view) for view in normalized])
        return known, [
            torch.stack(
                [torch.stack([head(view) for head in family]) for view in normalized]
            )
            for family in self.families
        ]


class Normalize(nn.Module):
    """Unit length, as a layer."""

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return F.normalize(x, dim=1)


def looped_sinkhorn(logits: Tensor, epsilon: float, num_iters: int) -> Tensor:
    """(B, K) -> (B, K), Sinkhorn-Knopp on the plain exponentials."""
    plan = torch.exp(logits / epsilon).t()
    plan /= plan.sum()
    num_clusters, num_rows = plan.shape
    for _ in range(num_iters):
        plan /= plan.sum(dim=1, keepdim=True)
        plan /= num_clusters
        plan /= plan.sum(dim=0, keepdim=True)
        plan /= num_rows
    return (plan * num_rows).t()


def looped_targets(
    novel: Tensor, labeled: Tensor, epsilon: float, num_iters: int
) -> list[list[Tensor]]:
    """V lists of H tensors (B_u, K)."""
    with torch.no_grad():
        return [
            [looped_sinkhorn(head[~labeled], epsilon, num_iters) for head in view]
            for view in novel
        ]


def looped_loss(
    known: Tensor, novel: Tensor, labels: Tensor, labeled: Tensor, config: Config
) -> Tensor:
    """(H,) losses of one family; ``labeled`` (B,) bool."""
    num_views, num_heads, num_rows, num_clusters = novel.shape
    num_known = known.shape[-1]
    targets = known.new_zeros(num_views, num_heads, num_rows, num_known + num_clusters)
    objective = config.objective
    pseudo_labels = looped_targets(
        novel, labeled, objective.epsilon, objective.sinkhorn_iters
    )
    for v in range(num_views):
        for h in range(num_heads):
            targets[v, h, labeled, :num_known] = F.one_hot(labels, num_known).to(
                known.dtype
            )
            targets[v, h, ~labeled, num_known:] = pseudo_labels[v][h]
    losses = []
    for h in range(num_heads):
        loss = known.new_zeros(())
        for v in range(num_views):
            for w in range(num_views):
                if v != w:
                    logits = (
                        torch.cat([known[w], novel[w, h]], dim=1)
                        / objective.temperature
                    )
                    loss = (
                        loss
                        - (targets[v, h] * F.log_softmax(logits, dim=1))
                        .sum(dim=1)
                        .mean()
                    )
        losses.append(loss / (num_views * (num_views - 1)))
    return torch.stack(losses)


# ------------------------------------------------------------------------------------------------ measuring  # noqa: E501
def main() -> None:
    """Run the command line, and print one row of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--presets", nargs="+", default=["cifar10", "cifar100_20", "imagenet"]
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add_timing_options(parser, batch=512, repeats=15, threads=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    row = {
        "question": "heads, Sinkhorn and loss: batched against looped",
        "command": "python -m benchmarks.objective " + " ".join(sys.argv[1:]),
        **vars(options),
        "results": {name: measure(name, options) for name in options.presets},
        **environment(options.device),
    }
    print(json.dumps(row))


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure all methods at the sizes of a preset."""
    methods = make_methods(name, options.batch, options.device)
    methods = {
        key: run for key, run in methods.items() if key.split()[1] in options.parts
    }
    seconds = take_turns(methods, options.repeats, options.device, options.clock)
    middle, spreads = medians(seconds), spread(seconds)
    return {
        part: {
            "speedup": round(middle[f"looped {part}"] / middle[f"ours {part}"], 2),
            **{
                way: {
                    "ms": round(1000 * middle[f"{way} {part}"], 3),
                    "spread": spreads[f"{way} {part}"],
                }
                for way in ("ours", "looped")
            },
        }
        for part in options.parts
    }


def outputs(logits: Logits) -> tuple[Tensor, list[Tensor]]:
    """The known head's logits, and those of each family."""
    return logits.known, [
        part for part in (logits.novel, logits.over) if part is not None
    ]


def make_methods(
    name: str, batch_size: int, device: str
) -> dict[str, Callable[[], Any]]:
    """Return the parts of the objective, batched and with loops.

    Returns:
        Functions by name: ``ours PART`` and ``looped PART`` for the parts ``sinkhorn``,
        ``sinkhorn_and_loss``, ``heads`` and ``all``. Their losses are checked to be
        equal.
    """
    config = override(preset(name), {"train.batch_size": batch_size})
    objective, num_views = config.objective, config.augment.large.num_views
    num_known, num_novel, rows_l, rows_u = CLASSES[name]
    plan = make_plan(0, config.data.batch_sampling, batch_size, rows_l, rows_u)
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, num_known, (plan.labeled_size,), generator=generator).to(
        device
    )
    labeled = (torch.arange(batch_size) < plan.labeled_size).to(device)
    features = torch.randn(
        num_views * batch_size, NUM_FEATURES, generator=generator
    ).to(device)
    model = build_network(config, num_known, num_novel, 0).to(device).train()
    looped = LoopedHeads(config, num_known, num_novel).to(device).train()
    with torch.no_grad():
        known, families = outputs(model.heads(features, num_views))

    def our_losses(known: Tensor, families: list[Tensor]) -> Tensor:
        targets = global_targets(families, num_views, len(labels), objective)
        return discovery_loss(known, families, labels, targets, objective.temperature)

    def looped_losses(known: Tensor, families: list[Tensor]) -> Tensor:
        return torch.stack(
            [looped_loss(known, own, labels, labeled, config) for own in families]
        )

    torch.testing.assert_close(
        our_losses(known, families), looped_losses(known, families), rtol=1e-4, atol=0
    )

    def leaves() -> tuple[Tensor, list[Tensor]]:
        return known.clone().requires_grad_(), [
            family.clone().requires_grad_() for family in families
        ]

    def our_heads() -> tuple[Tensor, list[Tensor]]:
        model.zero_grad(set_to_none=True)
        model.normalize_prototypes_()
        return outputs(model.heads(features.clone().requires_grad_(), num_views))

    def looped_heads() -> tuple[Tensor, list[Tensor]]:
        looped.zero_grad(set_to_none=True)
        last = [head[-1] for family in looped.families for head in family]
        with torch.no_grad():
            for module in [looped.known, *last]:
                module.weight.copy_(F.normalize(module.weight, dim=1))
        return looped(
            [view.clone().requires_grad_() for view in features.chunk(num_views)]
        )

    def backward(
        forward: Callable[[], tuple[Tensor, list[Tensor]]],
        losses: Callable[[Tensor, list[Tensor]], Tensor],
    ) -> Callable[[], None]:
        return lambda: losses(*forward()).mean().backward()

    def total(known: Tensor, families: list[Tensor]) -> Tensor:
        return known.sum() + sum(family.sum() for family in families)

    return {
        "ours sinkhorn": lambda: global_targets(
            families, num_views, len(labels), objective
        ),
        "looped sinkhorn": lambda: [
            looped_targets(own, labeled, objective.epsilon, objective.sinkhorn_iters)
            for own in families
        ],
        "ours sinkhorn_and_loss": backward(leaves, our_losses),
        "looped sinkhorn_and_loss": backward(leaves, looped_losses),
        "ours heads": backward(our_heads, total),
        "looped heads": backward(looped_heads, total),
        "ours all": backward(our_heads, our_losses),
        "looped all": backward(looped_heads, looped_losses),
    }


if __name__ == "__main__":
    main()
