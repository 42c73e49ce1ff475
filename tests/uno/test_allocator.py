import ctypes
import resource
import subprocess
import sys

import pytest

GLIBC = hasattr(ctypes.CDLL(None), "malloc_trim")
CHILD = """
import resource, torch
from contextlib import nullcontext
from uno.training import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def steps():
    for _ in range(10):
        torch.ones(2**26, dtype=torch.uint8)  # 64 MiB: 16,384 pages

for context in (nullcontext(), keep_freed_memory(torch.device("meta")), keep_freed_memory(torch.device("cpu"))):
    with context:
        steps()
        before = faults()
        steps()
        print(faults() - before, end=" ")
"""  # noqa: E501


@pytest.mark.skipif(not GLIBC, reason="another C library")
def test_steps_ask_for_their_pages_once():
    """Page faults of ten steps by a fresh process: as it is, for another device, and
    inside. Kills: a setting that has no effect, one for steps on a GPU.

    Inside, a small allocation by another thread can take the place of a freed block, so
    that a step asks for a new one. This may happen to two of the ten steps.
    """
    found = subprocess.run(
        [sys.executable, "-c", CHILD], check=True, capture_output=True, text=True
    )
    plain, other, kept = map(int, found.stdout.split())
    pages = 10 * 2**26 // resource.getpagesize()
    assert plain >= pages and other >= pages and kept < 0.3 * pages
