"""Memory of a GPU: taking it, filling it, reading it, giving it back, in the order of a stream.

Arrays come from the device's own pool, which gives back what is free whenever a stream is waited
for. (The memory resources of cuda.core set that pool to keep everything, for every library in the
process, hence the plain calls here.) A `Workspace` keeps what it has lent, and a `Pool` some of
what products of host operands have freed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from numpy.typing import NDArray

from tilewise._memory import format_bytes
from tilewise._shield import shielded
from tilewise.errors import BudgetError, DeviceError, describe

from . import driver, streams
from .device import current, facts, free_bytes

__all__ = [
    "Memory",
    "Pool",
    "Workspace",
    "allocate",
    "fill",
    "kept_bytes",
    "pool",
    "read",
    "workspace",
    "write",
]

#: What a `Pool` keeps at most, of the memory of its device.
_KEPT = 1 / 8


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


def allocate(
    nbytes: int, index: int, stream: int, what: str = "an array", source: Pool | None = None
) -> Memory:
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
    source : Pool, optional
        Where to take it, if not from the device's own pool.

    Raises
    ------
    BudgetError
        If the device has no such stretch left; it says how much is free.
    """
    with current(index) as cuda:
        is_full = cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY

        def take() -> Any:
            if source is None:
                return cuda.cuMemAllocAsync(max(nbytes, 1), stream)
            return cuda.cuMemAllocFromPoolAsync(max(nbytes, 1), source.handle, stream)

        status, pointer = take()
        if status == is_full and _give_back(index):
            status, pointer = take()
        if status == is_full:
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


class Pool:
    """Memory for products of host operands, of which some is kept for the next one.

    To take 1 GiB from the device costs 1.5 ms, and to give it back 1.9 (docs/facts.md). An eighth
    of the device is kept at most; the rest goes back when a stream is waited for.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        with current(index) as cuda:
            how = cuda.CUmemPoolProps()
            how.allocType = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
            how.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            how.location.id = int(driver.check(cuda.cuDeviceGet(index), f"opening cuda:{index}"))
            self.handle = driver.check(
                cuda.cuMemPoolCreate(how), f"making a memory pool on cuda:{index}"
            )
            kept = int(_KEPT * facts(index).memory_bytes)
            limit = cuda.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
            driver.check(
                cuda.cuMemPoolSetAttribute(self.handle, limit, cuda.cuuint64_t(kept)),
                f"limiting what is kept of cuda:{index}",
            )

    @property
    def held_bytes(self) -> int:
        """How much of the device is held, in use or kept."""
        return self._asked("CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT")

    @property
    def kept_bytes(self) -> int:
        """How much is held that nothing uses."""
        return self.held_bytes - self._asked("CU_MEMPOOL_ATTR_USED_MEM_CURRENT")

    def trim(self) -> None:
        """Give back what nothing uses."""
        with current(self._index) as cuda:
            driver.check(
                cuda.cuMemPoolTrimTo(self.handle, 0), f"giving memory of cuda:{self._index} back"
            )

    def make_room(self, needed: int, most: int) -> None:
        """Give back what is kept if more than ``most`` could be held with ``needed`` in use.

        What is kept may lie in pieces that do not suit, and then more is taken beside it.
        """
        if not needed <= self.held_bytes <= most:
            self.trim()

    def _asked(self, attribute: str) -> int:
        with current(self._index) as cuda:
            which = getattr(cuda.CUmemPool_attribute, attribute)
            doing = f"asking for the memory held of cuda:{self._index}"
            return int(driver.check(cuda.cuMemPoolGetAttribute(self.handle, which), doing))


_pools: dict[int, Pool] = {}
_making = threading.Lock()


def pool(index: int) -> Pool:
    """Return the pool of a GPU, of which each process has one."""
    with _making:
        if index not in _pools:
            _pools[index] = Pool(index)
        return _pools[index]


def kept_bytes(index: int) -> int:
    """Return how much of a GPU is kept for products of host operands, and not in use."""
    return _pools[index].kept_bytes if index in _pools else 0


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
                shielded(partial(stretch.take, nbytes, self._index, stream, what))
                assert stretch.memory is not None
            yield stretch.memory.pointer

    def shrink(self, stream: int, most: int) -> None:
        """Give back what is kept for a stream, in its order, if that is more than ``most``."""
        identity = streams.identity(stream, self._index)
        with self._lock:
            stretch = None if identity is None else self._stretches.get(identity)
        if stretch is not None:
            with stretch.lock:
                if stretch.memory is not None and stretch.memory.nbytes > most:
                    stretch.free(stream)

    @property
    def held_bytes(self) -> int:
        """How much is held now."""
        with self._lock:
            held = [stretch.memory for stretch in self._stretches.values()]
        return sum(memory.nbytes for memory in held if memory is not None)

    def release(self) -> None:
        """Give back what no thread is at; waits for all that runs on the device."""
        with self._lock:
            stretches = list(self._stretches.values())
        with current(self._index) as cuda:
            # The streams may be gone by now, so the device is waited for.
            driver.check(cuda.cuCtxSynchronize(), f"waiting for cuda:{self._index}")
            for stretch in stretches:
                if stretch.lock.acquire(blocking=False):
                    try:
                        stretch.free(streams.DEFAULT)
                    finally:
                        stretch.lock.release()
            streams.synchronize(streams.DEFAULT, self._index)  # the device's pool lets go of it


class _Stretch:
    """What a workspace holds for one stream, and the right to put launches that use it there."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.memory: Memory | None = None

    def take(self, nbytes: int, index: int, stream: int, what: str) -> None:
        self.memory = allocate(nbytes, index, stream, what)

    def free(self, stream: int) -> None:
        if self.memory is not None:
            self.memory.free(stream)
        self.memory = None


_workspaces: dict[int, Workspace] = {}


def workspace(index: int) -> Workspace:
    """Return the workspace of a GPU, of which each process has one."""
    return _workspaces.setdefault(index, Workspace(index))


def _give_back(index: int) -> bool:
    """Give back all that is kept of a GPU and not in use; say whether there was any."""
    kept = kept_bytes(index)
    if kept:
        _pools[index].trim()
    scratch = _workspaces.get(index)
    if scratch is not None and scratch.held_bytes:
        kept += scratch.held_bytes
        scratch.release()
    return kept > 0


def _check_fits(memory: Memory, array: NDArray[Any]) -> None:
    if not array.flags.c_contiguous or array.nbytes > memory.nbytes:
        raise DeviceError(
            f"{describe('array', array)} is not a C-contiguous array of at most {memory.nbytes} "
            "bytes"
        )
