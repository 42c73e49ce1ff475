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
from contextlib import redirect_stdout, suppress
from typing import Any

import torch
from torch import nn

from uno import collectives
from uno.config import Config, override, to_dict
from uno.errors import ConfigError, StorageError, UnoError
from uno.runs.hardware import num_threads
from uno.runs.lock import ClaimedStorage
from uno.session.backend import (
    STOPPING,
    LocalBackend,
    evaluate_rows,
    train_phases,
)
from uno.session.console import on_stop
from uno.session.data import Show, open_sets
from uno.session.resources import Room, on_features
from uno.session.run import Run
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
        backend: "TorchrunBackend",
        device: torch.device,
        look: Callable[[], bool],
        show: Show,
    ) -> None:
        self.rank, self.world_size = backend.rank, backend.world_size
        self.device = device
        self.look, self._show = look, show  # type: ignore[method-assign]

    def report(self, metrics: dict[str, Any]) -> None:
        """Show the metrics of rank 0 on the console and in the loggers."""
        self._show(metrics)


class TorchrunBackend(LocalBackend):
    """The ranks that ``torchrun`` has started, one process each.

    Rank 0 leads. It has the command, the console and the lock of the run, and does
    alone what is neither training nor evaluation. The other ranks :meth:`follow`.
    """

    def __init__(self) -> None:
        self.rank, self._local_rank, self.world_size, self._local_size = (
            int(os.environ[name]) for name in LAUNCHED[:4]
        )
        self._store = collectives.meeting()
        self._told = False

    def lead_or_follow(self, command: Callable[["TorchrunBackend"], int]) -> int:
        """Run the command on rank 0, and follow it on the other ranks.

        The first rank that ends with an error raises it. A rank that fails afterwards,
        usually because of the first one, returns its exit code alone.

        Args:
            command: Takes this backend, and returns an exit code.

        Returns:
            The exit code of this rank.
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

    def train(self, run: Run, show: Show) -> dict[str, float]:
        """Train and evaluate the run on all ranks. Only rank 0 calls this."""
        assert run.lock is not None
        self._tell(
            {
                "config": to_dict(run.config),
                "phases": run.phases,
                "evaluate": run.evaluate,
                "output": run.storage.uri,
                "token": run.lock.storage.token,
                "fingerprint": run.task.rows.fingerprint,
                "batch_is_derived": run.batch_is_derived,
            }
        )
        return self._work(run, show)

    def follow(self) -> None:
        """Train and evaluate as rank 0 tells, without a word.

        Raises:
            ConfigError: This machine has other data than that of rank 0.
        """
        while not self._store.check(["job"]):
            time.sleep(POLL_S)
        job = json.loads(self._store.get("job"))
        if job is None:
            return
        storage = ClaimedStorage(job["output"], job["token"])
        storage.check()
        run = Run(
            Config.model_validate(job["config"]),
            storage,
            self,
            phases=tuple(job["phases"]),
            evaluate=job["evaluate"],
            batch_is_derived=job["batch_is_derived"],
        )
        with (
            open(os.devnull, "w", encoding="utf-8") as nowhere,
            redirect_stdout(nowhere),
        ):
            if run.task.rows.fingerprint != job["fingerprint"]:
                raise ConfigError(
                    f"rank {self.rank} reads other data than rank 0 from"
                    f" {run.task.rows.source}"
                )
            self._work(run, lambda metrics: None)

    def _ends_first(self) -> bool:
        """Whether no rank has asked this before, or nobody knows."""
        with suppress(RuntimeError):  # the store is gone with its process
            return int(self._store.add("ends", 1)) == 1
        return True

    def _tell(self, job: dict[str, Any] | None) -> None:
        self._told = True
        self._store.set("job", json.dumps(job))

    def _work(self, run: Run, show: Show) -> dict[str, float]:
        """Train and evaluate as one of the ranks."""
        config, storage, device = run.config, run.storage, run.device
        torch.set_num_threads(num_threads(config, self._local_size))
        stopping, first = threading.Event(), self.rank == 0
        if device.type == "cuda":
            torch.cuda.set_device(device := torch.device("cuda", self._local_rank))
        # torchrun tells all to end as soon as one has: after an error here there is no
        # other way any more.
        usual = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        stop = on_stop(stopping.set, STOPPING if first else None)
        group = collectives.group(self._store, device, self.rank, self.world_size)
        with stop, group:
            worker = _TorchWorker(self, device, stopping.is_set, show)
            # rank 0 computes and keeps them for all
            if on_features(config) and not first:
                while not self._store.check(["features"]):
                    time.sleep(POLL_S)
            sets = open_sets(config, run.task, storage, show, stopping.is_set, first)
            if first:
                self._store.set("features", "kept")
            train = train_phases(run, sets, worker)
            metrics = evaluate_rows(run, sets, train, worker)
        signal.signal(signal.SIGTERM, usual)
        return metrics
