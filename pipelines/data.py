"""``python -m pipelines.data``: ``uno data`` as a script, for ``ray job submit``."""

from pipelines import cli
from pipelines.commands import data as main

if __name__ == "__main__":
    cli.run(main)
