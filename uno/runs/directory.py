"""A run's directory: who may use it, what is wrong with it, and the repairs that
cannot lose anything.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from uno import runs
from uno.config import (
    Config,
    differing_keys,
    dump_yaml,
    override,
    parse_yaml,
    require_code,
)
from uno.data import output, snapshot
from uno.data.files import Storage
from uno.data.rows import Rows
from uno.encoder import changed_code, code_of
from uno.errors import ConfigError, StorageError
from uno.limits import MAX_STATE_BYTES
from uno.profile import FOLDER as PROFILES
from uno.runs import (
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    FORMER_FOLDER,
    LOGGERS_FOLDER,
    METRICS_FILE,
    RAY_FOLDER,
    RESULTS_FILE,
    lock,
)
from uno.runs.checkpoint import (
    FORMAT_VERSION,
    checkpoint_steps,
    file_name,
    read_checkpoints,
)
from uno.runs.hardware import environment
from uno.runs.journal import read_journal
from uno.text import plural

log = logging.getLogger(__name__)
LEFTOVERS = {
    RAY_FOLDER: "Ray Train's bookkeeping of a killed command",
    runs.STOP_FILE: "the request of a stopped command",
}


def is_run(storage: Storage) -> bool:
    """Whether the directory holds a run (False also where it was only begun);
    ConfigError: anything else.
    """
    begun = {ENVIRONMENT_FILE, FORMER_FOLDER}
    return output.is_ours(storage, CONFIG_FILE, "run", begun)


def begin_run(config: Config, storage: Storage, fingerprint: str) -> None:
    """Make the directory a run's; ConfigError: it is one of other settings (named),
    data or format. A warning says where the code of its encoder is another.
    """
    code = code_of(config.model.encoder).get("code")
    if not is_run(storage):
        facts = environment(fingerprint) | ({"encoder_code": code} if code else {})
        storage.write(ENVIRONMENT_FILE, json.dumps(facts, indent=1).encode())
        storage.write(CONFIG_FILE, dump_yaml(config).encode())
        return
    known = output.find_mapping(storage, ENVIRONMENT_FILE)
    if known is None:
        raise ConfigError(
            f"{storage.path(ENVIRONMENT_FILE)} is missing or damaged; use --overwrite"
        )
    if (found := known.get("format_version")) != FORMAT_VERSION:
        raise ConfigError(
            f"{storage.uri} has format version {found}, not {FORMAT_VERSION}; use"
            " --overwrite"
        )
    if keys := differing_keys(read_config_tree(storage), config):
        raise output.other_settings(
            storage.uri, "a run", keys, "use those, --overwrite, or another --output"
        )
    if known.get("data_fingerprint") != fingerprint:
        raise ConfigError(
            f"{storage.uri} was trained on other data (fingerprint differs); use"
            " --overwrite"
        )
    if changed := changed_code(config.model.encoder, known.get("encoder_code"), code):
        log.warning(
            "%s: its numbers may differ from here on; --overwrite starts over", changed
        )


def check_images(storage: Storage, rows: Rows) -> None:
    """Warn that images may not be those that a run began with. ConfigError: some
    have other content.
    """
    then = snapshot.read(storage, snapshot.FILE, rows)
    if then is None:
        return
    suspects, looked, different = found = snapshot.compare(rows, then)
    if len(different):
        what = (
            f"{len(different):,} of {len(looked):,} images that were compared have"
            " changed, e.g. "
        )
        what += rows.ids[different[0]]
        raise ConfigError(
            f"{storage.uri} was trained on other data ({what}); use --overwrite"
        )
    if not found.believed:
        text = (
            "%s images were written to since the run began; the %s that could be"
            " compared are the same"
        )
        log.warning(text, f"{len(suspects):,}", f"{len(looked):,}")


def begin_images(storage: Storage, rows: Rows) -> None:
    """Note which images a run, or a sweep, begins with, or :func:`check_images`
    where it resumes.
    """
    if storage.exists(snapshot.FILE):
        check_images(storage, rows)
    else:
        snapshot.write(storage, snapshot.FILE, rows)


def require_run(storage: Storage) -> None:
    """Raise ConfigError unless the directory is that of a run."""
    if not storage.exists(CONFIG_FILE):
        raise ConfigError(
            f"{storage.uri} is not a run directory: it has no {CONFIG_FILE}"
        )


def read_config_tree(storage: Storage) -> dict[str, Any]:
    """The ``config.yaml`` of a run as a nested dict. ConfigError: there is none, it is
    damaged, or its method cannot be imported.
    """
    require_run(storage)
    tree = None
    with suppress(ValueError):
        tree = parse_yaml(storage.read(CONFIG_FILE, MAX_STATE_BYTES), CONFIG_FILE)
    if not tree:
        raise ConfigError(f"{storage.path(CONFIG_FILE)} is damaged")
    require_code(tree, storage.uri)
    return dict(tree)


def read_results(storage: Storage) -> dict[str, float] | None:
    """``metrics.json``; None where there is none or it is damaged."""
    return output.find_mapping(storage, RESULTS_FILE)


def repair(storage: Storage, thorough: bool = False) -> list[str]:
    """Remove leftovers and damaged checkpoints newer than the newest valid one;
    ``thorough``: all damaged ones, and a damaged configuration is replaced by that of
    the newest checkpoint. Returns a line for each of these. StorageError: a phase has
    checkpoints and none verifies.
    """
    lines, newest = list[str](), None
    for phase in runs.PHASES:
        found, damaged = read_checkpoints(storage, phase, every=thorough)
        newest = found or newest
        for step, problem in damaged.items():
            storage.delete(file_name(phase, step))
            lines.append(
                f"removed the damaged checkpoint of {phase} step {step} ({problem})"
            )
    if thorough and newest is not None and _config_problem(storage):
        storage.write(CONFIG_FILE, newest.config_yaml.encode())
        lines.append(
            f"restored {CONFIG_FILE} from the checkpoint of step {newest.step}"
        )
    for name in _leftovers(storage):
        # a process that outlives its command may still be writing there
        with suppress(StorageError):
            storage.delete(name)
    return lines


def _leftovers(storage: Storage) -> list[str]:
    """Names of what killed commands left: temporary files (on local disks), Ray's
    folder, a STOP file. Threads of loggers may be writing in theirs.
    """
    names = [name for name in LEFTOVERS if storage.exists(name)]
    others = (f"{RAY_FOLDER}/", f"{LOGGERS_FOLDER}/")
    return names + [
        name for name in output.leftovers(storage) if not name.startswith(others)
    ]


class Finding(NamedTuple):
    """One line of a diagnosis. ``level`` is ok, warning or error; an error keeps the
    run from resuming.
    """

    level: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.level:8} {self.text}" + (
            f"; {self.remedy}" if self.remedy else ""
        )


def diagnose(storage: Storage) -> Iterator[Finding]:
    """All that can be told of a run directory without its data; it takes WATCH_S
    where a lock is watched.
    """
    require_run(storage)
    if problem := _config_problem(storage):
        yield Finding(
            "error", problem, "--repair restores it from the newest checkpoint"
        )
    else:
        yield Finding("ok", f"{CONFIG_FILE} is complete")
    yield _of_environment(storage)
    for phase in runs.PHASES:
        yield from _of_checkpoints(storage, phase)
    lines = len(read_journal(storage))
    damaged = (
        len(storage.read(METRICS_FILE).splitlines()) - lines
        if storage.exists(METRICS_FILE)
        else 0
    )
    found = f"{METRICS_FILE}: {plural(damaged, 'unreadable line')}"
    cut = Finding("warning", found, "the next start removes them")
    yield cut if damaged else Finding("ok", f"{METRICS_FILE}: {plural(lines, 'line')}")
    for name in sorted(storage.list(PROFILES)):
        if name.endswith(".txt"):
            yield Finding("ok", storage.read(f"{PROFILES}/{name}").decode())
    if not storage.exists(RESULTS_FILE):
        yield Finding("ok", "not finished: the same command resumes")
    elif read_results(storage) is not None:
        yield Finding("ok", "finished: the same command prints the results")
    else:
        yield Finding(
            "warning", f"{RESULTS_FILE} is damaged", "the same command rewrites it"
        )
    who, lives = lock.lock_owner(storage) or ("no command", True)
    gone = Finding(
        "warning",
        f"{who} has the lock and no longer runs",
        "the next command removes it",
    )
    yield Finding("ok", f"{who} is using this directory") if lives else gone
    for name in _leftovers(storage):
        what = LEFTOVERS.get(name, "an unfinished write")
        yield Finding("warning", f"{name}: {what}", "the next start removes it")


def _config_problem(storage: Storage) -> str:
    """What is wrong with the configuration of a run, '' where nothing is."""
    try:
        override(Config(), read_config_tree(storage))
    except ConfigError as error:
        return str(error)
    return ""


def _of_environment(storage: Storage) -> Finding:
    known: dict[str, Any] = {}
    with suppress(StorageError):
        known = output.find_mapping(storage, ENVIRONMENT_FILE) or {}
    versions = known.get("versions")
    if not isinstance(versions, dict):
        text, remedy = (
            f"{ENVIRONMENT_FILE} is missing or damaged",
            "cannot verify that the data is unchanged; start over with --overwrite",
        )
        return Finding("error", text, remedy)
    if (found := known.get("format_version")) != FORMAT_VERSION:
        return Finding(
            "error", f"format version {found}, not {FORMAT_VERSION}", "--overwrite"
        )
    now = environment("")["versions"]
    pairs = [
        (name, versions.get(name, now[name]))
        for name in ("torch", "torchvision", "numpy")
    ]
    changed = ", ".join(
        f"{name} {then} then, {now[name]} now"
        for name, then in pairs
        if then != now[name]
    )
    if changed:
        return Finding(
            "warning", changed, "the run can resume; results will not be bit-identical"
        )
    return Finding("ok", f"{ENVIRONMENT_FILE} lists the installed versions")


def _of_checkpoints(storage: Storage, phase: str) -> Iterator[Finding]:
    try:
        _, damaged = read_checkpoints(storage, phase, every=True)
    except StorageError as error:
        yield Finding("error", str(error))
        return
    good = [
        str(step) for step in checkpoint_steps(storage, phase) if step not in damaged
    ]
    if good or phase == runs.DISCOVER:  # a run need not have the others
        steps = (
            f"valid checkpoints of step {', '.join(good)}"
            if good
            else "no checkpoint yet"
        )
        yield Finding("ok", f"{phase}: {steps}")
    for step, problem in damaged.items():
        remedy = "an older one is used; --repair removes it"
        yield Finding("warning", f"{phase} step {step}: {problem}", remedy)
