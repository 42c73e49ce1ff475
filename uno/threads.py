"""Count the CPU cores of this process, and start threads that share them."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch


def available_cpus() -> int:
    """Return the number of CPU cores that this process may use, at least 1.

    The number is the smallest of the machine's cores, the CPU affinity of the process
    (``taskset``, a batch scheduler), the CPU quota of its control group, version 1 or 2
    (a container's CPU limit, rounded up), and the environment variable
    ``LOKY_MAX_CPU_COUNT``. Hyperthreads count as cores.
    """
    from joblib import cpu_count  # 0.1 s, which a command without data need not wait

    return int(cpu_count())


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Let PyTorch compute with ``number`` CPU threads during a ``with`` block.

    At the end the number is what it was before. Threads that begin inside the block
    have the same number.

    Args:
        number: The number of threads, at least 1.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# Held while a pool starts, because the number for later threads is another one then.
_starting = threading.Lock()


def start_pool(num_threads: int, name: str) -> ThreadPoolExecutor:
    """Start a thread pool in which PyTorch computes with one CPU thread per thread.

    ``torch.set_num_threads`` also decides for all threads that begin later, and a
    thread takes that number at its first use of torch. So all threads of the pool begin
    here, and then the number for later threads is set back. The calling thread keeps
    its number, which may be another one: it may belong to such a pool.

    Args:
        num_threads: The number of threads of the pool.
        name: The prefix of their names.

    Returns:
        The pool. All its threads have started.

    Raises:
        KeyboardInterrupt: The user interrupted the start. No thread of the pool is
            left then.
    """
    pool = ThreadPoolExecutor(num_threads, name)
    started = threading.Barrier(num_threads)

    def begin(_: int) -> None:
        """Let PyTorch use one CPU thread in this thread of the pool.

        This returns when all threads of the pool have begun.
        """
        torch.set_num_threads(1)
        assert torch.get_num_threads() == 1  # the first use
        started.wait()

    with _starting, ThreadPoolExecutor(1) as later:
        number = later.submit(torch.get_num_threads).result()
        try:
            list(pool.map(begin, range(num_threads)))
        except BaseException:
            # Threads that have begun would wait for the others for ever.
            started.abort()
            pool.shutdown()
            raise
        finally:
            later.submit(torch.set_num_threads, number).result()
    return pool
