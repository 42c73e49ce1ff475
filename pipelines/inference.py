"""Running a trained model over a source, here or on Ray: what ``uno predict`` and the end of a run share.

On Ray: blocks of paths (or of encoded bytes) -> decoding tasks on any node -> an actor pool that holds the
model -> this process, which writes the shards. The same batches as without Ray, so the same results.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from pipelines import ray_env
from pipelines.console import Progress, reading, say, stopped_at_once
from pipelines.ray_data import bytes_of, decode_block, image_block, parquet_images
from uno.config import Config, override
from uno.data.decode import readable
from uno.data.files import Storage
from uno.data.rows import Decoded, Featured
from uno.data.sources import read_inputs, read_rows
from uno.data.splits import Task, make_task
from uno.errors import ConfigError, UnoError
from uno.results import infer
from uno.results.folders import sort_images, write_csv
from uno.results.infer import Classifier, build_classifier, decoder, with_alignment
from uno.results.predictions import PredictionWriter, Summary, predict_rows, result_table
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
        rows = read_inputs(override(Config(), data).data) if data else own_task(config).rows
        total(len(rows))
    if limit is not None and limit < len(rows):
        rows = rows.take(np.arange(limit) * len(rows) // limit)
    try:
        if model.alignment is None:
            task = own_task(config)
            decode = decoder(model, task.rows, config.compute.threads)
            model = with_alignment(model, storage, decode, unlabeled_rows(task))
    except UnoError as error:
        say(f"warning: head_agreement is left empty: heads cannot be aligned: {error}")
    output = Storage(str(given.get("output", storage.uri)))
    writer = PredictionWriter(output, rows, model, embedding, replace="output" not in given)

    kept = "stopped; finished shards are kept"
    with stopped_at_once(kept):
        summary = _predict(config, model, storage, decoder(model, rows, config.compute.threads), writer)
    say(f"{summary.rows:,} rows, {summary.ok:,} ok, {summary.bad:,} bad: {summary.path}")
    if csv:
        say(f"as CSV: {write_csv(output)}")
    if folders:
        with stopped_at_once(kept), Progress(seconds=INTERVAL_S) as progress:

            def show(done: int, total: int) -> None:
                progress({"phase": "copy", "step": done, "total_steps": total})

            say(f"sorted: {sort_images(output, rows, show)}")
    return 0


def predict_run(
    config: Config, storage: Storage, task: Task, model: Classifier | None = None
) -> tuple[Classifier, Summary]:
    """The last step of a run: ``predictions.parquet`` of all its rows, on Ray where there are many to decode;
    those of an earlier model are replaced. Returns the model, its heads aligned.
    """
    if isinstance(task.rows.images, Decoded | Featured) or len(task.rows) < RAY_PAYS_ROWS:
        config = override(config, {"compute.workers": 0})
    model = infer.load_classifier(storage) if model is None else model
    decode = decoder(model, task.rows, config.compute.threads)
    model = with_alignment(model, storage, decode, unlabeled_rows(task))
    writer = PredictionWriter(storage, task.rows, model, embedding=False, replace=True)
    return model, _predict(config, model, storage, decode, writer)


def own_task(config: Config) -> Task:
    """The rows a run was trained on, or will be."""
    with reading() as total:
        task = make_task(read_rows(config.data), config.data)
        total(len(task.rows))
    return task


def unlabeled_rows(task: Task) -> np.ndarray:
    """Numbers of the training rows whose classes were discovered."""
    return np.flatnonzero(task.is_train & (task.labels < 0))


def _predict(
    config: Config, model: Classifier, storage: Storage, decode: infer.Decode, writer: PredictionWriter
) -> Summary:
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
        return predict_rows(model.to(local_device(config)), decode, writer, show)


def predict_on_ray(
    ray: Any, config: Config, files: Mapping[str, bytes], writer: PredictionWriter,
    on_progress: Callable[[int, int], None],
) -> Summary:  # fmt: skip
    """Classify what ``writer`` lacks on actors that load the model's ``files``, and finish the table. Images
    are read where they are decoded: their paths must lead there from every node.
    """
    resources = ray_env.worker_resources(config, ray.cluster_resources())
    model = build_classifier(files)
    num_workers, rows = config.compute.workers, writer.rows
    blocks = [image_block(rows.images, index) for index in writer.batches(model.batch_rows)]
    how = model.config.data.interpolation
    decode = partial(decode_block, side=model.size, images=parquet_images(rows.images), interpolation=how)
    device = "cuda" if "GPU" in resources else "cpu"
    threads = num_threads(config, num_workers)
    whole = {"batch_format": "pyarrow", "batch_size": None}
    results = ray.data.from_arrow(blocks).map_batches(decode, **whole).map_batches(
        Scorer, fn_constructor_args=(ray.put(dict(files)), writer.embedding, device, threads),
        compute=ray.data.ActorPoolStrategy(size=num_workers), num_cpus=resources["CPU"],
        num_gpus=resources.get("GPU", 0), **whole,
    )  # fmt: skip
    for batch in results.iter_batches(**whole):
        writer.add(batch)
        on_progress(writer.num_done, len(rows))
    return writer.finish()


class Scorer:
    """An actor of the pool: loads the model once, then classifies block after block."""

    def __init__(self, files: Any, embedding: bool, device: str, threads: int) -> None:
        import ray

        torch.set_num_threads(threads)
        self._model, self._embedding = build_classifier(ray.get(files), device), embedding

    def __call__(self, block: pa.Table) -> pa.Table:
        """A decoded block -> its :func:`uno.results.predictions.result_table`."""
        size, reasons = self._model.size, block["reason"].to_pylist()
        pixels = bytes_of(block["pixels"], 3 * size**2)[readable(reasons)]
        images = torch.from_numpy(pixels).view(-1, 3, size, size)
        scores = self._model.score(images) if len(images) else None
        return result_table(block["row"].to_numpy(), reasons, scores, self._embedding)
