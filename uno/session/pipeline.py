"""The commands that train, evaluate and change a run, step by step.

A command that changes the model or the metrics of a run, or writes its report, calls
:func:`finish`, which brings the files of the directory in line with them. A command
that only pretrains, and a dry run, do not call it.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import pyarrow.compute as pc

import uno.runs.run as training
from uno.config import Config, flatten, to_dict
from uno.data import features
from uno.data.files import Storage
from uno.data.splits import train_rows
from uno.data.unreadable import BAD_SAMPLES
from uno.encoders.build import require_encoder
from uno.errors import ConfigError, NumericsError, StorageError
from uno.presets import is_custom_data, preset
from uno.report.report import open_task, write_report
from uno.results import predictions
from uno.results.accuracy_table import format_table
from uno.results.annotations import update_tables
from uno.results.classes import (
    ModelClasses,
    OutputClass,
    hashes,
)
from uno.results.export import CARD_FILE, FORMATS, export, model_card, origin
from uno.results.infer import Classifier, load_classifier, model_folder, save_model
from uno.results.predictions import read_columns
from uno.results.show import format_counts
from uno.results.trust import verdict
from uno.runs import DISCOVER, PHASES, REPORT_FILE, RESULTS_FILE, directory
from uno.runs.checkpoint import checkpoint_steps
from uno.runs.former import keep_until_replaced
from uno.session.console import Progress, interrupt_on_signal, print_line
from uno.session.data import Show, config_for_readable_rows
from uno.session.loggers import Loggers
from uno.session.predict import predict_run
from uno.session.prepare import (
    check_data,
    check_run,
    open_run,
    open_stored_run,
    with_full_path,
)
from uno.session.resources import trains_on_features
from uno.session.run import Backend, Run
from uno.text import plural

CLASSES_FILE = "model/classes.json"
TRAINED = {
    "full": "fully trained",
    "last_stage": "last stage trained",
    "none": "frozen",
}
"""Values of ``model.finetune``, for the console."""


def discover(
    config: Config,
    given: Mapping[str, Any],
    overwrite: bool = False,
    last: str = DISCOVER,
    predict: bool = True,
    report: bool = True,
    backend: Backend | None = None,
) -> None:
    """Train and evaluate a run, and write its model, predictions, metrics and report.

    The same call resumes an interrupted run, and prints the results of a finished one.
    With ``overwrite`` the former run of the directory is deleted when the new one
    begins to train, and put back if the command ends before that. The directory is
    locked while files are written into it.

    Args:
        config: The configuration before the data is read, from
            :func:`uno.session.configure.configure`. Its ``output`` is the run
            directory.
        given: The dotted keys that the user has set, with their values, as
            ``configure`` took them. Settings that are not among them may be derived
            from the data.
        overwrite: Whether a run in the same directory is started over.
        last: The last phase to train: "pretrain", the supervised pretraining on labeled
            rows, which may follow a pretext task; or "discover". After "pretrain"
            nothing is evaluated, and no model, predictions or report are written.
        predict: Whether the trained model then classifies all rows of the data, and the
            predictions are written into the run directory. A run that was finished
            before is not predicted again.
        report: Whether a report is written, also of a finished run that has none.
        backend: Does the work of the run. None chooses it by ``compute.num_workers``:
            this process for 0, otherwise Ray.

    Raises:
        ConfigError: The run cannot succeed, its directory holds a run of other settings
            or data and not ``overwrite``, or another command holds its directory.
        NumericsError: Training met numbers that are not finite, again and again.
        StorageError: A file cannot be read or written.
        Interrupted: The user stopped it. The same call resumes.
    """
    run = open_run(config, given, overwrite, last, backend)
    if run.resumes and run.evaluate and (metrics := run.metrics) is not None:
        directory.check_images(run.storage, run.task.rows)
        print_line(
            f"{run.storage.uri} is finished; nothing is trained again (--overwrite"
            " starts over)"
        )
        if report and not run.storage.exists(REPORT_FILE):
            with run.locked():
                finish(run, report=True)
        return show_results(run.storage, metrics)
    check_run(run)
    with run.locked():
        former_run = (
            keep_until_replaced(run.storage, print_line)
            if overwrite
            else nullcontext(lambda: None)
        )
        with former_run as discard_former_run:
            _begin_directory(run)

            def show(line: dict[str, Any]) -> None:
                """Send a line of metrics to the loggers.

                A line of a training phase, not one of reading the data, also deletes
                the former run of the directory, if it is still there.
                """
                if line.get("phase") in PHASES:
                    discard_former_run()
                loggers(line)

            with Loggers(run.config, run.storage) as loggers:
                metrics = _train_and_evaluate(run, show)
                loggers.results(metrics)
        if not run.evaluate:
            return print_line(f"finished: {run.storage.uri}")
        with interrupt_on_signal(
            "stopped before the run was finished; resume with the same command"
        ):
            finish(run, _save_model(run), metrics, predict, report)
    show_results(run.storage, metrics)


def evaluate(target: str, given: Mapping[str, Any]) -> None:
    """Evaluate a trained run again, and update its report if the metrics have changed.

    The newest checkpoint of discovery is evaluated, whether or not the run was
    finished. The new metrics replace ``metrics.json`` of the run, and are printed. The
    model card is written anew, and the folder ``model/`` if it is missing. A report is
    updated only if there is one, and the predictions are not.

    Args:
        target: The directory of the run, a path or URI.
        given: Settings by dotted key that replace those of the run: where to compute
            (``compute.*``), and where the data is now (``data.*``).

    Raises:
        ConfigError: There is no such run, a setting is refused, this machine lacks the
            device or the package of the encoder, the data cannot be read or has
            changed, or another command holds the directory.
        StorageError: The run has no valid checkpoint of discovery, a file in ``model/``
            is damaged, or a file cannot be read or written.
        Interrupted: The user stopped it. The former metrics stay.
    """
    run = open_stored_run(target, given)
    run.config = with_full_path(run.config)
    require_encoder(run.config.model.encoder, run.storage.uri)
    directory.begin_run(run.config, run.storage, run.task.rows.fingerprint)
    directory.check_images(run.storage, run.task.rows)
    check_data(run.config, run.task, read_images=False)
    with run.locked():
        before, metrics = run.metrics, _train_and_evaluate(run)
        is_saved = run.storage.exists(CLASSES_FILE)
        model = load_classifier(run.storage) if is_saved else _save_model(run)
        report = metrics != before and run.storage.exists(REPORT_FILE)
        with interrupt_on_signal("stopped before the new metrics were stored"):
            finish(run, model, metrics, report=report)
    show_results(run.storage, metrics)


def report(target: str, given: Mapping[str, Any]) -> str:
    """Write the HTML report of a run, finished or not, and return its path or URI.

    If the data is missing or has changed, a warning is printed, and the report shows
    what the directory still holds. The directory is not locked.

    Args:
        target: The directory of the run, a path or URI.
        given: Settings by dotted key that replace those of the run: where to compute
            (``compute.*``), and where the data is now (``data.*``).

    Raises:
        ConfigError: There is no such run, its ``config.yaml`` is damaged, a setting is
            refused, or this machine lacks the device that was asked for.
        StorageError: The report cannot be written; or the ``config.yaml``, the stored
            fingerprint of the data or the stored times of its images cannot be read.
    """
    run = open_stored_run(target, given)
    run.opened, run.data_problem = open_task(run.config, run.storage)
    if run.data_problem:
        print_line(f"warning: {run.data_problem}")
    finish(run, report=True)
    return run.storage.below(REPORT_FILE)


def apply_classes(run: Run, model: Classifier, edited: list[OutputClass]) -> None:
    """Apply edited classes to the model of a run and to all files that depend on them.

    Names, merged classes and dropped classes change in the model, the predictions and
    their tables, the metrics, the report and exported models. Rows are only predicted
    again if the stored predictions are of other merged or dropped classes or of another
    model, and only evaluated again if the metrics are of other merged or dropped
    classes. New names are written into the stored predictions. If rows are predicted or
    evaluated, all images are decoded into memory before, or their features are read or
    computed. Streamed images are read while rows are predicted or evaluated. A report
    reads a sample of the images.

    A file that the directory does not have, such as a report, is not created. The model
    card is always written. A report is not updated if the data is missing or has
    changed, and neither is an exported model if the package for its export is missing
    or the new export computes something else. A printed warning names such a file. The
    last line that is printed names what was updated.

    Args:
        run: The run, inside ``run.locked()``, so that no other command writes into its
            directory. ``run.storage`` may also be a copy of its folder ``model/``
            alone; only the model, its card and exported models change then.
            ``run.evaluate`` is overwritten: whether the metrics must be computed again.
        model: Its model, with the classes before the edit.
        edited: All classes after the edit, as many as before and in the same order. A
            discovered class is merged if its ``into`` is the index of another class,
            and dropped if ``into`` is None.

    Raises:
        ConfigError: Rows must be predicted or evaluated again, and the data is missing
            or has changed. No file was changed then. Or too many images cannot be read,
            or their features cannot be computed; the model has the new classes then.
        StorageError: A file of the run is damaged, or cannot be written.
    """
    storage, folder = run.storage, model_folder(run.storage)
    metrics, predicted = run.metrics, predictions.read_identity(storage)
    stored = ModelClasses.parse(storage.read(f"{folder}classes.json"))
    stored = stored.with_classes(edited)
    same = {"model_hash": model.model_hash, "routes": hashes(edited)["routes"]}
    predict = predicted is not None and not same.items() <= predicted.items()
    has_trained = metrics is not None and checkpoint_steps(storage, DISCOVER)
    run.evaluate = bool(has_trained) and not stored.is_measured
    report = storage.exists(REPORT_FILE)
    if predict or run.evaluate:
        directory.check_rows(storage, run.task.rows)
    elif report:
        run.opened, run.data_problem = open_task(run.config, storage)
        if run.data_problem:
            report = False
            print_line(
                f"warning: {REPORT_FILE} was not updated: the training data is missing"
                " or has changed"
            )
    storage.write(f"{folder}classes.json", stored.dump())
    model, measured = replace(model, classes=edited), None
    if predict or run.evaluate:
        measured = _train_and_evaluate(run) or None
    finish(run, model, measured, predict, report)
    renamed = not predict and predictions.rename(storage, edited)
    updated = {
        "the model": True,
        predictions.FOLDER: predict or renamed,
        RESULTS_FILE: measured is not None,
        REPORT_FILE: report,
    }
    for format in ("pt2", "onnx"):
        if storage.exists(name := folder + FORMATS[format]):
            try:
                storage.write(name, export(model, format))
                updated[name] = True
            except (ConfigError, NumericsError) as error:
                print_line(
                    f"warning: {name} was not updated and still has the previous"
                    f" classes: {error}"
                )
    if predict or renamed:
        updated |= dict.fromkeys(update_tables(storage), True)
    print_line(f"applied to {', '.join(name for name in updated if updated[name])}")


def finish(
    run: Run,
    model: Classifier | None = None,
    metrics: dict[str, float] | None = None,
    predict: bool = False,
    report: bool = False,
) -> None:
    """Update the files of a run that depend on its model and its metrics.

    :func:`discover` calls this after it has saved a new model, or to add a report to a
    finished run; :func:`evaluate`, :func:`report` and :func:`apply_classes` call it,
    too. Only the files that the arguments ask for are written, in this order: the model
    card, the predictions, the report, a note in ``model/classes.json``, and the
    metrics. New metrics are written last, because ``metrics.json`` marks a finished
    run.

    Args:
        run: The run. Unless only the report is written, it must be locked (inside
            ``run.locked()``).
        model: Its model, for the model card and the predictions. None if the model card
            stays as it is; ``predict`` must be False then.
        metrics: Its new metrics, values by name. None if it was not evaluated:
            ``metrics.json`` stays as it is. Otherwise ``model/classes.json`` notes that
            the metrics belong to its merged and dropped classes.
        predict: Whether ``model`` classifies all rows of the run, and the new
            predictions replace those that are stored.
        report: Whether the HTML report is written.

    Raises:
        ConfigError: Rows are to be classified, or a report is to be written and
            ``run.data_problem`` is empty, and the data of the run cannot be read.
        StorageError: A file cannot be written; or there are new metrics, and
            ``model/classes.json`` is missing or damaged.
    """
    if model is not None:
        _write_card(run, model, (run.metrics or {}) if metrics is None else metrics)
    if predict:
        assert model is not None
        also = " and writing the report" if report else ""
        print_line(f"predicting all images{also}")
        predict_run(run, model)
    if report:
        write_report(
            run.config,
            run.storage,
            None if run.data_problem else run.task,
            device=run.device,
            note=run.data_problem,
            model=model,
            metrics=metrics,
        )
    if metrics is not None:
        _mark_measured(run.storage)
        content = json.dumps(metrics, indent=1, sort_keys=True)
        run.storage.write(RESULTS_FILE, content.encode())


def plan_run(
    config: Config,
    given: Mapping[str, Any],
    overwrite: bool = False,
    last: str = DISCOVER,
    backend: Backend | None = None,
) -> None:
    """Check a run in full and print what it would do: a dry run.

    Images are decoded for up to a minute. Nothing is trained or encoded, and no file of
    the run is written. Weights "pretrained" may be downloaded into the cache of their
    library.

    Args:
        config: The configuration before the data is read, from
            :func:`uno.session.configure.configure`. ``config.output`` is the run
            directory.
        given: The dotted keys that the user has set, with their values, as
            ``configure`` took them.
        overwrite: Whether the run would be started over in its directory.
        last: The last phase, "pretrain" or "discover".
        backend: The backend that would do the work. None chooses it by
            ``compute.num_workers``: this process for 0, otherwise Ray.

    Raises:
        ConfigError: The run cannot succeed, or ``data.num_novel`` is "auto".
        StorageError: A file cannot be read.
    """
    run = open_run(config, given, overwrite, last, backend, dry_run=True)
    check_run(run, in_full=True)
    for line in describe_run(run.config, run.phases):
        print_line(line)
    usable = run.task.rows.usable  # of vectors; images may prove unreadable later
    config = config_for_readable_rows(
        run.config, run.task, usable, run.batch_is_derived
    )
    rows = train_rows(run.task, usable)
    sizes = len(rows["labeled"]), len(rows["unlabeled"])
    plans = training.plans(config, *sizes, config.compute.num_workers)
    for name in run.phases:
        if (plan := plans.get(name)) is not None:
            steps = plural(plan.steps_per_epoch, "step")
            epochs = f"{plural(getattr(run.config, name).epochs, 'epoch')} of {steps}"
            unlabeled = plural(plan.unlabeled_size, "unlabeled image")
            print_line(f"{name}: {epochs} of {plan.labeled_size} labeled + {unlabeled}")
    print_line("dry run: nothing was trained, and nothing was kept")


def _begin_directory(run: Run) -> None:
    """Write the first files of a new run, or check that a resumed run has not changed.

    The first files are the environment, the configuration, the modification times of
    the images, and ``run.first_files``. Each of the latter is also written if a resumed
    run lacks it. Then print what the run will do.

    Args:
        run: The run, inside ``run.locked()``.

    Raises:
        ConfigError: The directory holds a run of other settings or data, or an image
            was modified since the run began.
    """
    storage = run.storage
    directory.begin_run(run.config, storage, run.task.rows.fingerprint)
    directory.begin_images(storage, run.task.rows)
    for name, content in run.first_files.items():
        if not storage.exists(name):
            storage.write(name, content)
    for line in describe_run(run.config, run.phases):
        print_line(line)


def describe_run(config: Config, phases: tuple[str, ...]) -> Iterator[str]:
    """Describe on which encoder and for how long a run will train.

    Args:
        config: The configuration of the run, after its data was read.
        phases: The names of the phases that will be trained, in order, some of
            "pretext", "pretrain" and "discover".

    Yields:
        Lines for the console: the encoder with its weights, the epochs of each phase,
        and a hint to use pretrained weights if there are none and the data is the
        user's own.
    """
    model = config.model
    size = "vectors" if model.takes_vectors else f"{features.side(config)} px"
    yield (
        f"model: {model.encoder}, {TRAINED[model.finetune]}, {size};"
        f" weights: {origin(model)}"
    )
    epochs = ", ".join(
        f"{plural(num, 'epoch')} of {name}"
        for name in phases
        if (num := getattr(config, name).epochs)
    )
    if not epochs:
        steps = f"; method {config.method} trains nothing"
    elif model.takes_vectors:
        steps = f", {epochs} on vectors with noise, or with given views"
    elif trains_on_features(config) and (views := config.augment.num_cached_views):
        steps = f", {epochs} on {views} cached views per image"
    else:
        steps = f", {epochs}"
    yield f"training: preset {config.preset}{steps}"
    if model.weights is None and is_custom_data(flatten(to_dict(config))):
        name = preset("photos").model.encoder
        yield (
            "hint: no pretrained weights; for better results --weights pretrained"
            f" ({name}, preset photos)"
        )


def _train_and_evaluate(run: Run, also: Show = lambda line: None) -> dict[str, float]:
    """Train the unfinished phases of a locked run, evaluate it, and show the progress.

    Before that, files that interrupted commands left in the directory are deleted.
    Printed lines say from which step a run resumes, and at the end how many streamed
    images could not be read.

    Args:
        run: The run, inside ``run.locked()``. ``run.phases`` are trained, none if it is
            empty. ``run.backend`` becomes the backend that predicts rows after
            training.
        also: Also receives each line of metrics, values by name, besides the console.
            By default nothing else receives them.

    Returns:
        The metrics by name, empty unless ``run.evaluate``.

    Raises:
        UnoError: One of the errors of :meth:`uno.session.run.Backend.train`, for the
            same reasons. It is Interrupted if the user stopped the work.
    """
    directory.delete_leftovers(run.storage)
    reached = [
        (phase, steps[-1])
        for phase in run.phases
        if (steps := checkpoint_steps(run.storage, phase))
    ]
    if reached:
        print_line("resuming at {} step {}".format(*reached[-1]))
    with Progress(interval=run.config.train.log_every) as progress:

        def show(line: dict[str, Any]) -> None:
            """Show a line of metrics on the console, and pass it to ``also``."""
            progress(line)
            also(line)

        metrics = run.backend.train(run, show)
    if run.config.data.loading == "streaming" and run.storage.exists(BAD_SAMPLES):
        count = len(run.storage.read(BAD_SAMPLES).splitlines())
        print_line(
            f"warning: {plural(count, 'unreadable image')}; see"
            f" {run.storage.below(BAD_SAMPLES)}"
        )
    run.backend = run.backend.after_training(run.task)
    return metrics


def _save_model(run: Run) -> Classifier:
    """Write the trained model of a run into its folder ``model/``, and return it.

    Existing files of the model are replaced. The network ``run.trained`` is moved to
    the CPU. In the new model no class is merged or dropped, and discovered classes are
    named "novel-1" and so on.

    Raises:
        StorageError: The run has no checkpoint of discovery, or a file cannot be
            written.
    """
    model, best_head = run.trained
    return save_model(run.config, run.storage, model.cpu(), best_head, run.task.known)


def _write_card(run: Run, model: Classifier, metrics: Mapping[str, float]) -> None:
    """Write the model card ``README.md`` beside the files of a run's model.

    If the rows of the run are not open (``run.opened`` is None), the card keeps the
    line on the data of the former card, if there is one.

    Args:
        run: The run.
        model: Its model.
        metrics: The metrics of the run by name, for the tables of the card.
    """
    name = model_folder(run.storage) + CARD_FILE
    facts = {}
    if run.opened is not None:
        rows = run.opened.rows
        facts["Data"] = f"{rows.source}, fingerprint {rows.fingerprint[:16]}"
    elif (before := run.storage.find(name)) is not None:
        facts = dict(re.findall("^- (Data): (.*)$", before.decode(), re.M))
    run.storage.write(name, model_card(model, facts, metrics).encode())


def _mark_measured(storage: Storage) -> None:
    """Note in ``model/classes.json`` that the metrics belong to its merges and drops.

    Merged and dropped classes change the metrics of a run, so without this note the
    next command that edits the classes would evaluate the run again. Nothing is written
    if the file has the note, or if no class was ever merged or dropped.

    Args:
        storage: The run directory, which has the file.

    Raises:
        StorageError: The file is missing or damaged.
    """
    stored = ModelClasses.parse(storage.read(CLASSES_FILE))
    if not stored.is_measured:
        storage.write(CLASSES_FILE, stored.as_measured().dump())


def show_results(storage: Storage, values: dict[str, float]) -> None:
    """Print the results of a finished run, and which commands can follow.

    The results are the verdict, if the metrics have one; the numbers of images in each
    predicted class, if the run has predictions, among all rows that training saw no
    label of, which includes test rows; the table of accuracies, if the data has true
    novel classes; and the path of the directory. Commands are only suggested if the run
    has a report. Predictions that are damaged are left out.

    Args:
        storage: The run directory.
        values: The metrics of the run by name, as in its ``metrics.json``.
    """
    if (trust := verdict(values)) is not None:
        print_line("\n  ".join((f"\nverdict: {trust.word}", *trust.reasons)))
    novel = "novel-1"
    # the table may be damaged; the next prediction replaces it
    with suppress(StorageError):
        table = read_columns(storage, ("class_name", "kind", "label"))
        if table is not None:
            table = table.filter(pc.field("label").is_null())
            for kind, title in (
                ("novel", "new classes"),
                ("known", "known classes"),
                (None, "no class"),
            ):
                is_kind = (
                    pc.field("kind") == kind
                    if kind
                    else ~pc.field("kind").isin(["novel", "known"])
                )
                pairs = table.filter(is_kind)["class_name"].value_counts().to_pylist()
                if counts := {pair["values"]: pair["counts"] for pair in pairs}:
                    print_line(
                        f"no label in training, {title}: {format_counts(counts)}"
                    )
                if kind == "novel":
                    novel = min(
                        counts, key=lambda name: (len(name), name), default=novel
                    )
    if any("novel" in key.split("/") for key in values):  # the data has true classes
        print_line(f"\n{format_table(values)}")
    print_line(f"\nresults in {storage.uri}")
    if storage.exists(REPORT_FILE):
        run, report = shlex.quote(storage.uri), shlex.quote(storage.below(REPORT_FILE))
        print_line(
            f"next: open {report}\n"
            f"      uno classes {run} --rename {shlex.quote(f'{novel}=NAME')}\n"
            f"      uno predict {run} --data SOURCE --output DIR"
        )
