"""The cores that a process may use, and how many threads compute at once."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from uno.config import Config
from uno.data.decode import prefetch_map
from uno.runs.hardware import num_threads
from uno.threads import start_pool


def test_threads_that_prepare_images_use_one_thread_of_torch_each():
    """Sixteen threads with sixteen threads of torch each slow each other down."""
    torch.set_num_threads(2)
    found = list(prefetch_map(lambda _: torch.get_num_threads(), range(8), 2, 2))
    assert found == [1] * 8
    assert torch.get_num_threads() == 2


def test_threads_that_begin_later_have_as_many_as_before():
    """Also after a thread that prepares images has started others for a part of it."""
    torch.set_num_threads(2)
    nested = prefetch_map(
        lambda _: list(prefetch_map(abs, range(2), 2, 2)), range(2), 2, 2
    )
    assert list(nested) == [[0, 1], [0, 1]]
    with ThreadPoolExecutor() as pool:
        assert pool.submit(torch.get_num_threads).result() == 2


def test_an_interrupted_start_of_a_pool_leaves_no_thread(monkeypatch):
    """Threads that wait for the others would keep the process from ending."""
    submit, before = ThreadPoolExecutor.submit, torch.get_num_threads()

    def interrupt(pool, function, /, *args):
        if args == (2,):
            raise KeyboardInterrupt
        return submit(pool, function, *args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ThreadPoolExecutor, "submit", interrupt)
        start_pool(4, "interrupted")
    assert not [t for t in threading.enumerate() if t.name.startswith("interrupted")]
    with ThreadPoolExecutor() as pool:
        assert pool.submit(torch.get_num_threads).result() == before


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_a_process_that_is_bound_to_one_core_has_one_thread(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3})
    assert num_threads(Config()) == 1
