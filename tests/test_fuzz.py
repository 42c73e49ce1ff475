"""Damaged files of every kind are read, or refused in one line that a user understands.

Hypothesis damages small valid files and shrinks what fails. A finding is an exception
of another type, a message of several lines, a crash, an input that takes more than ten
seconds or two gibibytes, or two reads that disagree. Put a repaired finding into
``tests/corpus``: the name of a file there begins with its kind.

The slow lane tries the same inputs every time. Before a release, try more, and others::

    python -m pytest -m slow tests/test_fuzz.py --hypothesis-profile long
"""

import hashlib
import io
import os
import re
import resource
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.uno.data.builders import encoded, hf_table, pixels
from tests.uno.models import write_model
from tests.uno.small_run import small_config
from uno.config import Config, dump_yaml, load_yaml, override
from uno.data.decode import BadImage, decode, decode_rgb, inspect_image, read_header
from uno.data.files import Storage
from uno.data.rows import ReadOptions
from uno.data.tables import read_parquet, read_table
from uno.data.tar import read_tar
from uno.encoders.weights import read_weights
from uno.errors import UnoError
from uno.report.facts import read_facts
from uno.results.classes import OutputClass, apply_edits, template
from uno.results.infer import load_classifier
from uno.runs.checkpoint import (
    Checkpoint,
    checkpoint_name,
    load_newest,
    save_checkpoint,
)
from uno.runs.directory import begin_run, delete_leftovers

CORPUS = Path(__file__).parent / "corpus"
MEMORY_BYTES = 2 * 2**30
DEADLINE_MS = 10_000
IMAGES_ONLY = ReadOptions(images_only=True)
CLASSES = [
    OutputClass(i, f"name {i}", "known" if i < 3 else "novel", i) for i in range(6)
]
HOSTILE = [  # what parsers of numbers, YAML, JSON, CSV and paths stumble over
    *(b"*a", b"&a ", b"<<: ", b"!!python/object/apply:os.system [id]", b"1:59:59"),
    *(b"[" * 500, b'{"a":' * 500, b"1e400", b"NaN", b"null", b"-1", b"9" * 300),
    *(b"\\ud800", b"\xff\xfe", b"\x00", b'"', b"\n", b"\r", b",", b": ", b"- "),
    *(b"../../x", b"/dev/zero", b"{}", b"[]", b"true", b"2001-13-45", b"x" * 2000),
    *(b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"\x00\x00\x00\x80", b"\x50\xc3"),
]


@contextmanager
def reading_or_refusing() -> Iterator[None]:
    """Accept an error only if it can be shown to a user as one line."""
    try:
        yield
    except (UnoError, BadImage) as error:
        text = str(error)
        assert 0 < len(text.encode()) < 2000
        assert "\n" not in text and "MemoryError" not in text


def read_image(folder: Path, data: bytes) -> None:
    (folder / "image").write_bytes(data)
    assert read_header(data) == read_header(str(folder / "image"))
    inspect_image(data)
    assert np.array_equal(decode(data, 16), decode(data, 16))
    decode_rgb(data, 16)


def decode_each(images: Any) -> None:
    for image in images.read_images(np.arange(len(images))):
        with reading_or_refusing():
            decode(image, 8)


def read_parquet_file(folder: Path, data: bytes) -> None:
    path = folder / "train-0.parquet"
    path.write_bytes(data)
    read_parquet(str(path))
    rows = read_parquet(str(path), IMAGES_ONLY)
    for images in rows.images.take(np.arange(min(3, len(rows)))).split(3):
        decode_each(images)


def read_shard(folder: Path, data: bytes) -> None:
    path = folder / "train-0.tar"
    path.write_bytes(data)
    bare = read_tar(str(path), IMAGES_ONLY)
    decode_each(bare.images)
    assert read_tar(str(path)).ids == bare.ids


def read_shard_with_valid_checksums(folder: Path, data: bytes) -> None:
    """Repair the checksums of the headers, so that a reader sees what is in them."""
    summed = bytearray(data)
    for start in range(0, len(data) - tarfile.BLOCKSIZE + 1, tarfile.BLOCKSIZE):
        block = data[start : start + tarfile.BLOCKSIZE]
        if block[257:262] == b"ustar":
            total = tarfile.calc_chksums(block)[0]
            summed[start + 148 : start + 156] = b"%06o\0 " % total
    read_shard(folder, bytes(summed))


def read_text_table(name: str, folder: Path, data: bytes) -> None:
    (folder / "a.png").write_bytes(encoded(pixels(0)))
    (folder / name).write_bytes(data)
    for options in (ReadOptions(), IMAGES_ONLY):
        rows = read_table(str(folder / name), options)
        with reading_or_refusing():
            decode(rows.images[0], 8)


def read_weights_file(suffix: str, folder: Path, data: bytes) -> None:
    (folder / f"weights{suffix}").write_bytes(data)
    read_weights(str(folder / f"weights{suffix}"))


def read_yaml(folder: Path, data: bytes) -> None:
    (folder / "config.yaml").write_bytes(data)
    override(Config(), load_yaml(folder / "config.yaml"))


def read_classes(folder: Path, data: bytes) -> None:
    apply_edits(data, "classes.yaml", CLASSES, "0123456789abcdef")


def write_run(folder: Path, changed: bytes) -> Storage:
    """Write a small run. ``changed`` is the name of one of its files, a line break and
    the content that this file gets.
    """
    name, _, data = changed.partition(b"\n")
    for relative, content in run_files().items():
        path = folder / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data if relative.encode() == name else content)
    return Storage(str(folder))


def read_run(folder: Path, changed: bytes) -> None:
    storage = write_run(folder, changed)
    read_facts(storage)
    with reading_or_refusing():
        begin_run(small_config(), storage, "f" * 64)
    delete_leftovers(storage)


def read_checkpoint(folder: Path, changed: bytes) -> None:
    load_newest(write_run(folder, changed), "discover")


def read_checkpoint_with_valid_checksum(folder: Path, changed: bytes) -> None:
    storage, name = write_run(folder, changed), checkpoint_name("discover", 6)
    content = storage.read(name)
    found = re.search(rb'"sha256": "([^"]*)"', content)
    if found is not None:
        blank = content.replace(found[0], b'"sha256": "%s"' % (b"0" * 64))
        digest = hashlib.sha256(blank).hexdigest().encode()
        storage.write(name, content.replace(found[0], b'"sha256": "%s"' % digest))
    load_newest(storage, "discover")


def read_model(folder: Path, changed: bytes) -> None:
    load_classifier(write_run(folder, changed))


def pictures(
    form: str, modes: tuple[str, ...] = ("RGB", "P", "L", "1"), **options: Any
) -> list[bytes]:
    noise = Image.fromarray(pixels(0, 24, 20))
    images = [noise.convert(mode) for mode in modes] + [Image.new("RGB", (60, 40))]
    return [encoded(image, form, **options) for image in images]


def parquet_files() -> list[bytes]:
    images = [{"bytes": encoded(pixels(i)), "path": None} for i in range(6)]
    table = hf_table(images, [0, 1, None, 0, 1, None], ["cat", "dog"])
    files = []
    for codec in ("none", "snappy", "zstd"):
        file = io.BytesIO()
        pq.write_table(table, file, compression=codec, row_group_size=3)
        files.append(file.getvalue())
    return files


def shards() -> list[bytes]:
    """Return shards in every format of headers, with long names and a link."""
    image, far = encoded(pixels(0)), "folder/" * 20 + "\u00e9"
    members = {
        "a.png": image,
        "a.cls": b"cat",
        f"{far}.jpg": image,
        f"{far}.json": b'{"label": 3}',
        "b.png": image,
        "b.json": b'{"x": [], "class": null}',
        "c.png": b"",
    }
    files = []
    for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w", format=form) as archive:
            for name, content in members.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                member.type = tarfile.REGTYPE if content else tarfile.SYMTYPE
                archive.addfile(member, io.BytesIO(content))
        files.append(file.getvalue())
    return files


def csv_files() -> list[bytes]:
    rows = b"0,a.png,,train,dog\n1,a.png,cat,train,dog\n2,a.png,,train,dog\n"
    quoted = b'\xef\xbb\xbfpath,label\r\na.png,"x\ny"\r\n'
    return [b"id,path,label,split,eval_label\n" + rows, b"path\na.png\n", quoted]


def jsonl_files() -> list[bytes]:
    one = b'{"id": 0, "path": "a.png", "label": null, "split": "train"}\n'
    two = b'{"id": 1, "path": "a.png", "label": "cat"}\n'
    return [one + two, b'{"image": "a.png"}\n\n{"image": "a.png", "label": "\\u00e9"}']


def tensors() -> dict[str, torch.Tensor]:
    convolution = torch.ones(4, 3, 3, 3)
    return {"conv1.weight": convolution, "bn1.num_batches_tracked": torch.tensor(3)}


def pickled_weights() -> list[bytes]:
    file = io.BytesIO()
    torch.save(tensors(), file)
    return [file.getvalue()]


@cache
def run_files() -> dict[str, bytes]:
    """Return the files of a small run with a checkpoint, a lock and a model."""
    with tempfile.TemporaryDirectory() as name:
        folder, config = Path(name), small_config()
        storage = Storage(name)
        begin_run(config, storage, "f" * 64)
        state = Checkpoint(6, {"model/a": torch.ones(3)}, dump_yaml(config))
        save_checkpoint(storage, "discover", state)
        write_model(folder)
        line = b'{"phase": "discover", "step": 6, "loss": 1.5, "head_losses": [1, 2]}\n'
        storage.write("metrics.jsonl", line * 3)
        storage.write("metrics.json", b'{"train/novel/task_aware/acc/best": 0.5}')
        lock = b'{"host": "h", "pid": 1, "token": "t", "renewals": 2}'
        storage.write("lock.json", lock)
        storage.write("bad_samples.jsonl", b'{"id": "a", "reason": "broken"}\n')
        paths = [path for path in folder.rglob("*") if path.is_file()]
        return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def files_of_run(*prefixes: str) -> list[bytes]:
    """Return what :func:`write_run` takes, for the files of these prefixes."""
    files = run_files().items()
    return [f"{n}\n".encode() + data for n, data in files if n.startswith(prefixes)]


class Kind(NamedTuple):
    """A kind of file: valid examples, and how one is read in an empty folder."""

    examples: Callable[[], list[bytes]]
    read: Callable[[Path, bytes], None]


KINDS = {
    "jpeg": Kind(lambda: pictures("JPEG", ("RGB", "L", "CMYK")), read_image),
    "jpeg-progressive": Kind(
        lambda: pictures("JPEG", ("RGB", "L", "CMYK"), progressive=True), read_image
    ),
    "mpo": Kind(lambda: pictures("MPO", ("RGB",), save_all=True), read_image),
    "png": Kind(lambda: pictures("PNG"), read_image),
    "webp": Kind(lambda: pictures("WEBP", ("RGB", "RGBA")), read_image),
    "gif": Kind(lambda: pictures("GIF", save_all=True), read_image),
    "bmp": Kind(
        lambda: (
            pictures("BMP", ("RGB", "P", "1"))
            # Pillow reads BMP's own compression and does not write it
            + [(CORPUS / name).read_bytes() for name in ("bmp_rle8", "bmp_rle4")]
        ),
        read_image,
    ),
    "tiff": Kind(
        lambda: pictures("TIFF") + pictures("TIFF", compression="tiff_lzw"), read_image
    ),
    "parquet": Kind(parquet_files, read_parquet_file),
    "tar": Kind(shards, read_shard),
    "tar-summed": Kind(shards, read_shard_with_valid_checksums),
    "csv": Kind(csv_files, partial(read_text_table, "t.csv")),
    "jsonl": Kind(jsonl_files, partial(read_text_table, "t.jsonl")),
    "safetensors": Kind(
        lambda: [safetensors.torch.save(tensors(), {"a": "b"})],
        partial(read_weights_file, ".safetensors"),
    ),
    "pt": Kind(pickled_weights, partial(read_weights_file, ".pt")),
    "yaml": Kind(
        lambda: [dump_yaml(small_config()).encode(), b"objective: {epsilon: 0.1}\n"],
        read_yaml,
    ),
    "classes.yaml": Kind(
        lambda: [template(CLASSES, "0123456789abcdef").encode()], read_classes
    ),
    "checkpoint": Kind(partial(files_of_run, "checkpoints/"), read_checkpoint),
    "checkpoint-summed": Kind(
        partial(files_of_run, "checkpoints/"), read_checkpoint_with_valid_checksum
    ),
    "run": Kind(
        partial(files_of_run, "config", "environment", "metrics", "lock", "bad"),
        read_run,
    ),
    "model": Kind(partial(files_of_run, "model/"), read_model),
}
OF_RUN = ("checkpoint", "checkpoint-summed", "run", "model")


@st.composite
def damaged_files(draw: st.DrawFn, files: list[bytes], names_a_file: bool) -> bytes:
    """Draw a file and change up to four places of it, but not a line that names it."""
    content = bytearray(draw(st.sampled_from(files)))
    first = content.index(b"\n") + 1 if names_a_file else 0
    for _ in range(draw(st.integers(1, 4))):
        ends = st.sampled_from((min(first + 64, len(content)), len(content)))
        start = draw(st.integers(first, draw(ends)))
        length = draw(st.sampled_from((0, 1, 1, 2, 4, 30, len(content))))
        piece = bytes(content[start : start + 30])
        new = st.one_of(st.binary(max_size=8), st.sampled_from(HOSTILE), st.just(piece))
        content[start : start + length] = draw(new) * draw(st.sampled_from((1, 1, 50)))
    return bytes(content)


def read_safely(kind: str, data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder, reading_or_refusing():
        KINDS[kind].read(Path(folder), data)


@pytest.fixture
def memory_limit() -> Iterator[None]:
    """Let this process take no more than ``MEMORY_BYTES`` in addition."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("kind", KINDS)
def test_an_undamaged_file_is_read(kind, tmp_path):
    for number, data in enumerate(KINDS[kind].examples()):
        folder = tmp_path / str(number)
        folder.mkdir()
        KINDS[kind].read(folder, data)


PAST = sorted(CORPUS.iterdir())


@pytest.mark.timeout(10)
@pytest.mark.usefixtures("memory_limit")
@pytest.mark.parametrize("path", PAST, ids=lambda path: path.name)
def test_a_past_finding_stays_repaired(path):
    read_safely(path.name.partition("_")[0], path.read_bytes())


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("memory_limit")
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_read_or_refused(kind):
    files = KINDS[kind].examples()

    @settings(deadline=DEADLINE_MS)
    @given(damaged_files(files, names_a_file=kind in OF_RUN))
    def check(data: bytes) -> None:
        read_safely(kind, data)

    check()
