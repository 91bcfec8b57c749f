"""Operands as planning sees them: shape, dtype, strides and place, never an element.

And np.matmul's rules for their shapes: what goes together, and which matrices of a batch meet.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from operator import index
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .errors import ShapeError, describe

__all__ = [
    "Box",
    "Operand",
    "batch_slices",
    "batch_steps",
    "broadcast_shapes",
    "c_strides",
    "pick",
    "result_shape",
    "stored",
    "stored_shape",
]

#: A part of an array: one slice with start and stop for each axis.
Box = tuple[slice, ...]


class Operand(NamedTuple):
    """What planning needs to know of one operand."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    strides: tuple[int, ...]  #: bytes
    aligned: bool = True
    where: str = "memory"  #: "memory", "file" or "cuda:0"
    name: str = ""  #: of a file, for messages

    @classmethod
    def of(cls, x: Any) -> Operand:
        """Describe an array, or anything with ``shape`` and ``dtype`` (taken as C-ordered).

        TypeError or ValueError if these, or ``strides`` if it has them, are none.
        """
        dtype = np.dtype(x.dtype)
        shape = tuple(map(index, x.shape))
        strides = getattr(x, "strides", None)
        if strides is None:
            strides = c_strides(shape, dtype.itemsize)
        strides = tuple(map(index, strides))
        if len(strides) != len(shape):
            raise ValueError(f"strides {strides} are not as many as axes")
        flags = getattr(x, "flags", None)
        aligned = getattr(flags, "aligned", True)
        where = getattr(x, "where", "memory")
        name = getattr(x, "label", "") if where == "file" else ""
        return cls(shape, dtype, strides, aligned, where, name)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_plain(self) -> bool:
        """Whether BLAS can read it in place: aligned, native, one unit stride of the last two."""
        if not self.aligned or not self.dtype.isnative:
            return False
        size, itemsize = self.shape[-2:], self.dtype.itemsize
        strides = self.strides[-2:]
        if not size:
            return True
        if len(size) == 1:
            return size[0] <= 1 or (strides[0] > 0 and strides[0] % itemsize == 0)
        rows, columns = size
        row_step, column_step = strides
        by_rows = (columns <= 1 or column_step == itemsize) and (
            rows <= 1 or (row_step % itemsize == 0 and row_step >= columns * itemsize)
        )
        by_columns = (rows <= 1 or row_step == itemsize) and (
            columns <= 1 or (column_step % itemsize == 0 and column_step >= rows * itemsize)
        )
        return by_rows or by_columns

    def copied(self, dtype: np.dtype[Any]) -> Operand:
        """Describe the copy that a GPU gets: C-contiguous, a broadcast axis still a stride of 0."""
        sizes = stored_shape(self.shape, self.strides)
        steps = zip(self.shape, sizes, c_strides(sizes, dtype.itemsize), strict=True)
        strides = tuple(0 if n != size else step for n, size, step in steps)
        return Operand(self.shape, dtype, strides)

    @property
    def stored_bytes(self) -> int:
        """Bytes in memory of a broadcast operand, whose axes of stride 0 are stored once."""
        return math.prod(stored_shape(self.shape, self.strides)) * self.dtype.itemsize

    @property
    def span_bytes(self) -> int:
        """Bytes from the first of its elements in memory to the last, both included."""
        if 0 in self.shape:
            return 0
        steps = zip(self.shape, self.strides, strict=True)
        return self.dtype.itemsize + sum((n - 1) * abs(step) for n, step in steps)

    def as_matrix(self, *, is_row: bool) -> Operand:
        """Return a vector as the matrix it is multiplied as; a matrix as it is."""
        if len(self.shape) > 1:
            return self
        if is_row:
            return self._replace(shape=(1, *self.shape), strides=(0, *self.strides))
        return self._replace(shape=(*self.shape, 1), strides=(*self.strides, 0))

    @property
    def is_on_gpu(self) -> bool:
        return self.where.startswith("cuda")

    @property
    def row_step(self) -> int | None:
        """The step from row to row of a stack whose matrices follow each other as one does."""
        axes = [
            axis for axis in zip(self.shape[:-1], self.strides[:-1], strict=True) if axis[0] != 1
        ]
        if not axes:
            return self.strides[-2]
        row_step = step = axes[-1][1]
        for size, stride in reversed(axes):
            if stride != step or step == 0:
                return None
            step *= size
        return row_step

    def as_result(self, a: Operand, b: Operand, batch: tuple[int, ...]) -> Operand:
        """Return the place of a product as the stack of matrices that is written there."""
        strides = list(self.strides)
        if len(b.shape) == 1:
            strides.append(0)
        if len(a.shape) == 1:
            strides.insert(len(strides) - 1, 0)
        m, n = a.as_matrix(is_row=True).shape[-2], b.as_matrix(is_row=False).shape[-1]
        return self._replace(shape=(*batch, m, n), strides=tuple(strides))

    def to_dict(self) -> dict[str, Any]:
        return {"shape": list(self.shape), "dtype": str(self.dtype), "strides": list(self.strides)}

    def __str__(self) -> str:
        if self.name:
            return f"{self.name} {self.shape} {self.dtype}"
        return f"{self.shape} {self.dtype}" + ("" if self.where == "memory" else f", {self.where}")


def result_shape(a: Operand, b: Operand) -> tuple[tuple[int, ...], int, int, int, tuple[int, ...]]:
    """Return batch, m, n, k and the result's shape, by np.matmul's rules."""
    for name, x in (("a", a), ("b", b)):
        if not x.shape:
            raise ShapeError(
                f"{x.name or name} is a scalar ({x.dtype}); a matrix product needs at least one "
                "axis. Use * to scale a matrix"
            )
    a_name, b_name = a.name or "a", b.name or "b"
    a_shape = a.shape if len(a.shape) > 1 else (1, *a.shape)
    b_shape = b.shape if len(b.shape) > 1 else (*b.shape, 1)
    (m, k), (k_of_b, n) = a_shape[-2:], b_shape[-2:]
    if k != k_of_b:
        axis_a = len(a.shape) - 1
        axis_b = max(len(b.shape) - 2, 0)
        raise ShapeError(
            f"{describe(a_name, a)} and {describe(b_name, b)} do not go together: axis {axis_a} "
            f"of {a_name} has {k} elements and axis {axis_b} of {b_name} has {k_of_b}; they must "
            "be equal"
        )
    try:
        batch = broadcast_shapes(a_shape[:-2], b_shape[:-2])
    except ValueError:
        raise ShapeError(
            f"the batch axes of {a_name} {a.shape} and {b_name} {b.shape} do not broadcast: "
            f"{a_shape[:-2]} against {b_shape[:-2]}; each pair must be equal or one of them 1"
        ) from None
    shape = batch + ((m,) if len(a.shape) > 1 else ()) + ((n,) if len(b.shape) > 1 else ())
    return batch, m, n, k, shape


def broadcast_shapes(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that two broadcast to, or raise ValueError.

    np.broadcast_shapes knows 32 axes, and np.matmul 64.
    """
    rank = max(len(a), len(b))
    sizes = []
    for x, y in zip((1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b, strict=True):
        if x != y and 1 not in (x, y):
            raise ValueError(f"{x} against {y}")
        sizes.append(y if x == 1 else x)
    return tuple(sizes)


def batch_slices(batch: tuple[int, ...], at_once: int) -> Iterator[Box]:
    """Yield slices of the batch axes that hold at most ``at_once`` matrices each, in C order."""
    steps = batch_steps(batch, at_once)
    grid = (range(0, size, step) for size, step in zip(batch, steps, strict=True))
    for starts in itertools.product(*grid):
        parts = zip(starts, steps, batch, strict=True)
        yield tuple(slice(start, min(start + step, size)) for start, step, size in parts)


def batch_steps(batch: tuple[int, ...], at_once: int) -> tuple[int, ...]:
    """Return the length of those slices along each axis."""
    steps = []
    for size in reversed(batch):  # the innermost matrices are next to each other in memory
        steps.append(max(min(size, at_once), 1))
        at_once //= steps[-1]
    return tuple(reversed(steps))


def pick(at: Box, batch: tuple[int, ...]) -> Box:
    """Return the part of an operand's own batch axes that serves a batch slice.

    An axis of length 1 serves every slice; axes the operand lacks are left out.
    """
    own = at[len(at) - len(batch) :]
    return tuple(slice(0, 1) if n == 1 else part for n, part in zip(batch, own, strict=True))


def stored_shape(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of what is there: one place of each axis whose stride is 0."""
    return tuple(1 if step == 0 and n > 1 else n for n, step in zip(shape, strides, strict=True))


def stored(x: NDArray[Any]) -> NDArray[Any]:
    """Return a view without what repeats."""
    return x[tuple(slice(n) for n in stored_shape(x.shape, x.strides))]


def c_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return the strides, in bytes, of a C-ordered array."""
    strides = []
    step = itemsize
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
