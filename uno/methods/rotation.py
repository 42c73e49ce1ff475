"""The pretext task "rotation": predict by how many quarter turns an image is turned.

The paper is "Unsupervised representation learning by predicting image rotations"
(Gidaris et al., ICLR 2018). The methods KCL to RS+ start from this task. Their papers
then freeze most of the encoder, which learns here.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from uno.config import Config
from uno.method import Pretext
from uno.steps import Batch, TrainState, forward

NUM_TURNS = 4


def loss(state: TrainState, batch: Batch, config: Config) -> Tensor:
    """Compute the cross-entropy of predicting the number of quarter turns.

    Each row is seen four times, turned by 0 to 3 quarter turns, see :func:`turn_views`.
    The logits are cosines divided by the temperature. The prototypes of the model are
    scaled to length one first, in place.

    Args:
        state: The state of training, with the model, whose known head has four outputs.
        batch: The views of this worker's rows, without labels.
        config: The configuration of the run, which has the temperature.

    Returns:
        A scalar, the mean over rows and turns.
    """
    known = forward(state, turn_views(batch)).known  # (4, B, 4)
    turns = torch.arange(NUM_TURNS, device=known.device)
    turns = turns.repeat_interleave(known.shape[1])
    logits = known.flatten(0, 1) / config.objective.temperature
    return F.cross_entropy(logits, turns)


def turn_views(batch: Batch) -> Batch:
    """Return a batch with four views of each image, where view k is turned by k * 90°.

    Turns are counterclockwise. View k, from 0 to 3, is made from the large view number
    k modulo the number of large views. All four views count as large ones. Small views
    are left out. Labels and row numbers stay.

    Args:
        batch: A batch with at least one large view, pixels (B, 3, S, S). It is not
            changed.
    """
    views = [batch.views[k % batch.num_large] for k in range(NUM_TURNS)]
    views = [torch.rot90(view, k, (2, 3)).contiguous() for k, view in enumerate(views)]
    return batch._replace(views=views, num_large=NUM_TURNS)


PRETEXT = Pretext("rotation", loss, num_outputs=NUM_TURNS)
