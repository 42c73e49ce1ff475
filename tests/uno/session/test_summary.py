"""What a run says before it begins."""

from tests.uno.small_run import small_config
from uno.config import override
from uno.presets import preset
from uno.session.summary import describe_run


def test_a_run_names_its_encoder_its_weights_and_its_epochs():
    model, training = describe_run(small_config(), ("pretrain", "discover"))
    assert "resnet_small, fully trained, 8 px" in model and "random" in model
    assert "3 epochs of pretrain, 3 epochs of discover" in training


def test_own_images_without_weights_get_a_hint():
    config = override(preset("scratch"), {"data.source": "folder:photos"})
    *_, hint = describe_run(config, ("discover",))
    assert "--weights pretrained" in hint
