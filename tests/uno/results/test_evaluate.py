"""Counting on shards and batches, the metric paths, the k-means baseline and the
console table.
"""

from itertools import product

import numpy as np
import pytest
import torch

from uno.config import override
from uno.data.memory import EvalSet
from uno.methods.uno import METHOD
from uno.model import Logits, UnoModel
from uno.presets import preset
from uno.results import metrics
from uno.results.evaluate import (
    Confusions,
    count_outputs,
    gcd_metrics,
    protocol_metrics,
)

H, C_L, C_U, K = 3, 4, 3, 5


def random_rows(num_rows: int, seed: int = 0, num_true_novel: int = C_U):
    generator = torch.Generator().manual_seed(seed)
    known = torch.randn(num_rows, C_L, generator=generator)
    novel = torch.randn(H, num_rows, K, generator=generator)
    truth = torch.randint(-1, C_L + num_true_novel, (num_rows,), generator=generator)
    return known, novel, truth


def counted(known, novel, truth, num_true_novel=C_U):
    confusions = Confusions.zeros(len(novel), C_L, num_true_novel, K)
    confusions.add_(known, novel, truth)
    return confusions


def reference(known, novel, truth):
    """The three matrices by a loop over rows, from their definition."""
    shapes = (H, C_L, C_L), (H, C_U, K), (H, C_L + C_U, C_L + K)
    known_counts, novel_counts, joint_counts = (np.zeros(s, int) for s in shapes)
    for row, label in enumerate(truth.tolist()):
        if 0 <= label < C_L:
            known_counts[:, label, int(known[row].argmax())] += 1
        for head in range(H if label >= 0 else 0):
            if label >= C_L:
                novel_counts[head, label - C_L, int(novel[head, row].argmax())] += 1
            joint = torch.cat([known[row], novel[head, row]])
            joint_counts[head, label, int(joint.argmax())] += 1
    return known_counts, novel_counts, joint_counts


def test_counts_equal_a_loop_over_rows():
    """Kills: argmax over the wrong block, blocks exchanged, one head for all, -1
    counted, a row missed.
    """
    rows = random_rows(200)
    assert (rows[2] == -1).any()
    for counts, expected in zip(counted(*rows), reference(*rows), strict=True):
        torch.testing.assert_close(counts, torch.from_numpy(expected))


def test_a_tie_between_known_and_novel_is_known():
    """Kills: >= for >, which sends equal cosines to the cluster."""
    confusions = Confusions.zeros(1, 1, 1, 1)
    confusions.add_(
        torch.tensor([[0.5], [0.5]]),
        torch.tensor([[[0.5], [0.75]]]),
        torch.tensor([0, 1]),
    )
    assert confusions.joint.tolist() == [[[1, 0], [0, 1]]]


def spell_rows(num_rows: int) -> torch.Tensor:
    """Return images (num_rows, 3, 8, 8) whose first pixels spell their row number."""
    numbers = torch.arange(num_rows)
    images = torch.zeros(num_rows, 3, 8, 8, dtype=torch.uint8)
    images[:, 0, 0, 0], images[:, 0, 0, 1] = numbers % 256, numbers // 256
    return images


class Spelled(UnoModel):
    """Answers with the logits of the row that an image's first pixels spell."""

    def __init__(self, known: torch.Tensor, novel: torch.Tensor) -> None:
        super().__init__(CONFIG.model, C_L, K, METHOD)
        self.rows, self.sizes = [], []
        self.logits = known, novel

    def forward(self, views):
        assert torch.is_inference_mode_enabled()
        pixels = (views[0][:, 0, 0, :2] * 255).round().long()
        rows = pixels[:, 0] + 256 * pixels[:, 1]
        self.rows += rows.tolist()
        self.sizes.append(len(rows))
        known, novel = self.logits
        features = torch.zeros(1, len(rows), 2)
        return Logits(known[None, rows], novel[None, :, rows], None, features)


CONFIG = override(
    preset("digits"),
    {
        "data.mean": (0.0, 0.0, 0.0),
        "data.std": (1.0, 1.0, 1.0),
        "model.num_heads": H,
        "model.width": 4,
    },
)


@pytest.mark.parametrize(
    ("num_rows", "world_size", "batch_size"),
    [(300, 1, 300), (300, 1, 7), (301, 4, 32), (3, 4, 2)],
)
def test_every_row_is_counted_exactly_once(num_rows, world_size, batch_size):
    """W workers = 1 worker. Kills: padded sampler, dropped last batch, foreign truth,
    another view, counts overwritten instead of added.
    """
    known, novel, truth = random_rows(num_rows)
    images = spell_rows(num_rows)
    rows = EvalSet(truth, torch.arange(num_rows), truth < 0, images)
    model = Spelled(known, novel).eval()
    shares = [rows.batches(batch_size, rank, world_size) for rank in range(world_size)]
    found = [count_outputs(model, CONFIG, share, C_L + C_U)[0] for share in shares]
    total = [sum(parts) for parts in zip(*found, strict=True)]
    assert sorted(model.rows) == list(range(num_rows))
    assert 0 < min(model.sizes) <= max(model.sizes) <= batch_size
    torch.testing.assert_close(total, [*counted(known, novel, truth)])


def test_kinds_of_rows_are_counted_apart_in_one_pass():
    """Kills: rows of one kind in the counts of another, rows without truth in any, a
    second pass.
    """
    known, novel, truth = random_rows(300)
    model, second = Spelled(known, novel).eval(), torch.arange(300) % 3 == 0
    both = torch.where(second & (truth >= 0), truth + C_L + C_U, truth)
    batches = [(spell_rows(300), both)]
    found = count_outputs(model, CONFIG, batches, C_L + C_U, num_kinds=2)
    assert sorted(model.rows) == list(range(300))
    for kind, own in zip((~second, second), found, strict=True):
        alone = counted(known, novel, torch.where(kind, truth, -1))
        torch.testing.assert_close([*own], [*alone])


def expected_keys(split: str) -> set[str]:
    groups = [f"{group}/{{}}/acc" for group in ("known", "novel", "all")]
    groups += [f"novel/{{}}/{name}" for name in metrics.METRICS]
    keys = product(groups, metrics.PROTOCOLS, ("avg", "best"))
    found = {f"{split}/{group.format(name)}/{which}" for group, name, which in keys}
    return found | {f"{split}/novel/task_aware/chance/acc"}


def test_protocol_metrics_by_hand():
    """Two heads on four rows: known class 0 (rows 0, 1), novel classes 1 and 2 (rows 2,
    3); clusters 1 and 2.

    Kills: best head chosen by accuracy (head 1 is better everywhere), avg / best
    exchanged, head axis lost, argmax over the wrong block, blocks exchanged.
    """
    known = torch.tensor([[0.1], [0.9], [0.5], [0.1]])
    novel = torch.tensor(
        [
            # own outputs of novel rows: 1, 1; over all: 0, 1
            [[0.3, 0.2], [0.1, 0.2], [0.4, 0.3], [0.9, 0.8]],
            # own: 2, 1; over all: 2, 1
            [[0.0, 0.0], [0.1, 0.2], [0.3, 0.6], [0.9, 0.8]],
        ]
    )
    confusions = Confusions.zeros(2, 1, 2, 2)
    confusions.add_(known, novel, torch.tensor([0, 0, 1, 2]))
    result = protocol_metrics(confusions, best_head=0, split="test")
    assert set(result) == expected_keys("test")
    expected = {
        "task_aware": [(1, 1), (0.75, 0.5), (0.875, 0.75)],
        # head 0: row 0 -> cluster 1, row 1 -> known, row 2 -> known, row 3 -> cluster 1
        "task_agnostic_official": [(0.75, 0.5), (1, 1), (0.875, 0.75)],
        "task_agnostic_joint": [(0.75, 0.5)] * 3,
        "task_agnostic_strict": [(0.75, 0.5)] * 3,
    }
    for protocol, accuracies in expected.items():
        for rows, pair in zip(("known", "novel", "all"), accuracies, strict=True):
            path = f"test/{rows}/{protocol}/acc"
            assert (result[f"{path}/avg"], result[f"{path}/best"]) == pair, path
    other = protocol_metrics(confusions, best_head=1, split="test")
    assert other["test/novel/task_aware/acc/avg"] == 0.75
    assert other["test/novel/task_aware/acc/best"] == 1
    assert result["test/novel/task_aware/chance/acc"] == pytest.approx(0.75, abs=0.1)


@pytest.mark.parametrize("num_true_novel", [1, K + 2])
def test_other_numbers_of_true_classes(num_true_novel):
    """K clusters for 1 or more true classes than clusters. Kills: square matrices,
    chance over C_u.
    """
    rows = random_rows(120, num_true_novel=num_true_novel)
    result = protocol_metrics(counted(*rows, num_true_novel), 0, "test")
    assert set(result) == expected_keys("test")
    assert np.isfinite(list(result.values())).all()
    sizes = np.bincount(rows[2][rows[2] >= C_L] - C_L)
    chance = metrics.chance_accuracy(sizes, num_clusters=K)
    assert result["test/novel/task_aware/chance/acc"] == chance


def test_groups_without_rows_have_no_metrics():
    """Kills: NaN."""
    assert protocol_metrics(Confusions.zeros(H, C_L, C_U, K), 0, "train") == {}
    known = protocol_metrics(counted(*random_rows(120, num_true_novel=0), 0), 0, "test")
    assert known.keys() == {key for key in expected_keys("test") if "/known/" in key}


def test_mixed_piles_are_scored_over_their_unlabeled_rows():
    """Two heads, known classes 0 and 1, novel class 2. Kills: labeled rows counted,
    best head by accuracy, avg and best exchanged, a matching for each kind of rows.
    """
    first = [[4, 0, 0], [0, 3, 1], [0, 2, 6]]
    # known outputs exchanged: matched all the same
    second = [[0, 4, 0], [4, 0, 0], [1, 1, 6]]
    joint = torch.tensor([first, second])
    of_heads = {"all": (13 / 16, 14 / 16), "old": (7 / 8, 1), "new": (6 / 8, 6 / 8)}
    expected = {}
    for name, (best, other) in of_heads.items():
        expected[f"train/unlabeled/gcd/{name}/best"] = best
        expected[f"train/unlabeled/gcd/{name}/avg"] = (best + other) / 2
    assert gcd_metrics(joint, 2, best_head=0, split="train") == pytest.approx(expected)
    assert gcd_metrics(joint * 0, 2, 0, "test") == {}
