"""``uno data check``: what a run would make of a data set, before it starts. ``uno data pack``: write it as
Parquet shards that stream well.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from pipelines import cli
from pipelines.arguments import Arguments
from pipelines.options import parse
from uno.errors import ConfigError

USAGE = """\
usage: uno data check --data SOURCE [OPTIONS]
       uno data pack  --data SOURCE --output DIR [--shard-mb 128] [OPTIONS]

check  prints classes, counts and problems, as a run would find them; exit code 2 if it could not succeed.
pack   writes the rows of any source to DIR as Parquet shards with checksums, shuffled, encoded images as they
       are; --data parquet:DIR then reads the same data. Every image is decoded once: unreadable ones are
       listed in DIR/bad_samples.jsonl and left out. DIR is a path or a URI (s3://, gs://); the same command
       goes on after a kill. With --known-classes the rows that a run with it would see as labeled lie
       together; all labels are kept.

Options are those of uno discover."""
ACTIONS = ("check", "pack")


def main(argv: Sequence[str]) -> int:
    """Check or pack a data set."""
    action, *rest = argv or ("--help",)
    if action in ("-h", "--help"):
        print(USAGE)
        return 0 if argv else 2
    if action not in ACTIONS:
        raise ConfigError(f"unknown action {action!r}; use: uno data check --data SOURCE, or uno data pack")
    if any(word in ("-h", "--help") for word in rest):
        print(USAGE)
        return 0
    return check_data(rest) if action == "check" else pack_data(rest)


def check_data(argv: Sequence[str]) -> int:
    """Print classes, counts and problems; exit code 2 when a run could not succeed."""
    from pipelines.ingest import decide
    from uno.data.check import check, format_report
    from uno.data.sources import read_rows
    from uno.data.splits import make_task

    config, task = decide(parse(argv, "data").config, fresh=True)
    task = task or make_task(read_rows(config.data), config.data)
    problems = check(task, config)
    print(format_report(task, problems))
    return 2 if any(problem.level == "error" for problem in problems) else 0


def pack_data(argv: Sequence[str]) -> int:
    """Write a source as Parquet shards.

    Raises:
        ConfigError: no --output, or one that holds something else.
    """
    from pipelines.console import Progress, say
    from uno.config import override
    from uno.data.files import Storage
    from uno.data.pack import pack
    from uno.data.sources import read_rows
    from uno.data.splits import labeled_rows, limit_rows

    own = Arguments("uno data pack", "Write Parquet shards.")
    own.add_argument("--shard-mb", type=int, default=128)
    given, rest = own.parse_known_args(argv)
    if given.shard_mb < 1:
        raise ConfigError(f"--shard-mb must be at least 1, not {given.shard_mb}")
    config = parse(rest, "data").config
    if config.output is None:
        raise ConfigError("uno data pack needs --output DIR, the place for the shards")
    rows = read_rows(override(config, {"data.ingest": "streaming"}).data)
    if config.data.limit is not None:
        rows = rows.take(limit_rows(rows, config.data.limit))
    labeled = labeled_rows(rows, config.data) & (rows.split == "train")
    threads = config.compute.threads or os.cpu_count() or 1
    with Progress() as progress:

        def show(done: int, total: int) -> None:
            progress({"phase": "pack", "step": done, "total_steps": total})

        packed = pack(
            rows, np.asarray(labeled), Storage(config.output), given.shard_mb * 2**20, threads, show
        )
    say(
        f"{packed.rows:,} rows, {packed.packed:,} packed, {packed.bad:,} bad, {packed.shards:,} shards: "
        f"{config.output}"
    )
    return 0


if __name__ == "__main__":
    cli.run(main)
