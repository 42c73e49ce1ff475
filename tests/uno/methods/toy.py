"""Logits without a network, and naive sums."""

from itertools import product

import numpy as np
import torch

from tests.uno.small_run import step_of
from uno.config import Config
from uno.model import Logits
from uno.steps import Batch, TrainState

TAU = 0.1


LABELS = [0, 3, 1, 1]  # of the first rows


def step_on(
    config: Config, logits: Logits, labels: torch.Tensor, state: TrainState
) -> float:
    """The loss of the method's step whose network gives ``logits``."""
    # something to differentiate by
    leaf = torch.zeros((), dtype=logits.known.dtype, requires_grad=True)
    moved = Logits(*(None if part is None else part + leaf for part in logits))
    state.forward = lambda views: moved
    batch = Batch([torch.zeros(1)] * 2, labels, 2)
    return float(step_of(config)(state, batch, config, 0.0))


def random_logits(
    num_rows: int, num_known: int, num_novel: int, num_features: int, seed: int = 0
) -> Logits:
    """Float64 cosines and features of two views and one head."""
    generator = torch.Generator().manual_seed(seed)
    known, novel, features = (
        torch.rand(2, num_rows, num, generator=generator, dtype=torch.float64) * 2 - 1
        for num in (num_known, num_novel, num_features)
    )
    return Logits(known, novel.unsqueeze(1), None, features)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Of one row."""
    powers = np.exp(logits - max(logits))
    return powers / sum(powers)


def naive_cross_entropy(rows: np.ndarray, labels: list[int]) -> float:
    """Mean over views and rows of -log softmax: cosines (V, B, K), B labels."""
    probabilities = [softmax(row / TAU) for row in rows.reshape(-1, rows.shape[-1])]
    return float(
        np.mean(
            [
                -np.log(p[label])
                for p, label in zip(probabilities, labels * len(rows), strict=True)
            ]
        )
    )


def naive_pair_loss(
    first: np.ndarray, second: np.ndarray, similar: np.ndarray
) -> float:
    """-log of the likelihood of every pair: (N, K), (M, K) probabilities, (N, M)
    bool.
    """
    terms = []
    for i, j in product(range(len(first)), range(len(second))):
        together = sum(first[i] * second[j])
        terms.append(-np.log((together if similar[i][j] else 1 - together) + 1e-7))
    return float(np.mean(terms))


def naive_mse(first: np.ndarray, second: np.ndarray) -> float:
    """Mean over rows and classes of the squared difference of probabilities."""
    return float(
        np.mean(
            [(p - q) ** 2 for p, q in zip(first.ravel(), second.ravel(), strict=True)]
        )
    )


def naive_contrast(rows: np.ndarray, labels: list[int], tau: float) -> float:
    """Contrast of every row and view with all others: (2, B, P), labels of the first
    rows. Rows of one class attract each other, as the two views of a row do.
    """
    places = [(v, i) for v in (0, 1) for i in range(rows.shape[1])]
    unit = {place: rows[place] / np.linalg.norm(rows[place]) for place in places}
    terms = []
    for v, i in places:
        powers = {p: np.exp(unit[v, i] @ unit[p] / tau) for p in places if p != (v, i)}
        mates = [
            p
            for p in powers
            if p[1] == i or (i < len(labels) and labels[p[1] : p[1] + 1] == [labels[i]])
        ]
        shares = [powers[p] / sum(powers.values()) for p in mates]
        terms.append(-np.mean(np.log(shares)))
    return float(np.mean(terms))


def ramp(progress: float) -> float:
    """The weight of a loss that rises until ``progress`` is 1."""
    return float(np.exp(-5 * (1 - min(1, progress)) ** 2))


def naive_pairwise(logits: Logits, similar: np.ndarray, weight: float) -> float:
    """The objective of RS: labels of known rows, pairs of unlabeled rows, and a
    weighted consistency of the two views.
    """
    known, novel = (
        [probabilities(view) for view in head[:2]]
        for head in (logits.known, logits.novel[:, 0])
    )
    loss = naive_cross_entropy(logits.known[:2, :4].numpy(), LABELS)
    loss += naive_pair_loss(novel[0][4:], novel[1][4:], similar)
    return loss + weight * (naive_mse(*known) + naive_mse(*novel))


def probabilities(logits: torch.Tensor) -> np.ndarray:
    """(N, K) logits -> softmax at tau, one row at a time."""
    return np.array([softmax(row) for row in logits.numpy() / TAU])
