"""``uno report RUN``: the HTML report of a run, again; also ``python -m pipelines.report``."""

from __future__ import annotations

from collections.abc import Sequence

from pipelines import cli
from uno.errors import ConfigError

USAGE = """\
usage: uno report RUN [OPTIONS]

Write RUN/report.html: one file that opens from disk and needs no network.
Options of uno discover that change where it runs apply, e.g. --device cuda; --data SOURCE names the place
where the run's data is now, if it was moved."""

PLACES = ("compute.", "data.source", "data.labeled", "data.unlabeled", "data.download")
"""What may differ from the run: where its rows are and where the model runs."""


def main(argv: Sequence[str]) -> int:
    """Write the report of a run and print its path."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if argv else 2
    target, *rest = argv
    if target.startswith("-"):
        raise ConfigError("the run directory comes first: uno report RUN [OPTIONS]")
    return _report(target, rest)


def _report(target: str, argv: Sequence[str]) -> int:
    from pipelines.console import say
    from pipelines.options import overrides
    from uno.config import Config, override
    from uno.data.files import Storage
    from uno.report import open_task, write_report
    from uno.runs.directory import read_config_tree
    from uno.runs.hardware import local_device

    storage = Storage(target)
    changes = overrides(argv, "report")
    for key in changes:
        if not key.startswith(PLACES):
            raise ConfigError(f"{key} is a setting of the run; uno report takes options on where it runs")
    stored = override(Config(), read_config_tree(storage))
    config = override(stored, {**changes, "output": storage.uri})
    task, note = open_task(config, storage)
    if note:
        say(f"warning: {note}")
    say(f"report in {write_report(config, storage, task, device=local_device(config), note=note)}")
    return 0


if __name__ == "__main__":
    cli.run(main)
