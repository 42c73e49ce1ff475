"""Four small runs give their recorded results, see ``tests.golden``."""

import pytest

from tests.golden import RUNS, assert_as_recorded, discover, discover_by_torchrun
from uno.data import array_files

# The digits stand for the others.
LANE_ON_RAY = {
    "digits": pytest.mark.slow,
    "photos": pytest.mark.release,
    "gcd": pytest.mark.release,
    "vectors": pytest.mark.release,
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_gives_its_recorded_results(name, tmp_path):
    found = discover(name, tmp_path)
    assert_as_recorded(found, name, "one")


@pytest.mark.ray  # several processes
@pytest.mark.release
@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_of_torchrun_give_their_recorded_results(name, tmp_path):
    found = discover_by_torchrun(name, tmp_path)
    assert_as_recorded(found, name, "two")


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=LANE_ON_RAY[name]) for name in RUNS]
)
def test_two_workers_of_ray_give_the_results_of_two_ranks(name, tmp_path, monkeypatch):
    """Workers read vectors from a mapped file, as large arrays."""
    if name == "vectors":
        monkeypatch.setattr(array_files, "MAPPED_BYTES", 0)
    found = discover(name, tmp_path, "--workers", "2")
    assert_as_recorded(found, name, "two")
