"""A run directory: who may claim it, what it starts from, what it leaves."""

import json
import re

import pytest
import safetensors.torch
import torch
import torchvision
import yaml

from tests.uno.small_run import CPU, copied_tensors, fresh_state, small_config, small_sets, train_both
from uno.config import Config, dump_yaml, field_names, override, resumable
from uno.data.files import Storage
from uno.errors import ConfigError, StorageError
from uno.model import build_model
from uno.presets import PRESETS, preset
from uno.results.evaluate import evaluate_run
from uno.results.infer import load_classifier, save_model
from uno.runs import directory, run
from uno.runs.checkpoint import Checkpoint, save_checkpoint
from uno.train import LocalWorker

CONFIG = small_config()
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def storage(tmp_path) -> Storage:
    return Storage(str(tmp_path / "run"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Storage:
    """A run of both phases."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    storage = Storage(str(tmp_path_factory.mktemp("finished")))
    directory.open_run(CONFIG, storage, "print")
    train_both(CONFIG, storage)
    torch.set_num_threads(before)
    return storage


# ------------------------------------------------------------ open_run
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("recipe", ["paper", "v2"])
def test_the_same_config_opens_its_run_again(storage, name, recipe):
    """Kills: a value that YAML does not give back (1e-5 as text, tuples, None)."""
    config = preset(name, recipe)
    for _ in range(2):
        directory.open_run(config, storage, "print")
    assert override(Config(), directory.read_config_tree(storage)) == config


def test_other_settings_are_refused_with_their_keys(storage):
    """Kills: a run continued under other settings, keys not named, keys that do not matter refused."""
    directory.open_run(CONFIG, storage, "print")
    changed = small_config(objective__epsilon=0.1, discover__epochs=4)
    with pytest.raises(
        ConfigError, match=r"other settings: discover\.epochs, objective\.epsilon; use those, --fresh"
    ) as caught:
        directory.open_run(changed, storage, "print")
    assert caught.value.exit_code == 2
    with pytest.raises(ConfigError, match=r"\.\.\."):
        directory.open_run(preset("cifar10"), storage, "print")


def test_what_does_not_change_learning_may_differ(storage):
    """Kills: a resume refused for another device, place or logging interval."""
    directory.open_run(CONFIG, storage, "print")
    changes = {
        "output": "elsewhere", "compute.workers": 2, "compute.device": "cpu", "compute.threads": 3,
        "train.log_every": 7, "train.keep_checkpoints": 5, "train.checkpoint_every_epochs": 3,
        "train.eval_batch_size": 64,
    }  # fmt: skip
    free = {key for key in field_names() if resumable(key) and not key.startswith("compute.")}
    assert free == {key for key in changes if not key.startswith("compute.")}
    directory.open_run(override(CONFIG, changes), storage, "print")


def test_other_data_and_formats_are_refused(storage):
    """Kills: weights of one data set continued on another."""
    directory.open_run(CONFIG, storage, "print")
    with pytest.raises(ConfigError, match="trained on other data"):
        directory.open_run(CONFIG, storage, "other")
    facts = json.loads(storage.read("environment.json"))
    assert facts["data_fingerprint"] == "print" and "torch" in facts["versions"]
    storage.write("environment.json", json.dumps(facts | {"format_version": 99}).encode())
    with pytest.raises(ConfigError, match="format version 99, not 1"):
        directory.open_run(CONFIG, storage, "print")


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe", b"3"])
def test_damaged_files_of_a_run_are_one_line(storage, content):
    """Kills: tracebacks of json and yaml."""
    directory.open_run(CONFIG, storage, "print")
    storage.write("environment.json", content)
    with pytest.raises(ConfigError, match=r"environment\.json is damaged"):
        directory.open_run(CONFIG, storage, "print")
    storage.write("config.yaml", content)
    with pytest.raises(ConfigError, match=r"config\.yaml is damaged"):
        directory.open_run(CONFIG, storage, "print")


def test_a_directory_of_something_else_is_left_alone(storage):
    """Kills: a run written among somebody's files."""
    storage.write("thesis.tex", b"years of work")
    with pytest.raises(ConfigError, match=r"holds no run \(no config\.yaml\); .* choose another"):
        directory.open_run(CONFIG, storage, "print")
    assert storage.list() == ["thesis.tex"]
    with pytest.raises(ConfigError, match=r"is not a run directory: it has no config\.yaml"):
        directory.read_config_tree(storage)


def test_a_kill_while_claiming_does_not_block_the_directory(storage, monkeypatch):
    """Kills: a run that can never start because its directory is "not empty"."""
    write = Storage.write

    def killed(self, name, data):
        if name == "config.yaml":
            raise KeyboardInterrupt
        write(self, name, data)

    monkeypatch.setattr(Storage, "write", killed)
    with pytest.raises(KeyboardInterrupt):
        directory.open_run(CONFIG, storage, "print")
    monkeypatch.undo()
    directory.open_run(CONFIG, storage, "print")
    assert storage.read("config.yaml").decode() == dump_yaml(CONFIG)


# ------------------------------------------------------------ weights
def test_discovery_starts_from_the_pretrained_encoder_and_prototypes(finished):
    """Kills: fresh known prototypes, a fresh encoder, running statistics left behind."""
    pretrained = run.load_newest(finished, run.PRETRAIN).tensors
    model = build_model(CONFIG.model, 5, 5, seed=1)
    run.load_weights_(model, CONFIG, finished)
    for name, tensor in model.state_dict().items():
        if name.startswith(("encoder.", "known.")):
            assert torch.equal(tensor, pretrained[f"model/{name}"]), name


def test_weights_of_another_run(finished, storage):
    """Kills: this run's own checkpoint preferred, another number of known classes refused or half loaded."""
    config = small_config(model__weights=finished.uri)
    for num_known in (5, 3):
        model = build_model(config.model, num_known, 5, seed=1)
        known = model.known.weight.detach().clone()
        run.load_weights_(model, config, storage)
        pretrained = run.load_newest(finished, run.PRETRAIN).tensors
        assert torch.equal(model.encoder.conv1.weight, pretrained["model/encoder.conv1.weight"])
        assert torch.equal(known, model.known.weight) == (num_known == 3)
    with pytest.raises(ConfigError, match="another number of classes"):
        run.load_weights_(build_model(CONFIG.model, 3, 5, seed=1), CONFIG, finished)


def test_torchvision_weights(storage):
    """A state dict of torchvision's ResNet18 with its classifier. Kills: ``fc`` refused, keys ignored."""
    theirs = torchvision.models.resnet18()
    storage.write("resnet18.safetensors", safetensors.torch.save(theirs.state_dict()))
    source = storage.path("resnet18.safetensors")
    config = small_config(model__encoder="resnet18", model__stem="imagenet", model__weights=source)
    model = build_model(config.model, 5, 5, seed=1)
    run.load_weights_(model, config, storage)
    assert torch.equal(model.encoder.layer4[1].conv2.weight, theirs.layer4[1].conv2.weight)
    small_stem = override(config, {"model.stem": "small"})
    with pytest.raises(ConfigError, match=r"model\.weights: .* does not fit the encoder: .*conv1") as caught:
        run.load_weights_(build_model(small_stem.model, 5, 5, seed=1), small_stem, storage)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [None, b"", b"not safetensors", b"\xff" * 64])
def test_weights_that_cannot_be_read_are_one_line(storage, content):
    """Kills: a traceback of safetensors for the user's file."""
    source = storage.path("weights.safetensors")
    if content is not None:
        storage.write("weights.safetensors", content)
    config = small_config(model__weights=source)
    with pytest.raises(StorageError, match=re.escape(source)) as caught:
        run.load_weights_(build_model(config.model, 5, 5, seed=1), config, storage)
    assert "\n" not in str(caught.value)


def test_no_pretraining_is_an_error(storage):
    """Kills: discovery from a random encoder without a word."""
    with pytest.raises(StorageError, match="no pretraining checkpoint"):
        run.run_phase(CONFIG, run.DISCOVER, small_sets()[0], LocalWorker(CPU), storage)
    with pytest.raises(StorageError, match="run uno discover first"):
        run.load_trained(CONFIG, storage, 5, 5)


# ------------------------------------------------------------ results
def test_prototypes_are_normalised_before_evaluation(tmp_path):
    """The last step leaves them longer or shorter. Kills: prototypes not normalised by load_trained."""
    storage = Storage(str(tmp_path / "stretched"))
    state = fresh_state(CONFIG)
    with torch.no_grad():
        for head in (state.model.known, state.model.novel, state.model.over):
            head.weight.mul_(torch.rand(*head.weight.shape[:-1], 1) + 0.5)
    state.head_losses.copy_(torch.tensor([2.0, 1.0]))
    save_checkpoint(storage, run.DISCOVER, Checkpoint(1, copied_tensors(state), {}), "")
    model, best_head = run.load_trained(CONFIG, storage, 5, 5)
    assert best_head == 1 and not model.training
    for head in (model.known, model.novel, model.over):
        torch.testing.assert_close(head.weight.norm(dim=-1), torch.ones(head.weight.shape[:-1]))


def test_evaluation_has_all_protocols_and_baselines(finished):
    """Kills: a split or baseline left out, numbers that change from call to call."""
    train, sets = small_sets()
    values = evaluate_run(CONFIG, finished, train, sets, 10, LocalWorker(CPU))
    protocols = ["task_aware", *(f"task_agnostic_{name}" for name in ("official", "joint", "strict"))]
    for split in ("train", "test"):
        for group in ("known", "novel", "all"):
            for protocol in protocols:
                for which in ("avg", "best"):
                    assert 0 <= values[f"{split}/{group}/{protocol}/acc/{which}"] <= 1
    assert {"baseline/kmeans/novel/acc", "baseline/kmeans_pixels/novel/acc"} <= set(values)
    assert values["train/known/task_aware/acc/best"] > 0.5
    assert evaluate_run(CONFIG, finished, train, sets, 10, LocalWorker(CPU)) == values


def test_saved_model_is_what_is_evaluated(finished, tmp_path):
    """Kills: weights before normalisation, encoder keys with a prefix, classes out of order."""
    storage = Storage(str(tmp_path))
    storage.write("x", b"")
    names = ["zero", "one", "two", "three", "four"]
    model, best_head = run.load_trained(CONFIG, finished, 5, 5)
    written = save_model(CONFIG, finished, model, best_head, names)
    loaded = load_classifier(finished)
    assert (written.best_head, written.classes, written.model_hash) == (
        best_head,
        loaded.classes,
        loaded.model_hash,
    )
    encoder = safetensors.torch.load(finished.read("model/encoder.safetensors"))
    heads = safetensors.torch.load(finished.read("model/heads.safetensors"))
    assert set(encoder) == set(model.encoder.state_dict())
    weights = {f"encoder.{name}": tensor for name, tensor in encoder.items()} | heads
    for name, tensor in model.state_dict().items():
        assert torch.equal(weights[name], tensor)
    classes = json.loads(finished.read("model/classes.json"))
    assert classes["best_head"] == best_head
    assert [entry["name"] for entry in classes["classes"]] == names + [f"novel-{i}" for i in range(1, 6)]
    assert [entry["kind"] for entry in classes["classes"]] == ["known"] * 5 + ["novel"] * 5
    assert [entry["index"] for entry in classes["classes"]] == list(range(10))
    assert override(Config(), yaml.safe_load(finished.read("model/config.yaml"))) == CONFIG


def test_plans_do_not_depend_on_the_workers():
    """Kills: batch sizes rounded to the workers."""
    config = small_config(train__batch_size=24)
    assert run.plans(config, 100, 100, 1) == run.plans(config, 100, 100, 3) == run.plans(config, 100, 100, 0)
    with pytest.raises(ConfigError, match=r"do not divide by 5 workers|does not divide by 5 workers"):
        run.plans(config, 100, 100, 5)
