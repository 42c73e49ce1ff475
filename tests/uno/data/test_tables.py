"""Parquet, CSV and JSONL tables; images by reference."""

import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.fs
import pyarrow.parquet as pq
import pytest

from uno.data import parquet, tables, text_tables
from uno.data.decode import decode, decode_many
from uno.data.tables import read_parquet, read_table
from uno.data.unreadable import check_bad

from .builders import (
    assert_refused,
    columns_of,
    encoded,
    failure,
    hf_table,
    pixels,
    read,
    write_hf,
    write_images,
)


def write_csv(folder, text):
    (folder / "t.csv").write_text(text, encoding="utf-8")
    return str(folder / "t.csv")


def write_parquet(folder, table, name="a.parquet", **options):
    """Write a table, or a mapping of columns, and return the path of the file."""
    pq.write_table(pa.table(table), folder / name, **options)
    return str(folder / name)


def picture(seed):
    return {"bytes": encoded(pixels(seed)), "path": None}


def test_hugging_face_layout(tmp_path):
    write_hf(tmp_path, ["zebra", "ant", "cow"])
    rows = read_parquet(str(tmp_path))
    assert rows.class_names == ("zebra", "ant", "cow")
    assert (len(rows), rows.is_train.sum()) == (16, 12)
    fifth = rows.ids.to_pylist().index("train-00000-of-00001.parquet#4")
    assert rows.labels.to_pylist()[fifth] == "ant"
    assert (decode(rows.images[fifth], 8) == pixels(4).transpose(2, 0, 1)).all()


@pytest.mark.parametrize(
    "other",
    [
        hf_table([picture(0)], [0], ["b", "a"]),
        hf_table([picture(0)], [0], ["a"]),
        hf_table([picture(0)], [0], []).replace_schema_metadata(None),
    ],
    ids=["another order", "fewer", "no names"],
)
def test_files_must_agree_on_the_class_names(tmp_path, other):
    """Kills: the last file's names for the numbers of all."""
    write_parquet(tmp_path, hf_table([picture(0)], [0], ["a", "b"]))
    write_parquet(tmp_path, other, "b.parquet")
    line = failure(read_parquet, str(tmp_path))
    assert "class names in the metadata differ" in line


def test_a_file_without_labels_needs_no_class_names(tmp_path):
    """The test files of many data sets of Hugging Face have no labels."""
    table = hf_table([picture(0), picture(1)], [1, 0], ["b", "a"], "image")
    write_parquet(tmp_path, table, "train-0.parquet")
    write_parquet(tmp_path, {"image": [picture(2)]}, "test-0.parquet")
    rows = read(f"parquet:{tmp_path}")
    assert rows.class_names == ("b", "a")
    assert sorted(map(str, rows.labels.to_pylist())) == ["None", "a", "b"]


def test_limits_hold_before_rows_are_read(tmp_path, monkeypatch):
    """Kills: a footer that announces more rows than there is memory, a text of
    nothing but line breaks.
    """
    monkeypatch.setattr(tables, "MAX_ROWS", 15)
    monkeypatch.setattr(text_tables, "MAX_ROWS", 15)
    parquet = write_parquet(tmp_path, {"image": [b"x"] * 16})
    assert "has 16 rows, more than 15" in failure(read_parquet, parquet)
    csv = write_csv(tmp_path, "path\n" + "a.png\n" * 16)
    assert "has 17 lines, more than 15" in failure(read_table, csv)


BROKEN = {"huggingface": "{not json"}


@pytest.mark.parametrize(
    ("table", "labels"),
    [
        (hf_table([picture(0)] * 3, [0, None, -1], ["a", "b"]), ["a", None, None]),
        # half of a surrogate pair is no text that can be written
        (hf_table([picture(0)], [0], ["a\ud800", "b"]), ["a\\ud800"]),
        (
            pa.table({"img": [b"x"], "coarse_label": [0], "fine_label": [10]}),
            ["10"],
        ),
        (
            pa.table({"img": [b"x"], "label": [1]}).replace_schema_metadata(BROKEN),
            ["1"],
        ),
    ],
    ids=["null and negative", "surrogate", "fine", "broken metadata"],
)
def test_labels_of_parquet(tmp_path, table, labels):
    """Without names they are numbers."""
    rows = read_parquet(write_parquet(tmp_path, table))
    assert rows.labels.to_pylist() == labels
    assert set(rows.split.to_pylist()) == {"train"}


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train-0.parquet", "train"),
        ("validation-0.parquet", "test"),
        ("test/0.parquet", "test"),
        ("part.parquet", "train"),
        ("training-0.parquet", "train"),
        ("camera-Test-0.parquet", "test"),
    ],
)
def test_files_and_folders_name_the_split(tmp_path, name, split):
    (tmp_path / "test").mkdir()
    write_parquet(tmp_path, {"image": [b"x"]}, name)
    assert read_parquet(str(tmp_path)).split.to_pylist() == [split]


@pytest.mark.parametrize(
    ("table", "text"),
    [
        (pa.table({"picture": [b"x"], "label": ["a"]}), "it has picture, label"),
        (pa.table({"image": [b"x"], "label": [[1, 2]]}), "names or numbers"),
        (
            pa.table({"image": [b"x"], "eval_label": [[1, 2]]}),
            "column eval_label must hold",
        ),
        (pa.table({"image": [b"x"], "split": ["holdout"]}), "'holdout'"),
        (
            pa.table({"image": [b"x", b"y"], "id": ["same", "same"]}),
            "'same' appears more than once",
        ),
        (pa.table({"image": ["/etc/passwd"]}), "is outside the folder"),
        (pa.table({"image": ["missing.png"]}), "none of its 1 images"),
        (pa.table({"image": pa.array([], pa.binary())}), "no rows"),
        (
            pa.table([[b"x"], ["a"], ["b"]], ["image", "label", "label"]),
            "two columns have one name",
        ),
        (hf_table([picture(0)], [7], ["a", "b"]), "label 7 has no name"),
        (hf_table([picture(0)], [0], ["a", "a"]), "not a list of different names"),
        (pa.table({"image": [b"x"] * 2, "label": ["a", "a "]}), "'a' and 'a '"),
        (pa.table({"image": [b"x"], "Split": ["test"]}), "'Split'"),
    ],
)
def test_parquet_errors(tmp_path, table, text):
    write_parquet(tmp_path, table)
    assert text in failure(read_parquet, str(tmp_path))


def test_parquet_files_must_be_there_whole_and_alike(tmp_path):
    assert "cannot read nosuch://host/x" in failure(read, "nosuch://host/x")
    assert "no *.parquet files" in failure(read_parquet, str(tmp_path))
    (tmp_path / "a.parquet").write_bytes(b"PAR1 but nothing else")
    assert "cannot read Parquet file" in failure(read_parquet, str(tmp_path))
    write_parquet(tmp_path, {"img": [b"x"]}, "a.parquet")
    write_parquet(tmp_path, {"image": [b"x"]}, "b.parquet")
    assert "name their image column differently" in failure(read_parquet, str(tmp_path))


@pytest.fixture
def shards(tmp_path):
    """Two files of 10 and 7 rows in row groups of 4; a row without bytes."""
    images = [picture(i) for i in range(17)]
    images[12] = {"bytes": None, "path": None}
    for name, part in (("one.parquet", images[:10]), ("two.parquet", images[10:])):
        table = hf_table(part, [0] * len(part), ["c"])
        write_parquet(tmp_path, table, name, row_group_size=4)
    return tmp_path


@pytest.fixture
def read_row_group():
    """A mock around the method of pyarrow that reads a row group of a file."""
    with patch.object(
        pq.ParquetFile,
        "read_row_group",
        autospec=True,
        side_effect=pq.ParquetFile.read_row_group,
    ) as method:
        yield method


def groups_read(method):
    return [call.args[1] for call in method.call_args_list]


@pytest.mark.parametrize("is_plain", [True, False])
def test_a_row_group_of_more_than_2_gib_is_read(tmp_path, monkeypatch, is_plain):
    """An Arrow array of images with offsets of 32 bits does not hold it."""
    monkeypatch.setattr(parquet, "LARGE_GROUP_BYTES", 0)
    images = [encoded(pixels(i)) for i in range(5)]
    column = images if is_plain else [{"bytes": i, "path": "x"} for i in images]
    write_parquet(tmp_path, {"image": column})
    opened = read_parquet(str(tmp_path)).images
    assert opened.read_images(np.array([4, 0, 2])) == [images[i] for i in (4, 0, 2)]


def test_images_that_are_all_missing_have_no_paths_either(tmp_path):
    kind = pa.struct([("bytes", pa.binary())])
    write_parquet(tmp_path, pa.table({"image": pa.array([{"bytes": None}], kind)}))
    assert read_parquet(str(tmp_path)).images[0] == b""


@pytest.mark.parametrize("source", ["{folder}", "s3://bucket", "parquet:s3://bucket"])
def test_rows_are_what_they_are_when_all_is_read(shards, bucket, source):
    """By one, by many in any order, after a journey to another process."""
    opened = read(source.format(folder=shards)).images
    expected = [encoded(pixels(i)) for i in range(17)]
    expected[12] = b""
    assert [opened[i] for i in range(17)] == expected
    order = np.random.default_rng(0).permutation(17)
    copies = pickle.loads(pickle.dumps(opened)), opened.take(np.arange(17))
    for images in (opened, *copies):
        assert images.read_images(order) == [expected[i] for i in order]
    (part,) = opened.split(17)
    assert [part[i] for i in range(17)] == expected


def test_a_column_with_a_dot_in_its_name_has_sizes(tmp_path):
    table = {"image.png": [encoded(pixels(0)), encoded(pixels(1))]}
    write_parquet(tmp_path, table)
    images = read(f"parquet:{tmp_path}", columns="image=image.png").images
    assert min(images.sizes(np.arange(2))) > 50


def test_a_row_group_is_read_once(shards, read_row_group):
    """Kills: a read per row, a cache without a limit, bytes that travel with the
    references.
    """
    images = read_parquet(str(shards)).images
    groups = [0] * 4 + [1] * 4 + [2] * 2 + [3] * 4 + [4] * 3
    assert images.groups(np.arange(17)).tolist() == groups
    images.read_images(np.array([16, 0, 3, 15, 1]))
    assert groups_read(read_row_group) == [0, 1]
    assert len([images[row] for row in range(17)]) == 17
    assert groups_read(read_row_group) == [0, 1, 1, 2, 0, 1]
    assert len(pickle.dumps(images)) < 2000


def read_at_once(images, rows):
    """Read each row in a thread of its own; all threads begin at the same time."""
    ready = threading.Barrier(len(rows))

    def read_one(row):
        ready.wait(20)
        return images[row]

    with ThreadPoolExecutor(len(rows)) as pool:
        return list(pool.map(read_one, rows))


def test_row_groups_are_read_at_the_same_time(tmp_path, read_row_group):
    """Four threads want a part of one row group each, and all four reads overlap."""
    images = [b"%d" % i for i in range(8)]
    path = write_parquet(tmp_path, {"image": images}, row_group_size=2)
    opened, all_read = read_parquet(path).images, threading.Barrier(4)
    real = read_row_group.side_effect

    def read_together(*args):
        all_read.wait(20)
        return real(*args)

    read_row_group.side_effect = read_together
    assert read_at_once(opened, range(0, 8, 2)) == images[::2]


def test_threads_share_one_read_of_a_row_group_and_a_failed_read_is_not_kept(
    tmp_path, read_row_group
):
    images, real = [b"%d" % i for i in range(4)], read_row_group.side_effect
    opened = read_parquet(write_parquet(tmp_path, {"image": images})).images
    read_row_group.side_effect = OSError("Input/output error")
    assert "Input/output error" in failure(opened.__getitem__, 0)
    read_row_group.side_effect = real
    assert read_at_once(opened, [0, 3]) == [images[0], images[3]]
    assert groups_read(read_row_group) == [0, 0]


def test_another_file_and_no_file_are_seen(shards):
    """The fingerprint needs no image read: it has their row group's size and place."""
    rows = read_parquet(str(shards))
    assert read_parquet(str(shards)).fingerprint == rows.fingerprint
    other = hf_table([{"bytes": b"another", "path": None}] * 7, [0] * 7, ["c"])
    write_parquet(shards, other, "two.parquet", row_group_size=4)
    assert read_parquet(str(shards)).fingerprint != rows.fingerprint
    (shards / "one.parquet").unlink()
    assert "cannot read row group 0 of " in failure(rows.images.__getitem__, 0)


def test_a_column_with_fewer_rows_than_its_footer_counts_is_one_line():
    """Kills: an index out of bounds of images that stay in the file, rows of which a
    prediction ends.
    """
    path = str(Path(__file__).parents[2] / "corpus" / "parquet_images-fewer-than-rows")
    images, fewer = read_parquet(path).images, ["its columns have 0 rows, 3 by its"]
    assert len(images[3]) > 0  # the other row group is whole
    assert_refused(fewer, images.read_images, np.arange(3))
    assert_refused(fewer, images.__getitem__, 1)
    assert_refused(fewer, lambda: list(images.split(3)))


def test_row_groups_with_other_rows_than_the_footer_counts_are_one_line(tmp_path):
    """Kills: rows without an image, where no other column is read that shows it."""
    path = Path(write_parquet(tmp_path, {"image": [b"x"] * 37}))
    data = path.read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    # 37 and 38, an int64 of Thrift
    more = data[footer:].replace(b"\x16\x4a", b"\x16\x4c", 1)
    path.write_bytes(data[:footer] + more)
    assert "have 37 rows, 38 by its footer" in failure(read_parquet, str(path))


CSV = """\ufeffpath,label,split,id
a.png,cat,train,3
b.png,,train,4
sub/c.png,"dog, big",test,5
"""
JSONL = """{"image": "a.png", "label": "cat", "id": 3}
{"image": "b.png", "label": null, "split": "train", "id": 4}
{"image": "sub/c.png", "label": "dog, big", "split": "validation", "id": "5"}

"""


def test_csv_and_jsonl_agree(tmp_path):
    """With the line ends of Linux and of Windows."""
    write_images(tmp_path, ["a.png", "b.png", "sub/c.png"])
    (tmp_path / "t.jsonl").write_bytes(JSONL.replace("\n", "\r\n").encode())
    first, second = (
        read_table(path)
        for path in (write_csv(tmp_path, CSV), str(tmp_path / "t.jsonl"))
    )
    for rows in (first, second):
        assert columns_of(rows, "ids", "labels", "split") == {
            "ids": ["3", "4", "5"],
            "labels": ["cat", None, "dog, big"],
            "split": ["train", "train", "test"],
        }
        assert rows.images[2] == os.path.realpath(tmp_path / "sub/c.png")
    assert first.fingerprint == second.fingerprint


@pytest.fixture(params=["parquet", "table"])
def two_rows(request, tmp_path):
    """A function that writes columns of texts beside a.png and b.png as a Parquet file
    or as CSV, and returns the source.
    """
    write_images(tmp_path, ["a.png", "b.png"])

    def write(**columns):
        if request.param == "parquet":
            return f"parquet:{write_parquet(tmp_path, columns)}"
        lines = [columns, *zip(*columns.values(), strict=True)]
        text = "\n".join(",".join(cell or "" for cell in line) for line in lines)
        return f"table:{write_csv(tmp_path, text)}"

    return write


def test_columns_of_other_names(two_rows, tmp_path):
    """``--data.columns``. Kills: a column of the usual name that is taken all the same,
    a table to predict that must have labels, a name that is not there without a line.
    """
    source = two_rows(
        file=["a.png", "b.png"], kind=["x", None], image=["0", "1"], label=["p", "q"]
    )
    rows = read(source, columns="image=file, label=kind,id=file")
    assert columns_of(rows, "labels", "ids") == {
        "labels": ["x", None],
        "ids": ["a.png", "b.png"],
    }
    assert rows.images[1] == os.path.realpath(tmp_path / "b.png")
    assert len(read(source, images_only=True, columns="image=file,label=gone")) == 2
    line = failure(read, source, columns="image=gone")
    assert "--data.columns image=gone: no such column; it has file, kind" in line


def test_every_column(two_rows, tmp_path):
    """Kills: eval_label ignored, or taken for the label."""
    columns = {"id": ["r1", "r2"], "split": ["train", "test"], "label": ["x", None]}
    source = two_rows(path=["a.png", "b.png"], eval_label=[None, "y"], **columns)
    rows = read(source)
    assert columns_of(rows, "ids", "split", "labels", "eval_labels", "truth") == {
        "ids": ["r1", "r2"],
        "split": ["train", "test"],
        "labels": ["x", None],
        "eval_labels": [None, "y"],
        "truth": ["x", "y"],
    }
    assert rows.images[1] == str(tmp_path / "b.png")


@pytest.mark.parametrize(
    "path", ["../data-evil/b.png", "link.png", "{folder}/data-evil/b.png", "."]
)
def test_table_paths_are_confined(tmp_path, path):
    """Kills: prefix comparison without a separator (data-evil next to data), links
    not resolved.
    """
    write_images(tmp_path, ["data/a.png", "data-evil/b.png"])
    os.symlink(tmp_path / "data-evil" / "b.png", tmp_path / "data" / "link.png")
    path = path.replace("{folder}", str(tmp_path))
    table = write_csv(tmp_path / "data", f"path\n{tmp_path}/data/a.png\n{path}\n")
    assert_refused(["is outside the folder", "row 1"], read_table, table)


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("t.csv", "file,label\na.png,x\n", "it has file, label"),
        ("t.csv", "path,label\n", "no rows"),
        ("t.csv", "", "it has none"),
        ("t.csv", "path,label\na.png,x,y\n", "more values"),
        ("t.csv", 'path\n""\n', "(line 2) has no image path"),
        ("t.csv", "path,split\na.png,dev\n", "'dev'"),
        ("t.csv", "id,path\n1,a.png\n1,a.png\n", "'1' appears more than once"),
        ("t.csv", "path\n" + "x" * 200_000 + "\n", "is not CSV"),
        ("t.csv", "path\n\udcff\udcfe\n", "cannot read"),
        ("t.jsonl", "{", "line 1 is not JSON"),
        ("t.jsonl", "[" * 100_000, "line 1 is not JSON"),
        ("t.jsonl", '{"path": "\\ud800.png"}', "line 1 is not JSON"),
        ("t.jsonl", "[1]", "must be an object"),
        ("t.jsonl", '{"path": 3}', "no image path"),
        ("t.csv", "path,label,label\na.png,x,y\n", "two columns are named 'label'"),
        ("t.csv", "path,label, Split\na.png,x,test\n", "'Split' is not split"),
        (
            "t.csv",
            "path,label\na.png,1\na.png,1.0\na.png,x",
            "'1' and '1.0' differ only in spelling",
        ),
        (
            "t.jsonl",
            '{"path": "a.png", "label": "x 1.0"}\n{"path": "a.png", "label": "x 1.0 "}',
            "'x 1.0'",
        ),
        ("t.csv", "path,eval_label\na.png,cat\na.png,cat \n", "'cat' and 'cat '"),
        ("t.csv", "path,label,eval_label\na.png,1,x\na.png,,1.0\n", "'1' and '1.0'"),
    ],
    ids=range(20),
)
def test_table_errors(tmp_path, name, text, part):
    write_images(tmp_path, ["a.png"])
    (tmp_path / name).write_text(text, "utf-8", "surrogateescape")
    assert part in failure(read_table, str(tmp_path / name))


def test_folders_of_hive_partitioning_are_refused_if_they_say_labels(tmp_path):
    table = {"image": [b"x"] * 4, "kind": list("abab"), "year": [1, 2, 1, 2]}
    for column in ("kind", "year"):
        pyarrow.dataset.write_dataset(
            pa.table(table),
            tmp_path / column,
            format="parquet",
            partitioning=[column],
            partitioning_flavor="hive",
        )
    assert len(read(f"parquet:{tmp_path}/year")) == 4
    kinds = {"source": f"parquet:{tmp_path}/kind", "columns": "label=kind"}
    facts = ["folder kind=a is no column kind", "partitioning='hive'"]
    assert_refused(facts, read, **kinds)
    assert len(read(**kinds, images_only=True)) == 4


@pytest.mark.parametrize("options", ["", "?endpoint_override=http://localhost:9000"])
def test_folders_and_tables_at_a_uri_are_what_they_are_here(bucket, options):
    """Kills: options lost or swallowed by the path, names with '#', '?', '%' or
    blanks read as URI syntax.
    """
    names = ["test/cat/50%25.png", "train/cat/a b#1.png", "train/dog/c?.png"]
    write_images(bucket / "pets", names)
    rows = read(f"s3://bucket/pets{options}")
    assert rows.ids.to_pylist() == names
    assert [rows.images[i] for i in range(3)] == [
        f"s3://bucket/pets/{quote(name)}{options}" for name in names
    ]
    assert not any(decode_many(rows.images, 8)[1])
    for here in (f"{bucket}/pets", f"file://{bucket}/pets"):
        assert read(here).fingerprint == rows.fingerprint
    write_csv(bucket / "pets", "path\ntrain/cat/a b#1.png\n")
    table = read(f"s3://bucket/pets/t.csv{options}")
    assert table.images[0] == rows.images[1]


def test_mistakes_at_a_uri_are_one_line(bucket):
    write_csv(bucket, "path\n../hf/x\n")
    assert "is outside the folder" in failure(read, "table:s3://bucket/t.csv")
    assert "no such file" in failure(read, "s3://bucket/nothing")


@pytest.mark.parametrize("column", ["id", "label", "split", "eval_label", "image"])
def test_text_that_is_not_utf8_is_one_line(tmp_path, column):
    """Kills: a traceback of whoever reads the names first."""
    raw = pa.array([b"train\xf5", b"train", b"train"])
    columns = {"image": [b"a", b"b", b"c"], "label": ["a", "b", "a"]}
    columns[column] = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    path = write_parquet(tmp_path, columns)
    facts = ["cannot read ", f"{path}: ", "UTF8"]
    assert_refused(facts, read, path)
    if column in ("id", "image"):  # what a prediction reads
        assert_refused(facts, read, path, images_only=True)


def test_rows_without_an_image_say_why_and_what_to_do(tmp_path):
    """Hugging Face's exports may keep paths of the computer that wrote them."""
    images = [picture(0), {"bytes": None, "path": "/far/two.png"}]
    images += [{"bytes": None, "path": None}]
    write_parquet(tmp_path, hf_table(images, [0, 1, 0], ["a", "b"]))
    rows = read_parquet(str(tmp_path))
    reasons = decode_many(rows.images, 8)[1]
    assert reasons[0] is None
    assert "no bytes, and no path" in reasons[2]
    facts = ["a.parquet#1", "/far/two.png", "embed the bytes"]
    assert_refused(facts, check_bad, rows.ids, reasons, 0.0, None, rows.images)
