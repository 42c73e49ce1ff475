"""Real files on disk for the tests: images, CIFAR pickles, Parquet with Hugging Face
metadata.
"""

import io
import json
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from uno.data.cifar import Layout
from uno.data.decode import check_bad, decode_many, ok_mask
from uno.data.sources import read_rows
from uno.data.splits import make_task
from uno.errors import ConfigError

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


def write_cifar(
    root: Path, layout: Layout, rows: int = 20, protocol: int = 2, fortran: bool = False
) -> np.ndarray:
    """Files with ``rows`` rows each, labels counting round; returns the first file's
    pixels (rows, 3072).
    """
    folder = root / layout.folder
    folder.mkdir(parents=True)
    names = [f"class {i}" for i in range(layout.num_classes)]
    (folder / layout.meta).write_bytes(
        pickle.dumps({layout.names_key: names}, protocol)
    )
    labels = [i % layout.num_classes for i in range(rows)]
    for seed, file in reversed([*enumerate((*layout.train, *layout.test))]):
        data = np.random.default_rng(seed).integers(
            0, 256, (rows, 3072), dtype=np.uint8
        )
        stored = np.asfortranarray(data) if fortran else data
        (folder / file).write_bytes(
            pickle.dumps({"data": stored, layout.label_key: labels}, protocol)
        )
    return data


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
