"""One process of test_collectives: ``python -m tests.uno.gloo_worker RANK WORLD_SIZE FOLDER``."""

import sys
from contextlib import suppress
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.uno.small_run import CPU, copied_tensors, small_config, small_sets
from uno import collectives, steps
from uno.data.files import Storage
from uno.data.resident import ResidentBatches
from uno.errors import Interrupted
from uno.methods import METHODS, registry
from uno.model import build_model
from uno.runs import run
from uno.runs.checkpoint import load_newest
from uno.state import TrainState, new_state
from uno.steps import Batch, discovery_step
from uno.train import LocalWorker, Phase, fit

CONFIG = small_config(train__batch_size=24)
# Everything that Python code can call; DDP reduces gradients from C++, once for each bucket.
COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "barrier",
    "broadcast", "gather", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "send",
)  # fmt: skip


OPTIONS = {
    "objective__iic_weight": 0.5, "objective__iic_view_weight": 0.5, "objective__rkd_weight": 0.5,
    "objective__queue_size": 12,
}  # fmt: skip


class GlooWorker(LocalWorker):
    """A LocalWorker among others; stops before one step if asked to."""

    def __init__(self, rank: int, world_size: int, stop: int | None = None) -> None:
        super().__init__(CPU)
        self.rank, self.world_size, self.stop = rank, world_size, stop

    def wrap(self, model: nn.Module) -> nn.Module:
        return nn.parallel.DistributedDataParallel(model) if self.world_size > 1 else model

    def should_stop(self, step: int) -> bool:
        return step == self.stop


def make_state(worker: GlooWorker) -> TrainState:
    model = build_model(CONFIG.model, 5, 5, 0)
    return new_state(model, worker.wrap(model), CONFIG.discover, CPU, False)


def batches(worker: GlooWorker) -> ResidentBatches:
    train = small_sets()[0]
    plan = run.plans(CONFIG, len(train.labels), len(train.unlabeled_images), worker.world_size)[run.DISCOVER]
    return train.batches(CONFIG, plan, worker.rank, worker.world_size)


def one_step(worker: GlooWorker) -> dict[str, Tensor]:
    """A discovery step with BatchNorm in eval mode, so that rows do not see each other but in Sinkhorn."""
    state, batch = make_state(worker), batches(worker)(0)
    state.model.eval()
    seen: dict[str, Tensor] = {}
    calls = dict.fromkeys(COLLECTIVES, 0)

    def counted(name: str):
        real = getattr(dist, name)

        def call(*args, **kwargs):
            calls[name] += 1
            return real(*args, **kwargs)

        return call

    real = {name: getattr(dist, name) for name in COLLECTIVES}
    for name in COLLECTIVES if worker.world_size > 1 else ():
        setattr(dist, name, counted(name))
    targets_of = steps.global_targets

    def recorded(*args):
        targets = targets_of(*args)
        seen["novel_targets"], seen["over_targets"] = (target.contiguous() for target in targets)
        return targets

    steps.global_targets = recorded
    seen["loss"] = discovery_step(state, batch, CONFIG.objective, 0.1)
    steps.global_targets = targets_of
    for name, function in real.items():
        setattr(dist, name, function)
    seen["head_losses"] = state.epoch_losses.clone()
    seen["calls"] = torch.tensor([calls["all_gather"], sum(calls.values())])
    for name, parameter in state.model.named_parameters():
        seen[f"grad/{name}"] = parameter.grad.clone()
    seen |= {
        f"state/{k}": v for k, v in copied_tensors(state).items() if "epoch" not in k and "line" not in k
    }
    return seen


def nan_on_one_rank(worker: GlooWorker) -> dict[str, Tensor]:
    """Rank 1's rows are not numbers: both ranks skip the step."""
    state, batch = make_state(worker), batches(worker)(0)
    before = [p.detach().clone() for p in state.model.encoder.parameters()]
    if worker.rank == worker.world_size - 1:
        batch = Batch([view.fill_(float("nan")) for view in batch.views], batch.labels, batch.num_large)
    discovery_step(state, batch, CONFIG.objective, 0.1)
    kept = all(torch.equal(a, b) for a, b in zip(before, state.model.encoder.parameters(), strict=True))
    return {"skipped": state.skipped.clone(), "kept": torch.tensor(kept)}


def whole_phase(worker: GlooWorker, folder: Path) -> dict[str, Tensor]:
    """Two epochs, stopped in the middle of the second and resumed, against the same without a stop."""
    found = {}
    for name, stops in (("clean", (None,)), ("resumed", (11, None))):
        for stop in stops:
            worker.stop = stop
            state = make_state(worker)
            phase = Phase(run.DISCOVER, CONFIG.discover, 8, 24, 16, discovery_step)
            with suppress(Interrupted):
                fit(CONFIG, phase, state, batches(worker), worker, Storage(str(folder / name)))
        found |= {f"{name}/{key}": value for key, value in copied_tensors(state).items()}
        # what rank 0 stored is there for everyone as soon as fit returns
        found[f"{name}/stored"] = torch.tensor(load_newest(Storage(str(folder / name)), run.DISCOVER).step)
    return found


def two_steps(name: str, worker: GlooWorker) -> dict[str, Tensor]:
    """Gradients of the first step, and the state after two, with BatchNorm in eval mode."""
    options = OPTIONS if name == "uno" else {"objective__rampup": 0.0}
    config = small_config(method=name, train__batch_size=24, **options)
    method, train = registry.load(config), small_sets()[0]
    model = registry.build_network(config, 5, 5, 0)
    extra = {} if method.start is None else method.start(config, model, train)
    state = new_state(model, worker.wrap(model), config.discover, CPU, False)
    state.extra = {key: collectives.from_first(tensor) for key, tensor in extra.items()}
    state.total_steps = 24
    if name == "uno":
        teacher = build_model(config.model, 5, 0, 5).eval()
        state.teacher = torch.nn.Sequential(teacher.encoder, teacher.known)
    state.model.eval()
    plan = run.plans(config, len(train.labels), len(train.unlabeled_images), worker.world_size)[run.DISCOVER]
    batches = train.batches(config, plan, worker.rank, worker.world_size)
    seen = {"loss": method.step(state, batches(0), config.objective, 0.02)}
    for key, parameter in state.model.named_parameters():
        seen[f"grad/{key}"] = parameter.grad.clone()
    method.step(state, batches(1), config.objective, 0.02)
    kept = {k: v for k, v in copied_tensors(state).items() if "epoch" not in k and "line" not in k}
    return seen | {f"state/{key}": tensor for key, tensor in kept.items()}


def main(rank: int, world_size: int, folder: Path) -> None:
    """Run everything and store the tensors."""
    torch.set_num_threads(1)
    if world_size > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
        )
    assert collectives.world() == (rank, world_size)
    worker = GlooWorker(rank, world_size)
    tensors = {f"step/{k}": v for k, v in one_step(worker).items()}
    if world_size <= 2:
        by_method = {f"{name}/{k}": v for name in METHODS for k, v in two_steps(name, worker).items()}
        tensors |= {f"method/{k}": v.detach() for k, v in by_method.items()}
    if world_size > 1:
        tensors |= {f"nan/{k}": v for k, v in nan_on_one_rank(worker).items()}
        tensors |= {f"phase/{k}": v for k, v in whole_phase(worker, folder).items()}
    safetensors.torch.save_file(
        {k: v.contiguous().clone() for k, v in tensors.items()}, folder / f"{rank}.st"
    )
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
