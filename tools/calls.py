"""Count the functions of this project that a command of ``uno`` calls.

    python -m tools.calls [--list] discover --data digits --workers 0 --output DIR

The command runs as usual. Afterwards two numbers are printed: how many different
functions of ``uno/``, ``pipelines/`` and ``tune/`` were called, and in how many files
they are. With ``--list`` each function follows with its number of calls.
Comprehensions, lambdas and the bodies of modules and classes are not counted.
"""

import inspect
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = tuple(
    f"{ROOT / name}/" for name in ("uno", "pipelines", "tune", "reproduce")
)


def count_calls(argv: list[str]) -> Counter[tuple[str, str]]:
    """Run ``uno ARGV...`` in this process and count the calls of functions.

    Returns:
        The number of calls by file, relative to the root of the project, and by the
        qualified name of the function.
    """
    from pipelines import cli

    calls: Counter[tuple[str, str]] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        is_function = event == "call" and code.co_flags & inspect.CO_OPTIMIZED
        is_ours = code.co_filename.startswith(PACKAGES)
        # a template of the report is compiled to functions, too
        if is_function and is_ours and code.co_filename.endswith(".py"):
            calls[code.co_filename, code.co_qualname] += 1

    threading.setprofile(count)
    sys.setprofile(count)
    try:
        code = cli.main(argv)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    if code:
        sys.exit(code)
    return Counter(
        {
            (str(Path(file).relative_to(ROOT)), name): number
            for (file, name), number in calls.items()
            if not name.endswith(">")
        }
    )


def main() -> None:
    """Print the counts of the command on the command line."""
    argv = sys.argv[1:]
    listed = argv[:1] == ["--list"]
    calls = count_calls(argv[listed:])
    files = {file for file, _ in calls}
    print(f"{len(calls)} functions in {len(files)} files")
    if listed:
        for (file, name), number in sorted(calls.items()):
            print(f"{number:8}  {file}  {name}")


if __name__ == "__main__":
    main()
