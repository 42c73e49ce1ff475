"""Bytes in, bytes out, on a local disk and on what pyarrow knows."""

import errno
import os
from unittest.mock import Mock
from urllib.parse import quote

import pytest
from pyarrow import fs

from uno.data.files import Storage, full_path, parse_json, read_whole, shown
from uno.errors import ConfigError, StorageError

MEMORY = "mock:///run"  # pyarrow's file system in memory: neither local nor an object store


@pytest.mark.parametrize("kind", ["local", "not UTF-8", "file URI", "memory"])
def test_round_trip(kind, tmp_path):
    """Kills: parents that are not made, a URI taken for a path, append that replaces, delete that fails."""
    root = str(tmp_path / ("caf\udce9" if kind == "not UTF-8" else "a b") / "run")
    roots = {"memory": MEMORY, "file URI": f"file://{quote(os.fsencode(root))}"}
    storage = Storage(roots.get(kind, root))
    assert storage.list() == [] and storage.list("checkpoints") == [] and not storage.exists("x")
    storage.write("checkpoints/step_1/tensors", b"\x00\xff" * 1000)
    for text in (b"1\n", b"2\n"):
        storage.write("config.yaml", text)
        storage.append("logs/metrics.jsonl", text)
    assert storage.read("checkpoints/step_1/tensors") == b"\x00\xff" * 1000
    assert storage.read("config.yaml") == b"2\n" and storage.read("logs/metrics.jsonl") == b"1\n2\n"
    assert storage.list() == ["checkpoints", "config.yaml", "logs"]
    assert storage.size("logs/metrics.jsonl") == 4 and storage.size("absent") == 0
    with storage.create("streamed") as stream, pytest.raises(KeyError):
        stream.write(b"12")
        with storage.create("half") as half:
            half.write(b"1")
            raise KeyError
    with storage.open("streamed") as file:
        assert file.read_at(1, 1) == b"2" and "half" not in storage.list()
    storage.delete("streamed")
    assert storage.exists("checkpoints/step_1") and storage.exists()
    for name in ("checkpoints", "config.yaml", "config.yaml"):
        storage.delete(name)
    assert storage.list() == ["logs"]
    if kind != "memory":
        assert os.path.exists(f"{root}/logs/metrics.jsonl")
        again = Storage(storage.uri)  # what is handed to workers
        assert again.is_local and again.read("logs/metrics.jsonl") == b"1\n2\n"


def test_relative_paths_are_made_absolute(tmp_path, monkeypatch):
    """A Ray worker has another working directory. Kills: the path kept as given."""
    monkeypatch.chdir(tmp_path)
    storage = Storage("runs/demo")
    assert storage.uri == full_path("runs/demo") == str(tmp_path / "runs/demo")
    assert full_path("s3://bucket/b.png") == "s3://bucket/b.png"


def test_bad_uris_and_missing_files_are_storage_errors_of_one_line(tmp_path):
    """Kills: pyarrow's own exceptions."""
    for root in ("nothing://bucket/run", "s3:///", "://x"):
        with pytest.raises(StorageError, match=r"^.*cannot open.*$"):
            Storage(root)
    for storage in (Storage(str(tmp_path)), Storage(MEMORY)):
        with pytest.raises(StorageError, match=r"cannot read .*absent"):
            storage.read("absent")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match=r"cannot list .*file"):
        Storage(str(tmp_path)).list("file")


@pytest.mark.parametrize("call", ["open", "fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_no_other(call, tmp_path, monkeypatch):
    """Kills: writing in place, temporary files left behind, a message without the path."""
    storage = Storage(str(tmp_path))
    storage.write("state.json", b"old")

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr({"open": "pathlib.Path.open"}.get(call, f"os.{call}"), full)
    with pytest.raises(StorageError, match=r"cannot write .*state\.json.*No space left"):
        storage.write("state.json", b"new")
    monkeypatch.undo()
    assert storage.read("state.json") == b"old" and storage.list() == ["state.json"]


def test_writes_are_flushed_before_they_are_named(tmp_path, monkeypatch):
    """fsync, then rename, then fsync of the directory. Kills: any of them left out or late."""
    calls, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("fsync"), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("replace"), replace(a, b)))
    Storage(str(tmp_path)).write("x", b"1")
    assert calls == ["fsync", "replace", "fsync"]


def test_errors_of_the_file_system_are_storage_errors(tmp_path, monkeypatch):
    """Kills: an OSError that passes through any method."""
    storage = Storage(MEMORY)
    storage._fs = Mock(type_name="mock")
    for name in ("get_file_info", "open_input_file", "open_output_stream", "create_dir"):
        getattr(storage._fs, name).side_effect = OSError("connection reset")
    for action in ("exists", "size", "list", "read", "write", "append", "delete"):
        with pytest.raises(StorageError, match=r"run.*connection reset"):
            getattr(storage, action)("x", *([b""] if action in ("write", "append") else []))


def test_object_stores_get_no_directory_markers(tmp_path):
    """Kills: a request per directory and write on S3."""
    storage, stream = Storage(MEMORY), fs.LocalFileSystem().open_output_stream(str(tmp_path / "object"))
    storage._fs = Mock(type_name="s3", open_output_stream=Mock(return_value=stream))
    storage.write("a/b", b"1")
    assert not storage._fs.create_dir.called and (tmp_path / "object").read_bytes() == b"1"


def test_only_regular_files_are_opened(tmp_path):
    """Kills: a reader that waits for ever at a FIFO, an append to a device."""
    os.mkfifo(tmp_path / "fifo")
    storage, path = Storage(str(tmp_path)), str(tmp_path / "fifo")
    for read in (lambda: storage.read("fifo"), lambda: storage.append("fifo", b"1")):
        with pytest.raises(StorageError, match="fifo: not a regular file"):
            read()
    for name in (path, "/dev/zero"):
        with pytest.raises(ConfigError, match="not a regular file"):
            read_whole(name, 10)


def test_a_file_over_its_limit_is_not_read(tmp_path):
    storage = Storage(str(tmp_path))
    storage.write("a.json", b"12345")
    assert storage.read("a.json", 5) == b"12345"
    with pytest.raises(StorageError, match=r"a\.json is larger than 4 bytes"):
        storage.read("a.json", 4)


def test_of_two_first_writers_one_writes(tmp_path, monkeypatch):
    """Kills: a look before the write instead of the file system's own answer."""
    for storage in (Storage(str(tmp_path)), Storage(MEMORY)):
        storage.delete("lock.json")
        assert storage.write_first("lock.json", b"1") and not storage.write_first("lock.json", b"2")
        assert storage.read("lock.json") == b"1"
    storage = Storage(str(tmp_path))
    monkeypatch.setattr(storage, "exists", lambda name: False)  # both have looked before
    assert not storage.write_first("lock.json", b"2")
    monkeypatch.setattr(os, "link", Mock(side_effect=OSError(errno.EPERM, "no links here")))
    assert storage.write_first("other.json", b"3") and storage.read("other.json") == b"3"
    assert sorted(os.listdir(tmp_path)) == ["lock.json", "other.json"]


@pytest.mark.parametrize(("name", "text"), [
    ("a", "a"), ("\udce9", "\\xe9"), ("\ud800\udce9", "\\ud800\\xe9"), ("\udfffx", "\\udfffx"),
])  # fmt: skip
def test_any_name_can_be_shown(name, text):
    """Kills: half a surrogate pair, of a JSON or a command line, that no output can hold."""
    assert shown(name) == text and shown(name).encode()


def test_a_path_that_is_no_text_is_one_line():
    with pytest.raises(StorageError, match=r"cannot open /tmp/\\ud800: "):
        Storage("/tmp/\ud800")


def test_json_of_nobody_knows_whom():
    """Kills: RecursionError, which no caller expects."""
    assert parse_json(b'{"a": [1]}') == {"a": [1]}
    for text in ("[" * 100_000, '{"a":' * 100_000, "{"):
        with pytest.raises(ValueError):
            parse_json(text)
