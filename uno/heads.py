"""Heads of the network: prototypes and projection heads (paper Sec. 3.1, 3.3).

The paper has n cluster heads and n overclustering heads, each with its own MLP. Here
they are stacked: one wide Linear, one BatchNorm1d and one batched matrix product serve
all heads. Parameters and results equal those of separate MLPs.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Prototypes(nn.Module):
    """Compute cosines with K prototypes, by a linear layer without bias.

    ``weight`` holds the prototypes. They start at random with length one. Training
    changes their length, and :meth:`uno.model.UnoModel.normalize_prototypes_` restores
    it.

    Args:
        *shape: The shape of ``weight``: K, D, or H, K, D for H heads.
    """

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(F.normalize(torch.randn(*shape), dim=-1))

    def forward(self, features: Tensor) -> Tensor:
        """Compute the cosines of features with the K prototypes.

        The prototypes are not scaled here, so they must have length one.

        Args:
            features: Features (..., B, D) of any length. They are scaled to length one.
                The weights (H, K, D) of several heads take features (H, B, D), or (B,
                D) for all heads.

        Returns:
            Cosines (..., B, K), float32 or float64; (H, B, K) for several heads.
        """
        return self.cosines(unit(features))

    def cosines(self, directions: Tensor) -> Tensor:
        """Compute the cosines of vectors of length one with the K prototypes.

        Nothing is scaled here, so the prototypes must have length one, too. Autocast
        does not apply, because cosines in bfloat16 would change 0.8% of the
        pseudo-labels.

        Args:
            directions: Unit vectors (..., B, D), float32 or float64, as :func:`unit`
                returns them. The weights (H, K, D) of several heads take (H, B, D), or
                (B, D) for all heads.

        Returns:
            Cosines (..., B, K), in the type of ``directions``; (H, B, K) for several
            heads.
        """
        with torch.autocast(directions.device.type, enabled=False):
            return directions @ self.weight.mT.to(directions.dtype)


class NovelHead(nn.Module):
    """The novel head of a baseline: cosines of the feature to K prototypes.

    With ``has_layer`` the head sees the features through a linear layer, which is the
    identity at first. The layer takes the place of the encoder's last stage if the
    encoder is frozen, for methods that shape features. (The authors of NCL and RS train
    only this stage.)

    Args:
        num_novel: The number of prototypes K.
        num_features: The number of features D.
        auxiliary: A module that only the method's loss calls. It is trained with the
            head. None if the method has no such module.
        has_layer: Whether to build the linear layer.

    Attributes:
        layer: The linear layer from D to D features, or the identity.
    """

    def __init__(
        self,
        num_novel: int,
        num_features: int,
        auxiliary: nn.Module | None = None,
        has_layer: bool = False,
    ) -> None:
        super().__init__()
        self.prototypes = Prototypes(1, num_novel, num_features)
        self.auxiliary = auxiliary
        self.layer: nn.Module = nn.Identity()
        if has_layer:
            linear = nn.Linear(num_features, num_features)
            nn.init.eye_(linear.weight)
            nn.init.zeros_(linear.bias)
            self.layer = linear

    @property
    def weight(self) -> Tensor:
        """The prototypes of the K novel classes, (1, K, D)."""
        return self.prototypes.weight

    def forward(self, features: Tensor) -> Tensor:
        """Compute the cosines of features with the K prototypes of the novel classes.

        The features pass the linear layer first, if there is one.

        Args:
            features: Features (N, D) of any length: those of the adapter if the method
                has one, otherwise those of the encoder.

        Returns:
            Cosines (1, N, K), float32 or float64.
        """
        return self.prototypes(self.layer(features))


class StackedProjector(nn.Module):
    """H projection heads, evaluated together.

    Each head is an MLP with one hidden layer, BatchNorm and ReLU.

    Args:
        num_heads: H.
        num_features: D, the length of the features.
        hidden_dim: The width of the hidden layer of each head.
        projection_dim: P, the number of outputs of each head.
    """

    def __init__(
        self, num_heads: int, num_features: int, hidden_dim: int, projection_dim: int
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.hidden = nn.Linear(num_features, num_heads * hidden_dim)
        self.bn = nn.BatchNorm1d(num_heads * hidden_dim)
        # The default initialization of nn.Linear, for each head.
        bound = 1 / math.sqrt(hidden_dim)
        self.weight = nn.Parameter(
            torch.empty(num_heads, hidden_dim, projection_dim).uniform_(-bound, bound)
        )
        self.bias = nn.Parameter(
            torch.empty(num_heads, 1, projection_dim).uniform_(-bound, bound)
        )

    def forward(self, features: Tensor) -> Tensor:
        """Compute the projections of features by all H heads.

        Args:
            features: Features (B, D).

        Returns:
            Projections (H, B, projection_dim), which are not scaled to length one.
        """
        hidden = F.relu(self.bn(self.hidden(features)))  # (B, H * hidden)
        # (H, B, hidden)
        hidden = hidden.unflatten(1, (self.num_heads, -1)).transpose(0, 1)
        return torch.baddbmm(self.bias, hidden, self.weight)


def unit(vectors: Tensor) -> Tensor:
    """Scale vectors to length one.

    Args:
        vectors: Vectors (..., D) of any floating point type.

    Returns:
        Vectors (..., D) in float32, or float64 if they were. A zero vector stays zero.
    """
    return F.normalize(
        vectors.to(torch.promote_types(vectors.dtype, torch.float32)), dim=-1
    )
