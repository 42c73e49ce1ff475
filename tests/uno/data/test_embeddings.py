"""Vectors in the place of images: what is read, and what is refused."""

import io
import sys
import tracemalloc
import zipfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from pipelines import cli
from uno.data import array_files, embeddings, parquet
from uno.data.check import check, format_report
from uno.data.embeddings import Vectors, given_vectors
from uno.data.sources import read_rows
from uno.data.splits import make_task
from uno.errors import ConfigError
from uno.session.configure import configure

from .builders import assert_refused, columns_of, failure, read


def drawn(num: int = 12, width: int = 4) -> np.ndarray:
    """Random vectors, float32 (num, width)."""
    return np.random.default_rng(0).normal(size=(num, width)).astype(np.float32)


def stored(file: Path, kind: Any = None, **columns: Any) -> str:
    """A Parquet file with a column ``embedding`` of an Arrow ``kind``, and others."""
    columns["embedding"] = pa.array(
        list(columns["embedding"]), kind or pa.list_(pa.float32())
    )
    pq.write_table(pa.table(columns), file, row_group_size=11)
    return f"vectors:{file}"


def rows_of(source: str, **more: Any) -> Any:
    """Read a source. A path is that of a file of vectors."""
    prefix = "" if str(source).startswith("vectors:") else "vectors:"
    return read(f"{prefix}{source}", **more)


def values_of(rows: Any) -> Any:
    """Return the first vector of each row, float32 (N, D)."""
    return rows.images.vectors(np.arange(len(rows)))[0][:, 0].numpy()


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.float32(), 4),
        pa.list_(pa.float64()),
        pa.large_list(pa.float16()),
        pa.list_(pa.float16(), 4),
    ],
)
def test_lists_of_any_floats_are_read(tmp_path, kind):
    """Kills: a kind of list or float that is refused or scrambled."""
    values, labels = drawn().astype(np.float16), ["a", None] * 6
    rows = rows_of(stored(tmp_path / "v.parquet", kind, embedding=values, label=labels))
    np.testing.assert_array_equal(values_of(rows), values.astype(np.float32))
    assert (rows.labels.to_pylist(), str(rows.ids[3])) == (labels, "row-3")


def test_rows_of_one_id_are_views(tmp_path):
    """Kills: views in another order, ids with fewer views than others, labels of the
    wrong rows.
    """
    values = drawn(5)
    columns = {"embedding": values, "id": list("abbca"), "label": list("xyyzx")}
    rows = rows_of(stored(tmp_path / "v.parquet", **columns))
    assert columns_of(rows, "ids", "labels") == {
        "ids": ["a", "b", "c"],
        "labels": ["x", "y", "z"],
    }
    found, _ = rows.images.vectors(np.arange(3))
    np.testing.assert_array_equal(found, values[[[0, 4], [1, 2], [3, 3]]])
    np.testing.assert_array_equal(rows.images.prepared(np.array([1]))[0], values[[1]])
    assert "at most" in rows.notes[0]


FINITE = "numbers that are not finite"


@pytest.mark.parametrize(
    ("views", "reason"),
    [
        ([[1.0, np.nan, 3.0, 4.0]], FINITE),
        ([[np.inf, 2.0, 3.0, 4.0]], FINITE),
        ([[0.0] * 4], "a vector of zeros"),
        ([[1.0]], "1 numbers, not 4"),
        ([[1.0, None, 3.0, 4.0]], FINITE),
        ([None], "0 numbers, not 4"),
        ([[1.0, 2.0, 3.0, 4.0], [np.nan] * 4], FINITE),
    ],
)
def test_bad_rows_have_reasons(tmp_path, views, reason):
    """Kills: a NaN, an infinity, a missing number or vector that is trained on; a
    bad view that is kept.
    """
    columns = {
        "embedding": [*drawn(3), *views],
        "id": [*"abc", *["bad"] * len(views)],
    }
    found, reasons = rows_of(stored(tmp_path / "v.parquet", **columns)).images.vectors(
        np.arange(4)
    )
    assert reasons == [None, None, None, reason]
    assert found.flatten(1).any(dim=1).tolist() == [True, True, True, False]


EXACT = (np.arange(24, dtype=np.float32) % 16).reshape(6, 4)  # in 8 bits, too
TENSOR = torch.from_numpy(EXACT)


@pytest.mark.parametrize(
    ("name", "save"),
    [
        ("v.npy", lambda path: np.save(path, EXACT.astype(np.float64))),
        ("v.npz", lambda path: np.savez(path, embedding=EXACT, other=EXACT[:1])),
        ("v.pt", lambda path: torch.save(TENSOR, path)),
        ("v.pt", lambda path: torch.save(TENSOR.bfloat16(), path)),
        ("v.pt", lambda path: torch.save(TENSOR.to(torch.float8_e4m3fn), path)),
    ],
)
def test_arrays_of_numpy_and_tensors_of_pytorch_are_read(tmp_path, name, save):
    save(tmp_path / name)
    rows = rows_of(tmp_path / name)
    np.testing.assert_array_equal(values_of(rows), EXACT)
    assert rows.labels.null_count == 6


def test_a_table_beside_an_array_has_its_labels(tmp_path):
    """Kills: a CSV that is read in another order, a table of another length."""
    table = "".join(f"r{i},{'k' if i < 3 else ''}\n" for i in range(6))
    (tmp_path / "v.csv").write_text(f"name,label\n{table}")
    np.save(tmp_path / "v.npy", drawn(6))
    rows = rows_of(tmp_path / "v.npy", columns="id=name")
    assert columns_of(rows, "ids", "labels") == {
        "ids": [f"r{i}" for i in range(6)],
        "labels": ["k"] * 3 + [None] * 3,
    }
    np.save(tmp_path / "v.npy", drawn(5))
    assert_refused(["has 6 rows", "has 5"], rows_of, tmp_path / "v.npy")


def test_tensors_and_lists_of_pytorch_are_read(tmp_path):
    values = torch.from_numpy(drawn(4)).requires_grad_()
    labels = ["a", None, "b", ""]
    content = {"embedding": values, "label": labels, "id": torch.arange(4)}
    torch.save(content, tmp_path / "v.pt")
    rows = rows_of(tmp_path / "v.pt")
    np.testing.assert_array_equal(values_of(rows), values.detach())
    assert columns_of(rows, "ids", "labels") == {
        "ids": ["0", "1", "2", "3"],
        "labels": ["a", None, "b", None],
    }


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (Path("x"), "Python objects"),
        ({"embedding": 3}, "no dense tensor"),
        ({"a": torch.ones(2, 3), "b": torch.ones(2, 3)}, "embedding=a"),
        ({"embedding": torch.ones(2, 3), "label": [{}, []]}, "neither text nor"),
    ],
)
def test_a_file_of_pytorch_without_clear_embeddings_is_refused(tmp_path, content, part):
    torch.save(content, tmp_path / "v.pt")
    assert part in failure(rows_of, tmp_path / "v.pt")


def test_cells_without_the_package_that_reads_them_name_it(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "cells.h5ad").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "h5py", None)
    argv = ["data", "check", "--data", f"vectors:{tmp_path}/cells.h5ad"]
    assert cli.main(argv) == ConfigError.exit_code
    assert "pip install h5py" in capsys.readouterr().err


def test_arrays_are_read_from_a_remote_file_system(bucket):
    values, labels = drawn(6), list("aaabbb")
    np.savez_compressed(bucket / "v.npz", embedding=values, label=np.array(labels))
    rows = rows_of("s3://bucket/v.npz")
    np.testing.assert_array_equal(values_of(rows), values)
    assert rows.labels.to_pylist() == labels


def test_an_npz_file_is_not_in_memory_beside_its_arrays(tmp_path):
    values = drawn(2000, 1000)
    np.savez(tmp_path / "v.npz", embedding=values)
    tracemalloc.start()
    try:
        rows_of(tmp_path / "v.npz")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.5 * values.nbytes


def test_an_npz_file_of_too_many_bytes_is_refused(tmp_path, monkeypatch):
    """Its arrays would be read into memory. The file itself is small: it is packed."""
    np.savez_compressed(tmp_path / "v.npz", embedding=np.ones((1000, 8), np.float32))
    monkeypatch.setattr(array_files, "MAX_NPZ_BYTES", 32_000)
    assert_refused(["v.npz: its ", "np.save"], rows_of, tmp_path / "v.npz")
    monkeypatch.setattr(array_files, "MAX_NPZ_BYTES", 33_000)
    assert len(rows_of(tmp_path / "v.npz")) == 1000


def write_impossible_shape(path):
    """Write an archive whose array has a header of 10**12 rows, and 100 bytes."""
    array, shape = io.BytesIO(), {"shape": (10**12, 4), "fortran_order": False}
    np.lib.format.write_array_header_1_0(array, {"descr": "<f4", **shape})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("embedding.npy", array.getvalue() + bytes(100))


def damaged(content):
    return content[:300] + b"\xff" * 100 + content[400:]


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("v.npz", lambda path: path.write_bytes(path.read_bytes()[:-100])),
        ("v.npz", lambda path: path.write_bytes(damaged(path.read_bytes()))),
        ("v.npz", write_impossible_shape),
        ("v.pt", lambda path: path.write_bytes(path.read_bytes()[:-100])),
    ],
    ids=["cut", "altered", "impossible shape", "cut pt"],
)
def test_a_damaged_file_of_arrays_is_one_line(name, damage, tmp_path):
    np.savez_compressed(tmp_path / "v.npz", embedding=drawn(200))
    torch.save(torch.ones(20, 3), tmp_path / "v.pt")
    damage(tmp_path / name)
    assert f"{name} holds no " in failure(rows_of, tmp_path / name)


@pytest.mark.parametrize(
    ("columns", "fact"),
    [
        (
            pa.table([drawn(2).tolist(), ["a", "b"], ["a", "b"]], ["embedding", *"ll"]),
            "two columns have one name",
        ),
        (
            {"embedding": pa.array([None, None], pa.list_(pa.float32()))},
            "most rows have no vector",
        ),
        (
            {"embedding": drawn(2).tolist(), "id": ["a", "a"], "label": ["x", "y"]},
            "rows of id 'a' differ in label",
        ),
    ],
)
def test_what_holds_no_clear_vectors_is_refused(tmp_path, columns, fact):
    table = pa.table(columns) if isinstance(columns, dict) else columns
    pq.write_table(table, tmp_path / "v.parquet")
    assert fact in failure(rows_of, tmp_path)


def test_a_folder_of_files_with_splits_and_other_names(tmp_path):
    for name in ("train-0", "test-0"):
        table = {"vec": drawn(2).tolist(), "id": [f"{name}a", f"{name}b"]}
        pq.write_table(pa.table(table), tmp_path / f"{name}.parquet")
    rows = rows_of(tmp_path, columns="embedding=vec")
    assert columns_of(rows, "ids", "split") == {
        "ids": ["test-0a", "test-0b", "train-0a", "train-0b"],
        "split": ["test", "test", "train", "train"],
    }


def test_pictures_and_text_are_shown_not_learnt(tmp_path):
    """Kills: a picture of another row, text that is lost in a choice of rows, a picture
    in the fingerprint.
    """
    values = drawn(3)
    shown = {"path": ["a.jpg", "b.jpg", ""], "text": ["x", "y", None]}
    (tmp_path / "b.jpg").write_bytes(b"here")
    whole = rows_of(stored(tmp_path / "v.parquet", embedding=values, **shown))
    images, last = whole.take(np.array([2, 1])).images, np.array([1])
    assert images.captions(last) == ["y"]
    assert (
        images.pictures().read_images(last)
        == images.paths(last)
        == [f"{tmp_path}/b.jpg"]
    )
    plain = rows_of(stored(tmp_path / "w.parquet", embedding=values))
    assert (plain.fingerprint, plain.images.pictures()) == (whole.fingerprint, None)
    source = stored(tmp_path / "b.parquet", embedding=values, image=[b"0", b"1", b"2"])
    some = rows_of(source).take(np.array([2, 0])).images.pictures()
    assert some.read_images(np.arange(2)) == [b"2", b"0"]


def test_other_numbers_are_another_data_set():
    one, other = Vectors.of(drawn(3)), Vectors.of(drawn(3) + 1)
    assert [*one.content_keys(np.arange(3))] != [*other.content_keys(np.arange(3))]


def test_what_is_predicted_needs_no_labels(tmp_path):
    source = stored(tmp_path / "v.parquet", embedding=drawn(3), label=[[1], [2], [3]])
    assert len(rows_of(source, images_only=True)) == 3


def checked(source, **given):
    """Return the messages of the check of a source by their level, and its report."""
    settings = {"data.source": source, "train.batch_size": 8, **given}
    config = configure(settings)
    task = make_task(read_rows(config.data), config.data)
    problems = check(task, config, seconds=5)
    report = format_report(task, problems, config.data.stored_size)
    return [(problem.level, problem.message) for problem in problems], report


def test_the_checks_name_bad_vectors_and_do_not_decode(tmp_path):
    values, labels = drawn(40), ["a"] * 15 + ["b"] * 15 + [None] * 10
    values[5] = np.nan
    source = stored(tmp_path / "v.parquet", embedding=values, label=labels)
    problems, report = checked(source, **{"data.num_novel": 1})
    assert "as vectors of 4 numbers" in report
    (error,) = (message for level, message in problems if level == "error")
    assert "row-5: numbers that are not finite" in error


def test_numbers_in_a_file_are_those_in_memory(tmp_path, monkeypatch):
    """With bad rows and several views of a row; the file is gone from its folder.
    Kills: pieces in another order, rows of a second file or group at the place of the
    first, a file that is left.
    """
    values, ids = drawn(50), [str(row % 40) for row in range(50)]
    values[5], values[44, 1] = 0, np.nan
    np.save(tmp_path / "v.npy", values.astype(np.float64))
    (tmp_path / "data").mkdir()
    stored(tmp_path / "data" / "a.parquet", embedding=values[:30], id=ids[:30])
    stored(tmp_path / "data" / "b.parquet", embedding=values[30:], id=ids[30:])
    paths, some = (tmp_path / "data", tmp_path / "v.npy"), np.array([7, 3])
    in_memory = [rows_of(path).images for path in paths]
    monkeypatch.setenv("UNO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(array_files, "MAPPED_BYTES", 0)
    monkeypatch.setattr(embeddings, "PIECE_ROWS", 9)
    monkeypatch.setattr(parquet, "READ_ROWS", 7)
    assert isinstance(array_files.new_array((3, 2)), np.memmap)
    for path, expected in zip(paths, in_memory, strict=True):
        images = rows_of(path).images
        assert torch.equal(images.values, expected.values)
        assert images.reasons == expected.reasons
        assert torch.equal(images.vectors(some)[0], expected.values[some])
    assert not [*(tmp_path / "cache").iterdir()]


def test_equal_rows_are_those_of_a_dictionary():
    values = torch.randint(0, 3, (2_500, 6)).float()
    found = defaultdict[tuple[float, ...], list[int]](list)
    for row, numbers in enumerate(values.tolist()):
        found[tuple(numbers)].append(row)
    several = [group for group in found.values() if len(group) > 1]
    assert 500 < len(several) < len(found)
    assert embeddings.equal_rows(values) == several
    assert embeddings.equal_rows(values[:0]) == embeddings.equal_rows(values[:1]) == []


def test_copies_are_found_without_reading_rows(tmp_path, monkeypatch):
    """Kills: vectors that are copied to compare them; bad rows, all of them zeros,
    taken for copies.
    """
    values, labels = drawn(40), ["a", "b"] * 10 + [None] * 20
    values[7], values[8], values[9], values[12] = 0, 0, np.nan, values[3]
    source = stored(tmp_path / "v.parquet", embedding=values, label=labels)
    monkeypatch.setattr(Vectors, "read_images", None)
    problems, _ = checked(source, **{"data.num_novel": 2, "data.max_bad_fraction": 0.2})
    assert [message for _, message in problems if "duplicates" in message] == [
        "duplicates with different known labels: 1, e.g. row-3 = row-12"
    ]


def test_views_in_memory_are_stored_and_read_again(tmp_path):
    values = np.random.default_rng(0).normal(size=(6, 2, 4))
    given_vectors(values).store(f"{tmp_path}/v.parquet")
    rows = rows_of(tmp_path / "v.parquet")
    np.testing.assert_allclose(rows.images.values, values, atol=1e-6)


def test_labels_of_fewer_rows_than_vectors_are_refused():
    assert "1 labels for 6" in failure(given_vectors, drawn(6), labels=[1])


def test_a_column_of_pictures_may_be_empty(tmp_path):
    """A program that has no pictures may write the column ``path`` all the same."""
    path = stored(tmp_path / "v.parquet", embedding=list(drawn(3)), path=[None] * 3)
    assert rows_of(path).images.paths(np.arange(3)) == [None] * 3


def test_pictures_in_only_some_files_of_vectors_are_refused(tmp_path):
    table = {"embedding": [[1.0, 2.0]] * 3, "label": ["a", "b", None]}
    pq.write_table(pa.table(table | {"image": [b"png"] * 3}), tmp_path / "a.parquet")
    pq.write_table(pa.table(table), tmp_path / "b.parquet")
    line = failure(read, f"vectors:{tmp_path}")
    assert "1 of 2 files have a column image of pictures, e.g." in line


@pytest.mark.parametrize("name", ["text", "path"])
@pytest.mark.parametrize("value", [b"\xff\xfe", ["a", "b"]])
def test_texts_and_paths_that_are_no_text_are_one_line(tmp_path, name, value):
    table = {"embedding": [[1.0, 2.0]] * 3, "label": ["a", "b", None]}
    pq.write_table(pa.table(table | {name: [value] * 3}), tmp_path / "a.parquet")
    assert "a.parquet" in failure(read, f"vectors:{tmp_path}")
