"""Whose a directory is, what it was made from, and files that prove their content."""

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from uno.data.files import Storage
from uno.data.output import (
    claim_directory,
    delete_temporary_files,
    delete_temporary_files_of,
    dump_tensors,
    holds_output,
    list_temporary_files,
    load_tensors,
    read_mapping,
)
from uno.errors import ConfigError

TENSORS = {
    "weight": torch.arange(6.0).view(2, 3),
    "bias": torch.ones(3, dtype=torch.bfloat16),
}
FACTS = {"state": '{"sha256": "' + "0" * 64 + '"}', "config": "seed: 0\n", "é": "ü"}


@pytest.fixture
def storage(tmp_path) -> Storage:
    return Storage(str(tmp_path / "out"))


def test_a_file_of_tensors_gives_back_what_it_holds_and_any_reader_opens_it(tmp_path):
    data = dump_tensors("a/b", TENSORS, FACTS)
    tensors, facts = load_tensors("a/b", data)
    assert facts.items() >= FACTS.items() and tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in TENSORS.items())
    (tmp_path / "x.safetensors").write_bytes(data)
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata()["config"] == "seed: 0\n"


def test_every_changed_bit_and_every_lost_byte_is_noticed():
    data = dump_tensors("a/b", {"w": torch.ones(2)}, {"a": "b"})
    for i in range(len(data)):
        for damaged in (data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :], data[:i]):
            with pytest.raises(ValueError, match=r"^it is "):
                load_tensors("a/b", damaged)
    with pytest.raises(ValueError, match=r"^it is the file a/b$"):
        load_tensors("a/c", data)
    for other in (
        safetensors.torch.save({"w": torch.ones(2)}),
        b"\xff" * 99,
        b"\x02" + b"\0" * 7 + b"[]",
    ):
        with pytest.raises(ValueError, match=r"^it is "):
            load_tensors("a/b", other)


def test_a_directory_is_begun_continued_or_refused(storage):
    """Kills: an output among somebody's files, two outputs in one directory."""
    for name in (
        ".made.json.0a1b2c3d",
        "lock.json",
        ".lock.json.0a1b2c3d",
        "also.txt",
    ):  # of a killed command
        storage.write(name, b"")
    assert not holds_output(storage, "made.json", "thing", {"also.txt"})
    with pytest.raises(
        ConfigError,
        match=r"out is not empty and holds no thing \(no made.json\); nothing",
    ):
        claim_directory(storage, "made.json", {"rows": 3}, "thing")
    storage.delete("also.txt")
    claim_directory(
        storage, "made.json", {"rows": 3, "of": "x"}, "thing", finished=False
    )
    assert read_mapping(storage, "made.json") == {
        "rows": 3,
        "of": "x",
        "finished": False,
    }
    claim_directory(
        storage, "made.json", {"rows": 3, "of": "x"}, "thing", finished=True
    )
    assert read_mapping(storage, "made.json")["finished"] is False
    for content in (None, b"[]", b"{", b"[" * 100_000):
        if content is not None:
            storage.write("made.json", content)
        with pytest.raises(
            ConfigError, match=r"holds another thing \(other data or options: .*of\)"
        ):
            claim_directory(storage, "made.json", {"rows": 3, "of": "y"}, "thing")
    storage.write("below/mine.txt", b"")
    with pytest.raises(ConfigError, match=r"out/below is not empty and holds no thing"):
        claim_directory(storage, "below/made.json", {}, "thing")


def test_what_killed_writers_left_goes_and_nothing_else(storage):
    """Kills: the lock of a command at work, a file of the user's with a dot, another
    file's list_temporary_files.
    """
    names = [
        ".a.json.0a1b2c3d",
        "b/.c.0a1b2c3d",
        ".lock.json.0a1b2c3d",
        ".notes",
        "a.json",
        "b/c",
    ]
    for name in names:
        storage.write(name, b"")
    delete_temporary_files_of(storage, "c")
    assert (
        list_temporary_files(storage) == names[:2]
        and list_temporary_files(storage, "b") == names[1:2]
    )
    delete_temporary_files_of(storage, "a.json")
    assert list_temporary_files(storage) == names[1:2]
    delete_temporary_files(storage)
    assert [storage.exists(name) for name in names] == [
        False,
        False,
        True,
        True,
        True,
        True,
    ]
