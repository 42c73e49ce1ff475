"""``uno discover``, ``uno pretrain`` and ``uno demo``; ``python -m pipelines.discover`` for ``ray job
submit``.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipelines import cli
from pipelines.options import parse

DEMO_WORKERS = 2


def discover(argv: Sequence[str]) -> int:
    """Pretrain unless weights are given, discover, evaluate."""
    from pipelines.jobs import run_job

    return run_job(parse(argv, "discover"), ("pretrain", "discover"), evaluate=True)


def demo(argv: Sequence[str]) -> int:
    """The whole job on the embedded digits, through Ray on this machine."""
    from pipelines.jobs import run_job

    options = parse(["--workers", str(DEMO_WORKERS), *argv], "demo")
    return run_job(options, ("pretrain", "discover"), evaluate=True)


if __name__ == "__main__":
    cli.run(discover)
