"""Measure streamed images/s, of a torchvision DataLoader too, and the share of Ray.

    python -m benchmarks.ingest rate --views 2+2        # images/s, threads and DataLoader on the same cores
    python -m benchmarks.ingest ray --views 2+0         # the same through Ray Data, and Ray's share
    python -m benchmarks.ingest resident                # an epoch of resident data, Ray and no Ray

Each prints one JSON row. Sources: ImageNet originals (500 x 375 JPEG, the same 100
files again and again, so from the page cache) and CIFAR10-JPEG in Parquet. The
DataLoader is what one writes without us: Pillow, torchvision's RandomResizedCrop once
per view, PILToTensor, one worker per core. Methods take turns (A B A B) after a warm-up
turn.
"""  # noqa: E501

from __future__ import annotations

import argparse
import glob
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import v2

from benchmarks.measure import environment, medians, spread, take_turns
from uno.config import Config, override
from uno.crops import Cropper
from uno.data.files import Storage
from uno.data.images import Images, InMemory
from uno.data.parquet import ParquetImages, ParquetShard
from uno.data.sampling import make_pretrain_plan
from uno.data.stream import Chunk, CropJob, StreamedImages, StreamSet, crop_local
from uno.data.unreadable import BadRows
from uno.presets import preset
from uno.runs.journal import read_journal
from uno.session.resources import STORE_BYTES

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared" / "data"
SIZES = {"imagenet": (224, 96), "cifar": (32, 18)}
TRAIN_BATCH = 256  # of the parts that train
SCALES = {"large": (0.5, 1.0), "small": (0.08, 0.5)}
BATCH = 64
CORES = os.cpu_count() or 1


class Pictures(torch.utils.data.Dataset):
    """Paths or encoded images -> all views as uint8 tensors, as in any tutorial."""

    def __init__(self, images: Any, rows: np.ndarray, config: Config) -> None:
        self.images, self.rows = images, rows
        kinds = [
            (config.augment.large, SCALES["large"]),
            (config.augment.small, SCALES["small"]),
        ]
        self.crops = [
            (v2.RandomResizedCrop(kind.size, scale, antialias=True), kind.num_views)
            for kind, scale in kinds
            if kind.num_views
        ]
        self.to_tensor = v2.PILToTensor()

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.rows)

    def __getitem__(self, row: int) -> list[torch.Tensor]:
        """All views of one image."""
        image = self.images[int(self.rows[row])]
        picture = Image.open(
            io.BytesIO(image) if isinstance(image, bytes) else image
        ).convert("RGB")
        return [
            self.to_tensor(crop(picture))
            for crop, num in self.crops
            for _ in range(num)
        ]


def config_of(options: argparse.Namespace) -> Config:
    """Return the configuration of the views and the source that were asked for."""
    large, small = map(int, options.views.split("+"))
    sizes = SIZES[options.source]
    return override(
        preset("imagenet" if options.source == "imagenet" else "cifar10"),
        {
            "augment.large.num_views": large,
            "augment.large.size": sizes[0],
            "augment.large.crop": "resized",
            "augment.large.crop_scale": SCALES["large"],
            "augment.small.num_views": small,
            "augment.small.size": sizes[1],
            "augment.small.crop": "resized",
            "augment.small.crop_scale": SCALES["small"],
        },
    )


def source_of(options: argparse.Namespace) -> tuple[Images, np.ndarray]:
    """(images, the rows to read, in order of the benchmark)."""
    if options.source == "imagenet":
        files = sorted(
            glob.glob(str(SHARED / "imagenet-fullsize" / "train" / "*" / "*"))
        )
        return InMemory(files), np.arange(options.rows) % len(files)
    shards = [
        ParquetShard(str(SHARED / "cifar10-jpeg" / f"train-0000{i}-of-00004.parquet"))
        for i in range(4)
    ]
    return ParquetImages(shards, "img", [-1] * len(shards)), np.arange(options.rows)


def job_of(config: Config, images: Images, rows: np.ndarray, folder: str) -> CropJob:
    """All ``rows`` as labeled rows, in epochs of one pass."""
    plan = make_pretrain_plan(0, BATCH, len(rows))
    bad = BadRows([], images, 1.0, Storage(folder))
    train = StreamSet(
        StreamedImages.of(config, images.take(rows), bad),
        np.arange(len(rows)),
        torch.zeros(len(rows), dtype=torch.int64),
        np.empty(0, np.int64),
        1,
        1,
        partial(crop_local, threads=CORES),
    )
    return CropJob(config, train, plan, 0, 1, 0, plan.steps_per_epoch)


def drain(chunks: Iterator[Chunk], expected: int) -> None:
    """A consumer that does nothing."""
    seen = sum(len(pixels) for pixels, _ in chunks)
    assert seen == expected, (seen, expected)


def in_processes(pool: ProcessPoolExecutor, job: CropJob, expected: int) -> None:
    """Crop all chunks in processes without Ray, and throw them away."""
    chunks = list(chain.from_iterable(job.epochs(job.chunk_rows)))
    assert (
        sum(pool.map(partial(crop_chunk, job.cropper, job.images), chunks)) == expected
    )


def crop_chunk(
    cropper: Cropper, images: Images, chunk: tuple[np.ndarray, np.ndarray, np.ndarray]
) -> int:
    """Crop a chunk in a process of the pool; return its number of images."""
    torch.set_num_threads(1)
    steps, positions, rows = chunk
    return len(cropper.crop(steps, positions, images.read_images(rows))[0])


def loader_of(config: Config, images: Images, rows: np.ndarray) -> Callable[[], None]:
    """Return a function that reads an epoch of a DataLoader with Pillow."""
    # no random access to row groups
    data = Pictures(images.read_images(rows), np.arange(len(rows)), config)
    loader = torch.utils.data.DataLoader(
        data,
        batch_size=BATCH,
        num_workers=CORES,
        persistent_workers=True,
        drop_last=True,
        multiprocessing_context="spawn",  # a fork would copy Ray's threads
    )

    def loop() -> None:
        assert sum(len(batch[0]) for batch in loader) == len(rows) // BATCH * BATCH

    return loop


def rate(options: argparse.Namespace) -> dict[str, Any]:
    """Threads of one process next to the DataLoader."""
    config = config_of(options)
    images, rows = source_of(options)
    with tempfile.TemporaryDirectory() as folder:
        job = job_of(config, images, rows, folder)
        count = (job.last - job.first) * BATCH
        one = partial(crop_local, threads=1)
        methods = {
            "DataLoader": loader_of(config, images, rows),
            "uno, threads": lambda: drain(crop_local(job, CORES), count),
            "uno, one thread": lambda: drain(one(job), count),
        }
        return row(options, take_turns(methods, options.repeats), count)


def through_ray(options: argparse.Namespace) -> dict[str, Any]:
    """Compare Ray Data with processes without Ray and with a DataLoader."""
    from pipelines import ray_env
    from pipelines.ray_data import crop_on_ray, cropping_of

    # At Ray's 15, whatever else the machine does would take its time from Ray alone.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
    config = config_of(options)
    images, rows = source_of(options)
    with tempfile.TemporaryDirectory() as folder, ray_env.connect(STORE_BYTES) as ray:
        job = job_of(config, images, rows, folder)
        count = (job.last - job.first) * BATCH
        limits = cropping_of(ray, 1, 0.0, 1)
        on_ray = crop_on_ray(ray, ray.put(job.images), limits)
        with ProcessPoolExecutor(CORES, mp_context=get_context("spawn")) as pool:
            methods = {
                "DataLoader": loader_of(config, images, rows),
                "function": lambda: in_processes(pool, job, count),
                "uno, Ray Data": lambda: drain(on_ray(job), count),
            }
            seconds = take_turns(methods, options.repeats)
    found = row(options, seconds, count)
    middle = medians(seconds)
    return found | {
        "ray_share": round(1 - middle["function"] / middle["uno, Ray Data"], 3)
    }


def row(
    options: argparse.Namespace, seconds: dict[str, list[float]], count: int
) -> dict[str, Any]:
    """Return medians, speedups and spreads as one row of JSON."""
    middle = medians(seconds)
    return {
        "question": (
            f"images/s of decoding and cutting {options.views} views, {options.source}"
        ),
        "command": f"python -m benchmarks.ingest {' '.join(sys.argv[1:])}",
        **environment(),
        "load_average": round(os.getloadavg()[0], 1),
        "images": count,
        "cores": CORES,
        "images_per_s": {
            name: round(count / value, 1) for name, value in middle.items()
        },
        "images_per_s_per_core": {
            name: round(
                count / value / (1 if name.endswith("one thread") else CORES), 1
            )
            for name, value in middle.items()
        },
        "speedup": {
            name: round(middle["DataLoader"] / value, 3)
            for name, value in middle.items()
        },
        "spread": spread(seconds),
        "seconds": {
            name: [round(value, 3) for value in values]
            for name, values in seconds.items()
        },
    }


def resident(options: argparse.Namespace) -> dict[str, Any]:
    """Measure an epoch of pretraining, with one Ray worker and without Ray in turns.

    Pretraining has the shortest steps; discovery would add evaluations and a report at
    the end of every run.
    """
    cases = {
        f"--workers {n}": ["--workers", str(n), "--data.loading", "memory"]
        for n in (0, 1)
    }
    words = ["-m", "pipelines", "pretrain", "--data", f"parquet:{SHARED}/cifar10-jpeg"]
    words += ["--preset", "cifar10", "--known-classes", "first:5"]
    words += ["--limit", str(options.rows), "--batch-size", str(TRAIN_BATCH)]
    words += ["--model.encoder", "resnet_small", "--compute.threads", "1"]
    words += ["--pretrain.epochs", "11", "--pretrain.warmup-epochs", "0"]
    words += ["--train.log-every", "100000"]
    # of an epoch: half the classes are known
    images = options.rows // 2 // TRAIN_BATCH * TRAIN_BATCH
    epochs: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(options.repeats):
        for name, more in cases.items():
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, *words, *more, "--output", folder]
                subprocess.run(command, check=True, stdout=sys.stderr, cwd=ROOT)
                lines = read_journal(Storage(folder))
            rates = [x["images_per_s"] for x in lines if x["event"] == "epoch"]
            epochs[name] += [images / rate for rate in rates[1:]]
    middle = {name: statistics.median(values) for name, values in epochs.items()}
    return {
        "question": "seconds of a resident epoch, one Ray worker and no Ray",
        "command": f"python -m benchmarks.ingest {' '.join(sys.argv[1:])}",
        **environment(),
        "epoch_s": {name: round(value, 3) for name, value in middle.items()},
        "ratio": round(middle["--workers 1"] / middle["--workers 0"], 3),
        "spread": spread(epochs),
        "seconds": {
            name: [round(value, 3) for value in values]
            for name, values in epochs.items()
        },
    }


def main() -> None:
    """Run the command line, and print one row of JSON."""
    parts = {"rate": rate, "ray": through_ray, "resident": resident}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=parts)
    parser.add_argument("--source", choices=SIZES, default="imagenet")
    parser.add_argument("--views", default="2+0", help="large+small views of an image")
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(parts[options.part](options)))


if __name__ == "__main__":
    main()
