"""The layout of logits over views, rows and heads."""

import itertools

import pytest
import torch

from tests.uno.small_run import small_config
from tests.uno.test_heads import small_model
from uno.config import Config, ModelConfig
from uno.data.memory import RowBlocks
from uno.model import UnoModel, build_network, features_of, forward

SMALL = ModelConfig(
    encoder="resnet_small", width=4, num_heads=3, hidden_dim=8, projection_dim=6
)
CONFIG = Config(model=SMALL)


def randomised(model: UnoModel) -> UnoModel:
    """Eval mode with running statistics that are not those of a fresh model."""
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.uniform_(-0.3, 0.3)
        elif name.endswith("running_var"):
            buffer.uniform_(0.5, 1.5)
    return model.eval()


@pytest.mark.parametrize("sizes", [(8, 8, 6, 6), (8, 6, 8)])
@torch.inference_mode()
def test_views_come_first_and_do_not_depend_on_each_other(sizes):
    """Kills: rows and views exchanged by the reshape, views sorted by size, a view's
    logits from another's features.
    """
    model = randomised(small_model())
    views = [torch.randn(5, 3, size, size) for size in sizes]
    logits = model(views)
    assert [part.shape[1:] for part in logits[:3]] == [(5, 4), (3, 5, 3), (3, 5, 6)]
    for v, b in itertools.product(range(len(sizes)), range(5)):
        alone = model([views[v][b : b + 1]])
        found = [part[v, ..., b, :] for part in logits[:3]]
        expected = [part[0, ..., 0, :] for part in alone[:3]]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    rows = logits.known.flatten(0, 1)
    # all rows differ: an exchange would show
    assert torch.cdist(rows, rows).fill_diagonal_(1).min() > 1e-4


@pytest.mark.parametrize("overcluster_factor", [0, 2])
def test_directions_are_what_the_logits_come_from(overcluster_factor):
    """Kills: directions of other heads, views or the other family; gradients through
    them.
    """
    model = randomised(small_model(overcluster_factor=overcluster_factor))
    logits = model([torch.randn(4, 3, 8, 8) for _ in range(2)])
    pairs = [(model.novel, logits.novel)]
    if overcluster_factor:
        pairs.append((model.over, logits.over))
    for directions, (head, own) in zip(
        logits.directions.split(3, dim=1), pairs, strict=True
    ):
        torch.testing.assert_close(head.cosines(directions), own)
    assert not logits.directions.requires_grad


def test_a_seed_fixes_the_weights_and_leaves_the_global_state_alone():
    """Kills: weights from the global generator, a seed that is ignored, a reseeded
    caller, one draw for all heads, which would stay equal for ever.
    """
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first = build_network(CONFIG, 4, 3, 1)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(3)
    again, other = build_network(CONFIG, 4, 3, 1), build_network(CONFIG, 4, 3, 2)
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
    for name in (
        "encoder.conv1.weight",
        "known.weight",
        "projector.weight",
        "over.weight",
    ):
        assert not torch.equal(first.state_dict()[name], other.state_dict()[name])
    weights = first.projector.weight.flatten(1)
    assert (
        len(weights) == 6
        and torch.cdist(weights, weights).fill_diagonal_(1).min() > 0.1
    )


@torch.no_grad()
def test_features_pass_by_the_encoder():
    """Kills: features that are encoded or scaled once more, views of them that are
    exchanged.
    """
    config = small_config()
    model, images = (
        randomised(small_model()),
        torch.randint(0, 256, (6, 3, 8, 8), dtype=torch.uint8),
    )
    expected = forward(model, images, config)
    found = forward(model, expected.features[0], config)
    for one, other in zip(found[:4], expected[:4], strict=True):
        torch.testing.assert_close(one, other)
    views = [torch.randn(3, model.encoder.num_features) for _ in range(2)]
    torch.testing.assert_close(model(views).features, torch.stack(views))


def test_cached_features_pass_no_head(monkeypatch):
    """The evaluation view of them, as a tensor or as rows. Kills: heads whose outputs
    nobody wants, another view.
    """
    config = small_config()
    model = build_network(config, 5, 5, seed=0).eval()
    monkeypatch.setattr(model, "heads", None)
    views = torch.rand(6, 3, int(model.encoder.num_features))
    for found in (views, RowBlocks([views]), views[:, 0], RowBlocks([views[:, 0]])):
        assert torch.equal(features_of(model, found, config), views[:, 0])
