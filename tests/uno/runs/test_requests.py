"""What storage costs where a request takes long."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from benchmarks.storage import BUCKET, make_bucket, requests_of, store
from uno.data.files import Storage
from uno.data.tables import read_parquet
from uno.runs.checkpoint import Checkpoint, load_newest, save_checkpoint
from uno.runs.journal import Journal, read_journal
from uno.runs.lock import LOCK_FILE, ClaimedStorage


@pytest.mark.slow
def test_requests_to_s3(monkeypatch, tmp_path):
    """Counted by moto. Kills: an upload in parts of a few bytes, a look before a read, the size of an object
    asked for that its listing told, a journal read back for a line.
    """
    with store(0) as (env, log):
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        make_bucket()
        storage = ClaimedStorage(f"s3://{BUCKET}/run", "token")

        def costs(do) -> tuple[int, int]:
            """Requests, and how many of them upload."""
            before = len(requests_of(log))
            do()
            methods = [method for _, method, _ in requests_of(log)[before:]]
            return len(methods), sum(method in ("PUT", "POST") for method in methods)

        plain = Storage(storage.uri)
        assert costs(lambda: plain.write(LOCK_FILE, b'{"token": "token"}')) == (1, 1)
        assert costs(lambda: plain.find("nothing")) == (1, 0)
        assert costs(lambda: storage.write("a", b"1")) == (3, 1)  # a size and a file: whose the run is
        with Journal(storage, "discover", 0) as journal:
            for step in (1, 2, 3):
                metrics = {"phase": "discover", "step": step}
                assert costs(lambda m=metrics: (journal.write(m), journal.flush())) == (3, 1)
        assert [entry["step"] for entry in read_journal(storage)] == [1, 2, 3]
        checkpoint = Checkpoint(3, {"w": torch.zeros(2)}, "")
        saved = costs(lambda: save_checkpoint(storage, "discover", checkpoint))
        assert saved == (4, 1)  # is it there, may I write, write
        assert load_newest(storage, "discover").step == 3
        for name in ("one", "two"):
            image = pa.array([{"bytes": b"x" * 9, "path": None}] * 4)
            columns = {"image": image, "label": ["c"] * 4}
            pq.write_table(pa.table(columns), tmp_path / "t.parquet", row_group_size=2)
            plain.write(f"table/{name}.parquet", (tmp_path / "t.parquet").read_bytes())
        images = []
        described = costs(lambda: images.append(read_parquet(f"{storage.uri}/table").images))
        assert described <= (7, 0)  # the size of both files is known by the listing
        assert costs(lambda: images[0].read_images(np.array([0, 3, 5]))) == (3, 0)  # one of a group of rows
