"""The self-supervised phase: its batches, its step, and what pretraining takes from
it.
"""

import copy

import pytest
import torch
import torch.nn.functional as F

from tests.uno.small_run import (
    CPU,
    HERE,
    assert_same,
    check_resumes,
    lines,
    small_config,
    small_sets,
)
from uno.augment import normalize
from uno.config import override
from uno.data.files import Storage
from uno.data.memory import MemoryBatches
from uno.methods import rotation
from uno.model import build_network
from uno.runs import run
from uno.runs.checkpoint import load_newest
from uno.steps import new_state, take_step, with_prefix

CONFIG = small_config(
    pretext__epochs=2, pretext__warmup_epochs=1.0, train__batch_size=24
)


def rotation_batches(config=CONFIG) -> MemoryBatches:
    train = small_sets()[0]
    sizes = len(train.labels), len(train.unlabeled_images)
    plan = run.plans(config, *sizes, 1)[run.PRETEXT]
    return MemoryBatches(config, train, plan, 0, 1)


def test_view_k_is_turned_k_times_and_all_rows_take_part():
    """Kills: turns of the other direction for some views, one kind of rows, rows
    repeated in an epoch.
    """
    still = override(CONFIG, {"augment.weak": True, "augment.large.affine": 0.0})
    batches, seen = rotation_batches(still), []
    for step in range(200 // 24):
        batch = rotation.turn_views(batches(step))
        assert len(batch.views) == 4 and len(batch.labels) == 0
        for k, view in enumerate(batch.views):
            torch.testing.assert_close(view, torch.rot90(batch.views[0], k, (2, 3)))
        seen += [view.numpy().tobytes() for view in batch.views[0]]
    train, data = small_sets()[0], still.data
    images = torch.cat([train.labeled_images[:], train.unlabeled_images[:]])
    rows = normalize(images / 255, data.mean, data.std)
    known = {row.numpy().tobytes() for row in rows}
    assert len(seen) == 192 and len(set(seen) & known) >= 0.9 * 192


def test_the_step_tells_turns_apart():
    """Kills: labels in the order of rows, one view only, a temperature left out."""
    model = build_network(CONFIG, 4, 0, 0).train()
    state = new_state(model, model, CONFIG.pretext, CPU, False)
    batch = rotation_batches()(0)
    logits = copy.deepcopy(model)(rotation.turn_views(batch).views).known.detach() / 0.1
    turns = torch.arange(4).repeat_interleave(24)
    expected = float(F.cross_entropy(logits.flatten(0, 1), turns))
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
    start = run.pretrain(still, small_sets()[0], HERE, Storage(str(tmp_path / "still")))
    expected = with_prefix(stored.tensors, "model/encoder.")
    assert_same(dict(start.model.encoder.state_dict()), expected)
