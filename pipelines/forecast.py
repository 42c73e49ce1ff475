"""What a run says before it starts: what it will do, from which weights, and about how long that takes."""

import os
import time
from collections.abc import Iterator

import numpy as np
import torch

from pipelines.features import on_features
from pipelines.ray_env import worker_resources
from uno.config import Config, flatten, to_dict
from uno.crops import Cropper
from uno.data import features
from uno.data.features import FeatureCache, compute_shard, feature_job
from uno.data.files import Storage
from uno.data.plan import LABELED
from uno.data.splits import Task
from uno.methods import registry
from uno.objective import labeled_loss
from uno.presets import own_images, preset
from uno.results.export import origin
from uno.runs import DISCOVER, run
from uno.runs.checkpoint import checkpoint_steps
from uno.runs.hardware import local_device, num_threads

TIMED_ROWS = 16  # images of a timed batch of pixels
MIN_GPU_ROWS = 64  # of a batch; below, starting kernels takes longer than they do. Ours; no GPU was measured
H100_PIXELS_S = 1060 * 2 * 224**2  # of views, by ResNet18 in bf16 with its stem for photographs: calculated


def forecast(config: Config, task: Task, storage: Storage, phases: tuple[str, ...]) -> Iterator[str]:
    """Lines for the console: the run, its encoder, and the time of what is left of it on this machine."""
    model, side = config.model, min(config.augment.large.size, config.data.store_size)
    what = {"all": "encoder and heads", "last": "the encoder's last stage and the heads", "heads": "heads"}
    how = f" on {config.augment.cached_views} cached views an image" if on_features(config) else ""
    epochs = ", ".join(f"{getattr(config, name).epochs} epochs of {name}" for name in phases)
    yield f"run: preset {config.preset}, {epochs}, {what[model.trainable]} learn{how}, {side} px"
    yield f"encoder: {model.encoder}, weights {origin(model)}"
    if model.weights is None and own_images(flatten(to_dict(config))):
        name = preset("photos").model.encoder
        better = f"--weights pretrained fetches those of {name}, for the preset photos"
        yield f"no pretrained weights are at hand: all is learnt from these images, at {side} px; {better}"
    seconds = {name: spent for name, spent in _seconds(config, task, storage, phases).items() if spent >= 1}
    parts = ", ".join(f"{name} {_minutes(spent)}" for name, spent in seconds.items())
    if seconds:
        yield f"time: about {_minutes(sum(seconds.values()))} here ({parts}), from a timed batch"
        load, cores = os.getloadavg()[0], os.cpu_count() or 1
        if load > cores:
            busy = f"load {load:.1f} on {cores} cores"
            yield f"warning: other programs are at work ({busy}): it may take longer"


def advice(config: Config, cluster: dict[str, float], rate: float | None) -> Iterator[str]:
    """Lines for the console on what keeps the GPUs of a ``cluster`` (its resources) waiting: rows of a batch
    for each, and CPU cores for each where images are streamed, of which one core crops ``rate`` a second.
    """
    workers, size = config.compute.workers, config.train.batch_size
    resources = worker_resources(config, cluster)
    on_gpus = "GPU" in resources
    if on_gpus and size < MIN_GPU_ROWS * workers and not on_features(config):
        text = (
            f"batches of {size:,} rows are {size / workers:g} for each of {workers} GPUs, which wait for one"
        )
        yield f"warning: {text} another below {MIN_GPU_ROWS}: fewer --workers, or a larger --batch-size"
    if rate is None:
        return
    cores = (cluster["CPU"] - workers * resources["CPU"]) / workers
    supply, what = cores * rate, "GPU" if on_gpus else "worker"
    demand = H100_PIXELS_S / (_cropper(config).row_bytes / 3)
    line = f"{cores:.3g} cores for each {what} decode and crop {supply:,.0f} images/s"
    line += f" ({rate:,.0f} a core, timed)"
    if on_gpus and supply < demand and (config.model.encoder, config.model.stem) == ("resnet18", "imagenet"):
        line = f"warning: {line}, and an H100 takes about {demand:,.0f} (calculated): give it more cores"
    yield line


def _cropper(config: Config) -> Cropper:
    data = config.data
    return Cropper(config.seed, LABELED, TIMED_ROWS, config.augment, data.store_size, data.interpolation)


def crop_rate(config: Config, task: Task) -> float:
    """Training images that a core of this machine decodes and crops in a second, from a few of them."""
    cropper, rows = _cropper(config), np.flatnonzero(task.is_train)[:TIMED_ROWS]
    images, spent = task.rows.images.fetch(rows), 0.0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for some in (images[:1], images):  # the first call is slower
        start = time.perf_counter()
        cropper.crop(np.zeros(len(some), np.int64), np.arange(len(some)), some)
        spent = time.perf_counter() - start
    torch.set_num_threads(threads)
    return len(images) / spent


def _minutes(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _seconds(config: Config, task: Task, storage: Storage, phases: tuple[str, ...]) -> dict[str, float]:
    """Of each part of the run, on this machine, whose device is used alone; nothing where workers run on
    other machines, or on GPUs that this one lacks.
    """
    compute, found = config.compute, dict[str, float]()
    elsewhere = "RAY_ADDRESS" in os.environ or (compute.device == "cuda" and not torch.cuda.is_available())
    if compute.workers and elsewhere:
        return found
    device = local_device(config)
    threads = num_threads(config)
    torch.set_num_threads(threads)
    if on_features(config):
        encoder = run.frozen_encoder(config, storage)
        job = feature_job(config, task, encoder)
        left = FeatureCache(Storage(features.cache_directory(config)), job).num_missing()
        if left:
            found["features"] = left * _shard_row(job, encoder.to(device), threads)
    plans = run.plans(config, *task.sizes, config.compute.workers)
    for name in phases:
        steps, plan = getattr(config, name).epochs * plans[name].steps_per_epoch, plans[name]
        last = min(steps, config.train.max_steps or steps) - max(checkpoint_steps(storage, name), default=0)
        if last > 0:
            found[name] = last * _step(config, task, name, plan.labeled_size + plan.unlabeled_size, device)
    return found


def _shard_row(job: features.FeatureJob, encoder: torch.nn.Module, threads: int) -> float:
    """Seconds for a row's features, all threads at work."""
    torch.set_num_threads(1)
    images, _ = job.load(0)
    spent, in_training = 0.0, np.ones(len(images), dtype=bool)  # test rows have fewer views: an upper bound
    for num in (1, features.CPU_IMAGES):  # the first call is slower
        start = time.perf_counter()
        compute_shard(job.config, encoder, 0, images[:num], in_training[:num])
        spent = (time.perf_counter() - start) / min(num, len(images))
    torch.set_num_threads(threads)
    return spent / (threads if next(encoder.parameters()).device.type == "cpu" else 1)


def _step(config: Config, task: Task, phase: str, batch_rows: int, device: torch.device) -> float:
    """Seconds for a step of ``batch_rows``: forward and backward of all views, of fewer rows for images."""
    num_novel = task.num_novel if phase == DISCOVER else 0
    network = registry.build_network(config, task.num_known, num_novel, 0).to(device).train()
    network = network.to(memory_format=torch.channels_last)
    flat = on_features(config)
    rows = batch_rows if flat else min(TIMED_ROWS, batch_rows)
    large, small = config.augment.large, config.augment.small
    width = int(network.encoder.num_features)  # type: ignore[arg-type]
    sizes = [large.size] * large.num_views + [small.size] * small.num_views
    shapes = [(rows, width) if flat else (rows, 3, size, size) for size in sizes]
    spent = 0.0
    for _ in range(2):
        views = [torch.rand(shape, device=device) for shape in shapes]
        start = time.perf_counter()
        logits = network(views)
        labels = torch.zeros(rows, dtype=torch.int64, device=device)
        loss = labeled_loss(logits.known, labels, 1.0)
        for family in (logits.novel, logits.over):
            loss = loss if family is None else loss + family.float().square().mean()
        loss.backward()
        float(loss.detach())  # waits for the device
        spent = time.perf_counter() - start
    return spent * batch_rows / rows
