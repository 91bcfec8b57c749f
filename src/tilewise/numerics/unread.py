"""Arrays in files that need not fit into memory: read where they are looked at, and never mapped.

A file that is cut while it is mapped ends the process; one that is read ends the read. Which file
it is, and how it is read, is the caller's matter.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Unread", "broadcast_to", "taken"]

Array = NDArray[Any]
Span = slice | NDArray[np.int64]

#: Bytes that are read together although some of them are of no use, and runs that are worth it.
_TOGETHER, _LEAST_TOGETHER = 64 << 10, 4

#: Fills a buffer with the bytes of a file from an offset on, or raises.
Read = Callable[[int, memoryview], None]


class Unread:
    """An array of plain bytes in a file. Slices of it are such too; ``np.asarray`` reads one."""

    def __init__(
        self,
        read: Read,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        offset: int,
    ) -> None:
        """Describe elements from byte ``offset`` on, at strides of 0 or more bytes."""
        self.dtype, self.shape, self.strides = dtype, shape, strides
        self._read, self._offset = read, offset

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return prod(self.shape)

    def __getitem__(self, index: Any) -> Unread:
        """Return a part, by NumPy's basic indexing, of indices from 0 on and steps of 1."""
        index = index if isinstance(index, tuple) else (index,)
        if Ellipsis in index:
            at = index.index(Ellipsis)
            left = self.ndim - sum(part is not None for part in index) + 1
            index = (*index[:at], *(slice(None),) * left, *index[at + 1 :])
        offset, shape, strides = self._offset, [], []
        axes = iter(zip(self.shape, self.strides, strict=True))
        for part in index:
            if part is None:
                shape.append(1)
                strides.append(0)
                continue
            size, step = next(axes)
            if isinstance(part, slice):
                start, stop, _ = part.indices(size)
                shape.append(max(stop - start, 0))
                strides.append(step)
            else:
                start = int(part)
            offset += start * step
        for size, step in axes:
            shape.append(size)
            strides.append(step)
        return Unread(self._read, self.dtype, tuple(shape), tuple(strides), offset)

    def broadcast_to(self, shape: tuple[int, ...]) -> Unread:
        """Return it with axes before its own, and axes of length 1 repeated, as NumPy does."""
        added = len(shape) - self.ndim
        own = zip(shape[added:], self.shape, self.strides, strict=True)
        strides = (0,) * added + tuple(step if n == size else 0 for n, size, step in own)
        return Unread(self._read, self.dtype, shape, strides, self._offset)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Read it, in the order it is stored in; what repeats is read once."""
        if not self.size:
            return np.empty(self.shape, dtype or self.dtype)
        stored = [size if step else 1 for size, step in zip(self.shape, self.strides, strict=True)]
        order = sorted(range(self.ndim), key=lambda axis: -self.strides[axis])
        run, inner = self.dtype.itemsize, len(order)
        while inner and self._goes_on(order[inner - 1], run):
            run *= stored[order[inner - 1]]
            inner -= 1
        starts = np.array([self._offset])
        for axis in order[: max(inner - 1, 0)]:
            steps = np.arange(stored[axis]) * self.strides[axis]
            starts = (starts[:, np.newaxis] + steps).reshape(-1)
        count, step = (
            (stored[order[inner - 1]], self.strides[order[inner - 1]]) if inner else (1, run)
        )
        buffer = np.empty((starts.size, count, run), np.uint8)
        for start, into in zip(starts.data, buffer, strict=True):
            self._read_runs(start, step, into)
        values = buffer.reshape(-1).view(self.dtype).reshape([stored[axis] for axis in order])
        values = np.broadcast_to(values.transpose(np.argsort(order)), self.shape)
        return values if dtype is None else values.astype(dtype, copy=False)

    def _read_runs(self, start: int, step: int, into: NDArray[np.uint8]) -> None:
        """Read runs of bytes, one for each row of ``into``, that begin ``step`` bytes apart.

        Short ones are read several together, with what is between them.
        """
        count, run = into.shape
        at_once = _TOGETHER // step
        if at_once < _LEAST_TOGETHER or count == 1:
            for number in range(count):
                self._read(start + number * step, into[number].data)
            return
        whole = np.empty((min(at_once, count), step), np.uint8)
        for number in range(0, count, at_once):
            some = min(at_once, count - number)
            self._read(start + number * step, whole.reshape(-1).data[: (some - 1) * step + run])
            into[number : number + some] = whole[:some, :run]

    def _goes_on(self, axis: int, run: int) -> bool:
        """Whether stretches of ``run`` bytes along an axis lie end to end."""
        return self.strides[axis] in (0, run) or self.shape[axis] == 1


def broadcast_to(x: Array | Unread, shape: tuple[int, ...]) -> Any:
    """Return ``x`` broadcast, with nothing read or copied."""
    return x.broadcast_to(shape) if isinstance(x, Unread) else np.broadcast_to(x, shape)


def taken(x: Array | Unread, rows: Span, columns: Span) -> Any:
    """Return some rows and columns of a matrix, and read those that are listed."""
    if isinstance(rows, slice) and isinstance(columns, slice):
        return x[rows, columns]
    if not isinstance(x, Unread):
        return x[:, columns][rows] if isinstance(columns, slice) else x[rows][:, columns]
    parts = [[np.asarray(x[r, c]) for c in _runs(columns)] for r in _runs(rows)]
    return np.block(parts)


def _runs(span: Span) -> list[slice]:
    """Return ascending indices as slices."""
    if isinstance(span, slice):
        return [span]
    edges = [0, *(np.flatnonzero(np.diff(span) != 1) + 1).tolist(), span.size]
    return [slice(int(span[i]), int(span[j - 1]) + 1) for i, j in pairwise(edges)]
