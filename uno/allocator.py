"""Keep the memory of a process that trains on the CPU from one step to the next.

glibc maps every block of more than 32 MiB anew and unmaps it when it is freed. The
activations of a convolutional network are such blocks, and the kernel has to clear
their pages in every step, which takes up to a third of its time. Inside
:func:`kept_memory` all blocks come from the heap, which does not shrink.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # mallopt(3)
NEVER, MAX_MAPPINGS = -1, 65_536
LARGE = 32 * 2**20  # bytes; glibc itself raises the threshold up to this


@contextmanager
def kept_memory(device: torch.device) -> Iterator[None]:
    """Keep freed memory in the process during a ``with`` block.

    At the end of the block the free memory goes back to the kernel. This has an effect
    only if ``device`` is a CPU and the C library is glibc.
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
