"""Reads the files that TensorBoard and W&B write, for the tests of sweeps."""

import time
from pathlib import Path
from typing import Any

from tensorboardX.proto.event_pb2 import Event

from uno.data.files import Storage


def events(storage: Storage, phase: str) -> list[Event]:
    """Of one directory, in order of its files."""
    found = []
    for name in sorted(storage.list(f"tensorboard/{phase}")):
        data = storage.read(f"tensorboard/{phase}/{name}")
        while data:  # length (8), checksum (4), event, checksum (4)
            size = int.from_bytes(data[:8], "little")
            found.append(Event.FromString(data[12 : 12 + size]))
            data = data[16 + size :]
    return found


def wandb_records(path: Path) -> list:
    """W&B's messages in its transaction log: LevelDB's log format after a header of
    seven bytes.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, found, whole = path.read_bytes(), 7, [], b""
    while place + 7 <= len(data):
        if (left := 2**15 - place % 2**15) < 7:
            place += left
            continue
        size, kind = (
            int.from_bytes(data[place + 4 : place + 6], "little"),
            data[place + 6],
        )
        whole += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            found.append(Record.FromString(whole))
            whole = b""
    return found


def ended_wandb_records(path: Path) -> list:
    """Those of a run that has ended: its service writes on when finish() has
    returned.
    """
    end = time.monotonic() + 60
    while (
        not (parsed := wandb_records(path))
        or parsed[-1].WhichOneof("record_type") != "exit"
    ):
        assert time.monotonic() < end
        time.sleep(0.05)
    return parsed


def wandb_run(storage: Storage) -> tuple[Any, list[dict[str, str]], dict[str, str]]:
    """The run, the lines and the summary of the one offline run in that directory,
    values as JSON.
    """
    (path,) = Path(storage.path("wandb")).glob("offline-run-*/run-*.wandb")
    parsed = ended_wandb_records(path)
    history = [
        {
            item.key or "/".join(item.nested_key): item.value_json
            for item in one.history.item
        }
        for one in parsed
        if one.WhichOneof("record_type") == "history"
    ]
    (run,) = (one.run for one in parsed if one.WhichOneof("record_type") == "run")
    return (
        run,
        history,
        {
            u.key or u.nested_key[0]: u.value_json
            for p in parsed
            for u in p.summary.update
        },
    )
