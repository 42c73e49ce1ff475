"""Streaming through Ray Data: every worker's line of references becomes cut views, in its order.

Each rank runs executions of its own, so that any step can be the first. A block is a piece of the line:
paths, or the numbers of rows in Parquet files, two windows of them, so that few tasks read a row group. A Ray
task reads, decodes and cuts a block (``map_batches``), and 8-bit views come back in order, 16 MB at a time.
The line is fed to Ray in spans: memory does not grow with the epochs, and the next span starts before the
last one ends, so that an epoch has no beginning to wait for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from pipelines.blocks import image_columns, images_of
from uno.config import Config
from uno.crops import Cuts
from uno.data.decode import BadRows, decode_many
from uno.data.files import Storage
from uno.data.ingest import free_host_bytes
from uno.data.rows import Chosen, Files, Images
from uno.data.splits import Task
from uno.data.stream import (
    PART_BYTES,
    Decoded,
    Feed,
    Part,
    Refs,
    StreamedEvalSet,
    StreamSet,
    stream_facts,
    streamed_eval_sets,
)
from uno.data.tables import ParquetImages
from uno.errors import UnoError

SPAN_BYTES = 128 * 2**20  # of images that are in memory and travel with their references
SPAN_PARTS_PER_CPU = 32
MIN_SPAN_PARTS = 4
OPEN_NEXT_AT = 0.5  # of a span
STORE_BYTES = 1_500_000_000
"""Of the object store of a cluster started here, for each worker. Results wander through all of a store
before a page is used again, and a page touched for the first time costs as much as copying it."""
STORE_SHARE = 0.4  # of the object store, for all executions of all workers
TASK_PARTS = 4  # that a task cuts: it costs 11 ms of CPU time, a block of its results much less
TASK_CPUS = 0.9  # Ray rounds what workers reserve, and may leave a little less than one

Run = Callable[[list[pa.Table]], Iterator[pa.Table]]
"""Executes blocks of references, one span."""


def cut_on_ray(ray: Any, workers: int, worker_cpus: float) -> Callable[[Feed], Iterator[Part]]:
    """As :func:`uno.data.stream.cut_here`, in Ray tasks.

    Args:
        ray: the connected module.
        workers: that stream at the same time, each in executions of its own.
        worker_cpus: reserved by each of them.
    """
    cpus, store = limits(ray.cluster_resources(), workers, worker_cpus)

    def parts(feed: Feed) -> Iterator[Part]:
        row_bytes = feed.cuts.row_bytes
        lazy = feed.images if isinstance(feed.images, ParquetImages) else None
        cut = partial(_cut, cuts=feed.cuts, part_rows=feed.part_rows, images=lazy)
        run = _runner(ray, cut, cpus, store, feed.part_rows * row_bytes)
        num_rows = feed.read_rows if lazy else TASK_PARTS * feed.part_rows
        tables = (_references(feed, refs) for refs in feed.refs(num_rows))
        for table in in_spans(run, tables, feed.part_rows * span_parts(cpus, store)):
            yield Part(_bytes_of(table["pixels"], row_bytes), table["reason"].to_pylist())

    return parts


def decode_on_ray(
    ray: Any, images: Images, index: np.ndarray, side: int, workers: int, worker_cpus: float
) -> Callable[[Iterable[np.ndarray]], Iterator[Decoded]]:
    """As :func:`uno.results.infer.decoded` of rows ``index`` of ``images``, in Ray tasks."""
    cpus, store = limits(ray.cluster_resources(), workers, worker_cpus)

    decode = partial(_decode, side=side, images=images if isinstance(images, ParquetImages) else None)
    run = _runner(ray, decode, cpus, store, PART_BYTES)
    span_rows = span_parts(cpus, store) * max(1, PART_BYTES // (3 * side**2))

    def decoded(lots: Iterable[np.ndarray]) -> Iterator[Decoded]:
        tables = (
            pa.table({"task_row": pa.array(rows), **_image_columns(images, index[rows])}) for rows in lots
        )
        for table in in_spans(run, tables, span_rows):
            pixels = torch.from_numpy(_bytes_of(table["pixels"], 3 * side**2).copy())
            yield table["task_row"].to_numpy(), pixels.view(-1, 3, side, side), table["reason"].to_pylist()

    return decoded


def shared(ray: Any, task: Task) -> dict[str, Any]:
    """What all workers read of a task, in the object store: its rows, and apart from them the truth."""
    truth = {"is_train": task.is_train, "eval_labels": task.eval_labels}
    return {"stream": ray.put(stream_facts(task)), "truth": ray.put(truth)}


def train_set(config: Config, loop: dict[str, Any], storage: Storage) -> StreamSet:
    """On a worker: the training rows, cut by Ray tasks."""
    import ray

    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # an error is raised here, in one line
    facts = dict(ray.get(loop["stream"]))
    images = Chosen(facts["images"], facts["index"])
    bad = BadRows(facts.pop("ids"), images, config.data.max_bad_fraction, storage)
    return StreamSet(**facts, bad=bad, cut=cut_on_ray(ray, config.compute.workers, loop["worker_cpus"]))


def eval_sets(config: Config, loop: dict[str, Any], train: StreamSet) -> dict[str, StreamedEvalSet]:
    """On a worker: the rows with a true class, decoded by Ray tasks."""
    import ray

    side, truth = config.data.store_size, ray.get(loop["truth"])
    place = (config.compute.workers, loop["worker_cpus"])
    decode = decode_on_ray(ray, train.images, train.index, side, *place)
    return streamed_eval_sets(truth["is_train"], truth["eval_labels"], side, decode, train.bad)


def store_bytes(workers: int) -> int:
    """The object store that streaming asks for on this machine."""
    return min(workers * STORE_BYTES, int(0.3 * free_host_bytes()))


def limits(cluster: dict[str, float], workers: int, worker_cpus: float) -> tuple[float, float]:
    """(CPUs, bytes of the object store) for an execution of one worker; a span and the next share a store."""
    cpus = (cluster.get("CPU", 1) - workers * worker_cpus) / workers
    return max(1.0, cpus), STORE_SHARE * cluster.get("object_store_memory", 2**30) / workers / 2


def span_parts(cpus: float, store: float) -> int:
    """Parts of a span: enough for every CPU, but all of them fit into the share of the store."""
    return max(MIN_SPAN_PARTS, min(int(SPAN_PARTS_PER_CPU * cpus), int(store / PART_BYTES)))


def in_spans(run: Run, tables: Iterator[pa.Table], span_rows: int) -> Iterator[pa.Table]:
    """``run`` over all tables, span by span; the next one starts half-way through the one before it."""
    spans = _spans(tables, span_rows)
    with ThreadPoolExecutor(1, thread_name_prefix="uno-span") as pool:

        def start() -> tuple[int, Iterator[pa.Table]] | None:
            span = next(spans, None)
            if span is None:
                return None
            results = run(span)
            first = next(results, None)  # which starts the execution
            return sum(map(len, span)), iter(()) if first is None else chain([first], results)

        following: Future[Any] | None = pool.submit(start)
        while following is not None and (started := following.result()) is not None:
            following, done = None, 0
            num_rows, results = started
            for table in results:
                done += len(table)
                if following is None and done >= OPEN_NEXT_AT * num_rows:
                    following = pool.submit(start)
                yield table
            assert done == num_rows, (done, num_rows)  # no row is lost or doubled
            following = following or pool.submit(start)


def _spans(tables: Iterator[pa.Table], span_rows: int) -> Iterator[list[pa.Table]]:
    span: list[pa.Table] = []
    for table in tables:
        span.append(table)
        if sum(map(len, span)) >= span_rows or sum(part.nbytes for part in span) >= SPAN_BYTES:
            yield span
            span = []
    if span:
        yield span


def _runner(ray: Any, function: Callable[..., Any], cpus: float, store: float, part_bytes: int) -> Run:
    """Blocks of references through ``function`` in Ray tasks, which parts of ``part_bytes`` leave at once."""
    from ray.data import ExecutionResources

    def run(tables: list[pa.Table]) -> Iterator[pa.Table]:
        dataset = ray.data.from_arrow(tables)
        options = dataset.context.execution_options
        options.preserve_order = True
        options.resource_limits = ExecutionResources(cpu=cpus, object_store_memory=store)
        # Ray's reservation lets one task of two run on two CPUs. Without it a span bounds what is in memory.
        dataset.context.op_resource_reservation_enabled = False
        # Ray joins what is smaller and splits what is 1.5 times as large; either costs copies.
        dataset.context.target_max_block_size = part_bytes - 1
        return _batches(
            dataset.map_batches(function, batch_format="pyarrow", batch_size=None, num_cpus=TASK_CPUS)
        )

    return run


def _batches(dataset: Any) -> Iterator[pa.Table]:
    try:
        yield from dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=2)
    except Exception as error:
        raise _own_error(error) or error from None


def _own_error(error: BaseException | None) -> UnoError | None:
    """The error of ours that failed a Ray task: Ray's own text is a traceback, and it adds lines to ours."""
    while error is not None:
        cause = getattr(error, "cause", None)
        if isinstance(cause, UnoError):
            return type(cause)(str(cause).partition("\n")[0])
        error = cause if isinstance(cause, BaseException) else error.__cause__
    return None


def _references(feed: Feed, refs: Refs) -> pa.Table:
    places = {"step": pa.array(refs.steps), "position": pa.array(refs.positions)}
    return pa.table(places | _image_columns(feed.images, feed.index[refs.rows]))


def _image_columns(images: Images, rows: np.ndarray) -> dict[str, Any]:
    """How images travel: numbers of Parquet rows, paths, or whatever is in memory."""
    if isinstance(images, ParquetImages):
        return {"row": pa.array(rows)}
    if isinstance(images, Files):
        nothing = {"data": pa.nulls(len(rows), pa.large_binary()), "shape": pa.nulls(len(rows))}
        return {"path": images.column.take(pa.array(rows)), **nothing}
    return image_columns([images[int(row)] for row in rows])


def _cut(block: pa.Table, cuts: Cuts, part_rows: int, images: ParquetImages | None) -> Iterator[pa.Table]:
    torch.set_num_threads(1)
    found = _images(block, images)
    steps, positions = (block[name].to_numpy() for name in ("step", "position"))
    for start in range(0, len(block), part_rows):
        part = slice(start, start + part_rows)
        yield _pixel_table(*cuts.cut(steps[part], positions[part], found[part]))


def _decode(block: pa.Table, side: int, images: ParquetImages | None) -> pa.Table:
    found = _images(block, images)
    pixels, reasons = decode_many(found, side, threads=1)
    table = _pixel_table(pixels.flatten(1).numpy(), reasons)
    return table.append_column("task_row", block["task_row"])


def _images(block: pa.Table, images: ParquetImages | None) -> list[Any]:
    return images_of(block) if images is None else images.fetch(block["row"].to_numpy())


def _pixel_table(pixels: np.ndarray, reasons: list[str | None]) -> pa.Table:
    """Rows of bytes without a copy, as Arrow's fixed-size binary."""
    kind = pa.binary(pixels.shape[1])
    column = pa.FixedSizeBinaryArray.from_buffers(kind, len(pixels), [None, pa.py_buffer(pixels)])
    return pa.table({"pixels": column, "reason": pa.array(reasons, pa.string())})


def _bytes_of(chunks: pa.ChunkedArray, row_bytes: int) -> np.ndarray:
    """uint8 (n, row_bytes), read-only, without a copy of what is in one piece."""
    column = chunks.chunk(0) if chunks.num_chunks == 1 else chunks.combine_chunks()
    values = np.frombuffer(column.buffers()[1], np.uint8)[column.offset * row_bytes :]
    return values[: len(column) * row_bytes].reshape(-1, row_bytes)
