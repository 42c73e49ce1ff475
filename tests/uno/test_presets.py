"""Every number of every preset and recipe, against one file that was checked with
the tables by hand.
"""

import itertools
import json
from pathlib import Path

import pytest

from tests.uno.data.builders import failure
from uno.config import Config, flatten, override, to_dict
from uno.presets import CPU, PRESETS, preset, scale_sizes

GOLDEN = Path(__file__).parent / "golden" / "presets.json"
DEFAULTS = flatten(to_dict(Config()))
"""What the presets' differences start from, which are the paper's CIFAR10 settings."""


def differences(config: Config) -> dict:
    return {
        key: value
        for key, value in flatten(to_dict(config)).items()
        if value != DEFAULTS[key]
    }


def test_numbers_are_the_published_ones():
    """Kills: an old value left behind, v2's rate in pretraining, ImageNet with CIFAR's
    v2, a changed default.

    Fini et al. 2021, Sec. 4.1 and Tab. 1, and the authors' code. After a meant change
    write ``now`` to the file, and say in CHANGELOG.md which numbers moved.
    """
    each = [
        *itertools.product(PRESETS, ("paper", "v2")),
        *((name, "cpu") for name in CPU),
    ]
    now = {
        f"{name} {recipe}": differences(preset(name, recipe)) for name, recipe in each
    }
    assert {"defaults": DEFAULTS, **now} == json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("size", [4, 1024])
def test_every_preset_takes_images_of_every_size(name, size):
    base = preset(name)
    assert override(base, scale_sizes(base, size)).augment.large.size == size


def test_a_name_that_is_like_no_preset_is_one_line_with_all_of_them():
    line = failure(preset, "zzz")
    assert line.startswith("unknown preset 'zzz'; choose from digits, ")
