"""Elements of a product computed again and laid beside the result: the witnesses of `check`.

`compare` recomputes a tile in float64 and measures every element of the result against its bound;
`prove` settles one element in exact rational arithmetic. Which elements are looked at is decided
elsewhere.

A complex product is treated as the real product of twice the length and width that it is,
``[Aᵣ Aᵢ]·[[Bᵣ, Bᵢ], [−Bᵢ, Bᵣ]] = [Cᵣ Cᵢ]`` with the parts interleaved, so everything here is real.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .bounds import Bound, float_format
from .dtypes import DType, accumulator

__all__ = ["Comparison", "Proof", "Rule", "compare", "left", "prove", "right"]

Array = NDArray[Any]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]

#: Unit roundoff of float64, which elements are recomputed in.
UNIT = 2.0**-53


@dataclass(frozen=True, slots=True)
class Rule:
    """What the elements of a floating-point product are held to."""

    bound: Bound
    is_complex: bool
    terms: int  #: products in the sum of one real element: K, or 2K if complex
    is_rounded: bool  #: whether float64 may round an operand (integers of 64 bits)
    sum_max: float  #: largest finite number of the type that sums are held in
    result_max: float
    has_inf: bool  #: whether the result type has Inf; one that has not overflows to NaN

    @classmethod
    def of(cls, bound: Bound, a: DType, b: DType, result: DType) -> Rule:
        """Return the rule for operands and a result of these canonical types."""
        is_complex = result.kind == "c"
        target = float_format(result)
        return cls(
            bound=bound,
            is_complex=is_complex,
            terms=2 * bound.k if is_complex else bound.k,
            is_rounded=any(x.kind in "iu" and x.itemsize == 8 for x in (a, b)),
            sum_max=float_format(accumulator(result, a, b)).max,
            result_max=target.max,
            has_inf=target.has_inf,
        )

    @property
    def is_wide(self) -> bool:
        """Whether float64's own rounding is of the size of what the bound allows."""
        return self.bound.factor < 2.0**-40 * (self.terms + 2)

    def own_error(self, magnitude: Floats) -> Floats:
        """Return how far a float64 recomputation may itself be off, given ``|A||B|``."""
        unit = (self.terms + (6 if self.is_rounded else 2)) * UNIT
        return unit * magnitude + self.terms * 2.0**-1074


@dataclass(frozen=True, slots=True)
class Comparison:
    """The elements of one tile against their bounds.

    ``ratio`` is the measured error over the allowed one: 0 where a non-finite element is as it
    should be, Inf where it is not. ``is_unsure`` marks the elements whose verdict the rounding of
    the recomputation itself could turn.
    """

    ratio: Floats
    is_unsure: NDArray[np.bool_]
    largest_allowed: float  #: largest error of any element that could have gone unnoticed

    @property
    def is_wrong(self) -> NDArray[np.bool_]:
        return (self.ratio > 1) & ~self.is_unsure


@dataclass(frozen=True, slots=True)
class Proof:
    """One real element in exact arithmetic; ``expected`` and ``allowed`` are rounded to float64."""

    is_right: bool
    ratio: float  #: of the error to the allowed one
    expected: float
    allowed: float


def left(x: Array) -> Floats:
    """Return a copy of a left operand, or a result, in float64: complex parts interleaved."""
    if x.dtype.kind == "c":
        return np.array(x, np.complex128, order="C").view(np.float64)
    return x.astype(np.float64)


def right(x: Array) -> Floats:
    """Return a copy of a right operand in float64; of a complex one, rows for b and for i·b."""
    if x.dtype.kind != "c":
        return x.astype(np.float64)
    *batch, k, n = x.shape
    rows = np.empty((*batch, 2 * k, 2 * n))
    rows[..., ::2, ::2] = rows[..., 1::2, 1::2] = x.real
    rows[..., ::2, 1::2] = x.imag
    np.negative(x.imag, out=rows[..., 1::2, ::2])
    return rows


def compare(pieces: Iterable[tuple[Floats, Floats]], got: Floats, rule: Rule) -> Comparison:
    """Measure a tile of a result against its bound.

    Parameters
    ----------
    pieces : iterable of (ndarray (..., r, k'), ndarray (..., k', s))
        The rows of A and columns of B, from `left` and `right`, cut along K. Overwritten where
        they are not finite.
    got : ndarray (..., r, s)
        The same tile of the result, from `left`.
    rule : Rule
        What to hold it to.
    """
    exact, magnitude = np.zeros(got.shape), np.zeros(got.shape)
    infinite: Floats | None = None
    with np.errstate(all="ignore"):
        for a, b in pieces:
            if not (np.isfinite(a).all() and np.isfinite(b).all()):
                # Signs in place of finite numbers, so that nothing overflows into the answer.
                term = np.matmul(_signs(a), _signs(b))
                infinite = term if infinite is None else infinite + term
                a[~np.isfinite(a)] = 0
                b[~np.isfinite(b)] = 0
            exact += np.matmul(a, b)
            magnitude += np.matmul(np.abs(a), np.abs(b))
        allowed = rule.bound.of(magnitude, exact)
        own_error = rule.own_error(magnitude)
        error = np.abs(got - exact)
        ratio = np.where(error == 0, 0.0, error / allowed)
        is_unsure = (error > allowed - np.minimum(own_error, allowed / 2)) & (
            error <= allowed + own_error
        )
        # Magnitudes beyond float64 say nothing unless the result overflowed with them.
        is_unsure |= ~(np.isfinite(magnitude) & np.isfinite(exact)) & (got != exact)
        if not np.isfinite(got).all():
            odd = ~np.isfinite(got)
            may = _may_overflow(got, exact, magnitude, allowed, rule)
            ratio[odd] = np.where(may[odd], 0.0, np.inf)
            is_unsure[odd] &= ~np.isnan(got[odd]) | may[odd] | (not rule.has_inf)
        if infinite is not None:
            odd = ~np.isfinite(infinite)
            fits = _fits_pattern(got, infinite, magnitude, rule)
            ratio[odd] = np.where(fits[odd], 0.0, np.inf)
            is_unsure[odd] = False
        largest = np.max(allowed + own_error, initial=0.0, where=np.isfinite(magnitude))
    return Comparison(ratio, is_unsure, float(largest))


def prove(a_row: Array, b_column: Array, value: float, part: int, rule: Rule) -> Proof:
    """Settle one real element in exact arithmetic.

    Parameters
    ----------
    a_row, b_column : ndarray (k,)
        As the operands hold them.
    value : float
        What the result holds.
    part : int
        0 for the real part, 1 for the imaginary part.
    """
    if not (_is_finite(a_row) and _is_finite(b_column)):
        a, b = left(_complex_if(a_row, rule)[None]), right(_complex_if(b_column, rule)[:, None])
        with np.errstate(all="ignore"):
            pattern = float(np.matmul(_signs(a), _signs(b))[0, part])
        result = compare([(a, b[:, part : part + 1])], np.array([[value]]), rule)
        return Proof(not result.is_wrong[0, 0], float(result.ratio[0, 0]), pattern, 0.0)
    exact, magnitude = _exact_element(a_row, b_column, part, rule.is_complex)
    bound = rule.bound
    allowed = (
        Fraction(bound.factor) * magnitude
        + Fraction(bound.rounding) * abs(exact)
        + Fraction(bound.underflow)
    )
    if np.isfinite(value):
        error = abs(Fraction(value) - exact)
        is_right = error <= allowed
        ratio = _to_float(error / allowed) if allowed else 0.0 if is_right else float("inf")
    else:
        is_right = _may_overflow_exactly(value, exact, magnitude, allowed, rule)
        ratio = 0.0 if is_right else float("inf")
    return Proof(is_right, ratio, _to_float(exact), _to_float(allowed))


def _signs(x: Floats) -> Floats:
    return np.where(np.isfinite(x), np.sign(x), x)


def _may_overflow(
    got: Floats, exact: Floats, magnitude: Floats, allowed: Floats, rule: Rule
) -> NDArray[np.bool_]:
    """Whether each non-finite element may stem from finite operands: by overflow, as promised.

    The result overflows where C* does; it may where the terms of one sign overflow the sum, and be
    Inf − Inf where those of both signs do.
    """
    result_overflows = (np.abs(exact) + allowed >= rule.result_max) & (got * exact > 0)
    if not rule.has_inf:
        return np.isnan(got) & (np.abs(exact) + allowed >= rule.result_max)
    positive, negative = (  # also where a sum is Inf or NaN
        ~((magnitude + sign * exact) / 2 * (1 + 2.0**-10) < rule.sum_max) for sign in (1, -1)
    )
    one_sign = np.where(got > 0, positive, negative)
    may: NDArray[np.bool_] = np.where(
        np.isnan(got), positive & negative, result_overflows | one_sign
    )
    return may


def _may_overflow_exactly(
    value: float, exact: Fraction, magnitude: Fraction, allowed: Fraction, rule: Rule
) -> bool:
    """Decide the same for one element."""
    result_overflows = abs(exact) + allowed >= Fraction(rule.result_max)
    if not rule.has_inf:
        return bool(np.isnan(value)) and result_overflows
    positive, negative = (
        (magnitude + signed) / 2 * (1 + Fraction(1, 2**10)) >= Fraction(rule.sum_max)
        for signed in (exact, -exact)
    )
    if np.isnan(value):
        return positive and negative
    toward, one_sign = (exact, positive) if value > 0 else (-exact, negative)
    return (result_overflows and toward > 0) or one_sign


def _fits_pattern(
    got: Floats, infinite: Floats, magnitude: Floats, rule: Rule
) -> NDArray[np.bool_]:
    """Whether each element is as an Inf or NaN among its operands makes it."""
    same = (got == infinite) | (np.isnan(got) & np.isnan(infinite))
    # Complex multiplications differ in where they put NaN beside Inf; an overflow of the finite
    # terms meets the Inf of the operands; and a type without Inf has NaN only.
    is_loose = magnitude * (1 + 2.0**-10) >= rule.sum_max
    if rule.is_complex or not rule.has_inf:
        is_loose = np.ones_like(same)
    opposite = np.isinf(got) & np.isinf(infinite) & (got != infinite)
    fits: NDArray[np.bool_] = same | (is_loose & ~np.isfinite(got) & ~opposite)
    return fits


def _exact_element(
    a_row: Array, b_column: Array, part: int, is_complex: bool
) -> tuple[Fraction, Fraction]:
    """Return one element of C* and of ``|A||B|``."""
    if not is_complex:
        return _exact_dot(a_row, b_column)
    pairs = ((a_row.real, b_column.real), (a_row.imag, b_column.imag))
    if part:
        pairs = ((a_row.real, b_column.imag), (a_row.imag, b_column.real))
    (first, first_size), (second, second_size) = (_exact_dot(x, y) for x, y in pairs)
    return (first + second if part else first - second), first_size + second_size


def _exact_dot(x: Array, y: Array) -> tuple[Fraction, Fraction]:
    """Return ``Σ xy`` and ``Σ |xy|``: integers of Python, over one power of two a piece."""
    total = size = Fraction(0)
    for start in range(0, x.size, 2**8):
        piece = slice(start, start + 2**8)
        (x_whole, x_power), (y_whole, y_power) = _as_integers(x[piece]), _as_integers(y[piece])
        terms = [
            (u * v, i + j)
            for u, i, v, j in zip(x_whole, x_power, y_whole, y_power, strict=True)
            if u and v
        ]
        least = min((power for _, power in terms), default=0)
        shifted = [term << (power - least) for term, power in terms]
        total += sum(shifted) * Fraction(2) ** least
        size += sum(map(abs, shifted)) * Fraction(2) ** least
    return total, size


def _as_integers(x: Array) -> tuple[list[int], list[int]]:
    """Return whole numbers and powers of two whose products are the elements of ``x``."""
    if x.dtype.kind in "biu":
        return [int(v) for v in x.tolist()], [0] * x.size
    fraction, power = np.frexp(x.astype(np.float64))
    return np.ldexp(fraction, 53).astype(np.int64).tolist(), (power - 53).tolist()


def _is_finite(x: Array) -> bool:
    return bool(np.isfinite(x if x.dtype.kind in "biufc" else x.astype(np.float64)).all())


def _complex_if(x: Array, rule: Rule) -> Array:
    return x.astype(np.complex128) if rule.is_complex else x


def _to_float(x: Fraction) -> float:
    try:
        return float(x)
    except OverflowError:
        return float("inf") if x > 0 else float("-inf")
