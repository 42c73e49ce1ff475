"""Running a trained model over a source, here or on Ray: what ``uno predict`` and the end of a run share.

On Ray by :mod:`pipelines.partitions`: the same batches and files as with the threads of this process, so the
same results.
"""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from pipelines import ray_env
from pipelines.console import Progress, reading, say, stopped_at_once
from pipelines.partitions import through_model
from pipelines.ray_data import bytes_of, pixel_column
from uno.config import Config, override
from uno.data.files import Storage
from uno.data.images import InMemory, from_columns, to_columns
from uno.data.inputs import Inputs, RowInputs, cut, evenly, open_inputs
from uno.data.rows import Part
from uno.data.sources import read_rows
from uno.data.splits import Task, make_task
from uno.errors import ConfigError, UnoError
from uno.results import infer
from uno.results.folders import sort_images, write_csv
from uno.results.infer import Classifier, build_classifier, decoder, with_alignment
from uno.results.predictions import (
    PredictionWriter,
    Summary,
    Take,
    classify,
    decode_chunk,
    predict_rows,
    read_part,
)
from uno.runs.hardware import local_device, num_threads

RAY_PAYS_ROWS = 20_000  # at the end of a run; below it, starting actors takes longer than the work
INTERVAL_S = 5.0  # between two lines of progress


def predict_job(
    target: str, given: Mapping[str, Any], embedding: bool, csv: bool = False, folders: bool = False
) -> int:
    """``uno predict``: classify a source with the model of a run; ``given`` are dotted keys. Returns 0."""
    storage = Storage(target)
    model = infer.load_classifier(storage)
    compute, data = ({k: given[k] for k in given if k.startswith(s)} for s in ("compute.", "data."))
    config = override(model.config, {"compute.workers": 0, "compute.device": "auto", **compute})
    num_threads(config)
    if config.compute.workers == 0:
        local_device(config)
    if data and "output" not in given:
        raise ConfigError("--data and --limit need --output DIR, the place for predictions.parquet")
    limit = override(Config(), {"data.limit": data.pop("data.limit", None)}).data.limit
    with reading() as total:
        inputs: Inputs = (
            RowInputs(own_task(config).rows) if not data else open_inputs(override(Config(), data).data)
        )
        inputs = inputs if limit is None else evenly(inputs, limit)
        total(len(inputs))
    try:
        if model.alignment is None:
            task = own_task(config)
            decode = decoder(model, task.rows, config.compute.threads)
            model = with_alignment(model, storage, decode, unlabeled_rows(task))
    except UnoError as error:
        say(f"warning: head_agreement is left empty: heads cannot be aligned: {error}")
    output = Storage(str(given.get("output", storage.uri)))
    writer = PredictionWriter(output, inputs, model, embedding, replace="output" not in given)

    kept = "stopped; finished shards are kept"
    with stopped_at_once(kept):
        summary = _predict(config, model, storage, writer)
    say(f"{summary.rows:,} rows, {summary.ok:,} ok, {summary.bad:,} bad: {summary.path}")
    if csv:
        say(f"as CSV: {write_csv(output)}")
    if folders:
        with stopped_at_once(kept), Progress(seconds=INTERVAL_S) as progress:

            def show(done: int, total: int) -> None:
                progress({"phase": "copy", "step": done, "total_steps": total})

            say(f"sorted: {sort_images(output, inputs, show)}")
    return 0


def predict_run(
    config: Config, storage: Storage, task: Task, model: Classifier | None = None
) -> tuple[Classifier, Summary]:
    """The last step of a run: ``predictions.parquet`` of all its rows, on Ray where there are many to decode;
    those of an earlier model are replaced. Returns the model, its heads aligned.
    """
    is_prepared = task.rows.images.prepared(np.arange(0)) is not None
    if is_prepared or len(task.rows) < RAY_PAYS_ROWS:
        config = override(config, {"compute.workers": 0, "compute.device": local_device(config).type})
    model = infer.load_classifier(storage) if model is None else model
    decode = decoder(model, task.rows, config.compute.threads)
    model = with_alignment(model, storage, decode, unlabeled_rows(task))
    writer = PredictionWriter(storage, RowInputs(task.rows), model, embedding=False, replace=True)
    return model, _predict(config, model, storage, writer)


def own_task(config: Config) -> Task:
    """The rows a run was trained on, or will be."""
    with reading() as total:
        task = make_task(read_rows(config.data), config.data)
        total(len(task.rows))
    return task


def unlabeled_rows(task: Task) -> np.ndarray:
    """Numbers of the training rows whose classes were discovered."""
    return np.flatnonzero(task.is_train & (task.labels < 0))


def _predict(config: Config, model: Classifier, storage: Storage, writer: PredictionWriter) -> Summary:
    """Here or on Ray, as ``config.compute`` says."""
    if writer.complete:
        return writer.finish()
    if writer.num_done:
        say(f"{writer.num_done:,} of {writer.num_rows:,} rows are there already; continuing")
    num_before, start = writer.num_done, time.monotonic()
    with Progress(seconds=INTERVAL_S) as progress:

        def show(done: int, total: int) -> None:
            speed = (done - num_before) / max(time.monotonic() - start, 1e-9)
            progress({"phase": "predict", "step": done, "total_steps": total, "images_per_s": speed})

        if config.compute.workers:
            with ray_env.connect(workers=config.compute.workers) as ray:
                return predict_on_ray(ray, config, infer.read_model_files(storage), writer, show)
        torch.set_num_threads(num_threads(config))
        return predict_rows(model.to(local_device(config)), writer, config.compute.threads, show)


def predict_on_ray(
    ray: Any, config: Config, files: Mapping[str, bytes], writer: PredictionWriter,
    on_progress: Callable[[int, int], None],
) -> Summary:  # fmt: skip
    """Classify what ``writer`` lacks on actors that load the model's ``files``, and join it."""
    how, source = Take.of(build_classifier(files), writer.part_rows), writer.inputs.source
    decode = partial(decode_part, source=None if source is None else ray.put(source), how=how)
    rows = [writer.rows_of(number) for number in writer.missing]
    parts = zip(rows, writer.inputs.parts(map(np.asarray, rows)), strict=True)
    blocks = (part_block(own.start, part) for own, part in parts)
    loaded = ray.put(dict(files)), writer.embedding
    write, sizes = writer.part_writer.write, (writer.part_rows, how.chunk_rows, 3 * how.size**2)
    stored = through_model(ray, config, writer.storage, blocks, decode, Scorer, loaded, write, *sizes)
    for number, _ in stored:
        writer.stored(number)
        on_progress(writer.num_done, writer.num_rows)
    return writer.finish()


def part_block(first: int, part: Part) -> pa.Table:
    """A partition as it travels, its first row being ``first``."""
    rows = {"row": np.arange(first, first + len(part.rows))}
    if part.images is None:
        return pa.table({**rows, "number": part.rows})
    return pa.table({**rows, "id": part.ids, **to_columns(part.images, np.arange(len(part.rows)))})


def decode_part(block: pa.Table, source: Any, how: Take) -> Iterator[pa.Table]:
    """A task: a :func:`part_block` -> its rows with ``pixels``, some at a time; ``source``: of numbers."""
    import ray

    torch.set_num_threads(1)
    source = None if source is None else ray.get(source)
    rows = block["row"].to_numpy()
    if "id" in block.column_names:
        here = source is None
        images = InMemory(from_columns(block, None)) if here else source.take(block["number"].to_numpy())
        part, read = Part(rows, block["id"].combine_chunks(), images), cut
    else:
        part, read = Part(block["number"].to_numpy()), source.read
    for chunk in read_part(read, part, int(rows[0]), how):
        facts, pixels = decode_chunk(chunk, how, 1)
        yield facts.append_column("pixels", pixel_column(pixels.flatten(1).numpy()))


class Scorer:
    """An actor of the pool: loads the model once, then classifies block after block."""

    def __init__(self, device: str, threads: int, files: Any, embedding: bool) -> None:
        import ray

        torch.set_num_threads(threads)
        self._model, self._embedding = build_classifier(ray.get(files), device), embedding

    def __call__(self, block: pa.Table) -> pa.Table:
        """A decoded block -> what the model says of it."""
        size = self._model.size
        with warnings.catch_warnings(action="ignore"):  # Ray's arrays are read-only, and so are ours
            pixels = torch.from_numpy(bytes_of(block["pixels"], 3 * size**2)).view(-1, 3, size, size)
        return pa.concat_tables(classify(self._model, block.drop_columns("pixels"), pixels, self._embedding))
