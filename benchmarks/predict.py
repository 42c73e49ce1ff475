"""Measure images/s of ``uno predict``, and of a PyTorch loop over a DataLoader.

    python -m benchmarks.predict --rows 2000 --repeats 3
    python -m benchmarks.predict --rows 8000 --workers 1 2 4

Each prints one JSON row. Source: CIFAR10-JPEG, a Parquet file of JPEGs (``--data``);
model: a ResNet18 with the stem for small images, random weights. The plain loop is what
one writes without us: a Dataset that decodes with Pillow, DataLoader with 2 workers,
batches of 256, ``inference_mode``, the same network. All read the same rows on the same
cores and take turns (A B A B); ours also writes its table. ``--workers`` adds a turn
for each number of Ray actors, whose start is in its time; that of Ray itself is
``ray_start_s``.
"""

import argparse
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from PIL import Image
from torch import Tensor, nn

from benchmarks.measure import environment, medians, spread, take_turns
from uno.config import override
from uno.data.files import Storage
from uno.data.sources import read_rows
from uno.model import build_network
from uno.presets import preset
from uno.results.infer import load_classifier, read_model_files, save_model
from uno.results.predictions import PredictionWriter, predict_rows

DATA = Path(__file__).parents[2] / "shared" / "data" / "cifar10-jpeg"
BATCH = 256
LOADER_WORKERS = 2


class Jpegs(torch.utils.data.Dataset):
    """Encoded images -> normalized float tensors, as in any tutorial."""

    def __init__(self, encoded: list[bytes], mean: Tensor, std: Tensor) -> None:
        self.encoded, self.mean, self.std = (
            encoded,
            mean.view(3, 1, 1),
            std.view(3, 1, 1),
        )

    def __len__(self) -> int:
        """Number of images."""
        return len(self.encoded)

    def __getitem__(self, row: int) -> Tensor:
        """One image (3, 32, 32)."""
        pixels = np.array(Image.open(io.BytesIO(self.encoded[row])).convert("RGB"))
        return (
            torch.from_numpy(pixels).permute(2, 0, 1).float() / 255 - self.mean
        ) / self.std


def plain_loop(model: nn.Module, data: Jpegs) -> Tensor:
    """Class of every row by the first head, int64 (N,)."""
    loader = torch.utils.data.DataLoader(
        data, batch_size=BATCH, num_workers=LOADER_WORKERS
    )
    classes = []
    with torch.inference_mode():
        for images in loader:
            logits = model([images])
            scores = torch.cat([logits.known[0], logits.novel[0, 0]], dim=-1)
            classes.append(scores.div(0.1).softmax(dim=-1).argmax(dim=-1))
    return torch.cat(classes)


def write_run(folder: Path) -> Storage:
    """Write an untrained ResNet18 as a run directory, and return it."""
    config = override(preset("cifar10"), {"data.source": "digits"})
    model, storage = build_network(config, 5, 5, seed=0), Storage(str(folder / "run"))
    save_model(config, storage, model, 0, [str(i) for i in range(5)])
    return storage


def main() -> None:
    """Measure and print one row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, default=DATA / "test-00000-of-00001.parquet"
    )
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[], help="numbers of Ray actors"
    )
    options = parser.parse_args()
    if not options.data.exists():
        parser.error(f"there is no {options.data}")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        print(json.dumps(measure(options, folder, stack)))


def measure(
    options: argparse.Namespace, folder: Path, stack: ExitStack
) -> dict[str, Any]:
    """Measure all methods in turns.

    Args:
        options: The options of the command line.
        folder: A folder for the model and the predictions.
        stack: Ends Ray.
    """
    output = str(folder / "out")
    data_config = override(preset("cifar10"), {"data.source": str(options.data)}).data
    rows = read_rows(data_config).take(np.arange(options.rows))
    run = write_run(folder)
    model = load_classifier(run)
    found: dict[str, Any] = {}

    def writer() -> PredictionWriter:
        storage = Storage(output)
        storage.delete("")
        return PredictionWriter(storage, rows, model, embedding=False)

    def here() -> None:
        predict_rows(model, writer())
        found["uno"] = pq.read_table(output)["class_index"].to_numpy()

    normalization = map(torch.tensor, (model.config.data.mean, model.config.data.std))
    images = Jpegs([rows.images[i] for i in range(len(rows))], *normalization)
    plain = build_network(model.config, 5, 5, seed=0).eval()
    methods: dict[str, Callable[[], None]] = {
        "plain": lambda: found.update(plain=plain_loop(plain, images)),
        "uno --workers 0": here,
    }
    extra: dict[str, Any] = {}
    if options.workers:
        from pipelines import ray_env
        from pipelines.predict import predict_on_ray

        start = time.perf_counter()
        ray = stack.enter_context(ray_env.connect())
        extra["ray_start_s"] = round(time.perf_counter() - start, 2)

        def on_ray(workers: int) -> None:
            config = override(
                model.config,
                {"compute.num_workers": workers, "compute.cpus_per_worker": 0.25},
            )
            files = read_model_files(run)
            predict_on_ray(ray, config, files, writer(), lambda done, total: None)

        for workers in options.workers:
            methods[f"uno --workers {workers}"] = partial(on_ray, workers)
    seconds = take_turns(methods, options.repeats)
    middle = medians(seconds)
    extra["same_class"] = float((found["plain"].numpy() == found["uno"]).mean())
    return {
        "question": "images/s of uno predict",
        "command": f"python -m benchmarks.predict {' '.join(sys.argv[1:])}".strip(),
        "data": f"CIFAR10-JPEG test, first {len(rows)} rows",
        **environment(),
        "torch_threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 1),
        "images_per_s": {
            name: round(len(rows) / value, 1) for name, value in middle.items()
        },
        "speedup": {
            name: round(middle["plain"] / value, 3) for name, value in middle.items()
        },
        "spread": spread(seconds),
        "seconds": {
            name: [round(value, 3) for value in values]
            for name, values in seconds.items()
        },
        **extra,
    }


if __name__ == "__main__":
    main()
