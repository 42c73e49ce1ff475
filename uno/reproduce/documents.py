"""Write the results of a table: Markdown for people, JSON for programs."""

import json
from typing import Any

from uno.data.files import Storage
from uno.reproduce.experiments import REFERENCE, Benchmark, Evaluation, Row
from uno.reproduce.summary import Results
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
    the paper's numbers, and then for each data set the measured accuracy, the number of
    seeds and the minutes of a run. A cell has the numbers of all groups, in the order
    of ``table.groups``. Rows without any number are left out.
    """
    table = results.table
    titles = [
        column.title for column in table.published if results.find(source=column.title)
    ]
    head = ["", f"evaluation ({' / '.join(table.groups)})"]
    head += [f"paper: {title}" for title in titles]
    for benchmark in table.benchmarks:
        head += [f"measured: {benchmark.name}", "n", "minutes"]
    grid = [head]
    for row in table.rows:
        for evaluation in table.evaluations:
            texts = [_published(results, title, row, evaluation) for title in titles]
            for benchmark in table.benchmarks:
                texts += _measured(results, benchmark, row, evaluation)
            if any(text not in (DASH, "", "0") for text in texts):
                grid.append(
                    [row.name, f"{evaluation.name}, {evaluation.split}", *texts]
                )
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
    """Return the measured accuracies, the number of seeds, and the minutes of a run.

    Args:
        results: The results of the table.
        benchmark: The data set.
        row: The row of the table.
        evaluation: The evaluation.

    Returns:
        Three texts. The accuracy is "refused" if the settings of the row do not go with
        the data set. The minutes are "" if the row reads the runs of another one.
    """
    if f"{benchmark.key}-{row.trained}" in results.refused:
        return ["refused", "0", ""]
    lines = results.find(
        benchmark=benchmark.key, row=row.key, evaluation=evaluation.name
    )
    texts = {line["group"]: format_mean_sd(line["mean"], line["sd"]) for line in lines}
    text = (
        " / ".join(texts.get(group, DASH) for group in results.table.groups)
        if texts
        else DASH
    )
    cell = f"cells/{benchmark.key}-{row.trained}-seed"
    if num_failed := sum(name.startswith(cell) for name in results.failures):
        text += f"; {num_failed} of {results.seeds} failed"
    minutes = f"{lines[0]['minutes']:.1f}" if lines and row.of is None else ""
    return [text, str(max((line["n"] for line in lines), default=0)), minutes]


def effects_grid(results: Results) -> Grid:
    """Return the differences of rows to the row that they are compared to, as texts.

    A row of texts stands for a row of the table under one evaluation. Its columns are
    the row, the row that it is compared to, the evaluation, and then for each data set
    the mean difference in points with its standard deviation, and the number of seeds.
    Only the head is returned if no row is compared.
    """
    table = results.table
    grid = [["", "against", f"evaluation ({' / '.join(table.groups)})"]]
    for benchmark in table.benchmarks:
        grid[0] += [f"difference: {benchmark.name}", "n"]
    for row in (row for row in table.rows if row.versus is not None):
        for evaluation in table.evaluations:
            texts, has_effect = list[str](), False
            for benchmark in table.benchmarks:
                effects = {
                    line["group"]: line
                    for line in results.find(
                        benchmark=benchmark.key,
                        row=row.key,
                        evaluation=evaluation.name,
                    )
                    if "effect" in line
                }
                has_effect |= bool(effects)
                shown = (
                    format_mean_sd(one["effect"], one["effect_sd"], signed=True)
                    if (one := effects.get(group))
                    else DASH
                    for group in table.groups
                )
                number = max((one["effect_n"] for one in effects.values()), default=0)
                texts += [" / ".join(shown), str(number)]
            if has_effect:
                against = table.row(str(row.versus)).name
                counted = f"{evaluation.name}, {evaluation.split}"
                grid.append([row.name, against, counted, *texts])
    return grid


def explanations(results: Results) -> list[str]:
    """Return the sentences that stand below a table.

    They explain units, seeds, spreads and times, and name changed settings, refused
    rows, failures and missing cells.
    """
    table = results.table
    said = [
        "Percent; mean ± standard deviation over seeds; last epoch; no number was"
        " chosen by accuracy. Minutes are those of one run, on cores it may share;"
        f" pretraining is extra and shared ({results.pretrain_minutes:.1f} minutes for"
        f" {results.num_pretrainings}).",
        "Differences are those of the same seed, in points.",
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
    """Return a table's title, accuracies, differences and explanations as Markdown."""
    parts = [f"{results.table.title}:", _markdown_table(results_grid(results))]
    effects = effects_grid(results)
    if len(effects) > 1:
        parts += ["Differences:", _markdown_table(effects)]
    parts.append("\n".join(f"- {_inert(text)}" for text in explanations(results)))
    return "\n\n".join(parts)


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
