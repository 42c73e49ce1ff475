"""Write the features of a source to a file of vectors: ``uno embed``.

``--data vectors:FILE`` and other programs read such a file.
"""

import tempfile
import threading
from collections.abc import Collection
from typing import Any

import numpy as np
import pyarrow as pa
from torch import Tensor

from uno.config import Config, override
from uno.data.embeddings import is_vectors, require_kind, write_vectors
from uno.data.files import Storage, split
from uno.data.rows import Rows
from uno.data.sources import read_rows
from uno.data.splits import Task, limit_rows
from uno.encoders.weights import PRETRAINED_FILE
from uno.errors import ConfigError
from uno.session.backend import choose_backend
from uno.session.console import Progress, announce_reading, on_stop, print_line
from uno.session.data import leave_out_unreadable, load_features, read_task
from uno.session.derive import derive_value_range, settings_of_weights
from uno.session.prepare import starting_weights, with_full_path
from uno.text import plural


def embed(
    config: Config,
    given: Collection[str],
    num_views: int = 0,
) -> None:
    """Write the features of all rows to a Parquet file: ``uno embed``.

    With ``data.limit`` only some rows are taken. Finished features are kept in the
    cache, so the same command resumes. A file that an earlier ``uno embed`` has written
    is replaced. Rows that cannot be read are left out, with a warning. The file has a
    row for each view of a row. Its columns are the ids, labels, labels for evaluation,
    splits and texts of the rows, as far as the rows have them; the paths of images
    below the folder of the file, relative to it; the number of the view, 0 for the
    evaluation view; and the features. The encoder is always frozen here, whatever
    ``config`` says. At the end a line says how many rows were written.

    Args:
        config: The configuration. ``config.data`` names the rows, ``config.model`` the
            encoder and its weights, and ``config.output`` the file, a path or URI that
            ends with ".parquet".
        given: The dotted keys that the user has set. Image settings that are not among
            them are taken from the run that ``model.weights`` names, if it names one,
            see :func:`~uno.session.derive.settings_of_weights`. ``data.value_range`` is
            derived from a sample of the images if neither the user nor that run has
            set it.
        num_views: The number of random views (randomly augmented versions of the image)
            that are written for each row, besides the evaluation view, the image
            without augmentation. Test rows have them, too. It must be 0 if the rows are
            vectors, of which the first view is written.

    Raises:
        ConfigError: ``config.output`` is no such file, the encoder has no weights, the
            data cannot be read or does not fit the encoder, too many images cannot be
            read, views are wanted of vectors, or the file exists and was not written by
            ``uno embed``.
        StorageError: The weights, an image or the cache cannot be read, or the file or
            the cache cannot be written.
        Interrupted: The user stopped it while features were computed.
    """
    place = config.output
    if place is None or not place.endswith(".parquet"):
        raise ConfigError("uno embed needs --output FILE.parquet")
    folder, name = split(place)
    storage = Storage(folder)
    if storage.exists(name) and not is_vectors(place):
        raise ConfigError(
            f"{place} was not written by uno embed; choose another --output"
        )
    config = with_full_path(
        override(
            config,
            {
                "model.finetune": "none",
                "augment.small.num_views": 0,
                "discover.epochs": 0,
            },
        )
    )
    least = num_views and max(config.augment.large.num_views, num_views)
    of_weights = settings_of_weights(config)
    values = {key: of_weights[key] for key in of_weights if key not in given}
    config = override(config, {**values, "augment.num_cached_views": least})
    with announce_reading():
        rows = read_rows(config.data)
        rows = (
            rows
            if config.data.limit is None
            else rows.take(limit_rows(rows, config.data.limit))
        )
    for warning in rows.warnings:
        print_line(f"warning: {warning}")
    require_kind(config.model, rows.images)
    if num_views and config.model.takes_vectors:
        raise ConfigError("--views: vectors have no random views; leave it out")
    none = np.full(len(rows), -1)
    task = Task(rows, [], [], 0, none, none, np.full(len(rows), num_views > 0))
    values, line = derive_value_range(config, given, task)
    config = override(config, values)
    if line:
        print_line(line)
    with tempfile.TemporaryDirectory(prefix="uno-embed-") as scratch:
        start = Storage(scratch)
        if (weights := starting_weights(config, True)) is not None:
            start.write(PRETRAINED_FILE, weights)
        features, reasons = _compute_features(config, task, start)
    leave_out_unreadable(reasons, config, task)
    ok = np.array([reason is None for reason in reasons])
    counts = np.where(ok, 1 + num_views, 0)
    write_vectors(place, features, counts, _describe_rows(rows, folder))
    num = plural(int(ok.sum()), "row")
    print_line(
        f"{num}, {1 + num_views} vectors of {features.shape[2]} numbers each: {place}"
    )


def fill_cache(config: Config) -> None:
    """Compute the features of a run's frozen encoder that the feature cache lacks.

    The progress is shown. Nothing is returned, and nothing is written into the
    directory of the run.

    Args:
        config: The configuration of the run, with ``model.finetune`` "none". With
            ``model.weights`` "pretrained", the weights are read from the directory
            ``config.output``, which must have stored them.

    Raises:
        ConfigError: The data cannot be read, or the features cannot be computed, for
            example because the encoder has no weights.
        StorageError: The weights or an image cannot be read, or the cache cannot be
            read or written.
        Interrupted: The user stopped it. Finished features are kept.
    """
    if config.data.num_novel == "auto":  # the number of classes changes no feature
        config = override(config, {"data.num_novel": 1})
    storage = Storage(config.output or ".")
    _compute_features(config, read_task(config.data), storage)


def _compute_features(
    config: Config, task: Task, storage: Storage
) -> tuple[Tensor, list[str | None]]:
    """Return the features of all rows under a frozen encoder, and show the progress.

    Features in the cache are read, and the others are computed and cached. If the rows
    are vectors, these are the features.

    Args:
        config: The configuration. ``compute.num_workers`` decides where rows are
            encoded.
        task: The rows.
        storage: The directory that may hold the encoder's weights.

    Returns:
        D features of the N rows, float32 (N, 1 + V, D): first the evaluation view (the
        image without augmentation), then V random views, with V
        ``augment.num_cached_views``. They are zeros for rows that cannot be read, and
        for the random views of test rows. A source of vectors has its V further views
        instead of random ones, for test rows, too. And for each row the reason why it
        cannot be read, or None.

    Raises:
        ConfigError: The encoder has no weights or unsuitable ones, it returns numbers
            that are not finite, its runtime is not installed, this machine lacks the
            device that was asked for, or the Ray cluster has no place for the workers.
        StorageError: The weights or an image cannot be read, or the cache cannot be
            read or written.
        Interrupted: The user stopped it. Finished features are kept.
    """
    stopping, backend = threading.Event(), choose_backend(config)
    encoding = backend.encoding(config, stopping.is_set)
    with on_stop(stopping.set), Progress() as show, encoding as compute:
        return load_features(config, task, storage, show, stopping.is_set, compute)


def _describe_rows(rows: Rows, folder: str) -> dict[str, pa.Array]:
    """Return the columns that describe each row in the file of features.

    Args:
        rows: The N rows.
        folder: The path or URI of the folder of the file. Paths of images below it are
            stored relative to it, so that both can be moved together. Other paths
            become null.

    Returns:
        Arrow arrays of N strings by name: "id", "label", "split" ("train" or "test"),
        "eval_label" (the true class, only for evaluation), "text" and "path" (of the
        image, or of the picture of a row of vectors). Columns in which all rows are
        null are left out.
    """
    text: dict[str, Any] = {"id": rows.ids, "label": rows.labels, "split": rows.split}
    text |= {} if rows.eval_labels is None else {"eval_label": rows.eval_labels}
    number = np.arange(len(rows))
    text |= {"text": rows.images.captions(number)}
    pictures = rows.images.pictures()
    paths = [None] * len(rows) if pictures is None else pictures.paths(number)
    root = Storage(folder or ".").uri.rstrip("/") + "/"
    text |= {
        "path": [
            p.removeprefix(root) if p and p.startswith(root) else None for p in paths
        ]
    }
    columns = {
        name: (
            column.cast(pa.string())
            if isinstance(column, pa.Array)
            else pa.array(column, pa.string())
        )
        for name, column in text.items()
    }
    return {name: c for name, c in columns.items() if c.null_count < len(c)}
