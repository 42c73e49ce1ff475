"""``compute.cuda_graph``: a step that is recorded and replayed is the same step."""

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
from uno.methods import load

CPU = torch.device("cpu")


class Recorder:
    """In the place of CUDA graphs: replays by calling the function."""

    def __init__(self):
        self.num_records = 0

    def __call__(self, function):
        self.num_records += 1
        return function


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


def test_replayed_steps_are_the_same_steps():
    """Batches, learning rates and counters reach the recording, and it happens once."""
    recorder = Recorder()
    tensors, losses = train(CapturedStep(discovery_step, recorder))
    expected, expected_losses = train(discovery_step)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-6, atol=1e-6)
    for name, tensor in expected.items():
        torch.testing.assert_close(tensors[name], tensor, rtol=1e-4, atol=1e-6)
    assert recorder.num_records == 1


def test_a_step_is_recorded_anew_where_its_tensors_are_others():
    """As after a roll-back to a checkpoint."""
    recorder = Recorder()

    def replace_tensors(number, state):
        if number == EAGER_STEPS + 1:
            state.extra = dict(state.extra)

    train(CapturedStep(discovery_step, recorder), 3 * EAGER_STEPS + 3, replace_tensors)
    assert recorder.num_records == 2


def test_a_batch_of_another_size_is_trained_on_as_it_is():
    recorder = Recorder()
    config = small_config()
    state, batches = fresh_state(config), batches_of(config)
    step = CapturedStep(discovery_step, recorder)
    for number in range(EAGER_STEPS + 1):
        step(state, batches(number), config, 0.01)
    batch = batches(EAGER_STEPS + 1)
    smaller = batch._replace(views=[view[:-2] for view in batch.views], rows=None)
    assert step(state, smaller, config, 0.01).isfinite().all()
    assert state.step == EAGER_STEPS + 2


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
