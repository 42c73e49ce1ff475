"""Agreement as a property: whatever answers says the same of every row, of random small
data sets.

    OMP_NUM_THREADS=1 python -m tests.agreement --cases 200 --seed 0

A run of one epoch is trained on a random data set (folders, tables, Parquet, tar
shards, their packed copies, vectors; known classes hidden or rows without a label;
images of all kinds; an encoder of every kind; UNO, the default method of a frozen
encoder, baselines). Then, ``CASES`` times: its classes are edited, its images and new
ones written in another form, and read by ``uno predict``. That table, the run's own,
``uno.load(run).predict``, CSV, sorted folders and exported programs must agree: the
same class where it leads by ``TIE``, numbers within ``CLOSE``. What does not is
printed, and kept in ``--keep DIR`` as the JSON of the run and its cases; it belongs
into ``tests/corpus`` once it is repaired.
"""

import argparse
import csv
import io
import json
import logging
import os
import random
import re
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch
import yaml
from PIL import Image as Pillow
from PIL import ImageOps
from torch import Tensor, nn

import uno
from pipelines import cli
from tests.uno.data.builders import encoded
from uno.config import Config, override
from uno.data.decode import Decoding, decode_many, to_rgb
from uno.encoders.build import build_encoder
from uno.results.infer import NUMBERS
from uno.results.predictions import COLUMNS, FOLDER

CASES = 5  # of a run
TIE, CLOSE = 1e-4, 2e-5
# times these: it subtracts the mean of features, but not their rounding errors
NOISE = {"clustering": 20}
OPTIONS = {
    "model.width": 4,
    "model.blocks": 1,
    "model.stages": 2,
    "model.hidden_dim": 16,
    "model.projection_dim": 8,
    "train.batch_size": 16,
    "pretrain.epochs": 1,
    "discover.epochs": 1,
    "pretrain.warmup_epochs": 0,
    "discover.warmup_epochs": 0,
    "compute.threads": 1,
    "augment.num_cached_views": 2,
}
CHOICES: dict[str, Sequence[Any]] = {  # fields of the configuration, drawn for a run
    "model.encoder": (
        "resnet_small",
        "timm:test_resnet",
        "torchvision:shufflenet_v2_x0_5",
        "tests.agreement:tokens",
        "tests.agreement:maps",
        "vectors",
    ),
    "model.num_heads": (1, 2, 3),
    "model.overcluster_factor": (0, 2),
    "model.stem": ("cifar", "cifar_stride2"),
    "model.mlp_input": ("normalized", "raw"),
    "model.finetune": ("full", "full", "none"),
    "data.interpolation": ("bilinear", "bicubic"),
    "data.loading": ("memory", "streaming"),
    "objective.concat": (True, False),
    "method": ("uno", "uno", "uno", "clustering", "clustering", "rs_plus", "ncl"),
}
FORMS = ("folder", "csv", "jsonl", "parquet", "parquet of paths", "tar")
PACKED = tuple(f"packed {form}" for form in FORMS)
VECTORS = ("vectors", "vectors npy")
LEFT_OPEN = (
    "method",
    "hidden_dim",
    "projection_dim",
    "num_heads",
    "overcluster",
    "mlp_input",
    "objective",
    "discover",
)
"""Words of options without which ``uno discover`` takes its default method for a
frozen encoder.
"""
EDITS = ("none", "rename", "merge into known", "merge", "drop")
ITEMS = ("path", "bytes", "PIL", "array", "arrays", "column")
PROGRAMS = ("pt2", "onnx")
OF_ENCODERS = (
    "model.width",
    "model.blocks",
    "model.stages",
    "model.stem",
    "data.interpolation",
)
GCD = ("uno", "clustering")  # methods that take unlabeled rows of known classes
Spec = dict[str, Any]


class Tokens(nn.Module):
    """A class token before the patches of an image, (B, 1 + T, D)."""

    image_size = 8

    def __init__(self) -> None:
        super().__init__()
        self.cls_token, self.patches = (
            nn.Parameter(torch.ones(1, 1, 8)),
            nn.Conv2d(3, 8, 4, 4),
        )
        self.mix = nn.Linear(8, 8)

    def forward(self, images: Tensor) -> Tensor:
        """Tokens of images (B, 3, S, S); the first sees the others."""
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        first = self.cls_token + torch.relu(self.mix(tokens)).mean(dim=1, keepdim=True)
        return torch.cat([first, tokens], dim=1)


def tokens() -> nn.Module:
    """An encoder of the user's own, always with the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Tokens()


def maps() -> nn.Module:
    """One that gives maps (B, D, h, w)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first, second = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 12, 3, 2, 1)
        return nn.Sequential(first, nn.BatchNorm2d(8), nn.ReLU(), second)


def specs(seed: int) -> Iterator[Spec]:
    """Runs without end, each a function of the seed and its number, with the cases
    of each.
    """
    number = 0
    while True:
        chance = random.Random(f"agreement {seed} {number}")
        options = {key: chance.choice(values) for key, values in CHOICES.items()}
        known, novel = chance.randint(2, 3), chance.randint(1, 3)
        encoder, vectors = (
            options["model.encoder"],
            options["model.encoder"] == "vectors",
        )
        if vectors:
            options |= {
                "model.finetune": "none",
                "data.loading": "memory",
                "method": chance.choice(GCD),
            }
            del options["model.encoder"]
        if options["method"] == "clustering":
            options["model.finetune"], options["data.loading"] = "none", "memory"
        # those take novel rows only, and concatenate or not by themselves
        elif options["method"] != "uno":
            del options["objective.concat"], options["model.mlp_input"]
        hidden = options["method"] not in GCD or chance.random() < 0.5
        if options["data.loading"] == "streaming" and (
            options["model.finetune"] == "none" or options["method"] == "ncl"
        ):
            options["data.loading"] = "memory"
        forms, flags = (
            (VECTORS, ("--csv", "--embedding"))
            if vectors
            else ((*FORMS, *FORMS, *PACKED), ("--csv", "--folders", "--embedding"))
        )
        cases = [
            {
                "edit": chance.choice(EDITS),
                "form": chance.choice(forms),
                "items": "array" if vectors else chance.choice(ITEMS),
                "more": [flag for flag in flags if chance.random() < 0.4],
                "new": chance.randrange(12),
                "program": None,
            }
            for _ in range(CASES)
        ]
        if chance.random() < 0.6:  # a program takes a second or two
            chance.choice(cases)["program"] = chance.choice(PROGRAMS)
        yield {
            "pixels": chance.randrange(10**6),
            "form": chance.choice(
                forms if vectors else (*forms, "two folders", "two folders")
            ),
            "hidden": hidden,
            "size": chance.choice((8, 12)),
            "known": known,
            "novel": novel,
            "rows": chance.randint(7, 11),
            "options": options,
            "cases": cases,
            "default": options["method"] == "clustering"
            and ":" in encoder
            and chance.random() < 0.7,
        }
        number += 1


class Picture(NamedTuple):
    """An image: its name, which begins with its number, its class, and its file's
    content.
    """

    name: str
    label: str
    data: bytes


def pictures(
    spec: Spec, numbers: range, labels: Sequence[str], what: str
) -> list[Picture]:
    """Files of all kinds and sizes; images of a class have a colour in common."""
    found = []
    for number in numbers:
        chance = np.random.default_rng([spec["pixels"], number, len(what)])
        label = labels[number % len(labels)]
        colour = np.random.default_rng([spec["pixels"], labels.index(label)]).integers(
            40, 216, 3
        )
        height, width = chance.integers(6, 20, 2)
        pixels = (colour + chance.integers(-40, 40, (height, width, 3))).astype(
            np.uint8
        )
        image, form = (
            Pillow.fromarray(pixels),
            chance.choice(["PNG", "PNG", "JPEG", "BMP", "WEBP", "TIFF"]),
        )
        mode = chance.choice(["RGB", "RGB", "L", "RGBA", "P", "LA"])
        options: dict[str, Any] = {"lossless": True} if form == "WEBP" else {}
        if form == "PNG" and mode != "RGB":
            image = image.convert(mode)
        elif form == "JPEG":
            exif = Pillow.Exif()
            exif[0x0112] = int(chance.integers(1, 9))
            options, image = (
                {"exif": exif, "quality": 90},
                image.convert("L" if mode == "L" else "RGB"),
            )
        suffix = {"JPEG": "jpg", "TIFF": "tif"}.get(str(form), str(form).lower())
        name = f"{number:03d}{chance.choice(['', ' of é', '-x'])}.{suffix}"
        found.append(Picture(name, label, encoded(image, str(form), **options)))
    return found


def write(
    root: Path, form: str, rows: Sequence[Picture], labeled: Callable[[Picture], bool]
) -> list[str]:
    """The rows in a form; what names them on the command line."""
    if form.startswith("packed "):
        command(
            "data",
            "pack",
            *write(root / "plain", form[7:], rows, labeled),
            "--output",
            root / "packed",
        )
        return ["--data", f"parquet:{root}/packed"]
    root.mkdir(parents=True)
    if form in VECTORS:
        return write_vectors(root, form, rows, labeled)
    if form == "tar":
        with tarfile.open(root / "train-000.tar", "w") as file:
            for row in rows:
                stem = row.name.rpartition(".")[0]
                members = [(row.name, row.data)]
                members += [(f"{stem}.cls", row.label.encode())] if labeled(row) else []
                for name, data in members:
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    file.addfile(member, io.BytesIO(data))
        return ["--data", f"tar:{root}"]
    if form == "parquet":
        image = pa.array([{"bytes": row.data, "path": None} for row in rows])
        columns = {"image": image}
    else:
        two = form == "two folders"
        places = [
            ("known/" * two + row.label if labeled(row) else "new" * two, row.name)
            if form.endswith("folder") or two
            else ("images", row.name)
            for row in rows
        ]
        for (folder, name), row in zip(places, rows, strict=True):
            (root / folder).mkdir(parents=True, exist_ok=True)
            (root / folder / name).write_bytes(row.data)
        if two:
            return ["--labeled", str(root / "known"), "--unlabeled", str(root / "new")]
        if form == "folder":
            return ["--data", f"folder:{root}"]
        columns = {"path": pa.array([f"{folder}/{name}" for folder, name in places])}
    ids = [row.name for row in rows]
    label = [row.label if labeled(row) else None for row in rows]
    table = pa.table(
        {"id": pa.array(ids), **columns, "label": pa.array(label, pa.string())}
    )
    if form.startswith("parquet"):
        pq.write_table(table, root / "train.parquet", row_group_size=7)
        return ["--data", f"parquet:{root}"]
    path = root / f"rows.{form}"
    if form == "csv":
        table.to_pandas().to_csv(path, index=False)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    return ["--data", str(path)]


def vector_of(row: Picture) -> np.ndarray:
    """float32 (12,) in the place of an image: sums of its pixels and their squares."""
    pixels = np.asarray(
        Pillow.open(io.BytesIO(row.data)).convert("RGB").resize((2, 2)), np.float32
    )
    return pixels.ravel() / 64 - 2


def write_vectors(
    root: Path, form: str, rows: Sequence[Picture], labeled: Callable[[Picture], bool]
) -> list[str]:
    """A vector of each row, and after all of these more views of every third row,
    under the same ids.
    """
    chance, more = (
        np.random.default_rng(len(rows)),
        [row for i, row in enumerate(rows) if i % 3 == 0],
    )
    values = np.stack([vector_of(row) for row in (*rows, *more)])
    values[len(rows) :] += chance.normal(0, 0.1, (len(more), values.shape[1])).astype(
        np.float32
    )
    table = pa.table(
        {
            "id": [row.name for row in (*rows, *more)],
            "label": pa.array(
                [row.label if labeled(row) else None for row in (*rows, *more)],
                pa.string(),
            ),
        }
    )
    if form == "vectors npy":
        np.save(root / "rows.npy", values)
        table.to_pandas().to_csv(root / "rows.csv", index=False)
        return ["--data", f"vectors:{root}/rows.npy"]
    pq.write_table(
        table.append_column("embedding", pa.array(list(values))), root / "train.parquet"
    )
    return ["--data", f"vectors:{root}"]


def command(*words: object) -> None:
    """``uno WORDS`` in this process, in silence. AssertionError: it does not end
    with 0.
    """
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        code = cli.main([str(word) for word in words])
    assert code == 0, f"uno {words[0]} ends with {code}: {said.getvalue()[-500:]}"


Answers = dict[int, dict[str, Any]]
"""What is said of each image, by its number, under the names of the columns of
predictions.
"""


def by_number(rows: Sequence[dict[str, Any]]) -> Answers:
    """Rows of a table of predictions."""
    found = {int(re.search(r"(\d{3})[^/#]*$", row["id"])[1]): row for row in rows}
    assert len(found) == len(rows), (
        f"an image has two rows: {[row['id'] for row in rows]}"
    )
    return found


def differences(
    what: str, found: Answers, expected: Answers, noise: float = 1
) -> list[str]:
    """A line for each row that is not as expected; both say something of it. Numbers
    may differ by ``noise`` times :data:`CLOSE`.
    """
    lines = []
    for number in sorted(found.keys() & expected.keys()):
        one, other = found[number], expected[number]
        tied = (other["margin"] or 0) < TIE * noise
        exact = () if tied else ("class_index", "class_name", "kind")
        wrong = [name for name in (*exact, "reason") if one[name] != other[name]]
        for name in NUMBERS if not tied else ():
            pair = [
                float("nan") if value is None else float(value)
                for value in (one[name], other[name])
            ]
            if not np.allclose(*pair, rtol=0, atol=CLOSE * noise, equal_nan=True):
                wrong.append(name)
        lines += [
            f"{what}: image {number}: {name} {one[name]!r} for {other[name]!r}"
            for name in wrong
        ]
    return lines


def train(spec: Spec, folder: Path, workers: int = 0) -> list[Picture]:
    """The run of a spec in ``folder/run``; its images."""
    labels = [f"k{i}" for i in range(spec["known"])] + [
        f"n{i}" for i in range(spec["novel"])
    ]
    rows = pictures(spec, range(spec["rows"] * len(labels)), labels, "run")
    hidden = spec["hidden"] and spec["form"] != "two folders"

    def labeled(row: Picture) -> bool:
        # of the GCD setting, every third image of a known class has no label
        number = int(row.name[:3])
        gcd = spec["options"]["method"] in GCD
        return hidden or (row.label[0] == "k" and (not gcd or number % 3 > 0))

    words = write(folder / "source", spec["form"], rows, labeled)
    words += ["--known-classes", ",".join(labels[: spec["known"]])] if hidden else []
    if spec["options"]["model.finetune"] == "none" and spec["form"] not in VECTORS:
        path = folder / "encoder.safetensors"
        model = override(Config(), OPTIONS | spec["options"]).model
        torch.manual_seed(0)
        safetensors.torch.save_file(build_encoder(model).state_dict(), path)
        words += ["--weights", str(path)]
    options = (
        OPTIONS
        | spec["options"]
        | {"data.num_novel": spec["novel"], "compute.num_workers": workers}
    )
    if spec["form"] in VECTORS:
        options = {
            key: value for key, value in options.items() if key not in OF_ENCODERS
        }
    if spec.get("default"):
        options = {
            key: value
            for key, value in options.items()
            if not any(word in key for word in LEFT_OPEN)
        }
    for key, value in options.items():
        words += [f"--{key.replace('_', '-')}", str(value)]
    words += [] if spec["form"] in VECTORS else ["--image-size", str(spec["size"])]
    command("discover", *words, "--output", folder / "run")
    method = yaml.safe_load((folder / "run" / "config.yaml").read_text()).get(
        "method", "uno"
    )
    assert method == spec["options"]["method"], f"the method is {method}"
    return rows


def edit(run: Path, how: str, chance: random.Random) -> None:
    """Change the classes of a run as a person does."""
    path, classes = run / "classes.yaml", uno.load(run).classes
    path.unlink(missing_ok=True)
    novel = [c for c in classes if c.kind == "novel"]
    if how == "rename":
        return command(
            "classes",
            run,
            "--rename",
            f"{chance.choice(novel).index}=näme {chance.random()}",
        )
    left = [c for c in novel if c.into == c.index]
    if how == "none" or not left or (how != "merge into known" and len(left) < 2):
        return None
    one, *others = chance.sample(left, len(left))
    target = (
        chance.choice(others if how == "merge" else classes[: -len(novel)])
        if how != "drop"
        else None
    )
    command("classes", run)  # writes it
    tree = yaml.safe_load(path.read_text())
    # nothing is merged into what is gone
    own = {one.index} | {c.index for c in novel if c.into == one.index}
    for entry in tree["classes"]:
        if entry["index"] in own:
            entry["action"] = "drop" if target is None else f"merge into {target.name}"
    path.write_text(yaml.safe_dump(tree))
    return command("classes", run, "--apply")


def check(
    spec: Spec,
    case: Spec,
    folder: Path,
    run: Path,
    own: Sequence[Picture],
    workers: int = 0,
) -> list[str]:
    """What a case finds, a line each; ``own`` are the images of the run."""
    edit(run, case["edit"], random.Random(f"{spec['pixels']} {case}"))
    new = pictures(spec, range(len(own), len(own) + case["new"]), ["k0", "n0"], "new")
    rows, out, noise = (
        [*own, *new],
        folder / "out",
        NOISE.get(spec["options"]["method"], 1),
    )
    words = write(folder / "source", case["form"], rows, lambda row: False)
    command(
        "predict",
        run,
        *words,
        *case["more"],
        "--compute.num-workers",
        workers,
        "--output",
        out,
    )
    table = pq.read_table(out / FOLDER).to_pylist()
    found = by_number(table)
    lines = (
        [] if found.keys() == {*range(len(rows))} else ["uno predict: rows are missing"]
    )
    said = by_number(pq.read_table(run / FOLDER).to_pylist())
    lines += differences("the run's own table", said, found, noise)
    if "--csv" in case["more"]:
        lines += check_csv(out / "predictions.csv", table)
    if "--folders" in case["more"]:
        lines += check_folders(out / "by_class", rows, found)

    model = uno.load(run)
    how = Decoding.of(model._classifier.config.data)
    vectors = case["form"] in VECTORS
    squares = (
        torch.from_numpy(np.stack([vector_of(row) for row in rows]))
        if vectors
        else decode_many([row.data for row in rows], model.size, 1, how)[0]
    )
    answers = model.predict(items(case["items"], folder / "named", rows, squares))
    names = ("class_index", "class_name", "kind", *NUMBERS, "reason")
    said = {
        i: {name: getattr(row, name) for name in names} for i, row in enumerate(answers)
    }
    lines += differences(f"predict of {case['items']}", said, found, noise)
    if "--embedding" in case["more"]:
        embedding = np.array([found[i]["embedding"] for i in range(len(rows))])
        if not np.allclose(embedding, answers.embedding, rtol=1e-4, atol=1e-4):
            lines.append("embedding: the table's is not that of Python")
    if (program := case["program"]) and (
        compute := load_program(run, program)
    ) is not None:
        most = np.abs(compute(squares) - answers.probabilities).max()
        lines += (
            [f"{program}: probabilities differ by {most:.1e}"]
            if not most < TIE * noise
            else []
        )
    return lines


def items(kind: str, folder: Path, rows: Sequence[Picture], squares: Tensor) -> Any:
    """What ``predict`` of Python is given for ``rows``, whose ``squares`` the model
    takes.
    """
    if kind == "array":
        return squares
    if kind == "bytes":
        return [row.data for row in rows]
    if kind == "arrays":
        opened = (Pillow.open(io.BytesIO(row.data)) for row in rows)
        return [np.asarray(to_rgb(ImageOps.exif_transpose(image))) for image in opened]
    folder.mkdir()
    for row in rows:
        (folder / row.name).write_bytes(row.data)
    paths = [folder / row.name for row in rows]
    if kind == "column":
        return pa.table({"path": [str(path) for path in paths]}).to_pandas()["path"]
    return paths if kind == "path" else [Pillow.open(path) for path in paths]


def check_csv(path: Path, table: Sequence[dict[str, Any]]) -> list[str]:
    """What a CSV has that the ``table`` it was made from has not."""
    lines = []
    with path.open(newline="", encoding="utf-8-sig") as file:
        for row, line in zip(table, csv.DictReader(file), strict=True):
            for name, kind in COLUMNS.items():
                text = "" if row[name] is None else str(row[name])
                text = (
                    f"'{text}"
                    if text[:1] in (*"=+-@\t\r\n",) and kind == pa.string()
                    else text
                )
                if kind == pa.float32() and text and line[name]:
                    text = (
                        line[name]
                        if np.float32(line[name]) == np.float32(row[name])
                        else text
                    )
                if line[name] != text:
                    lines.append(
                        f"CSV: {row['id']}: {name} {line[name]!r} for {row[name]!r}"
                    )
    return lines


def check_folders(by_class: Path, rows: Sequence[Picture], found: Answers) -> list[str]:
    """Images that are not, as they were, in the folder of their class alone."""
    lines, places = (
        [],
        {path.read_bytes(): path.parent.name for path in by_class.glob("*/*")},
    )
    for row in rows:
        place, says = places.pop(row.data, ""), found[int(row.name[:3])]
        wanted = (
            "rejected" if says["kind"] == "rejected" else f"{says['class_index']:03d}-"
        )
        if not place.startswith(wanted):
            lines.append(f"folders: {row.name} is in {place!r}, not {wanted!r}")
    return lines + [f"folders: a file more in {place}" for place in places.values()]


def load_program(run: Path, format: str) -> Callable[[Tensor], np.ndarray] | None:
    """The run as an exported program of its images; None: the packages for it are
    missing.
    """
    if format == "onnx" and any(
        find_spec(name) is None for name in ("onnx", "onnxscript", "onnxruntime")
    ):
        return None
    command("export", run, "--format", format)
    path = run / "model" / f"model.{format}"
    if format == "pt2":
        program = torch.export.load(path).module()
        return lambda images: program(images).detach().numpy()
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda images: session.run(
        None, {session.get_inputs()[0].name: images.numpy()}
    )[0]


def check_run(spec: Spec, workers: int = 0, trained_by: int = 0) -> list[str]:
    """What the cases of a run find, a line each; what raises is a line, too."""
    from uno.session import pipeline

    lines = list[str]()
    with (
        tempfile.TemporaryDirectory(prefix="uno-agreement-") as name,
        pytest.MonkeyPatch.context() as patch,
    ):
        folder = Path(name)
        # a second a run
        patch.setattr(pipeline, "write_report", lambda *args, **options: "none")
        # another where features are trained on
        patch.setenv("UNO_CACHE", str(folder / "cache"))
        try:
            own = train(spec, folder, trained_by)
        except AssertionError as error:
            return [f"training: {error}"]
        for number, case in enumerate(spec["cases"]):
            here = folder / f"case{number}"
            try:
                found = check(spec, case, here, folder / "run", own, workers)
            except AssertionError as error:
                found = [str(error)]
            lines += [
                f"case {number} ({case['edit']}, {case['form']}): {line}"
                for line in found
            ]
            shutil.rmtree(here, ignore_errors=True)
    return lines


def main(argv: list[str] | None = None) -> int:
    """Print what disagrees and a JSON line of counts; 1 where there is something."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    parser.add_argument("--keep", help="folder for what disagrees")
    args = parser.parse_args(argv)
    logging.disable(logging.WARNING)  # that an encoder is code
    runs, cases, fallen = 0, 0, 0
    for number, spec in enumerate(specs(args.seed)):
        if number < args.first:
            continue
        if cases >= args.cases:
            break
        lines = check_run(spec)
        runs, cases, fallen = runs + 1, cases + len(spec["cases"]), fallen + bool(lines)
        print(
            *(f"run {number}: {line}" for line in lines[:20]),
            sep="\n",
            end="\n" * bool(lines),
            flush=True,
        )
        if lines and args.keep:
            Path(args.keep).mkdir(parents=True, exist_ok=True)
            (Path(args.keep) / f"agreement_{args.seed}_{number}").write_text(
                json.dumps(spec)
            )
    words = " ".join(
        ["python -m tests.agreement", *(sys.argv[1:] if argv is None else argv)]
    )
    print(
        json.dumps(
            {
                "command": words,
                "runs": runs,
                "cases": cases,
                "runs_that_disagree": fallen,
            }
        )
    )
    return int(fallen > 0)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    sys.exit(main())
