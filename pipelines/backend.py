"""The backend that does the work of a run on Ray. ``uno`` loads it by name."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from pipelines import nodes, ray_env
from pipelines.features import compute_on_ray
from pipelines.inference import predict_on_ray
from pipelines.worker import run_on_ray
from uno.config import Config, override
from uno.data.decode import decode_many, ok_mask
from uno.data.images import Images, from_columns, to_columns
from uno.data.splits import Task
from uno.model import features_of
from uno.results import estimate
from uno.results.estimate import Estimate, Settings
from uno.results.infer import Classifier, Decode, build_classifier, read_model_files
from uno.results.predictions import PredictionWriter, Summary
from uno.runs.hardware import num_threads
from uno.session.backend import LocalBackend, estimated_set
from uno.session.console import print_line
from uno.session.data import Show
from uno.session.resources import FreeMemory
from uno.session.run import Backend, Run

log = logging.getLogger(__name__)


# At the end of a smaller run, starting actors takes longer than the work.
RAY_PAYS_ROWS = 20_000


class RayBackend(LocalBackend):
    """The Ray cluster at ``RAY_ADDRESS``, or one that runs on this machine, else one
    that is started.
    """

    def __init__(self) -> None:
        if (address := ray_env.cluster_address()) is not None:
            # for all who ask whether there is one
            os.environ[ray_env.ADDRESS] = address

    def free_memory(self, config: Config) -> FreeMemory:
        """Return the least bytes that a worker finds free on its node."""
        return nodes.free_memory(config)

    def train(self, run: Run, show: Show) -> dict[str, float]:
        """Train and evaluate the run with Ray Data and Ray Train."""
        return run_on_ray(run, show)

    def after_training(self, task: Task) -> Backend:
        """Return this backend only where its workers end sooner than this process.

        They do if the run has many rows whose features are not at hand. Images that
        this process has decoded are worth the workers of a cluster alone.
        """
        ready = task.rows.images.prepared(np.arange(0))
        is_left = ready is None or (ready[0].ndim > 2 and self.is_cluster())
        return self if is_left and len(task.rows) >= RAY_PAYS_ROWS else LocalBackend()

    def is_cluster(self) -> bool:
        """Return whether the workers are those of a cluster that runs already."""
        return ray_env.cluster_address() is not None

    def decoder(self, run: Run, model: Classifier) -> Decode:
        """Return the function that decodes, or encodes, rows of the run for a model.

        The workers of a cluster compute features, because this machine may be small.
        This process decodes rows that need no encoder, those of a run that is not
        finished, and all rows if Ray was started here.
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
        """Classify rows with actors that load the model from the files of its run."""
        config, files = run.config, read_model_files(run.storage)
        with ray_env.connect(workers=config.compute.num_workers) as ray:
            return predict_on_ray(ray, config, files, writer, show)

    def estimate(self, run: Run, settings: Settings) -> Estimate:
        """Estimate with as many encoders and clusterings at once as workers."""
        config = run.config
        with ray_env.connect(workers=config.compute.num_workers) as ray:
            # more are used where there is room
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


def encode_on_ray(
    config: Config,
    files: Mapping[str, bytes],
    images: Images,
    here: Decode,
    batches: Iterable[np.ndarray],
) -> Iterator[tuple[np.ndarray, Tensor, Sequence[str | None]]]:
    """:data:`uno.results.infer.Decode` by tasks in the place of workers, each with a
    share of the batches; by ``here``, which is said, where they are lost or can read no
    image, as those of this machine's files.
    """
    rows, workers = list(batches), config.compute.num_workers
    blocks, size = (
        [to_columns(images, some) for some in rows],
        max(1, -(-len(rows) // workers)),
    )
    # nodes that are lost
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
    """A task: of each block of :func:`uno.data.images.to_columns` the features float32
    (b, D) by the model of these ``files``, and why a row has none.
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
) -> Iterator[tuple[int, Any]]:
    """:data:`uno.results.estimate.Tasks` on Ray: at most ``workers`` at once, each with
    ``request`` (``num_cpus``, ``num_gpus``); shared arguments travel once. An error is
    raised as it was in the task.
    """
    stored = ray.put(shared)
    remote = ray.remote(**request)(lambda shared, item: function(*shared, item))
    waiting = list(enumerate(items))[::-1]
    pending: dict[Any, int] = {}
    while waiting or pending:
        while waiting and len(pending) < workers:
            position, item = waiting.pop()
            pending[remote.remote(stored, item)] = position
        done, _ = ray.wait(list(pending), num_returns=1)
        try:
            value = ray.get(done[0])
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        yield pending.pop(done[0]), value
