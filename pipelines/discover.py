"""``python -m pipelines.discover``: ``uno discover`` as a script, for ``ray job submit``."""

from pipelines import cli
from pipelines.commands import demo as demo
from pipelines.commands import discover

if __name__ == "__main__":
    cli.run(discover)
