"""Round trips with the libraries of other formats: ``make test-formats``."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder. Warnings of these libraries are not ours."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.formats)
            item.add_marker(pytest.mark.filterwarnings("ignore"))
