"""Means, paired effects, verdicts, and what a table says where runs are missing."""

import math

import pytest

from tests.uno.reproduce.finished import finish, found, small
from uno.errors import ConfigError
from uno.reproduce.results import (
    DIFFERENT,
    FEW,
    NOT_SHOWN,
    OPPOSITE,
    SAME,
    SHOWN,
    Measured,
    chance_of_no_effect,
    published_effect,
    verdict,
)  # fmt: skip
from uno.reproduce.tables import STRICT_TEST

DROP = {"uno": 0.0, "no-concat": 0.20, "no-overclustering": 0.0, "weak-augmentation": -0.05}


def accuracy(row, evaluation, group, seed):
    """Seeds differ by a lot, the differences to UNO by little: only pairing shows them."""
    return 0.60 + 0.15 * seed - DROP[row] + 0.001 * (seed if row != "uno" else 0)


@pytest.mark.parametrize(
    ("differences", "claim", "expected"),
    [
        ([-10.0, -11.0, -9.0], "lower", SHOWN),
        ([-10.0, 9.0, -11.0], "lower", NOT_SHOWN),
        ([10.0, 11.0, 9.0], "lower", OPPOSITE),
        ([0.1, -0.1, 0.3], "lower", OPPOSITE),
        ([0.0, 0.0, 0.0], "lower", NOT_SHOWN),
        ([-50.0], "lower", FEW),
        ([10.0, 11.0, 9.0], "higher", SHOWN),
        ([-10.0, -11.0, -9.0], "higher", OPPOSITE),
        ([0.0, 0.0, 0.0], "higher", NOT_SHOWN),
        ([0.5, -0.5, 0.2], "same", SAME),
        ([-10.0, -11.0, -9.0], "same", DIFFERENT),
        ([10.0, 11.0, 9.0], "same", DIFFERENT),
    ],
)
def test_verdicts(differences, claim, expected):
    """Kills: a verdict from the sign alone, from one seed, or that ignores the paper's sign."""
    assert verdict(differences, claim, 1000) == expected


def test_a_few_images_are_no_effect():
    """Kills: agreement of seeds that share their images taken for certainty."""
    three, four = -100 * 3 / 178, -100 * 4 / 178
    assert verdict([three] * 3, "lower", 178) == NOT_SHOWN
    assert verdict([four - 1e-9] * 3, "lower", 178) == SHOWN


def test_the_standard_error_is_that_of_the_mean():
    """|mean| = 2 sd / sqrt(n) is the border. Kills: sd instead of the standard error, n - 1 instead of n."""
    sd = 10 * math.sqrt(3) / 2  # of (-10 + sd, -10, -10 - sd)
    assert verdict([-10.001 + sd, -10.001, -10.001 - sd], "lower", 10**6) == SHOWN
    assert verdict([-9.999 + sd, -9.999, -9.999 - sd], "lower", 10**6) == NOT_SHOWN


def test_how_weak_a_verdict_of_three_seeds_is():
    """Student's t with two degrees of freedom, from a table: P(|t| > 2) = .1835."""
    assert chance_of_no_effect(3) == pytest.approx(0.1835, abs=1e-4)
    assert chance_of_no_effect(1) is None


def test_means_effects_and_rows(tmp_path):
    """Kills: unpaired effects, sd with n, a fraction for a percentage, the wrong head or split."""
    table = small("ablation")
    finish(tmp_path, table, 3, accuracy)
    results = found(tmp_path, table, 3)
    digits = table.benchmarks[0]
    uno = results.measured(digits, table.row("uno"), STRICT_TEST, "novel")
    assert uno.values == pytest.approx([60, 75, 90])
    assert (uno.mean, uno.sd) == (pytest.approx(75), pytest.approx(15))
    effects = {(e.row.key, e.evaluation.name, e.group): e for e in results.effects()}
    assert len(effects) == 3 * 6
    concat = effects["no-concat", "task-aware", "all"]
    assert concat.measured.mean == pytest.approx(-19.9) and concat.measured.sd == pytest.approx(0.1)
    assert concat.verdict == SHOWN
    assert concat.published["CIFAR10, Tab. 2"] == -5.6
    assert effects["weak-augmentation", "task-aware", "novel"].verdict == OPPOSITE
    assert effects["no-overclustering", "task-aware", "novel"].verdict in (NOT_SHOWN, OPPOSITE)
    chance = results.measured(digits, table.row("chance"), table.evaluations[0], "novel")
    assert chance.values == [25.0] * 3
    assert results.measured(digits, table.row("chance"), STRICT_TEST, "novel") is None
    assert results.hardware == ["Testium, 2 cores"] and results.versions["torch"] == "2.11"
    assert results.total_minutes == pytest.approx(12)


def test_a_row_may_be_compared_to_another_than_the_reference(tmp_path):
    """Rotation pretraining of RS+ against RS+. Kills: all effects against UNO."""
    table = small("rotation")
    accuracies = {"uno": 0.9, "uno-rotation": 0.8, "rs-plus": 0.5, "rs-plus-rotation": 0.6}
    finish(tmp_path, table, 3, lambda row, *_: accuracies[row])
    effects = {e.row.key: e for e in found(tmp_path, table, 3).effects()}
    assert list(effects) == ["uno-rotation", "rs-plus-rotation"]
    assert effects["rs-plus-rotation"].measured.mean == pytest.approx(10)
    assert effects["rs-plus-rotation"].verdict == SHOWN and effects["uno-rotation"].verdict == OPPOSITE


def test_only_seeds_that_both_rows_have_are_compared():
    one, other = Measured({0: 50.0, 1: 60.0}), Measured({1: 70.0, 2: 90.0})
    assert one.minus(other).by_seed == {1: -10.0}


def test_failed_and_missing_cells_are_told_apart(tmp_path):
    """Kills: a failed seed that is silently left out of the mean."""
    table = small("ablation")
    lost = ("digits-no-concat-seed1", "digits-no-concat-seed2")
    finish(tmp_path, table, 3, accuracy, skip=lost)
    results = found(tmp_path, table, 3, {"cells/digits-no-concat-seed1": "loss is nan", "cells/other": "?"})
    assert results.failures == {"cells/digits-no-concat-seed1": "loss is nan"}
    assert results.missing == ["cells/digits-no-concat-seed2"]
    effects = [e for e in results.effects() if e.row.key == "no-concat"]
    assert {e.verdict for e in effects} == {FEW}


def test_a_damaged_result_is_named(tmp_path):
    table = small("ablation")
    finish(tmp_path, table, 1, accuracy)
    path = tmp_path / "cells" / "digits-uno-seed0" / "metrics.json"
    path.write_text("{")
    with pytest.raises(ConfigError, match=str(path)):
        found(tmp_path, table, 1)


def test_published_effects():
    table = small("sota")
    rs, uno = table.row("rs"), table.row("uno")
    assert published_effect(table.published[1], rs, uno, table.evaluations[0], 0) == -11.8
    assert published_effect(table.published[2], table.row("kcl"), uno, table.evaluations[0], 0) is None
