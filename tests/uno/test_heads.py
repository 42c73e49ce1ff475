"""Stacked heads against the H separate networks of the paper."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from uno.config import ModelConfig
from uno.heads import Prototypes, StackedProjector
from uno.methods.uno import METHOD
from uno.model import UnoModel

B, D, HIDDEN, P, C_L, C_U, H = 12, 7, 6, 5, 4, 3, 3


def small_model(mlp_input: str = "normalized", overcluster_factor: int = 2) -> UnoModel:
    torch.manual_seed(0)
    config = ModelConfig(
        encoder="resnet_small",
        width=4,
        num_heads=H,
        overcluster_factor=overcluster_factor,
        hidden_dim=HIDDEN,
        projection_dim=P,
        mlp_input=mlp_input,
    )
    return UnoModel(config, C_L, C_U, METHOD)


def own_part(
    projector: StackedProjector, i: int, of=lambda tensor: tensor
) -> dict[str, torch.Tensor]:
    """What head ``i`` has of the stacked tensors, by the names in a network of its
    own.
    """
    hidden, bn = projector.hidden, projector.bn
    own = slice(i * HIDDEN, (i + 1) * HIDDEN)
    return {
        "0.weight": of(hidden.weight)[own],
        "0.bias": of(hidden.bias)[own],
        "1.weight": of(bn.weight)[own],
        "1.bias": of(bn.bias)[own],
        "3.weight": of(projector.weight)[i].T,
        "3.bias": of(projector.bias)[i, 0],
    }


def separate_heads(model: UnoModel) -> list[nn.Sequential]:
    """The stacked projector as 2H networks of their own, cluster heads first."""
    networks = []
    for i in range(model.projector.num_heads):
        layers = (
            nn.Linear(16, HIDDEN),
            nn.BatchNorm1d(HIDDEN),
            nn.ReLU(inplace=True),
            nn.Linear(HIDDEN, P),
        )
        networks.append(nn.Sequential(*layers).train())
        networks[-1].load_state_dict(own_part(model.projector, i), strict=False)
    return networks


@pytest.mark.parametrize("num_views", [1, 2])
@pytest.mark.parametrize("mlp_input", ["normalized", "raw"])
def test_stacked_heads_equal_separate_heads_in_train_mode(mlp_input, num_views):
    """Outputs, gradients and running statistics. Kills: BatchNorm statistics shared by
    heads, heads mixed by the reshape, overclustering heads on the cluster heads'
    projections, views and rows exchanged, the other MLP input, projections not
    normalized, a missing bias.
    """
    model = small_model(mlp_input).train()
    # it starts at 1 and 0: make heads differ
    torch.nn.init.uniform_(model.projector.bn.weight, 0.5, 1.5)
    torch.nn.init.uniform_(model.projector.bn.bias, -0.5, 0.5)
    mlps = separate_heads(model)
    prototypes = [
        p.detach().clone().requires_grad_()
        for p in (*model.novel.weight, *model.over.weight)
    ]
    features = torch.randn(num_views * B, 16) * 3
    own = features.clone().requires_grad_()
    logits = model.heads(own, num_views)

    naive = features.clone().requires_grad_()
    z = F.normalize(naive, dim=1) if mlp_input == "normalized" else naive
    outputs = [
        F.normalize(mlp(z), dim=1) @ own.T
        for mlp, own in zip(mlps, prototypes, strict=True)
    ]
    expected_known = (
        F.normalize(naive, dim=1) @ F.normalize(model.known.weight, dim=1).T
    )
    torch.testing.assert_close(logits.known, expected_known.reshape(num_views, B, C_L))
    stacked = [*logits.novel.unbind(1), *logits.over.unbind(1)]
    for found, expected in zip(stacked, outputs, strict=True):
        torch.testing.assert_close(found, expected.reshape(found.shape))

    # gradients of a random projection
    weights = [torch.randn_like(output) for output in outputs]
    sum((w * o).sum() for w, o in zip(weights, outputs, strict=True)).backward()
    sum(
        (w.view_as(o) * o).sum() for w, o in zip(weights, stacked, strict=True)
    ).backward()
    torch.testing.assert_close(own.grad, naive.grad, atol=1e-5, rtol=1e-4)
    for i, mlp in enumerate(mlps):
        found, bn = (
            own_part(model.projector, i, lambda tensor: tensor.grad),
            model.projector.bn,
        )
        expected = {name: parameter.grad for name, parameter in mlp.named_parameters()}
        del found["0.bias"], expected["0.bias"]  # which BatchNorm takes away
        for name in ("running_mean", "running_var"):
            found[name] = getattr(bn, name)[i * HIDDEN : (i + 1) * HIDDEN]
            expected[name] = getattr(mlp[1], name)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
        # not zero against zero
        assert all(tensor.abs().max() > 1e-3 for tensor in found.values())
    for found, prototype in zip(
        (*model.novel.weight.grad, *model.over.weight.grad), prototypes, strict=True
    ):
        torch.testing.assert_close(found, prototype.grad, atol=1e-5, rtol=1e-4)


def test_layers_start_as_separate_linear_layers_would():
    """Kills: fan-in of the stacked layer (H times too many inputs), zero or unscaled
    initialization.
    """
    projector = StackedProjector(8, 64, 256, 128)
    for layer, num_inputs in ((projector.hidden, 64), (projector, 256)):
        bound = num_inputs**-0.5
        for weight in (layer.weight.detach(), layer.bias.detach()):
            assert weight.abs().max() <= bound
            assert float(weight.std()) == pytest.approx(bound / 3**0.5, rel=0.05)


def test_cosines_are_float32_under_autocast():
    """bf16 cosines have 3 digits: they flip pseudo-labels. Kills: the cosine layer
    under autocast.
    """
    head, features = Prototypes(5, 64), torch.randn(32, 64)
    exact = head(features)
    with torch.autocast("cpu", torch.bfloat16):
        assert (features @ head.weight.T).dtype == torch.bfloat16  # autocast is on
        assert torch.equal(head(features), exact)
        logits = small_model()([torch.randn(4, 3, 8, 8)])
    assert head(features.bfloat16()).dtype == torch.float32
    assert {part.dtype for part in (exact, *logits[:3])} == {torch.float32}
