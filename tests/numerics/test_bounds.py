"""Bounds from both sides: an honest product meets its bound, a product that is off does not."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.errors import DTypeError, OptionError
from tilewise.numerics.bounds import Bound, bound, float_format

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E5M2 = np.dtype(ml_dtypes.float8_e5m2)

#: Operand type, result type, and the type that an honest product is summed in.
FLOATS = [
    ("f4", "f4", "f4"),
    ("f8", "f8", "f8"),
    ("f4", "f8", "f8"),
    ("f8", "f4", "f8"),
    ("f2", "f2", "f4"),
    ("f2", "f4", "f4"),
    (BF16, BF16, "f4"),
    (BF16, "f4", "f4"),
    (E4M3, "f4", "f4"),
    (E5M2, "f4", "f4"),
    ("i1", "f4", "f4"),
    ("i4", "f4", "f8"),
    ("i8", "f8", "f8"),
    ("F", "F", "F"),
    ("D", "D", "D"),
    ("F", "D", "D"),
]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


def of(k: int, a: Any, b: Any, result: Any, **options: Any) -> Bound:
    return bound(k, np.dtype(a), np.dtype(b), np.dtype(result), **options)


def sample(rng: np.random.Generator, shape: tuple[int, int], dtype: Any) -> Any:
    dtype = np.dtype(dtype)
    if dtype.kind in "iu":
        high = min(2 ** (8 * dtype.itemsize - 1), 2**62)
        return rng.integers(-high, high, shape, dtype=dtype)
    x = rng.standard_normal(shape)
    return (x + 1j * rng.standard_normal(shape) if dtype.kind == "c" else x).astype(dtype)


def rational(x: Any) -> Any:
    """Return real and imaginary part as arrays of fractions."""
    if x.dtype.kind in "iu":
        return np.vectorize(lambda v: Fraction(int(v)), otypes=[object])(x), 0 * x.astype(object)
    wide = x.astype(np.complex128)
    exact = np.vectorize(lambda v: Fraction(float(v)), otypes=[object])
    return exact(wide.real), exact(wide.imag)


def worst_ratio(promise: Bound, a: Any, b: Any, c: Any) -> Fraction:
    """Return the largest error over the bound, in rational arithmetic, part by part."""
    (ar, ai), (br, bi), (cr, ci) = rational(a), rational(b), rational(c)
    parts = [(cr, ar @ br - ai @ bi, abs(ar) @ abs(br) + abs(ai) @ abs(bi))]
    if c.dtype.kind == "c":
        parts.append((ci, ar @ bi + ai @ br, abs(ar) @ abs(bi) + abs(ai) @ abs(br)))
    worst = Fraction(0)
    for got, exact, size in parts:
        allowed = promise.of(size.astype(float), exact.astype(float))
        for g, e, w in zip(got.ravel(), exact.ravel(), allowed.ravel(), strict=True):
            worst = max(worst, abs(g - e) / Fraction(float(w)))
    return worst


def honest(a: Any, b: Any, sums: Any, result: Any) -> Any:
    with np.errstate(all="ignore"):
        return (a.astype(sums) @ b.astype(sums)).astype(result)


@pytest.mark.parametrize(("operand", "result", "sums"), FLOATS, ids=str)
def test_an_honest_product_meets_its_bound_and_one_that_is_off_does_not(
    rng: np.random.Generator, operand: Any, result: Any, sums: Any
) -> None:
    a, b = sample(rng, (5, 23), operand), sample(rng, (23, 4), operand)
    is_whole = np.dtype(operand).kind == "i"
    a[2, 3] = 2 ** (8 * a.dtype.itemsize - 3) if is_whole else 1.75
    promise = of(23, operand, operand, result)
    assert worst_ratio(promise, a, b, honest(a, b, sums, result)) <= 1
    one_term_short = honest(a[:, :-1], b[:-1], sums, result)
    assert worst_ratio(promise, a, b, one_term_short) > 1
    truncated = a.copy()
    truncated[2, 3] = a[2, 3] // 2 if is_whole else 1
    assert worst_ratio(promise, a, b, honest(truncated, b, sums, result)) > 1


def test_the_coefficients_are_those_of_the_promise() -> None:
    k = 1000
    single, double = of(k, "f4", "f4", "f4"), of(k, "f8", "f8", "f8")
    assert (single.factor, single.rounding) == (1002 * 2.0**-24, 0)
    assert single.underflow == k * 2.0**-150
    assert (double.factor, double.rounding) == (1002 * 2.0**-53, 0)
    assert double.underflow == (k / 2) * 2.0**-1074
    assert of(k, "F", "F", "F").factor == 2002 * 2.0**-24
    assert of(k, "D", "D", "D").factor == 2002 * 2.0**-53
    half = of(k, "f2", "f2", "f2")
    assert half.rounding == 2.0**-11
    assert half.factor == 1002 * 2.0**-24 * (1 + 2.0**-11)
    assert of(k, "f2", "f2", "f2", device="cuda:0").factor == 2 * half.factor
    assert of(k, BF16, BF16, BF16).rounding == 2.0**-8
    assert of(k, E4M3, E4M3, "f4").factor == single.factor
    assert of(k, "f4", "f4", "f4", device="cuda").factor == single.factor


def test_the_formula_is_readable() -> None:
    assert str(of(9, "f4", "f4", "f4")) == "|C − C*| ≤ (K+2)·2⁻²⁴·|A||B| + K·2⁻¹⁵⁰"
    assert of(9, "D", "D", "D").text == "|C − C*| ≤ (2K+2)·2⁻⁵³·|A||B| + 2K·2⁻¹⁰⁷⁵"
    assert of(9, "f2", "f2", "f2").text == (
        "|C − C*| ≤ (1+2⁻¹¹)·((K+2)·2⁻²⁴·|A||B| + K·2⁻¹⁵⁰) + 2⁻¹¹·|C*| + 2⁻²⁵"
    )
    assert of(9, "i1", "i1", "i4").text == "C = C* exactly, modulo 2³²"


@pytest.mark.parametrize("kind", ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"])
def test_integers_and_bools_are_exact(kind: str) -> None:
    promise = of(12, kind, kind, kind)
    assert promise.is_exact
    assert not promise.of(np.ones((2, 2))).any()
    assert of(12, kind, kind, "i8").is_exact
    assert not of(12, kind, kind, "f4").is_exact


def test_an_empty_sum_is_exactly_zero() -> None:
    assert of(0, "f4", "f4", "f4").is_exact
    assert of(0, "f2", "f2", "f2").is_exact


@pytest.mark.parametrize(("dtype", "unit"), [(np.float32, 2.0**-24), (np.float64, 2.0**-53)])
def test_the_bound_is_attained_within_two_terms(dtype: Any, unit: float) -> None:
    # 1 + u rounds to even, back to 1: each of the 998 tiny terms is lost whole.
    k = 999
    a = np.full((1, k), unit, dtype)
    a[0, 0] = 1
    b = np.ones((k, 1), dtype)
    total = dtype(0)
    for x in a[0]:
        total += x
    ratio = worst_ratio(of(k, dtype, dtype, dtype), a, b, np.array([[total]]))
    assert Fraction(99, 100) < ratio <= 1


def test_the_underflow_term_is_needed_and_is_enough() -> None:
    a = np.full((1, 64), 2.0**-75, np.float32)
    b = np.full((64, 1), 2.0**-75, np.float32)
    zero = np.zeros((1, 1), np.float32)  # every product, 2^-150, rounds to even: to 0
    promise = of(64, "f4", "f4", "f4")
    assert worst_ratio(promise, a, b, zero) <= 1
    without = Bound(k=64, factor=promise.factor, underflow=2.0**-155, rounding=0.0, text="")
    assert worst_ratio(without, a, b, zero) > 1


def test_a_subnormal_half_rounds_by_half_the_least_half() -> None:
    a, b = np.array([[2.0**-13]], np.float16), np.array([[1.5 * 2.0**-12]], np.float16)
    rounded = (a.astype("f4") @ b.astype("f4")).astype("f2")
    assert rounded[0, 0] == 2.0**-24  # of 0.75·2^-24
    assert worst_ratio(of(1, "f2", "f2", "f2"), a, b, rounded) <= 1
    assert worst_ratio(of(1, "f2", "f2", "f2"), a, b, rounded * 3) > 1


def chopped(x: float, bits: int) -> float:
    fraction, power = np.frexp(x)
    return float(np.ldexp(np.trunc(np.ldexp(fraction, bits)), power - bits))


def test_a_tensor_core_that_chops_needs_the_bound_of_the_gpu() -> None:
    # Each term is just below the last place of the sum, and is chopped away whole.
    k = 1000
    a = np.full((1, k), 1.98 * 2.0**-24).astype(BF16)
    a[0, 0] = 1
    b = np.ones((k, 1), BF16)
    total = 0.0
    for x in a[0].astype(float):
        total = chopped(total + x, 24)
    c = np.array([[total]], np.float32)
    assert worst_ratio(of(k, BF16, BF16, "f4", device="cpu"), a, b, c) > 1
    assert worst_ratio(of(k, BF16, BF16, "f4", device="cuda"), a, b, c) <= 1


@pytest.mark.parametrize("data", ["normal", "positive", "one large"])
@pytest.mark.parametrize("k", [32, 100, 128, 1000])
def test_float8_on_a_tensor_core_meets_its_own_bound(
    rng: np.random.Generator, data: str, k: int
) -> None:
    """Simulate instructions of 32 products that keep 14 bits of the largest, promoted at 128."""
    x, y = rng.standard_normal((2, k))
    if data != "normal":
        x, y = abs(x), abs(y)
    if data == "one large":
        x[k // 2] = 400
    a, b = x.astype(E4M3).reshape(1, k), y.astype(E4M3).reshape(k, 1)
    products = a[0].astype(float) * b[:, 0].astype(float)
    total = np.float32(0)
    for piece in range(0, k, 128):
        held = 0.0
        for step in range(piece, min(piece + 128, k), 32):
            terms = np.append(products[step : min(step + 32, piece + 128)], held)
            last_place = 2.0 ** (np.frexp(abs(terms).max())[1] - 14)
            held = float((np.trunc(terms / last_place) * last_place).sum())
        total += np.float32(held)
    c = np.array([[total]], np.float32)
    assert worst_ratio(of(k, E4M3, E4M3, "f4", device="cuda"), a, b, c) <= 1
    if data != "normal":
        assert worst_ratio(of(k, E4M3, E4M3, "f4", device="cpu"), a, b, c) > 1


def test_integers_of_64_bits_may_be_rounded_on_the_way_in() -> None:
    assert of(10, "i8", "i8", "f8").factor == 16 * 2.0**-53
    assert of(10, "i8", "f8", "f8").factor == 14 * 2.0**-53
    assert of(10, "i4", "i4", "f8").factor == 12 * 2.0**-53
    assert of(10, "i2", "f4", "f4").factor == 12 * 2.0**-24


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_float64_meets_its_bound_whatever_the_values(data: st.DataObject) -> None:
    k = data.draw(st.integers(1, 6))
    values = st.floats(-1e150, 1e150, allow_subnormal=True)
    a = np.array([data.draw(st.lists(values, min_size=k, max_size=k))])
    b = np.array([data.draw(st.lists(values, min_size=k, max_size=k))]).T
    assert worst_ratio(of(k, "f8", "f8", "f8"), a, b, a @ b) <= 1


def test_of_takes_the_magnitude_for_the_result_where_that_is_unknown() -> None:
    promise = of(10, "f2", "f2", "f2")
    size, exact = np.array([4.0]), np.array([-1.0])
    assert promise.of(size) == promise.of(size, size)
    assert promise.of(size)[0] - promise.of(size, exact)[0] == 3 * 2.0**-11


@pytest.mark.parametrize(
    ("operands", "result"), [(("f4", "f4"), "i4"), (("i4", "i4"), "?"), (("F", "f4"), "f4")]
)
def test_a_result_that_cannot_be_is_refused(operands: tuple[str, str], result: str) -> None:
    with pytest.raises(DTypeError, match="product of"):
        of(4, *operands, result)


def test_a_precision_without_a_bound_is_refused() -> None:
    assert of(4, "f4", "f4", "f4", precision="ieee") == of(4, "f4", "f4", "f4")
    with pytest.raises(OptionError, match="fp64-int8"):
        of(4, "f8", "f8", "f8", precision="fp64-int8")


def test_tf32_adds_what_rounding_to_11_bits_costs() -> None:
    full, less = of(9, "f4", "f4", "f4"), of(9, "f4", "f4", "f4", precision="tf32")
    assert less.text == "|C − C*| ≤ (2⁻¹⁰+(K+2)·2⁻²⁴)·|A||B| + K·2⁻¹⁵⁰"
    assert less.factor == full.factor + 2.0**-10
    assert of(9, "F", "F", "F", precision="tf32").factor == 20 * 2.0**-24 + 2.0**-10


def test_the_facts_of_a_format_are_those_of_the_format() -> None:
    half = float_format(np.dtype(np.float16))
    assert (half.unit, half.least, half.max) == (2.0**-11, 2.0**-24, 65504)
    assert half.has_inf
    e4m3 = float_format(E4M3)
    assert (e4m3.unit, e4m3.least, e4m3.max) == (2.0**-4, 2.0**-9, 448)
    assert not e4m3.has_inf
    assert float_format(np.dtype(np.complex64)) == float_format(np.dtype(np.float32))
