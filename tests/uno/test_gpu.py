"""What only a GPU shows, beside ``test_fake_cuda``: kernels, numbers, waits. Run by
``pytest -m gpu``.
"""

import pytest
import torch

from tests.uno.fake_cuda import CPU, RealCuda
from tests.uno.models import tiny_model
from tests.uno.small_run import (
    batches_of,
    copied_tensors,
    discovery_step,
    fresh_state,
    small_config,
    small_sets,
)
from tests.uno.test_fake_cuda import EXTENDED, streamed, train_both_ends  # noqa: F401
from tests.uno.test_steps import poison
from uno.captured import CapturedStep
from uno.data.files import Storage
from uno.runs import run
from uno.training import LocalWorker

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")


@pytest.fixture
def trained(tmp_path):
    """``trained(device, **options)``: the state after some steps of pretraining and of
    discovery.
    """

    def train(device, num_steps=2, **options):
        options = {"compute__precision": "fp32"} | options
        config = small_config(train__max_steps=num_steps, **options)
        storage = Storage(str(tmp_path / f"{device}-{options}"))
        for phase in (run.PRETRAIN, run.DISCOVER):
            rows = small_sets()[0].to(device)
            state = run.run_phase(config, phase, rows, LocalWorker(device), storage)
        return state

    return train


def momenta_of(state):
    return [kept["momentum_buffer"] for kept in state.optimizer.state.values()]


@pytest.mark.parametrize("name", EXTENDED)
def test_no_step_waits(name):
    """By torch's own look at every call of the driver."""
    train_both_ends(name, 1, GPU)


def test_streamed_batches_arrive_without_a_wait(streamed):  # noqa: F811
    """From page-locked memory. Kills: crops or labels whose copy blocks."""
    mode = RealCuda()
    with streamed(GPU, 1) as batches:
        batches(0)
        mode.strict = True
        batch = batches(1)
        mode.strict = False
    assert {part.device.type for part in (*batch.views, batch.labels)} == {"cuda"}


def test_a_run_is_that_of_the_cpu(trained, monkeypatch):
    """Weights, momenta and losses after two steps of each phase; in bfloat16 the
    losses.
    """
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    here, there, half = (
        {k: t.cpu() for k, t in copied_tensors(state).items()}
        for state in (
            trained(CPU),
            trained(GPU),
            trained(GPU, compute__precision="bf16"),
        )
    )
    torch.testing.assert_close(there, here, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(
        half["epoch_losses"], here["epoch_losses"], rtol=0.1, atol=0
    )


def test_the_fused_kernel_skips_a_step_that_is_not_finite(trained):
    """Kills: NaN in weights or momenta, a skip that is not counted."""
    config, state = small_config(), trained(GPU)
    state.model.normalize_prototypes_()
    before = [
        tensor.clone() for tensor in (*state.model.parameters(), *momenta_of(state))
    ]
    poison(state.model, float("nan"))
    discovery_step(
        state, batches_of(config, train=small_sets()[0].to(GPU))(2), config, 0.1
    )
    torch.testing.assert_close([*state.model.parameters(), *momenta_of(state)], before)
    assert int(state.skipped) == 1


def test_scores_are_those_of_the_cpu(tmp_path):
    """Kills: a classifier that leaves a part of itself on the host."""
    model = tiny_model(tmp_path)
    images = torch.randint(0, 256, (6, 3, model.size, model.size), dtype=torch.uint8)
    expected = model.score(images)
    torch.testing.assert_close(
        model.to("cuda").score(images), expected, rtol=1e-2, atol=1e-2
    )


def test_a_recorded_step_is_the_same_step():
    """Ten steps, of which the first are not recorded, with another rate in each. In
    float64: in float32 a difference of 1e-6 in the weights is one of .01 in the fifth
    loss.
    """
    found = []
    for step in (discovery_step, CapturedStep(discovery_step)):
        config, train = small_config(), small_sets()[0].to(GPU)
        state = fresh_state(config, dtype=torch.float64, train=train, device=GPU)
        losses = []
        for number, batch in enumerate(map(batches_of(config, train=train), range(10))):
            doubles = batch._replace(views=[view.double() for view in batch.views])
            losses.append(step(state, doubles, config, 0.005 * (number + 1)).clone())
        assert state.step == 10
        found.append((torch.cat(losses), copied_tensors(state)))
    # the recorded rate is a float32
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-3, atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's imports
@pytest.mark.parametrize("compiled", [False, True])
def test_a_run_with_recorded_steps_learns(trained, compiled):
    """Both phases, through the loop: as much as without the recording."""
    recorded = {"compute__cuda_graph": True, "compute__compile": compiled}
    expected, found = (trained(GPU, 8, **options) for options in ({}, recorded))
    torch.testing.assert_close(
        found.head_losses, expected.head_losses, rtol=0.1, atol=0
    )
