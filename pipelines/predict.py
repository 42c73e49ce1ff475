"""Run a trained model over images with Ray Data, for predictions or features.

The steps are: tasks on any node read and decode the images, and actors with the model
compute results. For predictions a pool of actors writes one file for each partition of
rows. Features are sent to the driver. Batches and files are the same as with the
threads of one process, so the results are, too.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from pipelines import nodes, ray_env
from pipelines.ray_data import (
    bytes_of,
    grouped,
    image_block,
    in_order,
    make_dataset,
    own_node,
    pixel_column,
    shared_tensor,
)
from pipelines.workarounds import NODE
from uno.config import Config
from uno.data.files import Storage, is_uri
from uno.data.images import Images, InMemory, from_columns
from uno.encoders.runtimes import Precision, Runtime, runtime_precision
from uno.results.infer import build_classifier
from uno.results.predictions import (
    InputSpec,
    PredictionWriter,
    Summary,
    classify,
    decode_chunk,
    split_chunks,
)
from uno.runs.hardware import num_threads

FACT_BYTES = 4096  # bytes of a row besides its pixels: id, path, reason

MAX_WRITERS = 16  # a node can start so many processes at once


class WriterPool(NamedTuple):
    """How a pool of Ray actors writes results: a file for each partition of rows.

    Attributes:
        output: The directory of the results, a path or URI.
        write: Writes the results of a partition, as ``write(storage, number,
            results)``: the directory, the number of the partition, and its table.
        part_rows: The number of rows of a partition, a multiple of the rows of a chunk.
            The last partition may have fewer.
    """

    output: str
    write: Callable[[Storage, int, pa.Table], None]
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
    """Decode images and map them through a model, with Ray Data.

    Image paths must be valid on every node. If the cluster is too small for the
    workers, this waits for nodes, at most ``compute.wait_minutes``.

    Args:
        ray: The module ``ray``, connected to a cluster.
        config: The configuration, with the number and the resources of workers. There
            are as many actors with a model as workers.
        blocks: Tables with a row for each image to read. They have a column ``row``,
            the position among all rows, and the columns that ``decode`` takes. With
            ``writers``, each table is one partition.
        decode: Is called with such a table in a task, and returns or yields tables of
            decoded images.
        model: The class of the actors, built by ``model(config, resources, *loaded)``
            with the resources of an actor (``CPU``, ``GPU``). An actor is called with
            one chunk of decoded images at a time, and returns a table of results.
        loaded: Further arguments for ``model``.
        chunk_rows: The number of rows of a chunk. The last one may have fewer.
        row_bytes: The bytes of the pixels of an image.
        writers: How actors write the results to files; None sends the results to this
            process.
        give_up: Returns whether to stop waiting for nodes.

    Yields:
        The table of results of each chunk, in the order of ``blocks``; with
        ``writers``, tables with the column ``number``, the numbers of partitions that
        were written.

    Raises:
        ConfigError: The cluster had no place for the workers in time.
        Interrupted: ``give_up`` returned True before the first task.
        UnoError: A task or an actor raised it.
    """
    workers = config.compute.num_workers
    resources = nodes.wait_for_resources(config, give_up)
    cluster = ray.cluster_resources()
    spare = cluster.get("CPU", 1) - workers * resources["CPU"]
    # At least two tasks run at a time, because Python is the bottleneck for small
    # images.
    decode_cpus = ray_env.TASK_CPUS * min(1.0, spare / 2)
    whole = {"batch_format": "pyarrow", "batch_size": None}
    for some in grouped(blocks):
        dataset = make_dataset(some)
        # Ray joins blocks below this size, and cuts those of 1.5 times as much, which
        # no chunk has.
        dataset.context.target_max_block_size = (
            2 * chunk_rows * (row_bytes + FACT_BYTES)
        )
        results = dataset.map_batches(
            decode, num_cpus=decode_cpus, **whole
        ).map_batches(
            model,
            fn_constructor_args=(config, resources, *loaded),
            compute=ray.data.ActorPoolStrategy(size=workers),
            num_cpus=resources["CPU"],
            num_gpus=resources.get("GPU", 0),
            batch_format="pyarrow",
            batch_size=chunk_rows,  # Ray requires a number for actors with GPUs.
        )
        if writers is not None:
            results = results.map_batches(
                Writer,
                fn_constructor_args=(writers,),
                batch_format="pyarrow",
                # Ray collects the rows of a partition before it chooses an actor.
                batch_size=writers.part_rows,
                compute=ray.data.ActorPoolStrategy(size=min(workers, MAX_WRITERS)),
                num_cpus=0,
                label_selector=(
                    None if is_uri(writers.output) else {NODE: own_node(ray)}
                ),
            )
        # Ray may have joined the results of several chunks.
        yield from in_order(results, chunk_rows if writers is None else None)


def threads_of_actor(config: Config, resources: dict[str, float]) -> int:
    """Return the number of threads of torch in an actor, on the node of the actor.

    It is ``compute.threads``, or by default an equal share of the cores of this node
    for each actor that fits on it, of at most ``compute.num_workers`` actors.

    Args:
        config: The configuration of the run, with the number of workers.
        resources: The amount of each resource that an actor reserves, by its name
            (``CPU``, ``GPU``).
    """
    import ray

    own = own_node(ray)
    has = next(n["Resources"] for n in ray.nodes() if n["NodeID"] == own)
    fits = min(int(has.get(name, 0) / n + 1e-6) for name, n in resources.items())
    return num_threads(config, max(1, min(config.compute.num_workers, fits)))


class Writer:
    """A Ray actor that writes a file for each partition of results.

    Tasks would be 5 times slower for the digits. Ray keeps no more idle processes than
    there are CPUs, so each task would start a process.

    Args:
        pool: The directory of the results, how they are written, and the number of rows
            of a partition.
    """

    def __init__(self, pool: WriterPool) -> None:
        self._pool, self._storage = pool, Storage(pool.output)

    def __call__(self, results: pa.Table) -> pa.Table:
        """Write all results of one partition.

        Args:
            results: A table with exactly the results of one partition, in the order of
                their column ``row``, the position among all rows.

        Returns:
            A table of one row, the ``number`` of the partition.
        """
        rows, part_rows = results["row"].to_numpy(), self._pool.part_rows
        number = int(rows[0]) // part_rows
        start = number * part_rows
        assert np.array_equal(rows, np.arange(start, start + len(rows)))
        self._pool.write(self._storage, number, results)
        return pa.table({"number": [number]})


def predict_on_ray(
    ray: Any,
    config: Config,
    files: Mapping[str, bytes],
    writer: PredictionWriter,
    on_progress: Callable[[int, int], None],
) -> Summary:
    """Classify with Ray the rows whose predictions are not written yet.

    Args:
        ray: The module ``ray``, connected to a cluster.
        config: The configuration of the run, with the number of workers.
        files: The content of the files of the model, by name.
        writer: Has the rows to classify, and writes a Parquet file of predictions for
            each partition of rows. Partitions that are written already are not computed
            again.
        on_progress: Is called as ``on_progress(done, total)`` with the number of
            finished rows and the number of all rows, after partitions are written.

    Returns:
        The path of the predictions, and the numbers of all, readable and unreadable
        rows.

    Raises:
        ConfigError: The cluster had no place for the workers within
            ``compute.wait_minutes``.
        UnoError: A task raised it.
    """
    how = InputSpec.of(build_classifier(files), writer.part_rows)
    decode = partial(decode_part, reader=writer.data.images.reader(), how=how)
    parts = map(writer.rows_of, writer.missing)
    blocks = (make_block(writer, np.array(part)) for part in parts)
    vectors = config.model.takes_vectors
    precision = None if vectors else runtime_precision(config, torch.device("cpu"))
    loaded = ray.put(dict(files)), writer.embedding, precision
    pool = WriterPool(writer.storage.uri, writer.part_writer.write, writer.part_rows)
    for table in map_through_model(
        ray,
        config,
        blocks,
        decode,
        Scorer,
        loaded,
        how.chunk_rows,
        3 * how.size**2,
        pool,
    ):
        for number in table["number"].to_pylist():
            writer.stored(number)
        on_progress(writer.num_done, writer.num_rows)
    return writer.finish()


def make_block(writer: PredictionWriter, rows: np.ndarray) -> pa.Table:
    """Return the images of a partition of rows as the table that is sent to a task.

    Args:
        writer: Has all rows that are predicted.
        rows: The numbers of the rows of the partition, int64 (n,).

    Returns:
        A table with a row for each image: ``row``, its row number; ``id``; ``label``,
        the name of the class with which the model was trained on it, or null; and
        either ``number``, under which a reader finds the image, or ``image`` and
        ``shape``, its encoded bytes, pixels or path, see
        :func:`~uno.data.images.to_columns`.
    """
    names = writer.names_of(rows)
    return image_block(writer.data.images, rows, id=names["id"], label=names["label"])


def decode_part(
    block: pa.Table, reader: Images | None, how: InputSpec
) -> Iterator[pa.Table]:
    """Decode the images of a table of :func:`make_block`, in a task.

    PyTorch uses one thread in this process from then on.

    Args:
        block: The table.
        reader: Reads the images by the column ``number``; None if the table has the
            images themselves.
        how: The size in pixels of the images, how they are resized, and the number of
            images to decode at once.

    Yields:
        Tables of chunks of rows, with the columns ``row``, ``id``, ``label``, ``uri``
        (the path of the image, or null), ``reason`` (why the image cannot be read, or
        null) and ``pixels`` (the bytes of the uint8 pixels). The last chunk may have
        fewer rows.
    """
    torch.set_num_threads(1)
    images: Images
    if reader is None:
        images = InMemory(from_columns(block, None))
    else:
        images = reader.take(block["number"].to_numpy())
    names, first = block.select(["id", "label"]), block["row"][0].as_py()
    for chunk in split_chunks(names, images, first, how):
        facts, pixels = decode_chunk(chunk, how, 1)
        yield facts.append_column("pixels", pixel_column(pixels.flatten(1).numpy()))


class Scorer:
    """A Ray actor that loads a model on its own node, and classifies images.

    Args:
        config: The configuration of the run.
        resources: The resources of the actor (``CPU``, ``GPU``).
        files: The reference to the files of the model, their content by name.
        embedding: Whether to return the features of the encoder, too.
        precision: The precision in which OpenVINO computes the encoder on a CPU; None
            for PyTorch.
    """

    def __init__(
        self,
        config: Config,
        resources: dict[str, float],
        files: Any,
        embedding: bool,
        precision: Precision | None,
    ) -> None:
        import ray

        threads = threads_of_actor(config, resources)
        torch.set_num_threads(threads)
        device = "cuda" if "GPU" in resources else "cpu"
        self._model, self._embedding = (
            build_classifier(ray.get(files), device),
            embedding,
        )
        if precision is not None and self._model.device.type == "cpu":
            self._model.module.encoder = Runtime(
                self._model.module.encoder, precision, threads
            )

    def __call__(self, block: pa.Table) -> pa.Table:
        """Classify the images of a table of :func:`decode_part`.

        Args:
            block: The table, with decoded images.

        Returns:
            A table with the columns of ``block`` but ``pixels``, and with the model's
            prediction for each row, in the same order, see
            :func:`uno.results.predictions.classify`. With ``embedding`` it has the
            features, too.
        """
        size = self._model.size
        pixels = shared_tensor(bytes_of(block["pixels"], 3 * size**2)).view(
            -1, 3, size, size
        )
        return pa.concat_tables(
            classify(self._model, block.drop_columns("pixels"), pixels, self._embedding)
        )
