"""The cluster, and the undisturbed two-worker run that disturbed ones are compared with."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelines import cli
from tests.pipelines.small import LONG


@pytest.fixture(scope="package", autouse=True)
def quick_maps() -> Iterator[None]:
    """The first two coordinates for t-SNE, which takes seconds a report and is tested with the report."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sklearn.manifold.TSNE.fit_transform", lambda self, points: points[:, :2])
        yield


@pytest.fixture(autouse=True)
def restored_threads() -> Iterator[None]:
    """A command in this process changes the number of threads."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def two(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished ``uno demo``: two workers, 240 steps of discovery."""
    output = tmp_path_factory.mktemp("two") / "run"
    assert cli.main(["demo", *LONG, "--output", str(output)]) == 0
    return output
