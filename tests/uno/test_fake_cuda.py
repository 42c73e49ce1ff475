"""No step waits for the GPU, and none mixes devices; nor do batches, evaluation and
scores.
"""

from contextlib import closing
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from pipelines.train import RayWorker
from tests.uno.fake_cuda import (
    CPU,
    DEVICE,
    TINY,
    FirstWorker,
    Waits,
    fake_cuda,
    train_steps,
)
from tests.uno.models import tiny_model
from tests.uno.small_run import small_config, small_sets
from uno.config import override
from uno.data import stream
from uno.data.files import Storage
from uno.data.sources import read_rows
from uno.data.splits import make_task
from uno.method import METHODS
from uno.model import build_network, forward
from uno.presets import preset
from uno.results import baselines, evaluate
from uno.results.classes import OutputClass
from uno.results.evaluate import Edits, count_outputs
from uno.results.infer import score
from uno.runs import run

pytestmark = pytest.mark.fakecuda
WORLDS = pytest.mark.parametrize("world_size", [1, 4])
EXTENDED = {
    "rotation": {"pretext.epochs": 1},
    "resnet18": {"model.encoder": "resnet18", "model.finetune": "last_stage"},
    "queue": {"objective.queue_size": 40},
    "rkd": {"objective.rkd_weight": 1.0},
    "iic": {"objective.iic_weight": 1.0, "objective.iic_view_weight": 1.0},
    "hard": {"objective.pseudo_labels": "hard", "objective.concat": False},
    "average logits": {
        "objective.aggregation": "average_logits",
        "model.overcluster_factor": 0,
    },
    "average labels": {"objective.aggregation": "average_pseudo_labels"},
    "prior": {"objective.class_prior": "kmeans", "model.prototype_init": "kmeans"},
    "gcd": {"data.setting": "gcd", "model.prototype_init": "kmeans"},
} | {name: {"method": name} for name in METHODS if name != "uno"}
EXTENDED["pim"] |= {"pim.steps": 2}  # of its start


def train_both_ends(name, world_size, device=DEVICE, **more):
    """The first step of a method and one of the last."""
    config = small_config(**TINY | EXTENDED[name] | more)
    phase = run.PRETEXT if name == "rotation" else run.DISCOVER
    train_steps(config, phase, world_size, (0, 17), device)


@WORLDS
@pytest.mark.parametrize("name", EXTENDED)
def test_the_first_and_the_last_step_of_a_method(name, world_size):
    """Its start, its memories once they are full, targets once they stand, what
    rises at its height.
    """
    train_both_ends(name, world_size)


@pytest.mark.parametrize("name", EXTENDED)
def test_the_same_under_autocast(name):
    """On the CPU, as the device without values has none. Kills: bfloat16 added to
    what float32 has begun.
    """
    train_both_ends(name, 1, CPU, compute__precision="bf16")


@pytest.mark.parametrize("recipe", ["paper", "v2"])
@pytest.mark.parametrize("name", ["cifar10", "imagenet", "photos", "digits"])
def test_the_steps_of_a_preset(name, recipe):
    """Index, augment, forward, Sinkhorn, loss, backward, update."""
    for phase in (run.PRETRAIN, run.DISCOVER):
        train_steps(override(preset(name, recipe), TINY), phase, 1)


@pytest.fixture
def streamed(tmp_path):
    """``streamed(device, world_size)``: its batches of crops that are made on the
    host.
    """
    config = small_config(**TINY | {"data.loading": "streaming", "compute.threads": 1})
    task = make_task(read_rows(config.data), config.data)

    def batches(device, world_size):
        train = stream.streaming_set(config, task, Storage(str(tmp_path))).to(device)
        plan = run.plans(config, *task.sizes, world_size)[run.DISCOVER]
        return closing(train.batches(config, plan, 0, world_size, 3))

    return batches


@WORLDS
def test_streamed_batches(streamed, world_size):
    """Crops made on the host become views on the device. Kills: labels whose copy
    waits, a process alone that asks its device for what it knows.
    """
    with fake_cuda(world_size) as mode, streamed(DEVICE, world_size) as batches:
        # several ask each other which images cannot be read
        mode.strict = world_size == 1
        batches(0)
        mode.strict = True
        batch = batches(1)
    assert [part.device for part in (*batch.views, batch.labels)] == [DEVICE] * 3


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_batches_for_a_gpu_lie_in_locked_pages(streamed, monkeypatch, device):
    """Kills: a copy that waits all the same, memory locked for no GPU."""
    pack = Mock(side_effect=RuntimeError("there is no GPU"))
    monkeypatch.setattr(stream, "pack", pack)
    with streamed(device, 1) as batches, pytest.raises(RuntimeError, match="no GPU"):
        batches(0)
    assert pack.call_args.args[-1] == (device == "cuda")


def edited(model: Any) -> Edits:
    """Its sixth output merged into its seventh, its eighth dropped, its heads
    aligned.
    """
    classes = [
        OutputClass(i, str(i), "known" if i < 5 else "novel", i) for i in range(10)
    ]
    classes[5] = replace(classes[5], into=6)
    classes[7] = replace(classes[7], into=None)
    return Edits(classes, torch.arange(5).expand(model.num_heads, 5).contiguous())


def test_evaluation_counts_without_waiting():
    """Of a merged, dropped and aligned model, too. Kills: counts read batch by
    batch, routes copied in.
    """
    config = small_config(**TINY)
    with fake_cuda(4) as mode:
        model = build_network(config, 5, 5, 0).to(DEVICE).eval()
        mode.strict = True
        for edits in (None, edited(model)):
            rows = small_sets()[1]["train"].batches(64, 0, 4)
            (counts,) = count_outputs(model, config, rows, 10, edits)
            assert {part.device for part in counts} == {DEVICE}


@pytest.mark.parametrize("setting", ["ncd", "gcd"])
def test_a_whole_evaluation_reads_back_where_it_may(storage, monkeypatch, setting):
    """Protocols, baselines and signs of trust: no device is mixed."""
    config, (train, sets) = small_config(**TINY, data__setting=setting), small_sets()
    with fake_cuda() as mode:
        model = build_network(config, 5, 5, 0).eval()
        monkeypatch.setattr(evaluate, "load_trained", lambda *_: (model, 0))
        monkeypatch.setattr(baselines, "load_weights_", lambda *_: True)
        values = evaluate.evaluate_run(
            config, storage, train.to(DEVICE), sets, 10, FirstWorker(1)
        )
    assert mode.reads
    assert "trust/kmeans/agreement" in values
    assert storage.exists("alignment.json")


@pytest.mark.parametrize("is_edited", [False, True])
def test_scores_of_predictions(tmp_path, is_edited):
    """One look at the device for each of the results of a batch. Kills: images
    scored on another device.
    """
    model = tiny_model(tmp_path)
    edits = edited(model.module) if is_edited else (model.classes, model.alignment)
    images = torch.zeros(6, 3, model.size, model.size, dtype=torch.uint8)
    with fake_cuda() as mode:
        on_device = replace(model, classes=edits[0], alignment=edits[1]).to(DEVICE)
        scores = on_device.score(images)
        assert mode.reads == len(scores)
        assert {part.device.type for part in scores} == {"cpu"}
        mode.strict = True
        logits = forward(on_device.module, images, model.config)
        found = score(logits, 0.1, 0, *edits)
        assert {part.device for part in found} == {DEVICE}


WAITS = {
    "mixed devices": lambda there: there + torch.ones(4),
    "host index": lambda there: there[torch.tensor([0, 1])],
    "item": lambda there: there.sum().item(),
    "mask": lambda there: there[there > 0],
    "cpu": lambda there: there.cpu(),
    "nonzero": lambda there: there.nonzero(),
    "blocking copy": lambda there: torch.ones(4).to(DEVICE),
    "numbers": lambda there: torch.tensor([1.0, 2.0], device=DEVICE),
    "copied to": lambda there: torch.zeros(4).copy_(there),
    "copied from": lambda there: there.copy_(torch.ones(4)),
}


@pytest.mark.parametrize("name", WAITS)
def test_what_waits_is_found(name):
    """The tests above can fail."""
    with fake_cuda() as mode, pytest.raises(Waits):
        there, mode.strict = torch.zeros(4, device=DEVICE), True
        WAITS[name](there)


def test_on_several_gpus_norms_are_over_all_workers(monkeypatch):
    """Kills: DDP around norms of a worker's own rows, replicas on the first GPU."""
    worker, wrap = object.__new__(RayWorker), Mock()
    worker.world_size, worker.device = 4, torch.device("cuda", 1)
    monkeypatch.setattr(nn.parallel, "DistributedDataParallel", wrap)
    worker.wrap(nn.Sequential(nn.BatchNorm2d(3)))
    ((norm,),) = wrap.call_args.args
    assert isinstance(norm, nn.SyncBatchNorm)
    assert wrap.call_args.kwargs["device_ids"] == [worker.device]
