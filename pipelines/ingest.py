"""Resident or streaming: decided once for a run, and said why."""

from pipelines.console import say
from pipelines.ray_data import parquet_images
from uno.config import Config, override
from uno.data.files import Storage
from uno.data.ingest import choose, free_device_bytes, free_host_bytes
from uno.data.sources import read_rows
from uno.data.splits import Task, make_task
from uno.methods import registry
from uno.runs.directory import read_config_tree


def decide(config: Config, fresh: bool) -> tuple[Config, Task | None]:
    """``config`` with ``data.ingest`` decided, and the task where it had to be read for that.

    A run goes on as it began: its ``config.yaml`` holds the decision.
    """
    if config.data.ingest == "auto" and config.output is not None and not fresh:
        storage = Storage(config.output)
        if storage.exists("config.yaml"):
            stored = dict(read_config_tree(storage).get("data") or {})
            return override(config, {"data.ingest": stored.get("ingest", "auto")}), None
    lazy = override(config, {"data.ingest": "streaming"}).data
    task = make_task(read_rows(lazy), lazy)
    free = free_host_bytes(), free_device_bytes(config)
    ingest, reason = choose(config, len(task.rows), *free, registry.load(config).needs_images)
    say(f"data: {reason}")
    to_load = ingest == "resident" and parquet_images(task.rows.images) is not None
    return override(config, {"data.ingest": ingest}), None if to_load else task
