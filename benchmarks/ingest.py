"""Measure streamed images/s, of a torchvision DataLoader too, and the share of Ray.

    python -m benchmarks.ingest rate --views 2+2        # images/s, threads and DataLoader on the same cores
    python -m benchmarks.ingest ray --views 2+0         # the same through Ray Data, and Ray's share
    python -m benchmarks.ingest stream --code BEFORE    # epochs through Ray Data, in turns with a checkout
    python -m benchmarks.ingest train --code BEFORE     # steps/s of streamed training, in turns
    python -m benchmarks.ingest memory                  # peak memory for more epochs and more shards
    python -m benchmarks.ingest resident                # an epoch of resident data, Ray and no Ray
    python -m benchmarks.ingest all --output DIR        # everything, into DIR/result.json; 15 minutes

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
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
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
from uno.session.resources import STORE_BYTES

SHARED = Path(__file__).parents[2] / "shared" / "data"
SIZES = {"imagenet": (224, 96), "cifar": (32, 18)}
TRAIN_BATCH = 256  # of the parts that train
SCALES = {"large": (0.5, 1.0), "small": (0.08, 0.5)}
ALL = (
    "ray --views 2+0 --rows 12800 --repeats 2",
    "ray --views 2+2 --rows 12288 --repeats 2",
    "ray --source cifar --rows 49152 --repeats 3",
    "memory --rows 768",
    "memory --source cifar --rows 8192",
    "resident --rows 2000 --repeats 3",
    "rate --views 2+0 --rows 2048 --repeats 2",
    "rate --views 2+2 --rows 2048 --repeats 2",
    "rate --source cifar --rows 16384 --repeats 2",
)
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


def stream(options: argparse.Namespace) -> dict[str, Any]:
    """Measure epochs through Ray Data, in turns with the code of ``--code``.

    The consumer does nothing, and each turn starts Ray anew.
    """
    if options.turn:
        return one_stream(options)
    words = ["-m", "benchmarks.ingest", *sys.argv[1:], "--turn"]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in checkouts(options)}
    for _ in range(options.repeats):
        for name, code in checkouts(options).items():
            found[name].append(
                json.loads(run_in(code, words, stdout=subprocess.PIPE).splitlines()[-1])
            )
            print(name, found[name][-1], file=sys.stderr, flush=True)
    rates = {
        name: [turn["images_per_s"] for turn in turns] for name, turns in found.items()
    }
    return {
        "question": (
            f"images/s of {options.epochs} epochs through Ray Data, {options.views}"
            f" views of {options.source}"
        ),
        "command": f"python -m benchmarks.ingest {' '.join(sys.argv[1:])}",
        **environment(),
        "load_average": round(os.getloadavg()[0], 1),
        "images_per_s": {
            name: round(value, 1) for name, value in medians(rates).items()
        },
        "ratio": (
            round(medians(rates)["here"] / medians(rates)["before"], 3)
            if options.code
            else None
        ),
        "turns": found,
    }


def checkouts(options: argparse.Namespace) -> dict[str, Path]:
    """Return this checkout and, if given, the one of ``--code``, by name."""
    return ({"before": Path(options.code)} if options.code else {}) | {
        "here": Path(__file__).parents[1]
    }


def run_in(code: Path, words: list[str], stdout: Any) -> str:
    """What a Python of the packages of ``code`` prints."""
    env = {**os.environ, "PYTHONPATH": str(code.absolute())}
    done = subprocess.run(
        [sys.executable, *words], check=True, stdout=stdout, cwd=code, env=env
    )
    return done.stdout.decode() if done.stdout else ""


def one_stream(options: argparse.Namespace) -> dict[str, Any]:
    """Measure one turn of :func:`stream`.

    Returns:
        Images/s from begin to end, seconds to the first image, and images/s after a
        quarter of the blocks.
    """
    from pipelines import ray_env
    from pipelines.ray_data import crop_on_ray, cropping_of

    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
    config = config_of(options)
    images, rows = source_of(options)
    with tempfile.TemporaryDirectory() as folder, ray_env.connect(STORE_BYTES) as ray:
        job = job_of(config, images, rows, folder)
        job.last *= options.epochs
        limits = cropping_of(ray, 1, 0.0, 1)
        on_ray = crop_on_ray(ray, ray.put(job.images), limits)
        begin, seen, marks = time.perf_counter(), 0, list[tuple[float, int]]()
        for pixels, _ in on_ray(job):
            seen += len(pixels)
            marks.append((time.perf_counter() - begin, seen))
    assert seen == (job.last - job.first) * BATCH
    early, late = marks[len(marks) // 4], marks[-1]
    return {
        "images_per_s": round(seen / late[0], 1),
        "first_s": round(marks[0][0], 2),
        "images_per_s_after_a_quarter": round(
            (late[1] - early[1]) / (late[0] - early[0]), 1
        ),
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


def memory(options: argparse.Namespace) -> dict[str, Any]:
    """Measure peak memory for 1, 2 and 4 times the epochs and the rows."""
    from pipelines import ray_env
    from pipelines.ray_data import crop_on_ray, cropping_of

    config = config_of(options)
    runs = []
    with tempfile.TemporaryDirectory() as folder, ray_env.connect(STORE_BYTES) as ray:
        limits = cropping_of(ray, 1, 0.0, 1)
        for epochs, times in ((1, 1), (1, 1), (2, 1), (4, 1), (1, 2), (1, 4)):
            images, rows = source_of(
                argparse.Namespace(**vars(options) | {"rows": options.rows * times})
            )
            job = job_of(config, images, rows, folder)
            job.last *= epochs
            on_ray = crop_on_ray(ray, ray.put(job.images), limits)
            with Peak() as peak:
                drain(on_ray(job), job.last * BATCH)
            used = {
                "epochs": epochs,
                "rows": options.rows * times,
                "spilled_mb": spilled_mb(),
                **peak.found,
            }
            print(used, file=sys.stderr, flush=True)
            runs.append(used)
        store = ray.cluster_resources()["object_store_memory"]
    return {
        "question": "peak memory of streaming for more epochs and more rows",
        "command": f"python -m benchmarks.ingest {' '.join(sys.argv[1:])}",
        **environment(),
        "object_store_mb": round(store / 1e6),
        "runs, the first one a warm-up": runs,
    }


class Peak:
    """Sum the memory of this process and its children every half second; keep peaks."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Peak:
        """Begin to look."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the result in ``found``."""
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        import psutil

        most = {"peak_all_mb": 0, "peak_private_mb": 0, "peak_private_here_mb": 0}
        while not self._stop.wait(0.5):
            here = psutil.Process()
            shared = private = 0
            for process in [here, *here.children(recursive=True)]:
                try:
                    memory = process.memory_full_info()
                except psutil.Error:
                    continue
                shared += memory.pss  # pages of the object store once
                private += memory.uss
            own = here.memory_full_info().uss
            for name, value in zip(most, (shared, private, own), strict=True):
                most[name] = max(most[name], round(value / 1e6))
        self.found = most


def spilled_mb() -> float:
    """Return the megabytes that the object store has written to disk."""
    import ray
    from ray._private.internal_api import memory_summary

    text = memory_summary(ray.get_runtime_context().gcs_address, stats_only=True)
    return sum(float(value) for value in re.findall(r"Spilled (\d+) MiB", text))


def resident(options: argparse.Namespace) -> dict[str, Any]:
    """Measure an epoch of pretraining, with one Ray worker and without Ray in turns.

    Pretraining has the shortest steps; discovery would add evaluations and a report at
    the end of every run.
    """
    here = Path(__file__).parents[1]
    cases = {
        f"--workers {n}": (here, ["--workers", str(n), "--data.loading", "memory"])
        for n in (0, 1)
    }
    epochs = seconds_of_epochs(options, cases)
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


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Measure steps/s of streamed pretraining, in turns with the code of ``--code``."""
    words = ["--workers", "1", "--data.loading", "streaming"]
    epochs = seconds_of_epochs(
        options, {name: (code, words) for name, code in checkouts(options).items()}
    )
    steps = options.rows // 2 // TRAIN_BATCH
    rates = {
        name: [steps / seconds for seconds in values] for name, values in epochs.items()
    }
    middle = medians(rates)
    return {
        "question": "steps/s of a streamed epoch on one Ray worker",
        "command": f"python -m benchmarks.ingest {' '.join(sys.argv[1:])}",
        **environment(),
        "steps_per_s": {name: round(value, 2) for name, value in middle.items()},
        "ratio": round(middle["here"] / middle["before"], 3) if options.code else None,
        "spread": spread(rates),
        "turns": {
            name: [round(value, 2) for value in values]
            for name, values in rates.items()
        },
    }


def seconds_of_epochs(
    options: argparse.Namespace, cases: dict[str, tuple[Path, list[str]]]
) -> dict[str, list[float]]:
    """Measure epochs of pretraining on half the classes of CIFAR10-JPEG in turns."""
    # of an epoch: half the classes are known
    images = options.rows // 2 // TRAIN_BATCH * TRAIN_BATCH
    found: dict[str, list[float]] = {name: [] for name in cases}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(options.repeats):
            for place, (name, (code, arguments)) in enumerate(cases.items()):
                output = Path(folder) / f"{place}-{turn}"
                words = [
                    "-m",
                    "pipelines",
                    "pretrain",
                    "--data",
                    f"parquet:{SHARED}/cifar10-jpeg",
                    "--preset",
                    "cifar10",
                    "--known-classes",
                    "first:5",
                    "--limit",
                    str(options.rows),
                    "--batch-size",
                    str(TRAIN_BATCH),
                    "--model.encoder",
                    "resnet_small",
                    "--pretrain.epochs",
                    "11",
                    "--pretrain.warmup-epochs",
                    "0",
                    "--compute.threads",
                    "1",
                    "--train.log-every",
                    "100000",
                    "--output",
                    str(output),
                    *arguments,
                ]
                run_in(code, words, stdout=sys.stderr)
                lines = [
                    json.loads(x)
                    for x in (output / "metrics.jsonl").read_text().splitlines()
                ]
                rates = [x["images_per_s"] for x in lines if x["event"] == "epoch"]
                found[name] += [images / rate for rate in rates[1:]]
    return found


def everything(options: argparse.Namespace) -> dict[str, Any]:
    """Every part in a process of its own; what is there already is kept."""
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "result.json"
    found = json.loads(file.read_text()) if file.exists() else {"rows": {}}
    for words in ALL:
        if words not in found["rows"]:
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.ingest", *words.split()],
                check=True,
                stdout=subprocess.PIPE,
            )
            found["rows"][words] = json.loads(done.stdout.splitlines()[-1])
            found["command"] = (
                f"python -m benchmarks.ingest all --output {options.output}"
            )
            file.write_text(json.dumps(found, indent=1) + "\n")
    return found


def main() -> int:
    """Run the command line, and print one row of JSON."""
    parts = {
        "rate": rate,
        "ray": through_ray,
        "stream": stream,
        "train": train,
        "memory": memory,
        "resident": resident,
        "all": everything,
    }
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=parts)
    parser.add_argument("--source", choices=SIZES, default="imagenet")
    parser.add_argument("--views", default="2+0", help="large+small views of an image")
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=8, help="of stream")
    parser.add_argument(
        "--code",
        help=(
            "of stream and train: another checkout, whose packages take turns with"
            " these"
        ),
    )
    parser.add_argument("--turn", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output", help="of all: the record's directory")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(parts[options.part](options)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
