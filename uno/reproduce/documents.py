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
    """Format a mean and its spread: ``98.1 ± 0.8``, or ``98.1`` without ``sd``."""
    text = f"{value:.1f}"
    if signed:
        text = "0.0" if float(text) == 0 else f"{value:+.1f}".replace("-", MINUS)
    return text if sd is None else f"{text} ± {sd:.1f}"


def results_grid(results: Results) -> Grid:
    """Return rows x evaluations, the paper's numbers beside the measured ones.

    The numbers of all groups share a cell, in the order of ``table.groups``.
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
    """Return the paper's numbers of a row; a dash if it has none."""
    numbers = (
        format_mean_sd(line["published"], line["published_sd"])
        for line in results.find(row=row.key, evaluation=evaluation.name, source=title)
    )
    return " / ".join(numbers) or DASH


def _measured(
    results: Results, benchmark: Benchmark, row: Row, evaluation: Evaluation
) -> list[str]:
    """Return accuracies, number of seeds, and mean minutes of a run."""
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
    """Return the differences of rows to the row that they are compared to.

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
    """List what a reader has to know: units, seeds, spreads, times, failures."""
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
    """Return command, hardware and versions as texts."""
    versions = ", ".join(
        f"{name} {value}" for name, value in results.versions.items() if value
    )
    return {
        "command": command,
        "hardware": "; ".join(results.hardware) or DASH,
        "versions": versions,
    }


def markdown(results: Results) -> str:
    """Return title, results, differences and explanations."""
    parts = [f"{results.table.title}:", _markdown_table(results_grid(results))]
    effects = effects_grid(results)
    if len(effects) > 1:
        parts += ["Differences:", _markdown_table(effects)]
    parts.append("\n".join(f"- {_inert(text)}" for text in explanations(results)))
    return "\n\n".join(parts)


def _markdown_table(grid: Grid) -> str:
    rows = [grid[0], ["---"] * len(grid[0]), *grid[1:]]
    return "\n".join("| " + " | ".join(map(_inert, row)) + " |" for row in rows)


def _inert(text: str) -> str:
    """Escape a text for a cell of a Markdown table: markup is shown, not obeyed."""
    shown = visible(" ".join(text.split()), 2000)
    return shown.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")


def write(storage: Storage, results: Results, command: str) -> None:
    """Write ``TABLE.md`` and ``TABLE.json``; tables may share a directory."""
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
    """Return every number with its raw values, and where it was measured."""
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
