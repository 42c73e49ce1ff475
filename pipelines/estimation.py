"""The number of novel classes, as an interval: what ``uno estimate-classes`` does with its options."""

import time
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from typing import Any

from pipelines import ray_env
from pipelines.console import Progress, say, stopped_at_once
from pipelines.features import load_features
from pipelines.worker import leave_out_unreadable
from uno.config import Config, override
from uno.data.decode import decode_many, readable
from uno.data.defaults import from_images
from uno.data.files import Storage
from uno.data.resident import TrainSet, assemble
from uno.data.sources import read_rows
from uno.data.splits import Task, decide_pile, make_task
from uno.errors import ConfigError
from uno.results import estimate
from uno.results.estimate import Estimate, Settings
from uno.runs import lock
from uno.runs.hardware import local_device
from uno.weights import PRETRAINED, PRETRAINED_FILE, fetch_pretrained


def estimate_job(
    config: Config, settings: Settings, dry_run: bool, given: Container[str] = ()
) -> Estimate | None:
    """Read the data of ``config``, estimate into ``config.output`` and show the result; None: a dry run."""
    if config.compute.workers == 0:
        local_device(config)
    # The number is what we are after: 1 stands in for it and is never read.
    task = make_task(read_rows(config.data), config.data.model_copy(update={"num_novel": 1}))
    pile, reason = decide_pile(config, task.rows.known)
    say(reason)
    config, lines = from_images(override(config, {"data.pile": pile}), task, given)
    for line in lines:
        say(line)
    (labeled, unlabeled), known = task.sizes, f"{len(task.known)} known classes"
    say(f"{task.rows.source}: {labeled:,} labeled rows of {known}, {unlabeled:,} unlabeled rows")
    if dry_run:
        what = f"pretrain {settings.num_splits} encoders, each on some known classes"
        what = "cluster the features of the frozen encoder" if config.model.trainable == "heads" else what
        say(f"would {what}; nothing was done")
        return None
    assert config.output is not None
    storage, start, kept = Storage(config.output), time.perf_counter(), "stopped; finished encoders are kept"
    with lock.claim(storage, on_wait=say), stopped_at_once(kept):
        found = estimate_num_novel(config, task, storage, settings)
    say(format_estimate(found))
    say(f"{time.perf_counter() - start:.0f} s; all curves in {config.output}/estimate.json")
    return found


def estimate_num_novel(
    config: Config, task: Task, storage: Storage, settings: Settings | None = None,
    report: Callable[[str], None] = say,
) -> Estimate:  # fmt: skip
    """:func:`uno.results.estimate.estimate_num_novel` of a task, here or on Ray."""
    compute = config.compute
    if compute.workers == 0:
        data = config, _train_set(config, task, storage), task.known, storage
        return estimate.estimate_num_novel(*data, local_device(config), settings, report=report)
    with ray_env.connect(workers=compute.workers) as ray:
        resources = ray.cluster_resources()
        gpu = ray_env.use_gpu(config, resources)
        if gpu and resources.get("GPU", 0) < compute.gpus_per_worker:
            raise ConfigError("the cluster has too few GPUs for a task; use --device cpu")
        request = {"num_cpus": 1, "num_gpus": compute.gpus_per_worker if gpu else 0}
        tasks = partial(ray_tasks, ray, compute.workers, request)
        data = config, _train_set(config, task, storage, ray), task.known, storage
        return estimate.estimate_num_novel(*data, "cuda" if gpu else "cpu", settings, tasks, report=report)


def _train_set(config: Config, task: Task, storage: Storage, ray: Any = None) -> TrainSet:
    """The training rows decoded, or of a frozen encoder the features of their evaluation views (N,1,D)."""
    if config.model.trainable == "heads":
        if config.model.weights == PRETRAINED and not storage.exists(PRETRAINED_FILE):
            storage.write(PRETRAINED_FILE, fetch_pretrained(config.model.encoder))
        with Progress() as show:
            features, reasons = load_features(config, task, storage, show, ray=ray)
        images = features[:, :1]
    else:
        data = config.data
        images, reasons = decode_many(task.rows.images, data.store_size, interpolation=data.interpolation)
    leave_out_unreadable(reasons, config, task)
    return assemble(task, images, readable(reasons))


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


def format_estimate(found: Estimate) -> str:
    """The curves as a plain table, the answer, and what to make of it."""
    lines = ["", f"{'k':>4}  {'F1':>5}  {'ACC':>5}  {'CVI':>6}"]
    for k, f1, acc, cvi in zip(found.ks, *(found.curves[name] for name in ("f1", "acc", "cvi")), strict=True):
        mark = "  in the interval" if found.low <= k <= found.high else ""
        mark = "  <- estimate" if k == found.num_novel else mark
        lines.append(f"{k:>4}  {f1:>5.3f}  {acc:>5.3f}  {cvi:>6.3f}{mark}")
    ratios = zip(found.sizes["ratios"], found.sizes["clusters"], strict=True)
    wide = found.suggested < found.high
    why = "as the interval is too wide for its larger end" if wide else "the larger end of the interval"
    shares = ", ".join(f"{count:.1f} (r {ratio:g})" for ratio, count in ratios if ratio)
    lines += [
        f"\nclusters of unlabeled rows larger than r x the largest: {shares}",
        f"\nnovel classes: {found.num_novel}, between {found.low} and {found.high}",
        "warning: too few classes merge real ones, too many split them, which uno classes can merge again. "
        f"Suggested: --num-novel {found.suggested}, {why}",
    ]
    if found.at_limit:
        again = f"repeat with --max-novel {2 * found.ks[-1]}"
        lines.append(f"warning: the interval reaches the largest number tried; {again}")
    return "\n".join(lines)
