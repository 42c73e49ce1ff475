"""Whose a directory is, what it was made from, and files that prove their content."""

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

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


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (dump_tensors("a/b", TENSORS, FACTS), "^it is the file a/b$"),
        (safetensors.torch.save({"w": torch.ones(2)}), "^it is "),
        (b"\xff" * 99, "^it is "),
        (b"\x02" + b"\0" * 7 + b"[]", "^it is "),
    ],
)
def test_another_file_is_noticed(data, line):
    with pytest.raises(ValueError, match=line):
        load_tensors("a/c", data)


MADE = {"rows": 3, "of": "x"}


def test_an_output_is_not_begun_among_files_of_others(storage):
    """A killed command leaves temporary files and locks, in which one can begin."""
    for name in (".made.json.0a1b2c3d", "lock.json", ".lock.json.0a1b2c3d", "also.txt"):
        storage.write(name, b"")
    assert not holds_output(storage, "made.json", "thing", {"also.txt"})
    line = r"run is not empty and holds no thing \(no made.json\); nothing"
    with pytest.raises(ConfigError, match=line):
        claim_directory(storage, "made.json", MADE, "thing")
    storage.delete("also.txt")
    claim_directory(storage, "made.json", MADE, "thing", finished=False)
    assert read_mapping(storage, "made.json") == {**MADE, "finished": False}


@pytest.mark.parametrize("content", [None, b"[]", b"{", b"[" * 100_000])
def test_an_output_is_continued_by_the_same_options_only(storage, content):
    """Kills: two outputs in one directory."""
    claim_directory(storage, "made.json", MADE, "thing", finished=False)
    claim_directory(storage, "made.json", MADE, "thing", finished=True)
    assert read_mapping(storage, "made.json")["finished"] is False
    if content is not None:
        storage.write("made.json", content)
    line = r"holds another thing \(other data or options: .*of\)"
    with pytest.raises(ConfigError, match=line):
        claim_directory(storage, "made.json", {"rows": 3, "of": "y"}, "thing")


def test_what_killed_writers_left_goes_and_nothing_else(storage):
    """Kills: the lock of a command at work, a file of the user's with a dot, another
    file's list_temporary_files.
    """
    left = [".a.json.0a1b2c3d", "b/.c.0a1b2c3d"]
    others = [".lock.json.0a1b2c3d", ".notes", "a.json", "b/c"]
    for name in (*left, *others):
        storage.write(name, b"")
    delete_temporary_files_of(storage, "c")
    assert list_temporary_files(storage) == left
    assert list_temporary_files(storage, "b") == left[1:]
    delete_temporary_files_of(storage, "a.json")
    assert list_temporary_files(storage) == left[1:]
    delete_temporary_files(storage)
    assert not any(storage.exists(name) for name in left)
    assert all(storage.exists(name) for name in others)
