"""Vectors in the place of images: what is read, and what is refused."""

import io
import sys
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from pipelines import cli
from uno.config import DataConfig
from uno.data import array_files, embeddings, parquet
from uno.data import files as filesystem
from uno.data.check import check, format_report
from uno.data.embeddings import Vectors, given_vectors
from uno.data.sources import read_rows
from uno.data.splits import make_task
from uno.errors import ConfigError
from uno.session.configure import configure


def drawn(num: int = 12, width: int = 4) -> np.ndarray:
    """Random vectors, float32 (num, width)."""
    return np.random.default_rng(0).normal(size=(num, width)).astype(np.float32)


def stored(file: Path, kind: Any = None, **columns: Any) -> str:
    """A Parquet file with a column ``embedding`` of an Arrow ``kind``, and others."""
    lists = pa.array(columns.pop("embedding"), kind or pa.list_(pa.float32()))
    pq.write_table(pa.table({"embedding": lists, **columns}), file)
    return f"vectors:{file}"


def rows_of(source: str, **more: Any) -> Any:
    return read_rows(DataConfig(source=source, **more))


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
    values = drawn().astype(np.float16)
    rows = rows_of(
        stored(
            tmp_path / "v.parquet", kind, embedding=list(values), label=["a", None] * 6
        )
    )
    found, reasons = rows.images.vectors(np.arange(12))
    assert (
        np.array_equal(found[:, 0].numpy(), values.astype(np.float32))
        and reasons == [None] * 12
    )
    assert rows.labels.to_pylist()[:2] == ["a", None] and str(rows.ids[3]) == "row-3"


def test_rows_of_one_id_are_views(tmp_path):
    """Kills: views in another order, ids with fewer views than others, labels of the
    wrong rows.
    """
    values = drawn(5)
    source = stored(
        tmp_path / "v.parquet",
        embedding=list(values),
        id=list("abbca"),
        label=list("xyyzx"),
    )
    rows = rows_of(source)
    found, _ = rows.images.vectors(np.arange(3))
    assert rows.ids.to_pylist() == ["a", "b", "c"] and rows.labels.to_pylist() == [
        "x",
        "y",
        "z",
    ]
    expected = values[[[0, 4], [1, 2], [3, 3]]]
    assert np.array_equal(found.numpy(), expected)
    assert np.array_equal(rows.images.prepared(np.array([1]))[0].numpy(), values[[1]])
    assert "at most" in rows.notes[0]


def test_views_that_differ_in_label_are_refused(tmp_path):
    source = stored(
        tmp_path / "v.parquet",
        embedding=list(drawn(3)),
        id=list("aab"),
        label=["x", "y", "x"],
    )
    with pytest.raises(ConfigError, match="rows of id 'a' differ in label"):
        rows_of(source)


def test_bad_rows_have_reasons(tmp_path):
    """Kills: a NaN, an infinity, a missing number or vector that is trained on; a
    bad view that is kept.
    """
    values = [[*row] for row in drawn(9).tolist()]
    values[1][2], values[2][0], values[3], values[4], values[5][1] = (
        np.nan,
        np.inf,
        [0.0] * 4,
        [1.0],
        None,
    )
    values[6], values[8] = None, [np.nan] * 4
    source = stored(
        tmp_path / "v.parquet", embedding=values, id=[*map(str, range(8)), "7"]
    )
    found, reasons = rows_of(source).images.vectors(np.arange(8))
    finite, zeros = "numbers that are not finite", "a vector of zeros"
    assert reasons == [
        None,
        finite,
        finite,
        zeros,
        "1 numbers, not 4",
        finite,
        "0 numbers, not 4",
        finite,
    ]
    assert not found[1:].any() and found[0].all()


def test_arrays_beside_a_table(tmp_path):
    """Kills: a CSV that is read in another order, a file of objects, a table of
    another length.
    """
    values = drawn(6)
    np.save(tmp_path / "v.npy", values.astype(np.float64))
    bare = rows_of(f"vectors:{tmp_path}/v.npy")
    assert bare.labels.null_count == len(bare) and np.array_equal(
        bare.images.vectors(np.arange(6))[0][:, 0], values
    )
    (tmp_path / "v.csv").write_text(
        "name,label\n" + "".join(f"r{i},{'k' if i < 3 else ''}\n" for i in range(6))
    )
    rows = rows_of(f"vectors:{tmp_path}/v.npy", columns="id=name")
    assert str(rows.ids[5]) == "r5" and rows.labels.to_pylist()[:4] == [
        "k",
        "k",
        "k",
        None,
    ]
    np.savez(tmp_path / "v.npz", embedding=values, other=values[:1])
    assert np.array_equal(
        rows_of(f"vectors:{tmp_path}/v.npz").images.vectors(np.arange(6))[0][:, 0],
        values,
    )
    np.save(tmp_path / "v.npy", values[:5])
    with pytest.raises(ConfigError, match=r"has 6 rows, .* has 5"):
        rows_of(f"vectors:{tmp_path}/v.npy")
    np.save(tmp_path / "o.npy", np.array([{}]), allow_pickle=True)
    with pytest.raises(ConfigError, match="no array that can be read"):
        rows_of(f"vectors:{tmp_path}/o.npy")


def test_a_tensor_or_tensors_and_lists_of_pytorch_are_read(tmp_path):
    values = torch.from_numpy(drawn(6))
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        torch.save(values.to(dtype), tmp_path / "one.pt")
        rows = rows_of(f"vectors:{tmp_path}/one.pt")
        assert torch.equal(rows.images.values[:, 0], values.to(dtype).float())
    content = {
        "embedding": values.requires_grad_(),
        "label": ["a", None, "b", "", "a", "b"],
        "id": torch.arange(6),
    }
    torch.save(content, tmp_path / "v.pt")
    rows = rows_of(f"vectors:{tmp_path}/v.pt")
    assert torch.equal(rows.images.values[:, 0], values)
    assert rows.labels.to_pylist() == ["a", None, "b", None, "a", "b"]
    assert str(rows.ids[5]) == "5"


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
    with pytest.raises(ConfigError, match=part):
        rows_of(f"vectors:{tmp_path}/v.pt")


def test_a_damaged_file_of_pytorch_is_one_line(tmp_path):
    torch.save(torch.ones(20, 3), tmp_path / "v.pt")
    (tmp_path / "v.pt").write_bytes((tmp_path / "v.pt").read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"v\.pt holds no tensor"):
        rows_of(f"vectors:{tmp_path}/v.pt")


def test_cells_without_the_package_that_reads_them_name_it(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "cells.h5ad").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "h5py", None)
    argv = ["data", "check", "--data", f"vectors:{tmp_path}/cells.h5ad"]
    assert cli.main(argv) == ConfigError.exit_code
    assert "pip install h5py" in capsys.readouterr().err


def test_arrays_are_read_from_a_remote_file_system():
    values, content = drawn(6), io.BytesIO()
    np.savez_compressed(content, embedding=values, label=np.array(list("aaabbb")))
    store, path = filesystem.locate("mock:///v.npz")
    with store.open_output_stream(path) as stream:
        stream.write(content.getvalue())
    rows = rows_of("vectors:mock:///v.npz")
    assert np.array_equal(rows.images.vectors(np.arange(6))[0][:, 0], values)
    assert rows.labels.to_pylist() == list("aaabbb")


def test_an_npz_file_is_not_in_memory_beside_its_arrays(tmp_path):
    values = drawn(2000, 1000)
    np.savez(tmp_path / "v.npz", embedding=values)
    tracemalloc.start()
    try:
        rows_of(f"vectors:{tmp_path}/v.npz")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.5 * values.nbytes


def test_an_npz_file_of_too_many_bytes_is_refused(tmp_path, monkeypatch):
    """Its arrays would be read into memory. The file itself is small: it is packed."""
    np.savez_compressed(tmp_path / "v.npz", embedding=np.ones((1000, 8), np.float32))
    monkeypatch.setattr(array_files, "MAX_NPZ_BYTES", 32_000)
    with pytest.raises(ConfigError, match=r"v\.npz: its .*np\.save"):
        rows_of(f"vectors:{tmp_path}/v.npz")
    monkeypatch.setattr(array_files, "MAX_NPZ_BYTES", 33_000)
    assert len(rows_of(f"vectors:{tmp_path}/v.npz")) == 1000


@pytest.mark.parametrize("damage", ["cut", "altered", "impossible shape"])
def test_a_damaged_npz_file_is_one_line(damage, tmp_path):
    path = tmp_path / "v.npz"
    np.savez_compressed(path, embedding=drawn(200))
    content = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(content[:-100])
    elif damage == "altered":
        content[300:400] = b"\xff" * 100
        path.write_bytes(content)
    else:
        array, shape = io.BytesIO(), {"shape": (10**12, 4), "fortran_order": False}
        np.lib.format.write_array_header_1_0(array, {"descr": "<f4", **shape})
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("embedding.npy", array.getvalue() + bytes(100))
    with pytest.raises(ConfigError, match=r"v\.npz holds no array that can be read"):
        rows_of(f"vectors:{tmp_path}/v.npz")


def test_what_holds_no_vectors_is_refused(tmp_path):
    pq.write_table(pa.table({"id": ["a"]}), tmp_path / "v.parquet")
    with pytest.raises(ConfigError, match="needs a column embedding"):
        rows_of(f"vectors:{tmp_path}")
    with pytest.raises(ConfigError, match="lists of numbers, not string"):
        rows_of(stored(tmp_path / "v.parquet", pa.string(), embedding=["x"]))
    with pytest.raises(ConfigError, match="most rows have no vector"):
        rows_of(stored(tmp_path / "v.parquet", embedding=[None, None]))


def test_a_folder_of_files_with_splits_and_other_names(tmp_path):
    values = drawn(4)
    for name, part in (("train-0", values[:2]), ("test-0", values[2:])):
        table = {
            "vec": pa.array(list(part), pa.list_(pa.float32())),
            "id": [f"{name}{i}" for i in range(2)],
        }
        pq.write_table(pa.table(table), tmp_path / f"{name}.parquet")
    rows = rows_of(f"vectors:{tmp_path}", columns="embedding=vec")
    assert dict(zip(rows.ids.to_pylist(), rows.is_train.tolist(), strict=True)) == {
        "test-00": False,
        "test-01": False,
        "train-00": True,
        "train-01": True,
    }


def test_pictures_and_text_are_shown_not_learnt(tmp_path):
    """Kills: a picture of another row, text that is lost in a choice of rows, a picture
    in the fingerprint.
    """
    values = list(drawn(3))
    source = stored(
        tmp_path / "v.parquet",
        embedding=values,
        path=["a.jpg", "b.jpg", ""],
        text=["x", "y", None],
    )
    (tmp_path / "b.jpg").write_bytes(b"here")
    rows = rows_of(source).take(np.array([2, 1]))
    assert rows.images.captions(np.arange(2)) == [None, "y"]
    assert rows.images.pictures().read_images(np.array([1])) == [f"{tmp_path}/b.jpg"]
    assert rows.images.paths(np.array([1])) == [f"{tmp_path}/b.jpg"]
    plain = rows_of(stored(tmp_path / "w.parquet", embedding=values))
    assert (
        plain.fingerprint == rows_of(source).fingerprint
        and plain.images.pictures() is None
    )
    blob = rows_of(
        stored(tmp_path / "b.parquet", embedding=values, image=[b"0", b"1", b"2"])
    )
    assert blob.take(np.array([2, 0])).images.pictures().read_images(np.arange(2)) == [
        b"2",
        b"0",
    ]


def test_other_numbers_are_another_data_set():
    one, other = Vectors.of(drawn(3)), Vectors.of(drawn(3) + 1)
    assert [*one.content_keys(np.arange(3))] != [*other.content_keys(np.arange(3))]


def test_what_is_predicted_needs_no_labels(tmp_path):
    source = stored(
        tmp_path / "v.parquet", embedding=list(drawn(3)), label=[[1], [2], [3]]
    )
    assert len(read_rows(DataConfig(source=source), True)) == 3


def test_the_checks_name_bad_vectors_and_do_not_decode(tmp_path):
    values = drawn(40)
    values[5] = np.nan
    labels = ["a"] * 15 + ["b"] * 15 + [None] * 10
    source = stored(tmp_path / "v.parquet", embedding=list(values), label=labels)
    given = {"data.source": source, "data.num_novel": 1, "train.batch_size": 8}
    config = configure(given)
    task = make_task(read_rows(config.data), config.data)
    problems = check(task, config, seconds=5)
    assert "as vectors of 4 numbers" in format_report(
        task, problems, config.data.stored_size
    )
    errors = [problem.message for problem in problems if problem.level == "error"]
    assert len(errors) == 1 and "row-5: numbers that are not finite" in errors[0]


def test_numbers_in_a_file_are_those_in_memory(tmp_path, monkeypatch):
    """With bad rows and several views of a row; the file is gone from its folder.
    Kills: pieces in another order, rows of a second file or group at the place of the
    first, a file that is left.
    """
    monkeypatch.setattr(parquet, "READ_ROWS", 7)
    values, one = drawn(50), tmp_path / "data"
    values[5], values[44, 1] = 0, np.nan
    one.mkdir()
    for name, own in (("a", slice(0, 30)), ("b", slice(30, 50))):
        lists = pa.array(list(values[own]), pa.list_(pa.float32()))
        ids = [str(row % 40) for row in range(50)][own]
        pq.write_table(
            pa.table({"embedding": lists, "id": ids}),
            one / f"{name}.parquet",
            row_group_size=11,
        )
    np.save(tmp_path / "v.npy", values.astype(np.float64))
    sources = f"vectors:{one}", f"vectors:{tmp_path}/v.npy"
    in_memory = [
        rows_of(source).images.vectors(np.arange(len(rows_of(source))))
        for source in sources
    ]
    monkeypatch.setenv("UNO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(array_files, "MAPPED_BYTES", 0)
    monkeypatch.setattr(embeddings, "PIECE_ROWS", 9)
    for source, (found, reasons) in zip(sources, in_memory, strict=True):
        images = rows_of(source).images
        assert isinstance(array_files.new_array((3, 2)), np.memmap) and not [
            *(tmp_path / "cache").iterdir()
        ]
        again, why = images.vectors(np.arange(len(images)))
        assert torch.equal(again, found) and why == reasons and sum(map(bool, why)) == 2
        assert torch.equal(images.vectors(np.array([7, 3]))[0], found[[7, 3]])


def test_equal_rows_are_those_of_a_dictionary():
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 3, (2_500, 6), generator=generator).float()
    found: dict[tuple[float, ...], list[int]] = {}
    for row, numbers in enumerate(values.tolist()):
        found.setdefault(tuple(numbers), []).append(row)
    several = [group for group in found.values() if len(group) > 1]
    assert embeddings.equal_rows(values) == several and 500 < len(several) < len(found)
    assert embeddings.equal_rows(values[:0]) == embeddings.equal_rows(values[:1]) == []


def test_copies_are_found_without_reading_rows(tmp_path, monkeypatch):
    """Kills: vectors that are copied to compare them; bad rows, all of them zeros,
    taken for copies.
    """
    values = drawn(40)
    values[7], values[8], values[9], values[12] = 0, 0, np.nan, values[3]
    source = stored(
        tmp_path / "a.parquet",
        embedding=list(values),
        label=["a", "b"] * 10 + [None] * 20,
    )
    given = {"data.source": source, "data.num_novel": 2, "data.max_bad_fraction": 0.2}
    config = configure(given)
    task = make_task(read_rows(config.data), config.data)
    monkeypatch.setattr(Vectors, "read_images", None)
    copies = [p.message for p in check(task, config) if "duplicates" in p.message]
    assert copies == ["duplicates with different known labels: 1, e.g. row-3 = row-12"]


def test_vectors_from_memory(tmp_path):
    """Kills: labels of None, NaN, -1, numpy's numbers or names that become something
    else; mixed views.
    """
    values = np.random.default_rng(0).normal(size=(6, 2, 4))
    labels = ["a", None, float("nan"), -1, np.int64(3), 2.0]
    given_vectors(values, labels).store(f"{tmp_path}/v.parquet")
    rows = rows_of(f"vectors:{tmp_path}/v.parquet")
    assert rows.labels.to_pylist() == ["a", None, None, None, "3", "2"]
    assert np.allclose(rows.images.vectors(np.arange(6))[0], values, atol=1e-6)
    others = (
        ({"labels": [1]}, "1 labels for 6"),
        ({"ids": ["a"] * 6}, "unique"),
        ({"labels": [()] * 6}, "label"),
    )
    for more, why in others:
        with pytest.raises(ConfigError, match=why):
            given_vectors(values, **more)


def test_a_column_of_pictures_may_be_empty(tmp_path):
    """A program that has no pictures may write the column ``path`` all the same."""
    rows = rows_of(
        stored(tmp_path / "v.parquet", embedding=list(drawn(3)), path=[None] * 3)
    )
    assert rows.images.paths(np.arange(3)) == [None] * 3
