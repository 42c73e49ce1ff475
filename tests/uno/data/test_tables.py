"""Parquet, CSV and JSONL tables; images by reference."""

import json
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.fs
import pyarrow.parquet as pq
import pytest

from uno.config import DataConfig
from uno.data import files as filesystem
from uno.data import tables, text_tables
from uno.data.decode import decode, decode_many
from uno.data.images import Files
from uno.data.parquet import ParquetImages
from uno.data.rows import ReadOptions
from uno.data.sources import read_rows
from uno.data.tables import read_parquet, read_table
from uno.data.unreadable import check_bad
from uno.errors import ConfigError

from .builders import encoded, failure, hf_table, pixels, write_hf, write_images


def write_csv(folder, text):
    (folder / "t.csv").write_text(text, encoding="utf-8")
    return str(folder / "t.csv")


def picture(seed):
    return {"bytes": encoded(pixels(seed)), "path": None}


def test_hugging_face_layout(tmp_path):
    write_hf(tmp_path, ["zebra", "ant", "cow"])
    rows = read_parquet(str(tmp_path))
    assert len(rows) == 16 and rows.class_names == ("zebra", "ant", "cow")
    train = np.flatnonzero(rows.is_train)
    assert (
        isinstance(rows.images, ParquetImages)
        and len(train) == 12
        and rows.labels.to_pylist()[train[1]] == "ant"
    )
    assert rows.ids.to_pylist()[train[0]] == "train-00000-of-00001.parquet#0"
    assert (decode(rows.images[train[4]], 8) == pixels(4).transpose(2, 0, 1)).all()


def test_files_must_agree_on_the_class_names(tmp_path):
    """Kills: the last file's names for the numbers of all."""
    first, *others = (
        hf_table([picture(0)], [0], n, "image") for n in (["a", "b"], ["b", "a"], ["a"])
    )
    pq.write_table(first, tmp_path / "a.parquet")
    for other in (*others, first.replace_schema_metadata(None)):
        pq.write_table(other, tmp_path / "b.parquet")
        assert "class names in the metadata differ" in failure(
            read_parquet, str(tmp_path)
        )


def test_limits_hold_before_rows_are_read(tmp_path, monkeypatch):
    """Kills: a footer that announces more rows than there is memory, a text of
    nothing but line breaks.
    """
    monkeypatch.setattr(tables, "MAX_ROWS", 15)
    monkeypatch.setattr(text_tables, "MAX_ROWS", 15)
    write_hf(tmp_path, ["a", "b"], train=16, test=2)
    assert "has 16 rows, more than 15" in failure(read_parquet, str(tmp_path))
    assert "has 17 lines, more than 15" in failure(
        read_table, write_csv(tmp_path, "path\n" + "a.png\n" * 16)
    )


def test_labels_of_parquet(tmp_path):
    """Null and negative ones are none; without names they are numbers; broken
    metadata says nothing.
    """
    broken = {"huggingface": "{not json"}
    for table, labels in (
        (
            hf_table([picture(i) for i in range(3)], [0, None, -1], ["a", "b"]),
            ["a", None, None],
        ),
        # half of a surrogate pair is no text that can be written
        (hf_table([picture(0)], [0], ["a\ud800", "b"]), ["a\\ud800"]),
        (
            pa.table(
                {"img": [b"x"] * 2, "coarse_label": [0, 0], "fine_label": [3, 10]}
            ),
            ["3", "10"],
        ),
        (
            pa.table({"img": [b"x"], "label": pa.array(["x"]).dictionary_encode()}),
            ["x"],
        ),
        (
            pa.table({"img": [b"x"], "label": [1]}).replace_schema_metadata(broken),
            ["1"],
        ),
    ):
        pq.write_table(table, tmp_path / "a.parquet")
        rows = read_parquet(str(tmp_path / "a.parquet"))
        assert rows.labels.to_pylist() == labels and set(rows.split.to_pylist()) == {
            "train"
        }


def test_canonical_layout(tmp_path):
    write_images(tmp_path, ["im/a.png", "im/b.png"])
    columns = {"id": ["r1", "r2"], "label": ["x", None], "split": ["train", "test"]}
    pq.write_table(
        pa.table({**columns, "image": ["im/a.png", "im/b.png"]}),
        tmp_path / "rows.parquet",
    )
    rows = read_parquet(str(tmp_path))  # paths are small and read at once
    assert isinstance(rows.images, Files) and rows.images[1] == str(
        tmp_path / "im/b.png"
    )
    assert rows.ids.to_pylist() == ["r1", "r2"] and rows.labels.to_pylist() == [
        "x",
        None,
    ]
    assert rows.split.to_pylist() == ["train", "test"]


def test_files_and_folders_name_the_split(tmp_path):
    splits = {
        "train-0.parquet": "train",
        "validation-0.parquet": "test",
        "test/0.parquet": "test",
        "part.parquet": "train",
        "training-0.parquet": "train",
        "camera-Test-0.parquet": "test",
    }
    for name in splits:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        pq.write_table(
            pa.table({"image": [encoded(pixels(0))], "label": ["a"]}), tmp_path / name
        )
    rows = read_parquet(str(tmp_path))
    assert (
        dict(
            zip(
                [i.split("#")[0] for i in rows.ids.to_pylist()],
                rows.split.to_pylist(),
                strict=True,
            )
        )
        == splits
    )


@pytest.mark.parametrize(
    ("table", "text"),
    [
        (pa.table({"picture": [b"x"], "label": ["a"]}), "it has picture, label"),
        (pa.table({"image": [1.5]}), "images must be bytes"),
        (
            pa.table({"image": [b"x"], "label": [1.5]}),
            "row 0: label 1.5 is not a whole number",
        ),
        (pa.table({"image": [b"x"], "label": [[1, 2]]}), "names or numbers"),
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
    pq.write_table(table, tmp_path / "a.parquet")
    assert text in failure(read_parquet, str(tmp_path))


def test_parquet_files_must_be_there_whole_and_alike(tmp_path):
    assert "cannot read nosuch://host/x" in failure(read, "nosuch://host/x")
    assert "no *.parquet files" in failure(read_parquet, str(tmp_path))
    (tmp_path / "a.parquet").write_bytes(b"PAR1 but nothing else")
    assert "cannot read Parquet file" in failure(read_parquet, str(tmp_path))
    for name, column in (("a", "img"), ("b", "image")):
        pq.write_table(pa.table({column: [b"x"]}), tmp_path / f"{name}.parquet")
    assert "name their image column differently" in failure(read_parquet, str(tmp_path))


@pytest.fixture
def shards(tmp_path):
    """Two files of 10 and 7 rows in row groups of 4; a row without bytes."""
    images = [picture(i) for i in range(17)]
    images[12] = {"bytes": None, "path": None}
    for name, part in (("one", images[:10]), ("two", images[10:])):
        table = hf_table(part, [0] * len(part), ["c"])
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=4)
    return tmp_path


def test_rows_are_what_they_are_when_all_is_read(shards):
    """By one, by many in any order, after a journey to another process."""
    rows = read_parquet(str(shards))
    assert isinstance(rows.images, ParquetImages) and len(rows.images) == 17
    expected = [encoded(pixels(i)) for i in range(17)]
    expected[12] = b""
    assert [rows.images[i] for i in range(17)] == expected
    order = np.random.default_rng(0).permutation(17)
    for images in (
        rows.images,
        pickle.loads(pickle.dumps(rows.images)),
        rows.images.take(np.arange(17)),
    ):
        assert images.read_images(order) == [expected[i] for i in order]
    (part,) = rows.images.split(17)
    assert [part[i] for i in range(17)] == expected


def test_a_row_group_is_read_once(shards, monkeypatch):
    """Kills: a read per row, a cache without a limit, bytes that travel with the
    references.
    """
    read, real = [], pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        pq.ParquetFile,
        "read_row_group",
        lambda *args: read.append(args[1]) or real(*args),
    )
    images = read_parquet(str(shards)).images
    assert (
        images.groups(np.arange(17)).tolist()
        == [0] * 4 + [1] * 4 + [2] * 2 + [3] * 4 + [4] * 3
    )
    images.read_images(np.array([16, 0, 3, 15, 1]))
    assert read == [0, 1]
    assert len([images[row] for row in range(17)]) == 17
    assert read == [0, 1, 1, 2, 0, 1]
    assert len(pickle.dumps(images)) < 2000


def test_row_groups_are_read_at_the_same_time(tmp_path, monkeypatch):
    """Four threads want a part of one row group each, and all four reads overlap."""
    images = [b"%d" % i for i in range(8)]
    pq.write_table(
        pa.table({"image": images}), tmp_path / "a.parquet", row_group_size=2
    )
    opened, all_read = read_parquet(str(tmp_path)).images, threading.Barrier(4)
    real = pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        pq.ParquetFile,
        "read_row_group",
        lambda *args: all_read.wait(20) is not None and real(*args),
    )
    with ThreadPoolExecutor(4) as pool:
        found = list(
            pool.map(lambda i: opened.read_images(np.array([i])), range(0, 8, 2))
        )
    assert found == [[image] for image in images[::2]]


def test_threads_share_one_read_of_a_row_group_and_a_failed_read_is_not_kept(
    tmp_path, monkeypatch
):
    images, read = [b"%d" % i for i in range(4)], []
    pq.write_table(pa.table({"image": images}), tmp_path / "a.parquet")
    opened, both = read_parquet(str(tmp_path)).images, threading.Barrier(2)
    real = pq.ParquetFile.read_row_group

    def read_row_group(*args):
        read.append(args[1])
        if len(read) == 1:
            raise OSError("Input/output error")
        return real(*args)

    def read_one(row):
        both.wait(20)
        return opened.read_images(np.array([row]))

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", read_row_group)
    assert "Input/output error" in failure(opened.read_images, np.array([0]))
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(read_one, (0, 3))) == [[images[0]], [images[3]]]
    assert len(read) == 2


def test_another_file_and_no_file_are_seen(shards):
    """The fingerprint needs no image read: it has their row group's size and place."""
    rows = read_parquet(str(shards))
    assert read_parquet(str(shards)).fingerprint == rows.fingerprint
    table = pq.read_table(shards / "two.parquet")
    other = pa.array([{"bytes": b"another", "path": None}] * 7, table["img"].type)
    pq.write_table(
        table.set_column(0, "img", other), shards / "two.parquet", row_group_size=4
    )
    assert read_parquet(str(shards)).fingerprint != rows.fingerprint
    (shards / "one.parquet").unlink()
    assert "cannot read row group 0 of " in failure(rows.images.__getitem__, 0)


def test_a_column_with_fewer_rows_than_its_footer_counts_is_one_line():
    """Kills: an index out of bounds of images that stay in the file, rows of which a
    prediction ends.
    """
    path = str(Path(__file__).parents[2] / "corpus" / "parquet_images-fewer-than-rows")
    fewer, rows = (
        f"{path}: its columns have 0 rows, 3 by its footer",
        read_parquet(path),
    )
    assert len(rows) == 6 and len(rows.images[3]) > 0  # the other row group is whole
    assert (
        failure(rows.images.read_images, np.arange(3))
        == failure(rows.images.__getitem__, 1)
        == fewer
    )
    assert failure(lambda: list(rows.images.split(3))) == fewer


def test_row_groups_with_other_rows_than_the_footer_counts_are_one_line(tmp_path):
    """Kills: rows without an image, where no other column is read that shows it."""
    pq.write_table(pa.table({"image": [b"x"] * 37}), path := tmp_path / "a.parquet")
    data = path.read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    # 37 and 38, an int64 of Thrift
    more = data[footer:].replace(b"\x16\x4a", b"\x16\x4c", 1)
    path.write_bytes(data[:footer] + more)
    assert failure(read_parquet, str(path)).endswith(
        "its row groups have 37 rows, 38 by its footer"
    )


def test_csv_and_jsonl_agree(tmp_path):
    write_images(tmp_path, ["a.png", "b.png", "sub/c.png"])
    text = (
        '\ufeffpath,label,split\na.png,cat,train\nb.png,,train\nsub/c.png,"dog,'
        ' big",test\n'
    )
    first = read_table(write_csv(tmp_path, text))
    (tmp_path / "t.jsonl").write_text(
        '{"image": "a.png", "label": "cat"}\n{"image": "b.png", "label": null, "split":'
        ' "train"}\n{"image": "sub/c.png", "label": "dog, big", "split":'
        ' "validation"}\n\n'
    )
    second = read_table(str(tmp_path / "t.jsonl"))
    for rows in (first, second):
        assert rows.labels.to_pylist() == [
            "cat",
            None,
            "dog, big",
        ] and rows.split.to_pylist() == [
            "train",
            "train",
            "test",
        ]
        assert rows.ids.to_pylist() == ["row-0", "row-1", "row-2"]
        assert rows.images[2] == os.path.realpath(tmp_path / "sub/c.png")
    assert first.fingerprint == second.fingerprint
    (tmp_path / "t.jsonl").write_text('{"path": "a.png", "label": 7, "id": 3}')
    rows = read_table(str(tmp_path / "t.jsonl"))
    assert rows.labels.to_pylist() == ["7"] and rows.ids.to_pylist() == ["3"]


def test_columns_of_other_names(tmp_path):
    """``--data.columns``. Kills: a column of the usual name that is taken all the same,
    a table to predict that must have labels, a name that is not there without a line.
    """
    write_images(tmp_path, ["a.png", "b.png"])
    table = {
        "file": ["a.png", "b.png"],
        "kind": ["x", None],
        "image": ["0", "1"],
        "label": ["p", "q"],
    }
    pq.write_table(pa.table(table), tmp_path / "t.parquet")
    csv = write_csv(tmp_path, "file,kind,image,label\na.png,x,0,p\nb.png,,1,q\n")
    for source in (f"parquet:{tmp_path}/t.parquet", f"table:{csv}"):
        rows = read_rows(
            DataConfig(source=source, columns="image=file, label=kind,id=file")
        )
        assert rows.labels.to_pylist() == ["x", None] and rows.ids.to_pylist() == [
            "a.png",
            "b.png",
        ]
        assert rows.images[1] == os.path.realpath(tmp_path / "b.png")
        assert (
            len(
                read_rows(
                    DataConfig(source=source, columns="image=file,label=gone"), True
                )
            )
            == 2
        )
        found = failure(read_rows, DataConfig(source=source, columns="image=gone"))
        assert "--data.columns image=gone: no such column; it has file, kind" in found
    assert "--data.columns image=file" in failure(
        read_table, write_csv(tmp_path, "file\na.png\n")
    )


@pytest.mark.parametrize("columns", ["file", "picture=file", "image="])
def test_columns_are_pairs(columns):
    with pytest.raises(ValueError, match="columns must be as path=file,label=kind"):
        DataConfig(columns=columns)


def test_truth_for_evaluation_only(tmp_path):
    """Kills: eval_label ignored, or taken for the label."""
    write_images(tmp_path, ["a.png", "b.png"])
    table = {
        "path": ["a.png", "b.png"],
        "label": ["x", None],
        "eval_label": [None, "y"],
    }
    pq.write_table(pa.table(table), tmp_path / "t.parquet")
    csv = write_csv(tmp_path, "path,label,eval_label\na.png,x,\nb.png,,y\n")
    for rows in (read_parquet(str(tmp_path / "t.parquet")), read_table(csv)):
        assert (
            rows.labels.to_pylist() == ["x", None]
            and rows.eval_labels.to_pylist() == [None, "y"]
            and rows.truth.to_pylist() == ["x", "y"]
        )


def test_table_paths_are_confined(tmp_path):
    """Kills: prefix comparison without a separator (data-evil next to data), links
    not resolved.
    """
    write_images(tmp_path, ["data/a.png", "data-evil/b.png"])
    os.symlink(tmp_path / "data-evil" / "b.png", tmp_path / "data" / "link.png")
    evil = (
        "../data-evil/b.png",
        "link.png",
        str(tmp_path / "data-evil" / "b.png"),
        ".",
    )
    for path in evil:
        message = failure(
            read_table, write_csv(tmp_path / "data", f"path\na.png\n{path}\n")
        )
        assert "is outside the folder" in message and "row 1" in message
    assert (
        len(read_table(write_csv(tmp_path / "data", f"path\n{tmp_path}/data/a.png\n")))
        == 1
    )


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
        ("t.jsonl", '{"path": "a.png", "label": 1.5}', "1.5"),
        ("t.jsonl", '{"path": 3}', "no image path"),
        ("t.csv", "path,label,label\na.png,x,y\n", "two columns are named 'label'"),
        ("t.csv", "path,label, Split\na.png,x,test\n", "'Split' is not split"),
        ("t.csv", "path,Label\na.png,x\n", "'Label' is not label"),
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
    ids=range(22),
)
def test_table_errors(tmp_path, name, text, part):
    write_images(tmp_path, ["a.png"])
    (tmp_path / name).write_text(text, "utf-8", "surrogateescape")
    assert part in failure(read_table, str(tmp_path / name))


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_ends_of_lines_change_nothing(tmp_path, suffix):
    write_images(tmp_path, ["a.png", "b.png"])
    lines = [{"path": "a.png", "label": "1"}, {"path": "b.png", "label": 1}]
    text = {
        "csv": b"path,label\na.png,1\nb.png,1\n",
        "jsonl": "\n".join(map(json.dumps, lines)).encode(),
    }[suffix]
    path = tmp_path / f"t.{suffix}"
    for content in (text + b"\n", text.replace(b"\n", b"\r\n"), text.strip()):
        path.write_bytes(content)
        assert read_table(str(path)).labels.to_pylist() == ["1", "1"]


def test_folders_of_hive_partitioning_are_refused_if_they_say_labels(tmp_path):
    images = pa.array([encoded(pixels(i)) for i in range(4)])
    table = pa.table({"image": images, "kind": list("abab"), "year": [1, 2, 1, 2]})
    for column in ("kind", "year"):
        pyarrow.dataset.write_dataset(
            table,
            tmp_path / column,
            format="parquet",
            partitioning=[column],
            partitioning_flavor="hive",
        )
    assert len(read(f"parquet:{tmp_path}/year")) == 4
    config = DataConfig(source=f"parquet:{tmp_path}/kind", columns="label=kind")
    line = failure(read_rows, config)
    assert "folder kind=a is no column kind" in line and "partitioning='hive'" in line
    assert len(read_rows(config, images_only=True)) == 4


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """'s3://bucket' served from tmp_path by pyarrow's own sub-tree file system."""
    remote = pa.fs.SubTreeFileSystem(str(tmp_path), pa.fs.LocalFileSystem())
    monkeypatch.setattr(filesystem, "_connect", lambda host, options: (remote, ""))
    return tmp_path


def read(source):
    return read_rows(DataConfig(source=source))


def test_uris(bucket):
    write_hf(bucket / "hf", ["a", "b"])
    write_images(
        bucket / "pets", ["train/cat/a.png", "train/dog/b.png", "test/cat/c.png"]
    )
    write_csv(bucket / "pets", "path,label\ntrain/cat/a.png,cat\n")
    tables, expected = read("parquet:s3://bucket/hf"), read(str(bucket / "hf"))
    assert tables.labels == read("s3://bucket/hf").labels == expected.labels
    every = np.arange(16)
    assert tables.images.read_images(every) == expected.images.read_images(every)
    rows = read("s3://bucket/pets")
    assert (
        rows.labels.to_pylist() == ["cat", "cat", "dog"]
        and rows.images[0] == "s3://bucket/pets/test/cat/c.png"
    )
    assert decode(rows.images[1], 8).shape == (3, 8, 8)
    assert rows.fingerprint == read(str(bucket / "pets")).fingerprint
    assert rows.fingerprint == read(f"file://{bucket}/pets").fingerprint
    assert (
        read("table:s3://bucket/pets/t.csv").images[0]
        == "s3://bucket/pets/train/cat/a.png"
    )
    write_csv(bucket / "pets", "path\n../hf/x\n")
    assert "is outside the folder" in failure(read_table, "s3://bucket/pets/t.csv")
    assert "no such file" in failure(read, "s3://bucket/nothing")


def test_uris_with_options_and_odd_names(bucket):
    """Kills: options lost or swallowed by the path, names with '#', '?', '%' or
    blanks read as URI syntax.
    """
    write_images(bucket / "odd", ["cat/a b#1.png", "cat/50%25.png", "cat/c?.png"])
    options = "?endpoint_override=http://localhost:9000"
    rows = read(f"s3://bucket/odd{options}")
    assert rows.ids.to_pylist() == ["cat/50%25.png", "cat/a b#1.png", "cat/c?.png"]
    assert all(rows.images[i].endswith(options) for i in range(3))
    assert all(decode(rows.images[i], 8).shape == (3, 8, 8) for i in range(3))
    write_csv(bucket / "odd", "path\ncat/a b#1.png\n")
    assert read(f"s3://bucket/odd/t.csv{options}").images[0] == rows.images[1]


@pytest.mark.parametrize("column", ["id", "label", "split", "eval_label", "image"])
def test_text_that_is_not_utf8_is_one_line(tmp_path, column):
    """Kills: a traceback of whoever reads the names first."""
    raw = pa.array([b"train\xf5", b"train", b"train"])
    columns = {
        "image": pa.array([b"a", b"b", b"c"]),
        "label": pa.array(["a", "b", "a"]),
    }
    columns[column] = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    line = r"^cannot read (Parquet file|row group 0 of) .*a\.parquet: [^\n]*UTF8[^\n]*$"
    with pytest.raises(ConfigError, match=line):
        read_rows(DataConfig(source=f"parquet:{tmp_path}"))
    if column in ("id", "image"):  # what a prediction reads
        with pytest.raises(ConfigError, match=line):
            read_parquet(str(tmp_path), ReadOptions(images_only=True))


def test_rows_without_an_image_say_why_and_what_to_do(tmp_path):
    """Hugging Face's exports may keep paths of the computer that wrote them."""
    images = [picture(0), picture(1), {"bytes": None, "path": "/far/two.png"}]
    images += [{"bytes": None, "path": None}]
    pq.write_table(hf_table(images, [0, 1, 0, 1], ["a", "b"]), tmp_path / "t.parquet")
    rows = read_parquet(str(tmp_path))
    reasons = decode_many(rows.images, 8)[1]
    with pytest.raises(ConfigError) as refused:
        check_bad(rows.ids, reasons, 0.0, None, rows.images)
    for fact in ("t.parquet#2", "/far/two.png", "embed the bytes"):
        assert fact in str(refused.value)
    assert reasons[:2] == [None, None]
    assert "no bytes, and no path" in reasons[3] and "embed the bytes" in reasons[3]
