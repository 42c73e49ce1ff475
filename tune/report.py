"""What a sweep leaves behind: ``sweep.parquet``, ``best.yaml`` and a self-contained ``sweep.html``.

Everything is made from the sweep's directory alone, so it can be made again at any time. With the oracle
score every file is called ``oracle-...`` and every table says so.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from scipy import stats

from tune import page, records, spaces
from tune.records import FAILED, STOPPED, Trial
from tune.score import ORACLE
from tune.spaces import Space
from uno.data.files import Storage

PARTS = (
    "spread", "known_best", "novel_best", "known_avg", "novel_avg", "loss", "agreement",
    "seconds", "cpu_seconds", "gpu_seconds",
)  # fmt: skip
"""Numbers of an epoch that become columns, where a trial has them."""


@dataclass(frozen=True)
class Cost:
    """What a sweep took. ``saved`` is the share of epochs that stopping spared, of those the trials that did
    not fail would have run; seconds are sums over processes. ``pretrain_s`` is part of ``seconds``.
    """

    seconds: float
    cpu_seconds: float
    gpu_seconds: float
    epochs: int
    saved: float
    pretrainings: int
    pretrain_s: float


@dataclass(frozen=True)
class Summary:
    """A sweep read back from its directory."""

    settings: dict[str, Any]
    space: Space
    trials: list[Trial]
    cost: Cost
    importance: list[tuple[str, float]]

    @property
    def oracle(self) -> bool:
        """Whether true labels of novel classes were used."""
        return self.settings["score"] == ORACLE

    @property
    def num_epochs(self) -> int:
        """Epochs of a trial that is not stopped."""
        return int(self.settings["epochs"])


def read(storage: Storage) -> Summary:
    """Read a sweep's directory.

    Raises:
        ConfigError: it holds no sweep.
    """
    settings = records.read_settings(storage)
    trials = records.read_trials(storage)
    space = spaces.from_tree(settings["space"])
    return Summary(settings, space, trials, _cost(storage, settings, trials), importance(space, trials))


def write(storage: Storage) -> Summary:
    """Write all three files of the sweep in ``storage`` and return what they show."""
    summary = read(storage)
    brand = f"{ORACLE}-" if summary.oracle else ""
    storage.write(f"{brand}sweep.parquet", table_bytes(summary))
    text = best_yaml(summary)
    if text is not None:
        storage.write(f"{brand}best.yaml", text.encode())
    storage.write(f"{brand}sweep.html", page.render(summary).encode())
    return summary


def _cost(storage: Storage, settings: dict[str, Any], trials: Sequence[Trial]) -> Cost:
    pretrained = [
        records.read_json(storage, f"pretrain/{name}/done.json") for name in storage.list("pretrain")
    ]
    lines = [line for trial in trials for line in trial.epochs] + pretrained
    sound = [t for t in trials if t.status is not None and t.status != FAILED]
    planned = len(sound) * int(settings["epochs"])
    return Cost(
        seconds=sum(line.get("seconds", 0.0) for line in lines),
        cpu_seconds=sum(line.get("cpu_seconds", 0.0) for line in lines),
        gpu_seconds=sum(line.get("gpu_seconds", 0.0) for line in lines),
        epochs=sum(trial.last_epoch for trial in trials),
        saved=1 - sum(trial.last_epoch for trial in sound) / planned if planned else 0.0,
        pretrainings=sum(bool(p) for p in pretrained),
        pretrain_s=sum(p.get("seconds", 0.0) for p in pretrained),
    )


def importance(space: Space, trials: Sequence[Trial]) -> list[tuple[str, float]]:
    """Absolute Spearman correlation of each searched key with the trials' ranks, largest first.

    Choices count by their position in the space. It sees monotone effects of one key at a time: a key with a
    best value in the middle, or one that matters only together with another, looks unimportant.
    """
    ranked = records.ranking(list(trials))
    if len(ranked) < 4:
        return []
    found = []
    for domain in space:
        values = [page.position(domain, trial.overrides[domain.key]) for trial in ranked]
        if len(set(values)) < 2:
            continue
        found.append((domain.key, abs(float(stats.spearmanr(values, range(len(values))).statistic))))
    return sorted(found, key=lambda entry: (-entry[1], entry[0]))


# ----------------------------------------------------------------------------------------------------- tables
def table_bytes(summary: Summary) -> bytes:
    """Parquet, one row for every trial and epoch (one without epoch for a trial that never finished one).

    Columns: trial, status, reason, objective, epoch, score, parts of the score, and the searched keys.
    """
    rows = []
    for trial in summary.trials:
        head = {"trial": trial.index, "status": trial.status or "unfinished", "reason": trial.reason}
        head["objective"] = summary.settings["score"]
        values = {key: list(v) if isinstance(v, tuple) else v for key, v in trial.overrides.items()}
        for line in trial.epochs or [{}]:
            parts = {name: line.get(name) for name in PARTS}
            rows.append({**head, "epoch": line.get("epoch"), "score": line.get("score"), **parts, **values})
    names = ["trial", "status", "reason", "objective", "epoch", "score", *PARTS]
    kinds: dict[str, pa.DataType] = {name: pa.float64() for name in ("score", *PARTS)}
    kinds |= {"trial": pa.int64(), "epoch": pa.int64(), "status": pa.string(), "reason": pa.string()}
    columns = {name: pa.array([row[name] for row in rows], kinds.get(name)) for name in names}
    columns |= {domain.key: pa.array([row[domain.key] for row in rows]) for domain in summary.space}
    buffer = io.BytesIO()
    marks = {"objective": summary.settings["score"], "oracle": str(summary.oracle).lower()}
    pq.write_table(pa.table(columns).replace_schema_metadata(marks), buffer)
    return buffer.getvalue()


def best_yaml(summary: Summary) -> str | None:
    """What ``uno discover --config`` takes as it is: the given options and the winner's values, all searched
    keys. None where no trial finished.
    """
    best = records.best_trial(summary.trials)
    if best is None:
        return None
    values = {key: list(v) if isinstance(v, tuple) else v for key, v in best.overrides.items()}
    comment = (
        f"trial {best.index} of {len(summary.trials)}, score {best.score:.4f} ({summary.settings['score']}); "
        "uno discover --config best.yaml"
    )
    lines = [f"# {comment}"]
    if summary.oracle:
        lines.insert(
            0, "# ORACLE: chosen by the true labels of the novel classes. Not a result; research only."
        )
    given = {key: value for key, value in summary.settings["given"].items() if key not in values}
    lines.append(yaml.safe_dump(given, sort_keys=False).rstrip() if given else "")
    lines += ["# searched:", yaml.safe_dump(values, sort_keys=False).rstrip()]
    return "\n".join(line for line in lines if line) + "\n"


def format_table(summary: Summary, most: int = 10) -> str:
    """The console table: the best trials, the others counted, the cost."""
    ranked = records.ranking(summary.trials)
    default = next((trial for trial in summary.trials if trial.index == 0), None)
    shown = ranked[:most]
    if default is not None and default not in shown and default in ranked:
        shown = [*shown, default]
    heads = [domain.key.rpartition(".")[2] for domain in summary.space]
    rows = [["trial", "epochs", "score", *heads]]
    for trial in shown:
        name = f"{trial.index}{' (as given)' if trial.index == 0 else ''}"
        spread = "" if math.isnan(trial.spread) else f" +- {trial.spread:.4f}"
        epochs = f"{trial.last_epoch}{' stopped' if trial.status == STOPPED else ''}"
        values = [str(trial.overrides[domain.key]) for domain in summary.space]
        rows.append([name, epochs, f"{trial.score:.4f}{spread}", *values])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    failed = sum(trial.status == FAILED for trial in summary.trials)
    cost = summary.cost
    lines.append(
        f"{len(ranked)} trials, {failed} failed; {cost.epochs} epochs, stopping saved "
        f"{100 * cost.saved:.0f} %; {cost.pretrainings} pretrainings; {cost.cpu_seconds:.0f} CPU s"
    )
    best = records.best_trial(summary.trials)
    if best is not None and best is not ranked[0]:
        lines.append(
            f"best.yaml keeps the values as given: none beats their {best.score:.4f} by more than a "
            "standard error"
        )
    if summary.oracle:
        lines.insert(0, "ORACLE: scored by the true labels of the novel classes; not a result")
    return "\n".join(lines)
