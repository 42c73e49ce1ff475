"""``python -m tests.golden``: compare the small runs with their recorded results.

With ``--write`` the results are recorded.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from tests.golden import (
    RESULTS,
    RUNS,
    differences,
    discover,
    discover_by_torchrun,
    processor,
    read_results,
    tolerance_here,
)

COMPUTE = {"one": discover, "two": discover_by_torchrun}  # processes


def main() -> int:
    """Return 1 if a result differs from what is recorded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="*", help=f"{', '.join(RUNS)}; default: all")
    parser.add_argument("--write", action="store_true", help="record the results")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    results, lines, tolerance = read_results(), [], tolerance_here()
    if options.write and options.runs and results["processor"] != processor():
        parser.error("another processor recorded the other runs; record all runs")
    for run in options.runs or RUNS:
        with tempfile.TemporaryDirectory() as name:
            os.environ["UNO_CACHE"] = str(Path(name, "cache"))
            found = {}
            for number, compute in COMPUTE.items():
                folder = Path(name, number)
                folder.mkdir()
                found[number] = compute(run, folder)
        if options.write:
            results |= {run: found, "processor": processor()}
            RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
        lines += differences(found, results.get(run, {}), run, tolerance)
    print("\n".join(lines) if lines else "all results are as they are recorded")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
