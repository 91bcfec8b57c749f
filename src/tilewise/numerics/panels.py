"""Walking over a matrix that need not fit into memory: panels in the order it is stored in."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .unread import Unread

__all__ = ["panels", "release"]

Array = NDArray[Any]


def panels(x: Array | Unread, limit: int) -> Iterator[tuple[slice, slice, Array]]:
    """Yield rows, columns and the panel ``x[rows, columns]``, of at most ``limit`` elements.

    Panels follow the storage: whole rows of a row-major matrix, whole columns of a column-major
    one. Pages of a memory-mapped file are handed back to the system after each panel, since
    mapped pages count as this process's memory.
    """
    m, n = x.shape
    by_rows = abs(x.strides[1]) <= abs(x.strides[0])
    along, across = (n, m) if by_rows else (m, n)
    length = max(min(along, limit), 1)
    thickness = max(limit // length, 1)
    for start in range(0, across, thickness):
        outer = slice(start, min(start + thickness, across))
        for begin in range(0, along, length):
            inner = slice(begin, min(begin + length, along))
            rows, columns = (outer, inner) if by_rows else (inner, outer)
            yield rows, columns, np.asarray(x[rows, columns])
            release(x)


def release(x: Array | Unread) -> None:
    """Hand back the pages of a memory-mapped file under ``x``; do nothing for other arrays."""
    mode: str | None = None
    base: Any = x
    while isinstance(base, np.ndarray):
        mode = getattr(base, "mode", mode)
        base = base.base
    # Pages of a private mapping (mode "c") hold what was written to them and nothing else does.
    if isinstance(base, mmap.mmap) and mode in ("r", "r+", "w+") and hasattr(base, "madvise"):
        base.madvise(mmap.MADV_DONTNEED)
