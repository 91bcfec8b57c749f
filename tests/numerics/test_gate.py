"""Case A26: the release gate. Data that cannot pass by luck, and a reference that is not ours.

A gate of whole numbers let errors of 5 to 30 % ship elsewhere. This one holds products to the
promise with fractions, constants such as pi and e, and rows scaled from 1e-30 to 1e30, against
rational arithmetic written here, and proves itself on products that are wrong on purpose.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilewise as tw

BF16 = np.dtype(ml_dtypes.bfloat16)
Matmul = Callable[[Any, Any], Any]

#: Unit roundoff of the sums, of the result, and the least result, by element type.
PROMISES = {
    np.dtype(np.float64): (Fraction(1, 2**53), Fraction(0), Fraction(1, 2**1074)),
    np.dtype(np.float32): (Fraction(1, 2**24), Fraction(0), Fraction(1, 2**149)),
    np.dtype(np.float16): (Fraction(1, 2**24), Fraction(1, 2**11), Fraction(1, 2**24)),
    BF16: (Fraction(1, 2**24), Fraction(1, 2**8), Fraction(1, 2**133)),
}


def fractional(rng: np.random.Generator, dtype: Any) -> tuple[Any, Any]:
    return rng.uniform(-1, 1, (7, 53)).astype(dtype), rng.uniform(-1, 1, (53, 6)).astype(dtype)


def constants(rng: np.random.Generator, dtype: Any) -> tuple[Any, Any]:
    values = np.array([np.pi, np.e, np.sqrt(2), np.log(2), 1 / 3, 0.1, -np.pi / 7])
    return rng.choice(values, (5, 41)).astype(dtype), rng.choice(values, (41, 5)).astype(dtype)


def scaled_rows(rng: np.random.Generator, dtype: Any) -> tuple[Any, Any]:
    reach = 4 if dtype == np.float16 else 30
    scales = 10.0 ** np.linspace(-reach, reach, 9)[:, np.newaxis]
    a = scales * rng.standard_normal((9, 29)) * (0.1 if dtype == np.float16 else 1)
    return a.astype(dtype), rng.standard_normal((29, 4)).astype(dtype)


def cancelling(rng: np.random.Generator, dtype: Any) -> tuple[Any, Any]:
    half = rng.uniform(0.5, 1, (4, 30))
    b = np.repeat(rng.uniform(0.5, 1, (30, 3)), 2, axis=0)
    return np.stack([half, -half * 1.01], axis=2).reshape(4, 60).astype(dtype), b.astype(dtype)


DATA = (fractional, constants, scaled_rows, cancelling)


def worst(matmul: Matmul, data: Any, dtype: Any) -> Fraction:
    """Return the largest error of a product over what is promised of it."""
    a, b = data(np.random.default_rng(26), np.dtype(dtype))
    got = np.asarray(matmul(a, b))
    assert got.shape == (a.shape[0], b.shape[1])
    assert got.dtype == dtype
    unit, result_unit, least = PROMISES[np.dtype(dtype)]
    k, ratio = a.shape[1], Fraction(0)
    rows = [[Fraction(float(x)) for x in row] for row in a]
    columns = [[Fraction(float(x)) for x in column] for column in b.T]
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            terms = [x * y for x, y in zip(row, column, strict=True)]
            exact, size = sum(terms), sum(map(abs, terms))
            allowed = (k + 2) * unit * size * (1 + result_unit) + result_unit * abs(exact)
            value = float(got[i, j])
            assert np.isfinite(value)
            ratio = max(ratio, abs(Fraction(value) - exact) / (allowed + k * least))
    return ratio


@pytest.mark.parametrize("dtype", PROMISES, ids=str)
@pytest.mark.parametrize("data", DATA, ids=lambda data: data.__name__)
def test_A26_products_keep_their_promise(data: Any, dtype: Any) -> None:
    assert worst(tw.matmul, data, dtype) <= 1


def truncating(a: Any, b: Any) -> Any:
    return tw.matmul(np.trunc(a.astype(float)).astype(a.dtype), b)


def dropping_a_term(a: Any, b: Any) -> Any:
    return tw.matmul(a[:, :-1], b[:-1])


def rounding_inputs_to_11_bits(a: Any, b: Any) -> Any:
    def rounded(x: Any) -> Any:
        fraction, power = np.frexp(x.astype(float))
        return np.ldexp(np.rint(fraction * 2**11), power - 11).astype(x.dtype)

    return tw.matmul(rounded(a), rounded(b))


def transposing_a_tile(a: Any, b: Any) -> Any:
    c = np.array(tw.matmul(a, b))
    c[:3, :3] = c[:3, :3].T.copy()
    return c


@pytest.mark.parametrize("dtype", PROMISES, ids=str)
@pytest.mark.parametrize("mutant", [truncating, dropping_a_term, transposing_a_tile])
def test_A26_the_gate_stops_a_wrong_product_with_all_its_data(mutant: Matmul, dtype: Any) -> None:
    for data in DATA:
        assert worst(mutant, data, dtype) > 1, data.__name__


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_A26_the_gate_stops_reduced_precision(dtype: Any) -> None:
    for data in DATA:
        assert worst(rounding_inputs_to_11_bits, data, dtype) > 1, data.__name__


def test_A26_whole_numbers_would_have_let_the_mutant_through() -> None:
    def whole(rng: np.random.Generator, dtype: Any) -> tuple[Any, Any]:
        return rng.integers(-3, 4, (5, 9)).astype(dtype), rng.integers(-3, 4, (9, 4)).astype(dtype)

    assert worst(truncating, whole, np.float32) == 0
