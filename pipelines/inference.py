"""Running a trained model over a source, here or on Ray: what ``uno predict`` and the end of a run share.

On Ray: blocks of paths (or of encoded bytes) -> decoding tasks on any node -> an actor pool that holds the
model -> this process, which writes the shards. The same batches as without Ray, so the same results.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import torch

from pipelines import ray_env
from pipelines.console import Progress, on_stop, say
from pipelines.ray_data import bytes_of, decode_block, image_block, parquet_images
from pipelines.worker import worker_resources
from uno.config import Config, override
from uno.data.decode import readable
from uno.data.files import Storage
from uno.data.rows import Decoded, Rows
from uno.data.sources import read_inputs, read_rows
from uno.data.splits import Task, make_task
from uno.errors import ConfigError, Interrupted, UnoError
from uno.results.infer import (
    Classifier,
    Decode,
    build_classifier,
    decoder,
    load_classifier,
    read_model_files,
    with_alignment,
)
from uno.results.predictions import PredictionWriter, Summary, predict_rows, result_table
from uno.runs.hardware import local_device

RAY_PAYS_ROWS = 20_000  # at the end of a run; below it, starting actors takes longer than the work
INTERVAL_S = 5.0  # between two lines of progress


def predict_job(target: str, given: Mapping[str, Any], embedding: bool) -> int:
    """``uno predict``: classify a source with the model of run ``target``; ``given``: dotted keys. Returns 0.

    Raises:
        ConfigError: options or data that make no sense; a directory with other predictions.
        Interrupted: stopped by a signal; finished shards are kept.
    """
    storage = Storage(target)
    model = load_classifier(storage)
    compute = {key: value for key, value in given.items() if key.startswith("compute.")}
    config = override(model.config, {"compute.workers": 0, "compute.device": "auto", **compute})
    data = {key: value for key, value in given.items() if key.startswith("data.")}
    if data and "output" not in given:
        raise ConfigError("--data and --limit need --output DIR, the place for predictions.parquet")
    limit = data.pop("data.limit", None)
    rows = read_inputs(override(Config(), data).data) if data else own_task(config).rows
    rows = _limited(rows, limit)
    output = Storage(str(given.get("output", storage.uri)))
    model = _aligned(model, storage, config)
    writer = PredictionWriter(output, rows, model, embedding, replace="output" not in given)
    with on_stop(_stop):
        summary = _predict(config, model, storage, decoder(model, rows, config.compute.threads), writer)
    say(f"{summary.rows:,} rows, {summary.ok:,} ok, {summary.bad:,} bad: {summary.path}")
    return 0


def predict_run(
    config: Config, storage: Storage, task: Task, model: Classifier | None = None
) -> tuple[Classifier, Summary]:
    """The last step of a run: ``predictions.parquet`` in its directory, for every row of its own data.

    On Ray where the run was and there are many rows to decode. Predictions of an earlier model are replaced.

    Args:
        config: of the run.
        storage: of the run, with ``model/`` in it.
        task: its rows.
        model: that of ``model/``, where it is loaded.

    Returns:
        The model, its heads aligned, and what was written.

    Raises:
        UnoError: as ``uno predict``.
    """
    if isinstance(task.rows.images, Decoded) or len(task.rows) < RAY_PAYS_ROWS:
        config = override(config, {"compute.workers": 0})
    model = load_classifier(storage) if model is None else model
    decode = decoder(model, task.rows, config.compute.threads)
    model = with_alignment(model, storage, decode, unlabeled_rows(task))
    writer = PredictionWriter(storage, task.rows, model, embedding=False, replace=True)
    return model, _predict(config, model, storage, decode, writer)


def own_task(config: Config) -> Task:
    """The rows a run was trained on.

    Raises:
        ConfigError: they cannot be read.
    """
    return make_task(read_rows(config.data), config.data)


def unlabeled_rows(task: Task) -> np.ndarray:
    """Numbers of the training rows whose classes were discovered."""
    return np.flatnonzero(task.is_train & (task.labels < 0))


def _predict(
    config: Config, model: Classifier, storage: Storage, decode: Decode, writer: PredictionWriter
) -> Summary:
    """Here or on Ray, as ``config.compute`` says."""
    if writer.num_done and not writer.complete:
        say(f"{writer.num_done:,} of {writer.num_rows:,} rows are there already; continuing")
    with _progress(writer.num_done) as show:
        if writer.complete:
            return writer.finish()
        if config.compute.workers:
            files = read_model_files(storage)
            with ray_env.connect(workers=config.compute.workers) as ray:
                return predict_on_ray(ray, config, files, writer, show)
        torch.set_num_threads(config.compute.threads or os.cpu_count() or 1)
        return predict_rows(model.to(local_device(config)), decode, writer, show)


def predict_on_ray(
    ray: Any,
    config: Config,
    files: Mapping[str, bytes],
    writer: PredictionWriter,
    on_progress: Callable[[int, int], None],
) -> Summary:
    """Classify what ``writer`` lacks on ``config.compute.workers`` actors, and finish the table.

    Files are read where they are decoded: their paths must lead to them from every node.

    Args:
        ray: the connected module.
        config: says how many actors and on what.
        files: the model, see :func:`uno.results.infer.read_model_files`.
        writer: of the rows.
        on_progress: called with (rows done, N).

    Raises:
        ConfigError: the cluster has too few CPUs or GPUs.
    """
    resources = worker_resources(config, ray.cluster_resources())
    model = build_classifier(files)
    num_workers, rows = config.compute.workers, writer.rows
    blocks = [image_block(rows.images, index) for index in writer.batches(model.batch_rows)]
    decode = partial(decode_block, side=model.size, images=parquet_images(rows.images))
    scorer = {
        "files": ray.put(dict(files)),
        "embedding": writer.embedding,
        "device": "cuda" if "GPU" in resources else "cpu",
        "threads": config.compute.threads or max(1, (os.cpu_count() or 1) // num_workers),
    }
    results = (
        ray.data.from_arrow(blocks)
        .map_batches(decode, batch_format="pyarrow", batch_size=None)
        .map_batches(
            Scorer,
            fn_constructor_kwargs=scorer,
            compute=ray.data.ActorPoolStrategy(size=num_workers),
            num_cpus=resources["CPU"],
            num_gpus=resources.get("GPU", 0),
            batch_format="pyarrow",
            batch_size=None,
        )
    )
    for batch in results.iter_batches(batch_size=None, batch_format="pyarrow"):
        writer.add(batch)
        on_progress(writer.num_done, len(rows))
    return writer.finish()


class Scorer:
    """An actor of the pool: loads the model once, then classifies block after block."""

    def __init__(self, files: Any, embedding: bool, device: str, threads: int) -> None:
        import ray

        torch.set_num_threads(threads)
        self._model = build_classifier(ray.get(files), device)
        self._embedding = embedding

    def __call__(self, block: pa.Table) -> pa.Table:
        """A decoded block -> its :func:`uno.results.predictions.result_table`."""
        size = self._model.size
        reasons = block["reason"].to_pylist()
        pixels = bytes_of(block["pixels"], 3 * size**2)[readable(reasons)]
        images = torch.from_numpy(pixels).view(-1, 3, size, size)
        scores = self._model.score(images) if len(images) else None
        return result_table(block["row"].to_numpy(), reasons, scores, self._embedding)


# ------------------------------------------------------------------------------------------------ the command
def _limited(rows: Rows, limit: Any) -> Rows:
    override(Config(), {"data.limit": limit})  # checks it
    if limit is None or limit >= len(rows):
        return rows
    return rows.take(np.arange(limit) * len(rows) // limit)


def _aligned(model: Classifier, storage: Storage, config: Config) -> Classifier:
    """``model`` with aligned heads where the run's data can be read; else head_agreement stays empty."""
    if model.alignment is not None:
        return model
    try:
        task = own_task(config)
        decode = decoder(model, task.rows, config.compute.threads)
        return with_alignment(model, storage, decode, unlabeled_rows(task))
    except UnoError as error:
        say(f"warning: head_agreement is left empty: heads cannot be aligned: {error}")
        return model


@contextmanager
def _progress(done_before: int) -> Iterator[Callable[[int, int], None]]:
    """A live bar on a terminal; elsewhere a line every few seconds and one at the end."""
    start = shown = time.monotonic()
    with Progress() as progress:

        def show(done: int, total: int) -> None:
            nonlocal shown
            now = time.monotonic()
            if progress.live or done == total or now - shown >= INTERVAL_S:
                shown = now
                speed = (done - done_before) / max(now - start, 1e-9)
                metrics = {"phase": "predict", "step": done, "total_steps": total, "images_per_s": speed}
                progress(metrics)

        yield show


def _stop() -> NoReturn:
    raise Interrupted("stopped; finished shards are kept")
