"""Matrices that are read and written by slicing: Zarr arrays, chunked HDF5, a caller's own stores.

What a store is, is two methods: ``store[box]`` and, for an output, ``store[box] = values``, beside
``shape`` and ``dtype``. Where it has ``chunks`` too, no read crosses one without need. What lies
behind it (compression, a network, a computation) is the store's own business.
"""

from __future__ import annotations

import itertools
import math
import operator
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from .._arrays import check_out
from .._overlap import mapped_by
from ..errors import DTypeError, FileError, ShapeError
from ..numerics.dtypes import is_extension
from ..numerics.panels import release
from ..numerics.unread import Unread
from .flat import Box, spool

__all__ = [
    "COPIES",
    "LARGEST_PART",
    "Layout",
    "Readable",
    "StoreMatrix",
    "StoreOutput",
    "Writable",
    "dtype_of",
    "parts",
    "place_of",
]

#: What a store is asked for at once, at most: several chunks, which some stores read in parallel.
LARGEST_PART = 16 << 20

#: What a part takes beside the buffer it goes to: its chunks as stored, decoded, and joined.
COPIES = 3


class _Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...


class Readable(_Shaped, Protocol):
    """Anything with a shape and a dtype that is read by slicing."""

    def __getitem__(self, box: Any, /) -> Any:
        """Return the values of a box, a slice with start and stop for each axis."""


class Writable(_Shaped, Protocol):
    """Anything with a shape and a dtype that is written by slicing; to verify, it is read too."""

    def __setitem__(self, box: Any, values: Any, /) -> None:
        """Write the values of a box."""


@dataclass(frozen=True, slots=True)
class StoreMatrix:
    """An operand in a store: what a plan needs to know of it, and its boxes on demand."""

    operand: str  #: what the caller calls it: "a", "b"
    label: str  #: its path, or what kind of object it is
    store: Any
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunks: tuple[int, ...]  #: of the store; 1 along each axis if it has none
    paths: tuple[Path, ...] = ()  #: where it is stored, as far as that is known
    stamp: Callable[[], list[Any]] | None = None  #: gives which it is, and what changes with it
    opened_as: Any = None  #: what ``stamp`` gave then
    part_bytes: int = LARGEST_PART
    added: tuple[int, ...] = ()  #: axes of length 1 that boxes have and the store has not
    is_turned: bool = False  #: whether the store has the axes of boxes in the other order
    close: Callable[[], object] = lambda: None
    where: str = "file"

    @classmethod
    def of(
        cls,
        store: Any,
        operand: str,
        label: str,
        dtype: np.dtype[Any],
        *,
        paths: tuple[Path, ...] = (),
        stamp: Callable[[], list[Any]] | None = None,
        close: Callable[[], object] = lambda: None,
    ) -> StoreMatrix:
        """Describe a store whose elements are of type ``dtype``.

        Raises
        ------
        ShapeError
            If its shape is none.
        """
        return cls(
            operand,
            label,
            store,
            shape_of(store, f"{operand} ({label})"),
            dtype,
            chunks_of(store),
            paths,
            stamp,
            None if stamp is None else stamp(),
            close=close,
        )

    @property
    def name(self) -> str:
        return f"{self.operand} ({self.label})"

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes between neighbours of the C-ordered arrays that boxes are read into."""
        steps = itertools.accumulate(reversed(self.shape[1:]), _step, initial=self.dtype.itemsize)
        return tuple(reversed(list(steps))) if self.shape else ()

    def read(self, box: Box, buffer: NDArray[np.uint8]) -> NDArray[Any]:
        """Read a box into the start of ``buffer``, and return it as an array over that memory.

        Raises
        ------
        FileError
            If the store raised something, naming the chunk it was about.
        """
        into = self.view(box, buffer)
        self.read_into(box, into)
        return into

    def read_into(self, box: Box, into: NDArray[Any]) -> None:
        """Copy a box into an array of its shape, of any strides and byte order."""
        for part in parts(box, self.chunks, self.part_bytes // self.dtype.itemsize):
            into[_within(part, box)] = self._fetch(part)
            release(self.store)

    def view(self, box: Box, buffer: NDArray[np.uint8]) -> NDArray[Any]:
        """Return the box that was read into ``buffer`` before."""
        shape = _sizes(box)
        return buffer[: math.prod(shape) * self.dtype.itemsize].view(self.dtype).reshape(shape)

    def as_panels(self, shape: tuple[int, ...], part_bytes: int) -> StoreMatrix:
        """Return the same elements under the shape that panels refer to.

        A vector has an axis more there. ``COPIES`` times ``part_bytes``, or a chunk if that is
        more, are held beside the buffers that `read` gets.
        """
        added: tuple[int, ...] = ()
        if shape != self.shape:
            added = (0,) if shape == (1, *self.shape) else (1,)
        chunks = widened(self.chunks, added)
        return replace(self, shape=shape, chunks=chunks, added=added, part_bytes=part_bytes)

    def transposed(self) -> StoreMatrix:
        """Return the same elements with the axes in the other order."""
        return replace(
            self, shape=self.shape[::-1], chunks=self.chunks[::-1], is_turned=not self.is_turned
        )

    def unread(self, folder: Path, part_bytes: int) -> AbstractContextManager[Unread]:
        """Give the whole array to look at, as copied to a nameless file in ``folder``."""
        fetched = _fetched(self.store, self.shape, self.chunks, self.dtype, self._fetch, part_bytes)
        return spool(self.shape, self.dtype, fetched, folder, self.name)

    def identity(self) -> dict[str, Any] | None:
        """Return what tells this content from other, for a journal; None if nothing does."""
        if self.stamp is None:
            return None
        return {
            "stamp": self.opened_as,
            "shape": list(self.shape),
            "dtype": str(self.dtype),
            "is_turned": self.is_turned,
        }

    def check_unchanged(self) -> None:
        """Raise FileError if the store is known to have been written since it was opened."""
        if self.stamp is None:
            return
        try:
            is_same = self.stamp() == self.opened_as
        except OSError:  # it is gone
            is_same = False
        if not is_same:
            raise FileError(f"{self.name} was changed while it was read; run again when it rests")

    def is_same_file(self, path: Path) -> bool:
        """Whether ``path`` leads to where this is stored."""
        return any(own.exists() and path.exists() and path.samefile(own) for own in self.paths)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fetch(self, part: Box) -> NDArray[Any]:
        try:
            given = self.store[self._stored(part)]
            values = np.asarray(given)
        except MemoryError:
            raise
        except Exception as error:
            raise FileError(
                f"{self.name} cannot be read at {self._blamed(part)}: {_said(error)}"
            ) from error
        if np.ma.is_masked(given):
            raise DTypeError(
                f"{self.name} gave masked elements at {_place(part)}, which have no meaning in a "
                "product; give a store that fills them"
            )
        values = _elements(values, self.dtype, part, self.name)
        return (values.T if self.is_turned else values).reshape(_sizes(part))

    def _stored(self, box: Box) -> Box:
        """Return a box as the store has it."""
        box = _without(box, self.added)
        return box[::-1] if self.is_turned else box

    def _blamed(self, part: Box) -> str:
        """Say which chunk of a part cannot be read."""
        if math.prod(self.chunks) == 1:
            return _place(part)
        for chunk in parts(part, self.chunks, 1):
            at = self._stored(chunk)
            try:
                self.store[at]
            except Exception:
                chunks = chunks_of(self.store)
                number = tuple(p.start // size for p, size in zip(at, chunks, strict=True))
                return f"chunk {number}, {_place(at)}"
        return _place(part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What an output is, and how a plan cuts it."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    grid: tuple[int, ...]  #: the shape that boxes refer to: batch, rows, columns
    added: tuple[int, ...]  #: axes of the grid that the shape has not, where an operand is a vector
    chunks: tuple[int, ...]  #: of the shape: no chunk is in two parts that are written
    zarr_format: int = 3

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        """Its type in a store that does not know bfloat16 and float8: whole numbers as wide."""
        if not is_extension(self.dtype):
            return self.dtype
        return np.dtype(f"u{self.dtype.itemsize}")


class StoreOutput:
    """An output in a store of the caller's, written in place: it has no other name before."""

    def __init__(self, store: Any, layout: Layout, name: str, part_bytes: int) -> None:
        """Check that a store can take the result, and how much of it at once."""
        self.store, self.dtype = store, layout.dtype
        self.nbytes = layout.nbytes
        self.part_bytes = part_bytes
        self._name, self._added = name, layout.added
        shape, dtype = shape_of(store, name), dtype_of(store, name).newbyteorder("=")
        if shape != layout.shape:
            raise ShapeError(f"{name} has shape {shape}, the result {layout.shape}")
        if dtype not in (layout.dtype, layout.stored_dtype):
            raise DTypeError(f"{name} has dtype {dtype}, and the result {layout.dtype}")
        if isinstance(store, np.ndarray):
            check_out(store, shape, dtype, name, store.flags.writeable)
        self.chunks = widened(chunks_of(store), layout.added)

    def write(self, box: Box, values: NDArray[Any]) -> None:
        """Write the values of a box."""
        for part in parts(box, self.chunks, self.part_bytes // self.dtype.itemsize):
            at = _without(part, self._added)
            some = values[_within(part, box)].reshape(_sizes(at))
            if is_extension(some.dtype):  # bfloat16 and float8 are stored as raw bytes
                some = some.view(np.dtype(self.store.dtype))
            try:
                self.store[at] = some
            except MemoryError:
                raise
            except Exception as error:
                raise self._refused(part, error) from error
            release(self.store)

    def holds(self, box: Box) -> bool:
        """Whether what was written to a box is there, as far as that is seen without reading."""
        return True

    def sync(self) -> None:
        """Return when what was written is as durable as the store makes it."""
        if hasattr(self.store, "flush"):
            self.store.flush()

    def unread(
        self, shape: tuple[int, ...], folder: Path, part_bytes: int
    ) -> AbstractContextManager[Unread]:
        """Give what is written so far to look at, as copied to a nameless file in ``folder``."""

        def read(part: Box) -> NDArray[Any]:
            try:
                values = np.asarray(self.store[part])
            except MemoryError:
                raise
            except Exception as error:
                raise FileError(
                    f"{self._name} cannot be read back at {_place(part)}: {_said(error)}"
                ) from error
            return _elements(values, self.dtype, part, self._name).reshape(_sizes(part))

        chunks = chunks_of(self.store)
        fetched = _fetched(self.store, shape, chunks, self.dtype, read, part_bytes)
        return spool(shape, self.dtype, fetched, folder, self._name)

    def commit(self) -> None:
        self.sync()

    def close(self) -> None:
        """The store is the caller's."""

    def _refused(self, part: Box, error: Exception) -> FileError:
        """Return the error for values that the store would not take."""
        return FileError(f"{self._name} cannot be written at {_place(part)}: {_said(error)}")


def place_of(store: Any) -> Path | None:
    """Return the file or folder that a caller's store keeps its elements in, if that is seen.

    Memory maps and views of them, HDF5 datasets and Zarr arrays say it.
    """
    if isinstance(store, np.ndarray) and (root := mapped_by(store)) is not None:
        return Path(root.filename)
    filename = getattr(getattr(store, "file", None), "filename", None)
    if isinstance(filename, (str, bytes)):
        return Path(os.fsdecode(filename))
    keeper = getattr(getattr(store, "store_path", None), "store", None)
    root = getattr(keeper, "root", None) or getattr(keeper, "path", None)
    if not isinstance(root, (str, os.PathLike)):
        return None
    return Path(root) / str(getattr(store, "path", "")) if Path(root).is_dir() else Path(root)


def parts(box: Box, chunks: tuple[int, ...], most: int) -> Iterator[Box]:
    """Yield the parts of a box, of whole chunks and at most ``most`` elements (or one chunk)."""
    steps = list(chunks)
    for axis in reversed(range(len(box))):  # the last axis grows first: its chunks are neighbours
        reach = -(-box[axis].stop // chunks[axis]) - box[axis].start // chunks[axis]
        steps[axis] *= max(min(reach, most // max(math.prod(steps), 1)), 1)
        if steps[axis] < reach * chunks[axis]:
            break
    yield from itertools.product(
        *(
            list(_aligned(part, chunk, step))
            for part, chunk, step in zip(box, chunks, steps, strict=True)
        )
    )


def shape_of(store: Any, name: str) -> tuple[int, ...]:
    """Return a store's shape; ShapeError if it is no tuple of sizes."""
    if store.shape is None:
        raise ShapeError(f"{name} is empty: it has a type and no shape")
    try:
        shape = tuple(operator.index(size) for size in store.shape)
    except TypeError:
        shape = (-1,)
    if any(size < 0 for size in shape):
        raise ShapeError(f"{name} has {store.shape!r} for a shape, which is no tuple of sizes")
    return shape


def dtype_of(store: Any, name: str) -> np.dtype[Any]:
    """Return a store's dtype; DTypeError if NumPy knows none of that name."""
    wrong = DTypeError(f"{name} has {store.dtype!r} for a dtype, which is none of NumPy's")
    if store.dtype is None:  # which NumPy takes for float64
        raise wrong
    try:
        known: np.dtype[Any] = np.dtype(store.dtype)
    except (TypeError, ValueError, SyntaxError):  # "x4", "f4,(2"
        raise wrong from None
    return known


def chunks_of(store: Any) -> tuple[int, ...]:
    """Return the shape of a store's chunks; 1 along each axis if it says none."""
    try:
        chunks = tuple(operator.index(size) for size in getattr(store, "chunks", ()))
    except TypeError:  # None, or chunks of many shapes
        chunks = ()
    if len(chunks) == len(store.shape) and all(size > 0 for size in chunks):
        return chunks
    return (1,) * len(store.shape)


def widened(sizes: tuple[int, ...], added: tuple[int, ...]) -> tuple[int, ...]:
    """Return sizes with a 1 at each axis that was added."""
    rest = iter(sizes)
    count = len(sizes) + len(added)
    return tuple(1 if axis in added else next(rest) for axis in range(count))


def _fetched(
    store: Any,
    shape: tuple[int, ...],
    chunks: tuple[int, ...],
    dtype: np.dtype[Any],
    read: Callable[[Box], NDArray[Any]],
    part_bytes: int,
) -> Iterator[tuple[Box, NDArray[Any]]]:
    """Yield all parts of a store, each with its place."""
    everything = tuple(slice(0, size) for size in shape)
    for part in parts(everything, chunks, part_bytes // dtype.itemsize):
        yield part, read(part)
        release(store)


def _elements(values: NDArray[Any], dtype: np.dtype[Any], part: Box, name: str) -> NDArray[Any]:
    """Return what a store gave for a box as ``dtype``, or raise FileError if that is not it."""
    is_raw = values.dtype.type is np.void or values.dtype.kind in "iu"
    if is_raw and is_extension(dtype) and values.dtype.itemsize == dtype.itemsize:
        values = values.view(dtype)
    if values.dtype.newbyteorder("=") != dtype.newbyteorder("=") or (
        values.size != math.prod(_sizes(part))
    ):
        raise FileError(
            f"{name} gave {values.shape} {values.dtype} for {_place(part)}, "
            f"which has {_sizes(part)} {dtype}"
        )
    return values.astype(dtype, copy=False)


def _aligned(part: slice, chunk: int, step: int) -> Iterator[slice]:
    start = part.start
    while start < part.stop:
        stop = min(start // chunk * chunk + step, part.stop)
        yield slice(start, stop)
        start = stop


def _without(box: Box, added: tuple[int, ...]) -> Box:
    """Return a box as the store has it, without the axes that were added."""
    return tuple(part for axis, part in enumerate(box) if axis not in added)


def _within(part: Box, box: Box) -> Box:
    return tuple(
        slice(p.start - whole.start, p.stop - whole.start)
        for p, whole in zip(part, box, strict=True)
    )


def _sizes(box: Box) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in box)


def _place(box: Box) -> str:
    return "[" + ", ".join(f"{part.start}:{part.stop}" for part in box) + "]"


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _step(step: int, size: int) -> int:
    return step * max(size, 1)
