"""Case group A on host arrays: finite, plausible and wrong is the worst outcome there is."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilewise as tw
from tests.support import guarded, margins_are_whole, small_integers, within_bound

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def multiply_guarded(a: Any, b: Any, **options: Any) -> Any:
    """matmul between guard bands, into a poisoned result; the margins must stay whole."""
    a_in, a_buffer = guarded(a)
    b_in, b_buffer = guarded(b)
    shape, dtype = tw.plan(a, b, **options).shape, tw.plan(a, b, **options).dtype
    c_in, c_buffer = guarded(np.zeros(shape, dtype))
    c_in.view(np.uint8)[...] = 0xFF
    tw.matmul(a_in, b_in, out=c_in, **options)
    result = c_in.copy()
    for inside, buffer in ((a_in, a_buffer), (b_in, b_buffer), (c_in, c_buffer)):
        assert margins_are_whole(inside, buffer)
    return result


def exact(a: Any, b: Any) -> Any:
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    return np.matmul(a.astype(wide), b.astype(wide))


def test_A2_sizes_that_no_tile_divides_leave_no_element_unwritten(rng: Any) -> None:
    a = rng.integers(-3, 4, (1000, 1000)).astype(np.float32)
    b = rng.integers(-3, 4, (1000, 1000)).astype(np.float32)
    assert np.array_equal(multiply_guarded(a, b), exact(a, b))


SIZES = (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 100, 127, 129)


@pytest.mark.parametrize("dtype", ["float16", BF16, "float32", "float64", "int8", "int32"], ids=str)
def test_A5_every_size_around_every_tile(rng: Any, dtype: Any) -> None:
    # The full cross has 2,744 shapes; a third of it is drawn, the corners always among it.
    shapes = list(itertools.product(SIZES, repeat=3))
    some = [shapes[i] for i in rng.choice(len(shapes), 300, replace=False)]
    some += [*itertools.product((1, 16, 129), repeat=3)]
    some += [(33, 32, 32), (256, 128, 256), (35, 79, 19), (3000, 64, 64), (3, 3, 431)]
    for m, n, k in some:
        a, b = small_integers(rng, (m, k), dtype), small_integers(rng, (k, n), dtype)
        got = multiply_guarded(a, b)
        expected = exact(a, b)
        expected = expected.astype(np.int64) if np.dtype(dtype).kind == "i" else expected
        assert np.array_equal(got, expected.astype(dtype)), (m, n, k)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", BF16, "float32", "float64", "int8", "int32"], ids=str)
def test_A5_full_cross(rng: Any, dtype: Any) -> None:
    for m, n, k in [*itertools.product(SIZES, repeat=3), (30000, 64, 64)]:
        a, b = small_integers(rng, (m, k), dtype), small_integers(rng, (k, n), dtype)
        expected = exact(a, b)
        expected = expected.astype(np.int64) if np.dtype(dtype).kind == "i" else expected
        assert np.array_equal(multiply_guarded(a, b), expected.astype(dtype)), (m, n, k)


@pytest.mark.parametrize("dtype", ["float16", BF16], ids=str)
@pytest.mark.parametrize("m", [1744, 1752, 1760])
def test_A6_rows_that_are_no_multiple_of_16(rng: Any, dtype: Any, m: int) -> None:
    a, b = small_integers(rng, (m, 584), dtype), small_integers(rng, (584, 944), dtype)
    expected = exact(a, b)
    for a_order, b_order in itertools.product("CF", repeat=2):
        x, y = np.asarray(a, order=a_order), np.asarray(b, order=b_order)
        assert np.array_equal(tw.matmul(x, y, dtype=np.float32), expected)
    assert np.array_equal(tw.matmul(a, b), expected.astype(dtype))


def test_A7_repeated_calls_agree_when_freed_memory_holds_nan(rng: Any) -> None:
    for m, k, n in ((1000, 1001, 999), (500, 500, 500)):
        a = small_integers(rng, (m, k), np.float16)
        b = small_integers(rng, (k, n), np.float16)
        results = []
        for _ in range(3):
            np.full((2, 1200, 1200), np.nan)  # freed at once: spare memory that is not clean
            results.append(tw.matmul(a, b))
        assert np.array_equal(results[0], exact(a, b).astype(np.float16))
        assert results[0].tobytes() == results[1].tobytes() == results[2].tobytes()


@pytest.mark.parametrize(
    "dtype", ["float16", BF16, "float32", "float64", "complex64", "int8"], ids=str
)
def test_A8_outer_products(rng: Any, dtype: Any) -> None:
    for m, n in ((1, 128), (130, 77), (1, 1)):
        a, b = small_integers(rng, (m, 1), dtype), small_integers(rng, (1, n), dtype)
        assert (multiply_guarded(a, b).astype("complex128") == exact(a, b)).all()


@pytest.mark.parametrize("dtype", ["float16", BF16, "float32"], ids=str)
def test_A9_every_k_up_to_70(dtype: Any) -> None:
    for k in range(1, 71):
        ones = np.ones((128, k), dtype)
        assert (multiply_guarded(ones, np.ones((k, 128), dtype)) == k).all()
        assert (tw.matmul(np.asfortranarray(ones), ones.T) == k).all()


def test_A11_out_may_overlap_an_operand(rng: Any) -> None:
    a = np.ones((2, 99, 99))
    assert (tw.matmul(a, a, out=a) == 99).all()
    b = small_integers(rng, (500, 500), np.float32)
    expected = exact(b, b.T)
    assert np.array_equal(tw.matmul(b, b.T, out=b), expected)
    for dtype in ("float32", "float16", "int16"):
        whole = small_integers(rng, (60, 40), dtype)
        square = small_integers(rng, (40, 40), dtype)
        operand, out = whole[:30], whole[27:57]  # the last three rows of one are the other's first
        expected = exact(operand, square)
        tw.matmul(operand, square, out=out)
        assert np.array_equal(out, expected.astype(dtype))
        shifted = small_integers(rng, (41, 40), dtype)
        expected = exact(square, shifted[:40])
        tw.matmul(square, shifted[:40], out=shifted[1:])
        assert np.array_equal(shifted[1:], expected.astype(dtype))


def test_A13_strides_are_obeyed_and_nothing_outside_a_view_is_touched() -> None:
    base = np.arange(48, dtype=np.float32).reshape(6, 8)
    before = base.copy()
    a = base[::2, 1:5]
    assert np.array_equal(tw.matmul(a, np.eye(4, dtype=np.float32)), a)
    b_base = np.arange(64, dtype=np.float32).reshape(8, 8)
    b = b_base[::2, 2:6]
    target = np.full((6, 8), -1, np.float32)
    tw.matmul(a, b, out=target[::2, 1:5])
    assert np.array_equal(target[::2, 1:5], exact(a, b))
    target[::2, 1:5] = -1
    assert (target == -1).all()
    assert np.array_equal(base, before)


def test_A14_strides_of_axes_of_length_one_mean_nothing(rng: Any) -> None:
    b = small_integers(rng, (4, 6), np.float32)
    a = small_integers(rng, (5, 4), np.float32)
    view = np.lib.stride_tricks.as_strided(a, (1, 5, 4), (123456, *a.strides))
    assert np.array_equal(tw.matmul(view, b), exact(a, b)[np.newaxis])
    rows = small_integers(rng, (3, 4), np.float32)
    view = np.lib.stride_tricks.as_strided(rows, (3, 1, 4), (rows.strides[0], 99 * 4, 4))
    assert np.array_equal(tw.matmul(view, b), exact(rows[:, np.newaxis], b))


def test_A15_reversed_views(rng: Any) -> None:
    for dtype in ("float32", "float16", "int32", "complex128"):
        a, b = small_integers(rng, (7, 9), dtype), small_integers(rng, (9, 5), dtype)
        for view in (a[::-1], a[:, ::-1], a[::-1, ::-1], a[5:0:-2]):
            assert (tw.matmul(view, b) == exact(view, b)).all()
        turned = a[::-1, ::-1].T
        assert (tw.matmul(turned, a) == exact(turned, a)).all()


def test_A16_row_major_and_column_major_mix(rng: Any) -> None:
    for shapes in (((2, 3), (3, 4)), ((1024, 512), (512,)), ((256, 64), (64, 128))):
        for orders in itertools.product("CF", repeat=3):
            a = np.asarray(small_integers(rng, shapes[0], np.float32), order=orders[0])
            b = np.asarray(small_integers(rng, shapes[1], np.float32), order=orders[1])
            expected = exact(a, b)
            out = np.full(expected.shape, np.nan, np.float32, order=orders[2])
            flags = (out.flags.c_contiguous, out.flags.f_contiguous)
            assert tw.matmul(a, b, out=out) is out
            assert np.array_equal(out, expected)
            assert (out.flags.c_contiguous, out.flags.f_contiguous) == flags


def test_A17_uint64_wraps_and_does_not_saturate(rng: Any) -> None:
    assert tw.matmul(np.array([2**63 + 5], np.uint64), np.array([3], np.uint64)) == 2**63 + 15
    a = rng.integers(0, 2**64, (64, 64), np.uint64)
    assert np.array_equal(tw.matmul(a, a), np.matmul(a, a))


def test_A18_uint16_has_one_answer_in_every_shape() -> None:
    x, y = np.array([54321], np.uint16), np.array([9876], np.uint16)
    for x_shape, y_shape in (((1,), (1,)), ((1, 1), (1, 1)), ((1,), (1, 1, 1)), ((4, 1, 1),) * 2):
        a, b = np.broadcast_to(x, x_shape), np.broadcast_to(y, y_shape)
        assert (np.asarray(tw.matmul(a, b)) == 62036).all()


def test_A19_a_wider_result_type_is_exact() -> None:
    a, b = np.full((2, 300), 100, np.int8), np.full((300, 2), 100, np.int8)
    assert (tw.matmul(a, b) == -64).all()
    assert (tw.matmul(a, b, dtype=np.int16) == -14656).all()
    assert (tw.matmul(a, b, dtype=np.int32) == 3_000_000).all()


def test_A20_conjugate_transposes(rng: Any) -> None:
    for dtype in (np.complex64, np.complex128):
        a = np.ones((1, 2, 1), dtype)
        b = np.full((1, 3, 1), 1 + 2j, dtype).swapaxes(1, 2).conj()
        got = tw.matmul(a, b)
        assert got.shape == (1, 2, 3)
        assert (got == 1 - 2j).all()
        c = (rng.standard_normal((5, 5)) + 1j * rng.standard_normal((5, 5))).astype(dtype)
        unit = 2.0**-24 if dtype is np.complex64 else 2.0**-53
        assert within_bound(tw.matmul(c.conj(), c.T), c.conj(), c.T, unit)


@pytest.mark.parametrize("m", [2097153, 4266126, 6291456])
def test_A22_very_tall_operands(m: int) -> None:
    ones = np.ones((2, 2), np.float32)
    assert (tw.matmul(np.broadcast_to(np.float32(1), (m, 2)), ones) == 2).all()
    assert (tw.matmul(np.ones((m, 2), np.float16), ones.astype(np.float16)) == 2).all()


def test_A23_huge_batches_of_tiny_matrices(rng: Any) -> None:
    points = rng.standard_normal((400, 400, 2, 1)).astype(np.float32)
    assert np.array_equal(tw.matmul(np.eye(2, dtype=np.float32), points), points)
    turn = small_integers(rng, (3, 3), np.int32, -9, 9)
    pixels = rng.integers(0, 256, (480, 640, 3, 1), dtype=np.int32)
    assert np.array_equal(tw.matmul(turn, pixels), np.einsum("ij,abjk->abik", turn, pixels))


@pytest.mark.parametrize("dtype", ["float16", BF16, "float32", "float64", "complex64"], ids=str)
@pytest.mark.parametrize("size", [3, 200])
def test_A24_beta_zero_never_reads_c_and_alpha_zero_never_reads_a(dtype: Any, size: int) -> None:
    a = np.eye(size, dtype=dtype)
    for poison in (np.nan, np.inf):
        c = np.full((size, size), poison, dtype)
        tw.gemm(a, a, c, beta=0)
        assert np.array_equal(c, a)
        c[...] = 2
        tw.gemm(np.full_like(a, poison), a, c, alpha=0, beta=3)
        assert (c == 6).all()
        c[...] = poison
        tw.gemm(np.full_like(a, poison), a, c, alpha=0, beta=0)
        assert (c == 0).all()


def test_A25_out_is_never_resized_or_ignored() -> None:
    a = np.ones((2, 2))
    read_only = np.ones((2, 2))
    read_only.flags.writeable = False
    for out, words in (
        (np.ones((3, 1)), r"out \(shape \(3, 1\).*exactly the result's shape \(2, 2\)"),
        (np.ones((2, 2), np.int32), r"out .*dtype int32.*exactly the result's dtype float64"),
        (np.ones((2, 2), np.float32), "exactly the result's dtype float64"),
        (read_only, "out .*read-only"),
        (np.broadcast_to(np.ones(2), (2, 2)), "read-only"),
        (np.lib.stride_tricks.as_strided(np.ones(2), (2, 2), (0, 8)), "share memory"),
        (np.lib.stride_tricks.as_strided(np.ones(3), (2, 2), (8, 8)), "share memory"),
        ([[0, 0], [0, 0]], "cannot be written in place"),
    ):
        with pytest.raises(tw.TilewiseError, match=words):
            tw.matmul(a, a, out=out)
