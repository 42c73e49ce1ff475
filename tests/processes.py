"""The processes of this machine, as /proc shows them."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """A running process: the number of its parent, and its command."""

    parent: int
    words: list[str]


def running() -> dict[int, Process]:
    """Return every running process by its number."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            stat = (folder / "stat").read_text().rpartition(") ")[2]
            state, parent, *_ = stat.split()
            words = (folder / "cmdline").read_text().split("\0")
            if state != "Z":
                found[int(folder.name)] = Process(int(parent), words)
    return found


def below(roots: Iterable[int], found: dict[int, Process]) -> dict[int, Process]:
    """Return the processes of ``found`` that are ``roots`` or descend from them."""
    ours = set(roots)
    while (
        more := {pid for pid, process in found.items() if process.parent in ours} - ours
    ):
        ours |= more
    return {pid: found[pid] for pid in ours if pid in found}
