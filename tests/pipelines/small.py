"""A run of the digits preset that takes a second or two, as a command line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from uno.data.files import Storage
from uno.runs.checkpoint import load_newest
from uno.runs.journal import read_journal

SMALL = [
    "--preset", "digits", "--limit", "200", "--batch-size", "32", "--compute.threads", "1",
    "--model.width", "4", "--model.num-heads", "2", "--model.overcluster-factor", "2",
    "--model.hidden-dim", "16", "--model.projection-dim", "8",
    "--pretrain.epochs", "3", "--discover.epochs", "3", "--pretrain.warmup-epochs", "1",
    "--discover.warmup-epochs", "1", "--train.log-every", "4", "--train.checkpoint-every-epochs", "1",
]  # fmt: skip
LONG = [*SMALL, "--discover.epochs", "40"]  # 240 steps of discovery: time enough to be killed
INTERVAL = 6  # steps between checkpoints


def lines_of(run: Path) -> list[dict]:
    """The journal without what depends on the clock."""
    return [
        {k: v for k, v in line.items() if k != "images_per_s"} for line in read_journal(Storage(str(run)))
    ]


def assert_same_weights(a: Path, b: Path) -> None:
    """The newest checkpoints of two runs agree in every bit of every tensor."""
    for phase in ("pretrain", "discover"):
        first, second = (load_newest(Storage(str(run)), phase) for run in (a, b))
        assert first is not None and second is not None and first.step == second.step
        assert first.tensors.keys() == second.tensors.keys()
        for name, tensor in first.tensors.items():
            assert torch.equal(tensor, second.tensors[name]), (phase, name)


def write_images(folder: Path, counts: dict[str, int], size: int = 8) -> Path:
    """PNG files of noise in one subfolder for each class."""
    generator = np.random.default_rng(0)
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for i in range(count):
            pixels = generator.integers(0, 256, (size, size, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
    return folder
