"""What every command in this process needs, and what its tests share."""

from collections.abc import Iterator

import pytest
import torch

from pipelines import ray_env
from uno.runs import run


@pytest.fixture(autouse=True)
def restored_threads() -> Iterator[None]:
    """A command in this process changes the number of threads."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training or connecting to Ray fails the test."""
    for module, name in ((ray_env, "connect"), (run, "run_phase")):
        monkeypatch.setattr(
            module, name, lambda *_, **__: pytest.fail("to be refused earlier")
        )
