"""Results as Markdown, Parquet and HTML: one grid of texts for people, one long table for programs."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from uno.data.files import Storage
from uno.report.charts import Chart, Series, line_chart
from uno.report.page import render, visible
from uno.reproduce.definitions import DIGITS, Benchmark, Evaluation, Row
from uno.reproduce.figures import Figure
from uno.reproduce.published import Column
from uno.reproduce.results import ERRORS, Effect, Measured, Results, chance_of_no_effect
from uno.reproduce.tables import PAPER_ONLY

DASH = "–"  # noqa: RUF001
MINUS = "−"  # noqa: RUF001


@dataclass(frozen=True)
class Grid:
    """A table of texts: ``head``, and ``lines`` of the same length."""

    head: list[str]
    lines: list[list[str]]


# ------------------------------------------------------------------------------------------------------ texts
def spread(mean: float, sd: float | None, signed: bool = False) -> str:
    """``98.1 ± 0.8``, or the mean alone."""
    text = f"{mean:.1f}"
    if signed:
        text = "0.0" if float(text) == 0 else f"{mean:+.1f}".replace("-", MINUS)
    return text if sd is None else f"{text} ± {sd:.1f}"


def results_grid(found: Results) -> Grid:
    """Rows x evaluations, the paper's numbers beside the measured ones; groups share a cell."""
    table = found.table
    groups = f" ({' / '.join(table.groups)})"
    keys = {row.key for row in table.rows}
    published = [column for column in table.published if keys & column.values.keys()]
    head = ["", f"evaluation{groups}", *(f"paper: {column.title}" for column in published)]
    for benchmark in table.benchmarks:
        head += [f"measured: {benchmark.name}", "n", "minutes"]
    lines = []
    for row in table.rows:
        for evaluation in table.evaluations:
            cells = [_paper(column, row, evaluation) for column in published]
            for benchmark in table.benchmarks:
                cells += _measured(found, benchmark, row, evaluation)
            if any(cell not in (DASH, "", "0") for cell in cells):
                lines.append([row.name, f"{evaluation.name}, {evaluation.split}", *cells])
    return Grid(head, lines)


def _paper(column: Column, row: Row, evaluation: Evaluation) -> str:
    return " / ".join(spread(*number) for number in column.numbers(row.key, evaluation.name)) or DASH


def _measured(found: Results, benchmark: Benchmark, row: Row, evaluation: Evaluation) -> list[str]:
    """Accuracy, number of seeds and mean minutes of a run."""
    values = [found.measured(benchmark, row, evaluation, group) for group in found.table.groups]
    counts = [len(v.by_seed) for v in values if v is not None]
    prefix = f"cells/{benchmark.key}-{row.trained}-seed"
    num_failed = sum(name.startswith(prefix) for name in found.failures)
    text = " / ".join(DASH if v is None else spread(v.mean, v.sd) for v in values) if counts else DASH
    if num_failed:
        text += f"; {num_failed} of {found.seeds} failed"
    minutes = found.minutes.get((benchmark.key, row.trained), [])
    shown = f"{sum(minutes) / len(minutes):.1f}" if minutes and row.of is None else ""
    return [text, str(max(counts, default=0)), shown]


def effects_grid(found: Results) -> Grid | None:
    """Differences to the reference row, the paper's beside the measured ones; None where nothing compares."""
    effects = found.effects()
    if not effects:
        return None
    columns = [
        column for column in found.table.published if any(column.title in e.published for e in effects)
    ]
    head = ["", "evaluation", *(f"paper: {column.title}" for column in columns)]
    lines = []
    for effect in effects:
        evaluation = f"{effect.group}, {effect.evaluation.name}, {effect.evaluation.split}"
        paper = [effect.published.get(column.title) for column in columns]
        several = f", {effect.benchmark.name}" if len(found.table.benchmarks) > 1 else ""
        lines.append(
            [
                f"{effect.row.name}{several}", evaluation,
                *(DASH if value is None else spread(value, None, signed=True) for value in paper),
                spread(effect.measured.mean, effect.measured.sd, signed=True),
                str(len(effect.measured.by_seed)), effect.verdict,
            ]
        )  # fmt: skip
    return Grid([*head, "measured", "n", "verdict"], lines)


def explanations(found: Results) -> list[str]:
    """What a reader has to know: units, seeds, spreads, verdicts, times, failures."""
    said = [
        "Percent; mean ± standard deviation over seeds; last epoch; no number was chosen by accuracy. "
        "Minutes are those of one run, on cores it may share; pretraining is extra and shared "
        f"({found.pretrain_minutes:.1f} minutes for {found.num_pretrainings})."
    ]
    if found.table.published and any(benchmark.key == DIGITS.key for benchmark in found.table.benchmarks):
        said.append("The paper's numbers are of other data than the digits: compare the differences.")
    chance = chance_of_no_effect(found.seeds)
    if found.effects() and chance is not None:
        reference = found.table.row(found.table.reference).name
        named = " (or the row that is named)" if any(row.versus for row in found.table.rows) else ""
        said.append(
            f"Effects are differences to {reference}{named} of the same seed. "
            f"Shown: with its paper's sign, at least {ERRORS:g} standard errors from zero, over seeds and "
            "as a count of at least 4 images. "
            f"With {found.seeds} seeds an effect of zero looks so clear in {100 * chance:.0f} % of cases: "
            "where n is small a verdict is a hint."
        )
    absent = [row.name for row in found.table.rows if row.of == PAPER_ONLY]
    if absent:
        said.append(f"Not implemented here, so the paper's numbers stand alone: {', '.join(absent)}.")
    said += [*found.table.notes, *found.remarks]
    if found.changes:
        said.append("Changed for all cells: " + ", ".join(f"{k} {v}" for k, v in found.changes.items()) + ".")
    said += [f"{name.partition('/')[2]} failed: {reason}" for name, reason in found.failures.items()]
    if found.missing:
        said.append(f"{len(found.missing)} cells have no result yet: the table is not finished.")
    return said


def decision(found: Results) -> str:
    """Which effects of the paper show, row by row."""
    rows: dict[tuple[str, str], list[Effect]] = {}
    for effect in found.effects():
        rows.setdefault((effect.row.name, effect.benchmark.name), []).append(effect)
    parts = []
    for (name, benchmark), effects in rows.items():
        verdicts: dict[str, list[str]] = {}
        for effect in effects:
            verdicts.setdefault(effect.verdict, []).append(f"{effect.group}, {effect.evaluation.name}")
        texts = [
            f"{verdict} ({len(names)} of {len(effects)}: {'; '.join(names)})" if len(effects) > 1 else verdict
            for verdict, names in verdicts.items()
        ]
        parts.append(f"{name[0].upper()}{name[1:]}, {benchmark}: {', '.join(texts)}.")
    return " ".join(parts) or "No verdict: nothing is compared by numbers here."


def facts(found: Results, command: str) -> dict[str, str]:
    """Command, hardware, versions and times."""
    versions = ", ".join(f"{name} {value}" for name, value in found.versions.items() if value)
    return {
        "command": command,
        "hardware": "; ".join(found.hardware) or DASH,
        "versions": versions,
        "minutes": f"{found.total_minutes:.1f} in all, as the sum of all processes",
    }


# --------------------------------------------------------------------------------------------------- Markdown
def markdown_table(found: Results) -> str:
    """Results, effects and explanations."""
    effects = effects_grid(found)
    parts = [f"## {found.table.title}", found.table.question, _markdown(results_grid(found))]
    if effects is not None:
        parts += ["Effects:", _markdown(effects)]
    parts.append("\n".join(f"- {_inert(text)}" for text in explanations(found)))
    return "\n\n".join(parts)


def _markdown(grid: Grid) -> str:
    rows = [grid.head, ["---"] * len(grid.head), *grid.lines]
    return "\n".join("| " + " | ".join(map(_inert, row)) + " |" for row in rows)


def _inert(text: str) -> str:
    """Text of a Markdown table's cell: markup, bars and line breaks are shown, not obeyed."""
    shown = visible(" ".join(text.split()), 2000)
    return shown.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")


# ---------------------------------------------------------------------------------------------------- Parquet
def long_table(found: Results, scale: str) -> pa.Table:
    """One line for each row, evaluation, group and data set, the paper's among them."""
    effects = {(e.benchmark.key, e.row.key, e.evaluation.name, e.group): e for e in found.effects()}
    lines: list[dict[str, Any]] = []
    for row in found.table.rows:
        for evaluation in found.table.evaluations:
            common = {
                "table": found.table.name, "scale": scale, "row": row.key, "name": row.name,
                "head": row.head, "protocol": evaluation.protocol, "split": evaluation.split,
            }  # fmt: skip
            for column in found.table.published:
                for group, (mean, sd) in zip(
                    found.table.groups, column.numbers(row.key, evaluation.name), strict=False
                ):
                    paper = {"published": mean, "published_sd": sd, "source": column.title}
                    lines.append({**common, "data": column.benchmark, "group": group, **paper})
            for benchmark in found.table.benchmarks:
                for group in found.table.groups:
                    values = found.measured(benchmark, row, evaluation, group)
                    if values is not None:
                        effect = effects.get((benchmark.key, row.key, evaluation.name, group))
                        lines.append(
                            {**common, "data": benchmark.name, "group": group}
                            | _measured_fields(found, benchmark, row, values, effect)
                        )
    return pa.Table.from_pylist(lines, schema=SCHEMA)


def _measured_fields(
    found: Results, benchmark: Benchmark, row: Row, values: Measured, effect: Effect | None
) -> dict[str, Any]:
    minutes = found.minutes.get((benchmark.key, row.trained), [])
    fields = {
        "mean": values.mean, "sd": values.sd, "n": len(values.by_seed), "values": values.values,
        "seeds": sorted(values.by_seed), "hardware": "; ".join(found.hardware),
        "minutes": sum(minutes) / len(minutes) if minutes else None,
    }  # fmt: skip
    if effect is not None:
        fields |= {
            "effect": effect.measured.mean, "effect_sd": effect.measured.sd, "verdict": effect.verdict
        }  # fmt: skip
    return fields


TEXTS = ("table", "scale", "row", "name", "head", "protocol", "split", "data", "group")
SCHEMA = pa.schema(
    [(name, pa.string()) for name in TEXTS]
    + [("published", pa.float64()), ("published_sd", pa.float64()), ("source", pa.string())]
    + [("mean", pa.float64()), ("sd", pa.float64()), ("n", pa.int64())]
    + [("values", pa.list_(pa.float64())), ("seeds", pa.list_(pa.int64()))]
    + [("minutes", pa.float64()), ("hardware", pa.string())]
    + [("effect", pa.float64()), ("effect_sd", pa.float64()), ("verdict", pa.string())]
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------- HTML
def charts(found: Results) -> list[Chart]:
    """Accuracy over the rows' ``x`` for each series, and the margin of UNO relative to its accuracy."""
    drawn: list[Chart | None] = []
    evaluation = found.table.evaluations[0]
    for benchmark in found.table.benchmarks:
        series: dict[str, dict[int, float]] = {}
        for row in found.table.rows:
            values = found.measured(benchmark, row, evaluation, "novel")
            if row.x is not None and row.series is not None and values is not None:
                series.setdefault(row.series, {})[row.x] = values.mean
        title = f"{benchmark.name}: novel accuracy, percent, {evaluation.name}, {evaluation.split}"
        drawn.append(line_chart(title, found.table.x_label, [_points(name, s) for name, s in series.items()]))
        ours = series.get("UNO", {})
        margins = [
            _points(name, {x: 100 * (ours[x] - y) / ours[x] for x, y in other.items() if ours.get(x)})
            for name, other in series.items()
            if name not in ("UNO", "chance")
        ]
        drawn.append(line_chart(f"{benchmark.name}: margin of UNO, percent of its accuracy",
                                found.table.x_label, margins))  # fmt: skip
    return [chart for chart in drawn if chart is not None]


def _points(name: str, values: dict[int, float]) -> Series:
    return Series(name, [(float(x), y) for x, y in sorted(values.items())])


def html(found: Results, command: str, figures: list[Figure]) -> str:
    """One page that opens from disk: no script, no request."""
    return render(
        "reproduce.html",
        {
            "table": found.table,
            "grids": [("Results", results_grid(found)), ("Effects", effects_grid(found))],
            "explanations": explanations(found),
            "decision": decision(found),
            "charts": charts(found),
            "figures": figures,
            "facts": facts(found, command),
        },
    )


# ------------------------------------------------------------------------------------------------------ files
def write(storage: Storage, found: Results, scale: str, command: str, figures: list[Figure]) -> None:
    """``TABLE.md``, ``TABLE.parquet`` and ``TABLE.html``: tables may share a directory and its cells."""
    name = found.table.name
    storage.write(f"{name}.md", (markdown_table(found) + "\n").encode())
    buffer = io.BytesIO()
    pq.write_table(long_table(found, scale), buffer)
    storage.write(f"{name}.parquet", buffer.getvalue())
    storage.write(f"{name}.html", html(found, command, figures).encode())


def write_record(storage: Storage, found: Results, scale: str, command: str, figures: list[Figure]) -> None:
    """``README.md``, ``result.json`` (hardware, versions, raw values, decision) and figures as HTML."""
    where = facts(found, command)
    text = [f"# {found.table.question}", f"    {command}", markdown_table(found).split("\n\n", 2)[2]]
    text.append(f"Hardware: {where['hardware']}. {where['versions']}. Minutes: {where['minutes']}.")
    text.append(f"Decision: {_inert(decision(found))}")
    drawn = found.table.figures or bool(charts(found))
    if drawn:
        text.append("Drawings: [figures.html](figures.html).")
    storage.write("README.md", ("\n\n".join(text) + "\n").encode())
    lines = long_table(found, scale).to_pylist()
    measured = [{k: v for k, v in line.items() if v is not None} for line in lines]
    row = {
        "question": found.table.question,
        **where,
        "minutes": round(found.total_minutes, 2),
        "scale": scale,
        "n": found.seeds,
        "changes": dict(found.changes),
        "failures": dict(found.failures),
        "missing": found.missing,
        "decision": decision(found),
        "notes": explanations(found),
        "lines": measured,
    }
    storage.write("result.json", (json.dumps(row, indent=1, ensure_ascii=False) + "\n").encode())
    if drawn:
        storage.write("figures.html", html(found, command, figures).encode())
