"""A run in the processes that ``torchrun`` started, one process for each rank.

Nothing here needs Ray.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from typing import Any

import torch

from uno import distributed
from uno.config import Config, override, to_dict
from uno.errors import ConfigError, UnoError
from uno.runs.hardware import num_threads
from uno.runs.lock import ClaimedStorage
from uno.session.backend import (
    STOPPING,
    LocalBackend,
    evaluate_rows,
    train_phases,
)
from uno.session.configure import TORCHRUN_VARIABLES
from uno.session.console import on_stop
from uno.session.data import Show, open_sets
from uno.session.resources import FreeMemory, trains_on_features
from uno.session.run import Run

POLL_S = 0.1  # seconds between two checks whether rank 0 has sent something


class _TorchWorker(distributed.GroupWorker):
    """The process of one rank that torchrun started. Rank 0 shows the metrics.

    Args:
        backend: Has the number of this rank, and how many ranks there are.
        device: The device of this rank.
        asked_to_stop: Returns whether this rank has received a signal to stop. Only
            rank 0 asks it, at most every two seconds, and all ranks follow its answer.
        show: Takes each line of metrics of this rank. On other ranks than 0 it does
            nothing.
    """

    def __init__(
        self,
        backend: "TorchrunBackend",
        device: torch.device,
        asked_to_stop: Callable[[], bool],
        show: Show,
    ) -> None:
        self.rank, self.world_size = backend.rank, backend.world_size
        self.device = device
        self.asked_to_stop, self._show = asked_to_stop, show  # type: ignore[method-assign]

    def report(self, metrics: dict[str, Any]) -> None:
        """Pass a line of metrics to the function ``show`` of this worker.

        On rank 0 it shows the line on the console and in the loggers. On the other
        ranks it does nothing.
        """
        self._show(metrics)


class TorchrunBackend(LocalBackend):
    """The backend of the ranks that ``torchrun`` started, one process each.

    Rank 0 runs the command, prints, and holds the lock of the run. The other ranks only
    train and evaluate, see :meth:`follow`.
    """

    def __init__(self) -> None:
        self.rank, self._local_rank, self.world_size, self._local_size = (
            int(os.environ[name]) for name in TORCHRUN_VARIABLES[:4]
        )
        self._store = distributed.rendezvous_store()
        self._job_is_sent = False

    def lead_or_follow(self, command: Callable[["TorchrunBackend"], None]) -> None:
        """Run the command on rank 0, and help with it on the other ranks.

        If the command ends before it trains, the other ranks end, too.

        Args:
            command: Takes this backend. Called on rank 0.

        Raises:
            UnoError: The error of this rank, if no other rank has ended with an
                UnoError before, or if that cannot be known because the store of
                torchrun is gone. Errors of other classes are always raised.
            SystemExit: This rank ends with an UnoError, and another rank has ended with
                one before. The code is the exit code of the error.
        """
        try:
            if self.rank == 0:
                command(self)
            else:
                self.follow()
        except UnoError as end:
            if self._is_first_to_end():
                raise
            raise SystemExit(end.exit_code) from None
        finally:
            if self.rank == 0 and not self._job_is_sent:
                self._send_job(None)

    def sized(self, config: Config) -> Config:
        """Set the number of workers to that of the ranks, and choose the device.

        Args:
            config: The configuration. Its device may be "auto".

        Returns:
            The configuration with one worker for each rank, and with the device "cuda"
            or "cpu".

        Raises:
            ConfigError: ``compute.num_workers`` is neither 0 nor the number of ranks,
                or the device is "cuda" and PyTorch sees no GPU.
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

    def free_memory(self, config: Config) -> FreeMemory:
        """Return the free memory for one rank, in bytes.

        Each rank decodes all images, so a rank gets an equal share of the machine's
        memory. Of its GPU it gets the whole free memory, or the share
        ``compute.gpus_per_worker`` if that is between 0 and 1, both excluded.

        Args:
            config: The configuration, which decides whether a GPU is used.

        Returns:
            ``host``, the share of the free main memory, and ``device``, that of the
            GPU, None without a GPU. The other values, which concern Ray clusters, are
            None.
        """
        memory = super().free_memory(config)
        return memory._replace(host=memory.host // self._local_size)

    def train(self, run: Run, show: Show) -> dict[str, float]:
        """Train and evaluate the run on all ranks. Only rank 0 calls this, and once.

        The description of the run is sent to the other ranks first, which wait for it
        in :meth:`follow`. It includes the token of the lock, so that they can write.

        Args:
            run: The run, inside ``run.locked()``, so that no other command writes into
                its directory. Without phases it is only evaluated.
            show: Takes each line of metrics, values by name, such as "loss".

        Returns:
            The metrics by name, empty unless ``run.evaluate``.

        Raises:
            ConfigError: Too many images cannot be read, or too few rows are left.
            NumericsError: Training met numbers that are not finite, again and again.
            StorageError: A checkpoint or other file cannot be read or written.
            Interrupted: The user stopped it, or another rank was lost.
        """
        assert run.lock is not None
        self._send_job(
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
        return self._work_on_rank(run, show)

    def follow(self) -> None:
        """Train and evaluate the run that rank 0 describes, and print nothing.

        This waits without limit until rank 0 begins to train or ends. If rank 0 ends
        without training, nothing is done. What training prints to the standard output
        is discarded.

        Raises:
            ConfigError: This machine has other data than that of rank 0, or cannot read
                it.
            StorageError: This machine does not see the lock of the run, or it is held
                by another command.
            UnoError: Training has raised it, as on rank 0.
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
            self._work_on_rank(run, lambda metrics: None)

    def _is_first_to_end(self) -> bool:
        """Return whether this rank is the first that ends with an error.

        The ranks count their errors in the store of torchrun. True if this store is
        gone, so that it cannot be known.
        """
        with suppress(RuntimeError):  # the store is gone with its process
            return int(self._store.add("ends", 1)) == 1
        return True

    def _send_job(self, job: dict[str, Any] | None) -> None:
        """Send the description of a run to the other ranks, which wait for it.

        Args:
            job: JSON values by name; None to let the other ranks end without training.
        """
        self._job_is_sent = True
        self._store.set("job", json.dumps(job))

    def _work_on_rank(self, run: Run, show: Show) -> dict[str, float]:
        """Train and evaluate a run as one of the ranks. All ranks call this.

        Rank 0 computes and caches the features of a frozen encoder before the other
        ranks open the data, and it alone lists unreadable images. A first SIGTERM,
        SIGINT (Ctrl-C) or SIGHUP ends the computation of features on this rank after a
        chunk, and asks training to stop, where the request of rank 0 counts. It does
        not end the evaluation. If an error ends this function, SIGTERM
        is ignored from then on, because torchrun sends it to all ranks as soon as one
        has ended. PyTorch's number of threads is set, and on GPUs its current GPU.

        Args:
            run: The run. Its phases are trained; without phases it is only evaluated.
            show: Takes each line of metrics of this rank.

        Returns:
            The metrics by name, the same on all ranks; empty unless ``run.evaluate``.

        Raises:
            UnoError: One of the errors of :meth:`train`. It is Interrupted if training
                was stopped or another rank was lost.
        """
        config, storage, device = run.config, run.storage, run.device
        torch.set_num_threads(num_threads(config, self._local_size))
        stopping, first = threading.Event(), self.rank == 0
        if device.type == "cuda":
            torch.cuda.set_device(device := torch.device("cuda", self._local_rank))
        # torchrun tells all to end as soon as one has: after an error here there is no
        # other way any more.
        former_handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        stop = on_stop(stopping.set, STOPPING if first else None)
        group = distributed.join_group(self._store, device, self.rank, self.world_size)
        with stop, group:
            worker = _TorchWorker(self, device, stopping.is_set, show)
            # rank 0 computes the features and stores them for all ranks
            if trains_on_features(config) and not first:
                while not self._store.check(["features"]):
                    time.sleep(POLL_S)
            sets = open_sets(config, run.task, storage, show, stopping.is_set, first)
            if first:
                self._store.set("features", "kept")
            train = train_phases(run, sets, worker)
            metrics = evaluate_rows(run, sets, train, worker)
        signal.signal(signal.SIGTERM, former_handler)
        return metrics
