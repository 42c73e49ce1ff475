"""``uno data pack``, here or on Ray: a task for each shard, which reads its rows and writes its file."""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from pipelines import ray_env
from pipelines.console import Progress, say
from pipelines.ray_data import grouped, image_columns, images_of, own_error
from uno.config import Config, override
from uno.data.files import Storage
from uno.data.pack import Shard, ShardRows, ShardWriter, Store, pack, store_here
from uno.data.rows import Chosen, Rows, base
from uno.data.sources import read_rows
from uno.data.splits import labeled_rows, limit_rows
from uno.data.tables import ParquetImages
from uno.errors import ConfigError
from uno.runs.hardware import num_threads

BAD = pa.list_(pa.struct({"id": pa.string(), "reason": pa.string()}))
EXECUTION_ROWS = 2**20  # of shards that are in the object store at once, or where their images are


def pack_data(config: Config, shard_mb: int, given: Mapping[str, Any]) -> int:
    """Write a source as Parquet shards. Returns 0."""
    if config.output is None:
        raise ConfigError("uno data pack needs --output DIR, the place for the shards")
    workers = config.compute.workers if "compute.workers" in given else 0
    rows = read_rows(override(config, {"data.ingest": "streaming"}).data)
    if config.data.limit is not None:
        rows = rows.take(limit_rows(rows, config.data.limit))
    labeled = np.asarray(labeled_rows(rows, config.data) & (rows.split == "train"))
    with ray_env.connect(workers=workers) if workers else nullcontext() as ray, Progress() as progress:

        def show(done: int, total: int) -> None:
            progress({"phase": "pack", "step": done, "total_steps": total})

        store = store_on_ray(ray, rows, workers) if workers else store_here(num_threads(config))
        found = pack(rows, labeled, Storage(config.output), shard_mb * 2**20, store, show)
    counts = f"{found.rows:,} rows, {found.packed:,} packed, {found.bad:,} bad, {found.shards:,} shards"
    say(f"{counts}: {config.output}")
    return 0


def store_on_ray(ray: Any, rows: Rows, workers: int) -> Store:
    """At most ``workers`` shards at a time, each in a task: paths must lead to images and shards from every
    node, but what is local here is written here.
    """
    source, _ = base(rows.images, np.empty(0, np.int64))
    parquet = ray.put(source) if isinstance(source, ParquetImages) else None
    truth = rows.eval_labels is not None

    def store(output: Storage, writer: ShardWriter, shards: Iterator[ShardRows]) -> Iterator[Shard]:
        here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()} if output.is_local else None
        write = partial(write_shard, target=output.uri, writer=writer, parquet=parquet, truth=truth)
        for blocks in grouped(map(shard_block, shards), EXECUTION_ROWS):
            found = ray.data.from_arrow(blocks).map_batches(
                write, batch_format="pyarrow", batch_size=None, label_selector=here,
                num_cpus=ray_env.TASK_CPUS, compute=ray.data.TaskPoolStrategy(size=workers),
            )  # fmt: skip
            try:
                for table in found.iter_batches(batch_format="pyarrow", batch_size=None):
                    for name, num_rows, bad in zip(*table.to_pydict().values(), strict=True):
                        yield Shard(name, num_rows, bad)
            except Exception as error:
                raise own_error(error) or error from None

    return store


def shard_block(shard: ShardRows) -> pa.Table:
    """A shard as it travels: its name, the row group of each row, and the rows."""
    num, groups = len(shard.ids), np.repeat(np.arange(len(shard.sizes)), shard.sizes)
    text = {
        "id": shard.ids,
        "label": shard.labels,
        "split": shard.split,
        "truth": shard.eval_labels or [None] * num,
    }
    columns = {name: pa.array(values, pa.string()) for name, values in text.items()}
    images = image_columns(*base(shard.images, np.arange(num)))
    return pa.table({"name": pa.repeat(shard.name, num), "group": groups, **columns, **images})


def write_shard(block: pa.Table, target: str, writer: ShardWriter, parquet: Any, truth: bool) -> pa.Table:
    """A task: a :func:`shard_block` -> its file; name, rows, and what is not in it."""
    images: Any
    if parquet is None:
        images = images_of(block, None)
    else:
        import ray

        images = Chosen(ray.get(parquet), block["number"].to_numpy())
    ids, labels, split, given = (block[name].to_pylist() for name in ("id", "label", "split", "truth"))
    sizes, name = np.bincount(block["group"].to_numpy()).tolist(), block["name"][0].as_py()
    shard = ShardRows(name, sizes, ids, images, labels, split, given if truth else None)
    found = writer.write(Storage(target), shard, 1)
    return pa.table({"name": [name], "rows": [found.rows], "bad": pa.array([found.bad], BAD)})
