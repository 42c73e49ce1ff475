"""A run: checked, trained, measured, finished; and one that is finished, measured again
or with other classes.

Everything happens in this process, or where a :class:`~uno.session.place.Place` from
elsewhere does the work.
"""

import json
import os
import re
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow.compute as pc

from uno.config import Config, flatten, override
from uno.data.check import CHECK_SECONDS, check, format_report
from uno.data.decode import BAD_SAMPLES
from uno.data.defaults import derives_batch
from uno.data.files import Storage, is_uri, normalize_path
from uno.data.sources import locate_source
from uno.data.splits import Task
from uno.encoder import require_encoder
from uno.errors import ConfigError, StorageError
from uno.methods import registry
from uno.report.report import open_task, write_report
from uno.results import predictions
from uno.results.accuracy_table import format_table
from uno.results.classes import (
    OutputClass,
    dump_classes,
    hashes,
    is_measured,
    with_measured,
)
from uno.results.evaluate import read_edits
from uno.results.export import CARD_FILE, FORMATS, export, model_card
from uno.results.infer import (
    Classifier,
    Decode,
    decoder,
    load_classifier,
    model_folder,
    save_model,
    with_alignment,
)
from uno.results.predictions import read_columns
from uno.results.show import counted
from uno.results.trust import verdict
from uno.runs import (
    DISCOVER,
    ESTIMATE_FILE,
    FORMER_FOLDER,
    PHASES,
    RESULTS_FILE,
    directory,
    former,
    lock,
    run,
)
from uno.runs import REPORT_FILE as REPORT
from uno.runs.checkpoint import checkpoint_steps
from uno.runs.hardware import local_device, num_threads
from uno.runtime import require_runtime
from uno.session.console import Progress, interrupt_on_signal, print_line
from uno.session.data import Show, read_task
from uno.session.estimation import estimate_classes
from uno.session.loggers import Loggers, require_loggers
from uno.session.place import Place, TrainingJob, place_of
from uno.session.predict import predict_run, ray_pays, unlabeled_rows
from uno.session.resolve import resolve, starting_weights, stored_config, with_full_path
from uno.session.resources import check_memory, on_features
from uno.session.summary import describe_run
from uno.text import plural
from uno.weights import PRETRAINED_FILE

# kinds of sources of which every folder or table below the path is data
FOLDER_KINDS = ("folder", "imagefolder", "parquet", "vectors")


def discover(
    config: Config,
    given: Mapping[str, Any],
    overwrite: bool = False,
    last: str = DISCOVER,
    report: bool = True,
    dry_run: bool = False,
    elsewhere: Place | None = None,
) -> None:
    """Check everything, train the phases up to ``last`` that are not finished and,
    after discovery, evaluate and print the table; ``given``: the keys of ``config``
    that somebody set, ``report``: also predict every row and write the run's page,
    ``dry_run``: instead of all that take one step of each phase, and keep nothing.
    """
    num_threads(config)  # before the data is read
    require_loggers(config)
    if config.output is not None and not dry_run:
        _settle_former_run(Storage(config.output))
    config, estimate, place = with_full_path(config), None, place_of(config, elsewhere)
    if config.compute.num_workers == 0:
        local_device(config)
    own_weights = starting_weights(config, overwrite)
    if config.data.num_novel == "auto":
        if dry_run:
            raise ConfigError(
                "--dry-run needs a number for --num-novel; uno estimate-classes"
                " estimates one"
            )
        num_novel = None if overwrite else _num_novel_of_run(config, given)
        folder = f"{config.output}-estimate"
        if num_novel is None:
            found = estimate_classes(
                override(config, {"output": folder}), given, elsewhere=elsewhere
            )
            assert found is not None
            num_novel = found.suggested
        estimate = Storage(folder).find(ESTIMATE_FILE)
        config = override(config, {"data.num_novel": num_novel})
    config, lines, read = resolve(config, given, overwrite, place.free_memory)
    for line in lines:
        print_line(line)
    is_derived = derives_batch(config, given)
    task = read_task(config.data) if read is None else read
    evaluate, goes_on = last == DISCOVER, False
    if config.output is not None and not dry_run:
        storage = Storage(config.output)
        is_run = directory.is_run(storage)
        goes_on = is_run and not overwrite
        if overwrite:
            _require_inputs_outside(config, storage)
        if not is_run:
            _require_output_outside(config, storage)
    if goes_on:
        directory.open_run(config, storage, task.rows.fingerprint)
        if evaluate and (finished := directory.read_results(storage)) is not None:
            directory.check_images(storage, task.rows)
            print_line(
                f"{storage.uri} is finished; nothing is trained again (--overwrite"
                " starts over)"
            )
            return _show(storage, finished)
    task = preflight(config, task, dry_run, is_derived, read_images=not goes_on)
    phases = run.phases(config, last)
    check_memory(config, task)
    # refuses an encoder that the method refuses, before features are computed
    registry.build_network(config, task.num_known, task.num_novel, config.seed)
    require_runtime(config)
    if dry_run:
        return _dry_run(config, task, phases, own_weights, is_derived)
    assert config.output is not None
    storage = Storage(config.output)
    with lock.lock_run(storage, on_wait=print_line) as claim, ExitStack() as begun:
        started: Callable[[], None] | None = None
        if overwrite:
            former_run = former.kept_until_replaced(claim.storage, print_line)
            started = begun.enter_context(former_run)
        directory.open_run(config, claim.storage, task.rows.fingerprint)
        directory.begin_images(claim.storage, task.rows)
        if own_weights is not None and not claim.storage.exists(PRETRAINED_FILE):
            # workers and a resumed run fetch nothing
            claim.storage.write(PRETRAINED_FILE, own_weights)
        if estimate is not None and not claim.storage.exists(ESTIMATE_FILE):
            claim.storage.write(ESTIMATE_FILE, estimate)
        for line in describe_run(config, phases):
            print_line(line)
        job = TrainingJob(config, task, phases, evaluate, claim, is_derived)
        with ExitStack() as until:
            with (
                Loggers(config, claim.storage) as loggers,
                _watched(job, loggers) as show,
            ):

                def show_step(metrics: dict[str, Any]) -> None:
                    if started is not None and metrics.get("phase") in PHASES:
                        started()
                    show(metrics)

                values, task = place.train(job, show_step, until)
                loggers.results(values)
            begun.close()
            if not evaluate:
                return print_line(f"finished: {storage.uri}")
            with interrupt_on_signal(
                "stopped before the run was finished; resume with the same command"
            ):
                _finish(config, claim.storage, task, values, report, elsewhere)
    _show(storage, values)


def _settle_former_run(storage: Storage) -> None:
    """Finish what a killed command with ``--overwrite`` left in a run directory."""
    if storage.exists(FORMER_FOLDER):
        with lock.lock_run(storage, on_wait=print_line) as claim:
            if former.settle(claim.storage):
                print_line(f"the former run in {storage.uri} was put back")


def _require_inputs_outside(config: Config, storage: Storage) -> None:
    """Check that a run to be overwritten holds nothing that the new run reads.

    Raises:
        ConfigError: The data, the weights or the list of known classes is inside the
            output directory.
    """
    data = config.data
    if data.labeled is not None and data.unlabeled is not None:
        inputs = [("--labeled", data.labeled), ("--unlabeled", data.unlabeled)]
    else:
        inputs = [("--data", locate_source(data)[1])]
    inputs += [("--weights", config.model.weights or "")]
    inputs += [("--known-classes", data.known_classes or "")]
    for option, path in inputs:
        if path and _is_below(path, storage.uri):
            raise ConfigError(
                f"{option} {path} is inside --output {storage.uri}, which --overwrite"
                " empties; move it out of there, or choose another --output"
            )


def _require_output_outside(config: Config, storage: Storage) -> None:
    """Check that a new run would not become a part of its own data.

    A directory of a run would be a class folder, and its ``predictions.parquet`` a
    shard, when the data is read the next time.

    Raises:
        ConfigError: The output directory is inside a folder of classes or of tables.
    """
    data = config.data
    if data.labeled is not None and data.unlabeled is not None:
        kind, option, path = "folder", "--labeled", data.labeled
    else:
        (kind, path), option = locate_source(data), "--data"
    if kind in FOLDER_KINDS and _is_below(storage.uri, path):
        raise ConfigError(
            f"--output {storage.uri} is inside {option} {path}, where the run would be"
            " read as data the next time; choose another --output"
        )


def _is_below(path: str, folder: str) -> bool:
    """Return whether a path is a folder, or is inside it."""
    inner, outer = (
        name if is_uri(name) else os.path.realpath(name)
        for name in map(normalize_path, (path, folder))
    )
    return f"{inner}/".startswith(f"{outer}/")


def _num_novel_of_run(config: Config, given: Mapping[str, Any]) -> int | None:
    """Return the number of novel classes with which the run in the output directory
    began, or None if the directory is free.

    The number of classes is estimated only after this check, because an estimate takes
    long and replaces an earlier one. A run that goes on keeps its number.

    Raises:
        ConfigError: The directory holds something else, or a run of other settings or
            data.
    """
    storage = Storage(str(config.output))
    if not directory.is_run(storage):
        return None
    stored = flatten(directory.read_config_tree(storage))
    number = stored.get("data.num_novel")
    begun = resolve(override(config, {"data.num_novel": number}), given).config
    directory.open_run(begun, storage, read_task(begun.data).rows.fingerprint)
    return begun.data.num_novel if isinstance(begun.data.num_novel, int) else None


def evaluate(
    target: str, given: Mapping[str, Any], elsewhere: Place | None = None
) -> None:
    """Evaluate the run in directory ``target`` again, and write its report where that
    changes what it shows; ``given`` dotted keys say where that happens.
    """
    storage = Storage(target)
    config = with_full_path(stored_config(storage, given))
    if config.compute.num_workers == 0:
        local_device(config)
    require_encoder(config.model.encoder, storage.uri)
    task = read_task(config.data)
    directory.open_run(config, storage, task.rows.fingerprint)
    directory.check_images(storage, task.rows)
    preflight(config, task, read_images=False)
    with lock.lock_run(storage, on_wait=print_line) as claim:
        edits = read_edits(storage)
        if edits is not None and edits.alignment is None:
            model = load_classifier(storage)
            decode = place_of(config, elsewhere).decoder(
                config, claim.storage, task.rows, model
            )
            with_alignment(model, claim.storage, decode, unlabeled_rows(task))
        before = directory.read_results(storage)
        job = TrainingJob(config, task, (), True, claim)
        with ExitStack() as until:
            with _watched(job) as show:
                values, task = place_of(config, elsewhere).train(job, show, until)
            if values != before and storage.exists(REPORT):
                with interrupt_on_signal("stopped; nothing was changed"):
                    write_report(
                        config,
                        claim.storage,
                        task,
                        device=local_device(config),
                        metrics=values,
                        make_decoder=_report_decoder(
                            config, claim.storage, task, elsewhere
                        ),
                    )
        _write_results(claim.storage, values)
        if storage.exists(f"model/{CARD_FILE}"):
            _write_card(claim.storage, load_classifier(storage), values)
    _show(storage, values)


def apply_classes(
    claim: lock.RunLock, model: Classifier, edited: list[OutputClass]
) -> None:
    """Make ``edited`` the classes of a run's ``model``, and bring what the run holds in
    line: predictions, metrics, report, card, exports. Raises, before anything is
    written, where the data that takes is gone.
    """
    storage, folder = claim.storage, model_folder(claim.storage)
    config = override(
        model.config,
        {"compute.num_workers": 0, "compute.device": "auto", "output": storage.uri},
    )
    values, found = directory.read_results(storage), predictions.read_identity(storage)
    data = dump_classes(storage.read(f"{folder}classes.json"), edited)
    same = {"model_hash": model.model_hash, "routes": hashes(edited)["routes"]}
    predict = found is not None and not same.items() <= found.items()
    trained = values is not None and checkpoint_steps(storage, DISCOVER)
    measure, has_report = (
        bool(trained) and not is_measured(data),
        storage.exists(REPORT),
    )
    task, done = None, ["the model"]
    if predict or measure:
        task = read_task(config.data)
        directory.check_images(storage, task.rows)
    elif has_report and (task := open_task(config, storage)[0]) is None:
        print_line(
            f"warning: {REPORT} was not updated: the training data is missing or has"
            " changed"
        )
    storage.write(f"{folder}classes.json", data)
    model = replace(model, classes=edited)
    if task is not None:
        model = with_alignment(
            model, storage, decoder(model, task.rows), unlabeled_rows(task)
        )
        job = TrainingJob(config, task, (), measure, claim)
        with ExitStack() as until, _watched(job) as show:
            measured, task = Place().train(job, show, until)
        values = measured or values
    if predict:
        assert task is not None
        model, summary = predict_run(config, storage, task, model)
        print_line(f"predicted {plural(summary.rows, 'image')} again: {summary.path}")
        done.append(predictions.FILE)
    elif predictions.rename(storage, edited):
        done.append(predictions.FILE)
    if measure and values:
        _write_results(storage, values)
        done.append(RESULTS_FILE)
    if storage.exists(folder + CARD_FILE):
        _write_card(storage, model, values or {})
    if task is not None and has_report:
        write_report(config, storage, task, device=local_device(config), model=model)
        done.append(REPORT)
    for format in ("pt2", "onnx"):
        if storage.exists(name := folder + FORMATS[format]):
            try:
                storage.write(name, export(model, format))
                done.append(name)
            except ConfigError as error:
                print_line(
                    f"warning: {name} was not updated and still has the previous"
                    f" classes: {error}"
                )
    print_line(f"applied to {', '.join(done)}")


def preflight(
    config: Config,
    task: Task | None = None,
    dry_run: bool = False,
    batch_is_derived: bool = False,
    read_images: bool = True,
) -> Task:
    """Check the data of a run before anything is computed, and print what is found.

    Args:
        config: The configuration of the run.
        task: The task, if it was read before.
        dry_run: Whether to decode images for up to a minute, as ``uno data check``, and
            to print the table of classes.
        batch_is_derived: Whether the batch size was derived from the data.
        read_images: Whether a sample of images is looked at; False for a run that goes
            on with unchanged data.

    Raises:
        ConfigError: The run cannot succeed with this data.
    """
    task = read_task(config.data) if task is None else task
    seconds = CHECK_SECONDS if dry_run else 0
    problems = check(task, config, seconds, batch_is_derived, read_images)
    for problem in problems:
        if problem.level == "error":
            raise ConfigError(problem.message)
    lines = [f"{problem.level}: {problem.message}" for problem in problems] + [
        f"note: {note}" for note in task.notes
    ]
    for line in [format_report(task, problems)] if dry_run else lines:
        print_line(line)
    labeled, unlabeled = task.sizes
    run.plans(config, labeled, unlabeled, config.compute.num_workers)
    if config.compute.num_workers == 0:
        local_device(config)
    known = plural(len(task.known), "known class", "known classes")
    rows = f"{plural(labeled, 'labeled image')} of {known}, {unlabeled:,} unlabeled"
    test, unseen = int((~task.rows.is_train).sum()), int((~task.is_train).sum())
    for count, what in ((test, "test"), (unseen - test, "held out for validation")):
        rows += f", {count:,} {what}" if count else ""
    print_line(
        f"data: {task.rows.source}: {rows};"
        f" {plural(task.num_novel, 'class', 'classes')} to discover"
    )
    return task


@contextmanager
def _watched(job: TrainingJob, also: Show = lambda metrics: None) -> Iterator[Show]:
    """Heal the directory; show metrics, to ``also`` too, while ``job`` is trained
    and evaluated.
    """
    config, storage = job.config, job.claim.storage
    for line in directory.repair(storage):
        print_line(f"warning: {line}")
    reached = [
        (phase, steps[-1])
        for phase in job.phases
        if (steps := checkpoint_steps(storage, phase))
    ]
    if reached:
        print_line("resuming at {} step {}".format(*reached[-1]))
    with Progress(interval=config.train.log_every) as progress:

        def show(metrics: dict[str, Any]) -> None:
            progress(metrics)
            also(metrics)

        yield show
    if config.data.loading == "streaming" and storage.exists(BAD_SAMPLES):
        count = len(storage.read(BAD_SAMPLES).splitlines())
        print_line(
            f"warning: {plural(count, 'unreadable image')}; see"
            f" {storage.below(BAD_SAMPLES)}"
        )


def _finish(
    config: Config,
    storage: Storage,
    task: Task,
    values: dict[str, float],
    report: bool,
    elsewhere: Place | None,
) -> None:
    """The model, with ``report`` all rows' predictions and the page, then the mark
    of a finished run.
    """
    trained = run.load_trained(config, storage, task.num_known, task.num_novel)
    model = save_model(config, storage, *trained, task.known)
    _write_card(
        storage,
        model,
        values,
        f"{task.rows.source}, fingerprint {task.rows.fingerprint[:16]}",
    )
    if report:
        print_line("predicting all images and writing the report")
        model, _ = predict_run(config, storage, task, model, elsewhere)
        _mark_measured(storage)
        write_report(
            config,
            storage,
            task,
            device=local_device(config),
            model=model,
            metrics=values,
            make_decoder=_report_decoder(config, storage, task, elsewhere),
        )
    _write_results(storage, values)


def _report_decoder(
    config: Config, storage: Storage, task: Task, elsewhere: Place | None
) -> Callable[[Classifier], Decode]:
    """Return what makes the function that decodes rows for the report's model."""
    place = place_of(config, elsewhere) if ray_pays(task, elsewhere) else Place()
    return partial(place.decoder, config, storage, task.rows)


def _write_results(storage: Storage, values: dict[str, float]) -> None:
    _mark_measured(storage)
    storage.write(RESULTS_FILE, json.dumps(values, indent=1, sort_keys=True).encode())


def _mark_measured(storage: Storage) -> None:
    """The classes are those that the run's results count."""
    if storage.exists("model/classes.json") and not is_measured(
        data := storage.read("model/classes.json")
    ):
        storage.write("model/classes.json", with_measured(data))


def _write_card(
    storage: Storage, model: Classifier, values: Mapping[str, float], data: str = ""
) -> None:
    """The model card; ``data`` is what it says of the run's rows, by default what it
    said before.
    """
    name = model_folder(storage) + CARD_FILE
    if not data and (
        before := re.search("^- Data: (.*)$", storage.read(name).decode(), re.M)
    ):
        data = before[1]
    facts = {"Data": data} if data else {}
    storage.write(name, model_card(model, facts, values).encode())


def _show(storage: Storage, values: dict[str, float]) -> None:
    if (found := verdict(values)) is not None:
        print_line("\n  ".join((f"\nverdict: {found.word}", *found.reasons)))
    novel = "novel-1"
    # of a damaged table, which the next prediction replaces
    with suppress(StorageError):
        if (table := read_columns(storage, ("class_name", "kind"))) is not None:
            for kind, what in (
                ("novel", "new classes"),
                ("known", "known classes"),
                (None, "no class"),
            ):
                own = (
                    pc.field("kind") == kind
                    if kind
                    else ~pc.field("kind").isin(["novel", "known"])
                )
                pairs = table.filter(own)["class_name"].value_counts().to_pylist()
                if counts := {pair["values"]: pair["counts"] for pair in pairs}:
                    print_line(f"images of {what}: {counted(counts)}")
                if kind == "novel":
                    novel = min(
                        counts, key=lambda name: (len(name), name), default=novel
                    )
    if any("novel" in key.split("/") for key in values):  # with ground truth
        print_line(f"\n{format_table(values)}")
    print_line(f"\nresults in {storage.uri}")
    if storage.exists(REPORT):
        run, report = shlex.quote(storage.uri), shlex.quote(storage.below(REPORT))
        print_line(
            f"next: open {report}\n"
            f"      uno classes {run} --rename {shlex.quote(f'{novel}=NAME')}\n"
            f"      uno predict {run} --data SOURCE --output DIR"
        )


def _dry_run(
    config: Config,
    task: Task,
    phases: tuple[str, ...],
    own_weights: bytes | None,
    batch_is_derived: bool,
) -> None:
    """The plan, and one step of each phase that has any in a
    scratch directory.
    """
    phases = tuple(name for name in phases if getattr(config, name).epochs)
    for name, plan in run.plans(
        config, *task.sizes, config.compute.num_workers
    ).items():
        if name in phases:
            steps = plural(plan.steps_per_epoch, "step")
            epochs = f"{plural(getattr(config, name).epochs, 'epoch')} of {steps}"
            unlabeled = plural(plan.unlabeled_size, "unlabeled image")
            print_line(f"{name}: {epochs} of {plan.labeled_size} labeled + {unlabeled}")
    with tempfile.TemporaryDirectory(prefix="uno-dry-run-") as folder:
        once = override(
            config, {"train.max_steps": 1, "compute.num_workers": 0, "output": folder}
        )
        with lock.lock_run(Storage(folder), on_wait=print_line) as claim:
            if own_weights is not None:
                claim.storage.write(PRETRAINED_FILE, own_weights)
            for line in describe_run(config, phases):
                print_line(line)
            if not phases:
                return print_line("dry run: nothing would be trained; nothing was kept")
            # which would take minutes
            if on_features(config) and not config.model.takes_vectors:
                if registry.load(config).needs_images:
                    why = (
                        f"method {config.method} first computes features of all images"
                    )
                    return print_line(f"dry run: no step was taken, because {why}")
                once = override(once, {"data.loading": "streaming"})
            job = TrainingJob(
                once, task, phases, False, claim, batch_is_derived=batch_is_derived
            )
            Place().train(job, lambda metrics: None, ExitStack(), keep=False)
    print_line("dry run: one step of each phase was taken; nothing was kept")
