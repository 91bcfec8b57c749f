"""Exact models of the schemes that compute float32 products from narrower ones: bit for bit.

``fp16x3`` multiplies float32 matrices on float16 tensor cores within float32's own error bound
(Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores while surpassing the
FP32 theoretical peak performance", 2022), ``tf32`` multiplies the high parts alone. What is
computed is defined here, and so is which rows and columns it is not safe for; docs/numerics.md
derives the bound, and the kernels are held to these bits. What flagged elements are computed by
instead is a plain chain of fused multiply-adds, and not modelled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "LEAST_K",
    "PIECE",
    "ROW_EXPONENTS",
    "TF32_THRESHOLD",
    "Product",
    "Split",
    "column_exponents",
    "fp16x3",
    "fp16x3_threshold",
    "split_columns",
    "split_rows",
    "tensor_core_sum",
    "tf32",
    "tf32_exponents",
]

#: What a tensor core adds up by itself, of K, before the sum moves on to float32.
PIECE = 64
#: Below this K the cuts of the tensor core alone could exceed float32's bound.
LEAST_K = 32
#: Scaled elements below this would be subnormal as float16, which a tensor core does not normalise.
TF32_THRESHOLD = np.float32(2.0**-14)

#: Scaled operands have their largest element in [2^14, 2^15).
_TOP = 14
#: Sums of products of a row, E, and a piece, F, are C·2^(28 − E − F). They are multiplied by 2^(F −
#: _COLUMN_UNIT), then by 2^(E − _ROW_UNIT), which centres the range of columns that are safe.
_ROW_UNIT = 20
_COLUMN_UNIT = 2 * _TOP - _ROW_UNIT
#: Rows of A whose largest element has an exponent in here have scales that are normal numbers.
ROW_EXPONENTS = (-106, 127)
#: Products of float16 are multiples of 2^-48; times 2^(F − _COLUMN_UNIT) with F from here on, they
#: are multiples of 2^-149, and no sum is rounded among the subnormal numbers.
_LEAST_COLUMN_EXPONENT = -93

#: Products that a tensor core of Hopper adds to a sum at a time, and the bits below float32's last
#: that it keeps of each (Khattak and Mikaitis, "Accurate models of NVIDIA tensor cores", 2025).
_STEP = 16
_EXTRA_BITS = 2
_LEAST_FLOAT16_EXPONENT = -14

_NO_EXPONENT = -(1 << 12)

Array = NDArray[Any]
Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """An operand as scaled float16 parts: ``x·2^(14 − exponents) ≈ hi + lo``.

    Attributes
    ----------
    hi, lo : ndarray of float16
        In the operand's shape. lo is what hi leaves, rounded.
    exponents : ndarray of int, (m,) or (pieces, n)
        The exponent of the largest element of each row, or of each piece of a column.
    flags : ndarray of bool, (m,) or (n,)
        Rows or columns that the scheme is not safe for; their other fields mean nothing.
    """

    hi: NDArray[np.float16]
    lo: NDArray[np.float16]
    exponents: NDArray[np.int64]
    flags: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """What the tensor cores make of a product, and where that is not what is given out.

    Attributes
    ----------
    c : ndarray of float32, (m, n)
        In flagged rows and columns, what would come out if nothing were flagged.
    rows : ndarray of bool, (m,)
    columns : ndarray of bool, (n,)
        Whether all elements of a row or column are computed by chains of FMAs instead.
    """

    c: Float32
    rows: NDArray[np.bool_]
    columns: NDArray[np.bool_]


def fp16x3(a: Float32, b: Float32, *, chain: int | None = None) -> Product:
    """Return ``c = a @ b`` as three float16 products give it, and what is not safe so.

    Parameters
    ----------
    a : ndarray of float32, (m, k)
    b : ndarray of float32, (k, n)
        With k ≥ 32.
    chain : int, optional
        How much of K is summed up before the sum is added to that of earlier chains: a multiple of
        64; all of it by default.
    """
    least = fp16x3_threshold(a.shape[1])
    x, y = split_rows(a, least), split_columns(b, least)
    return _unscaled(_sum(lambda part: _promoted(x, y, part), a.shape[1], chain), x, y)


def tf32(a: Float32, b: Float32, *, chain: int | None = None) -> Product:
    """Return ``c = a @ b`` from 11 bits an operand; as `fp16x3`, without the low parts.

    Whole columns of B are scaled as rows of A are, and a tensor core sums a chain by itself.
    """
    safe = tf32_exponents(a.shape[1])
    x, y = split_rows(a, TF32_THRESHOLD, safe), split_rows(b.T, TF32_THRESHOLD, safe)

    def summed(part: slice) -> Float32:
        zeros = np.zeros((a.shape[0], b.shape[1]))
        return tensor_core_sum(x.hi[:, part], y.hi[:, part].T, zeros).astype(np.float32)

    sums = _sum(summed, a.shape[1], chain)
    with np.errstate(all="ignore"):
        scaled = np.ldexp(np.float64(sums), y.exponents - _TOP).astype(np.float32)
    return _unscaled(scaled, x, y, _TOP)


def fp16x3_threshold(k: int) -> np.float32:
    """Return the least scaled magnitude whose lost bits fit into the promise for K terms.

    An element below it, other than 0, flags its row or column. Derived in docs/numerics.md.
    """
    if k < LEAST_K:
        raise ValueError(f"fp16x3 needs {LEAST_K} terms, and K is {k}")
    terms = min(k, PIECE)
    # In units of 2^-24·|A||B|: the cuts of a piece, a rounding a piece, the lost lo·lo, all against
    # K+2. What is left is shared by what the operands lose, 1/128 of it and 1/2 for second orders.
    cuts = terms / 2 + 2 * -(-terms // _STEP)
    room = k + 2 - cuts - (-(-k // PIECE) - 1) - 4 - 0.5
    exact = max(128 / (127 * room), float(TF32_THRESHOLD))
    rounded = np.float32(exact)
    return rounded if rounded >= exact else np.nextafter(rounded, np.float32(1))


def column_exponents(k: int) -> tuple[int, int]:
    """Return the range of exponents of a column's pieces for which no sum over- or underflows."""
    # |sum| < 2^_ROW_UNIT · 2 · K · 2^(F+1) has to stay below 2^127.
    return _LEAST_COLUMN_EXPONENT, 125 - _ROW_UNIT - max(k - 1, 0).bit_length()


def tf32_exponents(k: int) -> tuple[int, int]:
    """Return the range of exponents of rows and columns for which no sum over- or underflows."""
    # Sums are less than 2^28 · 4 · K, multiples of 2^-48, and multiplied by 2^(F − 14) first.
    return -149 + 48 + _TOP, 127 - 30 + _TOP - 1 - max(k - 1, 0).bit_length()


def split_rows(
    a: Float32, least: np.float32, safe_exponents: tuple[int, int] = ROW_EXPONENTS
) -> Split:
    """Return A, (m, k), scaled row by row; ``least`` is the threshold for lost bits."""
    exponents, is_zero = _largest_exponents(a, axis=1)
    scaled = _scaled(a, exponents[:, np.newaxis])
    flags = _is_outside(exponents, is_zero, safe_exponents)
    return _split(scaled, exponents, flags | np.any(_is_lossy(a, scaled, least), axis=1))


def split_columns(b: Float32, least: np.float32) -> Split:
    """Return B, (k, n), scaled for each column and piece of K."""
    k, n = b.shape
    pieces = -(-k // PIECE)
    padded = np.zeros((pieces * PIECE, n), np.float32)
    padded[:k] = b
    exponents, is_zero = _largest_exponents(padded.reshape(pieces, PIECE, n), axis=1)
    scaled = _scaled(b, np.repeat(exponents, PIECE, axis=0)[:k])
    flags = np.any(_is_outside(exponents, is_zero, column_exponents(k)), axis=0)
    return _split(scaled, exponents, flags | np.any(_is_lossy(b, scaled, least), axis=0))


def tensor_core_sum(
    a: NDArray[np.float16], b: NDArray[np.float16], acc: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return ``acc + a @ b`` as Hopper's tensor cores add it up.

    16 products and the sum so far are aligned to the largest exponent among them, cut toward zero
    two bits below float32's last one, added, and cut to float32. Products are exact; their exponent
    is the sum of their factors', and a subnormal factor counts as one of exponent −14, so that a
    product may be smaller than its exponent says.

    Parameters
    ----------
    a : ndarray of float16, (m, k)
    b : ndarray of float16, (k, n)
    acc : ndarray of float64, (m, n)
        Numbers of float32.

    Notes
    -----
    Found by test vectors in the manner of Fasi, Higham, Mikaitis and Pranesh ("Numerical behavior
    of NVIDIA tensor cores", 2021), and equal to an H200 in every bit of random products
    (tests/gpu/test_float32_promise.py).
    """
    wide_a, wide_b = a.astype(np.float64), b.T.astype(np.float64)
    a_exponents, b_exponents = _nominal_exponents(wide_a), _nominal_exponents(wide_b)
    for start in range(0, a.shape[1], _STEP):
        part = slice(start, start + _STEP)
        products = wide_a[:, np.newaxis, part] * wide_b[np.newaxis, :, part]
        exponents = a_exponents[:, np.newaxis, part] + b_exponents[np.newaxis, :, part]
        top = np.maximum(exponents.max(axis=2), _nominal_exponents(acc, least=-126))
        last = np.maximum(top, -200) - 23 - _EXTRA_BITS
        scale = np.ldexp(1.0, -last)
        total = np.trunc(products * scale[:, :, np.newaxis]).sum(axis=2) + np.trunc(acc * scale)
        unit = np.ldexp(1.0, np.maximum(np.frexp(total)[1] - 24, 0))
        acc = np.ldexp(np.trunc(total / unit) * unit, last)
    return acc


def _sum(summed: Callable[[slice], Float32], k: int, chain: int | None) -> Float32:
    """Return the sum over K of what a part of it amounts to, chain by chain."""
    with np.errstate(all="ignore"):  # in flagged rows and columns
        parts = [slice(at, min(at + (chain or k), k)) for at in range(0, k, chain or k)]
        return reduce(np.add, (summed(part) for part in parts))


def _unscaled(sums: Float32, a: Split, b: Split, unit: int = _ROW_UNIT) -> Product:
    """Return the product of sums in units of rows of A."""
    with np.errstate(all="ignore"):  # in flagged rows and columns, and where C itself overflows
        c = np.ldexp(np.float64(sums), (a.exponents - unit)[:, np.newaxis])
        return Product(c=c.astype(np.float32), rows=a.flags, columns=b.flags)


def _promoted(a: Split, b: Split, chain: slice) -> Float32:
    """Return the sum over a part of K that begins with a piece, in units of rows of A."""
    sums = np.zeros((a.hi.shape[0], b.hi.shape[1]), np.float32)
    for at in range(chain.start, chain.stop, PIECE):
        part = slice(at, min(at + PIECE, chain.stop))
        t = tensor_core_sum(a.lo[:, part], b.hi[part], np.zeros(sums.shape))
        t = tensor_core_sum(a.hi[:, part], b.lo[part], t)
        t = tensor_core_sum(a.hi[:, part], b.hi[part], t)
        # An FMA: the factor is a power of two, and float64 adds numbers of float32 so well that
        # rounding its sum is rounding the exact one (Figueroa, "When is double rounding
        # innocuous?", 1995).
        promoted = np.ldexp(t, b.exponents[at // PIECE] - _COLUMN_UNIT)
        sums = (promoted + sums).astype(np.float32)
    return sums


def _largest_exponents(x: Float32, axis: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the exponent of the largest finite magnitude along an axis, and where that is 0."""
    magnitudes = np.where(np.isfinite(x), np.abs(x), np.float32(0))
    largest = magnitudes.max(axis=axis, initial=0)
    is_zero = largest == 0
    return np.where(is_zero, _TOP, np.frexp(largest)[1] - 1).astype(np.int64), is_zero


def _scaled(x: Float32, exponents: NDArray[np.int64]) -> Float32:
    return np.ldexp(x, _TOP - exponents).astype(np.float32)


def _is_lossy(x: Float32, scaled: Float32, least: np.float32) -> NDArray[np.bool_]:
    """Whether an element loses more than its share; true of what is not finite, too."""
    lossy: NDArray[np.bool_] = (x != 0) & ~((np.abs(scaled) >= least) & np.isfinite(x))
    return lossy


def _is_outside(
    exponents: NDArray[np.int64], is_zero: NDArray[np.bool_], allowed: tuple[int, int]
) -> NDArray[np.bool_]:
    low, high = allowed
    return ~is_zero & ((exponents < low) | (exponents > high))


def _split(scaled: Float32, exponents: NDArray[np.int64], flags: Any) -> Split:
    with np.errstate(all="ignore"):
        hi = scaled.astype(np.float16)
        lo = (scaled - hi.astype(np.float32)).astype(np.float16)
    return Split(hi=hi, lo=lo, exponents=exponents, flags=flags)


def _nominal_exponents(
    x: NDArray[np.float64], least: int = _LEAST_FLOAT16_EXPONENT
) -> NDArray[np.int64]:
    exponents = np.maximum(np.frexp(x)[1] - 1, least)
    return np.where(x == 0, _NO_EXPONENT, exponents).astype(np.int64)
