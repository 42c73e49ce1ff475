"""Finished cells in a record: their numbers, with which a table resumes where the runs are gone."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from uno.config import Config, dump_yaml, training_settings
from uno.data.files import Storage, parse_json
from uno.errors import ConfigError
from uno.reproduce.effects import read_json
from uno.reproduce.experiments import Cell
from uno.runs import NUMERICS

CELLS = "cells.jsonl"
FILES = ("metrics.json", "environment.json", "estimate.json")
PLACES = ("data.source", "data.labeled", "data.unlabeled", "data.known_classes", "model.weights")
PRIVATE = ("command", "platform")  # of environment.json: paths of a machine


def write(record: Storage, cells: Sequence[Cell], output: Path, seconds: Mapping[str, float]) -> None:
    """The finished ones of ``cells`` below ``output``, one a line, beside other cells of the record;
    ``seconds`` of cells and what they start from are by name.
    """
    lines = {line["cell"]: line for line in _lines(record)}
    for cell in cells:
        files = {name: read_json(output / cell.name / name) for name in FILES}
        if files["metrics.json"]:
            environment = {k: v for k, v in files["environment.json"].items() if k not in PRIVATE}
            lines[cell.name] = {
                "cell": cell.name, "settings": _settings(cell.config), "seconds": seconds.get(cell.name, 0.0),
                "start": cell.pretraining, "start_seconds": seconds.get(cell.pretraining, 0.0),
                **files, "environment.json": environment,
            }  # fmt: skip
    record.write(CELLS, "".join(json.dumps(line) + "\n" for line in lines.values()).encode())


def restore(record: Storage, cells: Sequence[Cell], output: Path) -> Iterator[tuple[str, float]]:
    """Put those of ``cells`` below ``output`` that it lacks and the record has, of the same settings and the
    present NUMERICS; yields their names, and what they started from, with seconds. ConfigError: no record.
    """
    found = {line["cell"]: line for line in _lines(record)}
    for cell in cells:
        run, line = output / cell.name, found.get(cell.name)
        if line is None or run.exists() or line["settings"] != _settings(cell.config):
            continue
        if line["environment.json"]["numerics"] != NUMERICS:
            continue
        storage = Storage(str(run))
        storage.write("config.yaml", dump_yaml(cell.config).encode())
        for name in reversed(FILES):  # metrics.json last: with it a cell is finished
            if line.get(name):
                storage.write(name, json.dumps(line[name]).encode())
        yield line["start"], float(line["start_seconds"])
        yield cell.name, float(line["seconds"])


def _lines(record: Storage) -> Iterator[dict[str, Any]]:
    for number, text in enumerate((record.read(CELLS) if record.exists(CELLS) else b"").splitlines(), 1):
        try:
            line = dict(parse_json(text.decode()))
            _ = line["settings"], line["start"], line["environment.json"]["numerics"]
            _ = line["cell"], line["seconds"] + line["start_seconds"]
        except (ValueError, TypeError, LookupError):
            raise ConfigError(f"{record.uri}: line {number} of {CELLS} is damaged; delete the file") from None
        yield line


def _settings(config: Config) -> str:
    """A hash of what decides the numbers of a cell, wherever its data lie."""
    kept = training_settings(config)
    kept |= {key: re.sub("/.*/", "", str(kept[key])) for key in PLACES}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:12]
