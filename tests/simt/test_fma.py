"""One rounding, against exact fractions, where two roundings would differ."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simt import exact
from tilewise.simt.fma import fma_f4, fma_f8

CASES = [(np.float32, fma_f4), (np.float64, fma_f8)]


def check(fma, dtype, x, y, z):
    with np.errstate(all="ignore"):
        found = fma(*(np.asarray(v, dtype) for v in (x, y, z)))
        expected = np.array([exact.fma(*lane, dtype) for lane in zip(x, y, z, strict=True)], dtype)
    same = (found == expected) & (np.signbit(found) == np.signbit(expected))
    same |= np.isnan(found) & np.isnan(expected)
    bad = np.flatnonzero(~same)[:3]
    assert same.all(), [(x[i], y[i], z[i], found[i], expected[i]) for i in bad]


@pytest.mark.parametrize(("dtype", "fma"), CASES)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_fma_of_any_bits_is_rounded_once(dtype, fma, data):
    width = 8 * np.dtype(dtype).itemsize
    patterns = st.lists(st.integers(0, 2**width - 1), min_size=20, max_size=20)
    lanes = [np.array(data.draw(patterns), f"u{width // 8}").view(dtype) for _ in range(3)]
    check(fma, dtype, *lanes)


@pytest.mark.parametrize(("dtype", "fma"), CASES)
def test_fma_is_right_next_to_ties(dtype, fma):
    """Sums that land half way between two results, or one unit of the wider type beside it."""
    rng = np.random.default_rng(1)
    digits = np.finfo(dtype).nmant + 1
    n = 3000
    half = digits // 2
    x, y = (1 + rng.integers(0, 2**half, n) * 2.0**-half for _ in range(2))
    z = 2.0 ** rng.integers(-2 * digits, 2 * digits, n) * rng.choice([-1, 1], n)
    z = z * (1 + rng.integers(0, 4, n) * 2.0 ** (1 - digits))
    check(fma, dtype, x.astype(dtype), y.astype(dtype), z.astype(dtype))


@pytest.mark.parametrize(("dtype", "fma"), CASES)
def test_fma_is_right_where_results_are_subnormal(dtype, fma):
    rng = np.random.default_rng(2)
    info = np.finfo(dtype)
    n = 3000
    x = (rng.standard_normal(n) * 2.0 ** rng.integers(-12, 0, n)).astype(dtype)
    y = (rng.standard_normal(n) * float(info.tiny) * 2.0 ** rng.integers(-10, 12, n)).astype(dtype)
    z = (rng.integers(-(2**20), 2**20, n) * float(info.smallest_subnormal)).astype(dtype)
    check(fma, dtype, x, y, z)
    check(fma, dtype, x, y, z * 0)


@pytest.mark.parametrize(("dtype", "fma"), CASES)
def test_fma_is_right_where_results_cancel_or_overflow(dtype, fma):
    rng = np.random.default_rng(3)
    info = np.finfo(dtype)
    n = 2000
    x, y = (rng.standard_normal(n).astype(dtype) for _ in range(2))
    z = (-(x * y) * (1 + rng.integers(-2, 3, n) * info.eps)).astype(dtype)
    check(fma, dtype, x, y, z)
    big = (float(info.max) * rng.uniform(0.4, 1, n)).astype(dtype)
    near = rng.choice(np.array([1, 1 + info.eps, 1.5, 2 - info.eps, 2], dtype), n)
    check(fma, dtype, big, near, (-float(info.max) * rng.uniform(0, 1, n)).astype(dtype))


@pytest.mark.parametrize(("dtype", "fma"), CASES)
def test_fma_of_special_values(dtype, fma):
    values = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-30], dtype)
    x, y, z = (axis.ravel() for axis in np.meshgrid(values, values, values))
    check(fma, dtype, x, y, z)


@pytest.mark.parametrize(("dtype", "fma"), CASES)
def test_fma_broadcasts_and_takes_scalars(dtype, fma):
    x = np.arange(3, dtype=dtype).reshape(3, 1)
    y = np.arange(4, dtype=dtype)
    assert np.array_equal(fma(x, y, dtype(0.5)), x * y + dtype(0.5))
    assert np.array_equal(
        fma(x, dtype(2), np.ones((2, 1, 1), dtype)), np.broadcast_to(2 * x + 1, (2, 3, 1))
    )
    result = fma(dtype(3), dtype(4), dtype(5))
    assert type(result) is dtype
    assert result == 17


def test_separate_roundings_differ_here():
    """The inputs of this file can tell: product and sum rounded one by one give other bits."""
    rng = np.random.default_rng(4)
    x, y, z = (rng.standard_normal(1000).astype(np.float32) for _ in range(3))
    assert (fma_f4(x, y, z) != x * y + z).mean() > 0.1
