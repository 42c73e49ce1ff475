"""Winner-take-all hashes and contrast of rows and classes against loops in float64."""

import numpy as np
import pytest
import torch

from tests.uno.methods import toy
from tests.uno.small_run import fresh_state, small_config
from uno.errors import ConfigError
from uno.methods import jia
from uno.model import build_network


@pytest.mark.parametrize("step", [0, 3, 40])
def test_the_step_equals_the_loop(step):
    """Kills, each tried: a row that is its own negative, positives of one view,
    unlabeled rows alike, labeled rows without their class, the logarithm of a sum,
    codes of one view, the smallest feature of a window, codes that agree below the
    share, one temperature for another, a weight of the consistency that does not rise.
    """
    state, logits = (
        fresh_state(small_config(method="jia")),
        toy.random_logits(9, 4, 3, 6),
    )
    state.step, state.total_steps = step, 20
    windows = torch.tensor(
        [[0, 1, 2], [3, 4, 5], [5, 0, 3], [1, 4, 2], [2, 3, 0], [4, 1, 0], [5, 2, 1]]
    )
    state.extra = {"windows": windows}
    logits.features[:, 6:8] = logits.features[:, 5:6] + 0.3 * logits.features[:, 6:8]
    found = toy.step_on(
        small_config(method="jia"), logits, torch.tensor(toy.LABELS), state
    )

    features = logits.features.numpy()
    codes = [
        [max(window, key=lambda d: row[d]) for window in windows.tolist()]
        for row in (features[0] + features[1])[4:]
    ]
    shares = [
        [np.mean([a == b for a, b in zip(one, two, strict=True)]) for two in codes]
        for one in codes
    ]
    similar = [[share > jia.AGREEMENT for share in row] for row in shares]
    assert 5 < np.sum(similar) < 25
    expected = toy.naive_pairwise(logits, similar, 5 * toy.ramp(step / 5))
    expected += toy.naive_contrast(features, toy.LABELS, jia.TEMPERATURE)
    assert found == pytest.approx(expected, rel=1e-6)


def test_fewer_features_than_a_window_has_are_refused():
    """Kills: windows that are silently shorter."""
    model = build_network(small_config(method="jia"), 5, 5, 0)
    model.known.weight.data = model.known.weight.data[:, :3]
    with pytest.raises(ConfigError, match=r"jia compares 4 .*only 3; use a wider"):
        jia.METHOD.initialize(small_config(method="jia"), model, None)


def test_windows_are_the_runs_own_and_of_different_features():
    """Kills: windows drawn with replacement, from the global generator, or the same
    for every seed.
    """
    model = build_network(small_config(method="jia"), 5, 5, 0)
    found = [
        jia.METHOD.initialize(small_config(method="jia", seed=seed), model, None)[
            "windows"
        ]
        for seed in (0, 0, 1)
    ]
    assert found[0].shape == (512, jia.WINDOW) and found[0].unique().tolist() == list(
        range(16)
    )
    assert all(len(set(window)) == jia.WINDOW for window in found[0].tolist())
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
