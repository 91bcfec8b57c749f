"""Slices of host arrays: what one thread copies at a time, and where on a device it goes.

Pure but for views; who copies is ``device_pipeline``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .device_schedule import Store
from .schedule import Box

__all__ = ["Slice", "is_copied_directly", "lines_of", "named", "packed", "slices"]

Array = NDArray[Any]


class Slice(NamedTuple):
    """A part of a panel, or of a tile of C, that one thread copies."""

    host: Array  #: the view of the operand or result, its last two axes lines and width
    place: int  #: on the device
    pitch: int

    lines: int
    width_bytes: int


def slices(host: Array, base: int, store: Store, most_bytes: int) -> Iterator[Slice]:
    """Cut a view, its last axes lines and width, into slices whose lines follow on the device."""
    item = host.dtype.itemsize
    width = host.shape[-1]
    most_lines = most_bytes // max(width * item, 1)
    parts: Iterator[Box]
    if most_lines > 0:
        parts = ((*box, slice(0, width)) for box in _boxes(host.shape[:-1], most_lines))
    else:
        step = max(most_bytes // item, 1)
        parts = (
            (*box, slice(at, min(at + step, width)))
            for box in _boxes(host.shape[:-1], 1)
            for at in range(0, width, step)
        )
    for box in parts:
        matrix = 0
        for size, part in zip(host.shape[:-2], box[:-2], strict=True):
            matrix = matrix * size + part.start
        line = matrix * store.lines + box[-2].start
        cut = host[box]
        yield Slice(
            cut,
            base + line * store.pitch + box[-1].start * item,
            store.pitch,
            math.prod(cut.shape[:-1]),
            cut.shape[-1] * item,
        )


def _boxes(sizes: Sequence[int], most: int) -> Iterator[Box]:
    """Cut an array into boxes of at most ``most`` elements that are contiguous in C order."""
    if not sizes:
        yield ()
        return
    inner = math.prod(sizes[1:])
    whole = tuple(slice(0, size) for size in sizes[1:])
    if inner <= most:
        step = max(most // max(inner, 1), 1)
        for start in range(0, sizes[0], step):
            yield (slice(start, min(start + step, sizes[0])), *whole)
    else:
        for start in range(sizes[0]):
            for rest in _boxes(sizes[1:], most):
                yield (slice(start, start + 1), *rest)


def packed(memory: NDArray[np.uint8], like: Array) -> Array:
    """Return a contiguous array in pinned memory, in the machine's byte order."""
    dtype = like.dtype.newbyteorder("=")
    return memory[: like.size * dtype.itemsize].view(dtype).reshape(like.shape)


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
