"""Pages whose examples need the libraries of other formats."""

import pytest

from tests.pages import OF_LIBRARIES, run_examples


@pytest.mark.parametrize("name", OF_LIBRARIES)
def test_the_examples_of_a_page_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_examples(name)
