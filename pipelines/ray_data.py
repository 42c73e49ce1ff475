"""Read and decode images with Ray Data, by tasks on any node.

A resident set is decoded once. Its images are sent to the tasks as they are: as paths,
encoded bytes, pixels, or numbers of rows in Parquet files. The tasks return 8-bit
pixels, in order.

A streamed set is decoded in every epoch, and the views are cropped in the same tasks.
Every rank runs its own executions of Ray Data, so that training can start at any step.
An execution is for one epoch, or for several short ones. Only row numbers are sent to
it, 24 bytes each. What reads the images, or images in memory, is in the object store,
once for each node. The allocator of Ray Data limits how much is read ahead.

An execution has as many processes as its rank's share of CPUs, and they live as long as
it does. No task then waits for a CPU, which an autoscaler would take for a need of
nodes. The first process takes no CPU, so that executions that wait for each other's
CPUs still make progress.
"""

import logging
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from pipelines.nodes import StallWarner
from pipelines.ray_env import TASK_CPUS
from pipelines.ray_private import ELSEWHERE, NODE, first_without_cpu
from uno.config import Config
from uno.crops import Cropper
from uno.data import stream
from uno.data.decode import BadRows, DecodedBatch, Interpolation, decode_many, ok_mask
from uno.data.files import Storage
from uno.data.images import Images, from_columns, to_columns
from uno.data.mapped import NeighborViews
from uno.data.resident import EvalSet
from uno.data.resident import train_set as resident_set
from uno.data.row_blocks import RowBlocks
from uno.data.splits import Task, train_rows, truth_rows
from uno.data.stream import CHUNK_BYTES, Chunk, CropJob, EvalData, References, TrainData
from uno.errors import UnoError

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

# A worker's tasks stay on its node if that has this share of the CPUs for them.
NEAR_SHARE = 0.9

Run = Callable[[list[pa.Table]], Iterator[pa.Table]]
"""Runs an execution: takes blocks, and yields the resulting blocks in order.

The blocks are put into the object store when it is called.
"""


def shared(
    ray: Any,
    config: Config,
    task: Task,
    reasons: list[str | None] | None,
    features: Tensor | NeighborViews | None = None,
    images: list[Any] | None = None,
) -> dict[str, Any]:
    """Put what all workers read of a task into the object store.

    What training may know and the true labels are stored separately.

    Args:
        ray: The connected module.
        config: The configuration of the run.
        task: The rows of the run.
        reasons: For each row the reason why it cannot be read, or None. None as a whole
            if nothing was read yet.
        features: Features (N, 1 + V, D) that replace the images, or None.
        images: The references to blocks of :func:`decode_task`, or None.

    Returns:
        Entries of the dict that :func:`worker_sets` takes: ``num_true``, the number of
        true classes; references at ``rows`` (the facts for training) and ``truth`` (the
        true labels); and at ``source``, ``features`` or ``images`` if the run has them.
    """
    ok = None if reasons is None else ok_mask(reasons)
    streams = config.data.loading == "streaming"
    rows = stream.stream_facts(task) if streams else train_rows(task, ok)
    found: dict[str, Any] = {"num_true": len(task.known) + len(task.novel)}
    if streams:
        found["source"] = ray.put(rows.pop("images"))
    if features is not None:
        parts = (features,) if isinstance(features, Tensor) else features.parts
        found["features"] = ray.put([part.numpy() for part in parts])
    found |= {} if images is None else {"images": images}
    return {"rows": ray.put(rows), "truth": ray.put(truth_rows(task, ok)), **found}


def worker_sets(
    config: Config, loop: Mapping[str, Any], storage: Storage
) -> tuple[TrainData, Callable[[], Mapping[str, EvalData]]]:
    """Return the training set and the evaluation sets of a run, on a worker.

    Args:
        config: The configuration of the run.
        loop: The result of :func:`shared`, with ``worker_cpus``, the CPUs of a worker.
        storage: The directory of the run, in which unreadable images are listed.

    Returns:
        The training set, and a function that reads the evaluation sets by split. It is
        called after training.
    """
    import ray
    import ray.train

    def truth(
        make: Callable[[Any, Any, Any], EvalData],
    ) -> Callable[[], Mapping[str, EvalData]]:
        return lambda: {
            split: make(*each) for split, each in ray.get(loop["truth"]).items()
        }

    side, rows = config.data.stored_size, dict(ray.get(loop["rows"]))
    if config.data.loading != "streaming":
        if "features" in loop:
            parts = [shared_tensor(part) for part in ray.get(loop["features"])]
            features = parts[0] if len(parts) == 1 else NeighborViews(*parts)
            images, seen = RowBlocks([features]), RowBlocks([features[:, 0]])
        else:
            images = seen = pixels_of(ray.get(loop["images"]), side)
        return resident_set(images, **rows), truth(
            lambda own, true, free: EvalSet(seen.select_rows(own), true, own, free)
        )

    # The error is raised here, so Ray need not log it.
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    cpus, store = execution_limits(
        ray.cluster_resources(), config.compute.num_workers, loop["worker_cpus"]
    )
    neighbors = ray.train.get_context().get_local_world_size()
    node, cpus = preferred_node(
        ray.nodes(), own_node(ray), cpus, neighbors, loop["worker_cpus"]
    )
    limits = cpus, store, node
    source = ray.get(loop["source"])
    bad = BadRows(rows.pop("ids"), source, config.data.max_bad_fraction, storage)
    decode = decode_on_ray(
        ray, loop["source"], side, *limits, config.data.interpolation
    )
    crop = crop_on_ray(ray, loop["source"], *limits)
    train = stream.StreamSet(source, **rows, bad=bad, crop=crop, decode=decode)
    how = source, side, decode, bad
    return train, truth(
        lambda own, true, free: stream.StreamedEvalSet(true, own, free, *how)
    )


def decode_task(
    ray: Any, task: Task, side: int, how: Interpolation = "bilinear"
) -> tuple[list[Any], list[str | None]]:
    """Decode the images of a task.

    A few images are decoded by this process, more by Ray. No label is sent.

    Args:
        ray: The connected module.
        task: The rows of the run.
        side: The side of the stored square in pixels.
        how: How images are resized.

    Returns:
        References to blocks with one row for each image, and the reasons in the order
        of the rows. The columns of a block are ``row``, ``pixels`` (3 * side * side
        bytes) and ``reason``. The reason is None, or it says why the image cannot be
        read; the pixels are then zeros.
    """
    # Imported here, because tasks that decode do not need it.
    from uno.session.resources import ROWS_PER_BLOCK

    images, rows = task.rows.images, np.arange(len(task.rows))
    if len(rows) < FEW_ROWS:
        pixels, reasons = decode_many(images, side, interpolation=how)
        table = _pixel_table(pixels.flatten(1).numpy(), reasons).append_column(
            "row", pa.array(rows)
        )
        return [ray.put(table)], reasons
    blocks = [
        image_block(images, rows[i : i + ROWS_PER_BLOCK])
        for i in rows[::ROWS_PER_BLOCK]
    ]
    decode = partial(decode_block, side=side, images=images.reader(), interpolation=how)
    batches = {
        "batch_format": "pyarrow",
        "batch_size": ROWS_PER_DECODE,
        "zero_copy_batch": True,
    }
    dataset = make_dataset(blocks).map_batches(decode, **batches).materialize()
    columns = dataset.select_columns(["row", "reason"])
    facts = pa.concat_tables(
        columns.iter_batches(batch_size=None, batch_format="pyarrow")
    )
    return dataset.to_arrow_refs(), facts.sort_by("row")["reason"].to_pylist()


def pixels_of(tables: Iterable[pa.Table], side: int) -> RowBlocks:
    """Return the images of the blocks of :func:`decode_task` in the order of rows.

    They stay in the object store, which every process of a node reads without a copy.

    Args:
        tables: The blocks.
        side: The side of the images in pixels.

    Returns:
        uint8 (N,3,side,side).
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
    """Return a read-only array as a tensor, without a copy.

    The tensor must not be written, because Ray shares the array between processes.
    """
    with warnings.catch_warnings(action="ignore"):
        return torch.from_numpy(array)


def image_block(images: Images, rows: np.ndarray) -> pa.Table:
    """Return a table of row numbers and images as they are sent to a task.

    Args:
        images: The images of all rows.
        rows: int64 (n,), the rows of the table.
    """
    return pa.table({"row": pa.array(rows), **to_columns(images, rows)})


def decode_block(
    block: pa.Table,
    side: int,
    images: Images | None,
    interpolation: Interpolation = "bilinear",
) -> pa.Table:
    """Decode the images of a block, in a task.

    Args:
        block: A table of :func:`image_block`.
        side: The side of the stored square in pixels.
        images: Reads images that are given as row numbers, or None.
        interpolation: How images are resized.

    Returns:
        A table with the columns ``pixels``, ``reason`` and ``row``.
    """
    pixels, reasons = decode_many(from_columns(block, images), side, 1, interpolation)
    return _pixel_table(pixels.flatten(1).numpy(), reasons).append_column(
        "row", block["row"]
    )


def _pixel_table(pixels: np.ndarray, reasons: list[str | None]) -> pa.Table:
    """Return a table of pixels (n, row_bytes) and of the reasons why rows have none."""
    return pa.table(
        {"pixels": pixel_column(pixels), "reason": pa.array(reasons, pa.string())}
    )


def pixel_column(pixels: np.ndarray) -> pa.Array:
    """Return bytes (n, row_bytes) as fixed-size binary of Arrow, without a copy."""
    kind = pa.binary(pixels.shape[1])
    return pa.FixedSizeBinaryArray.from_buffers(
        kind, len(pixels), [None, pa.py_buffer(pixels)]
    )


def bytes_of(chunks: pa.ChunkedArray, row_bytes: int) -> np.ndarray:
    """Return a column of fixed-size binary as a read-only array, uint8 (n, row_bytes).

    It is a copy only if the column has several chunks.
    """
    column = chunks.chunk(0) if chunks.num_chunks == 1 else chunks.combine_chunks()
    values = np.frombuffer(column.buffers()[1], np.uint8)[column.offset * row_bytes :]
    return values[: len(column) * row_bytes].reshape(-1, row_bytes)


def execution_limits(
    cluster: dict[str, float], workers: int, worker_cpus: float
) -> tuple[float, float]:
    """Return the CPUs and the bytes of the object store for one worker's executions.

    Args:
        cluster: The resources of the cluster, as Ray counts them.
        workers: The number of workers.
        worker_cpus: The CPUs of a worker.
    """
    cpus = (cluster.get("CPU", 1) - workers * worker_cpus) / workers
    return max(0.1, cpus), STORE_SHARE * cluster.get(
        "object_store_memory", 2**30
    ) / workers


def pool_size(cpus: float) -> int:
    """Return the number of processes of an execution: one for each whole CPU.

    A CPU counts as whole even if Ray's rounding left a little less, and there is always
    at least one process.
    """
    return max(1, int(cpus + 1 - TASK_CPUS))


def own_node(ray: Any) -> str:
    """Return the id of the node that this process runs on."""
    return str(ray.get_runtime_context().get_node_id())


def preferred_node(
    nodes: list[dict[str, Any]],
    own: str,
    cpus: float,
    neighbors: int,
    worker_cpus: float,
) -> tuple[str | None, float]:
    """Decide whether the processes of a worker's executions stay on its own node.

    On the same node their results need not be sent over the network. They stay if the
    node has about as many CPUs for them as the worker's share of the cluster. On a node
    with fewer CPUs they would be slower than on the whole cluster.

    Args:
        nodes: The nodes of ``ray.nodes()``.
        own: The id of the worker's node.
        cpus: The worker's share of the CPUs of all nodes.
        neighbors: The number of workers on this node.
        worker_cpus: The CPUs of a worker.

    Returns:
        The node's id and the CPUs to use there, or None and ``cpus``.
    """
    total = next(
        (
            n["Resources"].get("CPU", 0.0)
            for n in nodes
            if n["NodeID"] == own and n["Alive"]
        ),
        0.0,
    )
    here = total / neighbors - worker_cpus
    return (own, min(cpus, here)) if here >= NEAR_SHARE * cpus else (None, cpus)


def crop_on_ray(
    ray: Any, source: Any, cpus: float, store: float, node: str | None = None
) -> Callable[[CropJob], Generator[Chunk, None, None]]:
    """Return a function like :func:`uno.data.stream.crop_local` that uses tasks of Ray.

    Args:
        ray: The connected module.
        source: The reference to the images of the job.
        cpus: The CPUs of an execution, see :func:`execution_limits`.
        store: The bytes of the object store for an execution.
        node: The node to prefer, see :func:`preferred_node`, or None.
    """

    def chunks(job: CropJob) -> Generator[Chunk, None, None]:
        crop = partial(_crop, cropper=job.cropper, chunk_rows=job.chunk_rows)
        run = _runner(
            ray, crop, source, cpus, store, job.chunk_rows * job.row_bytes, node
        )
        num_rows = job.fetch_rows or TASK_CHUNKS * job.chunk_rows
        for table in in_executions(
            run, whole_epochs(map(places, epoch) for epoch in job.epochs(num_rows))
        ):
            yield bytes_of(table["pixels"], job.row_bytes), table["reason"].to_pylist()

    return chunks


def places(of: References) -> pa.Table:
    """Return references to rows as the table that is sent to a task.

    Its columns are ``step``, ``position`` in the batch, and ``row``.
    """
    return pa.table(dict(zip(("step", "position", "row"), of, strict=True)))


def decode_on_ray(
    ray: Any,
    source: Any,
    side: int,
    cpus: float,
    store: float,
    node: str | None = None,
    how: Interpolation = "bilinear",
) -> Callable[[Iterable[np.ndarray]], Iterator[DecodedBatch]]:
    """Return a function like :func:`uno.data.decode.decoded` that uses tasks of Ray.

    Args:
        ray: The connected module.
        source: The reference to the images.
        side: The side of the stored square in pixels.
        cpus: The CPUs of an execution, see :func:`execution_limits`.
        store: The bytes of the object store for an execution.
        node: The node to prefer, see :func:`preferred_node`, or None.
        how: How images are resized.
    """
    decode = partial(decode_block, side=side, interpolation=how)
    run = _runner(ray, decode, source, cpus, store, CHUNK_BYTES, node)

    def decoded(batches: Iterable[np.ndarray]) -> Iterator[DecodedBatch]:
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
    """Crop the views of the rows of a block, in a task.

    Args:
        block: A table of :func:`places`.
        images: The images of all rows.
        cropper: What to crop.
        chunk_rows: The number of rows of each result.

    Yields:
        Tables with the columns ``pixels`` and ``reason``.
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
    """Run one execution after the other, and yield all results in order.

    The inputs of the next execution are stored while results of this one are read. A
    long wait for a block logs a warning, see :class:`~pipelines.nodes.StallWarner`.

    Args:
        run: Runs one execution.
        groups: The blocks of each execution.
    """

    def prepare() -> tuple[int, Iterator[pa.Table]] | None:
        group = next(groups, None)
        return None if group is None else (sum(map(len, group)), run(group))

    with (
        closing(StallWarner()) as waits,
        ThreadPoolExecutor(1, thread_name_prefix="uno-execution") as pool,
    ):
        following = pool.submit(prepare)
        while True:
            with waits:
                execution = following.result()
            if execution is None:
                return
            following, (num_rows, results), done = pool.submit(prepare), execution, 0
            while True:
                with waits:
                    table = next(results, None)
                if table is None:
                    break
                done += len(table)
                yield table
            assert done == num_rows, (done, num_rows)  # no row is lost or doubled


def whole_epochs(epochs: Iterable[Iterable[pa.Table]]) -> Iterator[list[pa.Table]]:
    """Join the blocks of epochs to groups, one for each execution.

    A group consists of whole epochs. It ends as soon as it has at least
    ``EXECUTION_BLOCKS`` blocks. The last group may have fewer.

    Args:
        epochs: The blocks of each epoch.
    """
    group: list[pa.Table] = []
    for epoch in epochs:
        group += epoch
        if len(group) >= EXECUTION_BLOCKS:
            yield group
            group = []
    if group:
        yield group


def grouped(
    blocks: Iterable[pa.Table], max_rows: int | None = None
) -> Iterator[list[pa.Table]]:
    """Join blocks to groups, one for each execution.

    A group ends as soon as it has 128 MiB or ``max_rows`` rows.

    Args:
        blocks: The blocks.
        max_rows: The limit of rows, or None.
    """
    group: list[pa.Table] = []
    rows = size = 0
    for block in blocks:
        group.append(block)
        rows, size = rows + len(block), size + block.nbytes
        if size >= EXECUTION_BYTES or rows >= (max_rows or rows + 1):
            yield group
            group, rows, size = [], 0, 0
    if group:
        yield group


class Apply:
    """An actor of an execution, which calls a function with each block.

    Args:
        function: Takes a block, and the images as ``images``.
        source: The reference to the images.
    """

    def __init__(self, function: Callable[..., Any], source: Any) -> None:
        import ray

        self._function = partial(function, images=ray.get(source))

    def __call__(self, block: pa.Table) -> Any:
        """Return the function's result for a block: a table, or several."""
        return self._function(block)


def _runner(
    ray: Any,
    function: Callable[..., Any],
    source: Any,
    cpus: float,
    store: float,
    chunk_bytes: int,
    node: str | None,
) -> Run:
    """Return a function that runs an execution: it sends blocks through a function.

    Args:
        ray: The connected module.
        function: The function, see :class:`Apply`.
        source: The reference to the images.
        cpus: The CPUs of the execution.
        store: The bytes of the object store for the execution.
        chunk_bytes: The bytes of a result. Ray Data passes a result of this size on at
            once.
        node: The node to prefer, or None.
    """
    from ray.data import ActorPoolStrategy, ExecutionResources

    where = (
        {}
        if node is None
        else {"label_selector": {NODE: node}, "fallback_strategy": ELSEWHERE}
    )

    def run(blocks: list[pa.Table]) -> Iterator[pa.Table]:
        dataset = make_dataset(blocks)
        options = dataset.context.execution_options
        options.resource_limits = ExecutionResources(
            cpu=cpus, object_store_memory=store
        )
        # Ray joins what is smaller and splits what is 1.5 times as large; either costs
        # copies.
        dataset.context.target_max_block_size = chunk_bytes - 1
        # A fixed pool is started whatever Ray's coordinator has left: it gives a rank
        # of many no CPU at all.
        pool = ActorPoolStrategy(size=min(pool_size(cpus), len(blocks)))
        # Ranks wait for each other and hold their CPUs for an epoch: one without any
        # would wait for ever.
        first = first_without_cpu(own_node(ray))
        results = dataset.map_batches(
            Apply,
            fn_constructor_args=(function, source),
            compute=pool,
            num_cpus=TASK_CPUS * min(1.0, cpus),
            batch_format="pyarrow",
            batch_size=None,
            **where,
            **first,
        )
        return in_order(results)

    return run


def make_dataset(blocks: list[pa.Table]) -> Any:
    """Return Arrow tables as a dataset of Ray Data that keeps their order.

    Ray Data would end an execution with an error after 30 minutes without progress,
    also if it waits for a node, or if nobody takes its results. It does not here.

    Args:
        blocks: The blocks of the dataset.
    """
    import ray

    # from_arrow would start a task that counts the rows of each block.
    dataset = ray.data.from_blocks(blocks)
    dataset.context.execution_options.preserve_order = True
    dataset.context.execution_no_progress_timeout_s = -1
    return dataset


def in_order(dataset: Any, num_rows: int | None = None) -> Iterator[pa.Table]:
    """Yield the rows of a dataset in order.

    Args:
        dataset: The dataset of Ray Data.
        num_rows: The number of rows of each table; None for the blocks as they are.

    Raises:
        UnoError: A task raised it. It is raised here without Ray's traceback.
    """
    try:
        yield from dataset.iter_batches(
            batch_size=num_rows, batch_format="pyarrow", prefetch_batches=2
        )
    except Exception as error:
        raise own_error(error) or error from None


def own_error(error: BaseException | None) -> UnoError | None:
    """Return the error for the user that made a task of Ray fail, or None.

    Only its first line is kept, because Ray adds lines and a traceback.
    """
    while error is not None:
        cause = getattr(error, "cause", None)
        if isinstance(cause, UnoError):
            return type(cause)(str(cause).partition("\n")[0])
        error = cause if isinstance(cause, BaseException) else error.__cause__
    return None
