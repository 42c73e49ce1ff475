"""Spaces: every key and bound is checked against the schema, and draws are functions
of (seed, index).
"""

import pytest

from tests.uno.data.builders import failure
from tune import spaces
from tune.spaces import SPACES, Domain
from uno.config import override
from uno.presets import PRESETS, preset

DIGITS = preset("digits")
UNO, FULL = (spaces.load_space(name, preset("cifar10")) for name in ("uno", "full"))


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("base", PRESETS)
def test_named_spaces_fit_every_preset(name, base):
    config = preset(base)
    space = spaces.load_space(name, config)
    for index in range(20):
        drawn = spaces.draw(space, 0, index)
        assert spaces.current(space, override(config, drawn)) == drawn


def test_named_spaces():
    """The digits take no resized crops: searching their scale would only waste
    trials.
    """
    keys, all_keys = ({domain.key for domain in space} for space in (UNO, FULL))
    assert keys == {
        "objective.epsilon",
        "objective.temperature",
        "model.num_heads",
        "model.overcluster_factor",
    }
    assert all(domain.reason for domain in FULL)
    of_digits = {domain.key for domain in spaces.load_space("full", DIGITS)}
    assert all_keys - of_digits == {"augment.large.crop_scale"}


EPSILON, HEADS = "objective.epsilon", "model.num_heads"


@pytest.mark.parametrize(
    ("key", "entry", "words"),
    [
        ("objective.epsilonn", "{low: 0.1, high: 0.2}", "'objective.epsilon'"),
        ("objective", "{low: 0.1, high: 0.2}", "section"),
        (
            EPSILON,
            "{low: 0.0, high: 0.2}",
            "objective.epsilon: Input should be greater",
        ),
        (EPSILON, "{low: 0.1, high: 20.0}", "objective.epsilon: Input should be less"),
        (EPSILON, "{low: 0.2, high: 0.1}", "low 0.2 is not below high 0.1"),
        (EPSILON, "{low: 0.1}", "needs choices, or the numbers low and high"),
        (EPSILON, "{low: 0.1, high: .inf}", "finite"),
        (EPSILON, "{low: false, high: 0.2}", "low: must be a number, not false"),
        (EPSILON, "{low: a, high: b}", "low: Input should be a valid number"),
        (EPSILON, "{low: 0.1, high: 0.2, choices: [0.1]}", "either"),
        (EPSILON, "{low: 0.1, high: 0.2, scale: cubic}", "'linear', 'log' or 'int'"),
        (
            EPSILON,
            "{lo: 0.1, high: 0.2}",
            "expected KEY: {low, high, scale, choices, reason}",
        ),
        (EPSILON, "{choices: []}", "needs choices"),
        (EPSILON, "{choices: 0.1}", "choices: Input should be a valid tuple"),
        ("discover.min_lr", "{low: 0.0, high: 0.1, scale: log}", "log scale"),
        (HEADS, "{low: 2, high: 4.5, scale: int}", "whole"),
        (
            HEADS,
            "{low: 2, high: 64, scale: int}",
            "model.num_heads: Input should be less",
        ),
        ("model.hidden_dim", "{low: 512, high: 2048}", "valid integer"),
        (
            HEADS,
            "{low: 1, high: 8}",
            "model.num_heads: Input should be a valid integer",
        ),
        (HEADS, "{choices: [2, many]}", "model.num_heads"),
        ("data.source", "{choices: [digits]}", "cannot be searched"),
        ("seed", "{low: 0, high: 5, scale: int}", "cannot be searched"),
        ("discover.epochs", "{low: 1, high: 5, scale: int}", "cannot be searched"),
        ("compute.num_workers", "{low: 0, high: 2, scale: int}", "cannot be searched"),
        ("model.weights", "{choices: [a, b]}", "cannot be searched"),
    ],
)
def test_a_bad_domain_is_one_line_naming_it(tmp_path, key, entry, words):
    path = tmp_path / "mine.yaml"
    path.write_text(f"{key}: {entry}\n")
    said = failure(spaces.load_space, str(path), DIGITS)
    assert words in said and key in said


def test_a_user_space_from_yaml(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "objective.epsilon: {scale: log, low: 0.02, high: 0.2, reason: why not}\n"
        "model:\n  num_heads: {choices: [2, 4]}\n"
        # text in YAML 1.1
        "discover.weight_decay: {scale: log, low: 1e-5, high: 1e-3}\n"
        "augment.large.crop_scale: {choices: [[0.2, 1.0], [0.5, 1.0]]}\n"
    )
    space = spaces.load_space(str(path), DIGITS)
    assert space == (
        Domain("objective.epsilon", 0.02, 0.2, "log", reason="why not"),
        Domain("model.num_heads", choices=(2, 4)),
        Domain("discover.weight_decay", 1e-5, 1e-3, "log"),
        Domain("augment.large.crop_scale", choices=((0.2, 1.0), (0.5, 1.0))),
    )
    assert spaces.from_tree(spaces.to_tree(space)) == space


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "mine.yaml: the search space is empty"),
        ("- 1\n", "mine.yaml"),
        ("a: &a [1]\nb: *a\n", "mine.yaml"),
    ],
)
def test_a_file_that_is_no_space_is_refused(tmp_path, text, says):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    assert says in failure(spaces.load_space, str(path), DIGITS)


def test_draws_depend_on_seed_and_index_alone():
    assert spaces.draw(UNO, 3, 7) == spaces.draw(UNO, 3, 7)
    many = [spaces.draw(UNO, 0, index) for index in range(300)]
    assert len({tuple(d.values()) for d in many}) > 250
    for domain in UNO:
        values = [d[domain.key] for d in many]
        if domain.choices:
            assert set(values) == set(domain.choices)
        else:
            assert domain.low <= min(values) and max(values) <= domain.high
        assert spaces.draw(UNO, 1, 0) != spaces.draw(UNO, 0, 0)
    assert {d["model.num_heads"] for d in many} == set(range(2, 9))


@pytest.mark.parametrize(
    ("domain", "value", "position"),
    [
        (Domain("discover.weight_decay", 1e-5, 1e-1, "log"), 1e-3, 0.5),
        (Domain("discover.base_lr", 0.1, 0.5), 0.2, 0.25),
        (Domain("model.num_heads", 2, 8, "int"), 8, 1),
        pytest.param(UNO[0], 5.0, 1, id="above a range"),
        pytest.param(UNO[2], 1, 0, id="below a range"),
        pytest.param(UNO[1], 0.12, 0.625, id="between the choices 0.1 and 0.14"),
        (Domain("discover.weight_decay", 1e-5, 1.0, "log"), 0.0, 0),
        (Domain("model.num_heads", choices=(4, 2, 1)), 3, 0.25),
        (Domain("model.num_heads", scale="log", choices=(0, 1, 3)), 2, 0.75),
    ],
)
def test_charts_show_values_on_the_scale_of_their_domain(domain, value, position):
    """Values outside are at its edge or between two choices."""
    assert domain.position(value) == pytest.approx(position)
