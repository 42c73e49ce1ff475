"""What all methods have in common: settings, learning, resume, frozen encoders."""

import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import normalize

from tests.uno.methods import toy
from tests.uno.small_run import (
    HERE,
    batches_of,
    check_resumes,
    copied_tensors,
    fresh_state,
    small_config,
    step_of,
)
from uno.config import Config
from uno.data.files import Storage
from uno.data.memory import TrainSet
from uno.encoders.build import build_encoder
from uno.errors import ConfigError
from uno.method import METHODS, default_settings, load
from uno.methods.pairs import PairSimilarity
from uno.model import build_network
from uno.runs import DISCOVER, PRETRAIN, run
from uno.runs.checkpoint import checkpoint_steps

FROZEN = {
    "model__finetune": "none",
    "augment__small__num_views": 0,
    "augment__num_cached_views": 3,
}


def config_of(**changes) -> Config:
    return small_config(**FROZEN | {"augment__large__num_views": 2} | changes)


def feature_set() -> TrainSet:
    """60 labeled and 60 unlabeled rows of ten classes that are easily told apart, in
    four views.
    """
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(10, 1, 16, generator=generator)
    truth = torch.arange(120) % 10
    rows = centers[truth] + 0.3 * torch.randn(120, 4, 16, generator=generator) + 1
    known = truth < 5
    return TrainSet(rows[known], truth[known], rows[~known], 5, 5)


@pytest.mark.parametrize(
    ("method", "preset", "expected"),
    [
        ("uno", "cifar100_20", {}),
        ("rs", "cifar10", {}),
        ("rs", "cifar100_20", {"rs.consistency_weight": 50.0, "rs.rampup": 0.75}),
        (
            "dtc",
            "cifar100_50",
            {"dtc.warmup": 30 / 130, "dtc.update_interval": 10 / 130},
        ),
        ("dtc", "imagenet", {"dtc.consistency_weight": 100, "dtc.warmup": 10 / 70}),
        ("simgcd", "cifar100_50", {"simgcd.epsilon": 4.0}),
        ("rs", "photos", {"model.prototype_init": "random"}),
        ("clustering", "digits", {"discover.epochs": 0}),
    ],
)
def test_a_method_brings_its_authors_constants(method, preset, expected):
    """Kills: constants of CIFAR10 on CIFAR100."""
    settings = default_settings(method, preset)
    assert settings.items() >= expected.items()
    assert settings.get("method", "uno") == method
    assert expected or not settings.keys() - {"method"}


@pytest.mark.parametrize("method", sorted({*METHODS} - {"uno", "ncl", "pim"}))
def test_steps_lower_the_loss(method):
    """Kills: a sign, a loss without gradient."""
    config = small_config(method=method)
    if hasattr(config.method_options, "rampup"):
        config = small_config(method=method, **{f"{method}__rampup": 0.0})
    state, batch, step = fresh_state(config), batches_of(config)(0), step_of(config)
    losses = [float(step(state, batch, config, 0.05)) for _ in range(20)]
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "options", "stops", "kept"),
    [
        ("uno", {}, (4, 5, 11), ()),
        (
            "uno",
            {"objective__queue_size": 40, "objective__rkd_weight": 0.1},
            (4, 11),
            ("extra/queue",),
        ),
        (
            "uno",
            {"model__finetune": "last_stage", "model__encoder_lr_factor": 0.3},
            (2, 9),
            ("optimizer/encoder.layer3.0.conv1.weight/momentum_buffer",),
        ),
        (
            "dtc",
            {"discover__epochs": 4},
            (3, 14),
            ("extra/targets", "extra/probabilities"),
        ),
        (
            "ncl",
            {"pretrain__epochs": 0, "discover__epochs": 2},
            (9,),
            ("extra/memory",),
        ),
        (
            "jia",
            {"pretrain__epochs": 0, "discover__epochs": 1},
            (3,),
            ("extra/windows",),
        ),
        ("openmix", {"pretrain__epochs": 0, "discover__epochs": 1}, (3,), ()),
    ],
)
def test_a_stopped_run_resumes_to_the_bit(tmp_path, method, options, stops, kept):
    """Kills: discovery from other weights than the pretrained ones after a resume; a
    queue or a memory that is not stored; k-means or windows anew after a resume; draws
    that go on from a generator.
    """
    config = small_config(method=method, **options)
    tensors = check_resumes(config, tmp_path, stops)
    assert all(tensors[name].any() for name in kept)


@pytest.mark.parametrize("method", ["dtc", "pim", "simgcd", "clustering"])
def test_fewer_unlabeled_rows_than_novel_classes_are_one_line(method):
    """Kills: a traceback of k-means."""
    few = replace(feature_set(), unlabeled_images=torch.zeros(4, 4, 16))
    config = config_of(method=method)
    model = build_network(config, 5, 5, 0)
    with pytest.raises(ConfigError, match=rf"method {method} needs .*5"):
        load(method).initialize(config, model, few)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns_with_its_heads_alone(method):
    """Kills: a method that is refused, an encoder that moves, a part of the head that
    never learns, a hidden layer on every feature of a wide encoder.
    """
    few_steps = {"pim__steps": 20} if method == "pim" else {}
    config, train = config_of(method=method, **few_steps), feature_set()
    state, batches = fresh_state(config, train=train), batches_of(config, train=train)
    state.step = 9
    if "memory" in state.extra:
        state.extra["memory"] += 0.1
    before = copied_tensors(state)
    for n in range(2):
        assert step_of(config)(state, batches(n), config, 0.1).isfinite()
    # the encoder is frozen, and the adapter is chosen before training
    model = {name: t for name, t in copied_tensors(state).items() if "model/" in name}
    moved = {name for name, t in model.items() if not torch.equal(t, before[name])}
    assert moved == {name for name in model if not re.search("encoder|adapter", name)}
    known = state.model.eval().heads(train.labeled_images[:, 0]).known[0].argmax(dim=1)
    # at the means of the classes
    assert method != "dtc" or torch.equal(known, train.labels)
    assert PairSimilarity(1280).output.in_features == 2048


@pytest.mark.parametrize("method", ["ncl", "jia"])
def test_a_layer_stands_for_the_last_stage(method):
    """The identity at first; then the objective is that of its output. Kills: contrast,
    memories or pairs of the features themselves, which nothing moves.
    """
    configs, train = (
        (config_of(method=method), small_config(method=method)),
        feature_set(),
    )
    frozen, whole = (fresh_state(config, train=train) for config in configs)
    features = train.unlabeled_images[:9, :2].transpose(0, 1)
    head = frozen.model.novel
    torch.testing.assert_close(head(features[0]), head.prototypes(features[0]))
    layer = torch.nn.Linear(16, 16)
    head.layer.load_state_dict(layer.state_dict())
    assert not torch.allclose(
        head(features[0]), head.prototypes(features[0]), atol=0.01
    )
    labels = torch.tensor(toy.LABELS)
    logits = toy.random_logits(9, 5, 5, 16)._replace(features=features)
    mapped = logits._replace(features=layer(features).detach())
    for name in frozen.extra.keys() & {"memory", "labeled_memory"}:
        rows = train.labeled_images[: len(frozen.extra[name]), 0]
        frozen.extra[name] = whole.extra[name] = normalize(rows, dim=1)
    frozen.step = whole.step = 9
    found = toy.step_on(configs[0], logits, labels, frozen)
    assert found == pytest.approx(
        toy.step_on(configs[1], mapped, labels, whole), rel=1e-5
    )
    other = toy.step_on(configs[0], mapped, labels, frozen)
    assert found != pytest.approx(other, rel=1e-3)
    assert head.layer.weight.grad.abs().sum() > 0


def test_the_teacher_of_rkd_is_a_known_head_on_the_features(tmp_path):
    """On features of an encoder whose file knows no class. Kills: an untrained teacher,
    one that starts the student.
    """
    path = tmp_path / "encoder.safetensors"
    save_file(build_encoder(small_config().model).state_dict(), path)
    rkd = config_of(
        model__weights=str(path),
        objective__rkd_weight=0.1,
        pretrain__epochs=8,
        discover__epochs=1,
    )
    train, whole = feature_set(), Storage(str(tmp_path / "whole"))
    assert run.list_phases(rkd) == (PRETRAIN, DISCOVER)
    run.run_phase(rkd, PRETRAIN, train, HERE, whole)
    state = run.run_phase(rkd, DISCOVER, train, HERE, whole)
    taught = state.teacher([train.labeled_images[:, 0]]).known[0].argmax(dim=1)
    assert (taught == train.labels).float().mean() > 0.95 and checkpoint_steps(
        whole, PRETRAIN
    )
    plain = config_of(model__weights=rkd.model.weights, discover__epochs=1)
    other = run.run_phase(
        plain, DISCOVER, train, HERE, Storage(str(tmp_path / "plain"))
    )
    assert other.teacher is None and not torch.equal(
        other.model.known.weight, state.model.known.weight
    )
