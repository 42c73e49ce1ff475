"""Terms that later work adds to UNO's objective; each is off by default and one function.

All take the cosines of a step: known (V, B, C_l), novel (V, H, B, C_u) of the cluster heads, the first B_l
rows labeled. Under several workers each returns a number whose mean over workers, and whose gradient, is that
of the global batch.
"""

from __future__ import annotations

from itertools import combinations

import torch
from torch import Tensor

from uno.collectives import mean_with_grad


def iic_loss(known: Tensor, novel: Tensor, num_labeled: int, temperature: float) -> Tensor:
    """Minus the symmetric KL divergence between the outputs of labeled and of unlabeled rows.

    Li et al. (CVPR 2023), "inter-class": outputs are softmaxes over all C classes; the mean goes over all
    pairs of a labeled and an unlabeled row, over views and cluster heads. A mean over pairs needs no pairs:
    the mean of KL(p || q) is the mean of <p, log p> less <mean p, mean log q>.

    Args:
        known: (V, B, C_l).
        novel: (V, H, B, C_u).
        num_labeled: B_l; both kinds of rows must be there.
        temperature: tau.

    Returns:
        Scalar, negative.
    """
    joint = torch.cat([known.unsqueeze(1).expand(-1, novel.shape[1], -1, -1), novel], dim=-1) / temperature
    log_p = joint.log_softmax(dim=-1)  # (V, H, B, C)
    p = log_p.exp()
    inner = (p * log_p).sum(dim=-1)  # (V, H, B), minus the entropies
    labeled, unlabeled = slice(None, num_labeled), slice(num_labeled, None)
    p_l, p_u, log_p_l, log_p_u = (
        mean_with_grad(rows[:, :, part].mean(dim=2)) for rows in (p, log_p) for part in (labeled, unlabeled)
    )  # (V, H, C)
    cross = (p_l * log_p_u + p_u * log_p_l).sum(dim=-1)  # (V, H)
    own = inner[:, :, labeled].mean(dim=2) + inner[:, :, unlabeled].mean(dim=2)
    return -(own - cross).mean() / 2


def iic_view_loss(known: Tensor, novel: Tensor, num_labeled: int, temperature: float) -> Tensor:
    """Symmetric KL divergence between the outputs of a row's views, per class.

    Li et al. (CVPR 2023), "intra-class": labeled rows' softmax over known outputs, unlabeled rows' over novel
    ones; mean over pairs of views, heads and rows, and, as in the authors' code, divided by the number of
    classes.

    Returns:
        Scalar.
    """
    parts = (known[:, None, :num_labeled], novel[:, :, num_labeled:])
    total = known.new_zeros(())
    for logits in parts:
        log_p = (logits / temperature).log_softmax(dim=-1)
        p = log_p.exp()
        for v, w in combinations(range(len(logits)), 2):
            both = (p[v] - p[w]) * (log_p[v] - log_p[w])  # KL(v || w) + KL(w || v), element by element
            total = total + both.mean() / 2
    return total / (len(known) * (len(known) - 1) / 2)


def rkd_loss(
    known: Tensor, novel: Tensor, teacher: Tensor, temperature: float, distillation_temperature: float
) -> Tensor:
    """Cross-entropy of the known outputs on unlabeled rows with those of the pretrained network.

    Gu et al. (ICCV 2023), rKD: a row weighs as much as the probability that the current network gives to all
    known classes, relative to the mean; factor T^2 as in Hinton et al. 2015. Softmax at tau T throughout. The
    weight has a gradient, as in the authors' code.

    Args:
        known: (V, B_u, C_l) of unlabeled rows.
        novel: (V, H, B_u, C_u).
        teacher: (V, B_u, C_l) of the pretrained network, without gradient.
        temperature: tau.
        distillation_temperature: T.

    Returns:
        Scalar: the mean over views, heads and rows.
    """
    scale = temperature * distillation_temperature
    cross_entropy = -((teacher / scale).softmax(dim=-1) * (known / scale).log_softmax(dim=-1)).sum(dim=-1)
    log_known = (known / scale).logsumexp(dim=-1).unsqueeze(1)  # (V, 1, B_u)
    known_mass = torch.sigmoid(log_known - (novel / scale).logsumexp(dim=-1))  # (V, H, B_u)
    weight = known_mass / mean_with_grad(known_mass.mean())
    return distillation_temperature**2 * (weight * cross_entropy.unsqueeze(1)).mean()
