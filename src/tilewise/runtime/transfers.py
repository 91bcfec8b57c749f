"""A GPU as a pipeline sees it: three lanes of work that overlap, and what orders them.

Copies in, kernels and copies out each have a stream of their own; `Event` carries the order from
one to another, and lets a thread sleep until a lane has come so far. All memory taken here is given
back by `close`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

from tilewise.errors import DeviceError

from . import driver, quick, streams
from .device import current
from .memory import Memory, allocate, pool
from .quick import DEVICE, HOST

__all__ = ["Event", "Gpu", "Lane", "is_pinned"]

Lane = Literal["in", "compute", "out"]

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: not ordered with the default stream
_SLEEPING = 1 | 2  # CU_EVENT_BLOCKING_SYNC and CU_EVENT_DISABLE_TIMING


class Event:
    """A point on a lane; recorded again, a later one.

    ``is_pending`` says whether it may be yet to come.
    """

    __slots__ = ("handle", "is_pending")

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.is_pending = False


class Gpu:
    """The lanes of one GPU, and the memory that one product takes there.

    A thread is `attached` while it calls any of `record` to `zero`: making the device current for
    each call would double what it costs. Only `finish` and `close` wait.
    """

    def __init__(self, index: int, needed_bytes: int, most_bytes: int) -> None:
        self.index = index
        self._memory: list[Memory] = []
        self._events: list[Event] = []
        self._streams: dict[Lane, int] = {}
        self._cuda, self._quick = driver.require(), quick.calls()
        lanes: tuple[Lane, ...] = ("in", "compute", "out")
        try:
            with current(index) as cuda:
                for lane in lanes:
                    stream = driver.check(cuda.cuStreamCreate(_NON_BLOCKING), "making a stream")
                    self._streams[lane] = int(stream)
            pool(index).make_room(needed_bytes, most_bytes)
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
        memory = allocate(nbytes, self.index, self._streams["in"], what, pool(self.index))
        self._memory.append(memory)
        with self.attached():
            ready = self.event()
            self.record(ready, "in")
            self.wait("compute", ready)
            self.wait("out", ready)
        return memory.pointer

    def event(self) -> Event:
        made = int(driver.check(self._cuda.cuEventCreate(_SLEEPING), "making an event"))
        event = Event(made)
        self._events.append(event)
        return event

    def record(self, event: Event, lane: Lane) -> None:
        """Let an event stand for all that is on a lane now."""
        self._check(self._quick.record(event.handle, self._streams[lane]), "ordering copies")
        event.is_pending = True

    def wait(self, lane: Lane, event: Event) -> None:
        """Let what comes on a lane wait for an event."""
        self._check(self._quick.wait(self._streams[lane], event.handle, 0), "ordering copies")

    def is_done(self, event: Event) -> bool:
        """Say whether an event has come; one that was never recorded has."""
        if event.is_pending and self._quick.query(event.handle) == 0:
            event.is_pending = False  # the driver need not be asked again
        return not event.is_pending

    def finish(self, event: Event) -> None:
        """Sleep until an event has come; one that was never recorded has."""
        if not self.is_done(event):
            (status,) = self._cuda.cuEventSynchronize(event.handle)
            driver.check((status,), f"waiting for cuda:{self.index}")

    def copy_in(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, lines: int
    ) -> None:
        """Copy lines of ``width`` bytes from pinned host memory to the device."""
        stream = self._streams["in"]
        if target_pitch == source_pitch == width:
            status = self._quick.copy_in(target, source, width * lines, stream)
        else:
            host, here = (HOST, source, source_pitch), (DEVICE, target, target_pitch)
            status = self._quick.copy_lines(quick.lines(host, here, width, lines), stream)
        self._check(status, "copying in")

    def copy_out(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, lines: int
    ) -> None:
        """Copy lines of ``width`` bytes from the device to pinned host memory."""
        stream = self._streams["out"]
        if target_pitch == source_pitch == width:
            status = self._quick.copy_out(target, source, width * lines, stream)
        else:
            here, host = (DEVICE, source, source_pitch), (HOST, target, target_pitch)
            status = self._quick.copy_lines(quick.lines(here, host, width, lines), stream)
        self._check(status, "copying out")

    def zero(self, pointer: int, nbytes: int) -> None:
        """Set memory to 0 on the lane of kernels."""
        status = self._quick.fill(pointer, 0, nbytes, self._streams["compute"])
        self._check(status, "clearing memory")

    def close(self) -> None:
        """Wait for all lanes, and give everything back; then raise what went wrong first."""
        failures: list[DeviceError] = []

        def attempt(call: Callable[[], object]) -> None:
            try:
                call()
            except DeviceError as error:
                failures.append(error)

        with current(self.index) as cuda:
            for stream in self._streams.values():
                attempt(partial(streams.synchronize, stream, self.index))
            for memory in self._memory:
                attempt(memory.free)
            for event in self._events:
                cuda.cuEventDestroy(event.handle)
            for stream in self._streams.values():
                cuda.cuStreamSynchronize(stream)  # the pool gives back what it does not keep
                cuda.cuStreamDestroy(stream)
        self._memory.clear()
        self._events.clear()
        self._streams.clear()
        if failures:
            raise failures[0]

    def _check(self, status: int, doing: str) -> None:
        if status != 0:
            result = self._cuda.CUresult(status)
            driver.check((result,), f"{doing} on cuda:{self.index}")


def is_pinned(first: int, last: int, index: int) -> bool:
    """Say whether a GPU copies host memory, from its first to its last byte, as it is."""
    with current(index) as cuda:
        attribute = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        for address in (first, last):
            status, kind = cuda.cuPointerGetAttribute(attribute, address)
            if status != 0 or int(kind) != HOST:
                return False
    return True
