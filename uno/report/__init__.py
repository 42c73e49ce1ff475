"""The report of a run: one HTML file that opens from disk and asks the network for nothing.

``write_report`` is the way in. Modules in the order of the page's making::

    facts         what the run directory says (every file may be missing)
    predictions   a sample of the rows through the model
    clusters      sizes, confidence, agreement, look-alikes of the discovered classes
    checks        what may be wrong
    pictures, maps, charts, summary    the parts of the page
    page          parts + templates/ -> HTML
"""

from __future__ import annotations

import logging

import torch

from uno.config import Config
from uno.data.files import Storage
from uno.data.sources import read_rows
from uno.data.splits import Task, make_task
from uno.errors import ConfigError, StorageError
from uno.report.checks import CHECKED, problems
from uno.report.clusters import Findings, find
from uno.report.facts import output_names, read_facts
from uno.report.page import Rows, curves, estimate_chart, render, rows_context
from uno.report.predictions import Predictions, predict
from uno.report.summary import EXPLAINED, commands, headline, heads, results, tiles, what_was_run
from uno.runs.run import load_trained

REPORT = "report.html"

log = logging.getLogger(__name__)


def write_report(
    config: Config,
    storage: Storage,
    task: Task | None,
    *,
    device: torch.device | str = "cpu",
    max_rows: int | None = None,
    note: str = "",
) -> str:
    """Write ``report.html`` into a run directory and return its path.

    Everything but the configuration may be missing: without a task (unreadable data) or a discovery
    checkpoint the page shows what is left and says so. Rows are decoded anew, at most ``max_rows`` of them.

    Args:
        config: of the run.
        storage: the run directory.
        task: the rows of the run; None where its data cannot be read.
        device: where the model runs.
        max_rows: rows looked at; default 20,000 on a GPU, 4,000 on a CPU (1,500 above 64 px).
        note: why something is missing, shown on the page.

    Raises:
        StorageError: the file cannot be written.
    """
    facts = read_facts(storage)
    predictions, findings, names, notes = None, None, [], [note] if note else []
    if task is not None:
        names = output_names(task, facts)
        try:
            predictions, findings = _look(config, storage, task, names, torch.device(device), max_rows)
        except (StorageError, RuntimeError, ValueError) as error:
            # RuntimeError: the checkpoint is of another shape. The page says what is missing and why.
            notes.append(f"No predictions: {' '.join(str(error).split())[:300]}.")
            log.warning("report without predictions: %s", error)
    context = {
        "title": task.rows.source if task is not None else config.data.source,
        "uri": storage.uri,
        "notes": notes,
        "headline": headline(config, facts, task, findings),
        "tiles": tiles(facts, findings),
        "problems": problems(config, facts, predictions, findings),
        "checked": CHECKED,
        "results": results(facts.metrics),
        "metrics": facts.metrics,
        "explained": EXPLAINED,
        "novel_truth": any("/novel/" in key for key in facts.metrics),
        "heads": heads(facts, predictions, findings),
        "pairs": [] if findings is None or predictions is None else findings.pairs.tolist(),
        "curves": curves(facts),
        "estimate": facts.estimate,
        "estimate_chart": estimate_chart(facts),
        "bad": facts.bad,
        "facts": what_was_run(config, facts, task, predictions, storage.uri),
        "commands": commands(config, storage.uri),
        "config_yaml": facts.config_yaml,
        "findings": findings,
        "predictions": predictions,
        "names": names,
        "num_known": 0 if task is None else task.num_known,
        "task": task,
        "cards": [],
        "known_cards": [],
        "gallery_full": False,
        "tile": 0,
        "matrices": [],
        "maps": [],
        "layers": [],
        "data": {},
    }
    if task is not None and predictions is not None and findings is not None:
        rows = Rows(task, predictions, findings, names, config.seed, config.data.store_size)
        context |= rows_context(rows)
    storage.write(REPORT, render(context).encode())
    return storage.path(REPORT)


def open_task(config: Config, storage: Storage) -> tuple[Task | None, str]:
    """The rows of a finished run, or None and the reason where its data is gone or has changed."""
    recorded = read_facts(storage).environment.get("data_fingerprint")
    try:
        task = make_task(read_rows(config.data), config.data)
    except (ConfigError, OSError) as error:
        return None, f"The data of the run cannot be read, so nothing here shows images: {error}"
    if recorded is not None and task.rows.fingerprint != recorded:
        return (
            None,
            "The data has changed since the run (its fingerprint differs), so nothing here shows images.",
        )
    return task, ""


def _look(
    config: Config,
    storage: Storage,
    task: Task,
    names: list[str],
    device: torch.device,
    max_rows: int | None,
) -> tuple[Predictions, Findings]:
    model, best_head = load_trained(config, storage, task.num_known, task.num_novel)
    predictions = predict(config, task, model, best_head, device, max_rows)
    return predictions, find(task, predictions, names)


__all__ = ["REPORT", "open_task", "write_report"]
