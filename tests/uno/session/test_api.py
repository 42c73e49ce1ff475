"""``uno.load(run).predict(images)``: cheap to import, any kind of image, the numbers
of ``uno predict``.
"""

import os
import subprocess
import sys

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from PIL import Image

import uno
from tests.uno.models import tiny_model, write_damaged, write_model
from uno.data.sources import read_digits
from uno.errors import ConfigError, StorageError


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    write_model(folder)
    return folder


@pytest.fixture(scope="module")
def model(run):
    return uno.load(run)


def test_importing_uno_is_cheap():
    code = (
        "import sys, uno; assert 'torch' not in sys.modules and 'numpy' not in"
        " sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = uno.nonsense


def test_the_numbers_are_those_of_the_model(run, tmp_path):
    images = read_digits().images.items[:600]  # more than two batches
    found = uno.load(str(run / "model")).predict(images)
    scores = tiny_model(tmp_path / "same").score(
        torch.from_numpy(images[:9].transpose(0, 3, 1, 2).copy())
    )
    np.testing.assert_allclose(found.margin[:9], scores.margin, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(
        found.embedding[:9], scores.features, rtol=1e-4, atol=1e-6
    )
    assert len(found) == len(list(found)) == 600 and found.probabilities.shape == (
        600,
        10,
    )
    np.testing.assert_allclose(found.probabilities.sum(axis=1), 1, atol=1e-5)
    assert found[0].class_name == found.class_name[0] and found[0].kind in (
        "known",
        "novel",
    )
    assert found[0].probability == pytest.approx(float(found.probabilities[0].max()))


def test_unreadable_images_are_rows_with_a_reason(model, tmp_path):
    readable = write_damaged(tmp_path)
    found = model.predict([tmp_path / name for name in readable])
    assert [reason is None for reason in found.reason] == list(readable.values())
    grayscale = np.zeros((9, 5, 3), np.uint8)
    with Image.open(tmp_path / "truncated-half.jpg") as truncated:
        found = model.predict(
            [truncated, grayscale, Image.new("F", (4, 4)), "/no/such/file"]
        )
    assert found.class_index.tolist()[::2] == [-1, -1] and found.class_index[1] >= 0
    assert found[2].class_name is None and "floating-point" in found[2].reason
    assert (
        np.isnan(found[0].probability)
        and found[3].reason == "No such file or directory"
    )
    # a rotated picture is turned upright
    with Image.open(tmp_path / "rotated.jpg") as picture:
        found = model.predict([picture, tmp_path / "rotated.jpg"])
    np.testing.assert_allclose(
        found.probabilities[0], found.probabilities[1], atol=1e-6
    )


def test_nothing_and_nonsense(model, tmp_path):
    empty = model.predict([])
    assert len(empty) == 0 and empty.probabilities.shape == (0, 10)
    for images, words in (
        ("image.png", "in a list"),
        (np.zeros((8, 8, 3), np.uint8), "in a list"),
        (torch.zeros(2, 3, 8, 8), "must be uint8"),
        ([None], "image 0 is None"),
        (None, "list or column of images, not None"),
        (3, "not int '3'"),
        (pd.DataFrame({"path": ["a.png"]}), r'table\["path"\]'),
        (np.zeros((2, 8, 8)), "image 0 is float64"),
        ([np.zeros((8, 8, 3))], "image 0 is float64"),
    ):
        with pytest.raises(ValueError, match=words):
            model.predict(images)
    with pytest.raises(StorageError, match="no trained model"):
        uno.load(tmp_path)


@pytest.mark.parametrize(
    ("path", "device", "words"),
    [
        (None, "cpu", "the path of a run, not None"),
        (3, "cpu", "not int '3'"),
        ("run", "cuda", "sees no CUDA device"),
        ("run", "cuda:7", "sees no CUDA device"),
        ("run", "gpu", 'must be "cpu" or "cuda", not \'gpu\''),
        ("run", "mps", "not 'mps'"),
        ("run", "meta", "not 'meta'"),
        ("run", None, "not None"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(run, path, device, words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match=words):
        uno.load(run if path == "run" else path, device=device)


def test_every_kind_of_image_and_of_column_gives_the_same(model, tmp_path):
    pixels = read_digits().images.items[:20]
    paths = [tmp_path / f"{i}.png" for i in range(20)]
    for path, image in zip(paths, pixels, strict=True):
        Image.fromarray(image).save(path)
    words = list(map(str, paths))
    opened = [Image.open(path) for path in paths]
    expected = model.predict(pixels)
    for images in (
        paths,
        words,
        np.array(words),
        np.array(words, object),
        pd.Series(paths),
        pd.DataFrame({"path": words})["path"],
        pd.Series(words, dtype="string"),
        pa.chunked_array([words]),
        [path.read_bytes() for path in paths],
        opened,
        list(pixels),
        pixels[..., 0],
        torch.from_numpy(pixels).permute(0, 3, 1, 2),
    ):
        found = model.predict(images)
        np.testing.assert_array_equal(found.class_index, expected.class_index)
        np.testing.assert_allclose(
            found.probabilities, expected.probabilities, atol=1e-6
        )
    for picture in opened:
        picture.close()
    assert model.predict(tuple(words)).path == words


@pytest.fixture(params=["autocast", "device of a block", "default device", "dtype"])
def setting_of_the_caller(request):
    """Compute a test under a setting of PyTorch that is not the default."""
    try:
        if request.param == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                yield
        elif request.param == "device of a block":
            with torch.device("meta"):
                yield
        elif request.param == "default device":
            torch.set_default_device("meta")
            yield
        else:
            torch.set_default_dtype(torch.float64)
            yield
            assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def probabilities(model):
    """Return the probabilities of forty digits under the default settings."""
    return model.predict(read_digits().images.items[:40]).probabilities


def test_settings_of_the_caller_move_no_number(
    run, probabilities, setting_of_the_caller
):
    found = uno.load(run).predict(read_digits().images.items[:40])
    np.testing.assert_array_equal(found.probabilities, probabilities)


def test_a_slice_of_predictions_is_predictions(model):
    found = model.predict(read_digits().images.items[:60])
    some = found[50:10:-4]
    assert len(some) == 10 and some.class_name == found.class_name[50:10:-4]
    assert [one.probability for one in some] == [
        found[i].probability for i in range(50, 10, -4)
    ]
    assert len(found[60:]) == 0
    assert found[np.int64(3)] == found[3] == found[-57]


FORKED = """
import multiprocessing, sys, torch, uno
import numpy as np

torch.set_num_threads(4)
images, model = np.zeros((300, 8, 8, 3), np.uint8), uno.load(sys.argv[1])
model.predict(images)
def predict_and_load():
    model.predict(images)
    uno.load(sys.argv[1]).predict(images)

child = multiprocessing.get_context("fork").Process(target=predict_and_load)
child.start()
child.join(60)
alive = child.is_alive()
child.kill()
assert not alive and child.exitcode == 0, "the child hangs"
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_of_a_process_that_has_predicted_predicts(run):
    """OpenMP of PyTorch does not survive a fork. Kills: a pool of processes that
    hangs.
    """
    subprocess.run([sys.executable, "-c", FORKED, run], check=True, timeout=150)
