"""A run that takes a second: real digits, a network of width 4, two heads, six steps
an epoch.
"""

import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from uno import distributed
from uno.clustering.initialization import init_prototypes_
from uno.config import Config, override
from uno.data.files import Storage
from uno.data.memory import EvalSet, TrainSet
from uno.encoders.build import build_encoder
from uno.errors import Interrupted
from uno.method import load
from uno.model import build_network
from uno.objective import unified_objective
from uno.presets import preset
from uno.runs import run
from uno.runs.journal import read_journal
from uno.session.data import open_sets, read_task
from uno.steps import (
    Batch,
    Step,
    TrainState,
    new_state,
    pretrain_loss,
    state_tensors,
    take_step,
)
from uno.training import LocalWorker, Worker

CPU = torch.device("cpu")
discovery_step = partial(take_step, unified_objective)
pretrain_step = partial(take_step, pretrain_loss)
CLOCKED = re.compile("images_per_s|step_ms|rank_ms|slow_rank|data_wait|peak_memory")
HERE = LocalWorker(CPU)
SMALL = {
    "model.width": 4,
    "model.num_heads": 2,
    "model.overcluster_factor": 2,
    "model.hidden_dim": 16,
    "model.projection_dim": 8,
    "data.limit": 200,
    "train.batch_size": 32,
    "train.log_every": 4,
    "train.checkpoint_every_epochs": 1,
    "pretrain.epochs": 3,
    "discover.epochs": 3,
    "pretrain.warmup_epochs": 1,
    "discover.warmup_epochs": 1,
}


def small_config(**overrides: Any) -> Config:
    """The digits preset, cut down; keys with ``__`` for dots."""
    return override(
        preset("digits"),
        SMALL | {k.replace("__", "."): v for k, v in overrides.items()},
    )


def frozen_encoder(config: Config) -> torch.nn.Module:
    """Return an encoder with running statistics that are not those of a new network."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoder = build_encoder(config.model)
        for name, buffer in encoder.named_buffers():
            if name.endswith("running_var"):
                buffer.uniform_(0.5, 1.5)
    return encoder.eval().requires_grad_(False)


def step_of(config: Config) -> Step:
    """The step of the run's method."""
    return partial(take_step, load(config.method).loss)


@cache
def small_sets() -> tuple[TrainSet, dict[str, EvalSet]]:
    """100 labeled and 100 unlabeled training rows of the digits, and the rows with
    truth.
    """
    config = small_config()
    sets = open_sets(config, read_task(config.data), Storage("."), keep=False)
    assert isinstance(sets.train, TrainSet)
    return sets.train, sets.truth()


def fresh_state(
    config: Config,
    num_novel: int = 5,
    dtype: torch.dtype = torch.float32,
    worker: Worker = HERE,
    train: TrainSet | None = None,
    device: torch.device = CPU,
) -> TrainState:
    """A state at step 0 of discovery by the run's method (pretraining: num_novel 0),
    as uno.runs makes it.
    """
    method = load(config.method)
    model = build_network(config, 5, num_novel, config.seed).to(dtype).train()
    train = train or small_sets()[0]
    extra = method.initialize(config, model, train) if num_novel else {}
    extra = init_prototypes_(config, model, train, extra) if num_novel else {}
    phase = config.discover if num_novel else config.pretrain
    model = model.to(device)
    state = new_state(
        model, worker.wrap(model), phase, device, False, config.model.encoder_lr_factor
    )
    state.extra = {
        name: distributed.broadcast_from_rank0(tensor) for name, tensor in extra.items()
    }
    state.total_steps = 18
    return state


def batches_of(
    config: Config,
    phase: str = run.DISCOVER,
    train: TrainSet | None = None,
    worker: Worker = HERE,
) -> Callable[[int], Batch]:
    """``batches(step)`` of a phase on the small set."""
    train = train or small_sets()[0]
    sizes = len(train.labels), len(train.unlabeled_images)
    plan = run.plan_phase(config, phase, *sizes, worker.world_size)
    return train.batches(config, plan, worker.rank, worker.world_size)


def train_both(config: Config, storage: Storage, worker: Worker = HERE) -> TrainState:
    """All phases; returns the final state."""
    return [
        run.run_phase(config, name, small_sets()[0], worker, storage)
        for name in run.list_phases(config)
    ][-1]


class StopAt(LocalWorker):
    """Asks to stop before a step, in each phase."""

    def __init__(self, step: int) -> None:
        super().__init__(CPU)
        self.step = step

    def should_stop(self, step: int) -> bool:
        return step == self.step


def check_resumes(
    config: Config, folder: Path, stops: Sequence[int]
) -> dict[str, torch.Tensor]:
    """Stopped before each of ``stops`` a run ends as the undisturbed one, to the
    bit; returns its tensors.
    """
    runs = []
    for name, some in (("whole", ()), ("stopped", stops)):
        storage = Storage(str(folder / name))
        for step in some:
            with pytest.raises(Interrupted):
                train_both(config, storage, StopAt(step))
        runs.append((copied_tensors(train_both(config, storage)), lines(storage)))
    assert_same(runs[1][0], runs[0][0])
    assert runs[1][1] == runs[0][1]
    return runs[0][0]


def copied_tensors(state: TrainState) -> dict[str, torch.Tensor]:
    """What a checkpoint of the state would hold, as it is now."""
    return {
        name: tensor.detach().clone() for name, tensor in state_tensors(state).items()
    }


def assert_same(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> None:
    """Bit for bit."""
    assert found.keys() == expected.keys()
    different = [
        name for name in expected if not torch.equal(found[name], expected[name])
    ]
    assert not different, different


def without_clock(line: dict[str, Any]) -> dict[str, Any]:
    """A line of the journal without what differs from run to run."""
    return {k: v for k, v in line.items() if not CLOCKED.match(k)}


def lines(storage: Storage) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without the clock."""
    return [without_clock(line) for line in read_journal(storage)]
