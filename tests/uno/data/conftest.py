"""An object store for the tests of data."""

from pathlib import Path

import pyarrow.fs
import pytest

from uno.data import files


@pytest.fixture
def bucket(tmp_path, monkeypatch) -> Path:
    """'s3://bucket' served from tmp_path by pyarrow's own sub-tree file system."""
    store = pyarrow.fs.SubTreeFileSystem(str(tmp_path), pyarrow.fs.LocalFileSystem())
    monkeypatch.setattr(files, "_connect", lambda host, options: (store, ""))
    return tmp_path
