"""The optimizer is plain SGD, and a stored state is the whole state."""

import pytest
import torch

from tests.uno.small_run import assert_same, batches_of, copied_tensors, fresh_state, small_config
from uno.data.files import Storage
from uno.errors import StorageError
from uno.runs.checkpoint import Checkpoint, save_checkpoint
from uno.state import load_state_, state_tensors
from uno.steps import discovery_step
from uno.train import resume_

CONFIG = small_config()


@pytest.mark.parametrize("mu", [0.9, 0.0])
def test_sgd_follows_its_equations(mu):
    """g' = g + wd w; m = mu m + g'; w = w - lr m. Kills: Nesterov, damping, decay left out or decoupled, a
    momentum buffer that starts at anything but zero.
    """
    state = fresh_state(small_config(discover__momentum=mu))
    parameter = state.model.known.weight
    weight, momentum = parameter.detach().clone().double(), torch.zeros_like(parameter).double()
    for _ in range(4):
        grad = torch.randn_like(parameter)
        for other in state.model.parameters():
            other.grad = torch.zeros_like(other)
        parameter.grad = grad.clone()
        state.optimizer.param_groups[0]["lr"] = 0.3
        state.optimizer.step()
        momentum = mu * momentum + grad + 1e-4 * weight
        weight = weight - 0.3 * momentum
    torch.testing.assert_close(parameter.detach().double(), weight, atol=1e-6, rtol=1e-5)
    buffer = state.optimizer.state[parameter]["momentum_buffer"]
    torch.testing.assert_close(buffer.double(), momentum if mu else 0 * momentum, atol=1e-6, rtol=1e-5)


def test_stored_tensors_continue_the_run_bit_for_bit():
    """Kills: momentum, running statistics or a counter left out of the checkpoint, tensors that alias."""
    batches, state = batches_of(CONFIG), fresh_state(CONFIG)
    for step in range(3):
        discovery_step(state, batches(step), CONFIG.objective, 0.1)
    stored = copied_tensors(state)
    other = fresh_state(small_config(seed=7))
    load_state_(other, stored, 3)
    assert_same(copied_tensors(other), stored)
    for each in (state, other):
        for step in range(3, 6):
            discovery_step(each, batches(step), CONFIG.objective, 0.1)
    assert other.step == state.step == 6
    assert_same(copied_tensors(other), copied_tensors(state))
    assert not torch.equal(stored["model/known.weight"], copied_tensors(state)["model/known.weight"])


def test_every_tensor_of_model_and_optimizer_is_stored():
    """Kills: a new parameter or buffer that a checkpoint forgets."""
    state = fresh_state(CONFIG)
    names = set(copied_tensors(state))
    assert {f"model/{name}" for name in state.model.state_dict()} <= names
    assert {f"optimizer/{name}" for name, _ in state.model.named_parameters()} <= names
    counters = [value for value in vars(state).values() if isinstance(value, torch.Tensor)]
    assert all(any(counter is tensor for tensor in state_tensors(state).values()) for counter in counters)


def test_a_checkpoint_of_another_model_is_one_line(tmp_path):
    """Kills: a traceback of load_state_dict, a model filled by half."""
    storage = Storage(str(tmp_path))
    wide = fresh_state(small_config(model__width=8))
    save_checkpoint(storage, "discover", Checkpoint(4, copied_tensors(wide), {}), "")
    with pytest.raises(StorageError, match="discover checkpoint does not fit this model") as caught:
        resume_(fresh_state(CONFIG), storage, "discover")
    assert "\n" not in str(caught.value)
