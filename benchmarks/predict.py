"""Measure images/s of ``uno predict``, and of a PyTorch loop over a DataLoader.

    python -m benchmarks.predict --rows 2000 --repeats 3

prints one JSON row. Source: CIFAR10-JPEG, one Parquet file of JPEGs (``--data``);
model: a ResNet18 with the stem for small images, random weights. The plain loop is what
one writes without us: a Dataset that decodes with Pillow, DataLoader with 2 workers,
batches of 256, ``inference_mode``, the same network. Both read the same rows on the
same cores and take turns (A B A B); ours also writes its table. ``--workers 2`` adds a
turn on two Ray actors, whose start is in its time; that of Ray itself is
``ray_start_s``. ``--executions 3`` lets that alone take turns with as many executions
that follow each other, as those of 10^8 rows do, each with actors of its own;
``restart_s`` is what one more costs. An execution has 512 rows at least.
"""

import argparse
import io
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow.parquet as pq
import torch
from PIL import Image
from torch import Tensor, nn

from benchmarks.measure import environment, medians, spread, take_turns
from uno.config import override
from uno.data.files import Storage
from uno.data.rows import Rows
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


class Plain(nn.Module):
    """Encoder and heads, as trained."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, S, S) -> probabilities (B, C) of the first head."""
        logits = self.model([images])
        return (
            torch.cat([logits.known[0], logits.novel[0, 0]], dim=-1)
            .div(0.1)
            .softmax(dim=-1)
        )


def plain_loop(model: nn.Module, data: Jpegs) -> Tensor:
    """Class of every row, int64 (N,)."""
    loader = torch.utils.data.DataLoader(
        data, batch_size=BATCH, num_workers=LOADER_WORKERS
    )
    with torch.inference_mode():
        return torch.cat([model(images).argmax(dim=-1) for images in loader])


def write_run(folder: Path) -> None:
    """An untrained CIFAR10 model as a run directory."""
    config = override(preset("cifar10"), {"data.source": "digits"})
    model = build_network(config, 5, 5, seed=0)
    save_model(config, Storage(str(folder)), model, 0, [str(i) for i in range(5)])


def main() -> int:
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
        "--workers",
        type=int,
        default=0,
        help="Ray actors, besides the measurement without",
    )
    parser.add_argument(
        "--executions",
        type=int,
        default=0,
        help="on Ray, besides the measurement with one",
    )
    options = parser.parse_args()
    if options.executions and not options.workers:
        parser.error("--executions needs --workers")
    if not options.data.exists():
        print(f"skipped: no {options.data}", file=sys.stderr)
        return 0
    folder = Path(tempfile.mkdtemp(prefix="uno-bench-"))
    try:
        print(json.dumps(measure(options, folder)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All methods in turn."""
    rows: Rows = read_rows(
        override(preset("cifar10"), {"data.source": str(options.data)}).data
    )
    rows = rows.take(np.arange(options.rows))
    write_run(folder / "run")
    storage = Storage(str(folder / "run"))
    model = load_classifier(storage)
    stats = (
        torch.tensor(values)
        for values in (model.config.data.mean, model.config.data.std)
    )
    data = Jpegs([rows.images[i] for i in range(len(rows))], *stats)
    plain = Plain(build_network(model.config, 5, 5, seed=0)).eval()
    found: dict[str, Any] = {}

    def loop() -> None:
        found["plain"] = plain_loop(plain, data)

    def output() -> Storage:
        shutil.rmtree(folder / "out", ignore_errors=True)
        return Storage(str(folder / "out"))

    def here() -> None:
        writer = PredictionWriter(output(), rows, model, embedding=False)
        predict_rows(model, writer)
        found["uno"] = pq.read_table(folder / "out")["class_index"].to_numpy()

    methods = {"plain": loop, "uno --workers 0": here}
    extra: dict[str, Any] = {}
    if options.workers:
        from pipelines import partitions, ray_env
        from pipelines.inference import predict_on_ray

        start = time.perf_counter()
        with ray_env.connect() as ray:
            extra["ray_start_s"] = round(time.perf_counter() - start, 2)
            config = override(model.config, {"compute.num_workers": options.workers})

            def on_ray() -> None:
                writer = PredictionWriter(output(), rows, model, embedding=False)
                predict_on_ray(
                    ray,
                    config,
                    read_model_files(storage),
                    writer,
                    lambda done, total: None,
                )

            def in_executions() -> None:
                few = -(-len(rows) // options.executions)
                with patch.object(partitions, "EXECUTION_ROWS", few):
                    on_ray()

            if options.executions:
                methods.clear()
            methods[f"uno --workers {options.workers}"] = on_ray
            if options.executions:
                methods[
                    f"uno --workers {options.workers}, {options.executions} executions"
                ] = in_executions
            seconds = take_turns(methods, options.repeats)
    else:
        seconds = take_turns(methods, options.repeats)
    middle = medians(seconds)
    if options.executions:
        one, many = middle.values()
        extra |= {
            "restart_s": round((many - one) / (options.executions - 1), 2),
            "ratio": round(many / one, 3),
        }
    else:
        extra["same_class"] = float((found["plain"].numpy() == found["uno"]).mean())
        extra["speedup"] = {
            name: round(middle["plain"] / value, 3) for name, value in middle.items()
        }
    return {
        "question": "images/s of uno predict next to a plain DataLoader loop",
        "command": f"python -m benchmarks.predict {' '.join(sys.argv[1:])}".strip(),
        "data": f"CIFAR10-JPEG test, first {len(rows)} rows",
        **environment(),
        "torch_threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 1),
        "images_per_s": {
            name: round(len(rows) / value, 1) for name, value in middle.items()
        },
        "spread": spread(seconds),
        "seconds": {
            name: [round(value, 3) for value in values]
            for name, values in seconds.items()
        },
        **extra,
    }


if __name__ == "__main__":
    sys.exit(main())
