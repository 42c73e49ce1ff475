"""``uno.load(run).predict(images)``: any kind of image, the numbers of ``uno
predict``.
"""

import os
import subprocess
import sys
from contextlib import contextmanager
from functools import partial

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from PIL import Image

import uno
from tests.uno.models import tiny_model, write_damaged, write_model
from uno.data.sources import read_digits
from uno.errors import ConfigError


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    write_model(folder)
    return folder


@pytest.fixture(scope="module")
def model(run):
    return uno.load(run)


def test_a_name_that_uno_does_not_have_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = uno.nonsense


def test_the_numbers_are_those_of_the_model(run, tmp_path):
    images = read_digits().images.items[:600]  # more than two batches
    found = uno.load(str(run / "model")).predict(images)
    views = torch.from_numpy(images[:9].transpose(0, 3, 1, 2).copy())
    scores = tiny_model(tmp_path / "same").score(views)
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    close(found.margin[:9], scores.margin)
    close(found.embedding[:9], scores.features)
    close(found.probabilities[:9], scores.probabilities)
    assert len(found) == len(list(found)) == 600
    assert (found[0].class_name, found[0].kind) == ("0", "known")


def test_unreadable_images_are_rows_with_a_reason(model, tmp_path):
    readable = write_damaged(tmp_path)
    found = model.predict([tmp_path / name for name in readable])
    assert [reason is None for reason in found.reason] == list(readable.values())
    grayscale = np.zeros((9, 5, 3), np.uint8)
    with Image.open(tmp_path / "truncated-half.jpg") as truncated:
        images = [truncated, grayscale, Image.new("F", (4, 4)), "/no/such/file"]
        found = model.predict(images)
    assert [index < 0 for index in found.class_index] == [True, False, True, True]
    assert found[2].class_name is None and "floating-point" in found[2].reason
    assert np.isnan(found[3].probability)
    assert found[3].reason == "No such file or directory"


def test_nothing_has_no_predictions(model):
    empty = model.predict([])
    assert len(empty) == 0 and empty.probabilities.shape == (0, 10)


@pytest.mark.parametrize(
    ("images", "words"),
    [
        ("image.png", "in a list"),
        (np.zeros((8, 8, 3), np.uint8), "in a list"),
        (torch.zeros(2, 3, 8, 8), "must be uint8"),
        ([None], "image 0 is None"),
        (None, "list or column of images, not None"),
        (3, "not int '3'"),
        (pd.DataFrame({"path": ["a.png"]}), r'table\["path"\]'),
        (np.zeros((2, 8, 8)), "image 0 is float64"),
        ([np.zeros((8, 8, 3))], "image 0 is float64"),
    ],
    ids=str,
)
def test_nonsense_is_refused(model, images, words):
    with pytest.raises(ValueError, match=words):
        model.predict(images)


def test_a_rotated_picture_is_turned_upright(model, tmp_path):
    write_damaged(tmp_path)
    with Image.open(tmp_path / "rotated.jpg") as picture:
        first, second = model.predict([picture, tmp_path / "rotated.jpg"]).probabilities
    np.testing.assert_allclose(first, second, atol=1e-6)


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
    pictures = list(map(Image.fromarray, pixels))
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
        pictures,
        list(pixels),
        pixels[..., 0],
        torch.from_numpy(pixels).permute(0, 3, 1, 2),
    ):
        found = model.predict(images)
        np.testing.assert_array_equal(found.class_index, expected.class_index)
        np.testing.assert_allclose(
            found.probabilities, expected.probabilities, atol=1e-6
        )
    assert model.predict(tuple(words)).path == words


@contextmanager
def double_precision():
    torch.set_default_dtype(torch.float64)
    yield
    assert torch.get_default_dtype() == torch.float64
    torch.set_default_dtype(torch.float32)


SETTINGS = {
    "autocast": partial(torch.autocast, "cpu", torch.bfloat16),
    "device": partial(torch.device, "meta"),
    "dtype": double_precision,
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_of_the_caller_move_no_number(run, model, setting):
    images = read_digits().images.items[:40]
    expected = model.predict(images).probabilities
    with SETTINGS[setting]():
        found = uno.load(run).predict(images).probabilities
    np.testing.assert_array_equal(found, expected)


def test_a_slice_of_predictions_is_predictions(model):
    found = model.predict(read_digits().images.items[:60])
    some = found[50:10:-4]
    assert some.class_name == found.class_name[50:10:-4] and len(some) == 10
    assert list(some) == [found[i] for i in range(50, 10, -4)]
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
