"""Run the benchmarks that fit two CPU cores in ten minutes (``make bench``).

Each of them prints one row of JSON.
"""

import subprocess
import sys

COMMANDS = (
    "benchmarks.objective --repeats 7",
    "benchmarks.augment --batch 512 --repeats 3",
    "benchmarks.step --preset cifar10 --batch 64 --repeats 3",
    "benchmarks.step --preset cifar10 --batch 64 --repeats 3 --bf16",
    "benchmarks.step --preset digits --batch 128 --repeats 9",
)

for command in COMMANDS:
    print(f"$ python -m {command}", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", *command.split()], check=True)
