"""What a run needs of this machine, estimated before any of it is taken."""

import os

import torch
from torch import Tensor, nn

from pipelines.features import on_features, row_bytes
from uno.config import OWN_ENCODERS, Config
from uno.data.ingest import free_device_bytes, free_host_bytes
from uno.data.splits import Task
from uno.errors import ConfigError
from uno.methods import registry
from uno.runs import DISCOVER, run
from uno.runs.hardware import local_device, num_threads

GB = 1e9
SIDE = 64  # pixels of the image that is measured; convolutions keep as much for each pixel of a larger one


def check_demand(config: Config, task: Task) -> None:
    """ConfigError: more threads than the cores can bear, or more memory than is free here, with the images of
    a resident run, without what :func:`~uno.data.ingest.peak_bytes` counts for programs. On other machines
    (``RAY_ADDRESS``) and on GPUs that this one lacks nothing is known beforehand.
    """
    compute = config.compute
    if compute.workers and ("RAY_ADDRESS" in os.environ or compute.device == "cuda"):
        return
    num_threads(config)
    free, where, num_rows = free_host_bytes(), "memory", len(task.rows)
    if not compute.workers and local_device(config).type == "cuda":
        free, where, num_rows = free_device_bytes(config) or free, "device memory", sum(task.sizes)
    parts = needed_bytes(config, task, free)
    images = num_rows * row_bytes(config) if config.data.ingest == "resident" else 0
    needed = sum(parts.values()) * max(1, compute.workers) + images
    if needed > free:
        listed = ", ".join(f"{name} {spent / GB:.1f} GB" for name, spent in parts.items() if spent > 1e8)
        listed += f" in each of {compute.workers} workers" if compute.workers > 1 else ""
        advice = "lower --batch-size, --augment.large.size, the encoder or --objective.queue-size"
        if images > needed / 2:
            listed = f"{num_rows:,} images {images / GB:.1f} GB"
            advice = "use --data.ingest streaming, or --limit"
        text = f"this run needs at least {needed / GB:.1f} GB of {where} ({listed}), "
        raise ConfigError(f"{text}{free / GB:.1f} GB are free; {advice}")


def needed_bytes(config: Config, task: Task, free: float = float("inf")) -> dict[str, int]:
    """A lower bound by part, for one process: weights, their gradients and momentum; what the backward pass
    of a step keeps, from one image; the queue and its logits. What alone is more than ``free`` is not built.
    Of an encoder that is the user's own code nothing is known.
    """
    model, large, small = config.model, config.augment.large, config.augment.small
    workers = max(1, config.compute.workers)
    if model.encoder.partition(":")[0] not in (*OWN_ENCODERS, "torchvision", "timm"):
        return {}
    plan = run.plans(config, *task.sizes, workers)[DISCOVER]
    rows = (plan.labeled_size + plan.unlabeled_size) // workers
    views = [(kind.num_views, kind.size) for kind in (large, small) if kind.num_views]
    heads = model.num_heads * (2 if model.overcluster_factor else 1)
    outputs = task.num_novel * (1 + model.overcluster_factor)
    hidden = rows * sum(num for num, _ in views) * heads * (2 * model.hidden_dim + model.projection_dim)
    in_queue = 2 * (heads // model.num_heads) * model.projection_dim + outputs
    parts = {
        "network": 12 * heads * model.hidden_dim * model.projection_dim,
        "a step's activations": 4 * hidden,
        "queue": 4 * config.objective.queue_size * large.num_views * model.num_heads * in_queue,
    }
    if registry.load(config).novel_head is not None:  # a baseline's, without projections
        parts = dict.fromkeys(parts, 0)
    if model.encoder == "resnet_small":  # two 3x3 convolutions a block, of w, 2w, 4w channels
        channels = sum(4**i for i in range(model.stages)) * model.width**2
        parts["network"] += 12 * 9 * (2 * model.blocks - 1) * channels
    if sum(parts.values()) > free:
        return parts
    network = registry.build_network(config, task.num_known, task.num_novel, 0).eval()
    parts["network"] = sum((12 if p.requires_grad else 4) * p.numel() for p in network.parameters())
    for num, size in views if not on_features(config) else ():
        side = min(size, SIDE) if model.encoder in OWN_ENCODERS else size
        kept = _kept_bytes(network.encoder, side) * (size / side) ** 2
        parts["a step's activations"] += round(kept * num * rows)
    return parts


def _kept_bytes(encoder: nn.Module, side: int) -> int:
    """What is kept of one image for the way back."""
    weights = {parameter.untyped_storage()._cdata for parameter in encoder.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        encoder(torch.zeros(1, 3, side, side))
    return sum(storage.nbytes() for storage in kept.values())
