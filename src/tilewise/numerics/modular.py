"""Checking products of integers and bools, which are exact: any difference is an error.

NumPy's integers wrap, so everything is computed modulo 2^w, w the width of the result, in unsigned
arithmetic, by NumPy's own loops and not by what multiplies (limbs on BLAS).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .elements import Array, Bools
from .panels import panels

__all__ = ["differs", "element", "odd_sums"]

Unsigned = NDArray[Any]

#: Terms of an element that are Python's integers at a time.
_TERMS = 2**8


def differs(a: Any, b: Any, c: Array, panel: int) -> Bools:
    """Return which elements of c (..., m, n) are not those of ``a @ b``, recomputing all.

    The operands are read in pieces of ``panel`` elements.
    """
    k, width = a.shape[-1], max(a.shape[-2], b.shape[-1])
    # Sums of zeros and ones in float32 are zero exactly if every term is.
    kind = np.dtype(np.float32) if c.dtype.kind == "b" else _unsigned(c)
    total = np.zeros(c.shape, kind)
    step = max(panel // width, 1)
    for start in range(0, k, step):
        piece = slice(start, start + step)
        ours, others = np.asarray(a[..., piece]), np.asarray(b[..., piece, :])
        total += np.matmul(ours.astype(kind), others.astype(kind))
    if c.dtype.kind == "b":
        return np.asarray((total > 0) != c)
    return np.asarray(total != c.astype(kind))


def element(a_row: Array, b_column: Array, result: np.dtype[Any]) -> int | bool:
    """Return one element of the product in Python's integers, wrapped as ``result`` wraps."""
    total = 0
    for start in range(0, a_row.size, _TERMS):
        row, column = (x[start : start + _TERMS].tolist() for x in (a_row, b_column))
        total += sum(int(x) * int(y) for x, y in zip(row, column, strict=True))
    if result.kind == "b":
        return total > 0
    size = 1 << (8 * result.itemsize)
    total %= size
    return total - size if result.kind == "i" and total >= size // 2 else total


def odd_sums(
    a: Any, b: Any, c: Any, rounds: int, rng: np.random.Generator, panel_size: int, terms: int
) -> tuple[Bools, Bools]:
    """Return the rows and the columns of an integer product that certainly hold errors.

    The vectors are uniform modulo 2^w: a row with an error is missed in one round with a
    probability of at most one half, which an error of 2^(w−1) attains. One more vector is odd
    throughout, so that a single wrong element in a row or column is never missed. What is read is
    ``panel_size`` elements at a time, and of K ``terms``.
    """
    (m, k), n = a.shape, b.shape[1]
    kind = _unsigned(c)

    def draw(length: int) -> Unsigned:
        x = rng.integers(0, 2 ** (8 * kind.itemsize), (length, rounds + 1), dtype=kind)
        x[:, 0] |= 1
        return x

    def zeros(length: int) -> Unsigned:
        return np.zeros((length, rounds + 1), kind)

    x, u = draw(n), draw(m)
    by_rows, by_columns = zeros(m), zeros(n)
    for start in range(0, k, max(terms, 1)):
        piece = slice(start, min(start + terms, k))
        a_piece, b_piece = a[:, piece], b[piece]
        y, v = zeros(piece.stop - start), zeros(piece.stop - start)  # B·x, Aᵀ·u
        for rows, columns, panel in panels(b_piece, panel_size):
            y[rows] += panel.astype(kind) @ x[columns]
        for rows, columns, panel in panels(a_piece, panel_size):
            ours = panel.astype(kind)
            by_rows[rows] -= ours @ y[columns]
            v[columns] += _transposed(ours) @ u[rows]
        for rows, columns, panel in panels(b_piece, panel_size):
            by_columns[columns] -= _transposed(panel.astype(kind)) @ v[rows]
    for rows, columns, panel in panels(c, panel_size):
        ours = panel.astype(kind)
        by_rows[rows] += ours @ x[columns]
        by_columns[columns] += _transposed(ours) @ u[rows]
    return np.any(by_rows, axis=1), np.any(by_columns, axis=1)


def _transposed(panel: Unsigned) -> Unsigned:
    """Return a contiguous transpose: NumPy's integer loop is several times slower on strides."""
    return np.ascontiguousarray(panel.T)


def _unsigned(c: Any) -> np.dtype[Any]:
    return np.dtype(f"u{c.dtype.itemsize}")
