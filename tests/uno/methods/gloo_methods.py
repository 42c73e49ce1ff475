"""One process of test_distributed: ``python -m tests.uno.methods.gloo_methods RANK WORLD_SIZE FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor

from tests.uno.gloo_worker import GlooWorker
from tests.uno.methods.toy import method_config
from tests.uno.small_run import CPU, copied_tensors, small_sets
from uno import collectives, methods
from uno.methods import METHODS
from uno.runs import run
from uno.state import new_state

OPTIONS = {
    "objective__iic_weight": 0.5, "objective__iic_view_weight": 0.5, "objective__rkd_weight": 0.5,
    "objective__queue_size": 12,
}  # fmt: skip


def two_steps(name: str, worker: GlooWorker) -> dict[str, Tensor]:
    """Gradients of the first step, and the state after two, with BatchNorm in eval mode."""
    options = OPTIONS if name == "uno" else {"objective__rampup": 0.0}
    config = method_config(name, train__batch_size=24, **options)
    method, train = methods.load(config), small_sets()[0]
    model = methods.build_network(config, 5, 5, 0)
    extra = {} if method.start is None else method.start(config, model, train)
    state = new_state(model, worker.wrap(model), config.discover, CPU, False)
    state.extra = {key: collectives.from_first(tensor) for key, tensor in extra.items()}
    state.total_steps = 24
    if name == "uno":
        teacher = run.build_model(config.model, 5, 0, 5).eval()
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
    """Run every method and store the tensors."""
    torch.set_num_threads(1)
    if world_size > 1:
        place = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=place, rank=rank, world_size=world_size)
    worker = GlooWorker(rank, world_size)
    tensors = {f"{name}/{k}": v for name in METHODS for k, v in two_steps(name, worker).items()}
    tensors = {key: tensor.detach().contiguous().clone() for key, tensor in tensors.items()}
    safetensors.torch.save_file(tensors, folder / f"{rank}.st")
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
