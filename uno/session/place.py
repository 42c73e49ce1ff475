"""Where the work of a run is done: :class:`Place` does it in this process;
``pipelines.jobs.OnRay``, which has the same methods, on the workers of a Ray cluster.
Whoever wants that passes it in.
"""

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import NamedTuple

import torch

from uno.config import Config
from uno.data.decode import decode_many, ok_mask
from uno.data.files import Storage
from uno.data.resident import TrainSet, assemble
from uno.data.rows import Rows
from uno.data.splits import Task
from uno.errors import ConfigError, Interrupted
from uno.results import estimate
from uno.results.estimate import Estimate, Settings
from uno.results.evaluate import evaluate_run
from uno.results.infer import Classifier, Decode, at_speed, decoder
from uno.results.predictions import PredictionWriter, Summary, predict_rows
from uno.runs import run
from uno.runs.hardware import local_device, num_threads
from uno.runs.lock import RunLock
from uno.session import resources
from uno.session.console import Progress, on_stop, print_line
from uno.session.data import (
    Compute,
    Show,
    compute_local,
    config_for_readable_rows,
    leave_out_unreadable,
    load_features,
    open_sets,
)
from uno.train import LocalWorker
from uno.weights import PRETRAINED, PRETRAINED_FILE, fetch_pretrained

STOPPING = "stopping: saving a checkpoint first"


class TrainingJob(NamedTuple):
    """What to train and evaluate, in whose directory.

    ``batch_is_derived`` says whether the batch size was derived from the data, so that
    it is derived again when unreadable images are left out.
    """

    config: Config
    task: Task
    phases: tuple[str, ...]
    evaluate: bool
    claim: RunLock
    batch_is_derived: bool = False


class Place:
    """This process, without Ray."""

    def free_memory(self, config: Config) -> resources.Room:
        """Bytes that are free for a run's workers."""
        return resources.free_memory(config)

    def train(
        self, job: TrainingJob, show: Show, until: ExitStack, keep: bool = True
    ) -> tuple[dict[str, float], Task]:
        """Train the phases of ``job`` and evaluate: metrics, and the task with its
        images, which may be gone when ``until`` is closed. Unless ``keep``, unreadable
        images are listed in no file.
        """
        config, storage = job.config, job.claim.storage
        torch.set_num_threads(num_threads(config))
        worker = LocalWorker(local_device(config), show)

        def stop() -> None:
            if not job.phases:  # nothing is trained, so nothing waits for a step to end
                raise Interrupted("stopped; nothing was changed")
            worker.stop_requested = True

        with on_stop(stop, STOPPING if job.phases else None):
            sets = open_sets(
                config,
                job.task,
                storage,
                show,
                lambda: worker.stop_requested,
                keep,
            )
            if job.phases:
                config = config_for_readable_rows(
                    config, job.task, sets.ok, job.batch_is_derived
                )
            train = sets.train.to(worker.device)
            for phase in job.phases:
                run.run_phase(config, phase, train, worker, storage)
        if not job.evaluate:
            return {}, sets.task
        num_true = len(sets.task.known) + len(sets.task.novel)
        with nullcontext() if job.phases else on_stop(stop):
            return (
                evaluate_run(config, storage, train, sets.truth(), num_true, worker),
                sets.task,
            )

    def predict(
        self,
        config: Config,
        model: Classifier,
        storage: Storage,
        writer: PredictionWriter,
        show: Callable[[int, int], None],
    ) -> Summary:
        """Classify the rows that ``writer`` lacks, with the ``model`` of the run in
        ``storage``.
        """
        threads, model = num_threads(config), model.to(local_device(config))
        torch.set_num_threads(threads)
        with at_speed(model, config, threads):
            return predict_rows(model, writer, config.compute.threads, show)

    def is_cluster(self) -> bool:
        """Whether its workers are other machines than this one, which may be small."""
        return False

    def decoder(
        self, config: Config, storage: Storage, rows: Rows, model: Classifier
    ) -> Decode:
        """What shows a sample of ``rows`` to the ``model`` of the run in
        ``storage``.
        """
        return decoder(model, rows, config.compute.threads)

    def estimate(
        self,
        config: Config,
        task: Task,
        storage: Storage,
        settings: Settings | None = None,
    ) -> Estimate:
        """:func:`uno.results.estimate.estimate_num_novel` of a task."""
        data = config, estimated_set(config, task, storage), task.known, storage
        return estimate.estimate_num_novel(
            *data, local_device(config), settings, report=print_line
        )


def place_of(config: Config, elsewhere: Place | None) -> Place:
    """Where ``config`` has its work done; ConfigError: by workers, and nobody
    brought them.
    """
    if not config.compute.num_workers:
        return Place()
    if elsewhere is None:
        raise ConfigError(
            "--workers needs Ray: use uno discover on the command line, or"
            " pipelines.api.discover(...)"
        )
    return elsewhere


def estimated_set(
    config: Config, task: Task, storage: Storage, compute: Compute = compute_local
) -> TrainSet:
    """The training rows decoded, or of a frozen encoder the features of their
    evaluation views (N,1,D).
    """
    if config.model.finetune == "none":
        if config.model.weights == PRETRAINED and not storage.exists(PRETRAINED_FILE):
            storage.write(PRETRAINED_FILE, fetch_pretrained(config.model.encoder))
        with Progress() as show:
            features, reasons = load_features(
                config, task, storage, show, compute=compute
            )
        images = features[:, 0:1]
    else:
        data = config.data
        images, reasons = decode_many(
            task.rows.images, data.stored_size, interpolation=data.interpolation
        )
    leave_out_unreadable(reasons, config, task)
    return assemble(task, images, ok_mask(reasons))
