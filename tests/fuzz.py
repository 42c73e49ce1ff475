"""Hostile and clumsy inputs, seeded and counted: a reader takes them or refuses them in
one line.

    python -m tests.fuzz --images 10000 --others 2000 --seed 0
    python -m tests.fuzz --kinds bmp yaml --seconds 30              # as many as fit

A finding is a signal, an exception that is no UnoError or has several lines, more than
10 s, more than 2 GiB, or two reads that disagree. Inputs run in child processes; what
ends one is kept in ``--keep DIR`` and belongs into ``tests/corpus`` once it is
repaired: those files come first in every run.
"""

import argparse
import faulthandler
import hashlib
import io
import json
import multiprocessing
import os
import random
import re
import resource
import signal
import struct
import sys
import tarfile
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import safetensors.torch
import torch
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
from uno.results.classes import OutputClass, read_edits, template
from uno.results.infer import load_classifier
from uno.runs.checkpoint import (
    Checkpoint,
    checkpoint_name,
    load_newest,
    save_checkpoint,
)
from uno.runs.directory import begin_run, delete_leftovers

CORPUS = Path(__file__).parent / "corpus"
SLOW_S, MEMORY_BYTES, BATCH = 10, 2 * 2**30, 100
FORK = multiprocessing.get_context("fork")
NUMBERS = (
    0,
    1,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0x8000,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
    50_000,
    9_999,
)
WORDS = (
    b"*a",
    b"&a ",
    b"<<: ",
    b"!!python/object/apply:os.system [id]",
    b"[" * 500,
    b'{"a":' * 500,
    b"1e400",
    b"NaN",
    b"null",
    b"-1",
    b"\\ud800",
    b"\xff\xfe",
    b"\x00",
    b'"',
    b"\n",
    b"9" * 300,
    b"../../x",
    b"{}",
    b"[]",
    b"true",
    b"1:59:59",
    b"2001-13-45",
    b"\xed\xa0\x80",
    b"/dev/zero",
    b"\r",
    b",",
    b": ",
    b"- ",
    b"x" * 2000,
)


class Kind(NamedTuple):
    """How inputs of a kind are made, and what reads one: a scratch folder and the
    bytes.
    """

    seeds: Callable[[], list[bytes]]
    read: Callable[[Path, bytes], object]


def mutated(data: bytes, other: bytes, chance: random.Random) -> bytes:
    """One to six changes of ``data``: bytes, numbers, words, cuts, copies, and
    pieces of ``other``.
    """
    out = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 3, 6))):
        at, length = chance.randrange(len(out) + 1), chance.randrange(1, 33)
        if chance.random() < 0.2:  # headers stand in front
            at = min(at, chance.randrange(64))
        form, start = (
            chance.choice(("<B", "<H", "<I", ">H", ">I")),
            chance.randrange(len(other) + 1),
        )
        mask = 256 ** struct.calcsize(form) - 1
        size, new = chance.choice(
            (  # so many bytes give way to these
                (
                    1,
                    bytes(byte ^ 1 << chance.randrange(8) for byte in out[at : at + 1]),
                ),
                (1, chance.randbytes(1)),
                (
                    struct.calcsize(form),
                    struct.pack(form, chance.choice(NUMBERS) & mask),
                ),
                (0, chance.choice(WORDS)),
                (length, b""),
                (0, out[at : at + length] * chance.choice((1, 2, 50))),
                (length, other[start : start + length]),
                (len(out) if chance.random() < 0.3 else 0, b""),
            )
        )
        out[at : at + size] = new
    return bytes(out)


def _read_image(folder: Path, data: bytes) -> None:
    (folder / "image").write_bytes(data)
    assert read_header(data) == read_header(str(folder / "image"))
    inspect_image(data)
    first = decode(data, 16)
    assert first.shape == (3, 16, 16) and np.array_equal(first, decode(data, 16)), (
        "two reads disagree"
    )
    decode_rgb(data, 16)


FLAT, COLORS = Image.new("RGB", (60, 40), "red"), ("RGB", "L", "CMYK")


def _pictures(
    format: str, modes: tuple[str, ...] = ("RGB", "P", "L", "1"), **options: object
) -> list[bytes]:
    noise = Image.fromarray(pixels(0, 24, 20))
    return [
        encoded(image, format, **options)
        for image in (*map(noise.convert, modes), FLAT)
    ]


def _rle_pictures() -> list[bytes]:
    """BMP's own compression, 8 and 4 bits, which Pillow reads and does not write."""
    return [(CORPUS / name).read_bytes() for name in ("bmp_rle8", "bmp_rle4")]


def _read_parquet(folder: Path, data: bytes) -> None:
    (folder / "train-0.parquet").write_bytes(data)
    rows = read_parquet(str(folder / "train-0.parquet"))
    for row in range(min(3, len(rows))):
        _or_refused(decode, rows.images[row], 8)
    rows = read_parquet(str(folder / "train-0.parquet"), ReadOptions(images_only=True))
    for images in rows.images.take(np.arange(min(3, len(rows)))).split(3):
        for image in images.read_images(np.arange(len(images))):
            _or_refused(decode, image, 8)


def _parquet() -> list[bytes]:
    images = [{"bytes": encoded(pixels(i)), "path": None} for i in range(6)]
    table, found = hf_table(images, [0, 1, None, 0, 1, None], ["cat", "dog"]), []
    for codec in ("none", "snappy", "zstd"):
        file = io.BytesIO()
        pq.write_table(
            table,
            file,
            compression=codec,
            row_group_size=3,
            write_page_checksum=codec == "none",
        )
        found.append(file.getvalue())
    return found


def _tar() -> list[bytes]:
    """Shards in every format of headers: long names, classes as text and JSON, a
    link, what is not read.
    """
    image, far, found = encoded(pixels(0)), "folder/" * 20 + "\u00e9", list[bytes]()
    members = {
        "a.png": image,
        "a.cls": b"cat",
        f"{far}.jpg": encoded(FLAT, "JPEG"),
        f"{far}.json": b'{"label": 3}',
        "b.png": image,
        "b.json": b'{"x": [], "class": null}',
        "b.txt": b"no label",
        "c.png": b"",
    }
    for format in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        with tarfile.open(
            fileobj=(file := io.BytesIO()), mode="w", format=format
        ) as archive:
            for name, content in members.items():
                info = tarfile.TarInfo(name)
                info.size, info.type = (
                    len(content),
                    tarfile.REGTYPE if content else tarfile.SYMTYPE,
                )
                archive.addfile(info, io.BytesIO(content))
            end = archive.offset + 2 * tarfile.BLOCKSIZE
        found.append(file.getvalue()[:end])
    return found


def _read_tar(folder: Path, data: bytes) -> None:
    """As it is, and once more with sums that vouch for the damage of its headers."""
    summed = bytearray(data)
    for start in range(0, len(data) - tarfile.BLOCKSIZE + 1, tarfile.BLOCKSIZE):
        block = data[start : start + tarfile.BLOCKSIZE]
        if block[257:262] == b"ustar":
            summed[start + 148 : start + 156] = (
                b"%06o\0 " % tarfile.calc_chksums(block)[0]
            )
    _or_refused(_read_shard, folder / "train-0.tar", data)
    _read_shard(folder / "train-0.tar", bytes(summed))


def _read_shard(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    bare = read_tar(str(path), ReadOptions(images_only=True))
    for image in bare.images.read_images(np.arange(len(bare))):
        _or_refused(decode, image, 8)
    rows = read_tar(str(path))
    assert rows.ids == bare.ids and rows.fingerprint, "two reads disagree"


def _read_text_table(name: str) -> Callable[[Path, bytes], None]:
    def read(folder: Path, data: bytes) -> None:
        (folder / name).write_bytes(data)
        if not (folder / "a.png").exists():
            (folder / "a.png").write_bytes(encoded(pixels(0)))
        for images_only in (False, True):
            rows = read_table(str(folder / name), ReadOptions(images_only=images_only))
            _or_refused(decode, rows.images[0], 8)

    return read


CSV = [
    b"id,path,label,split,eval_label\n0,a.png,,train,dog\n1,a.png,cat,train,dog\n2,a.png,,train,dog\n",
    b"path\na.png\n",
    b'\xef\xbb\xbfpath,label\r\na.png,"x\ny"\r\n',
]
JSONL = [
    (
        b'{"id": 0, "path": "a.png", "label": null, "split": "train"}\n{"id": 1,'
        b' "path": "a.png", "label": "cat"}\n{"id": 2, "path": "a.png", "label": 3}'
    ),
    b'{"image": "a.png"}\n\n{"image": "a.png", "label": "\\u00e9"}',
]


def _read_weights(folder: Path, data: bytes) -> None:
    for suffix in (".safetensors", ".pt"):
        path = folder / f"w{suffix}"
        path.write_bytes(data)
        _or_refused(read_weights, str(path))


def _weights() -> list[bytes]:
    tensors = {
        "conv1.weight": torch.ones(4, 3, 3, 3),
        "bn1.num_batches_tracked": torch.tensor(3),
    }
    torch.save(tensors, file := io.BytesIO())
    return [safetensors.torch.save(tensors, {"a": "b"}), file.getvalue()]


def _read_yaml(folder: Path, data: bytes) -> None:
    (folder / "c.yaml").write_bytes(data)
    override(Config(), load_yaml(folder / "c.yaml"))


CLASSES = [
    OutputClass(i, f"name {i}", "known" if i < 3 else "novel", i) for i in range(6)
]


@cache
def _run_files() -> dict[str, bytes]:
    """A small run: its configuration, environment, journal, results, a lock, a
    checkpoint, a model.
    """
    with tempfile.TemporaryDirectory() as folder:
        config, storage = small_config(), Storage(folder)
        begin_run(config, storage, "f" * 64)
        save_checkpoint(
            storage,
            "discover",
            Checkpoint(6, {"model/a": torch.ones(3)}, dump_yaml(config)),
        )
        write_model(Path(folder))
        storage.write(
            "metrics.jsonl",
            b'{"phase": "discover", "step": 6, "loss": 1.5, "head_losses": [1, 2]}\n'
            * 3,
        )
        storage.write("metrics.json", b'{"train/novel/task_aware/acc/best": 0.5}')
        storage.write(
            "lock.json", b'{"host": "h", "pid": 1, "token": "t", "renewals": 2}'
        )
        storage.write("bad_samples.jsonl", b'{"id": "a", "reason": "broken"}\n')
        paths = [path for path in Path(folder).rglob("*") if path.is_file()]
        return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def _write_run(folder: Path, changed: bytes) -> Storage:
    """The small run with a file replaced: its name stands before the first line
    break.
    """
    name, _, data = changed.partition(b"\n")
    for relative, content in _run_files().items():
        (folder / relative).parent.mkdir(parents=True, exist_ok=True)
        (folder / relative).write_bytes(
            data if relative == name.decode("latin1") else content
        )
    return Storage(str(folder))


def _of_run(*parts: str) -> Callable[[], list[bytes]]:
    return lambda: [
        f"{n}\n".encode() + data
        for n, data in _run_files().items()
        if n.startswith(parts)
    ]


def _read_run(folder: Path, data: bytes) -> None:
    storage = _write_run(folder, data)
    read_facts(storage)
    _or_refused(begin_run, small_config(), storage, "f" * 64)
    delete_leftovers(storage)


def _read_checkpoint(folder: Path, data: bytes) -> None:
    """As it is, and once more with a sum that vouches for the damage, where its sum
    can be found.
    """
    storage, name = _write_run(folder, data), checkpoint_name("discover", 6)
    _or_refused(load_newest, storage, "discover")
    found = re.search(rb'"sha256": "([^"]*)"', content := storage.read(name))
    if found is not None:
        blank = content.replace(found[0], b'"sha256": "%s"' % (b"0" * 64))
        digest = hashlib.sha256(blank).hexdigest().encode()
        storage.write(name, content.replace(found[0], b'"sha256": "%s"' % digest))
    load_newest(storage, "discover")


def _read_model(folder: Path, data: bytes) -> None:
    load_classifier(_write_run(folder, data))


IMAGES = {
    "jpeg": Kind(lambda: _pictures("JPEG", COLORS), _read_image),
    "jpeg, progressive": Kind(
        lambda: _pictures("JPEG", COLORS, progressive=True, quality=30), _read_image
    ),
    "mpo": Kind(
        lambda: _pictures("MPO", ("RGB",), save_all=True, append_images=[FLAT]),
        _read_image,
    ),
    "png": Kind(lambda: _pictures("PNG"), _read_image),
    "webp": Kind(lambda: _pictures("WEBP", ("RGB", "RGBA")), _read_image),
    "gif": Kind(
        lambda: _pictures("GIF", save_all=True, append_images=[FLAT]), _read_image
    ),
    "bmp": Kind(
        lambda: _pictures("BMP", ("RGB", "P", "1")) + _rle_pictures(), _read_image
    ),
    "tiff": Kind(
        lambda: _pictures("TIFF") + _pictures("TIFF", compression="tiff_lzw"),
        _read_image,
    ),
}
OTHERS = {
    "parquet": Kind(_parquet, _read_parquet),
    "tar": Kind(_tar, _read_tar),
    "csv": Kind(lambda: CSV, _read_text_table("t.csv")),
    "jsonl": Kind(lambda: JSONL, _read_text_table("t.jsonl")),
    "safetensors": Kind(_weights, _read_weights),
    "yaml": Kind(
        lambda: [dump_yaml(small_config()).encode(), b"objective: {epsilon: 0.1}\n"],
        _read_yaml,
    ),
    "classes.yaml": Kind(
        lambda: [template(CLASSES, "0123456789abcdef", {}).encode()],
        lambda folder, data: read_edits(
            data, "classes.yaml", CLASSES, "0123456789abcdef"
        ),
    ),
    "checkpoint": Kind(_of_run("checkpoints/"), _read_checkpoint),
    "run": Kind(
        _of_run("config", "environment", "metrics", "lock", "bad", "checkpoints/"),
        _read_run,
    ),
    "model": Kind(_of_run("model/"), _read_model),
}
KINDS = IMAGES | OTHERS


def inputs_of(name: str, seed: int) -> Iterator[bytes]:
    """The corpus of past failures, the unchanged seeds, then mutants without end."""
    seeds, chance = KINDS[name].seeds(), random.Random(f"{name} {seed}")
    yield from (
        path.read_bytes()
        for path in sorted(CORPUS.glob(f"{name.replace(', ', '-')}_*"))
    )
    yield from seeds
    while True:
        data, other = chance.choice(seeds), chance.choice(seeds)
        if name in ("checkpoint", "run", "model"):
            head, _, data = data.partition(b"\n")
            yield head + b"\n" + mutated(data, other, chance)
        else:
            yield mutated(data, other, chance)


def _or_refused(function: Callable[..., object], *args: object) -> None:
    """What may be refused, before the next thing is read."""
    try:
        function(*args)
    except (UnoError, BadImage) as error:
        if not is_one_line(error):
            raise


def is_one_line(error: Exception) -> bool:
    """Whether a user can be told so."""
    text = str(error)
    with suppress(UnicodeError):
        return (
            0 < len(text.encode()) < 2000
            and "\n" not in text
            and "MemoryError" not in text
        )
    return False


def outcome_of(kind: Kind, folder: Path, data: bytes) -> str:
    """'read', 'refused', or what went wrong."""
    try:
        kind.read(folder, data)
        return "read"
    except (UnoError, BadImage) as error:
        return (
            "refused" if is_one_line(error) else f"not one line: {str(error)[:300]!r}"
        )
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:200]!r}"


def _child(kind: Kind, batch: list[bytes], tell: Connection) -> None:
    """Reads the inputs of a batch one after the other, telling of each how it ended."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf(
        "SC_PAGE_SIZE"
    )
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES, size + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # that of pytest-timeout would only raise
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    faulthandler.disable()  # the signal is told by the parent
    torch.set_num_threads(1)  # a fork has none of its parent's threads
    # libtiff and warnings of what was skipped
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    for data in batch:
        with tempfile.TemporaryDirectory(prefix="uno-fuzz-") as folder:
            signal.alarm(SLOW_S)
            start = time.monotonic()
            result = outcome_of(kind, Path(folder), data)
            signal.alarm(0)
            tell.send((result, time.monotonic() - start))


def run_batch(kind: Kind, batch: list[bytes]) -> list[tuple[str, float]]:
    """What became of each input; that which ended the process has the signal's name."""
    results: list[tuple[str, float]] = []
    while len(results) < len(batch):
        told, tell = FORK.Pipe(duplex=False)
        child = FORK.Process(target=_child, args=(kind, batch[len(results) :], tell))
        # Python 3.12 fears the parent's threads
        with warnings.catch_warnings(action="ignore"):
            child.start()
        tell.close()
        with told, suppress(EOFError):
            while True:
                results.append(told.recv())
        child.join()
        if code := child.exitcode:
            name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            results.append(
                (f"over {SLOW_S} s" if name == "SIGALRM" else name, float(SLOW_S))
            )
    return results


def fuzz(
    name: str,
    count: int,
    seed: int,
    seconds: float = 1e9,
    keep: str | None = None,
    first: int = 0,
) -> dict[str, Any]:
    """At most ``count`` inputs of a kind from number ``first`` on, for about
    ``seconds``: what became of them.
    """
    inputs, end = islice(inputs_of(name, seed), first, None), time.monotonic() + seconds
    seen, findings = list[tuple[str, float]](), list[str]()
    while len(seen) < count and time.monotonic() < end:
        batch = list(islice(inputs, min(BATCH, count - len(seen))))
        for data, result in zip(batch, run_batch(KINDS[name], batch), strict=True):
            # a hang repeats, a machine that is busy elsewhere does not
            if result[0].startswith("over"):
                (result,) = run_batch(KINDS[name], [data])
            number = first + len(seen)
            seen.append(result)
            if result[0] not in ("read", "refused"):
                findings.append(f"input {number}: {result[0]}")
                if keep is not None:
                    Path(keep).mkdir(parents=True, exist_ok=True)
                    (
                        Path(keep) / f"{name.replace(', ', '-')}_{seed}_{number}"
                    ).write_bytes(data)
    counts = {
        wanted: sum(what == wanted for what, _ in seen)
        for wanted in ("read", "refused")
    }
    facts = {
        "findings": findings,
        "slowest_s": round(max(spent for _, spent in seen), 3),
    }
    return {"kind": name, "inputs": len(seen), **counts, **facts}


def main(argv: list[str] | None = None) -> int:
    """Print a table and a JSON line of the counts; 1 where there are findings."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument(
        "--images", type=int, default=10_000, help="inputs of each format"
    )
    parser.add_argument(
        "--others", type=int, default=2_000, help="inputs of each other kind"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="for each kind, at most"
    )
    parser.add_argument(
        "--first",
        type=int,
        default=0,
        help="number of the first input: a run in pieces",
    )
    parser.add_argument("--keep", help="folder for inputs that are findings")
    args, outcomes = parser.parse_args(argv), []
    print(
        "| kind | inputs | read | refused | findings | slowest, s"
        " |\n|---|---|---|---|---|---|"
    )
    for name in args.kinds:
        count = args.images if name in IMAGES else args.others
        found = fuzz(name, count, args.seed, args.seconds, args.keep, args.first)
        outcomes.append(found)
        shown = {**found, "findings": len(found["findings"])}
        cells = (
            f"{value:,}" if isinstance(value, int) else str(value)
            for value in shown.values()
        )
        print("|", " | ".join(cells), "|", flush=True)
        print(
            *(f"{name}: {line}\n" for line in found["findings"][:20]),
            sep="",
            end="",
            file=sys.stderr,
        )
    command = " ".join(
        ["python -m tests.fuzz", *(sys.argv[1:] if argv is None else argv)]
    )
    print(json.dumps({"command": command, "seed": args.seed, "kinds": outcomes}))
    return int(any(found["findings"] for found in outcomes))


if __name__ == "__main__":
    sys.exit(main())
