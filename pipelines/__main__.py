"""``python -m pipelines COMMAND``: ``uno COMMAND`` with the code that stands here,
for ``ray job submit``.
"""

import sys

from pipelines import cli

if __name__ == "__main__":
    sys.argv[0] = "uno"  # as environment.json has the command
    sys.exit(cli.main())
