"""``python -m pipelines.doctor``: ``uno doctor`` as a script, for ``ray job submit``."""

from pipelines import cli
from pipelines.commands import doctor as main

if __name__ == "__main__":
    cli.run(main)
