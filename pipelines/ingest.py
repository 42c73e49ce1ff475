"""Resident or streaming: decided once for a run, and said why."""

import numpy as np

from pipelines.console import say
from uno.config import Config, override
from uno.data.files import Storage
from uno.data.ingest import choose, free_device_bytes, free_host_bytes
from uno.data.rows import base
from uno.data.sources import read_rows
from uno.data.splits import Task, make_task
from uno.data.tables import ParquetImages
from uno.methods import registry
from uno.runs.directory import read_config_tree


def decide(config: Config, fresh: bool) -> tuple[Config, Task | None]:
    """``config`` with ``data.ingest`` decided, and the task where it had to be read for that.

    A run goes on as it began: its ``config.yaml`` holds the decision.
    """
    if config.data.ingest == "auto" and config.output is not None and not fresh:
        storage = Storage(config.output)
        if storage.exists("config.yaml"):
            stored = read_config_tree(storage).get("data")
            return override(config, {"data.ingest": dict(stored or {}).get("ingest", "auto")}), None
    lazy = override(config, {"data.ingest": "streaming"}).data
    task = make_task(read_rows(lazy), lazy)
    free = free_host_bytes(), free_device_bytes(config)
    ingest, reason = choose(config, len(task.rows), *free, registry.load(config).needs_images)
    say(f"data: {reason}")
    images, _ = base(task.rows.images, np.empty(0, np.int64))
    to_load = ingest == "resident" and isinstance(images, ParquetImages)
    return override(config, {"data.ingest": ingest}), None if to_load else task
