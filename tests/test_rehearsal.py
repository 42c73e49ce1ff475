"""One scene of the rehearsal; ``make rehearsal`` plays all."""

import pytest
import torch

from tests import rehearsal
from tests.pages import table


def test_the_page_has_rows_of_every_scene():
    """Kills: a scene that is played and whose outcome nobody reads, a row of a scene that is gone."""
    _, *rows = table("docs/deploy/ray.md", "| scene |")
    assert {row[0] for row in rows} == {f"`{name}`" for name in rehearsal.SCENES}


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_run_and_predictions_on_gpus_that_only_workers_have():
    """Submitted to a head that has neither a CPU nor a GPU for work, with tokens and S3: from frozen features
    to the report, then predictions, equal to those without Ray. Kills: a call that Ray refuses where there
    are GPUs, a device that the driver must have after its workers have used theirs, chunks of other rows, a
    variable that both the job and the command set, a worker without the token, a URI that loses its options.
    """
    assert [row.command for row in rehearsal.play("frozen")] == ["uno discover", "uno predict"]
