"""The discovery method NCL: neighborhood contrastive learning (Zhong et al., 2021).

The paper is "Neighborhood contrastive learning for novel class discovery" (CVPR 2021;
arXiv 2106.10731). The objective is that of :mod:`uno.methods.rs`, with two changes.
Pairs are similar if the cosine of their features is high. And the features are
contrasted with two memories, in which the oldest entries are replaced. An unlabeled row
is drawn to its other view and to its nearest neighbors in the memory of unlabeled rows.
It is pushed away from the other entries and from hard negatives: memory entries unlike
it, mixed with labeled ones. A labeled row is drawn to its other view and to all entries
of its class. Neither memory holds a label that is not given.

Known constants, from the authors' code:
- Pairs are similar above a cosine of 0.95 (``--ncl.threshold``; a small network that
  was trained with few labels needs a lower one: record ``2026-11-23_cpu-track``). The
  temperature is 0.05.
- The memories have 2,000 entries (ImageNet 3,000).
- The target of an unlabeled row is 0.2 on the other view, and 0.8 spread over k =
  int(2000 / C_u / 2) neighbors. This term has the weight 1 from epoch 1 of 200. The
  term of labeled rows has the weight 0.1, with uniform targets.
- Hard negatives begin at epoch 3. The 400 entries least like the row (50 if C_u = 5)
  are mixed 5 times with random labeled entries, 1/3 to 2/3 and 2/3 to 1/3, and the 400
  hardest of them count.
- The weight of the consistency is that of RS.

What differs:
- A memory is no larger than its set. Otherwise it would hold earlier copies of a row
  more often than the row's neighbors. k, 400 and 50 shrink with it.
- Epochs are shares of the phase. A term waits until its memories are full, where theirs
  begin as random numbers.
- The target sums to one, as in the paper. In their code a row whose other view is among
  its own nearest entries loses that part.
- Labeled entries are drawn with replacement, by a generator of the step.
- All workers hold the same memories, of all workers' rows in the order of the global
  batch.
- Steps of the learning rate, batches of 128 and the frozen first three stages are left
  out.

The authors warn that hard negatives sometimes collapse, and leave them out on CIFAR10.

A frozen encoder has nothing that contrast could train. There a linear layer on its
features, the identity at first, takes the place of the last stage, the only one that
the authors train. Pairs, memories and clusters are those of this layer's output, for
cached views. The known head reads the features themselves.
"""

import torch
from torch import Tensor

from uno import distributed
from uno.config import Config
from uno.data.stream import TrainData
from uno.heads import unit
from uno.methods import rs
from uno.methods.common import forward_two_views, similar_by_cosine
from uno.model import UnoModel
from uno.steps import Batch, TrainState

TEMPERATURE = 0.05
SIZE, SIZES = 2000, {"imagenet": 3000}  # entries of a memory, and those by preset
OWN = 0.2  # share of the target at the other view
LABELED_WEIGHT = 0.1
START, HARD_START = 1 / 200, 3 / 200  # shares of the phase, at which terms begin
NUM_HARD, NUM_FAR, NUM_FAR_OF_FIVE = 400, 400, 50  # entries, if a memory has 2,000
DRAWS = 5
MIXES = ((1 / 3, 2 / 3), (2 / 3, 1 / 3))


class Ncl(rs.ContrastMethod):
    """NCL: RS with cosines of features, plus contrast with memories of features.

    An unlabeled row is drawn to its nearest neighbors in a memory of unlabeled rows,
    and a labeled row to the entries of its class in a memory of labeled rows.
    """

    name = "ncl"
    constants = rs.CosineConstants
    constants_of_preset = rs.SETTINGS

    def loss(self, state: TrainState, batch: Batch, config: Config) -> Tensor:
        """Compute the pairwise loss of a batch, plus contrastive losses with memories.

        The pairwise loss is :func:`uno.methods.rs.loss_of_pairs`, where two unlabeled
        rows are similar if the cosine of their features in view 0 exceeds
        ``ncl.threshold``. The contrastive loss of labeled rows is :func:`class_loss`
        with the weight 0.1, from the first step on. That of unlabeled rows is
        :func:`neighbor_loss` with the weight 1, which begins at the share ``START``
        (1/200) of the phase, once the memory of unlabeled features is full. From the
        share ``HARD_START`` (3/200) on it has hard negatives, once the memory of
        labeled features is full, too. For a memory of M unlabeled rows, the number of
        nearest neighbors is M / (2 C_u), rounded down, but at least 1. In both
        contrastive losses only view 0 gets a gradient. After the losses are computed,
        the unit features of all workers' rows in view 0 and the classes of the labeled
        rows are put into the memories. All features are those after the novel head's
        layer, if it has one. The prototypes of the model are scaled to length one
        first, in place. All workers call this.

        Args:
            state: The state of training, with the model and the memories. The memories
                in ``state.extra`` are replaced.
            batch: The views of this worker's rows, labeled rows first.
            config: The configuration of the run.

        Returns:
            The loss, a scalar.
        """
        num_labeled, extra = len(batch.labels), state.extra
        known, novel, features = forward_two_views(state, batch)
        features = state.model.novel.layer(features)
        similar = similar_by_cosine(
            features[0, num_labeled:], config.method_options.threshold
        )
        loss = rs.loss_of_pairs(state, batch.labels, config, known, novel, similar)
        query, key = unit(features[0]), unit(features[1]).detach()
        labeled_memory, memory = extra["labeled_memory"], extra["memory"]
        loss = loss + LABELED_WEIGHT * class_loss(
            query[:num_labeled],
            key[:num_labeled],
            batch.labels,
            labeled_memory,
            extra["labeled_classes"],
        )
        num_batches = state.step * distributed.rank_and_world()[1]  # of all workers
        num_unlabeled = len(query) - num_labeled
        labeled_is_full = num_batches * num_labeled >= len(labeled_memory)
        is_full = num_batches * num_unlabeled >= len(memory)
        if state.progress >= START and is_full:
            hard = None
            if state.progress >= HARD_START and labeled_is_full:
                hard = _draw_hard_negatives(state, query[num_labeled:], novel.shape[-1])
            num_near = max(1, int(len(memory) / novel.shape[-1] / 2))
            loss = loss + neighbor_loss(
                query[num_labeled:], key[num_labeled:], memory, num_near, hard
            )
        seen = query.detach()
        extra["labeled_memory"] = push_rows(seen[:num_labeled], labeled_memory)
        extra["labeled_classes"] = push_rows(batch.labels, extra["labeled_classes"])
        extra["memory"] = push_rows(seen[num_labeled:], memory)
        return loss

    def initialize(
        self, config: Config, model: UnoModel, train: TrainData
    ) -> dict[str, Tensor]:
        """Create empty memories of features, of at most 2,000 rows (ImageNet 3,000).

        Args:
            config: The configuration of the run, which has the preset.
            model: The network, which decides the number of features D and the device of
                the memories. It is not changed.
            train: The training data, which limits the sizes: M is at most its number
                of unlabeled rows, and M_l at most its number of labeled rows.

        Returns:
            "memory", zeros (M, D) for features of unlabeled rows; "labeled_memory",
            zeros (M_l, D) for features of labeled rows; and "labeled_classes", int64
            (M_l,), the classes of the entries of "labeled_memory". They are all -1,
            which stands for an empty entry.
        """
        size, device = SIZES.get(config.preset, SIZE), model.known.weight.device
        num_labeled = min(size, len(train.labels))
        num_unlabeled = min(size, train.num_unlabeled)
        width = model.known.weight.shape[1]
        return {
            "memory": torch.zeros(num_unlabeled, width, device=device),
            "labeled_memory": torch.zeros(num_labeled, width, device=device),
            "labeled_classes": torch.full((num_labeled,), -1, device=device),
        }


def class_loss(
    query: Tensor, key: Tensor, labels: Tensor, memory: Tensor, classes: Tensor
) -> Tensor:
    """Return the contrastive loss of labeled rows with a memory of earlier ones.

    It is a cross-entropy. The softmax of a row is over its cosines with its other view
    and with all entries of the memory, divided by 0.05. Its target is uniform over its
    other view and the entries of its class.

    Args:
        query: Unit features of this worker's labeled rows in view 0, (N, D).
        key: The same in view 1.
        labels: Classes of the rows, int64 (N,).
        memory: Unit features of M earlier labeled rows, (M, D).
        classes: Classes of the rows in the memory, int64 (M,), -1 for empty entries,
            which do not count.

    Returns:
        A scalar, the mean over rows.
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
    """Return the contrastive loss of unlabeled rows with a memory of earlier ones.

    It is a cross-entropy. The softmax of a row is over its cosines with its other view,
    with all entries of the memory and with the hard negatives, divided by 0.05. Its
    target is 0.2 at its other view, and 0.8 spread evenly over the entries of the
    memory with the highest cosines.

    Args:
        query: Unit features of this worker's unlabeled rows in view 0, (N, D).
        key: The same in view 1.
        memory: Unit features of M earlier unlabeled rows, (M, D).
        near: The number of nearest entries in the target, at most M.
        hard: Cosines of the rows with n additional negatives each, (N, n); None if
            there are none.

    Returns:
        A scalar, the mean over rows.
    """
    others = query @ memory.T
    logits = [(query * key).sum(dim=1, keepdim=True), others]
    if hard is not None:
        logits.append(hard)
    log_p = (torch.cat(logits, dim=1) / TEMPERATURE).log_softmax(dim=1)
    nearest = 1 + others.topk(near, dim=1).indices
    return -(
        OWN * log_p[:, 0] + (1 - OWN) * log_p.gather(1, nearest).mean(dim=1)
    ).mean()


def _draw_hard_negatives(state: TrainState, query: Tensor, num_novel: int) -> Tensor:
    """Draw hard negatives of unlabeled rows, and return the cosines with them.

    A hard negative is a feature from the memory of unlabeled rows that is unlike the
    row, mixed with a random feature from the memory of labeled rows. Each unlike
    feature is mixed with five random features, each time in two proportions. The draw
    is seeded by the step alone, and is the same for any number of workers.

    Args:
        state: The state of training, with both memories, which are not changed.
        query: Unit features of this worker's unlabeled rows, (N, D).
        num_novel: The number of novel classes. For each row the 400 entries that are
            least like it are mixed, or 50 if there are 5 novel classes; proportionally
            fewer, but at least one, if the memory of unlabeled rows has less than 2,000
            entries.

    Returns:
        The cosines of each row with its hardest negatives, (N, n), the highest first,
        see :func:`hard_negatives`. n is at most 400, or proportionally less, but at
        least 1, if the memory of unlabeled rows has less than 2,000 entries.
    """
    memory, labeled = state.extra["memory"], state.extra["labeled_memory"]
    far = NUM_FAR_OF_FIVE if num_novel == 5 else NUM_FAR
    # as many of a memory of another size
    far, kept = (max(1, min(n, len(memory) * n // SIZE)) for n in (far, NUM_HARD))
    shape = (len(query) * distributed.rank_and_world()[1], DRAWS, far)
    generator = torch.Generator().manual_seed(state.step)
    chosen = torch.randint(len(labeled), shape, generator=generator).to(
        query.device, non_blocking=True
    )
    return hard_negatives(
        query, memory, labeled, distributed.local_shard(chosen, 0), kept
    )


def hard_negatives(
    query: Tensor, memory: Tensor, labeled: Tensor, chosen: Tensor, kept: int
) -> Tensor:
    """Return the cosines of rows with their hardest negatives.

    The negatives of a row are weighted sums of two features: one of the n features in
    the memory of unlabeled rows that are least similar to it, and one of a labeled row.
    Each such pair is summed twice, with the weights 1/3 and 2/3 and the reverse. The
    hardest are those with the highest cosines. The sums are not computed: their cosines
    follow from those of both parts.

    Args:
        query: Unit features of the rows, (N, D).
        memory: Unit features of unlabeled rows, (M, D).
        labeled: Unit features of labeled rows, (L, D).
        chosen: For each row, in each of several draws, the index of the labeled row
            that each of the n features is mixed with, int64 (N, draws, n).
        kept: The number of negatives to keep for each row.

    Returns:
        Cosines (N, ``kept``), the highest first, or fewer columns if there are fewer
        negatives.
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
    cosines = torch.stack(mixed, dim=1).flatten(1)
    return cosines.topk(min(kept, cosines.shape[1]), dim=1).values


def push_rows(rows: Tensor, memory: Tensor) -> Tensor:
    """Return a memory with rows of all workers in front, without its oldest entries.

    All workers call this.

    Args:
        rows: The rows of this worker, features or labels, (N, ...). Each number that is
            not finite becomes 0.
        memory: The memory of earlier rows, (M, ...), newest first. It is not changed.

    Returns:
        The new memory, (M, ...), in the type of ``memory``.
    """
    all_rows = distributed.gather_rows(rows, 0).to(memory.dtype)
    # values of a step that was not finite must not stay in the memory
    return torch.cat([all_rows, memory])[: len(memory)].nan_to_num(0.0, 0.0, 0.0)


METHOD = Ncl()
