"""Classes that a first run found are known to the second: ``examples/continued.py``
on the digits.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

import uno
from examples.continued import confirm, main, right
from tests.uno.models import write_digits
from tests.uno.small_run import SMALL
from uno.data.sources import read_digits


def folders(place: Path) -> list[str]:
    """Some of the digits 0-2 with labels, others with 3-6 as the first set, others
    with 3-8 as the second.
    """
    digits = read_digits()
    labels, sets = (
        np.array(digits.labels.to_pylist()).astype(int),
        {"known": range(3), "first": range(7), "second": range(9)},
    )
    for start, (name, classes) in enumerate(sets.items()):
        for digit in classes:
            rows = np.flatnonzero(labels == digit)[start : 75 + start : 3]
            write_digits(
                place / name / str(digit),
                np.stack([digits.images.items[row] for row in rows]),
            )
    return [str(place / name) for name in sets]


@pytest.mark.slow
def test_what_is_confirmed_is_known_to_the_next_run(tmp_path, capsys):
    """Kills: classes that are not confirmed, or images of others, among the known ones
    of the second run; an encoder that starts anew; a share of other images than the
    first set's.
    """
    options = SMALL | {
        "preset": "digits",
        "data.known_classes": None,
        "compute.threads": 1,
    }
    (tmp_path / "own.yaml").write_text(
        yaml.safe_dump(options | {"data.limit": None, "pretrain.epochs": 20})
    )
    given = [
        *folders(tmp_path),
        str(tmp_path / "run"),
        "4",
        "4",
        str(tmp_path / "own.yaml"),
    ]
    before, after = main(*given)
    said = capsys.readouterr().out
    first, second = (uno.load(str(tmp_path / "run" / name)) for name in "12")
    images = sorted((tmp_path / "first").rglob("*.png"))
    found, truth = (
        [row.class_name for row in first.predict(images)],
        [path.parent.name for path in images],
    )
    confirmed = confirm(["novel-1", "novel-2", "novel-3", "novel-4"], found, truth)
    assert len(confirmed) == 2
    kept = {
        path.name: path.parent.name
        for path in (tmp_path / "run" / "known").rglob("novel-*")
    }
    assert len(kept) == sum(name in confirmed for name in found) > 10
    assert all(confirmed[file[:7]] == folder for file, folder in kept.items())
    known = {row.name for row in second.classes if row.kind == "known"}
    assert known == {"0", "1", "2", *confirmed.values()}
    stored = yaml.safe_load((tmp_path / "run" / "2" / "config.yaml").read_text())
    assert stored["model"]["weights"] == f"{tmp_path}/run/1/model/encoder.safetensors"
    assert json.loads((tmp_path / "run" / "2" / "metrics.json").read_text())
    now = [row.class_name for row in second.predict(images)]
    assert (
        after == right(now, truth, confirmed.values())
        and f"{after:.1%} after the second" in said
    )
    assert 0 < before <= 1


def test_the_larger_half_is_confirmed_by_the_name_of_most():
    """Kills: the smaller half, a name that a class has by chance, images of other
    classes in the share.
    """
    found = ["novel-1"] * 3 + ["novel-2"] * 5 + ["novel-3"] + ["cat"] * 2
    truth = ["a", "a", "b", "c", "c", "c", "a", "a", "d", "cat", "d"]
    assert confirm(["novel-1", "novel-2", "novel-3"], found, truth) == {"novel-2": "c"}
    assert confirm(["novel-1", "novel-2"], found[:3], truth[:3]) == {"novel-1": "a"}
    assert right(
        ["a", "c", "b", "a"], ["a", "a", "b", "c"], ["a", "c"]
    ) == pytest.approx(1 / 3)
