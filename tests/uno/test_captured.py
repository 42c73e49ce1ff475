"""``compute.cuda_graph``: a step that is recorded and replayed is the same step."""

from unittest.mock import Mock

import pytest
import torch

from tests.uno.small_run import (
    batches_of,
    copied_tensors,
    discovery_step,
    fresh_state,
    small_config,
)
from uno.captured import EAGER_STEPS, CapturedStep, check_cuda_graph
from uno.errors import ConfigError
from uno.method import load


@pytest.fixture
def record():
    """In the place of CUDA graphs: replays by calling the function."""
    return Mock(side_effect=lambda function: function)


def train(step, num_steps=8, after=lambda step, state: None):
    """The tensors of a run of ``num_steps``, and its losses."""
    config = small_config()
    state, batches = fresh_state(config), batches_of(config)
    losses = []
    for number in range(num_steps):
        losses.append(step(state, batches(number), config, 0.01 * (number + 1)).clone())
        after(number, state)
    assert state.step == num_steps
    return copied_tensors(state), torch.cat(losses)


def test_replayed_steps_are_the_same_steps(record):
    """Batches, learning rates and counters reach the recording, and it happens once."""
    tensors, losses = train(CapturedStep(discovery_step, record))
    expected, expected_losses = train(discovery_step)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(tensors, expected, rtol=1e-4, atol=1e-6)
    record.assert_called_once()


def test_a_step_is_recorded_anew_where_its_tensors_are_others(record):
    """As after a roll-back to a checkpoint."""

    def replace_tensors(number, state):
        if number == EAGER_STEPS + 1:
            state.extra = dict(state.extra)

    train(CapturedStep(discovery_step, record), 3 * EAGER_STEPS + 3, replace_tensors)
    assert record.call_count == 2


def test_a_batch_of_another_size_is_trained_on_as_it_is(record):
    step = CapturedStep(discovery_step, record)

    def train_on_less(state, batch, config, lr):
        if state.step > EAGER_STEPS:
            less = [view[:-2] for view in batch.views]
            batch = batch._replace(views=less, rows=None)
        return step(state, batch, config, lr)

    _, losses = train(train_on_less, EAGER_STEPS + 2)
    assert losses.isfinite().all()


@pytest.mark.parametrize(
    ("options", "device", "num_workers", "reason"),
    [
        ({}, "cpu", 1, "needs a GPU"),
        ({}, "cuda", 2, "one worker"),
        ({"method": "rs"}, "cuda", 1, "rs"),
        ({"objective__queue_size": 12}, "cuda", 1, "these options"),
    ],
)
def test_what_cannot_be_recorded_is_refused(options, device, num_workers, reason):
    config = small_config(compute__cuda_graph=True, **options)
    can_be_recorded = load(config.method).can_be_recorded(config)
    with pytest.raises(ConfigError, match=reason):
        check_cuda_graph(config, can_be_recorded, torch.device(device), num_workers)
