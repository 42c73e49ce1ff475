"""NCL: neighborhood contrastive learning (Zhong et al., "Neighborhood contrastive
learning for novel class discovery", CVPR 2021; arXiv 2106.10731).

The objective of :mod:`uno.methods.rs` with pairs called similar where their features'
cosine is high, and contrast of the features themselves with two memories, first in
first out. An unlabeled row is drawn to its other view and to its nearest neighbors in
the memory of unlabeled rows, and pushed away from the rest and from hard negatives:
memory entries unlike it, mixed with labeled ones. A labeled row is drawn to its other
view and to all entries of its class. Neither memory holds a label that is not given.

Known constants, from the authors' code: pairs are similar above a cosine of .95
(``--ncl.threshold``; a small network that few labels trained needs a lower one: record
``2026-11-23_cpu-track``); temperature .05; memories of 2,000 (ImageNet 3,000); of an
unlabeled row's target .2 on the other view and .8 spread over k = int(2000 / C_u / 2)
neighbors; weight 1 from epoch 1 of 200; weight .1 of labeled rows, targets uniform;
hard negatives from epoch 3: the 400 entries least like the row (50 where C_u = 5) mixed
5 times with random labeled entries, 1/3 to 2/3 and 2/3 to 1/3, of which the 400 hardest
count; the weight of the consistency as RS.

Ours: a memory is no larger than its set, or it would hold a row's past more often than
its neighbors; k, 400 and 50 shrink with it. Epochs are shares of the phase, and a term
waits until its memories are full, where theirs begin as random numbers. The target sums
to one, as in the paper: in their code a row whose other view is among its own nearest
loses that part. Labeled entries are drawn with replacement, by a generator of the step.
All workers hold the same memories, of all workers' rows in the order of the global
batch. Not carried over: steps of the learning rate, batches of 128, the frozen first
three stages. Its authors warn that hard negatives sometimes collapse, and leave them
out on CIFAR10.

A frozen encoder has nothing that contrast could train: there a linear layer on its
features, the identity at first, stands for the last stage, the only one that the
authors train, and pairs, memories and clusters are of that layer's output, of cached
views. The known head reads the features themselves.
"""

from typing import Any

import torch
from torch import Tensor

from uno import collectives
from uno.config import Config, field
from uno.heads import unit
from uno.methods import Method, rs
from uno.methods.method import (
    AdaptedHead,
    NovelHead,
    forward_two_views,
    learned_features,
    similar_by_cosine,
)
from uno.model import UnoModel
from uno.state import TrainState
from uno.steps import Batch, update_

TEMPERATURE = 0.05
SIZE, SIZES = 2000, {"imagenet": 3000}  # of a memory, by preset
OWN = 0.2  # of the target: the other view
LABELED_WEIGHT = 0.1
START, HARD_START = 1 / 200, 3 / 200  # shares of the phase
NUM_HARD, NUM_FAR, NUM_FAR_OF_FIVE = 400, 400, 50  # of a memory of 2,000
DRAWS = 5
MIXES = ((1 / 3, 2 / 3), (2 / 3, 1 / 3))


class Constants(rs.Consistency):
    """Of NCL."""

    threshold: float = field(
        0.95, "Cosine above which two images count as of one class.", ge=-1, le=1
    )


def step(state: TrainState, batch: Batch, config: Config, lr: float) -> Tensor:
    """The objective of pairs + contrast of labeled and, once it is time, of
    unlabeled rows. Returns (1,).
    """
    num_labeled, extra = len(batch.labels), state.extra
    known, novel, features = forward_two_views(state, batch)
    features = learned_features(state.model, features)
    similar = similar_by_cosine(
        features[0, num_labeled:], config.method_options.threshold
    )
    loss = rs.loss_of_pairs(state, batch.labels, config, known, novel, similar)
    query, key = unit(features[0]), unit(features[1]).detach()
    past, past_labeled, classes = (
        extra["memory"],
        extra["labeled_memory"],
        extra["labeled_classes"],
    )
    pulled = class_loss(
        query[:num_labeled], key[:num_labeled], batch.labels, past_labeled, classes
    )
    loss = loss + LABELED_WEIGHT * pulled
    kinds = ((num_labeled, past_labeled), (len(query) - num_labeled, past))
    world_size = collectives.rank_and_world()[1]
    full = [state.step * world_size * rows >= len(memory) for rows, memory in kinds]
    if state.progress >= START and full[1]:
        hard = None
        if state.progress >= HARD_START and all(full):
            hard = _hard(state, query[num_labeled:], novel.shape[-1])
        near = max(1, int(len(past) / novel.shape[-1] / 2))
        loss = loss + neighbor_loss(
            query[num_labeled:], key[num_labeled:], past, near, hard
        )
    seen = query.detach()
    extra["labeled_memory"] = newest(seen[:num_labeled], past_labeled)
    extra["labeled_classes"] = newest(batch.labels, classes)
    extra["memory"] = newest(seen[num_labeled:], past)
    return update_(state, loss, lr)


def class_loss(
    query: Tensor, key: Tensor, labels: Tensor, memory: Tensor, classes: Tensor
) -> Tensor:
    """Cross-entropy with a target uniform over the other view and the entries of the
    row's class, a scalar.

    Unit vectors: query, key (N, D), memory (M, D); labels (N,), classes (M,), -1 where
    an entry is empty.
    """
    others = (query @ memory.T).masked_fill(classes < 0, -torch.inf)
    log_p = (
        torch.cat([(query * key).sum(dim=1, keepdim=True), others], dim=1) / TEMPERATURE
    )
    log_p = log_p.log_softmax(dim=1)  # (N, 1 + M)
    same = labels[:, None] == classes
    total = log_p[:, 0] + torch.where(same, log_p[:, 1:], 0.0).sum(dim=1)
    return -(total / (1 + same.sum(dim=1))).mean()


def neighbor_loss(
    query: Tensor, key: Tensor, memory: Tensor, near: int, hard: Tensor | None
) -> Tensor:
    """Cross-entropy with .2 of the target on the other view, .8 on the ``near`` nearest
    entries, a scalar.

    Unit vectors: query, key (N, D), memory (M, D); ``hard`` (N, n): cosines with
    further negatives.
    """
    others = query @ memory.T
    logits = [
        (query * key).sum(dim=1, keepdim=True),
        others,
        *([] if hard is None else [hard]),
    ]
    log_p = (torch.cat(logits, dim=1) / TEMPERATURE).log_softmax(dim=1)
    nearest = 1 + others.topk(near, dim=1).indices
    return -(
        OWN * log_p[:, 0] + (1 - OWN) * log_p.gather(1, nearest).mean(dim=1)
    ).mean()


def _hard(state: TrainState, query: Tensor, num_novel: int) -> Tensor:
    memory, labeled = state.extra["memory"], state.extra["labeled_memory"]
    far = NUM_FAR_OF_FIVE if num_novel == 5 else NUM_FAR
    far, kept = (max(1, min(n, len(memory) * n // SIZE)) for n in (far, NUM_HARD))
    shape = (len(query) * collectives.rank_and_world()[1], DRAWS, far)
    generator = torch.Generator().manual_seed(state.step)
    chosen = torch.randint(len(labeled), shape, generator=generator).to(
        query.device, non_blocking=True
    )
    return hard_negatives(
        query, memory, labeled, collectives.local_shard(chosen, 0), kept
    )


def hard_negatives(
    query: Tensor, memory: Tensor, labeled: Tensor, chosen: Tensor, kept: int
) -> Tensor:
    """Cosines (N, at most ``kept``) of rows with the hardest mixtures of unlike and
    labeled entries.

    Unit vectors: query (N, D), memory (M, D), labeled (L, D); ``chosen`` (N, draws, n):
    which labeled entry each of the n least similar entries is mixed with, in each draw.
    No mixture is ever formed: its cosine follows from those of its two parts.
    """
    others = query @ memory.T
    far = others.topk(chosen.shape[2], dim=1, largest=False).indices  # (N, n)
    shape = chosen.shape
    first = others.gather(1, far).unsqueeze(1)  # (N, 1, n)
    second = (query @ labeled.T).gather(1, chosen.flatten(1)).unflatten(1, shape[1:])
    inner = (memory @ labeled.T)[far.unsqueeze(1).expand(shape), chosen]
    mixed = [
        (a * first + b * second)
        / (a * a + b * b + 2 * a * b * inner).clamp(min=1e-6).sqrt()
        for a, b in MIXES
    ]
    found = torch.stack(mixed, dim=1).flatten(1)
    return found.topk(min(kept, found.shape[1]), dim=1).values


def newest(rows: Tensor, memory: Tensor) -> Tensor:
    """``memory`` (M, ...) with all workers' ``rows`` in front of it, the oldest left
    out.
    """
    found = torch.cat([collectives.gather_rows(rows, 0).to(memory.dtype), memory])[
        : len(memory)
    ]
    return found.nan_to_num(0.0, 0.0, 0.0)  # a bad step must not stay


def start(config: Config, model: UnoModel, train: Any) -> dict[str, Tensor]:
    """Empty memories: (M, D) of unlabeled rows, (M_l, D) and the classes (M_l,) of
    labeled ones.
    """
    size, device = SIZES.get(config.preset, SIZE), model.known.weight.device
    num_labeled, num_unlabeled = (
        min(size, len(train.labels)),
        min(size, train.num_unlabeled),
    )
    width = model.known.weight.shape[1]
    return {
        "memory": torch.zeros(num_unlabeled, width, device=device),
        "labeled_memory": torch.zeros(num_labeled, width, device=device),
        "labeled_classes": torch.full((num_labeled,), -1, device=device),
    }


METHOD = Method(
    "ncl",
    step,
    NovelHead,
    start,
    Constants,
    settings=rs.SETTINGS,
    frozen_head=AdaptedHead,
)
