"""Parquet, CSV and JSONL tables."""

import json
import os

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest

from uno.config import DataConfig
from uno.data import files as filesystem
from uno.data.decode import decode
from uno.data.rows import Encoded, Files
from uno.data.sources import read_rows
from uno.data.tables import read_parquet, read_table
from uno.errors import ConfigError

from .builders import encoded, hf_table, pixels, write_hf, write_images


def failure(function, path):
    with pytest.raises(ConfigError) as caught:
        function(str(path))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_hugging_face_layout(tmp_path):
    write_hf(tmp_path, ["zebra", "ant", "cow"])
    rows = read_parquet(str(tmp_path))
    assert len(rows) == 16 and rows.class_names == ("zebra", "ant", "cow")
    assert isinstance(rows.images, Encoded)
    train = [i for i in range(16) if rows.split[i] == "train"]
    assert len(train) == 12 and rows.labels[train[1]] == "ant"
    assert rows.ids[train[0]] == "train-00000-of-00001.parquet#0"
    assert (decode(rows.images[train[4]], 8) == pixels(4).transpose(2, 0, 1)).all()


@pytest.mark.parametrize("names", [["dog", "cat"], ["cat"], None])
def test_files_must_agree_on_the_class_names(tmp_path, names):
    """Kills: the last file's names for the numbers of all."""
    images = [{"bytes": encoded(pixels(0)), "path": None}]
    pq.write_table(hf_table(images, [0], ["cat", "dog"], "image"), tmp_path / "a.parquet")
    table = hf_table(images, [0], names or ["x"], "image")
    pq.write_table(table if names else table.replace_schema_metadata(None), tmp_path / "b.parquet")
    assert "class names in the metadata differ" in failure(read_parquet, tmp_path)


def test_null_and_negative_labels_are_unlabeled(tmp_path):
    images = [{"bytes": encoded(pixels(i)), "path": None} for i in range(3)]
    pq.write_table(hf_table(images, [0, None, -1], ["a", "b"], "image"), tmp_path / "x.parquet")
    rows = read_parquet(str(tmp_path))
    assert rows.labels == ["a", None, None] and set(rows.split) == {"train"}


def test_labels_without_names_are_numbers_and_fine_labels_count(tmp_path):
    table = pa.table({"img": [encoded(pixels(0))] * 2, "coarse_label": [0, 0], "fine_label": [3, 10]})
    pq.write_table(table, tmp_path / "a.parquet")
    assert read_parquet(str(tmp_path)).labels == ["3", "10"]


def test_hugging_face_rows_by_path(tmp_path):
    """Kills: rows without bytes read as empty, paths resolved in the working directory."""
    write_images(tmp_path, ["one.png"], first_seed=5)
    images = [{"bytes": encoded(pixels(0)), "path": "ignored"}, {"bytes": None, "path": "one.png"}]
    pq.write_table(hf_table(images, [0, 0], ["a"]), tmp_path / "a.parquet")
    rows = read_parquet(str(tmp_path / "a.parquet"))
    assert (decode(rows.images[1], 8) == pixels(5).transpose(2, 0, 1)).all()
    images[1]["path"] = "../one.png"
    pq.write_table(hf_table(images, [0, 0], ["a"]), tmp_path / "a.parquet")
    assert "leaves the folder" in failure(read_parquet, tmp_path)


def test_canonical_layout(tmp_path):
    write_images(tmp_path, ["im/a.png", "im/b.png"])
    columns = {
        "id": ["r1", "r2"],
        "image": ["im/a.png", "im/b.png"],
        "label": ["x", None],
        "split": ["train", "test"],
    }
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    rows = read_parquet(str(tmp_path))
    assert isinstance(rows.images, Files)
    assert (
        rows.ids == ["r1", "r2"] and rows.labels == ["x", None] and rows.split.tolist() == ["train", "test"]
    )
    columns["image"] = [encoded(pixels(1)), encoded(pixels(2))]
    columns["label"] = pa.array(["x", None]).dictionary_encode()
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    assert read_parquet(str(tmp_path)).labels == ["x", None]


def test_files_and_folders_name_the_split(tmp_path):
    table = pa.table({"image": [encoded(pixels(0))], "label": ["a"]})
    for name in (
        "train-0.parquet",
        "validation-0.parquet",
        "test/0.parquet",
        "part.parquet",
        "training-0.parquet",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        pq.write_table(table, tmp_path / name)
    rows = read_parquet(str(tmp_path))
    splits = dict(zip([i.split("#")[0] for i in rows.ids], rows.split.tolist(), strict=True))
    assert splits == {
        "train-0.parquet": "train", "validation-0.parquet": "test", "test/0.parquet": "test",
        "part.parquet": "train", "training-0.parquet": "train",
    }  # fmt: skip


def test_parquet_errors(tmp_path):
    assert "no *.parquet files" in failure(read_parquet, tmp_path)
    (tmp_path / "a.parquet").write_bytes(b"PAR1 but nothing else")
    assert "cannot read Parquet file" in failure(read_parquet, tmp_path)
    cases = [
        ({"picture": [b"x"], "label": ["a"]}, "it has picture, label"),
        ({"image": [1.5]}, "images must be bytes"),
        ({"image": [b"x"], "label": [1.5]}, "names or numbers"),
        ({"image": [b"x"], "split": ["holdout"]}, "'holdout'"),
        ({"image": [b"x", b"y"], "id": ["same", "same"]}, "'same' appears more than once"),
        ({"image": ["/etc/passwd"]}, "leaves the folder"),
        ({"image": ["missing.png"]}, "none of its 1 images"),
        ({"image": pa.array([], pa.binary())}, "no rows"),
    ]
    for columns, text in cases:
        pq.write_table(pa.table(columns), tmp_path / "a.parquet")
        assert text in failure(read_parquet, tmp_path)
    pq.write_table(hf_table([{"bytes": b"x", "path": None}], [7], ["a", "b"]), tmp_path / "a.parquet")
    assert "label 7 has no name" in failure(read_parquet, tmp_path)


def test_broken_hugging_face_metadata_is_ignored(tmp_path):
    table = pa.table({"image": [b"x"], "label": [1]}).replace_schema_metadata({"huggingface": "{not json"})
    pq.write_table(table, tmp_path / "a.parquet")
    assert read_parquet(str(tmp_path)).labels == ["1"]


def write_csv(folder, text):
    (folder / "t.csv").write_text(text, encoding="utf-8")
    return folder / "t.csv"


def test_csv_and_jsonl_agree(tmp_path):
    write_images(tmp_path, ["a.png", "b.png", "sub/c.png"])
    text = '\ufeffpath,label,split\na.png,cat,train\nb.png,,train\nsub/c.png,"dog, big",test\n'
    first = read_table(str(write_csv(tmp_path, text)))
    records = [
        {"image": "a.png", "label": "cat"},
        {"image": "b.png", "label": None, "split": "train"},
        {"image": "sub/c.png", "label": "dog, big", "split": "validation"},
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n\n")
    second = read_table(str(tmp_path / "t.jsonl"))
    for rows in (first, second):
        assert rows.labels == ["cat", None, "dog, big"] and rows.split.tolist() == ["train", "train", "test"]
        assert rows.ids == ["row-0", "row-1", "row-2"] and rows.images[2] == os.path.realpath(
            tmp_path / "sub/c.png"
        )
    assert first.fingerprint == second.fingerprint
    (tmp_path / "t.jsonl").write_text(json.dumps({"path": "a.png", "label": 7, "id": 3}))
    rows = read_table(str(tmp_path / "t.jsonl"))
    assert rows.labels == ["7"] and rows.ids == ["3"]


def test_truth_for_evaluation_only(tmp_path):
    """Kills: eval_label ignored, or taken for the label."""
    write_images(tmp_path, ["a.png", "b.png"])
    truth = [None, "y"]
    table = {"path": ["a.png", "b.png"], "label": ["x", None], "eval_label": truth}
    pq.write_table(pa.table(table), tmp_path / "t.parquet")
    (tmp_path / "t.csv").write_text("path,label,eval_label\na.png,x,\nb.png,,y\n")
    for rows in (read_parquet(str(tmp_path / "t.parquet")), read_table(str(tmp_path / "t.csv"))):
        assert rows.labels == ["x", None] and rows.eval_labels == truth and rows.truth == ["x", "y"]


def test_table_paths_are_confined(tmp_path):
    """Kills: prefix comparison without a separator (data-evil next to data), links not resolved."""
    write_images(tmp_path, ["data/a.png", "data-evil/b.png"])
    os.symlink(tmp_path / "data-evil" / "b.png", tmp_path / "data" / "link.png")
    for path in (
        "../data-evil/b.png",
        "link.png",
        str(tmp_path / "data-evil" / "b.png"),
        "s3://bucket/x.png",
        ".",
    ):
        message = failure(read_table, write_csv(tmp_path / "data", f"path\na.png\n{path}\n"))
        assert "leaves the folder" in message and "row 1" in message
    inside = read_table(str(write_csv(tmp_path / "data", f"path\n{tmp_path}/data/a.png\n")))
    assert len(inside) == 1


def test_table_errors(tmp_path):
    write_images(tmp_path, ["a.png"])
    for text, part in [
        ("file,label\na.png,x\n", "it has file, label"),
        ("path,label\n", "no rows"),
        ("", "it has none"),
        ("path,label\na.png,x,y\n", "more values"),
        ('path\n""\n', "row 0 has no image path"),
        ("path,split\na.png,dev\n", "'dev'"),
        ("id,path\n1,a.png\n1,a.png\n", "'1' appears more than once"),
        ("path\n" + "x" * 200_000 + "\n", "is not CSV"),
    ]:
        assert part in failure(read_table, write_csv(tmp_path, text))
    (tmp_path / "t.csv").write_bytes(b"path\n\xff\xfe\n")
    assert "cannot read" in failure(read_table, tmp_path / "t.csv")
    for line, part in [
        ("{", "line 1 is not JSON"),
        ("[" * 100_000, "line 1 is not JSON"),
        ("[1]", "must be an object"),
        ('{"path": "a.png", "label": 1.5}', "1.5"),
        ('{"path": 3}', "no image path"),
    ]:
        (tmp_path / "t.jsonl").write_text(line)
        assert part in failure(read_table, tmp_path / "t.jsonl")


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """'s3://bucket' served from tmp_path by pyarrow's own sub-tree file system."""
    remote = pa.fs.SubTreeFileSystem(str(tmp_path), pa.fs.LocalFileSystem())
    monkeypatch.setattr(filesystem, "_connect", lambda host, options: (remote, ""))
    return tmp_path


def test_uris(bucket):
    write_hf(bucket / "hf", ["a", "b"])
    write_images(bucket / "pets", ["train/cat/a.png", "train/dog/b.png", "test/cat/c.png"])
    write_csv(bucket / "pets", "path,label\ntrain/cat/a.png,cat\n")
    assert len(read_rows(DataConfig(source="parquet:s3://bucket/hf"))) == 16
    assert len(read_rows(DataConfig(source="s3://bucket/hf"))) == 16
    rows = read_rows(DataConfig(source="s3://bucket/pets"))
    assert rows.labels == ["cat", "cat", "dog"] and rows.images[0] == "s3://bucket/pets/test/cat/c.png"
    assert decode(rows.images[1], 8).shape == (3, 8, 8)
    assert rows.fingerprint == read_rows(DataConfig(source=str(bucket / "pets"))).fingerprint
    assert rows.fingerprint == read_rows(DataConfig(source=f"file://{bucket}/pets")).fingerprint
    table = read_rows(DataConfig(source="table:s3://bucket/pets/t.csv"))
    assert table.images[0] == "s3://bucket/pets/train/cat/a.png"
    write_csv(bucket / "pets", "path\n../hf/x\n")
    assert "leaves the folder" in failure(read_table, "s3://bucket/pets/t.csv")
    with pytest.raises(ConfigError, match="no such file"):
        read_rows(DataConfig(source="s3://bucket/nothing"))


def test_uris_with_options_and_odd_names(bucket):
    """Kills: options lost or swallowed by the path, names with '#', '?', '%' or blanks read as URI syntax."""
    write_images(bucket / "odd", ["cat/a b#1.png", "cat/50%25.png", "cat/c?.png"])
    options = "?endpoint_override=http://localhost:9000"
    rows = read_rows(DataConfig(source=f"s3://bucket/odd{options}"))
    assert rows.ids == ["cat/50%25.png", "cat/a b#1.png", "cat/c?.png"]
    assert all(rows.images[i].endswith(options) for i in range(3))
    assert all(decode(rows.images[i], 8).shape == (3, 8, 8) for i in range(3))
    write_csv(bucket / "odd", "path\ncat/a b#1.png\n")
    table = read_rows(DataConfig(source=f"s3://bucket/odd/t.csv{options}"))
    assert table.images[0] == rows.images[1]


def test_an_unreachable_uri_is_one_line():
    with pytest.raises(ConfigError, match="cannot read nosuch://host/x") as caught:
        read_rows(DataConfig(source="nosuch://host/x"))
    assert "\n" not in str(caught.value)
