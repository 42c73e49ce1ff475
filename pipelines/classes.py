"""``python -m pipelines.classes``: ``uno classes`` as a script, for ``ray job submit``."""

from pipelines import cli
from pipelines.commands import classes as main

if __name__ == "__main__":
    cli.run(main)
