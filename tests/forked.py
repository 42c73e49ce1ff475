"""A child process that has imported what this one has: a tenth of a second, where a
new Python takes four.
"""

import os
import sys
import traceback
import warnings
from collections.abc import Callable


def forked(function: Callable[[], object]) -> tuple[int, str]:
    """Exit code of a process that does this alone, and what it writes to stderr."""
    read, write = os.pipe()
    # Python 3.12 fears the parent's threads
    with warnings.catch_warnings(action="ignore"):
        pid = os.fork()
    if pid == 0:
        os.dup2(write, 2)
        sys.stderr = os.fdopen(2, "w", buffering=1)
        sys.unraisablehook = sys.__unraisablehook__  # pytest has its own
        code: object = 1
        try:
            _kept = function()  # a Popen that is let go warns
            code = 0
        except SystemExit as ended:
            code = ended.code
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code if isinstance(code, int) else 1)
    os.close(write)
    with open(read) as told:
        said = told.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said
