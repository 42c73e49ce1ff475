"""``python -m pipelines.report``: ``uno report`` as a script, for ``ray job submit``."""

from pipelines import cli
from pipelines.commands import report as main

if __name__ == "__main__":
    cli.run(main)
