"""Read, decode and crop the images of a run with Ray Data.

An image set that fits into memory is decoded once, by tasks on any node. Its images are
sent to the tasks as they are: as paths, encoded bytes, pixels, or numbers of rows in
Parquet files. The tasks return 8-bit pixels, in order.

A streamed image set is decoded in every epoch, and the views are cropped in the same
processes. Every rank runs its own executions of Ray Data, so that training can start at
any step. An execution is for one epoch, or for several short ones. Only row numbers are
sent to it, 24 bytes each. The object that reads the images, or images in memory, is in
the object store, once for each node. The allocator of Ray Data limits how much is read
ahead.

The processes of such an execution are on the node of their rank. They use the CPUs of
the rank's own placement group and take no further ones from Ray. So no rank waits for
the CPUs of another, and no node is started for them.
"""

import logging
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from pipelines.workarounds import NODE
from uno.config import Config
from uno.crops import Cropper
from uno.data import stream
from uno.data.decode import PLAIN, DecodedBatch, Decoding, decode_many, ok_mask
from uno.data.files import Storage
from uno.data.images import Images, from_columns, to_columns
from uno.data.memory import EvalSet, RowBlocks, train_set
from uno.data.splits import Task, train_rows, truth_rows
from uno.data.stream import CHUNK_BYTES, Chunk, CropJob, EvalData, References, TrainData
from uno.data.unreadable import BadRows
from uno.errors import UnoError

# Ray Data logs plans, and that it shows no progress bars.
QUIET = {"ray.data": logging.WARNING, "ray.data._internal.progress": logging.ERROR}
# Fewer images than this are decoded here, because starting processes takes longer.
FEW_ROWS = 2_000
ROWS_PER_DECODE = 256  # decoded at once by a task, which limits its memory
# The largest number of bytes of places, or of images in memory, that are sent to the
# tasks of an execution.
EXECUTION_BYTES = 128 * 2**20
# An execution has so many epochs that it has this many blocks, because each execution
# starts new processes.
EXECUTION_BLOCKS = 1_000
STORE_SHARE = 0.4  # share of the object store for the executions of all workers
# The number of chunks that a task crops. A task costs 11 ms of CPU time, and a block of
# its results much less.
TASK_CHUNKS = 4

Run = Callable[[list[pa.Table]], Iterator[pa.Table]]
"""Runs an execution: takes blocks, and yields the resulting blocks in order.

The blocks are put into the object store when it is called.
"""


def shared(
    ray: Any,
    config: Config,
    task: Task,
    reasons: list[str | None] | None,
    features: Tensor | None = None,
    images: list[Any] | None = None,
) -> dict[str, Any]:
    """Put the data that all training workers read into Ray's object store.

    The tables of ``images`` are there already, and are not copied. The rows and labels
    for training are stored apart from the true labels, which only the evaluation reads.

    Args:
        ray: The module ``ray``, connected to a cluster.
        config: The configuration of the run. ``data.loading`` says whether images are
            streamed.
        task: The N rows of the run, with their classes, splits and encoded images.
        reasons: For each row the reason why it cannot be read, or None; a single None
            if no image was read yet. Unreadable rows are left out.
        features: Cached features of a frozen encoder that replace the images, float32
            (N, 1 + V, D): D numbers for the evaluation view (the image without
            augmentation) and for each of V random views. None if the encoder is
            trained.
        images: The references to the tables of decoded images from :func:`decode_task`;
            None if the run trains on features or streams its images.

    Returns:
        Entries of the dict that :func:`worker_sets` takes. ``num_true`` is the number
        of known and novel classes that evaluation knows. ``rows`` is the reference to
        the row numbers and labels for training, and ``truth`` that to the true labels.
        Streamed images have two more references: ``source``, to the object that reads
        the encoded images by row number, and ``ids``, to the ids of all rows. Otherwise
        there is either ``features``, a reference to the array, or ``images``, the given
        references.
    """
    ok = None if reasons is None else ok_mask(reasons)
    streams = config.data.loading == "streaming"
    rows = train_rows(task, ok)
    found: dict[str, Any] = {"num_true": len(task.known) + len(task.novel)}
    if streams:
        found["source"] = ray.put(task.rows.images)
        found["ids"] = ray.put(task.rows.ids)
    if features is not None:
        found["features"] = ray.put(features.numpy())
    found |= {} if images is None else {"images": images}
    return {"rows": ray.put(rows), "truth": ray.put(truth_rows(task, ok)), **found}


def worker_sets(
    config: Config, loop: Mapping[str, Any], storage: Storage
) -> tuple[TrainData, Callable[[], Mapping[str, EvalData]]]:
    """Return the training set and the evaluation sets of a run, on a training worker.

    Args:
        config: The configuration of the run.
        loop: The result of :func:`shared`, and ``worker_cpus``, the number of CPUs that
            are reserved for a worker.
        storage: The directory of the run, in which unreadable streamed images are
            listed.

    Returns:
        The training set, which holds images or features and the labels of labeled rows;
        and a function, to be called after training, that returns the evaluation sets
        with true classes, by split ("train", "test"). Streamed images are decoded by
        Ray Data while the sets are read. Nothing is decoded here.
    """
    import ray
    import ray.train

    def truth(
        make: Callable[[Any, Any, Any], EvalData],
    ) -> Callable[[], Mapping[str, EvalData]]:
        """Return a function that makes the evaluation set of each split.

        Args:
            make: Makes an evaluation set from row numbers, true classes, and whether
                training does not see the label of each row.
        """
        return lambda: {
            split: make(*each) for split, each in ray.get(loop["truth"]).items()
        }

    side, rows = config.data.stored_size, dict(ray.get(loop["rows"]))
    if config.data.loading != "streaming":
        if "features" in loop:
            features = shared_tensor(ray.get(loop["features"]))
            images, seen = RowBlocks([features]), RowBlocks([features[:, 0]])
        else:
            images = seen = pixels_of(ray.get(loop["images"]), side)
        return train_set(images, **rows), truth(
            lambda own, true, free: EvalSet(true, own, free, seen)
        )

    # The error is raised here, so Ray need not log it.
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    limits = cropping_of(
        ray,
        config.compute.num_workers,
        loop["worker_cpus"],
        ray.train.get_context().get_local_world_size(),
    )
    images, ids = ray.get(loop["source"]), ray.get(loop["ids"])
    bad = BadRows(ids, images, config.data.max_bad_fraction, storage)
    decode = decode_on_ray(ray, loop["source"], side, limits, Decoding.of(config.data))
    source = stream.StreamedImages(images, side, decode, bad)
    crop = crop_on_ray(ray, loop["source"], limits)
    return stream.StreamSet(source, **rows, crop=crop), truth(
        lambda own, true, free: stream.StreamedEvalSet(true, own, free, source)
    )


def decode_task(
    ray: Any, task: Task, side: int, how: Decoding = PLAIN
) -> tuple[list[Any], list[str | None]]:
    """Decode all images of a run once, before training.

    Fewer than 2,000 images are decoded by this process, more by tasks of Ray Data. This
    returns when all are decoded. No label is sent to the tasks.

    Args:
        ray: The module ``ray``, connected to a cluster.
        task: All rows of the run, with their encoded images.
        side: The side in pixels of the squares to which images are resized.
        how: How the images are resized and scaled to 8 bits.

    Returns:
        References to Arrow tables in the object store, which together have one row for
        each image, in any order; and for each row of the run, in the order of rows, the
        reason why its image cannot be read, or None. The columns of a table are ``row``
        (the row number), ``pixels`` (3 * side * side bytes, zeros for an unreadable
        image) and ``reason``.
    """
    # Imported here, because tasks that decode do not need it.
    from uno.session.resources import ROWS_PER_BLOCK

    images, rows = task.rows.images, np.arange(len(task.rows))
    if len(rows) < FEW_ROWS:
        pixels, reasons = decode_many(images, side, how=how)
        table = _pixel_table(pixels.flatten(1).numpy(), reasons).append_column(
            "row", pa.array(rows)
        )
        return [ray.put(table)], reasons
    blocks = [
        image_block(images, rows[i : i + ROWS_PER_BLOCK])
        for i in rows[::ROWS_PER_BLOCK]
    ]
    decode = partial(decode_block, side=side, images=images.reader(), how=how)
    batches = {
        "batch_format": "pyarrow",
        "batch_size": ROWS_PER_DECODE,
        "zero_copy_batch": True,
    }
    try:
        dataset = make_dataset(blocks).map_batches(decode, **batches).materialize()
        columns = dataset.select_columns(["row", "reason"])
        facts = pa.concat_tables(
            columns.iter_batches(batch_size=None, batch_format="pyarrow")
        )
    except ray.exceptions.RayError as error:
        raise own_error(error) or error from None
    return dataset.to_arrow_refs(), facts.sort_by("row")["reason"].to_pylist()


def pixels_of(tables: Iterable[pa.Table], side: int) -> RowBlocks:
    """Return the images in the tables of :func:`decode_task`, ordered by row number.

    They stay in the object store, which every process of a node reads without a copy.

    Args:
        tables: The tables, in any order. Together they have N rows.
        side: The side of the images in pixels.

    Returns:
        The pixels, uint8 (N,3,side,side), as blocks that are not joined. Unreadable
        images are zeros.
    """
    parts = [part for table in tables for part in table.to_batches() if len(part)]
    rows = torch.cat([torch.tensor(part["row"].to_numpy()) for part in parts])
    blocks = [
        shared_tensor(bytes_of(pa.chunked_array([part["pixels"]]), 3 * side**2))
        for part in parts
    ]
    return RowBlocks(
        [block.view(-1, 3, side, side) for block in blocks], rows.argsort()
    )


def shared_tensor(array: np.ndarray) -> Tensor:
    """Return a NumPy array as a tensor, without a copy and without PyTorch's warning.

    The array can be read-only, as one in Ray's object store, which Ray shares between
    processes. So the tensor must not be written.
    """
    with warnings.catch_warnings(action="ignore"):
        return torch.from_numpy(array)


def image_block(images: Images, rows: np.ndarray, **columns: Any) -> pa.Table:
    """Return some images as the Arrow table that is sent to a decoding task.

    Args:
        images: The images of all rows of the run, encoded.
        rows: int64 (n,), the row numbers of the images to send.
        **columns: Further columns by name. A column ``row`` replaces the row numbers.

    Returns:
        A table with a row for each image: ``row``, its row number; the further columns;
        and either ``number``, under which a reader finds the image, or ``image`` and
        ``shape``, its encoded bytes, pixels or path, see
        :func:`~uno.data.images.to_columns`.
    """
    return pa.table({"row": rows, **columns, **to_columns(images, rows)})


def decode_block(
    block: pa.Table,
    side: int,
    images: Images | None,
    how: Decoding = PLAIN,
) -> pa.Table:
    """Decode the images of a table of :func:`image_block`, in a process of Ray Data.

    Args:
        block: The table.
        side: The side in pixels of the squares to which images are resized.
        images: Reads the images by the column ``number``; None if the table has the
            images themselves.
        how: How the images are resized and scaled to 8 bits.

    Returns:
        A table, in the order of the given one, with the columns ``pixels`` (3 * side *
        side bytes, zeros for an unreadable image), ``reason`` (why the image cannot be
        read, or None) and ``row``.
    """
    pixels, reasons = decode_many(from_columns(block, images), side, 1, how)
    return _pixel_table(pixels.flatten(1).numpy(), reasons).append_column(
        "row", block["row"]
    )


def _pixel_table(pixels: np.ndarray, reasons: list[str | None]) -> pa.Table:
    """Return decoded images as an Arrow table with the columns pixels and reason.

    Args:
        pixels: uint8 (n, row_bytes), the bytes of each image or of its views.
        reasons: For each of the n images why it cannot be read, or None.

    Returns:
        A table of n rows: ``pixels`` is binary of ``row_bytes`` bytes, ``reason`` is
        text or null.
    """
    return pa.table(
        {"pixels": pixel_column(pixels), "reason": pa.array(reasons, pa.string())}
    )


def pixel_column(pixels: np.ndarray) -> pa.Array:
    """Return the rows of a byte array as a column of Arrow, without a copy.

    Args:
        pixels: uint8 (n, row_bytes), contiguous.

    Returns:
        n values of fixed-size binary, ``row_bytes`` bytes each.
    """
    kind = pa.binary(pixels.shape[1])
    return pa.FixedSizeBinaryArray.from_buffers(
        kind, len(pixels), [None, pa.py_buffer(pixels)]
    )


def bytes_of(chunks: pa.ChunkedArray, row_bytes: int) -> np.ndarray:
    """Return a column of fixed-size binary of Arrow as a read-only byte array.

    It is the inverse of :func:`pixel_column`, and copies only if the number of chunks
    of the column is not 1.

    Args:
        chunks: The column, n values.
        row_bytes: The number of bytes of a value.

    Returns:
        uint8 (n, row_bytes).
    """
    column = chunks.chunk(0) if chunks.num_chunks == 1 else chunks.combine_chunks()
    values = np.frombuffer(column.buffers()[1], np.uint8)[column.offset * row_bytes :]
    return values[: len(column) * row_bytes].reshape(-1, row_bytes)


def own_node(ray: Any) -> str:
    """Return Ray's id of the node that this process runs on."""
    return str(ray.get_runtime_context().get_node_id())


class Cropping(NamedTuple):
    """Limits for the processes of Ray Data that decode and crop images for one rank.

    Attributes:
        processes: The number of processes. They are on the node of the rank.
        store: The largest number of bytes of Ray's object store that one execution of a
            dataset may use.
    """

    processes: int
    store: float


def cropping_of(ray: Any, workers: int, worker_cpus: float, neighbors: int) -> Cropping:
    """Return the limits for the processes that decode and crop images for this rank.

    Args:
        ray: The module ``ray``, connected to a cluster.
        workers: The number of ranks.
        worker_cpus: The number of CPUs that are reserved for each rank.
        neighbors: The number of ranks on this node, with this one.

    Returns:
        The number of processes, at least 1: the CPUs that are reserved for the rank, or
        an equal share of the node's CPUs if that is more, without one CPU for the rank
        itself. And the bytes of object store that an execution of Ray Data may use: an
        equal share for each rank of 40% of the object store of the whole cluster, which
        counts as 1 GiB if its size is unknown.
    """
    own = own_node(ray)
    has = next(n["Resources"] for n in ray.nodes() if n["NodeID"] == own)
    cpus = max(worker_cpus, has.get("CPU", 0.0) / neighbors)
    store = ray.cluster_resources().get("object_store_memory", 2**30)
    return Cropping(max(1, int(cpus - 1)), STORE_SHARE * store / workers)


def crop_on_ray(
    ray: Any, source: Any, limits: Cropping
) -> Callable[[CropJob], Generator[Chunk, None, None]]:
    """Return a function that crops views of streamed images by processes of Ray Data.

    The function does the same as :func:`uno.data.stream.crop_local`.

    Args:
        ray: The module ``ray``, connected to a cluster.
        source: The reference to an object in Ray's object store: the images of the run,
            which are read by row number.
        limits: The number of processes, and the bytes of the object store that they may
            use.

    Returns:
        A function that takes a :class:`~uno.data.stream.CropJob`, the rows that this
        rank needs in some training steps. It yields the cropped views of these rows in
        order, in chunks: uint8 (n, bytes of all views of a row), and for each row the
        reason why its image cannot be read, or None.
    """

    def chunks(job: CropJob) -> Generator[Chunk, None, None]:
        """Yield the cropped views of a job's rows in order, in chunks."""
        crop = partial(_crop, cropper=job.cropper, chunk_rows=job.chunk_rows)
        run = _execution_runner(
            ray, crop, source, limits, job.chunk_rows * job.row_bytes
        )
        num_rows = job.fetch_rows or TASK_CHUNKS * job.chunk_rows
        for table in in_executions(
            run, whole_epochs(map(places, epoch) for epoch in job.epochs(num_rows))
        ):
            yield bytes_of(table["pixels"], job.row_bytes), table["reason"].to_pylist()

    return chunks


def places(of: References) -> pa.Table:
    """Return which rows some training steps need, as the table for a cropping task.

    Args:
        of: Three arrays int64 (n,) with an entry for each row: the number of the
            training step, the position in the global batch of that step, and the row
            number.

    Returns:
        An Arrow table with the columns ``step``, ``position`` and ``row``.
    """
    return pa.table(dict(zip(("step", "position", "row"), of, strict=True)))


def decode_on_ray(
    ray: Any,
    source: Any,
    side: int,
    limits: Cropping,
    how: Decoding = PLAIN,
) -> Callable[[Iterable[np.ndarray]], Iterator[DecodedBatch]]:
    """Return a function that decodes batches of images by processes of Ray Data.

    The function does the same as :func:`uno.data.decode.decoded`.

    Args:
        ray: The module ``ray``, connected to a cluster.
        source: The reference to an object in Ray's object store: the images of the run,
            which are read by row number.
        side: The side in pixels of the squares to which images are resized.
        limits: The number of processes, and the bytes of the object store that they may
            use.
        how: How the images are resized and scaled to 8 bits.

    Returns:
        A function that takes batches of row numbers int64 (b,), and yields for each
        batch its row numbers, its pixels uint8 (b, 3, side, side), and for each row the
        reason why its image cannot be read, or None.
    """
    decode = partial(decode_block, side=side, how=how)
    run = _execution_runner(ray, decode, source, limits, CHUNK_BYTES)

    def decoded(batches: Iterable[np.ndarray]) -> Iterator[DecodedBatch]:
        """Decode batches of row numbers, and yield each batch in order."""
        for table in in_executions(
            run, grouped(pa.table({"row": rows, "number": rows}) for rows in batches)
        ):
            pixels = torch.from_numpy(bytes_of(table["pixels"], 3 * side**2).copy())
            yield (
                table["row"].to_numpy(),
                pixels.view(-1, 3, side, side),
                table["reason"].to_pylist(),
            )

    return decoded


def _crop(
    block: pa.Table, images: Images, cropper: Cropper, chunk_rows: int
) -> Iterator[pa.Table]:
    """Crop the views of the rows of a table of :func:`places`, in a Ray actor.

    PyTorch uses one thread in this process from then on.

    Args:
        block: The table: a training step, a position in its batch and a row number for
            each row.
        images: The images of the run, which are read by row number.
        cropper: Cuts the views. Its random numbers depend on the step and the position.
        chunk_rows: The number of rows of each result. The last one may have fewer.

    Yields:
        Tables with the columns ``pixels`` (the bytes of all views of a row) and
        ``reason`` (why the image cannot be read, or None).
    """
    torch.set_num_threads(1)
    steps, positions, rows = (
        block[name].to_numpy() for name in ("step", "position", "row")
    )
    found = images.read_images(rows)
    for start in range(0, len(block), chunk_rows):
        own = slice(start, start + chunk_rows)
        yield _pixel_table(*cropper.crop(steps[own], positions[own], found[own]))


def in_executions(run: Run, groups: Iterator[list[pa.Table]]) -> Iterator[pa.Table]:
    """Run one execution of Ray Data after the other, and yield all results in order.

    A thread starts the next execution, and stores its inputs, while results of this one
    are read.

    Args:
        run: Starts one execution: takes its input tables, and returns an iterator over
            its results.
        groups: The input tables of each execution.

    Yields:
        The tables that the executions return, with as many rows in all as the input
        tables.
    """

    def prepare() -> tuple[int, Iterator[pa.Table]] | None:
        """Start the next execution, if there is one.

        Returns:
            The number of its rows, and its results; None after the last execution.
        """
        group = next(groups, None)
        return None if group is None else (sum(map(len, group)), run(group))

    with ThreadPoolExecutor(1, thread_name_prefix="uno-execution") as pool:
        following = pool.submit(prepare)
        while (execution := following.result()) is not None:
            following, (num_rows, results), done = pool.submit(prepare), execution, 0
            for table in results:
                done += len(table)
                yield table
            assert done == num_rows, (done, num_rows)  # no row is lost or doubled


def whole_epochs(epochs: Iterable[Iterable[pa.Table]]) -> Iterator[list[pa.Table]]:
    """Join the tables of consecutive epochs to groups, one for each Ray Data execution.

    A group consists of whole epochs. It ends after the epoch with which it has at least
    1,000 tables. The last group may have fewer. Without tables there is no group.

    Args:
        epochs: The tables of each epoch.

    Yields:
        The tables of a group, a list.
    """
    group: list[pa.Table] = []
    for epoch in epochs:
        group += epoch
        if len(group) >= EXECUTION_BLOCKS:
            yield group
            group = []
    if group:
        yield group


def grouped(blocks: Iterable[pa.Table]) -> Iterator[list[pa.Table]]:
    """Join consecutive tables to groups of limited size, each for one execution.

    A group is executed as one dataset of Ray Data. It ends with the table with which it
    has at least 128 MiB. The last group may be smaller.

    Args:
        blocks: The tables.

    Yields:
        The tables of a group, a list.
    """
    group, size = list[pa.Table](), 0
    for block in blocks:
        group.append(block)
        size += block.nbytes
        if size >= EXECUTION_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


class CropActor:
    """A Ray actor that calls a function with tables of rows and with the images.

    Args:
        function: Takes a table, and the images of all rows as the keyword ``images``.
        source: The reference to the images, which the actor loads once.
    """

    def __init__(self, function: Callable[..., Any], source: Any) -> None:
        import ray

        self._function = partial(function, images=ray.get(source))

    def __call__(self, block: pa.Table) -> Any:
        """Return the function's result for a table: one table, or an iterator."""
        return self._function(block)


def _execution_runner(
    ray: Any,
    function: Callable[..., Any],
    source: Any,
    limits: Cropping,
    chunk_bytes: int,
) -> Run:
    """Return a function that sends tables through actors of Ray Data on this node.

    Each of its calls is one execution of Ray Data.

    Args:
        ray: The module ``ray``, connected to a cluster.
        function: Is called in an actor with each table, and with the images of the run
            as the keyword ``images``. It returns or yields tables.
        source: The reference to these images, an object in Ray's object store that
            reads them by row number. Each actor loads the object once.
        limits: The number of actors, and the bytes of the object store that they may
            use.
        chunk_bytes: The bytes of a result of ``function``. Ray Data passes a result of
            this size on at once.

    Returns:
        A function that takes a list of tables, and returns an iterator over the results
        in order.
    """

    def run(blocks: list[pa.Table]) -> Iterator[pa.Table]:
        """Send tables through a new pool of actors, and return the results in order."""
        dataset = make_dataset(blocks, limits.store)
        # Ray joins what is smaller and splits what is 1.5 times as large; either costs
        # copies.
        dataset.context.target_max_block_size = chunk_bytes - 1
        pool = ray.data.ActorPoolStrategy(size=min(limits.processes, len(blocks)))
        results = dataset.map_batches(
            CropActor,
            fn_constructor_args=(function, source),
            compute=pool,
            num_cpus=0,
            label_selector={NODE: own_node(ray)},
            batch_format="pyarrow",
            batch_size=None,
        )
        return in_order(results)

    return run


def make_dataset(blocks: list[pa.Table], store: float | None = None) -> Any:
    """Return Arrow tables as a dataset of Ray Data that keeps their order.

    Ray Data would end an execution with an error after 30 minutes without progress,
    also if it waits for a node, or if nobody takes its results. This is switched off
    here, and a busy execution starts no further nodes. Progress bars are switched off,
    and in this process two loggers of Ray Data lose their messages below a warning or
    an error. Nothing is executed yet.

    Args:
        blocks: The tables, which become the blocks of the dataset.
        store: The largest number of bytes of the object store that an execution may
            use; None for Ray's default.
    """
    import ray

    # from_arrow would start a task that counts the rows of each block.
    dataset, has = ray.data.from_blocks(blocks), ray.cluster_resources()
    options = dataset.context.execution_options
    options.preserve_order = True
    options.resource_limits = ray.data.ExecutionResources.for_limits(
        cpu=has.get("CPU", 0.0), gpu=has.get("GPU", 0.0), object_store_memory=store
    )
    dataset.context.execution_no_progress_timeout_s = -1
    dataset.context.enable_progress_bars = False
    for name, level in QUIET.items():
        logger = logging.getLogger(name)
        logger.setLevel(max(logger.level, level))
    return dataset


def in_order(dataset: Any, num_rows: int | None = None) -> Iterator[pa.Table]:
    """Execute a dataset of Ray Data, and yield its rows in order, as Arrow tables.

    Args:
        dataset: The dataset, from :func:`make_dataset`.
        num_rows: The number of rows of each table, except for the last one; None for
            the resulting blocks as they are.

    Yields:
        The tables of results.

    Raises:
        UnoError: A task raised it. It is raised here without Ray's traceback.
        Exception: Another error of Ray Data or of a task, as Ray raises it.
    """
    try:
        yield from dataset.iter_batches(
            batch_size=num_rows, batch_format="pyarrow", prefetch_batches=2
        )
    except Exception as error:
        raise own_error(error) or error from None


def own_error(error: BaseException | None) -> UnoError | None:
    """Return the UnoError that made a task of Ray fail, or None if there is none.

    Args:
        error: The error that Ray raised. Its chain of causes is followed by the
            attributes ``cause`` and ``__cause__``, until a ``cause`` is a UnoError. The
            error itself does not count. None if there is no error.

    Returns:
        A new error of the same class with only the first line of its text, because Ray
        adds lines and a traceback; None if no cause is a UnoError.
    """
    while error is not None:
        cause = getattr(error, "cause", None)
        if isinstance(cause, UnoError):
            return type(cause)(str(cause).partition("\n")[0])
        error = cause if isinstance(cause, BaseException) else error.__cause__
    return None
