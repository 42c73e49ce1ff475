"""Means, paired effects, verdicts, and what a table says where runs are missing."""

import math

import pytest

from tests.uno.reproduce.finished import finished, small
from uno.errors import ConfigError
from uno.reproduce import effects
from uno.reproduce.effects import DIFFERENT, FEW, NOT_SHOWN, OPPOSITE, SAME, SHOWN
from uno.reproduce.experiments import cells

DROP = {
    "uno": 0.0,
    "no-concat": 0.20,
    "no-overclustering": 0.0,
    "weak-augmentation": -0.05,
}


def accuracy(row, evaluation, group, seed):
    """Seeds differ by a lot, the differences to UNO by little: only pairing shows
    them.
    """
    return 0.60 + 0.15 * seed - DROP[row] + 0.001 * (seed if row != "uno" else 0)


# images of the digits' novel test rows
THREE, FOUR = -100 * 3 / 178, -100 * 4 / 178 - 1e-9
SD = 10 * math.sqrt(3) / 2  # |mean| = 2 sd / sqrt(n) is the border


@pytest.mark.parametrize(
    ("differences", "claim", "num_rows", "expected"),
    [
        ([-10.0, -11.0, -9.0], "lower", 1000, SHOWN),
        ([-10.0, 9.0, -11.0], "lower", 1000, NOT_SHOWN),
        ([10.0, 11.0, 9.0], "lower", 1000, OPPOSITE),
        ([0.1, -0.1, 0.3], "lower", 1000, OPPOSITE),
        ([0.0, 0.0, 0.0], "lower", 1000, NOT_SHOWN),
        ([-50.0], "lower", 1000, FEW),
        ([10.0, 11.0, 9.0], "higher", 1000, SHOWN),
        ([-10.0, -11.0, -9.0], "higher", 1000, OPPOSITE),
        ([0.0, 0.0, 0.0], "higher", 1000, NOT_SHOWN),
        ([0.5, -0.5, 0.2], "same", 1000, SAME),
        ([-10.0, -11.0, -9.0], "same", 1000, DIFFERENT),
        ([10.0, 11.0, 9.0], "same", 1000, DIFFERENT),
        ([THREE] * 3, "lower", 178, NOT_SHOWN),
        ([FOUR] * 3, "lower", 178, SHOWN),
        ([-10.001 + SD, -10.001, -10.001 - SD], "lower", 10**6, SHOWN),
        ([-9.999 + SD, -9.999, -9.999 - SD], "lower", 10**6, NOT_SHOWN),
    ],
)
def test_verdicts(differences, claim, num_rows, expected):
    """Kills: a verdict from the sign alone, from one seed, or that ignores the
    paper's sign.
    """
    assert effects.verdict(differences, claim, num_rows) == expected


def test_means_effects_and_rows(tmp_path):
    """Kills: unpaired effects, sd with n, a fraction for a percentage, the wrong
    head or split.
    """
    results = finished(tmp_path, small("ablation"), 3, accuracy)
    strict = "task-agnostic, strict"

    def line(row, evaluation, group):
        return results.find(
            benchmark="digits", row=row, evaluation=evaluation, group=group
        )

    (uno,) = line("uno", strict, "novel")
    assert uno["seeds"] == [0, 1, 2] and uno["values"] == pytest.approx([60, 75, 90])
    assert (uno["mean"], uno["sd"]) == (pytest.approx(75), pytest.approx(15))
    assert len(results.effects) == 3 * 6
    (concat,) = line("no-concat", "task-aware", "all")
    assert (concat["effect"], concat["effect_sd"]) == (
        pytest.approx(-19.9),
        pytest.approx(0.1),
    )
    assert (
        concat["verdict"] == SHOWN
        and concat["published_effects"]["CIFAR10, Tab. 2"] == -5.6
    )
    assert line("weak-augmentation", "task-aware", "novel")[0]["verdict"] == OPPOSITE
    assert line("chance", "task-aware", "novel")[0]["values"] == [25.0] * 3
    assert not line("chance", strict, "novel")
    assert (
        results.hardware == ["Testium, 2 cores"] and results.versions["torch"] == "2.11"
    )
    assert results.total_minutes == pytest.approx(12)


def test_a_row_may_be_compared_to_another_than_the_reference(tmp_path):
    """Rotation pretraining of RS+ against RS+. Kills: all effects against UNO."""
    accuracies = {
        "uno": 0.9,
        "uno-rotation": 0.8,
        "rs-plus": 0.5,
        "rs-plus-rotation": 0.6,
    }
    results = finished(tmp_path, small("rotation"), 3, lambda row, *_: accuracies[row])
    found = {
        effect["row"]: (effect["verdict"], effect["effect"])
        for effect in results.effects
    }
    assert found == {
        "uno-rotation": (OPPOSITE, pytest.approx(-10)),
        "rs-plus-rotation": (SHOWN, pytest.approx(10)),
    }


def test_failed_and_missing_cells_are_told_apart(tmp_path):
    """Kills: a failed seed that is silently left out of the mean, seeds compared
    that only one row has.
    """
    lost = ("cells/digits-no-concat-seed1", "cells/digits-no-concat-seed2")
    failed = {lost[0]: "loss is nan", "cells/other": "?"}
    results = finished(tmp_path, small("ablation"), 3, accuracy, lost, failed)
    assert results.failures == {lost[0]: "loss is nan"} and results.missing == [lost[1]]
    concat = [effect for effect in results.effects if effect["row"] == "no-concat"]
    assert {(*e["seeds"], e["effect_n"], e["verdict"]) for e in concat} == {(0, 1, FEW)}
    path = tmp_path / "cells" / "digits-uno-seed0" / "metrics.json"
    path.write_text("{")  # a damaged result is named
    with pytest.raises(ConfigError, match=str(path)):
        effects.read(
            small("ablation"),
            cells(small("ablation"), 1, {}, {})[0],
            tmp_path,
            {},
            {},
            {},
            {},
        )


def test_published_effects_and_how_weak_a_verdict_of_three_seeds_is():
    # Student's t with two degrees of freedom, from a table: P(|t| > 2) = .1835
    assert effects.chance_of_no_effect(3) == pytest.approx(0.1835, abs=1e-4)
    assert effects.chance_of_no_effect(1) is None
    table = small("sota")
    rows, evaluation = map(table.row, ("rs", "kcl")), table.evaluations[0]
    rs, kcl = (
        effects.published_effects(table, row, evaluation, "novel") for row in rows
    )
    assert (
        rs["CIFAR100-20, Tab. 3, baselines pretrained with self-supervision"] == -11.8
    )
    assert (len(rs), len(kcl)) == (6, 5)
