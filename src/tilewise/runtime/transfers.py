"""A GPU as a pipeline sees it: three lanes of work that overlap, and what orders them.

Copies in, kernels and copies out each have a stream of their own; `Event` carries the order from
one to another, and lets a thread sleep until a lane has come so far. All memory taken here is given
back by `close`.
"""

from __future__ import annotations

from typing import Any, Literal

from . import driver
from .device import current
from .memory import Memory, allocate

__all__ = ["Event", "Gpu", "Lane", "is_pinned"]

Lane = Literal["in", "compute", "out"]

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: not ordered with the default stream
_SLEEPING = 1 | 2  # CU_EVENT_BLOCKING_SYNC and CU_EVENT_DISABLE_TIMING
_HOST = 1  # CU_MEMORYTYPE_HOST


class Event:
    """A point on a lane; recorded again, a later one."""

    __slots__ = ("handle", "is_recorded")

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.is_recorded = False


class Gpu:
    """The lanes of one GPU, and the memory that one product takes there.

    A thread calls `record`, `wait`, `finish`, `copy_in`, `copy_out` and `zero` while it is
    `attached`: making the device current for each of them would double what they cost, and each
    change of the thread that holds the interpreter's lock costs more still. None but `finish` and
    `close` waits.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self._memory: list[Memory] = []
        self._events: list[Event] = []
        self._streams: dict[Lane, int] = {}
        self._cuda = driver.require()
        lanes: tuple[Lane, ...] = ("in", "compute", "out")
        try:
            with current(index) as cuda:
                for lane in lanes:
                    stream = driver.check(cuda.cuStreamCreate(_NON_BLOCKING), "making a stream")
                    self._streams[lane] = int(stream)
        except BaseException:
            self.close()
            raise

    def stream(self, lane: Lane) -> int:
        """Return the handle of a lane's stream."""
        return self._streams[lane]

    def attached(self) -> current:
        """Return a context manager that makes the device current in this thread."""
        return current(self.index)

    def allocate(self, nbytes: int, what: str) -> int:
        """Return a pointer to memory that every lane may use; `BudgetError` if there is none."""
        memory = allocate(nbytes, self.index, self._streams["in"], what)
        self._memory.append(memory)
        with self.attached():
            ready = self.event()
            self.record(ready, "in")
            self.wait("compute", ready)
            self.wait("out", ready)
        return memory.pointer

    def event(self) -> Event:
        event = Event(driver.check(self._cuda.cuEventCreate(_SLEEPING), "making an event"))
        self._events.append(event)
        return event

    def record(self, event: Event, lane: Lane) -> None:
        """Let an event stand for all that is on a lane now."""
        status = self._cuda.cuEventRecord(event.handle, self._streams[lane])
        driver.check(status, "ordering copies")
        event.is_recorded = True

    def wait(self, lane: Lane, event: Event) -> None:
        """Let what comes on a lane wait for an event."""
        status = self._cuda.cuStreamWaitEvent(self._streams[lane], event.handle, 0)
        driver.check(status, "ordering copies")

    def finish(self, event: Event) -> None:
        """Sleep until an event has come; one that was never recorded has."""
        if event.is_recorded:
            status = self._cuda.cuEventSynchronize(event.handle)
            driver.check(status, f"waiting for cuda:{self.index}")

    def copy_in(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, lines: int
    ) -> None:
        """Copy lines of ``width`` bytes from pinned host memory to the device."""
        cuda, stream = self._cuda, self._streams["in"]
        if target_pitch == source_pitch == width:
            status = cuda.cuMemcpyHtoDAsync(target, source, width * lines, stream)
        else:
            how = cuda.CUDA_MEMCPY2D()
            how.srcMemoryType = cuda.CUmemorytype.CU_MEMORYTYPE_HOST
            how.srcHost, how.srcPitch = source, source_pitch
            how.dstMemoryType = cuda.CUmemorytype.CU_MEMORYTYPE_DEVICE
            how.dstDevice, how.dstPitch = target, target_pitch
            how.WidthInBytes, how.Height = width, lines
            status = cuda.cuMemcpy2DAsync(how, stream)
        driver.check(status, f"copying {width * lines} bytes to cuda:{self.index}")

    def copy_out(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, lines: int
    ) -> None:
        """Copy lines of ``width`` bytes from the device to pinned host memory."""
        cuda, stream = self._cuda, self._streams["out"]
        if target_pitch == source_pitch == width:
            status = cuda.cuMemcpyDtoHAsync(target, source, width * lines, stream)
        else:
            how = cuda.CUDA_MEMCPY2D()
            how.srcMemoryType = cuda.CUmemorytype.CU_MEMORYTYPE_DEVICE
            how.srcDevice, how.srcPitch = source, source_pitch
            how.dstMemoryType = cuda.CUmemorytype.CU_MEMORYTYPE_HOST
            how.dstHost, how.dstPitch = target, target_pitch
            how.WidthInBytes, how.Height = width, lines
            status = cuda.cuMemcpy2DAsync(how, stream)
        driver.check(status, f"copying {width * lines} bytes from cuda:{self.index}")

    def zero(self, pointer: int, nbytes: int) -> None:
        """Set memory to 0 on the lane of kernels."""
        status = self._cuda.cuMemsetD8Async(pointer, 0, nbytes, self._streams["compute"])
        driver.check(status, f"clearing memory of cuda:{self.index}")

    def close(self) -> None:
        """Wait for all lanes, and give everything back; then raise what went wrong on a lane."""
        failure = None
        with current(self.index) as cuda:
            for stream in self._streams.values():
                status = cuda.cuStreamSynchronize(stream)
                failure = failure or (status if status[0] != 0 else None)
            for memory in self._memory:
                memory.free()
            self._memory.clear()
            for event in self._events:
                cuda.cuEventDestroy(event.handle)
            for stream in self._streams.values():
                cuda.cuStreamSynchronize(stream)  # the pool gives back what has been freed
                cuda.cuStreamDestroy(stream)
        if failure is not None:
            driver.check(failure, f"multiplying on cuda:{self.index}")


def is_pinned(first: int, last: int, index: int) -> bool:
    """Say whether a GPU copies host memory, from its first to its last byte, as it is."""
    with current(index) as cuda:
        attribute = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        for address in (first, last):
            status, kind = cuda.cuPointerGetAttribute(attribute, address)
            if status != 0 or int(kind) != _HOST:
                return False
    return True
