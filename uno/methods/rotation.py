"""Rotation (Gidaris et al., "Unsupervised representation learning by predicting image
rotations", ICLR 2018): by how many quarter turns was an image turned? KCL to RS+ start
from it; their papers then freeze most of the encoder, which learns here.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from uno.config import Config
from uno.methods import Pretext
from uno.state import TrainState
from uno.steps import Batch, forward, update_

NUM_TURNS = 4


def step(state: TrainState, batch: Batch, config: Config, lr: float) -> Tensor:
    """Cross-entropy of the number of quarter turns, each row turned by 0 to 3.
    Returns the loss as (1,).
    """
    known = forward(state, turned(batch)).known  # (4, B, 4)
    turns = torch.arange(NUM_TURNS, device=known.device).repeat_interleave(
        known.shape[1]
    )
    return update_(
        state,
        F.cross_entropy(known.flatten(0, 1) / config.objective.temperature, turns),
        lr,
    )


def turned(batch: Batch) -> Batch:
    """Four views, of which view k is turned by k * 90 degrees, made of the large
    ones in turn.
    """
    views = [batch.views[k % batch.num_large] for k in range(NUM_TURNS)]
    views = [torch.rot90(view, k, (2, 3)).contiguous() for k, view in enumerate(views)]
    return batch._replace(views=views, num_large=NUM_TURNS)


PRETEXT = Pretext("rotation", step, num_outputs=NUM_TURNS)
