"""Situations that users of other tools have reported, tried on this one.

docs/contributing/data-situations.md lists each with its source.
"""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from uno.config import Config
from uno.data.check import check

from .builders import encoded, failure, pixels, read, read_task, write_images


def warnings_of(source: object) -> list[str]:
    """Return what a check of the data warns of."""
    return [problem.message for problem in check(read_task(source), Config())]


def refusal(source: object) -> str:
    """Return the line with which a source is refused as the data of a run."""
    return failure(warnings_of, source)


def test_folders_that_a_notebook_leaves_are_no_classes(tmp_path):
    names = [".ipynb_checkpoints/x.png", "cat/.ipynb_checkpoints/1-checkpoint.png"]
    write_images(tmp_path, ["cat/1.png", "dog/2.png", *names])
    assert read(tmp_path).ids.to_pylist() == ["cat/1.png", "dog/2.png"]


def test_jpeg_files_with_the_ending_of_a_browser_are_images(tmp_path):
    write_images(tmp_path, ["cat/1.JFIF", "dog/2.png"])
    assert read(tmp_path).ids.to_pylist() == ["cat/1.JFIF", "dog/2.png"]


@pytest.mark.parametrize("word", ["NA", "nan", "None", "N/A"])
def test_a_class_that_means_missing_is_reported(tmp_path, word):
    write_images(tmp_path, ["a.png", "b.png", "c.png"])
    table = tmp_path / "t.csv"
    table.write_text(f"path,label\na.png,cat\nb.png,{word}\nc.png,{word}\n")
    line = refusal(table)
    assert f"class '{word}'" in line and "empty" in line
    table.write_text(f"path,label\na.png,cat\nb.png,{word}\nc.png,\n")
    warning = f"class '{word}' seems to stand for a missing label"
    assert any(warning in text for text in warnings_of(table))


def test_a_folder_around_the_class_folders_is_refused_with_the_path_to_give(tmp_path):
    write_images(tmp_path, ["Data/cat/1.png", "Data/dog/2.png"])
    line = refusal(tmp_path)
    assert f"--data {tmp_path}/Data" in line and f"classes:{tmp_path}" in line
    assert read(f"classes:{tmp_path}").labels.to_pylist() == ["Data", "Data"]
    write_images(tmp_path, ["Data/3.png"])
    assert set(read(tmp_path).labels.to_pylist()) == {"Data"}


@pytest.mark.parametrize("names", [("Training", "Testing"), ("Train", "Val")])
def test_folders_of_splits_by_other_names_are_no_classes(tmp_path, names):
    write_images(tmp_path, [f"{split}/{c}/1.png" for split in names for c in "ab"])
    line = refusal(tmp_path)
    assert "splits" in line and "rename" in line and "classes:" in line
    assert set(read(f"classes:{tmp_path}").labels.to_pylist()) == set(names)


def test_test_images_in_a_folder_of_another_name_are_named(tmp_path):
    write_images(tmp_path, ["train/a/1.png", "train/b/1.png", "dev/a/1.png"])
    assert "rename their folder to test" in refusal(tmp_path)


@pytest.mark.parametrize(
    "kind", [pa.dictionary(pa.int32(), pa.string()), pa.string_view()], ids=str
)
@pytest.mark.parametrize(
    ("images_only", "labels"), [(False, ["x", None]), (True, [None, None])]
)
def test_texts_of_any_arrow_type_are_read_from_parquet(
    tmp_path, kind, images_only, labels
):
    """Arrow has dictionaries, which pandas writes for categories, and views."""
    write_images(tmp_path, ["a.png", "b.png"])
    columns = {"path": ["a.png", "b.png"], "label": ["x", None]}
    schema = pa.schema({"path": kind, "label": kind})
    pq.write_table(pa.table(columns, schema), tmp_path / "t.parquet")
    rows = read(tmp_path / "t.parquet", images_only)
    assert rows.images[1] == str((tmp_path / "b.png").resolve())
    assert rows.labels.to_pylist() == labels


def test_images_in_views_of_bytes_are_read_from_parquet(tmp_path):
    images = [encoded(pixels(0)), encoded(pixels(1))]
    columns = {"image": pa.array(images, pa.binary_view()), "label": ["x", None]}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    assert read(tmp_path / "t.parquet").images[1] == images[1]


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("t.csv", "path,label\nA.PNG,x\n", "'a.png' is there"),
        ("t.csv", '"path,label"\n"a.png,x"\n', "remove the quotes around the lines"),
        ("t.jsonl", '[{"path": "a.png", "label": "cat"}]', "lines=True"),
        ("t.jsonl", '[\n {\n  "path": "a.png",\n  "label": "x"\n }\n]', "lines=True"),
        ("list.txt", "a.png 0\n", "path,label"),
    ],
)
def test_mistakes_in_a_table_are_named_with_the_fix(tmp_path, name, text, part):
    write_images(tmp_path, ["a.png"])
    (tmp_path / name).write_text(text)
    assert part in refusal(tmp_path / name)


def test_spaces_after_a_path_do_not_count(tmp_path):
    write_images(tmp_path, ["a.png"])
    (tmp_path / "t.csv").write_text("path,label\na.png ,x\n")
    assert read(tmp_path / "t.csv").images[0] == str((tmp_path / "a.png").resolve())


def test_an_empty_line_of_labels_is_explained(tmp_path):
    np.save(tmp_path / "v.npy", np.ones((3, 2), "f4"))
    (tmp_path / "v.csv").write_text("label\na\n\nb\n")
    assert "an empty line is no row" in refusal(f"vectors:{tmp_path}/v.npy")
    (tmp_path / "v.csv").write_text('label\na\n""\nb\n')
    assert read(f"vectors:{tmp_path}/v.npy").labels.to_pylist() == ["a", None, "b"]


@pytest.mark.parametrize("name", ["v.npy", "v.npz"])
def test_arrays_of_python_objects_are_refused_without_the_advice_to_open_them(
    tmp_path, name
):
    save = np.save if name == "v.npy" else np.savez
    save(tmp_path / name, np.array([[1.0, 2.0], [3.0]], object))
    line = refusal(f"vectors:{tmp_path / name}")
    assert "np.stack" in line and "allow_pickle" not in line


@pytest.mark.parametrize(
    ("columns", "kind", "parts"),
    [
        (
            {"embedding": ["[0.1, 0.2]"] * 2},
            "vectors",
            ("lists of numbers", "json.loads"),
        ),
        (
            {str(i): [0.5, 1.5] for i in range(12)},
            "vectors",
            ("needs a column embedding", "np.save"),
        ),
        (
            {"image": pa.array([[0] * 48] * 2, pa.list_(pa.uint8()))},
            "parquet",
            ("images must be bytes", "PNG or JPEG"),
        ),
    ],
)
def test_columns_of_other_values_are_refused_with_the_way_to_store_them(
    tmp_path, columns, kind, parts
):
    table = pa.table(columns | {"label": ["a", None]})
    pq.write_table(table, tmp_path / "t.parquet")
    line = refusal(f"{kind}:{tmp_path}/t.parquet")
    assert all(part in line for part in parts)
