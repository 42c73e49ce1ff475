"""A profile of some steps, and what looks for NaN."""

import json
import math
from pathlib import Path

import pytest
import torch

from tests.uno.small_run import (
    CPU,
    assert_same,
    copied_tensors,
    small_config,
    small_sets,
)
from tests.uno.test_training import discover, failing_at
from uno.data.files import Storage
from uno.errors import ConfigError, NumericsError
from uno.runs import run
from uno.training import LocalWorker, write_profile


def pretrain(config, storage, worker=None):
    return copied_tensors(
        run.run_phase(
            config, run.PRETRAIN, small_sets()[0], worker or LocalWorker(CPU), storage
        )
    )


@pytest.mark.parametrize("where", ["local", "remote"])
def test_a_profile_is_read_back_and_changes_no_number(tmp_path, where):
    """Two of nine steps. Kills: a trace of every step, of none, or of the last one
    missing; other weights.
    """
    storage = Storage(str(tmp_path / "run") if where == "local" else "mock:///run")
    config = small_config(train__profile="3:5")
    assert_same(
        pretrain(config, storage),
        pretrain(small_config(), Storage(str(tmp_path / "plain"))),
    )
    trace = json.loads(storage.read("profile/pretrain.json"))["traceEvents"]
    updates = [e for e in trace if e.get("name", "").startswith("Optimizer.step")]
    assert len(updates) == 2 and any(
        e.get("name") == "aten::convolution_backward" for e in trace
    )
    assert "aten::convolution_backward" in storage.read("profile/pretrain.txt").decode()


def test_a_profile_to_the_end_and_on_other_ranks(tmp_path):
    """Kills: steps that are traced and never written, a trace of every rank."""
    for rank in (0, 1):
        worker = LocalWorker(CPU)
        worker.rank = rank
        storage = Storage(str(tmp_path / str(rank)))
        discover(
            storage, small_config(train__profile="8:99"), max_steps=9, worker=worker
        )
        assert bool(storage.list("profile")) == (rank == 0)
    for bad in ("5", "5:5", "9:2", "-1:3", "a:b"):
        with pytest.raises(ConfigError, match=r"train: profile must be START:END"):
            small_config(train__profile=bad)


@pytest.mark.filterwarnings("ignore:Error detected in")
def test_an_anomaly_is_named_at_its_step(tmp_path):
    """Kills: a switch that nothing reads, a traceback in the place of a line, steps
    skipped as usual.
    """

    def step(state, *rest):
        if state.step == 7:
            state.model.encoder.conv1.weight.data[0] = math.nan
        return failing_at([])(state, *rest)

    config = small_config(compute__detect_anomaly=True)
    with pytest.raises(
        NumericsError,
        match=r"discover step 7: Function '\w+Backward0' returned nan values",
    ):
        discover(Storage(str(tmp_path)), config, step=step)


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_on_a_gpu_there_is_a_snapshot_of_its_memory(tmp_path, monkeypatch):
    """With PyTorch's recorder stood in for. Kills: a recorder that is left on, one
    that runs on the CPU.
    """
    asked = []

    def dump(path):
        asked.append("dump")
        Path(path).write_bytes(b"snapshot")

    memory = torch.cuda.memory
    monkeypatch.setattr(
        memory,
        "_record_memory_history",
        lambda enabled="all", **_: asked.append(enabled),
    )
    monkeypatch.setattr(memory, "_dump_snapshot", dump)
    for kind, expected in (("cpu", []), ("cuda", ["all", "dump", None])):
        storage = Storage(str(tmp_path / kind))
        with write_profile("discover", LocalWorker(torch.device(kind)), storage):
            torch.ones(3) + 1
        assert asked == expected and storage.find("profile/discover.json")
        assert storage.find("profile/discover.pickle") == (
            b"snapshot" if expected else None
        )
