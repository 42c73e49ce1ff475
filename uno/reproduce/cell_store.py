"""Finished cells in a record: their numbers, with which a table resumes where the
runs are gone.
"""

import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from uno.config import Config, dump_yaml, override, training_settings
from uno.data.files import Storage, parse_json
from uno.errors import ConfigError
from uno.reproduce.effects import read_json
from uno.reproduce.experiments import Cell
from uno.runs import NUMERICS, TOUCHED

CELLS = "cells.jsonl"
FILES = ("metrics.json", "environment.json", "estimate.json")
PLACES = (
    "data.source",
    "data.labeled",
    "data.unlabeled",
    "data.known_classes",
    "model.weights",
)
PRIVATE = ("command", "platform")  # of environment.json: paths of a machine


def write(
    record: Storage, cells: Sequence[Cell], output: Path, seconds: Mapping[str, float]
) -> None:
    """The finished ones of ``cells`` below ``output``, one a line, beside other cells
    of the record; ``seconds`` of cells and what they start from are by name.
    """
    lines = {line["cell"]: line for line in _lines(record)}
    for cell in cells:
        files = {name: read_json(output / cell.name / name) for name in FILES}
        if files["metrics.json"]:
            environment = {
                k: v for k, v in files["environment.json"].items() if k not in PRIVATE
            }
            lines[cell.name] = {
                "cell": cell.name,
                "settings": settings_hash(cell.config),
                "seconds": seconds.get(cell.name, 0.0),
                "start": cell.pretraining,
                "start_seconds": seconds.get(cell.pretraining, 0.0),
                **files,
                "environment.json": environment,
            }
    data = "".join(json.dumps(line) + "\n" for line in lines.values()).encode()
    record, name = _place(record)
    record.write(name, gzip.compress(data, mtime=0) if name.endswith(".gz") else data)


def restore(
    record: Storage, cells: Sequence[Cell], output: Path
) -> Iterator[tuple[str, float]]:
    """Put those of ``cells`` below ``output`` that it lacks and the record has; yields
    their names, and what they started from, with seconds. ConfigError: no record.
    """
    found = {line["cell"]: line for line in _lines(record)}
    for cell in stored(record, cells):
        run, line = output / cell.name, found[cell.name]
        if run.exists():
            continue
        storage = Storage(str(run))
        storage.write("config.yaml", dump_yaml(cell.config).encode())
        for name in reversed(FILES):  # metrics.json last: with it a cell is finished
            if line.get(name):
                storage.write(name, json.dumps(line[name]).encode())
        yield line["start"], float(line["start_seconds"])
        yield cell.name, float(line["seconds"])


def stored(record: Storage, cells: Sequence[Cell]) -> list[Cell]:
    """The ``cells`` that the record has with these settings, and that no later
    change of numbers touches.
    """
    found = {line["cell"]: line for line in _lines(record)}
    return [
        cell
        for cell in cells
        if (line := found.get(cell.name))
        and line["settings"] == settings_hash(cell.config)
        if not _is_touched(cell, line["environment.json"]["numerics"])
    ]


def _is_touched(cell: Cell, numerics: int) -> bool:
    """Whether a change of numbers after ``numerics`` names a word of the cell, or
    none and so all cells.
    """
    words = set(
        re.findall(
            r"\w+",
            f"{cell.name} {[*training_settings(cell.config).values()]}".replace(
                "-", "_"
            ),
        )
    )
    later = [TOUCHED.get(number, ()) for number in range(numerics + 1, NUMERICS + 1)]
    return any(not touched or words.intersection(touched) for touched in later)


def _place(record: Storage) -> tuple[Storage, str]:
    """The directory and name of a record's cells; a record may be a file,
    ``TABLE.jsonl.gz``.
    """
    folder, _, name = record.uri.rpartition("/")
    return (
        (Storage(folder or "."), name)
        if name.endswith(".jsonl.gz")
        else (record, CELLS)
    )


def _lines(record: Storage) -> Iterator[dict[str, Any]]:
    record, name = _place(record)
    data = record.read(name) if record.exists(name) else b""
    if name.endswith(".gz") and data:
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error):
            raise ConfigError(
                f"{record.below(name)} is damaged; delete the file"
            ) from None
    for number, text in enumerate(data.splitlines(), 1):
        try:
            line = dict(parse_json(text.decode()))
            _ = line["settings"], line["start"], line["environment.json"]["numerics"]
            _ = line["cell"], line["seconds"] + line["start_seconds"]
        except (ValueError, TypeError, LookupError):
            raise ConfigError(
                f"{record.uri}: line {number} of {name} is damaged; delete the file"
            ) from None
        yield line


def settings_hash(config: Config) -> str:
    """A hash of what decides the numbers of a cell, wherever its data lie: the settings
    that are not their defaults, so that a new one changes no hash.
    """
    defaults = training_settings(override(Config(), {"method": config.method}))
    kept = {
        key: value
        for key, value in training_settings(config).items()
        if value != defaults.get(key, ...)
    }
    kept |= {key: re.sub("/.*/", "", str(kept[key])) for key in PLACES if key in kept}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:12]
