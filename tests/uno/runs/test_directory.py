"""A run directory: who may use it, and what is deleted from it."""

import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.uno.data.builders import encoded, pixels
from tests.uno.small_run import small_config
from uno.config import (
    Config,
    DataConfig,
    dump_yaml,
    override,
)
from uno.data.rows import DEFAULT_OPTIONS
from uno.data.sources import read_folder, read_rows
from uno.errors import ConfigError
from uno.presets import PRESETS, preset
from uno.runs import directory

CONFIG = small_config(pretrain__epochs=2, discover__epochs=2)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("recipe", ["paper", "v2"])
def test_the_same_config_opens_its_run_again(storage, name, recipe):
    """Kills: a value that YAML does not give back (1e-5 as text, tuples, None)."""
    config = preset(name, recipe)
    for _ in range(2):
        directory.begin_run(config, storage, "print")
    assert override(Config(), directory.read_config_tree(storage)) == config


def test_what_does_not_fit_the_run_is_refused(storage):
    """Kills: a run continued under other settings or on other data, keys that are
    not named.
    """
    directory.begin_run(CONFIG, storage, "print")
    changed = override(CONFIG, {"objective.epsilon": 0.1, "discover.epochs": 4})
    facts = json.loads(storage.read("environment.json"))
    assert facts["data_fingerprint"] == "print" and "torch" in facts["versions"]
    for config, data, says in (
        (
            changed,
            "print",
            r"other settings: discover\.epochs, objective\.epsilon; use",
        ),
        (preset("cifar10"), "print", r"\.\.\."),
        (CONFIG, "other", "trained on other data"),
    ):
        with pytest.raises(ConfigError, match=says):
            directory.begin_run(config, storage, data)
    facts["format_version"] = 99
    storage.write("environment.json", json.dumps(facts).encode())
    with pytest.raises(ConfigError, match="format version 99, not 3; use --overwrite"):
        directory.begin_run(CONFIG, storage, "print")


DEEP = b"[" * 100_000  # more than Python recurses
BOMB = b"a: &a {x: 1}\nb: &b {x: *a, y: *a}\nc: {x: *b, y: *b}\n"


@pytest.mark.parametrize(
    "content", [b"{", b"[]", b"\xff\xfe", b"3", b"", DEEP, BOMB, b"#" * 2_000_000]
)
@pytest.mark.parametrize("name", ["environment.json", "config.yaml"])
def test_damaged_files_of_a_run_are_one_line(storage, name, content):
    """Kills: tracebacks of json and yaml, a YAML file that takes minutes."""
    directory.begin_run(CONFIG, storage, "print")
    storage.write(name, content)
    with pytest.raises(ConfigError, match=rf"{name} is (missing or )?damaged"):
        directory.begin_run(CONFIG, storage, "print")


def test_what_a_kill_between_two_writes_leaves_does_not_block_a_directory(storage):
    for name in ("environment.json", ".lock.json.0a1b2c3d", ".config.yaml.0a1b2c3d"):
        storage.write(name, b"{")
    directory.begin_run(CONFIG, storage, "print")
    assert storage.read("config.yaml").decode() == dump_yaml(CONFIG)


def test_what_killed_commands_left_is_deleted_and_nothing_else(storage):
    """A file that a logger may be writing stays, too."""
    leftovers = ["checkpoints/.x.safetensors.0a1b2c3d", "ray/attempt/x.json", "STOP"]
    kept = ["checkpoints/discover/step_00000006.safetensors", "config.yaml"]
    kept.append("loggers/.wandb.0a1b2c3d")
    for name in leftovers + kept:
        storage.write(name, b"")
    directory.delete_leftovers(storage)
    assert not any(map(storage.exists, leftovers))
    assert all(map(storage.exists, kept))


def folder_rows(folder, numbers=(), first_seed=0):
    for number in numbers:
        path = folder / "abcd"[number % 4] / f"{number:02}.bmp"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(pixels(first_seed + number), "BMP"))
    return read_folder(str(folder), DEFAULT_OPTIONS)


def test_images_that_were_written_to_are_other_data(tmp_path, storage):
    """Of the same names and sizes; a copy with its times is the same data."""
    data = tmp_path / "data"
    rows = folder_rows(data, range(40))
    for _ in range(2):  # begins, resumes
        directory.begin_images(storage, rows)
    shutil.copytree(data, tmp_path / "copy")
    for folder in (data, tmp_path / "copy"):
        directory.check_images(storage, folder_rows(folder))
    changed = folder_rows(data, [4, 5], 100)
    assert changed.fingerprint == rows.fingerprint
    for check in (directory.check_images, directory.begin_images):
        with pytest.raises(ConfigError, match=r"2 images .*a/04.bmp.*--overwrite"):
            check(storage, changed)


def test_a_run_without_times_of_its_images_is_not_refused(tmp_path, storage):
    """Also where the file is damaged."""
    rows = folder_rows(tmp_path / "data", range(4))
    directory.check_images(storage, rows)
    directory.begin_images(storage, rows)
    (path,) = (tmp_path / "run").iterdir()
    path.write_bytes(path.read_bytes()[:20])
    directory.check_images(storage, rows)


def test_files_that_hold_images_are_compared(tmp_path, storage):
    """A table of the same size has the same fingerprint, and other times."""

    def table_rows(seed):
        images = [encoded(pixels(seed + i), "BMP") for i in range(8)]
        table = pa.table({"id": list("abcdefgh"), "image": images, "label": ["a"] * 8})
        pq.write_table(table, tmp_path / "x.parquet", compression="none")
        return read_rows(DataConfig(source=str(tmp_path / "x.parquet")))

    rows = table_rows(0)
    directory.begin_images(storage, rows)
    changed = table_rows(100)
    assert changed.fingerprint == rows.fingerprint
    with pytest.raises(ConfigError, match="8 images"):
        directory.check_images(storage, changed)
