"""How many threads compute at once."""

import threading

import torch

from uno.data.decode import prefetch_map


def test_threads_that_prepare_images_use_one_thread_of_torch_each():
    """Sixteen threads with sixteen threads of torch each slow each other down."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        found = list(prefetch_map(lambda _: torch.get_num_threads(), range(8), 2, 2))
        assert found == [1] * 8
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_threads_that_begin_later_have_as_many_as_before():
    """Also after a thread that prepares images has started others for a part of it."""
    before = torch.get_num_threads()
    found = []
    try:
        torch.set_num_threads(2)
        inner = prefetch_map(
            lambda _: list(prefetch_map(abs, range(2), 2, 2)), range(2), 2, 2
        )
        assert list(inner) == [[0, 1], [0, 1]]
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert found == [2]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
