"""The optimizer is plain SGD, and a stored state is the whole state."""

import copy

import pytest
import torch
from torch import nn

from tests.uno.small_run import (
    batches_of,
    copied_tensors,
    discovery_step,
    fresh_state,
    pretrain_step,
    small_config,
)
from uno.errors import StorageError
from uno.runs.checkpoint import Checkpoint, save_checkpoint
from uno.training import resume_

CONFIG = small_config()


@pytest.mark.parametrize("mu", [0.9, 0.0])
def test_sgd_follows_its_equations(mu):
    """g' = g + wd w; m = mu m + g'; w = w - lr m. Kills: Nesterov, damping, decay left
    out or decoupled, a momentum buffer that starts at anything but zero.
    """
    state = fresh_state(small_config(discover__momentum=mu), dtype=torch.float64)
    parameter = state.model.known.weight
    weight, momentum = parameter.detach().clone(), torch.zeros_like(parameter)
    state.optimizer.param_groups[0]["lr"] = 0.3
    for _ in range(4):
        for other in state.model.parameters():
            other.grad = torch.randn_like(other)
        gradient = parameter.grad + 1e-4 * weight
        state.optimizer.step()
        momentum = mu * momentum + gradient
        weight = weight - 0.3 * momentum
    torch.testing.assert_close(parameter.detach(), weight)
    buffer = state.optimizer.state[parameter]["momentum_buffer"]
    torch.testing.assert_close(buffer, momentum if mu else 0 * momentum)


def test_a_checkpoint_of_another_model_is_one_line(storage):
    """Kills: a traceback of load_state_dict, a model filled by half."""
    wide = fresh_state(small_config(model__width=8))
    save_checkpoint(storage, "discover", Checkpoint(4, copied_tensors(wide), ""))
    line = r"^the discover checkpoint does not fit this model[^\n]*$"
    with pytest.raises(StorageError, match=line):
        resume_(fresh_state(CONFIG), storage, "discover")


@pytest.mark.parametrize(
    ("finetune", "encoder", "frozen"),
    [
        (
            "last_stage",
            "resnet_small",
            ("encoder.conv1.", "encoder.bn1.", "encoder.layer1.", "encoder.layer2."),
        ),
        ("none", "resnet_small", ("encoder.",)),
        (
            "last_stage",
            "tests.uno.toy_encoders:vit",
            (
                "encoder.class_token",
                "encoder.conv_proj.",
                "encoder.encoder.pos_embedding",
                "encoder.encoder.layers.encoder_layer_0.",
            ),
        ),
    ],
)
@pytest.mark.parametrize(
    ("num_novel", "phase", "step"),
    [(0, "pretrain", pretrain_step), (5, "discover", discovery_step)],
)
def test_what_is_frozen_stays_to_the_bit(
    finetune, encoder, frozen, num_novel, phase, step
):
    """Running statistics too, with weight decay, in both phases; the rest learns, and
    nothing else is stored.

    Kills: BatchNorm of a frozen stage in training mode after ``train()``, decay of
    frozen weights, momentum kept for them.
    """
    config = small_config(
        model__finetune=finetune, model__encoder=encoder, train__batch_size=16
    )
    state, batches = fresh_state(config, num_novel), batches_of(config, phase)
    state.model.train()
    before = copied_tensors(state)
    for i in range(2):
        step(state, batches(i), config, 0.1)
    after = copied_tensors(state)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    kept = tuple(f"{kind}/{name}" for name in frozen for kind in ("model", "optimizer"))
    assert not [name for name in moved if name.startswith(kept)]
    assert not [name for name in before if name.startswith(kept[1::2])]
    weights = {f"model/{name}" for name, _ in state.model.named_parameters()}
    learned = {name for name in weights if not name.startswith(kept)}
    assert learned <= moved
    of_encoder = [name for name in learned if name.startswith("model/encoder.")]
    assert bool(of_encoder) == (finetune == "last_stage")


def test_the_encoder_learns_at_its_own_rate():
    """Half the rate moves it half as far in a first step; the heads go as before, and a
    factor of 1 changes nothing. Kills: a factor on the heads, a rate that the schedule
    overwrites.
    """
    moved = []
    for factor in (1.0, 0.5):
        config = small_config(
            model__encoder_lr_factor=factor, discover__weight_decay=0.0
        )
        state = fresh_state(config)
        state.model.normalize_prototypes_()
        before = copy.deepcopy(dict(state.model.named_parameters()))
        discovery_step(state, batches_of(config)(0), config, 0.1)
        after = state.model.named_parameters()
        moved.append({name: (p - before[name]).detach() for name, p in after})
    for name, whole in moved[0].items():
        expected = (0.5 if name.startswith("encoder.") else 1) * whole
        torch.testing.assert_close(moved[1][name], expected, atol=1e-6, rtol=1e-3)


def test_synchronized_batch_norms_of_a_frozen_stage_stay_in_eval_mode():
    """DDP on GPUs converts the model. Kills: a norm of a frozen stage that goes back
    to training mode.
    """
    state = fresh_state(small_config(model__finetune="last_stage"))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(state.model)
    assert model is state.model  # the module that DDP wraps, and checkpoints keep
    model.train()
    norms = [
        (name, module)
        for name, module in model.encoder.named_modules()
        if isinstance(module, nn.SyncBatchNorm)
    ]
    assert len(norms) > 4
    for name, norm in norms:
        assert norm.training == name.startswith("layer3"), name
