"""A run: what its phases start from, what it leaves."""

from itertools import product
from unittest.mock import Mock

import numpy as np
import pytest
import safetensors.torch
import torch
import yaml

from tests.uno.small_run import (
    assert_same,
    copied_tensors,
    fresh_state,
    small_config,
    small_sets,
    train_both,
)
from uno.config import Config, override
from uno.data.files import Storage
from uno.errors import ConfigError, StorageError
from uno.model import build_network, features_of
from uno.results.baselines import direction_clusters, score_clusters
from uno.results.classes import ModelClasses, first_classes
from uno.results.evaluate import evaluate_run
from uno.results.infer import (
    align_heads,
    decoder,
    load_classifier,
    predicted_novel,
    sample_logits,
    save_model,
)
from uno.results.metrics import PROTOCOLS
from uno.runs import directory, run
from uno.runs.checkpoint import Checkpoint, save_checkpoint
from uno.session.data import read_task
from uno.training import LocalWorker

CONFIG, WORKER = small_config(), LocalWorker(torch.device("cpu"))
NAMES = ["zero", "one", "two", "three", "four"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Storage:
    """A run of both phases."""
    storage = Storage(str(tmp_path_factory.mktemp("finished")))
    directory.begin_run(CONFIG, storage, "print")
    train_both(CONFIG, storage)
    return storage


@pytest.mark.parametrize(
    ("of_another_run", "num_known"), [(False, 5), (True, 5), (True, 3)]
)
def test_discovery_starts_from_pretrained_weights(
    finished, storage, of_another_run, num_known
):
    """Kills: fresh known prototypes, a fresh encoder, running statistics left
    behind.
    """
    config = small_config(model__weights=finished.uri) if of_another_run else CONFIG
    pretrained = run.load_newest(finished, run.PRETRAIN).tensors
    model = build_network(config, num_known, 5, seed=1)
    known = model.known.weight.detach().clone()
    assert run.load_weights_(
        model, config, storage if of_another_run else finished
    ) == (num_known == 5)
    for name, tensor in model.encoder.state_dict().items():
        assert torch.equal(tensor, pretrained[f"model/encoder.{name}"]), name
    assert torch.equal(
        model.known.weight,
        pretrained["model/known.weight"] if num_known == 5 else known,
    )
    with pytest.raises(ConfigError, match="another number of classes"):
        run.load_weights_(build_network(CONFIG, 3, 5, seed=1), CONFIG, finished)


def test_no_pretraining_is_an_error(storage):
    """Kills: discovery from a random encoder without a word."""
    with pytest.raises(StorageError, match="no pretraining checkpoint"):
        run.run_phase(CONFIG, run.DISCOVER, small_sets()[0], WORKER, storage)
    with pytest.raises(StorageError, match="run uno discover first"):
        run.load_trained(CONFIG, storage, 5, 5)


def test_prototypes_are_normalized_before_evaluation(storage):
    """The last step leaves them longer or shorter. Kills: prototypes not normalized
    by load_trained.
    """
    state = fresh_state(CONFIG)
    with torch.no_grad():
        for head in (state.model.known, state.model.novel, state.model.over):
            head.weight.mul_(torch.rand(*head.weight.shape[:-1], 1) + 0.5)
    state.head_losses.copy_(torch.tensor([2.0, 1.0]))
    save_checkpoint(storage, run.DISCOVER, Checkpoint(1, copied_tensors(state), ""))
    model, best_head = run.load_trained(CONFIG, storage, 5, 5)
    assert best_head == 1 and not model.training
    for head in (model.known, model.novel, model.over):
        lengths = head.weight.norm(dim=-1)
        torch.testing.assert_close(lengths, torch.ones_like(lengths))


def kmeans_by_hand(storage: Storage) -> float:
    """Return the accuracy of k-means on the novel rows' pretrained features."""
    _, sets = small_sets()
    model = build_network(CONFIG, 5, 0, 0)
    run.load_weights_(model, CONFIG, storage)
    novel = sets["train"].where(sets["train"].truth >= 5)
    features = features_of(model.eval(), novel.images[novel.index], CONFIG)
    clusters = direction_clusters(features, 5, CONFIG.seed)
    return score_clusters(novel.truth, clusters, 5)["acc"]


def test_evaluation_has_all_protocols_and_baselines(finished):
    """Kills: a split or baseline left out, numbers that change from call to call."""
    train, sets = small_sets()
    values = evaluate_run(CONFIG, finished, train, sets, 10, WORKER)
    groups = ("train", "test"), ("known", "novel", "all")
    for key in product(*groups, PROTOCOLS, ("acc",), ("avg", "best")):
        assert 0 <= values["/".join(key)] <= 1
    found = {key for key in values if key.startswith("baseline/") and "acc" in key}
    assert found == {"baseline/kmeans/novel/acc", "baseline/spectral/novel/acc"}
    assert values["baseline/kmeans/novel/acc"] == pytest.approx(
        kmeans_by_hand(finished), abs=1e-9
    )
    assert values["train/known/task_aware/acc/best"] > 0.5
    assert evaluate_run(CONFIG, finished, train, sets, 10, WORKER) == values


def test_pretraining_sees_large_views_only(storage, monkeypatch):
    """Kills: the small crops of recipe v2 in pretraining, large crops that depend on
    there being some.
    """
    fit = Mock()
    monkeypatch.setattr(run, "fit", fit)
    monkeypatch.setattr(run, "load_weights_", lambda *_: True)
    for small, phase in ((0, run.PRETRAIN), (2, run.PRETRAIN), (2, run.DISCOVER)):
        config = small_config(augment__small__num_views=small, augment__small__size=4)
        run.run_phase(config, phase, small_sets()[0], WORKER, storage)
    plain, v2, discovery = (call.args[3](0).views for call in fit.call_args_list)
    assert (len(v2), len(discovery)) == (2, 4)
    torch.testing.assert_close(v2, plain, rtol=0, atol=0)


@pytest.mark.parametrize("setting", ["ncd", "gcd"])
def test_an_evaluation_aligns_the_heads(finished, setting):
    """By features that it has: whoever saves the model has nothing to decode. Kills:
    other rows or heads than those that the images say, in a mixed pile rows that are
    taken for known, another best head's.
    """
    config, (train, sets) = override(CONFIG, {"data.setting": setting}), small_sets()
    evaluate_run(config, finished, train, sets, 10, WORKER)
    model, best_head = run.load_trained(config, finished, 5, 5)
    saved = save_model(config, finished, model, best_head, NAMES)
    task = read_task(config.data)
    decode = decoder(saved, task.rows, threads=1)
    unlabeled = np.flatnonzero(task.is_train & (task.labels < 0))
    _, logits = sample_logits(saved, decode, unlabeled, len(unlabeled))
    known, novel = logits.known[0], logits.novel[0]
    if setting == "gcd":
        novel = novel[:, predicted_novel(known, novel, best_head)]
    assert torch.equal(saved.alignment, align_heads(novel, best_head))
    assert not torch.equal(saved.alignment[1 - best_head], saved.alignment[best_head])
    assert save_model(config, finished, model, 1 - best_head, NAMES).alignment is None


def test_saved_model_is_what_is_evaluated(finished):
    """Kills: weights before normalization, encoder keys with a prefix, classes out
    of order.
    """
    model, best_head = run.load_trained(CONFIG, finished, 5, 5)
    written = save_model(CONFIG, finished, model, best_head, NAMES)
    assert written.model_hash == load_classifier(finished).model_hash
    encoder = safetensors.torch.load(finished.read("model/encoder.safetensors"))
    heads = safetensors.torch.load(finished.read("model/heads.safetensors"))
    encoder = {f"encoder.{name}": tensor for name, tensor in encoder.items()}
    assert_same(model.state_dict(), encoder | heads)
    stored = ModelClasses.parse(finished.read("model/classes.json"))
    assert stored.classes == first_classes(NAMES, 5)
    assert stored.best_head == written.best_head == best_head
    tree = yaml.safe_load(finished.read("model/config.yaml"))
    assert override(Config(), tree) == CONFIG
