"""Write the results of a table: Markdown for people, JSON for programs."""

import itertools
import json
from typing import Any

from uno.data.files import Storage
from uno.reproduce.experiments import REFERENCE, Benchmark, Evaluation, Row
from uno.reproduce.summary import Line, Results
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
            none.
    """
    text = f"{value:.1f}"
    if signed:
        text = "0.0" if float(text) == 0 else f"{value:+.1f}".replace("-", MINUS)
    return text if sd is None else f"{text} ± {sd:.1f}"


def results_grid(results: Results) -> Grid:
    """Return the accuracies of a table as texts.

    A row of texts stands for a row of the table under one evaluation. Its columns are
    the paper's numbers, and then for each data set the measured accuracy and the number
    of seeds. A cell has the numbers of all groups, in the order of ``table.groups``. A
    row that is compared to another one has the mean difference in brackets. Rows
    without any number are left out.
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
    """Return the paper's numbers of a row and an evaluation; a dash if it has none.

    Args:
        results: The results of the table.
        title: The title of the column of the paper's numbers.
        row: The row of the table.
        evaluation: The evaluation.
    """
    numbers = (
        format_mean_sd(line["published"], line["published_sd"])
        for line in results.find(row=row.key, evaluation=evaluation.name, source=title)
    )
    return " / ".join(numbers) or DASH


def _measured(
    results: Results, benchmark: Benchmark, row: Row, evaluation: Evaluation
) -> list[str]:
    """Return the measured accuracies and the number of seeds.

    Args:
        results: The results of the table.
        benchmark: The data set.
        row: The row of the table.
        evaluation: The evaluation.

    Returns:
        Two texts. The accuracy is "refused" if the settings of the row do not go with
        the data set.
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
    """Format an accuracy and its difference: ``50.0 ± 1.0 (−40.0 ± 0.0)``."""
    text = format_mean_sd(line["mean"], line["sd"])
    if "effect" in line:
        effect = format_mean_sd(line["effect"], line["effect_sd"], signed=True)
        text += f" ({effect})"
    return text


def explanations(results: Results) -> list[str]:
    """Return the sentences that stand below a table.

    They explain units, seeds, spreads and times, and name changed settings, refused
    rows, failures and missing cells.
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
    """Return the command, the hardware and the versions of libraries of a table.

    Args:
        results: The results of the table.
        command: The command that computes them.

    Returns:
        Texts by "command", "hardware" and "versions".
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
    """Return a table's title, accuracies and explanations as Markdown."""
    notes = "\n".join(f"- {_inert(text)}" for text in explanations(results))
    table = _markdown_table(results_grid(results))
    return f"{results.table.title}:\n\n{table}\n\n{notes}"


def _markdown_table(grid: Grid) -> str:
    """Format texts as a Markdown table. The first row is its head."""
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

    Args:
        storage: The directory. Several tables may share it.
        results: The results.
        command: The command that computes them.
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
    """Return the results as a JSON mapping, with the values of every seed.

    Args:
        results: The results.
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
