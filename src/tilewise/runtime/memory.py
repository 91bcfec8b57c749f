"""Memory of a GPU: taking it, filling it, reading it, giving it back, in the order of a stream.

Nothing is hoarded: memory comes from the device's own pool, which gives back what is free whenever
a stream is waited for. (The memory resources of cuda.core set that pool to keep everything, for
every library in the process, hence the plain calls here.) Only a `Workspace` keeps any.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from numpy.typing import NDArray

from tilewise._memory import format_bytes
from tilewise.errors import BudgetError, DeviceError, describe

from . import driver, streams
from .device import current, facts, free_bytes

__all__ = ["Memory", "Workspace", "allocate", "fill", "read", "workspace", "write"]


class Memory:
    """A stretch of a GPU's memory, given back in the order of a stream; a context manager."""

    def __init__(self, index: int, pointer: int, nbytes: int, stream: int) -> None:
        self.index = index
        self.pointer = pointer
        self.nbytes = nbytes
        self._stream = stream
        self._is_held = True

    def free(self, stream: int | None = None) -> None:
        """Give the memory back once the stream has come this far; a second time does nothing."""
        if not self._is_held:
            return
        self._is_held = False
        with current(self.index) as cuda:
            ordered = self._stream if stream is None else stream
            driver.check(
                cuda.cuMemFreeAsync(self.pointer, ordered), f"freeing memory of cuda:{self.index}"
            )

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()


def allocate(nbytes: int, index: int, stream: int, what: str = "an array") -> Memory:
    """Take memory of a GPU, usable by what follows on the stream.

    Parameters
    ----------
    nbytes : int
    index : int
        The device.
    stream : int
        A handle, as `streams.handle_of` gives it.
    what : str
        What it is for, for the message.

    Raises
    ------
    BudgetError
        If the device has no such stretch left; it says how much is free.
    """
    with current(index) as cuda:
        status, pointer = cuda.cuMemAllocAsync(max(nbytes, 1), stream)
        if status == cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            size = format_bytes
            raise BudgetError(
                f"{what} needs {size(nbytes)} on cuda:{index}, which has {size(free_bytes(index))} "
                f"free of {size(facts(index).memory_bytes)}; free some (other libraries keep "
                "memory for later), or leave the operands on the host and give a budget: memory="
            )
        pointer = driver.check((status, pointer), f"allocating {nbytes} bytes on cuda:{index}")
    return Memory(index, int(pointer), nbytes, stream)


def write(memory: Memory, array: NDArray[Any], stream: int) -> None:
    """Copy a C-contiguous host array to the front of ``memory``; returns when it has been read."""
    _check_fits(memory, array)
    with current(memory.index) as cuda:
        doing = f"copying {array.nbytes} bytes to cuda:{memory.index}"
        driver.check(
            cuda.cuMemcpyHtoDAsync(memory.pointer, array.ctypes.data, array.nbytes, stream), doing
        )
        driver.check(cuda.cuStreamSynchronize(stream), doing)


def read(memory: Memory, array: NDArray[Any], stream: int) -> None:
    """Copy the front of ``memory`` into a C-contiguous host array; returns when it is there."""
    _check_fits(memory, array)
    if not array.flags.writeable:
        raise DeviceError(f"{describe('array', array)} cannot be written")
    with current(memory.index) as cuda:
        doing = f"copying {array.nbytes} bytes from cuda:{memory.index}"
        driver.check(
            cuda.cuMemcpyDtoHAsync(array.ctypes.data, memory.pointer, array.nbytes, stream), doing
        )
        driver.check(cuda.cuStreamSynchronize(stream), doing)


def fill(memory: Memory, byte: int, stream: int) -> None:
    """Set every byte of ``memory``, in the order of the stream."""
    with current(memory.index) as cuda:
        driver.check(
            cuda.cuMemsetD8Async(memory.pointer, byte, memory.nbytes, stream),
            f"filling memory of cuda:{memory.index}",
        )


class Workspace:
    """Scratch memory that the products of one GPU share, a stretch for each stream.

    What is put on a stream runs in order, so each product there may use the same stretch; while one
    product's launches are put on a stream, `on` keeps others off it. In the capture of a CUDA graph
    the stretch belongs to the graph instead, and lives and dies with it.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._lock = threading.Lock()
        self._stretches: dict[int, _Stretch] = {}

    @contextmanager
    def on(self, stream: int, nbytes: int) -> Iterator[int]:
        """Lend a pointer to ``nbytes`` of scratch memory to launches on ``stream``."""
        what = "a product's workspace"
        identity = streams.identity(stream, self._index)
        if identity is None:
            with allocate(nbytes, self._index, stream, what) as memory:
                yield memory.pointer
            return
        with self._lock:
            stretch = self._stretches.setdefault(identity, _Stretch())
        with stretch.lock:
            if stretch.memory is None or stretch.memory.nbytes < nbytes:
                stretch.free(stream)
                stretch.memory = allocate(nbytes, self._index, stream, what)
            yield stretch.memory.pointer

    @property
    def held_bytes(self) -> int:
        """How much is held now."""
        with self._lock:
            held = [stretch.memory for stretch in self._stretches.values()]
        return sum(memory.nbytes for memory in held if memory is not None)

    def release(self) -> None:
        """Give everything back; waits for all that runs on the device."""
        with self._lock:
            stretches = list(self._stretches.values())
            self._stretches.clear()
        for stretch in stretches:
            with stretch.lock, current(self._index) as cuda:
                # Its stream may be gone by now, so the device is waited for.
                driver.check(cuda.cuCtxSynchronize(), f"waiting for cuda:{self._index}")
                stretch.free(streams.DEFAULT)


class _Stretch:
    """What a workspace holds for one stream, and the right to put launches that use it there."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.memory: Memory | None = None

    def free(self, stream: int) -> None:
        if self.memory is not None:
            self.memory.free(stream)
        self.memory = None


_workspaces: dict[int, Workspace] = {}


def workspace(index: int) -> Workspace:
    """Return the workspace of a GPU, of which each process has one."""
    return _workspaces.setdefault(index, Workspace(index))


def _check_fits(memory: Memory, array: NDArray[Any]) -> None:
    if not array.flags.c_contiguous or array.nbytes > memory.nbytes:
        raise DeviceError(
            f"{describe('array', array)} is not a C-contiguous array of at most {memory.nbytes} "
            "bytes"
        )
