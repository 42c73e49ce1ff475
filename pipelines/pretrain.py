"""``python -m pipelines.pretrain``: ``uno pretrain`` as a script, for ``ray job submit``."""

from pipelines import cli
from pipelines.commands import pretrain as main

if __name__ == "__main__":
    cli.run(main)
