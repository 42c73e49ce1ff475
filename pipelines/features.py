"""Features of a frozen encoder on Ray, bit for bit as
:func:`uno.session.data.compute_local` has them.
"""

import threading
from collections.abc import Callable, Container, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import safetensors.torch
import torch

from pipelines import ray_env
from pipelines.partitions import map_through_model
from pipelines.ray_data import bytes_of, pixel_column, shared_tensor
from uno.config import Config, to_dict
from uno.data import features
from uno.data.decode import prefetch_map
from uno.data.features import (
    FeatureJob,
    Missing,
    Piece,
    Shard,
    pack_shard,
    shard_name,
    unpack_shard,
)
from uno.data.files import Storage
from uno.data.images import from_columns, to_columns
from uno.encoder import build_encoder
from uno.runs.hardware import at_speed
from uno.runtime import Runtime
from uno.session import embed as session
from uno.session.console import Progress, on_stop
from uno.session.data import compute_local, load_features, read_task

# that a task decodes, at most: a row group of Parquet has more rows than a shard
TASK_SHARDS = 8


def compute_on_ray(
    ray: Any,
    job: FeatureJob,
    encoder: torch.nn.Module,
    missing: Missing,
    storage: Storage,
    give_up: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[int, Shard]]:
    """What is ``missing`` of shards, in order, once it is stored in the cache
    directory: bit for bit as here. Interrupted: ``give_up`` while nodes are waited for.
    """
    config, reader, numbers = job.config, job.task.rows.images.reader(), sorted(missing)
    plan, encoder = (
        (encoder.plan, encoder.encoder)
        if isinstance(encoder, Runtime)
        else (None, encoder)
    )
    state = {
        name: tensor.cpu().contiguous() for name, tensor in encoder.state_dict().items()
    }
    decode = partial(
        decode_block, config=config, reader=None if reader is None else ray.put(reader)
    )
    at_once = max(1, min(TASK_SHARDS, len(numbers) // (4 * config.compute.num_workers)))
    groups = (numbers[i : i + at_once] for i in range(0, len(numbers), at_once))
    blocks = (
        shard_block(job, {number: missing[number] for number in group})
        for group in groups
    )
    loaded = (ray.put((to_dict(config), safetensors.torch.save(state), plan)),)
    write = partial(write_part, key=job.key, views=job.views, num_views=job.num_views)
    sizes = features.SHARD_ROWS, features.SHARD_ROWS, features.row_bytes(config)
    stored = map_through_model(
        ray, config, storage, blocks, decode, Featurizer, loaded, write, *sizes, give_up
    )
    for number, data in stored:
        if data is None:
            raise features.not_finite(config)
        yield number, unpack_shard(job.name(number, missing[number]), data)


def shard_block(job: FeatureJob, missing: Missing) -> pa.Table:
    """Rows of shards as they travel: ``row``, ``in_training``, how many views they
    ``have``, the image.
    """
    rows = np.concatenate([job.rows(number) for number in missing])
    have = [missing[number] for number in (rows // features.SHARD_ROWS).tolist()]
    columns = to_columns(job.task.rows.images, rows)
    return pa.table(
        {"row": rows, "have": have, "in_training": job.task.is_train[rows], **columns}
    )


def decode_block(block: pa.Table, config: Config, reader: Any) -> Iterator[pa.Table]:
    """A task: a :func:`shard_block` -> its rows with ``pixels``, a shard at a time."""
    import ray

    torch.set_num_threads(1)
    reader = None if reader is None else ray.get(reader)
    images, rows = from_columns(block, reader), block["row"].to_numpy()
    in_training, size = block["in_training"].to_numpy(), features.ROWS_AT_ONCE
    # whole: the writer gets them so
    for shard in range(0, len(rows), features.SHARD_ROWS):
        own = slice(shard, shard + features.SHARD_ROWS)
        pieces = [
            slice(i, min(i + size, own.stop))
            for i in range(*own.indices(len(rows))[:2], size)
        ]
        found = [
            features.decode_rows(config, int(rows[p.start]), images[p], in_training[p])
            for p in pieces
        ]
        pixels, viewed, why = zip(*found, strict=True)
        facts = {
            "row": rows[own],
            "have": block["have"][own],
            "viewed": np.concatenate(viewed),
        }
        reasons = pa.array(chain.from_iterable(why), pa.string())
        yield pa.table(
            {**facts, "reason": reasons, "pixels": pixel_column(np.concatenate(pixels))}
        )


class Featurizer:
    """An actor of the pool: loads the encoder once, then computes features of block
    after block.
    """

    def __init__(self, device: str, threads: int, shared: Any) -> None:
        import ray

        tree, weights, plan = ray.get(shared)
        self._config, self._threads = Config.model_validate(tree), threads
        encoder = build_encoder(self._config.model)
        encoder.load_state_dict(safetensors.torch.load(weights))
        encoder = (
            encoder.eval()
            .requires_grad_(False)
            .to(device)
            .to(memory_format=torch.channels_last)
        )
        here = plan is not None and torch.device(device).type == "cpu"
        self._encoder = at_speed(encoder, plan, threads) if here else encoder

    def __call__(self, block: pa.Table) -> pa.Table:
        """Shards of :func:`decode_block` -> ``row``, ``have``, ``features`` and
        ``reason``.
        """
        config, rows, viewed = (
            self._config,
            block["row"].to_numpy(),
            block["viewed"].to_numpy(),
        )
        have = block["have"].to_numpy()
        ok = block["reason"].is_null().to_numpy()
        pixels = shared_tensor(bytes_of(block["pixels"], features.row_bytes(config)))

        def encode(start: int) -> torch.Tensor:
            torch.set_num_threads(1)  # of this thread
            own = slice(start, start + features.ROWS_AT_ONCE)
            # Ray has cut nothing
            assert rows[start] % features.SHARD_ROWS % features.ROWS_AT_ONCE == 0
            some = pixels[own], viewed[own], ok[own], int(have[start])
            return features.encode_rows(config, self._encoder, int(rows[start]), *some)

        starts = range(0, len(rows), features.ROWS_AT_ONCE)
        found = torch.cat(
            list(prefetch_map(encode, starts, self._threads, self._threads))
        )
        flat = found.flatten(1).numpy().view(np.uint8)
        facts = {name: block[name] for name in ("row", "have", "reason")}
        return pa.table({**facts, "features": pixel_column(flat)})


def write_part(
    storage: Storage,
    number: int,
    results: pa.Table,
    key: str,
    views: str,
    num_views: int,
) -> bytes | None:
    """Keep all results of a shard, in order, in the cache directory; returns the
    content of its file, or None for numbers that are not finite: of an error Ray would
    make a traceback.
    """
    column, have = results["features"], results["have"][0].as_py()
    flat = torch.from_numpy(
        bytes_of(column, column.type.byte_width).view(np.float32).copy()
    )
    if not flat.isfinite().all():
        return None
    shard = flat.unflatten(1, (num_views, -1))[:, have:], results["reason"].to_pylist()
    name = shard_name(key, Piece(number, views, have, num_views))
    data = pack_shard(name, shard)
    features.write_shard(storage, name, data)
    return data


def embed(config: Config, given: Container[str], num_views: int) -> int:
    """``uno embed``, here or on Ray; returns 0."""
    stopping, workers = threading.Event(), config.compute.num_workers
    connected = ray_env.connect(workers=workers) if workers else nullcontext()
    with on_stop(stopping.set), connected as ray:
        compute = (
            compute_local
            if ray is None
            else partial(compute_on_ray, ray, give_up=stopping.is_set)
        )
        session.embed(config, given, num_views, compute, stopping.is_set)
    return 0


def fill_cache(config: Config) -> int:
    """Compute what the cache lacks of a run's features, here or on Ray; returns 0."""
    data = config.data.model_copy(
        update={"num_novel": 1} if config.data.num_novel == "auto" else {}
    )
    task, stopping, workers = (
        read_task(data),
        threading.Event(),
        config.compute.num_workers,
    )
    connected = ray_env.connect(workers=workers) if workers else nullcontext()
    with on_stop(stopping.set), Progress() as show, connected as ray:
        compute = (
            compute_local
            if ray is None
            else partial(compute_on_ray, ray, give_up=stopping.is_set)
        )
        load_features(
            config, task, Storage(config.output or "."), show, stopping.is_set, compute
        )
    return 0
