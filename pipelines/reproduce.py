"""``uno reproduce TABLE``: the paper's tables and figures, run, measured and set beside its numbers.

Also ``python -m pipelines.reproduce`` for ``ray job submit``. Every cell is a run in a directory of its own
(``OUTPUT/cells``), cells with the same pretraining share it (``OUTPUT/pretrain``); finished ones are never
repeated, so the same command continues what was stopped or killed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines import cli
from pipelines.console import say
from uno.errors import ConfigError, NumericsError, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipelines.cells import Ended, Job, Runner
    from uno.config import Config
    from uno.reproduce.definitions import Table
    from uno.reproduce.tables import Cell

DATA_OPTIONS = {
    "cifar10": "CIFAR10 in torchvision's layout",
    "cifar100": "CIFAR100 in torchvision's layout",
    "imagenet": "ImageNet: train/ and val/ with wnid folders",
    "cifar10-jpeg": "CIFAR10 as JPEG in Parquet, for --scale small: adds a subset of it",
}
OWN_KEYS = ("seed", "output", "preset", "data.source", "data.labeled", "data.unlabeled", "model.weights")
"""What a table decides for its cells; everything else can be changed for all of them at once."""

EPILOG = """\
Options of uno discover hold for every cell (--discover.epochs 100, --recipe v2, --device cuda); what a row of
the table changes wins. Finished cells are read, not repeated; a larger --seeds adds to them.
"""


@dataclass(frozen=True)
class Request:
    """What ``uno reproduce`` was asked to do."""

    table: Table
    scale: str
    seeds: int
    output: Path
    directories: Mapping[str, str]
    changes: Mapping[str, Any]
    parallel: int | None
    runner: str
    record: Path | None
    dry_run: bool
    command: str


def main(argv: Sequence[str]) -> int:
    """Run what is missing of a table and write it."""
    request = parse(argv)
    jobs = plan(request)
    if request.dry_run:
        _describe(request, jobs)
        return 0
    run_missing(request, jobs)
    return write_tables(request)


def parser() -> argparse.ArgumentParser:
    """The options that are not fields of the configuration."""
    from pipelines.arguments import Arguments
    from uno.reproduce.tables import TABLES

    new = Arguments("uno reproduce", "Run a table or figure of the paper and write it beside its numbers.")
    new.epilog = EPILOG
    add = new.add_argument
    add("table", metavar="TABLE", help=", ".join(TABLES))
    add("--scale", choices=("small", "full"), default="small", help="default: small, for two CPU cores")
    add("--seeds", type=int, help="runs of each row (default: 3; tsne: 1)")
    add("--output", metavar="DIR", help="default: runs/reproduce-TABLE (-full); for Ray nodes a shared one")
    for option, text in DATA_OPTIONS.items():
        add(f"--{option}", metavar="DIR", help=text)
    add("--datasets", nargs="+", metavar="NAME", help="only these data sets of the table")
    add("--rows", nargs="+", metavar="ROW", help="only these rows, and the reference row")
    add("--parallel", type=int, metavar="N", help="cells at a time (default: cores / threads, or the GPUs)")
    add("--runner", choices=("auto", "processes", "ray"), default="auto",
        help="auto: Ray where RAY_ADDRESS is set or there are several GPUs")  # fmt: skip
    add("--record", metavar="DIR", help="also write README.md and result.json there")
    add("--dry-run", action="store_true", help="list the cells and what they would cost")
    return new


def parse(argv: Sequence[str]) -> Request:
    """The request of a command line.

    Raises:
        ConfigError: an unknown table or option, or data that ``full`` needs and nobody named.
        SystemExit: after ``--help``.
    """
    from pipelines.options import RAY_JOB, overrides
    from uno.reproduce import tables

    own, rest = parser().parse_known_args(list(argv))
    table = tables.build(own.table, own.scale)
    changes = overrides(rest, "reproduce")
    for key in changes:
        if key in OWN_KEYS:
            raise ConfigError(f"{key} is for the table to choose; uno reproduce has --seeds and --output")
    for name in ("seeds", "parallel"):
        if getattr(own, name) is not None and getattr(own, name) < 1:
            raise ConfigError(f"--{name} must be at least 1, got {getattr(own, name)}")
    directories = {name: _directory(own, name) for name in DATA_OPTIONS if _directory(own, name)}
    table = _select(table, own, directories)
    output = own.output or f"runs/reproduce-{own.table}{'-full' if own.scale == 'full' else ''}"
    if "://" in output:
        raise ConfigError("--output must be a directory: uno reproduce keeps logs of its processes there")
    if RAY_JOB in os.environ and not os.path.isabs(output):
        raise ConfigError(
            f"inside a Ray job --output must be an absolute path that all nodes share, not {output!r}"
        )
    if own.scale == "small":
        changes = {"compute.threads": 1, **changes}
    return Request(
        table, own.scale, own.seeds or table.seeds, Path(os.path.expanduser(output)).absolute(), directories,
        {"compute.workers": 0, **changes}, own.parallel, own.runner, own.record and Path(own.record),
        own.dry_run, shlex.join(["uno", "reproduce", *_without(argv, "--output", "--record", "--parallel")]),
    )  # fmt: skip


def _directory(own: argparse.Namespace, option: str) -> str:
    return os.path.abspath(os.path.expanduser(getattr(own, option.replace("-", "_")) or "")) * bool(
        getattr(own, option.replace("-", "_"))
    )


def _without(argv: Sequence[str], *names: str) -> list[str]:
    """``argv`` without options that say where and how fast, each with its one value."""
    kept: list[str] = []
    words = iter(argv)
    for word in words:
        if word in names:
            next(words, None)
        elif word.partition("=")[0] not in names:
            kept.append(word)
    return kept


def _select(table: Table, own: argparse.Namespace, directories: Mapping[str, str]) -> Table:
    """The data sets and rows that were asked for and are there."""
    wanted = table.benchmarks
    if own.datasets:
        known = {benchmark.key: benchmark for benchmark in wanted}
        for name in own.datasets:
            if name not in known:
                raise ConfigError(f"--datasets {name}: {table.name} has {', '.join(known)}")
        wanted = tuple(known[name] for name in own.datasets)
    elif own.scale == "small":  # what is not there is not missed
        wanted = tuple(b for b in wanted if b.option is None or b.option in directories)
    missing = dict.fromkeys(b.option for b in wanted if b.option and b.option not in directories)
    if missing:
        options = " and ".join(f"--{option} DIR ({DATA_OPTIONS[option]})" for option in missing if option)
        only = f", or only some of it: --datasets {wanted[0].key}" if len(wanted) > 1 else ""
        raise ConfigError(f"{table.name} at this scale needs {options}{only}")
    rows = table.rows
    if own.rows:
        known_rows = {row.key for row in rows}
        for name in own.rows:
            if name not in known_rows:
                raise ConfigError(f"--rows {name}: {table.name} has {', '.join(row.key for row in rows)}")
        kept = {*own.rows, table.reference} | {
            key for row in rows if row.key in own.rows for key in (row.of, row.versus)
        }
        rows = tuple(row for row in rows if row.key in kept)
    return replace(table, benchmarks=wanted, rows=rows)


# ------------------------------------------------------------------------------------------------------- plan
def plan(request: Request) -> list[Job]:
    """All jobs that have no result yet, pretrainings first where cells need them.

    Raises:
        ConfigError: data that is not there or cannot be trained on, or a directory of other settings.
    """
    from pipelines.cells import Job, read_history
    from uno.config import override
    from uno.reproduce.tables import cell_config
    from uno.runs.run import pretrain_hash

    history = read_history(request.output)
    jobs: dict[str, Job] = {}
    checked: set[str] = set()
    for cell in all_cells(request):
        config = cell_config(cell, request.directories, request.changes)
        _check_data(config, checked)
        shared, name = f"pretrain/{pretrain_hash(config)}", f"cells/{cell.slug}"
        weights = str(request.output / shared)
        with_weights = override(config, {"model.weights": weights})
        _check_stored(request.output / name, with_weights)
        past = history.get(name)
        if (request.output / name / "metrics.json").exists() or (past and past.hopeless):
            continue
        pretrained = history.get(shared)
        if pretrained is None or pretrained.code != 0 or not (request.output / shared).exists():
            label = f"{cell.benchmark.key} pretraining seed {cell.seed}"
            jobs.setdefault(shared, Job(shared, config, label))
        label = f"{cell.benchmark.key} {cell.row.key} seed {cell.seed}"
        jobs[name] = Job(name, with_weights, label, shared)
    return list(jobs.values())


def _check_data(config: Config, checked: set[str]) -> None:
    """The preflight checks of a run, once for each data set and its classes."""
    from uno.data.check import check
    from uno.data.sources import read_rows
    from uno.data.splits import make_task

    data = config.data if config.data.num_novel != "auto" else config.data.model_copy(update={"num_novel": 1})
    key = repr((data, config.train.batch_size, config.augment))
    if key in checked:
        return
    checked.add(key)
    errors = [p for p in check(make_task(read_rows(data), data), config) if p.level == "error"]
    if errors:
        raise ConfigError(f"{data.source}: {errors[0].message}")


def _check_stored(place: Path, config: Config) -> None:
    """Raise ConfigError where a directory holds a cell of other settings."""
    from uno.config import Config, differing_keys, override, to_dict
    from uno.data.files import Storage
    from uno.runs.directory import read_config_tree

    if not (place / "config.yaml").exists():
        return
    stored = override(Config(), read_config_tree(Storage(str(place))))  # fields it does not know: defaults
    keys = differing_keys(to_dict(stored), config)
    free = {"model.weights", *(["data.num_novel"] if config.data.num_novel == "auto" else [])}
    keys = [key for key in keys if key not in free]
    if keys:
        raise ConfigError(f"{place} was run with other settings: {', '.join(keys[:6])}; use another --output")


def all_cells(request: Request) -> list[Cell]:
    """Every cell of the table, finished or not."""
    from uno.reproduce.tables import cells

    return cells(request.table, request.seeds)


def _describe(request: Request, jobs: list[Job]) -> None:
    """The cells that are missing, and their cost where a cell's is known."""
    cells, num_cells = [job for job in jobs if job.needs is not None], len(all_cells(request))
    say(f"{request.table.title}: {num_cells} cells, {num_cells - len(cells)} of them have a result")
    for job in jobs:
        say(f"  {job.label}")
    known = {benchmark.key: benchmark.minutes for benchmark in request.table.benchmarks}
    minutes = [known[key] for key in known for job in cells if job.label.startswith(f"{key} ")]
    parallel = request.parallel or _default_parallel(request)
    if None in minutes:
        say("nobody has measured what these cells cost; the first finished one says")
    else:
        total = sum(m for m in minutes if m is not None) / parallel
        say(f"about {total:.0f} minutes, {parallel} cells at a time")


def _default_parallel(request: Request) -> int:
    import torch

    if request.changes["compute.workers"]:
        return 1  # a cell is many processes
    if torch.cuda.is_available() and request.changes.get("compute.device") != "cpu":
        return max(1, torch.cuda.device_count())
    threads = int(request.changes.get("compute.threads") or os.cpu_count() or 1)
    return max(1, (os.cpu_count() or 1) // threads)


# ------------------------------------------------------------------------------------------------------- run
def run_missing(request: Request, jobs: list[Job]) -> None:
    """Run ``jobs``, one console line for each that ends.

    Raises:
        Interrupted: after SIGTERM or SIGINT; all that was trained is kept.
    """
    from pipelines.cells import Queue
    from uno.data.files import Storage
    from uno.runs import lock

    if not jobs:
        say(f"{request.output}: every cell has a result; nothing is run again")
        return
    with lock.claim(Storage(str(request.output)), on_wait=say), _runner(request) as runner:
        for folder in ("cells", "pretrain"):
            (request.output / folder).mkdir(parents=True, exist_ok=True)
        say(f"{len(jobs)} jobs, {min(len(jobs), runner.capacity)} at a time; logs in {request.output}/cells")
        Queue(request.output, runner, _Console(jobs, runner.capacity)).run(jobs)


class _Console:
    """One line for each job that ends."""

    def __init__(self, jobs: list[Job], capacity: int) -> None:
        self._left, self._capacity, self._since = [job.needs for job in jobs], capacity, time.monotonic()
        self._total = len(jobs)

    def __call__(self, ended: Ended, reason: str) -> None:
        """Say how a job ended, and when the last one may: cells take longer than pretrainings."""
        self._left.remove(ended.job.needs)
        done, elapsed = self._total - len(self._left), time.monotonic() - self._since
        how = "done" if ended.code == 0 else f"ended with {ended.code}: {reason}"
        eta = f", about {elapsed / done * len(self._left) / 60:.0f} min left" if self._left else ""
        say(f"{done}/{self._total}  {ended.job.label}: {how}  ({ended.seconds:.0f} s{eta})")


@contextmanager
def _runner(request: Request) -> Iterator[Runner]:
    """Processes here, or Ray actors with the resources of a cell."""
    import torch

    from pipelines.cells import ProcessRunner, RayRunner
    from uno.config import Config, override
    from uno.runs.hardware import local_device

    gpus = torch.cuda.device_count() if request.changes.get("compute.device") != "cpu" else 0
    wants_ray = request.runner == "ray" or (
        request.runner == "auto" and ("RAY_ADDRESS" in os.environ or gpus > 1)
    )
    if not wants_ray or request.changes["compute.workers"]:  # cells that start Ray themselves
        local_device(override(Config(), request.changes))
        yield ProcessRunner(request.parallel or _default_parallel(request))
        return
    from pipelines import ray_env

    with ray_env.connect() as ray:
        cluster = ray.cluster_resources()
        gpu = cluster.get("GPU", 0) > 0 and request.changes.get("compute.device") != "cpu"
        share = float(request.changes.get("compute.gpus_per_worker", 1.0)) if gpu else 0.0
        cpus = float(request.changes.get("compute.threads") or 1)
        cpus = min(cpus, max(1.0, cluster.get("CPU", 1.0)))
        fits = int(cluster["GPU"] / share) if share else int(cluster.get("CPU", 1.0) / cpus)
        capacity = max(1, min(fits, request.parallel or fits))
        yield RayRunner(ray, {"num_cpus": 0 if share else cpus, "num_gpus": share}, capacity)


# ----------------------------------------------------------------------------------------------------- tables
def write_tables(request: Request) -> int:
    """Write Markdown, Parquet, HTML and, where asked for, the record; show the table. Returns 0.

    Raises:
        NumericsError: some cells diverged; the tables are written and say so.
        StorageError: some cells failed otherwise.
    """
    from pipelines.cells import read_history
    from uno.data.files import Storage
    from uno.errors import Interrupted
    from uno.reproduce import page, results

    history = read_history(request.output)
    found = results.read(
        request.table, request.output, request.directories, request.changes, request.seeds,
        {name: past.seconds for name, past in history.items()},
        {name: past.reason for name, past in history.items() if past.failed},
    )  # fmt: skip
    figures = []
    if request.table.figures:
        from uno.reproduce.figures import draw

        figures = draw(found, say)
    storage = Storage(str(request.output))
    page.write(storage, found, request.scale, request.command, figures)
    if request.record is not None:
        page.write_record(Storage(str(request.record)), found, request.scale, request.command, figures)
    say("")
    say(page.markdown_table(found))
    say("")
    name = request.table.name
    say(f"tables in {request.output}: {name}.md, {name}.parquet, {name}.html")
    if found.failures:
        name, reason = next(iter(found.failures.items()))
        kind = {2: ConfigError, 3: NumericsError}.get(history[name].code, StorageError)
        raise kind(f"{len(found.failures)} of {len(all_cells(request))} cells failed, {name} first: {reason}")
    if found.missing:
        raise Interrupted(f"{len(found.missing)} cells have no result yet")
    return 0


if __name__ == "__main__":
    sys.exit(cli.guard(main, sys.argv[1:]))
