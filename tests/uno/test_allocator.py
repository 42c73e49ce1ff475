"""Memory that training frees is used again, without asking the kernel for it."""

import ctypes
import resource
import sys
from contextlib import nullcontext

import pytest
import torch

from tests.forked import forked
from uno.training import keep_freed_memory

GLIBC = hasattr(ctypes.CDLL(None), "malloc_trim")


def count_page_faults() -> int:
    """Return the page faults of ten steps that need 64 MiB each."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(2**26, dtype=torch.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def print_page_faults() -> None:
    """Print those of a process as it is, of steps on a GPU, and of steps on the CPU."""
    contexts = [nullcontext()]
    contexts += [keep_freed_memory(torch.device(name)) for name in ("meta", "cpu")]
    for context in contexts:
        with context:
            count_page_faults()
            print(count_page_faults(), file=sys.stderr)


@pytest.mark.skipif(not GLIBC, reason="another C library")
def test_steps_ask_for_their_pages_once():
    """Inside, a small allocation by another thread can take the place of a freed block,
    so that a step asks for a new one. This may happen to two of the ten steps.
    """
    code, said = forked(print_page_faults)
    assert code == 0, said
    plain, other, kept = map(int, said.split())
    pages = 10 * 2**26 // resource.getpagesize()
    assert plain >= pages
    assert other >= pages
    assert kept < 0.3 * pages
