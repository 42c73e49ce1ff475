"""Create, check and clean up the directory in which a run keeps its files."""

import io
import json
import logging
from contextlib import suppress
from typing import Any

import numpy as np

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
from uno.encoders.build import changed_code, code_of
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
    STOP_FILE,
)
from uno.runs.checkpoint import FORMAT_VERSION
from uno.runs.hardware import describe_environment
from uno.text import plural

log = logging.getLogger(__name__)


def is_run(storage: Storage) -> bool:
    """Return whether a directory holds a run, by whether it has a ``config.yaml``.

    Args:
        storage: The directory, which need not exist.

    Returns:
        True if there is a ``config.yaml``, whatever else the directory holds. False if
        the directory is missing or empty, or only has what a run writes before its
        ``config.yaml``: the lock, ``environment.json``, the temporary files of these
        and of ``config.yaml``, and the folder ``former/`` with a replaced run.

    Raises:
        ConfigError: There is no ``config.yaml``, and the directory holds anything else.
        StorageError: The file cannot be looked up, or the directory cannot be listed.
    """
    begun = {ENVIRONMENT_FILE, FORMER_FOLDER}
    return output.holds_output(storage, CONFIG_FILE, "run", begun)


def begin_run(config: Config, storage: Storage, fingerprint: str) -> None:
    """Write the first files of a new run, or check that the directory holds this run.

    The files are ``environment.json``, which says how and where the run was started
    (:func:`~uno.runs.hardware.describe_environment`), and ``config.yaml`` with all
    settings. Nothing is written if the directory holds this run already. If the encoder
    is the user's own code, it is built once here. Hashes of its modules are kept in
    ``environment.json``, and a warning is logged if they have changed since the run
    began.

    Args:
        config: The configuration of the run.
        storage: The run directory.
        fingerprint: The hash of the data, the attribute ``fingerprint`` of its rows.

    Raises:
        ConfigError: The directory has no ``config.yaml`` but other files than a run
            that was just begun; or it holds a run of other settings, data or format; or
            the run's ``environment.json`` is missing or damaged, or
            :func:`read_config_tree` refuses its ``config.yaml``; or an encoder of the
            user's own code cannot be built. If settings differ, the message names the
            first of them. Settings that may change when a run resumes are not compared.
        StorageError: A file cannot be read or written.
    """
    code = code_of(config.model.encoder).get("code")
    if not is_run(storage):
        facts = describe_environment(fingerprint) | (
            {"encoder_code": code} if code else {}
        )
        storage.write(ENVIRONMENT_FILE, json.dumps(facts, indent=1).encode())
        storage.write(CONFIG_FILE, dump_yaml(config).encode())
        return
    stored = output.read_mapping(storage, ENVIRONMENT_FILE)
    if stored is None:
        raise ConfigError(
            f"{storage.path(ENVIRONMENT_FILE)} is missing or damaged; use --overwrite"
        )
    if (version := stored.get("format_version")) != FORMAT_VERSION:
        raise ConfigError(
            f"{storage.uri} has format version {version}, not {FORMAT_VERSION}; use"
            " --overwrite"
        )
    if keys := differing_keys(read_config_tree(storage), config):
        raise output.other_settings_error(
            storage.uri, "a run", keys, "use those, --overwrite, or another --output"
        )
    if stored.get("data_fingerprint") != fingerprint:
        raise _fingerprint_error(storage)
    if changed := changed_code(config.model.encoder, stored.get("encoder_code"), code):
        log.warning(
            "%s: its numbers may differ from here on; --overwrite starts over", changed
        )


def check_rows(storage: Storage, rows: Rows) -> None:
    """Check that rows are those with which a run began.

    The fingerprint is only compared if there is an ``environment.json`` that has one.

    Args:
        storage: The directory of the run.
        rows: The rows that its source has now.

    Raises:
        ConfigError: The fingerprint of the rows differs from that in
            ``environment.json``; or an image has another modification time, see
            :func:`check_images`.
        StorageError: A file of the run exists and cannot be read.
    """
    stored = output.read_mapping(storage, ENVIRONMENT_FILE) or {}
    if stored.get("data_fingerprint", rows.fingerprint) != rows.fingerprint:
        raise _fingerprint_error(storage)
    check_images(storage, rows)


def _fingerprint_error(storage: Storage) -> ConfigError:
    """Return the error for a directory whose data has another fingerprint now."""
    return ConfigError(
        f"{storage.uri} was trained on other data (fingerprint differs); restore the"
        " data, or train again with --overwrite"
    )


def check_images(storage: Storage, rows: Rows) -> None:
    """Check that no image was modified since a run, or a sweep, began.

    The fingerprint of the data covers the ids and sizes of files. This function
    compares their modification times with those in ``image_times.npy``. It does nothing
    if there is no such file, if it is damaged, or if it has another number of rows.

    Args:
        storage: The directory of the run.
        rows: The rows that the run reads now, with the same fingerprint.

    Raises:
        ConfigError: An image has another modification time, or its file is missing now.
            The message has the number of such images, and the id of the first one.
        StorageError: ``image_times.npy`` exists and cannot be read.
    """
    data, stored_times = storage.find(IMAGE_TIMES_FILE), np.zeros(0, np.int64)
    if data is not None:
        with suppress(ValueError, EOFError):
            stored_times = np.load(io.BytesIO(data), allow_pickle=False)
    if len(stored_times) != len(rows):
        return
    changed = np.flatnonzero(stored_times != rows.images.times(np.arange(len(rows))))
    if len(changed):
        modified = f"{plural(len(changed), 'image')} written to since the run began"
        raise ConfigError(
            f"{storage.uri} was trained on other data ({modified}, e.g."
            f" {rows.ids[changed[0]]}); restore the files with their times, or use"
            " --overwrite"
        )


def begin_images(storage: Storage, rows: Rows) -> None:
    """Store the modification times of the images of a run, or a sweep.

    They are written to ``image_times.npy``, in ns since 1970, int64 (N,): 0 for an
    image in memory or a missing file, and -1 if the time is not known. If this file
    exists, it stays, and its times are compared with the present ones, see
    :func:`check_images`.

    Args:
        storage: The directory of the run or sweep.
        rows: All rows of its data.

    Raises:
        ConfigError: An image was modified since the times were stored.
        StorageError: The file cannot be read or written.
    """
    if storage.exists(IMAGE_TIMES_FILE):
        check_images(storage, rows)
        return
    stream = io.BytesIO()
    np.save(stream, rows.images.times(np.arange(len(rows))))
    storage.write(IMAGE_TIMES_FILE, stream.getvalue())


def require_run(storage: Storage) -> None:
    """Check that a directory holds a run.

    Args:
        storage: The directory.

    Raises:
        ConfigError: It has no ``config.yaml``, or does not exist.
        StorageError: The file cannot be looked up.
    """
    if not storage.exists(CONFIG_FILE):
        raise ConfigError(
            f"{storage.uri} is not a run directory: it has no {CONFIG_FILE}"
        )


def read_config_tree(storage: Storage) -> dict[str, Any]:
    """Return the ``config.yaml`` of a run as a nested dict.

    If its method is the user's own code (``package.module:METHOD``), this code is
    imported, because the method may have settings of its own. A warning is then logged
    that names this code, and likewise for code of the pretext task, which is not
    imported.

    Args:
        storage: The run directory.

    Returns:
        The settings as the file has them, section by section. No defaults are added.

    Raises:
        ConfigError: The file is missing or empty, or :func:`uno.config.parse_yaml`
            refuses it; the method's code cannot be imported; or code for the method or
            the pretext task lies in the run directory.
        StorageError: The file cannot be read, or has more than ``MAX_STATE_BYTES``.
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
    """Return the final metrics of a finished run by name, from its ``metrics.json``.

    A name is a path such as ``test/novel/task_aware/acc/best``. The values are returned
    as the file has them, and are not checked.

    Args:
        storage: The run directory.

    Returns:
        The metrics; None if the file is missing, because the run is not finished, or if
        it is damaged.

    Raises:
        StorageError: The file cannot be read, or has more than ``MAX_STATE_BYTES``.
    """
    return output.read_mapping(storage, RESULTS_FILE)


def delete_leftovers(storage: Storage) -> None:
    """Delete the files that interrupted commands left in a run directory.

    These are temporary files on local disks (in the run directory and in all folders
    below it), the folder ``ray/`` of Ray Train, and the file ``STOP``, which asks a run
    to stop. Temporary files of the lock and in the folder ``loggers/`` stay, and so
    does a file that cannot be deleted.

    Args:
        storage: The run directory, locked by this command, so that no other process
            writes into it.

    Raises:
        StorageError: The storage cannot be reached, so that nothing can be looked up.
    """
    names = [name for name in (RAY_FOLDER, STOP_FILE) if storage.exists(name)]
    names += output.list_temporary_files(storage)
    for name in names:
        if not name.startswith(f"{LOGGERS_FOLDER}/"):  # a logger may still write there
            with suppress(StorageError):
                storage.delete(name)
