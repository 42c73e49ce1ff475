"""The optimizer is plain SGD, and a stored state is the whole state."""

import pytest
import torch
from torch import nn

from tests.uno.small_run import (
    batches_of,
    check_resumes,
    copied_tensors,
    discovery_step,
    fresh_state,
    pretrain_step,
    small_config,
)
from uno.data.files import Storage
from uno.errors import StorageError
from uno.runs.checkpoint import Checkpoint, save_checkpoint
from uno.training import resume_

CONFIG = small_config()


@pytest.mark.parametrize("mu", [0.9, 0.0])
def test_sgd_follows_its_equations(mu):
    """g' = g + wd w; m = mu m + g'; w = w - lr m. Kills: Nesterov, damping, decay left
    out or decoupled, a momentum buffer that starts at anything but zero.
    """
    state = fresh_state(small_config(discover__momentum=mu))
    parameter = state.model.known.weight
    weight, momentum = (
        parameter.detach().clone().double(),
        torch.zeros_like(parameter).double(),
    )
    for _ in range(4):
        grad = torch.randn_like(parameter)
        for other in state.model.parameters():
            other.grad = torch.zeros_like(other)
        parameter.grad = grad.clone()
        state.optimizer.param_groups[0]["lr"] = 0.3
        state.optimizer.step()
        momentum = mu * momentum + grad + 1e-4 * weight
        weight = weight - 0.3 * momentum
    torch.testing.assert_close(
        parameter.detach().double(), weight, atol=1e-6, rtol=1e-5
    )
    buffer = state.optimizer.state[parameter]["momentum_buffer"]
    torch.testing.assert_close(
        buffer.double(), momentum if mu else 0 * momentum, atol=1e-6, rtol=1e-5
    )


def test_a_checkpoint_of_another_model_is_one_line(tmp_path):
    """Kills: a traceback of load_state_dict, a model filled by half."""
    storage = Storage(str(tmp_path))
    wide = fresh_state(small_config(model__width=8))
    save_checkpoint(storage, "discover", Checkpoint(4, copied_tensors(wide), ""))
    with pytest.raises(
        StorageError, match="discover checkpoint does not fit this model"
    ) as caught:
        resume_(fresh_state(CONFIG), storage, "discover")
    assert "\n" not in str(caught.value)


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
def test_what_is_frozen_stays_to_the_bit(finetune, encoder, frozen):
    """Running statistics too, with weight decay, in both phases; the rest learns, and
    nothing else is stored.

    Kills: BatchNorm of a frozen stage in training mode after ``train()``, decay of
    frozen weights, momentum kept for them.
    """
    config = small_config(
        model__finetune=finetune, model__encoder=encoder, train__batch_size=16
    )
    for num_novel, phase, step in (
        (0, "pretrain", pretrain_step),
        (5, "discover", discovery_step),
    ):
        state, batches = fresh_state(config, num_novel), batches_of(config, phase)
        state.model.train()
        before = copied_tensors(state)
        for i in range(2):
            step(state, batches(i), config, 0.1)
        after = copied_tensors(state)
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        of_model = [
            name.removeprefix("model/") for name in before if name.startswith("model/")
        ]
        kept = {name for name in of_model if name.startswith(frozen)}
        learned = {name for name in of_model if not name.startswith(frozen)}
        assert not moved & {f"model/{name}" for name in kept}
        assert {
            f"model/{name}"
            for name, _ in state.model.named_parameters()
            if name in learned
        } <= moved
        assert (
            not {f"optimizer/{name}/momentum_buffer" for name in kept} & before.keys()
        )
        if finetune == "last_stage":
            assert any(name.startswith("encoder.") for name in learned)


def test_the_encoder_learns_at_its_own_rate():
    """Half the rate moves it half as far in a first step; the heads go as before, and a
    factor of 1 changes nothing. Kills: a factor on the heads, a rate that the schedule
    overwrites.
    """
    moved = {}
    for factor in (1.0, 0.5):
        config = small_config(
            model__encoder_lr_factor=factor, discover__weight_decay=0.0
        )
        state, batches = fresh_state(config), batches_of(config)
        state.model.normalize_prototypes_()
        before = copied_tensors(state)
        discovery_step(state, batches(0), config, 0.1)
        after = copied_tensors(state)
        names = [f"model/{name}" for name, _ in state.model.named_parameters()]
        moved[factor] = {name: after[name] - before[name] for name in names}
    for name, whole in moved[1.0].items():
        share = 0.5 if name.startswith("model/encoder.") else 1
        torch.testing.assert_close(
            moved[0.5][name], share * whole, atol=1e-6, rtol=1e-3
        )


@pytest.mark.slow
def test_a_run_with_frozen_stages_resumes_to_the_bit(tmp_path):
    config = small_config(model__finetune="last_stage", model__encoder_lr_factor=0.3)
    tensors = check_resumes(config, tmp_path, stops=(2, 9))
    assert "optimizer/encoder.layer3.0.conv1.weight/momentum_buffer" in tensors
    assert "optimizer/encoder.layer2.0.conv1.weight/momentum_buffer" not in tensors


def test_synchronized_batch_norms_of_a_frozen_stage_stay_in_eval_mode():
    """DDP on GPUs converts the model. Kills: a norm of a frozen stage that goes back
    to training mode.
    """
    state = fresh_state(small_config(model__finetune="last_stage"))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(state.model)
    assert model is state.model  # the module that DDP wraps, and checkpoints keep
    model.train()
    modes = {
        n: m.training
        for n, m in model.encoder.named_modules()
        if isinstance(m, nn.SyncBatchNorm)
    }
    assert {name for name, training in modes.items() if training} == {
        n for n in modes if n.startswith("layer3")
    }
    assert len(modes) > 4 and not model.encoder.bn1.weight.requires_grad
