"""``make bench``: the benchmarks that fit a CPU in 10 minutes, one JSON row each."""

from __future__ import annotations

import subprocess
import sys

COMMANDS = (
    "benchmarks.augment --batch 512 --repeats 5",
    "benchmarks.step --preset cifar10 --batch 64 --repeats 5",
    "benchmarks.step --preset digits --batch 128 --repeats 9",
)

for command in COMMANDS:
    print(f"$ python -m {command}", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", *command.split()], check=True)
