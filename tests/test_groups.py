"""Groups: lists of arrays, planned whole, multiplied pair by pair within one budget."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.support import small_integers
from tilewise import _overlap
from tilewise.errors import BudgetError, DTypeError, OptionError, ShapeError
from tilewise.runtime.arrays import DeviceArray


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20261130)


def test_lists_of_arrays_are_a_grouped_product(rng: Any) -> None:
    a = [rng.standard_normal((m, 4)) for m in (1, 2, 3)]
    b = [rng.standard_normal((4, n)) for n in (5, 1, 2)]
    for got, x, y in zip(tw.matmul(a, b), a, b, strict=True):
        assert np.array_equal(got, x @ y)
    with pytest.raises(tw.TilewiseError, match="two lists of equally many"):
        tw.matmul(a, b[:2])
    with pytest.raises(tw.TilewiseError, match="np.stack"):
        tw.matmul(a, b[0])


def test_a_group_refuses_a_place_that_another_pair_reads_or_writes(rng: Any) -> None:
    a, b, c, d = (rng.standard_normal((4, 4)) for _ in range(4))
    place, other = np.zeros((4, 4)), np.zeros((4, 4))
    before = b.copy()

    class Own(np.ndarray[Any, Any]):
        """As a memory map is."""

    for out in ([b, other], [place, place], [place, a], [b.view(Own), other]):
        with pytest.raises(tw.TilewiseError, match=r"out\[\d\] shares memory with an array of an"):
            tw.matmul([a, b], [c, d], out=out)
        assert not place.any()
        assert np.array_equal(b, before)
    expected = a @ c
    wide = np.zeros((4, 8))
    tw.matmul([a, b], [c, d], out=[a, wide[:, ::2]])  # its own operand may be the place
    assert np.array_equal(a, expected)
    assert np.array_equal(wide[:, ::2], b @ d)
    halves = np.zeros((2, 4, 4))
    tw.matmul([a, b], [c, d], out=list(halves))


def test_a_group_is_checked_whole_before_its_first_product(rng: Any) -> None:
    a, b = (
        [rng.standard_normal((4, 5)) for _ in "abc"],
        [rng.standard_normal((5, 6)) for _ in "abc"],
    )
    first, second = np.full((4, 6), 7.0), np.full((4, 6), 7.0)
    frozen = np.zeros((4, 6))
    frozen.flags.writeable = False
    for last, error, said in (
        (np.zeros((6, 4)), ShapeError, r"pair 2 of the group: out \(shape \(6, 4\)"),
        (np.zeros((4, 6), np.float32), DTypeError, "pair 2 .* exactly the result's dtype"),
        (frozen, DTypeError, "pair 2 .* read-only"),
    ):
        with pytest.raises(error, match=said):
            tw.matmul(a, b, out=[first, second, last])
    with pytest.raises(ShapeError, match="pair 1 of the group: a .* do not go together"):
        tw.matmul(a, [b[0], b[1][:3], b[2]], out=[first, second, np.zeros((4, 6))])
    with pytest.raises(DTypeError, match="pair 2 of the group: b is a masked array"):
        tw.matmul(a, [*b[:2], np.ma.array(b[2])], out=[first, second, np.zeros((4, 6))])
    assert (first == 7).all()
    assert (second == 7).all()


def test_a_budget_is_for_the_whole_group(rng: Any) -> None:
    a = [small_integers(rng, (100, 100), np.float16) for _ in range(5)]
    one = 100 * 100 * 2
    with pytest.raises(BudgetError, match=r"of all others take 78.13 KiB.* allows 58.59 KiB for t"):
        tw.matmul(a, a, memory=3 * one)
    with pytest.raises(
        BudgetError, match="pair 0 of the group: .* is computed with at least|takes"
    ):
        tw.matmul(a, a, memory=5 * one)
    expected = [x.astype(float) @ x.astype(float) for x in a]
    for out in (None, [np.empty((100, 100), np.float16) for _ in a]):
        memory = (0 if out else 5 * one) + 50_000
        tracemalloc.start()
        got = tw.matmul(a, a, out=out, memory=memory)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak <= memory + (64 << 10)
        for x, y in zip(got, expected, strict=True):
            assert np.array_equal(x, y)


def test_a_plan_is_for_one_product(rng: Any) -> None:
    a = [np.ones((3, 3)), np.ones((3, 3))]
    with pytest.raises(OptionError, match="plan each pair"):
        tw.plan(a, a)


def test_arrays_of_a_group_may_share_what_they_do_not_both_use(rng: Any) -> None:
    def there(x: Any) -> DeviceArray:
        place = x.__array_interface__["data"][0]
        return DeviceArray(place, x.shape, x.strides, x.dtype, 0, False, None)

    base, a = np.zeros((8, 12)), np.ones((8, 6))
    left, right = base[:, :6], base[:, 6:]
    for kind in (lambda x: x, there):
        x, y, z = kind(a), kind(left), kind(right)
        assert _overlap.meeting([(x, x, y), (x, x, z)]) is None  # columns that alternate
        assert _overlap.meeting([(x, x, y), (z, x, None)]) is None
        assert _overlap.meeting([(x, x, y), (y, x, z)]) == 0
        assert _overlap.meeting([(x, x, y), (x, x, kind(base[3:5, 5:7]))]) == 0
        assert _overlap.meeting([(x, y, None), (x, x, kind(base[::-1, 3]))]) == 1
        assert _overlap.meeting([(x, x, x), (y, y, y)]) is None  # of its own pair


def test_arrays_of_a_group_may_be_maps_of_one_file(rng: Any, tmp_path: Path) -> None:
    a = rng.integers(-3, 4, (2, 50, 50)).astype("f8")
    np.save(tmp_path / "x.npy", np.concatenate([a, a]))
    read = np.load(tmp_path / "x.npy", mmap_mode="r")
    place = np.load(tmp_path / "x.npy", mmap_mode="r+")
    with pytest.raises(ShapeError, match=r"out\[0\] shares memory with an array of another pair"):
        tw.matmul([a[0], read[2]], [a[0], a[1]], out=[place[2], np.empty((50, 50))])
    tw.matmul(list(read[:2]), list(read[:2]), out=list(place[2:]))
    assert np.array_equal(place, np.concatenate([a, a @ a]))
