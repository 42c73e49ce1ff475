"""Predict the rows of a source with a trained model.

``uno predict`` does this, and every run at its end.
"""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from uno.config import Config, override
from uno.data.embeddings import require_kind
from uno.data.files import Storage
from uno.data.images import evenly_spaced
from uno.data.sources import read_rows
from uno.encoders.runtimes import require_runtime
from uno.errors import ConfigError
from uno.results import infer
from uno.results.folders import sort_images, write_csv
from uno.results.infer import Classifier
from uno.results.predictions import PredictionWriter, Summary
from uno.runs import CONFIG_FILE
from uno.runs.hardware import num_threads
from uno.session.backend import LocalBackend, choose_backend
from uno.session.console import (
    Progress,
    announce_reading,
    count_items,
    interrupt_on_signal,
    print_line,
)
from uno.session.run import Run
from uno.text import plural

ANYWHERE = {
    "compute.num_workers": 0,
    "compute.device": "auto",
    "compute.encoder_runtime": "torch",
    "compute.precision": "auto",
}
"""Settings with which a model predicts by default, whatever machine trained it."""
INTERVAL_S = 5.0  # seconds between two lines of progress


def predict(
    target: str,
    given: Mapping[str, Any],
    embedding: bool,
    csv: bool = False,
    folders: bool = False,
) -> None:
    """Classify the images of a source with the model of a run: ``uno predict``.

    Without a source, the rows of the run itself are classified. The predictions are a
    table of Parquet files, in the folder ``predictions`` of the output directory. Files
    that an interrupted command has finished are not computed again. Unless ``given``
    says otherwise, this process classifies, with PyTorch, and on the GPU if there is
    one. For a model of vectors this process does it in any case. The numbers of rows
    and the paths of what was written are printed.

    Args:
        target: The directory of the run, or a copy of its folder ``model/``, a path or
            URI.
        given: Settings by dotted key: the source (``data.*``, such as "data.source"),
            the output directory ("output"), and where to compute (``compute.*``). With
            any key of ``data.*``, "output" is required. "data.limit" is the largest
            number of rows that are classified. They are evenly spaced over the source,
            or over the rows of the run if "data.limit" is the only such key. Without
            "output" the predictions replace those in the directory of the run. Other
            keys are not read.
        embedding: Whether the table also has the features, the output of the encoder.
        csv: Whether the table, without the features, is also written as
            ``predictions.csv`` of the output directory.
        folders: Whether images are also copied into ``by_class/`` of the output
            directory, with a folder for each class.

    Raises:
        ConfigError: The source cannot be read or does not fit the model, "output" is
            missing, the output directory is that of another run, or of a run if there
            is a source, it holds predictions of another model or other data and
            "output" is given, it holds a folder ``predictions`` that this program did
            not write, ``folders`` is asked for vectors without images, or this machine
            lacks the device or a package that was asked for.
        StorageError: There is no trained model, or a file is damaged.
        Interrupted: The user stopped it. Finished parts of the table are kept.
    """
    storage = Storage(target)
    model = infer.load_classifier(storage)
    compute, data = (
        {k: given[k] for k in given if k.startswith(s)} for s in ("compute.", "data.")
    )
    config = override(model.config, {**ANYWHERE, **compute})
    num_threads(config)
    require_runtime(config)
    backend = choose_backend(config)
    if data and "output" not in given:
        raise ConfigError(
            "--data and --limit need --output DIR, the place for the predictions"
        )
    other = Storage(str(given["output"])) if "output" in given else storage
    if (data or other.uri != storage.uri) and other.exists(CONFIG_FILE):
        raise ConfigError(
            f"--output {given['output']} is the directory of a run, which keeps the"
            " predictions of its own data; choose another --output"
        )
    if model.config.model.takes_vectors:
        backend = LocalBackend()  # there is nothing to decode
    run = Run(config, storage, backend)
    limit = override(Config(), {"data.limit": data.pop("data.limit", None)}).data.limit
    labels: pa.Array | None = None
    if data:
        with announce_reading():
            rows = read_rows(override(Config(), data).data, images_only=True)
    else:
        rows, labels = run.task.rows, run.task.label_names
    if limit is not None and limit < len(rows):
        chosen = evenly_spaced(limit, len(rows))
        rows = rows.take(chosen)
        labels = None if labels is None else labels.take(pa.array(chosen))
    for warning in rows.warnings:
        print_line(f"warning: {warning}")
    require_kind(model.config.model, rows.images)
    if folders and rows.images.pictures() is None:
        raise ConfigError("--folders copies images, and the data has only vectors")
    output = Storage(str(given.get("output", storage.uri)))
    writer = PredictionWriter(
        output, rows, model, embedding, labels, replace="output" not in given
    )

    kept = "stopped; finished shards are kept"
    with interrupt_on_signal(kept):
        summary = _predict(run, model, writer)
    print_line(
        f"{plural(summary.rows, 'image')}, {summary.ok:,} ok, {summary.bad:,} bad:"
        f" {summary.path}"
    )
    if csv:
        print_line(f"as CSV: {write_csv(output, output)}")
    if folders:
        with interrupt_on_signal(kept), Progress() as progress:
            show = count_items(progress, "copy", INTERVAL_S)
            print_line(f"sorted: {sort_images(output, rows, show)}")


def predict_run(run: Run, model: Classifier) -> Summary:
    """Classify all rows of a run, and write the predictions into its directory.

    Predictions of an earlier model, of changed classes or of changed images are
    replaced. If all predictions of this model are there, nothing is computed; if some
    are there, only the missing ones are computed. The table has no features. A signal
    to stop is not handled here; the caller may use
    :func:`uno.session.console.interrupt_on_signal`.

    Args:
        run: The run, inside ``run.locked()``, so that no other command writes into its
            directory. Its rows ``run.task``, with which it was trained, are classified.
        model: The model of the run.

    Returns:
        The numbers of all, readable and unreadable rows, and the path of the
        predictions.

    Raises:
        ConfigError: The directory has a folder ``predictions`` that this program did
            not write, or the data of the run cannot be read.
        StorageError: A file cannot be written.
    """
    writer = PredictionWriter(
        run.storage,
        run.task.rows,
        model,
        embedding=False,
        labels=run.task.label_names,
        replace=True,
    )
    return _predict(run, model, writer)


def _predict(run: Run, model: Classifier, writer: PredictionWriter) -> Summary:
    """Classify the rows that a writer has not written yet, and show the progress.

    Afterwards the predictions are marked as complete. If only some rows were written
    before, a line says so.

    Args:
        run: The run, whose backend does the work.
        model: The model of the run.
        writer: Holds the rows and writes their predictions. Rows that it has written
            before are not classified again.

    Returns:
        The numbers of all, readable and unreadable rows, and the path of the
        predictions.

    Raises:
        UnoError: One of the errors of the method ``predict`` of the backend: a
            ConfigError or a StorageError.
    """
    if writer.complete:
        return writer.finish()
    if writer.num_done:
        print_line(
            f"resuming: {writer.num_done:,} of {plural(writer.num_rows, 'image')}"
            " already predicted"
        )
    with Progress() as progress:
        show = count_items(progress, "predict", INTERVAL_S)
        show(writer.num_done, writer.num_rows)
        return run.backend.predict(run, model, writer, show)
