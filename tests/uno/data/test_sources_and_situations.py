"""Every source in every situation: read exactly as it should be, or refused in one
line.

``EXPECTED`` is a table of situations and sources. An outcome is ``Right`` (which rows
are read) or ``Refused`` (what the error line names).
"""

import csv
import io
import json
import os
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from uno.config import DataConfig
from uno.data.decode import decode_many
from uno.data.embeddings import given_vectors
from uno.data.sources import read_rows

from .builders import encoded, failure, pixels

Label = str | float | None


class Row(NamedTuple):
    """An image, or the vector in its place."""

    name: str
    label: Label
    is_broken: bool = False


class Right(NamedTuple):
    """The labels of all rows in any order, and how many rows are unreadable.

    ``named``: what the notes, warnings or names of unreadable rows must contain.
    """

    labels: Sequence[Label]
    unreadable: int = 0
    named: str = ""


class Refused(NamedTuple):
    """Regular expressions for what the line names: file or row, and the fix."""

    words: Sequence[str]


ROWS = [
    Row("a.png", "cat"),
    Row("b.png", "cat"),
    Row("c.png", "dog"),
    Row("d.png", "dog"),
    Row("e.png", None),
]
LABELS = ["cat", "cat", "dog", "dog", None]
ODD = [
    Row("a b.png", "two words"),
    Row("cam 2.1_003.png", "v1.0 x"),
    Row("-dash.png", "-dash"),
    Row("é杯子.png", "杯子 ü"),
    Row("it's #1, 50%.png", "it's, 50%"),
    Row("e.f.png", None),
]


def content(row: Row, number: int) -> bytes:
    """A PNG; of a broken row only its beginning."""
    image = encoded(pixels(number, 16, 16))
    return image[:20] if row.is_broken else image


def write_file(path: Path, row: Row, number: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content(row, number))


def text_of(label: Label) -> str:
    return "" if label is None else str(label)


def csv_text(rows: Iterable[Row], separator: str = ",") -> str:
    text = io.StringIO()
    writer = csv.writer(text, delimiter=separator)
    writer.writerows(
        [
            ("path", "label"),
            *((f"images/{row.name}", text_of(row.label)) for row in rows),
        ]
    )
    return text.getvalue()


def numbers(rows: Sequence[Row]) -> np.ndarray:
    """Vectors float32 (N, 4), not finite for a broken row."""
    values = np.random.default_rng(0).normal(size=(len(rows), 4)).astype(np.float32)
    values[[row.is_broken for row in rows]] = np.nan
    return values


def write_folder(root: Path, rows: Sequence[Row]) -> dict[str, str]:
    for number, row in enumerate(rows):
        folder = root if row.label is None else root / f"{row.label}"
        write_file(folder / row.name, row, number)
    return {"source": f"folder:{root}"}


def write_two_folders(root: Path, rows: Sequence[Row]) -> dict[str, str]:
    for number, row in enumerate(rows):
        folder = root / "new" if row.label is None else root / "known" / f"{row.label}"
        write_file(folder / row.name, row, number)
    return {"labeled": f"{root}/known", "unlabeled": f"{root}/new"}


def write_images_of(root: Path, rows: Sequence[Row]) -> None:
    for number, row in enumerate(rows):
        write_file(root / "images" / row.name, row, number)


def write_csv(root: Path, rows: Sequence[Row]) -> dict[str, str]:
    write_images_of(root, rows)
    (root / "t.csv").write_text(csv_text(rows), "utf-8")
    return {"source": f"table:{root}/t.csv"}


def write_jsonl(root: Path, rows: Sequence[Row]) -> dict[str, str]:
    write_images_of(root, rows)
    records = [{"path": f"images/{row.name}", "label": row.label} for row in rows]
    (root / "t.jsonl").write_text("\n".join(map(json.dumps, records)), "utf-8")
    return {"source": f"table:{root}/t.jsonl"}


def write_parquet(root: Path, rows: Sequence[Row]) -> dict[str, str]:
    root.mkdir(parents=True, exist_ok=True)
    columns = {"id": [row.name for row in rows], "label": [row.label for row in rows]}
    columns["image"] = [content(row, number) for number, row in enumerate(rows)]
    pq.write_table(pa.table(columns), root / "t.parquet")
    return {"source": f"parquet:{root}"}


def write_tar(
    root: Path, rows: Sequence[Row], more: Iterable[tuple[str, bytes]] = ()
) -> dict[str, str]:
    root.mkdir(parents=True, exist_ok=True)
    members = [(row.name, content(row, number)) for number, row in enumerate(rows)]
    keys = [(row.name.removesuffix(".png"), row.label) for row in rows]
    members += [
        (f"{key}.cls", f"{label}".encode()) for key, label in keys if label is not None
    ]
    with tarfile.open(root / "t.tar", "w") as archive:
        for name, data in (*members, *more):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return {"source": f"tar:{root}"}


def write_vectors(root: Path, rows: Sequence[Row]) -> dict[str, str]:
    root.mkdir(parents=True, exist_ok=True)
    np.save(root / "t.npy", numbers(rows))
    (root / "t.csv").write_text(csv_text(rows).replace("path,", "id,", 1), "utf-8")
    return {"source": f"vectors:{root}/t.npy"}


def write_python(root: Path, rows: Sequence[Row], labels: Any = None) -> dict[str, str]:
    """As ``uno.discover(embeddings=X, labels=y, ids=names)`` stores them."""
    root.mkdir(parents=True, exist_ok=True)
    labels = [row.label for row in rows] if labels is None else labels
    given = given_vectors(numbers(rows), labels, [row.name for row in rows])
    given.store(f"{root}/t.parquet")
    return {"source": f"vectors:{root}/t.parquet"}


WRITERS: dict[str, Callable[[Path, Sequence[Row]], dict[str, str]]] = {
    "folder": write_folder,
    "two folders": write_two_folders,
    "csv": write_csv,
    "jsonl": write_jsonl,
    "parquet": write_parquet,
    "tar": write_tar,
    "vectors": write_vectors,
    "python": write_python,
}


def missing_label(source: str, root: Path) -> dict[str, str]:
    return WRITERS[source](root, ROWS)


def one_broken_file(source: str, root: Path) -> dict[str, str]:
    return WRITERS[source](root, [*ROWS[:-1], ROWS[-1]._replace(is_broken=True)])


def numbers_as_labels(source: str, root: Path) -> dict[str, str]:
    """As pandas has them: the gap makes floats of integers. Folders have names."""
    labels: list[Label] = [0.0, 0.0, 1.0, 1.0, None]
    if "folder" in source:
        labels = ["0", "0", "1", "1", None]
    return WRITERS[source](
        root, [row._replace(label=v) for row, v in zip(ROWS, labels, strict=True)]
    )


def other_numbers(source: str, root: Path) -> dict[str, str]:
    labels: list[Label] = [0.5, 0.5, 1.0, 1.0, None]
    return WRITERS[source](
        root, [row._replace(label=v) for row, v in zip(ROWS, labels, strict=True)]
    )


def odd_names(source: str, root: Path) -> dict[str, str]:
    return WRITERS[source](root, ODD)


def lost_label(source: str, root: Path) -> dict[str, str]:
    """A label for an image or vector that is not there."""
    gone = Row("gone.png", "cat")
    if source == "tar":
        return write_tar(root, ROWS, [("gone.cls", b"cat")])
    if source == "python":
        return write_python(root, ROWS, [*LABELS, "cat"])
    config = WRITERS[source](root, ROWS)
    if source in ("csv", "vectors"):
        (root / "t.csv").write_text(csv_text([*ROWS, gone]))
    elif source == "jsonl":
        with open(root / "t.jsonl", "a") as file:
            file.write('\n{"path": "images/gone.png", "label": "cat"}')
    elif source == "parquet":
        write_images_of(root, ROWS)
        table = {
            "path": [f"images/{row.name}" for row in (*ROWS, gone)],
            "label": [*LABELS, "cat"],
        }
        pq.write_table(pa.table(table), root / "t.parquet")
    else:
        (root / ("known/emu" if source == "two folders" else "emu")).mkdir()
    return config


def link_out(source: str, root: Path) -> dict[str, str]:
    """An image of the source is a link to a file elsewhere."""
    elsewhere = root.parent / "elsewhere.png"
    write_file(elsewhere, ROWS[0], 0)
    config = WRITERS[source](root, ROWS)
    if source == "parquet":
        write_images_of(root, ROWS)
        table = {"path": [f"images/{row.name}" for row in ROWS], "label": LABELS}
        pq.write_table(pa.table(table), root / "t.parquet")
    below = {"folder": "cat", "two folders": "known/cat"}.get(source, "images")
    (root / below / "a.png").unlink()
    os.symlink(elsewhere, root / below / "a.png")
    return config


def missing_values_of_pandas(source: str, root: Path) -> dict[str, str]:
    pandas = pytest.importorskip("pandas")
    labels = pandas.Series([*LABELS[:-1], pandas.NA], dtype="string")
    if source == "python":
        return write_python(root, ROWS, labels)
    config = WRITERS[source](root, ROWS)
    column = "id" if source == "vectors" else "path"
    table = pandas.DataFrame(
        {column: [f"images/{row.name}" for row in ROWS], "label": labels}
    )
    if source == "parquet":
        write_images_of(root, ROWS)
        table.to_parquet(root / "t.parquet")
    elif source == "jsonl":
        table.to_json(root / "t.jsonl", orient="records", lines=True)
    else:
        table.to_csv(root / "t.csv", index=False)
    return config


FOLDERS = ("folder", "two folders")
TABLES = ("csv", "jsonl", "parquet")
OTHERS = ("tar", "vectors", "python")
EXPECTED: dict[Callable[..., dict[str, str]], dict[str, Right | Refused]] = {
    missing_label: dict.fromkeys(WRITERS, Right(LABELS)),
    one_broken_file: dict.fromkeys(WRITERS, Right(LABELS, 1, r"\be\b")),
    lost_label: {
        **dict.fromkeys(FOLDERS, Refused(["emu", "fill or remove"])),
        **dict.fromkeys(
            TABLES, Right([*LABELS, "cat"], 1, named="gone.png|t.parquet#5")
        ),
        "tar": Right(LABELS, named="gone.cls"),
        "vectors": Refused(["t.csv has 6 rows", "t.npy has 5"]),
        "python": Refused(["6 labels for 5 embeddings"]),
    },
    numbers_as_labels: dict.fromkeys(WRITERS, Right(["0", "0", "1", "1", None])),
    other_numbers: dict.fromkeys(
        (*TABLES, *OTHERS),
        Refused([r"row \d|t.tar#\w", r"0\.5", r'df\["label"\]\.astype']),
    ),
    odd_names: dict.fromkeys(WRITERS, Right([row.label for row in ODD])),
    link_out: dict.fromkeys((*FOLDERS, *TABLES), Refused([r"a\.png", "--data."])),
    missing_values_of_pandas: dict.fromkeys(
        (*TABLES, "vectors", "python"), Right(LABELS)
    ),
}


@pytest.mark.parametrize(
    ("situation", "source"),
    [(situation, source) for situation in EXPECTED for source in EXPECTED[situation]],
)
def test_a_source_is_read_right_or_refused_in_one_line(tmp_path, situation, source):
    expected = EXPECTED[situation][source]

    def read():
        return read_rows(DataConfig(**situation(source, tmp_path / "data")))

    if isinstance(expected, Refused):
        line = failure(read)
        assert all(re.search(word, line) for word in expected.words), line
        return
    rows = read()
    assert Counter(rows.labels.to_pylist()) == Counter(expected.labels)
    vectors = rows.images.vectors(np.arange(len(rows)))
    reasons = decode_many(rows.images, 8)[1] if vectors is None else vectors[1]
    assert len(reasons) - reasons.count(None) == expected.unreadable
    bad = rows.image_sample.reasons
    names = map(rows.name_of, bad)
    said = " ".join([*rows.warnings, *names, *bad.values()])
    assert re.search(expected.named, said) and bool(said) == bool(expected.named)
