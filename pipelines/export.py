"""``python -m pipelines.export``: ``uno export`` as a script, for ``ray job submit``."""

from pipelines import cli
from pipelines.commands import export as main

if __name__ == "__main__":
    cli.run(main)
