"""Measure the free memory, and estimate the memory that a run needs.

The estimate decides whether images are kept in memory or streamed, and refuses a run
that cannot fit.
"""

import os
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from uno.config import OWN_ENCODERS, Config
from uno.data.splits import Task
from uno.encoders.build import build_encoder
from uno.errors import ConfigError
from uno.method import load
from uno.model import build_network
from uno.runs.hardware import local_device

# share of the free memory that images may take; training and the system need more
IMAGE_SHARE = 0.6
RAY_BYTES = 2_000_000_000  # memory of the processes that Ray always starts
WORKER_BYTES = 750_000_000  # memory of a worker without images and network
# images in one task of Ray Data; the first tasks start processes, which takes seconds
ROWS_PER_BLOCK = 2048
# size of the object store for each worker that reads a stream; a larger store is
# slower, because the first write to a page costs as much as a copy
STORE_BYTES = 1_500_000_000
MEMINFO = "/proc/meminfo"
CGROUP = "/sys/fs/cgroup"

Loading = Literal["memory", "streaming"]
HOW = {"memory": "kept in memory", "streaming": "streamed"}
"""Values of ``data.loading``, for the console."""


class FreeMemory(NamedTuple):
    """Free memory in bytes for a run, on the node that has the least.

    None means that there is no such limit.

    Attributes:
        host: Main memory.
        device: A worker's share of the memory of a GPU.
        store: The object store of a Ray cluster that already runs.
        driver: Main memory of this machine, if the workers are on other machines.
    """

    host: int
    device: int | None = None  # a worker's share of a GPU
    store: int | None = None  # the object store of a cluster that already runs
    driver: int | None = None  # the machine of this process, if workers are on others


def free_memory(config: Config) -> FreeMemory:
    """Return the memory that is free on this machine, in bytes.

    The main memory is not divided among workers. Of the free memory of the GPU, a
    worker has the share ``compute.gpus_per_worker``, and all of it if that is 0, unset
    or above 1.

    Args:
        config: The configuration of the run.

    Returns:
        ``host``, the free main memory, and ``device``, the free memory of the GPU, None
        without a GPU. The other values are None.
    """
    device = free_device_bytes(config)
    share = min(1.0, config.compute.gpus_per_worker or 1.0)
    return FreeMemory(
        free_host_bytes(), None if device is None else int(share * device)
    )


def free_host_bytes() -> int:
    """Return the bytes of main memory that are free for this process.

    This is the smaller of what Linux calls available and what is left of the limit of
    its control group (version 2), such as that of a container. On other systems it is
    the whole memory of the machine.
    """
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError), open(MEMINFO, encoding="ascii") as file:  # Linux only
        for line in file:
            if line.startswith("MemAvailable:"):
                free = min(free, int(line.split()[1]) * 1024)
    # Outside a container the files are missing, or the limit is the word "max".
    with (
        suppress(OSError, ValueError),
        open(f"{CGROUP}/memory.max", encoding="ascii") as limit,
        open(f"{CGROUP}/memory.current", encoding="ascii") as used,
    ):
        free = max(0, min(free, int(limit.read()) - int(used.read())))
    return free


def free_device_bytes(config: Config) -> int | None:
    """Return the free bytes of the GPU that this process uses by default.

    Args:
        config: The configuration. ``compute.device`` says whether a GPU is used.

    Returns:
        The bytes; None if ``compute.device`` is "cpu" or this machine has no GPU.
    """
    if config.compute.device == "cpu" or not torch.cuda.is_available():
        return None
    return int(torch.cuda.mem_get_info()[0])


def trains_on_features(config: Config) -> bool:
    """Return whether a run trains on cached features of a frozen encoder.

    This is so if ``model.finetune`` is "none" and images are not streamed. Vectors in
    the place of images count as such features.

    Args:
        config: The configuration of the run.
    """
    return config.model.finetune == "none" and config.data.loading != "streaming"


def row_bytes(config: Config) -> int:
    """Return the bytes that one row takes in memory.

    These are its decoded pixels, or with a frozen encoder its cached features: of the
    evaluation view and of all random views. For vectors one view is counted. Whether
    images are streamed does not matter here.

    Args:
        config: The configuration of the run.
    """
    if config.model.finetune != "none":
        return 3 * config.data.stored_size**2
    with torch.device("meta"):
        width = int(build_encoder(config.model).num_features)  # type: ignore[arg-type]
    views = config.augment.num_cached_views
    return 4 * width * (1 if config.model.takes_vectors else 1 + views)


def choose_loading(
    config: Config, num_rows: int, memory: FreeMemory
) -> tuple[Loading, str]:
    """Choose whether the images of a run are kept in memory or streamed.

    The wish of the user counts. With "auto" they are kept in memory if the run needs
    that (vectors, a pretext task, or the method), or if they (with a frozen encoder,
    their features) fit into 60 % of the tightest limit in ``memory``. With workers the
    limits are lower, see :func:`_image_budget`.

    Args:
        config: ``data.loading`` is the wish of the user, or "auto".
        num_rows: The number of images.
        memory: The free memory of the machines of the run.

    Returns:
        The value for ``data.loading``, "memory" or "streaming", and a sentence that
        gives the reason.

    Raises:
        ConfigError: The user wants to stream images that are needed in memory.
    """
    wish, needs = config.data.loading, ""
    if config.model.takes_vectors:
        needs = "--data vectors"
    elif config.pretext.epochs:
        needs = "pretext.epochs"
    elif load(config.method).needs_memory:
        needs = f"method {config.method}"
    if needs and wish == "streaming":
        raise ConfigError(
            f"{needs} needs the images in memory; use --data.loading memory"
        )
    needed = num_rows * row_bytes(config)
    budget, limit = _image_budget(config, memory)
    kind = "of features" if config.model.finetune == "none" else "decoded"
    share = f"{IMAGE_SHARE:.0%} of {limit}"
    sizes = f"({_format_size(needed)} {kind}; budget {_format_size(budget)}, {share})"
    if wish != "auto":
        return wish, f"{HOW[wish]}, set by --data.loading {sizes}"
    if needs:
        return "memory", f"{HOW['memory']}, because {needs} needs it {sizes}"
    loading: Loading = "memory" if needed <= budget else "streaming"
    return loading, f"{HOW[loading]} {sizes}"


def _image_budget(config: Config, memory: FreeMemory) -> tuple[float, str]:
    """Return how much memory the images of all rows may take, and what limits it.

    Args:
        config: The configuration of the run.
        memory: The free memory of the machines of the run.

    Returns:
        The number of bytes, which is 60 % of the tightest limit; and the name of this
        limit: "free host memory", "free device memory", "the smallest object store of
        the cluster" or "the driver's memory". With workers, 2 GB and 750 MB for each
        worker are subtracted from the free host memory, for Ray's processes. With
        workers and a frozen encoder, half of the host memory and half of the driver's
        count, because the features are in this process and in Ray's object store.
    """
    workers = config.compute.num_workers
    programs = RAY_BYTES + workers * WORKER_BYTES if workers else 0
    # Features are in this process and in Ray's object store.
    copies = 2 if workers and config.model.finetune == "none" else 1
    limits = {"free host memory": max(0, memory.host - programs) / copies}
    if memory.device is not None:
        limits["free device memory"] = memory.device
    if memory.store is not None:
        limits["the smallest object store of the cluster"] = memory.store
    if memory.driver is not None:
        limits["the driver's memory"] = memory.driver / copies
    name = min(limits, key=lambda name: limits[name])
    return IMAGE_SHARE * limits[name], name


def store_bytes(config: Config, num_rows: int) -> int | None:
    """Return the size in bytes that Ray's object store gets on this machine.

    Images in memory are in the store twice: as they are read, and as they are kept. The
    size is that of both and 750 MB more, at most 60 % of the free main memory. Streamed
    images need 1.5 GB for each worker, at most 30 % of the free main memory.

    Args:
        config: The configuration of the run.
        num_rows: The number of images.

    Returns:
        The size; None for cached features in memory, for which Ray's default is large
        enough.
    """
    if config.data.loading == "streaming":
        return min(
            config.compute.num_workers * STORE_BYTES, int(0.3 * free_host_bytes())
        )
    if trains_on_features(config):
        return None
    images = num_rows * 3 * config.data.stored_size**2
    return min(2 * images + STORE_BYTES // 2, int(0.6 * free_host_bytes()))


def check_memory(config: Config, task: Task) -> None:
    """Check that a run can fit into the free memory of this machine.

    Without workers this is the memory of the GPU if the run uses one, otherwise the
    main memory; with workers it is the main memory. Images, or the features in their
    place, count if they are kept in memory: those of all rows, but on a GPU only those
    of training rows. Nothing is checked with workers if ``compute.device`` is "cuda",
    or if the environment variable RAY_ADDRESS names a running Ray cluster. The network
    is built in any case, so that a method can refuse the encoder.

    Args:
        config: The configuration of the run.
        task: Its rows.

    Raises:
        ConfigError: The run needs more memory than is free. The message lists the
            parts. Or the network cannot be built.
    """
    workers, parts = config.compute.num_workers, estimate_training_bytes(config, task)
    on_cluster = os.environ.get("RAY_ADDRESS", "local") not in ("", "local")
    if workers and (on_cluster or config.compute.device == "cuda"):
        return
    free, where, num_rows = free_host_bytes(), "memory", len(task.rows)
    if not workers and local_device(config).type == "cuda":
        free, where = free_device_bytes(config) or free, "device memory"
        num_rows = sum(task.sizes)
    if config.data.loading == "memory":
        parts[f"{num_rows:,} images"] = num_rows * row_bytes(config)
    needed = sum(parts.values())
    if needed <= free:
        return
    largest = max(parts, key=lambda name: parts[name])
    advice = (
        "use --data.loading streaming, or --limit"
        if largest.endswith(" images")
        else "lower --batch-size or --augment.large.size, or take a smaller encoder"
    )
    listed = ", ".join(f"{name} {_format_size(part)}" for name, part in parts.items())
    raise ConfigError(
        f"this run needs at least {_format_size(needed)} of {where} ({listed}),"
        f" {_format_size(free)} are free; {advice}"
    )


def estimate_training_bytes(config: Config, task: Task) -> dict[str, int]:
    """Estimate the memory that training takes, in all workers together.

    The network is built on PyTorch's device "meta", where it takes no memory. There are
    two exceptions, which are always built on the CPU: a run on vectors, and an encoder
    in the code of the user (``package.module:callable``), which may not work on that
    device. Their activations are not estimated.

    Args:
        config: The configuration of the run.
        task: Its rows, which have the numbers of classes.

    Returns:
        Bytes by part: of the "network" with gradients and momentum, once for each
        worker, and of the "activations" of the encoder for the global batch of a step
        of discovery, with 2 bytes a number in bfloat16 and 4 in float32. The latter are
        0 if they are not estimated, if discovery has no epochs, or if the encoder is
        frozen and its features are cached.
    """
    library = config.model.encoder.partition(":")[0]
    # vectors have small heads, which on that device import PyTorch's compiler
    is_ours = library in (*OWN_ENCODERS, "torchvision", "timm")
    with torch.device("meta" if is_ours else "cpu"):
        network = build_network(config, task.num_known, task.num_novel, 0)
    weights = sum(
        (12 if weight.requires_grad else 4) * weight.numel()
        for weight in network.parameters()
    )
    per_image = 0
    if is_ours and config.discover.epochs and not trains_on_features(config):
        for view in (config.augment.large, config.augment.small):
            if view.num_views:
                bytes_of_view = estimate_activation_bytes(network.encoder, view.size)
                per_image += view.num_views * bytes_of_view
    precision = config.compute.precision
    if precision == "auto":
        precision = "bf16" if local_device(config).type == "cuda" else "fp32"
    activations = config.train.batch_size * per_image
    return {
        "network": max(1, config.compute.num_workers) * weights,
        "activations": activations // 2 if precision == "bf16" else activations,
    }


def estimate_activation_bytes(encoder: nn.Module, side: int) -> int:
    """Estimate the memory for the backward pass of one image, in bytes.

    The outputs of all layers with trained weights are counted, in float32.

    Args:
        encoder: A network on the device "meta". It is put into eval mode, and run once.
        side: The height and width of the image in pixels.
    """
    total = 0

    def add_output(module: nn.Module, inputs: Any, output: Any) -> None:
        """Add the size of a layer's output to the total."""
        nonlocal total
        if isinstance(output, Tensor):
            total += output.nbytes

    hooks = [
        module.register_forward_hook(add_output)
        for module in encoder.eval().modules()
        if any(weight.requires_grad for weight in module.parameters(recurse=False))
    ]
    encoder(torch.zeros(1, 3, side, side, device="meta"))
    for hook in hooks:
        hook.remove()
    return total


def _format_size(num_bytes: float) -> str:
    """Return a number of bytes with its unit, such as ``564 MB`` (1 MB is 10^6)."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.4g} TB"
