"""Write the features of a source to a file of vectors: ``uno embed``.

``--data vectors:FILE`` and other programs read such a file.
"""

import tempfile
from collections.abc import Callable, Container, Sequence

import numpy as np
import pyarrow as pa

from uno.config import Config, override
from uno.data.files import Storage, split
from uno.data.rows import Rows
from uno.data.sources import read_rows
from uno.data.splits import Task, limit_rows
from uno.data.vectors import is_vectors, require_kind, write_vectors
from uno.errors import ConfigError
from uno.session.console import Progress, print_line, reading
from uno.session.data import Compute, compute_local, leave_out_unreadable, load_features
from uno.session.resolve import images_of_weights, starting_weights, with_full_path
from uno.text import plural
from uno.weights import PRETRAINED_FILE


def embed(
    config: Config,
    given: Container[str],
    num_views: int = 0,
    compute: Compute = compute_local,
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Write the features of all rows to a Parquet file: ``uno embed``.

    Finished features are kept in the cache, so the same command resumes.

    Args:
        config: The configuration. ``config.data`` names the rows, and ``config.output``
            the file.
        given: The dotted keys that the user has set.
        num_views: The number of random views that are written for each row, besides the
            evaluation view.
        compute: Encodes the rows that are not in the cache.
        should_stop: Returns whether the user has asked to stop.

    Raises:
        ConfigError: There are no weights or no such data, or the file exists and was
            not written by ``uno embed``.
        Interrupted: ``should_stop`` returned True.
    """
    place = config.output
    if place is None or not place.endswith(".parquet"):
        raise ConfigError("uno embed needs --output FILE.parquet")
    folder, name = split(place)
    storage = Storage(folder or ".")
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
    config = override(
        config, {**images_of_weights(config, given), "augment.num_cached_views": least}
    )
    with reading() as total:
        rows = read_rows(config.data)
        rows = (
            rows
            if config.data.limit is None
            else rows.take(limit_rows(rows, config.data.limit))
        )
        total(len(rows))
    for warning in rows.warnings:
        print_line(f"warning: {warning}")
    require_kind(config.model, rows.images)
    if num_views and config.model.takes_vectors:
        raise ConfigError("--views: vectors have no random views; leave it out")
    none = np.full(len(rows), -1)
    task = Task(rows, [], [], 0, none, none, np.full(len(rows), num_views > 0))
    with (
        tempfile.TemporaryDirectory(prefix="uno-embed-") as scratch,
        Progress() as show,
    ):
        start = Storage(scratch)
        if (weights := starting_weights(config, True)) is not None:
            start.write(PRETRAINED_FILE, weights)
        features, reasons = load_features(
            config, task, start, show, should_stop, compute
        )
    leave_out_unreadable(reasons, config, task)
    ok = np.array([reason is None for reason in reasons])
    counts = np.where(ok, 1 + num_views, 0)
    write_vectors(place, features, counts, _describe_rows(rows, folder))
    num = plural(int(ok.sum()), "row")
    print_line(
        f"{num}, {1 + num_views} vectors of {features.shape[2]} numbers each: {place}"
    )


def _describe_rows(rows: Rows, folder: str) -> dict[str, pa.Array]:
    """Return the columns that describe each row in the file of features.

    Args:
        rows: The N rows.
        folder: The folder of the file. Paths of images below it are stored relative to
            it, so that both can be moved together. Other paths are left out.

    Returns:
        String arrays of length N by name: "id", "label", "split", "eval_label", "text"
        and "path", without columns that are empty.
    """
    text: dict[str, Sequence[str | None]] = {
        "id": rows.ids,
        "label": rows.labels,
        "split": rows.split,
    }
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
        name: pa.array(list(column), pa.string()) for name, column in text.items()
    }
    return {name: c for name, c in columns.items() if c.null_count < len(c)}
