"""Partitions of rows on Ray, from where their images are to a file: what predictions
and features share.

Where the rows of a partition are (or their bytes) -> tasks that read and decode them,
on any node -> an actor pool that holds the model -> an actor that writes a file for
each partition.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from pipelines import nodes, ray_env
from pipelines.ray_data import grouped, in_order, own_node
from pipelines.ray_private import NODE, dataset_of
from uno.config import Config
from uno.data.files import Storage
from uno.runs.hardware import num_threads

EXECUTION_ROWS = 2**24  # whose places are in the object store at once
FACT_BYTES = 4096  # of a row besides its pixels: id, path, reason

Write = Callable[[Storage, int, pa.Table], bytes | None]
"""Keeps the results of partition ``number``; returns what the driver wants of them."""


def map_through_model(
    ray: Any,
    config: Config,
    storage: Storage,
    blocks: Iterator[pa.Table],
    decode: Callable[..., Any],
    model: type,
    loaded: tuple[Any, ...],
    write: Write,
    part_rows: int,
    chunk_rows: int,
    row_bytes: int,
    give_up: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[int, bytes | None]]:
    """Numbers of stored partitions, and what ``write`` returned; each has ``part_rows``
    rows, the last fewer.

    ``blocks`` are whole partitions with a column ``row``; ``decode`` makes chunks of
    them, pixels of ``row_bytes`` a row. A chunk has ``chunk_rows``, which divide
    ``part_rows``; the last one may have fewer. Each worker's actor is a
    ``model(device, threads, *loaded)`` and gets a chunk at a time. Paths must lead to
    the images from every node. Nodes are waited for, until ``give_up``: Interrupted.
    """
    workers = config.compute.num_workers
    resources = nodes.wait_for_resources(
        config, give_up, nodes.startup_timeout_s(config)
    )
    cluster = ray.cluster_resources()
    spare = cluster.get("CPU", 1) - workers * resources["CPU"]
    # two tasks at least: small images wait for Python
    decode_cpus = ray_env.TASK_CPUS * min(1.0, spare / 2)
    here = {NODE: own_node(ray)} if storage.is_local else None
    arguments = (
        "cuda" if "GPU" in resources else "cpu",
        num_threads(config, workers),
        *loaded,
    )
    whole = {"batch_format": "pyarrow", "batch_size": None}
    for some in grouped(blocks, EXECUTION_ROWS):
        dataset = dataset_of(some)
        # the rows of a partition stay together
        dataset.context.execution_options.preserve_order = True
        # Ray joins blocks below this size, and cuts those of 1.5 times as much, which
        # no chunk has.
        dataset.context.target_max_block_size = (
            2 * chunk_rows * (row_bytes + FACT_BYTES)
        )
        stored = (
            dataset.map_batches(decode, num_cpus=decode_cpus, **whole)
            .map_batches(
                model,
                fn_constructor_args=arguments,
                compute=ray.data.ActorPoolStrategy(size=workers),
                num_cpus=resources["CPU"],
                num_gpus=resources.get("GPU", 0),
                batch_format="pyarrow",
                batch_size=chunk_rows,  # Ray wants a number where there are GPUs
            )
            .map_batches(
                Writer,
                fn_constructor_args=(storage.uri, write, part_rows),
                batch_format="pyarrow",
                compute=ray.data.ActorPoolStrategy(size=1),
                batch_size=part_rows,
                num_cpus=0,
                label_selector=here,
            )
        )
        for batch in in_order(stored):
            yield from zip(
                batch["number"].to_pylist(), batch["data"].to_pylist(), strict=True
            )


class Writer:
    """The actor that stores partitions of ``size`` rows, the last one of fewer, in
    ``target``. Of tasks each would start a process, as Ray keeps no more idle ones than
    there are CPUs: 5 times slower for digits.
    """

    def __init__(self, target: str, write: Write, size: int) -> None:
        self._storage, self._write, self._size = Storage(target), write, size

    def __call__(self, results: pa.Table) -> pa.Table:
        """All results of a partition, in order -> its number."""
        rows = results["row"].to_numpy()
        number = int(rows[0]) // self._size
        assert np.array_equal(
            rows, np.arange(number * self._size, number * self._size + len(rows))
        )
        data = pa.array(
            [self._write(self._storage, number, results)], pa.large_binary()
        )
        return pa.table({"number": [number], "data": data})
