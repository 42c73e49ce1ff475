"""Clusters of a frozen encoder's features, of the kind that finds known classes best when they are hidden:
:mod:`uno.choice`. Everything happens before the first step: prototypes are moved to the means of the chosen
clusters, in the space that was chosen with them. Steps, if some are asked for, continue from there by the
unified objective.
"""

from typing import Any

import torch
from torch import Tensor, nn

from uno.choice import MAX_DIRECTIONS, Space, find
from uno.config import Config
from uno.errors import ConfigError
from uno.heads import unit
from uno.methods import Method
from uno.methods.method import NovelHead
from uno.model import UnoModel
from uno.objective import discovery_step
from uno.prototype_init import training_features


class Adapter(nn.Module):
    """A :class:`uno.choice.Space` as a module (N, D) -> (N, ``width``); nothing in it learns."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.width = min(num_features, MAX_DIRECTIONS)
        self.register_buffer("mean", torch.zeros(num_features))
        self.register_buffer("directions", torch.eye(num_features)[:, : self.width].clone())

    def forward(self, features: Tensor) -> Tensor:
        """Coordinates in the chosen space."""
        mean, directions = self.get_buffer("mean"), self.get_buffer("directions")
        with torch.autocast(features.device.type, enabled=False):
            return (unit(features) - mean) @ directions


def start(config: Config, model: UnoModel, train: Any) -> dict[str, Tensor]:
    """Choose, and move adapter and prototypes. Returns what was chosen and expected, and of how many new
    classes how many were found. ConfigError: fewer unlabeled rows than clusters.
    """
    model.eval()
    labeled, labels, unlabeled = training_features(config, model, train)
    model.train()
    gcd, num_novel = config.data.setting == "gcd", train.num_novel
    if len(unlabeled) <= (num := num_novel + train.num_known * gcd):
        raise ConfigError(
            f"method choice needs more unlabeled rows than {num} clusters, not {len(unlabeled)}"
        )
    choice, space, found = find(labeled, labels, unlabeled, num_novel, gcd, config.seed)
    _move_(model, space, found)
    left = int(found[train.num_known :].any(dim=1).sum())
    return {
        "chosen": torch.tensor([choice.candidate, choice.num_hidden]), "right": choice.scores,
        "right_new": choice.new, "right_joined": choice.joined, "classes": torch.tensor([num_novel, left]),
    }  # fmt: skip


@torch.no_grad()
def _move_(model: UnoModel, space: Space, found: Tensor) -> None:
    model.adapter.mean.copy_(space.mean)
    model.adapter.directions.copy_(space.directions)
    known, novel = found.split([model.num_known, model.num_novel])
    model.known.weight.copy_(known)
    model.novel.weight[0].copy_(novel)


METHOD = Method(
    "choice", discovery_step, novel_head=NovelHead, adapter=Adapter, start=start, gcd=True, trains=False
)  # fmt: skip
