"""Run ``python -m pipelines COMMAND`` as ``uno COMMAND``, with the code of this folder.

``ray job submit`` uses this.
"""

import sys

from pipelines import cli

if __name__ == "__main__":
    sys.argv[0] = "uno"  # the name in environment.json
    sys.exit(cli.main())
