"""Tables and files that other programs made: what is read, and what a refusal says."""

import json
import os
import unicodedata
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest

from uno.config import Config, DataConfig
from uno.data import files as filesystem
from uno.data.check import check
from uno.data.decode import decode_many
from uno.data.sources import read_rows
from uno.data.splits import make_task
from uno.data.unreadable import check_bad, name_bad
from uno.report.facts import read_facts

from .builders import encoded, failure, hf_table, pixels, write_images

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
    (folder / name).write_bytes(text.encode(encoding))
    return f"table:{folder / name}"


def csv_text(separator: str = ",", header: tuple[str, str] = ("path", "label")) -> str:
    """Return the text of a table of the three images."""
    lines = [separator.join(row) for row in [header, *PATHS_AND_LABELS]]
    return "\r\n".join(lines) + "\r\n"


def read(source: str, **settings: object):
    """Return the rows of a source."""
    return read_rows(DataConfig(source=source, **settings))


def refusal(source: str, **settings: object) -> str:
    """Return the line with which a source is refused as the data of a run."""
    config = DataConfig(source=source, num_novel=1, **settings)
    return failure(lambda: make_task(read_rows(config), config))


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_a_separator_other_than_the_comma_is_recognized_and_noted(folder, separator):
    rows = read(write_table(folder, csv_text(separator)))
    assert rows.labels.to_pylist() == ["cat", "dog", None]
    assert "separated by" in rows.notes[0]


def test_a_comma_inside_a_semicolon_table_is_text(folder):
    text = "path;label;note, free\na.png;cat;1,5\n"
    assert read(write_table(folder, text)).labels.to_pylist() == ["cat"]


def test_a_file_that_ends_in_tsv_is_a_table(folder):
    write_table(folder, csv_text("\t"), "t.tsv")
    assert read(str(folder / "t.tsv")).labels.to_pylist() == ["cat", "dog", None]


def test_spaces_around_column_names_and_before_values_do_not_count(folder):
    rows = read(
        write_table(folder, 'path, label \na.png, cat\nsub/b.png, "dog, big"\n')
    )
    assert rows.labels.to_pylist() == ["cat", "dog, big"]


@pytest.mark.parametrize(
    "encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"]
)
def test_encodings_with_a_byte_order_mark_are_read(folder, encoding):
    mark = "\ufeff" if encoding in ("utf-16-le", "utf-16-be") else ""
    text = mark + csv_text().replace("cat", "Gehäuse")
    assert (
        read(write_table(folder, text, encoding=encoding)).labels.to_pylist()[0]
        == "Gehäuse"
    )


@pytest.mark.parametrize("encoding", ["cp1252", "latin-1"])
def test_another_encoding_is_refused_with_the_line_and_the_way_to_save(
    folder, encoding
):
    source = write_table(
        folder, csv_text().replace("dog", "Gehäuse"), encoding=encoding
    )
    line = refusal(source)
    assert (
        "not UTF-8" in line
        and "line 3" in line
        and "CSV UTF-8" in line
        and "iconv" in line
    )


def test_utf_16_without_a_mark_is_refused_by_name(folder):
    assert "UTF-16" in refusal(write_table(folder, csv_text(), encoding="utf-16-le"))


def test_path_and_image_are_one_column():
    assert DataConfig(columns="path=file").named_columns == {"image": "file"}
    with pytest.raises(ValueError, match="path and image are the same"):
        DataConfig(columns="path=a,image=b")


@pytest.mark.parametrize(
    ("header", "parts"),
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
def test_a_table_of_other_columns_is_refused_with_the_option(folder, header, parts):
    line = refusal(write_table(folder, csv_text(header=header)))
    assert all(part in line for part in parts)


def test_parquet_and_arrays_without_a_label_name_the_likely_column(tmp_path):
    table = pa.table({"image": [b"x"], "species": ["a"]})
    pq.write_table(table, tmp_path / "t.parquet")
    assert "--data.columns label=species" in refusal(f"parquet:{tmp_path}")
    np.savez(tmp_path / "v.npz", features=np.ones((4, 2), "f4"), y=np.arange(4))
    assert "--data.columns label=y" in refusal(f"vectors:{tmp_path}/v.npz")


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.replace("/", "\\"),
        lambda path: path.replace("é", "%C3%A9"),
        lambda path: unicodedata.normalize("NFD", path),
    ],
)
def test_paths_as_other_programs_write_them_lead_to_the_file(tmp_path, change):
    """Backslashes of Windows, percent signs of URLs, accents of macOS."""
    write_images(tmp_path, ["été/b.png"])
    source = write_table(tmp_path, f"path,label\n{change('été/b.png')},cat\n")
    assert os.path.samefile(read(source).images[0], tmp_path / "été/b.png")


def test_a_file_whose_name_has_a_backslash_is_found_as_it_is(tmp_path):
    write_images(tmp_path, ["a\\b.png", "a/b.png"])
    rows = read(write_table(tmp_path, "path,label\na\\b.png,cat\n"))
    assert rows.images[0].endswith("a\\b.png")


def test_other_spellings_stay_inside_the_folder(tmp_path):
    write_images(tmp_path, ["secret.png", "data/a.png"])
    for path in ("..\\secret.png", "..%2Fsecret.png", f"file://{tmp_path}/secret.png"):
        source = write_table(tmp_path / "data", f"path,label\na.png,x\n{path},cat\n")
        rows = failure(read, source, may_pass=True)
        assert rows is None or "outside the folder" in rows or "is a URL" in rows
        if rows is None:
            assert not os.path.exists(read(source).images[1])


def test_a_file_url_inside_the_folder_is_a_path(folder):
    source = write_table(folder, f"path,label\nfile://{folder}/sub/b.png,cat\n")
    assert os.path.samefile(read(source).images[0], folder / "sub/b.png")


def test_an_image_folder_and_an_ending_complete_the_paths(folder):
    (folder / "tables").mkdir()
    source = write_table(folder / "tables", "path,label\nb,cat\nc.PNG,dog\n")
    line = refusal(source)
    assert "none of its 2 images" in line
    assert "--data.image-folder" in line and "--data.image-suffix" in line
    rows = read(source, image_folder=str(folder / "sub"), image_suffix=".png")
    assert rows.images[0] == os.path.realpath(folder / "sub/b.png")
    assert os.path.basename(rows.images[1]) == "c.PNG"
    with pytest.raises(ValueError, match="image_suffix must begin with a dot"):
        DataConfig(image_suffix="png")


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("https://host/a.png", ("is a URL", "download")),
        ("s3://bucket/dir/a.png", ("is a URL", "--data.image-folder s3://bucket/dir")),
        ("/data/upload/3/ab-a.png", ("Label Studio", "download")),
        ("/data/local-files/?d=a.png", ("Label Studio", "download")),
        ("/elsewhere/a.png", ("is outside the folder", "--data.image-folder")),
    ],
)
def test_a_path_that_leads_elsewhere_is_refused_with_a_way_that_fits(
    folder, path, parts
):
    line = refusal(write_table(folder, f"path,label\na.png,cat\n{path},dog\n"))
    assert all(part in line for part in parts) and "(line 3)" in line
    assert "move it there" not in line or path.startswith("/elsewhere")


def test_paths_of_a_windows_computer_are_named(folder):
    line = refusal(write_table(folder, "path,label\nC:\\photos\\a.png,cat\n"))
    assert "Windows" in line and "relative" in line


def test_uris_below_the_folder_of_images_are_read(tmp_path, monkeypatch):
    remote = pa.fs.SubTreeFileSystem(str(tmp_path), pa.fs.LocalFileSystem())
    monkeypatch.setattr(filesystem, "_connect", lambda host, options: (remote, ""))
    write_images(tmp_path / "pets", ["cat/a b.png"])
    text = "path,label\ns3://bucket/pets/cat/a b.png,cat\n"
    write_table(tmp_path / "pets", text)
    rows = read("table:s3://bucket/pets/t.csv")
    assert rows.images[0] == "s3://bucket/pets/cat/a%20b.png"
    local = write_table(tmp_path, text)
    assert read(local, image_folder="s3://bucket/pets").images[0] == rows.images[0]


def test_unreadable_rows_of_a_table_have_their_path(folder):
    source = write_table(folder, csv_text().replace("sub/b", "sub/gone"))
    config = Config(data=DataConfig(source=source, num_novel=1, max_bad_fraction=1))
    task = make_task(read_rows(config.data), config.data)
    gone = os.path.realpath(folder / "sub/gone.png")
    for seconds in (0, 60):
        messages = [problem.message for problem in check(task, config, seconds)]
        assert any(f"row-1 ({gone})" in message for message in messages)
    _, reasons = decode_many(task.rows.images, 8)
    storage = filesystem.Storage(str(folder / "run"))
    check_bad(task.rows.ids, reasons, 1, storage, task.rows.images)
    entry = json.loads(storage.read("bad_samples.jsonl"))
    assert (entry["id"], entry["uri"]) == ("row-1", gone)
    assert read_facts(storage).bad == [(f"row-1 ({gone})", "No such file or directory")]


def test_rows_of_folders_keep_their_short_names(tmp_path):
    write_images(tmp_path, ["cat/a.png", "dog/b.png"])
    (tmp_path / "dog/b.png").write_bytes(b"")
    rows = read(str(tmp_path))
    (entry,) = check_bad(rows.ids, [None, "empty"], 1, images=rows.images)
    assert (
        entry["uri"] == str(tmp_path / "dog/b.png") and name_bad(entry) == "dog/b.png"
    )


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("e.csv", ("vectors: reads .parquet, .h5ad, .npy", "np.loadtxt")),
        ("e.h5", ("vectors: reads", "HDF5")),
        ("e.safetensors", ("vectors: reads", "np.save")),
    ],
)
def test_vectors_in_other_files_are_refused_with_the_formats_that_are_read(
    tmp_path, name, parts
):
    (tmp_path / name).write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(500))
    line = refusal(f"vectors:{tmp_path / name}")
    assert all(part in line for part in parts)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("v.npy", "--data vectors:"),
        ("v.npz", "--data vectors:"),
        ("e.pt", "--data vectors:"),
        ("cells.h5ad", "--data vectors:"),
        ("t.xlsx", "CSV UTF-8"),
        ("photos.zip", "unpack it"),
        ("shard.tar.gz", "unpack it"),
        ("t.csv.gz", "unpack it"),
        ("instances.json", "columns path and label"),
    ],
)
def test_a_file_of_another_format_is_refused_with_the_way_to_read_it(
    tmp_path, name, part
):
    (tmp_path / name).write_bytes(bytes(100))
    assert part in refusal(str(tmp_path / name))


def test_arrays_of_an_npz_file_are_embeddings_and_columns(tmp_path):
    values = np.random.default_rng(0).normal(size=(6, 3)).astype("f4")
    label = np.array(["a", "", "b", "b", "", "a"])
    arrays = {
        "label": label,
        "features": values,
        "id": np.arange(6),
        "scale": np.ones(1),
    }
    np.savez(tmp_path / "v.npz", **arrays)
    rows = read(f"vectors:{tmp_path}/v.npz")
    assert (
        rows.labels.to_pylist() == ["a", None, "b", "b", None, "a"]
        and str(rows.ids[5]) == "5"
    )
    assert np.array_equal(rows.images[5], values[5])
    np.savez(tmp_path / "v.npz", features=values, y=np.array([0, 1, -1, 0, 1, 1]))
    rows = read(f"vectors:{tmp_path}/v.npz", columns="label=y")
    assert rows.labels.to_pylist() == ["0", "1", None, "0", "1", "1"]


def test_embeddings_that_could_be_one_of_two_arrays_are_asked_for(tmp_path):
    values = np.ones((6, 3), "f4")
    np.savez(tmp_path / "v.npz", train=values, test=values)
    line = refusal(f"vectors:{tmp_path}/v.npz")
    assert "train (6, 3)" in line and "--data.columns embedding=train" in line
    np.savez(tmp_path / "v.npz", embedding=values, label=np.array(["a"]))
    assert "array label has the shape (1,)" in refusal(f"vectors:{tmp_path}/v.npz")
    np.savez(tmp_path / "v.npz", embedding=values, label=np.array(["a", None], object))
    assert ".astype(str)" in refusal(f"vectors:{tmp_path}/v.npz")
    np.savez(tmp_path / "v.npz", embedding=values, label=np.array(["a"] * 6))
    write_table(tmp_path, "label\n" + "a\n" * 6, "v.csv")
    assert "both hold label" in refusal(f"vectors:{tmp_path}/v.npz")


def test_arrays_without_labels_name_the_file_that_may_hold_them(tmp_path):
    np.save(tmp_path / "v.npy", np.ones((6, 3), "f4"))
    assert "v.csv" in refusal(f"vectors:{tmp_path}/v.npy")


def test_parquet_that_only_names_files_reads_them_or_names_the_option(folder):
    """Hugging Face's struct of bytes and path, without bytes."""
    paths = [{"bytes": None, "path": str(folder / name)} for name in NAMES]
    (folder / "export").mkdir()
    pq.write_table(
        hf_table(paths, [0, 0, None], ["x"], "image"), folder / "export/t.parquet"
    )
    for read_it in (read, lambda source: read_rows(DataConfig(source=source), True)):
        line = failure(read_it, f"parquet:{folder}/export")
        assert "outside the folder" in line and "--data.image-folder" in line
    assert "store the bytes" in refusal(f"parquet:{folder}/export")
    rows = read(f"parquet:{folder}/export", image_folder=str(folder))
    assert rows.labels.to_pylist() == ["x", "x", None]
    assert rows.images[1] == os.path.realpath(folder / "sub/b.png")


@pytest.mark.parametrize("kind", ["", "parquet:", "folder:"])
def test_a_folder_of_arrow_files_names_how_to_write_parquet(tmp_path, kind):
    for name in ("data-00000-of-00001.arrow", "dataset_info.json", "state.json"):
        (tmp_path / name).write_bytes(b"{}")
    assert "Dataset.to_parquet" in refusal(f"{kind}{tmp_path}")


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """A folder 'data' whose images are links to files outside it, in the way of
    caches.
    """
    write_images(tmp_path / "store", ["0.png", "1.png"])
    for name, target in (("cat/a.png", "0.png"), ("dog/b.png", "1.png")):
        link = tmp_path / "data" / name
        link.parent.mkdir(parents=True)
        os.symlink(os.path.relpath(tmp_path / "store" / target, link.parent), link)
    return tmp_path


def test_links_out_of_a_folder_are_followed_on_request(linked):
    write_images(linked, ["new/c.png"])
    assert "--data.follow-links" in refusal(f"{linked}/data")
    rows = read(f"{linked}/data", follow_links=True)
    assert rows.labels.to_pylist() == ["cat", "dog"]
    assert (
        decode_many(rows.images, 8)[0][1].numpy() == pixels(1).transpose(2, 0, 1)
    ).all()
    both = {"labeled": f"{linked}/data", "unlabeled": f"{linked}/new"}
    assert "--data.follow-links" in failure(read_rows, DataConfig(**both))
    assert len(read_rows(DataConfig(**both, follow_links=True))) == 3
    assert "--data.follow-links" in failure(
        read_rows, DataConfig(source=f"{linked}/data"), True
    )
    followed = DataConfig(source=f"{linked}/data", follow_links=True)
    assert len(read_rows(followed, True)) == 2


def test_links_of_tables_and_parquet_are_followed_on_request(linked):
    source = write_table(linked / "data", "path,label\ncat/a.png,cat\ndog/b.png,dog\n")
    line = refusal(source)
    assert "it is a link" in line and "--data.follow-links" in line
    rows = read(source, follow_links=True)
    assert decode_many(rows.images, 8)[1] == [None, None]
    escape = write_table(linked / "data", "path,label\n../store/0.png,cat\n", "u.csv")
    assert "outside the folder" in failure(read, escape, follow_links=True)
    pq.write_table(
        pa.table({"image": [encoded(pixels(0))], "label": ["a"]}), linked / "t.parquet"
    )
    (linked / "shards").mkdir()
    os.symlink(linked / "t.parquet", linked / "shards/t.parquet")
    assert "--data.follow-links" in refusal(f"parquet:{linked}/shards")
    assert len(read(f"parquet:{linked}/shards", follow_links=True)) == 1


@pytest.mark.parametrize("target", ["gone.png", "z.png"])
def test_a_link_to_nothing_is_an_unreadable_image(tmp_path, target):
    """A file that is gone, and a link to itself."""
    write_images(tmp_path, ["cat/a.png", "dog/b.png"])
    os.symlink(target, tmp_path / "cat/z.png")
    for rows in (read(str(tmp_path)), read(str(tmp_path), follow_links=True)):
        assert rows.ids.to_pylist() == ["cat/a.png", "cat/z.png", "dog/b.png"]
        assert [reason is None for reason in decode_many(rows.images, 8)[1]] == [
            True,
            False,
            True,
        ]


def test_loops_of_followed_links_end(tmp_path):
    write_images(tmp_path, ["data/cat/a.png", "data/dog/b.png"])
    os.symlink("..", tmp_path / "data/cat/up")
    os.symlink(tmp_path, tmp_path / "data/dog/top")
    rows = read(str(tmp_path / "data"), follow_links=True)
    assert sorted(rows.ids.to_pylist()) == ["cat/a.png", "dog/b.png"]
