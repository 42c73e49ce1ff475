"""A run's lines in the tools that people watch runs with (``--report-to``). The
driver has every line.
"""

import importlib.util
import math
import os
import queue
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from contextvars import copy_context
from typing import Any, NamedTuple, Protocol

from uno.config import Config, flatten, to_dict
from uno.data.files import Storage, split, upload_pause_s
from uno.errors import ConfigError, one_line
from uno.runs import LOGGERS_FOLDER
from uno.session.console import print_line

POSITION = ("step", "total_steps", "epoch", "epochs", "every_s", "rank_ms")
UPLOAD_S = 30.0  # at least, between two uploads of events to an object store
REQUEST_S = 1.0  # between two requests to MLflow
CLOSE_S = 60.0  # for what a logger still has to do when the run is over


class Record(NamedTuple):
    """Whose numbers a logger gets: the directory, name, group (a sweep) and flat
    configuration of a run.
    """

    storage: Storage
    name: str
    group: str | None
    settings: Mapping[str, Any]

    def key(self, logger: str, new: Callable[[], str]) -> tuple[str, bool]:
        """What ``logger`` calls this run, kept in its directory for a resume;
        whether it is ``new``.
        """
        if (found := self.storage.find(f"{LOGGERS_FOLDER}/{logger}")) is not None:
            return found.decode(), False
        self.storage.write(f"{LOGGERS_FOLDER}/{logger}", (made := new()).encode())
        return made, True


class Logger(Protocol):
    """One tool; made from a :class:`Record`. Whatever it raises switches it off."""

    def log(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """The numbers of one line; after a roll-back steps come again."""

    def results(self, values: Mapping[str, float]) -> None:
        """The metrics of the finished run."""

    def close(self, failed: bool) -> None:
        """The run is over."""


class TensorBoard:
    """Events in ``tensorboard/PHASE`` of the run directory."""

    def __init__(self, record: Record) -> None:
        from tensorboardX import SummaryWriter
        from tensorboardX.proto.summary_pb2 import Summary

        self._storage, self._new, self._summary = record.storage, SummaryWriter, Summary
        self._next_upload = -math.inf  # time.monotonic()
        self._folder = (
            record.storage.path("")
            if record.storage.is_local
            else tempfile.mkdtemp("-uno")
        )
        self._writers: dict[str, Any] = {}
        self._last: dict[str, int] = {}

    def log(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """One directory per phase: purging hides every later step of the directory,
        whatever its name.
        """
        if step <= self._last.get(phase, step):
            if phase in self._writers:
                self._writers.pop(phase).close()
            folder = os.path.join(self._folder, "tensorboard", phase)
            # TensorBoard reads files by name, which has seconds
            order = f".{time.time_ns()}"
            self._writers[phase] = self._new(
                folder, purge_step=step, filename_suffix=order
            )
        self._last[phase] = step
        found = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in values.items()
        ]
        # as one event
        self._writers[phase].file_writer.add_summary(self._summary(value=found), step)
        self._writers[phase].flush()
        if not self._storage.is_local and time.monotonic() > self._next_upload:
            self._upload()

    def results(self, values: Mapping[str, float]) -> None:
        """As scalars of their own directory."""
        self.log("results", 0, values)

    def close(self, failed: bool) -> None:
        """Write what is left."""
        for writer in self._writers.values():
            writer.close()
        if not self._storage.is_local:
            self._upload()
            shutil.rmtree(self._folder)

    def _upload(self) -> None:
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
    """Weights & Biases: project ``WANDB_PROJECT`` or uno, offline with
    ``WANDB_MODE=offline``.
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
            settings=wandb.Settings(console="off", silent=True, login_timeout=30),
        )

    def log(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """Against ``PHASE/step``: W&B's own count goes up alone."""
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

    def results(self, values: Mapping[str, float]) -> None:
        """As the run's summary."""
        self._run.summary.update(dict(values))

    def close(self, failed: bool) -> None:
        """Finish."""
        self._run.finish(exit_code=int(failed))


class MLflow:
    """MLflow: experiment ``MLFLOW_EXPERIMENT_NAME`` or uno at
    ``MLFLOW_TRACKING_URI``.
    """

    def __init__(self, record: Record) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client, self._metric = MlflowClient(), Metric
        self._waiting: list[Metric] = []
        self._sent = -math.inf
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "uno")
        found = self._client.get_experiment_by_name(name)
        place = found.experiment_id if found else self._client.create_experiment(name)
        tags = {"group": record.group} if record.group else {}

        def create() -> str:
            return str(
                self._client.create_run(
                    place, tags=tags, run_name=record.name
                ).info.run_id
            )

        self._id, new = record.key("mlflow", create)
        self._client.update_run(self._id, status="RUNNING")
        params = [Param(key, str(value)) for key, value in record.settings.items()]
        for start in range(0, len(params) * new, 100):  # more at once are refused
            self._client.log_batch(self._id, params=params[start : start + 100])

    def log(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """A request a second at most: a server has many runs to listen to."""
        self._add({f"{phase}/{name}": value for name, value in values.items()}, step)
        if time.monotonic() > self._sent + REQUEST_S:
            self._send()

    def results(self, values: Mapping[str, float]) -> None:
        """As metrics without a phase."""
        self._add(values, 0)

    def close(self, failed: bool) -> None:
        """Finish."""
        self._send()
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")

    def _add(self, values: Mapping[str, float], step: int) -> None:
        now = round(1000 * time.time())
        self._waiting += [
            self._metric(name, value, now, step) for name, value in values.items()
        ]

    def _send(self) -> None:
        for start in range(0, len(self._waiting), 1000):  # more at once are refused
            self._client.log_batch(self._id, self._waiting[start : start + 1000])
        self._waiting, self._sent = [], time.monotonic()


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
    """ConfigError: a package that ``train.report_to`` needs is missing."""
    for name in config.train.loggers:
        if importlib.util.find_spec(LOGGERS[name][0]) is None:
            raise ConfigError(
                f"--report-to {name} needs its package: pip install"
                f" 'uno-discovery[{name}]'"
            )


class Loggers(AbstractContextManager["Loggers"]):
    """The loggers that ``config`` names, each in a thread of its own: one that fails
    says one warning and is off, one that waits holds nobody up.
    """

    def __init__(
        self, config: Config, storage: Storage, group: str | None = None
    ) -> None:
        name = split(storage.uri)[1]
        record = Record(
            storage,
            f"{group}-{name}" if group else name,
            group,
            flatten(to_dict(config)),
        )
        found = {name: LOGGERS[name][1] for name in config.train.loggers}
        self._threads = [
            _LoggerThread(name, make, record) for name, make in found.items() if make
        ]

    def __call__(self, metrics: Mapping[str, Any]) -> None:
        """A line of metrics; one that has no loss says only where the run is."""
        if math.isfinite(metrics.get("loss", math.nan)):
            self._put("log", metrics["phase"], metrics["step"], scalars(metrics))

    def results(self, values: Mapping[str, float]) -> None:
        """What the run has come to."""
        if found := {
            key: value for key, value in values.items() if math.isfinite(value)
        }:
            self._put("results", found)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._put("close", kind is not None)
        end = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                print_line(
                    f"warning: --report-to {thread.name} has not finished in"
                    f" {CLOSE_S:g} s and is left alone"
                )

    def _put(self, *job: Any) -> None:
        for thread in self._threads:
            thread.jobs.put(job)


def scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line of metrics by name."""
    values = {
        k: v
        for k, v in metrics.items()
        if isinstance(v, int | float) and k not in POSITION
    }
    return values | {
        f"head_loss/{head}": loss
        for head, loss in enumerate(metrics.get("head_losses", ()))
    }


class _LoggerThread(threading.Thread):
    def __init__(
        self, name: str, make: Callable[[Record], Logger], record: Record
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.jobs, self._make, self._record = (
            queue.SimpleQueue[tuple[Any, ...]](),
            make,
            record,
        )
        self._context = copy_context()  # whether the console is silent
        self.start()

    def run(self) -> None:
        self._context.run(self._work)

    def _work(self) -> None:
        name, job = self.name, ("",)
        try:
            logger = self._make(self._record)
            while job[0] != "close":
                name, *values = job = self.jobs.get()
                getattr(logger, name)(*values)
        except Exception as error:  # whatever it is: training goes on
            with suppress(OSError):
                print_line(
                    f"warning: --report-to {self.name} is off:"
                    f" {one_line(error) or type(error).__name__}"
                )
            while job[0] != "close":
                job = self.jobs.get()
