"""Rows that are kept once are those that a copy would hold, however many blocks hold
them.
"""

import pytest
import torch

from uno.data.row_blocks import RowBlocks, part

ROWS = torch.arange(7 * 2 * 3).view(7, 2, 3)
PLACE = torch.tensor([4, 0, 6, 5, 1, 3, 2])


@pytest.fixture(params=[[7], [2, 1, 0, 4]])
def kept(request):
    """In one block and in four, one of them empty, in another order."""
    return RowBlocks(ROWS.split(request.param), PLACE)


def test_some_rows_are_those_of_a_copy(kept):
    """Kills: rows by their place in another block, in the order of the blocks, of a
    mask read as numbers.
    """
    expected = ROWS[PLACE]
    assert len(kept) == 7 and kept.shape == expected.shape and kept.ndim == 3
    mask = torch.tensor([True, False, True, True, False, False, True])
    none = torch.tensor([], dtype=torch.int64)
    assert all(torch.equal(kept[[i]][0], expected[i]) for i in range(7))
    for rows in (slice(None), slice(1, 6, 2), mask, torch.tensor([6, 0, 0, 3]), none):
        for found in (
            kept[rows],
            kept.select_rows(rows)[:],
            part(kept, rows)[:],
            part(expected, rows),
        ):
            assert torch.equal(found, expected[rows])
    assert torch.equal(
        torch.cat([*kept.select_rows(slice(1, None)).split(4)]), expected[1:]
    )
    assert kept.to("cpu") is kept and kept.select_rows(slice(1, None)).to(
        "meta"
    ).shape == (6, 2, 3)


def test_a_part_is_no_copy():
    """Kills: a set that holds its own images, so that memory holds them twice."""
    rows = ROWS.clone()
    some = (
        RowBlocks([rows]).select_rows(slice(2, None)).select_rows(torch.tensor([0, 3]))
    )
    rows += 100
    assert torch.equal(some[:], rows[[2, 5]])
    assert torch.equal(some[torch.tensor([1]), torch.tensor([0])], rows[5:6, 0])
