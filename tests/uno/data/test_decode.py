"""Images of many kinds, good and bad."""

import errno
import io
import os
import struct
import zlib
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile, ImageOps

from uno.data import decode as decode_module
from uno.data.decode import (
    BadImage,
    Decoding,
    decode,
    decode_many,
    decode_rgb,
    decode_square_and_rgb,
    inspect_image,
    ok_mask,
    read_header,
)
from uno.data.files import Storage
from uno.data.unreadable import check_bad
from uno.errors import StorageError

from .builders import assert_refused, encoded, pixels


def smooth(height, width):
    """A picture whose red grows to the right and whose green grows downwards."""
    y, x = np.mgrid[:height, :width]
    channels = [x * 255 // max(width - 1, 1), y * 255 // max(height - 1, 1), 0 * x + 90]
    return np.stack(channels, -1).astype(np.uint8)


@pytest.mark.parametrize("format", ["PNG", "BMP", "TIFF", "WEBP"])
def test_lossless_formats_are_exact_at_their_own_size(format):
    image = pixels(0, 16, 16)
    options = {"lossless": True} if format == "WEBP" else {}
    for data in (image, encoded(image, format, **options)):
        np.testing.assert_array_equal(decode(data, 16), image.transpose(2, 0, 1))


def test_pixels_with_broken_metadata_are_not_turned():
    broken = JPEG[:2] + b"\xff\xe1\x00\x20Exif\x00\x00" + b"\xff" * 24 + JPEG[2:]
    assert np.array_equal(decode(broken, 8), decode(JPEG, 8))


GRAY = np.arange(256, dtype=np.uint8).reshape(16, 16)


@pytest.mark.parametrize("mode", ["L", "1", "P", "LA", "RGBA", "CMYK"])
def test_modes_become_rgb(mode):
    """To the colors that Pillow has for them, up to what a JPEG loses."""
    picture = Image.fromarray(smooth(16, 16)).convert(mode)
    format = "JPEG" if mode == "CMYK" else "PNG"
    options = {"quality": 95} if mode == "CMYK" else {}
    out = decode(encoded(picture, format, **options), 16).astype(int)
    expected = np.asarray(picture.convert("RGB")).transpose(2, 0, 1)
    assert np.abs(out - expected).mean() < (12 if mode == "CMYK" else 1)


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_16_bits_are_scaled_to_8(format):
    """Kills: clipping at 255."""
    deep = encoded(Image.fromarray(GRAY.astype(np.uint16) * 257), format)
    np.testing.assert_array_equal(decode(deep, 16), np.stack([GRAY] * 3))


def test_transparent_pixels_become_white():
    rgba = np.zeros((8, 8, 4), np.uint8)
    rgba[:4, :, 3] = 255
    expected = np.full((3, 8, 8), 255, np.uint8)
    expected[:, :4] = 0
    np.testing.assert_array_equal(decode(encoded(rgba), 8), expected)


@pytest.mark.parametrize(
    ("format", "transparency"), [("GIF", 0), ("PNG", 0), ("PNG", bytes([0, 128]))]
)
def test_a_transparent_color_of_a_palette_becomes_white(format, transparency):
    palette = Image.new("P", (8, 8), 0)
    palette.putpalette([255, 0, 0, 0, 255, 0])
    assert decode(encoded(palette, format, transparency=transparency), 8).min() == 255


@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP", "TIFF"])
def test_the_first_frame_counts(format):
    first, second = (Image.new("RGB", (8, 8), color) for color in ("black", "white"))
    data = encoded(first, format, save_all=True, append_images=[second])
    assert decode(data, 8).max() < 10


def huge_png(width, height):
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + struct.pack(">I", 13)
        + chunk
        + struct.pack(">I", zlib.crc32(chunk))
    )


JPEG, PNG = encoded(pixels(0, 40, 40), "JPEG"), encoded(pixels(0, 40, 40))
BAD = {
    "empty": b"",
    "text": b"hello",
    "signature only": PNG[:8],
    "none": None,
    "truncated jpeg": JPEG[: len(JPEG) // 2],
    "truncated png": PNG[: len(PNG) // 2],
    "bomb": huge_png(60_000, 60_000),
    "large": huge_png(12_000, 9_000),
    "zero": huge_png(0, 10),
    "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
    "svg": b'<svg xmlns="http://www.w3.org/2000/svg"/>',
    "ppm": b"P6 2 2 255 " + bytes(12),
    "ico": encoded(pixels(0, 16, 16), "ICO"),
    "float tiff": encoded(Image.fromarray(np.ones((8, 8), np.float32)), "TIFF"),
    "int tiff": encoded(Image.fromarray(np.full((8, 8), 1 << 20, np.int32)), "TIFF"),
    "missing file": "/nowhere/at/all.png",
    "folder": "/tmp",
    "null byte": "/tmp/\0.png",
    "unknown uri": "nosuch://host/x.png",
    "float array": np.zeros((4, 4, 3)),
    "flat array": np.zeros((4, 4), np.uint8),
    "no pixels": np.zeros((0, 4, 3), np.uint8),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_images_have_one_reason(name):
    with pytest.raises(BadImage, match=r"^.{1,299}$"):
        decode(BAD[name], 8)


@pytest.mark.parametrize(
    ("limit", "value", "reason"),
    [
        ("MAX_IMAGE_PIXELS", 63, "8 x 8 pixels, not 1 to 63"),
        ("MAX_IMAGE_BYTES", 50, "larger than 50 bytes"),
    ],
)
def test_images_over_a_limit_are_refused(monkeypatch, tmp_path, limit, value, reason):
    monkeypatch.setattr(decode_module, limit, value)
    (tmp_path / "a.png").write_bytes(encoded(pixels(0)))
    with pytest.raises(BadImage, match=reason):
        decode(str(tmp_path / "a.png"), 8)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_the_facts_of_an_image_are_its_format_size_and_brightness(tmp_path, format):
    image = np.full((900, 500, 3), (20, 120, 70), np.uint8)
    path = tmp_path / "image"
    path.write_bytes(encoded(image, format))
    facts = inspect_image(str(path))
    assert facts.header == (format, 500, 900)
    assert read_header(str(path)) == read_header(path.read_bytes()) == facts.header
    assert facts.brightest == pytest.approx(120, abs=5)
    assert facts.deep_values is None
    assert inspect_image(image)[:2] == (("pixels", 500, 900), 120)


def bytes_read():
    """Return the bytes that this process has read, by Linux's own count."""
    with open("/proc/self/io", encoding="utf-8") as file:
        return int(file.readline().split()[1])


@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="needs Linux")
@pytest.mark.parametrize("place", ["{folder}", "s3://bucket"])
def test_a_header_is_read_without_the_rest_of_the_file(place, bucket):
    """In a local file, and in an object of a remote store."""
    data = encoded(pixels(0, 1000, 1000), "PNG")
    (bucket / "image").write_bytes(data)
    before = bytes_read()
    for _ in range(30):
        read_header(f"{place.format(folder=bucket)}/image")
    assert bytes_read() - before < 30 * len(data) / 4


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.sampled_from(["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF"]), st.data())
def test_no_damage_leads_to_another_exception(format, data):
    """One to four flipped bytes and a cut anywhere: pixels of the right shape, or
    BadImage.
    """
    content = bytearray(encoded(pixels(1, 12, 9), format))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(
            st.integers(1, 255)
        )
    end = data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))
    try:
        assert decode(bytes(content[:end]), 8).shape == (3, 8, 8)
    except BadImage as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [(Image.Image, "resize", TypeError), (ImageFile.ImageFile, "load", MemoryError)],
)
def test_an_error_that_is_not_about_the_image_is_raised(
    monkeypatch, owner, name, error
):
    """The code is wrong, or the machine has no memory: the image is not unreadable."""
    monkeypatch.setattr(owner, name, Mock(side_effect=error("not of the image")))
    with pytest.raises(error, match="not of the image"):
        decode_many([encoded(pixels(0, 20, 30))] * 3, 8, 2)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_process_without_free_files_does_not_make_images_unreadable(
    number, monkeypatch, tmp_path
):
    failure = OSError(number, os.strerror(number))
    monkeypatch.setattr(decode_module, "read_bytes", Mock(side_effect=failure))
    with pytest.raises(StorageError, match=r"a\.png"):
        decode(str(tmp_path / "a.png"), 8)


@pytest.mark.parametrize("error", [KeyError, TypeError, struct.error, RecursionError])
def test_pillows_errors_of_any_kind_make_an_image_unreadable(monkeypatch, error):
    """Damaged bytes lead to errors that are meant for programmers, too."""
    monkeypatch.setattr(ImageFile.ImageFile, "load", Mock(side_effect=error("x")))
    with pytest.raises(BadImage, match=error.__name__):
        decode(PNG, 8)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize(("size", "side"), [(16, 16), (16, 400), (400, 16), (90, 30)])
def test_one_read_gives_the_square_and_the_whole_image(format, size, side):
    """To the bit, also where a JPEG is taken at two scales, and turned upright."""
    exif = Image.Exif()
    exif[0x0112] = 6
    large = Image.fromarray(pixels(1, 30, 40)).resize((1200, 900))
    data = encoded(large, format, exif=exif)
    square, whole = decode_square_and_rgb(data, size, side, Decoding("bicubic"))
    np.testing.assert_array_equal(square, decode(data, size, Decoding("bicubic")))
    expected = decode_rgb(data, side)
    assert whole.shape[:2] == expected.shape[:2]
    np.testing.assert_array_equal(whole[..., :3], expected[..., :3])


@pytest.mark.parametrize("threads", [1, 3, None])
@pytest.mark.parametrize("num", [0, 150])
def test_decode_many_counts_every_row(threads, num):
    """ok + bad = all, in order, whatever the number of threads."""
    arrays = np.stack([pixels(i) for i in range(150)])[:num]
    images = [b"bad" if i % 10 == 3 else encoded(arrays[i]) for i in range(num)]
    expected = arrays.transpose(0, 3, 1, 2).copy()
    expected[3::10] = 0
    out, reasons = decode_many(images, 8, threads)
    np.testing.assert_array_equal(out, expected)
    assert np.flatnonzero(~ok_mask(reasons)).tolist() == [*range(3, num, 10)]


def test_budget_of_bad_images(tmp_path):
    storage, ids = Storage(str(tmp_path)), list(map(str, range(200)))
    reasons = [None, "no image data", *[None] * 197, "other"]
    assert check_bad([], [], 0.0, storage) == [] == storage.list()
    assert check_bad(ids, reasons, 0.01, storage) == [
        {"id": "1", "reason": "no image data"},
        {"id": "199", "reason": "other"},
    ]
    facts = ["2 of 199 images are unreadable", "1: no image data; all are in "]
    assert_refused(facts, check_bad, ids[1:], reasons[1:], 0.01, storage)


def test_large_jpegs_are_drafted_and_stay_close(monkeypatch):
    """Kills: a draft below the final size (blur), a draft that moves the crop."""
    noise = Image.fromarray(pixels(3, 40, 56)).resize(
        (1120, 800), Image.Resampling.BICUBIC
    )
    data = encoded(noise, "JPEG", quality=95)
    fast = decode(data, 40).astype(int)
    monkeypatch.setattr(decode_module, "DRAFT", 10_000)
    full = decode(data, 40).astype(int)
    assert 0 < np.abs(fast - full).mean() < 1.5


def test_more_pixels_than_bytes_can_hold_are_refused_before_they_are_made():
    """Kills: gigabytes for a header. A real image has them: one color in one bit a
    pixel.
    """
    header = bytearray(encoded(pixels(0), "BMP"))
    header[18:26] = struct.pack("<ii", 9_000, 9_000)
    with pytest.raises(BadImage, match="9000 x 9000 pixels in 246 bytes"):
        decode(bytes(header), 8)
    assert decode(encoded(Image.new("1", (4000, 3000)), "PNG"), 8).max() == 0


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((41, 64), 16),
        ((64, 41), 16),
        ((50, 50), 16),
        ((300, 400), 224),
        ((100, 300), 224),
        ((9, 19), 16),
    ],
)
def test_turned_pictures_are_pillows_to_the_level(
    orientation, interpolation, shape, size
):
    """Turned first, then resized: Pillow rounds in an order that depends on the scale.
    Kills: a small square that is turned.
    """
    picture, exif = Image.fromarray(pixels(orientation, *shape)), Image.Exif()
    exif[0x0112] = orientation
    data = encoded(picture, "PNG", exif=exif)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    left, top = ((length - min(shape)) / 2 for length in upright.size)
    box = (left, top, left + min(shape), top + min(shape))
    how = Image.Resampling[interpolation.upper()]
    expected = np.asarray(upright.resize((size, size), how, box)).transpose(2, 0, 1)
    np.testing.assert_array_equal(decode(data, size, Decoding(interpolation)), expected)
