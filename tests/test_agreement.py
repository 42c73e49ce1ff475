"""Every way to ask a model about images gives the same answers.

The ways are the run's own table, ``uno predict`` on any form of data, ``predict`` of a
loaded model on any kind of image, and exported programs. Hypothesis draws how the model
is trained, how its classes are edited and how it is asked. The release lane tries the
same 25 situations every time; ``--hypothesis-profile long`` draws others.
"""

import io
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

import uno
from pipelines import cli
from tests.pipelines.small import write_weights
from tests.uno.data.builders import encoded
from tests.uno.data.test_tar import write_tar
from uno.config import Config, override
from uno.data.decode import Decoding, decode_many, to_rgb
from uno.results.infer import NUMBERS

NETWORK = {
    "model.encoder": "resnet_small",
    "model.width": 4,
    "model.blocks": 1,
    "model.stages": 2,
    "image-size": 8,
}
HEADS = {
    "model.hidden-dim": 16,
    "model.projection-dim": 8,
    "model.num-heads": 2,
    "discover.epochs": 1,
    "discover.warmup-epochs": 0,
}
PRETRAINING = {"pretrain.epochs": 1, "pretrain.warmup-epochs": 0}
TRAINED = NETWORK | HEADS | PRETRAINING
FROZEN = {"model.finetune": "none", "image-size": 8}
OTHER_HEADS = {
    "model.num-heads": 3,
    "model.overcluster-factor": 0,
    "model.stem": "cifar_stride2",
    "model.mlp-input": "raw",
    "data.interpolation": "bicubic",
}
OWN = "tests.uno.toy_encoders"
MODELS: dict[str, dict[str, Any]] = {  # options of `uno discover`
    "uno": TRAINED,
    "other heads": TRAINED | OTHER_HEADS,
    "streamed": TRAINED | {"data.loading": "streaming"},
    "rs_plus": TRAINED | {"method": "rs_plus"},
    "ncl": TRAINED | {"method": "ncl"},
    "own encoder of maps": TRAINED | {"model.encoder": f"{OWN}:maps"},
    "uno on a frozen encoder": FROZEN
    | HEADS
    | {"model.encoder": "torchvision:shufflenet_v2_x0_5", "method": "uno"},
    "default of a frozen encoder": FROZEN | {"model.encoder": "timm:test_resnet"},
    "default of an own frozen encoder": FROZEN | {"model.encoder": f"{OWN}:tokens"},
    "uno on vectors": HEADS | {"method": "uno"},
    "default of vectors": {},
}
ON_VECTORS = ("uno on vectors", "default of vectors")
KNOWN_ONLY = ("rs_plus", "ncl")  # methods for unlabeled images of novel classes alone
FORMS = ("folder", "csv", "parquet", "tar", "packed")
EDITS = [
    (),
    ("rename",),
    ("merge",),
    ("merge", "rename"),
    ("merge into known",),
    ("drop",),
]


@dataclass(frozen=True)
class Situation:
    """How a model is trained, how its classes are edited, and how it is asked.

    Attributes:
        model: A key of ``MODELS``.
        trained_on: Form of the training data.
        gcd: Whether a third of the images of known classes are unlabeled.
        num_novel: Number of novel classes.
        edits: Changes of classes, one after the other.
        asked: Form of the data of ``uno predict``.
        items: What ``predict`` of Python is given.
        exported: Whether an exported program is asked, too.
    """

    model: str = "uno"
    trained_on: str = "parquet"
    gcd: bool = False
    num_novel: int = 2
    edits: tuple[str, ...] = ()
    asked: str = "folder"
    items: str = "bytes"
    exported: bool = False


PAST = {
    "the export of a chosen feature space": Situation(
        "default of an own frozen encoder", edits=("merge",), exported=True
    ),
    "no novel class is left": Situation(num_novel=1, edits=("merge into known",)),
    "a class that others are merged into is renamed": Situation(
        edits=("merge", "rename")
    ),
}


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    model = draw(st.sampled_from(sorted(MODELS)))
    forms = st.sampled_from(("vectors",) if model in ON_VECTORS else FORMS)
    return Situation(
        model,
        trained_on=draw(forms),
        gcd=model not in KNOWN_ONLY and draw(st.booleans()),
        num_novel=draw(st.integers(2, 3)),
        edits=draw(st.sampled_from(EDITS)),
        asked=draw(forms),
        items=draw(st.sampled_from(("paths", "bytes", "PIL", "arrays"))),
        exported=draw(st.booleans()),
    )


class Picture(NamedTuple):
    """An image file; its name begins with its number."""

    name: str
    label: str | None
    data: bytes


def draw_pictures(numbers: range, labels: list[str]) -> list[Picture]:
    """Draw images in several formats and modes; those of a class have one color."""
    options = {
        "JPEG": {"exif": Image.Exif(), "quality": 90},
        "WEBP": {"lossless": True},
    }
    options["JPEG"]["exif"][0x0112] = 6  # a camera that was turned
    kinds = [("PNG", mode) for mode in ("RGB", "L", "RGBA", "P", "LA")]
    kinds += [(form, "RGB") for form in ("JPEG", "BMP", "WEBP", "TIFF")]
    pictures = []
    for number in numbers:
        rng = np.random.default_rng(number)
        label = labels[number % len(labels)]
        color = np.random.default_rng([*label.encode()]).integers(40, 216, 3)
        size = *rng.integers(6, 20, 2), 3
        pixels = (color + rng.integers(-40, 40, size)).astype(np.uint8)
        form, mode = kinds[number % len(kinds)]
        image = Image.fromarray(pixels).convert(mode)
        name = f"{number:03} of é.{form.lower()}"
        data = encoded(image, form, **options.get(form, {}))
        pictures.append(Picture(name, label, data))
    return pictures


def vector_of(picture: Picture) -> np.ndarray:
    """Return float32 (12,), which stands for an image where a model takes vectors."""
    image = Image.open(io.BytesIO(picture.data)).convert("RGB").resize((2, 2))
    return np.asarray(image, np.float32).ravel() / 64 - 2


def write_source(root: Path, form: str, pictures: list[Picture]) -> str:
    """Write images in a form, and return the value of ``--data`` that names them."""
    root.mkdir(parents=True)
    if form == "packed":
        plain = write_source(root / "plain", "folder", pictures)
        run_command("data", "pack", "--data", plain, "--output", root / "packed")
        return f"parquet:{root / 'packed'}"
    if form == "tar":
        members = [(p.name, p.data) for p in pictures]
        labeled = [p for p in pictures if p.label is not None]
        members += [(f"{Path(p.name).stem}.cls", p.label.encode()) for p in labeled]
        write_tar(root / "train-000.tar", sorted(members))
        return f"tar:{root}"
    ids, labels = [p.name for p in pictures], [p.label for p in pictures]
    columns = {"id": ids, "label": pa.array(labels, pa.string())}
    if form == "vectors":
        columns["embedding"] = [vector_of(picture) for picture in pictures]
    elif form == "parquet":
        columns["image"] = [{"bytes": p.data, "path": None} for p in pictures]
    else:
        places = [f"{picture.label or ''}/{picture.name}" for picture in pictures]
        for place, picture in zip(places, pictures, strict=True):
            (root / place.strip("/")).parent.mkdir(exist_ok=True)
            (root / place.strip("/")).write_bytes(picture.data)
        if form == "folder":
            return f"folder:{root}"
        columns["path"] = [place.strip("/") for place in places]
    table = pa.table(columns)
    if form == "csv":
        table.to_pandas().to_csv(root / "rows.csv", index=False)
        return str(root / "rows.csv")
    pq.write_table(table, root / "train.parquet", row_group_size=7)
    return f"{'vectors' if form == 'vectors' else 'parquet'}:{root}"


def run_command(*words: object) -> None:
    assert cli.main([str(word) for word in words]) == 0, words


def train(situation: Situation, folder: Path, *more: object) -> list[Picture]:
    """Train a run in ``folder/run``, and return its images."""
    labels = ["k0", "k1", *(f"n{i}" for i in range(situation.num_novel))]
    pictures = []
    for number, picture in enumerate(draw_pictures(range(8 * len(labels)), labels)):
        unlabeled = picture.label[0] == "n" or (situation.gcd and number % 3 == 0)
        pictures.append(picture._replace(label=None) if unlabeled else picture)
    options = MODELS[situation.model] | {
        "data": write_source(folder / "source", situation.trained_on, pictures),
        "num-novel": situation.num_novel,
        "train.batch-size": 12,
        "compute.threads": 1,
        "output": folder / "run",
    }
    if options.get("model.finetune") == "none":
        options["weights"] = folder / "encoder.safetensors"
        encoder = override(Config(), {"model.encoder": options["model.encoder"]}).model
        write_weights(options["weights"], encoder)
    words = []
    for name, value in options.items():
        words += [f"--{name}", value]
    run_command("discover", *words, *more)
    return pictures


def edit_classes(run: Path, edit: str) -> None:
    classes = uno.load(run).classes
    novel = [each for each in classes if each.kind == "novel"]
    if edit == "rename":
        run_command("classes", run, "--rename", f"{novel[-1].index}=näme")
        return
    actions = {
        "merge": f"merge into {novel[-1].name}",
        "merge into known": f"merge into {classes[0].name}",
        "drop": "drop",
    }
    run_command("classes", run)  # writes the file
    tree = yaml.safe_load((run / "classes.yaml").read_text())
    entries = {entry["index"]: entry for entry in tree["classes"]}
    entries[novel[0].index]["action"] = actions[edit]
    (run / "classes.yaml").write_text(yaml.safe_dump(tree))
    run_command("classes", run, "--apply")


def read_answers(folder: Path) -> pd.DataFrame:
    """Read a table of predictions; its index is the numbers of the images."""
    table = pq.read_table(folder / "predictions").to_pandas()
    numbers = [int(re.search(r"(\d{3}) of[^/]*$", name)[1]) for name in table["id"]]
    table.index = numbers
    return table.sort_index()


def assert_agree(
    answers: pd.DataFrame, expected: pd.DataFrame, tolerance: float
) -> None:
    """Compare the images that both tables have, except where two classes are tied."""
    clear = expected["margin"].isna() | (expected["margin"] > 5 * tolerance)
    rows = answers.index.intersection(expected.index[clear])
    answers, expected = answers.loc[rows], expected.loc[rows]
    for name in ("class_index", "class_name", "kind"):
        assert answers[name].tolist() == expected[name].tolist()
    for name in NUMBERS:
        pair = answers[name].to_numpy(float), expected[name].to_numpy(float)
        np.testing.assert_allclose(*pair, rtol=0, atol=tolerance, err_msg=name)


def make_items(kind: str, folder: Path, pictures: list[Picture]) -> list[Any]:
    """Return the images as ``predict`` of Python may get them."""
    if kind == "bytes":
        return [picture.data for picture in pictures]
    folder.mkdir()
    paths = [folder / picture.name for picture in pictures]
    for path, picture in zip(paths, pictures, strict=True):
        path.write_bytes(picture.data)
    if kind == "paths":
        return paths
    images = [Image.open(path) for path in paths]
    if kind == "PIL":
        return images
    return [np.asarray(to_rgb(ImageOps.exif_transpose(image))) for image in images]


def check_agreement(situation: Situation, folder: Path, *more: object) -> None:
    """Train, edit and ask a model; ``more`` are options of training and prediction."""
    pictures, run = train(situation, folder, *more), folder / "run"
    for edit in situation.edits:
        edit_classes(run, edit)
    new = draw_pictures(range(len(pictures), len(pictures) + 9), ["k0", "n0"])
    unlabeled = [picture._replace(label=None) for picture in pictures + new]
    source = write_source(folder / "asked", situation.asked, unlabeled)
    where = ["--data", source, "--embedding", "--output", folder / "out"]
    run_command("predict", run, *where, *more)
    expected = read_answers(folder / "out")
    assert expected.index.tolist() == list(range(len(unlabeled)))

    # clustering subtracts the mean of the features, but not their rounding errors
    tolerance = 4e-4 if "default" in situation.model else 2e-5
    assert_agree(read_answers(run), expected, tolerance)
    model = uno.load(run)
    if situation.model in ON_VECTORS:
        inputs = torch.from_numpy(np.stack([vector_of(row) for row in unlabeled]))
        said = model.predict(inputs)
    else:
        decoding = Decoding.of(model._classifier.config.data)
        files = [picture.data for picture in unlabeled]
        inputs = decode_many(files, model.size, 1, decoding)[0]
        said = model.predict(make_items(situation.items, folder / "items", unlabeled))
    names = ("class_index", "class_name", "kind", *NUMBERS)
    answers = pd.DataFrame({name: getattr(said, name) for name in names})
    assert_agree(answers, expected, tolerance)
    embedding = np.stack(expected["embedding"])
    np.testing.assert_allclose(embedding, said.embedding, rtol=1e-4, atol=1e-4)
    if situation.exported:
        run_command("export", run, "--format", "pt2")
        program = torch.export.load(run / "model" / "model.pt2").module()
        probabilities = program(inputs).detach().numpy()
        limits = {"rtol": 0, "atol": 5 * tolerance}
        np.testing.assert_allclose(probabilities, said.probabilities, **limits)


@pytest.mark.parametrize("name", PAST)
def test_a_past_disagreement_stays_repaired(name, tmp_path):
    check_agreement(PAST[name], tmp_path)


@pytest.mark.release
@pytest.mark.timeout(0)
@pytest.mark.filterwarnings("ignore")
@settings(max_examples=25, phases=[Phase.reuse, Phase.generate], print_blob=True)
@given(situations())
def test_all_ways_to_ask_a_model_agree(situation):
    with tempfile.TemporaryDirectory() as folder:
        check_agreement(situation, Path(folder))


@pytest.mark.ray
@pytest.mark.release
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    "model", ["streamed", "default of a frozen encoder", "default of vectors"]
)
def test_two_workers_of_ray_give_the_same_answers(model, tmp_path):
    form = "vectors" if model in ON_VECTORS else "parquet"
    situation = Situation(model, trained_on=form, gcd=True, asked=form)
    check_agreement(situation, tmp_path, "--compute.num-workers", 2)
