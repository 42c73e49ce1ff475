"""Keep the former run of a directory until the new run of ``--overwrite`` trains.

A command can be refused after its directory was prepared, for example because too many
images cannot be read. ``--overwrite`` therefore moves the former run into the folder
``former/`` of its directory. The former run is deleted when the new run has taken its
first training steps, and moved back if the command ends before that.

A killed command leaves one of four states. :func:`complete_overwrite` tells them apart:

- ``former/replaced``: the former run was being deleted.
- ``former/`` without ``config.yaml``: the move was not finished, in either direction.
- ``former/config.yaml`` and a checkpoint of the new run: the new run stays.
- ``former/config.yaml`` and no checkpoint: the former run is moved back.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from uno.data import output
from uno.data.files import Storage
from uno.data.unreadable import BAD_SAMPLES
from uno.errors import ConfigError, StorageError
from uno.runs import CONFIG_FILE, FORMER_FOLDER, PHASES
from uno.runs.checkpoint import checkpoint_steps

REFUSED_SAMPLES = f"refused_{BAD_SAMPLES}"  # list of a refused command
REPLACED = f"{FORMER_FOLDER}/replaced"


@contextmanager
def keep_until_replaced(
    storage: Storage, announce: Callable[[str], None]
) -> Iterator[Callable[[], None]]:
    """Set a run aside for the block, and move it back if the block fails too early.

    All files of the directory except its lock are moved to ``former/``, so that the
    block finds it empty. An interrupted ``--overwrite`` is completed before, see
    :func:`complete_overwrite`.

    If the block raises anything, the error is passed on. Before that, the former run is
    moved back and the files of the new run are deleted, if the new run has no
    checkpoint yet and the former run still exists. Otherwise the new run stays, and the
    former run is deleted.

    Args:
        storage: The directory of the run, as :func:`uno.runs.lock.lock_run` yields it
            in the attribute ``storage`` of the lock.
        announce: Called with a line of text for the user, after the former run was
            moved back.

    Yields:
        A function that deletes the former run. It is called when the new run has begun
        to train. The end of the block deletes the former run, too.

    Raises:
        ConfigError: The block has raised it. If the former run was moved back and the
            new run had listed unreadable images, the list is kept as
            ``refused_bad_samples.jsonl``, and the message names this file instead.
        StorageError: Files cannot be moved or deleted. If the block raises an error and
            the former run cannot be moved back then, the error of the block is raised
            instead, and ``former/`` stays.
    """
    complete_overwrite(storage)
    try:
        _set_aside(storage)
        yield lambda: _delete_former_run(storage)
    except BaseException as error:
        # Another command may have taken over the directory. It then settles this.
        with suppress(StorageError):
            unreadable = storage.find(BAD_SAMPLES)
            if complete_overwrite(storage):
                announce(f"the former run in {storage.uri} was kept")
                if unreadable and isinstance(error, ConfigError):
                    storage.write(REFUSED_SAMPLES, unreadable)
                    here, there = map(storage.below, (BAD_SAMPLES, REFUSED_SAMPLES))
                    raise ConfigError(str(error).replace(here, there)) from None
        raise
    _delete_former_run(storage)


def complete_overwrite(storage: Storage) -> bool:
    """Complete an interrupted ``--overwrite``: keep the new run or the former one.

    ``--overwrite`` moves the former run into the folder ``former/`` of its directory.
    The new run is kept if it has a checkpoint, and the former one is deleted then.
    Otherwise the files of the new run are deleted and the former run is moved back. If
    the former run was only moved in part, the moved files are moved back, and nothing
    is deleted. If the former run was being deleted, its deletion is completed. Nothing
    happens if the directory has no folder ``former/``.

    Args:
        storage: The directory of the run, as :func:`uno.runs.lock.lock_run` yields it
            in the attribute ``storage`` of the lock.

    Returns:
        Whether the former run was moved back.

    Raises:
        StorageError: A file cannot be moved or deleted.
    """
    if not storage.exists(FORMER_FOLDER):
        return False
    if storage.exists(REPLACED):
        _delete_former_run(storage)
        return False
    if storage.exists(f"{FORMER_FOLDER}/{CONFIG_FILE}"):
        if any(checkpoint_steps(storage, phase) for phase in PHASES):
            _delete_former_run(storage)
            return False
        for name in _files_of_run(storage):
            if name != CONFIG_FILE:
                storage.delete(name)
        storage.move(f"{FORMER_FOLDER}/{CONFIG_FILE}", CONFIG_FILE)
    for name in storage.list(FORMER_FOLDER):
        storage.move(f"{FORMER_FOLDER}/{name}", name)
    storage.delete(FORMER_FOLDER)
    return True


def _set_aside(storage: Storage) -> None:
    """Move all files of a run into the folder ``former/`` of its directory.

    The lock stays. ``config.yaml`` is moved last, so that it shows whether all files
    were moved.
    """
    for name in sorted(_files_of_run(storage), key=lambda name: name == CONFIG_FILE):
        storage.move(name, f"{FORMER_FOLDER}/{name}")


def _delete_former_run(storage: Storage) -> None:
    """Delete the folder ``former/`` with the former run, if there is one.

    The file ``former/replaced`` is written first, so that a deletion that was killed
    can be completed.
    """
    if not storage.exists(FORMER_FOLDER):
        return
    storage.write(REPLACED, b"")
    for name in storage.list(FORMER_FOLDER):
        if f"{FORMER_FOLDER}/{name}" != REPLACED:
            storage.delete(f"{FORMER_FOLDER}/{name}")
    storage.delete(FORMER_FOLDER)


def _files_of_run(storage: Storage) -> list[str]:
    """List what is directly in a run directory, except its lock and ``former/``.

    Returns:
        The names of files and folders, without the path of the directory.
    """
    names = storage.list()
    return [n for n in names if n != FORMER_FOLDER and not output.is_lock(n)]
