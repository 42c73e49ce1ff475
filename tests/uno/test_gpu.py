"""What only a GPU shows, beside ``test_fake_cuda``: kernels, numbers, waits. Run by ``pytest -m gpu``."""

import pytest
import torch

from tests.uno import kernels
from tests.uno.fake_cuda import CPU
from tests.uno.models import tiny_model
from tests.uno.small_run import batches_of, copied_tensors, small_config, small_sets
from tests.uno.test_fake_cuda import EXTENDED, train_both_ends
from tests.uno.test_steps import poison
from uno.data.files import Storage
from uno.runs import run
from uno.steps import discovery_step
from uno.train import LocalWorker

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")


@pytest.fixture
def trained(tmp_path):
    """``trained(device, num_steps)``: the state after these steps of pretraining and of discovery."""

    def train(device, num_steps, precision="fp32"):
        config = small_config(train__max_steps=num_steps, compute__precision=precision)
        storage, rows = Storage(str(tmp_path / f"{device}-{precision}")), small_sets()[0].to(device)
        for phase in (run.PRETRAIN, run.DISCOVER):
            state = run.run_phase(config, phase, rows, LocalWorker(device), storage)
        return state

    return train


def momenta_of(state):
    return [kept["momentum_buffer"] for kept in state.optimizer.state.values()]


@pytest.mark.parametrize("name", EXTENDED)
def test_no_step_waits(name):
    """By torch's own look at every call of the driver."""
    train_both_ends(name, 1, GPU)


def test_a_run_is_that_of_the_cpu(trained, monkeypatch):
    """Weights, momenta and losses after two steps of each phase; in bfloat16 the losses."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    runs = (CPU, 2), (GPU, 2), (GPU, 2, "bf16")
    here, there, half = ({k: t.cpu() for k, t in copied_tensors(trained(*facts)).items()} for facts in runs)
    torch.testing.assert_close(there, here, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(half["epoch_losses"], here["epoch_losses"], rtol=0.1, atol=0)


def test_the_fused_kernel_skips_a_step_that_is_not_finite(trained):
    """Kills: NaN in weights or momenta, a skip that is not counted."""
    config, state = small_config(), trained(GPU, 2)
    state.model.normalize_prototypes_()
    before = [tensor.clone() for tensor in (*state.model.parameters(), *momenta_of(state))]
    poison(state.model, float("nan"))
    discovery_step(state, batches_of(config, train=small_sets()[0].to(GPU))(2), config.objective, 0.1)
    torch.testing.assert_close([*state.model.parameters(), *momenta_of(state)], before)
    assert int(state.skipped) == 1


def test_the_kernels_of_norms_are_the_equations():
    """Which take their place on the CPU, in tests."""
    x, grad = (torch.randn(12, 3, 4, 4, device=GPU) for _ in range(2))
    weight, bias, (mean, inverse) = *torch.randn(2, 3, device=GPU), kernels.batch_norm_stats(x, 1e-5)
    count, needed = torch.full((1,), 192, dtype=torch.int32, device=GPU), [True] * 3
    sums = kernels.batch_norm_backward_reduce(grad, x, mean, inverse, weight, *needed)
    for name, facts in {
        "batch_norm_stats": (x, 1e-5),
        "batch_norm_elemt": (x, weight, bias, mean, inverse, 1e-5),
        "batch_norm_backward_reduce": (grad, x, mean, inverse, weight, *needed),
        "batch_norm_backward_elemt": (grad, x, mean, inverse, weight, *sums[:2], count),
    }.items():
        found, expected = (getattr(module, name)(*facts) for module in (torch, kernels))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_scores_are_those_of_the_cpu(tmp_path):
    """Kills: a classifier that leaves a part of itself on the host."""
    model = tiny_model(tmp_path)
    images = torch.randint(0, 256, (6, 3, model.size, model.size), dtype=torch.uint8)
    torch.testing.assert_close(model.to("cuda").score(images), model.score(images), rtol=1e-2, atol=1e-2)
