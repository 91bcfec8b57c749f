"""What all planners share: which stacks of matrices a tensor map holds, and how it is told."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewise.kernels.steps import (
    LEAST_PIECE,
    LONGEST_CHAIN,
    MOST_PIECES,
    Pointer,
    Strides,
    Tensor,
    chains,
    limited_by,
)

ROWS = Strides(outer=4096, inner=512, row=64, col=1)


@pytest.mark.parametrize(
    ("item_bytes", "strides", "suits"),
    [
        (2, ROWS, True),
        (2, replace(ROWS, is_aligned=False), False),
        (2, replace(ROWS, row=60), False),  # 120 bytes
        (4, replace(ROWS, row=60), True),
        (2, replace(ROWS, col=2), False),
        (2, ROWS.transposed, False),
        (2, replace(ROWS, row=-64), False),
        (2, replace(ROWS, row=32), False),  # rows overlap
        (2, replace(ROWS, row=0), False),
        (2, replace(ROWS, outer=-4096), False),
        (2, replace(ROWS, outer=0, inner=0), True),
        (2, replace(ROWS, outer=2**39), False),
        (4, replace(ROWS, outer=2**38 - 4), True),
        (4, replace(ROWS, outer=2**38), False),
    ],
)
def test_a_map_holds_whole_vectors_that_lie_apart(
    item_bytes: int, strides: Strides, suits: bool
) -> None:
    assert strides.suits_map(8, 40, item_bytes) == suits


def test_steps_that_are_never_taken_keep_nothing_from_a_map() -> None:
    odd = Strides(outer=7, inner=-3, row=5, col=9)
    assert not odd.suits_map(1, 1, 2)
    assert odd.taken(1, 1, 1, 1).suits_map(1, 1, 2)
    assert odd.taken(2, 3, 4, 5) == odd


@pytest.mark.parametrize("item_bytes", [1, 2, 4])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 9), (3, 1, 5, 16), (1, 2, 1, 33), (2, 2, 7, 48)])
def test_a_map_reaches_the_elements_that_strides_do(
    sizes: tuple[int, int, int, int], item_bytes: int
) -> None:
    strides = Strides(outer=4096, inner=0, row=64, col=1).taken(*sizes)
    mapped = Tensor.mapped(Pointer(1, 32), strides, sizes, item_bytes)
    assert (mapped.operand, mapped.offset_bytes) == (1, 32)
    assert all(step * item_bytes % 16 == 0 for step in mapped.strides[:-1])
    places = np.indices(sizes).reshape(4, -1)
    stepped = np.array([strides.outer, strides.inner, strides.row, strides.col]) @ places
    inside = places % np.array(mapped.shape)[:, None]
    np.testing.assert_array_equal(np.array(mapped.strides) @ inside, stepped)


def test_of_two_bounds_that_are_close_both_are_felt() -> None:
    assert limited_by({"a": 1.0, "b": 100.0}) == (100.0, "b")
    us, limit = limited_by({"a": 100.0, "b": 99.0})
    assert limit == "a"
    assert 102 < us < 105


@pytest.mark.parametrize("k", [1, 63, 64, 65, 4096, LONGEST_CHAIN])
def test_k_up_to_a_limit_is_one_chain(k: int) -> None:
    count, length = chains(k)
    assert count == 1
    assert length >= k
    assert length % 64 == 0


@given(st.integers(LONGEST_CHAIN + 1, 2**31))
def test_a_longer_k_is_cut_into_pieces_none_of_them_empty(k: int) -> None:
    count, length = chains(k)
    assert (count - 1) * length < k <= count * length
    assert count <= MOST_PIECES
    assert length >= LEAST_PIECE
    assert length % 64 == 0
