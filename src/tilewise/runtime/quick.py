"""Calls of the driver that put work on a stream, made without giving up the interpreter's lock.

cuda.bindings gives it up in every call. Where many threads copy, to get it back takes 35 µs, and a
slice of a matrix was five such calls (docs/facts.md); to put work on a stream takes one or two. So
nothing here waits for a device; and nothing here is for streams of other libraries, which may hold
functions of Python that need the lock before anything else goes on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

from . import driver

__all__ = ["DEVICE", "HOST", "Copy2D", "Quick", "calls", "lines"]

#: Kinds of memory, as the driver numbers them.
HOST, DEVICE = 1, 2

_Call = Callable[..., int]

_HANDLE = _POINTER = ctypes.c_uint64
_SIZE = ctypes.c_size_t
_END = (
    ("XInBytes", _SIZE),
    ("Y", _SIZE),
    ("MemoryType", ctypes.c_int),
    ("Host", _POINTER),
    ("Device", _POINTER),
    ("Array", _POINTER),
    ("Pitch", _SIZE),
)


class Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D: lines of bytes. Source: CUDA driver API reference."""

    _fields_ = (
        *((f"src{name}", kind) for name, kind in _END),
        *((f"dst{name}", kind) for name, kind in _END),
        ("WidthInBytes", _SIZE),
        ("Height", _SIZE),
    )


def lines(
    source: tuple[int, int, int], target: tuple[int, int, int], width: int, count: int
) -> Copy2D:
    """Describe a copy of lines, from and to a kind of memory, an address and a pitch."""
    how = Copy2D(WidthInBytes=width, Height=count)
    how.srcMemoryType, address, how.srcPitch = source
    how.srcHost = how.srcDevice = address  # each kind of memory reads its own
    how.dstMemoryType, address, how.dstPitch = target
    how.dstHost = how.dstDevice = address
    return how


class Quick:
    """The calls, each of which returns a status; addresses, handles and sizes are plain numbers."""

    def __init__(self, library: Any) -> None:
        def call(name: str, *types: Any) -> _Call:
            found: Any = getattr(library, name)
            found.argtypes, found.restype = types, ctypes.c_int
            return found  # type: ignore[no-any-return]

        self.record = call("cuEventRecord", _HANDLE, _HANDLE)
        self.query = call("cuEventQuery", _HANDLE)
        self.wait = call("cuStreamWaitEvent", _HANDLE, _HANDLE, ctypes.c_uint)
        self.copy_in = call("cuMemcpyHtoDAsync_v2", _POINTER, _POINTER, _SIZE, _HANDLE)
        self.copy_out = call("cuMemcpyDtoHAsync_v2", _POINTER, _POINTER, _SIZE, _HANDLE)
        self.copy_lines = call("cuMemcpy2DAsync_v2", ctypes.POINTER(Copy2D), _HANDLE)
        self.launch = call("cuLaunchKernelEx", _POINTER, _HANDLE, _POINTER, _POINTER)
        self.fill = call("cuMemsetD8Async", _POINTER, ctypes.c_ubyte, _SIZE, _HANDLE)


@cache
def calls() -> Quick:
    """Return the calls of the driver that this process has opened."""
    driver.require()
    return Quick(ctypes.PyDLL(driver.LIBRARY))
