"""Means, differences paired by seed, and what is said of runs that are missing."""

import pytest

from reproduce import summary
from reproduce.experiments import cells
from tests.reproduce.finished import finished, small
from uno.errors import ConfigError

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


def test_means_and_differences(tmp_path):
    """Kills: unpaired differences, sd with n, a fraction for a percentage, the wrong
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
    assert "effect" not in uno
    (concat,) = line("no-concat", "task-aware", "all")
    assert (concat["effect"], concat["effect_sd"], concat["effect_n"]) == (
        pytest.approx(-19.9),
        pytest.approx(0.1),
        3,
    )
    assert line("chance", "task-aware", "novel")[0]["values"] == [25.0] * 3
    assert not line("chance", strict, "novel")
    assert (
        results.hardware == ["Testium, 2 cores"] and results.versions["torch"] == "2.11"
    )
    assert results.total_minutes == pytest.approx(12)


def test_a_row_may_be_compared_to_another_than_the_reference(tmp_path):
    """Rotation pretraining of RS+ against RS+. Kills: all differences against UNO."""
    accuracies = {
        "uno": 0.9,
        "uno-rotation": 0.8,
        "rs-plus": 0.5,
        "rs-plus-rotation": 0.6,
    }
    results = finished(tmp_path, small("rotation"), 3, lambda row, *_: accuracies[row])
    assert {
        line["row"]: line["effect"] for line in results.lines if "effect" in line
    } == {
        "uno-rotation": pytest.approx(-10),
        "rs-plus-rotation": pytest.approx(10),
    }


def test_failed_and_missing_cells_are_told_apart(tmp_path):
    """Kills: a failed seed that is silently left out of the mean, seeds compared
    that only one row has.
    """
    lost = {("no-concat", 1): "loss is nan", ("no-concat", 2): ""}
    results = finished(tmp_path, small("ablation"), 3, accuracy, lost)
    ((failed, reason),), (missing,) = results.failures.items(), results.missing
    assert "no-concat-seed1" in failed and reason == "loss is nan"
    assert "no-concat-seed2" in missing
    concat = [line for line in results.find(row="no-concat") if "effect" in line]
    assert {
        (*line["seeds"], line["effect_n"], line["effect_sd"]) for line in concat
    } == {(0, 1, None)}
    todo, _ = cells(small("ablation"), 1, {}, {})
    path = tmp_path / todo[0].name / "metrics.json"
    path.write_text("{")  # a damaged result is named
    with pytest.raises(ConfigError, match=str(path)):
        summary.read(small("ablation"), todo, tmp_path, {}, {}, {}, {})
