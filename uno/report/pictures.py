"""Draw thumbnails of images as data URIs, singly or many in one picture."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow

from uno.config import Range
from uno.data.decode import BadImage, Decoding, decode_many, read_header
from uno.data.images import Image, evenly_spaced
from uno.data.rows import Rows
from uno.results.show import SMALL, data_uri, encode

MAX_TILES = 2_000  # of all classes together, about 12 MB of photographs
SIDE = 160  # pixels of a tile, unless images are smaller
QUALITY, SHEET_QUALITY = 50, 30  # of the WebP tiles, and of the JPEG sheet
SHEET_SIDE, PREVIEW_SIDE = 24, 28  # pixels
SHEET_COLUMNS = 40
NUM_PROBED = 24  # images whose median size is taken for that of all
NUM_PREVIEWED = 6  # pictures of a class in the table of classes
NUM_TEXTS = 2  # rows of a class that the table shows where there are no pictures
MAX_TEXT = 300  # characters of a row that is shown as text


class Tile(NamedTuple):
    """A thumbnail in the gallery of a class.

    Attributes:
        row: Index of the row in the sample of rows that the report shows.
        uri: The thumbnail as a data URI, or an empty string for rows without pictures.
        text: The caption of the thumbnail, or an empty string; for rows without
            pictures their text or identifier.
    """

    row: int
    uri: str
    text: str


class Preview(NamedTuple):
    """The most confident members of a class, for a table of classes.

    Attributes:
        uri: One picture with the members side by side, as a data URI; an empty string
            for a class without members and for rows without pictures.
        num_pictures: The number of members in the picture.
        texts: The texts of a few members, for rows without pictures.
    """

    uri: str
    num_pictures: int
    texts: list[str]


class Album:
    """Draws the members of classes as thumbnails.

    A thumbnail is the centered square of an image, resized. Each class has at most
    ``max_tiles`` tiles. If it has more members, those are drawn that are evenly spaced
    in the order of confidence. The headers of some images are read when an object is
    made.

    Args:
        rows: The rows of the run.
        index: Row numbers (M,) of the sample of rows that the report shows.
        confidence: Probability of the predicted class of each row in the sample, (M,).
        groups: For each class the indices of its members in the sample, int64 (n,).
        value_range: The stored values (black, white) that become 0 and 255 in gray
            images of more than 8 bits; None for 0 and 65,535.

    Attributes:
        has_pictures: Whether rows have pictures. Other rows are shown as text.
        side: Side of a thumbnail in pixels: 160, or the median of the shorter sides of
            up to 24 images if that is less.
        max_tiles: Largest number of thumbnails of a class: 2,000 divided by the number
            of ``groups`` and rounded down, but at least 1.
        is_whole: Whether all members of all classes are drawn.

    Raises:
        StorageError: An image's file cannot be read now, but perhaps later.
        ConfigError: A file that holds many images cannot be read.
    """

    def __init__(
        self,
        rows: Rows,
        index: NDArray[np.int64],
        confidence: NDArray[np.float32],
        groups: Sequence[NDArray[np.int64]],
        value_range: Range | None = None,
    ) -> None:
        self._decoding = Decoding(value_range=value_range)
        pictures = rows.images.pictures()
        self.has_pictures = pictures is not None
        self._images = None if pictures is None else pictures.take(index)
        self._confidence = confidence
        self._ids = rows.ids.take(index).to_pylist()
        self._captions = rows.images.captions(index)
        members = np.concatenate([*groups, np.arange(0)])
        probed = members[evenly_spaced(NUM_PROBED, len(members))]
        self.side = SIDE
        if self._images is not None and len(probed):
            images = self._images
            native = np.median([_shorter_side(images[i]) for i in probed.tolist()])
            self.side = min(SIDE, int(native))
        self.max_tiles = max(1, MAX_TILES // max(1, len(groups)))
        self.is_whole = max(map(len, groups), default=0) <= self.max_tiles

    def gallery(self, members: NDArray[np.int64]) -> list[Tile]:
        """Draw the members of a class as thumbnails, the most confident first.

        Args:
            members: Indices of the members in the sample.

        Returns:
            Thumbnails of all members, or of ``max_tiles`` of them that are evenly
            spaced in the order of confidence. Rows without pictures have a text
            instead.

        Raises:
            StorageError: An image's file cannot be read now, but perhaps later.
            ConfigError: A file that holds many images cannot be read.
        """
        ranked = self._ranked(members)
        if len(ranked) > self.max_tiles:
            chosen = np.linspace(0, len(ranked) - 1, self.max_tiles)
            ranked = ranked[chosen.round().astype(int)]
        return self._tiles(ranked)

    def preview(self, members: NDArray[np.int64]) -> Preview:
        """Draw a few of the most confident members of a class, for a table of classes.

        Args:
            members: Indices of the members in the sample.

        Returns:
            One picture with at most ``NUM_PREVIEWED`` (6) members side by side, the
            most confident first, as squares of at most 28 pixels, and their number. For
            rows without pictures, the texts of at most ``NUM_TEXTS`` (2) members. A
            class without members has neither.

        Raises:
            StorageError: An image's file cannot be read now, but perhaps later.
            ConfigError: A file that holds many images cannot be read.
        """
        ranked = self._ranked(members)[:NUM_PREVIEWED]
        if not self.has_pictures:
            return Preview("", 0, [t.text for t in self._tiles(ranked[:NUM_TEXTS])])
        if not len(ranked):
            return Preview("", 0, [])
        pixels = self._pixels(ranked, min(self.side, PREVIEW_SIDE))
        return Preview(encode(pixels, len(ranked), 80), len(ranked), [])

    def sheet(self, positions: NDArray[np.int64]) -> tuple[str, int]:
        """Draw thumbnails of many rows in one picture, for the t-SNE map.

        The thumbnails are squares of at most ``SHEET_SIDE`` (24) pixels in lines of
        :data:`SHEET_COLUMNS` (40), in the given order.

        Args:
            positions: Indices of the rows in the sample, int64 (n,).

        Returns:
            The picture as a data URI, and the side of one thumbnail in pixels; or
            ``("", 0)`` for rows without pictures.

        Raises:
            StorageError: An image's file cannot be read now, but perhaps later.
            ConfigError: A file that holds many images cannot be read.
        """
        if not self.has_pictures:
            return "", 0
        side = min(self.side, SHEET_SIDE)
        images = self._pixels(positions, side)
        return encode(images, SHEET_COLUMNS, SHEET_QUALITY), side

    def _ranked(self, members: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return rows in the order of confidence, the highest first.

        The confidence is the probability of a row's predicted class.

        Args:
            members: Indices of the rows in the sample, int64 (n,).
        """
        return members[np.argsort(-self._confidence[members], kind="stable")]

    def _pixels(self, positions: NDArray[np.int64], side: int) -> NDArray[np.uint8]:
        """Decode the images of rows to squares.

        The centered square of each image is resized.

        Args:
            positions: Indices of the rows in the sample, int64 (n,).
            side: Side of the squares in pixels.

        Returns:
            Pixels uint8 (n, 3, side, side) in RGB, black for images that cannot be
            decoded.

        Raises:
            StorageError: An image's file cannot be read now, but perhaps later.
            ConfigError: A file that holds many images cannot be read.
        """
        assert self._images is not None
        images = self._images.take(positions)
        return decode_many(images, side, how=self._decoding)[0].numpy()

    def _tiles(self, positions: NDArray[np.int64]) -> list[Tile]:
        """Draw a thumbnail of each row.

        Args:
            positions: Indices of the rows in the sample, int64 (n,).

        Returns:
            A thumbnail for each row, in this order: a PNG of up to 16 pixels or a
            larger WebP, and the caption of the row or an empty string. Rows without
            pictures have no thumbnail; their text is the caption, or else the
            identifier, cut off after ``MAX_TEXT`` (300) characters.
        """
        if not self.has_pictures:
            return [
                Tile(i, "", (self._captions[i] or self._ids[i])[:MAX_TEXT])
                for i in positions.tolist()
            ]
        kind = "png" if self.side <= SMALL else "webp"
        return [
            Tile(
                i,
                data_uri(Pillow.fromarray(pixels), kind, quality=QUALITY, method=2),
                self._captions[i] or "",
            )
            for i, pixels in zip(
                positions.tolist(),
                self._pixels(positions, self.side).transpose(0, 2, 3, 1),
                strict=True,
            )
        ]


def _shorter_side(image: Image) -> int:
    """Return the shorter side of an image in pixels, from its header.

    For an image that is damaged or missing the result is ``SIDE`` (160), the side of
    the largest thumbnails.

    Raises:
        StorageError: The image's file cannot be read now, but perhaps later.
    """
    try:
        return min(read_header(image)[1:3])
    except BadImage:  # the file is gone since the run
        return SIDE
