"""``python -m pipelines.estimate``: ``uno estimate-classes`` as a script, for ``ray job submit``."""

from pipelines import cli
from pipelines.commands import estimate as main

if __name__ == "__main__":
    cli.run(main)
