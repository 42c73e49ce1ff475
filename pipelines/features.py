"""Features of a frozen encoder for a command: from the cache, else computed here or on Ray and kept there."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pyarrow as pa
import safetensors.torch
import torch
from torch import Tensor

from pipelines import ray_env
from pipelines.console import Progress, on_stop, say
from pipelines.ray_data import image_columns, images_of, parquet_images
from uno.config import Config, to_dict
from uno.data import features
from uno.data.decode import ahead, decode_many
from uno.data.features import FeatureCache, FeatureJob, feature_job, pack_shard
from uno.data.files import Storage
from uno.data.rows import base
from uno.data.sources import read_rows
from uno.data.splits import Task, make_task
from uno.encoder import build_encoder
from uno.errors import ConfigError, Interrupted
from uno.runs.hardware import local_device, num_threads
from uno.runs.run import frozen_encoder

INTERVAL_S = 10.0  # between two lines of progress

Show = Callable[[dict[str, Any]], None]


def load_features(
    config: Config, task: Task, storage: Storage, show: Show, should_stop: Callable[[], bool] = lambda: False,
    ray: Any = None,
) -> tuple[Tensor, list[str | None]]:  # fmt: skip
    """Features float32 (N, 1 + V, D) of the rows of ``task``, and why a row has none. ``ray``: where they are
    computed by its actors, one for each worker; else by threads here. Interrupted: ``should_stop`` says so;
    ConfigError: nobody has trained the encoder.
    """
    if config.model.weights is None:
        raise ConfigError("model.trainable heads needs --weights: what trained the encoder that is frozen")
    encoder = frozen_encoder(config, storage)
    job = feature_job(config, task, encoder)
    cache = FeatureCache(Storage(features.cache_directory(config)), job)

    def compute(numbers: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        rows = sum(len(job.rows(number)) for number in numbers)
        have = f", {len(task.rows) - rows:,} are there" if rows < len(task.rows) else ""
        say(f"features: {rows:,} images through {config.model.encoder}{have}; kept in {cache.path}")
        if ray is not None:
            found = compute_on_ray(ray, job, encoder, numbers)
        else:
            threads = num_threads(config)
            shards = features.compute_here(job, encoder.to(local_device(config)), numbers, threads)
            found = ((number, pack_shard(shard)) for number, shard in shards)
        for number, data in found:
            yield number, data
            if should_stop():
                raise Interrupted("stopped; finished features are kept")

    start: list[tuple[int, float]] = []

    def progress(done: int, total: int) -> None:
        start[:] = start or [(done, time.monotonic())]
        seconds = max(time.monotonic() - start[0][1], 1e-9)
        speed = (done - start[0][0]) / seconds if done > start[0][0] else None
        show({"phase": "features", "step": done, "total_steps": total, "images_per_s": speed,
              "every_s": INTERVAL_S})  # fmt: skip

    return features.cached_features(cache, job, config.model.weights or "", compute, progress)


def compute_on_ray(
    ray: Any, job: FeatureJob, encoder: torch.nn.Module, numbers: Sequence[int]
) -> Iterator[tuple[int, bytes]]:
    """Shards in any order, as :func:`~uno.data.features.pack_shard` makes them, computed by actors that hold
    the encoder. Paths must lead to their images from every node.
    """
    config, images = job.config, job.task.rows.images
    resources, workers = ray_env.worker_resources(config, ray.cluster_resources()), config.compute.workers
    threads = num_threads(config, workers)
    state = {name: tensor.cpu().contiguous() for name, tensor in encoder.state_dict().items()}
    shared = ray.put((to_dict(config), safetensors.torch.save(state)))
    blocks = [shard_block(job, numbers[i : i + threads]) for i in range(0, len(numbers), threads)]
    whole = {"batch_format": "pyarrow", "batch_size": None}
    arguments = shared, "cuda" if "GPU" in resources else "cpu", threads, parquet_images(images)
    results = ray.data.from_arrow(blocks).map_batches(
        Featurizer, fn_constructor_args=arguments, num_cpus=resources["CPU"],
        num_gpus=resources.get("GPU", 0), compute=ray.data.ActorPoolStrategy(size=workers), **whole,
    )  # fmt: skip
    for table in results.iter_batches(**whole):
        for number, data, error in zip(*(column.to_pylist() for column in table.columns), strict=True):
            if error is not None:
                raise ConfigError(error)
            yield number, data


def shard_block(job: FeatureJob, numbers: Sequence[int]) -> pa.Table:
    """The rows of some shards as they travel: ``number`` of the shard, ``in_training``, and the image."""
    rows = np.concatenate([job.rows(number) for number in numbers])
    columns = image_columns(*base(job.task.rows.images, rows))
    which = {"number": rows // features.SHARD_ROWS, "in_training": job.task.is_train[rows]}
    return pa.table({**{name: pa.array(values) for name, values in which.items()}, **columns})


class Featurizer:
    """An actor of the pool: loads the encoder once, then computes shard after shard."""

    def __init__(self, shared: Any, device: str, threads: int, parquet: Any) -> None:
        import ray

        tree, weights = ray.get(shared)
        self._config, self._threads, self._parquet = Config.model_validate(tree), threads, parquet
        encoder = build_encoder(self._config.model)
        encoder.load_state_dict(safetensors.torch.load(weights))
        self._encoder = encoder.eval().requires_grad_(False).to(device).to(memory_format=torch.channels_last)

    def __call__(self, block: pa.Table) -> pa.Table:
        """A :func:`shard_block` -> ``number`` and ``data`` of each of its shards, or the ``error`` that ends
        the job: Ray would make a traceback of it.
        """
        images, numbers = images_of(block, self._parquet), block["number"].to_numpy()
        in_training = block["in_training"].to_numpy(zero_copy_only=False)

        def compute(number: int) -> bytes:
            torch.set_num_threads(1)  # of this thread
            own = np.flatnonzero(numbers == number)
            some = [images[i] for i in own]
            return pack_shard(
                features.compute_shard(self._config, self._encoder, number, some, in_training[own])
            )

        found = list(dict.fromkeys(numbers.tolist()))
        data, error = [None] * len(found), None  # type: list[bytes | None], str | None
        try:
            data = list(ahead(compute, found, self._threads, self._threads))
        except ConfigError as problem:
            error = str(problem)
        columns = pa.array(data, pa.large_binary()), pa.array([error] * len(found), pa.string())
        return pa.table({"number": found, "data": columns[0], "error": columns[1]})


def fill_cache(config: Config) -> int:
    """Compute what the cache lacks of a run's features, here or on Ray; returns 0."""
    data = config.data.model_copy(update={"num_novel": 1} if config.data.num_novel == "auto" else {})
    task, stopping, workers = make_task(read_rows(data), data), threading.Event(), config.compute.workers
    connected = ray_env.connect(workers=workers) if workers else nullcontext()
    with on_stop(stopping.set), Progress() as show, connected as ray:
        load_features(config, task, Storage(config.output or "."), show, stopping.is_set, ray)
    return 0


def row_bytes(config: Config) -> int:
    """Of one image that a resident run keeps: decoded, or as the features of a frozen encoder."""
    return feature_bytes(config) if config.model.trainable == "heads" else 3 * config.data.store_size**2


def feature_bytes(config: Config) -> int:
    """Of one row's features in memory."""
    width = build_encoder(config.model).num_features
    return 4 * (1 + config.augment.cached_views) * int(width)  # type: ignore[arg-type]


def on_features(config: Config) -> bool:
    """Whether a run trains on cached features: its encoder is frozen, and they are to be kept in memory."""
    return config.model.trainable == "heads" and config.data.ingest != "streaming"


def load_images(
    config: Config, task: Task, storage: Storage, show: Show, should_stop: Callable[[], bool] = lambda: False
) -> tuple[Tensor, list[str | None]]:
    """What a resident run keeps of every row, computed here: pixels uint8 (N, 3, S, S), or features of a
    frozen encoder; and why a row has none.
    """
    if on_features(config):
        return load_features(config, task, storage, show, should_stop)
    data = config.data
    return decode_many(task.rows.images, data.store_size, interpolation=data.interpolation)
