"""Drawn photographs: a folder for each known shape, and a folder of known and new
ones without labels.
"""

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

CORNERS = {  # (x, y) of a polygon around the middle, of radius 1
    "triangle": [(0, -1), (0.9, 0.7), (-0.9, 0.7)],
    "square": [(-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)],
    "bar": [(-1, -0.25), (1, -0.25), (1, 0.25), (-1, 0.25)],
    "bolt": [
        (-0.4, -1),
        (0.6, -1),
        (0.1, -0.2),
        (0.7, -0.2),
        (-0.5, 1),
        (-0.1, 0.1),
        (-0.7, 0.1),
    ],
    "arrow": [
        (-1, -0.2),
        (0.2, -0.2),
        (0.2, -0.8),
        (1, 0),
        (0.2, 0.8),
        (0.2, 0.2),
        (-1, 0.2),
    ],
    "cross": [
        (-0.3, -1),
        (0.3, -1),
        (0.3, -0.3),
        (1, -0.3),
        (1, 0.3),
        (0.3, 0.3),
        (0.3, 1),
        (-0.3, 1),
        (-0.3, 0.3),
        (-1, 0.3),
        (-1, -0.3),
        (-0.3, -0.3),
    ],
}
NEW = ("arrow", "cross")


def draw(name: str, seed: int, side: int = 48) -> Image.Image:
    """One shape, of a place, size and colors that the seed chooses."""
    rng = np.random.default_rng(seed)
    light, dark = rng.integers(170, 256, 3), rng.integers(0, 90, 3)
    image = Image.new("RGB", (side, side), tuple(map(int, light)))
    radius, middle = side * rng.uniform(0.25, 0.38), side / 2 + rng.uniform(-3, 3, 2)
    points = [
        tuple(float(m + radius * c) for m, c in zip(middle, corner, strict=True))
        for corner in CORNERS[name]
    ]
    ImageDraw.Draw(image).polygon(points, fill=tuple(map(int, dark)))
    return image


def draw_photos(folder: Path, num: int = 12) -> None:
    """``known/SHAPE/*.png``, ``num`` of each known shape, and ``new/*.png``, half as
    many of every shape.
    """
    for kind, name in enumerate(CORNERS):
        places = [folder / "new" / f"{kind}{i:03}.png" for i in range(num // 2)]
        if name not in NEW:
            places += [folder / "known" / name / f"{i:03}.png" for i in range(num)]
        for seed, place in enumerate(places):
            place.parent.mkdir(parents=True, exist_ok=True)
            draw(name, 1000 * kind + seed).save(place)
