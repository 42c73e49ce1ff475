"""Run ``uno data pack``, which writes images as Parquet shards, here or on Ray.

On Ray a task packs each shard: it reads the rows and writes the file.
"""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from pipelines import nodes, ray_env
from pipelines.ray_data import grouped, in_order, make_dataset, own_node
from pipelines.workarounds import NODE
from uno.config import Config, override
from uno.data.files import Storage
from uno.data.images import InMemory, from_columns, to_columns
from uno.data.pack import Shard, ShardRows, Store, pack, store_local, store_shard
from uno.data.rows import Rows
from uno.data.sources import read_rows
from uno.data.splits import labeled_rows, limit_rows
from uno.errors import ConfigError
from uno.runs.hardware import num_threads
from uno.session.console import Progress, print_line
from uno.text import plural

BAD = pa.list_(pa.struct({"id": pa.string(), "reason": pa.string()}))
# The largest number of rows whose images, or places of images, are in the object store
# at once.
EXECUTION_ROWS = 2**20


def pack_data(config: Config, shard_mb: int, given: Mapping[str, Any]) -> int:
    """Write a source as Parquet shards, print a summary, and return the exit code 0.

    Images that cannot be read are left out.

    Args:
        config: The configuration with the source and the output directory. If
            ``data.limit`` is set, only so many rows are written.
        shard_mb: The size of a shard in MiB.
        given: The settings of the configuration that the user gives, by dotted key.
            Tasks of Ray write the shards if ``compute.num_workers`` is among them and
            not 0; otherwise threads of this process do.

    Raises:
        ConfigError: There is no output directory, it holds something else, or the
            source holds vectors and not images. With Ray: no node can write to the
            output directory, or no node with a CPU came in time.
    """
    if config.output is None:
        raise ConfigError("uno data pack needs --output DIR, the place for the shards")
    workers = config.compute.num_workers if "compute.num_workers" in given else 0
    rows = read_rows(config.data)
    for warning in rows.warnings:
        print_line(f"warning: {warning}")
    if config.data.limit is not None:
        rows = rows.take(limit_rows(rows, config.data.limit))
    labeled = labeled_rows(rows, config.data) & rows.is_train
    with (
        ray_env.connect(workers=workers) if workers else nullcontext() as ray,
        Progress() as progress,
    ):

        def show(done: int, total: int) -> None:
            progress({"phase": "pack", "step": done, "total_steps": total})

        store = (
            store_on_ray(ray, config) if workers else store_local(num_threads(config))
        )
        found = pack(
            rows, labeled, Storage(config.output), shard_mb * 2**20, store, show
        )
    counts = (
        f"{plural(found.rows, 'image')}, {found.packed:,} packed, {found.bad:,} bad, "
    )
    counts += plural(found.shards, "shard")
    print_line(f"{counts}: {config.output}")
    return 0


def store_on_ray(ray: Any, config: Config) -> Store:
    """Return a function that writes shards by tasks of Ray.

    At most as many tasks as workers run at a time. Image paths must be valid on every
    node, and so must an output that is a URI. If the output is a local directory, all
    tasks run on this node. If it is a URI and the cluster has no CPU, this waits for a
    node.

    Args:
        ray: The module ``ray``, connected to a cluster.
        config: The configuration with the output directory and the number of workers.

    Returns:
        A function that takes the output directory, the rows of the source, and for each
        shard to write its name and row numbers. It yields for each written shard its
        name, its number of rows, and the rows that were left out because their images
        cannot be read.

    Raises:
        ConfigError: The output is local, and Ray has no CPU on this node; or it is a
            URI, and no node with a CPU came in time.
    """
    workers, own = config.compute.num_workers, own_node(ray)
    one = override(config, {"compute.num_workers": 1, "compute.device": "cpu"})
    if not Storage(str(config.output)).is_local:
        nodes.once_one_fits(
            one, lambda: ray_env.task_request(one, ray.cluster_resources())
        )
    elif not any(
        node["NodeID"] == own and node["Resources"].get("CPU") for node in ray.nodes()
    ):
        advice = "use a URI, or leave --workers out"
        raise ConfigError(
            f"--output {config.output} is local, where Ray has no CPUs; {advice}"
        )

    def store(
        output: Storage, rows: Rows, shards: Iterator[ShardRows]
    ) -> Iterator[Shard]:
        """Write shards by tasks of Ray, and yield each written shard, in order.

        Args:
            output: The directory of the pack.
            rows: All rows of the source.
            shards: The name and the row numbers of each shard to write.
        """
        shared = ray.put((without_images(rows), rows.images.reader()))
        here = {NODE: own} if output.is_local else None
        write = partial(write_shard, target=output.uri, shared=shared)
        for some in grouped(
            (shard_block(shard, rows) for shard in shards), EXECUTION_ROWS
        ):
            found = make_dataset(some).map_batches(
                write,
                batch_format="pyarrow",
                batch_size=None,
                label_selector=here,
                num_cpus=ray_env.TASK_CPUS,
                compute=ray.data.TaskPoolStrategy(size=workers),
            )
            for table in in_order(found):
                for name, num_rows, bad in zip(
                    *table.to_pydict().values(), strict=True
                ):
                    yield Shard(name, num_rows, bad)

    return store


def without_images(rows: Rows) -> Rows:
    """Return the rows of a data set with row numbers in the place of their images.

    Ids, labels and other facts stay. The images are sent to tasks separately.
    """
    return replace(rows, images=InMemory(range(len(rows))))


def shard_block(shard: ShardRows, rows: Rows) -> pa.Table:
    """Return the rows of a shard as the Arrow table that is sent to a task.

    Args:
        shard: The name of the shard, the numbers of its rows in the source, and the
            sizes of its Parquet row groups.
        rows: All rows of the source.

    Returns:
        A table with a row for each image: the columns ``name`` (of the shard),
        ``group`` (the number of its Parquet row group), ``row`` (its row number in the
        source); and either ``number``, under which a reader finds the image, or
        ``image`` and ``shape``, the image itself, see
        :func:`~uno.data.images.to_columns`.
    """
    columns = to_columns(rows.images, shard.rows)
    name = pa.DictionaryArray.from_arrays(
        np.zeros(len(shard.rows), np.int8), [shard.name]
    )
    group = np.repeat(np.arange(len(shard.sizes), dtype=np.int32), shard.sizes)
    return pa.table({"name": name, "group": group, "row": shard.rows, **columns})


def write_shard(block: pa.Table, target: str, shared: Any) -> pa.Table:
    """Write one Parquet shard, in a task of Ray.

    Args:
        block: A table of :func:`shard_block`, with all rows of the shard.
        target: The output directory, a path or URI.
        shared: The reference to a pair in the object store: all rows of the source
            without their images, from :func:`without_images`; and the object that reads
            images by row number, or None if the table has the images themselves.

    Returns:
        A table of one row: ``name``, the name of the file; ``rows``, the number of rows
        of the shard, with those that are left out; and ``bad``, the id and the reason
        of each row that is left out because its image cannot be read.
    """
    import ray

    (rows, reader), name = ray.get(shared), block["name"][0].as_py()
    shard = ShardRows(
        name, np.bincount(block["group"].to_numpy()), block["row"].to_numpy()
    )
    found = store_shard(Storage(target), rows, shard, from_columns(block, reader))
    return pa.table(
        {"name": [name], "rows": [found.rows], "bad": pa.array([found.bad], BAD)}
    )
