"""One way to ask images of any source, and what a source need not say itself."""

import threading

import numpy as np
import pyarrow as pa
import pytest
import torch

from uno.data.decode import PIECE_ROWS, decode_many, decoded, pieces
from uno.data.images import (
    Images,
    InMemory,
    batches_of,
    evenly_spaced,
    from_columns,
    spread,
    to_columns,
)
from uno.data.memory import DecodedImages, RowBlocks

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
    """All else follows. Kills: a choice of a choice that forgets the first one,
    sizes of other rows.
    """
    images = InMemory([b"a", b"bcd", "/dir/e.png", np.zeros((2, 3, 3), np.uint8), b""])
    chosen = images.take(np.array([4, 3, 2, 1])).take(np.array([2, 0, 3, 1]))
    assert chosen.images is images and chosen.index.tolist() == [2, 4, 1, 3]
    rows = np.array([3, 0, 2])
    assert chosen[2] == b"bcd" and [
        len(image) for image in chosen.read_images(rows)
    ] == [2, 10, 3]
    assert chosen.sizes(rows).tolist() == [18, -1, 3]  # there is no such file
    assert chosen.paths(rows) == [None, "/dir/e.png", None]
    assert [fact[:4] for fact in chosen.content_keys(rows)] == [
        b"(2, ",
        b"/dir",
        b"bcd",
    ]
    assert (
        chosen.groups(rows) is None
        and chosen.reader() is None
        and chosen.prepared(rows) is None
    )


@pytest.mark.parametrize(
    ("num", "total"), [(0, 5), (1, 5), (3, 7), (7, 7), (9, 7), (4, 0)]
)
def test_evenly_spaced(num, total):
    """Kills: the last row twice, more rows than there are."""
    rows = evenly_spaced(num, total).tolist()
    assert len(set(rows)) == len(rows) == min(num, total) and all(
        0 <= row < total for row in rows
    )
    assert rows == [i * total // max(len(rows), 1) for i in range(len(rows))]


@pytest.mark.parametrize(
    ("num", "sizes"),
    [(100, (300, 300)), (100, (900, 60)), (100, (600, 200)), (9, (50, 0))],
)
def test_whole_groups_are_spread(num, sizes):
    """Two kinds of rows, mixed in groups of 10. Kills: other groups for each kind,
    parts of groups, more rows than wanted, another choice than evenly spaced rows where
    all are wanted or each is read by itself.
    """
    kinds = np.split(np.random.default_rng(0).permutation(sum(sizes)), [sizes[0]])
    kinds = [np.sort(rows) for rows in kinds]
    images = Grouped(sum(sizes), 10)
    found = spread(images, kinds, num)
    read = [
        set(images.groups(rows[own]).tolist())
        for rows, own in zip(kinds, found, strict=True)
    ]
    for rows, own, groups in zip(kinds, found, read, strict=True):
        assert (
            min(num, len(rows)) * 0.6 < len(own) + 1
            and len(own) <= num
            and (np.diff(own) > 0).all()
        )
        if len(rows) <= num:
            assert own.tolist() == list(range(len(rows)))
        else:
            inside = np.isin(images.groups(rows), list(groups)).sum()
            assert inside <= len(own) * 1.1 + 10  # what is read is looked at
            assert max(np.diff(sorted(groups)), default=0) <= 4 * sum(sizes) / 10 / len(
                groups
            )
    share = max(num / max(num, size) for size in sizes if size)
    assert len(read[0] | read[1]) <= np.ceil(1.1 * share * -(-sum(sizes) // 10))
    plain = spread(InMemory(np.zeros(sum(sizes))), kinds, num)
    assert [own.tolist() for own in plain] == [
        evenly_spaced(num, len(rows)).tolist() for rows in kinds
    ]


def test_a_kind_in_few_of_many_groups_is_not_left_out():
    """1,000 labeled rows in 100 groups, and 10 unlabeled ones in another one."""
    kinds = [np.arange(1000), np.arange(1000, 1010)]
    found = spread(Grouped(1010, 10), kinds, 5)
    assert [len(own) for own in found] == [5, 5]


@pytest.mark.parametrize(
    ("size", "expected"),
    [(10, [10, 10, 5]), (24, [20, 5]), (4, [4, 4, 2, 4, 4, 2, 4, 1])],
)
def test_batches_end_where_groups_end(size, expected):
    """Kills: a group in two batches that fits into one, a batch of more rows, an
    endless loop, lost rows.
    """
    found = batches_of(Grouped(30, 10), np.arange(25), size)
    assert [len(batch) for batch in found] == expected and np.concatenate(
        found
    ).tolist() == list(range(25))
    assert [len(b) for b in batches_of(InMemory([b""] * 25), np.arange(25), 10)] == [
        10,
        10,
        5,
    ]
    assert batches_of(InMemory([]), np.arange(0), 10) == []


def test_what_is_read_together_is_read_once_and_decoded_by_all_threads(monkeypatch):
    """Kills: a read for each thread's piece, one thread for a set of one group, rows of
    a group in the places of another's.
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
    """Kills: what is ready of other rows after a choice, an image that hides that it
    could not be read.
    """
    values, reasons = torch.arange(12.0).view(4, 3), [None, "broken", None, None]
    turned = InMemory([b"a", b"b", b"c", b"d"]).take(np.array([3, 2, 1, 0]))
    images = DecodedImages.of(turned, RowBlocks([values]), reasons)
    some = images.take(np.array([2, 1]))
    found, why = some.prepared(np.array([1, 0]))
    assert found.equal(values[[1, 2]]) and why == ["broken", None]
    assert some.read_images(np.arange(2)) == [b"b", b"c"] and [
        *some.content_keys(np.arange(2))
    ] == [
        b"b",
        b"c",
    ]
    (rows, batch, reasons), *_ = decoded(images, [np.array([3, 1])], 8, 1)
    assert (
        rows.tolist() == [3, 1]
        and batch.equal(values[[3, 1]])
        and reasons == [None, "broken"]
    )


def test_images_travel_as_they_are():
    """Kills: pixels without their shape, a path taken for bytes."""
    given = [b"bytes", "/a/b.png", "", pixels(0, 2, 5)]
    columns = to_columns(InMemory(given), np.array([3, 0, 2, 1]))
    array, *rest = from_columns(pa.table(columns), None)
    assert (array == given[3]).all() and rest == [b"bytes", "", "/a/b.png"]
