import pytest
import torch


@pytest.fixture
def one_thread():
    """Sums in one order, for tests that compare bits or stored numbers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
