"""Batches are a pure function of (seed, step), cut into the workers' shares."""

import pytest
import torch

from tests.uno.small_run import small_config, small_sets
from uno.data.resident import ResidentBatches
from uno.runs import run

CONFIG = small_config(
    train__batch_size=24, augment__small__num_views=1, augment__small__size=6, augment__small__crop="resized"
)


def batches(config=CONFIG, phase=run.DISCOVER, rank=0, world_size=1):
    train = small_sets()[0]
    plan = run.plans(config, len(train.labels), len(train.unlabeled_images), world_size)[phase]
    return ResidentBatches(config, train, plan, rank, world_size)


def same(first, second) -> bool:
    return torch.equal(first.labels, second.labels) and all(
        torch.equal(a, b) for a, b in zip(first.views, second.views, strict=True)
    )


def test_batches_are_a_pure_function_of_the_step():
    """Kills: a generator carried from step to step, the global generator used or changed."""
    source = batches()
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    forward = [source(step) for step in range(5)]
    assert torch.equal(torch.random.get_rng_state(), before)
    again = batches()
    assert all(same(again(step), forward[step]) for step in reversed(range(5)))
    assert not any(same(forward[0], other) for other in forward[1:])
    assert not same(batches(small_config(**{"seed": 1, "train__batch_size": 24}))(0), batches()(0)._replace(
        views=forward[0].views[:2]))  # fmt: skip


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("phase", [run.PRETRAIN, run.DISCOVER])
def test_shares_of_the_workers_are_the_global_batch(phase, world_size):
    """Labeled rows first, then unlabeled, on every worker; a row gets the same views wherever it is. Kills:
    the same views on every worker, views drawn per rank, rows shared out across the two kinds.
    """
    whole = batches(phase=phase)(2)
    shares = [batches(phase=phase, rank=rank, world_size=world_size)(2) for rank in range(world_size)]
    assert torch.equal(torch.cat([share.labels for share in shares]), whole.labels)
    num_labeled, share_labeled = len(whole.labels), len(shares[0].labels)
    assert num_labeled == (24 if phase == run.PRETRAIN else 12)
    for v, view in enumerate(whole.views):
        labeled = torch.cat([share.views[v][:share_labeled] for share in shares])
        unlabeled = torch.cat([share.views[v][share_labeled:] for share in shares])
        assert torch.equal(torch.cat([labeled, unlabeled]), view)


def test_labels_belong_to_their_images():
    """Without augmentation a row is an image of the set. Kills: labels and images indexed apart, unlabeled
    rows first, the same image in place of another view.
    """
    config = small_config(
        augment__large__affine=0.0, augment__large__jitter=0.0, train__batch_size=24, augment__weak=True
    )
    train = small_sets()[0]
    batch = batches(config)(1)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (config.data.mean, config.data.std))
    pixels = ((batch.views[0] * std + mean) * 255).round().to(torch.uint8)
    row_of = {image.numpy().tobytes(): i for i, image in enumerate(train.labeled_images)}
    for image, label in zip(pixels[:12], batch.labels, strict=True):
        assert train.labels[row_of[image.numpy().tobytes()]] == label
    unlabeled = {image.numpy().tobytes() for image in train.unlabeled_images}
    assert all(image.numpy().tobytes() in unlabeled for image in pixels[12:])
    assert torch.equal(batch.views[0], batch.views[1])  # nothing random is left


def test_views_and_shapes():
    """Kills: small views first, two equal views, phases that share their randomness."""
    batch = batches()(0)
    assert [tuple(view.shape) for view in batch.views] == [(24, 3, 8, 8), (24, 3, 8, 8), (24, 3, 6, 6)]
    assert batch.num_large == 2 and len(batch.labels) == 12
    assert not torch.equal(batch.views[0], batch.views[1])
    pretraining = batches(phase=run.PRETRAIN)(0)
    assert len(pretraining.labels) == len(pretraining.views[0]) == 24
    assert batch.labels.max() < 5 and batch.labels.dtype == torch.int64
