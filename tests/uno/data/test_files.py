"""Bytes in, bytes out, on a local disk and on what pyarrow knows."""

import errno
import os
import threading
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from types import SimpleNamespace
from unittest.mock import Mock
from urllib.parse import quote

import pytest

from uno.data import array_files, files
from uno.data.files import Storage, full_path, parse_json, read_whole, valid_text
from uno.encoders import weights
from uno.errors import ConfigError, StorageError

# pyarrow's file system in memory: neither local nor an object store
MEMORY = "mock:///run"


@pytest.fixture(params=["local", "memory"])
def storage(request, tmp_path) -> Storage:
    return Storage(MEMORY if request.param == "memory" else str(tmp_path))


@pytest.mark.parametrize("kind", ["local", "not UTF-8", "file URI", "memory"])
def test_round_trip(kind, tmp_path):
    """Kills: parents that are not made, a URI taken for a path, append that
    replaces, delete that fails.
    """
    root = str(tmp_path / ("caf\udce9" if kind == "not UTF-8" else "a b") / "run")
    roots = {"memory": MEMORY, "file URI": f"file://{quote(os.fsencode(root))}"}
    storage = Storage(roots.get(kind, root))
    assert storage.list() == storage.list("checkpoints") == []
    tensors = b"\x00\xff" * 1000
    storage.write("checkpoints/step_1/tensors", tensors)
    for text in (b"1\n", b"2\n"):
        storage.write("config.yaml", text)
        storage.append("logs/metrics.jsonl", text)
    again = Storage(storage.uri)  # what is handed to workers
    names = ("checkpoints/step_1/tensors", "config.yaml", "logs/metrics.jsonl")
    assert [again.read(name) for name in names] == [tensors, b"2\n", b"1\n2\n"]
    with storage.open("logs/metrics.jsonl") as file:
        assert file.read_at(1, 2) == b"2"
    assert storage.exists("checkpoints/step_1") and storage.exists()
    assert storage.list() == ["checkpoints", "config.yaml", "logs"]
    for name in ("checkpoints", "config.yaml", "config.yaml"):
        storage.delete(name)
    assert storage.list() == ["logs"]
    is_on_disk = os.path.exists(f"{root}/logs/metrics.jsonl")
    assert is_on_disk == storage.is_local == (kind != "memory")


def test_relative_paths_are_made_absolute(tmp_path, monkeypatch):
    """A Ray worker has another working directory. Kills: the path kept as given."""
    monkeypatch.chdir(tmp_path)
    storage = Storage("runs/demo")
    assert storage.uri == full_path("runs/demo") == str(tmp_path / "runs/demo")
    assert full_path("s3://bucket/b.png") == "s3://bucket/b.png"


@pytest.mark.parametrize(
    ("root", "shown"),
    [
        ("nothing://bucket/run", "nothing://bucket/run"),
        ("://x", "://x"),
        ("/tmp/\ud800", r"/tmp/\\ud800: "),
    ],
)
def test_a_bad_place_is_a_storage_error_of_one_line(root, shown):
    """Kills: pyarrow's own exceptions, text that no output can hold."""
    with pytest.raises(StorageError, match=f"^.*cannot open {shown}.*$"):
        Storage(root)


def test_missing_files_and_folders_are_storage_errors(storage, tmp_path):
    with pytest.raises(StorageError, match=r"cannot read .*absent"):
        storage.read("absent")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match=r"cannot list .*file"):
        Storage(str(tmp_path)).list("file")


@pytest.mark.parametrize("call", ["open", "fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_no_other(call, tmp_path, monkeypatch):
    """Kills: writing in place, temporary files left behind, a message without the
    path.
    """
    storage = Storage(str(tmp_path))
    storage.write("state.json", b"old")

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr({"open": "pathlib.Path.open"}.get(call, f"os.{call}"), full)
    with pytest.raises(
        StorageError, match=r"cannot write .*state\.json.*No space left"
    ):
        storage.write("state.json", b"new")
    monkeypatch.undo()
    assert storage.read("state.json") == b"old" and storage.list() == ["state.json"]


def test_a_failed_stream_leaves_the_old_file(storage):
    """An overwrite that fails half-way removes or shortens nothing."""
    storage.write("old.txt", b"old")
    for name in ("old.txt", "new.txt"):
        with pytest.raises(KeyError), storage.create(name) as stream:
            stream.write(b"ne")
            raise KeyError
    assert storage.read("old.txt") == b"old" and not storage.exists("new.txt")
    with storage.create("old.txt") as stream:
        stream.write(b"new")
        assert storage.read("old.txt") == b"old"
    assert storage.read("old.txt") == b"new"
    with storage.create("empty.txt"):
        pass
    assert storage.read("empty.txt") == b""


def test_a_full_temporary_folder_is_named():
    """The line that ends an upload says which disk is full and how to use another."""
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(StorageError, match="TMPDIR"), Storage(MEMORY).create("x"):
        raise full


def test_writes_are_flushed_before_they_are_named(tmp_path, monkeypatch):
    """fsync, then rename, then fsync of the directory. Kills: any of them left out
    or late.
    """
    calls, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("fsync"), fsync(fd)))
    monkeypatch.setattr(
        os, "replace", lambda a, b: (calls.append("replace"), replace(a, b))
    )
    Storage(str(tmp_path)).write("x", b"1")
    assert calls == ["fsync", "replace", "fsync"]


@pytest.mark.parametrize(
    ("action", "more"),
    [
        ("exists", ()),
        ("list", ()),
        ("read", ()),
        ("write", (b"",)),
        ("append", (b"",)),
        ("delete", ()),
    ],
)
def test_errors_of_the_file_system_are_storage_errors(action, more):
    """Kills: an OSError that passes through any method."""
    storage = Storage(MEMORY)
    denied = Mock(side_effect=OSError("AWS Error ACCESS_DENIED"))
    calls = ("get_file_info", "open_input_file", "open_output_stream", "create_dir")
    storage._fs = Mock(type_name="mock", **dict.fromkeys(calls, denied))
    with pytest.raises(StorageError, match=r"run.*ACCESS_DENIED"):
        getattr(storage, action)("x", *more)


AWS = "When getting information for key 'k' in bucket 'bucket': AWS Error"


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (f"{AWS} UNKNOWN (HTTP status 503) during HeadObject operation: none", True),
        (f"{AWS} UNKNOWN (HTTP status 429) during HeadObject operation: none", True),
        (f"{AWS} SLOW_DOWN during CreateMultipartUpload operation: text", True),
        (f"{AWS} NETWORK_CONNECTION during HeadObject operation: curlCode: 7", True),
        (OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT), "/nfs/a"), True),
        (OSError(errno.ESTALE, os.strerror(errno.ESTALE), "/nfs/a"), True),
        (f"{AWS} UNKNOWN (HTTP status 400) during HeadObject operation: none", False),
        (f"{AWS} ACCESS_DENIED during HeadObject operation: none", False),
        (f"{AWS} NO_SUCH_BUCKET during GetObject operation: text", False),
        (OSError(errno.ENOENT, os.strerror(errno.ENOENT), "/nfs/a"), False),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/nfs/a"), False),
        (OSError(errno.EIO, os.strerror(errno.EIO), "/nfs/a"), False),
    ],
)
def test_errors_that_may_pass_are_known_by_their_text(error, passes):
    """Texts of pyarrow 26 before a server that answers so."""
    assert files.is_transient(error) == passes


class ThrottledStore(SimpleHTTPRequestHandler):
    """An object store of the files in a folder, which refuses three requests at first.

    Without other settings pyarrow gives up then.
    """

    num_requests = 0

    def send_head(self):
        """Answer the beginning of any request."""
        type(self).num_requests += 1
        return super().send_head() if self.num_requests > 3 else self.send_error(503)

    def log_message(self, *args):
        """Write nothing to the console."""


def test_a_store_that_throttles_is_asked_again(tmp_path, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "none")
    Storage(str(tmp_path)).write("bucket/x", b"0123456789")
    handler = partial(ThrottledStore, directory=tmp_path)
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"endpoint_override=127.0.0.1:{server.server_port}"
        uri = f"s3://bucket/x?region=us-east-1&scheme=http&{place}"
        assert files.read_bytes(uri, 10) == b"0123456789"
        server.shutdown()
    assert ThrottledStore.num_requests > 3


def test_space_is_reserved_where_the_system_has_no_call_for_it(tmp_path, monkeypatch):
    """As on macOS: arrays in a file have their size, and a full disk is an error."""
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    monkeypatch.setenv("UNO_CACHE", str(tmp_path))
    monkeypatch.setattr(array_files, "MAPPED_BYTES", 1)
    assert not array_files.new_array((500, 3)).any()
    full = SimpleNamespace(f_bavail=1, f_frsize=4096)
    monkeypatch.setattr(os, "fstatvfs", lambda number: full)
    with pytest.raises(StorageError, match="No space left"):
        array_files.new_array((500, 3))


def test_only_regular_files_are_opened(tmp_path):
    """Kills: a reader that waits for ever at a FIFO, an append to a device."""
    os.mkfifo(tmp_path / "fifo")
    storage = Storage(str(tmp_path))
    with pytest.raises(StorageError, match="fifo: not a regular file"):
        storage.read("fifo")
    with pytest.raises(StorageError, match="fifo: not a regular file"):
        storage.append("fifo", b"1")
    with pytest.raises(ConfigError, match="fifo: not a regular file"):
        read_whole(str(tmp_path / "fifo"), 10)


def test_a_file_over_its_limit_is_not_read(storage):
    storage.write("a.json", b"12345")
    assert storage.read("a.json", 5) == b"12345"
    with pytest.raises(StorageError, match=r"a\.json is larger than 4 bytes"):
        storage.read("a.json", 4)


def test_a_small_remote_file_takes_no_more_memory_than_it_has_bytes():
    """A limit of 256 TiB cannot be allocated."""
    Storage("mock:///").write("small.csv", b"path,label")
    assert files.read_bytes("mock:///small.csv", 2**48) == b"path,label"
    assert files.read_bytes("mock:///small.csv", 3) == b"path"


def test_of_two_first_writers_one_writes(storage):
    assert storage.write_if_absent("lock.json", b"1")
    assert not storage.write_if_absent("lock.json", b"2")
    assert storage.read("lock.json") == b"1" and storage.list() == ["lock.json"]


def test_of_two_writers_that_have_looked_before_one_writes(tmp_path, monkeypatch):
    """Kills: a look before the write instead of the file system's own answer."""
    storage = Storage(str(tmp_path))
    monkeypatch.setattr(storage, "exists", lambda name: False)
    assert storage.write_if_absent("lock.json", b"1")
    assert not storage.write_if_absent("lock.json", b"2")
    assert storage.read("lock.json") == b"1"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a", "a"),
        ("\udce9", "\\xe9"),
        ("\ud800\udce9", "\\ud800\\xe9"),
        ("\udfffx", "\\udfffx"),
    ],
)
def test_any_name_can_be_shown(name, text):
    """Kills: half a surrogate pair, of a JSON or a command line, that no output can
    hold.
    """
    assert valid_text(name) == text and valid_text(name).encode()


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "{"])
def test_json_that_is_none_or_too_deep_is_a_value_error(text):
    """Kills: RecursionError, which no caller expects."""
    with pytest.raises(ValueError):
        parse_json(text)


@pytest.mark.parametrize("end", ["", "/"])
def test_a_place_below_a_uri_keeps_its_options(end):
    """Kills: the name behind the options, where it is part of the region."""
    storage = Storage(f"s3://bucket/run{end}?region=eu-west-1")
    below = storage.below("pretrain/a b")
    assert below == "s3://bucket/run/pretrain/a%20b?region=eu-west-1"
    assert Storage(below).root == "bucket/run/pretrain/a b"
    assert storage.below("") == storage.uri


@pytest.mark.parametrize(
    ("uri", "is_file"),
    [
        ("s3://bucket/w.safetensors?region=eu-west-1", True),
        ("s3://bucket/w?endpoint_override=http://host/w.pt", False),
    ],
)
def test_options_of_a_uri_are_no_part_of_a_file_name(uri, is_file):
    assert weights.is_file(uri) == is_file
