import pytest
import torch

torch.set_num_threads(1)  # sums in one order, for tests that compare bits or stored numbers


@pytest.fixture(autouse=True)
def one_thread():
    """What a test changes lasts no longer than the test."""
    yield
    torch.set_num_threads(1)
