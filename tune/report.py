"""Write the results of a hyperparameter search (a sweep) as a table and an HTML page.

The files are ``sweep.jsonl``, ``best.yaml`` and the self-contained ``sweep.html``. They
are made from the sweep's directory alone.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from tune import SCORES, records, spaces
from tune.records import FAILED, FINISHED, STOPPED, Trial
from tune.spaces import Domain, Space
from uno.data.files import Storage
from uno.data.output import read_mapping
from uno.report.charts import WIDE, Chart, Dot, Series, line_chart
from uno.report.page import render
from uno.text import plural, visible

MAX_SHOWN, MAX_LISTED = 200, 10  # trials in a chart, and in the table on the console


class Summary(NamedTuple):
    """The results of a sweep, read from its directory.

    Attributes:
        settings: The content of ``sweep.yaml``.
        space: The search space.
        trials: All trials, in the order of their numbers.
        ranked: The finished and early-stopped trials, the best first.
        best: The trial whose configuration ``best.yaml`` holds, or None if none
            finished.
        cost: ``seconds``, ``cpu_seconds`` and ``gpu_seconds`` over all processes;
            ``epochs``, the number of trained epochs; ``saved``, the share of epochs
            that early stopping saved; ``pretrainings``, the number of shared
            pretrainings, and ``pretrain_s``, their seconds.
    """

    settings: Mapping[str, Any]
    space: Space
    trials: list[Trial]
    ranked: list[Trial]
    best: Trial | None
    cost: dict[str, float]

    @property
    def keeps_given(self) -> bool:
        """Whether trial 0 is recommended although another trial has a higher score.

        Trial 0 is the user's configuration. It is preferred if its score is at most one
        standard error lower, see :func:`tune.records.best_trial`.
        """
        return self.best is not None and self.best is not self.ranked[0]


def read(storage: Storage) -> Summary:
    """Read the results of a sweep from its directory, and summarize them.

    Args:
        storage: The directory of the sweep.

    Returns:
        The trials with their ranking and the best one, and the cost of the sweep.

    Raises:
        ConfigError: The directory holds no sweep.
    """
    settings, trials = records.read_settings(storage), records.read_trials(storage)
    space, ranked = spaces.from_tree(settings["space"]), records.ranking(trials)
    folders = (f"pretrain/{name}" for name in storage.list("pretrain"))
    pretrained = [
        read_mapping(storage, f"{folder}/done.json") or {} for folder in folders
    ]
    lines = [line for trial in trials for line in trial.epochs] + pretrained
    sound = [
        trial.last_epoch for trial in trials if trial.status in (FINISHED, STOPPED)
    ]
    planned = len(sound) * int(settings["epochs"])
    cost = {
        key: sum(e.get(key, 0.0) for e in lines)
        for key in ("seconds", "cpu_seconds", "gpu_seconds")
    }
    cost["epochs"] = sum(trial.last_epoch for trial in trials)
    cost["saved"] = 1 - sum(sound) / planned if planned else 0.0
    cost["pretrainings"] = sum(map(bool, pretrained))
    cost["pretrain_s"] = sum(line.get("seconds", 0.0) for line in pretrained)
    best = records.best_trial(trials)
    return Summary(settings, space, trials, ranked, best, cost)


def write(storage: Storage) -> Summary:
    """Write the results of a sweep into its directory, as three files.

    The table is ``sweep.jsonl``, the best configuration ``best.yaml`` and the page
    ``sweep.html``. Without a best trial ``best.yaml`` is not written; if there is one
    already, it stays.

    Args:
        storage: The directory of the sweep, which is read and written.

    Returns:
        The results that the files show.

    Raises:
        ConfigError: The directory holds no sweep.
    """
    summary = read(storage)
    storage.write("sweep.jsonl", lines_bytes(summary))
    if summary.best is not None:
        storage.write("best.yaml", best_yaml(summary, summary.best).encode())
    storage.write("sweep.html", page(summary).encode())
    return summary


def lines_bytes(summary: Summary) -> bytes:
    """Return the results of a sweep as JSON lines, one for each trial.

    A line has the number of the trial, its hyperparameter values, the results of each
    epoch, the status (``unfinished`` if the trial has not ended), the reason of a
    failure, the name of the score (``objective``), and whether the trial is the best.
    Failed trials have a line, too. The lines are in the order of the numbers.

    Args:
        summary: The results of the sweep.
    """
    lines = [
        {
            "trial": t.index,
            "best": t is summary.best,
            "status": t.status or "unfinished",
            "reason": t.reason,
            "objective": summary.settings["score"],
            "values": t.overrides,
            "epochs": t.epochs,
        }
        for t in summary.trials
    ]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def best_yaml(summary: Summary, best: Trial) -> str:
    """Return the best trial's configuration as YAML for ``uno discover --config``.

    It has the settings that the user gave, and the searched values of the trial, which
    replace those that the user gave. A comment names the trial and its score.

    Args:
        summary: The results of the sweep.
        best: The trial.
    """
    which = f"trial {best.index} of {len(summary.trials)}, score {best.score:.4f}"
    how = f"# {which} ({summary.settings['score']}); uno discover --config best.yaml"
    lines = [how]
    if given := {
        k: v for k, v in summary.settings["given"].items() if k not in best.overrides
    }:
        lines.append(yaml.safe_dump(given, sort_keys=False).rstrip())
    return "\n".join(
        [*lines, "# searched:", yaml.safe_dump(best.overrides, sort_keys=False)]
    )


def format_table(summary: Summary) -> str:
    """Return the results of a sweep as a table for the console.

    It lists the ten best trials and trial 0, if it has a rank, and counts the ranked
    and the failed trials. Then follows the cost. If trial 0 is recommended although
    another trial has a higher score, a last line says so.

    Args:
        summary: The results of the sweep.
    """
    cost, space = summary.cost, summary.space
    rows = [
        [
            "trial",
            "epochs",
            "score",
            *(domain.key.rpartition(".")[2] for domain in space),
        ]
    ]
    for rank, trial in enumerate(summary.ranked):
        if rank < MAX_LISTED or trial.index == 0:
            name = f"{trial.index}{' (yours)' if trial.index == 0 else ''}"
            epochs = (
                f"{trial.last_epoch}{' stopped' if trial.status == STOPPED else ''}"
            )
            values = (str(trial.overrides[domain.key]) for domain in space)
            rows.append([name, epochs, f"{trial.score:.4f}", *values])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    failed = sum(trial.status == FAILED for trial in summary.trials)
    trials, epochs = (
        plural(len(summary.ranked), "trial"),
        plural(cost["epochs"], "epoch"),
    )
    lines.append(
        f"{trials}, {failed} failed; {epochs}, stopping saved"
        f" {100 * cost['saved']:.0f}%; {plural(cost['pretrainings'], 'pretraining')};"
        f" {cost['cpu_seconds']:.0f} CPU s"
    )
    if summary.best is not None and summary.keeps_given:
        kept = (
            "best.yaml keeps your configuration: no trial beat its"
            f" {summary.best.score:.4f}"
        )
        lines.append(f"{kept} by more than one standard error")
    return "\n".join(lines)


def page(summary: Summary) -> str:
    """Return the self-contained HTML page with the results of a sweep.

    It has tables of the trials, and charts of their scores.
    """
    trials, scatters = (
        summary.trials,
        [scatter(domain, summary) for domain in summary.space],
    )
    context = {
        "summary": summary,
        "sentence": SCORES[summary.settings["score"]],
        "default": next((trial for trial in summary.ranked if trial.index == 0), None),
        "others": [trial for trial in trials if trial not in summary.ranked],
        "statuses": [trial.status for trial in trials],
        "curves": learning_curves(summary),
        "scatters": [chart for chart in scatters if chart],
    }
    return render("sweep.html", context, package="tune")


def learning_curves(summary: Summary) -> Chart | None:
    """Draw the score over epochs, one line for each trial.

    A dot at the end of a line shows the last epoch of the trial, and its kind whether
    the trial was stopped early. At most 200 trials are shown.

    Args:
        summary: The results of the sweep.

    Returns:
        The chart, or None if no trial has a score.
    """
    series, last = [], int(summary.settings["epochs"])
    for trial in _shown_trials(summary):
        points = [(epoch["epoch"], epoch["score"]) for epoch in trial.epochs]
        series.append(
            Series(f"trial {trial.index}", points, _kind_of_trial(summary, trial))
        )
    x_range = (1, last)
    return _draw_scores(
        summary,
        "Score by epoch",
        "epoch",
        lambda trial: trial.last_epoch,
        series,
        x_range=x_range,
        width=WIDE,
    )


def scatter(domain: Domain, summary: Summary) -> Chart | None:
    """Draw the score of each trial over its value of one searched setting.

    Of a range about five values are marked on the horizontal axis, of a list of
    choices at most eleven. At most 200 trials are shown.

    Args:
        domain: The values that the setting may take.
        summary: The results of the sweep.

    Returns:
        The chart, or None if no trial has a score.
    """
    values = domain.choices[:: max(1, len(domain.choices) // 6)]
    values = values or tuple(
        dict.fromkeys(domain.at(share) for share in (0, 0.25, 0.5, 0.75, 1 - 1e-12))
    )
    marks = [(domain.position(value), _format_value(value)) for value in values]

    def place(trial: Trial) -> float:
        """Return the horizontal position of a trial, 0 to 1, from its value."""
        return domain.position(trial.overrides[domain.key])

    return _draw_scores(summary, domain.key, "", place, x_range=(0, 1), x_ticks=marks)


def _shown_trials(summary: Summary) -> list[Trial]:
    """Return the trials that a chart shows: at most 200 that have a score.

    These are the best trial and those with the highest numbers. The best trial is the
    last of the list, so that it is drawn above the others.

    Args:
        summary: The results of the sweep.
    """
    shown = [trial for trial in summary.trials if math.isfinite(trial.score)]
    return sorted(shown, key=lambda trial: trial is summary.best)[-MAX_SHOWN:]


def _draw_scores(
    summary: Summary,
    title: str,
    x_label: str,
    x: Callable[[Trial], float],
    series: Sequence[Series] = (),
    **how: Any,
) -> Chart | None:
    """Draw a chart of scores with a dot for each trial, and optionally lines.

    The dot of a trial is at its last score, and its text has the trial's number,
    status, score and values. The vertical axis covers the scores, and need not begin at
    zero.

    Args:
        summary: The results of the sweep.
        title: The title of the chart.
        x_label: The label of the horizontal axis.
        x: Returns the horizontal position of a trial.
        series: The lines, such as learning curves.
        **how: Further arguments of :func:`~uno.report.charts.line_chart`.

    Returns:
        The chart, or None if no trial has a score.
    """
    dots = []
    for trial in _shown_trials(summary):
        values = (
            f"{key.rpartition('.')[2]} {_format_value(value)}"
            for key, value in trial.overrides.items()
        )
        how_far = (
            f"{trial.status or 'unfinished'}, epoch {trial.last_epoch}):"
            f" {trial.score:.4f}"
        )
        words = f"trial {trial.index} ({how_far}; {', '.join(values)}"
        dots.append(Dot(x(trial), trial.score, _kind_of_trial(summary, trial), words))
    scores = [dot.y for dot in dots] + [y for line in series for _, y in line.points]
    finite = [score for score in scores if math.isfinite(score)] or [0.0, 1.0]
    air = (max(finite) - min(finite)) * 0.06 or 0.05
    y_range = min(finite) - air, max(finite) + air
    return line_chart(title, x_label, series, dots, y_range=y_range, **how)


def _kind_of_trial(summary: Summary, trial: Trial) -> str:
    """Return the kind by which a chart styles a trial.

    Returns:
        ``best`` for the best trial; else its status, ``finished``, ``stopped`` or
        ``failed``; ``unfinished`` if it has not ended.
    """
    return "best" if trial is summary.best else trial.status or "unfinished"


def _format_value(value: Any) -> str:
    """Return a value as short text for a chart: ``0.05``, or ``0.5-1`` for a pair.

    A float has two significant digits. Other text is cut off after 14 characters.
    """
    if isinstance(value, list | tuple):
        return "-".join(map(_format_value, value))
    return f"{value:.2g}" if isinstance(value, float) else visible(value, 14)
