"""A step never waits for the device: on the meta device, which holds no values, nothing can be read back."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.nn.modules._functions import SyncBatchNorm as TorchNorm

from tests.uno import kernels
from tests.uno.small_run import batches_of, small_config
from uno import collectives
from uno.data.resident import TrainSet
from uno.model import build_model
from uno.norm import with_global_norms
from uno.presets import preset
from uno.runs import run
from uno.state import new_state
from uno.steps import discovery_step, pretrain_step

META = torch.device("meta")


@pytest.fixture(autouse=True)
def on_meta(monkeypatch):
    """What torch lacks on the meta device: autocast, which is off here, and the one fused kernel of SGD."""
    plain = torch.optim.SGD
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    monkeypatch.setattr(plain, "step", lambda self: None)
    monkeypatch.setattr(torch.optim, "SGD", lambda *args, fused, **options: plain(*args, **options))


@pytest.fixture
def group_of(monkeypatch):
    """``group_of(W)``: from now on this is rank 0 of W workers, whose collectives leave all as it is."""

    def become(world_size):
        if world_size > 1:
            monkeypatch.setattr(collectives, "in_group", lambda: True)
            monkeypatch.setattr(collectives, "world", lambda: (0, world_size))
            monkeypatch.setattr(collectives, "sum_", lambda tensor: tensor)
            monkeypatch.setattr(torch.distributed, "all_gather", lambda parts, tensor: None)
        for kernel in kernels.ALL:
            monkeypatch.setattr(torch, kernel.__name__, kernel)

    return become


@pytest.mark.parametrize("phase", [run.PRETRAIN, run.DISCOVER])
@pytest.mark.parametrize(
    ("name", "recipe", "world_size"),
    [("cifar10", "v2", 4), ("imagenet", "v2", 4), ("digits", "paper", 1), ("digits", "paper", 4)],
)
def test_a_step_reads_nothing_back(phase, name, recipe, world_size, group_of):
    """Index, augment, forward, norms over all workers, Sinkhorn, loss, backward, update. Kills: ``.item()``,
    ``bool(tensor)``, a boolean mask, ``nonzero`` or a tensor left on the host, anywhere in a step.
    """
    views, novel = preset(name, recipe).augment, 5 if phase == run.DISCOVER else 0
    side = max(views.large.size, views.small.size)
    config = small_config(data__store_size=side).model_copy(update={"augment": views})
    images = torch.empty(100, 3, side, side, dtype=torch.uint8, device=META)
    train = TrainSet(images, torch.empty(100, dtype=torch.int64, device=META), images, 5, 5)
    model = build_model(config.model, 5, novel, 0).to(META, memory_format=torch.channels_last).train()
    group_of(world_size)
    state = new_state(model, with_global_norms(model), config.discover, META, False)
    step = discovery_step if phase == run.DISCOVER else pretrain_step
    for i in range(2):
        loss = step(state, batches_of(config, phase, train)(i), config.objective, 0.1)
        assert loss.is_meta and loss.shape == (1,)


def test_torchs_norm_over_workers_reads_back(group_of):
    """Why there is one of ours: in every layer the host waits for the number of rows of the others."""
    group_of(4)
    x, four = torch.empty(6, 3, 2, 2, device=META), torch.empty(3, device=META)
    group = SimpleNamespace(_get_backend_name=lambda: "gloo")
    with pytest.raises(RuntimeError), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "all_gather", lambda *_, **__: None)
        TorchNorm.apply(x, four, four, four, four, 1e-5, 0.1, group, 4)


def test_the_meta_device_finds_a_read():
    """The check above can fail."""
    values = torch.empty(4, device=META)
    for read in (torch.Tensor.item, bool, torch.nonzero, torch.Tensor.cpu, lambda v: v[v > 0]):
        with pytest.raises(RuntimeError):
            read(values.sum() if read in (torch.Tensor.item, bool) else values)
