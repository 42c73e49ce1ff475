"""Classes that a first run found are known to the second: ``examples/continued.py``
on the digits.
"""

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
    digits, sets = read_digits(), {"known": 3, "first": 7, "second": 9}
    labels = np.array(digits.labels.to_pylist()).astype(int)
    for start, (name, num_classes) in enumerate(sets.items()):
        for digit in range(num_classes):
            rows = np.flatnonzero(labels == digit)[start : 75 + start : 3]
            write_digits(place / name / str(digit), digits.images.items[rows])
    return [str(place / name) for name in sets]


@pytest.mark.slow
def test_what_is_confirmed_is_known_to_the_next_run(tmp_path, capsys):
    """Kills: classes that are not confirmed, or images of others, among the known ones
    of the second run; an encoder that starts anew; a share of other images than the
    first set's.
    """
    own, run = tmp_path / "own.yaml", tmp_path / "run"
    changed = {
        "preset": "digits",
        "data.known_classes": None,
        "data.limit": None,
        "pretrain.epochs": 20,
        "compute.threads": 1,
    }
    own.write_text(yaml.safe_dump(SMALL | changed))
    before, after = main(*folders(tmp_path), str(run), "4", "4", str(own))
    first, second = (uno.load(str(run / name)) for name in "12")
    images = sorted((tmp_path / "first").rglob("*.png"))
    truth = [path.parent.name for path in images]
    found = [row.class_name for row in first.predict(images)]
    confirmed = confirm(["novel-1", "novel-2", "novel-3", "novel-4"], found, truth)
    assert len(confirmed) == 2
    kept = [(path.name[:7], path.parent.name) for path in run.glob("known/*/novel-*")]
    assert len(kept) == sum(name in confirmed for name in found) > 10
    assert set(kept) == set(confirmed.items())
    known = {row.name for row in second.classes if row.kind == "known"}
    assert known == {"0", "1", "2", *confirmed.values()}
    stored = yaml.safe_load((run / "2" / "config.yaml").read_text())
    assert stored["model"]["weights"] == f"{run}/1/model/encoder.safetensors"
    now = [row.class_name for row in second.predict(images)]
    assert after == right(now, truth, confirmed.values()) and 0 < before <= 1
    assert f"{after:.1%} after the second" in capsys.readouterr().out


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
