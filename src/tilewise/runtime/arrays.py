"""Arrays in the memory of a GPU, whoever made them: seen, ordered on a stream, copied."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise._operand import Operand, c_strides, stored
from tilewise.errors import DeviceError, DTypeError

from . import driver, streams
from .device import current
from .memory import allocate, write

__all__ = [
    "COPY_ALIGNMENT",
    "AnyArray",
    "DeviceArray",
    "copied",
    "to_device",
    "to_host",
    "view",
]


#: A copy of an array stands where the array does modulo this: what was planned for it still fits.
COPY_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class DeviceArray:
    """A view of an array in the memory of GPU ``index``; strides are in bytes, as NumPy's."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    index: int
    is_readonly: bool
    owner: Any  #: keeps the memory alive

    @property
    def where(self) -> str:
        return f"cuda:{self.index}"

    @property
    def aligned(self) -> bool:
        """Whether its first element stands on a multiple of 16 bytes."""
        return self.pointer % 16 == 0

    @property
    def extent(self) -> tuple[int, int]:
        """The addresses between which all its elements lie."""
        if 0 in self.shape:
            return self.pointer, self.pointer
        steps = [(n - 1) * step for n, step in zip(self.shape, self.strides, strict=True)]
        low = self.pointer + sum(step for step in steps if step < 0)
        high = self.pointer + sum(step for step in steps if step > 0) + self.dtype.itemsize
        return low, high

    def without_terms(self, *, is_left: bool) -> DeviceArray:
        """Return the operand of an empty sum: the same one with K = 0."""
        axis = len(self.shape) - (1 if is_left or len(self.shape) == 1 else 2)
        return replace(self, shape=(*self.shape[:axis], 0, *self.shape[axis + 1 :]))

    def overlaps(self, other: DeviceArray) -> bool:
        """Whether both may share memory; told by their extents."""
        (low, high), (other_low, other_high) = self.extent, other.extent
        return self.index == other.index and low < other_high and other_low < high


#: One in host or device memory.
AnyArray = NDArray[Any] | DeviceArray


def view(x: Any, name: str, stream: int | None) -> DeviceArray:
    """Return a foreign device array, whose data is complete for what follows on ``stream``.

    Parameters
    ----------
    x : object
        Anything with ``__dlpack__`` or ``__cuda_array_interface__``.
    name : str
        The operand's name, for messages.
    stream : int or None
        A handle, as `streams.handle_of` gives it; None looks at the array and orders nothing.

    Raises
    ------
    DTypeError
        If its element type has no name here.
    DeviceError
        If its library does not hand it over.
    """
    driver.require()
    from cuda.core.utils import StridedMemoryView

    try:
        seen = StridedMemoryView.from_any_interface(x, stream_ptr=stream)
        dtype = np.dtype(seen.dtype)
    except NotImplementedError as error:
        raise DTypeError(
            f"{name} ({type(x).__name__}) has an element type that NumPy knows through ml_dtypes: "
            f"pip install ml_dtypes ({error})"
        ) from None
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise DeviceError(f"{name} ({type(x).__name__}) is not handed over: {error}") from error
    shape, pointer = tuple(seen.shape), int(seen.ptr)
    if pointer % dtype.alignment and 0 not in shape:
        raise DeviceError(
            f"{name} (shape {shape}, dtype {dtype}) stands at address {pointer:#x}, which is no "
            f"multiple of {dtype.alignment} bytes; copy it"
        )
    if seen.strides is None:
        strides = c_strides(shape, dtype.itemsize)
    else:
        strides = tuple(step * dtype.itemsize for step in seen.strides)
    span = sum(abs(step) * (n - 1) for n, step in zip(shape, strides, strict=True) if n > 1)
    if span >= 2**62:
        raise DeviceError(
            f"{name} (shape {shape}, dtype {dtype}, strides {strides}) spans more than any memory; "
            "its strides are damaged"
        )
    return DeviceArray(
        pointer, shape, strides, dtype, int(seen.device_id), bool(seen.readonly), seen
    )


@contextmanager
def to_device(x: NDArray[Any], index: int, stream: int) -> Iterator[DeviceArray]:
    """Lend a copy of a host array on a GPU; a broadcast one is not expanded."""
    compact = np.ascontiguousarray(stored(x), x.dtype.newbyteorder("="))
    strides = Operand.of(x).copied(compact.dtype).strides
    with allocate(compact.nbytes, index, stream, "an operand") as memory:
        write(memory, compact, stream)
        yield DeviceArray(memory.pointer, x.shape, strides, compact.dtype, index, True, memory)


def to_host(x: DeviceArray, stream: int) -> NDArray[Any]:
    """Copy a device array to the host, after what is before it on the stream."""
    if 0 in x.shape:
        return np.empty(x.shape, x.dtype)
    low, high = x.extent
    raw = np.empty(high - low, np.uint8)
    doing = f"copying {raw.size} bytes from cuda:{x.index}"
    with current(x.index) as cuda:
        driver.check(cuda.cuMemcpyDtoHAsync(raw.ctypes.data, low, raw.size, stream), doing)
    streams.synchronize(stream, x.index)
    # as_strided goes by the letter of a type, and float8_e5m2 has one that NumPy does not know.
    return np.ndarray(x.shape, x.dtype, raw.data, x.pointer - low, x.strides)


@contextmanager
def copied(x: DeviceArray, stream: int) -> Iterator[DeviceArray]:
    """Lend a copy of an array on its own device, with the same strides."""
    low, high = x.extent
    with allocate(high - low + COPY_ALIGNMENT, x.index, stream, "a copy of an operand") as memory:
        place = memory.pointer + low % COPY_ALIGNMENT
        with current(x.index) as cuda:
            driver.check(
                cuda.cuMemcpyDtoDAsync(place, low, high - low, stream), "copying an operand"
            )
        yield DeviceArray(
            place + x.pointer - low, x.shape, x.strides, x.dtype, x.index, True, memory
        )
