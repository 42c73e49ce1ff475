import pytest
import torch

from uno.data.files import Storage

# sums in one order, for tests that compare bits or stored numbers
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def one_thread():
    """What a test changes lasts no longer than the test; its random numbers do not
    depend on those before.
    """
    torch.manual_seed(0)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def storage(tmp_path) -> Storage:
    """A directory that is not there yet."""
    return Storage(str(tmp_path / "run"))
