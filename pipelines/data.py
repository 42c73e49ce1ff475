"""``uno data check``: what a run would make of a data set, before it starts."""

from __future__ import annotations

from collections.abc import Sequence

from pipelines import cli
from pipelines.options import parse
from uno.errors import ConfigError


def main(argv: Sequence[str]) -> int:
    """Print classes, counts and problems; exit code 2 when a run could not succeed."""
    action, *rest = argv or ("--help",)
    if action in ("-h", "--help"):
        print("usage: uno data check --data SOURCE [OPTIONS]\n\nOptions are those of uno discover.")
        return 0 if argv else 2
    if action != "check":
        raise ConfigError(f"unknown action {action!r}; use: uno data check --data SOURCE")
    from uno.data.check import check, format_report
    from uno.data.sources import read_rows
    from uno.data.splits import make_task

    config = parse(rest, "data").config
    task = make_task(read_rows(config.data), config.data)
    problems = check(task, config)
    print(format_report(task, problems))
    return 2 if any(problem.level == "error" for problem in problems) else 0


if __name__ == "__main__":
    cli.run(main)
