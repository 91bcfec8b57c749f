"""Exact integer products on floating-point BLAS.

A float64 product of integer matrices is exact while every partial sum stays at or below 2^53
(float32: 2^24), in any order of summation. Integers too large for that are cut into limbs, each a
small signed integer, ``x = Σ x_i · 2^(w·i)``; the products of limbs are exact, and are shifted and
added in int64, whose wrap modulo 2^64 is the wrap NumPy's integer matmul has. A pair of limbs whose
shift reaches the result's width contributes a multiple of 2^width, which is nothing.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Cut", "choose_cut", "magnitude_bits", "multiply_add", "type_bits"]

#: Depth of a float32 product below which its extra additions cost what its speed gains.
_LEAST_FLOAT32_DEPTH = 256


@dataclass(frozen=True, slots=True)
class Cut:
    """How two integer panels are cut into limbs so that every product of limbs is exact."""

    dtype: np.dtype[Any]  #: float type that the limbs are multiplied in
    depth: int  #: largest piece of K for which the products are exact
    a_width: int  #: bits of a limb of a; 0 where a is one limb
    b_width: int
    a_limbs: int
    b_limbs: int
    pairs: tuple[tuple[int, int], ...]  #: the pairs of limbs that are multiplied


def type_bits(dtype: np.dtype[Any]) -> int:
    """Return the least n with ``abs(x) <= 2**n`` for every x of the integer type ``dtype``."""
    if dtype.kind == "b":
        return 0
    return 8 * dtype.itemsize - (dtype.kind == "i")


def magnitude_bits(x: NDArray[Any]) -> int:
    """Return a small n with ``abs(x) <= 2**n`` for every element of an integer array.

    Types of at most 16 bits are not looked at: their type says enough. uint64 is taken modulo
    2^64 as int64, so a value above 2^63 counts as the negative number it wraps to.
    """
    if x.dtype.itemsize <= 2 or x.size == 0:
        return type_bits(x.dtype)
    if x.dtype == np.uint64:
        x = x.view(np.int64)
    low, high = int(x.min()), int(x.max())
    return max((-low - 1).bit_length() if low < 0 else 0, high.bit_length())


@lru_cache(maxsize=1024)
def choose_cut(a_bits: int, b_bits: int, k: int, result_bits: int) -> Cut:
    """Return the cut with the fewest products for operands below 2^a_bits and 2^b_bits in size.

    Parameters
    ----------
    a_bits, b_bits : int
        Bounds of the operands' magnitudes, as `magnitude_bits` gives them.
    k : int
        Length of the sums.
    result_bits : int
        Width of the result type; the product is needed modulo 2^result_bits.
    """
    float32_depth = 1 << max(24 - a_bits - b_bits, 0)
    if a_bits + b_bits <= 24 and float32_depth >= min(k, _LEAST_FLOAT32_DEPTH):
        return Cut(np.dtype(np.float32), float32_depth, 0, 0, 1, 1, ((0, 0),))
    best: Cut | None = None
    a_ways = [way for limbs in range(1, 9) for way in _widths(a_bits, limbs, result_bits)]
    b_ways = [way for limbs in range(1, 9) for way in _widths(b_bits, limbs, result_bits)]
    most_bits = 53 - (min(k, 1024) - 1).bit_length()  # of the product of two limbs
    for (a_width, a_sizes), (b_width, b_sizes) in itertools.product(a_ways, b_ways):
        if a_sizes[0] + b_sizes[0] > most_bits:
            continue
        a_limbs, b_limbs = len(a_sizes), len(b_sizes)
        # How many limbs of b each of a is multiplied with.
        rows = [
            min(-(-(result_bits - i * a_width) // b_width), b_limbs) if b_width else 1
            for i in range(a_limbs)
        ]
        if best is not None and sum(rows) >= len(best.pairs):
            continue
        bits = max(a_sizes[i] + max(b_sizes[:row]) for i, row in enumerate(rows))
        if bits <= most_bits:
            pairs = tuple((i, j) for i, row in enumerate(rows) for j in range(row))
            best = Cut(
                np.dtype(np.float64), 1 << (53 - bits), a_width, b_width, a_limbs, b_limbs, pairs
            )
    assert best is not None, "eight limbs a side cut any 64-bit integers"
    return best


def multiply_add(
    a: NDArray[Any], b: NDArray[Any], total: NDArray[np.int64], result_bits: int
) -> None:
    """Add ``a @ b`` to ``total``, exactly modulo 2^result_bits.

    Parameters
    ----------
    a, b : ndarray (..., m, k) and (..., k, n)
        Panels of any integer type or bool, any strides.
    total : ndarray (..., m, n) of int64
        Added to in place, wrapping modulo 2^64.
    """
    k = a.shape[-1]
    a, b = _reduced(a, result_bits), _reduced(b, result_bits)
    # No cut depends on k but by the power of two above it, up to 1024; few are searched for.
    about = 1 << min(max(k - 1, 0).bit_length(), 10)
    cut = choose_cut(magnitude_bits(a), magnitude_bits(b), about, result_bits)
    for start in range(0, k, cut.depth):
        stop = min(start + cut.depth, k)
        a_limbs = _split(a[..., start:stop], cut.a_limbs, cut.a_width, cut.dtype)
        b_limbs = _split(b[..., start:stop, :], cut.b_limbs, cut.b_width, cut.dtype)
        for i, j in cut.pairs:
            part = np.matmul(a_limbs[i], b_limbs[j]).astype(np.int64)
            if shift := i * cut.a_width + j * cut.b_width:
                np.left_shift(part, shift, out=part)
            np.add(total, part, out=total)
            del part  # before the next one takes its place


def _reduced(x: NDArray[Any], result_bits: int) -> NDArray[Any]:
    """Return ``x`` modulo 2^result_bits, if it is of a wider type."""
    if 8 * x.dtype.itemsize <= result_bits:
        return x
    return x.astype(np.dtype(f"i{result_bits // 8}"))


def _widths(bits: int, limbs: int, result_bits: int) -> list[tuple[int, list[int]]]:
    """Return (width, bits of each limb's magnitude) for every way to cut into equal limbs."""
    if limbs == 1:
        return [(0, [bits])]
    ways = []
    for width in range(4, 33):
        top_shift = width * (limbs - 1)
        if top_shift >= min(bits + 1, result_bits):
            break
        # The top limb holds what is left and a carry; modulo 2^64 it may also wrap.
        top = min(bits - top_shift + 1, 64 - top_shift)
        ways.append((width, [width - 1] * (limbs - 1) + [max(top, 1)]))
    return ways


def _split(x: NDArray[Any], limbs: int, width: int, dtype: np.dtype[Any]) -> list[NDArray[Any]]:
    """Return the limbs of ``x``, lowest first, each in [−2^(width−1), 2^(width−1)) but the last."""
    if limbs == 1:
        if x.dtype == np.uint64:
            x = x.view(np.int64)
        return [x.astype(dtype)]
    rest = x.astype(np.int64)
    half, mask = 1 << (width - 1), (1 << width) - 1
    parts = []
    for _ in range(limbs - 1):  # in place: what is held at a time is counted
        low = rest + half
        low &= mask
        low -= half
        parts.append(low.astype(dtype))
        rest -= low
        rest >>= width
    parts.append(rest.astype(dtype))
    return parts
