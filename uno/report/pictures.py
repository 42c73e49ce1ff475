"""Thumbnails as data URIs: strips of a class's images and one sheet for the points of the maps."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow

from uno.data.decode import decode_many
from uno.data.rows import Chosen
from uno.data.splits import Task
from uno.report.clusters import Findings
from uno.report.predictions import Predictions

BUDGET_BYTES = 2_800_000  # of all galleries; the page stays below 5 MB
SHEET_BYTES = 700_000
MAX_SIDE, SHEET_SIDE = 64, 24
SMALL = 16
"""Up to this side a PNG is smaller than a JPEG, and enlarging keeps the pixels."""
SHEET_COLUMNS = 40


@dataclass(frozen=True)
class Strip:
    """Images side by side: what they are, their positions among the predicted rows, one data URI."""

    title: str
    rows: list[int]
    uri: str


def encode(images: NDArray[np.uint8], columns: int, quality: int) -> str:
    """(N,3,S,S) -> a data URI of one picture with ``columns`` images in a row; PNG if tiny, else JPEG."""
    num, _, side, _ = images.shape
    lines = -(-num // columns)
    sheet = np.zeros((lines * columns, 3, side, side), np.uint8)
    sheet[:num] = images
    grid = sheet.reshape(lines, columns, 3, side, side).transpose(0, 3, 1, 4, 2)
    pixels = grid.reshape(lines * side, columns * side, 3)
    grey = bool((pixels == pixels[..., :1]).all())
    picture = Pillow.fromarray(np.ascontiguousarray(pixels[..., 0] if grey else pixels))
    buffer = BytesIO()
    if side <= SMALL:
        picture.save(buffer, "PNG", optimize=True)
    else:
        picture.save(buffer, "JPEG", quality=quality, optimize=True)
    kind = "png" if side <= SMALL else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


class Album:
    """Draws strips until :data:`BUDGET_BYTES` are spent; after that ``full`` is true.

    Args:
        task: of the run.
        predictions: rows to choose from.
        findings: of the same rows.
        size: side of the stored images.
        num_classes: that share the budget; many classes get fewer, smaller and coarser pictures.
        seed: of the random choice.
    """

    def __init__(
        self, task: Task, predictions: Predictions, findings: Findings, size: int, num_classes: int, seed: int
    ) -> None:
        self._task, self._predictions, self._findings = task, predictions, findings
        self._left, self._generator = BUDGET_BYTES, np.random.default_rng([seed, 7])
        many = num_classes > 24
        self.num = 8 if many else 10
        self.side = min(size, 32 if many else MAX_SIDE)
        self._quality = 60 if many else 80
        self.full = False

    def strips(self, members: NDArray[np.int64]) -> list[Strip]:
        """Most confident, random and least confident of ``members``, positions among the predicted rows.

        Each image is in one strip at most; [] when there are no members or the budget is spent.
        """
        if self.full or not len(members):
            return []
        ranked = members[np.argsort(-self._findings.confidence[members], kind="stable")]
        share = min(self.num, -(-len(ranked) // 3))
        top, rest = ranked[:share], ranked[share:]
        low = rest[-share:][::-1] if len(rest) else rest
        middle = rest[: len(rest) - len(low)]
        random = np.sort(self._generator.permutation(len(middle))[: self.num])
        chosen = (("Most confident", top), ("Random", middle[random]), ("Least confident", low))
        strips = [self._strip(title, rows) for title, rows in chosen if len(rows)]
        self._left -= sum(len(strip.uri) for strip in strips)
        self.full = self._left < 0
        return strips

    def preview(self, members: NDArray[np.int64], num: int = 6) -> Strip | None:
        """The few most confident of ``members``, small."""
        if not len(members):
            return None
        ranked = members[np.argsort(-self._findings.confidence[members], kind="stable")][:num]
        return self._strip("Most confident", ranked, min(self.side, 28))

    def sheet(self, positions: NDArray[np.int64]) -> tuple[str, int]:
        """One picture of all ``positions``, and its side; coarser until it fits :data:`SHEET_BYTES`."""
        side = min(self.side, SHEET_SIDE)
        images = self._images(positions, side)
        uri = ""
        for quality in (70, 50, 30, 10):
            uri = encode(images, SHEET_COLUMNS, quality)
            if len(uri) <= SHEET_BYTES:
                break
        return uri, side

    def _strip(self, title: str, rows: NDArray[np.int64], side: int | None = None) -> Strip:
        images = self._images(rows, side or self.side)
        return Strip(title, rows.tolist(), encode(images, len(rows), self._quality))

    def _images(self, positions: Sequence[int] | NDArray[np.int64], side: int) -> NDArray[np.uint8]:
        rows = self._predictions.index[np.asarray(positions)]
        return decode_many(Chosen(self._task.rows.images, rows), side)[0].numpy()
