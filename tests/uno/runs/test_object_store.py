"""Files of a run in an object store."""

import numpy as np
import pytest

from tests.s3 import BUCKET, make_bucket, store
from uno.data.files import Storage


@pytest.mark.slow
def test_an_object_is_replaced_whole_or_not_at_all(monkeypatch):
    """A file of three parts of an upload, and a stream that fails after two of them."""
    with store(0) as (env, log):
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        make_bucket()
        storage = Storage(f"s3://{BUCKET}/run")
        piece = np.random.default_rng(0).bytes(2**20)
        with storage.create("predictions") as stream:
            for _ in range(25):
                stream.write(piece)
        with pytest.raises(KeyError), storage.create("predictions") as stream:
            for _ in range(20):
                stream.write(piece)
            raise KeyError
        assert storage.read("predictions") == 25 * piece
        assert "PUT" in log.read_text() and "DELETE" not in log.read_text()
