"""Whether arrays share memory: told by addresses, of the host, of a GPU, or in a mapped file."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.array_utils import byte_bounds
from numpy.typing import NDArray

__all__ = ["mapped_by", "meeting", "meets", "overlap"]

#: Candidates that the exact test for shared memory may try before overlap is assumed.
_OVERLAP_WORK: Any = 10_000

#: Positions in a file are counted from here, since no array is at address 0.
_PAGE = 4096


def overlap(out: NDArray[Any], *operands: NDArray[Any]) -> bool:
    """Whether ``out`` may share memory with an operand; exact unless that takes too long.

    Memory maps of one file share it at different addresses.
    """
    is_own = out.flags.owndata
    in_file = None if is_own else _in_file(out)
    for x in operands:
        if is_own and x.flags.owndata and x is not out:
            continue  # at once: no memory is two arrays' own
        if np.may_share_memory(out, x) and _share(out, x):
            return True
        other = None if in_file is None else _in_file(x)
        if in_file and other and in_file.file == other.file and _share(in_file.place, other.place):
            return True
    return False


def meets(out: Any, *operands: Any) -> bool:
    """Whether ``out`` may share memory with an operand, each in host or device memory.

    What the host and a GPU both see (managed memory, mapped memory) has one address for both.
    """
    if type(out) is np.ndarray and all(type(x) is np.ndarray for x in operands):
        return overlap(out, *operands)
    low, high = _extent(out)
    return any(low < end and start < high for start, end in map(_extent, operands))


def meeting(products: Sequence[tuple[Any, Any, Any]]) -> int | None:
    """Return an ``i`` of which out shares memory with an array of another product.

    Products are given as their a, b and out (or None), in host or device memory.
    """
    if all(out is None for _, _, out in products):
        return None
    every = [
        (i, x is each[2], *place)
        for i, each in enumerate(products)
        for x in each
        if x is not None
        for place in _places(x)
    ]
    owners = np.array([i for i, *_ in every])
    files = np.unique([str(file) for *_, file, _ in every], return_inverse=True)[1]
    bounds = np.array([byte_bounds(place) for *_, place in every])
    for number, (i, is_out, _, place) in enumerate(every):
        if is_out:
            low, high = bounds[number]
            near = (bounds[:, 0] < high) & (bounds[:, 1] > low)
            near &= (files == files[number]) & (owners != i)
            if any(_share(place, every[j][-1]) for j in np.flatnonzero(near)):
                return i
    return None


def mapped_by(x: Any) -> Any:
    """Return the memory map of a named file that an array is a view of, or None."""
    root, base = None, x
    while base is not None:
        if isinstance(base, np.memmap):
            root = base
        base = base.obj if isinstance(base, memoryview) else getattr(base, "base", None)
    return None if root is None or root.filename is None else root


class _InFile(NamedTuple):
    """Where a memory map, or a view of one, lies in its file."""

    file: Hashable  #: whatever name it was opened by
    place: NDArray[Any]  #: at addresses that are positions in the file, not to be read


def _in_file(x: Any) -> _InFile | None:
    """Return where an array lies in a file; None if it is no memory map."""
    root = mapped_by(x)
    if root is None:
        return None
    file: Hashable = os.fspath(root.filename)
    with suppress(OSError):  # it has no name any more
        status = os.stat(root.filename)
        file = status.st_dev, status.st_ino
    start = int(x.__array_interface__["data"][0]) - int(root.__array_interface__["data"][0])
    place = _Addresses(_PAGE + root.offset + start, x.shape, x.strides, x.dtype.itemsize)
    return _InFile(file, np.asarray(place))


def _extent(x: Any) -> tuple[int, int]:
    """Return the addresses between which an array lies."""
    bounds: tuple[int, int] = x.extent if hasattr(x, "extent") else byte_bounds(x)
    return bounds


def _share(x: NDArray[Any], y: NDArray[Any]) -> bool:
    """Whether two arrays may share memory; exact unless that takes too long."""
    try:
        return np.shares_memory(x, y, max_work=_OVERLAP_WORK)
    except np.exceptions.TooHardError:
        return True


def _places(x: Any) -> Iterator[tuple[Hashable, NDArray[Any]]]:
    """Yield an array by its addresses in host or device memory, and in a file it is a map of."""
    if isinstance(x, np.ndarray):
        yield "", x
        if (in_file := _in_file(x)) is not None:
            yield in_file
    else:
        yield "", np.asarray(_Addresses(x.pointer, x.shape, x.strides, x.dtype.itemsize))


class _Addresses:
    """What NumPy takes addresses for an array of its own by, not to be read."""

    def __init__(
        self, pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int
    ) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (pointer, True),
            "shape": shape,
            "strides": strides,
            "typestr": f"|V{itemsize}",
        }
