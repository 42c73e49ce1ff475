"""The processes of this machine, as /proc shows them."""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """One that runs; CPU seconds of its ended children, too."""

    parent: int
    cpu: float
    name: str
    words: list[str]


def running() -> dict[int, Process]:
    """Every process by its number."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            name, _, rest = (
                (folder / "stat").read_text().partition("(")[2].rpartition(") ")
            )
            fields, words = rest.split(), (folder / "cmdline").read_text().split("\0")
            cpu = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
            if fields[0] != "Z":
                found[int(folder.name)] = Process(int(fields[1]), cpu, name, words)
    return found


def below(roots: Iterable[int], found: dict[int, Process]) -> dict[int, Process]:
    """Those of ``found`` that are ``roots`` or descend from them."""
    ours = set(roots)
    while (
        more := {pid for pid, process in found.items() if process.parent in ours} - ours
    ):
        ours |= more
    return {pid: found[pid] for pid in ours if pid in found}
