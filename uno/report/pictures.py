"""Thumbnails as data URIs: strips of a class's images and one sheet for the points of the maps."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from uno.data.decode import decode_many
from uno.data.rows import Chosen, Rows
from uno.report.facts import Sample
from uno.results.show import encode

BUDGET_BYTES = 2_800_000  # of all galleries; the page stays below 5 MB
SHEET_BYTES = 700_000
MAX_SIDE, SHEET_SIDE = 64, 24
SHEET_COLUMNS = 40


class Strip(NamedTuple):
    """Images side by side: what they are, their positions in the sample, one data URI."""

    title: str
    rows: list[int]
    uri: str


class Album:
    """Draws strips of ``sample``'s images until BUDGET_BYTES are spent and it is ``full``; many classes get
    fewer, smaller and coarser pictures.
    """

    def __init__(self, rows: Rows, sample: Sample, size: int, seed: int) -> None:
        self._rows, self._sample = rows.images, sample
        self._left, self._generator = BUDGET_BYTES, np.random.default_rng([seed, 7])
        many = len(sample.names) > 24
        self._num, self._quality = (8, 60) if many else (10, 80)
        self.side, self.full = min(size, 32 if many else MAX_SIDE), False

    def strips(self, members: NDArray[np.int64]) -> list[Strip]:
        """Most confident, random and least confident of ``members``, positions in the sample; none twice."""
        if self.full or not len(members):
            return []
        ranked = self._ranked(members)
        share = min(self._num, -(-len(ranked) // 3))
        middle, low = ranked[share:-share], ranked[share:][-share:][::-1]
        random = middle[np.sort(self._generator.permutation(len(middle))[: self._num])]
        chosen = (("Most confident", ranked[:share]), ("Random", random), ("Least confident", low))
        strips = [self._strip(title, rows, self.side) for title, rows in chosen if len(rows)]
        self._left -= sum(len(strip.uri) for strip in strips)
        self.full = self._left < 0
        return strips

    def preview(self, members: NDArray[np.int64]) -> Strip | None:
        """The few most confident of ``members``, small."""
        ranked = self._ranked(members)[:6]
        return self._strip("Most confident", ranked, min(self.side, 28)) if len(members) else None

    def sheet(self, positions: NDArray[np.int64]) -> tuple[str, int]:
        """One picture of all ``positions``, and its side; coarser until it fits :data:`SHEET_BYTES`."""
        side = min(self.side, SHEET_SIDE)
        images = self._pixels(positions, side)
        for quality in (70, 50, 30, 10):
            uri = encode(images, SHEET_COLUMNS, quality)
            if len(uri) <= SHEET_BYTES:
                break
        return uri, side

    def _ranked(self, members: NDArray[np.int64]) -> NDArray[np.int64]:
        return members[np.argsort(-self._sample.confidence[members], kind="stable")]

    def _strip(self, title: str, rows: NDArray[np.int64], side: int) -> Strip:
        return Strip(title, rows.tolist(), encode(self._pixels(rows, side), len(rows), self._quality))

    def _pixels(self, positions: NDArray[np.int64], side: int) -> NDArray[np.uint8]:
        return decode_many(Chosen(self._rows, self._sample.index[positions]), side)[0].numpy()
