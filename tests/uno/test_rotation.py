"""The self-supervised phase: its batches, its step, and what pretraining takes from
it.
"""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.uno.small_run import (
    CPU,
    assert_same,
    check_resumes,
    lines,
    small_config,
    small_sets,
)
from uno.config import override
from uno.data.files import Storage
from uno.data.resident import PretextBatches
from uno.methods import rotation
from uno.model import build_network
from uno.runs import run
from uno.runs.checkpoint import load_newest
from uno.steps import new_state, take_step, with_prefix
from uno.training import LocalWorker

CONFIG = small_config(
    pretext__epochs=2, pretext__warmup_epochs=1.0, train__batch_size=24
)


def rotation_batches(
    config=CONFIG, rank: int = 0, world_size: int = 1
) -> PretextBatches:
    train = small_sets()[0]
    plan = run.plans(
        config, len(train.labels), len(train.unlabeled_images), world_size
    )[run.PRETEXT]
    return PretextBatches(config, train, plan, rank, world_size)


def test_view_k_is_turned_k_times_and_all_rows_take_part():
    """Kills: turns of the other direction for some views, one kind of rows, rows
    repeated in an epoch.
    """
    still = override(CONFIG, {"augment.weak": True, "augment.large.affine": 0.0})
    batches, seen = rotation_batches(still), []
    for step in range(200 // 24):
        batch = rotation.turned(batches(step))
        assert len(batch.views) == 4 and len(batch.labels) == 0
        for k, view in enumerate(batch.views):
            torch.testing.assert_close(view, torch.rot90(batch.views[0], k, (2, 3)))
        seen += [view.numpy().tobytes() for view in batch.views[0]]
    train = small_sets()[0]
    mean, std = (
        torch.tensor(values).view(3, 1, 1)
        for values in (still.data.mean, still.data.std)
    )
    pixels = (
        torch.cat([train.labeled_images[:], train.unlabeled_images[:]]).float() / 255
    )
    known = {image.numpy().tobytes() for image in (pixels - mean) / std}
    assert len(seen) == 192 and len(set(seen) & known) >= 0.9 * 192


def test_shares_of_the_workers_are_the_global_batch():
    """Kills: views drawn per rank, rows that change places between the kinds."""
    whole = {view.numpy().tobytes() for view in torch.cat(rotation_batches()(3).views)}
    shares = [rotation_batches(rank=rank, world_size=2)(3) for rank in (0, 1)]
    assert {
        view.numpy().tobytes() for share in shares for view in torch.cat(share.views)
    } == whole
    assert not any(
        torch.equal(a, b) for a, b in zip(shares[0].views, shares[1].views, strict=True)
    )


def test_the_step_tells_turns_apart():
    """Kills: labels in the order of rows, one view only, a temperature left out."""
    model = build_network(CONFIG, 4, 0, 0).train()
    state, batch = (
        new_state(model, model, CONFIG.pretext, CPU, False),
        rotation_batches()(0),
    )
    known = copy.deepcopy(model)(rotation.turned(batch).views).known.detach()
    expected = np.mean(
        [float(F.cross_entropy(known[k] / 0.1, torch.full((24,), k))) for k in range(4)]
    )
    found = [
        float(take_step(rotation.loss, state, batch, CONFIG, 0.05)) for _ in range(20)
    ]
    assert found[0] == pytest.approx(expected, rel=1e-4)
    assert found[-1] < 0.7 * found[0]


@pytest.mark.slow
def test_pretraining_starts_from_it_and_everything_resumes_to_the_bit(tmp_path):
    """Kills: an encoder that is not carried over, a phase without checkpoints or lines,
    a resume that skips the phase or starts it again.
    """
    config, whole = override(CONFIG, {"method": "rs"}), Storage(str(tmp_path / "whole"))
    check_resumes(config, tmp_path, (10, 5))
    stored = load_newest(whole, run.PRETEXT)
    assert stored.step == 2 * (200 // 24) and lines(whole)[0]["phase"] == "pretext"
    still = override(config, {"pretrain.epochs": 0})
    start = run.pretrain(
        still, small_sets()[0], LocalWorker(CPU), Storage(str(tmp_path / "still"))
    )
    assert_same(
        dict(start.model.encoder.state_dict()),
        with_prefix(stored.tensors, "model/encoder."),
    )
