"""Real files on disk for the tests: images, CIFAR files, Parquet with Hugging Face
metadata.
"""

import hashlib
import io
import json
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from torchvision import datasets

from uno.config import DataConfig
from uno.data.decode import decode_many, ok_mask
from uno.data.rows import Rows
from uno.data.sources import read_rows
from uno.data.splits import Task, make_task
from uno.data.unreadable import check_bad
from uno.errors import ConfigError

CIFAR = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}
SHARED = Path(__file__).parents[4] / "shared" / "data"


def failure(
    function: Callable[..., Any], *args: Any, may_pass: bool = False, **options: Any
) -> str | None:
    """The one line with which ``function`` refuses its arguments."""
    try:
        function(*args, **options)
    except ConfigError as error:
        assert "\n" not in str(error) and len(str(error)) < 600
        return str(error)
    assert may_pass, "nothing is wrong"
    return None


def read(source: Any, images_only: bool = False, **config: Any) -> Rows:
    """The rows of a source, with other settings of the data."""
    return read_rows(DataConfig(source=str(source), **config), images_only)


def read_task(source: Any, **config: Any) -> Task:
    """The data of a run on a source with one novel class, unless settings differ."""
    settings = DataConfig(**{"source": str(source), "num_novel": 1, **config})
    return make_task(read_rows(settings), settings)


def assert_refused(
    facts: Iterable[str], function: Callable[..., Any], *args: Any, **options: Any
) -> None:
    """``function`` refuses its arguments with one line, which has all the facts."""
    line = failure(function, *args, **options)
    for fact in facts:
        assert fact in str(line)


def columns_of(rows: Any, *names: str) -> dict[str, list[Any]]:
    """Columns of rows by their names, as lists to compare."""
    return {name: getattr(rows, name).to_pylist() for name in names}


def pixels(seed: int, height: int = 8, width: int = 8) -> np.ndarray:
    return np.random.default_rng(seed).integers(
        0, 256, (height, width, 3), dtype=np.uint8
    )


def encoded(
    image: np.ndarray | Image.Image, format: str = "PNG", **options: Any
) -> bytes:
    buffer, picture = (
        io.BytesIO(),
        Image.fromarray(image) if isinstance(image, np.ndarray) else image,
    )
    picture.save(buffer, format, **options)
    return buffer.getvalue()


def write_images(
    folder: Path, names: Iterable[str], first_seed: int = 0, size: int = 8
) -> None:
    for seed, name in enumerate(names, start=first_seed):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(
            encoded(
                pixels(seed, size, size), "JPEG" if path.suffix == ".jpg" else "PNG"
            )
        )


def cifar_files(name: str, rows: int = 20, protocol: int = 2) -> dict[str, bytes]:
    """Content of the files of 'cifar10' or 'cifar100' by name, the file of class names
    first: ``rows`` drawn rows each, labels counting round.
    """
    published = CIFAR[name]
    num_classes = 10 if name == "cifar10" else 100
    names = [f"class {i}" for i in range(num_classes)]
    content: dict[str, Any] = {
        published.meta["filename"]: {published.meta["key"]: names}
    }
    for seed, (file, _) in enumerate((*published.train_list, *published.test_list)):
        drawn = np.random.default_rng(seed).integers(0, 256, (rows, 3072), np.uint8)
        key = "labels" if name == "cifar10" else "fine_labels"
        labels = [i % num_classes for i in range(rows)]
        content[file] = {"data": drawn, key: labels}
    return {file: pickle.dumps(value, protocol) for file, value in content.items()}


def publish_cifar(
    monkeypatch: pytest.MonkeyPatch, name: str, files: dict[str, bytes]
) -> None:
    """Let torchvision take these files for the published ones."""
    published = CIFAR[name]
    sums = {file: hashlib.md5(data).hexdigest() for file, data in files.items()}
    meta = published.meta | {"md5": sums[published.meta["filename"]]}
    monkeypatch.setattr(published, "meta", meta)
    for files_of_split in ("train_list", "test_list"):
        listed = [[file, sums[file]] for file, _ in getattr(published, files_of_split)]
        monkeypatch.setattr(published, files_of_split, listed)


def write_cifar(root: Path, name: str, files: dict[str, bytes]) -> Path:
    """Write files into the folder that the archive unpacks to, and return it."""
    folder = root / CIFAR[name].base_folder
    folder.mkdir(parents=True)
    for file, data in files.items():
        (folder / file).write_bytes(data)
    return folder


def hf_table(
    images: list[Any], labels: list[int | None], names: list[str], column: str = "img"
) -> pa.Table:
    struct = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table(
        {column: pa.array(images, struct), "label": pa.array(labels, pa.int64())}
    )
    features = {
        column: {"_type": "Image"},
        "label": {"names": names, "_type": "ClassLabel"},
    }
    return table.replace_schema_metadata(
        {"huggingface": json.dumps({"info": {"features": features}})}
    )


def write_hf(root: Path, names: list[str], train: int = 12, test: int = 4) -> None:
    """train-*.parquet and test-*.parquet with PNG bytes, labels counting round."""
    root.mkdir(parents=True, exist_ok=True)
    for split, num, seed in (("train", train, 0), ("test", test, 1000)):
        images = [
            {"bytes": encoded(pixels(seed + i)), "path": None} for i in range(num)
        ]
        table = hf_table(images, [i % len(names) for i in range(num)], names)
        pq.write_table(table, root / f"{split}-00000-of-00001.parquet")


def load_resident(config, threads=None):
    """Read, split and decode: (task, images uint8 (N,3,S,S), ok bool (N,), bad
    [{"id", "reason"}, ...]).
    """
    task = make_task(read_rows(config), config)
    images, reasons = decode_many(task.rows.images, config.stored_size, threads)
    bad = check_bad(task.rows.ids, reasons, config.max_bad_fraction)
    return task, images, ok_mask(reasons), bad
