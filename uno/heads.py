"""Known head, projection heads and prototypes (paper Sec. 3.1, 3.3).

The paper's separate networks, n cluster and n overclustering heads, are stacked: one
wide Linear + BatchNorm1d and one batched matmul serve all heads, with parameters and
results equal to separate MLPs.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Prototypes(nn.Module):
    """Bias-free linear layer to cosines: its rows, (K, D) or (H, K, D) for H heads,
    are unit vectors.
    """

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(F.normalize(torch.randn(*shape), dim=-1))

    def forward(self, features: Tensor) -> Tensor:
        """(..., B, D) features of any length -> (..., B, K) cosines, see
        :meth:`cosines`.
        """
        return self.cosines(unit(features))

    def cosines(self, directions: Tensor) -> Tensor:
        """Unit vectors (..., B, D) -> (..., B, K) in float32 at least: bf16 flips
        0.8% of pseudo-labels.
        """
        with torch.autocast(directions.device.type, enabled=False):
            return directions @ self.weight.mT.to(directions.dtype)


class StackedProjector(nn.Module):
    """H projection heads D -> hidden (BatchNorm, ReLU) -> projection_dim, evaluated
    together.
    """

    def __init__(
        self, num_heads: int, num_features: int, hidden_dim: int, projection_dim: int
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.hidden = nn.Linear(num_features, num_heads * hidden_dim)
        self.bn = nn.BatchNorm1d(num_heads * hidden_dim)
        # nn.Linear's default initialization, per head
        bound = 1 / math.sqrt(hidden_dim)
        self.weight = nn.Parameter(
            torch.empty(num_heads, hidden_dim, projection_dim).uniform_(-bound, bound)
        )
        self.bias = nn.Parameter(
            torch.empty(num_heads, 1, projection_dim).uniform_(-bound, bound)
        )

    def forward(self, features: Tensor) -> Tensor:
        """(B, D) features -> (H, B, projection_dim) projections, not normalized."""
        hidden = F.relu(self.bn(self.hidden(features)))  # (B, H * hidden)
        # (H, B, hidden)
        hidden = hidden.unflatten(1, (self.num_heads, -1)).transpose(0, 1)
        return torch.baddbmm(self.bias, hidden, self.weight)


def unit(vectors: Tensor) -> Tensor:
    """(..., D) -> the same, of length one, in float32 at least; a zero vector stays
    zero.
    """
    return F.normalize(
        vectors.to(torch.promote_types(vectors.dtype, torch.float32)), dim=-1
    )
