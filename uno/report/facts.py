"""Read metrics, environment and history from a run directory, and draw charts."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from uno import runs
from uno.data.files import Storage, parse_json
from uno.data.unreadable import BAD_SAMPLES, name_bad
from uno.errors import StorageError
from uno.report.charts import Chart, Series, line_chart
from uno.report.page import duration
from uno.runs.journal import read_journal
from uno.text import plural

COUNTS = ("step", "total_steps", "epoch", "skipped_steps")  # of a line of metrics
ESTIMATE_CURVES = {
    "f1": "mean F1 of classes",
    "probability": "probability of k classes",
}


@dataclass(frozen=True)
class RunData:
    """The content of a run directory, except for its model.

    Attributes:
        metrics: The metrics of the run, finite numbers by key, such as
            "train/novel/task_aware/acc/avg".
        environment: The content of ``environment.json``: among others the command,
            versions and hardware, by name.
        journal: The lines of ``metrics.jsonl``, in order. Each has values by name.
        bad: Name and reason of each image that could not be read, as ``(name,
            reason)``. The name is the identifier of its row, followed by its path in
            parentheses if the path is known and tells more, see
            :func:`uno.data.unreadable.name_bad`.
        config_yaml: The stored configuration as text.
        estimate: The content of ``estimate.json``, the estimated number of novel
            classes with its curves (:class:`uno.results.estimate.Estimate`); empty
            without an estimate.
        unreadable: Names of the files above that could not be read or parsed.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    journal: list[dict[str, Any]] = field(default_factory=list)
    bad: list[tuple[str, str]] = field(default_factory=list)
    config_yaml: str = ""
    estimate: dict[str, Any] = field(default_factory=dict)
    unreadable: tuple[str, ...] = ()

    def entries(self, phase: str) -> list[dict[str, Any]]:
        """Return the lines of ``metrics.jsonl`` that belong to a training phase.

        Args:
            phase: "pretext", "pretrain" or "discover".

        Returns:
            Lines in order, each with values by name, such as "step" and "loss".
        """
        return [entry for entry in self.journal if entry.get("phase") == phase]

    @property
    def has_trained(self) -> bool:
        """Whether a line of ``metrics.jsonl`` has a step above 0, in any phase."""
        return any(entry.get("step", 0) for entry in self.journal)

    def head_losses(self) -> list[list[float]]:
        """Return the cluster loss of each head after each epoch of discovery.

        Lines of ``metrics.jsonl`` without losses of heads, which are those within an
        epoch, are left out. So are lines with a loss that is not a finite number. Of
        the remaining lines, those with another number of heads than the last one are
        left out, too.

        Returns:
            A list for each remaining line, in order, with one loss for each head.
        """
        losses = [entry.get("head_losses") for entry in self.entries("discover")]
        rows = [
            row for row in losses if isinstance(row, list) and all(map(is_number, row))
        ]
        return [row for row in rows if len(row) == len(rows[-1])]


def read_facts(storage: Storage, metrics: Mapping[str, float] | None = None) -> RunData:
    """Read the files of a run directory that its report shows.

    Missing files count as empty. So do files that cannot be read or parsed, but their
    names are recorded in the attribute ``unreadable`` of the result. No error is raised
    for either. Metrics that are not finite numbers are left out. So are lines that are
    no JSON objects, and lines of ``metrics.jsonl`` in which the step, the total number
    of steps, the epoch or the number of skipped steps is there and is not a finite
    number.

    Args:
        storage: The run directory.
        metrics: The metrics of the run by key, instead of those in the directory. None
            reads the file ``metrics.json``.

    Returns:
        The metrics, the environment, the training history (the lines of
        ``metrics.jsonl``), the images that could not be read, the configuration as
        text, the estimate of the number of classes, and the names of the files that
        could not be read.
    """
    unreadable: list[str] = []

    def read(name: str, empty: Any) -> Any:
        """Read a file of the run directory, or return ``empty`` if it cannot be read.

        The type of ``empty`` says what the file holds: a list of JSON lines, a JSON
        mapping, or text. A missing file counts as empty. The name of a file that cannot
        be read, or that holds something else, is added to ``unreadable``. Lines that
        are no JSON objects are left out.
        """
        content: Any = None
        with suppress(StorageError, ValueError):
            if isinstance(empty, list):
                content = read_journal(storage, name)
            else:
                text = (storage.find(name) or b"").decode(errors="replace")
                content = parse_json(text or "{}") if isinstance(empty, dict) else text
        if isinstance(content, type(empty)):
            return content
        unreadable.append(name)
        return empty

    results = read(runs.RESULTS_FILE, {}) if metrics is None else metrics
    return RunData(
        metrics={k: float(value) for k, value in results.items() if is_number(value)},
        environment=read(runs.ENVIRONMENT_FILE, {}),
        journal=[
            entry
            for entry in read(runs.METRICS_FILE, [])
            if all(is_number(entry.get(key, 0)) for key in COUNTS)
        ],
        bad=[
            (name_bad(entry), str(entry.get("reason", "")))
            for entry in read(BAD_SAMPLES, [])
        ],
        config_yaml=read(runs.CONFIG_FILE, ""),
        estimate=read(runs.ESTIMATE_FILE, {}),
        unreadable=tuple(unreadable),  # filled by the calls above
    )


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value of a JSON file is a finite number, and not a boolean."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max  # an int may be larger than any float
    )


def curves(facts: RunData) -> list[Chart]:
    """Draw charts of the training history of a run.

    They are, for each phase in order, the loss and the learning rate over steps, and
    then one chart with the loss of each cluster head over the epochs of discovery.
    Charts without a point are left out.

    Args:
        facts: The content of the run directory, with the lines of metrics.
    """
    charts = []
    for phase, title in runs.PHASES.items():
        for key, name in (("loss", "loss"), ("lr", "learning rate")):
            series = _series(
                name,
                [entry.get("step") for entry in facts.entries(phase)],
                [entry.get(key) for entry in facts.entries(phase)],
            )
            charts.append(line_chart(f"{title}: {name}", "step", [series]))
    heads = [
        Series(f"head {head}", list(enumerate(losses, 1)))
        for head, losses in enumerate(zip(*facts.head_losses(), strict=True), 1)
    ]
    charts.append(line_chart("Cluster loss of each head", "epoch", heads))
    return [chart for chart in charts if chart is not None]


def estimate_chart(facts: RunData) -> Chart | None:
    """Draw how well each number k of novel classes fits, a stored estimate of the run.

    The estimate is the file ``estimate.json`` of the run directory. A run with
    ``--num-novel auto`` makes the estimate before it begins, and keeps a copy of the
    file. The command ``uno estimate-classes`` writes the file into its output
    directory.

    Args:
        facts: The content of the run directory, with the estimate.

    Returns:
        A chart over k with the curves that the estimate has: the mean F1 score of known
        classes that were held out, or for a frozen encoder the probability of k. None
        if the run has no estimate of the number of classes, or no curve of it has a
        finite value.
    """
    ks, stored = facts.estimate.get("ks"), facts.estimate.get("curves")
    if not isinstance(ks, list) or not isinstance(stored, dict):
        return None
    series = [
        _series(label, ks, stored[key])
        for key, label in ESTIMATE_CURVES.items()
        if isinstance(stored.get(key), list)
    ]
    title = "How well k clusters fit the known classes"
    return line_chart(title, "k, novel classes", series)


def _series(name: str, xs: Sequence[Any], ys: Sequence[Any]) -> Series:
    """Return a curve, without the points whose x or y is not a finite number.

    Args:
        name: Name for the legend.
        xs: The x values, read from JSON, of any type.
        ys: The y values, likewise. If there are more values of one kind, the rest is
            ignored.
    """
    points = [
        (x, y) for x, y in zip(xs, ys, strict=False) if is_number(x) and is_number(y)
    ]
    return Series(name, points)


def times(facts: RunData) -> list[tuple[str, str]]:
    """Describe how long the training steps of each phase took.

    A phase without lines of metrics is left out. The numbers of steps and epochs are
    those of its last line.

    Args:
        facts: The content of the run directory, with the lines of metrics.

    Returns:
        Pairs of a title and a text for the report, such as ``("Discovery time", "12 min
        for 3,300 steps, 100 epochs")``.
    """
    lines = []
    for phase, title in runs.PHASES.items():
        if entries := facts.entries(phase):
            steps = plural(entries[-1].get("step", 0), "step")
            epochs = plural(entries[-1].get("epoch", 0), "epoch")
            seconds = duration(training_seconds(entries))
            lines.append((f"{title} time", f"{seconds} for {steps}, {epochs}"))
    return lines


def training_seconds(entries: Sequence[dict[str, Any]]) -> float:
    """Sum the wall time of the steps of a phase, without evaluation.

    A line is ignored if its step is not above 0 and above that of each line that was
    counted before it, or if its ``step`` or ``step_ms`` is not a finite number. One
    that is missing counts as 0.

    Args:
        entries: The lines of metrics of the phase. ``step_ms`` is the mean time of the
            steps since the line before, in milliseconds.

    Returns:
        Seconds.
    """
    seconds, previous_step = 0.0, 0.0
    for entry in entries:
        step, step_ms = entry.get("step", 0), entry.get("step_ms", 0)
        if is_number(step) and is_number(step_ms) and step > previous_step:
            seconds += (step - previous_step) * step_ms / 1000
            previous_step = step
    return seconds
