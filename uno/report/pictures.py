"""Pictures as data URIs: a tile for every member of a class, and one sheet for the
points of the maps.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow

from uno.cpus import available_cpus
from uno.data.decode import BadImage, decode, decode_many, prefetch_map, read_header
from uno.data.images import Image, evenly_spaced
from uno.data.rows import Rows
from uno.results.show import SMALL, data_uri, encode

BUDGET_BYTES = 12_000_000  # of all tiles, as text in the page
SHEET_BYTES = 700_000
SIZES = ((240, 60), (200, 55), (160, 50), (120, 50), (120, 30))
"""Side and WebP quality of tiles: the first whose tiles fit the budget; with the
last, some are left out.
"""
SHEET_SIDE, PREVIEW_SIDE = 24, 28
SHEET_COLUMNS = 40
NUM_PROBED = 24  # images that tell how large tiles will be
# most confident rows of a class where there are no pictures; characters of one
NUM_TEXTS, MAX_TEXT = 2, 300
NUM_FIRST, NUM_LAST = 12, 6  # tiles of a class that are shown before it is opened


class Tile(NamedTuple):
    """An image, its position in the sample; "" for one that has none, and the row's
    text or else id.
    """

    row: int
    uri: str
    text: str


class Gallery(NamedTuple):
    """Tiles of a class by falling confidence: the first and last few, the rest, and
    how many are left out.
    """

    first: list[Tile]
    rest: list[Tile]
    last: list[Tile]
    left_out: int


class Album:
    """Draws the members of classes, ``groups`` of positions in the sample: all of them
    while tiles fit the budget, else as many of each class, evenly spaced in
    ``confidence``. ``index`` (M,): rows of the sample; ``side``: of a tile.
    """

    def __init__(
        self,
        rows: Rows,
        index: NDArray[np.int64],
        confidence: NDArray[np.float32],
        groups: Sequence[NDArray[np.int64]],
    ) -> None:
        pictures, self._confidence = rows.images.pictures(), confidence
        self._images = None if pictures is None else pictures.take(index)
        self._ids, self._captions = rows.ids.take(index), rows.images.captions(index)
        sizes, total = [len(group) for group in groups], sum(map(len, groups))
        probe = np.concatenate([*groups, np.arange(0)])
        probe = probe[evenly_spaced(NUM_PROBED, total)]
        sides = (
            []
            if self._images is None
            else [_side(self._images[i]) for i in probe.tolist()]
        )
        native = int(np.median(sides or [SIZES[0][0]]))
        fitting = [size for size in SIZES if size[0] <= native] or [(native, 85)]
        for self.side, self._quality in fitting:
            mean = (
                np.mean(
                    [len(t.uri) + len(t.text) for t in map(self._tile, probe.tolist())]
                )
                if total
                else 1
            )
            if mean * total <= BUDGET_BYTES:
                break
        self.most = _cap(sizes, int(BUDGET_BYTES / mean))
        num = sum(min(size, self.most) for size in sizes)
        self.is_whole, self.num_bytes = num == total, int(mean * num)

    @property
    def has_pictures(self) -> bool:
        """Whether rows have pictures; else they are shown as text."""
        return self._images is not None

    def gallery(self, members: NDArray[np.int64]) -> Gallery:
        """Tiles of ``members``."""
        ranked = self._ranked(members)
        if len(ranked) > self.most:
            ranked = ranked[
                np.linspace(0, len(ranked) - 1, self.most).round().astype(int)
            ]
        threads = available_cpus()
        tiles = list(prefetch_map(self._tile, ranked.tolist(), threads, 2 * threads))
        last = tiles[NUM_FIRST:][-NUM_LAST:]
        rest = tiles[NUM_FIRST : len(tiles) - len(last)]
        return Gallery(tiles[:NUM_FIRST], rest, last, len(members) - len(tiles))

    def preview(self, members: NDArray[np.int64]) -> tuple[str, int, list[str]]:
        """One picture of the most confident of ``members``, side by side, and how
        many; or their texts.
        """
        ranked = self._ranked(members)[:6]
        if self._images is None:
            return "", 0, [self._tile(i).text for i in ranked[:NUM_TEXTS].tolist()]
        pixels = self._pixels(ranked, min(self.side, PREVIEW_SIDE))
        return (encode(pixels, len(ranked), 80) if len(ranked) else ""), len(ranked), []

    def sheet(self, positions: NDArray[np.int64]) -> tuple[str, int]:
        """One picture of all ``positions`` within :data:`SHEET_BYTES`, and its side;
        ("", 0): no pictures.
        """
        if self._images is None:
            return "", 0
        side = min(self.side, SHEET_SIDE)
        images = self._pixels(positions, side)
        for quality in (70, 50, 30, 10):
            uri = encode(images, SHEET_COLUMNS, quality)
            if len(uri) <= SHEET_BYTES:
                break
        return uri, side

    def _ranked(self, members: NDArray[np.int64]) -> NDArray[np.int64]:
        return members[np.argsort(-self._confidence[members], kind="stable")]

    def _pixels(self, positions: NDArray[np.int64], side: int) -> NDArray[np.uint8]:
        assert self._images is not None
        return decode_many(self._images.take(positions), side)[0].numpy()

    def _tile(self, position: int) -> Tile:
        text = self._captions[position] or self._ids[position]
        if self._images is None:
            return Tile(position, "", text[:MAX_TEXT])
        try:
            pixels = decode(self._images[position], self.side).transpose(1, 2, 0)
        except BadImage:
            pixels = np.zeros((self.side, self.side, 3), np.uint8)
        kind = "png" if self.side <= SMALL else "webp"
        uri = data_uri(Pillow.fromarray(pixels), kind, quality=self._quality, method=2)
        return Tile(position, uri, self._captions[position] or "")


def _side(image: Image) -> int:
    """The shorter side in pixels."""
    try:
        return min(read_header(image)[1:])
    except BadImage:  # gone since the model saw it
        return SIZES[0][0]


def _cap(sizes: Sequence[int], total: int) -> int:
    """The most members of each group that may be shown, so that all groups' are at
    most ``total``.
    """
    left, groups = total, sorted(sizes)
    for i, size in enumerate(groups):
        share = left // (len(groups) - i)
        if size > share:
            return max(1, share)
        left -= size
    return max(groups, default=0)
