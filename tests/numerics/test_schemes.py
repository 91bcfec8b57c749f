"""fp16x3 keeps float32's promise wherever it is not flagged, and is flagged wherever it would not.

References are float64 and integers; what is flagged is computed by other means and not looked at.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.float32_data import DISTRIBUTIONS, cut, lossy, normal, over_the_promise
from tilewise.numerics import schemes
from tilewise.numerics.bounds import bound
from tilewise.numerics.schemes import fp16x3, fp16x3_threshold, tensor_core_sum, tf32

#: Where rows hold more magnitudes than float16 parts do.
SPREAD = ("outliers", "lognormal", "huge_beside_one")

SINGLE = np.dtype(np.float32)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


def kept(found: schemes.Product) -> Any:
    """Where the product is what the tensor cores make of it."""
    return ~(found.rows[:, np.newaxis] | found.columns)


@pytest.mark.parametrize("k", [32, 33, 64, 97, 1000])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_what_is_not_flagged_keeps_the_promise(name: str, k: int, rng: Any) -> None:
    a, b = DISTRIBUTIONS[name](rng, 24, k, 20)
    found = fp16x3(a, b)
    assert over_the_promise(found.c, a, b)[kept(found)].max(initial=0) <= 1


@pytest.mark.parametrize("name", [name for name in DISTRIBUTIONS if name not in SPREAD])
def test_ordinary_data_is_not_flagged(name: str, rng: Any) -> None:
    a, b = DISTRIBUTIONS[name](rng, 24, 500, 20)
    flagged = 1 - kept(fp16x3(a, b)).mean()
    assert flagged <= {"subnormal": 0.6, "scaled_columns": 0.2}.get(name, 0)


@pytest.mark.parametrize("name", SPREAD)
def test_rows_of_many_magnitudes_are_flagged(name: str, rng: Any) -> None:
    a, b = DISTRIBUTIONS[name](rng, 24, 500, 20)
    found = fp16x3(a, b)
    assert found.rows.all()
    if name != "outliers":  # and would break the promise; outliers may, with other columns
        assert over_the_promise(found.c, a, b).max() > 1


def test_the_bound_is_nearly_attained_by_the_tensor_cores_cuts(rng: Any) -> None:
    a, b = cut(rng, 2, 64, 2)
    assert 0.65 < over_the_promise(fp16x3(a, b).c, a, b).min() <= 1


@pytest.mark.parametrize("k", [256, 1024, 8192])
def test_the_threshold_for_lost_bits_is_sharp(k: int, rng: Any) -> None:
    a, b = lossy(rng, 2, k, 2)
    found = fp16x3(a, b)
    assert kept(found).all()
    assert 0.75 < over_the_promise(found.c, a, b).min() <= 1
    # Without flags, elements of a half of the threshold would break the promise.
    a, b = lossy(rng, 2, k, 2, times=0.5)
    found = fp16x3(a, b)
    assert not kept(found).any()
    assert over_the_promise(found.c, a, b).min() > 1


@pytest.mark.parametrize("k", [32, 100, 5000, 20000])
def test_lost_bits_are_flagged_from_the_threshold_on(k: int) -> None:
    least = fp16x3_threshold(k)
    a = np.ones((2, k), np.float32)
    a[:, 3] = 2.0**14
    a[0, 5], a[1, 5] = least, np.nextafter(least, np.float32(0))
    assert schemes.split_rows(a, least).flags.tolist() == [False, True]
    assert schemes.split_columns(np.ascontiguousarray(a.T), least).flags.tolist() == [False, True]
    for scale in (2.0**-60, 2.0**60):
        scaled = a * np.float32(scale)
        assert schemes.split_rows(-scaled, least).flags.tolist() == [False, True]


def test_the_threshold_is_never_below_where_float16_is_normal() -> None:
    assert fp16x3_threshold(16384) > schemes.TF32_THRESHOLD
    for k in (17_000, 2**20, 2**31):
        assert fp16x3_threshold(k) == schemes.TF32_THRESHOLD
    with pytest.raises(ValueError, match="needs 32 terms"):
        fp16x3_threshold(31)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_flagged(value: float, rng: Any) -> None:
    a, b = normal(rng, 6, 70, 5)
    a[2, 69], b[3, 4] = value, value
    found = fp16x3(a, b)
    assert np.flatnonzero(found.rows).tolist() == [2]
    assert np.flatnonzero(found.columns).tolist() == [4]
    assert over_the_promise(found.c, a, b)[kept(found)].max() <= 1


@pytest.mark.parametrize(("exponent", "is_flagged"), [(-106, False), (-107, True), (127, False)])
def test_rows_are_flagged_outside_a_range_of_exponents(
    exponent: int, is_flagged: bool, rng: Any
) -> None:
    k = 40
    a = np.full((1, k), 1.75 * 2.0**exponent, np.float32)
    b = normal(rng, 1, k, 3)[1]
    found = fp16x3(a, b)
    assert found.rows.tolist() == [is_flagged]
    assert over_the_promise(found.c, a, b).max() <= 1


@pytest.mark.parametrize("k", [32, 64, 100, 1024])
def test_columns_are_flagged_where_a_sum_could_overflow(k: int) -> None:
    _, high = schemes.column_exponents(k)
    most = np.nextafter(np.float32(2), np.float32(0))
    a = np.full((1, k), most * np.float32(2.0**-40), np.float32)
    for exponent, is_flagged in ((high, False), (high + 1, True), (high + 2, True)):
        b = np.full((k, 1), most * np.float32(2.0**exponent), np.float32)
        found = fp16x3(a, b)
        assert found.columns.tolist() == [is_flagged]
        assert is_flagged or over_the_promise(found.c, a, b).max() <= 1
    if k.bit_count() == 1:
        assert np.isinf(found.c).all()  # although C is some 2^60


def test_columns_are_flagged_where_a_sum_could_underflow(rng: Any) -> None:
    k = 64
    low, _ = schemes.column_exponents(k)
    least = fp16x3_threshold(k)
    # The largest of a column meets a zero; the other products are the least there can be.
    a, b = lossy(rng, 2, k, 2)
    a *= np.float32(2.0**100)
    for exponent, is_flagged in ((low, False), (low - 1, True)):
        tiny = b * np.float32(2.0 ** (exponent - 14))
        found = fp16x3(a, tiny)
        assert found.columns.all() == found.columns.any() == is_flagged
        assert over_the_promise(found.c, a, tiny).max() <= 1
    tiny = b * np.float32(2.0 ** (-124 - 14))
    assert schemes.split_columns(tiny, least).flags.all()
    assert over_the_promise(fp16x3(a, tiny).c, a, tiny).max() > 1


def test_one_tiny_piece_flags_a_column_and_a_zero_piece_does_not(rng: Any) -> None:
    a, b = normal(rng, 3, 200, 3)
    b[64:128, 0] = 0
    b[64:128, 1] *= np.float32(2.0**-100)
    found = fp16x3(a, b)
    assert found.columns.tolist() == [False, True, False]


def test_zeros_and_underflow_have_the_sign_of_a_chain_of_fmas() -> None:
    a = np.zeros((3, 64), np.float32)
    a[1], a[2, :2] = -(2.0**-80), (1, -1)
    b = np.zeros((64, 2), np.float32)
    b[0, 0], b[:2, 1] = 2.0**-80, 1
    found = fp16x3(a, b)
    assert kept(found).all()
    zero = found.c[found.c == 0]
    assert zero.size == 4
    assert np.signbit(found.c).tolist() == [[False, False], [True, True], [False, False]]


def test_overflow_is_infinite_and_what_is_finite_stays_finite() -> None:
    a = np.full((2, 64), 2.0**127, np.float32)
    a[1, 1::2] *= -1
    b = np.full((64, 1), 2.0**3, np.float32)
    found = fp16x3(a, b)
    assert kept(found).all()
    assert found.c.ravel().tolist() == [np.inf, 0]


def exact_sum(a: Any, b: Any, acc: float) -> float:
    """One row by one column, as `tensor_core_sum` says, in integers."""
    for start in range(0, len(a), 16):
        terms = []
        for x, y in zip(a[start : start + 16], b[start : start + 16], strict=True):
            product = Fraction(float(x)) * Fraction(float(y))
            if product:
                exponents = [max(int(np.frexp(float(v))[1]) - 1, -14) for v in (x, y)]
                terms.append((product, sum(exponents)))
        if acc:
            terms.append((Fraction(acc), int(np.frexp(acc)[1]) - 1))
        if not terms:
            continue
        unit = Fraction(2) ** (max(exponent for _, exponent in terms) - 25)
        total = sum(int(term / unit) for term, _ in terms)  # int() cuts toward zero
        lost = max(abs(total).bit_length() - 24, 0)
        total = (abs(total) >> lost << lost) * (1 if total >= 0 else -1)
        acc = float(total * unit)
    return acc


@given(st.integers(0, 2**32), st.integers(1, 40), st.sampled_from([2, 12, 24]))
@settings(max_examples=40, deadline=None)
def test_the_tensor_core_model_is_its_definition(seed: int, k: int, spread: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = (
        (rng.standard_normal(s) * 2.0 ** rng.integers(-spread, spread // 2, s)).astype(np.float16)
        for s in ((3, k), (k, 2))
    )
    acc = rng.standard_normal((3, 2)).astype(np.float32).astype(np.float64)
    acc[0] = 0
    found = tensor_core_sum(a, b, acc)
    for i in range(3):
        for j in range(2):
            assert found[i, j] == exact_sum(a[i], b[:, j], float(acc[i, j]))


def test_a_subnormal_float16_costs_a_tensor_core_its_last_bits() -> None:
    # 2^-24·1 + 2·(2^-24)²: float32 holds the sum, and float32 arithmetic would give it.
    a = np.array([[2.0**-24] * 3], np.float16)
    b = np.array([[1], [2.0**-24], [2.0**-24]], np.float16)
    assert tensor_core_sum(a, b, np.zeros((1, 1)))[0, 0] == 2.0**-24
    a, b = np.ldexp(a, 10), np.ldexp(b, -10)
    b[1:] = 2.0**-24
    a[0, 1:] = 2.0**-24
    assert tensor_core_sum(a, b, np.zeros((1, 1)))[0, 0] == 2.0**-24 + 2.0**-47


@pytest.mark.parametrize("k", [32, 33, 100, 1000])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_tf32_keeps_its_own_promise(name: str, k: int, rng: Any) -> None:
    a, b = DISTRIBUTIONS[name](rng, 24, k, 20)
    promise = bound(k, SINGLE, SINGLE, SINGLE, precision="tf32")
    found = tf32(a, b)
    wide_a, wide_b = a.astype(float), b.astype(float)
    allowed = promise.of(abs(wide_a) @ abs(wide_b))
    with np.errstate(all="ignore"):
        error = np.abs(found.c - wide_a @ wide_b)
        error[found.c == (wide_a @ wide_b).astype(np.float32)] = 0
    assert (error <= allowed)[kept(found)].all()


def test_tf32_is_not_better_than_it_says(rng: Any) -> None:
    a, b = np.full((1, 64), 1 + 2.0**-11), np.full((64, 1), 1 + 2.0**-11)
    a, b = a.astype(np.float32), b.astype(np.float32)
    c = tf32(a, b).c.astype(float)
    exact = a.astype(float) @ b.astype(float)
    promise = bound(64, SINGLE, SINGLE, SINGLE, precision="tf32")
    assert 0.9 < abs(c - exact)[0, 0] / promise.of(exact)[0, 0] <= 1


def test_sums_are_more_accurate_than_a_chain_of_float32(rng: Any) -> None:
    a, b = DISTRIBUTIONS["positive"](rng, 32, 4096, 32)
    exact = a.astype(float) @ b.astype(float)
    chain = np.zeros((32, 32), np.float32)
    for x, y in zip(a.T, b, strict=True):
        chain += np.outer(x, y)
    ours, plain = (np.linalg.norm(c - exact) for c in (fp16x3(a, b).c, chain))
    assert ours < plain / 6


def test_chains_are_added_in_their_order_and_keep_the_promise(rng: Any) -> None:
    a, b = normal(rng, 9, 1000, 7)
    whole, found = fp16x3(a, b), fp16x3(a, b, chain=192)
    assert (found.c != whole.c).any()
    assert over_the_promise(found.c, a, b).max() <= 1
    assert np.array_equal(fp16x3(a, b, chain=1024).c, whole.c)


def test_rows_and_columns_do_not_see_each_other(rng: Any) -> None:
    a, b = normal(rng, 9, 130, 7)
    whole = fp16x3(a, b)
    alone = fp16x3(a[4:5], b[:, 2:3])
    assert alone.c[0, 0] == whole.c[4, 2]
