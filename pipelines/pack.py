"""Run ``uno data pack``, which writes images as Parquet shards, here or on Ray.

On Ray a task packs each shard: it reads the images of the rows and writes the file.
"""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pyarrow as pa

from pipelines import ray_env
from pipelines.ray_data import own_node
from pipelines.tasks import run_tasks, wait_for_task
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
from uno.session.console import Progress, interrupt_on_signal, print_line
from uno.text import plural


def pack_data(config: Config, shard_mb: int, given: Mapping[str, Any]) -> None:
    """Write a source as Parquet shards, and print a summary.

    Images that cannot be read are left out, and listed in ``bad_samples.jsonl`` of the
    output directory. Shards that an interrupted call has written are kept.

    Args:
        config: The configuration with the source and the output directory. If
            ``data.limit`` is set, at most so many training rows and so many test rows
            are written.
        shard_mb: The size of a shard in MiB.
        given: The settings of the configuration that the user gives, by dotted key.
            Tasks of Ray write the shards if ``compute.num_workers`` is among them and
            not 0; otherwise threads of this process do.

    Raises:
        ConfigError: There is no output directory, it holds something else, or the
            source cannot be read or holds vectors and not images. With Ray: the output
            is a local directory and Ray has no CPU on this node; or it is a URI and no
            node with a CPU came in time.
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
        interrupt_on_signal("stopped; the same command continues"),
        ray_env.connect(workers=workers) if workers else nullcontext() as ray,
        Progress() as progress,
    ):

        def show(done: int, total: int) -> None:
            """Show the number of finished rows and of all rows as the progress."""
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


def store_on_ray(ray: Any, config: Config) -> Store:
    """Return a function that writes shards by tasks of Ray.

    At most as many tasks as workers run at a time. If the output is a local directory,
    all tasks run on this node. If it is a URI, tasks run on any node, where image paths
    must be valid, too; and if the cluster has fewer CPUs than one task asks for, this
    waits for a node.

    Args:
        ray: The module ``ray``, connected to a cluster.
        config: The configuration with the output directory and the number of workers.

    Returns:
        A function that takes the output directory, the rows of the source, and for each
        shard to write its name and row numbers. It yields each shard that is written,
        in the order in which tasks end.

    Raises:
        ConfigError: The output is local, and Ray has no CPU on this node; or it is a
            URI, and no node with a CPU came in time.
    """
    own = own_node(ray)
    request: dict[str, Any] = {"num_cpus": ray_env.TASK_CPUS}
    if not Storage(str(config.output)).is_local:
        wait_for_task(ray, override(config, {"compute.device": "cpu"}))
    elif any(
        node["NodeID"] == own and node["Resources"].get("CPU") for node in ray.nodes()
    ):
        request["label_selector"] = {NODE: own}
    else:
        advice = "use a URI, or leave --workers out"
        raise ConfigError(
            f"--output {config.output} is local, where Ray has no CPUs; {advice}"
        )

    def store(
        output: Storage, rows: Rows, shards: Iterator[ShardRows]
    ) -> Iterator[Shard]:
        """Write shards by tasks of Ray, and yield each shard as its task ends.

        Args:
            output: The directory of the pack.
            rows: All rows of the source.
            shards: The name and the row numbers of each shard to write.
        """
        facts = replace(rows, images=InMemory(range(len(rows))))
        shared = output.uri, facts, rows.images.reader()
        items = ((shard, to_columns(rows.images, shard.rows)) for shard in shards)
        workers = config.compute.num_workers
        for _, shard in run_tasks(ray, workers, request, write_shard, shared, items):
            yield shard

    return store


def write_shard(
    target: str, rows: Rows, reader: Any, item: tuple[ShardRows, Mapping[str, Any]]
) -> Shard:
    """Write one Parquet shard, in a task of Ray.

    Args:
        target: The output directory, a path or URI.
        rows: All rows of the source, without their images.
        reader: Reads images by their number; None if the columns of the item hold the
            images themselves.
        item: The rows that the shard is to hold; and Arrow columns with a value for
            each of them, see :func:`~uno.data.images.to_columns`. With a reader they
            are only ``number``, the number under which it finds the image; otherwise
            ``image`` and ``shape``.

    Returns:
        The name of the shard; the number of its rows, with those that are left out; and
        the unreadable rows, which are left out.
    """
    shard, columns = item
    images = from_columns(pa.table(dict(columns)), reader)
    return store_shard(Storage(target), rows, shard, images)
