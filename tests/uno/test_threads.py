"""How many threads compute at once."""

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
