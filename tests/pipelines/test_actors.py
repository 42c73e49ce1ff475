"""Actors of Ray Data that run a model."""

import sys
from unittest.mock import Mock

import pytest

from pipelines.predict import threads_of_actor
from uno.config import Config, override


@pytest.mark.parametrize(
    ("node", "each", "given", "threads"),
    [
        ({"CPU": 48.0}, {"CPU": 1.0}, None, 12),
        ({"CPU": 48.0, "GPU": 2.0}, {"CPU": 1.0, "GPU": 1.0}, None, 24),
        ({"CPU": 48.0, "GPU": 2.0}, {"CPU": 1.0, "GPU": 1.0}, 3, 3),
        ({"CPU": 2.0}, {"CPU": 2.0}, None, 48),
    ],
)
def test_threads_of_a_model_are_a_share_of_the_cores_of_its_node(
    monkeypatch, node, each, given, threads
):
    """The driver, on which another number of cores may be, decides nothing."""
    ray = Mock()
    ray.get_runtime_context().get_node_id.return_value = "here"
    ray.nodes.return_value = [
        {"NodeID": "other", "Resources": {"CPU": 1.0}},
        {"NodeID": "here", "Resources": node},
    ]
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr("uno.runs.hardware.available_cpus", lambda: 48)
    settings = {"compute.num_workers": 4, "compute.threads": given}
    assert threads_of_actor(override(Config(), settings), each) == threads
