"""Pseudo-labels by entropic optimal transport (paper Sec. 3.2, Eq. 4-5)."""

import torch
from torch import Tensor


def sinkhorn(logits: Tensor, epsilon: float, num_iters: int, prior: Tensor | None = None) -> Tensor:
    """Soft assignment of rows to equally used clusters: Sinkhorn-Knopp on ``exp(logits / epsilon)``; or to
    clusters used in proportion to ``prior`` (K,), which is positive.

    Each iteration first gives every cluster its mass, then every row mass one, so rows of the result sum
    to one while the cluster marginals hold only approximately: at 3 iterations (the paper's, from SwAV) that
    is wanted, converging hurts small batches. Works in the log domain, where ``exp(1 / 0.05)`` cannot
    overflow and a starved cluster cannot divide by zero; half precision is raised to float32.

    (..., B, K) cosines of B unlabeled rows to K prototypes, batched over views and heads -> (..., B, K)
    non-negative, rows summing to one, without gradient. ``epsilon`` weighs the entropy H(Y) in Eq. 4.
    """
    scores = logits.detach().to(torch.promote_types(logits.dtype, torch.float32)) / epsilon
    by_cluster = scores.shape[-1] < scores.shape[-2]  # sums over 5 clusters in a row would not vectorize
    scores = scores.mT.contiguous() if by_cluster else scores
    over_rows, over_clusters = (-1, -2) if by_cluster else (-2, -1)
    mass = None if prior is None else prior.to(scores.dtype).log()
    mass = mass.unsqueeze(-1) if mass is not None and by_cluster else mass
    for _ in range(num_iters):
        scores = scores.log_softmax(dim=over_rows)  # every cluster gets the same mass
        scores = scores if mass is None else scores + mass  # or its own
        scores = scores.log_softmax(dim=over_clusters)  # every row gets mass one
    return scores.exp().mT if by_cluster else scores.exp()
