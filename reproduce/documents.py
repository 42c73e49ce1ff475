"""Write the results of a table of experiments as Markdown and as JSON."""

import itertools
import json
from typing import Any

from reproduce.experiments import REFERENCE, Benchmark, Evaluation, Row
from reproduce.summary import Line, Results
from uno.data.files import Storage
from uno.text import visible

DASH = "–"  # noqa: RUF001
MINUS = "−"  # noqa: RUF001

Grid = list[list[str]]  # a table of texts, its head first


def format_mean_sd(value: float, sd: float | None = None, signed: bool = False) -> str:
    """Format a mean and its standard deviation with one decimal: ``98.1 ± 0.8``.

    Args:
        value: The mean.
        sd: The standard deviation. If it is None, only the mean is formatted.
        signed: Whether a positive mean has a plus sign. A mean that is rounded to 0 has
            no sign.
    """
    text = f"{value:.1f}"
    if signed:
        text = "0.0" if float(text) == 0 else f"{value:+.1f}".replace("-", MINUS)
    return text if sd is None else f"{text} ± {sd:.1f}"


def results_grid(results: Results) -> Grid:
    """Return the table of published and measured accuracies as a grid of texts.

    The first line is the head. Each other line stands for a row of the table (such as a
    method) under one evaluation (such as task-aware accuracy on test images). Its
    columns are the name, the evaluation, the paper's numbers, and then for each data
    set the measured accuracy and the number of seeds. A text has the accuracies of all
    groups of images (such as known, novel and all), separated by slashes. If a row is
    compared to another one, the mean difference is in brackets. Rows without any number
    are left out.

    Args:
        results: The table with the results of its finished runs.
    """
    table = results.table
    titles = [
        column.title for column in table.published if results.find(source=column.title)
    ]
    head = ["", f"evaluation ({' / '.join(table.groups)})"]
    head += [f"paper: {title}" for title in titles]
    for benchmark in table.benchmarks:
        head += [f"measured: {benchmark.name}", "n"]
    grid = [head]
    for row, evaluation in itertools.product(table.rows, table.evaluations):
        texts = [_published(results, title, row, evaluation) for title in titles]
        for benchmark in table.benchmarks:
            texts += _measured(results, benchmark, row, evaluation)
        if any(text not in (DASH, "0") for text in texts):
            name = row.name
            if row.versus is not None:
                name += f" (against {table.row(row.versus).name})"
            grid.append([name, f"{evaluation.name}, {evaluation.split}", *texts])
    return grid


def _published(results: Results, title: str, row: Row, evaluation: Evaluation) -> str:
    """Format the accuracies that the paper publishes for a row of a table.

    Args:
        results: The results of the table.
        title: The title of the column of published numbers: data set and source.
        row: The row of the table, such as a method.
        evaluation: The protocol and the split under which the accuracy was measured.

    Returns:
        The accuracies of the groups of images, such as ``98.1 ± 0.8 / 60.3``; a dash if
        the paper has none.
    """
    numbers = (
        format_mean_sd(line["published"], line["published_sd"])
        for line in results.find(row=row.key, evaluation=evaluation.name, source=title)
    )
    return " / ".join(numbers) or DASH


def _measured(
    results: Results, benchmark: Benchmark, row: Row, evaluation: Evaluation
) -> list[str]:
    """Format the measured accuracies of a row of a table, and the number of seeds.

    Args:
        results: The results of the table.
        benchmark: The data set.
        row: The row of the table, such as a method.
        evaluation: The protocol and the split under which the accuracy was measured.

    Returns:
        Two texts. The first has the accuracies of the groups of images, such as ``98.1
        ± 0.8 / 60.3``, and the number of failed runs, if any. It is "refused" if the
        settings of the row are not allowed for the data set. The second is the number
        of seeds.
    """
    if f"{benchmark.key}-{row.trained}" in results.refused:
        return ["refused", "0"]
    lines = results.find(
        benchmark=benchmark.key, row=row.key, evaluation=evaluation.name
    )
    texts = {line["group"]: _accuracy(line) for line in lines}
    groups = results.table.groups
    text = " / ".join(texts.get(g, DASH) for g in groups) if texts else DASH
    cell = f"cells/{benchmark.key}-{row.trained}-seed"
    if num_failed := sum(name.startswith(cell) for name in results.failures):
        text += f"; {num_failed} of {results.seeds} failed"
    return [text, str(max((line["n"] for line in lines), default=0))]


def _accuracy(line: Line) -> str:
    """Format a measured accuracy: ``50.0 ± 1.0 (−40.0 ± 0.0)``.

    If the row of the table is compared to another row (such as UNO itself), the mean
    difference of the two is in brackets.

    Args:
        line: A measured line of :attr:`reproduce.summary.Results.lines`: "mean" and
            "sd" in percent and, for a difference, "effect" and "effect_sd" in points. A
            standard deviation of None, of a single seed, is left out.
    """
    text = format_mean_sd(line["mean"], line["sd"])
    if "effect" in line:
        effect = format_mean_sd(line["effect"], line["effect_sd"], signed=True)
        text += f" ({effect})"
    return text


def explanations(results: Results) -> list[str]:
    """Return the sentences that stand below a table of results.

    They explain units, seeds, standard deviations and times, and name changed settings,
    rows that are not allowed for a data set, failed runs and missing runs.

    Args:
        results: The table with the results of its finished runs.
    """
    table = results.table
    said = [
        "Percent; mean ± standard deviation over seeds; last epoch; no number was"
        " chosen by accuracy. In brackets: the mean difference of the same seed, in"
        f" points. Pretraining is shared ({results.pretrain_minutes:.1f} minutes for"
        f" {results.num_pretrainings}).",
    ]
    others = [
        "the digits" if benchmark.key == "digits" else benchmark.key
        for benchmark in table.benchmarks
        if benchmark.option is None
    ]
    if table.published and others:
        where = " and ".join(dict.fromkeys(others))
        said.append(
            f"The paper's numbers are of other data than {where}: compare the"
            f" differences to {table.row(REFERENCE).name}."
        )
    said += [*table.notes, *results.remarks]
    if results.changes:
        changes = ", ".join(f"{key} {value}" for key, value in results.changes.items())
        said.append(f"Changed for all cells: {changes}.")
    said += [f"{name} is refused: {why}" for name, why in results.refused.items()]
    said += [
        f"{name.partition('/')[2]} failed: {why}"
        for name, why in results.failures.items()
    ]
    if results.missing:
        said.append(
            f"Cells without a result: {len(results.missing)}; the table is not"
            " finished."
        )
    return said


def facts(results: Results, command: str) -> dict[str, str]:
    """Return how the results of a table were computed: command, hardware, versions.

    Args:
        results: The table with the results of its finished runs.
        command: The command that computes them.

    Returns:
        Texts by "command", "hardware" (devices of all runs) and "versions" (of
        libraries).
    """
    versions = ", ".join(
        f"{name} {value}" for name, value in results.versions.items() if value
    )
    return {
        "command": command,
        "hardware": "; ".join(results.hardware) or DASH,
        "versions": versions,
    }


def markdown(results: Results) -> str:
    """Return a table of results as Markdown: title, accuracies and explanations."""
    notes = "\n".join(f"- {_inert(text)}" for text in explanations(results))
    table = _markdown_table(results_grid(results))
    return f"{results.table.title}:\n\n{table}\n\n{notes}"


def _markdown_table(grid: Grid) -> str:
    """Format a grid of texts as a Markdown table. The first line is the head."""
    rows = [grid[0], ["---"] * len(grid[0]), *grid[1:]]
    return "\n".join("| " + " | ".join(map(_inert, row)) + " |" for row in rows)


def _inert(text: str) -> str:
    """Escape a text for a cell of a Markdown table, so that it is shown literally.

    White space becomes single spaces, and texts are cut at 2,000 characters.
    """
    shown = visible(" ".join(text.split()), 2000)
    return shown.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")


def write(storage: Storage, results: Results, command: str) -> None:
    """Write the results of a table as ``NAME.md`` and ``NAME.json``.

    NAME is the name of the table, so several tables may share a directory. Existing
    files of these names are replaced.

    Args:
        storage: The directory to write into.
        results: The table with the results of its finished runs.
        command: The command line that computes these results. Both files show it.
    """
    name, where = results.table.name, facts(results, command)
    text = [
        f"# {results.table.question}",
        f"    {command}",
        markdown(results),
        f"Hardware: {where['hardware']}. {where['versions']}. Minutes:"
        f" {results.total_minutes:.1f}, as the sum of all processes.",
    ]
    storage.write(f"{name}.md", ("\n\n".join(text) + "\n").encode())
    data = json.dumps(as_json(results, command), indent=1, ensure_ascii=False)
    storage.write(f"{name}.json", (data + "\n").encode())


def as_json(results: Results, command: str) -> dict[str, Any]:
    """Return the results of a table as a mapping for JSON, with values of every seed.

    Args:
        results: The table with the results of its finished runs.
        command: The command that computes them.
    """
    return {
        "title": results.table.title,
        "question": results.table.question,
        **facts(results, command),
        "minutes": round(results.total_minutes, 2),
        "scale": results.table.scale,
        "n": results.seeds,
        "changes": dict(results.changes),
        "failures": dict(results.failures),
        "refused": dict(results.refused),
        "missing": list(results.missing),
        "notes": explanations(results),
        "lines": [
            {key: value for key, value in line.items() if value is not None}
            for line in results.lines
        ],
    }
