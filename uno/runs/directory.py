"""A run's directory: who may use it, and the repairs that cannot lose anything."""

import io
import json
import logging
from contextlib import suppress
from typing import Any

import numpy as np

from uno import runs
from uno.config import (
    Config,
    differing_keys,
    dump_yaml,
    parse_yaml,
    require_code,
)
from uno.data import output
from uno.data.files import Storage
from uno.data.rows import Rows
from uno.encoder import changed_code, code_of
from uno.errors import ConfigError, StorageError
from uno.limits import MAX_STATE_BYTES
from uno.runs import (
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    FORMER_FOLDER,
    IMAGE_TIMES_FILE,
    LOGGERS_FOLDER,
    RAY_FOLDER,
    RESULTS_FILE,
)
from uno.runs.checkpoint import (
    FORMAT_VERSION,
    file_name,
    read_checkpoints,
)
from uno.runs.hardware import environment
from uno.text import plural

log = logging.getLogger(__name__)


def is_run(storage: Storage) -> bool:
    """Whether the directory holds a run (False also where it was only begun);
    ConfigError: anything else.
    """
    begun = {ENVIRONMENT_FILE, FORMER_FOLDER}
    return output.is_ours(storage, CONFIG_FILE, "run", begun)


def begin_run(config: Config, storage: Storage, fingerprint: str) -> None:
    """Make the directory a run's; ConfigError: it is one of other settings (named),
    data or format. A warning says where the code of its encoder is another.
    """
    code = code_of(config.model.encoder).get("code")
    if not is_run(storage):
        facts = environment(fingerprint) | ({"encoder_code": code} if code else {})
        storage.write(ENVIRONMENT_FILE, json.dumps(facts, indent=1).encode())
        storage.write(CONFIG_FILE, dump_yaml(config).encode())
        return
    known = output.find_mapping(storage, ENVIRONMENT_FILE)
    if known is None:
        raise ConfigError(
            f"{storage.path(ENVIRONMENT_FILE)} is missing or damaged; use --overwrite"
        )
    if (found := known.get("format_version")) != FORMAT_VERSION:
        raise ConfigError(
            f"{storage.uri} has format version {found}, not {FORMAT_VERSION}; use"
            " --overwrite"
        )
    if keys := differing_keys(read_config_tree(storage), config):
        raise output.other_settings(
            storage.uri, "a run", keys, "use those, --overwrite, or another --output"
        )
    if known.get("data_fingerprint") != fingerprint:
        raise ConfigError(
            f"{storage.uri} was trained on other data (fingerprint differs); use"
            " --overwrite"
        )
    if changed := changed_code(config.model.encoder, known.get("encoder_code"), code):
        log.warning(
            "%s: its numbers may differ from here on; --overwrite starts over", changed
        )


def check_images(storage: Storage, rows: Rows) -> None:
    """Check that no image was written to since a run, or a sweep, began.

    The fingerprint of the data has the ids and sizes of files. This compares their
    modification times. It does nothing if the run has no file of them.

    Args:
        storage: The directory of the run.
        rows: The rows that it reads now, of the same fingerprint.

    Raises:
        ConfigError: An image has another time. The line names one.
    """
    data, then = storage.find(IMAGE_TIMES_FILE), np.zeros(0, np.int64)
    if data is not None:
        with suppress(ValueError, EOFError):
            then = np.load(io.BytesIO(data), allow_pickle=False)
    if len(then) != len(rows):
        return
    changed = np.flatnonzero(then != rows.images.times(np.arange(len(rows))))
    if len(changed):
        what = f"{plural(len(changed), 'image')} written to since the run began"
        raise ConfigError(
            f"{storage.uri} was trained on other data ({what}, e.g."
            f" {rows.ids[changed[0]]}); restore the files with their times, or use"
            " --overwrite"
        )


def begin_images(storage: Storage, rows: Rows) -> None:
    """Note when the images of a run, or a sweep, were last changed.

    If that was noted before, :func:`check_images` is called.
    """
    if storage.exists(IMAGE_TIMES_FILE):
        check_images(storage, rows)
        return
    stream = io.BytesIO()
    np.save(stream, rows.images.times(np.arange(len(rows))))
    storage.write(IMAGE_TIMES_FILE, stream.getvalue())


def require_run(storage: Storage) -> None:
    """Raise ConfigError unless the directory is that of a run."""
    if not storage.exists(CONFIG_FILE):
        raise ConfigError(
            f"{storage.uri} is not a run directory: it has no {CONFIG_FILE}"
        )


def read_config_tree(storage: Storage) -> dict[str, Any]:
    """The ``config.yaml`` of a run as a nested dict. ConfigError: there is none, it is
    damaged, or its method cannot be imported.
    """
    require_run(storage)
    tree = None
    with suppress(ValueError):
        tree = parse_yaml(storage.read(CONFIG_FILE, MAX_STATE_BYTES), CONFIG_FILE)
    if not tree:
        raise ConfigError(
            f"{storage.path(CONFIG_FILE)} is damaged; restore the file, or use"
            " --overwrite to start over"
        )
    require_code(tree, storage.uri)
    return dict(tree)


def read_results(storage: Storage) -> dict[str, float] | None:
    """``metrics.json``; None where there is none or it is damaged."""
    return output.find_mapping(storage, RESULTS_FILE)


def repair(storage: Storage) -> list[str]:
    """Remove what killed commands left, and damaged checkpoints that are not needed.

    A damaged checkpoint is not needed if it is newer than the newest valid one. What
    killed commands left are temporary files on local disks, Ray's folder and the
    request to stop.

    Returns:
        A line for each checkpoint that was removed.

    Raises:
        StorageError: A phase has checkpoints, and all of them are damaged.
    """
    lines = []
    for phase in runs.PHASES:
        _, damaged = read_checkpoints(storage, phase)
        for step, problem in damaged.items():
            storage.delete(file_name(phase, step))
            lines.append(
                f"removed the damaged checkpoint of {phase} step {step} ({problem})"
            )
    names = [name for name in (RAY_FOLDER, runs.STOP_FILE) if storage.exists(name)]
    names += output.leftovers(storage)
    # Threads of loggers, and processes that outlive their command, may be writing.
    busy = (f"{RAY_FOLDER}/", f"{LOGGERS_FOLDER}/")
    for name in names:
        if not name.startswith(busy):
            with suppress(StorageError):
                storage.delete(name)
    return lines
