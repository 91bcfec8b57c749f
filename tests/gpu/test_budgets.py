"""memory= with device arrays: what is taken of the GPU is planned, or refused before any work."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.gpu.support import download, random, upload
from tests.support import exact_integers
from tilewise.errors import BudgetError, ShapeError
from tilewise.runtime import device, memory

pytestmark = pytest.mark.gpu

KINDS = ("int32", "int64", "uint16", "float16", "float32", "complex64", "float64")

#: To which the driver rounds up what it gives, a few times over.
ROUNDED = 4096


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(8)


class High:
    """How much of the GPU's own pool was in use at most, beside what is now."""

    def __init__(self) -> None:
        with device.current(0) as cuda:
            self._pool = cuda.cuDeviceGetDefaultMemPool(cuda.cuDeviceGet(0)[1])[1]
            which = cuda.CUmemPool_attribute
            self._high = which.CU_MEMPOOL_ATTR_USED_MEM_HIGH
            cuda.cuMemPoolSetAttribute(self._pool, self._high, cuda.cuuint64_t(0))
            now = which.CU_MEMPOOL_ATTR_USED_MEM_CURRENT
            self._before = int(cuda.cuMemPoolGetAttribute(self._pool, now)[1])

    def taken_bytes(self) -> int:
        with device.current(0) as cuda:
            high = int(cuda.cuMemPoolGetAttribute(self._pool, self._high)[1])
        return max(high - self._before, 0)


@pytest.mark.parametrize("dtype", KINDS)
def test_parts_within_a_budget_have_the_bits_of_the_whole(rng: Any, dtype: str) -> None:
    kind = np.dtype(dtype)
    shapes = (2, 2100, 2049), (2049, 1900)
    if kind.kind in "iu":
        limits = np.iinfo(kind)
        a, b = (rng.integers(limits.min, limits.max, shape, kind) for shape in shapes)
    else:
        a, b = (random(rng, shape, kind) for shape in shapes)
    x, y = upload(a), upload(b)
    whole = tw.plan(x, y)
    expected = download(whole(x, y))
    if kind.kind in "iu":
        some = exact_integers(a[1, 2000:], b, kind)
        assert np.array_equal(expected[1, 2000:], some)
    out = upload(np.zeros((2, 2100, 1900), kind))
    for share in (2, 5, 11):
        room = whole.workspace_bytes // share
        cut = tw.plan(x, y, out=out, memory=room)
        if dtype not in ("float16", "float64"):  # of which other kernels take none
            assert "parts; " in str(cut)
            assert cut.method == whole.method
        assert cut.held_bytes <= room
        out.fill(0)
        memory.workspace(0).release()
        high = High()
        cut(x, y, out=out)
        assert download(out).tobytes() == expected.tobytes()
        assert high.taken_bytes() <= room + ROUNDED


def test_a_copied_operand_is_counted_and_refused_before_any_work(rng: Any) -> None:
    import cupy

    a = upload(random(rng, (1500, 1500), "float64"))
    before = download(a)
    plan, apart = tw.plan(a, a, out=a), tw.plan(a, a, out=cupy.empty_like(a), memory=1000)
    assert plan.held_bytes >= 2 * a.nbytes
    memory.workspace(0).release()
    for given in (plan.held_bytes - 1, a.nbytes):
        with pytest.raises(BudgetError, match="an out that shares no memory with an operand"):
            tw.matmul(a, a, out=a, memory=given)
    with pytest.raises(BudgetError, match="shares no memory"):
        apart(a, a, out=a)
    assert np.array_equal(download(a), before)
    high = High()
    tw.matmul(a, a, out=a, memory=plan.held_bytes)
    assert high.taken_bytes() <= plan.held_bytes + ROUNDED
    np.testing.assert_allclose(download(a), before @ before, rtol=1e-9, atol=1e-9)


def test_a_workspace_from_before_is_no_larger_than_a_budget(rng: Any) -> None:
    import cupy

    x = upload(random(rng, (4096, 4096), "float32"))
    memory.workspace(0).release()
    tw.matmul(x, x)
    large = memory.workspace(0).held_bytes
    out = cupy.empty_like(x)
    room = large // 4
    tw.matmul(x, x, out=out, memory=room)
    assert memory.workspace(0).held_bytes <= room < large


def test_a_share_is_of_the_device_that_operands_are_on() -> None:
    import cupy

    x = cupy.ones((8, 8), np.float32)
    plan = tw.plan(x, x, memory="50%")
    assert abs(plan.asked.memory_bytes - device.facts(0).memory_bytes // 2) <= 1
    assert "allowed on cuda:0" in str(plan)
    host = tw.plan(np.ones((8, 8)), np.ones((8, 8)), memory="50%")
    assert host.asked.memory_bytes != plan.asked.memory_bytes
    assert "allowed on this machine" in str(host)


def test_a_group_is_checked_whole_and_has_one_budget(rng: Any) -> None:
    import cupy

    a = [upload(random(rng, (300, 300), "int32")) for _ in range(4)]
    wide = cupy.zeros((300, 600), np.int32)
    first, second = wide[:, ::2], wide[:, 1::2]  # which alternate, and share nothing
    place = cupy.zeros((300, 300), np.int32)
    for out in (
        [place, place, first, second],
        [a[1], place, first, second],
        [wide[:, :300], place, first, second],
    ):
        with pytest.raises(ShapeError, match=r"out\[\d\] shares memory with an array of another"):
            tw.matmul(a, a, out=out)
    with pytest.raises(ShapeError, match="pair 3 of the group: out"):
        tw.matmul(a, a, out=[place, first, second, cupy.zeros((3, 3), np.int32)])
    assert not wide.any()
    assert not place.any()
    single = tw.plan(a[0], a[0])
    results = 4 * a[0].nbytes
    with pytest.raises(BudgetError, match="all others take"):
        tw.matmul(a, a, memory=2 * a[0].nbytes)
    memory.workspace(0).release()
    high = High()
    got = tw.matmul(a, a, memory=results + single.workspace_bytes)
    assert high.taken_bytes() <= single.workspace_bytes + ROUNDED
    other = cupy.zeros((300, 300), np.int32)
    tw.matmul(a, a, out=[first, second, place, other])
    for x, y, z in zip(a, got, (first, second, place, other), strict=True):
        expected = exact_integers(download(x), download(x), "int32")
        assert np.array_equal(download(y), expected)
        assert np.array_equal(download(cupy.ascontiguousarray(z)), expected)


def test_a_group_like_one_before_is_launched_at_once(rng: Any) -> None:
    a = [upload(random(rng, (64, 64), "float32")) for _ in range(3)]
    first = tw.matmul(a, a)
    again = tw.matmul(a, a)
    for x, y in zip(first, again, strict=True):
        assert download(x).tobytes() == download(y).tobytes()
