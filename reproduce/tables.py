"""Run the missing cells (training runs) of a table for ``uno reproduce``, and write it.

A table has a cell for each row (a method or variant), data set and seed. Its run
directory is in ``OUTPUT/cells``. Cells share the pretrainings in ``OUTPUT/pretrain``.
Finished runs are never repeated.
"""

import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from pipelines import nodes, ray_env
from pipelines.options import Options
from reproduce import documents, summary
from reproduce.cells import (
    Attempts,
    CellProcess,
    RunCommand,
    read_attempts,
    run_jobs,
    run_local,
    run_on_ray,
)
from reproduce.experiments import (
    DATA_OPTIONS,
    REFERENCE,
    Benchmark,
    Cell,
    Table,
    build,
    cells,
    with_own_data,
)
from uno.config import ComputeConfig, Config, field_traits, override
from uno.data.check import check
from uno.data.features import cache_directory
from uno.data.files import Storage, full_path, normalize_path
from uno.data.sources import SOURCES, read_rows
from uno.data.splits import make_task
from uno.encoders.weights import is_file
from uno.errors import ConfigError, Interrupted, NumericsError, StorageError
from uno.presets import is_custom_data
from uno.runs import RESULTS_FILE, lock
from uno.runs.hardware import local_device
from uno.runs.run import pretraining_config
from uno.session.configure import expand_output
from uno.session.console import print_line
from uno.session.derive import resolve
from uno.session.prepare import with_full_path
from uno.text import plural
from uno.threads import available_cpus


class Request(NamedTuple):
    """What a command line of ``uno reproduce`` asks for.

    Attributes:
        args: The command's own options, such as ``seeds``.
        table: The table with the rows and data sets that were asked for.
        cells: All cells (training runs) of the table.
        refused: For each row that is left out, its name and the reason.
        output: The directory of all runs.
        changes: Settings that hold for all cells, by dotted key.
        command: The command line, which is printed with the table.
    """

    args: SimpleNamespace
    table: Table
    cells: list[Cell]
    refused: Mapping[str, str]
    output: Path
    changes: Mapping[str, Any]
    command: str

    @property
    def lacking(self) -> list[Benchmark]:
        """The data sets of the table whose directory is needed and was not given.

        The directory is given by an option such as ``--cifar10``. Only ``--dry-run``
        accepts a table with such data sets.
        """
        options = {
            name
            for name in DATA_OPTIONS
            if not getattr(self.args, name.replace("-", "_"))
        }
        return [
            benchmark
            for benchmark in self.table.benchmarks
            if benchmark.option in options
        ]

    @property
    def compute(self) -> ComputeConfig:
        """The section ``compute`` of the configuration of all cells.

        It has the values that the user gives on the command line, and else the
        defaults.
        """
        own = {
            key: value
            for key, value in self.changes.items()
            if key.startswith("compute.")
        }
        return override(Config(), own).compute


def main(options: Options, argv: Sequence[str]) -> int:
    """Run the missing cells of a table, write the table, and return the exit code 0.

    With ``--dry-run`` the missing cells are only listed.

    Args:
        options: The options of the command line.
        argv: The arguments after ``uno reproduce``.

    Raises:
        UnoError: The command line has a mistake, or a cell failed. In the second case
            the other cells were run, and the table is written without the failed ones.
        Interrupted: This process got a signal to stop; or the process of a cell was
            interrupted or killed, so that the table is written without this cell.
    """
    request = read_request(options, argv)
    jobs = plan(request)
    if request.args.dry_run:
        _describe(request, jobs)
        return 0
    run_missing(request, jobs)
    with lock_output(request):
        write_tables(request)
    return 0


def read_request(options: Options, argv: Sequence[str]) -> Request:
    """Return the table, cells and settings that a command line asks for.

    Args:
        options: The options of the command line.
        argv: The arguments after ``uno reproduce``, which are printed with the table.

    Raises:
        ConfigError: The command line has a mistake, or the directory of a data set is
            not given.
    """
    own, given = options.args, options.overrides
    on_own = is_custom_data(given) and {"data.source", "data.labeled"} & given.keys()
    frozen = (
        options.config.model.finetune if on_own else given.get("model.finetune")
    ) == "none"
    for key in given:
        free = (frozen and key == "model.weights") or (on_own and key in OWN_DATA)
        if field_traits(key).fixed_by == "reproduce" and not free:
            raise ConfigError(f"{key} is set by the table; use --seeds and --output")
    paths = {option: getattr(own, option.replace("-", "_")) for option in DATA_OPTIONS}
    directories = {
        option: full_path(normalize_path(path))
        for option, path in paths.items()
        if path
    }
    table, full, changes = build(own.table, own.scale), own.scale == "full", dict(given)
    if frozen:
        changes |= (
            {} if options.config.model.takes_vectors else _feature_cache_settings(given)
        )
        table = table.model_copy(
            update={"notes": table.notes if table.frozen is None else table.frozen}
        )
    if on_own:
        if directories:
            raise ConfigError(
                f"give either --data or --{next(iter(directories))}, not both"
            )
        table = _on_own_data(table, options)
        changes = {
            k: v
            for k, v in changes.items()
            if not k.startswith("data.") and k != "preset"
        }
    table = _select_parts(table, own, directories)
    name = "-".join(
        [own.table, *(["full"] * full), *(b.key for b in table.benchmarks if on_own)]
    )
    output = expand_output(own.output or f"runs/reproduce-{name}")
    if "://" in output:
        raise ConfigError(
            "--output must be a directory: uno reproduce keeps logs of its processes"
            " there"
        )
    changes = ({} if full else {"compute.threads": 1}) | changes
    todo, refused = cells(table, own.seeds or table.seeds, directories, changes)
    command = shlex.join(["uno", "reproduce", *argv])
    return Request(own, table, todo, refused, Path(output).absolute(), changes, command)


OWN_DATA = ("preset", "data.source", "data.labeled", "data.unlabeled")
"""Keys that a table does not set if the user gives the data."""


def _on_own_data(table: Table, options: Options) -> Table:
    """Return a table whose only data set is the one that the user's options name.

    The data is read. The settings that depend on it, and the free memory of this
    machine or of the cluster, are found out here once for all cells.

    Args:
        table: The table.
        options: The options of the command line.

    Raises:
        ConfigError: The data cannot be read; or no unlabeled image has a true class, so
            that no accuracy can be computed.
    """
    config = override(options.config, {"output": None})
    found, task = resolve(config, options.overrides, True, nodes.free_memory)
    assert task is not None
    if not (
        task.is_train & (task.labels < 0) & (task.eval_labels >= task.num_known)
    ).any():
        why = "no unlabeled image has a true class"
        raise ConfigError(
            f"{task.rows.source}: {why}; hide labels with --known-classes"
        )
    # Every cell decides its loading itself.
    places: dict[str, Any] = {"data.loading": config.data.loading}
    # Full paths, because processes of cells can run in other directories.
    for name in ("source", "labeled", "unlabeled", "known_classes"):
        kind, colon, path = str(getattr(found.data, name)).rpartition(":")
        named = name == "known_classes" and path in task.known
        if (
            (not kind or kind in SOURCES)
            and not named
            and os.path.exists(normalize_path(path))
        ):
            places[f"data.{name}"] = kind + colon + full_path(normalize_path(path))
    return with_own_data(
        table, override(found, places), task.num_known, len(task.novel)
    )


def _feature_cache_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with which all cells read one cache of features.

    The features are those of a frozen encoder.

    Args:
        given: The settings of the user, by dotted key.

    Returns:
        ``model.weights``, the file of the encoder's weights; and ``compute.cache``, the
        directory of caches that the user gave, or the default one. Both are full paths,
        because cells can run in other directories.

    Raises:
        ConfigError: The user gave no file of weights.
    """
    source = given.get("model.weights")
    if not is_file(source):
        raise ConfigError("model.finetune none needs --weights FILE")
    full = with_full_path(override(Config(), {"model.weights": source})).model.weights
    cache = cache_directory(
        Config(compute=ComputeConfig(cache=given.get("compute.cache")))
    )
    return {"model.weights": full, "compute.cache": full_path(normalize_path(cache))}


def _select_parts(
    table: Table, args: SimpleNamespace, directories: Mapping[str, str]
) -> Table:
    """Return a table with only the data sets and rows that the user asked for.

    The reference row stays, and so do the rows whose runs a chosen row reads or with
    which it is compared. Without ``--datasets`` the small scale leaves out data whose
    directory is not given.

    Args:
        table: The table.
        args: The options ``datasets``, ``rows``, ``scale`` and ``dry_run`` of the
            command line. An empty list of data sets or rows means all of them.
        directories: The directories of data sets that the user gave, by option, such as
            ``cifar10``.

    Raises:
        ConfigError: A name is unknown; or the directory of a chosen data set is not
            given, except with ``--dry-run``.
    """
    benchmarks = {benchmark.key: benchmark for benchmark in table.benchmarks}
    rows = {row.key: row for row in table.rows}
    chosen = {"datasets": list(benchmarks), "rows": list(rows)}
    for option, wanted in (("datasets", args.datasets), ("rows", args.rows)):
        for name in wanted:
            if name not in chosen[option]:
                raise ConfigError(
                    f"--{option} {name}: choose from {', '.join(chosen[option])}"
                )
        chosen[option] = wanted or chosen[option]
    sets = [benchmarks[name] for name in chosen["datasets"]]
    if args.scale == "small" and not args.datasets:  # missing data is left out
        sets = [
            benchmark for benchmark in sets if benchmark.option in (None, *directories)
        ]
    missing = dict.fromkeys(
        b.option for b in sets if b.option and b.option not in directories
    )
    if missing and not args.dry_run:
        options = " and ".join(
            f"--{option} DIR ({DATA_OPTIONS[option]})" for option in missing
        )
        only = (
            f", or only some of it: --datasets {sets[0].key}" if len(sets) > 1 else ""
        )
        raise ConfigError(f"{table.name} at this scale needs {options}{only}")
    named = [rows[name] for name in chosen["rows"]]
    kept = {REFERENCE, *(key for row in named for key in (row.key, row.of, row.versus))}
    kept_rows = tuple(row for row in table.rows if row.key in kept)
    return table.model_copy(update={"benchmarks": tuple(sets), "rows": kept_rows})


def plan(request: Request) -> list[CellProcess]:
    """Return the jobs that produce the missing results, in an order that can be run.

    A job is a cell (training run), or what cells start from: a pretraining, or a job
    that puts the features of a frozen encoder into the cache. These come first. A cell
    is left out if it has a result, or if its training diverged in an earlier attempt.

    Args:
        request: The table with its cells, and the output directory.

    Raises:
        ConfigError: The data has a mistake.
    """
    lacking = {benchmark.key for benchmark in request.lacking}
    _check_data(
        [cell.config for cell in request.cells if cell.benchmark.key not in lacking]
    )
    attempts = read_attempts(request.output)
    starts, jobs = dict[str, CellProcess](), list[CellProcess]()
    for cell in request.cells:
        diverged = attempts.get(cell.name, Attempts()).code == NumericsError.exit_code
        if diverged or (request.output / cell.name / RESULTS_FILE).exists():
            continue
        start, config = request.output / cell.start, cell.config
        if cell.is_frozen:
            # Cells wait for this job, so that it may use all cores.
            starts[cell.start] = CellProcess(
                cell.start,
                override(config, {"compute.threads": None}),
                f"{cell.benchmark.key} features",
            )
        else:
            config = override(config, {"model.weights": str(start)})
            if attempts.get(cell.start, Attempts(code=1)).code or not start.exists():
                starts[cell.start] = CellProcess(
                    cell.start,
                    pretraining_config(cell.config),
                    f"{cell.benchmark.key} pretraining seed {cell.seed}",
                )
        label = f"{cell.benchmark.key} {cell.row.key} seed {cell.seed}"
        jobs.append(CellProcess(cell.name, config, label, cell.start))
    return [*starts.values(), *jobs]


def _check_data(configs: Sequence[Config]) -> None:
    """Check the data of cells before any cell is run.

    Cells with the same data, batch size and augmentation are checked once.

    Args:
        configs: The configurations of the cells.

    Raises:
        ConfigError: A cell could not be trained with its data, for example because
            there are fewer rows than a batch has.
    """
    for config in {
        (c.data, c.train.batch_size, c.augment): c for c in configs
    }.values():
        data = config.data.model_copy(
            update={"num_novel": 1} if config.data.num_novel == "auto" else {}
        )
        for problem in check(make_task(read_rows(data), data), config):
            if problem.level == "error":
                raise ConfigError(f"{data.source}: {problem.message}")


def _describe(request: Request, jobs: Sequence[CellProcess]) -> None:
    """Print the jobs that are missing, and how long they will take, for ``--dry-run``.

    The minutes are printed if the cells of this scale have been measured.

    Args:
        request: The table with its cells.
        jobs: The jobs without a result: cells, and what they start from.
    """
    todo, num_cells = {job.name for job in jobs}, len(request.cells)
    minutes = [cell.benchmark.minutes for cell in request.cells if cell.name in todo]
    counts = (
        f"{plural(num_cells, 'cell')}, {num_cells - len(minutes)} of them have a result"
    )
    print_line(f"{request.table.title}: {counts}")
    for name, reason in request.refused.items():
        print_line(f"  {name} is refused: {reason}")
    for job in jobs:
        print_line(f"  {job.label}")
    for benchmark, config in {
        c.benchmark.key: (c.benchmark, c.config) for c in reversed(request.cells)
    }.values():
        first = (
            ""
            if config.model.finetune == "none"
            else f"pretraining {plural(config.pretrain.epochs, 'epoch')}, "
        )
        each = plural(config.discover.epochs, "epoch")
        print_line(f"{benchmark.name}: {first}discovery {each} for each cell")
    for option in dict.fromkeys(benchmark.option for benchmark in request.lacking):
        print_line(
            f"not checked: {DATA_OPTIONS[str(option)]}; to run it, pass --{option} DIR"
        )
    if None in minutes:
        print_line(
            "cost: unknown, as no cell of this scale has been measured; the first that"
            " finishes prints it"
        )
    else:
        parallel = request.args.parallel or _default_parallel(request.compute)
        print_line(
            f"about {sum(filter(None, minutes)) / parallel:.0f} minutes,"
            f" {plural(parallel, 'cell')} at a time"
        )


def run_missing(request: Request, jobs: Sequence[CellProcess]) -> None:
    """Run jobs as processes, and print one line for each that ends.

    The output directory is locked meanwhile. A job that fails does not end the others.

    Args:
        request: The table with its cells, and the output directory.
        jobs: The jobs without a result, in an order that can be run.

    Raises:
        ConfigError: There is no room for a cell, or another command uses the directory.
        Interrupted: The process got a signal. All jobs have saved and ended.
    """
    if not jobs:
        print_line(f"{request.output}: every cell has a result; nothing is run again")
        return
    since = time.monotonic()
    with cell_runner(request) as (run, capacity), lock_output(request):
        for folder in {job.name.partition("/")[0] for job in jobs}:
            (request.output / folder).mkdir(parents=True, exist_ok=True)
        print_line(
            f"{len(jobs)} jobs, {min(len(jobs), capacity)} at a time; logs in"
            f" {request.output}/cells"
        )
        for done, (job, attempt) in enumerate(
            run_jobs(jobs, request.output, run, capacity), 1
        ):
            how = (
                "done"
                if attempt.code == 0
                else f"ended with {attempt.code}: {attempt.reason}"
            )
            minutes = (time.monotonic() - since) / done * (len(jobs) - done) / 60
            eta = f", about {minutes:.0f} min left" if done < len(jobs) else ""
            print_line(
                f"{done}/{len(jobs)}  {job.label}: {how}  ({attempt.seconds:.0f}"
                f" s{eta})"
            )


def lock_output(request: Request) -> AbstractContextManager[lock.RunLock]:
    """Lock the output directory inside a block, so that one command writes there.

    Args:
        request: Names the directory.
    """
    return lock.lock_run(Storage(str(request.output)), on_wait=print_line)


@contextmanager
def cell_runner(request: Request) -> Iterator[tuple[RunCommand, int]]:
    """Choose whether cells run as processes on this machine or in tasks of Ray.

    ``--runner`` says so. ``auto`` means tasks of Ray if a cluster runs already, or if
    this machine has several GPUs and the device is not ``cpu``. Cells that have Ray
    workers themselves always run as processes on this machine. If tasks of Ray run
    them, Ray is connected inside the ``with`` block.

    Args:
        request: The table with its cells, and the options of the command line.

    Yields:
        A function that runs a command; and the number of processes that run at a time.

    Raises:
        ConfigError: This machine lacks the device that cells need, or the cluster has
            no room for a cell.
    """
    compute, parallel = request.compute, request.args.parallel
    several = ray_env.cluster_address() is not None or (
        compute.device != "cpu" and torch.cuda.device_count() > 1
    )
    wants_ray = request.args.runner == "ray" or (
        request.args.runner == "auto" and several
    )
    if not wants_ray or compute.num_workers:  # such cells start Ray themselves
        local_device(Config(compute=compute))
        yield run_local, parallel or _default_parallel(compute)
        return
    with ray_env.connect() as ray:
        config = Config(compute=compute)
        fits, resources = nodes.once_one_fits(
            config, lambda: cells_at_once(config, ray.cluster_resources())
        )
        yield partial(run_on_ray, ray, resources), min(fits, parallel or fits)


def cells_at_once(
    config: Config, cluster: dict[str, float]
) -> tuple[int, dict[str, float]]:
    """Return how many cells (training runs) a cluster holds at a time.

    A cell on a GPU reserves ``compute.gpus_per_worker`` GPUs and no CPU. Another cell
    reserves ``compute.threads`` CPUs, by default 1, but not more than the cluster has.

    Args:
        config: A configuration with the section ``compute`` of the cells.
        cluster: The amount of each resource of the whole cluster, by Ray's name of it
            (``CPU``, ``GPU``).

    Returns:
        The number of cells, and the resources of each (``num_cpus``, ``num_gpus``).

    Raises:
        ConfigError: The cluster has no room for a cell.
    """
    share = config.compute.gpus_per_worker if ray_env.use_gpu(config, cluster) else 0.0
    name, has = (
        ("GPU", cluster.get("GPU", 0.0)) if share else ("CPU", cluster.get("CPU", 0.0))
    )
    each = share or min(float(config.compute.threads or 1), max(1.0, has))
    if has < each:
        raise ConfigError(f"a cell needs {each:g} {name}s, the cluster has {has:g}")
    return int(has / each), {"num_cpus": 0 if share else each, "num_gpus": share}


def _default_parallel(compute: ComputeConfig) -> int:
    """Return how many cells run at a time on this machine without ``--parallel``.

    It is 1 if cells have Ray workers; else the number of GPUs, if there are any and the
    device is not ``cpu``; else the number of cores divided by ``compute.threads``, and
    1 if that is not set.

    Args:
        compute: The section ``compute`` of the configuration of all cells.
    """
    if compute.num_workers:
        return 1  # A cell has several processes.
    if torch.cuda.is_available() and compute.device != "cpu":
        return max(1, torch.cuda.device_count())
    cores = available_cpus()
    return max(1, cores // (compute.threads or cores))


def write_tables(request: Request) -> None:
    """Write the table with the results of all cells (training runs), and print it.

    Cells without a result are left out of the means.

    Args:
        request: The table with its cells, and the output directory.

    Raises:
        UnoError: Cells failed; the table is written first. The error is a ConfigError
            or a NumericsError if the first of them ended with the exit code of one, and
            else a StorageError.
        Interrupted: No cell failed, but some have no result, because their processes
            were interrupted or killed; the table is written first.
    """
    attempts = read_attempts(request.output)
    results = summary.read(
        request.table,
        request.cells,
        request.output,
        {
            key: value
            for key, value in request.changes.items()
            if key != "model.weights"
        },
        {name: past.seconds for name, past in attempts.items()},
        {name: past.reason for name, past in attempts.items() if past.failed},
        request.refused,
    )
    documents.write(Storage(str(request.output)), results, request.command)
    files = f"{request.table.name}.md, {request.table.name}.json"
    print_line(
        f"\n{documents.markdown(results)}\n\ntables in {request.output}: {files}"
    )
    if results.failures:
        name, reason = next(iter(results.failures.items()))
        kind = {2: ConfigError, 3: NumericsError}.get(attempts[name].code, StorageError)
        raise kind(
            f"{len(results.failures)} of {len(request.cells)} cells failed, {name}"
            f" first: {reason}"
        )
    if results.missing:
        raise Interrupted(f"{plural(len(results.missing), 'cell')} without a result")
