"""The state of a run that the steps of a command share, and the backend interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch

from uno.config import Config
from uno.data.files import Storage
from uno.data.splits import Task
from uno.model import UnoModel
from uno.results.estimate import Estimate, Settings
from uno.results.infer import Classifier
from uno.results.predictions import PredictionWriter, Summary
from uno.runs import directory
from uno.runs.hardware import local_device
from uno.runs.lock import RunLock, lock_run
from uno.runs.run import load_trained
from uno.session.console import print_line
from uno.session.data import Compute, Show, read_task
from uno.session.resources import FreeMemory


class Backend(Protocol):
    """The interface to the processes that do the work of a run.

    It is implemented for this process, for torchrun's ranks and for Ray's workers.
    """

    def free_memory(self, config: Config) -> FreeMemory:
        """Return the free memory for the processes that train, in bytes.

        Args:
            config: The configuration, which has the device and the number of workers.

        Returns:
            ``host``, the free main memory (for torchrun the share of one rank), and
            ``device``, a worker's share of the free memory of its GPU, on the node that
            has the least. For Ray also ``store``, the object store of a running
            cluster, and ``driver``, the free main memory of this machine if workers are
            on others. A limit that there is not is None, such as that of a GPU on a
            machine without one.
        """

    def train(self, run: Run, show: Show) -> dict[str, float]:
        """Train the phases of a run from their newest checkpoints, then evaluate it.

        Finished phases are not trained again. If the run is evaluated and images are
        kept in memory, the rows of ``run.task`` hold the decoded images, or the
        features of a frozen encoder, afterwards.

        Args:
            run: The run, inside ``run.locked()``, so that no other command writes into
                its directory. Without phases it is only evaluated.
            show: Takes each line of metrics, values by name, such as "loss".

        Returns:
            The metrics of the evaluation by name, empty unless ``run.evaluate``.

        Raises:
            ConfigError: Too many images cannot be read, or the configuration does not
                fit the rows that are left or the workers.
            NumericsError: Training met numbers that are not finite, again and again.
            StorageError: A checkpoint or other file cannot be read or written.
            Interrupted: The user stopped it. If a phase was being trained, its
                checkpoint is saved.
        """

    def after_training(self, task: Task) -> Backend:
        """Return the backend that predicts rows after training.

        It may be this one, or one that works in this process alone.

        Args:
            task: The rows of the trained run. Their number, and whether they hold
                decoded images, may decide.
        """

    def predict(
        self,
        run: Run,
        model: Classifier,
        writer: PredictionWriter,
        show: Callable[[int, int], None],
    ) -> Summary:
        """Classify the rows of ``writer`` that it has not written yet.

        They are those of the run or of any other source.

        Args:
            run: The run that the model belongs to, which says where to compute.
            model: The model of the run. Its network may be moved to another device.
            writer: Holds the rows and stores their predictions.
            show: Called again and again as ``show(done, total)`` with the number of
                finished rows and of all rows.

        Returns:
            The numbers of all, readable and unreadable rows, and the path of the
            predictions.
        """

    def encoding(
        self, config: Config, should_stop: Callable[[], bool]
    ) -> AbstractContextManager[Compute]:
        """Return a context manager that yields a function to encode rows.

        The function computes features of a frozen encoder. It takes a
        :class:`~uno.data.features.FeatureJob` (all rows, and how to encode them), the
        encoder, and row numbers int64 (n,); and yields the features in chunks, in the
        order of the row numbers.

        Args:
            config: The configuration, which decides the device and the workers.
            should_stop: Returns whether the user has asked to stop. A backend asks it
                while it waits for nodes of a cluster.
        """

    def estimate(self, run: Run, settings: Settings) -> Estimate:
        """Estimate the number of novel classes among the unlabeled rows of a run.

        Args:
            run: The run, inside ``run.locked()``. The estimate is stored in its
                directory. If it is there for the same data and settings, it is only
                read.
            settings: The parameters of the estimate, such as the largest number to try.

        Returns:
            The estimate with its interval.

        Raises:
            ConfigError: There are too few known classes or unlabeled rows, or too many
                images cannot be read.
        """


@dataclass
class Run:
    """A run: its directory, its configuration, its rows and its backend.

    A run is locked inside the block ``with run.locked()``. Functions that write into
    the directory take a locked run.

    Attributes:
        config: The final configuration.
        storage: The run directory. Inside :meth:`locked`, every write checks that this
            command still holds the lock.
        backend: Does the work of the run.
        opened: The rows of the run; None until they are read, at the latest when
            ``task`` is used.
        phases: The names of the phases to train, in order.
        evaluate: Whether the run is evaluated after its phases.
        batch_is_derived: Whether the batch size was derived from the data, so that it
            is derived again when unreadable images are left out.
        resumes: Whether the directory holds this run already.
        first_files: Content of files that a new run directory begins with, by name.
        data_problem: Why the rows cannot be shown, empty if they can.
        lock: The lock of the directory, None before :meth:`locked`.
        cleanup: Closes what a backend keeps open until the command ends.
    """

    config: Config
    storage: Storage
    backend: Backend
    opened: Task | None = None
    phases: tuple[str, ...] = ()
    evaluate: bool = True
    batch_is_derived: bool = False
    resumes: bool = False
    first_files: Mapping[str, bytes] = field(default_factory=dict)
    data_problem: str = ""
    lock: RunLock | None = None
    cleanup: ExitStack = field(default_factory=ExitStack)

    @property
    def task(self) -> Task:
        """The rows of the run with their classes and splits.

        If the attribute ``opened`` is None, they are read from the source of the data
        now, and ``opened`` becomes this :class:`Task`. Otherwise it is the one that
        ``opened`` holds.

        Raises:
            ConfigError: The data cannot be read, or does not fit the configuration.
        """
        if self.opened is None:
            self.opened = read_task(self.config.data)
        return self.opened

    @cached_property
    def device(self) -> torch.device:
        """The device of this process, "cuda" or "cpu", by ``compute.device``.

        "auto" is the GPU if there is one. If workers train, this process uses the CPU
        when it has no GPU, also for "cuda".

        Raises:
            ConfigError: ``compute.device`` is "cuda", no workers train, and there is no
                GPU.
        """
        return local_device(self.config)

    @cached_property
    def trained(self) -> tuple[UnoModel, int]:
        """The trained network in eval mode, and the index of its best head.

        The network has several cluster heads. The best head is the one with the lowest
        training loss. Both are read at the first use from the newest valid checkpoint
        of discovery, and kept. The network is on the CPU at first.

        Raises:
            ConfigError: The data, which has the numbers of classes, cannot be read.
            StorageError: The run has no such checkpoint.
            RuntimeError: The checkpoint is that of another network, for example for
                other numbers of classes.
        """
        num_known, num_novel = self.task.num_known, self.task.num_novel
        return load_trained(self.config, self.storage, num_known, num_novel)

    @property
    def metrics(self) -> dict[str, float] | None:
        """The metrics of the stored run by name, from its ``metrics.json``.

        The file is read at every use. The value is None if there is no such file,
        because the run is not finished, or if it is damaged.

        Raises:
            StorageError: The file exists and cannot be read.
        """
        return directory.read_results(self.storage)

    @contextmanager
    def locked(self) -> Iterator[RunLock]:
        """Lock the directory inside the block, so that no other command writes into it.

        If there is a lock already, a line is printed, and the lock is watched for up to
        ten seconds. The lock of a killed command is then taken over. From here on
        ``storage`` is the directory that can be written only while the lock is held. At
        the end what the backend keeps open is closed, and the lock is released.

        Yields:
            The lock, which is also the attribute ``lock``.

        Raises:
            ConfigError: Another command holds the directory.
            StorageError: The lock file cannot be read or written.
        """
        with lock_run(self.storage, on_wait=print_line) as self.lock, self.cleanup:
            self.storage = self.lock.storage
            yield self.lock
