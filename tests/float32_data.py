"""Operands that a float32 product made of narrower ones could get wrong, and how far it is off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilewise.numerics.schemes import PIECE, fp16x3_threshold

Array = np.ndarray[Any, np.dtype[Any]]
Data = Callable[[np.random.Generator, int, int, int], tuple[Array, Array]]


def over_the_promise(c: Array, a: Array, b: Array) -> Array:
    """Return each element's error over |C − C*| ≤ (K+2)·2^-24·|A||B| + K·2^-150; NaN is Inf.

    float64 sums are off by K·2^-53 of |A||B| at most, a 2^29th of what is allowed.
    """
    k = a.shape[-1]
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(all="ignore"):
        allowed = (k + 2) * 2.0**-24 * (np.abs(wide_a) @ np.abs(wide_b)) + k * 2.0**-150
        exact = wide_a @ wide_b
        ratio = np.abs(c.astype(np.float64) - exact) / allowed
        ratio[c == exact.astype(np.float32)] = 0  # both overflow, too
    return np.where(np.isnan(ratio), np.inf, ratio)


def normal(rng: np.random.Generator, m: int, k: int, n: int) -> tuple[Array, Array]:
    return _single(rng.standard_normal((m, k))), _single(rng.standard_normal((k, n)))


def uniform(rng: np.random.Generator, m: int, k: int, n: int) -> tuple[Array, Array]:
    return _single(rng.random((m, k))), _single(rng.random((k, n)))


def integers(rng: np.random.Generator, m: int, k: int, n: int) -> tuple[Array, Array]:
    return _single(rng.integers(-3, 4, (m, k))), _single(rng.integers(-3, 4, (k, n)))


def positive(rng: np.random.Generator, m: int, k: int, n: int) -> tuple[Array, Array]:
    """All near one, so that a bias of the sums shows."""
    return _single(1 + rng.random((m, k)) / 8), _single(1 + rng.random((k, n)) / 8)


def cancelling(rng: np.random.Generator, m: int, k: int, n: int) -> tuple[Array, Array]:
    """Neighbours that all but cancel."""
    a, b = rng.uniform(0.5, 1, (m, k)), rng.uniform(0.5, 1, (k, n))
    last = k - k % 2
    a[:, 1:last:2] = -a[:, :last:2] * (1 + 1e-6 * rng.standard_normal((m, last // 2)))
    b[1:last:2] = b[:last:2]
    return _single(a), _single(b)


def scaled_rows(rng: np.random.Generator, m: int, k: int, n: int) -> tuple[Array, Array]:
    scales = 10.0 ** np.linspace(-30, 30, m)[:, np.newaxis]
    return _single(scales * rng.standard_normal((m, k))), _single(rng.standard_normal((k, n)))


def scaled_columns(rng: np.random.Generator, m: int, k: int, n: int) -> tuple[Array, Array]:
    a, b = scaled_rows(rng, n, k, m)
    return np.ascontiguousarray(b.T), np.ascontiguousarray(a.T)


def subnormal(rng: np.random.Generator, m: int, k: int, n: int) -> tuple[Array, Array]:
    """Subnormal operands in some rows and columns, subnormal results of normal ones in others."""
    a, b = normal(rng, m, k, n)
    a[::3] *= np.float32(2.0**-130)
    b[:, ::4] *= np.float32(2.0**-133)
    a[1::3] *= np.float32(2.0**-70)
    b[:, 1::4] *= np.float32(2.0**-65)
    return a, b


def outliers(rng: np.random.Generator, m: int, k: int, n: int) -> tuple[Array, Array]:
    a, b = normal(rng, m, k, n)
    a[np.arange(m), rng.integers(0, k, m)] = 1e6
    b[rng.integers(0, k, n), np.arange(n)] = -1e6
    return a, b


def zeros(rng: np.random.Generator, m: int, k: int, n: int) -> tuple[Array, Array]:
    """Zero rows, columns and pieces, zeros of either sign in between."""
    a, b = normal(rng, m, k, n)
    a[rng.random((m, k)) < 0.3] = 0
    b[rng.random((k, n)) < 0.3] = -0.0
    a[::5] = 0
    b[:, ::7] = -0.0
    b[: k // 3 : 2, 1::2] = 0
    b[:PIECE, ::2] = 0
    return a, b


def lognormal(rng: np.random.Generator, m: int, k: int, n: int) -> tuple[Array, Array]:
    """Magnitudes of e^±24 and more within each row."""
    a = rng.standard_normal((m, k)) * np.exp(12 * rng.standard_normal((m, k)))
    b = rng.standard_normal((k, n)) * np.exp(12 * rng.standard_normal((k, n)))
    return _single(a), _single(b)


def huge_beside_one(rng: np.random.Generator, m: int, k: int, n: int) -> tuple[Array, Array]:
    """[1e30, 1]·[0, 1]: the largest element of each row meets a zero."""
    a, b = np.zeros((m, k), np.float32), np.zeros((k, n), np.float32)
    a[:, 0], a[:, 1], b[1] = 1e30, rng.uniform(1, 2, m), rng.uniform(1, 2, n)
    return a, b


def cut(rng: np.random.Generator, m: int, k: int, n: int) -> tuple[Array, Array]:
    """Lose as much in the tensor core as can be lost: all cuts are of one sign and nearly whole.

    A piece's first product is the largest, and loses all that splitting can lose; the others are
    1.99 times the last bit that is kept beside it, 4 to a sum short of a bit of float32.
    """
    worst = 1 + 4093 * 2.0**-23  # lo keeps 4092 of the 4093 that hi leaves
    a, b = np.full((m, k), 4 * 1.99), np.full((k, n), 2.0)
    a[:, 15::16] *= 0.4
    a[:, ::PIECE], b[::PIECE] = 2.0**14 * worst, 2.0**14 * worst
    return _single(a), _single(b)


def lossy(
    rng: np.random.Generator, m: int, k: int, n: int, times: float = 1
) -> tuple[Array, Array]:
    """Elements as small as is let through (or ``times`` that), each losing all that it can.

    The largest of each row and of each column's pieces meet zeros.
    """
    step = 2.0**-24
    least = max(float(fp16x3_threshold(k)) * times, 2.0**-20)
    # An even multiple of 2^-24 and a half: rounded down.
    small = (2 * np.ceil(least / step / 2) + 0.5) * step
    a, b = np.full((m, k), small), np.full((k, n), small)
    a[:, ::PIECE], b[::PIECE] = 0, 2.0**14
    a[:, 1::PIECE], b[1::PIECE] = 2.0**14, 0
    return _single(a), _single(b)


#: By name, in the order of docs/numerics.md. `lossy` and `cut` are made against the scheme.
DISTRIBUTIONS: dict[str, Data] = {
    each.__name__: each
    for each in (
        normal,
        uniform,
        integers,
        positive,
        cancelling,
        scaled_rows,
        scaled_columns,
        subnormal,
        outliers,
        zeros,
        lognormal,
        huge_beside_one,
        cut,
        lossy,
    )
}


def _single(x: Array) -> Array:
    with np.errstate(all="ignore"):
        return x.astype(np.float32)
