"""``python -m pipelines.evaluate``: ``uno evaluate`` as a script, for ``ray job submit``."""

from pipelines import cli
from pipelines.commands import evaluate as main

if __name__ == "__main__":
    cli.run(main)
