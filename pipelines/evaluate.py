"""``uno evaluate RUN``: all protocols again, from its checkpoints; also ``python -m pipelines.evaluate``."""

from __future__ import annotations

from collections.abc import Sequence

from pipelines import cli
from uno.errors import ConfigError

USAGE = """\
usage: uno evaluate RUN [OPTIONS]

Compute the metrics of the finished run in directory RUN again, from its checkpoints and its data.
Options of uno discover that change where it runs apply, e.g. --workers 2 or --device cuda."""


def main(argv: Sequence[str]) -> int:
    """Evaluate a run and rewrite its ``metrics.json``."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if argv else 2
    target, *rest = argv
    if target.startswith("-"):
        raise ConfigError("the run directory comes first: uno evaluate RUN [OPTIONS]")
    from pipelines.jobs import evaluate_job

    return evaluate_job(target, rest)


if __name__ == "__main__":
    cli.run(main)
