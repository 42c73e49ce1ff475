"""Logits without a network, naive sums, and a network small enough to step twenty times in a second."""

import numpy as np
import torch
from torch import Tensor

from tests.uno.small_run import CPU, batches_of, small_config, small_sets
from uno.config import Config
from uno.methods import registry
from uno.model import Logits
from uno.state import TrainState, new_state
from uno.steps import Batch, ObjectiveConfig

TAU = 0.1


def method_config(name: str, **overrides) -> Config:
    """The small digits run of a method."""
    return small_config(method=name, **overrides)


def method_state(config: Config) -> TrainState:
    """A fresh state of the run's method, as ``uno.runs.run`` makes it."""
    method = registry.load(config)
    model = registry.build_network(config, 5, 5, config.seed).train()
    extra = method.start(config, model, small_sets()[0]) if method.start is not None else {}
    state = new_state(model, model, config.discover, CPU, False)
    state.extra, state.total_steps, state.steps_per_epoch = extra, 18, 6
    return state


def losses(config: Config, num_steps: int, lr: float = 0.05) -> list[float]:
    """Losses of steps on one and the same batch."""
    state, batch = method_state(config), batches_of(config)(0)
    step = registry.load(config).step
    return [float(step(state, batch, config.objective, lr)) for _ in range(num_steps)]


def step_on(step, logits: Logits, labels: Tensor, objective: ObjectiveConfig, state: TrainState) -> float:
    """The loss of a step whose network gives ``logits``."""
    leaf = torch.zeros((), dtype=logits.known.dtype, requires_grad=True)  # something to differentiate by
    moved = Logits(*(None if part is None else part + leaf for part in logits))
    state.forward = lambda views: moved
    return float(step(state, Batch([torch.zeros(1)] * 2, labels, 2), objective, 0.0))


def random_logits(num_rows: int, num_known: int, num_novel: int, num_features: int, seed: int = 0) -> Logits:
    """Float64 cosines and features of two views and one head."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1

    return Logits(
        uniform(2, num_rows, num_known), uniform(2, 1, num_rows, num_novel), None,
        uniform(2, num_rows, num_features),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------- naive references
def softmax(logits: np.ndarray) -> np.ndarray:
    """Of one row."""
    powers = [float(np.exp(value - max(logits))) for value in logits]
    return np.array([power / sum(powers) for power in powers])


def naive_cross_entropy(rows: np.ndarray, labels: list[int]) -> float:
    """Mean over rows of -log softmax."""
    return float(np.mean([-np.log(softmax(row)[label]) for row, label in zip(rows, labels, strict=True)]))


def naive_pair_loss(first: np.ndarray, second: np.ndarray, similar: np.ndarray) -> float:
    """-log of the likelihood of every pair: (N, K), (M, K) probabilities, (N, M) in [0, 1]."""
    terms = []
    for i in range(len(first)):
        for j in range(len(second)):
            together = sum(first[i][k] * second[j][k] for k in range(len(first[i])))
            s = float(similar[i][j])
            terms.append(-s * np.log(together + 1e-7) - (1 - s) * np.log(1 - together + 1e-7))
    return float(np.mean(terms))


def naive_mse(first: np.ndarray, second: np.ndarray) -> float:
    """Mean over rows and classes of the squared difference of probabilities."""
    return float(
        np.mean([(p - q) ** 2 for a, b in zip(first, second, strict=True) for p, q in zip(a, b, strict=True)])
    )


def probabilities(logits: Tensor) -> np.ndarray:
    """(N, K) logits -> softmax at tau, one row at a time."""
    return np.array([softmax(row) for row in logits.numpy() / TAU])
