"""The discovery method of Jia et al. (ICCV 2021; arXiv 2104.12673), one modality.

The paper is "Joint representation learning and novel category discovery on single- and
multi-modal data". The objective is that of :mod:`uno.methods.rs`, with two changes.
Pairs are similar if their winner-take-all hashes agree (Yagnik et al., 2011: for each
of H random windows of k features, which of these is the largest). And the features of
all rows are contrasted: an unlabeled row is drawn to its other view alone (instance
discrimination), a labeled row to both views of all rows of its class (category
discrimination), and each away from all other rows.

No code was published, and we know no constant. So the constants are ours, the same for
all data. H is 512 and k is 4. The share of equal codes above which rows are similar,
and the temperature, are those with the best accuracy on the labeled digits alone, with
three of five classes held out as novel (record ``2026-11-22_methods-three``). Codes are
those of the mean of both views' features, which separates held-out classes better than
one view. Contrast and every other term have the weight 1, and the consistency the same
as in RS. The features are contrasted, not a projection of them, among the batch of all
workers, without a memory. Several positives count as the mean of their logarithms
(Khosla et al., 2020, L_out).

A frozen encoder has nothing that contrast could train. There a linear layer on its
features, the identity at first, takes the place of its last stage. The output of this
layer, for cached views, is hashed, contrasted and clustered. The known head reads the
features themselves.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from uno import distributed
from uno.config import Config
from uno.data.stream import TrainData
from uno.errors import ConfigError
from uno.heads import unit
from uno.methods import rs
from uno.methods.common import feature_contrast_loss, forward_two_views
from uno.model import UnoModel
from uno.steps import Batch, TrainState

NUM_WINDOWS, WINDOW = 512, 4  # H, k
AGREEMENT = 0.5  # share of equal codes above which two rows are similar
TEMPERATURE = 0.1


class Jia(rs.ContrastMethod):
    """The method of Jia et al.: RS with hashes of features, plus a contrastive loss.

    Two unlabeled rows are similar if their winner-take-all hash codes agree. The
    features of all rows are contrasted between two views.
    """

    name = "jia"
    constants = rs.Consistency
    constants_of_preset = rs.SETTINGS

    def loss(self, state: TrainState, batch: Batch, config: Config) -> Tensor:
        """Compute the pairwise loss of a batch, plus the contrastive loss of all rows.

        The pairwise loss is :func:`uno.methods.rs.loss_of_pairs`, where two unlabeled
        rows are similar if more than half of their winner-take-all hash codes are
        equal. The codes are those of a row's mean feature over both views. The
        contrastive loss is :func:`uno.methods.common.feature_contrast_loss` with the
        temperature 0.1. All features are those after the novel head's layer, if it has
        one. The prototypes of the model are scaled to length one first, in place. All
        workers call this.

        Args:
            state: The state of training, with the model and the windows of the hashes.
            batch: The views of this worker's rows, labeled rows first.
            config: The configuration of the run.

        Returns:
            The loss, a scalar.
        """
        num_labeled, windows = len(batch.labels), state.extra["windows"]
        known, novel, features = forward_two_views(state, batch)
        features = state.model.novel.layer(features)
        codes = hash_codes(features[:, num_labeled:].detach().mean(dim=0), windows)
        all_codes = distributed.gather_rows(codes, 0)
        similar = share_of_equal_codes(codes, all_codes, windows.shape[1]) > AGREEMENT
        pair_loss = rs.loss_of_pairs(state, batch.labels, config, known, novel, similar)
        return pair_loss + feature_contrast_loss(
            unit(features), batch.labels, TEMPERATURE
        )

    def initialize(
        self, config: Config, model: UnoModel, train: TrainData
    ) -> dict[str, Tensor]:
        """Draw the windows of features that the winner-take-all hashes compare.

        The draw depends on the seed of the run and the number of features alone.

        Args:
            config: The configuration of the run, which has the seed.
            model: The network, which decides the number of features D and the device of
                the result. It is not changed.
            train: Not used.

        Returns:
            "windows", H = 512 random windows of k = 4 indices of features, 0 to D - 1,
            int64 (H, k), on the device of the model. A window has no feature twice.

        Raises:
            ConfigError: D is less than k.
        """
        width = model.known.weight.shape[1]
        if width < WINDOW:
            raise ConfigError(
                f"method jia compares {WINDOW} features at a time, but the encoder has"
                f" only {width}; use a wider encoder or another --method"
            )
        generator = torch.Generator().manual_seed(config.seed)
        order = torch.rand(NUM_WINDOWS, width, generator=generator).argsort(dim=1)
        return {"windows": order[:, :WINDOW].to(model.known.weight.device)}


def hash_codes(features: Tensor, windows: Tensor) -> Tensor:
    """Compute winner-take-all hash codes of features (Yagnik et al., 2011).

    A code says which of the k features of a window is the largest.

    Args:
        features: Features (N, D).
        windows: H windows, each k indices of features, int64 (H, k).

    Returns:
        The code of each row for each window, int64 (N, H), from 0 to k - 1.
    """
    return features[:, windows].argmax(dim=-1)


def share_of_equal_codes(codes: Tensor, others: Tensor, window: int) -> Tensor:
    """Return the share of equal hash codes for each pair of rows.

    Codes are equal if both rows have the same code for the same window. They are
    compared as one-hot vectors, by one matrix product for all pairs.

    Args:
        codes: H codes of each of N rows, int64 (N, H), of :func:`hash_codes`.
        others: H codes of each of M rows, int64 (M, H).
        window: k, the number of features in each window. It is the number of values
            that a code can have, 0 to k - 1, and so the length of the one-hot vectors.

    Returns:
        Shares, float32 (N, M), 0-1: the number of equal codes, divided by H.
    """
    one, other = (
        F.one_hot(rows, window).flatten(1).float() for rows in (codes, others)
    )
    return one @ other.T / codes.shape[1]


METHOD = Jia()
