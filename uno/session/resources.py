"""What a run needs of a machine, before it takes any of it: memory, which decides
whether images are decoded once and kept (resident) or again in every epoch (streaming),
and about how long it takes.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from uno import runtime
from uno.allocator import kept_memory
from uno.config import OWN_ENCODERS, VECTORS, Config, flatten, override, to_dict
from uno.cpus import available_cpus
from uno.crops import Cropper
from uno.data import features
from uno.data.features import FeatureCache, encode_chunk, feature_job
from uno.data.files import Storage
from uno.data.plan import LABELED
from uno.data.splits import Task
from uno.encoder import build_encoder
from uno.errors import ConfigError
from uno.methods import registry
from uno.presets import is_custom_data, preset
from uno.results.export import origin
from uno.runs import DISCOVER, run
from uno.runs.checkpoint import checkpoint_steps
from uno.runs.hardware import local_device, num_threads
from uno.steps import labeled_loss
from uno.text import plural

GB = 1e9
SHARE = 0.6  # of free memory; the rest is for the model, its activations and the system
# of a resident set on Ray; a task is a process at first, which takes seconds to start
ROWS_PER_BLOCK = 2048
ALONE_BYTES = 870_000_000  # of a run without Ray, to its end
RAY_BYTES = 1_370_000_000  # of this process, and of those that Ray starts in any case
# of a process that decodes: one for each CPU, gone when training starts
TASK_BYTES = 420_000_000
# of Ray Train's own processes, and of each worker
TRAINER_BYTES, WORKER_BYTES = 720_000_000, 750_000_000
# for each worker; more is slower: a page's first touch costs as much as a copy
STORE_BYTES = 1_500_000_000
# times the decoded images: those that were in memory travel to their tasks
RESIDENT_STORE = 2
STATM = "/proc/self/statm"
MEMINFO = "/proc/meminfo"
CGROUP = "/sys/fs/cgroup"
# pixels of the image that is measured; convolutions keep as much for each pixel of a
# larger one
SIDE = 64
TIMED_ROWS = 16  # images of a timed batch of pixels
# of a batch; below, starting kernels takes longer than they do. Ours; no GPU was
# measured
MIN_GPU_ROWS = 64
# of views, by ResNet18 in bf16 with its stem for photographs: calculated
H100_PIXELS_S = 1060 * 2 * 224**2

Loading = Literal["memory", "streaming"]


# What there is.


class Room(NamedTuple):
    """Bytes that are free for a run, on the node that has least; None: there is no
    such limit.
    """

    host: int
    device: int | None = None  # a worker's share of a GPU
    # all of Ray's object store, of a cluster that runs already
    store: int | None = None
    # of the machine of this process, where workers are on others
    driver: int | None = None


def free_memory(config: Config) -> Room:
    """What a worker may take here."""
    device, share = (
        free_device_bytes(config),
        min(1.0, config.compute.gpus_per_worker or 1.0),
    )
    return Room(free_host_bytes(), None if device is None else int(share * device))


def free_host_bytes() -> int:
    """Memory that this process could still take, as the kernel and the container
    say.
    """
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # else not Linux
    with suppress(OSError, ValueError), open(MEMINFO, encoding="ascii") as file:
        found = [
            int(line.split()[1]) * 1024
            for line in file
            if line.startswith("MemAvailable:")
        ]
        free = min([free, *found])
    try:
        with open(f"{CGROUP}/memory.max", encoding="ascii") as limit:
            most = limit.read().strip()
        with open(f"{CGROUP}/memory.current", encoding="ascii") as used:
            return (
                free
                if most == "max"
                else max(0, min(free, int(most) - int(used.read())))
            )
    except (OSError, ValueError):
        return free  # no container, or one that does not say


def free_device_bytes(config: Config) -> int | None:
    """Free memory of the GPU that this process would take; None where it takes none."""
    if config.compute.device == "cpu" or not torch.cuda.is_available():
        return None
    return int(torch.cuda.mem_get_info()[0])


def own_bytes() -> int:
    """Memory that this process has taken, which is counted as a program's."""
    # else not Linux
    with suppress(OSError, ValueError), open(STATM, encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


# What the images take.


def on_features(config: Config) -> bool:
    """Whether a run trains on cached features: its encoder is frozen, and they are
    to be kept in memory.
    """
    return config.model.finetune == "none" and config.data.loading != "streaming"


def row_bytes(config: Config) -> int:
    """Of one image that a resident run keeps: decoded, or its features (also if
    their file is mapped).
    """
    if config.model.finetune != "none":
        return 3 * config.data.stored_size**2
    width = int(build_encoder(config.model).num_features)  # type: ignore[arg-type]
    views = config.augment.num_cached_views
    if config.model.takes_vectors and config.augment.vector_view == "neighbors":
        # a partner and a share for each: views are made when they are read
        return 4 * width + 8 * views
    return 4 * (1 + views) * width


HOW = {"memory": "kept in memory", "streaming": "streamed"}
"""Values of ``data.loading``, for the console."""


def choose(
    config: Config, num_rows: int, row_bytes: int, room: Room
) -> tuple[Loading, str]:
    """The loading of ``num_rows`` images, and a sentence that says why. ``row_bytes``:
    of one in memory, decoded or as the features of a frozen encoder. A GPU and every
    node's object store hold one copy of all, the driver as many as a machine that has
    all of a run. ConfigError: images that are needed in memory are to be streamed.
    """
    needed, peak, copies = (
        num_rows * row_bytes,
        peak_bytes(config, num_rows, row_bytes),
        _num_copies(config),
    )
    left = max(0, room.host + own_bytes() - _program_bytes(config, num_rows))
    budget, where = SHARE * left / copies, "of free host memory"
    for limit, name in (
        (room.device, "of free device memory"),
        (room.store, "of the smallest object store of the cluster"),
        (
            (
                None
                if room.driver is None
                else max(0, room.driver + own_bytes() - RAY_BYTES) / copies
            ),
            "of the driver's memory",
        ),
    ):
        if limit is not None and SHARE * limit < budget:
            budget, where = SHARE * limit, name
    what = "of features" if config.model.finetune == "none" else "decoded"
    sizes = f"{_size(needed)} {what}; process peak about {_size(peak)}, "
    sizes += f"budget {_size(budget)} ({SHARE:.0%} {where})"
    method = f"method {config.method}" if registry.load(config).needs_images else None
    needs, told = (
        "pretext.epochs" if config.pretext.epochs else method,
        config.data.loading,
    )
    needs = "--data vectors" if config.model.takes_vectors else needs
    if needs and told == "streaming":
        raise ConfigError(
            f"{needs} needs the images in memory; use --data.loading memory"
        )
    if told != "auto":
        return told, f"{HOW[told]}, set by --data.loading ({sizes})"
    if needs:
        return "memory", f"{HOW['memory']}, because {needs} needs it ({sizes})"
    fits: Loading = "memory" if needed <= budget else "streaming"
    return fits, f"{HOW[fits]} ({sizes})"


def peak_bytes(
    config: Config, num_rows: int, row_bytes: int, cpus: int | None = None
) -> int:
    """Memory of a resident run on one machine of so many CPUs (default: as here) when
    it holds most, without what grows with the network and its batches: programs, and
    the set in this process or in Ray's store. Of several machines it is an upper bound,
    as if all workers were on one.
    """
    return (
        _program_bytes(config, num_rows, cpus)
        + _num_copies(config) * num_rows * row_bytes
    )


def _program_bytes(config: Config, num_rows: int, cpus: int | None = None) -> int:
    """As ``benchmarks.memory`` measured them on CPUs (x86, Python 3.11, torch 2.15
    built for CUDA 13, Ray 2.60; not on GPUs): Ray's decode first and go, then there are
    workers.
    """
    workers = config.compute.num_workers
    tasks = min(cpus or available_cpus(), -(-num_rows // ROWS_PER_BLOCK))
    more = max(tasks * TASK_BYTES, TRAINER_BYTES + workers * WORKER_BYTES)
    return RAY_BYTES + more if workers else ALONE_BYTES


def _num_copies(config: Config) -> int:
    """Of the set, on a node: all workers see that of Ray's store; this process also
    keeps features.
    """
    return 2 if config.compute.num_workers and config.model.finetune == "none" else 1


def store_bytes(config: Config, num_rows: int) -> int | None:
    """The object store that a run asks for on this machine: for streams a worker; for a
    resident set as images came and as they stay, and a task's on top; None: Ray's own
    default, for cached features.
    """
    if config.data.loading == "streaming":
        return min(
            config.compute.num_workers * STORE_BYTES, int(0.3 * free_host_bytes())
        )
    if on_features(config):
        return None
    images = num_rows * 3 * config.data.stored_size**2
    return min(RESIDENT_STORE * images + STORE_BYTES // 2, int(0.6 * free_host_bytes()))


def choose_for_sweep(
    config: Config, num_rows: int, num_folds: int
) -> tuple[Loading, str]:
    """:func:`choose` for the trials of a sweep, which share the images: this process
    and Ray's store have a copy each, a GPU one of each fold. What does not fit is
    streamed: trials read images themselves, and features of a frozen encoder are mapped
    from a file.
    """
    room, here = free_memory(config), override(config, {"compute.num_workers": 0})
    device = None if room.device is None else room.device // num_folds
    return choose(here, num_rows, row_bytes(config), Room(room.host // 2, device))


def _size(num_bytes: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.4g} TB"


def on_a_cluster() -> bool:
    """Whether workers are those of a Ray cluster (``RAY_ADDRESS``), whose machines
    are not known here.
    """
    return os.environ.get("RAY_ADDRESS", "local") not in ("", "local")


# What the network and its batches take.


def check_memory(config: Config, task: Task) -> None:
    """ConfigError: more threads than the cores can bear, or more memory than is free
    here, with the images of a resident run, without what :func:`peak_bytes` counts for
    programs. On other machines and on GPUs that this one lacks nothing is known
    beforehand.
    """
    compute = config.compute
    if compute.num_workers and (on_a_cluster() or compute.device == "cuda"):
        return
    num_threads(config)
    free, where, num_rows = free_host_bytes(), "memory", len(task.rows)
    if not compute.num_workers and local_device(config).type == "cuda":
        free, where, num_rows = (
            free_device_bytes(config) or free,
            "device memory",
            sum(task.sizes),
        )
    parts = needed_bytes(config, task, free)
    images = num_rows * row_bytes(config) if config.data.loading == "memory" else 0
    needed = sum(parts.values()) * max(1, compute.num_workers) + images
    if needed > free:
        listed = ", ".join(
            f"{name} {spent / GB:.1f} GB"
            for name, spent in parts.items()
            if spent > 1e8
        )
        listed += (
            f" in each of {compute.num_workers} workers"
            if compute.num_workers > 1
            else ""
        )
        advice = (
            "lower --batch-size, --augment.large.size, the encoder or"
            " --objective.queue-size"
        )
        if images > needed / 2:
            listed = f"{plural(num_rows, 'image')} {images / GB:.1f} GB"
            advice = "use --data.loading streaming, or --limit"
        text = f"this run needs at least {needed / GB:.1f} GB of {where} ({listed}), "
        raise ConfigError(f"{text}{free / GB:.1f} GB are free; {advice}")


def needed_bytes(
    config: Config, task: Task, free: float = float("inf")
) -> dict[str, int]:
    """A lower bound by part, for one process: weights, their gradients and momentum;
    what the backward pass of a step keeps, from one image; the queue and its logits.
    What alone is more than ``free`` is not built. Of an encoder that is the user's own
    code nothing is known.
    """
    model, large, small = config.model, config.augment.large, config.augment.small
    workers = max(1, config.compute.num_workers)
    if model.encoder.partition(":")[0] not in (
        *OWN_ENCODERS,
        "torchvision",
        "timm",
        VECTORS,
    ):
        return {}
    plan = run.plans(config, *task.sizes, workers).get(DISCOVER)
    rows = 0 if plan is None else (plan.labeled_size + plan.unlabeled_size) // workers
    views = [(kind.num_views, kind.size) for kind in (large, small) if kind.num_views]
    heads = model.num_heads * (2 if model.overcluster_factor else 1)
    outputs = task.num_novel * (1 + model.overcluster_factor)
    hidden = (
        rows
        * sum(num for num, _ in views)
        * heads
        * (2 * model.hidden_dim + model.projection_dim)
    )
    in_queue = 2 * (heads // model.num_heads) * model.projection_dim + outputs
    parts = {
        "network": 12 * heads * model.hidden_dim * model.projection_dim,
        "a step's activations": 4 * hidden,
        "queue": (
            4
            * config.objective.queue_size
            * large.num_views
            * model.num_heads
            * in_queue
        ),
    }
    # a baseline's, without projections
    if registry.load(config).novel_head is not None:
        parts = dict.fromkeys(parts, 0)
    # two 3x3 convolutions a block, of w, 2w, 4w channels
    if model.encoder == "resnet_small":
        channels = sum(4**i for i in range(model.stages)) * model.width**2
        parts["network"] += 12 * 9 * (2 * model.blocks - 1) * channels
    if sum(parts.values()) > free:
        return parts
    network = registry.build_network(config, task.num_known, task.num_novel, 0).eval()
    parts["network"] = sum(
        (12 if p.requires_grad else 4) * p.numel() for p in network.parameters()
    )
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


# How long it takes.


def forecast(
    config: Config, task: Task, storage: Storage, phases: tuple[str, ...]
) -> Iterator[str]:
    """Lines for the console: the run, its encoder, and the time of what is left of
    it on this machine.
    """
    model, side = config.model, features.side(config)
    what = {
        "full": "fully trained",
        "last_stage": "last stage trained",
        "none": "frozen",
    }[model.finetune]
    views = config.augment.num_cached_views if on_features(config) else 0
    how = f" on {views} cached views per image" if views else ""
    counts = {name: getattr(config, name).epochs for name in phases}
    epochs = ", ".join(
        f"{plural(num, 'epoch')} of {name}" for name, num in counts.items() if num
    )
    size = "vectors" if model.takes_vectors else f"{side} px"
    yield f"model: {model.encoder}, {what}, {size}; weights: {origin(model)}"
    steps = f", {epochs}{how}" if epochs else f"; method {config.method} trains nothing"
    yield f"training: preset {config.preset}{steps}"
    if model.weights is None and is_custom_data(flatten(to_dict(config))):
        name = preset("photos").model.encoder
        yield (
            "hint: no pretrained weights; for better results --weights pretrained"
            f" ({name}, preset photos)"
        )
    seconds = {
        name: spent
        for name, spent in _seconds(config, task, storage, phases).items()
        if spent >= 1
    }
    parts = ", ".join(f"{name} {_minutes(spent)}" for name, spent in seconds.items())
    if seconds:
        total = _minutes(sum(seconds.values()))
        yield (
            f"time: about {total} ({parts}), from a timed batch; then evaluation and"
            " report"
        )
        # the load is that of the whole machine, so all of its cores count
        load, cores = os.getloadavg()[0], os.cpu_count() or 1
        if load > cores:
            busy = f"load {load:.1f} on {cores} cores"
            yield (
                f"warning: other programs use the CPU ({busy}): the run may take longer"
            )


def advice(
    config: Config, cpus: float, each: dict[str, float], rate: float | None
) -> Iterator[str]:
    """Lines for the console on what keeps the GPUs of a cluster waiting, which has so
    many ``cpus`` and gives ``each`` worker its resources: rows of a batch for each, and
    CPU cores for each where images are streamed, of which one core crops ``rate`` a
    second.
    """
    workers, size, on_gpus = (
        config.compute.num_workers,
        config.train.batch_size,
        "GPU" in each,
    )
    if on_gpus and size < MIN_GPU_ROWS * workers and not on_features(config):
        text = (
            f"batches of {plural(size, 'image')} are {size / workers:g} for each of"
            f" {workers} GPUs"
        )
        advice = "use fewer --workers, or a larger --batch-size"
        yield (
            f"warning: {text}, which wait for each other below {MIN_GPU_ROWS}; {advice}"
        )
    if rate is None:
        return
    cores = (cpus - workers * each["CPU"]) / workers
    supply, what = cores * rate, "GPU" if on_gpus else "worker"
    demand = H100_PIXELS_S / (_cropper(config).row_bytes / 3)
    line = f"{cores:.3g} cores for each {what} decode and crop {supply:,.0f} images/s"
    line += f" ({rate:,.0f} per core, timed)"
    if (
        on_gpus
        and supply < demand
        and (config.model.encoder, config.model.stem) == ("resnet18", "imagenet")
    ):
        line = (
            f"warning: {line}; an H100 needs about {demand:,.0f} (calculated): add"
            " cores"
        )
    yield line


def _cropper(config: Config) -> Cropper:
    data = config.data
    return Cropper(
        config.seed,
        LABELED,
        TIMED_ROWS,
        config.augment,
        data.stored_size,
        data.interpolation,
    )


def crop_rate(config: Config, task: Task) -> float:
    """Training images that a core of this machine decodes and crops in a second,
    from a few of them.
    """
    cropper, rows = _cropper(config), np.flatnonzero(task.is_train)[:TIMED_ROWS]
    images = task.rows.images.read_images(rows)

    def crop(num: int) -> None:
        cropper.crop(np.zeros(num, np.int64), np.arange(num), images[:num])

    with runtime.threads(1):
        return len(images) / _timed(crop, 1, len(images))


def _seconds(
    config: Config, task: Task, storage: Storage, phases: tuple[str, ...]
) -> dict[str, float]:
    """Of each part of the run, on this machine, whose device is used alone; nothing
    where workers run on other machines, or on GPUs that this one lacks.
    """
    compute, found = config.compute, dict[str, float]()
    elsewhere = on_a_cluster() or (
        compute.device == "cuda" and not torch.cuda.is_available()
    )
    if compute.num_workers and elsewhere:
        return found
    device = local_device(config)
    threads = num_threads(config)
    torch.set_num_threads(threads)
    if on_features(config) and not config.model.takes_vectors:
        encoder = run.frozen_encoder(config, storage)
        job = feature_job(config, task, encoder)
        cache = FeatureCache(Storage(features.cache_directory(config)), job)
        missing = cache.missing_rows()
        if len(missing):
            encoder = encoder.to(device)
            found["features"] = len(missing) * _encoded_row(
                job, encoder, missing, threads
            )
    plans = run.plans(config, *task.sizes, config.compute.num_workers)
    for name in (name for name in phases if name in plans):
        steps, plan = (
            getattr(config, name).epochs * plans[name].steps_per_epoch,
            plans[name],
        )
        last = min(steps, config.train.max_steps or steps) - max(
            checkpoint_steps(storage, name), default=0
        )
        if last > 0:
            found[name] = last * _step(
                config, task, name, plan.labeled_size + plan.unlabeled_size, device
            )
    return found


def _encoded_row(
    job: features.FeatureJob, encoder: nn.Module, rows: np.ndarray, threads: int
) -> float:
    """Return the seconds that one of the rows takes while all threads encode."""
    num_rows = min(features.CPU_IMAGES, len(rows))

    def compute(num: int) -> None:
        encode_chunk(job, encoder, rows[:num])

    with runtime.threads(1):
        spent = _timed(compute, 1, num_rows) / num_rows
    return spent / (threads if next(encoder.parameters()).device.type == "cpu" else 1)


def _step(
    config: Config, task: Task, phase: str, batch_rows: int, device: torch.device
) -> float:
    """Seconds for a step of ``batch_rows``: forward and backward of all views, of
    fewer rows for images.
    """
    num_novel = task.num_novel if phase == DISCOVER else 0
    network = (
        registry.build_network(config, task.num_known, num_novel, 0).to(device).train()
    )
    network = network.to(memory_format=torch.channels_last)
    flat = on_features(config)
    rows = batch_rows if flat else min(TIMED_ROWS, batch_rows)
    large, small = config.augment.large, config.augment.small
    width = int(network.encoder.num_features)  # type: ignore[arg-type]
    sizes = [large.size] * large.num_views + [small.size] * small.num_views
    shapes = [(rows, width) if flat else (rows, 3, size, size) for size in sizes]

    def step(num: int) -> None:
        logits = network([torch.rand(shape, device=device) for shape in shapes])
        labels = torch.zeros(num, dtype=torch.int64, device=device)
        loss = labeled_loss(logits.known, labels, 1.0)
        for family in (logits.novel, logits.over):
            loss = loss if family is None else loss + family.float().square().mean()
        loss.backward()
        float(loss.detach())  # waits for the device

    with kept_memory(device):  # as in training
        return _timed(step, rows, rows) * batch_rows / rows


def _timed(work: Callable[[int], None], *sizes: int) -> float:
    """Seconds of the last of some calls, one for each size: the first one is slower."""
    spent = 0.0
    for size in sizes:
        start = time.perf_counter()
        work(size)
        spent = time.perf_counter() - start
    return spent


def _minutes(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
