"""Pictures of a report as data URIs: tiles of classes, and one sheet for the map."""

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

BUDGET_BYTES = 12_000_000  # size of all tiles, as text in the page
SHEET_BYTES = 700_000  # size of the sheet
# Sides and WebP qualities of tiles. The first pair with which all tiles fit the budget
# is used. With the last pair, tiles are left out.
SIZES = ((240, 60), (200, 55), (160, 50), (120, 50), (120, 30))
SHEET_SIDE, PREVIEW_SIDE = 24, 28  # pixels
SHEET_COLUMNS = 40
NUM_PROBED = 24  # images from which the size of all tiles is estimated
NUM_PREVIEWED = 6  # pictures of a class in the table of classes
NUM_TEXTS = 2  # rows of a class that the table shows where there are no pictures
MAX_TEXT = 300  # characters of a row that is shown as text
NUM_FIRST, NUM_LAST = 12, 6  # tiles of a class that are shown before it is opened


class Tile(NamedTuple):
    """A picture of a class.

    Attributes:
        row: Position in the sample.
        uri: The picture as a data URI, or an empty string for rows without pictures.
        text: The caption of the picture; for rows without pictures their text or
            identifier.
    """

    row: int
    uri: str
    text: str


class Gallery(NamedTuple):
    """The tiles of a class, the most confident first.

    Attributes:
        first: The first few.
        rest: Those between.
        last: The last few.
        left_out: Number of members without a tile.
    """

    first: list[Tile]
    rest: list[Tile]
    last: list[Tile]
    left_out: int


class Album:
    """Draws the members of classes within a budget of bytes.

    All members are drawn if they fit the budget. Otherwise each class has at most
    ``most`` tiles, evenly spaced in confidence.

    Args:
        rows: The rows of the run.
        index: Row numbers (M,) of the sample.
        confidence: Probabilities (M,) of the rows' classes.
        groups: Positions in the sample of the members of each class.

    Attributes:
        side: Side of a tile in pixels.
        most: Largest number of tiles of a class.
        is_whole: Whether all members are drawn.
        num_bytes: Estimated size of all tiles.
    """

    def __init__(
        self,
        rows: Rows,
        index: NDArray[np.int64],
        confidence: NDArray[np.float32],
        groups: Sequence[NDArray[np.int64]],
    ) -> None:
        pictures = rows.images.pictures()
        self._confidence = confidence
        self._images = None if pictures is None else pictures.take(index)
        self._ids = rows.ids.take(index).to_pylist()
        self._captions = rows.images.captions(index)
        sizes = [len(group) for group in groups]
        total = sum(sizes)
        members = np.concatenate([*groups, np.arange(0)])
        probed = members[evenly_spaced(NUM_PROBED, total)].tolist()
        sides = [] if self._images is None else [_side(self._images[i]) for i in probed]
        native = int(np.median(sides or [SIZES[0][0]]))
        fitting = [size for size in SIZES if size[0] <= native] or [(native, 85)]
        mean_bytes = 1.0
        for self.side, self._quality in fitting:
            if total:
                tiles = [self._tile(i) for i in probed]
                mean_bytes = float(np.mean([len(t.uri) + len(t.text) for t in tiles]))
            if mean_bytes * total <= BUDGET_BYTES:
                break
        self.most = _cap(sizes, int(BUDGET_BYTES / mean_bytes))
        num_tiles = sum(min(size, self.most) for size in sizes)
        self.is_whole = num_tiles == total
        self.num_bytes = int(mean_bytes * num_tiles)

    @property
    def has_pictures(self) -> bool:
        """Whether rows have pictures. Other rows are shown as text."""
        return self._images is not None

    def gallery(self, members: NDArray[np.int64]) -> Gallery:
        """Return the tiles of a class.

        Args:
            members: Positions of the members in the sample.

        Returns:
            Tiles by falling confidence: all members, or ``most`` of them, evenly
            spaced.
        """
        ranked = self._ranked(members)
        if len(ranked) > self.most:
            chosen = np.linspace(0, len(ranked) - 1, self.most).round().astype(int)
            ranked = ranked[chosen]
        threads = available_cpus()
        tiles = list(prefetch_map(self._tile, ranked.tolist(), threads, 2 * threads))
        last = tiles[NUM_FIRST:][-NUM_LAST:]
        rest = tiles[NUM_FIRST : len(tiles) - len(last)]
        return Gallery(tiles[:NUM_FIRST], rest, last, len(members) - len(tiles))

    def preview(self, members: NDArray[np.int64]) -> tuple[str, int, list[str]]:
        """Show at most six of the most confident members of a class in a table.

        Args:
            members: Positions of the members in the sample.

        Returns:
            A data URI of one picture with the members side by side, their number, and
            an empty list. For rows without pictures: an empty string, 0, and the texts
            of two members.
        """
        ranked = self._ranked(members)[:NUM_PREVIEWED]
        if self._images is None:
            return "", 0, [self._tile(i).text for i in ranked[:NUM_TEXTS].tolist()]
        if not len(ranked):
            return "", 0, []
        pixels = self._pixels(ranked, min(self.side, PREVIEW_SIDE))
        return encode(pixels, len(ranked), 80), len(ranked), []

    def sheet(self, positions: NDArray[np.int64]) -> tuple[str, int]:
        """Draw all ``positions`` on one sheet of about :data:`SHEET_BYTES`.

        The pictures are squares in rows of :data:`SHEET_COLUMNS`, in the given order.

        Returns:
            The sheet as a data URI and the side of one picture in pixels, or
            ``("", 0)`` for rows without pictures.
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
        """Sort positions by confidence, the most confident first."""
        return members[np.argsort(-self._confidence[members], kind="stable")]

    def _pixels(self, positions: NDArray[np.int64], side: int) -> NDArray[np.uint8]:
        """Decode images as squares, uint8 (n, 3, side, side)."""
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
    """Return the shorter side of an image in pixels."""
    try:
        return min(read_header(image)[1:])
    except BadImage:  # the file is gone since the run
        return SIZES[0][0]


def _cap(sizes: Sequence[int], total: int) -> int:
    """Return the largest number of tiles of one group.

    All groups share ``total`` tiles. Tiles that small groups do not need go to the
    larger ones. ``sizes`` are the numbers of members of the groups.
    """
    left, groups = total, sorted(sizes)
    for i, size in enumerate(groups):
        share = left // (len(groups) - i)
        if size > share:
            return max(1, share)
        left -= size
    return max(groups, default=0)
