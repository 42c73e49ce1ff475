"""What later work adds to UNO's objective, all of it off by default: IIC, rKD, and a
queue for Sinkhorn.

The terms take the cosines of a step: known (V, B, C_l), novel (V, H, B, C_u) of the
cluster heads, the first B_l rows labeled. Under several workers each is a number whose
mean over workers, and whose gradient, is that of the global batch.
"""

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from uno.collectives import gather_rows, mean_with_grad
from uno.config import Config, ObjectiveConfig
from uno.model import Logits, UnoModel
from uno.objective import discovery_loss, global_targets
from uno.state import TrainState
from uno.steps import Batch, forward, update_


def step(state: TrainState, batch: Batch, config: Config, lr: float) -> Tensor:
    """:func:`uno.objective.discovery_step` with the terms and the queue that
    ``objective`` asks for.
    """
    objective = config.objective
    logits, labels = forward(state, batch), batch.labels
    assert logits.novel is not None
    families = [logits.novel] if logits.over is None else [logits.novel, logits.over]
    past = None
    if "queue" in state.extra:
        assert logits.directions is not None
        past = past_logits(
            state, logits.directions[: batch.num_large, :, len(labels) :]
        )
    rows, prior = (batch.num_large, len(labels)), state.extra.get("prior")
    targets = global_targets(families, *rows, objective, past, logits.known, prior)
    losses = discovery_loss(
        logits.known, families, labels, targets, objective.temperature, objective.concat
    )
    loss = torch.stack([losses.mean(), *terms(state, batch, logits, objective)]).sum()
    return update_(state, loss, lr, losses[0])


def terms(
    state: TrainState, batch: Batch, logits: Logits, objective: ObjectiveConfig
) -> Iterator[Tensor]:
    """What ``objective`` adds to the loss, weighted."""
    assert logits.novel is not None
    known, novel, num_labeled, tau = (
        logits.known,
        logits.novel,
        len(batch.labels),
        objective.temperature,
    )
    if objective.iic_weight:
        yield objective.iic_weight * iic_loss(known, novel, num_labeled, tau)
    if objective.iic_view_weight:
        yield objective.iic_view_weight * iic_view_loss(known, novel, num_labeled, tau)
    if objective.rkd_weight:
        assert state.teacher is not None
        large, rows = slice(batch.num_large), slice(num_labeled, None)
        with (
            torch.no_grad(),
            torch.autocast(state.device.type, torch.bfloat16, enabled=state.autocast),
        ):
            teacher = state.teacher([view[rows] for view in batch.views[large]]).known
        known, novel = known[large, rows], novel[large, :, rows]
        yield objective.rkd_weight * rkd_loss(
            known, novel, teacher, tau, objective.rkd_temperature
        )


def start(config: Config, model: UnoModel, train: Any) -> dict[str, Tensor]:
    """An empty queue of projections for Sinkhorn, where the run has one."""
    size, families = config.objective.queue_size, 1 if model.over is None else 2
    width = families * config.model.projection_dim
    shape = (config.augment.large.num_views, config.model.num_heads, size, width)
    return (
        {"queue": torch.zeros(shape, device=model.known.weight.device)} if size else {}
    )


@torch.no_grad()
def past_logits(state: TrainState, directions: Tensor) -> list[Tensor] | None:
    """Cosines of past unlabeled rows with today's prototypes; the rows of this batch
    enter the queue.

    After SwAV (Caron et al. 2020, App. A), for batches with few rows per cluster. Like
    theirs the queue takes part late: once it is full and the warm-up is over.
    ``state.extra["queue"]`` (V_large, H, Q, P or 2P) holds directions of both families
    side by side, newest first, the same on all workers; ``directions`` (V_large, H or
    2H, B_u, P) are this worker's. Returns per family (V_large, H, Q, K), or None
    without part.
    """
    queue, heads = (
        state.extra["queue"],
        [h for h in (state.model.novel, state.model.over) if h is not None],
    )
    rows = gather_rows(torch.cat(directions.chunk(len(heads), dim=1), dim=-1), dim=2)
    newest = torch.cat([rows.to(queue.dtype), queue], dim=2)[:, :, : queue.shape[2]]
    state.extra["queue"] = newest.nan_to_num(0.0, 0.0, 0.0)  # a bad step must not stay
    if state.step < state.warmup_steps or state.step * rows.shape[2] < queue.shape[2]:
        return None
    return [
        head.cosines(own)
        for head, own in zip(heads, queue.chunk(len(heads), dim=-1), strict=True)
    ]


def iic_loss(
    known: Tensor, novel: Tensor, num_labeled: int, temperature: float
) -> Tensor:
    """Minus the symmetric KL divergence between the outputs of labeled and of unlabeled
    rows, a scalar.

    Li et al. (CVPR 2023), "inter-class": outputs are softmaxes over all C classes; the
    mean goes over all pairs of a labeled and an unlabeled row, over views and cluster
    heads. A mean over pairs needs no pairs: the mean of KL(p || q) is the mean of <p,
    log p> less <mean p, mean log q>. Needs rows of both kinds.
    """
    joint = (
        torch.cat(
            [known.unsqueeze(1).expand(-1, novel.shape[1], -1, -1), novel], dim=-1
        )
        / temperature
    )
    log_p = joint.log_softmax(dim=-1)  # (V, H, B, C)
    p = log_p.exp()
    inner = (p * log_p).sum(dim=-1)  # (V, H, B), minus the entropies
    labeled, unlabeled = slice(None, num_labeled), slice(num_labeled, None)
    p_l, p_u, log_p_l, log_p_u = (
        mean_with_grad(rows[:, :, part].mean(dim=2))
        for rows in (p, log_p)
        for part in (labeled, unlabeled)
    )  # (V, H, C)
    cross = (p_l * log_p_u + p_u * log_p_l).sum(dim=-1)  # (V, H)
    own = inner[:, :, labeled].mean(dim=2) + inner[:, :, unlabeled].mean(dim=2)
    return -(own - cross).mean() / 2


def iic_view_loss(
    known: Tensor, novel: Tensor, num_labeled: int, temperature: float
) -> Tensor:
    """Symmetric KL divergence between the outputs of a row's views, per class, a
    scalar.

    Li et al. (CVPR 2023), "intra-class": labeled rows' softmax over known outputs,
    unlabeled rows' over novel ones; mean over pairs of views, heads and rows, divided
    by the number of classes as in the authors' code.
    """
    total = known.new_zeros(())
    for logits in (known[:, None, :num_labeled], novel[:, :, num_labeled:]):
        log_p = (logits / temperature).log_softmax(dim=-1)
        p = log_p.exp()
        for v, w in combinations(range(len(logits)), 2):
            # KL(v || w) + KL(w || v), element by element
            both = (p[v] - p[w]) * (log_p[v] - log_p[w])
            total = total + both.mean() / 2
    return total / (len(known) * (len(known) - 1) / 2)


def rkd_loss(
    known: Tensor,
    novel: Tensor,
    teacher: Tensor,
    temperature: float,
    distillation_temperature: float,
) -> Tensor:
    """Cross-entropy of the known outputs on unlabeled rows with those of the pretrained
    network.

    Gu et al. (ICCV 2023), rKD: a row weighs as much as the probability that the current
    network gives to all known classes, relative to the mean; factor T^2 as in Hinton et
    al. 2015. Softmax at tau T throughout. The weight has a gradient, as in the authors'
    code. Unlabeled rows: known (V, B_u, C_l), novel (V, H, B_u, C_u), the pretrained
    network's teacher (V, B_u, C_l); a scalar, the mean over views, heads and rows. Of a
    frozen encoder whose file knows no class, that network is the encoder with a known
    head that learns for the epochs of pretraining, on labeled rows alone, before
    discovery.
    """
    scale = temperature * distillation_temperature
    cross_entropy = -(
        (teacher / scale).softmax(dim=-1) * (known / scale).log_softmax(dim=-1)
    ).sum(dim=-1)
    log_known = (known / scale).logsumexp(dim=-1).unsqueeze(1)  # (V, 1, B_u)
    # (V, H, B_u)
    known_probability = torch.sigmoid(log_known - (novel / scale).logsumexp(dim=-1))
    weight = known_probability / mean_with_grad(known_probability.mean())
    return distillation_temperature**2 * (weight * cross_entropy.unsqueeze(1)).mean()
