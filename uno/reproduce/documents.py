"""Results as Markdown for people and JSON for programs, and both as a page with its
drawings; a record.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from uno.data.files import Storage
from uno.report.charts import Chart, Series, line_chart
from uno.report.page import render
from uno.reproduce.effects import ERRORS, Results, chance_of_no_effect
from uno.reproduce.experiments import REFERENCE, Benchmark, Evaluation, Row
from uno.reproduce.figures import Figure
from uno.text import visible

DASH = "–"  # noqa: RUF001
MINUS = "−"  # noqa: RUF001

Grid = list[list[str]]  # a table of texts, its head first


def format_mean_sd(value: float, sd: float | None = None, signed: bool = False) -> str:
    """``98.1 ± 0.8``, or the mean alone."""
    text = f"{value:.1f}"
    if signed:
        text = "0.0" if float(text) == 0 else f"{value:+.1f}".replace("-", MINUS)
    return text if sd is None else f"{text} ± {sd:.1f}"


def results_grid(found: Results) -> Grid:
    """Rows x evaluations, the paper's numbers beside the measured ones; groups share
    a cell.
    """
    table = found.table
    titles = [
        column.title for column in table.published if found.find(source=column.title)
    ]
    head = [
        "",
        f"evaluation ({' / '.join(table.groups)})",
        *(f"paper: {title}" for title in titles),
    ]
    for benchmark in table.benchmarks:
        head += [f"measured: {benchmark.name}", "n", "minutes"]
    grid = [head]
    for row in table.rows:
        for evaluation in table.evaluations:
            texts = []
            for title in titles:
                paper = found.find(
                    row=row.key, evaluation=evaluation.name, source=title
                )
                numbers = (
                    format_mean_sd(line["published"], line["published_sd"])
                    for line in paper
                )
                texts.append(" / ".join(numbers) or DASH)
            for benchmark in table.benchmarks:
                texts += _measured(found, benchmark, row, evaluation)
            if any(text not in (DASH, "", "0") for text in texts):
                grid.append(
                    [row.name, f"{evaluation.name}, {evaluation.split}", *texts]
                )
    return grid


def _measured(
    found: Results, benchmark: Benchmark, row: Row, evaluation: Evaluation
) -> list[str]:
    """Accuracy, number of seeds and mean minutes of a run."""
    if f"{benchmark.key}-{row.trained}" in found.refused:
        return ["refused", "0", ""]
    lines = found.find(benchmark=benchmark.key, row=row.key, evaluation=evaluation.name)
    texts = {line["group"]: format_mean_sd(line["mean"], line["sd"]) for line in lines}
    text = (
        " / ".join(texts.get(group, DASH) for group in found.table.groups)
        if texts
        else DASH
    )
    cell = f"cells/{benchmark.key}-{row.trained}-seed"
    if num_failed := sum(name.startswith(cell) for name in found.failures):
        text += f"; {num_failed} of {found.seeds} failed"
    minutes = f"{lines[0]['minutes']:.1f}" if lines and row.of is None else ""
    return [text, str(max((line["n"] for line in lines), default=0)), minutes]


def effects_grid(found: Results) -> Grid:
    """Differences to the reference row, the paper's beside the measured ones."""
    effects = found.effects
    titles = [
        c.title
        for c in found.table.published
        if any(c.title in e["published_effects"] for e in effects)
    ]
    grid = [
        [
            "",
            "evaluation",
            *(f"paper: {title}" for title in titles),
            "measured",
            "n",
            "verdict",
        ]
    ]
    for effect in effects:
        several = f", {effect['data']}" if len(found.table.benchmarks) > 1 else ""
        counted = f"{effect['group']}, {effect['evaluation']}, {effect['split']}"
        paper = (effect["published_effects"].get(title) for title in titles)
        texts = [
            DASH if value is None else format_mean_sd(value, signed=True)
            for value in paper
        ]
        texts.append(format_mean_sd(effect["effect"], effect["effect_sd"], signed=True))
        grid.append(
            [
                effect["name"] + several,
                counted,
                *texts,
                str(effect["effect_n"]),
                effect["verdict"],
            ]
        )
    return grid


def explanations(found: Results) -> list[str]:
    """List what a reader has to know: units, seeds, spreads, verdicts, times,
    failures.
    """
    table = found.table
    said = [
        "Percent; mean ± standard deviation over seeds; last epoch; no number was"
        " chosen by accuracy. Minutes are those of one run, on cores it may share;"
        f" pretraining is extra and shared ({found.pretrain_minutes:.1f} minutes for"
        f" {found.num_pretrainings})."
    ]
    others = [
        "the digits" if b.key == "digits" else b.key
        for b in table.benchmarks
        if b.option is None
    ]
    if table.published and others:
        where = " and ".join(dict.fromkeys(others))
        said.append(
            f"The paper's numbers are of other data than {where}: compare the"
            " differences."
        )
    chance = chance_of_no_effect(found.seeds)
    if found.effects and chance is not None:
        named = (
            " (or the row that is named)"
            if any(row.versus != REFERENCE for row in table.rows)
            else ""
        )
        said.append(
            f"Effects are differences to {table.row(REFERENCE).name}{named} of the same"
            f" seed. Shown: with its paper's sign, at least {ERRORS:g} standard errors"
            " from zero, over seeds and as a count of at least 4 images. With"
            f" {found.seeds} seeds an effect of zero looks so clear in"
            f" {100 * chance:.0f}% of cases: where n is small a verdict is a hint."
        )
    said += [*table.notes, *found.remarks]
    if found.changes:
        said.append(
            "Changed for all cells: "
            + ", ".join(f"{k} {v}" for k, v in found.changes.items())
            + "."
        )
    said += [f"{name} is refused: {reason}" for name, reason in found.refused.items()]
    said += [
        f"{name.partition('/')[2]} failed: {reason}"
        for name, reason in found.failures.items()
    ]
    if found.missing:
        said.append(
            f"Cells without a result: {len(found.missing)}; the table is not finished."
        )
    return said


def decision(found: Results) -> str:
    """Which effects of the paper show, row by row."""
    rows: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    for effect in found.effects:
        name = f"{effect['name'][0].upper()}{effect['name'][1:]}, {effect['data']}"
        rows[name].append(
            (effect["verdict"], f"{effect['group']}, {effect['evaluation']}")
        )
    said = []
    for name, verdicts in rows.items():
        groups = {
            verdict: [where for one, where in verdicts if one == verdict]
            for verdict, _ in verdicts
        }
        of = f"of {len(verdicts)}"
        texts = [
            f"{verdict} ({len(some)} {of}: {'; '.join(some)})"
            for verdict, some in groups.items()
        ]
        said.append(f"{name}: {', '.join(texts if len(verdicts) > 1 else groups)}.")
    return " ".join(said) or "No verdict: nothing is compared by numbers here."


def facts(found: Results, command: str) -> dict[str, str]:
    """Command, hardware, versions and times."""
    versions = ", ".join(
        f"{name} {value}" for name, value in found.versions.items() if value
    )
    minutes = f"{found.total_minutes:.1f} in all, as the sum of all processes"
    hardware = "; ".join(found.hardware) or DASH
    return {
        "command": command,
        "hardware": hardware,
        "versions": versions,
        "minutes": minutes,
    }


def markdown(found: Results) -> str:
    """Title, results, effects and explanations."""
    parts = [f"{found.table.title}:", _markdown_table(results_grid(found))]
    if found.effects:
        parts += ["Effects:", _markdown_table(effects_grid(found))]
    parts.append("\n".join(f"- {_inert(text)}" for text in explanations(found)))
    return "\n\n".join(parts)


def _markdown_table(grid: Grid) -> str:
    rows = [grid[0], ["---"] * len(grid[0]), *grid[1:]]
    return "\n".join("| " + " | ".join(map(_inert, row)) + " |" for row in rows)


def _inert(text: str) -> str:
    """Text of a Markdown table's cell: markup, bars and line breaks are shown, not
    obeyed.
    """
    shown = visible(" ".join(text.split()), 2000)
    return shown.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")


def charts(found: Results) -> list[Chart]:
    """Accuracy over the rows' ``x`` for each series, and the margin of UNO relative
    to its accuracy.
    """
    drawn: list[Chart | None] = []
    evaluation, label = found.table.evaluations[0], found.table.x_label
    for benchmark in found.table.benchmarks:
        series: defaultdict[str, dict[int, float]] = defaultdict(dict)
        for row in found.table.rows:
            where = {
                "benchmark": benchmark.key,
                "row": row.key,
                "evaluation": evaluation.name,
            }
            for line in found.find(group="novel", **where):
                if row.x is not None and row.series is not None:
                    series[row.series][row.x] = line["mean"]
        title = (
            f"{benchmark.name}: novel accuracy, percent, {evaluation.name},"
            f" {evaluation.split}"
        )
        drawn.append(
            line_chart(title, label, [_points(*one) for one in series.items()])
        )
        ours = series.pop("UNO", {})
        series.pop("chance", None)
        for name, other in series.items():
            series[name] = {
                x: 100 * (ours[x] - y) / ours[x]
                for x, y in other.items()
                if ours.get(x)
            }
        title = f"{benchmark.name}: margin of UNO, percent of its accuracy"
        drawn.append(
            line_chart(title, label, [_points(*one) for one in series.items()])
        )
    return [chart for chart in drawn if chart is not None]


def _points(name: str, values: dict[int, float]) -> Series:
    return Series(name, [(float(x), y) for x, y in sorted(values.items())])


def html(found: Results, command: str, figures: Sequence[Figure]) -> str:
    """One page that opens from disk: no script, no request."""
    context = {
        "table": found.table,
        "grids": {"Results": results_grid(found), "Effects": effects_grid(found)},
        "explanations": explanations(found),
        "decision": decision(found),
        "charts": charts(found),
        "figures": figures,
        "facts": facts(found, command),
    }
    return render("reproduce.html", context, package="uno.reproduce")


def write(
    storage: Storage,
    found: Results,
    command: str,
    figures: Sequence[Figure],
    record: bool = False,
) -> None:
    """``TABLE.md``, ``TABLE.json`` and ``TABLE.html``, as tables may share a directory
    and its cells; of a ``record`` ``README.md``, ``result.json`` and, where something
    is drawn, ``figures.html``.
    """
    name = found.table.name
    text, data, page = f"{name}.md", f"{name}.json", f"{name}.html"
    if record:
        text, data, page = "README.md", "result.json", "figures.html"
    drawn = bool(figures or charts(found))
    storage.write(text, _document(found, command, page if drawn else None).encode())
    storage.write(
        data,
        (
            json.dumps(result(found, command), indent=1, ensure_ascii=False) + "\n"
        ).encode(),
    )
    if drawn or not record:
        storage.write(page, html(found, command, figures).encode())


def _document(found: Results, command: str, drawings: str | None) -> str:
    where = facts(found, command)
    text = [f"# {found.table.question}", f"    {command}", markdown(found)]
    text.append(
        f"Hardware: {where['hardware']}. {where['versions']}. Minutes:"
        f" {where['minutes']}."
    )
    text.append(f"Decision: {_inert(decision(found))}")
    if drawings is not None:
        text.append(f"Drawings: [{drawings}]({drawings}).")
    return "\n\n".join(text) + "\n"


def result(found: Results, command: str) -> dict[str, Any]:
    """All of it for programs: hardware, versions, decision, and every number with
    its raw values.
    """
    return {
        "title": found.table.title,
        "question": found.table.question,
        **facts(found, command),
        "minutes": round(found.total_minutes, 2),
        "scale": found.table.scale,
        "n": found.seeds,
        "changes": dict(found.changes),
        "failures": dict(found.failures),
        "refused": dict(found.refused),
        "missing": list(found.missing),
        "decision": decision(found),
        "notes": explanations(found),
        "lines": [
            {k: v for k, v in line.items() if v is not None} for line in found.lines
        ],
    }
