"""One scene of the rehearsal; ``python -m tests.rehearsal`` plays all."""

import json

import pytest
import torch

from tests import rehearsal
from tests.pages import table


def test_the_page_has_rows_of_every_scene():
    """Kills: a scene that is played and whose outcome nobody reads, a row of a scene
    that is gone.
    """
    _, *rows = table("docs/deploy/ray.md", "| scene |")
    assert {row[0] for row in rows} == {f"`{name}`" for name in rehearsal.SCENES}


def test_idle_is_who_waits_for_rank_0(tmp_path):
    """Of three ranks the one that waits most. Kills: who comes after rank 0, who works
    while it votes; times of a group before; names of a place where nobody waited.
    """
    came = {
        0: [[0.0, ""], [3.0, "_save"], [6.0, "run_tasks"], [10.0, "end"]],
        1: [[1.0, ""], [2.0, "_save"], [5.0, ""], [8.0, "end"]],
        2: [[0.5, ""], [4.0, "_save"], [6.0, "run_tasks"], [9.5, "end"]],
    }
    for rank, times in came.items():
        (tmp_path / f"rank-{rank}.times").write_text(json.dumps(times))
    found = rehearsal.idle(tmp_path, 14.0)
    waited = "; ranks idle while rank 0 works: 30.0% of 10.0 s (end 20.0%, _save 10.0%)"
    assert (
        found == f"{waited}; 4 s without ranks" and rehearsal.idle(tmp_path, 14.0) == ""
    )


@pytest.mark.ray
@pytest.mark.release
@pytest.mark.timeout(900)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_run_and_predictions_on_gpus_that_only_workers_have():
    """Submitted to a head that has neither a CPU nor a GPU for work, with tokens and
    S3: from frozen features to the report, then predictions, equal to those without
    Ray. Kills: a call that Ray refuses where there are GPUs, a device that the driver
    must have after its workers have used theirs, chunks of other rows, a variable that
    both the job and the command set, a worker without the token, a URI that loses its
    options.
    """
    assert [row.command for row in rehearsal.play("frozen")] == [
        "uno discover",
        "uno predict",
    ]
