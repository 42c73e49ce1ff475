"""Tables and files that other programs made: what is read, and what a refusal says."""

import json
import os
import unicodedata
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from uno.config import Config, DataConfig
from uno.data import files as filesystem
from uno.data.check import check
from uno.data.decode import decode_many
from uno.data.sources import read_rows
from uno.data.splits import make_task
from uno.data.unreadable import check_bad
from uno.report.facts import read_facts

from .builders import (
    assert_refused,
    encoded,
    failure,
    hf_table,
    pixels,
    read,
    read_task,
    write_images,
)

NAMES = ["a.png", "sub/b.png", "sub/c.png"]
PATHS_AND_LABELS = [("a.png", "cat"), ("sub/b.png", "dog"), ("sub/c.png", "")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with three images."""
    write_images(tmp_path, NAMES)
    return tmp_path


def write_table(
    folder: Path, text: str, name: str = "t.csv", encoding: str = "utf-8"
) -> str:
    """Write a table, and return it as a source."""
    (folder / name).write_bytes(text.encode(encoding, "surrogateescape"))
    return f"table:{folder / name}"


def csv_text(separator: str = ",", header: tuple[str, str] = ("path", "label")) -> str:
    """Return the text of a table of the three images."""
    lines = [separator.join(row) for row in [header, *PATHS_AND_LABELS]]
    return "\r\n".join(lines) + "\r\n"


@pytest.mark.parametrize("name", ["t.csv", "t.tsv"])
@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_a_separator_other_than_the_comma_is_recognized_and_noted(
    folder, separator, name
):
    write_table(folder, csv_text(separator), name)
    rows = read(folder / name)
    assert rows.labels.to_pylist() == ["cat", "dog", None]
    assert "separated by" in rows.notes[0]


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("path;label;note, free\na.png;cat;1,5\n", ["cat"]),
        ('path, label \na.png, cat\nsub/b.png, "dog, big"\n', ["cat", "dog, big"]),
        ("\n\n" + csv_text(";"), ["cat", "dog", None]),
    ],
    ids=[
        "a comma in a table of semicolons",
        "spaces around names, before values",
        "empty lines before the names",
    ],
)
def test_commas_spaces_and_empty_lines_that_are_text_or_nothing(folder, text, labels):
    assert read(write_table(folder, text)).labels.to_pylist() == labels


@pytest.mark.parametrize(
    "encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"]
)
def test_encodings_with_a_byte_order_mark_are_read(folder, encoding):
    mark = "\ufeff" if encoding in ("utf-16-le", "utf-16-be") else ""
    text = mark + csv_text().replace("cat", "Gehäuse")
    rows = read(write_table(folder, text, encoding=encoding))
    assert rows.labels.to_pylist() == ["Gehäuse", "dog", None]


@pytest.mark.parametrize(
    ("encoding", "label", "facts"),
    [
        ("cp1252", "Gehäuse", ["not UTF-8", "line 3", "CSV UTF-8", "iconv"]),
        ("latin-1", "Gehäuse", ["not UTF-8", "line 3", "CSV UTF-8", "iconv"]),
        ("utf-16-le", "house", ["UTF-16"]),
        # its place is counted after the byte order mark
        ("utf-8-sig", "caf\udce9", ["line 3, byte 0xe9"]),
    ],
)
def test_another_encoding_is_refused_with_the_line_and_the_way_to_save(
    folder, encoding, label, facts
):
    text = csv_text().replace("dog", label)
    assert_refused(facts, read, write_table(folder, text, encoding=encoding))


@pytest.mark.parametrize(
    ("settings", "fact"),
    [
        ({"columns": "file"}, "columns must be as path=file,label=kind"),
        ({"columns": "picture=file"}, "columns must be as path=file,label=kind"),
        ({"columns": "image="}, "columns must be as path=file,label=kind"),
        ({"columns": "path=a,image=b"}, "path and image are the same"),
        ({"image_suffix": "png"}, "image_suffix must begin with a dot"),
    ],
)
def test_settings_of_a_table_that_mean_nothing_are_refused(settings, fact):
    with pytest.raises(ValueError, match=fact):
        DataConfig(**settings)


def test_path_and_image_are_one_column():
    assert DataConfig(columns="path=file").named_columns == {"image": "file"}


@pytest.mark.parametrize(
    ("header", "facts"),
    [
        (
            ("path", "class"),
            ("no column label", "path, class", "--data.columns label=class"),
        ),
        (
            ("Filename", "label"),
            ("needs a column path", "--data.columns image=Filename"),
        ),
        (
            ("a.png", "cat"),
            ("needs a column path", "the first line must name the columns"),
        ),
        (("path", "Label"), ("'Label' is not label", "--data.columns label=Label")),
    ],
)
def test_a_table_of_other_columns_is_refused_with_the_option(folder, header, facts):
    assert_refused(facts, read_task, write_table(folder, csv_text(header=header)))


def test_parquet_without_a_label_names_the_likely_column(tmp_path):
    table = pa.table({"image": [b"x"], "species": ["a"]})
    pq.write_table(table, tmp_path / "t.parquet")
    assert "--data.columns label=species" in failure(read_task, f"parquet:{tmp_path}")


@pytest.mark.parametrize(
    ("path", "file"),
    [
        ("été\\b.png", "été/b.png"),
        ("%C3%A9t%C3%A9/b.png", "été/b.png"),
        (unicodedata.normalize("NFD", "été/b.png"), "été/b.png"),
        ("file://{folder}/été/b.png", "été/b.png"),
        ("a\\b.png", "a\\b.png"),
    ],
    ids=["Windows", "URL", "macOS", "file URL", "a backslash in a name"],
)
def test_paths_as_other_programs_write_them_lead_to_the_file(tmp_path, path, file):
    write_images(tmp_path, ["été/b.png", "a\\b.png", "a/b.png"])
    path = path.replace("{folder}", str(tmp_path))
    rows = read(write_table(tmp_path, f"path,label\n{path},cat\n"))
    assert os.path.samefile(rows.images[0], tmp_path / file)


@pytest.mark.parametrize(
    ("path", "is_refused"),
    [
        ("file://{folder}/secret.png", True),
        ("..\\secret.png", False),
        ("..%2Fsecret.png", False),
    ],
)
def test_other_spellings_stay_inside_the_folder(tmp_path, path, is_refused):
    write_images(tmp_path, ["secret.png", "data/a.png"])
    path = path.replace("{folder}", str(tmp_path))
    table = write_table(tmp_path / "data", f"path,label\na.png,x\n{path},cat\n")
    if is_refused:
        assert "outside the folder" in failure(read, table)
    else:
        assert not os.path.exists(read(table).images[1])


def test_an_image_folder_and_an_ending_complete_the_paths(folder):
    (folder / "tables").mkdir()
    source = write_table(folder / "tables", "path,label\nb,cat\nc.PNG,dog\n")
    options = ["--data.image-folder", "--data.image-suffix"]
    assert_refused(["none of its 2 images", *options], read, source)
    rows = read(source, image_folder=str(folder / "sub"), image_suffix=".png")
    assert rows.images[0] == os.path.realpath(folder / "sub/b.png")
    assert os.path.basename(rows.images[1]) == "c.PNG"


@pytest.mark.parametrize(
    ("path", "facts"),
    [
        ("https://host/a.png", ("is a URL", "download")),
        ("s3://bucket/dir/a.png", ("is a URL", "--data.image-folder s3://bucket/dir")),
        ("/data/upload/3/ab-a.png", ("Label Studio", "download")),
        ("/data/local-files/?d=a.png", ("Label Studio", "download")),
        ("/elsewhere/a.png", ("is outside the folder", "--data.image-folder")),
    ],
)
def test_a_path_that_leads_elsewhere_is_refused_with_a_way_that_fits(
    folder, path, facts
):
    table = write_table(folder, f"path,label\na.png,cat\n{path},dog\n")
    assert_refused([*facts, "(line 3)"], read, table)


def test_links_to_nothing_are_not_called_another_spelling(tmp_path):
    for name in ("a.png", "b.png"):
        (tmp_path / name).symlink_to("gone")
    source = write_table(tmp_path, "path,label\na.png,cat\nb.png,dog\n", "t.csv")
    line = failure(read, source)
    assert "none of its 2 images" in line and "capital" not in line


def test_paths_of_a_windows_computer_are_named(folder):
    table = write_table(folder, "path,label\nC:\\photos\\a.png,cat\n")
    assert_refused(["Windows", "relative"], read, table)


@pytest.mark.parametrize("written", ["my pets/a b.png", "my%20pets/a%20b.png"])
def test_uris_below_the_folder_of_images_are_read(bucket, written):
    """Percent-encoded or not, as other programs write them."""
    write_images(bucket / "my pets", ["a b.png"])
    text = f"path,label\ns3://bucket/{written},cat\n"
    write_table(bucket / "my pets", text)
    there = read("table:s3://bucket/my%20pets/t.csv")
    here = read(write_table(bucket, text), image_folder="s3://bucket/my%20pets")
    assert there.images[0] == here.images[0] == "s3://bucket/my%20pets/a%20b.png"


def test_unreadable_rows_of_a_table_have_their_path(folder):
    source = write_table(folder, csv_text().replace("sub/b", "sub/gone"))
    config = Config(data=DataConfig(source=source, num_novel=1, max_bad_fraction=1))
    task = make_task(read_rows(config.data), config.data)
    gone = os.path.realpath(folder / "sub/gone.png")
    for seconds in (0, 60):
        problems = check(task, config, seconds)
        assert any(f"row-1 ({gone})" in problem.message for problem in problems)
    _, reasons = decode_many(task.rows.images, 8)
    storage = filesystem.Storage(str(folder / "run"))
    check_bad(task.rows.ids, reasons, 1, storage, task.rows.images)
    entry = json.loads(storage.read("bad_samples.jsonl"))
    assert (entry["id"], entry["uri"]) == ("row-1", gone)
    assert read_facts(storage).bad == [(f"row-1 ({gone})", "No such file or directory")]


@pytest.mark.parametrize(
    ("source", "facts"),
    [
        ("vectors:{}/e.csv", ["vectors: reads .parquet, .h5ad, .npy", "np.loadtxt"]),
        ("vectors:{}/e.h5", ["vectors: reads", "HDF5"]),
        ("vectors:{}/e.safetensors", ["vectors: reads", "np.save"]),
        ("{}/v.npy", ["--data vectors:"]),
        ("{}/v.npz", ["--data vectors:"]),
        ("{}/e.pt", ["--data vectors:"]),
        ("{}/cells.h5ad", ["--data vectors:"]),
        ("{}/t.xlsx", ["CSV UTF-8"]),
        ("{}/photos.zip", ["unpack it"]),
        ("{}/shard.tar.gz", ["unpack it"]),
        ("{}/t.csv.gz", ["unpack it"]),
        ("{}/instances.json", ["columns path and label"]),
    ],
)
def test_a_file_of_another_format_is_refused_with_the_way_to_read_it(
    tmp_path, source, facts
):
    (tmp_path / source.rpartition("/")[2]).write_bytes(b"\x89HDF\r\n" + bytes(500))
    assert_refused(facts, read, source.format(tmp_path))


VALUES = np.random.default_rng(0).normal(size=(6, 3)).astype("f4")
KNOWN = np.array(["a", "", "b", "b", "", "a"])


@pytest.mark.parametrize(
    ("arrays", "columns", "labels"),
    [
        (
            {"label": KNOWN, "features": VALUES, "id": np.arange(6), "s": np.ones(1)},
            "",
            ["a", None, "b", "b", None, "a"],
        ),
        (
            {"features": VALUES, "y": np.array([0, 1, -1, 0, 1, 1])},
            "label=y",
            ["0", "1", None, "0", "1", "1"],
        ),
        (
            {"features": VALUES, "label": np.array(["Käse".encode(), b""] * 3)},
            "",
            ["Käse", None] * 3,
        ),
    ],
)
def test_arrays_of_an_npz_file_are_embeddings_and_columns(
    tmp_path, arrays, columns, labels
):
    np.savez(tmp_path / "v.npz", **arrays)
    rows = read(f"vectors:{tmp_path}/v.npz", columns=columns)
    assert rows.labels.to_pylist() == labels
    assert str(rows.ids[5]) == ("5" if "id" in arrays else "row-5")
    np.testing.assert_array_equal(rows.images[5], VALUES[5])


@pytest.mark.parametrize(
    ("arrays", "facts"),
    [
        (
            {"train": VALUES, "test": VALUES},
            ["train (6, 3)", "--data.columns embedding=train"],
        ),
        (
            {"embedding": VALUES, "label": np.array(["Käse".encode("latin-1")] * 6)},
            ["label holds neither text nor numbers"],
        ),
        (
            {"embedding": VALUES, "label": KNOWN[:1]},
            ["array label has the shape (1,)"],
        ),
        (
            {"embedding": VALUES, "label": np.array(["a", None], object)},
            [".astype(str)"],
        ),
        ({"embedding": VALUES, "y": KNOWN}, ["--data.columns label=y"]),
    ],
    ids=[
        "two embeddings",
        "bytes of another encoding",
        "shape",
        "objects",
        "label of another name",
    ],
)
def test_arrays_that_are_not_clear_are_asked_for(tmp_path, arrays, facts):
    np.savez(tmp_path / "v.npz", **arrays)
    assert_refused(facts, read_task, f"vectors:{tmp_path}/v.npz")


def test_labels_in_an_array_and_in_a_table_are_refused(tmp_path):
    np.savez(tmp_path / "v.npz", embedding=VALUES, label=KNOWN)
    write_table(tmp_path, "label\n" + "a\n" * 6, "v.csv")
    assert "both hold label" in failure(read, f"vectors:{tmp_path}/v.npz")


def test_arrays_without_labels_name_the_file_that_may_hold_them(tmp_path):
    np.save(tmp_path / "v.npy", VALUES)
    assert "v.csv" in failure(read_task, f"vectors:{tmp_path}/v.npy")


def test_parquet_that_only_names_files_reads_them_or_names_the_option(folder):
    """Hugging Face's struct of bytes and path, without bytes."""
    paths = [{"bytes": None, "path": str(folder / name)} for name in NAMES]
    (folder / "export").mkdir()
    table = hf_table(paths, [0, 0, None], ["x"], "image")
    pq.write_table(table, folder / "export/t.parquet")
    source = f"parquet:{folder}/export"
    facts = ["outside the folder", "--data.image-folder", "store the bytes"]
    for images_only in (False, True):
        assert_refused(facts, read, source, images_only)
    rows = read(source, image_folder=str(folder))
    assert rows.labels.to_pylist() == ["x", "x", None]
    assert rows.images[1] == os.path.realpath(folder / "sub/b.png")


@pytest.mark.parametrize("kind", ["", "parquet:", "folder:"])
def test_a_folder_of_arrow_files_names_how_to_write_parquet(tmp_path, kind):
    for name in ("data-00000-of-00001.arrow", "dataset_info.json", "state.json"):
        (tmp_path / name).write_bytes(b"{}")
    assert "Dataset.to_parquet" in failure(read, f"{kind}{tmp_path}")


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """A folder 'data' with links to two images outside it, a table of them, and links
    to a Parquet file, in the way of caches; and a folder 'new' of an image.
    """
    write_images(tmp_path, ["store/0.png", "store/1.png", "new/c.png"])
    table = pa.table({"image": [encoded(pixels(0))], "label": ["a"]})
    pq.write_table(table, tmp_path / "store" / "t.parquet")
    for name, target in (
        ("data/cat/a.png", "0.png"),
        ("data/dog/b.png", "1.png"),
        ("shards/t.parquet", "t.parquet"),
    ):
        (tmp_path / name).parent.mkdir(parents=True)
        relative = os.path.relpath(tmp_path / "store", (tmp_path / name).parent)
        (tmp_path / name).symlink_to(f"{relative}/{target}")
    write_table(tmp_path / "data", "path,label\ncat/a.png,cat\ndog/b.png,dog\n")
    return tmp_path


@pytest.mark.parametrize(
    ("sources", "num_rows"),
    [
        ({"source": "folder:{}/data"}, 2),
        ({"labeled": "{}/data", "unlabeled": "{}/new"}, 3),
        ({"source": "table:{}/data/t.csv"}, 2),
        ({"source": "parquet:{}/shards"}, 1),
    ],
)
@pytest.mark.parametrize("images_only", [False, True])
def test_links_are_followed_on_request(linked, sources, num_rows, images_only):
    given = {name: source.format(linked) for name, source in sources.items()}
    assert "--data.follow-links" in failure(read_rows, DataConfig(**given), images_only)
    rows = read_rows(DataConfig(**given, follow_links=True), images_only)
    assert decode_many(rows.images, 8)[1] == [None] * num_rows


def test_a_table_that_follows_links_stays_inside_the_folder(linked):
    escape = write_table(linked / "data", "path,label\n../store/0.png,cat\n", "u.csv")
    assert "outside the folder" in failure(read, escape, follow_links=True)


@pytest.mark.parametrize("follow_links", [False, True])
@pytest.mark.parametrize("target", ["gone.png", "z.png"])
def test_a_link_to_nothing_is_an_unreadable_image(tmp_path, target, follow_links):
    """A file that is gone, and a link to itself."""
    write_images(tmp_path, ["cat/a.png", "dog/b.png"])
    (tmp_path / "cat/z.png").symlink_to(target)
    rows = read(tmp_path, follow_links=follow_links)
    assert rows.ids.to_pylist() == ["cat/a.png", "cat/z.png", "dog/b.png"]
    first, lost, last = decode_many(rows.images, 8)[1]
    assert lost and (first, last) == (None, None)


def test_loops_of_followed_links_end(tmp_path):
    write_images(tmp_path, ["data/cat/a.png", "data/dog/b.png"])
    (tmp_path / "data/cat/up").symlink_to("..")
    (tmp_path / "data/dog/top").symlink_to(tmp_path)
    rows = read(tmp_path / "data", follow_links=True)
    assert sorted(rows.ids.to_pylist()) == ["cat/a.png", "dog/b.png"]
