"""Ray Data: tasks on any node read and decode images, once for a resident set, in every
epoch for a streamed one, where they crop the views as well.

Images of a resident set travel to a task as they are: paths, encoded bytes, pixels, or
numbers of rows in Parquet files. What comes back is 8-bit pixels, in order. For
streaming every rank runs executions of its own, so that any step can be the first: one
for each epoch, or for several short ones. Numbers of rows travel, 24 bytes each; what
reads the images, or the images that are in memory, is in the object store, once for
each node. What is not read yet is bounded by Ray Data's allocator. An execution's
processes are as many as its rank's CPUs and live as long as it does, so that no task
waits for a CPU, which an autoscaler would take for a need of nodes. The first one takes
none: executions that wait for each other's CPUs continue.
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
from pipelines.ray_private import ELSEWHERE, NODE, dataset_of, first_without_cpu
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

# of a resident set; below it, to start processes takes longer than to decode
FEW_ROWS = 2_000
ROWS_PER_DECODE = 256  # decoded at once by a task; bounds its memory
# of places, or of images that are in memory, which travel to their tasks
EXECUTION_BYTES = 128 * 2**20
# from which on whole epochs are enough for an execution: its processes are new ones
EXECUTION_BLOCKS = 1_000
STORE_SHARE = 0.4  # of the object store, for the executions of all workers
# that a task crops: it costs 11 ms of CPU time, a block of its results much less
TASK_CHUNKS = 4

# of a worker's CPUs that its own node must have for its tasks to stay there
NEAR_SHARE = 0.9

Run = Callable[[list[pa.Table]], Iterator[pa.Table]]
"""One execution: blocks, which are stored at once, to blocks, in order."""


def shared(
    ray: Any,
    config: Config,
    task: Task,
    reasons: list[str | None] | None,
    features: Tensor | NeighborViews | None = None,
    images: list[Any] | None = None,
) -> dict[str, Any]:
    """What all workers read of a task, in the object store: what training may know, and
    the truth apart; ``features`` (N, 1 + V, D) where they stand for the images, or
    ``images``, the blocks of
    :func:`decode_task`.
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
    """On a worker: the training set, and what reads the evaluation sets when
    training is over.
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

    # an error is raised here, in one line
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
    """References to blocks with a row per image of ``task``: ``row``, ``pixels`` (3 *
    side * side bytes, zeros where ``reason`` says why there are none); and the reasons
    in row order. No label is in here. Few images are decoded by this process.
    """
    # imported here: tasks that decode have no use for it
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
    dataset = dataset_of(blocks).map_batches(decode, **batches).materialize()
    columns = dataset.select_columns(["row", "reason"])
    facts = pa.concat_tables(
        columns.iter_batches(batch_size=None, batch_format="pyarrow")
    )
    return dataset.to_arrow_refs(), facts.sort_by("row")["reason"].to_pylist()


def pixels_of(tables: Iterable[pa.Table], side: int) -> RowBlocks:
    """All images (N,3,side,side) of the blocks of :func:`decode_task`, in row order,
    where they are: in the object store, which every process of a node reads without a
    copy.
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
    """``array`` without a copy. Ray's arrays are read-only, and so are ours."""
    with warnings.catch_warnings(action="ignore"):
        return torch.from_numpy(array)


def image_block(images: Images, rows: np.ndarray) -> pa.Table:
    """The ``rows`` int64 (n,) of ``images`` with their images as they travel."""
    return pa.table({"row": pa.array(rows), **to_columns(images, rows)})


def decode_block(
    block: pa.Table,
    side: int,
    images: Images | None,
    interpolation: Interpolation = "bilinear",
) -> pa.Table:
    """The rows of an :func:`image_block` with ``pixels`` and ``reason``; ``images``
    reads their numbers.
    """
    pixels, reasons = decode_many(from_columns(block, images), side, 1, interpolation)
    return _pixel_table(pixels.flatten(1).numpy(), reasons).append_column(
        "row", block["row"]
    )


def _pixel_table(pixels: np.ndarray, reasons: list[str | None]) -> pa.Table:
    return pa.table(
        {"pixels": pixel_column(pixels), "reason": pa.array(reasons, pa.string())}
    )


def pixel_column(pixels: np.ndarray) -> pa.Array:
    """Rows of bytes (n, row_bytes) without a copy, as Arrow's fixed-size binary."""
    kind = pa.binary(pixels.shape[1])
    return pa.FixedSizeBinaryArray.from_buffers(
        kind, len(pixels), [None, pa.py_buffer(pixels)]
    )


def bytes_of(chunks: pa.ChunkedArray, row_bytes: int) -> np.ndarray:
    """A column ``pixels`` as uint8 (n, row_bytes), read-only, without a copy of what
    is in one piece.
    """
    column = chunks.chunk(0) if chunks.num_chunks == 1 else chunks.combine_chunks()
    values = np.frombuffer(column.buffers()[1], np.uint8)[column.offset * row_bytes :]
    return values[: len(column) * row_bytes].reshape(-1, row_bytes)


def execution_limits(
    cluster: dict[str, float], workers: int, worker_cpus: float
) -> tuple[float, float]:
    """(CPUs, bytes of the object store) for the execution of one worker."""
    cpus = (cluster.get("CPU", 1) - workers * worker_cpus) / workers
    return max(0.1, cpus), STORE_SHARE * cluster.get(
        "object_store_memory", 2**30
    ) / workers


def pool_size(cpus: float) -> int:
    """Processes of an execution: one for each whole CPU, also where Ray's rounding
    left a little less.
    """
    return max(1, int(cpus + 1 - TASK_CPUS))


def own_node(ray: Any) -> str:
    """The name of the node that this process runs on."""
    return str(ray.get_runtime_context().get_node_id())


def preferred_node(
    nodes: list[dict[str, Any]],
    own: str,
    cpus: float,
    neighbors: int,
    worker_cpus: float,
) -> tuple[str | None, float]:
    """The node ``own``, and how many of the ``cpus`` of a worker's share of all
    ``nodes`` are there, if its processes are to stay with it, from where their results
    need not travel: its CPUs, shared by that many workers, are about as many. Else
    None: where a node has too few CPUs others do more.
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
    """As :func:`uno.data.stream.crop_local`, in Ray tasks within
    :func:`execution_limits`,
    :func:`preferred_node` or anywhere; ``source`` is the reference to the job's images.
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
    """Rows to crop as they travel."""
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
    """As :func:`uno.data.decode.decoded`, of the images that ``source`` refers to,
    in Ray tasks.
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
    torch.set_num_threads(1)
    steps, positions, rows = (
        block[name].to_numpy() for name in ("step", "position", "row")
    )
    found = images.read_images(rows)
    for start in range(0, len(block), chunk_rows):
        own = slice(start, start + chunk_rows)
        yield _pixel_table(*cropper.crop(steps[own], positions[own], found[own]))


def in_executions(run: Run, groups: Iterator[list[pa.Table]]) -> Iterator[pa.Table]:
    """``run`` over the blocks of each group, one after the other; what the next one
    needs is stored while results are read. Whoever waits too long for a block learns
    what Ray Data lacks.
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
    """Blocks for an execution: those of one epoch after the other, until they are
    enough.
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
    """Blocks for an execution: of so many rows, or of 128 MiB."""
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
    """A process of an execution, which calls ``function`` with blocks and the images
    at ``source``.
    """

    def __init__(self, function: Callable[..., Any], source: Any) -> None:
        import ray

        self._function = partial(function, images=ray.get(source))

    def __call__(self, block: pa.Table) -> Any:
        """What comes of a block, or an iterator of it."""
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
    """Blocks through ``function`` in processes on ``node``, or where Ray wants them,
    which results of ``chunk_bytes`` leave at once.
    """
    from ray.data import ActorPoolStrategy, ExecutionResources

    where = (
        {}
        if node is None
        else {"label_selector": {NODE: node}, "fallback_strategy": ELSEWHERE}
    )

    def run(blocks: list[pa.Table]) -> Iterator[pa.Table]:
        dataset = dataset_of(blocks)
        options = dataset.context.execution_options
        options.preserve_order = True
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


def in_order(dataset: Any) -> Iterator[pa.Table]:
    """Its blocks, in order; an error of ours in a task is raised as it was."""
    try:
        yield from dataset.iter_batches(
            batch_size=None, batch_format="pyarrow", prefetch_batches=2
        )
    except Exception as error:
        raise own_error(error) or error from None


def own_error(error: BaseException | None) -> UnoError | None:
    """The error of ours that failed a Ray task: Ray's own text is a traceback, and
    it adds lines to ours.
    """
    while error is not None:
        cause = getattr(error, "cause", None)
        if isinstance(cause, UnoError):
            return type(cause)(str(cause).partition("\n")[0])
        error = cause if isinstance(cause, BaseException) else error.__cause__
    return None
