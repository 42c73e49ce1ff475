"""Four small runs give their recorded results, see ``tests.golden``."""

import pytest

from tests.golden import (
    ELSEWHERE,
    RUNS,
    differences,
    discover,
    discover_by_torchrun,
    read_results,
    tolerance_here,
)

# An encoder that is trained and one that is frozen stand for the others.
LANE_ON_RAY = {
    "digits": pytest.mark.slow,
    "photos": pytest.mark.slow,
    "gcd": pytest.mark.release,
    "vectors": pytest.mark.release,
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_gives_its_recorded_results(name, tmp_path):
    found = discover(name, tmp_path)
    assert differences(found, read_results()[name]["one"], "", tolerance_here()) == []


@pytest.mark.ray  # several processes
@pytest.mark.release
@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_of_torchrun_give_their_recorded_results(name, tmp_path):
    found = discover_by_torchrun(name, tmp_path)
    assert differences(found, read_results()[name]["two"], "", tolerance_here()) == []


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=LANE_ON_RAY[name]) for name in RUNS]
)
def test_two_workers_of_ray_give_the_results_of_two_ranks(name, tmp_path):
    found = discover(name, tmp_path, "--workers", "2")
    assert differences(found, read_results()[name]["two"], "", tolerance_here()) == []


@pytest.mark.parametrize(
    "change",
    [
        {"metrics": {"accuracy": 0.5001, "rows": 7}},
        {"metrics": {"accuracy": 0.5, "rows": 8}},
        {"metrics": {"accuracy": 0.5}},
        {"metrics": {"accuracy": 0.5, "rows": 7, "more": 0.0}},
        {"losses": {"discover": [[4, 1.0], [5, 2.0]]}},
        {"losses": {"discover": [[4, 1.001]]}},
        {"classes": "a a b"},
        {"classes": "a b"},
        {"weights": {"head": [2.0, 2.5]}},
    ],
    ids=str,
)
def test_a_difference_is_reported(change):
    """Kills: a comparison that overlooks a value, a missing key or a row."""
    record = {
        "metrics": {"accuracy": 0.5, "rows": 7},
        "losses": {"discover": [[4, 1.0]]},
        "classes": "a b b",
        "probability": 0.75,
        "weights": {"head": [2.0, 3.0]},
    }
    rounded = {"metrics": {"accuracy": 0.5 * (1 + 5e-5), "rows": 7}}
    assert differences(record, record) == []
    assert differences(record | rounded, record) == []
    (line,) = differences(record | change, record)
    assert next(iter(change)) in line


def test_results_of_another_processor_may_be_rounded_otherwise():
    """Kills: a comparison elsewhere that accepts everything."""
    record = {"metrics": {"acc": 0.5}, "classes": "a " * 40, "weights": {"w": [2.0]}}
    near = {"metrics": {"acc": 0.53}, "classes": "a " * 39 + "b", "weights": {"w": [3]}}
    assert differences(near, record, "", ELSEWHERE) == []
    for far in ({"metrics": {"acc": 0.7}}, {"classes": "b " * 40}, {"weights": {}}):
        assert differences(record | far, record, "", ELSEWHERE)
