"""A sweep that takes seconds: 200 digits, a network of width 4, two epochs."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pipelines.options import parse
from tests.pipelines.small import write_weights
from tests.uno.data.builders import load_resident
from tune import FOLDS, records
from tune.driver import open_sweep, sweep_options
from tune.records import PartStorage
from tune.score import Fold, SweepData, make_folds, open_folds, sweep_data
from tune.sweep import TUNE
from tune.trial import SweepOptions, run_trial
from uno.config import Config
from uno.data.files import Storage
from uno.runs.lock import ClaimedStorage, lock_run
from uno.training import LocalWorker

TINY = (
    "--data",
    "digits",
    "--data.limit",
    "200",
    "--model.width",
    "4",
    "--model.hidden-dim",
    "16",
    "--model.projection-dim",
    "8",
    "--train.batch-size",
    "32",
    "--pretrain.epochs",
    "1",
    "--discover.epochs",
    "2",
    "--pretrain.warmup-epochs",
    "0",
    "--discover.warmup-epochs",
    "0",
    "--compute.threads",
    "1",
    "--device",
    "cpu",
)
CPU = torch.device("cpu")
NO_DATA = "0" * 64


def tiny_options(output: Path | str, *more: str) -> SweepOptions:
    """Options of ``uno tune`` on the tiny set."""
    return sweep_options(parse([*TINY, "--output", str(output), *more], TUNE))


def tiny_data(config: Config, relabel: Any = None) -> SweepData:
    """What trials see; ``relabel`` changes the true labels (N,) that only evaluation
    may read.
    """
    task, images, ok, _ = load_resident(config.data, threads=1)
    if relabel is not None:
        object.__setattr__(task, "eval_labels", relabel(task.eval_labels.copy()))
    return sweep_data(task, images.numpy(), ok)


def folds_of(
    data: SweepData, config: Config, score: str = FOLDS, num_folds: int = 2
) -> list[Fold]:
    """The problems of a trial with their images."""
    rows = make_folds(data, score, num_folds, config.seed)
    return open_folds(data.images, rows, config, Storage("mock:///trial"))


def frozen_options(folder: Path, *more: str) -> SweepOptions:
    """Options of a sweep in ``folder``/s on the features of a frozen encoder; its
    weights and the cache are in ``folder``, too.
    """
    weights = folder / "encoder.safetensors"
    torch.manual_seed(0)
    write_weights(weights, tiny_options(folder).config.model)
    words = [
        *("--model.finetune", "none", "--weights", str(weights)),
        *("--model.prototype_init", "kmeans", "--objective.class_prior", "kmeans"),
        *("--augment.num-cached-views", "3", "--compute.cache", str(folder / "cache")),
    ]
    return tiny_options(folder / "s", *words, *more)


@contextmanager
def claimed(folder: Path) -> Iterator[ClaimedStorage]:
    """A directory under a claim."""
    with lock_run(Storage(str(folder)), on_wait=print) as mine:
        yield mine.storage


def run_tiny(
    options: SweepOptions,
    data: SweepData,
    storage: ClaimedStorage,
    overrides: dict[str, Any] | None = None,
    report: Any = lambda line: None,
) -> list[dict[str, Any]]:
    """Trial 0 in this process, without Ray; its epochs without the clock."""
    rows = make_folds(
        data, options.score, options.folds, options.config.seed, options.hide
    )
    folds = open_folds(
        data.images, rows, options.config, PartStorage(storage, records.trial_name(0))
    )
    trial = records.Trial(0, overrides or {}, records.read_epochs(storage, 0))
    run_trial(trial, options, folds, 2, LocalWorker(CPU), storage, report)
    lines = records.read_epochs(storage, 0)
    return [
        {k: v for k, v in line.items() if not k.endswith("seconds")} for line in lines
    ]


def fake_sweep(
    folder: Path,
    options: SweepOptions,
    trials: Sequence[dict[str, Any]],
    num_epochs: int = 3,
    fingerprint: str = NO_DATA,
) -> Storage:
    """The directory of a sweep that never ran: ``trials`` hold overrides, scores,
    status, reason.
    """
    storage = Storage(str(folder))
    open_sweep(options, storage, fingerprint, num_epochs)
    for index, trial in enumerate(trials):
        name = records.trial_name(index)
        storage.write(
            f"{name}/trial.json", json.dumps({"overrides": trial["overrides"]}).encode()
        )
        for epoch, score in enumerate(trial.get("scores", ()), start=1):
            line = {
                "epoch": epoch,
                "score": score,
                "loss": 1.0,
                "seconds": 2.0,
                "cpu_seconds": 1.0,
            }
            line |= trial.get("line", {})
            storage.append(f"{name}/epochs.jsonl", (json.dumps(line) + "\n").encode())
        if trial.get("status"):
            result = {"status": trial["status"], "reason": trial.get("reason", "")}
            storage.write(f"{name}/result.json", json.dumps(result).encode())
    return storage
