"""What storage costs where a request takes long."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from benchmarks.storage import BUCKET, make_bucket, requests_of, store
from uno.data.files import Storage
from uno.data.tables import read_parquet
from uno.runs import LOCK_FILE
from uno.runs.checkpoint import Checkpoint, load_newest, save_checkpoint
from uno.runs.journal import Journal, read_journal
from uno.runs.lock import ClaimedStorage


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

        def asked(do) -> list[str]:
            before = len(requests_of(log))
            do()
            return [method for _, method, _ in requests_of(log)[before:]]

        plain = Storage(storage.uri)
        assert asked(lambda: plain.write(LOCK_FILE, b'{"token": "token"}')) == ["PUT"]
        assert asked(lambda: plain.find("nothing")) == ["HEAD"]
        assert asked(lambda: storage.write("a", b"1")) == ["HEAD", "GET", "PUT"]
        assert storage.walk("") == sorted([LOCK_FILE, "a"])
        with Journal(storage, "discover", 0) as journal:
            for step in (1, 2, 3):
                metrics = {"phase": "discover", "step": step}
                assert asked(lambda m=metrics: (journal.write(m), journal.flush())) == ["HEAD", "GET", "PUT"]
        assert [entry["step"] for entry in read_journal(storage)] == [1, 2, 3]
        checkpoint = Checkpoint(3, {"w": torch.zeros(2)}, {})
        saved = asked(lambda: save_checkpoint(storage, "discover", checkpoint, ""))
        assert sorted(saved) == sorted([*4 * ["HEAD", "GET", "PUT"], "GET"])
        assert load_newest(storage, "discover").step == 3
        for name in ("one", "two"):
            image = pa.array([{"bytes": b"x" * 9, "path": None}] * 4)
            columns = {"image": image, "label": ["c"] * 4}
            pq.write_table(pa.table(columns), tmp_path / "t.parquet", row_group_size=2)
            plain.write(f"table/{name}.parquet", (tmp_path / "t.parquet").read_bytes())
        images = []
        described = asked(lambda: images.append(read_parquet(f"{storage.uri}/table").images))
        assert "HEAD" not in described[1:]  # the first tells that it is a folder
        assert asked(lambda: images[0].fetch(np.array([0, 3, 5]))) == ["GET"] * 3
