"""Estimate the number of novel classes: ``uno estimate-classes``."""

import time
from collections.abc import Collection

from uno.clustering.num_classes import MIN_NOVEL, calibration
from uno.config import Config, override
from uno.data.files import Storage
from uno.data.splits import decide_setting, train_rows
from uno.results.estimate import Estimate, Settings, require_enough_rows
from uno.runs import ESTIMATE_FILE
from uno.session.backend import choose_backend
from uno.session.console import interrupt_on_signal, print_line
from uno.session.data import read_task
from uno.session.derive import derive_settings
from uno.session.run import Backend, Run
from uno.text import plural

MIN_SHOWN = 0.01  # least probability of a number in the table


def estimate_classes(
    config: Config,
    given: Collection[str] = (),
    settings: Settings | None = None,
    dry_run: bool = False,
    backend: Backend | None = None,
) -> Estimate | None:
    """Estimate the number of novel classes among unlabeled rows, and print the result.

    The data is read, and the settings that it decides are printed, too. An estimate
    that the directory holds for the same data and settings is not computed again.

    Args:
        config: The configuration before the data is read, from
            :func:`uno.session.configure.configure`. Its ``data.num_novel`` is not used.
            The estimate and pretrained encoders are stored in the directory
            ``config.output``, which must be set unless ``dry_run``.
        given: The dotted keys that the user has set. Other settings may be derived from
            the data.
        settings: The parameters of the estimate, such as the largest number to try;
            None for the defaults of :class:`~uno.results.estimate.Settings`.
        dry_run: Whether the data is only read and checked, and a line says what would
            be done.
        backend: The backend that computes. None chooses it by ``compute.num_workers``:
            this process for 0, otherwise Ray.

    Returns:
        The estimate, or None for a dry run.

    Raises:
        ConfigError: There are too few known classes or too few unlabeled rows, the data
            cannot be read, too many images cannot be read, the weights of a frozen
            encoder are missing, or another command holds the directory.
        NumericsError: The training of an encoder met numbers that are not finite, again
            and again.
        StorageError: A file cannot be read or written.
        Interrupted: The user stopped it. Finished encoders are kept.
    """
    settings = settings or Settings()
    backend = choose_backend(config) if backend is None else backend
    # The number is what we are after: 1 stands in for it and is never read.
    task = read_task(override(config, {"data.num_novel": 1}).data)
    readable = train_rows(task, task.rows.usable)
    num_known = len(readable["labels"].unique())
    # before anything is computed
    frozen = config.model.finetune == "none"
    require_enough_rows(num_known, len(readable["unlabeled"]), frozen)
    setting, reason = decide_setting(config, task.rows.known)
    config = override(config, {"data.setting": setting})
    values, lines = derive_settings(config, given, task)
    if frozen:  # nothing is trained on the features
        values |= {"discover.epochs": 0, "augment.num_cached_views": 0}
    config = override(config, values)
    left_out = (f"warning: {line}" for line in task.rows.warnings)
    for line in (reason, *lines, *left_out):
        print_line(line)
    (labeled, unlabeled), known = (
        task.sizes,
        plural(len(task.known), "known class", "known classes"),
    )
    sizes = f"{plural(labeled, 'labeled image')} of {known}, {unlabeled:,} unlabeled"
    print_line(f"data: {task.rows.source}: {sizes}")
    if dry_run:
        work = f"pretrain {settings.num_splits} encoders, each on some known classes"
        work = "cluster the features of the frozen encoder" if frozen else work
        print_line(f"dry run: would {work}; nothing was done")
        return None
    assert config.output is not None
    run, start = (
        Run(config, Storage(config.output), backend, opened=task),
        time.perf_counter(),
    )
    kept = "stopped; finished encoders are kept"
    with run.locked(), interrupt_on_signal(kept):
        estimate = backend.estimate(run, settings)
    print_line(format_estimate(estimate))
    print_line(
        f"{time.perf_counter() - start:.0f} s; all curves in"
        f" {run.storage.below(ESTIMATE_FILE)}"
    )
    return estimate


def format_estimate(estimate: Estimate) -> str:
    """Format an estimate of the number of novel classes for the console.

    Returns:
        A text of several lines. The first part is a table with a row for each number k
        of novel classes that was tried: its probability for a frozen encoder, where
        numbers outside the interval with less than one percent are left out, otherwise
        its F1 score. Then come the estimate with its interval, the option
        ``--num-novel`` that can follow, and notes and warnings if there are any.
    """
    lines = _table_lines(estimate)
    lines.append(
        f"\nestimated new classes: {estimate.num_novel} (interval {estimate.low} to"
        f" {estimate.high})"
    )
    if not estimate.splits:
        reason = "pairs that may be one class are named after the run"
    elif estimate.suggested < estimate.high:
        reason = "the interval is too wide for its larger end"
    else:
        reason = "the larger end of the interval"
    lines.append(
        "next: extra classes can be merged later with uno classes, missing ones"
        f" cannot: --num-novel {estimate.suggested} ({reason})"
    )
    if not estimate.splits and estimate.low == MIN_NOVEL:
        lines.append(
            f"note: the estimate assumes at least {MIN_NOVEL} new classes; it cannot"
            " say that there is one, or none"
        )
    smallest, largest = calibration()["num_novel"]
    if not estimate.splits and estimate.high >= largest:
        lines.append(
            f"warning: the estimate was calibrated on {smallest} to {largest} new"
            " classes; it was mostly too low where there were more"
        )
    if estimate.at_limit:
        again = f"repeat uno estimate-classes with --max-novel {2 * estimate.ks[-1]}"
        lines.append(f"warning: the interval reaches the largest number tried; {again}")
    return "\n".join(lines)


def _format_mark(estimate: Estimate, k: int) -> str:
    """Return the end of the table row of k novel classes.

    It says whether k is the estimate or lies in its interval; otherwise it is empty.
    """
    if k == estimate.num_novel:
        return "  <- estimate"
    return "  in the interval" if estimate.low <= k <= estimate.high else ""


def _table_lines(estimate: Estimate) -> list[str]:
    """Format a table with a row for each number k of novel classes.

    For a frozen encoder a row has the probability of k. Numbers of less than one
    percent are left out then, unless they lie in the interval. Otherwise a row has the
    F1 score of k.

    Returns:
        Lines of text: an empty one, the heads of the columns, and the rows. A row ends
        with a mark if k is the estimate or lies in its interval.
    """
    if estimate.splits:
        curve, head, layout = "f1", f"{'F1':>5}", "{:>5.3f}"
    else:
        curve, head, layout = "probability", "probability", "{:>11.0%}"
    lines = ["", f"{'k':>4}  {head}"]
    for k, value in zip(estimate.ks, estimate.curves[curve], strict=True):
        if estimate.splits or value >= MIN_SHOWN or estimate.low <= k <= estimate.high:
            lines.append(f"{k:>4}  {layout.format(value)}{_format_mark(estimate, k)}")
    return lines
