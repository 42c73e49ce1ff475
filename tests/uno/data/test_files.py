"""Bytes in, bytes out, on a local disk and on what pyarrow knows."""

import errno
import os
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock
from urllib.parse import quote

import pytest
from pyarrow import fs

from uno.data import array_files, files
from uno.data.files import Storage, full_path, parse_json, read_whole, valid_text
from uno.encoders import weights
from uno.errors import ConfigError, StorageError
from uno.runs.lock import ClaimedStorage

# pyarrow's file system in memory: neither local nor an object store
MEMORY = "mock:///run"


@pytest.mark.parametrize("kind", ["local", "not UTF-8", "file URI", "memory"])
def test_round_trip(kind, tmp_path):
    """Kills: parents that are not made, a URI taken for a path, append that
    replaces, delete that fails.
    """
    root = str(tmp_path / ("caf\udce9" if kind == "not UTF-8" else "a b") / "run")
    roots = {"memory": MEMORY, "file URI": f"file://{quote(os.fsencode(root))}"}
    storage = Storage(roots.get(kind, root))
    assert (
        storage.list() == []
        and storage.list("checkpoints") == []
        and not storage.exists("x")
    )
    storage.write("checkpoints/step_1/tensors", b"\x00\xff" * 1000)
    for text in (b"1\n", b"2\n"):
        storage.write("config.yaml", text)
        storage.append("logs/metrics.jsonl", text)
    assert storage.read("checkpoints/step_1/tensors") == b"\x00\xff" * 1000
    assert (
        storage.read("config.yaml") == b"2\n"
        and storage.read("logs/metrics.jsonl") == b"1\n2\n"
    )
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


@pytest.mark.parametrize("where", ["local", "memory"])
def test_a_failed_stream_leaves_the_old_file(where, tmp_path):
    """An overwrite that fails half-way removes or shortens nothing."""
    storage = Storage(MEMORY if where == "memory" else str(tmp_path))
    storage.write("old.txt", b"old")
    for name in ("old.txt", "new.txt"):
        with pytest.raises(KeyError), storage.create(name) as stream:
            stream.write(b"ne")
            raise KeyError
    assert storage.read("old.txt") == b"old" and not storage.exists("new.txt")
    with storage.create("old.txt") as stream:
        stream.write(b"ne")
        assert storage.read("old.txt") == b"old"
        stream.write(b"w")
    with storage.create("empty.txt"):
        pass
    assert storage.read("old.txt") == b"new" and storage.read("empty.txt") == b""


def test_a_failed_upload_deletes_nothing():
    storage, upload = Storage(MEMORY), MagicMock()
    upload.write.side_effect = OSError("AWS Error ACCESS_DENIED")
    upload.__enter__.return_value, upload.__exit__.return_value = upload, False
    storage._fs = Mock(type_name="s3", open_output_stream=Mock(return_value=upload))
    with (
        pytest.raises(StorageError, match=r"cannot write .*ACCESS_DENIED"),
        storage.create("predictions.parquet") as stream,
    ):
        stream.write(b"new")
    assert not storage._fs.delete_file.called


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


def test_errors_of_the_file_system_are_storage_errors(tmp_path, monkeypatch):
    """Kills: an OSError that passes through any method, one that is tried again
    though it stays.
    """
    storage = Storage(MEMORY)
    storage._fs = Mock(type_name="mock")
    monkeypatch.setattr(files.time, "sleep", pytest.fail)
    for name in (
        "get_file_info",
        "open_input_file",
        "open_output_stream",
        "create_dir",
    ):
        getattr(storage._fs, name).side_effect = OSError("AWS Error ACCESS_DENIED")
    for action in ("exists", "size", "list", "read", "write", "append", "delete"):
        with pytest.raises(StorageError, match=r"run.*ACCESS_DENIED"):
            getattr(storage, action)(
                "x", *([b""] if action in ("write", "append") else [])
            )


AWS = "When getting information for key 'k' in bucket 'bucket': AWS Error"


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (
            (
                f"{AWS} UNKNOWN (HTTP status 503) during HeadObject operation: No"
                " response body."
            ),
            True,
        ),
        (
            (
                f"{AWS} UNKNOWN (HTTP status 429) during HeadObject operation: No"
                " response body."
            ),
            True,
        ),
        (f"{AWS} SLOW_DOWN during CreateMultipartUpload operation: text", True),
        (
            (
                f"{AWS} NETWORK_CONNECTION during HeadObject operation: curlCode: 7,"
                " Could not connect"
            ),
            True,
        ),
        (OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT), "/nfs/a"), True),
        (OSError(errno.ESTALE, os.strerror(errno.ESTALE), "/nfs/a"), True),
        (
            (
                f"{AWS} UNKNOWN (HTTP status 400) during HeadObject operation: No"
                " response body."
            ),
            False,
        ),
        (f"{AWS} ACCESS_DENIED during HeadObject operation: No response body.", False),
        (f"{AWS} NO_SUCH_BUCKET during GetObject operation: text", False),
        *[
            (OSError(code, os.strerror(code), "/nfs/a"), False)
            for code in (
                errno.ENOENT,
                errno.EACCES,
                errno.ENOSPC,
                errno.EDQUOT,
                errno.EROFS,
                errno.EIO,
            )
        ],
    ],
)
def test_what_may_pass_is_tried_again_for_half_a_minute(
    monkeypatch, caplog, error, passes
):
    """Texts of pyarrow 26 before a server that answers so. Kills: a permanent error
    that waits, one that may pass and ends a run, retries without pauses or without end.
    """
    paused, asked = [], []
    monkeypatch.setattr(files.time, "sleep", paused.append)
    error = OSError(error) if isinstance(error, str) else error

    def access(name):
        asked.append(name)
        if len(asked) <= failures:
            raise error
        return "data"

    failures = 2
    if not passes:
        with pytest.raises(OSError):
            files.retry_transient(access)("a")
        assert asked == ["a"] and not paused
        return
    assert (
        files.retry_transient(access)("a") == "data"
        and paused == [1, 2]
        and "retrying in 2 s" in caplog.text
    )
    asked.clear(), paused.clear()
    failures = 99
    with pytest.raises(OSError):
        files.retry_transient(access)("a")
    assert sum(paused) == 31 and len(asked) == len(paused) + 1


def test_every_access_to_storage_is_patient(tmp_path, monkeypatch):
    """Each succeeds after one refusal. Kills: a method or a function that is not
    tried again.
    """
    monkeypatch.setattr(files.time, "sleep", lambda _: None)
    storage, inner = Storage(MEMORY), Storage(str(tmp_path))
    for name in ("x", "t"):
        inner.write(name, b"1")

    def once(function):
        failed = []

        def flaky(*args, **kwargs):
            if not failed:
                failed.append(1)
                raise OSError(f"{AWS} SLOW_DOWN")
            return function(*args, **kwargs)

        return flaky

    def flaky_files():
        real = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
        names = (
            "get_file_info",
            "open_input_file",
            "open_input_stream",
            "open_output_stream",
            "delete_file",
        )
        return Mock(
            type_name="s3", **{name: once(getattr(real, name)) for name in names}
        )

    for act in (
        lambda: storage.exists("x"),
        lambda: storage.read("x") == b"1",
        lambda: storage.list() == ["t", "x"],
        lambda: storage.write("y", b"2") is None,
        lambda: storage.append("y", b"2") is None,
        lambda: storage.delete("y") is None,
        lambda: storage.find("x") == b"1",
    ):
        storage._fs, storage.root = flaky_files(), ""
        assert act()
    for act in (
        lambda: files.kind("s3://b/x") == "file",
        lambda: files.children("s3://b/")[1] == ["t", "x"],
        lambda: len([*files.walk("s3://b/")]) == 2,
        lambda: files.read_bytes("s3://b/x", 9) == b"1",
    ):
        remote = flaky_files()
        monkeypatch.setattr(
            files,
            "locate",
            lambda path, remote=remote: (remote, path.rpartition("/")[2]),
        )
        assert act()


@pytest.mark.parametrize("kind", [Storage, ClaimedStorage])
@pytest.mark.parametrize("name", ["exists", "list", "read", "write", "delete"])
def test_pauses_of_nested_accesses_do_not_multiply(kind, name, monkeypatch):
    """A store that throttles for ever is left after one series of pauses."""
    paused, storage = [], kind(MEMORY, *(["token"] if kind is ClaimedStorage else []))
    monkeypatch.setattr(files.time, "sleep", paused.append)
    throttled = Mock(side_effect=OSError(f"{AWS} SLOW_DOWN"))
    calls = ("get_file_info", "open_input_file", "open_output_stream", "delete_file")
    storage._fs = Mock(type_name="s3", **dict.fromkeys(calls, throttled))
    with pytest.raises(StorageError, match="SLOW_DOWN"):
        getattr(storage, name)("x", *([b""] if name == "write" else []))
    assert sum(paused) == 31


def test_every_read_of_an_open_remote_file_is_retried(monkeypatch):
    """The file fails at its opening and before each of two pieces."""
    monkeypatch.setattr(files.time, "sleep", lambda _: None)
    content, fails = b"0123456789", iter([True, False] * 5)

    def refuse_once(answer):
        if next(fails):
            raise OSError(f"{AWS} SLOW_DOWN")
        return answer

    remote = Mock(size=lambda: len(content))
    remote.read_at = lambda num, at: refuse_once(content[at : at + num])
    storage = Storage(MEMORY)
    storage._fs = Mock(open_input_file=lambda name: refuse_once(remote))
    with storage.open("x") as file:
        assert file.read(4) == b"0123" and file.read_at(3, 6) == b"678"


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


def test_a_small_remote_file_takes_no_more_memory_than_it_has_bytes():
    """A limit of 256 TiB cannot be allocated."""
    store, path = files.locate("mock:///small.csv")
    with store.open_output_stream(path) as stream:
        stream.write(b"path,label")
    assert files.read_bytes("mock:///small.csv", 2**48) == b"path,label"
    assert files.read_bytes("mock:///small.csv", 3) == b"path"


def test_of_two_first_writers_one_writes(tmp_path, monkeypatch):
    """Kills: a look before the write instead of the file system's own answer."""
    for storage in (Storage(str(tmp_path)), Storage(MEMORY)):
        storage.delete("lock.json")
        assert storage.write_if_absent(
            "lock.json", b"1"
        ) and not storage.write_if_absent("lock.json", b"2")
        assert storage.read("lock.json") == b"1"
    storage = Storage(str(tmp_path))
    # both have looked before
    monkeypatch.setattr(storage, "exists", lambda name: False)
    assert not storage.write_if_absent("lock.json", b"2")
    monkeypatch.setattr(
        os, "link", Mock(side_effect=OSError(errno.EPERM, "no links here"))
    )
    assert (
        storage.write_if_absent("other.json", b"3")
        and storage.read("other.json") == b"3"
    )
    assert sorted(os.listdir(tmp_path)) == ["lock.json", "other.json"]


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


def test_a_path_that_is_no_text_is_one_line():
    with pytest.raises(StorageError, match=r"cannot open /tmp/\\ud800: "):
        Storage("/tmp/\ud800")


def test_json_of_nobody_knows_whom():
    """Kills: RecursionError, which no caller expects."""
    assert parse_json(b'{"a": [1]}') == {"a": [1]}
    for text in ("[" * 100_000, '{"a":' * 100_000, "{"):
        with pytest.raises(ValueError):
            parse_json(text)


@pytest.mark.parametrize(
    "root", ["s3://bucket/run?region=eu-west-1", "s3://bucket/run/?region=eu-west-1"]
)
def test_a_place_below_a_uri_keeps_its_options(root):
    """Kills: the name behind the options, where it is part of the region."""
    assert (
        Storage(root).below("pretrain/a b")
        == "s3://bucket/run/pretrain/a%20b?region=eu-west-1"
    )
    assert Storage(root).below("") == Storage(root).uri
    part = Storage(Storage(root).below("part"))
    assert part.root == "bucket/run/part"
    assert weights.is_file("s3://bucket/w.safetensors?region=eu-west-1")
    assert not weights.is_file("s3://bucket/w?endpoint_override=http://host/w.pt")
