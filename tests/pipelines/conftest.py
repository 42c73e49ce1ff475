"""What every command in this process needs."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def quick_maps() -> Iterator[None]:
    """The first two coordinates for t-SNE, which takes seconds a report and is
    tested with the report.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "sklearn.manifold.TSNE.fit_transform", lambda self, points: points[:, :2]
        )
        yield


@pytest.fixture(autouse=True)
def restored_threads() -> Iterator[None]:
    """A command in this process changes the number of threads."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
