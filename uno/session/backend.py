"""The backend that does the work of a run in this process, and the choice of a backend.

A backend decides which processes train, evaluate and predict: this process, the ranks
of torchrun, or workers of Ray.
"""

import pkgutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

import uno.runs.run as training
from uno.config import Config
from uno.data.decode import Decoding, decode_many, ok_mask
from uno.data.memory import TrainSet, assemble
from uno.data.splits import Task
from uno.data.stream import TrainData
from uno.encoders.weights import PRETRAINED, PRETRAINED_FILE, fetch_pretrained
from uno.errors import Interrupted
from uno.results.estimate import Estimate, Settings, estimate_num_novel
from uno.results.evaluate import evaluate_run
from uno.results.infer import Classifier, accelerated_encoder
from uno.results.predictions import PredictionWriter, Summary, predict_rows
from uno.runs.hardware import local_device, num_threads
from uno.session import resources
from uno.session.console import (
    Progress,
    interrupt_on_signal,
    on_stop,
    print_line,
)
from uno.session.data import (
    Compute,
    Sets,
    Show,
    compute_local,
    config_for_readable_rows,
    leave_out_unreadable,
    load_features,
    open_sets,
)
from uno.session.run import Backend, Run
from uno.training import LocalWorker, Worker

STOPPING = "stopping: saving a checkpoint first"
RAY_BACKEND = "pipelines.backend:RayBackend"  # by name, because uno imports no Ray


def choose_backend(config: Config) -> Backend:
    """Choose where the work of a run is done, by ``compute.num_workers``.

    The module of the Ray backend is imported only if it is chosen. Making this backend
    looks for a running cluster, and sets the environment variable RAY_ADDRESS if there
    is one. No cluster is started here.

    Args:
        config: The configuration of the run.

    Returns:
        The backend of this process for 0 workers, otherwise the backend of Ray.

    Raises:
        ConfigError: The work is done in this process, and it lacks the device that the
            configuration asks for.
    """
    if config.compute.num_workers == 0:
        local_device(config)
        return LocalBackend()
    backend: Backend = pkgutil.resolve_name(RAY_BACKEND)()
    return backend


class LocalBackend:
    """The backend that does all work in this process, without Ray."""

    def free_memory(self, config: Config) -> resources.FreeMemory:
        """Return the free memory of this machine and of its GPU, in bytes.

        Args:
            config: The configuration. With ``compute.device`` "cpu", or without a GPU,
                the value for the GPU is None. A share ``compute.gpus_per_worker``
                between 0 and 1, both excluded, reduces it to this share.

        Returns:
            ``host``, the free main memory, and ``device``, the free memory of the GPU.
            The other values, which concern clusters, are None.
        """
        return resources.free_memory(config)

    def train(self, run: Run, show: Show) -> dict[str, float]:
        """Train the phases of a run in this process, then evaluate it.

        Phases continue from their newest checkpoints. If images are kept in memory, the
        rows of ``run.task`` hold the decoded images, or a frozen encoder's features of
        the evaluation view (the image without random augmentation), afterwards.
        PyTorch's number of threads is set for the whole process. The signals to stop
        are SIGTERM, SIGINT (Ctrl-C) and SIGHUP. The first one ends the computation of
        features after a chunk, and training before its next step, or before the
        evaluation if no step is left. In the evaluation, and always if the run has no
        phases, it ends the work at once.

        Args:
            run: The run, inside ``run.locked()``, so that no other command writes into
                its directory. Without phases it is only evaluated.
            show: Takes each line of metrics, values by name, such as "loss".

        Returns:
            The metrics of the evaluation by name, empty unless ``run.evaluate``.

        Raises:
            ConfigError: Too many images cannot be read, too few rows are left, or the
                weights or an option of ``compute`` do not fit.
            NumericsError: Training met numbers that are not finite, again and again.
            StorageError: A checkpoint or other file cannot be read or written.
            Interrupted: The user stopped it. If a phase was being trained, its
                checkpoint is saved.
        """
        torch.set_num_threads(num_threads(run.config))
        worker = LocalWorker(run.device, show)

        def stop() -> None:
            """Let training stop after this step; without phases, raise Interrupted."""
            if not run.phases:  # nothing is trained, so nothing waits for a step to end
                raise Interrupted("stopped; nothing was changed")
            worker.stop_requested = True

        with on_stop(stop, STOPPING if run.phases else None):
            sets = open_sets(
                run.config,
                run.task,
                run.storage,
                show,
                lambda: worker.stop_requested,
            )
            train = train_phases(run, sets, worker)
        stopped = (
            "stopped before the run was finished; resume with the same command"
            if run.phases
            else "stopped; nothing was changed"
        )
        if (
            worker.stop_requested
        ):  # after the last step, or while features are clustered
            raise Interrupted(stopped)
        with interrupt_on_signal(stopped):
            return evaluate_rows(run, sets, train, worker)

    def after_training(self, task: Task) -> Backend:
        """Return the backend that predicts rows after training: this one.

        A backend of several processes may return one that works in this process alone,
        as that of Ray does for few rows.

        Args:
            task: Not used here.
        """
        return self

    def predict(
        self,
        run: Run,
        model: Classifier,
        writer: PredictionWriter,
        show: Callable[[int, int], None],
    ) -> Summary:
        """Classify in this process the rows that ``writer`` has not written yet.

        At the end the predictions are marked as complete. PyTorch's number of threads
        is set for the whole process. On a CPU the encoder is computed by
        ``compute.encoder_runtime``, which is PyTorch or OpenVINO.

        Args:
            run: The run, which decides the device and the number of threads.
            model: The model of the run. Its network is moved to the device of the run,
                and stays there.
            writer: Holds the rows and writes their predictions.
            show: Called as ``show(done, total)`` after each batch, with the number of
                finished rows and of all rows.

        Returns:
            The numbers of all, readable and unreadable rows, and the path of the
            predictions.

        Raises:
            ConfigError: ``compute.encoder_runtime`` is not installed or cannot compute
                the encoder, or a file that holds many images, such as a tar shard,
                cannot be read.
            StorageError: The storage of an image cannot be reached now, or the
                predictions cannot be written.
        """
        threads, model = num_threads(run.config), model.to(run.device)
        torch.set_num_threads(threads)
        with accelerated_encoder(model, run.config, threads):
            return predict_rows(model, writer, run.config.compute.threads, show)

    def encoding(
        self, config: Config, should_stop: Callable[[], bool]
    ) -> AbstractContextManager[Compute]:
        """Return a context manager that yields a function to encode rows.

        The function computes features of a frozen encoder in threads of this process.
        It takes a :class:`~uno.data.features.FeatureJob` (all rows, and how to encode
        them), the encoder, and row numbers int64 (n,); and yields the features in
        chunks, in the order of the row numbers.

        Args:
            config: Not used here; the job has the configuration.
            should_stop: Not used here.
        """
        return nullcontext(compute_local)

    def estimate(self, run: Run, settings: Settings) -> Estimate:
        """Estimate the number of novel classes among the unlabeled rows of a run.

        Unless the encoder is frozen, several encoders are trained, one after another,
        and a line is printed after each. What an earlier call has stored for the same
        data and settings is not computed again.

        Args:
            run: The run, inside ``run.locked()``. Encoders and the estimate are stored
                in its directory.
            settings: The parameters of the estimate, such as the largest number to try.

        Returns:
            The estimate with its interval, as stored in ``estimate.json``.

        Raises:
            ConfigError: There are too few known classes or unlabeled rows, too many
                images cannot be read, or the weights of a frozen encoder are missing or
                cannot be downloaded.
            NumericsError: The training of an encoder met numbers that are not finite,
                again and again.
            StorageError: An image or a stored file cannot be read, or a file cannot be
                written.
        """
        return estimate_num_novel(
            run.config,
            estimated_set(run),
            run.task.known,
            run.storage,
            run.device,
            settings,
            report=print_line,
        )


def train_phases(run: Run, sets: Sets, worker: Worker) -> TrainData:
    """Train the phases of a run on its opened data.

    Finished phases are skipped, and an interrupted one resumes. Checkpoints are written
    into the directory of the run. A batch size that was derived from the data becomes
    smaller, with a printed line, if too few rows can be read for it. Afterwards
    ``run.opened`` is set to ``sets.task``, whose rows hold the images or features that
    are kept in memory. Without phases nothing is trained.

    Args:
        run: The run, inside ``run.locked()``. ``run.phases`` names the phases.
        sets: Its data, from :func:`uno.session.data.open_sets`.
        worker: The process that trains: a local process or one rank of several. All
            ranks of a group must call this.

    Returns:
        The rows that training may see, on the device of the worker.

    Raises:
        ConfigError: Too few rows can be read for the configuration, more streamed
            images are unreadable than it allows, or the weights or an option of
            ``compute`` do not fit.
        NumericsError: Training met numbers that are not finite, again and again.
        StorageError: An earlier phase that is needed has no valid checkpoint, or a
            checkpoint cannot be written.
        Interrupted: The worker was asked to stop. A checkpoint is saved.
    """
    config = run.config
    if run.phases:
        config = config_for_readable_rows(
            config, run.task, sets.ok, run.batch_is_derived
        )
    train = sets.train.to(worker.device)
    for phase in run.phases:
        training.run_phase(config, phase, train, worker, run.storage)
    run.opened = sets.task
    return train


def evaluate_rows(
    run: Run, sets: Sets, train: TrainData, worker: Worker
) -> dict[str, float]:
    """Evaluate a trained run, and return its metrics by name.

    If ``run.evaluate`` is False, nothing is computed, and the result is empty.
    Otherwise the network ``run.trained`` is moved to the device of the worker, and rank
    0 writes ``alignment.json``, which says which clusters of different heads are the
    same class. This file is not written if classes were merged or dropped, or if there
    is no unlabeled training row. The metrics are not written here.

    Args:
        run: The trained run.
        sets: Its data, from :func:`uno.session.data.open_sets`.
        train: The rows that training may see, as :func:`train_phases` returned them.
        worker: The process that evaluates. All ranks of a group must call this.

    Raises:
        ConfigError: No labeled or no unlabeled training image can be read, more
            streamed images are unreadable than the configuration allows, or the weights
            that discovery started from do not fit.
        StorageError: The run has no valid checkpoint of discovery, or a file cannot be
            read or written.
    """
    if not run.evaluate:
        return {}
    num_true = len(run.task.known) + len(run.task.novel)
    truth = sets.truth()
    return evaluate_run(
        run.config, run.storage, train, truth, num_true, worker, run.trained
    )


def estimated_set(run: Run, compute: Compute = compute_local) -> TrainSet:
    """Open the training rows on which the number of novel classes is estimated.

    A frozen encoder's features are read from the cache, or computed and cached. For
    this, weights "pretrained" are fetched and stored in the directory of the run,
    unless it has them. Unreadable images are left out, with a printed warning, and are
    not listed in a file. Images for an encoder that is trained are decoded into memory.

    Args:
        run: The run to which the rows belong.
        compute: Computes features of a frozen encoder, see
            :data:`uno.session.data.Compute`; by default in threads of this process. It
            is not used for an encoder that is trained.

    Returns:
        The readable training rows, labeled and unlabeled. They hold decoded images
        uint8 (N, 3, S, S) with sides of S pixels; if the encoder is frozen
        (``model.finetune`` is "none"), they hold D features of the evaluation view
        (the image without random augmentation) instead, float32 (N, 1, D). In a source
        of vectors, these features are the first vector of each row.

    Raises:
        ConfigError: Too many images cannot be read, or the weights of a frozen encoder
            are missing or cannot be downloaded.
        StorageError: An image or the weights cannot be read, or a file cannot be
            written.
    """
    config, task, storage = run.config, run.task, run.storage
    if config.model.finetune == "none":
        if config.model.weights == PRETRAINED and not storage.exists(PRETRAINED_FILE):
            storage.write(PRETRAINED_FILE, fetch_pretrained(config.model.encoder))
        with Progress() as show:
            features, reasons = load_features(
                config, task, storage, show, compute=compute
            )
        images = features[:, 0:1]
    else:
        size, how = config.data.stored_size, Decoding.of(config.data)
        images, reasons = decode_many(task.rows.images, size, how=how)
    leave_out_unreadable(reasons, config, task)
    return assemble(task, images, ok_mask(reasons))
