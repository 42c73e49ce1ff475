"""Map rows through a model with Ray Data.

Predictions and features use this. The steps are: tasks on any node read and decode the
rows, and actors with the model compute results. The results of features are sent to the
driver. For predictions a pool of actors writes one file for each partition of rows.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from pipelines import nodes, ray_env
from pipelines.ray_data import grouped, in_order, make_dataset, own_node
from pipelines.ray_private import NODE
from uno.config import Config
from uno.data.files import Storage
from uno.runs.hardware import num_threads

# largest number of rows whose places are in the object store at once
EXECUTION_ROWS = 2**24
FACT_BYTES = 4096  # bytes of a row besides its pixels: id, path, reason

MAX_WRITERS = 16  # a node can start so many processes at once

Write = Callable[[Storage, int, pa.Table], None]
"""Stores the results of a partition.

Its arguments are the directory, the number of the partition, and the results.
"""


class WriterPool(NamedTuple):
    """How a pool of actors stores partitions of rows.

    Attributes:
        storage: The directory of the results.
        write: Stores the results of a partition, see :data:`Write`.
        part_rows: The number of rows of a partition, a multiple of the rows of a
            chunk. The last partition may have fewer.
    """

    storage: Storage
    write: Write
    part_rows: int


def map_through_model(
    ray: Any,
    config: Config,
    blocks: Iterator[pa.Table],
    decode: Callable[..., Any],
    model: Callable[..., Callable[[pa.Table], pa.Table]],
    loaded: tuple[Any, ...],
    chunk_rows: int,
    row_bytes: int,
    writers: WriterPool | None = None,
    give_up: Callable[[], bool] = lambda: False,
) -> Iterator[pa.Table]:
    """Map rows through a model on Ray.

    Image paths must be valid on every node. Nodes are waited for.

    Args:
        ray: The connected module.
        config: The configuration, with the number and the resources of workers.
        blocks: Tables with a column ``row``. With ``writers``, each is one partition.
        decode: Turns such a table into tables of chunks, with pixels.
        model: Builds the model of an actor by ``model(device, threads, *loaded)``. It
            is called with one chunk at a time.
        loaded: Arguments for ``model``.
        chunk_rows: The number of rows of a chunk. The last one may have fewer.
        row_bytes: The bytes of the pixels of a row.
        writers: Stores the results; None sends them to this process.
        give_up: Returns whether to stop waiting for nodes.

    Yields:
        The results of each chunk, in order; with ``writers``, tables with the column
        ``number`` of the partitions that were stored.

    Raises:
        ConfigError: The cluster had no place for the workers in time.
        Interrupted: ``give_up`` returned True.
    """
    workers = config.compute.num_workers
    resources = nodes.wait_for_resources(
        config, give_up, nodes.startup_timeout_s(config)
    )
    cluster = ray.cluster_resources()
    spare = cluster.get("CPU", 1) - workers * resources["CPU"]
    # At least two tasks run at a time, because Python is the bottleneck for small
    # images.
    decode_cpus = ray_env.TASK_CPUS * min(1.0, spare / 2)
    whole = {"batch_format": "pyarrow", "batch_size": None}
    for some in grouped(blocks, EXECUTION_ROWS):
        dataset = make_dataset(some)
        # Ray joins blocks below this size, and cuts those of 1.5 times as much, which
        # no chunk has.
        dataset.context.target_max_block_size = (
            2 * chunk_rows * (row_bytes + FACT_BYTES)
        )
        results = dataset.map_batches(
            decode, num_cpus=decode_cpus, **whole
        ).map_batches(
            ModelActor,
            fn_constructor_args=(model, config, resources, loaded),
            compute=ray.data.ActorPoolStrategy(size=workers),
            num_cpus=resources["CPU"],
            num_gpus=resources.get("GPU", 0),
            batch_format="pyarrow",
            batch_size=chunk_rows,  # Ray requires a number for actors with GPUs.
        )
        if writers is not None:
            storage, write, part_rows = writers
            results = results.map_batches(
                Writer,
                fn_constructor_args=(storage.uri, write, part_rows),
                batch_format="pyarrow",
                # Ray collects the rows of a partition before it chooses an actor.
                batch_size=part_rows,
                compute=ray.data.ActorPoolStrategy(size=min(workers, MAX_WRITERS)),
                num_cpus=0,
                label_selector={NODE: own_node(ray)} if storage.is_local else None,
            )
        # Ray may have joined the results of several chunks.
        yield from in_order(results, chunk_rows if writers is None else None)


class ModelActor:
    """An actor that builds the model on its own node and calls it with chunks.

    Args:
        build: Builds the model, see :func:`map_through_model`.
        config: The configuration.
        resources: The resources of the actor (``CPU``, ``GPU``).
        loaded: Arguments for ``build``.
    """

    def __init__(
        self,
        build: Callable[..., Callable[[pa.Table], pa.Table]],
        config: Config,
        resources: dict[str, float],
        loaded: tuple[Any, ...],
    ) -> None:
        device = "cuda" if "GPU" in resources else "cpu"
        self._model = build(device, threads_of_actor(config, resources), *loaded)

    def __call__(self, chunk: pa.Table) -> pa.Table:
        """Return the results of a chunk of rows."""
        return self._model(chunk)


def threads_of_actor(config: Config, resources: dict[str, float]) -> int:
    """Return the number of threads of torch in an actor, on the node of the actor.

    It is an equal share of the cores of this node for each actor that fits on it.
    ``compute.threads`` has priority.

    Args:
        config: The configuration.
        resources: The resources of an actor (``CPU``, ``GPU``).
    """
    import ray

    own = own_node(ray)
    has = next(n["Resources"] for n in ray.nodes() if n["NodeID"] == own)
    fits = min(int(has.get(name, 0) / n + 1e-6) for name, n in resources.items())
    return num_threads(config, max(1, min(config.compute.num_workers, fits)))


class Writer:
    """An actor that stores partitions.

    Tasks would be 5 times slower for the digits. Ray keeps no more idle processes than
    there are CPUs, so each task would start a process.

    Args:
        target: The directory of the results.
        write: Stores the results of a partition, see :data:`Write`.
        size: The number of rows of a partition. The last one may have fewer.
    """

    def __init__(self, target: str, write: Write, size: int) -> None:
        self._storage, self._write, self._size = Storage(target), write, size

    def __call__(self, results: pa.Table) -> pa.Table:
        """Store all results of one partition, given in order.

        Returns:
            A table of one row, the ``number`` of the partition.
        """
        rows = results["row"].to_numpy()
        number = int(rows[0]) // self._size
        assert np.array_equal(
            rows, np.arange(number * self._size, number * self._size + len(rows))
        )
        self._write(self._storage, number, results)
        return pa.table({"number": [number]})
