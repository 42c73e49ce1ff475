"""Small run directories without training: an untrained model in a real checkpoint."""

import json
from pathlib import Path

import numpy as np
import torch

from uno.config import Config, dump_yaml, override
from uno.data.columns import make_ids, make_labels
from uno.data.files import Storage, valid_text
from uno.data.rows import Rows
from uno.data.splits import Task, make_task
from uno.model import build_network
from uno.presets import preset
from uno.runs.checkpoint import Checkpoint, save_checkpoint
from uno.runs.hardware import describe_environment

HOSTILE = [
    "</script><script>alert(1)</script>",
    "\"><img src=x onerror='alert(1)'>",
    "line\nbreak\u2028and\u2029more",
    "\u202eright to left \u05d0\u05d1",
    "x" * 300,
    "{{ 7 * 7 }}{% raw %}",
    "lone \ufffe noncharacter",
    "<!-- --> ]]> &amp; \x00\x1b[31m",
    "javascript:alert(1)",
    "http://example.com/a.js",
]


def small_config(**values: object) -> Config:
    """A tiny digits configuration."""
    return override(
        preset("digits"), {"model.hidden_dim": 32, "model.projection_dim": 16, **values}
    )


def hostile_task(
    config: Config, rows_per_class: int = 8, test: bool = True, truth: bool = True
) -> Task:
    """Noise of ten classes whose names, and the rows' ids, mean harm; the first five
    are known.
    """
    num = rows_per_class * len(HOSTILE)
    rows = Rows(
        ids=make_ids(valid_text(f"{i} {HOSTILE[(i * 7) % 10]}") for i in range(num)),
        images=np.random.default_rng(0).integers(
            0, 255, (num, 8, 8, 3), dtype=np.uint8
        ),
        labels=make_labels(
            HOSTILE[i % 10] if truth or i % 10 < 5 else None for i in range(num)
        ),
        is_train=np.array([not (test and i // 10 % 4 == 0) for i in range(num)]),
        source=HOSTILE[0],
        class_names=tuple(HOSTILE),
        known=tuple(HOSTILE[:5]) if truth else (),
    )
    return make_task(
        rows, override(config, {"data.known_classes": None, "data.num_novel": 5}).data
    )


def write_run(
    folder: Path, config: Config, task: Task, metrics: dict[str, float] | None = None
) -> Storage:
    """``config.yaml``, a discovery checkpoint, a journal, and the rest of a run
    directory.
    """
    storage = Storage(str(folder))
    model = build_network(config, task.num_known, task.num_novel, 0)
    tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    tensors["head_losses"] = torch.tensor([0.4, 0.3, 0.2, 0.5])
    save_checkpoint(storage, "discover", Checkpoint(10, tensors, dump_yaml(config)))
    lines = [
        {
            "phase": phase,
            "step": step,
            "total_steps": 10,
            "epoch": step // 5,
            "epochs": 2,
            "loss": 3.0 / step,
            "lr": 0.1 / step,
            "images_per_s": 100.0,
            "skipped_steps": 0,
            "head_losses": [1.0 / step + h for h in range(4)],
        }
        for phase in ("pretrain", "discover")
        for step in (5, 10)
    ]
    files = {
        "config.yaml": dump_yaml(config),
        "environment.json": json.dumps(describe_environment(task.rows.fingerprint)),
        "metrics.jsonl": "\n".join(map(json.dumps, lines)) + "\n",
        "bad_samples.jsonl": json.dumps({"id": HOSTILE[1], "reason": HOSTILE[0]})
        + "\n",
    }
    if metrics is not None:
        files["metrics.json"] = json.dumps(metrics)
    for name, text in files.items():
        storage.write(name, text.encode())
    return storage
