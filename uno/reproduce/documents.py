"""Results as Markdown, Parquet and HTML: grids of texts for people, one long table for programs, a record."""

import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from uno.data.files import Storage
from uno.report.charts import Chart, Series, line_chart
from uno.report.page import render
from uno.reproduce.effects import ERRORS, Results, chance_of_no_effect, deviation, mean
from uno.reproduce.experiments import REFERENCE, Benchmark, Evaluation, Row
from uno.reproduce.figures import Figure
from uno.text import visible

DASH = "–"  # noqa: RUF001
MINUS = "−"  # noqa: RUF001

Grid = list[list[str]]  # a table of texts, its head first


def spread(value: float, sd: float | None = None, signed: bool = False) -> str:
    """``98.1 ± 0.8``, or the mean alone."""
    text = f"{value:.1f}"
    if signed:
        text = "0.0" if float(text) == 0 else f"{value:+.1f}".replace("-", MINUS)
    return text if sd is None else f"{text} ± {sd:.1f}"


def results_grid(found: Results) -> Grid:
    """Rows x evaluations, the paper's numbers beside the measured ones; groups share a cell."""
    table = found.table
    pairs = [(row.key, evaluation.name) for row in table.rows for evaluation in table.evaluations]
    published = [column for column in table.published if any(column.read(*pair) for pair in pairs)]
    head = ["", f"evaluation ({' / '.join(table.groups)})", *(f"paper: {c.title}" for c in published)]
    for benchmark in table.benchmarks:
        head += [f"measured: {benchmark.name}", "n", "minutes"]
    grid = [head]
    for row in table.rows:
        for evaluation in table.evaluations:
            paper = [column.read(row.key, evaluation.name) for column in published]
            texts = [" / ".join(spread(*number) for number in numbers) or DASH for numbers in paper]
            for benchmark in table.benchmarks:
                texts += _measured(found, benchmark, row, evaluation)
            if any(text not in (DASH, "", "0") for text in texts):
                grid.append([row.name, f"{evaluation.name}, {evaluation.split}", *texts])
    return grid


def _measured(found: Results, benchmark: Benchmark, row: Row, evaluation: Evaluation) -> list[str]:
    """Accuracy, number of seeds and mean minutes of a run."""
    keys = [(benchmark.key, row.key, evaluation.name, group) for group in found.table.groups]
    values = [found.values.get(key, {}) for key in keys]
    num_seeds = max(map(len, values))
    if f"{benchmark.key}-{row.trained}" in found.refused:
        return ["refused", "0", ""]
    text = " / ".join(spread(mean(v), deviation(v)) if v else DASH for v in values) if num_seeds else DASH
    cell = f"cells/{benchmark.key}-{row.trained}-seed"
    if num_failed := sum(name.startswith(cell) for name in found.failures):
        text += f"; {num_failed} of {found.seeds} failed"
    minutes = found.minutes.get((benchmark.key, row.key), [])
    return [text, str(num_seeds), f"{statistics.fmean(minutes):.1f}" if minutes else ""]


def effects_grid(found: Results) -> Grid:
    """Differences to the reference row, the paper's beside the measured ones."""
    effects = found.effects.values()
    columns = [c.title for c in found.table.published if any(c.title in e.published for e in effects)]
    grid = [["", "evaluation", *(f"paper: {title}" for title in columns), "measured", "n", "verdict"]]
    for effect in effects:
        several = f", {effect.benchmark.name}" if len(found.table.benchmarks) > 1 else ""
        counted = f"{effect.group}, {effect.evaluation.name}, {effect.evaluation.split}"
        paper = (effect.published.get(title) for title in columns)
        texts = [DASH if value is None else spread(value, signed=True) for value in paper]
        texts.append(spread(mean(effect.measured), deviation(effect.measured), signed=True))
        grid.append([effect.row.name + several, counted, *texts, str(len(effect.measured)), effect.verdict])
    return grid


def explanations(found: Results) -> list[str]:
    """What a reader has to know: units, seeds, spreads, verdicts, times, failures."""
    table = found.table
    said = [
        "Percent; mean ± standard deviation over seeds; last epoch; no number was chosen by accuracy. "
        "Minutes are those of one run, on cores it may share; pretraining is extra and shared "
        f"({found.pretrain_minutes:.1f} minutes for {found.num_pretrainings})."
    ]
    others = ["the digits" if b.key == "digits" else b.key for b in table.benchmarks if b.option is None]
    if table.published and others:
        where = " and ".join(dict.fromkeys(others))
        said.append(f"The paper's numbers are of other data than {where}: compare the differences.")
    chance = chance_of_no_effect(found.seeds)
    if found.effects and chance is not None:
        named = " (or the row that is named)" if any(row.versus != REFERENCE for row in table.rows) else ""
        said.append(
            f"Effects are differences to {table.row(REFERENCE).name}{named} of the same seed. Shown: with "
            f"its paper's sign, at least {ERRORS:g} standard errors from zero, over seeds and as a count of "
            f"at least 4 images. With {found.seeds} seeds an effect of zero looks so clear in "
            f"{100 * chance:.0f} % of cases: where n is small a verdict is a hint."
        )
    said += [*table.notes, *found.remarks]
    if found.changes:
        said.append("Changed for all cells: " + ", ".join(f"{k} {v}" for k, v in found.changes.items()) + ".")
    said += [f"{name} is refused: {reason}" for name, reason in found.refused.items()]
    said += [f"{name.partition('/')[2]} failed: {reason}" for name, reason in found.failures.items()]
    if found.missing:
        said.append(f"{len(found.missing)} cells have no result yet: the table is not finished.")
    return said


def decision(found: Results) -> str:
    """Which effects of the paper show, row by row."""
    rows: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    for effect in found.effects.values():
        name = f"{effect.row.name[0].upper()}{effect.row.name[1:]}, {effect.benchmark.name}"
        rows[name].append((effect.verdict, f"{effect.group}, {effect.evaluation.name}"))
    said = []
    for name, verdicts in rows.items():
        groups = {verdict: [where for one, where in verdicts if one == verdict] for verdict, _ in verdicts}
        of = f"of {len(verdicts)}"
        texts = [f"{verdict} ({len(some)} {of}: {'; '.join(some)})" for verdict, some in groups.items()]
        said.append(f"{name}: {', '.join(texts if len(verdicts) > 1 else groups)}.")
    return " ".join(said) or "No verdict: nothing is compared by numbers here."


def facts(found: Results, command: str) -> dict[str, str]:
    """Command, hardware, versions and times."""
    versions = ", ".join(f"{name} {value}" for name, value in found.versions.items() if value)
    minutes = f"{found.total_minutes:.1f} in all, as the sum of all processes"
    hardware = "; ".join(found.hardware) or DASH
    return {"command": command, "hardware": hardware, "versions": versions, "minutes": minutes}


def markdown(found: Results) -> str:
    """Title, question, results, effects and explanations."""
    parts = [f"## {found.table.title}", found.table.question, _markdown_table(results_grid(found))]
    if found.effects:
        parts += ["Effects:", _markdown_table(effects_grid(found))]
    parts.append("\n".join(f"- {_inert(text)}" for text in explanations(found)))
    return "\n\n".join(parts)


def _markdown_table(grid: Grid) -> str:
    rows = [grid[0], ["---"] * len(grid[0]), *grid[1:]]
    return "\n".join("| " + " | ".join(map(_inert, row)) + " |" for row in rows)


def _inert(text: str) -> str:
    """Text of a Markdown table's cell: markup, bars and line breaks are shown, not obeyed."""
    shown = visible(" ".join(text.split()), 2000)
    return shown.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")


TEXTS = ("table", "scale", "row", "name", "head", "protocol", "split", "data", "group")
SCHEMA = pa.schema(
    dict.fromkeys(TEXTS, pa.string())
    | {"published": pa.float64(), "published_sd": pa.float64(), "source": pa.string()}
    | {"mean": pa.float64(), "sd": pa.float64(), "n": pa.int64()}
    | {"values": pa.list_(pa.float64()), "seeds": pa.list_(pa.int64())}
    | {"minutes": pa.float64(), "hardware": pa.string(), "numerics": pa.int64()}
    | {"effect": pa.float64(), "effect_sd": pa.float64(), "verdict": pa.string()}
)


def long_table(found: Results) -> pa.Table:
    """One line for each row, evaluation, group and data set, the paper's among them."""
    table, lines = found.table, list[dict[str, Any]]()
    for row, evaluation in itertools.product(table.rows, table.evaluations):
        fields = [*_published_fields(found, row, evaluation), *_measured_fields(found, row, evaluation)]
        of_row = {"table": table.name, "scale": table.scale, "row": row.key, "name": row.name}
        counted = {"head": row.head, "protocol": evaluation.protocol, "split": evaluation.split}
        lines += [{**of_row, **counted, **more} for more in fields]
    return pa.Table.from_pylist(lines, schema=SCHEMA)


def _published_fields(found: Results, row: Row, evaluation: Evaluation) -> Iterator[dict[str, Any]]:
    for column in found.table.published:
        numbers = column.read(row.key, evaluation.name)
        for group, (value, sd) in zip(found.table.groups, numbers, strict=False):
            paper = {"published": value, "published_sd": sd, "source": column.title}
            yield {"data": column.data, "group": group, **paper}


def _measured_fields(found: Results, row: Row, evaluation: Evaluation) -> Iterator[dict[str, Any]]:
    for benchmark, group in itertools.product(found.table.benchmarks, found.table.groups):
        key = (benchmark.key, row.key, evaluation.name, group)
        if values := found.values.get(key):
            compared: dict[str, Any] = {}
            if effect := found.effects.get(key):
                compared = {"effect": mean(effect.measured), "effect_sd": deviation(effect.measured)}
                compared["verdict"] = effect.verdict
            yield compared | {
                "data": benchmark.name, "group": group, "mean": mean(values), "sd": deviation(values),
                "n": len(values), "values": list(values.values()), "seeds": list(values),
                "minutes": statistics.fmean(found.minutes[benchmark.key, row.trained]),
                "hardware": "; ".join(found.hardware),
                "numerics": found.numerics[benchmark.key, row.trained],
            }  # fmt: skip


def charts(found: Results) -> list[Chart]:
    """Accuracy over the rows' ``x`` for each series, and the margin of UNO relative to its accuracy."""
    drawn: list[Chart | None] = []
    evaluation, label = found.table.evaluations[0], found.table.x_label
    for benchmark in found.table.benchmarks:
        series: defaultdict[str, dict[int, float]] = defaultdict(dict)
        for row in found.table.rows:
            values = found.values.get((benchmark.key, row.key, evaluation.name, "novel"))
            if values and row.x is not None and row.series is not None:
                series[row.series][row.x] = mean(values)
        title = f"{benchmark.name}: novel accuracy, percent, {evaluation.name}, {evaluation.split}"
        drawn.append(line_chart(title, label, [_points(*one) for one in series.items()]))
        ours = series.pop("UNO", {})
        series.pop("chance", None)
        for name, other in series.items():
            series[name] = {x: 100 * (ours[x] - y) / ours[x] for x, y in other.items() if ours.get(x)}
        title = f"{benchmark.name}: margin of UNO, percent of its accuracy"
        drawn.append(line_chart(title, label, [_points(*one) for one in series.items()]))
    return [chart for chart in drawn if chart is not None]


def _points(name: str, values: dict[int, float]) -> Series:
    return Series(name, [(float(x), y) for x, y in sorted(values.items())])


def html(found: Results, command: str, figures: Sequence[Figure]) -> str:
    """One page that opens from disk: no script, no request."""
    context = {
        "table": found.table, "grids": {"Results": results_grid(found), "Effects": effects_grid(found)},
        "explanations": explanations(found), "decision": decision(found), "charts": charts(found),
        "figures": figures, "facts": facts(found, command),
    }  # fmt: skip
    return render("reproduce.html", context, package="uno.reproduce")


def write(storage: Storage, found: Results, command: str, figures: Sequence[Figure]) -> None:
    """``TABLE.md``, ``TABLE.parquet`` and ``TABLE.html``: tables may share a directory and its cells."""
    name = found.table.name
    storage.write(f"{name}.md", (markdown(found) + "\n").encode())
    with storage.create(f"{name}.parquet") as file:
        pq.write_table(long_table(found), file)
    storage.write(f"{name}.html", html(found, command, figures).encode())


def write_record(storage: Storage, found: Results, command: str, figures: Sequence[Figure]) -> None:
    """``README.md``, ``result.json`` (hardware, versions, raw values, decision) and figures as HTML."""
    where = facts(found, command)
    text = [f"# {found.table.question}", f"    {command}", markdown(found).split("\n\n", 2)[2]]
    text.append(f"Hardware: {where['hardware']}. {where['versions']}. Minutes: {where['minutes']}.")
    text.append(f"Decision: {_inert(decision(found))}")
    if figures or charts(found):
        text.append("Drawings: [figures.html](figures.html).")
        storage.write("figures.html", html(found, command, figures).encode())
    storage.write("README.md", ("\n\n".join(text) + "\n").encode())
    lines = long_table(found).to_pylist()
    row = {
        "question": found.table.question, **where, "minutes": round(found.total_minutes, 2),
        "scale": found.table.scale, "n": found.seeds, "changes": dict(found.changes),
        "failures": dict(found.failures), "refused": dict(found.refused), "missing": found.missing,
        "decision": decision(found),
        "notes": explanations(found),
        "lines": [{k: v for k, v in line.items() if v is not None} for line in lines],
    }  # fmt: skip
    storage.write("result.json", (json.dumps(row, indent=1, ensure_ascii=False) + "\n").encode())
