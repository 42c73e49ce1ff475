"""One way to ask images of any source, and what a source need not say itself."""

import threading

import numpy as np
import pytest

from uno.data.decode import PIECE_ROWS, decode_many, pieces
from uno.data.images import (
    InMemory,
    batches_of,
    evenly_spaced,
    spread,
)

from .builders import encoded, pixels


class Grouped(InMemory):
    """Row i is picture i; ``size`` rows are read together, which is noted."""

    def __init__(self, num: int, size: int) -> None:
        super().__init__(range(num))
        self.size, self.read = size, list[int]()

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
    rows = np.array([2, 0])
    assert chosen[2] == b"bcd"
    assert chosen.read_images(rows) == [b"bcd", "/dir/e.png"]
    assert chosen.paths(rows) == [None, "/dir/e.png"]
    assert chosen.groups(rows) is chosen.reader() is chosen.prepared(rows) is None
    assert chosen.sizes(np.array([3, 0, 2])).tolist() == [
        18,
        -1,
        3,
    ]  # there is no such file
    keys = [key[:4] for key in chosen.content_keys(np.array([3, 0, 2]))]
    assert keys == [b"(2, ", b"/dir", b"bcd"]


@pytest.mark.parametrize(
    ("num", "total"), [(0, 5), (1, 5), (3, 7), (7, 7), (9, 7), (4, 0)]
)
def test_evenly_spaced(num, total):
    """Kills: the last row twice, more rows than there are."""
    rows = evenly_spaced(num, total).tolist()
    assert len(set(rows)) == min(num, total)
    assert rows == [i * total // len(rows) for i in range(len(rows))]


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
    read = []
    for rows, own in zip(kinds, spread(images, kinds, num), strict=True):
        groups = np.unique(images.groups(rows[own]))
        read += groups.tolist()
        assert min(num, len(rows)) * 0.6 - 1 < len(own) <= num
        if len(rows) <= num:
            assert own.tolist() == list(range(len(rows)))
        else:
            inside = np.isin(images.groups(rows), groups).sum()
            assert inside <= len(own) * 1.1 + 10  # what is read is looked at
            widest = np.diff(groups).max(initial=0)
            assert widest <= 4 * sum(sizes) / 10 / len(groups)
    share = max(num / max(num, size) for size in sizes if size)
    assert len(set(read)) <= np.ceil(1.1 * share * -(-sum(sizes) // 10))
    plain = spread(InMemory(np.zeros(sum(sizes))), kinds, num)
    expected = [evenly_spaced(num, len(rows)).tolist() for rows in kinds]
    assert [own.tolist() for own in plain] == expected


def test_a_kind_in_few_of_many_groups_is_not_left_out():
    """1,000 labeled rows in 100 groups, and 10 unlabeled ones in another one."""
    kinds = [np.arange(1000), np.arange(1000, 1010)]
    found = spread(Grouped(1010, 10), kinds, 5)
    assert [len(own) for own in found] == [5, 5]


@pytest.mark.parametrize("images", [Grouped(1010, 10), InMemory([b""] * 1010)])
def test_a_sample_has_a_row_of_every_class(images):
    """In groups and row by row; two classes of a row each that are not chosen."""
    labels = np.arange(1000) % 4
    labels[[3, 999]] = 4, 5
    kinds = [np.arange(1000), np.arange(1000, 1010)]
    labeled, unlabeled = spread(images, kinds, 40, labels)
    assert {*labels[labeled].tolist()} == {*range(6)}
    assert len(labeled) <= 42 and len(unlabeled) == 10
    assert labeled.tolist() == sorted({*labeled.tolist()})


@pytest.mark.parametrize(
    ("images", "size", "expected"),
    [
        (Grouped(30, 10), 10, [10, 10, 5]),
        (Grouped(30, 10), 24, [20, 5]),
        (Grouped(30, 10), 4, [4, 4, 2, 4, 4, 2, 4, 1]),
        (InMemory([b""] * 25), 10, [10, 10, 5]),
    ],
)
def test_batches_end_where_groups_end(images, size, expected):
    """Kills: a group in two batches that fits into one, a batch of more rows, an
    endless loop, lost rows.
    """
    found = batches_of(images, np.arange(25), size)
    assert [len(batch) for batch in found] == expected
    assert np.concatenate(found).tolist() == list(range(25))
    assert batches_of(images, np.arange(0), size) == []


def test_what_is_read_together_is_read_once_and_decoded_by_all_threads(monkeypatch):
    """Kills: a read for each thread's piece, one thread for a set of one group, rows of
    a group in the places of another's.
    """
    images = Grouped(3 * PIECE_ROWS, 2 * PIECE_ROWS)
    parts = [len(rows) for rows, _ in pieces(images)]
    assert parts == [PIECE_ROWS] * 3 and sorted(images.read) == [0, 1]
    order = np.random.default_rng(0).permutation(len(images))[:20]
    found, reasons = decode_many(images.take(order), 8, 2)
    expected, _ = decode_many(images.read_images(order), 8, 2)
    assert (found == expected).all() and not any(reasons)
    both = threading.Barrier(2, timeout=20)

    def decode(*_):
        both.wait()  # for an image of the other thread
        return pixels(0).transpose(2, 0, 1)

    monkeypatch.setattr("uno.data.decode.decode", decode)
    decode_many(Grouped(2 * PIECE_ROWS, 2 * PIECE_ROWS), 8, 2)
