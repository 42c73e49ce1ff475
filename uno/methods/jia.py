"""Jia et al., "Joint representation learning and novel category discovery on single-
and multi-modal data" (ICCV 2021; arXiv 2104.12673), of one modality.

The objective of :mod:`uno.methods.rs` with pairs called similar where winner-take-all
hashes agree (Yagnik et al. 2011: of each of H random windows of k features, which is
the largest), and noise contrast of the features of all rows: an unlabeled row is drawn
to its other view alone (instance discrimination), a labeled one to both views of all
rows of its class (category discrimination), away from all other rows.

No code was published, and no constant is known to us: these are ours, once for all
data. H = 512, k = 4. The share of equal codes above which rows are similar, and the
temperature, are those with the best accuracy on the labeled digits alone, three of five
classes held out as novel (record ``2026-11-22_methods-three``). Codes are of the mean
of both views' features, which tells held-out classes apart better than one view's.
Contrast and every other term weigh 1, the consistency as in RS; contrast reads the
features, not a projection of them, and the batch of all workers, not a memory; several
positives count as the mean of their logarithms (Khosla et al. 2020, L_out).

A frozen encoder has nothing that contrast could train: there a linear layer on its
features, the identity at first, stands for its last stage, and what is hashed,
contrasted and clustered is that layer's output, of cached views. The known head reads
the features themselves.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from uno import collectives
from uno.config import Config
from uno.heads import unit
from uno.methods import Method, rs
from uno.methods.method import (
    AdaptedHead,
    NovelHead,
    contrast_loss,
    forward_two_views,
    learned_features,
)
from uno.model import UnoModel
from uno.state import TrainState
from uno.steps import Batch, update_

NUM_WINDOWS, WINDOW = 512, 4  # H, k
AGREEMENT = 0.5  # share of equal codes above which two rows are similar
TEMPERATURE = 0.1


def step(state: TrainState, batch: Batch, config: Config, lr: float) -> Tensor:
    """The objective of pairs + contrast of all rows. Returns the loss as (1,)."""
    num_labeled, windows = len(batch.labels), state.extra["windows"]
    known, novel, features = forward_two_views(state, batch)
    features = learned_features(state.model, features)
    codes = hash_codes(features[:, num_labeled:].detach().mean(dim=0), windows)
    similar = (
        agreement(codes, collectives.gather_rows(codes, 0), windows.shape[1])
        > AGREEMENT
    )
    pairs = rs.loss_of_pairs(state, batch.labels, config, known, novel, similar)
    return update_(
        state, pairs + contrast_loss(unit(features), batch.labels, TEMPERATURE), lr
    )


def hash_codes(features: Tensor, windows: Tensor) -> Tensor:
    """Which feature of each window is the largest: (N, D) and indices (H, k) -> (N,
    H) in 0..k-1.
    """
    return features[:, windows].argmax(dim=-1)


def agreement(codes: Tensor, others: Tensor, window: int) -> Tensor:
    """Share of equal codes of rows (N, H) and (M, H), of 0..``window``-1: (N, M)."""
    one, other = (
        F.one_hot(rows, window).flatten(1).float() for rows in (codes, others)
    )
    return one @ other.T / codes.shape[1]


def start(config: Config, model: UnoModel, train: Any) -> dict[str, Tensor]:
    """The windows (H, k): features of the network, at random."""
    width, generator = (
        model.known.weight.shape[1],
        torch.Generator().manual_seed(config.seed),
    )
    order = torch.rand(NUM_WINDOWS, width, generator=generator).argsort(dim=1)
    return {"windows": order[:, :WINDOW].to(model.known.weight.device)}


METHOD = Method(
    "jia",
    step,
    NovelHead,
    start,
    rs.Consistency,
    settings=rs.SETTINGS,
    frozen_head=AdaptedHead,
)
