"""The memory of a process that trains on the CPU, kept from one step to the next.

glibc maps every block of more than 32 MiB anew and unmaps it when it is freed, so that
the activations of a convolutional network are pages that the kernel has to clear in
every step: up to a third of its time. Inside
:func:`kept_memory` blocks come from the heap, which does not shrink.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # mallopt(3)
NEVER, MAX_MAPPINGS = -1, 65_536
LARGE = 32 * 2**20  # bytes; as far as glibc raises its threshold by itself


@contextmanager
def kept_memory(device: torch.device) -> Iterator[None]:
    """Inside the ``with`` freed blocks stay with the process, where it computes on the
    CPU by glibc; after it the kernel gets back what is free.
    """
    library = ctypes.CDLL(None)
    if device.type != "cpu" or not hasattr(library, "malloc_trim"):  # macOS, musl
        yield
        return
    library.mallopt(M_MMAP_MAX, 0)
    library.mallopt(M_TRIM_THRESHOLD, NEVER)
    try:
        yield
    finally:
        library.mallopt(M_MMAP_MAX, MAX_MAPPINGS)
        library.mallopt(M_MMAP_THRESHOLD, LARGE)
        library.mallopt(M_TRIM_THRESHOLD, 2 * LARGE)
        library.malloc_trim(0)
