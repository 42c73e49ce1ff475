"""How fast are tar shards next to Parquet shards of the same images, in the same order?

    python -m benchmarks.shards --data parquet:DIR --repeats 5

Prints one JSON row with images/s of three kinds of work, for both: every image read
(``read``), decoded as a resident set (``decode``), and cut into views as a stream
(``stream``), by all cores of one process from the page cache. The source is packed as
Parquet (``uno data pack``) and its rows written as tar beside it. Methods take turns (A
B A B) after a warm-up turn.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import tarfile
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measure import environment, medians, spread, take_turns
from uno.config import override
from uno.data.decode import BadRows, decode_many, pieces
from uno.data.files import Storage
from uno.data.images import InMemory
from uno.data.pack import pack, store_local
from uno.data.plan import make_pretrain_plan
from uno.data.rows import Rows
from uno.data.sources import read_rows
from uno.data.splits import limit_rows
from uno.data.stream import CropJob, StreamSet, crop_local, decode_here
from uno.presets import preset

CORES = os.cpu_count() or 1
BATCH = 64
SHARD_BYTES = 64 * 2**20


def write_tar(rows: Rows, folder: Path) -> None:
    """``rows`` in shards of about :data:`SHARD_BYTES`: KEY.cls and KEY.png, whatever
    the format.
    """
    folder.mkdir()
    archive, filled = None, SHARD_BYTES
    for row, label in enumerate(rows.labels):
        if filled >= SHARD_BYTES:
            if archive is not None:
                archive.close()
            name = f"train-{len([*folder.iterdir()]):05}.tar"
            archive, filled = (
                tarfile.open(folder / name, "w", format=tarfile.USTAR_FORMAT),  # noqa: SIM115
                0,
            )
        image: Any = rows.images[row]
        for suffix, content in (("cls", (label or "").encode()), ("png", image)):
            info = tarfile.TarInfo(f"{row:08}.{suffix}")
            info.size = len(content)
            assert archive is not None
            archive.addfile(info, io.BytesIO(content))
            filled += len(content) + 1024
    if archive is not None:
        archive.close()


def read(rows: Rows) -> None:
    """Every image in memory once, in order, some at a time."""
    assert sum(
        len(some.read_images(np.arange(len(own)))) for own, some in pieces(rows.images)
    ) == len(rows)


def decode(rows: Rows, side: int) -> None:
    """As a resident run decodes them."""
    _, reasons = decode_many(rows.images, side, CORES)
    assert not any(reasons)


def stream(rows: Rows, side: int, folder: str) -> None:
    """As a streamed run cuts them, a pass in the order of training."""
    values = {
        "data.stored_size": side,
        "augment.large.size": side,
        "augment.small.num_views": 0,
    }
    config = override(preset("cifar10"), values)
    every, none = np.arange(len(rows)), np.empty(0, np.int64)
    bad = BadRows([], InMemory([]), 1.0, Storage(folder))
    labels, crop = (
        torch.zeros(len(rows), dtype=torch.int64),
        partial(crop_local, threads=CORES),
    )
    train = StreamSet(
        rows.images,
        every,
        labels,
        none,
        1,
        1,
        bad,
        crop,
        decode_here(config, rows.images),
    )
    plan = make_pretrain_plan(0, BATCH, len(rows))
    job = CropJob(config, train, plan, 0, 1, 0, plan.steps_per_epoch)
    assert sum(len(pixels) for pixels, _ in crop_local(job, CORES)) == job.last * BATCH


def main() -> int:
    """Prints the row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", default="digits")
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    config = override(preset("scratch"), {"data.source": options.data}).data
    rows = read_rows(config)
    if options.limit is not None:
        rows = rows.take(limit_rows(rows, options.limit))
    with tempfile.TemporaryDirectory() as folder:
        place = Storage(f"{folder}/parquet")
        pack(
            rows, np.ones(len(rows), dtype=bool), place, SHARD_BYTES, store_local(CORES)
        )
        packed = read_rows(
            override(
                preset("scratch"), {"data.source": f"parquet:{folder}/parquet"}
            ).data
        )
        write_tar(packed, Path(folder, "tar"))
        shards = read_rows(
            override(preset("scratch"), {"data.source": f"tar:{folder}/tar"}).data
        )
        kinds: dict[str, Callable[[Rows], None]] = {
            "read": read,
            "decode": partial(decode, side=options.size),
            "stream": partial(stream, side=options.size, folder=folder),
        }
        methods = {
            f"{kind} {name}": partial(work, found)
            for kind, work in kinds.items()
            for name, found in (("parquet", packed), ("tar", shards))
        }
        seconds = take_turns(methods, options.repeats)
    middle = medians(seconds)
    result = {
        "question": "images/s of tar shards next to Parquet shards of the same images",
        "command": f"python -m benchmarks.shards {' '.join(sys.argv[1:])}",
        **environment(),
        "images": len(packed),
        "images_per_s": {
            name: round(len(packed) / value) for name, value in middle.items()
        },
        "tar_to_parquet": {
            kind: round(middle[f"{kind} parquet"] / middle[f"{kind} tar"], 3)
            for kind in kinds
        },
        "spread": spread(seconds),
        "seconds": {
            name: [round(value, 3) for value in values]
            for name, values in seconds.items()
        },
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
