import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.uno.reference import classify_failure, padded_loss, scale_matrix, targets_of
from uno.objective import discovery_loss, pseudo_labels
from uno.steps import labeled_loss

AGGREGATIONS = ["swap", "average_pseudo_labels", "average_logits"]


def problem(
    num_views, num_labeled, num_unlabeled, num_known, num_clusters, num_heads, seed=0
):
    generator, rows = torch.Generator().manual_seed(seed), num_labeled + num_unlabeled
    shapes = (num_views, rows, num_known), (num_views, num_heads, rows, num_clusters)
    known, novel = (
        torch.rand(s, generator=generator, dtype=torch.float64) * 2 - 1 for s in shapes
    )
    return (
        known,
        novel,
        torch.randint(0, num_known, (num_labeled,), generator=generator),
    )


def compare(shape, num_large, aggregation, hard, concat, seed=0, temperature=0.1):
    """The loss of the fast code (float32 and float64) against the naive loop."""
    known, novel, labels = problem(**shape, seed=seed)
    options = {
        "epsilon": 0.05,
        "num_iters": 3,
        "aggregation": aggregation,
        "hard": hard,
    }
    expected = []
    for head in novel.unbind(1):
        targets = targets_of(head.numpy(), len(labels), num_large, options)
        expected.append(
            classify_failure(
                known.numpy(),
                head.numpy(),
                labels.numpy(),
                targets,
                temperature,
                concat,
            )
        )
    for dtype, tolerance in ((torch.float64, 1e-6), (torch.float32, 2e-4)):
        own_known, own_novel = known.to(dtype), novel.to(dtype)
        targets = pseudo_labels(own_novel[:num_large, :, len(labels) :], **options)
        (losses,) = discovery_loss(
            own_known, [own_novel], labels, [targets], temperature, concat
        )
        np.testing.assert_allclose(
            losses.double().numpy(), expected, atol=tolerance, rtol=tolerance
        )


SHAPES = {
    "two views": ({"num_views": 2}, 2),
    "three views": ({"num_views": 3}, 3),
    "two large and two small": ({"num_views": 4}, 2),
}


@pytest.mark.parametrize("views", SHAPES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("concat", [True, False])
def test_equals_naive_loop(views, aggregation, hard, concat):
    """Kills: unswapped views, blocks exchanged, mean over the wrong rows, targets from
    small crops, softmax over the batch axis, temperature missing, aggregation variants
    mixed up.
    """
    extra, num_large = SHAPES[views]
    shape = {
        "num_labeled": 4,
        "num_unlabeled": 5,
        "num_known": 3,
        "num_clusters": 4,
        "num_heads": 2,
    } | extra
    compare(shape, num_large, aggregation, hard, concat)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    shape=st.fixed_dictionaries(
        {
            "num_labeled": st.integers(0, 5),
            "num_unlabeled": st.integers(0, 5),
            "num_known": st.integers(1, 4),
            "num_clusters": st.integers(1, 5),
            "num_heads": st.integers(1, 3),
        }
    ),
    temperature=st.floats(0.05, 2),
    seed=st.integers(0, 99),
)
def test_equals_naive_loop_for_any_shape(shape, temperature, seed):
    """Kills: failures for B_l = 0, B_u = 0 or 1, K = 1, C_l = 1."""
    if shape["num_labeled"] + shape["num_unlabeled"]:
        compare(
            {"num_views": 2, **shape},
            2,
            "swap",
            False,
            True,
            seed,
            temperature=temperature,
        )


@pytest.mark.parametrize("views", SHAPES)
@pytest.mark.parametrize("concat", [True, False])
def test_gradients_equal_autograd_through_the_padded_form(views, concat):
    """Two families at once, weighted by what comes back.

    Kills: gradients through targets, detached too much, wrong weights between labeled
    and unlabeled rows, one family's partition in the other's softmax, weights of heads
    or families exchanged.
    """
    extra, num_large = SHAPES[views]
    shape = {
        "num_labeled": 4,
        "num_unlabeled": 6,
        "num_known": 3,
        "num_heads": 2,
    } | extra
    known, novel, labels = problem(**shape, num_clusters=4)
    families = [novel, problem(**shape, num_clusters=9, seed=1)[1]]
    inputs = [tensor.requires_grad_() for tensor in (known, *families)]
    targets = [pseudo_labels(family[:num_large, :, 4:], 0.05, 3) for family in families]
    assert not any(target.requires_grad for target in targets)
    compare_gradients(inputs, known, families, labels, targets, 0.1, concat)


def compare_gradients(inputs, *given):
    """Of a weighted sum over heads and families, by the fast code and by the padded
    form.
    """
    weights = torch.rand(
        2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    )
    losses = [loss(*given) for loss in (discovery_loss, padded_loss)]
    torch.testing.assert_close(*losses, atol=1e-12, rtol=1e-12)
    found, expected = (
        torch.autograd.grad((loss * weights).sum(), inputs) for loss in losses
    )
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-9)


def mixed_problem(num_large=2, num_views=2):
    """Unlabeled rows that may be of known classes: targets over all outputs, of two
    families.
    """
    shape = {
        "num_views": num_views,
        "num_labeled": 4,
        "num_unlabeled": 6,
        "num_known": 3,
        "num_heads": 2,
    }
    known, novel, labels = problem(**shape, num_clusters=4)
    families = [novel, problem(**shape, num_clusters=9, seed=1)[1]]
    joint = [
        torch.cat([known.unsqueeze(1).expand(-1, 2, -1, -1), f], dim=-1)
        for f in families
    ]
    priors = [
        torch.rand(f.shape[-1], generator=torch.Generator().manual_seed(3)) + 0.1
        for f in joint
    ]
    priors = [prior / prior.sum() for prior in priors]
    pairs = zip(joint, priors, strict=True)
    targets = [
        pseudo_labels(f[:num_large, :, 4:], 0.05, 3, prior=prior) for f, prior in pairs
    ]
    return known, families, labels, targets, joint, priors


@pytest.mark.parametrize("views", SHAPES)
def test_a_mixed_pile_equals_the_naive_loop(views):
    """Kills: known targets dropped, taught by a view's own, left out of the sum, pulled
    toward the labeled rows' logits; known and novel parts exchanged.
    """
    extra, num_large = SHAPES[views]
    known, families, labels, targets, joint, priors = mixed_problem(num_large, **extra)
    for f, prior, target in zip(joint, priors, targets, strict=True):
        for v, h in itertools.product(range(num_large), range(2)):
            expected = scale_matrix(
                f[v, h, 4:].numpy(), 0.05, 3, prior.double().numpy()
            )
            np.testing.assert_allclose(target[v, h].numpy(), expected, atol=1e-6)
    losses = discovery_loss(known, families, labels, targets, 0.1)
    for own, family, target in zip(losses, families, targets, strict=True):
        for h in range(2):
            given = (
                known.numpy(),
                family[:, h].numpy(),
                labels.numpy(),
                target[:, h].numpy(),
            )
            assert float(own[h]) == pytest.approx(
                classify_failure(*given, 0.1, True), rel=1e-9
            )


def test_gradients_of_a_mixed_pile_equal_autograd_through_the_padded_form():
    """Kills: known logits detached, gradients through targets."""
    known, families, labels, targets, *_ = mixed_problem(2, 3)
    inputs = [tensor.requires_grad_() for tensor in (known, *families)]
    compare_gradients(inputs, known, families, labels, targets, 0.1)


def test_full_precision_under_autocast():
    """Kills: matrix products of the loss in bfloat16."""
    known, novel, labels = (
        t.float() if t.is_floating_point() else t for t in problem(2, 4, 6, 3, 4, 2)
    )
    targets = pseudo_labels(novel[:, :, 4:], 0.05, 3)
    plain = discovery_loss(known, [novel], labels, [targets], 0.1)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(
            discovery_loss(known, [novel], labels, [targets], 0.1), plain
        )


def test_labeled_loss_is_cross_entropy_of_cosines():
    """Kills: temperature missing, labels not repeated per view."""
    known, _, labels = problem(2, 6, 0, 4, 2, 1)
    rows = itertools.product(range(2), range(6))
    naive = np.mean(
        [-float(F.log_softmax(known[v, b] / 0.1, dim=0)[labels[b]]) for v, b in rows]
    )
    np.testing.assert_allclose(
        float(labeled_loss(known, labels, 0.1)), naive, rtol=1e-5
    )
