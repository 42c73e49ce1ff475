"""How many bytes and collectives does a step cost, and what do they say about many
GPUs?

    python -m benchmarks.workers --workers 1 2 4

prints one JSON row: collectives and bytes of one discovery step of the CIFAR10 `paper`
recipe (ResNet18, batch 512), counted in real gloo processes on this machine on images
of 8 pixels, as sizes of gradients and logits do not depend on the pixels (what
SyncBatchNorm sends, on GPUs alone, follows from the model), and a model of the scaling
efficiency on GPUs. Its assumptions are :data:`ASSUMED`.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from benchmarks.measure import environment
from benchmarks.step import train_set
from pipelines.worker import RayWorker
from uno import collectives
from uno.config import Config, override
from uno.data.plan import make_plan
from uno.data.resident import ResidentBatches
from uno.model import build_model
from uno.objective import discovery_step
from uno.presets import preset
from uno.state import new_state

STEPS = 3  # the last is counted: DDP agrees on new buckets at the start of the second
ASSUMED = {
    "link_gb_per_s": 50.0,  # 400 Gb/s for each GPU, in both directions
    "link_efficiency": 0.8,  # of a ring's large messages
    "hop_us": 5.0,  # of latency; a ring all-reduce has 2 (W - 1) hops, a tree 2 log2 W
    "call_us": 20.0,  # launch and completion of one collective, whatever its size
    "backward_share": 0.67,  # of a step's time: gradients may travel during it
    # of the GPU, for Sinkhorn over the global batch, which every GPU repeats
    "memory_gb_per_s": 3000.0,
    "sinkhorn_passes": 16,  # reads and writes of the gathered logits
    # of 512 images of 32 pixels on one H100 or H200 in bf16: a range, not measured
    "step_ms": (10.0, 40.0),
    "rows_per_gpu": 512,  # weak scaling: the global batch grows with the GPUs
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--batch", type=int, default=512, help="global")
    parser.add_argument("--side", type=int, default=8, help="pixels of the images")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        work(
            options.rank,
            options.workers[0],
            options.batch,
            options.side,
            options.folder,
        )
        return
    counted = {
        str(size): count(size, options.batch, options.side) for size in options.workers
    }
    row = {
        "question": "bytes and collectives per step, and the scaling they allow",
        "command": "python -m benchmarks.workers " + " ".join(sys.argv[1:]),
        "batch": options.batch,
        "counted": counted,
        "network": network(options.batch),
        "assumed": ASSUMED,
        "model": [
            efficiency(gpus, step)
            for step in ASSUMED["step_ms"]
            for gpus in (8, 64, 512)
        ],
        **environment(),
    }
    print(json.dumps(row))


# --------------------------------------------------------------------------------------------------- counting  # noqa: E501
def count(num_workers: int, batch: int, side: int) -> dict[str, Any]:
    """Start the processes; what rank 0 sent in one step, by collective."""
    with tempfile.TemporaryDirectory() as folder:
        options = [
            "--workers",
            num_workers,
            "--batch",
            batch,
            "--side",
            side,
            "--folder",
            folder,
        ]
        command = [sys.executable, "-m", "benchmarks.workers", *map(str, options)]
        processes = [
            subprocess.Popen([*command, "--rank", str(rank)])
            for rank in range(num_workers)
        ]
        if any([process.wait() for process in processes]):
            raise SystemExit("a worker failed")
        found: dict[str, Any] = json.loads((Path(folder) / "counted.json").read_text())
        return found


def work(rank: int, num_workers: int, batch: int, side: int, folder: str) -> None:
    """One process of a group."""
    torch.set_num_threads(1)
    if num_workers > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=num_workers,
        )
    found = counted_step(rank, num_workers, batch, side)
    if rank == 0:
        (Path(folder) / "counted.json").write_text(json.dumps(found))
    if num_workers > 1:
        dist.destroy_process_group()


def counted_step(
    rank: int,
    num_workers: int,
    batch: int,
    side: int,
    reduce: Callable[[Any, Any], Any] = allreduce_hook,
) -> dict[str, Any]:
    """A few steps in a group that has begun, the last with all collectives and their
    bytes counted. ``reduce``: DDP's hook for gradients.
    """
    views = {
        "augment.large.size": side,
        "data.stored_size": side,
        "train.batch_size": batch,
    }
    config = override(preset("cifar10"), views)
    train = train_set(None, config)
    calls: Counter[str] = Counter()
    sent: Counter[str] = Counter()
    plan = make_plan(
        0,
        config.data.batch_sampling,
        batch,
        len(train.labels),
        len(train.unlabeled_images),
        num_workers,
    )
    batches = ResidentBatches(config, train, plan, rank, num_workers)
    model = build_model(config.model, train.num_known, train.num_novel, 0)
    model = model.to(memory_format=torch.channels_last).train()
    place = SimpleNamespace(world_size=num_workers, device=torch.device("cpu"))
    forward = RayWorker.wrap(place, model)  # type: ignore[arg-type]  # needs no more than these two
    gather = dist.all_gather
    if num_workers > 1:

        def counted_hook(group, bucket):  # type: ignore[no-untyped-def]  # DDP checks the annotations
            calls["all_reduce of gradients"] += 1
            sent["all_reduce of gradients"] += bucket.buffer().nbytes
            return reduce(group, bucket)

        forward.register_comm_hook(None, counted_hook)

        def counted_gather(parts: list[torch.Tensor], tensor: torch.Tensor) -> Any:
            calls["all_gather of logits"] += 1
            sent["all_gather of logits"] += tensor.nbytes
            return gather(parts, tensor)

        collectives.dist.all_gather = counted_gather

    state = new_state(model, forward, config.discover, torch.device("cpu"), False)
    for step in range(STEPS):
        calls.clear()
        sent.clear()
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU]
        ) as trace:
            discovery_step(state, batches(step), config, 1e-3)
        seen = Counter(
            event.name for event in trace.events() if event.name.startswith("gloo:")
        )
    collectives.dist.all_gather = gather
    return {"calls": dict(calls), "bytes": dict(sent), "seen_by_gloo": dict(seen)}


# ------------------------------------------------------------------------------------------------------ model  # noqa: E501
@cache
def network(rows: int) -> dict[str, int]:
    """What a step of the CIFAR10 `paper` recipe has to exchange, from the model
    itself.
    """
    config: Config = preset("cifar10")
    model = build_model(config.model, 5, 5, 0)
    norms = [
        m for m in model.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)
    ]
    outputs = model.num_heads * model.num_novel * (1 + config.model.overcluster_factor)
    return {
        "gradient_bytes": sum(4 * p.numel() for p in model.parameters()),
        # half are unlabeled
        "logit_bytes": 4 * config.augment.large.num_views * outputs * rows // 2,
        "batch_norms": len(norms),
        "batch_norm_bytes": sum(4 * 2 * m.num_features for m in norms),
    }


def efficiency(gpus: int, step_ms: float) -> dict[str, float]:
    """Milliseconds of one step on ``gpus`` GPUs, by part, and the speed per GPU
    relative to one GPU.
    """
    a, sizes = ASSUMED, network(ASSUMED["rows_per_gpu"])
    gb_per_s = a["link_gb_per_s"] * a["link_efficiency"]

    def travel(num_bytes: float) -> float:
        return num_bytes / gb_per_s / 1e6

    call = (a["call_us"] + 2 * math.ceil(math.log2(gpus)) * a["hop_us"]) / 1e3
    ring = (
        2 * (gpus - 1) / gpus * travel(sizes["gradient_bytes"])
        + 2 * (gpus - 1) * a["hop_us"] / 1e3
    )
    tree = 2 * travel(sizes["gradient_bytes"]) + call
    gradients = min(ring, tree)
    hidden = a["backward_share"] * step_ms
    # DDP's first bucket, 1 MB, is sent last
    last_bucket = min(gradients, call + 2 * travel(1e6))
    exposed = max(gradients - hidden, last_bucket)
    gathered = (gpus - 1) * sizes["logit_bytes"]
    logits = call + travel(gathered)
    # forward a sum of W rows, all zeros but one; backward a sum of one row
    statistics = sizes["batch_norms"] * 2 * call + 2 * travel(
        gpus * sizes["batch_norm_bytes"]
    )
    sinkhorn = a["sinkhorn_passes"] * gathered / a["memory_gb_per_s"] / 1e6
    total = step_ms + exposed + logits + statistics + sinkhorn
    parts = {
        "gradients": gradients,
        "gradients_exposed": exposed,
        "logits": logits,
        "global_norms": statistics,
        "sinkhorn_repeated": sinkhorn,
        "total": total,
    }
    return {
        "gpus": gpus,
        "step_ms": step_ms,
        **{name: round(value, 3) for name, value in parts.items()},
        "efficiency": round(step_ms / total, 3),
        "efficiency_without_global_norms": round(step_ms / (total - statistics), 3),
    }


if __name__ == "__main__":
    main()
