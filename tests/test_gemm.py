"""gemm: c = alpha·a·b + beta·c in place, for every type, layout and overlap."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilewise as tw
from tests.support import guarded, margins_are_whole, small_integers

BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


@pytest.mark.parametrize(
    "dtype",
    ["float16", BF16, "float32", "float64", "complex64", "complex128", "longdouble"],
    ids=str,
)
@pytest.mark.parametrize(("alpha", "beta"), [(1, 0), (2, 1), (-0.5, 2), (1, 1), (0, 1), (3, 0)])
def test_floats(rng: Any, dtype: Any, alpha: float, beta: float) -> None:
    a, b = small_integers(rng, (2, 9, 30), dtype), small_integers(rng, (30, 8), dtype)
    c, buffer = guarded(small_integers(rng, (2, 9, 8), dtype))
    wide = np.complex128 if np.dtype(dtype).kind == "c" else np.float64
    expected = alpha * np.matmul(a.astype(wide), b.astype(wide)) + beta * c.astype(wide)
    assert tw.gemm(a, b, c, alpha=alpha, beta=beta) is c
    assert (c.astype(wide) == expected).all()
    assert margins_are_whole(c, buffer)


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "int64", "uint64"])
@pytest.mark.parametrize("size", [3, 20])  # NumPy's own loop, and limbs
def test_integers_wrap(rng: Any, dtype: str, size: int) -> None:
    info = np.iinfo(dtype)
    a = rng.integers(info.min, info.max, (size, 50), dtype=dtype, endpoint=True)
    c = rng.integers(info.min, info.max, (size, size), dtype=dtype, endpoint=True)
    for alpha, beta in (
        (1, 1),
        (3, -1),
        (-1, -1),
        (2**40 + 1, 1),
        (info.max, info.max),
        *((0, beta) for beta in (5, -1, 300, 2**63)),
        (2**64 + 3, -(2**70) - 1),
    ):
        result = c.copy()
        tw.gemm(a, a.T, result, alpha=alpha, beta=beta)
        product = np.matmul(a.astype(object), a.T.astype(object))
        exact = alpha * product + beta * c.astype(object)
        wrapped = [int(v) % (1 << info.bits) for v in exact.ravel()]
        assert [int(v) % (1 << info.bits) for v in result.ravel()] == wrapped


def test_bool_accumulates_by_or(rng: Any) -> None:
    a, c = rng.random((20, 9)) < 0.3, rng.random((20, 20)) < 0.3
    expected = np.matmul(a, a.T) | c
    tw.gemm(a, a.T, c, beta=1)
    assert np.array_equal(c, expected)


def test_vectors_and_strided_targets(rng: Any) -> None:
    a, x = small_integers(rng, (6, 4), np.float64), small_integers(rng, (4,), np.float64)
    y = np.arange(12.0)[::-2]
    expected = 2 * (a @ x) + y
    tw.gemm(a, x, y, alpha=2, beta=1)
    assert np.array_equal(y, expected)
    dot = np.array(3.0)
    tw.gemm(x, x, dot, beta=-1)
    assert dot == x @ x - 3


def test_c_may_overlap_an_operand(rng: Any) -> None:
    for dtype in ("float32", "int16"):
        a = small_integers(rng, (30, 30), dtype)
        expected = (a.astype(int) @ a.T.astype(int) + a).astype(dtype)
        tw.gemm(a, a.T, a, beta=1)
        assert np.array_equal(a, expected)


def test_alpha_and_beta_are_applied_before_the_one_rounding() -> None:
    a = np.full((1, 4096), 4, np.float16)  # the sum, 65536, is beyond float16
    c = np.zeros((1, 1), np.float16)
    tw.gemm(a, a.T, c, alpha=0.5)
    assert c[0, 0] == 32768


@pytest.mark.parametrize("alpha", [0, 1])
def test_a_factor_beyond_the_type_of_the_sums_is_inf_without_a_warning(alpha: float) -> None:
    a, c = np.ones((3, 3), np.float32), np.ones((3, 3), np.float32)
    tw.gemm(a, a, c, alpha=alpha, beta=1e300)
    assert (c == np.inf).all()
    tw.gemm(a, a, c, alpha=1e300)
    assert (c == np.inf).all()
    tw.gemm(a, a, c, alpha=-(10**400))
    assert (c == -np.inf).all()
    tw.gemm(a, np.full_like(a, np.nan), c, alpha=1e-300, beta=0)  # 0 in float32: not formed
    assert (c == 0).all()


def test_large_products_are_done_tile_by_tile(rng: Any) -> None:
    a = rng.integers(-3, 4, (2500, 300)).astype(np.float32)
    c = np.ones((2500, 2500), np.float32)
    tw.gemm(a, a.T, c, alpha=2, beta=3)
    assert np.array_equal(c, 2 * (a.astype(float) @ a.T.astype(float)) + 3)
