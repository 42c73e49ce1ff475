"""Slow, plain float64 versions of the paper's equations, written from the text: what the fast code must
equal.
"""

import numpy as np
import torch
import torch.nn.functional as F


def scale_matrix(logits: np.ndarray, epsilon: float, num_iters: int) -> np.ndarray:
    """Sinkhorn-Knopp by scaling the matrix exp(logits / epsilon): (B, K) -> (B, K).

    Works on exact logarithms of the row and column sums, one element at a time, so that nothing over- or
    underflows.
    """
    num_rows, num_clusters = logits.shape
    if num_rows == 0:
        return np.zeros((0, num_clusters))
    log_y = [[float(logits[b, k]) / epsilon for k in range(num_clusters)] for b in range(num_rows)]
    for _ in range(num_iters):
        for k in range(num_clusters):
            total = _log_sum([log_y[b][k] for b in range(num_rows)])
            for b in range(num_rows):
                log_y[b][k] -= total
        for b in range(num_rows):
            total = _log_sum(log_y[b])
            for k in range(num_clusters):
                log_y[b][k] -= total
    return np.exp(np.array(log_y, dtype=np.float64).reshape(num_rows, num_clusters))


def _log_sum(values: list[float]) -> float:
    top = max(values)
    return top + float(np.log(sum(np.exp(v - top) for v in values)))


def cross_entropy(logits: np.ndarray, target: np.ndarray, temperature: float) -> float:
    """Eq. 1 for one row."""
    scaled = logits / temperature
    log_p = scaled - _log_sum(list(scaled))
    return -float(sum(t * lp for t, lp in zip(target, log_p, strict=True)))


def targets_of(novel: np.ndarray, num_labeled: int, num_large: int, options: dict) -> np.ndarray:
    """Pseudo-labels (V_large, B_u, K) of one head from its (V, B, K) logits."""
    epsilon, num_iters = options["epsilon"], options["num_iters"]
    unlabeled = novel[:num_large, num_labeled:]
    if options["aggregation"] == "average_logits":
        target = scale_matrix(sum(unlabeled) / num_large, epsilon, num_iters)
        targets = [target] * num_large
    elif options["aggregation"] == "average_pseudo_labels":
        target = sum(scale_matrix(view, epsilon, num_iters) for view in unlabeled) / num_large
        targets = [target] * num_large
    else:
        targets = [scale_matrix(view, epsilon, num_iters) for view in unlabeled]
    if options["hard"]:
        targets = [np.eye(t.shape[1])[t.argmax(axis=1)] for t in targets]
    return np.array(targets)


def loss_of(
    known: np.ndarray,
    novel: np.ndarray,
    labels: np.ndarray,
    targets: np.ndarray,
    temperature: float,
    concat: bool,
) -> float:
    """Eq. 1-3 for one head: known (V, B, C_l), novel (V, B, K), targets (V_large, B_u, K)."""
    num_views, num_rows, num_known = known.shape
    num_clusters = novel.shape[2]
    terms = []
    for v in range(len(targets)):  # the view that teaches
        for w in range(num_views):  # the view that predicts
            if v == w:
                continue
            for b in range(num_rows):
                if b < len(labels):
                    one_hot = np.eye(num_known)[labels[b]]
                    target = np.concatenate([one_hot, np.zeros(num_clusters)])  # Eq. 2, upper row
                    logits, alone = known[w, b], one_hot
                else:
                    pseudo = targets[v, b - len(labels)]
                    target = np.concatenate([np.zeros(num_known), pseudo])  # Eq. 2, lower row
                    logits, alone = novel[w, b], pseudo
                if concat:
                    terms.append(
                        cross_entropy(np.concatenate([known[w, b], novel[w, b]]), target, temperature)
                    )
                else:
                    terms.append(cross_entropy(logits, alone, temperature))
    return float(np.mean(terms))


def padded_loss(known, families, labels, targets, temperature, concat=True, mistake=None):
    """Eq. 1-3 for autograd, with concatenated logits and padded targets; arguments as discovery_loss.

    ``mistake`` makes one that this field made: see tests/uno/test_mutants.py.
    """
    losses, (num_views, num_rows, num_known) = [], known.shape
    tau = 1 if mistake == "no temperature" else temperature
    for novel, target in zip(families, targets, strict=True):
        num_large, num_heads, num_clusters = len(target), novel.shape[1], novel.shape[-1]
        same = torch.eye(num_large, num_views, dtype=known.dtype)
        pairs = {"itself too": torch.ones_like(same), "unswapped": same}.get(mistake, 1 - same)
        joint = torch.cat([known.unsqueeze(1).expand(-1, num_heads, -1, -1), novel], dim=-1) / tau
        if not concat:  # the other block's outputs are out of reach
            joint[:, :, : len(labels), num_known:] = -1e9
            joint[:, :, len(labels) :, :num_known] = -1e9
        log_p = joint.log_softmax(dim=-2 if mistake == "over rows" else -1)
        pseudo = F.pad(target.to(known.dtype), (num_known, 0))
        if mistake == "known block":
            pseudo = pseudo.roll(-num_known, dims=-1)
        one_hot = F.pad(F.one_hot(labels, num_known).to(known.dtype), (0, num_clusters))
        y = torch.cat([one_hot.expand(num_large, num_heads, -1, -1), pseudo], dim=2)
        weight = pairs / (num_large * (num_views - 1) * num_rows)
        losses.append(-torch.einsum("vw,vhbk,whbk->h", weight, y, log_p))
    return torch.stack(losses)
