"""The work of a run on Ray, for whoever wants workers: :class:`OnRay` is a place of ``uno.session``."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from pipelines import nodes, ray_env
from pipelines.features import compute_on_ray
from pipelines.inference import predict_on_ray
from pipelines.worker import run_on_ray
from uno.config import Config, override
from uno.data.files import Storage
from uno.data.splits import Task
from uno.results import estimate
from uno.results.estimate import Estimate, Settings
from uno.results.infer import Classifier, read_model_files
from uno.results.predictions import PredictionWriter, Summary
from uno.session.console import print_line
from uno.session.data import Show
from uno.session.place import Place, TrainingJob, estimated_set
from uno.session.resources import Room


class OnRay(Place):
    """The Ray cluster at ``RAY_ADDRESS``, or one that runs on this machine, else one that is started."""

    def __init__(self) -> None:
        if (address := ray_env.cluster_address()) is not None:
            os.environ[ray_env.ADDRESS] = address  # for all who ask whether there is one

    def free_memory(self, config: Config) -> Room:
        """The least that a worker finds on its node, and of the store of any node."""
        return nodes.free_memory(config)

    def train(
        self, job: TrainingJob, show: Show, until: ExitStack, keep: bool = True
    ) -> tuple[dict[str, float], Task]:
        """By Ray Data and Ray Train."""
        return run_on_ray(job, show, until)

    def predict(
        self, config: Config, model: Classifier, storage: Storage, writer: PredictionWriter,
        show: Callable[[int, int], None],
    ) -> Summary:  # fmt: skip
        """By actors that load the model from the files of its run."""
        with ray_env.connect(workers=config.compute.num_workers) as ray:
            return predict_on_ray(ray, config, read_model_files(storage), writer, show)

    def estimate(
        self, config: Config, task: Task, storage: Storage, settings: Settings | None = None
    ) -> Estimate:
        """As many encoders and clusterings at once as there are workers."""
        with ray_env.connect(workers=config.compute.num_workers) as ray:
            one = override(config, {"compute.num_workers": 1})  # more are used where there is room
            request = nodes.once_one_fits(one, lambda: ray_env.task_request(config, ray.cluster_resources()))
            tasks = partial(ray_tasks, ray, config.compute.num_workers, request)
            train = estimated_set(config, task, storage, partial(compute_on_ray, ray))
            device = "cuda" if request["num_gpus"] else "cpu"
            return estimate.estimate_num_novel(
                config, train, task.known, storage, device, settings, tasks, report=print_line
            )


def ray_tasks(
    ray: Any, workers: int, request: dict[str, float], function: Callable[..., Any],
    shared: tuple[Any, ...], items: Sequence[Any],
) -> Iterator[tuple[int, Any]]:  # fmt: skip
    """:data:`uno.results.estimate.Tasks` on Ray: at most ``workers`` at once, each with ``request``
    (``num_cpus``, ``num_gpus``); shared arguments travel once. An error is raised as it was in the task.
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
