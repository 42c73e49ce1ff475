"""One scene of the rehearsal of a cluster; the others are played by ``make rehearsal``."""

import pytest
import torch

from tests import rehearsal

pytestmark = [
    pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
]  # fmt: skip


def test_what_the_pages_print_for_a_streamed_run_works_on_a_cluster():
    """Kills: a printed command that a cluster refuses, work on a head without CPUs and GPUs, options of a URI
    that are lost on the way, a worker without the token.
    """
    rows = rehearsal.play("streamed")
    assert [row.command for row in rows] == ["uno data pack", "uno discover", "uno predict", "uno report"]
