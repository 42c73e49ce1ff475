"""What a discovery method is made of, and the parts that several share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from uno.config import Config
from uno.heads import Prototypes
from uno.model import Logits, UnoModel
from uno.state import TrainState
from uno.steps import Batch, Step, forward

Start = Callable[[Config, UnoModel, Any], dict[str, Tensor]]
"""From configuration, model and training set to the tensors that the method keeps from step to step."""


@dataclass(frozen=True)
class Method:
    """A discovery method.

    ``step`` is one optimizer step. ``novel_head(K, D)`` builds the head that reads the feature: (N, D) ->
    (1, N, K) logits, with ``weight`` (1, K, ...); None: UNO's projection heads.
    ``start(config, model, train)`` runs once, before the first step, on every worker alike: it may initialise
    the model in place and returns tensors to keep in ``state.extra`` and in every checkpoint. ``settings``:
    preset -> dotted keys, where the authors' constants depend on the data. ``needs_images``: it reads images
    other than in batches, or ``Batch.rows``, so it cannot stream.
    """

    step: Step
    novel_head: Callable[[int, int], nn.Module] | None = None
    start: Start | None = None
    needs_images: bool = False
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


class NovelHead(nn.Module):
    """Cosines of the feature to K prototypes, and a module that only training uses, if any.

    ``auxiliary`` is called by the method's step, on the features of the forward pass.
    """

    def __init__(self, num_novel: int, num_features: int, auxiliary: nn.Module | None = None) -> None:
        super().__init__()
        self.prototypes = Prototypes(1, num_novel, num_features)
        self.auxiliary = auxiliary

    @property
    def weight(self) -> Tensor:
        """(1, K, D)."""
        return self.prototypes.weight

    def forward(self, features: Tensor) -> Tensor:
        """(N, D) features -> (1, N, K) cosines."""
        return self.prototypes(features)


def forward_two_views(state: TrainState, batch: Batch) -> Logits:
    """Logits and features of the first two large views: V = 2."""
    return forward(state, batch._replace(views=batch.views[:2], num_large=2))


def novel_probabilities(logits: Logits, num_labeled: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Softmax over the C_u novel outputs of the unlabeled rows under view 0 and view 1, each (B_u, C_u)."""
    assert logits.novel is not None
    first, second = (logits.novel[:2, 0, num_labeled:] / temperature).softmax(dim=-1)
    return first, second


def pair_likelihood_loss(probabilities: Tensor, others: Tensor, similar: Tensor) -> Tensor:
    """Binary cross-entropy of "both rows are in one cluster", P = <p_i, q_j>, against ``similar``.

    Han et al. 2020, Eq. 2; Hsu et al. 2019, Eq. 1. The logarithm's 1e-7 is the authors' in both.

    Args:
        probabilities: (N, K) of this worker's rows under one view.
        others: (M, K) of all workers' rows under the other view.
        similar: (N, M) bool, or float in [0, 1].

    Returns:
        Scalar: the mean over all N M pairs.
    """
    together = probabilities @ others.T
    similar = similar.to(together.dtype)
    likelihood = similar * (together + 1e-7).log() + (1 - similar) * (1 - together + 1e-7).log()
    return -likelihood.mean()


def consistency_loss(logits: Tensor, temperature: float) -> Tensor:
    """Mean squared difference of the softmax outputs of two views: logits (2, B, K) -> scalar."""
    first, second = (logits / temperature).softmax(dim=-1)
    return F.mse_loss(first, second)


def weight_or(given: float | None, published: float) -> float:
    """The weight that was given, else the published one."""
    return published if given is None else given
