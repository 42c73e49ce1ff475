"""Running a trained model over a source: what ``uno predict`` and the end of a run
share.
"""

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from uno.config import Config, override
from uno.data.files import Storage
from uno.data.images import spread
from uno.data.inputs import EvenSample, Inputs, RowInputs, open_inputs
from uno.data.sources import read_rows
from uno.data.splits import Task, make_task
from uno.data.vectors import require_kind
from uno.errors import ConfigError, UnoError
from uno.results import infer
from uno.results.folders import sort_images, write_csv
from uno.results.infer import SAMPLE_ROWS, Classifier, with_alignment
from uno.results.predictions import PredictionWriter, Summary
from uno.runs import CONFIG_FILE
from uno.runs.hardware import local_device, num_threads
from uno.runtime import require_runtime
from uno.session.console import Progress, interrupt_on_signal, print_line, reading
from uno.session.data import read_task
from uno.session.place import Place, place_of
from uno.text import plural

# at the end of a run; below it, starting actors takes longer than the work
RAY_PAYS_ROWS = 20_000
ANYWHERE = {
    "compute.num_workers": 0,
    "compute.device": "auto",
    "compute.encoder_runtime": "torch",
    "compute.precision": "auto",
}
"""Where a model predicts by default, whatever trained it."""
INTERVAL_S = 5.0  # between two lines of progress


def predict(
    target: str,
    given: Mapping[str, Any],
    embedding: bool,
    csv: bool = False,
    folders: bool = False,
    elsewhere: Place | None = None,
) -> None:
    """``uno predict``: classify a source with the model of the run ``target``;
    ``given`` are dotted keys.
    """
    storage = Storage(target)
    model = infer.load_classifier(storage)
    compute, data = (
        {k: given[k] for k in given if k.startswith(s)} for s in ("compute.", "data.")
    )
    config = override(model.config, {**ANYWHERE, **compute})
    num_threads(config)
    require_runtime(config)
    if config.compute.num_workers == 0:
        local_device(config)
    if data and "output" not in given:
        raise ConfigError(
            "--data and --limit need --output DIR, the place for predictions.parquet"
        )
    if data and Storage(str(given["output"])).exists(CONFIG_FILE):
        raise ConfigError(
            f"--output {given['output']} is the directory of a run, which keeps the"
            " predictions of its own data; choose another --output"
        )
    limit = override(Config(), {"data.limit": data.pop("data.limit", None)}).data.limit
    with reading() as total:
        if data:
            inputs: Inputs = open_inputs(override(Config(), data).data)
        else:
            inputs = RowInputs(make_task(read_rows(config.data), config.data).rows)
        inputs = (
            EvenSample(inputs, limit)
            if limit is not None and limit < len(inputs)
            else inputs
        )
        total(len(inputs))
    for warning in inputs.warnings:
        print_line(f"warning: {warning}")
    require_kind(model.config.model, inputs.first)
    if folders and inputs.first.pictures() is None:
        raise ConfigError("--folders copies images, and the data has only vectors")
    if model.config.model.takes_vectors:  # there is nothing to decode
        config = override(
            config,
            {"compute.num_workers": 0, "compute.device": local_device(config).type},
        )
    try:
        if model.alignment is None:
            task = read_task(config.data)
            decode = place_of(config, elsewhere).decoder(
                config, storage, task.rows, model
            )
            model = with_alignment(model, storage, decode, unlabeled_rows(task))
    except UnoError as error:
        print_line(
            "warning: head_agreement is empty, because heads cannot be aligned:"
            f" {error}"
        )
    output = Storage(str(given.get("output", storage.uri)))
    writer = PredictionWriter(
        output, inputs, model, embedding, replace="output" not in given
    )

    kept = "stopped; finished shards are kept"
    with interrupt_on_signal(kept):
        summary = _predict(config, model, storage, writer, elsewhere)
    print_line(
        f"{plural(summary.rows, 'image')}, {summary.ok:,} ok, {summary.bad:,} bad:"
        f" {summary.path}"
    )
    if csv:
        print_line(f"as CSV: {write_csv(output)}")
    if folders:
        with interrupt_on_signal(kept), Progress(seconds=INTERVAL_S) as progress:

            def show(done: int, total: int) -> None:
                progress({"phase": "copy", "step": done, "total_steps": total})

            print_line(f"sorted: {sort_images(output, inputs, show)}")


def predict_run(
    config: Config,
    storage: Storage,
    task: Task,
    model: Classifier,
    elsewhere: Place | None = None,
) -> tuple[Classifier, Summary]:
    """The last step of a run: ``predictions.parquet`` of all its rows, on Ray where
    there are many to decode; those of an earlier model are replaced. Returns ``model``,
    its heads aligned.
    """
    if not ray_pays(task, elsewhere):
        config = override(
            config,
            {"compute.num_workers": 0, "compute.device": local_device(config).type},
        )
    decode = place_of(config, elsewhere).decoder(config, storage, task.rows, model)
    model = with_alignment(model, storage, decode, unlabeled_rows(task))
    writer = PredictionWriter(
        storage, RowInputs(task.rows), model, embedding=False, replace=True
    )
    return model, _predict(config, model, storage, writer, elsewhere)


def ray_pays(task: Task, elsewhere: Place | None) -> bool:
    """Whether workers end sooner than this process with what takes an encoder at the
    end of a run: there are many rows, and no features of them, nor decoded images
    unless the workers are those of a cluster.
    """
    ready = task.rows.images.prepared(np.arange(0))
    is_cluster = elsewhere is not None and elsewhere.is_cluster()
    is_left = ready is None or (ready[0].ndim > 2 and is_cluster)
    return is_left and len(task.rows) >= RAY_PAYS_ROWS


def unlabeled_rows(task: Task) -> np.ndarray:
    """Numbers of training rows whose classes were discovered, as many as heads are
    aligned on.
    """
    kinds = [
        np.flatnonzero(task.is_train & member)
        for member in (task.labels >= 0, task.labels < 0)
    ]
    return kinds[1][
        spread(task.rows.images, kinds, SAMPLE_ROWS, task.labels[kinds[0]])[1]
    ]


def _predict(
    config: Config,
    model: Classifier,
    storage: Storage,
    writer: PredictionWriter,
    elsewhere: Place | None,
) -> Summary:
    """Where ``config.compute`` says."""
    if writer.complete:
        return writer.finish()
    if writer.num_done:
        print_line(
            f"resuming: {writer.num_done:,} of {plural(writer.num_rows, 'image')}"
            " already predicted"
        )
    num_before, start = writer.num_done, time.monotonic()
    with Progress(seconds=INTERVAL_S) as progress:

        def show(done: int, total: int) -> None:
            speed = (done - num_before) / max(time.monotonic() - start, 1e-9)
            progress(
                {
                    "phase": "predict",
                    "step": done,
                    "total_steps": total,
                    "images_per_s": speed,
                }
            )

        return place_of(config, elsewhere).predict(config, model, storage, writer, show)
