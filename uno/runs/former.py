"""The former run of a directory, which ``--overwrite`` keeps until the new run trains.

A command can be refused after its directory was prepared, for example because too many
images cannot be read. ``--overwrite`` therefore moves the former run into the folder
``former/`` of its directory. The former run is deleted when the new run has taken its
first training steps, and moved back if the command ends before that.

A killed command leaves one of four states, which :func:`settle` tells apart:

- ``former/replaced``: the former run was being deleted.
- ``former/`` without ``config.yaml``: the move was not finished, in either direction.
- ``former/config.yaml`` and a checkpoint of the new run: the new run stays.
- ``former/config.yaml`` and no checkpoint: the former run is moved back.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from uno.data import output
from uno.data.decode import BAD_SAMPLES
from uno.data.files import Storage
from uno.errors import ConfigError, StorageError
from uno.runs import CONFIG_FILE, FORMER_FOLDER, PHASES
from uno.runs.checkpoint import checkpoint_steps

REFUSED_SAMPLES = f"refused_{BAD_SAMPLES}"  # the list of a command that was refused
REPLACED = f"{FORMER_FOLDER}/replaced"


@contextmanager
def kept_until_replaced(
    storage: Storage, announce: Callable[[str], None]
) -> Iterator[Callable[[], None]]:
    """Move the run in a locked directory aside, and back if the block raises.

    Args:
        storage: The directory of the run.
        announce: Takes a line when the former run was moved back.

    Yields:
        A function that deletes the former run, for when the new run has begun to train.
        The end of the block deletes it, too.
    """
    settle(storage)
    try:
        _set_aside(storage)
        yield lambda: _discard(storage)
    except BaseException as error:
        # Another command may have taken over the directory. It then settles this.
        with suppress(StorageError):
            unreadable = storage.find(BAD_SAMPLES)
            if settle(storage):
                announce(f"the former run in {storage.uri} was kept")
                if unreadable and isinstance(error, ConfigError):
                    storage.write(REFUSED_SAMPLES, unreadable)
                    here, there = map(storage.below, (BAD_SAMPLES, REFUSED_SAMPLES))
                    raise ConfigError(str(error).replace(here, there)) from None
        raise
    _discard(storage)


def settle(storage: Storage) -> bool:
    """Decide between the former run and the new run of a locked directory.

    The new run stays if it has a checkpoint. Otherwise the former run is moved back.
    Nothing happens if the directory has no former run.

    Returns:
        Whether the former run was moved back.
    """
    if not storage.exists(FORMER_FOLDER):
        return False
    if storage.exists(REPLACED):
        _discard(storage)
        return False
    if storage.exists(f"{FORMER_FOLDER}/{CONFIG_FILE}"):
        if any(checkpoint_steps(storage, phase) for phase in PHASES):
            _discard(storage)
            return False
        for name in _content(storage):
            if name != CONFIG_FILE:
                storage.delete(name)
        storage.move(f"{FORMER_FOLDER}/{CONFIG_FILE}", CONFIG_FILE)
    for name in storage.list(FORMER_FOLDER):
        storage.move(f"{FORMER_FOLDER}/{name}", name)
    storage.delete(FORMER_FOLDER)
    return True


def _set_aside(storage: Storage) -> None:
    """Move all files of a run into the folder of the former run.

    ``config.yaml`` goes last, so that its place tells whether all files were moved.
    """
    for name in sorted(_content(storage), key=lambda name: name == CONFIG_FILE):
        storage.move(name, f"{FORMER_FOLDER}/{name}")


def _discard(storage: Storage) -> None:
    """Delete the former run, if there is one. A killed deletion can be completed."""
    if not storage.exists(FORMER_FOLDER):
        return
    storage.write(REPLACED, b"")
    for name in storage.list(FORMER_FOLDER):
        if f"{FORMER_FOLDER}/{name}" != REPLACED:
            storage.delete(f"{FORMER_FOLDER}/{name}")
    storage.delete(FORMER_FOLDER)


def _content(storage: Storage) -> list[str]:
    """Return the names of a run's files, without its lock and its former run."""
    names = storage.list()
    return [n for n in names if n != FORMER_FOLDER and not output.is_lock(n)]
