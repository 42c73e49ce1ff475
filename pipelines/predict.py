"""``python -m pipelines.predict``: ``uno predict`` as a script, for ``ray job submit``."""

from pipelines import cli
from pipelines.commands import predict as main

if __name__ == "__main__":
    cli.run(main)
