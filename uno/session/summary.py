"""Describe for the console what a run will do."""

from collections.abc import Iterator

from uno.config import Config, flatten, to_dict
from uno.data import features
from uno.presets import is_custom_data, preset
from uno.results.export import origin
from uno.session.resources import trains_on_features
from uno.text import plural

TRAINED = {
    "full": "fully trained",
    "last_stage": "last stage trained",
    "none": "frozen",
}
"""Values of ``model.finetune``, for the console."""


def describe_run(config: Config, phases: tuple[str, ...]) -> Iterator[str]:
    """Describe on which encoder and for how long a run will train.

    Args:
        config: The configuration of the run.
        phases: The names of the phases that will be trained.

    Yields:
        Lines for the console: the encoder with its weights, the epochs of each phase,
        and a hint if no pretrained weights are used.
    """
    model = config.model
    size = "vectors" if model.takes_vectors else f"{features.side(config)} px"
    yield (
        f"model: {model.encoder}, {TRAINED[model.finetune]}, {size};"
        f" weights: {origin(model)}"
    )
    epochs = ", ".join(
        f"{plural(num, 'epoch')} of {name}"
        for name in phases
        if (num := getattr(config, name).epochs)
    )
    if not epochs:
        steps = f"; method {config.method} trains nothing"
    elif model.takes_vectors:
        steps = f", {epochs} on vectors with noise, or with given views"
    elif trains_on_features(config) and (views := config.augment.num_cached_views):
        steps = f", {epochs} on {views} cached views per image"
    else:
        steps = f", {epochs}"
    yield f"training: preset {config.preset}{steps}"
    if model.weights is None and is_custom_data(flatten(to_dict(config))):
        name = preset("photos").model.encoder
        yield (
            "hint: no pretrained weights; for better results --weights pretrained"
            f" ({name}, preset photos)"
        )
