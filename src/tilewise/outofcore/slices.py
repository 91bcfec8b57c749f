"""Slices of operands and results: what one thread copies at a time, and where on a device it goes.

Whoever has the elements is a `Source` or a `Sink`: a `HostArray`, or a file (``device_files``).
What is `InPlace` is not copied. Who copies is ``device_pipeline``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from .._operand import Box
from .device_job import Store
from .stores import parts

__all__ = [
    "End",
    "HostArray",
    "InPlace",
    "Sink",
    "Slice",
    "Source",
    "is_copied_directly",
    "lines_of",
    "named",
    "shifted",
    "slices",
]

Array = NDArray[Any]


class End(Protocol):
    """Where elements come from, or go to."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    @property
    def chunks(self) -> tuple[int, ...] | None:
        """What is read or written as one, which slices do not cut; None if anything may be."""

    def view(self, box: Box, /) -> Array | None:
        """Return a part as it lies in memory; None where it does not."""


class Source(End, Protocol):
    """An operand; several threads read it at a time."""

    def read_into(self, box: Box, into: Array, /) -> None:
        """Copy a part into an array of its shape, in the machine's byte order, of any strides."""


class Sink(End, Protocol):
    """A result; several threads write to it at a time."""

    def write(self, box: Box, values: Array, /) -> None: ...

    def finish(self, tile: int, /) -> None:
        """Take note that all of a tile was written."""


@dataclass(frozen=True, slots=True)
class HostArray:
    """Elements in host memory, a `Source` or a `Sink`."""

    array: Array
    chunks: None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.array.dtype

    def view(self, box: Box) -> Array:
        part: Array = self.array[box]
        return part

    def read_into(self, box: Box, into: Array) -> None:
        np.copyto(into, self.array[box])

    def write(self, box: Box, values: Array) -> None:
        np.copyto(self.array[box], values)

    def finish(self, tile: int) -> None:
        """Nothing is to be done when it is there."""


class InPlace(NamedTuple):
    """An operand or result in the memory of the device, which kernels read, or write, there."""

    pointer: int


class Slice(NamedTuple):
    """A part of a panel, or of a tile of C, that one thread copies."""

    box: Box  #: of the operand or result
    is_turned: bool  #: whether lines are its last axis
    shape: tuple[int, ...]  #: with lines before what they are made of
    places: tuple[int, ...]  #: on the device, of stretches of lines that follow each other
    pitch: int
    lines: int  #: in each stretch
    width_bytes: int

    def packed(self, memory: NDArray[np.uint8], dtype: np.dtype[Any]) -> Array:
        """Return what has its lines end to end in pinned memory, with the axes of the box."""
        return self.turned(np.ndarray(self.shape, dtype, memory.data))

    def turned(self, x: Array) -> Array:
        """Return an array with the axes of the box as one with lines before the last axis, or back.

        A view.
        """
        return x.swapaxes(-1, -2) if self.is_turned else x

    def copies(self, address: int, pitch: int) -> Iterator[tuple[int, int]]:
        """Yield where each stretch is on the device, and where in host memory."""
        for i, place in enumerate(self.places):
            yield place, address + i * self.lines * pitch


def slices(
    end: End, region: Box, is_turned: bool, base: int, store: Store, most_bytes: int
) -> Iterator[Slice]:
    """Cut a part of an operand or result into slices.

    Parameters
    ----------
    end : End
    region : Box
        Which part.
    is_turned : bool
        Whether its last axis is the lines of ``store``, and not what they are made of.
    base : int
        Where on the device the part begins.
    store : Store
    most_bytes : int
        Of a slice, unless one chunk has more.
    """
    item, pitch = end.dtype.itemsize, store.pitch
    chunks = end.chunks or (1,) * len(region)
    if is_turned:
        region, chunks = _swapped(region), _swapped(chunks)
    *lead, lines, width = region
    for box in parts(region, chunks, max(most_bytes // item, 1)):
        shape = tuple([part.stop - part.start for part in box])
        start = base + (box[-1].start - width.start) * item
        start += (box[-2].start - lines.start) * pitch
        own_lines, matrices = shape[-2], [0]
        if lead:
            matrices = _numbers(lead, box)
            if own_lines == store.lines and matrices[-1] - matrices[0] == len(matrices) - 1:
                own_lines *= len(matrices)
                del matrices[1:]
        yield Slice(
            _swapped(box) if is_turned else box,
            is_turned,
            shape,
            tuple([start + i * store.lines * pitch for i in matrices]),
            pitch,
            own_lines,
            shape[-1] * item,
        )


def shifted(box: Box, region: Box) -> Box:
    """Return a box within a region as one of what the region is a part of."""
    return tuple(
        slice(outer.start + part.start, outer.start + part.stop)
        for outer, part in zip(region, box, strict=True)
    )


def is_copied_directly(x: Array) -> bool:
    """Say whether one copy of lines takes pinned memory as it is."""
    if not x.dtype.isnative or math.prod(x.shape[:-2]) != 1:
        return False
    line, step = x.strides[-2:]
    width = x.shape[-1] * x.dtype.itemsize
    return (x.shape[-1] == 1 or step == x.dtype.itemsize) and (x.shape[-2] == 1 or line >= width)


def lines_of(x: Array) -> tuple[int, int]:
    """Return where the lines of a slice begin, and the bytes from one to the next."""
    address = int(x.__array_interface__["data"][0])
    return address, x.strides[-2] if x.shape[-2] > 1 else x.shape[-1] * x.dtype.itemsize


def named(name: str, box: Box) -> str:
    """Return a part of an array as one would write it."""
    return f"{name}[{', '.join(f'{part.start}:{part.stop}' for part in box)}]"


def _numbers(lead: list[slice], box: Box) -> list[int]:
    """Return which matrices of a region a part of it has, in the order they lie in."""
    numbers = [0]
    for whole, part in zip(lead, box[:-2], strict=True):
        size, first = whole.stop - whole.start, part.start - whole.start
        inner = range(first, first + part.stop - part.start)
        numbers = [i * size + j for i, j in itertools.product(numbers, inner)]
    return numbers


def _swapped(x: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*x[:-2], x[-1], x[-2])
