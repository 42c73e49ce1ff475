"""No step of a preset waits for the GPU, and none mixes devices; presets of equal steps are run once."""

import pytest

from tests.uno.fake_run import TINY, train_steps
from uno.config import dump_yaml, override
from uno.presets import PRESETS, preset
from uno.runs import run

pytestmark = [pytest.mark.fakecuda, pytest.mark.filterwarnings("ignore:Grad strides")]  # of 1 x 1 weights
SAME = override(preset("cifar10"), TINY)
SAME = {name: getattr(SAME, name) for name in ("preset", "recipe", "data", "pretrain", "discover")}


def tiny(name, recipe):
    return override(preset(name, recipe), TINY)


def steps_of(name, recipe):
    """What two presets of equal steps have in common."""
    config = tiny(name, recipe)
    size = {"data": SAME["data"].model_copy(update={"store_size": config.data.store_size})}
    return dump_yaml(config.model_copy(update=SAME | size))


RECIPES = {steps_of(name, recipe): (name, recipe) for recipe in ("paper", "v2") for name in reversed(PRESETS)}


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize(("name", "recipe"), RECIPES.values())
def test_the_steps_of_a_preset(name, recipe, world_size):
    """Index, augment, forward, Sinkhorn, loss, backward, update."""
    for phase in (run.PRETRAIN, run.DISCOVER):
        train_steps(tiny(name, recipe), phase, world_size)
