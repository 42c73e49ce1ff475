"""``python -m tests.golden``: record the results of the small runs."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from tests.golden import RESULTS, RUNS, discover, discover_by_torchrun, processor

os.environ["OMP_NUM_THREADS"] = "1"
results: dict[str, Any] = {"processor": processor()}
for run in RUNS:
    with tempfile.TemporaryDirectory() as name:
        os.environ["UNO_CACHE"] = str(Path(name, "cache"))
        folders = Path(name, "one"), Path(name, "two")
        for folder in folders:
            folder.mkdir()
        one = discover(run, folders[0])
        results[run] = {"one": one, "two": discover_by_torchrun(run, folders[1])}
RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
