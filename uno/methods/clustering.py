"""The default for a frozen encoder: cluster its features, without training.

:func:`uno.frozen.discover_clusters` finds the clusters. Everything happens before the
first step: the adapter takes the space in which the clusters were found, and the
prototypes become the directions of the clusters' means. If steps are asked for, they
continue from there by the unified objective.
"""

from typing import Any

import torch
from torch import Tensor, nn

from uno import collectives
from uno.config import Config
from uno.errors import ConfigError
from uno.frozen import MAX_DIRECTIONS, discover_clusters
from uno.heads import unit
from uno.methods import Method
from uno.methods.method import NovelHead, set_prototypes_
from uno.model import UnoModel
from uno.num_classes import pairs_of_one_class
from uno.objective import discovery_step
from uno.prototype_init import training_features


class Adapter(nn.Module):
    """An affine map of unit features that is not trained.

    It is a :class:`uno.frozen.Space` as a module.

    Attributes:
        width: The number of coordinates.
    """

    def __init__(self, num_features: int) -> None:
        """Start from the leading ``MAX_DIRECTIONS`` of the ``num_features`` axes."""
        super().__init__()
        self.width = min(num_features, MAX_DIRECTIONS)
        # On the meta device torch.eye imports PyTorch's compiler, which takes seconds.
        directions = torch.zeros(num_features, self.width).fill_diagonal_(1)
        self.register_buffer("mean", torch.zeros(num_features))
        self.register_buffer("directions", directions)

    def forward(self, features: Tensor) -> Tensor:
        """Map features to coordinates in the space in which the clusters were found.

        Features are scaled to length one, the mean is subtracted, and the result is
        multiplied by the directions.

        Args:
            features: Features of the encoder, (N, D).

        Returns:
            Coordinates (N, ``width``).
        """
        mean, directions = self.get_buffer("mean"), self.get_buffer("directions")
        with torch.autocast(features.device.type, enabled=False):
            return (unit(features) - mean) @ directions


def start(config: Config, model: UnoModel, train: Any) -> dict[str, Tensor]:
    """Cluster the training features and move the model's adapter and prototypes.

    Args:
        config: The run's configuration.
        model: The network, which is changed in place.
        train: The training data.

    Returns:
        Tensors that the checkpoint keeps: ``agreement`` (A,) of
        :class:`uno.frozen.Result`; ``similar`` (n, 3) of :func:`pairs_of_one_class`;
        and ``counts`` (3,): unlabeled rows that were clustered, known and novel
        classes.

    Raises:
        ConfigError: There are not more unlabeled rows than clusters.
    """
    model.eval()
    labeled, labels, unlabeled = training_features(config, model, train)
    model.train()
    gcd, num_novel = config.data.setting == "gcd", train.num_novel
    if len(unlabeled) <= (num := num_novel + train.num_known * gcd):
        raise ConfigError(
            f"method {METHOD.name} needs more unlabeled rows than {num} clusters, not"
            f" {len(unlabeled)}"
        )

    def compute() -> dict[str, Tensor]:
        result = discover_clusters(
            labeled, labels, unlabeled, num_novel, gcd, config.seed
        )
        return {
            "mean": result.space.mean,
            "directions": result.space.directions,
            "prototypes": result.prototypes,
            "agreement": result.agreement,
            "similar": pairs_of_one_class(
                result, labeled, labels, unlabeled, gcd, config.seed
            ),
        }

    found = collectives.compute_on_rank0(compute, model.known.weight.device)
    with torch.no_grad():
        model.adapter.mean.copy_(found["mean"])
        model.adapter.directions.copy_(found["directions"])
    set_prototypes_(model, found["prototypes"])
    return {
        "agreement": found["agreement"],
        "similar": found["similar"],
        "counts": torch.tensor([len(unlabeled), train.num_known, num_novel]),
    }


METHOD = Method(
    "clustering",
    discovery_step,
    novel_head=NovelHead,
    adapter=Adapter,
    start=start,
    gcd=True,
    trains=False,
)
