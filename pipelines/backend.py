"""The backend that does the work of a run on Ray. ``uno`` loads it by name."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from pipelines import nodes, ray_env
from pipelines.features import compute_on_ray
from pipelines.inference import predict_on_ray
from pipelines.train import run_on_ray
from uno.config import Config, override
from uno.data.decode import decode_many, ok_mask
from uno.data.images import Images, from_columns, to_columns
from uno.data.splits import Task
from uno.errors import ConfigError, Interrupted, one_line
from uno.model import features_of
from uno.results import estimate
from uno.results.estimate import Estimate, Settings
from uno.results.infer import Classifier, Decode, build_classifier, read_model_files
from uno.results.predictions import PredictionWriter, Summary
from uno.runs.hardware import num_threads
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
    """The backend that works on a Ray cluster.

    It is the cluster at ``RAY_ADDRESS``, or one that runs on this machine. Otherwise
    one is started on this machine.
    """

    def __init__(self) -> None:
        if (address := ray_env.cluster_address()) is not None:
            # Other functions ask for the cluster by this variable.
            os.environ[ray_env.ADDRESS] = address

    def free_memory(self, config: Config) -> FreeMemory:
        """Return the free memory of the nodes on which a run's workers will be.

        See :func:`pipelines.nodes.free_memory`.
        """
        return nodes.free_memory(config)

    def train(self, run: Run, show: Show) -> dict[str, float]:
        """Train and evaluate the run with Ray Data and Ray Train.

        Args:
            run: The locked run.
            show: Takes each line of metrics.

        Returns:
            The metrics of the evaluation; empty unless ``run.evaluate``.
        """
        return run_on_ray(run, show)

    def after_training(self, task: Task) -> Backend:
        """Return the backend for the work after training, such as predictions.

        Args:
            task: The rows of the run.

        Returns:
            This backend if its workers end sooner than this process, else a local one.
            This backend is returned for at least ``RAY_PAYS_ROWS`` rows, if their
            images have not been read yet. If this process has the decoded images
            already, the workers must also belong to a cluster that runs already. If it
            has the features, the backend is always local.
        """
        ready = task.rows.images.prepared(np.arange(0))
        is_left = ready is None or (ready[0].ndim > 2 and self.is_cluster())
        return self if is_left and len(task.rows) >= RAY_PAYS_ROWS else LocalBackend()

    def is_cluster(self) -> bool:
        """Return whether the workers belong to a cluster that runs already."""
        return ray_env.cluster_address() is not None

    def decoder(self, run: Run, model: Classifier) -> Decode:
        """Return the function that decodes, or encodes, rows of the run for a model.

        On a cluster that runs already, its workers compute features, because this
        machine may be small. In all other cases this process does the work: if Ray was
        started here, if the features are known already, or if the model is that of an
        unfinished run.

        Args:
            run: The run.
            model: The model.

        Returns:
            A function as :data:`uno.results.infer.Decode`.
        """
        here, images = super().decoder(run, model), run.task.rows.images
        ready = images.prepared(np.arange(0))
        has_features = ready is not None and ready[0].ndim == 2
        if has_features or not model.model_hash or not self.is_cluster():
            return here
        files = read_model_files(run.storage)
        return partial(encode_on_ray, run.config, files, images, here)

    def predict(
        self,
        run: Run,
        model: Classifier,
        writer: PredictionWriter,
        show: Callable[[int, int], None],
    ) -> Summary:
        """Classify rows with actors that load the model from the files of its run.

        Args:
            run: The run of the model.
            model: The model. It is not used, because the actors load it.
            writer: The predictions. Parts that are stored already are not computed
                again.
            show: Takes the number of finished rows and of all rows.

        Returns:
            The summary of all predictions.
        """
        config, files = run.config, read_model_files(run.storage)
        with ray_env.connect(workers=config.compute.num_workers) as ray:
            return predict_on_ray(ray, config, files, writer, show)

    @contextmanager
    def encoding(
        self, config: Config, should_stop: Callable[[], bool]
    ) -> Iterator[Compute]:
        """Yield the function that encodes rows with the workers of a cluster."""
        with ray_env.connect(workers=config.compute.num_workers) as ray:
            yield partial(compute_on_ray, ray, give_up=should_stop)

    def estimate(self, run: Run, settings: Settings) -> Estimate:
        """Estimate the number of novel classes, with several tasks of Ray at once.

        Args:
            run: The run whose rows are clustered.
            settings: The settings of the estimate.

        Raises:
            ConfigError: The images do not fit into the memory of this machine.
        """
        config = run.config
        check_driver_memory(config, len(run.task.rows))
        with ray_env.connect(workers=config.compute.num_workers) as ray:
            # One place is enough to begin, and more are used if there is room.
            one = override(config, {"compute.num_workers": 1})
            request = nodes.once_one_fits(
                one, lambda: ray_env.task_request(config, ray.cluster_resources())
            )
            return estimate.estimate_num_novel(
                config,
                estimated_set(run, partial(compute_on_ray, ray)),
                run.task.known,
                run.storage,
                "cuda" if request["num_gpus"] else "cpu",
                settings,
                partial(ray_tasks, ray, config.compute.num_workers, request),
                report=print_line,
            )


def check_driver_memory(config: Config, num_rows: int) -> None:
    """Refuse images that this process cannot hold and send to the workers.

    Args:
        config: The configuration of the run.
        num_rows: The number of images.

    Raises:
        ConfigError: The images, or their features, do not fit.
    """
    # One copy is in this process, and one in Ray's object store.
    needed = 2 * num_rows * resources.row_bytes(config)
    free = resources.free_host_bytes()
    if needed > free:
        raise ConfigError(
            f"{num_rows:,} images need {needed / 1e9:.1f} GB of this machine's memory,"
            f" {free / 1e9:.1f} GB are free; use --limit, or --model.finetune none"
        )


def encode_on_ray(
    config: Config,
    files: Mapping[str, bytes],
    images: Images,
    here: Decode,
    batches: Iterable[np.ndarray],
) -> Iterator[tuple[np.ndarray, Tensor, Sequence[str | None]]]:
    """Compute features on Ray workers, as :data:`uno.results.infer.Decode`.

    Each worker gets a share of the batches. If workers are lost, or if they can read no
    image because the files are on this machine, a warning says so and this machine
    computes everything.

    Args:
        config: The configuration of the run.
        files: The files of the model, by name.
        images: The images of all rows.
        here: Computes the features on this machine.
        batches: Batches of row numbers, int64 (b,).

    Returns:
        For each batch its row numbers, the features float32 (b, D), and for each row
        the reason why it has none, or None.
    """
    rows, workers = list(batches), config.compute.num_workers
    blocks, size = (
        [to_columns(images, some) for some in rows],
        max(1, -(-len(rows) // workers)),
    )
    # A RayError means that nodes were lost.
    with ray_env.connect() as ray, suppress(ray.exceptions.RayError):
        one = override(config, {"compute.num_workers": 1})
        request = nodes.once_one_fits(
            one, lambda: ray_env.task_request(one, ray.cluster_resources())
        )
        device, threads = (
            "cuda" if request["num_gpus"] else "cpu",
            num_threads(config, workers),
        )
        shares = [blocks[i : i + size] for i in range(0, len(blocks), size)]
        shared = files, images.reader(), device, threads
        tasks = dict(ray_tasks(ray, workers, request, encode_blocks, shared, shares))
        found = [batch for share in range(len(tasks)) for batch in tasks[share]]
        if any(None in reasons for _, reasons in found):
            return iter([(own, *batch) for own, batch in zip(rows, found, strict=True)])
    log.warning(
        "workers were lost or can read no image: this machine computes the features"
    )
    return here(rows)


def encode_blocks(
    files: Mapping[str, bytes],
    reader: Images | None,
    device: str,
    threads: int,
    blocks: Sequence[Mapping[str, Any]],
) -> list[tuple[Tensor, list[str | None]]]:
    """Compute the features of blocks of images, in a task of Ray.

    Args:
        files: The files of the model, by name.
        reader: Reads images that are given as row numbers, or None.
        device: The device of the model.
        threads: The number of threads.
        blocks: Columns of :func:`uno.data.images.to_columns`, b rows each.

    Returns:
        For each block the features float32 (b, D), on the CPU, and for each row the
        reason why it has none, or None. Without an image the features are zeros.
    """
    torch.set_num_threads(threads)
    model, found = (
        build_classifier(files, device),
        list[tuple[Tensor, list[str | None]]](),
    )
    for block in blocks:
        how = model.config.data.interpolation
        pixels, reasons = decode_many(
            from_columns(pa.table(block), reader), model.size, threads, how
        )
        width = int(model.module.encoder.num_features)  # type: ignore[arg-type]
        features = torch.zeros(len(reasons), width)
        ok = torch.from_numpy(ok_mask(reasons))
        if ok.any():
            features[ok] = features_of(model.module, pixels[ok], model.config).cpu()
        found.append((features, reasons))
    return found


def ray_tasks(
    ray: Any,
    workers: int,
    request: dict[str, float],
    function: Callable[..., Any],
    shared: tuple[Any, ...],
    items: Sequence[Any],
    give_up: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[int, Any]]:
    """Run tasks of Ray, one an item, as :data:`uno.results.estimate.Tasks`.

    Args:
        ray: The connected module.
        workers: The largest number of tasks at once.
        request: The resources of a task (``num_cpus``, ``num_gpus``).
        function: It is called with the shared arguments and an item.
        shared: Arguments that are sent to each node once.
        items: The items.
        give_up: Returns whether to cancel all tasks and return.

    Yields:
        The position of an item and the result, in the order in which tasks end.

    Raises:
        Exception: The error of the function, as it is. Other tasks are cancelled.
        Interrupted: A task was lost again and again.
    """
    stored = ray.put(shared)
    remote = ray.remote(**request)(lambda shared, item: function(*shared, item))
    waiting = list(enumerate(items))[::-1]
    pending: dict[Any, int] = {}
    try:
        while waiting or pending:
            while waiting and len(pending) < workers:
                position, item = waiting.pop()
                pending[remote.remote(stored, item)] = position
            done, _ = ray.wait(list(pending), timeout=ray_env.POLL_S)
            if give_up():
                return
            if not done:
                continue
            try:
                value = ray.get(done[0])
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
            except ray.exceptions.RayError as error:
                raise Interrupted(
                    f"tasks keep dying ({one_line(error)}); they may be out of memory"
                ) from None
            yield pending.pop(done[0]), value
    finally:
        for task in pending:
            ray.cancel(task, force=True)
