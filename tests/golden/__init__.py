"""Recorded results of four small runs, which a change of the code must reproduce.

``tests/golden/results.json`` holds, for each run with one process and with two, the
values of ``metrics.json``, the class of every predicted row, the losses of training and
two numbers of each tensor of the model. Times and paths are not recorded.

Processors and versions of PyTorch round differently, and each training step amplifies
the difference. With the processor and the version that recorded the results, floats are
compared to 1e-4 and classes exactly. Elsewhere floats may differ by 0.1 of their value
or 0.05, a twentieth of the rows may have another class, and weights are not compared.

``python -m tests.golden`` records the results again. Do so only if they were meant to
change, and say in the change log what moved.
"""

import json
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torchvision
from PIL import Image
from safetensors.torch import load_file, save_file

from pipelines import cli

RESULTS = Path(__file__).parent / "results.json"
ROOT = Path(__file__).parents[2]


def processor() -> str:
    """Return what decides how floats are rounded: processor and version of PyTorch."""
    name = platform.processor() or platform.machine()
    cpus = Path("/proc/cpuinfo")
    if cpus.exists():
        found = re.search(r"^model name\s*: (.*)$", cpus.read_text(), re.M)
        name = found[1] if found else name
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{name}, {capability}, PyTorch {torch.__version__.partition('+')[0]}"


COLORS = [
    (220, 40, 40),
    (40, 200, 60),
    (50, 70, 220),
    (220, 210, 50),
    (200, 60, 200),
    (60, 200, 210),
]
COMMON = ["--compute.threads", "1", "--train.log-every", "4"]
NETWORK = [
    *("--model.width", "8", "--model.hidden-dim", "32", "--model.projection-dim", "16"),
    *("--model.num-heads", "2", "--model.overcluster-factor", "2"),
]
# At the usual learning rates each step amplifies rounding a hundredfold.
RATE = "0.01"
TRAINING = [
    *("--discover.base-lr", RATE, "--discover.epochs", "3"),
    *("--discover.warmup-epochs", "1"),
]
PRETRAINING = [
    *("--pretrain.base-lr", RATE, "--pretrain.epochs", "4"),
    *("--pretrain.warmup-epochs", "1"),
]
DIGITS = [
    *("--preset", "digits", "--data.limit", "200", "--train.batch-size", "64"),
    *(*NETWORK, *TRAINING, *PRETRAINING),
]


def draw_colored_folders(folder: Path, num_images: int = 16, side: int = 40) -> None:
    """Draw ``train/CLASS/*.png`` and ``test/CLASS/*.png``: six classes, told apart by
    color.
    """
    rng = np.random.default_rng(0)
    for split, num in (("train", num_images), ("test", num_images // 4)):
        for label, color in enumerate(COLORS):
            place = folder / split / f"class-{label}"
            place.mkdir(parents=True)
            for i in range(num):
                image = np.full((side, side, 3), color, float)
                image += rng.uniform(-75, 75, 3) + rng.uniform(-30, 30, image.shape)
                pixels = image.clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(place / f"{i:02}.png")


def write_random_encoder(path: Path) -> None:
    """Save the state dict of a ResNet-18 with random weights of a fixed seed."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        save_file(torchvision.models.resnet18(weights=None).state_dict(), path)


def write_embeddings(path: Path, num_rows: int = 30, dim: int = 24) -> None:
    """Write a Parquet table of embeddings of eight classes, three of them without
    labels.
    """
    rng = np.random.default_rng(1)
    truth = np.tile(np.arange(8), num_rows)
    centers = rng.normal(size=(8, dim))
    rows = centers[truth] + 0.5 * rng.normal(size=(len(truth), dim))
    names = [f"class-{label}" for label in truth]
    columns = {
        "embedding": list(rows.astype(np.float32)),
        "label": [name if name < "class-5" else None for name in names],
        "eval_label": names,
        "split": ["test" if i % 10 == 9 else "train" for i in range(len(names))],
    }
    pq.write_table(pa.table(columns), path)


def digits(folder: Path) -> list[str]:
    """Return the options of a small network that is trained from scratch."""
    return DIGITS


def gcd(folder: Path) -> list[str]:
    """Return the options of ``digits`` where half of the known rows are unlabeled."""
    return [*DIGITS, "--data.unlabeled-known-fraction", "0.5"]


def photos(folder: Path) -> list[str]:
    """Return the options of a folder of images with a frozen encoder and the default
    method.
    """
    draw_colored_folders(folder / "photos")
    write_random_encoder(folder / "encoder.safetensors")
    known = ",".join(f"class-{label}" for label in range(4))
    return [
        *("--data", f"folder:{folder / 'photos'}", "--known-classes", known),
        *("--model.encoder", "torchvision:resnet18", "--model.finetune", "none"),
        *("--weights", str(folder / "encoder.safetensors")),
        *("--data.stored-size", "32", "--augment.large.size", "32"),
    ]


def vectors(folder: Path) -> list[str]:
    """Return the options of embeddings on which the heads of UNO are trained."""
    write_embeddings(folder / "embeddings.parquet")
    return [
        *("--data", f"vectors:{folder / 'embeddings.parquet'}", "--num-novel", "3"),
        *("--data.setting", "ncd"),
        *("--method", "uno", *NETWORK[2:], *TRAINING),
        *("--train.batch-size", "66"),
    ]


RUNS: dict[str, Callable[[Path], list[str]]] = {
    function.__name__: function for function in (digits, gcd, photos, vectors)
}


def discover(name: str, folder: Path, *options: str) -> dict[str, Any]:
    """Compute a run in this process and return its record."""
    words = ["discover", *RUNS[name](folder), *COMMON, *options]
    assert cli.main([*words, "--output", str(folder / "run")]) == 0
    return read_record(folder / "run")


def discover_by_torchrun(name: str, folder: Path) -> dict[str, Any]:
    """Compute a run with two ranks of torchrun and return its record."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = ["discover", *RUNS[name](folder), *COMMON, "--output", str(folder / "run")]
    command = [sys.executable, *launch, "-m", "pipelines", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    errors = [line for line in done.stderr.splitlines() if "uno: " in line]
    assert done.returncode == 0, "\n".join(errors) or done.stderr[-2000:]
    return read_record(folder / "run")


def read_record(run: Path) -> dict[str, Any]:
    """Read what a finished run is compared by.

    Returns:
        ``metrics``: the values of metrics.json; ``losses``: phase -> [step, loss] for
        each logged step; ``classes``: the names of the predicted classes in the order
        of the rows, joined by spaces; ``probability``: the mean probability of the
        predicted classes; ``weights``: tensor -> two norms, see
        :func:`summarize_tensor`.
    """
    table = pq.read_table(run / "predictions")
    losses: dict[str, list[list[float]]] = {}
    journal = run / "metrics.jsonl"  # a method without training writes none
    for line in journal.read_text().splitlines() if journal.exists() else ():
        entry = json.loads(line)
        if "loss" in entry:
            losses.setdefault(entry["phase"], []).append([entry["step"], entry["loss"]])
    weights = {}
    for path in sorted((run / "model").glob("*.safetensors")):
        for name, tensor in sorted(load_file(path).items()):
            weights[f"{path.stem}/{name}"] = summarize_tensor(tensor)
    return {
        "metrics": json.loads((run / "metrics.json").read_text()),
        "losses": losses,
        "classes": " ".join(map(str, table["class_name"].to_pylist())),
        "probability": float(np.mean(table["probability"].to_numpy())),
        "weights": weights,
    }


def summarize_tensor(tensor: torch.Tensor) -> list[float]:
    """Return the norm of a tensor, and its norm weighted from 1 to 2.

    The second number changes if values change their places. Neither depends on the
    sign of a direction, which is arbitrary where directions are eigenvectors.
    """
    flat = tensor.double().flatten()
    rising = torch.linspace(1, 2, len(flat), dtype=torch.float64)
    return [float(flat.norm()), float((flat * rising).norm())]


def flatten(tree: Any, place: str = "") -> dict[str, float | str]:
    """Return the values of a record by their paths, as ``/losses/discover/0/1``."""
    if not isinstance(tree, dict | list):
        return {place: tree}
    flat = {}
    for name, part in tree.items() if isinstance(tree, dict) else enumerate(tree):
        flat |= flatten(part, f"{place}/{name}")
    return flat


def read_results() -> dict[str, dict[str, Any]]:
    """Return the recorded results.

    They are run -> ``one`` or ``two`` processes -> record, and ``processor``: the
    processor that recorded them.
    """
    results: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text())
    return results


def assert_as_recorded(found: dict[str, Any], name: str, processes: str) -> None:
    """Compare a record with the one of ``results.json``.

    Args:
        found: The record, see :func:`read_record`.
        name: The run, a key of ``RUNS``.
        processes: ``one`` or ``two``.
    """
    results = read_results()
    expected, same = results[name][processes], results["processor"] == processor()
    parts = ["metrics", "losses", "probability", *(["weights"] if same else [])]
    relative, absolute, most_moved = (1e-4, 1e-6, 0) if same else (0.1, 0.05, 0.05)
    values = [
        flatten({part: each[part] for part in parts}) for each in (found, expected)
    ]
    limits = {"rel": relative, "abs": absolute, "nan_ok": True}
    assert values[0] == pytest.approx(values[1], **limits)
    classes = [np.array(each["classes"].split()) for each in (found, expected)]
    assert len(classes[0]) == len(classes[1])
    assert np.mean(classes[0] != classes[1]) <= most_moved
