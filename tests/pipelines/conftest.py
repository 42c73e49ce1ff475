"""What every command in this process needs."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def restored_threads() -> Iterator[None]:
    """A command in this process changes the number of threads."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
