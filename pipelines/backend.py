"""The backend that does the work of a run on Ray: training, predictions, estimates.

:func:`uno.session.backend.choose_backend` imports it by its name, because the package
``uno`` imports no Ray.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np

from pipelines import nodes, ray_env
from pipelines.features import compute_on_ray
from pipelines.predict import predict_on_ray
from pipelines.tasks import run_tasks, wait_for_task
from pipelines.train import run_on_ray
from uno.config import Config
from uno.data.splits import Task
from uno.errors import ConfigError
from uno.results import estimate
from uno.results.estimate import Estimate, Settings
from uno.results.infer import Classifier, read_model_files
from uno.results.predictions import PredictionWriter, Summary
from uno.session import resources
from uno.session.backend import LocalBackend, estimated_set
from uno.session.console import print_line
from uno.session.data import Compute, Show
from uno.session.resources import FreeMemory
from uno.session.run import Backend, Run

log = logging.getLogger(__name__)


# At the end of a smaller run, starting actors takes longer than the work.
RAY_PAYS_ROWS = 20_000


class RayBackend(LocalBackend):
    """The backend that trains, predicts and estimates on a Ray cluster.

    It is the cluster at ``RAY_ADDRESS``, or one that runs on this machine. Otherwise
    one is started on this machine.
    """

    def __init__(self) -> None:
        if (address := ray_env.cluster_address()) is not None:
            # Other functions ask for the cluster by this variable.
            os.environ[ray_env.ADDRESS] = address

    def free_memory(self, config: Config) -> FreeMemory:
        """Return the free memory in bytes of the machines on which workers would run.

        On a running cluster this waits for nodes for the workers, and tasks of Ray
        measure them, see :func:`pipelines.nodes.free_memory`. Without a running
        cluster, or if no task answers within 60 s, this machine is measured.

        Args:
            config: The configuration of the run.

        Returns:
            ``host``, the least free main memory; ``device``, the least free GPU memory
            for a worker; ``store``, the size of the smallest object store of a running
            cluster; and ``driver``, the free main memory of this machine if the others
            are of nodes. A value that does not apply is None.

        Raises:
            ConfigError: The cluster is too small for the workers, and does not grow
                within ``compute.wait_minutes``.
        """
        return nodes.free_memory(config)

    def train(self, run: Run, show: Show) -> dict[str, float]:
        """Train and evaluate a run with Ray Data and Ray Train.

        The workers write checkpoints into the directory of the run.

        Args:
            run: The run, inside ``run.locked()``, so that no other command writes into
                its directory. ``run.phases`` are trained from their newest checkpoints;
                without phases the run is only evaluated. If it is evaluated and its
                images are not streamed, its rows hold the decoded images or the
                features afterwards.
            show: Takes each line of training metrics, values by name.

        Returns:
            The metrics of the evaluation by name; empty if ``run.evaluate`` is False.

        Raises:
            ConfigError: The cluster has no place for the workers, or too many images
                cannot be read.
            Interrupted: The user has asked to stop, or workers keep dying.
            UnoError: A worker raised it for the user to act on.
            Exception: Another error of the workers' code occurred three times in a row
                without a new checkpoint.
        """
        return run_on_ray(run, show)

    def after_training(self, task: Task) -> Backend:
        """Return the backend for the work after training, such as predictions.

        The aim is to end soon: Ray is faster for many images that must still be read,
        and this process for few images or for images that it already has in memory.

        Args:
            task: All rows of the run, with their images.

        Returns:
            A :class:`~uno.session.backend.LocalBackend` if there are fewer than 20,000
            rows, or if this process already has the features of the rows. If it already
            has their decoded images, this Ray backend is returned only if there is a
            running cluster, see :func:`pipelines.ray_env.cluster_address`, and a local
            one otherwise. If it has neither, this Ray backend is returned.
        """
        ready = task.rows.images.prepared(np.arange(0))
        is_left = ready is None or (
            ready[0].ndim > 2 and ray_env.cluster_address() is not None
        )
        return self if is_left and len(task.rows) >= RAY_PAYS_ROWS else LocalBackend()

    def predict(
        self,
        run: Run,
        model: Classifier,
        writer: PredictionWriter,
        show: Callable[[int, int], None],
    ) -> Summary:
        """Classify rows with Ray actors that load the model from the files of its run.

        This connects to the cluster, or starts a private one, and disconnects at the
        end. A connection that this process has already is used, and left open.

        Args:
            run: The run of the model. Its configuration has the number of workers.
            model: The model. It is not used, because the actors load it.
            writer: Has the rows to classify, and writes a Parquet file of predictions
                for each partition of rows. Partitions that are written already are not
                computed again.
            show: Is called as ``show(done, total)`` with the number of finished rows
                and the number of all rows.

        Returns:
            The path of the predictions, and the numbers of all, readable and unreadable
            rows.

        Raises:
            ConfigError: The cluster cannot be reached, or had no place for the workers
                within ``compute.wait_minutes``.
        """
        config, files = run.config, read_model_files(run.storage)
        with ray_env.connect(workers=config.compute.num_workers) as ray:
            return predict_on_ray(ray, config, files, writer, show)

    @contextmanager
    def encoding(
        self, config: Config, should_stop: Callable[[], bool]
    ) -> Iterator[Compute]:
        """Connect to Ray, and yield a function that encodes rows on its workers.

        At the end of the ``with`` block the connection is closed, which also ends a
        private cluster that was started for it. A connection that this process had
        before is left open.

        Args:
            config: The configuration of the run, with the number of workers.
            should_stop: Returns whether the user has asked to stop. The function asks
                it while it waits for nodes.

        Yields:
            A function that computes features with a frozen encoder. It takes a
            :class:`~uno.data.features.FeatureJob` (all rows, and how to encode them),
            the encoder, and row numbers int64 (n,); and yields the features in chunks,
            see :func:`pipelines.features.compute_on_ray`.
        """
        with ray_env.connect(workers=config.compute.num_workers) as ray:
            yield partial(compute_on_ray, ray, give_up=should_stop)

    def estimate(self, run: Run, settings: Settings) -> Estimate:
        """Estimate the number of novel classes, with several tasks of Ray at once.

        At most ``compute.num_workers`` tasks run at a time. With a frozen encoder Ray
        only computes the features, and this process clusters them.

        Args:
            run: The run with the labeled and unlabeled rows, inside ``run.locked()``.
                The estimate and pretrained encoders are stored in its directory.
            settings: The parameters of the estimate, such as the largest number to try.

        Returns:
            The estimated number, with its interval.

        Raises:
            ConfigError: The images do not fit into the memory of this machine, no node
                had a place for a task within ``compute.wait_minutes``, there are too
                few known classes or unlabeled rows, or too many images cannot be read.
            Interrupted: Ray lost a task, and could not run it again.
        """
        config = run.config
        check_driver_memory(config, len(run.task.rows))
        with ray_env.connect(workers=config.compute.num_workers) as ray:
            request = wait_for_task(ray, config)
            return estimate.estimate_num_novel(
                config,
                estimated_set(run, partial(compute_on_ray, ray)),
                run.task.known,
                run.storage,
                "cuda" if request["num_gpus"] else "cpu",
                settings,
                partial(run_tasks, ray, config.compute.num_workers, request),
                report=print_line,
            )


def check_driver_memory(config: Config, num_rows: int) -> None:
    """Check that this process can hold all images of a run and send them to workers.

    They take memory twice: in this process, and in Ray's object store on this machine.

    Args:
        config: The configuration of the run. With a frozen encoder, the features count
            instead of the images.
        num_rows: The number of images.

    Raises:
        ConfigError: Two copies do not fit into the free main memory of this machine.
    """
    # One copy is in this process, and one in Ray's object store.
    needed = 2 * num_rows * resources.row_bytes(config)
    free = resources.free_host_bytes()
    if needed > free:
        raise ConfigError(
            f"{num_rows:,} images need {needed / 1e9:.1f} GB of this machine's memory,"
            f" {free / 1e9:.1f} GB are free; use --limit, or --model.finetune none"
        )
