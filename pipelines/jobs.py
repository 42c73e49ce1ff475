"""What pretrain, discover, demo and evaluate share: from options to a finished run directory."""

import json
import re
import tempfile
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import safetensors.torch
import torch

from pipelines import nodes
from pipelines.console import Progress, on_stop, say, silence, stopped_at_once
from pipelines.demand import check_demand
from pipelines.features import load_images, on_features, row_bytes
from pipelines.forecast import forecast
from pipelines.inference import own_task, predict_run, unlabeled_rows
from pipelines.options import Options
from pipelines.worker import STOPPING, Job, leave_out_unreadable, run_on_ray
from uno import weights
from uno.config import OWN_ENCODERS, Config, dump_yaml, flatten, override
from uno.data import ingest
from uno.data.check import check, format_report
from uno.data.decode import BAD_SAMPLES, readable
from uno.data.defaults import OF_ENCODER, decided, from_images
from uno.data.files import Storage, full_path, normal, split
from uno.data.resident import assemble, eval_sets, keep_pixels
from uno.data.splits import Task, decide_pile
from uno.data.stream import EvalData, TrainData, streaming_eval_sets, streaming_set
from uno.encoder import require_encoder
from uno.errors import ConfigError, Interrupted
from uno.methods import registry
from uno.presets import IMAGE_SIZE, SIZES
from uno.report.contents import open_task, write_report
from uno.results import predictions
from uno.results.accuracy_table import format_table
from uno.results.classes import OutputClass, dump_classes, hashes, is_measured, with_measured
from uno.results.evaluate import evaluate_run, read_edits
from uno.results.export import CARD_FILE, FORMATS, export, model_card
from uno.results.infer import (
    Classifier,
    decoder,
    load_classifier,
    model_folder,
    save_model,
    with_alignment,
)
from uno.results.trust import verdict
from uno.runs import DISCOVER, ESTIMATE_FILE, PRETRAIN, RESULTS_FILE, directory, lock, run
from uno.runs import REPORT_FILE as REPORT
from uno.runs.checkpoint import checkpoint_steps
from uno.runs.hardware import local_device, num_threads
from uno.runs.hooks import hooked
from uno.train import LocalWorker
from uno.weights import PRETRAINED, PRETRAINED_FILE, fetch_pretrained


def run_job(options: Options, last: str = DISCOVER, report: bool = True) -> int:
    """Check everything, train the phases up to ``last`` that are not finished and, after discovery, evaluate
    and print the table; ``report``: also predict every row and write the run's page. Returns 0.
    """
    config, fresh, evaluate = options.config, options.own.fresh, last == DISCOVER
    if options.own.print_config:
        print(dump_yaml(as_it_would_run(config, fresh, options.given)), end="")
        return 0
    for line in hooked("announced", list[str]()):
        say(line)
    num_threads(config)  # before the data is read
    config, estimate = _with_full_paths(config), None
    if config.compute.workers == 0:
        local_device(config)
    own_weights = starting_weights(config, fresh)
    if config.data.num_novel == "auto":
        if options.own.dry_run:
            raise ConfigError("--dry-run needs a number for --num-novel; uno estimate-classes finds one")
        config, estimate = _with_estimated_classes(config, options.given)
    config, found = decide(config, fresh, options.given)
    task = prepare(config, found)
    phases = run.phases(config, last)
    check_demand(config, task)
    if options.own.dry_run:
        return _dry_run(config, task, phases, own_weights)
    assert config.output is not None
    storage = Storage(config.output)
    if directory.is_run(storage) and not fresh:
        directory.open_run(config, storage, task.rows.fingerprint)
        if evaluate and (finished := directory.read_results(storage)) is not None:
            say(f"{storage.uri} is finished; nothing is trained again (--fresh starts over)")
            _show(storage, finished)
            return 0
    with lock.claim(storage, on_wait=say) as claim:
        if fresh:
            directory.clear(claim.storage)
        directory.open_run(config, claim.storage, task.rows.fingerprint)
        if own_weights is not None and not claim.storage.exists(PRETRAINED_FILE):
            claim.storage.write(PRETRAINED_FILE, own_weights)  # workers and a resumed run fetch nothing
        if estimate is not None:
            claim.storage.write(ESTIMATE_FILE, estimate)
        for line in forecast(config, task, claim.storage, phases):
            say(line)
        with _executed(Job(config, task, phases, evaluate, claim)) as (values, task):
            if not evaluate:
                say(f"finished: {storage.uri}")
                return 0
            with stopped_at_once("stopped before the run was finished; resume with the same command"):
                _finish(config, claim.storage, task, values, report)
    _show(storage, values)
    return 0


def evaluate_job(target: str, given: Mapping[str, Any]) -> int:
    """Evaluate the run in directory ``target`` again, and write its report where that changes what it shows;
    ``given`` dotted keys say where that happens.
    """
    storage = Storage(target)
    stored = override(Config(), directory.read_config_tree(storage))
    here = {"compute.workers": 0, "compute.device": "auto"}  # the run's workers may have been elsewhere
    config = _with_full_paths(override(stored, {**here, **given, "output": storage.uri}))
    if config.compute.workers == 0:
        local_device(config)
    require_encoder(config.model.encoder, storage.uri)
    task = prepare(config)
    directory.open_run(config, storage, task.rows.fingerprint)
    with lock.claim(storage, on_wait=say) as claim:
        edits = read_edits(storage)
        if edits is not None and edits.alignment is None:
            model = load_classifier(storage)
            with_alignment(model, claim.storage, decoder(model, task.rows), unlabeled_rows(task))
        before = directory.read_results(storage)
        with _executed(Job(config, task, (), True, claim)) as (values, task):
            if values != before and storage.exists(REPORT):
                with stopped_at_once("stopped; nothing was changed"):
                    write_report(config, claim.storage, task, device=local_device(config), metrics=values)
        _write_results(claim.storage, values)
        if storage.exists(f"model/{CARD_FILE}"):
            _write_card(claim.storage, load_classifier(storage), values)
    _show(storage, values)
    return 0


def apply_classes(claim: lock.Claim, model: Classifier, edited: list[OutputClass]) -> None:
    """Make ``edited`` the classes of a run's ``model``, and bring what the run holds in line: predictions,
    metrics, report, card, exports. Raises, before anything is written, where the data that takes is gone.
    """
    storage, folder = claim.storage, model_folder(claim.storage)
    config = override(model.config, {"compute.workers": 0, "compute.device": "auto", "output": storage.uri})
    values, found = directory.read_results(storage), predictions.read_identity(storage)
    data = dump_classes(storage.read(f"{folder}classes.json"), edited)
    same = {"model_hash": model.model_hash, "routes": hashes(edited)["routes"]}
    predict = found is not None and not same.items() <= found.items()
    trained = values is not None and checkpoint_steps(storage, DISCOVER)
    measure, has_report = bool(trained) and not is_measured(data), storage.exists(REPORT)
    task, done = None, ["the model"]
    if predict or measure:
        task = own_task(config)
    elif has_report and (task := open_task(config, storage)[0]) is None:
        say(f"warning: {REPORT} stays as it is: the run's data is gone or has changed")
    storage.write(f"{folder}classes.json", data)
    model = replace(model, classes=edited)
    if task is not None:
        model = with_alignment(model, storage, decoder(model, task.rows), unlabeled_rows(task))
        with _executed(Job(config, task, (), measure, claim)) as (measured, task):  # without Ray
            values = measured or values
    if predict:
        assert task is not None
        model, summary = predict_run(config, storage, task, model)
        say(f"{summary.rows:,} rows predicted again: {summary.path}")
        done.append(predictions.FILE)
    elif predictions.rename(storage, edited):
        done.append(predictions.FILE)
    if measure and values:
        _write_results(storage, values)
        done.append(RESULTS_FILE)
    if storage.exists(folder + CARD_FILE):
        _write_card(storage, model, values or {})
    if task is not None and has_report:
        write_report(config, storage, task, device=local_device(config), model=model)
        done.append(REPORT)
    for format in ("pt2", "onnx"):
        if storage.exists(name := folder + FORMATS[format]):
            try:
                storage.write(name, export(model, format))
                done.append(name)
            except ConfigError as error:
                say(f"warning: {name} has the classes of before: {error}")
    say(f"applied to {', '.join(done)}")


def _with_full_paths(config: Config) -> Config:
    """``config.model.weights`` as workers can open it: they run in another directory."""
    if config.model.weights in (None, PRETRAINED):
        return config
    source = full_path(normal(config.model.weights))
    folder, name = split(source)
    if weights.is_file(source):
        if not Storage(folder).exists(name):
            raise ConfigError(f"model.weights: no such file {source}")
    elif not checkpoint_steps(Storage(source), PRETRAIN):
        raise ConfigError(
            f"model.weights: {source} is no {', '.join(weights.SUFFIXES)} and no run that has pretrained"
        )
    return override(config, {"model.weights": source})


def starting_weights(config: Config, fresh: bool) -> bytes | None:
    """The library's own weights as a safetensors file, where a run starts from them: those it keeps, or else
    fetched. An encoder or weights that do not fit are a ConfigError here, before any data is read.
    """
    source, own, tensors = config.model.weights, None, None
    if config.model.trainable == "heads" and source is None:
        raise ConfigError(
            "model.trainable heads needs --weights: an encoder that has learnt nothing finds nothing"
        )
    if source == PRETRAINED:
        storage = Storage(config.output) if config.output and not fresh else None
        if storage is not None and storage.exists(PRETRAINED_FILE):
            return storage.read(PRETRAINED_FILE)
        own = fetch_pretrained(config.model.encoder)
        tensors = safetensors.torch.load(own)
    elif source is not None and weights.is_file(source):
        tensors = weights.read_weights(source)
    if tensors is not None or config.model.encoder not in OWN_ENCODERS:
        weights.check_encoder(config, tensors)
    return own


def _with_estimated_classes(config: Config, given: Container[str]) -> tuple[Config, bytes]:
    """``config`` with the suggested number of classes, and estimate.json, kept beside the run directory."""
    from pipelines.estimation import estimate_job
    from uno.results.estimate import Settings

    folder = f"{config.output}-estimate"
    found = estimate_job(override(config, {"output": folder}), Settings(), False, given)
    assert found is not None
    return override(config, {"data.num_novel": found.suggested}), Storage(folder).read(ESTIMATE_FILE)


def decide(config: Config, fresh: bool, given: Iterable[str] = ()) -> tuple[Config, Task | None]:
    """``config`` with ``data.ingest`` and ``data.pile`` decided, and, unless ``given``, ``data.hold_out`` and
    what its images decide (a run goes on as it began); and the task if it was read. Says what they are.
    """
    began, given = False, {*given, *(SIZES if IMAGE_SIZE in given else ())}
    config = as_the_encoder_learnt(config, given)
    if config.output is not None and not fresh and (storage := Storage(config.output)).exists("config.yaml"):
        stored = flatten(directory.read_config_tree(storage))
        if config.data.pile == "auto":  # before there were mixed piles, all were novel
            config = override(config, {"data.pile": stored.get("data.pile", "novel")})
            began = config.data.pile != "auto"
        if "data.hold_out" not in given:  # once own images held nothing out by default
            config = override(config, {"data.hold_out": stored.get("data.hold_out", 0.0)})
        config = as_stored(config, stored, given)
        given |= set(decided(config))
        if config.data.ingest == "auto":
            say(decide_pile(config, [], began)[1])
            return override(config, {"data.ingest": stored.get("data.ingest", "auto")}), None
    task = own_task(config)
    pile, reason = decide_pile(config, task.rows.known, began)
    say(reason)
    config, lines = from_images(override(config, {"data.pile": pile}), task, given)
    for line in lines:
        say(line)
    asked = config if config.data.ingest == "auto" else override(config, {"compute.workers": 0})
    free = nodes.free_memory(asked)
    needs_images = registry.load(config).needs_images
    chosen, reason = ingest.choose(config, len(task.rows), row_bytes(config), *free, needs_images)
    say(f"data: {reason}")
    return override(config, {"data.ingest": chosen}), task


def as_it_would_run(config: Config, fresh: bool, given: Iterable[str]) -> Config:
    """``config`` with what own images decide, unless the number of their classes is to be found first."""
    if not decided(config) or config.data.num_novel == "auto":
        return config
    with silence():
        found, _ = decide(config, fresh, given)
    return override(found, {"data.ingest": config.data.ingest})  # the machine's affair


def as_stored(config: Config, stored: Mapping[str, Any], given: Container[str]) -> Config:
    """``config`` with what its images decided when the flat tree ``stored`` was written."""
    keys = [key for key in decided(config) if key in stored and key not in given]
    return override(config, {key: stored[key] for key in keys})


def as_the_encoder_learnt(config: Config, given: Container[str]) -> Config:
    """Own images as the run took them whose encoder this one starts from."""
    source = config.model.weights
    if source in (None, PRETRAINED) or weights.is_file(source) or not decided(config):
        return config
    stored = flatten(directory.read_config_tree(Storage(str(source))))
    found = {key: stored[key] for key in OF_ENCODER if key in stored and key not in given}
    config = override(config, found)
    say(f"size: {config.augment.large.size} px, mean and std: as {source} learnt them")
    return config


def prepare(config: Config, task: Task | None = None) -> Task:
    """Read the rows' table unless it is there, and run the preflight checks: their first error is raised."""
    task = own_task(config) if task is None else task
    for problem in check(task, config):
        if problem.level == "error":
            raise ConfigError(problem.message)
        say(f"warning: {problem.message}")
    labeled, unlabeled = task.sizes
    run.plans(config, labeled, unlabeled, config.compute.workers)
    if config.compute.workers == 0:
        local_device(config)
    rows = f"{labeled:,} labeled rows of {len(task.known)} known classes, {unlabeled:,} unlabeled rows"
    unseen = zip(_unseen(task), ("test rows", "rows held out"), strict=True)
    test = "".join(f", {count:,} {what}" for count, what in unseen if count)
    say(f"{task.rows.source}: {rows}{test}, {task.num_novel} classes to discover")
    return task


def _unseen(task: Task) -> tuple[int, int]:
    """Numbers of rows that training does not see: the source's test rows, and those that are held out."""
    own = int((~task.rows.is_train).sum())
    return own, int((~task.is_train).sum()) - own


@contextmanager
def _executed(job: Job) -> Iterator[tuple[dict[str, float], Task]]:
    """Heal the directory, train and evaluate, here or on Ray: metrics, and the task with its images, which
    may be gone afterwards.
    """
    config, storage = job.config, job.claim.storage
    for line in directory.heal(storage):
        say(f"warning: {line}")
    reached = [(phase, steps[-1]) for phase in job.phases if (steps := checkpoint_steps(storage, phase))]
    if reached:
        say("resuming at {} step {}".format(*reached[-1]))
    with ExitStack() as until:
        with Progress(interval=config.train.log_every) as progress:
            execute = partial(run_on_ray, until=until) if config.compute.workers else _run_here
            done = execute(job, hooked("in_driver", progress, storage))
        if config.data.ingest == "streaming" and storage.exists(BAD_SAMPLES):
            count = len(storage.read(BAD_SAMPLES).splitlines())
            say(f"warning: {count} images were unreadable; see {storage.path(BAD_SAMPLES)}")
        yield done


def _run_here(
    job: Job, show: Callable[[dict[str, Any]], None], keep: bool = True
) -> tuple[dict[str, float], Task]:
    """Everything in this process, without Ray; unless ``keep``, unreadable images are listed in no file."""
    config, task, storage = job.config, job.task, job.claim.storage
    torch.set_num_threads(num_threads(config))
    worker = LocalWorker(local_device(config), show)
    train: TrainData
    truth: Callable[[], Mapping[str, EvalData]]

    def stop() -> None:
        if not job.phases:  # nothing is trained, so nothing waits for a step to end
            raise Interrupted("stopped; nothing was changed")
        worker.stop_requested = True

    with on_stop(stop, STOPPING if job.phases else None):
        if config.data.ingest == "streaming":
            stream = streaming_set(config, task, storage)
            train, truth = stream, partial(streaming_eval_sets, config, task, stream.bad)
        else:
            images, reasons = load_images(config, task, storage, show, lambda: worker.stop_requested)
            leave_out_unreadable(reasons, config, task, storage if keep else None)
            task, ok = keep_pixels(task, images, reasons), readable(reasons)
            train, truth = assemble(task, images, ok), partial(eval_sets, task, images, ok)
        train = train.to(worker.device)
        for phase in job.phases:
            run.run_phase(config, phase, train, worker, storage)
    if not job.evaluate:
        return {}, task
    num_true = len(task.known) + len(task.novel)
    with nullcontext() if job.phases else on_stop(stop):
        return evaluate_run(config, storage, train, truth(), num_true, worker), task


def _finish(config: Config, storage: Storage, task: Task, values: dict[str, float], report: bool) -> None:
    """The model, with ``report`` all rows' predictions and the page, then the mark of a finished run."""
    trained = run.load_trained(config, storage, task.num_known, task.num_novel)
    model = save_model(config, storage, *trained, task.known)
    _write_card(storage, model, values, f"{task.rows.source}, fingerprint {task.rows.fingerprint[:16]}")
    if report:
        say("predicting every row and writing the report")
        model, _ = predict_run(config, storage, task, model)
        _mark_measured(storage)
        write_report(config, storage, task, device=local_device(config), model=model, metrics=values)
    _write_results(storage, values)


def _write_results(storage: Storage, values: dict[str, float]) -> None:
    _mark_measured(storage)
    storage.write(RESULTS_FILE, json.dumps(values, indent=1, sort_keys=True).encode())


def _mark_measured(storage: Storage) -> None:
    """The classes are those that the run's results count."""
    if storage.exists("model/classes.json") and not is_measured(data := storage.read("model/classes.json")):
        storage.write("model/classes.json", with_measured(data))


def _write_card(storage: Storage, model: Classifier, values: Mapping[str, float], data: str = "") -> None:
    """The model card; ``data`` is what it says of the run's rows, by default what it said before."""
    name = model_folder(storage) + CARD_FILE
    if not data and (before := re.search("^- Data: (.*)$", storage.read(name).decode(), re.M)):
        data = before[1]
    facts = {"Data": data} if data else {}
    storage.write(name, model_card(model, facts, values).encode())


def _show(storage: Storage, values: dict[str, float]) -> None:
    if (found := verdict(values)) is not None:
        say(f"\n{found}")
    say(f"\n{format_table(values)}\n\nresults in {storage.uri}")
    if storage.exists(REPORT):
        say(f"report:    {storage.path(REPORT)}")


def _dry_run(config: Config, task: Task, phases: tuple[str, ...], own_weights: bytes | None) -> int:
    """The data report, one step of each phase in a scratch directory, and the plan."""
    say(format_report(task, check(task, config)))
    for name, plan in run.plans(config, *task.sizes, config.compute.workers).items():
        if name in phases:
            epochs = f"{getattr(config, name).epochs} epochs of {plan.steps_per_epoch} steps"
            say(f"{name}: {epochs} of {plan.labeled_size} labeled + {plan.unlabeled_size} unlabeled rows")
    with tempfile.TemporaryDirectory(prefix="uno-dry-run-") as folder:
        once = override(config, {"train.max_steps": 1, "compute.workers": 0, "output": folder})
        if on_features(config):  # which take minutes, and would be kept
            if registry.load(config).needs_images:
                say(f"no step ran: method {config.method} begins with the features of all rows")
                return 0
            once = override(once, {"data.ingest": "streaming"})
        with lock.claim(Storage(folder), on_wait=say) as claim:
            if own_weights is not None:
                claim.storage.write(PRETRAINED_FILE, own_weights)
            _run_here(Job(once, task, phases, False, claim), lambda metrics: None, keep=False)
    say("one step of each phase ran; nothing was kept")
    return 0
