"""``uno pretrain``: the supervised phase alone; ``python -m pipelines.pretrain`` for ``ray job submit``."""

from __future__ import annotations

from collections.abc import Sequence

from pipelines import cli
from pipelines.options import parse


def main(argv: Sequence[str]) -> int:
    """Train encoder and known head on the labeled rows; ``uno discover`` with the same options goes on from
    there.
    """
    from pipelines.jobs import run_job

    return run_job(parse(argv, "pretrain"), ("pretrain",), evaluate=False)


if __name__ == "__main__":
    cli.run(main)
