"""The short form of ``tests.rehearsal``."""

import pytest
import torch

from tests.rehearsal import simulated, streamed
from uno.data.files import Storage


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_streamed_run_from_submission_to_report(tmp_path):
    """On two machines with declared GPUs, tokens, S3 by URIs with options. Kills: a folder of Ray behind
    the options of a URI, a device that the head must have, a command that a job cannot run.
    """
    (tmp_path / "hidden").mkdir()
    with simulated(tmp_path / "hidden") as cluster:
        streamed(cluster)
        assert [row.code for row in cluster.rows] == [0] * 4, [row.said[-1500:] for row in cluster.rows]
        run = Storage(cluster.uri("run"))
        assert run.exists("metrics.json") and run.exists("report.html") and not run.exists("ray")
        assert Storage(cluster.uri("predictions")).exists("predictions.parquet")
    assert cluster.table().count("| ok, ") == 4
