"""Multiply and add with one rounding, lane by lane, exactly as the hardware's FMA does it.

float32 goes through float64, where the product of two float32 is exact. The sum is then rounded
twice, to 53 bits and to 24; the second rounding can only go wrong when the first one lands exactly
half way between two float32. Those few lanes are found by a bit test and put right by rounding the
sum to odd (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).

float64 has no wider type to lean on: error-free transformations (Dekker's product, Knuth's sum)
give the exact result as a sum of parts, which the same paper shows how to round once. Lanes whose
parts could over- or underflow are computed with fractions.

NaN results are NaN; their payload is not modelled.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["fma_f4", "fma_f8"]

_LOW_28 = np.int64((1 << 28) - 1)
_SPLITTER = 134217729.0  # 2^27 + 1


def fma_f4(x: Any, y: Any, z: Any) -> Any:
    """Return ``x·y + z`` for float32 lanes (or scalars), rounded once."""
    product, wide = x.astype(np.float64) * y.astype(np.float64), z.astype(np.float64)
    if not (isinstance(product, np.ndarray) or isinstance(wide, np.ndarray)):
        return fma_f4(np.array([x]), np.array([y]), np.array([z]))[0]
    whole = wide.shape == product.shape
    wide = np.add(product, wide, out=wide) if whole else product + wide
    result = wide.astype(np.float32)
    # float32 drops the lowest 29 bits, or more of them below its normal range. Half way means a 1
    # and zeros: the 28 lowest are zero in any case. Most numbers like that are simply float32.
    suspect = (wide.view(np.int64) & _LOW_28) == 0
    if suspect.any():
        suspect &= result != wide
    if suspect.any():
        lanes = np.nonzero(suspect)
        exact, addend = (np.broadcast_to(v, wide.shape)[lanes] for v in (product, z))
        result[lanes] = _sum_to_odd(exact, addend.astype(np.float64)).astype(np.float32)
    return result


def fma_f8(x: Any, y: Any, z: Any) -> Any:
    """Return ``x·y + z`` for float64 lanes (or scalars), rounded once."""
    if not any(isinstance(v, np.ndarray) for v in (x, y, z)):
        return fma_f8(np.array([x]), np.array([y]), np.array([z]))[0]
    high, low = _two_product(x, y)
    plain = high + z
    rounded = low != 0  # an exact product needs one addition only; NaN counts as rounded
    odd = (np.abs(high) < 1e-270) & (x != 0) & (y != 0)  # the product's error could underflow
    odd = odd | ~((np.abs(x) < 1e290) & (np.abs(y) < 1e290) & (np.abs(plain) < 1e290))
    if not (rounded | odd).any():
        return plain
    upper, rest = _two_sum(z, low)
    top, below = _two_sum(high, upper)
    # Zeros of either sign come out right from the one addition, not from the sum of parts.
    result = np.where(rounded, top + _sum_to_odd(below, rest), plain)
    if odd.any():
        lanes = np.nonzero(np.broadcast_to(odd, result.shape))
        parts = (np.broadcast_to(v, result.shape)[lanes] for v in (x, y, z))
        result[lanes] = [_exact(*lane) for lane in zip(*(p.tolist() for p in parts), strict=True)]
    return result


def _two_sum(a: Any, b: Any) -> tuple[Any, Any]:
    """Return the rounded sum and its error (Knuth)."""
    total = a + b
    b_part = total - a
    return total, (a - (total - b_part)) + (b - b_part)


def _two_product(a: Any, b: Any) -> tuple[Any, Any]:
    """Return the rounded product and its error (Dekker, with Veltkamp's splitting)."""
    product = a * b
    a_high = _SPLITTER * a - (_SPLITTER * a - a)
    b_high = _SPLITTER * b - (_SPLITTER * b - b)
    a_low, b_low = a - a_high, b - b_high
    error = a_low * b_low - (((product - a_high * b_high) - a_low * b_high) - a_high * b_low)
    return product, error


def _sum_to_odd(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ``a + b`` rounded to odd: of the two neighbours of an inexact sum, the odd one."""
    total, error = _two_sum(a, b)
    even = (total.view(np.int64) & 1) == 0
    away = np.where(error > 0, np.inf, -np.inf)
    move = even & (error != 0) & np.isfinite(total)
    odd: NDArray[np.float64] = np.where(move, np.nextafter(total, away), total)
    return odd


def _exact(x: float, y: float, z: float) -> float:
    """Return ``x·y + z`` rounded once, by exact rational arithmetic."""
    product = np.float64(x) * np.float64(y)
    if not (np.isfinite(x) and np.isfinite(y) and np.isfinite(z)):
        return float(product + np.float64(z))
    exact = Fraction(x) * Fraction(y) + Fraction(z)
    if exact == 0:
        return float((0.0 if x and y else product) + np.float64(z))
    try:
        return float(exact)
    except OverflowError:
        return float("inf") if exact > 0 else float("-inf")
