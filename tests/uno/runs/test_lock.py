"""Who may write in a run directory: one command, and its workers only while it has
it.
"""

import json
import time

import pytest

from uno.data.files import Storage
from uno.data.output import is_lock
from uno.errors import ConfigError, StorageError
from uno.runs import lock


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(lock, "RENEW_S", 0.1)
    monkeypatch.setattr(lock, "WATCH_S", 0.5)


@pytest.fixture
def storage(tmp_path):
    return Storage(str(tmp_path))


def test_a_free_directory_is_held_and_given_back_even_after_an_error(storage):
    with (
        pytest.raises(ZeroDivisionError),
        lock.lock_run(storage, on_wait=pytest.fail) as mine,
    ):
        mine.storage.write("a.txt", b"1\n")
        mine.storage.append("a.txt", b"2\n")
        assert storage.read("a.txt") == b"1\n2\n"
        mine.storage.delete("a.txt")
        assert storage.list() == [lock.LOCK_FILE]
        _ = 1 / 0
    assert storage.list() == []


def test_what_killed_holders_left_of_their_locks_goes_and_nothing_else(storage):
    """Kills: `.lock.json.0c448410` for ever, of a sweep killed while it renewed its
    claim.
    """
    for name in (
        ".lock.json.0c448410",
        "..lock.json.0c448410.12345678",
        "lock.json.mine",
        ".a.json.0c448410",
    ):
        storage.write(name, b"{")
    with lock.lock_run(storage, on_wait=pytest.fail):
        pass
    assert storage.list() == [".a.json.0c448410", "lock.json.mine"]


def test_a_living_holder_is_left_alone(storage):
    lines = []
    with lock.lock_run(storage, on_wait=lines.append) as first:
        with (
            pytest.raises(ConfigError, match="is in use by process"),
            lock.lock_run(storage, on_wait=lines.append),
        ):
            pytest.fail("entered")
        first.storage.write("still.txt", b"mine")
    assert len(lines) == 1 and "waiting 0.5 s" in lines[0]


def test_a_dead_holder_is_replaced_and_its_workers_are_stopped(storage):
    """Kills: a lock that a kill -9 leaves for ever; workers that outlive their
    driver and go on writing.
    """
    storage.write(
        lock.LOCK_FILE, b'{"host": "gone", "pid": 1, "token": "old", "renewals": 7}'
    )
    orphan = lock.ClaimedStorage(storage.uri, "old")
    orphan.write("by-orphan.txt", b"while nobody else has it")
    with lock.lock_run(storage, on_wait=lambda line: None):
        for change, *data in (
            (orphan.write, b"late"),
            (orphan.append, b"late"),
            (orphan.delete,),
        ):
            with pytest.raises(StorageError, match="was taken over by process"):
                change("by-orphan.txt", *data)
    assert storage.read("by-orphan.txt") == b"while nobody else has it"


@pytest.mark.parametrize(
    "content",
    [b"", *(pytest.param(c, marks=pytest.mark.slow) for c in (b"[]", b"{", b"\xff"))],
)
def test_a_damaged_lock_is_of_a_dead_holder_a_released_one_is_free(storage, content):
    storage.write(lock.LOCK_FILE, content)
    with lock.lock_run(storage, on_wait=lambda line: None) as mine:
        mine.storage.write("a.txt", b"1")
    holder = lock.RunLock(
        storage.uri
    )  # one that is released while watched is taken at once
    with lock.lock_run(storage, on_wait=lambda line: holder.release()):
        pass
    assert storage.list() == ["a.txt"]


def test_a_holder_that_lost_its_claim_does_not_take_it_back(storage):
    """Kills: a sleeper (laptop, paused container) that wakes up and renews over its
    successor.
    """
    sleeper = lock.RunLock(storage.uri)
    storage.write(lock.LOCK_FILE, json.dumps({"token": "successor"}).encode())
    time.sleep(0.4)
    sleeper.release()
    assert json.loads(storage.read(lock.LOCK_FILE)) == {"token": "successor"}
    with pytest.raises(StorageError, match="was taken over"):
        sleeper.storage.write("a.txt", b"1")
    with pytest.raises(StorageError, match="was taken over"):
        sleeper.replace_token()
    assert json.loads(storage.read(lock.LOCK_FILE)) == {"token": "successor"}


def test_a_new_token_shuts_out_the_workers_of_the_old_one(storage):
    with lock.lock_run(storage, on_wait=pytest.fail) as mine:
        worker = lock.ClaimedStorage(storage.uri, mine.replace_token())
        worker.check()
        mine.replace_token()
        with pytest.raises(StorageError, match="was taken over"):
            worker.check()
        mine.storage.check()
    # another node without the shared disk: the directory is there, empty
    with pytest.raises(StorageError, match="is not on storage that all nodes share"):
        lock.ClaimedStorage(storage.uri, "token").check()
    assert is_lock("lock.json") and is_lock(".lock.json.1a2b3c4d")
    assert not is_lock("config.yaml") and not is_lock("my-lock.json")


def test_of_two_commands_in_the_same_moment_one_is_refused(storage):
    """Both have found the directory free. The second does not take over."""
    with lock.lock_run(storage, on_wait=pytest.fail) as first:
        with pytest.raises(ConfigError, match="is in use by process"):
            lock.RunLock(storage.uri, free=True)
        first.storage.write("still.txt", b"mine")
