"""Open a run and check that it can start.

A run is opened from the settings of the user: its configuration is completed, its rows
are read, and its directory is examined.
"""

import os
from collections.abc import Mapping
from typing import Any

import safetensors.torch

from uno.config import OWN_ENCODERS, Config, flatten, override
from uno.data.check import CHECK_SECONDS, check, format_report
from uno.data.files import Storage, full_path, is_uri, normalize_path, split
from uno.data.sources import SOURCES, locate_source
from uno.data.splits import Task
from uno.encoders import weights
from uno.encoders.runtimes import require_runtime
from uno.encoders.weights import PRETRAINED, PRETRAINED_FILE, fetch_pretrained
from uno.errors import ConfigError
from uno.model import build_network
from uno.runs import (
    DISCOVER,
    ESTIMATE_FILE,
    FORMER_FOLDER,
    PRETRAIN,
    directory,
    former,
    lock,
)
from uno.runs import run as training
from uno.runs.checkpoint import checkpoint_steps
from uno.runs.hardware import num_threads
from uno.session.backend import choose_backend
from uno.session.console import print_line
from uno.session.derive import derives_batch, resolve
from uno.session.estimation import estimate_classes
from uno.session.loggers import require_loggers
from uno.session.resources import check_memory
from uno.session.run import Backend, Run
from uno.text import plural


def open_run(
    config: Config,
    given: Mapping[str, Any],
    overwrite: bool = False,
    last: str = DISCOVER,
    backend: Backend | None = None,
    dry_run: bool = False,
) -> Run:
    """Complete the configuration of a run, read its rows and examine its directory.

    If the directory holds a run that is not overwritten, the settings that were derived
    for it are kept. Otherwise the data decides them, and a number of novel classes of
    "auto" is estimated here, with its own directory ``OUTPUT-estimate``, which trains
    encoders unless the encoder is frozen. The run itself is not trained. The rows are
    read, except in a dry run of a run that is stored.

    Nothing is written into the directory of the run, with one exception: a former run,
    which a killed command with ``--overwrite`` has set aside, is moved back, or deleted
    if the new run has a checkpoint. What was decided is printed. Weights "pretrained"
    are fetched if the directory lacks them or the run is overwritten. They are in
    ``first_files`` of the run, and so is the estimate for a number "auto".

    Args:
        config: The configuration before the data is read, from
            :func:`uno.session.configure.configure`. ``config.output`` is the run
            directory and must be set.
        given: The dotted keys that the user has set, with their values, as
            ``configure`` took them. Other settings may be derived from the data.
        overwrite: Whether a run in the same directory is started over.
        last: The last phase, "pretrain" or "discover".
        backend: Does the work of the run. None chooses it by ``compute.num_workers``:
            this process for 0, otherwise Ray.
        dry_run: Whether the run is only planned. A former run is then not moved back,
            and it is not checked whether the directory may hold the new run.

    Returns:
        The run, not locked. Its attribute ``resumes`` is True if its directory holds it
        already and it is not overwritten; in a dry run it is always False.

    Raises:
        ConfigError: The settings do not fit each other or the data, the weights are
            missing or do not fit, the package of a logger is missing, the directory
            holds something else or a run of other settings or data, another command
            holds the directory, or ``data.num_novel`` is "auto" in a dry run.
        StorageError: A file cannot be read or written.
        Interrupted: The user stopped the estimate of the number of novel classes.
    """
    assert config.output is not None
    num_threads(config)  # refuses a wrong number before the data is read
    require_loggers(config)
    storage = Storage(config.output)
    if not dry_run:
        _restore_former_run(storage)
    config = with_full_path(config)
    backend = choose_backend(config) if backend is None else backend
    files = dict[str, bytes]()
    if (weights := starting_weights(config, overwrite)) is not None:
        files[PRETRAINED_FILE] = weights  # workers and a resumed run fetch nothing
    if config.data.num_novel == "auto":
        if dry_run:
            raise ConfigError(
                "--dry-run needs a number for --num-novel; uno estimate-classes"
                " estimates one"
            )
        beside = Storage(f"{config.output}-estimate")
        if overwrite or not directory.is_run(storage):  # a stored run has a number
            estimate = estimate_classes(
                override(config, {"output": beside.uri}), given, backend=backend
            )
            assert estimate is not None
            config = override(config, {"data.num_novel": estimate.suggested})
        if (content := beside.find(ESTIMATE_FILE)) is not None:
            files[ESTIMATE_FILE] = content
    config, task = resolve(config, given, overwrite, backend.free_memory)
    run = Run(
        config,
        storage,
        backend,
        opened=task,
        phases=training.list_phases(config, last),
        evaluate=last == DISCOVER,
        batch_is_derived=derives_batch(config, given),
        first_files=files,
    )
    if not dry_run:
        _examine_directory(run, overwrite)
    return run


def open_stored_run(target: str, given: Mapping[str, Any]) -> Run:
    """Open a stored run, for a command that evaluates it or writes its report.

    The workers and the device of its training are replaced by this process, because
    they may have been on another machine, unless ``given`` names others.

    Args:
        target: The directory, a path or URI.
        given: Settings by dotted key that replace those of the run: where to compute
            (``compute.*``), and where the data is now (``data.*``).

    Returns:
        The run, not locked and without phases to train. Its attribute ``resumes`` is
        True. Its rows are read at the first use of ``run.task``.

    Raises:
        ConfigError: The directory holds no run or a damaged one, a setting is refused,
            or this machine lacks the device that was asked for.
    """
    storage = Storage(target)
    stored = flatten(directory.read_config_tree(storage))
    here = {"compute.num_workers": 0, "compute.device": "auto"}
    config = override(Config(), {**stored, **here, **given, "output": storage.uri})
    return Run(config, storage, choose_backend(config), resumes=True)


def check_source(config: Config, given: Mapping[str, Any]) -> None:
    """Check the data of a configuration in full, and print a report.

    This is ``uno data check``. The directory of the run is neither read nor written,
    weights of a library are not fetched, and it is not checked whether the run fits
    into memory. Weights in a file, or of another run, are checked. A number of novel
    classes of "auto" is not estimated: two are assumed, and a line says so. Images are
    decoded for up to a minute.

    Args:
        config: The configuration before the data is read, from
            :func:`uno.session.configure.configure`. ``config.output`` is not used.
        given: The dotted keys that the user has set, with their values, as
            ``configure`` took them.

    Raises:
        ConfigError: The settings do not fit each other, or no run can succeed with this
            data.
    """
    config = with_full_path(override(config, {"output": None}))
    if config.model.weights not in (None, PRETRAINED):
        starting_weights(config, overwrite=True)  # refuses weights that do not fit
    if config.data.num_novel == "auto":
        print_line("a run estimates the number of new classes; this check assumes 2")
        config = override(config, {"data.num_novel": 2})
    config, task = resolve(
        config, given, measure_memory=choose_backend(config).free_memory
    )
    assert task is not None
    # a method can refuse the encoder, as `dtc` refuses one with too few features
    build_network(config, task.num_known, task.num_novel, config.seed)
    is_derived = derives_batch(config, given)
    check_data(config, task, batch_is_derived=is_derived, in_full=True)


def check_run(run: Run, in_full: bool = False) -> None:
    """Check that a run can succeed, before anything is computed.

    The data, the memory and the library that computes the encoder (PyTorch or OpenVINO)
    are checked. Findings on the data and a summary of it are printed.

    Args:
        run: The run. If it resumes, no images are read.
        in_full: Whether to decode images for up to a minute, and to print the table of
            classes. Otherwise only a part of the images is read.

    Raises:
        ConfigError: The run cannot succeed. For example, its data does not fit into
            memory.
    """
    check_data(
        run.config,
        run.task,
        batch_is_derived=run.batch_is_derived,
        read_images=not run.resumes,
        in_full=in_full,
    )
    check_memory(run.config, run.task)
    require_runtime(run.config)


def check_data(
    config: Config,
    task: Task,
    *,
    batch_is_derived: bool = False,
    read_images: bool = True,
    in_full: bool = False,
) -> None:
    """Check the data of a run before anything is computed, and print the findings.

    Warnings and notes are printed, and last a line with the numbers of rows and
    classes. If a finding is an error, it is raised, and nothing is printed before but
    the report of ``in_full``.

    Args:
        config: The configuration of the run, after its data was read.
        task: Its rows, with their classes and splits.
        batch_is_derived: Whether the batch size was derived from the data. It is then
            derived again if images are unreadable.
        read_images: Whether images are checked: a sample of at most 64 is decoded, and
            some images are compared to find duplicates, see
            :func:`uno.data.check.check`. False for a run that resumes with unchanged
            data.
        in_full: Whether to decode images for up to a minute, and to print a report
            with the table of classes, the findings and the notes in the place of single
            lines. If ``read_images`` is False, only the sample is decoded, because the
            report names the sizes of its images.

    Raises:
        ConfigError: The run cannot succeed with this data. The message is that of the
            first finding that is an error.
    """
    seconds = CHECK_SECONDS if in_full else 0
    problems = check(task, config, seconds, batch_is_derived, read_images)
    lines = [f"{problem.level}: {problem.message}" for problem in problems]
    lines += [f"note: {note}" for note in task.notes]
    if in_full:
        print_line(format_report(task, problems, config.data.stored_size))
        lines = []
    for problem in problems:
        if problem.level == "error":
            raise ConfigError(problem.message)
    for line in lines:
        print_line(line)
    labeled, unlabeled = task.sizes
    known = plural(len(task.known), "known class", "known classes")
    rows = f"{plural(labeled, 'labeled image')} of {known}, {unlabeled:,} unlabeled"
    test, unseen = int((~task.rows.is_train).sum()), int((~task.is_train).sum())
    for count, what in ((test, "test"), (unseen - test, "held out for validation")):
        rows += f", {count:,} {what}" if count else ""
    novel = plural(task.num_novel, "class", "classes")
    print_line(f"data: {task.rows.source}: {rows}; {novel} to discover")


def _examine_directory(run: Run, overwrite: bool) -> None:
    """Set ``run.resumes`` to whether the output directory holds this run already.

    Nothing is written here. A warning is logged if the code of the encoder has changed
    since the run began.

    Args:
        run: The run. Its rows are read if it resumes.
        overwrite: Whether a run in the directory is started over. ``run.resumes`` is
            False then.

    Raises:
        ConfigError: The directory holds something else; or it holds a run of other
            settings or data, and ``overwrite`` is False. A new directory is inside the
            folder of the data; or a run that is overwritten has the data, the weights
            or the list of known classes inside it.
    """
    is_run = directory.is_run(run.storage)
    run.resumes = is_run and not overwrite
    if run.resumes:
        directory.begin_run(run.config, run.storage, run.task.rows.fingerprint)
    else:
        _require_separate_paths(run.config, run.storage, is_run)


def _restore_former_run(storage: Storage) -> None:
    """Complete a command with ``--overwrite`` that was killed.

    Such a command has set the former run of the directory aside, into its folder
    ``former/``. If the new run has no checkpoint yet, its files are deleted, the former
    run is moved back, and a line is printed. If only a part of the former run was set
    aside, this part is moved back and nothing is deleted. If the new run has a
    checkpoint, or the former run was already being deleted, the former run is deleted.
    The directory is locked meanwhile.

    Args:
        storage: The run directory. Nothing happens if it has no folder ``former/``.

    Raises:
        ConfigError: Another command holds the directory.
        StorageError: A file cannot be moved or deleted, or the lock cannot be written.
    """
    if storage.exists(FORMER_FOLDER):
        with lock.lock_run(storage, on_wait=print_line) as claim:
            if former.complete_overwrite(claim.storage):
                print_line(f"the former run in {storage.uri} was put back")


def _require_separate_paths(config: Config, storage: Storage, is_run: bool) -> None:
    """Check that the output directory and the inputs of a new run are not nested.

    Args:
        config: The configuration of the new run.
        storage: Its output directory.
        is_run: Whether the directory holds a run, which the new run overwrites.

    Raises:
        ConfigError: If ``is_run``, the run to be overwritten holds the data, the
            weights or the list of known classes. Otherwise, the directory is inside the
            folder ``data.labeled`` or ``data.unlabeled``, or inside the folder of a
            ``data.source`` whose subfolders are all read, where the run would be read
            as data the next time.
    """
    data = config.data
    if data.labeled is not None and data.unlabeled is not None:
        reads_subfolders = True
        folders = [("--labeled", data.labeled), ("--unlabeled", data.unlabeled)]
    else:
        kind, path = locate_source(data)
        reads_subfolders = kind in SOURCES and SOURCES[kind].reads_subfolders
        folders = [("--data", path)]
    inputs = [*folders, ("--weights", config.model.weights or "")]
    inputs += [("--known-classes", data.known_classes or "")]
    for option, path in inputs if is_run else ():
        if path and _is_below(path, storage.uri):
            raise ConfigError(
                f"{option} {path} is inside --output {storage.uri}, which --overwrite"
                " empties; move it out of there, or choose another --output"
            )
    for option, path in folders if reads_subfolders and not is_run else ():
        if _is_below(storage.uri, path):
            raise ConfigError(
                f"--output {storage.uri} is inside {option} {path}, where the run would"
                " be read as data the next time; choose another --output"
            )


def _is_below(path: str, folder: str) -> bool:
    """Return whether a path or URI names a given folder, or lies inside that folder.

    Relative local paths count from the working directory, and links are followed. URIs
    are compared as text.

    Args:
        path: The path or URI of a file or folder, which need not exist.
        folder: The path or URI of the folder.
    """
    inner, outer = (
        name if is_uri(name) else os.path.realpath(name)
        for name in map(normalize_path, (path, folder))
    )
    return f"{inner}/".startswith(f"{outer}/")


def with_full_path(config: Config) -> Config:
    """Return the configuration with ``model.weights`` as an absolute path or URI.

    Workers in other directories can open it then.

    Args:
        config: The configuration. It is returned unchanged if ``model.weights`` is None
            or "pretrained".

    Raises:
        ConfigError: The name has the suffix of a file of weights and there is no such
            file, or it has none and there is no run with a checkpoint of pretraining.
    """
    if config.model.weights in (None, PRETRAINED):
        return config
    source = full_path(normalize_path(config.model.weights))
    folder, name = split(source)
    if weights.is_file(source):
        if not Storage(folder).exists(name):
            raise ConfigError(f"model.weights: no such file {source}")
    elif not checkpoint_steps(Storage(source), PRETRAIN):
        raise ConfigError(
            f"model.weights: {source} is neither a {', '.join(weights.SUFFIXES)} file"
            " nor a pretrained run"
        )
    return override(config, {"model.weights": source})


def starting_weights(config: Config, overwrite: bool) -> bytes | None:
    """Return the pretrained weights that a new run stores in its directory.

    These are weights of a library (torchvision or timm), which ``model.weights``
    "pretrained" asks for. They are read from the run directory if it has them,
    otherwise from the library's cache or the internet. An encoder and weights that do
    not fit are refused here, before any data is read: the encoder is built, the weights
    are loaded, and it is run on a black image. This is left out for weights in the run
    directory, for vectors, and for an encoder of this package without weights or with
    those of a run. Nothing is written into the run directory.

    Args:
        config: The configuration before the data is read. ``config.output`` is the run
            directory, None if there is none.
        overwrite: Whether a run in the same directory is started over. Weights that the
            directory holds are then not used.

    Returns:
        The content of a safetensors file. If the run takes vectors, it has no tensors,
        whatever ``model.weights`` is. Otherwise it has the weights that "pretrained"
        asks for, and the result is None if ``model.weights`` names a file or a run, or
        is None.

    Raises:
        ConfigError: The encoder cannot be built, the weights do not exist or cannot be
            downloaded or do not fit the encoder, or ``model.finetune`` is "none"
            without weights.
        StorageError: A file of weights cannot be read, or holds no weights.
    """
    source, fetched, tensors = config.model.weights, None, None
    if config.model.finetune == "none" and source is None:
        raise ConfigError(
            "model.finetune none needs pretrained weights: pass --weights FILE or"
            " --weights pretrained"
        )
    if config.model.takes_vectors:
        return fetch_pretrained(config.model.encoder)
    if source == PRETRAINED:
        storage = Storage(config.output) if config.output and not overwrite else None
        if storage is not None and storage.exists(PRETRAINED_FILE):
            return storage.read(PRETRAINED_FILE)
        fetched = fetch_pretrained(config.model.encoder)
        tensors = safetensors.torch.load(fetched)
    elif source is not None and weights.is_file(source):
        tensors = weights.read_weights(source)
    if tensors is not None or config.model.encoder not in OWN_ENCODERS:
        weights.check_encoder(config, tensors)
    return fetched
