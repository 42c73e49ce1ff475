"""Send the metrics of a run to TensorBoard, W&B and MLflow (``--report-to``).

The driver sends them. A logger that raises an error is switched off with a warning, so
that a server that is down never ends a run.
"""

import importlib.util
import math
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, NamedTuple, Protocol

from uno.config import Config, flatten, to_dict
from uno.data.files import Storage, split, upload_pause_s
from uno.errors import ConfigError, one_line
from uno.runs import LOGGERS_FOLDER
from uno.session.console import print_line

POSITION_KEYS = ("step", "total_steps", "epoch", "epochs", "every_s", "rank_ms")
"""Names in a line of metrics that are no metrics, so that no logger records them."""
UPLOAD_S = 30.0  # least seconds between two uploads of events to an object store
FINISH_S = 60.0  # seconds that W&B may upload after the end of the run
# MLflow's own limits are 8 attempts of 120 s, and 10 threads. Several threads that
# create one folder of a store of files at the same time fail.
MLFLOW_LIMITS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_ASYNC_LOGGING_THREADPOOL_SIZE": "1",
}


class Record(NamedTuple):
    """The run that a logger such as TensorBoard or MLflow records.

    Attributes:
        storage: The run directory.
        name: The name of the run: that of its directory, after the name of the sweep
            and a dash if it belongs to one.
        group: The name of the sweep, None for a single run.
        settings: The configuration by dotted key.
    """

    storage: Storage
    name: str
    group: str | None
    settings: Mapping[str, Any]

    def key(self, logger: str, new: Callable[[], str]) -> tuple[str, bool]:
        """Return the identifier of this run in the data base of a logger.

        A new identifier is written into the file ``loggers/LOGGER`` of the run
        directory, so that a resumed run continues the same record.

        Args:
            logger: The name of the logger: "wandb" or "mlflow".
            new: Makes an identifier if the run has none.

        Returns:
            The identifier, and whether it was made now.

        Raises:
            StorageError: The file cannot be read or written.
        """
        if (found := self.storage.find(f"{LOGGERS_FOLDER}/{logger}")) is not None:
            return found.decode(), False
        self.storage.write(f"{LOGGERS_FOLDER}/{logger}", (made := new()).encode())
        return made, True


class Logger(Protocol):
    """A tool that records the metrics of one run.

    It is made from a :class:`Record`. Any exception that it raises switches it off.
    """

    def log(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """Record the values of one training step.

        After training rolled back to a checkpoint, steps are recorded again.

        Args:
            phase: The training phase, or "results" for the metrics of the finished run.
            step: The number of the step in its phase; 0 for "results".
            values: Numbers by name, such as "loss".
        """

    def close(self, failed: bool) -> None:
        """End the record of a run.

        Args:
            failed: Whether the run ended with an exception.
        """


class TensorBoard:
    """Write TensorBoard events into ``tensorboard/PHASE`` of the run directory.

    For a directory in an object store, events are written to a temporary folder and
    uploaded at times.
    """

    def __init__(self, record: Record) -> None:
        from tensorboardX import SummaryWriter

        self._storage, self._new = record.storage, SummaryWriter
        self._next_upload = -math.inf  # time.monotonic()
        self._folder = (
            record.storage.path("")
            if record.storage.is_local
            else tempfile.mkdtemp("-uno")
        )
        self._writers: dict[str, Any] = {}
        self._last: dict[str, int] = {}

    def log(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """Record the values of one training step in the directory of its phase.

        If the step is not larger than the last one, because training rolled back,
        TensorBoard hides the steps that were recorded from this step on. The first step
        of a phase does the same with those of an interrupted command. Each phase has
        a separate directory, because TensorBoard hides all later steps of a directory,
        in every phase. The events are written to the disk at once. If the run directory
        is a URI, they are uploaded at the first call, and later if the pause since the
        last upload is over, which is 30 seconds or more.

        Args:
            phase: The training phase, or "results".
            step: The number of the step in its phase.
            values: Numbers by name.
        """
        if step <= self._last.get(phase, step):
            if phase in self._writers:
                self._writers.pop(phase).close()
            folder = os.path.join(self._folder, "tensorboard", phase)
            # TensorBoard reads files in the order of names, which only have seconds
            order = f".{time.time_ns()}"
            self._writers[phase] = self._new(
                folder, purge_step=step, filename_suffix=order
            )
        self._last[phase] = step
        for name, value in values.items():
            self._writers[phase].add_scalar(name, value, step)
        self._writers[phase].flush()
        if not self._storage.is_local and time.monotonic() > self._next_upload:
            self._upload()

    def close(self, failed: bool) -> None:
        """Close the files of events, and upload them if the run directory is a URI.

        The temporary folder of the events is deleted after the upload.

        Args:
            failed: Not used.
        """
        for writer in self._writers.values():
            writer.close()
        if not self._storage.is_local:
            self._upload()
            shutil.rmtree(self._folder)

    def _upload(self) -> None:
        """Upload all files of events to the run directory, and delay the next upload.

        The earliest time of the next upload is 30 seconds after the begin of this one,
        or later if there were many bytes: a second for each 256 KiB.
        """
        start, num_bytes = time.monotonic(), 0
        for folder, _, names in os.walk(self._folder):
            for name in names:
                path = os.path.join(folder, name)
                with open(path, "rb") as file:
                    data = file.read()
                self._storage.write(os.path.relpath(path, self._folder), data)
                num_bytes += len(data)
        self._next_upload = start + upload_pause_s(num_bytes, UPLOAD_S)


class WandB:
    """Send metrics to Weights & Biases.

    The project is ``WANDB_PROJECT`` or "uno". ``WANDB_MODE=offline`` sends nothing.
    """

    def __init__(self, record: Record) -> None:
        import wandb

        key, _ = record.key("wandb", lambda: uuid.uuid4().hex[:8])
        self._phases: set[str] = set()
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "uno"),
            id=key,
            resume="allow",
            name=record.name,
            group=record.group,
            config=dict(record.settings),
            reinit="create_new",
            dir=record.storage.path("") if record.storage.is_local else None,
            settings=wandb.Settings(
                console="off", silent=True, login_timeout=30, finish_timeout=FINISH_S
            ),
        )

    def log(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """Record the values of one training step, under the names ``PHASE/NAME``.

        Their horizontal axis is the metric ``PHASE/step``, which holds the step. W&B's
        own step can only rise, but steps repeat after training rolled back.

        Args:
            phase: The training phase, or "results".
            step: The number of the step in its phase.
            values: Numbers by name.
        """
        if phase not in self._phases:
            self._phases.add(phase)
            self._run.define_metric(f"{phase}/step")
            self._run.define_metric(f"{phase}/*", step_metric=f"{phase}/step")
        self._run.log(
            {
                f"{phase}/step": step,
                **{f"{phase}/{name}": v for name, v in values.items()},
            }
        )

    def close(self, failed: bool) -> None:
        """Finish the W&B run, with exit code 1 if it failed, otherwise 0.

        This waits until W&B has uploaded everything, but at most a minute.

        Args:
            failed: Whether the run ended with an exception.
        """
        self._run.finish(exit_code=int(failed))


class MLflow:
    """Send metrics to MLflow.

    The experiment is ``MLFLOW_EXPERIMENT_NAME`` or "uno", on the server of
    ``MLFLOW_TRACKING_URI``. MLflow queues the metrics and sends them in its own
    threads. The environment variables of :data:`MLFLOW_LIMITS` are set, unless they are
    set already.
    """

    def __init__(self, record: Record) -> None:
        for name, limit in MLFLOW_LIMITS.items():
            os.environ.setdefault(name, limit)
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client, self._metric = MlflowClient(), Metric
        self._sending: list[Any] = []
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "uno")
        found = self._client.get_experiment_by_name(name)
        experiment = (
            found.experiment_id if found else self._client.create_experiment(name)
        )
        tags = {"group": record.group} if record.group else {}

        def create() -> str:
            """Create the MLflow run and return its identifier."""
            run = self._client.create_run(experiment, tags=tags, run_name=record.name)
            return str(run.info.run_id)

        self._id, new = record.key("mlflow", create)
        self._client.update_run(self._id, status="RUNNING")
        params = [Param(key, str(value)) for key, value in record.settings.items()]
        for start in range(0, len(params) * new, 100):  # MLflow refuses more at once
            self._client.log_batch(self._id, params=params[start : start + 100])

    def log(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """Queue the values of one training step for MLflow, under ``PHASE/name``.

        Args:
            phase: The training phase, or "results".
            step: The number of the step in its phase.
            values: Numbers by name.
        """
        now = round(1000 * time.time())
        metrics = [
            self._metric(f"{phase}/{name}", value, now, step)
            for name, value in values.items()
        ]
        self._sending.append(
            self._client.log_batch(self._id, metrics, synchronous=False)
        )

    def close(self, failed: bool) -> None:
        """Wait until MLflow has sent all metrics, then end the MLflow run.

        Args:
            failed: Whether the status becomes "FAILED" instead of "FINISHED".
        """
        for operation in self._sending:
            operation.wait()
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


LOGGERS: dict[str, tuple[str, Callable[[Record], Logger] | None]] = {
    "tensorboard": ("tensorboardX", TensorBoard),
    "wandb": ("wandb", WandB),
    "mlflow": ("mlflow", MLflow),
    "jsonl": ("json", None),  # the run's own metrics.jsonl
}
"""Every name of ``--report-to``: the package it needs, and what makes its
:class:`Logger`.
"""


def require_loggers(config: Config) -> None:
    """Check that the packages of all loggers in ``train.report_to`` are installed.

    Args:
        config: The configuration of the run.

    Raises:
        ConfigError: A package is missing.
    """
    for name in config.train.loggers:
        if importlib.util.find_spec(LOGGERS[name][0]) is None:
            raise ConfigError(
                f"--report-to {name} needs its package: pip install"
                f" 'uno-discovery[{name}]'"
            )


class Loggers(AbstractContextManager["Loggers"]):
    """All loggers of a run that ``--report-to`` names, as a context manager.

    A call sends a line of metrics to each of them. A logger that raises an error is
    switched off, with one warning. The end of the block closes the loggers.
    """

    def __init__(
        self, config: Config, storage: Storage, group: str | None = None
    ) -> None:
        """Start the loggers that ``config`` names in ``train.report_to``.

        "jsonl" needs none, because training itself writes ``metrics.jsonl``. A logger
        that raises an error is left out, with a printed warning.

        Args:
            config: The configuration, which each logger records.
            storage: The run directory.
            group: The name of the sweep, None for a single run.
        """
        name = split(storage.uri)[1]
        record = Record(
            storage,
            f"{group}-{name}" if group else name,
            group,
            flatten(to_dict(config)),
        )
        self._loggers: dict[str, Logger] = {}
        for name in config.train.loggers:
            make = LOGGERS[name][1]
            if make is not None:
                with self._switched_off_by_errors(name):
                    self._loggers[name] = make(record)

    @property
    def names(self) -> list[str]:
        """The names of the loggers that are not switched off, in alphabetical order."""
        return sorted(self._loggers)

    def __call__(self, metrics: Mapping[str, Any]) -> None:
        """Send a line of metrics to all loggers, unless it has no finite loss.

        The loggers get the phase, the step, and the numbers of :func:`scalars`.

        Args:
            metrics: Values by name. "phase" and "step" are required.
        """
        if math.isfinite(metrics.get("loss", math.nan)):
            phase, step, values = metrics["phase"], metrics["step"], scalars(metrics)
            self._call_each(lambda logger: logger.log(phase, step, values))

    def results(self, values: Mapping[str, float]) -> None:
        """Send the finite metrics of the finished run to all loggers.

        The loggers get them as step 0 of the phase "results". Nothing is sent if no
        metric is finite.

        Args:
            values: The metrics by name.
        """
        finite = {name: v for name, v in values.items() if math.isfinite(v)}
        if finite:
            self._call_each(lambda logger: logger.log("results", 0, finite))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close all loggers.

        Args:
            kind: The class of the exception that the block has raised, which the
                loggers record as a failed run; None if it has raised none.
        """
        self._call_each(lambda logger: logger.close(kind is not None))

    def _call_each(self, call: Callable[[Logger], None]) -> None:
        """Call a function for each logger that is not switched off.

        Args:
            call: Takes a logger. If it raises an error, this logger is switched off
                with a warning, and the next one is called.
        """
        for name, logger in list(self._loggers.items()):
            with self._switched_off_by_errors(name):
                call(logger)

    @contextmanager
    def _switched_off_by_errors(self, name: str) -> Iterator[None]:
        """Switch a logger off, with a warning, if the block raises an error.

        The error goes no further. KeyboardInterrupt and the like are still raised.

        Args:
            name: The name of the logger, such as "wandb".
        """
        try:
            yield
        except Exception as error:
            self._loggers.pop(name, None)
            reason = one_line(error) or type(error).__name__
            with suppress(OSError):  # the console is closed
                print_line(f"warning: --report-to {name} is off: {reason}")


def scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a line of metrics by name, for a logger.

    The values "step", "total_steps", "epoch", "epochs", "every_s" and "rank_ms" are no
    metrics and are left out, and so are texts, lists and None.

    Args:
        metrics: JSON values by name. The list "head_losses", which may be missing, has
            one loss for each cluster head.

    Returns:
        The numbers by name, also those that are not finite, and the loss of each head
        as "head_loss/0", "head_loss/1" and so on.
    """
    values = {
        k: v
        for k, v in metrics.items()
        if isinstance(v, int | float) and k not in POSITION_KEYS
    }
    return values | {
        f"head_loss/{head}": loss
        for head, loss in enumerate(metrics.get("head_losses", ()))
    }
