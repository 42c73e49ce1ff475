"""Trained-model directories without training, and files that are damaged in every
way we know.
"""

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from tests.uno.data.builders import encoded, pixels
from tests.uno.small_run import SMALL
from uno.augment import normalize
from uno.config import Config, dump_yaml, override
from uno.data.files import Storage
from uno.data.sources import read_digits
from uno.model import UnoModel, build_network
from uno.presets import preset
from uno.results.infer import Classifier, load_classifier, save_model

TINY = {key: value for key, value in SMALL.items() if key.startswith("model.")}
TINY |= {"model.num_heads": 3, "compute.threads": 1}


def write_model(
    run: Path, aligned: bool = True, num_novel: int = 5, **overrides: Any
) -> Config:
    """A run directory as discover leaves it, with random weights and batch norms
    that have seen something.
    """
    config = override(
        preset("digits"), TINY | {k.replace("__", "."): v for k, v in overrides.items()}
    )
    model = build_network(config, 5, num_novel, seed=1)
    generator = torch.Generator().manual_seed(0)
    for name, buffer in model.named_buffers():
        if name.endswith("running_var"):
            buffer.uniform_(0.5, 2, generator=generator)
    if model.eval().projector is not None:
        _spread_prototypes_(model, config)
    storage, best_head = Storage(str(run)), min(1, model.num_heads - 1)
    save_model(config, storage, model, best_head, [str(i) for i in range(5)])
    storage.write("config.yaml", dump_yaml(config).encode())
    if aligned:
        facts = json.loads(storage.read("model/classes.json"))
        facts["alignment"] = [list(range(num_novel))] * model.num_heads
        storage.write("model/classes.json", json.dumps(facts).encode())
    return config


@torch.no_grad()
def _spread_prototypes_(model: UnoModel, config: Config) -> None:
    """Point prototypes from the mean to single images, so that every class is
    predicted for some digits.
    """
    digits = torch.from_numpy(read_digits().images.items[:40]).permute(0, 3, 1, 2) / 255
    size = config.data.stored_size
    images = F.interpolate(digits, size=(size, size), mode="bilinear")
    features = model.encoder(normalize(images, config.data.mean, config.data.std))
    inputs = F.normalize(features, dim=-1) if model.normalize_input else features
    for head, points in (
        (model.known, features),
        (model.novel, model.projector(inputs)),
    ):
        points = F.normalize(points, dim=-1)
        mean = F.normalize(points.mean(dim=-2, keepdim=True), dim=-1)
        points = points[..., : head.weight.shape[-2], :]
        points = points - (points * mean).sum(dim=-1, keepdim=True) * mean
        head.weight.copy_(F.normalize(points[: len(head.weight)], dim=-1))


def tiny_model(run: Path, **overrides: Any) -> Classifier:
    """:func:`write_model`, loaded."""
    write_model(run, **overrides)
    return load_classifier(Storage(str(run)))


def write_digits(folder: Path, images: np.ndarray) -> None:
    """Images (N, H, W, 3) as PNG files."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, image in enumerate(images):
        Image.fromarray(image).save(folder / f"digit-{i:04d}.png", compress_level=1)


def write_damaged(folder: Path) -> dict[str, bool]:
    """Forty files of different kinds; the result says which of them can be read all
    the same.
    """
    folder.mkdir(parents=True, exist_ok=True)
    noise = pixels(0, 40, 30)
    picture = Image.fromarray(noise)
    jpeg, png, gif, bmp, tiff, webp = (
        encoded(noise, name) for name in ("JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP")
    )
    exif = Image.Exif()
    exif[0x0112] = 6
    flipped = bytearray(png)
    flipped[png.index(b"IDAT") + 4] ^= 0xFF  # the first byte of the compressed stream
    rgba = np.concatenate([noise, np.full((40, 30, 1), 100, np.uint8)], axis=2)
    broken = {
        "empty.jpg": b"",
        "empty.png": b"",
        "one-byte.jpg": b"\xff",
        "zeros.jpg": bytes(5000),
        "text.jpg": b"this is not an image\n" * 20,
        "html.png": b"<html><script>alert(1)</script></html>",
        "eps.jpg": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage\n",
        "svg.png": b"<svg xmlns='http://www.w3.org/2000/svg' width='10' height='10'/>",
        "pdf.jpg": b"%PDF-1.4\n1 0 obj\n",
        "script.jpg": b"#!/bin/sh\nrm -rf /\n",
        "pickle.jpg": b"\x80\x04\x95\x10\x00\x00\x00\x00",
        "zip.jpg": b"PK\x03\x04" + bytes(100),
        "bomb.png": _png_header(60_000, 60_000),
        "wide.png": _png_header(2_000_000_000, 1),
        "flat.png": _png_header(0, 10),
        "bomb.bmp": _bmp_header(50_000, 50_000),
        "bomb.gif": b"GIF89a\xff\xff\xff\xff\x00\x00\x00",
        "flipped.png": bytes(flipped),
        "truncated-half.jpg": jpeg[: len(jpeg) // 2],
        "truncated-header.jpg": jpeg[:20],
        "truncated-half.png": png[: len(png) // 2],
        "truncated-header.png": png[:30],
        "truncated.gif": gif[:40],
        "truncated.bmp": bmp[:100],
        "truncated.tiff": tiff[:60],
        "truncated.webp": webp[: len(webp) // 2],
        "float.tiff": encoded(noise[..., 0].astype(np.float32), "TIFF"),
    }
    fine = {
        "png-named.jpg": png,
        "jpeg-named.png": jpeg,
        "palette.gif": gif,
        "alpha.png": encoded(rgba),
        "sixteen-bit.png": encoded(
            (np.arange(1200).reshape(40, 30) * 50).astype(np.uint16)
        ),
        "palette.png": encoded(picture.convert("P")),
        "one-bit.png": encoded(picture.convert("1")),
        "gray.jpg": encoded(picture.convert("L"), "JPEG"),
        "cmyk.jpg": encoded(picture.convert("CMYK"), "JPEG"),
        "rotated.jpg": encoded(noise, "JPEG", exif=exif),
        "trailing.jpg": jpeg + b"garbage" * 100,
        "broken-exif.jpg": jpeg[:2]
        + b"\xff\xe1\x00\x10Exif\x00\x00garbage!"
        + jpeg[2:],
        "single-pixel.png": encoded(noise[:1, :1]),
    }
    for name, data in (broken | fine).items():
        (folder / name).write_bytes(data)
    return dict.fromkeys(broken, False) | dict.fromkeys(fine, True)


def _png_header(width: int, height: int) -> bytes:
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = (
        struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    )
    return b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 4) + b"IDAT" + bytes(8)


def _bmp_header(width: int, height: int) -> bytes:
    header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + header
