"""What storage costs where a request takes long."""

import numpy as np
import pytest

from tests.s3 import BUCKET, bytes_read, make_bucket, requests_of, store
from tests.uno.data.builders import pixels
from tests.uno.small_run import small_config
from uno.config import override
from uno.data import files as filesystem
from uno.data import pack
from uno.data.columns import Labels, Text
from uno.data.files import Storage
from uno.data.rows import Rows
from uno.data.sources import read_rows
from uno.data.splits import make_task
from uno.data.stream import streaming_eval_sets, streaming_set
from uno.model import build_network
from uno.prototype_init import training_features
from uno.results import baselines


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
        assert "DELETE" not in {method for _, method, _ in requests_of(log)}


@pytest.mark.release
def test_bytes_of_a_sample(monkeypatch, tmp_path):
    """What is looked at before discovery and after training, from a packed set on S3:
    at most 1.2 times what is wanted is read. Kills: a row group for each row, groups
    that are read for each kind, or twice.
    """
    num = 1200
    images = np.stack([pixels(i, 40, 40) for i in range(num)])
    codes = np.random.default_rng(0).integers(0, 4, num).astype(np.int32)
    ids = Text.of(f"{i}.png" for i in range(num))
    rows = Rows(ids, images, Labels(tuple("abcd"), codes), np.ones(num, bool), "made")
    for module in ("uno.prototype_init", "uno.results.baselines"):
        monkeypatch.setattr(f"{module}.MAX_ROWS", 120)
    monkeypatch.setattr(pack, "GROUP_ROWS", 20)
    with store(0) as (env, log):
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        filesystem._connect.cache_clear()  # which leads to another test's server
        make_bucket()
        place = Storage(f"s3://{BUCKET}/packed")
        pack.pack(rows, codes < 2, place, 500_000, pack.store_local(1))
        data = {
            "data.source": f"parquet:{place.uri}",
            "data.known_classes": "a,b",
            "data.loading": "streaming",
        }
        config = override(
            small_config(), data | {"data.limit": None, "data.stored_size": 20}
        )
        task = make_task(read_rows(config.data), config.data)
        train = streaming_set(config, task, Storage(str(tmp_path)))
        model = build_network(config, 2, 0, 0).eval()
        looked = streaming_eval_sets(config, task, train.bad)["train"]
        size = len(task.rows.images[0])
        before = bytes_read(log)
        sample = training_features(config, model, train)
        between = bytes_read(log)
        novel = baselines.read(config, model, looked.where(looked.truth >= 2))
        num_both, num_novel = (
            len(sample.labeled) + len(sample.unlabeled),
            len(novel.features),
        )
        assert num_both >= 220 and num_novel >= 110
        assert (between - before) / (num_both * size) < 1.2
        assert (bytes_read(log) - between) / (num_novel * size) < 1.2
    filesystem._connect.cache_clear()
