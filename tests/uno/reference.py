"""Slow, plain float64 versions of the paper's equations, written from the text: what
the fast code must equal.
"""

import itertools

import numpy as np
import torch
import torch.nn.functional as F


def scale_matrix(
    logits: np.ndarray, epsilon: float, num_iters: int, prior=None
) -> np.ndarray:
    """Sinkhorn-Knopp by scaling the matrix exp(logits / epsilon): (B, K) -> (B, K);
    column k to prior[k].

    Works on exact logarithms of the row and column sums, so that nothing over- or
    underflows.
    """
    log_y = logits.astype(np.float64) / epsilon
    for _ in range(num_iters if log_y.size else 0):
        for k, column in enumerate(log_y.T):
            column -= _log_sum(column) - (0 if prior is None else np.log(prior[k]))
        for row in log_y:
            row -= _log_sum(row)
    return np.exp(log_y)


def _log_sum(values: np.ndarray) -> float:
    return float(values.max() + np.log(np.exp(values - values.max()).sum()))


def cross_entropy(logits: np.ndarray, target: np.ndarray, temperature: float) -> float:
    """Eq. 1 for one row."""
    scaled = logits / temperature
    log_p = scaled - _log_sum(scaled)
    return -float(sum(t * lp for t, lp in zip(target, log_p, strict=True)))


def targets_of(
    novel: np.ndarray, num_labeled: int, num_large: int, options: dict
) -> np.ndarray:
    """Pseudo-labels (V_large, B_u, K) of one head from its (V, B, K) logits."""
    epsilon, num_iters = options["epsilon"], options["num_iters"]
    unlabeled = novel[:num_large, num_labeled:]
    if options["aggregation"] == "average_logits":
        unlabeled = [sum(unlabeled) / num_large] * num_large
    targets = [scale_matrix(view, epsilon, num_iters) for view in unlabeled]
    if options["aggregation"] == "average_pseudo_labels":
        targets = [sum(targets) / num_large] * num_large
    if options["hard"]:
        targets = [np.eye(t.shape[1])[t.argmax(axis=1)] for t in targets]
    return np.array(targets)


def classify_failure(
    known, novel, labels, targets, temperature: float, concat: bool
) -> float:
    """Eq. 1-3 for one head: known (V, B, C_l), novel (V, B, K), targets (V_large,
    B_u, K).
    """
    terms, num_known, num_clusters = [], known.shape[2], novel.shape[2]
    # the view that teaches, the one that predicts
    for v, w in itertools.permutations(range(len(known)), 2):
        for b in range(known.shape[1] if v < len(targets) else 0):
            if b < len(labels):
                alone, logits = np.eye(num_known)[labels[b]], known[w, b]
                # Eq. 2, upper row
                target = np.concatenate([alone, np.zeros(num_clusters)])
            else:
                alone, logits = targets[v, b - len(labels)], novel[w, b]
                nothing = (
                    num_known + num_clusters - len(alone)
                )  # in the GCD setting the target is over all outputs
                target = np.concatenate([np.zeros(nothing), alone])  # Eq. 2, lower row
            if concat:
                terms.append(
                    cross_entropy(
                        np.concatenate([known[w, b], novel[w, b]]), target, temperature
                    )
                )
            else:
                terms.append(cross_entropy(logits, alone, temperature))
    return float(np.mean(terms))


def padded_loss(known, families, labels, targets, temperature, concat=True):
    """Compute Eq. 1-3 for autograd, with concatenated logits and padded targets.

    The arguments are those of :func:`uno.objective.discovery_loss`.
    """
    losses, (num_views, num_rows, num_known) = [], known.shape
    for novel, target in zip(families, targets, strict=True):
        num_large, num_heads, num_clusters = len(target), *novel.shape[1::2]
        pairs = 1 - torch.eye(num_large, num_views, dtype=known.dtype)
        known_of_heads = known.unsqueeze(1).expand(-1, num_heads, -1, -1)
        logits = torch.cat([known_of_heads, novel], dim=-1) / temperature
        if not concat:  # outputs of the other block are out of reach
            logits[:, :, : len(labels), num_known:] = -1e9
            logits[:, :, len(labels) :, :num_known] = -1e9
        log_p = logits.log_softmax(dim=-1)
        padding = num_known + num_clusters - target.shape[-1]
        pseudo_labels = F.pad(target.to(known.dtype), (padding, 0))
        one_hot = F.pad(F.one_hot(labels, num_known).to(known.dtype), (0, num_clusters))
        one_hot = one_hot.expand(num_large, num_heads, -1, -1)
        y = torch.cat([one_hot, pseudo_labels], dim=2)
        weight = pairs / (num_large * (num_views - 1) * num_rows)
        losses.append(-torch.einsum("vw,vhbk,whbk->h", weight, y, log_p))
    return torch.stack(losses)
