"""Every source in every situation: read exactly as it should be, or refused in one
line.

``SITUATIONS`` is a table of situations and of the sources in which they can occur.
"""

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from uno.config import DataConfig
from uno.data.decode import decode_many
from uno.data.sources import read_rows

from .builders import encoded, failure, pixels
from .test_tar import write_tar

Label = str | float | None
PNG = encoded(pixels(0, 16, 16))


class Row(NamedTuple):
    """An image, or the vector in its place, which is not finite for a broken image.

    ``image`` is None if there is only the label.
    """

    name: str
    label: Label
    image: bytes | None = PNG


class Right(NamedTuple):
    """The labels of all rows in any order, and how many rows are unreadable.

    ``named``: what the notes, warnings or names of unreadable rows must contain.
    """

    labels: Sequence[Label]
    unreadable: int = 0
    named: str = ""


def labeled(labels: Sequence[Label]) -> list[Row]:
    """Return the rows a.png, b.png, ... with these labels."""
    names = (f"{letter}.png" for letter in "abcde")
    return [Row(*pair) for pair in zip(names, labels, strict=True)]


LABELS = ["cat", "cat", "dog", "dog", None]
ODD = [
    Row("a b.png", "two words"),
    Row("cam 2.1_003.png", "v1.0 x"),
    Row("-dash.png", "-dash"),
    Row("é杯子.png", "杯子 ü"),
    Row("it's #1, 50%.png", "it's, 50%"),
    Row("e.f.png", None),
]


def write_files(folder: Path, contents: Mapping[str, bytes | None]) -> None:
    for name, data in contents.items():
        if data is not None:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


def write_folder(root: Path, rows: Sequence[Row]) -> dict[str, str]:
    write_files(root, {f"{row.label or '.'}/{row.name}": row.image for row in rows})
    return {"source": f"folder:{root}"}


def write_two_folders(root: Path, rows: Sequence[Row]) -> dict[str, str]:
    write_folder(root / "known", [row for row in rows if row.label is not None])
    write_folder(root / "new", [row for row in rows if row.label is None])
    return {"labeled": f"{root}/known", "unlabeled": f"{root}/new"}


def write_csv_file(path: Path, key: str, rows: Sequence[Row]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow((key, "label"))
        writer.writerows((row.name, row.label) for row in rows)


def write_csv(root: Path, rows: Sequence[Row]) -> dict[str, str]:
    write_files(root, {row.name: row.image for row in rows})
    write_csv_file(root / "t.csv", "path", rows)
    return {"source": f"table:{root}/t.csv"}


def write_parquet(root: Path, rows: Sequence[Row]) -> dict[str, str]:
    ids, labels, images = map(list, zip(*rows, strict=True))
    table = pa.table({"id": ids, "label": labels, "image": images})
    pq.write_table(table, root / "t.parquet")
    return {"source": f"parquet:{root}"}


def write_shard(root: Path, rows: Sequence[Row]) -> dict[str, str]:
    members = list[tuple[str, bytes]]()
    for name, label, image in rows:
        if image is not None:
            members.append((name, image))
        if label is not None:
            members.append((f"{name.removesuffix('.png')}.cls", f"{label}".encode()))
    write_tar(root / "t.tar", members)
    return {"source": f"tar:{root}"}


def write_vectors(root: Path, rows: Sequence[Row]) -> dict[str, str]:
    """Vectors of broken images are not finite."""
    values = np.random.default_rng(0).normal(size=(len(rows), 4))
    values[[row.image != PNG for row in rows]] = np.nan
    np.save(root / "t.npy", values)
    write_csv_file(root / "t.csv", "id", rows)
    return {"source": f"vectors:{root}/t.npy"}


WRITERS: dict[str, Callable[[Path, Sequence[Row]], dict[str, str]]] = {
    "folder": write_folder,
    "two folders": write_two_folders,
    "csv": write_csv,
    "parquet": write_parquet,
    "tar": write_shard,
    "vectors": write_vectors,
}
NO_FOLDERS = ("csv", "parquet", "tar", "vectors")
ROWS = labeled(LABELS)
LOST = [*ROWS, Row("gone.png", "cat", None)]
SITUATIONS: dict[str, tuple[Sequence[Row], Iterable[str], Right]] = {
    # the rows, the sources that can hold them, and what is read
    "missing label": (ROWS, WRITERS, Right(LABELS)),
    "one broken file": (
        [*ROWS[:-1], Row("e.png", None, PNG[:20])],
        WRITERS,
        Right(LABELS, 1, r"\be\b"),
    ),
    "lost label in a table": (
        LOST,
        ("csv", "parquet"),
        Right([*LABELS, "cat"], 1, "gone.png"),
    ),
    "lost label in a shard": (LOST, ("tar",), Right(LABELS, named="gone.cls")),
    # as pandas has them: the gap makes floats of integers
    "numbers as labels": (
        labeled([0.0, 0.0, 1.0, 1.0, None]),
        NO_FOLDERS,
        Right(["0", "0", "1", "1", None]),
    ),
    "odd names": (ODD, WRITERS, Right([row.label for row in ODD])),
}


@pytest.mark.parametrize(
    ("situation", "source"),
    [(name, source) for name, case in SITUATIONS.items() for source in case[1]],
)
def test_a_source_is_read_right(tmp_path, situation, source):
    given, _, expected = SITUATIONS[situation]
    rows = read_rows(DataConfig(**WRITERS[source](tmp_path, given)))
    assert Counter(rows.labels.to_pylist()) == Counter(expected.labels)
    vectors = rows.images.vectors(np.arange(len(rows)))
    reasons = decode_many(rows.images, 8)[1] if vectors is None else vectors[1]
    assert len(reasons) - reasons.count(None) == expected.unreadable
    bad = rows.image_sample.reasons
    said = " ".join([*rows.warnings, *map(rows.name_of, bad), *bad.values()])
    assert re.search(expected.named, said)
    assert bool(said) == bool(expected.named)


@pytest.mark.parametrize("source", NO_FOLDERS)
def test_fractions_are_refused_as_labels_in_one_line(tmp_path, source):
    """The line names the row and the fix."""
    config = WRITERS[source](tmp_path, labeled([0.5, 0.5, 1.0, 1.0, None]))
    line = failure(read_rows, DataConfig(**config))
    for word in (r"row \d|t.tar#\w", r"0\.5", r'df\["label"\]\.astype'):
        assert re.search(word, line)
