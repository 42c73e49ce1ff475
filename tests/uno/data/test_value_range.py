"""Gray images of more than 8 bits: one range of values for a data set."""

import struct
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import uno
from uno.config import AugmentConfig, Config, ViewConfig, override
from uno.crops import Cropper
from uno.data.check import check
from uno.data.decode import (
    BadImage,
    Decoding,
    decode,
    decode_many,
    decode_rgb,
    decode_square_and_rgb,
)
from uno.data.files import Storage
from uno.data.value_range import choose_value_range

from . import builders
from .builders import encoded, pixels

GRAY = np.linspace(0, 4095, 64).round().reshape(8, 8)
FLOATS = np.where(GRAY == 0, np.nan, GRAY / 4095).astype(np.float32)
FLOATS[4, 4] = np.inf


def tiff_of_12_bits(values: np.ndarray) -> bytes:
    """Return a TIFF that packs two samples into three bytes."""
    height, width = values.shape
    bits = "".join(f"{value:012b}" for value in values.reshape(-1))
    data = int(bits, 2).to_bytes(len(bits) // 8, "big")
    tags = {
        256: width,
        257: height,
        258: 12,  # bits per sample
        259: 1,
        262: 1,
        273: 8,
        277: 1,
        278: height,
        279: len(data),
    }
    entries = [struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items()]
    table = struct.pack("<H", len(tags)) + b"".join(entries) + bytes(4)
    return b"II*\0" + struct.pack("<I", 8 + len(data)) + data + table


def write_folder(folder: Path, *contents: bytes) -> Path:
    """Write images of two classes, which have the contents in turn."""
    for i in range(8):
        name = f"class{i % 2}/{i}.tif"
        Storage(str(folder)).write(name, contents[i % len(contents)])
    return folder


read_task = partial(builders.read_task, known_classes="first:1")


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        ([encoded(GRAY.astype(np.uint16))], (0, 4095)),
        ([encoded(GRAY.astype(np.int32), "TIFF")], (0, 4095)),
        ([encoded(FLOATS, "TIFF")], (0, 1)),
        (
            [encoded(np.where(GRAY > 900, 65004, 65001).astype(np.uint16))],
            (65001, 65004),
        ),
        ([encoded(pixels(0)), encoded(GRAY.astype("u2"))], (0, 4095)),
        ([tiff_of_12_bits(GRAY.astype(int))], (0, 4095)),
    ],
)
def test_the_range_is_that_of_the_values(tmp_path, contents, expected):
    found, _ = choose_value_range(read_task(write_folder(tmp_path, *contents)).rows)
    assert found == pytest.approx(expected, abs=0.02 * (expected[1] - expected[0]))


def test_images_of_8_bits_have_no_range(tmp_path):
    folder = write_folder(tmp_path, encoded(pixels(0)))
    assert choose_value_range(read_task(folder).rows) is None


@pytest.mark.parametrize(
    "stored", [GRAY.astype(np.uint16), GRAY.astype(np.float32), GRAY.astype(np.int32)]
)
def test_every_way_to_decode_uses_the_range(stored):
    """Values outside the range become black or white."""
    how, image = Decoding(value_range=(1000, 3000)), encoded(stored, "TIFF")
    expected = (np.clip(GRAY, 1000, 3000) - 1000) * 255 // 2000
    of_square, of_whole = (
        Cropper(0, 0, 1, AugmentConfig(large=ViewConfig(size=8, crop=crop)), 8, how)
        for crop in ("none", "resized")
    )
    zero, square = np.zeros(1, np.int64), np.zeros((1, 3, 8, 8), np.uint8)
    views, _ = of_square.crop(zero, zero, [image], square)
    square_of_image, rgb = decode_square_and_rgb(image, 8, 8, how)
    for found in (
        decode(image, 8, how)[0],
        decode_rgb(image, 8, how.value_range)[..., 0],
        square_of_image[0],
        rgb[..., 0],
        decode_many([image], 8, 1, how)[0][0, 0].numpy(),
        views.reshape(-1, 3, 8, 8)[0, 0],
        square[0, 0],
    ):
        assert np.array_equal(found, expected)
    resized, reasons = of_whole.crop(zero, zero, [image])
    assert reasons == [None] and resized.max() == 255 and resized.min() == 0


def test_numbers_that_are_not_finite_become_black_or_white():
    values = np.array([[np.nan, np.inf, -np.inf, 0.5]], np.float32)
    image = encoded(values.repeat(4, axis=0), "TIFF")
    found = decode_rgb(image, 4, (0, 1))[0, :, 0]
    assert found.tolist() == [0, 255, 0, 127]


def warnings_of(folder: Path, value_range: tuple[float, float] | None) -> list[str]:
    config = override(Config(), {"data.value_range": value_range})
    return [problem.message for problem in check(read_task(folder), config, 60)]


def test_a_wrong_range_and_unused_pages_are_warnings(tmp_path):
    page = Image.fromarray(GRAY.astype(np.uint16))
    content = encoded(page, "TIFF", save_all=True, append_images=[page])
    folder = write_folder(tmp_path, content)
    messages = warnings_of(folder, (0, 65535))
    assert any("nearly black" in text and "value-range" in text for text in messages)
    assert any("several pages" in text and "first is used" in text for text in messages)
    messages = warnings_of(write_folder(tmp_path, encoded(page)), (0, 4095))
    assert not any("black" in text or "pages" in text for text in messages)


def test_a_check_decodes_every_image_by_the_range(tmp_path):
    folder = write_folder(tmp_path, encoded(FLOATS, "TIFF"))
    assert not any("cannot be read" in text for text in warnings_of(folder, (0, 1)))


def test_a_dicom_file_is_refused_with_the_way_to_convert_it():
    with pytest.raises(BadImage, match=r"DICOM.*dcmj2pnm"):
        decode(bytes(128) + b"DICM" + bytes(100), 8)


def test_a_model_reads_new_images_by_the_range_of_its_run(tmp_path):
    """The run stores the range, and the same call finds it again."""
    values = np.random.default_rng(0).normal(300, 60, (48, 8, 8)).clip(0, 4095)
    for i, image in enumerate(values):
        image[:, i % 4 * 2 : i % 4 * 2 + 2] += 1500
        name = "new" if i % 4 > 1 or i > 36 else f"known/class{i % 4}"
        content = encoded(image.astype(np.uint16))
        Storage(str(tmp_path)).write(f"{name}/{i}.png", content)
    settings = dict(
        labeled=tmp_path / "known",
        unlabeled=tmp_path / "new",
        num_novel=2,
        preset="scratch",
        output=tmp_path / "run",
        model={"encoder": "resnet_small", "width": 4},
        batch_size=16,
        **{"pretrain.epochs": 1, "discover.epochs": 1, "train.report_to": "jsonl"},
        quiet=True,
    )
    model = uno.discover(**settings)
    low, high = model._classifier.config.data.value_range
    assert 0 < low < 400 and 1500 < high < 2200
    path = tmp_path / "new" / "2.png"
    by_hand = decode(str(path), 8, Decoding(value_range=(low, high)))
    found = model.predict([path, Image.open(path), by_hand.transpose(1, 2, 0)])
    assert found.reason == [None] * 3
    assert np.allclose(found.probabilities, found.probabilities[0])
    assert uno.discover(**settings).model_hash == model.model_hash
