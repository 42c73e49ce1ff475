"""A run whose ranks somebody else has started, one process each: ``torchrun``.
Without Ray.
"""

import inspect
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout, suppress
from typing import Any

import torch
from torch import nn

from uno import collectives
from uno.config import Config, override, to_dict
from uno.data.files import Storage
from uno.data.splits import Task
from uno.errors import ConfigError, StorageError, UnoError
from uno.results.evaluate import evaluate_run
from uno.runs import run
from uno.runs.hardware import local_device, num_threads
from uno.runs.lock import ClaimedStorage
from uno.session.console import on_stop
from uno.session.data import Show, config_for_readable_rows, open_sets, read_task
from uno.session.place import STOPPING, Place, TrainingJob
from uno.session.resources import Room, on_features
from uno.session.settings import LAUNCHED

STOP_LOOK_S = 2.0  # between two looks whether to stop
GPU_VOTE_STEPS = 10  # between two votes of the ranks on GPUs whether to stop
POLL_S = 0.1


class GroupWorker:
    """One rank of a process group; ``look`` says on rank 0 whether to stop."""

    rank: int
    world_size: int
    device: torch.device
    _next_look = 0.0  # time.monotonic()

    def wrap(self, model: nn.Module) -> nn.Module:
        """DDP for several workers, on GPUs with norms over the whole batch (the CPU
        has no such kernels).
        """
        if self.world_size == 1:
            return model
        devices = None
        if self.device.type == "cuda":
            model, devices = (
                nn.SyncBatchNorm.convert_sync_batchnorm(model),
                [self.device],
            )
        # Running statistics are rank 0's (or equal, with SyncBatchNorm) and need not
        # travel.
        ddp = nn.parallel.DistributedDataParallel
        # in torch 2.15
        renamed = "forward_sync_buffers" in inspect.signature(ddp).parameters
        options: dict[str, Any] = {
            "forward_sync_buffers" if renamed else "broadcast_buffers": False
        }
        return ddp(model, device_ids=devices, gradient_as_bucket_view=True, **options)

    def look(self) -> bool:
        """Whether somebody asked to stop."""
        raise NotImplementedError

    def should_stop(self, step: int) -> bool:
        """Return whether to stop before a step, with the same answer on all ranks.

        The ranks vote before every step on the CPU, and before some steps on a GPU,
        because the vote waits for the GPU.
        """
        if self.device.type != "cpu" and step % GPU_VOTE_STEPS:
            return False
        vote = torch.tensor(int(self._hears_stop()), device=self.device)
        return bool(collectives.all_reduce_sum_(vote).item())

    def _hears_stop(self) -> bool:
        """Return whether rank 0 finds a request to stop; it looks every few seconds."""
        if self.rank > 0 or time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + STOP_LOOK_S
        with suppress(StorageError):  # writing the checkpoints will show the error
            return self.look()
        return False


class _TorchWorker(GroupWorker):
    def __init__(
        self,
        place: "Ranks",
        device: torch.device,
        look: Callable[[], bool],
        show: Show,
    ) -> None:
        self.rank, self.world_size, self.device = place.rank, place.world_size, device
        self.look, self._show = look, show  # type: ignore[method-assign]

    def report(self, metrics: dict[str, Any]) -> None:
        """Show the metrics of rank 0 on the console and in the loggers."""
        self._show(metrics)


class Ranks(Place):
    """All ranks that ``torchrun`` has started. Rank 0 leads: it has the command, the
    console and the claim, and does alone what is not training; the others
    :meth:`follow`.
    """

    def __init__(self) -> None:
        self.rank, self._local_rank, self.world_size, self._local_size = (
            int(os.environ[name]) for name in LAUNCHED[:4]
        )
        self._store = collectives.meeting()
        self._told = False

    def run(self, command: Callable[["Ranks"], int]) -> int:
        """The exit code of this rank, of which rank 0 has the ``command``. The first
        that ends with an error raises it; where others do so for that, only their code
        says it.
        """
        try:
            if self.rank == 0:
                return command(self)
            self.follow()
            return 0
        except UnoError as end:
            if self._ends_first():
                raise
            return end.exit_code
        finally:
            if self.rank == 0 and not self._told:
                self._tell(None)

    def sized(self, config: Config) -> Config:
        """``config`` with as many workers as there are ranks. ConfigError: it asks
        for others.
        """
        if config.compute.num_workers not in (0, self.world_size):
            what = (
                f"--workers {config.compute.num_workers}, but torchrun has started"
                f" {self.world_size} ranks"
            )
            raise ConfigError(f"{what}; leave --workers out")
        device = (
            "cuda"
            if config.compute.device != "cpu" and torch.cuda.is_available()
            else "cpu"
        )
        if config.compute.device == "cuda" != device:
            raise ConfigError(
                "compute.device is cuda but PyTorch sees no CUDA device; use"
                " --device cpu"
            )
        return override(
            config, {"compute.num_workers": self.world_size, "compute.device": device}
        )

    def free_memory(self, config: Config) -> Room:
        """Return the memory in bytes that is free for one rank.

        Each rank decodes all images, so that it has its share of the machine's memory.
        The memory of its GPU is its own.
        """
        room = super().free_memory(config)
        return room._replace(host=room.host // self._local_size)

    def train(
        self, job: TrainingJob, show: Show, until: ExitStack, keep: bool = True
    ) -> tuple[dict[str, float], Task]:
        """By all ranks; only rank 0 calls it."""
        storage = job.claim.storage
        self._tell(
            {
                "config": to_dict(job.config),
                "phases": job.phases,
                "evaluate": job.evaluate,
                "output": storage.uri,
                "token": storage.token,
                "fingerprint": job.task.rows.fingerprint,
                "batch_is_derived": job.batch_is_derived,
            }
        )
        return self._work(
            job.config,
            job.task,
            job.phases,
            job.evaluate,
            job.batch_is_derived,
            storage,
            show,
        )

    def follow(self) -> None:
        """Do what rank 0 tells, without a word. ConfigError: this machine has other
        data than rank 0's.
        """
        while not self._store.check(["job"]):
            time.sleep(POLL_S)
        job = json.loads(self._store.get("job"))
        if job is None:
            return
        config, storage = (
            Config.model_validate(job["config"]),
            ClaimedStorage(job["output"], job["token"]),
        )
        storage.check()
        with (
            open(os.devnull, "w", encoding="utf-8") as nowhere,
            redirect_stdout(nowhere),
        ):
            task = read_task(config.data)
            if task.rows.fingerprint != job["fingerprint"]:
                raise ConfigError(
                    f"rank {self.rank} reads other data than rank 0 from"
                    f" {task.rows.source}"
                )
            self._work(
                config,
                task,
                job["phases"],
                job["evaluate"],
                job["batch_is_derived"],
                storage,
                lambda metrics: None,
            )

    def _ends_first(self) -> bool:
        """Whether no rank has asked this before, or nobody knows."""
        with suppress(RuntimeError):  # the store is gone with its process
            return int(self._store.add("ends", 1)) == 1
        return True

    def _tell(self, job: dict[str, Any] | None) -> None:
        self._told = True
        self._store.set("job", json.dumps(job))

    def _work(
        self,
        config: Config,
        task: Task,
        phases: Any,
        evaluate: bool,
        batch_is_derived: bool,
        storage: Storage,
        show: Show,
    ) -> tuple[dict[str, float], Task]:
        torch.set_num_threads(num_threads(config, self._local_size))
        device, stopping, first = (
            local_device(config),
            threading.Event(),
            self.rank == 0,
        )
        if device.type == "cuda":
            torch.cuda.set_device(device := torch.device("cuda", self._local_rank))
        # torchrun tells all to end as soon as one has: after an error here there is no
        # other way any more.
        usual = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        stop, values = (
            on_stop(stopping.set, STOPPING if first else None),
            dict[str, float](),
        )
        group = collectives.group(self._store, device, self.rank, self.world_size)
        with stop, group:
            worker = _TorchWorker(self, device, stopping.is_set, show)
            # rank 0 computes and keeps them for all
            if on_features(config) and not first:
                while not self._store.check(["features"]):
                    time.sleep(POLL_S)
            sets = open_sets(config, task, storage, show, stopping.is_set, first)
            if first:
                self._store.set("features", "kept")
            if phases:
                config = config_for_readable_rows(
                    config, task, sets.ok, batch_is_derived
                )
            train = sets.train.to(device)
            for phase in phases:
                run.run_phase(config, phase, train, worker, storage)
            if evaluate:
                num_true = len(sets.task.known) + len(sets.task.novel)
                values = evaluate_run(
                    config, storage, train, sets.truth(), num_true, worker
                )
        signal.signal(signal.SIGTERM, usual)
        return values, sets.task
