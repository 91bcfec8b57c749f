"""memory= counts whatever is held, and refuses what does not fit before any work."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.support import planned, small_integers
from tests.test_gpu_plan import gpu, on
from tilewise.errors import BudgetError, ShapeError
from tilewise.numerics.check import check

#: Of Python's own: what is not in proportion to any operand.
SLACK = 64 << 10


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(6)


def peak_bytes(work: Callable[[], Any]) -> int:
    """Return the most that NumPy held beside what there was, while ``work`` ran a second time."""
    work()
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_an_out_that_overlaps_an_operand_has_the_result_beside_it(rng: Any) -> None:
    a = small_integers(rng, (300, 300), np.float32)
    before, expected = a.copy(), a @ a.T
    apart = tw.plan(a, a.T, out=np.empty_like(a), memory=1000)
    plan = tw.plan(a, a.T, out=a)
    assert (apart.held_bytes, plan.held_bytes) == (0, a.nbytes)
    with pytest.raises(BudgetError, match="an out that shares no memory with an operand"):
        tw.matmul(a, a.T, out=a, memory=a.nbytes - 1)
    with pytest.raises(BudgetError, match="shares no memory"):
        apart(a, a.T, out=a)  # planned for a place of its own
    assert np.array_equal(a, before)
    assert peak_bytes(lambda: tw.matmul(a, a.T, out=a[::-1], memory=a.nbytes)) <= a.nbytes + SLACK
    a[...] = before
    tw.matmul(a, a.T, out=a, memory=a.nbytes)
    assert np.array_equal(a, expected)


def test_a_plan_with_a_budget_is_not_called_for_what_it_has_not_counted(rng: Any) -> None:
    a = small_integers(rng, (300, 300), np.float32)
    plan = tw.plan(a, a, out=np.empty_like(a), memory=1000)
    with pytest.raises(BudgetError, match=r"takes 351.57 KiB, and memory= allows 1000 B"):
        plan(a, a)
    with pytest.raises(ShapeError, match="make a plan for it"):
        plan(a, a, out=np.empty((300, 600), np.float32)[:, ::2])
    assert np.array_equal(plan(a, a, out=np.empty_like(a)), a @ a)
    assert np.array_equal(tw.plan(a, a, out=np.empty_like(a))(a, a), a @ a)


def odd_places(shape: tuple[int, ...], dtype: str) -> dict[str, Any]:
    """Return places for a result that no BLAS writes."""
    kind = np.dtype(dtype)
    raw = np.zeros(int(np.prod(shape)) * kind.itemsize + 1, np.uint8)
    return {
        "swapped": np.zeros(shape, kind.newbyteorder()),
        "every second": np.zeros((*shape[:-1], 2 * shape[-1]), kind)[..., ::2],
        "reversed": np.zeros(shape, kind)[..., ::-1],
        "misaligned": raw[1:].view(kind).reshape(shape),
    }


@pytest.mark.parametrize("dtype", ["float32", "complex128"])
@pytest.mark.parametrize("kind", ["swapped", "every second", "reversed", "misaligned"])
def test_where_blas_cannot_write_a_counted_copy_is_made(rng: Any, dtype: str, kind: str) -> None:
    a, b = rng.random((6, 150, 130)).astype(dtype), rng.random((130, 170)).astype(dtype)
    out = odd_places((6, 150, 170), dtype)[kind]
    one = 150 * 170 * np.dtype(dtype).itemsize
    free, tight = tw.plan(a, b, out=out), tw.plan(a, b, out=out, memory=3 * one)
    assert (free.held_bytes, tight.held_bytes) == (6 * one, 3 * one)
    for plan in (free, tight):
        assert plan.method == "blas"
        assert "a copy goes there" in str(plan)
        out[...] = -7
        assert peak_bytes(lambda plan=plan: plan(a, b, out=out)) <= plan.held_bytes + SLACK
        assert np.array_equal(out, np.matmul(a, b))  # its bits, too
    panels = tw.plan(a, b, out=out, memory=one // 2)
    assert panels.method == "panels"
    out[...] = -7
    assert peak_bytes(lambda: panels(a, b, out=out)) <= one // 2 + SLACK
    np.testing.assert_allclose(out, np.matmul(a, b), rtol=1e-5)
    vector = out[0, 0]
    assert np.array_equal(tw.matmul(a[0, 0], b, out=vector), a[0, 0] @ b)
    assert np.array_equal(tw.matmul(a[0], b[:, 0], out=out[0, :, 0]), a[0] @ b[:, 0])


def test_a_place_that_blas_writes_is_written_by_it(rng: Any) -> None:
    a, b = rng.random((40, 30)), rng.random((30, 20))
    wide = np.empty((40, 33))
    places = (wide[:, :20], np.empty((20, 40)).T, np.empty((3, 40, 20))[1], np.empty((40, 20)))
    for out in places:
        assert tw.plan(a, b, out=out).held_bytes == 0
        np.testing.assert_allclose(tw.matmul(a, b, out=out), a @ b)
    assert tw.plan(a[0], b[:, 0], out=np.empty(())).held_bytes == 0


@pytest.mark.parametrize(
    ("a_type", "b_type"), [("longdouble",) * 2, ("clongdouble",) * 2, ("float32", "longdouble")]
)
def test_types_that_no_blas_has_are_multiplied_within_a_budget(
    rng: Any, a_type: str, b_type: str
) -> None:
    a, b = small_integers(rng, (2, 90, 120), a_type), small_integers(rng, (120, 70), b_type)
    expected = np.matmul(a, b)
    for memory in (None, expected.nbytes + 300_000, expected.nbytes + 5000):
        plan = tw.plan(a, b, memory=memory)
        assert plan.held_bytes <= (memory or np.inf)
        assert np.array_equal(plan(a, b), expected)
        assert peak_bytes(lambda plan=plan: plan(a, b)) <= plan.held_bytes + SLACK


def test_sums_of_nothing_take_no_workspace() -> None:
    for dtype in ("int32", "int8", "bool", "longdouble", "float16"):
        a, b = np.ones((700, 0), dtype), np.ones((0, 600), dtype)
        plan = tw.plan(a, b)
        out = plan(a, b)
        assert not out.any()
        assert peak_bytes(lambda plan=plan, a=a, b=b: plan(a, b)) <= plan.held_bytes + SLACK
        few = tw.plan(a, b, out=out, memory=1 << 16)
        assert peak_bytes(lambda few=few, a=a, b=b, out=out: few(a, b, out=out)) <= 2 * SLACK
    tall = np.ones((1_000_000, 4), np.int8)
    assert peak_bytes(lambda: tw.matmul(tall, np.ones((4, 0), np.int32))) <= SLACK


@pytest.mark.parametrize(
    ("shapes", "dtype"),
    [
        (((900, 300), (300, 800)), "float64"),
        (((40, 50, 60), (60, 70)), "complex64"),
        (((700, 600), (600, 700)), "int32"),
        (((20000, 30), (30, 5)), "float16"),
        (((3, 2, 33, 1), (3, 2, 1, 33)), "float64"),
        (((30, 30), (30, 30)), "float32"),
        (((1200, 1000), (1000, 1300)), "float32"),
    ],
)
def test_what_verify_takes_is_counted(
    rng: Any, shapes: tuple[tuple[int, ...], tuple[int, ...]], dtype: str
) -> None:
    a, b = (small_integers(rng, shape, dtype) for shape in shapes)
    plan = tw.plan(a, b, verify=True)
    assert plan.verify_bytes > 0
    out = np.zeros(plan.shape, plan.dtype)
    assert peak_bytes(lambda: plan(a, b, out=out)) <= plan.held_bytes + SLACK
    checked = peak_bytes(lambda: check(a, b, out, bound=plan.bound))
    assert checked <= plan.verify_bytes <= 8 * checked + (1 << 20)
    out[...] = 5
    with pytest.raises(BudgetError, match="do without verify="):
        tw.matmul(a, b, out=out, verify=True, memory=out.nbytes + plan.verify_bytes - 1)
    assert (out == 5).all()
    tw.matmul(a, b, out=out, verify=True, memory=out.nbytes + plan.verify_bytes)


def test_gemm_holds_no_more_than_parts_and_copies(rng: Any) -> None:
    c = small_integers(rng, (900, 900), np.float32)
    once = peak_bytes(lambda: tw.gemm(c, c, c, alpha=0, beta=2))
    assert once <= 200_000  # by parts
    row = np.broadcast_to(c[:1], (900, 900))  # of the memory that is written, and repeated
    expected = row.copy() @ np.ones((900, 900), np.float32)
    ones = np.ones((900, 900), np.float32)
    tw.gemm(row, ones, c)
    assert np.array_equal(c, expected)
    wide = np.ones((900, 500), np.float32)
    many = np.broadcast_to(wide, (50, 900, 500))
    place = np.lib.stride_tricks.as_strided(wide, (50, 900, 5), (36, 2000, 4), writeable=True)
    place = wide.reshape(-1)[:225_000].reshape(50, 900, 5)
    assert np.shares_memory(place, wide)
    # 90 MB if the operand were expanded.
    assert peak_bytes(lambda: tw.gemm(many, ones[:500, :5], place)) <= 30_000_000


def test_copies_of_operands_that_out_overlaps_on_a_gpu_are_counted() -> None:
    a, c = on((1000, 1000), "float64"), on((1000, 1000), "float64")
    assert planned(a, a, out=c, gpu=gpu()).held_bytes == 0
    both = planned(a, a, out=c, overlaps=(True, True), gpu=gpu())
    assert both.held_bytes == 2 * (8_000_000 + 16)
    wide = a._replace(strides=(80_000, 8))
    spread = planned(wide, a, out=c, overlaps=(True, False), gpu=gpu())
    assert spread.held_bytes == 999 * 80_000 + 8000 + 16  # all that lies between is copied
    with pytest.raises(BudgetError, match="an out that shares no memory with an operand"):
        planned(a, a, out=c, overlaps=(True, False), gpu=gpu(), memory_bytes=8_000_000)
    assert "allowed on cuda:0" in str(planned(a, a, out=c, gpu=gpu(), memory_bytes=8_000_000))


def test_a_check_of_device_arrays_is_counted_on_the_host() -> None:
    a = on((1000, 1000), "float32")
    plan = planned(a, a, out=a, gpu=gpu(), verify=True)
    assert plan.verify_bytes > 12_000_000
    with pytest.raises(BudgetError, match="do without verify="):
        planned(a, a, out=a, gpu=gpu(), verify=True, memory_bytes=plan.verify_bytes - 1)
    assert planned(a, a, out=a, gpu=gpu(), verify=True, memory_bytes=plan.verify_bytes)
