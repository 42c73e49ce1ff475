"""One way to ask images of any source, and what a source need not say itself."""

import threading

import numpy as np
import pyarrow as pa
import pytest
import torch

from uno.data.decode import PIECE_ROWS, decode_many, decoded, pieces
from uno.data.images import Images, InMemory, evenly_spaced, from_columns, to_columns, with_ready
from uno.data.row_blocks import RowBlocks

from .builders import encoded, pixels


class Grouped(Images):
    """Row i is picture i; ``size`` rows are read together, which is noted."""

    def __init__(self, num: int, size: int) -> None:
        self.num, self.size = num, size
        self.read, self.threads = list[int](), set[str]()

    def __len__(self) -> int:
        return self.num

    def read_images(self, rows):
        self.read += np.unique(rows // self.size).tolist()
        return [encoded(pixels(row)) for row in rows.tolist()]

    def groups(self, rows):
        return rows // self.size


def test_a_source_says_how_many_and_how_to_read():
    """All else follows. Kills: a choice of a choice that forgets the first one, sizes of other rows."""
    images = InMemory([b"a", b"bcd", "/dir/e.png", np.zeros((2, 3, 3), np.uint8), b""])
    chosen = images.take(np.array([4, 3, 2, 1])).take(np.array([2, 0, 3, 1]))
    assert chosen.images is images and chosen.index.tolist() == [2, 4, 1, 3]
    rows = np.array([3, 0, 2])
    assert chosen[2] == b"bcd" and [len(image) for image in chosen.read_images(rows)] == [2, 10, 3]
    assert chosen.sizes(rows).tolist() == [18, 10, 3] and chosen.paths(rows) == [None, "/dir/e.png", None]
    assert [fact[:4] for fact in chosen.content_keys(rows)] == [b"(2, ", b"/dir", b"bcd"]
    assert chosen.groups(rows) is None and chosen.reader() is None and chosen.prepared(rows) is None


@pytest.mark.parametrize(("num", "total"), [(0, 5), (1, 5), (3, 7), (7, 7), (9, 7), (4, 0)])
def test_evenly_spaced(num, total):
    """Kills: the last row twice, more rows than there are."""
    rows = evenly_spaced(num, total).tolist()
    assert len(set(rows)) == len(rows) == min(num, total) and all(0 <= row < total for row in rows)
    assert rows == [i * total // max(len(rows), 1) for i in range(len(rows))]


def test_what_is_read_together_is_read_once_and_decoded_by_all_threads(monkeypatch):
    """Kills: a read for each thread's piece, one thread for a set of one group, rows of a group in the places
    of another's.
    """
    images = Grouped(3 * PIECE_ROWS, 2 * PIECE_ROWS)
    parts = [len(rows) for rows, _ in pieces(images)]
    assert parts == [PIECE_ROWS] * 3 and sorted(images.read) == [0, 1]
    both, seen = threading.Barrier(2), []

    def decode(image, size, how):
        if len(seen) < 2:
            seen.append(threading.current_thread().name)
            both.wait(20)
        return pixels(0).transpose(2, 0, 1)

    order = np.random.default_rng(0).permutation(len(images))[:20]
    found, reasons = decode_many(images.take(order), 8, 2)
    expected, _ = decode_many(images.read_images(order), 8, 2)
    assert (found == expected).all() and not any(reasons)
    monkeypatch.setattr("uno.data.decode.decode", decode)
    decode_many(Grouped(2 * PIECE_ROWS, 2 * PIECE_ROWS), 8, 2)
    assert len(set(seen)) == 2


def test_what_is_ready_is_not_decoded_again():
    """Kills: what is ready of other rows after a choice, an image that hides that it could not be read."""
    values, reasons = torch.arange(12.0).view(4, 3), [None, "broken", None, None]
    turned = InMemory([b"a", b"b", b"c", b"d"]).take(np.array([3, 2, 1, 0]))
    images = with_ready(turned, RowBlocks([values]), reasons)
    some = images.take(np.array([2, 1]))
    found, why = some.prepared(np.array([1, 0]))
    assert found.equal(values[[1, 2]]) and why == ["broken", None]
    assert some.read_images(np.arange(2)) == [b"b", b"c"] and [*some.content_keys(np.arange(2))] == [
        b"b",
        b"c",
    ]
    (rows, batch, reasons), *_ = decoded(images, [np.array([3, 1])], 8, 1)
    assert rows.tolist() == [3, 1] and batch.equal(values[[3, 1]]) and reasons == [None, "broken"]


def test_images_travel_as_they_are():
    """Kills: pixels without their shape, a path taken for bytes."""
    given = [b"bytes", "/a/b.png", "", pixels(0, 2, 5)]
    columns = to_columns(InMemory(given), np.array([3, 0, 2, 1]))
    array, *rest = from_columns(pa.table(columns), None)
    assert (array == given[3]).all() and rest == [b"bytes", "", "/a/b.png"]
