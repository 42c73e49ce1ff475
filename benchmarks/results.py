"""The results: every measured figure is a row of ``results/*.csv``, and
``docs/results`` is made from them.

    python -m benchmarks.results render                        # write the tables of docs/results
    python -m benchmarks.results check                         # what a row, the log or a page lacks
    python -m benchmarks.results add DIR [--table speed]       # fold in what --record or a benchmark wrote

A row is one seed or repeat; ``seed`` is its number, or ``n=5`` for a figure over five
without raw values. ``command`` is a key of ``commands.json`` and ``system`` one of
``systems.json``; ``status`` is current, "superseded by DATE", negative or withdrawn.
"""  # noqa: E501

import argparse
import csv
import gzip
import io
import json
import re
import statistics
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from uno.errors import ConfigError, UnoError
from uno.reproduce.documents import format_mean_sd

HERE = Path(__file__).parent
COLUMNS = (
    "experiment",
    "data",
    "split",
    "method",
    "protocol",
    "seed",
    "value",
    "unit",
    "minutes",
    "command",
    "commit",
    "numerics",
    "system",
    "date",
    "status",
    "note",
)
TABLES = ("accuracy", "speed", "robustness")
# columns that a row may leave empty
EMPTY = ("data", "split", "method", "minutes", "note")
STATUS = re.compile(r"current|negative|withdrawn|superseded by \d{4}-\d\d-\d\d")
LOG_LINES, MAX_COLUMNS, MAX_COMMANDS, OPEN_LINES = 15, 14, 6, 40
BEGIN, END = "<!-- benchmarks.results: begin -->", "<!-- benchmarks.results: end -->"
UNITS = {
    "_ms": "ms",
    "_s": "s",
    "_mb": "MB",
    "_mib": "MiB",
    "_gb": "GB",
    "_minutes": "min",
}
UNITS |= {
    "seconds": "s",
    "minutes": "min",
    "images_per_s": "images/s",
    "rows_per_s": "rows/s",
}
SETTINGS = {
    "assumed",
    "base",
    "batch",
    "batch_size",
    "cores",
    "cpus",
    "known",
    "ks",
    "n",
    "num_splits",
    "numerics",
    "ratios",
    "repeats",
    "scale",
    "seed",
    "seeds",
    "sizes",
    "splits",
    "threads",
    "true_seeds",
    "views",
}
"""Keys of a result that were set, not measured."""
LABELS = (
    "row",
    "name",
    "case",
    "kind",
    "what",
    "version",
    "method",
    "set",
    "setting",
    "task",
    "data",
    "code",
    "rows",
    "workers",
    "gpus",
    "step_ms",
    "trial",
    "split",
    "files",
)
"""Keys that tell the entries of a list apart."""

Row = dict[str, str]


def read(table: str, root: Path = HERE) -> list[Row]:
    """The rows of ``accuracy``, ``speed`` or ``robustness``."""
    with (root / "results" / f"{table}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write(table: str, rows: Sequence[Mapping[str, str]], root: Path = HERE) -> None:
    """Replace the rows of a table."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    (root / "results" / f"{table}.csv").write_text(text.getvalue(), encoding="utf-8")


def find(experiment: str, root: Path = HERE, **wanted: str) -> list[Row]:
    """The rows of an experiment that still hold (``current`` and ``negative``) and
    have these entries.
    """
    rows = [
        row
        for table in TABLES
        for row in read(table, root)
        if row["experiment"] == experiment
    ]
    held = [row for row in rows if row["status"] in ("current", "negative")]
    return [
        row for row in held if all(row[key] == value for key, value in wanted.items())
    ]


def mean_sd(rows: Sequence[Row]) -> tuple[float, float | None]:
    """Mean and standard deviation (n - 1) of the values; None of one."""
    values = [float(row["value"]) for row in rows]
    return statistics.fmean(values), (
        statistics.stdev(values) if len(values) > 1 else None
    )


def check(root: Path = HERE) -> list[str]:
    """What is wrong, a line each: a row without its origin, an experiment that the
    log does not explain.
    """
    found, log = [], entries((root / "LOG.md").read_text())
    systems, commands = (
        json.loads((root / f"{name}.json").read_text())
        for name in ("systems", "commands")
    )
    for table in TABLES:
        for number, row in enumerate(read(table, root), 2):
            empty = [
                column for column in COLUMNS if not row[column] and column not in EMPTY
            ]
            problems = [f"no {column}" for column in empty]
            if row["system"] and row["system"] not in systems:
                problems.append(f"unknown system {row['system']}")
            if row["command"] and row["command"] not in commands:
                problems.append(f"unknown command {row['command']}")
            if not STATUS.fullmatch(row["status"]):
                problems.append(f"unknown status {row['status']!r}")
            if (row["date"], row["experiment"]) not in log:
                problems.append(
                    f"LOG.md has no entry {row['date']} {row['experiment']}"
                )
            found += [
                f"{table}.csv:{number}: {row['experiment']}: {problem}"
                for problem in problems
            ]
    long = [key for key, text in log.items() if len(text.splitlines()) > LOG_LINES]
    return found + [
        f"LOG.md: {date} {name} has more than {LOG_LINES} lines" for date, name in long
    ]


def entries(log: str) -> dict[tuple[str, str], str]:
    """The text of each entry ``## DATE EXPERIMENT`` of the log, its heading
    included.
    """
    parts = re.split(r"^(?=## )", log, flags=re.M)[1:]
    return {tuple(part.split("\n", 1)[0].split()[1:3]): part.strip() for part in parts}  # type: ignore[misc]


def pages(root: Path = HERE) -> dict[Path, str]:
    """What ``docs/results`` should hold: pages with the part between the two marks
    made anew.
    """
    folder = root.parent / "docs" / "results"
    commands, systems = (
        json.loads((root / f"{name}.json").read_text())
        for name in ("commands", "systems")
    )
    machines = ["| system | processor | cores | software |", "|---|---|---|---|"]
    machines += [
        f"| {key} | {one['processor']} | {one['cores']} | {one['software']} |"
        for key, one in systems.items()
    ]
    log = (
        (root / "LOG.md")
        .read_text()
        .partition("\n## ")[2]
        .replace("](../docs/results/", "](")
    )
    made = {"index": "\n".join(machines), "log": "## " + log.strip()}
    for table in TABLES:
        rows = read(table, root)
        names = list(dict.fromkeys((row["experiment"], row["date"]) for row in rows))
        parts, old = [], []
        for name, date in sorted(names, key=lambda one: (one[0], one[1])):
            own = [
                row for row in rows if (row["experiment"], row["date"]) == (name, date)
            ]
            held = [row for row in own if row["status"] in ("current", "negative")]
            if held:
                parts.append(f"### {name}\n\n{_table(held, commands)}")
            if gone := [row for row in own if row not in held]:
                old.append(
                    f"**{name}, {date}:"
                    f" {gone[0]['status']}**\n\n{_table(gone, commands)}"
                )
        text = "\n\n".join(parts)
        if old:
            text += (
                "\n\n<details><summary>Superseded and withdrawn</summary>\n\n"
                + "\n\n".join(old)
            )
            text += "\n\n</details>"
        made[table] = text
    found = {}
    for name, text in made.items():
        path = folder / f"{name}.md"
        before, begin, rest = path.read_text().partition(BEGIN)
        _, end, after = rest.partition(END)
        if not begin or not end:
            raise ConfigError(f"{path}: the marks of the generated part are missing")
        found[path] = f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"
    return found


def _table(rows: Sequence[Row], commands: Mapping[str, str]) -> str:
    """Origin, and the figures: methods x protocols where these fill such a table,
    else one a line.
    """
    first, used = rows[0], dict.fromkeys(row["command"] for row in rows)
    numerics = ", ".join(sorted({row["numerics"] for row in rows}, key=int))
    origin = (
        f"{first['date']}, commit {first['commit']}, numerics {numerics},"
        f" {first['system']}"
    )
    origin += "" if first["status"] == "current" else f", {first['status']}"
    cells: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        unit = row["unit"] if row["unit"] not in ("1", "%") else ""
        column = ", ".join(
            filter(None, (row["protocol"].replace("_", " "), row["split"], unit))
        )
        cells.setdefault(
            (", ".join(filter(None, (row["data"], row["method"]))), column), []
        ).append(row)
    counts = {_count(own) for own in cells.values()}
    heads, columns = (list(dict.fromkeys(part)) for part in zip(*cells, strict=True))
    if len(columns) > MAX_COLUMNS or 2 * len(cells) < len(heads) * len(columns):
        cells = {
            (", ".join(filter(None, key)), "value"): own for key, own in cells.items()
        }
        heads, columns = [head for head, _ in cells], ["value"]
    grid = [["", *columns], ["---"] * (len(columns) + 1)]
    for head in heads:
        texts = (
            _figure(cells[head, c], len(counts) > 1) if (head, c) in cells else ""
            for c in columns
        )
        grid.append([head, *texts])
    table = "\n".join(
        "| " + " | ".join(text.replace("|", "\\|") for text in line) + " |"
        for line in grid
    )
    if len(counts) == 1:
        origin += f", n = {counts.pop()}"
    said = "\n".join(f"    {commands[name]}" for name in list(used)[:MAX_COMMANDS])
    if len(used) > MAX_COMMANDS:
        said += (
            f"\n\nand {len(used) - MAX_COMMANDS} more, by row in"
            " `benchmarks/commands.json`"
        )
    text = f"{said}\n\n{table}"
    if len(text.splitlines()) > OPEN_LINES:
        text = (
            f"<details><summary>{len(grid) - 2} lines</summary>\n\n{text}\n\n</details>"
        )
    return f"{origin}:\n\n{text}"


def _count(rows: Sequence[Row]) -> str:
    return rows[0]["seed"][2:] if rows[0]["seed"].startswith("n=") else str(len(rows))


def _figure(rows: Sequence[Row], with_n: bool) -> str:
    """Mean and, of percentages, spread; with n where that differs in a table."""
    value, sd = mean_sd(rows)
    text = format_mean_sd(value, sd) if rows[0]["unit"] == "%" else f"{value:.4g}"
    return f"{text} ({_count(rows)})" if with_n and _count(rows) != "1" else text


def add(
    directory: Path, table: str | None = None, name: str = "", root: Path = HERE
) -> int:
    """Fold a directory DATE_EXPERIMENT (``result.json``, others beside it,
    ``cells.jsonl``) into the tables; older rows of the experiment become superseded.
    Returns their number. ConfigError: it lacks something.
    """
    match = re.fullmatch(
        r"(\d{4}-\d\d-\d\d)_(?:reproduce-)?(.+)", directory.resolve().name
    )
    if not match or not (directory / "result.json").exists():
        raise ConfigError(
            f"{directory}: not a directory DATE_EXPERIMENT with a result.json"
        )
    date, name = match[1], name or match[2]
    read_json = {
        path.stem: json.loads(path.read_text())
        for path in sorted(directory.glob("*.json"))
    }
    first = read_json.pop("result")
    table = table or next(
        (t for t in TABLES if any(r["experiment"] == name for r in read(t, root))), None
    )
    if table is None and not first.keys() & {"lines", "results"}:
        raise ConfigError(f"{directory}: name its table, --table {' | '.join(TABLES)}")
    commands = json.loads((root / "commands.json").read_text())
    made = list[Row]()
    for stem, result in {"result": first, **read_json}.items():
        if not result.get("command"):
            raise ConfigError(f"{directory / stem}.json: no command")
        commit, note = (
            (str(result["commit"]), "") if result.get("commit") else origin(directory)
        )
        numerics = _numerics(result, commit)
        common = {
            "experiment": name,
            "date": date,
            "status": "current",
            "commit": commit,
            "note": note,
            "command": str(result["command"]),
            "numerics": str(numerics),
            "system": _system(result, root),
        }
        where = [] if stem == "result" else [stem]
        for row in (
            _lines(result, numerics) if "lines" in result else _leaves(result, *where)
        ):
            full = {**dict.fromkeys(COLUMNS, ""), **common, **row}
            made.append(
                full
                | {"command": _command_key(commands, f"{name}-{date}", full["command"])}
            )
    table = table or "accuracy"
    kept = [
        row
        for row in read(table, root)
        if (row["experiment"], row["date"]) != (name, date)
    ]
    for row in kept:
        if (
            row["experiment"] == name
            and row["date"] < date
            and row["status"] in ("current", "negative")
        ):
            row["status"] = f"superseded by {date}"
    write(
        table,
        sorted([*kept, *made], key=lambda row: (row["experiment"], row["date"])),
        root,
    )
    (root / "commands.json").write_text(
        json.dumps(dict(sorted(commands.items())), indent=1) + "\n"
    )
    if (directory / "cells.jsonl").exists():
        _add_cells(
            directory / "cells.jsonl",
            root / "cells" / f"{first['lines'][0]['table']}.jsonl.gz",
        )
    return len(made)


def origin(directory: Path) -> tuple[str, str]:
    """The commit that added a directory, or the present one, and a note that says
    which.
    """
    git = ["git", "-C", str(directory.resolve())]
    log = subprocess.run(
        [*git, "log", "--diff-filter=A", "--format=%h", "--", "."],
        capture_output=True,
        text=True,
    )
    if found := log.stdout.split():
        return found[-1], "commit that added the record"
    head = subprocess.run(
        [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    if not head.stdout.strip():
        raise ConfigError(
            f"{directory}: its result has no commit, and it is in no git repository"
        )
    return head.stdout.strip(), "commit before the record was added"


def _numerics(result: Mapping[str, Any], commit: str) -> int:
    """What a result says, else what the changelog of ``commit`` says."""
    if "numerics" in result:
        return int(result["numerics"])
    if said := re.search(r"numerics (\d+)", str(result.get("versions", ""))):
        return int(said[1])
    shown = subprocess.run(
        ["git", "-C", str(HERE), "show", f"{commit}:CHANGELOG.md"],
        capture_output=True,
        text=True,
    )
    return max(
        [int(n) for n in re.findall(r"\*\*numbers (\d+)", shown.stdout)],
        default=shown.stdout.count("**numbers**"),
    )


def _system(result: Mapping[str, Any], root: Path) -> str:
    """The key of the system whose words ("hardware") are those of the result."""
    said = json.dumps(result)
    for key, system in json.loads((root / "systems.json").read_text()).items():
        if any(f'"{words}' in said for words in system["words"]):
            return str(key)
    raise ConfigError(
        f"unknown hardware {result.get('hardware')!r}: add it to"
        f" {root / 'systems.json'}"
    )


def _command_key(commands: dict[str, str], name: str, command: str) -> str:
    """The key of a command in ``commands``, which gets a new one if it is not there."""
    for key, text in commands.items():
        if text == command:
            return key
    used = sum(key.rpartition(".")[0] == name for key in commands)
    commands[f"{name}.{used + 1}"] = command
    return f"{name}.{used + 1}"


def _lines(result: Mapping[str, Any], numerics: int) -> Iterator[Row]:
    """The measured lines of ``uno reproduce``, a row a seed."""
    for line in result["lines"]:
        if "values" not in line:  # a published number, or a line of other programs
            yield from () if "published" in line else _leaves(line, str(line["row"]))
            continue
        for seed, value in zip(line["seeds"], line["values"], strict=True):
            yield {
                "data": line["data"],
                "split": line["split"],
                "method": line["row"],
                "seed": str(seed),
                "protocol": f"{line['group']} {line['protocol']}",
                "value": f"{value:.7g}",
                "unit": "%",
                "minutes": f"{line['minutes']:.3g}" if "minutes" in line else "",
                "numerics": str(line.get("numerics", numerics)),
            }


def _leaves(
    node: Any, *path: str, command: str = "", accuracy: bool = False
) -> Iterator[Row]:
    """Every number of a result that is no setting: keys are the method, the last one
    the protocol; a list of numbers has one row each.
    """
    if isinstance(node, Mapping):
        command = node["command"] if isinstance(node.get("command"), str) else command
        command = (
            f"{command.partition('(')[0]}{node['options']}"
            if isinstance(node.get("options"), str)
            else command
        )
        over = {"mean", "sd"} <= node.keys()
        for key, value in node.items():
            if over and key in ("mean", "sd", "min") and "values" in node:
                continue
            nested = isinstance(value, Mapping) or (
                isinstance(value, list) and any(isinstance(v, Mapping) for v in value)
            )
            if nested or (key not in SETTINGS and key not in LABELS):
                below = [] if over and key == "values" else [str(key)]
                yield from _leaves(value, *path, *below, command=command, accuracy=over)
    elif isinstance(node, list) and any(
        isinstance(part, Mapping | list) for part in node
    ):
        seen = set[str]()
        for number, part in enumerate(node):
            named = (
                {key: part[key] for key in LABELS if key in part}
                if isinstance(part, Mapping)
                else {}
            )
            texts = [
                str(v) if isinstance(v, str) else f"{k} {v}"
                for k, v in named.items()
                if v is not None
            ]
            label = ", ".join(texts) or str(number)
            label += f", {number}" if label in seen else ""
            seen.add(label)
            yield from _leaves(part, *path, label, command=command)
    elif isinstance(node, list | int | float) and not isinstance(node, bool) and path:
        values = node if isinstance(node, list) else [node]
        *method, protocol = path
        fraction = accuracy and all(
            isinstance(v, float | int) and 0 <= v <= 1 for v in values
        )
        unit = (
            "%"
            if accuracy
            else next((u for end, u in UNITS.items() if protocol.endswith(end)), "1")
        )
        for seed, value in enumerate(values):
            if isinstance(value, int | float):
                shown = f"{100 * value if fraction else value:.10g}"
                row = {
                    "method": " / ".join(method),
                    "protocol": protocol,
                    "seed": str(seed),
                    "value": shown,
                    "unit": unit,
                }
                yield row | ({"command": command} if command else {})


def _add_cells(path: Path, target: Path) -> None:
    """Put finished cells beside those that a table has."""
    old = gzip.decompress(target.read_bytes()).decode() if target.exists() else ""
    lines = {
        json.loads(line)["cell"]: line
        for line in [*old.splitlines(), *path.read_text().splitlines()]
    }
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(
        gzip.compress(
            "".join(f"{line}\n" for line in lines.values()).encode(), 9, mtime=0
        )
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Do as the command line says; 1 where something is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.results", description=__doc__
    )
    commands = parser.add_subparsers(dest="what", required=True)
    commands.add_parser("render")
    commands.add_parser("check")
    adding = commands.add_parser("add")
    adding.add_argument("directory", type=Path)
    adding.add_argument("--table", choices=TABLES)
    adding.add_argument(
        "--name", default="", help="the experiment, where it is not DIR's name"
    )
    args = parser.parse_args(argv)
    try:
        if args.what == "add":
            print(
                f"{add(args.directory, args.table, args.name)} rows; write its entry of"
                " LOG.md, render"
            )
            return 0
        found, made = check(), pages()
    except UnoError as error:
        print(error)
        return 1
    for path, text in made.items():
        if args.what == "render":
            path.write_text(text)
        elif path.read_text() != text:
            found.append(
                f"{path}: not what `python -m benchmarks.results render` writes"
            )
    print("\n".join(found) or "nothing is wrong")
    return bool(found)


if __name__ == "__main__":
    raise SystemExit(main())
