"""GPUs that are as late as their rules allow: lanes run only when somebody sleeps on them.

Copies read and write their memory when they run, not when they are put on a lane, so a pipeline
that reuses a buffer too soon, or forgets to order two lanes, gives a wrong product here.
`FakeDevice` is what a pipeline asks for; `FakeCuda` is the driver beneath.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from tilewise.errors import BudgetError, DeviceError
from tilewise.runtime.quick import Quick
from tilewise.runtime.streams import DEFAULT

POISON = 0xA5


class Point:
    """An event: how far a lane has to have come, by the number of what was put there."""

    def __init__(self) -> None:
        self.lane: str | None = None
        self.number = 0
        self.time = 0.0  #: when it was recorded; lanes have no clock of their own


class Lanes:
    """Work in order, and what orders it across lanes."""

    def __init__(self, seed: int = 0, eager: Any = None) -> None:
        self._eager = eager
        self.lock = threading.RLock()
        self._random = random.Random(seed)
        self._work: dict[Any, deque[tuple[int, Callable[[], object]]]] = defaultdict(deque)
        self._put: dict[Any, int] = defaultdict(int)
        self._done: dict[Any, int] = defaultdict(int)

    def add(self, lane: Any, work: Callable[[], object]) -> None:
        with self.lock:
            self._put[lane] += 1
            self._work[lane].append((self._put[lane], work))

    def record(self, event: Point, lane: Any) -> None:
        with self.lock:
            event.lane, event.number, event.time = lane, self._put[lane], time.perf_counter()

    def wait(self, lane: Any, event: Point) -> None:
        other, number = event.lane, event.number
        if other is not None:
            self.add(lane, lambda: self._run(other, number))

    def is_done(self, event: Point) -> bool:
        with self.lock:
            return event.lane is None or self._done[event.lane] >= event.number

    def finish(self, event: Point) -> None:
        """Run the lane of an event up to it; others may come further, or not.

        An eager lane comes as far as it can, when threads have had time to put something there.
        """
        if event.lane is None:
            return
        if self._eager is not None:
            time.sleep(0.001)
            self.drain(self._eager)
        with self.lock:
            for lane in list(self._work):
                self._run(lane, self._done[lane] + self._random.randint(0, 3))
            self._run(event.lane, event.number)

    def drain(self, lane: Any) -> None:
        with self.lock:
            self._run(lane, self._put[lane])

    def _run(self, lane: Any, number: int) -> None:
        queue = self._work[lane]
        while queue and queue[0][0] <= number:
            reached, work = queue.popleft()
            work()
            self._done[lane] = reached


def copy_lines(target: int, pitch: int, source: int, source_pitch: int, w: int, lines: int) -> None:
    for i in range(lines):
        ctypes.memmove(target + i * pitch, source + i * source_pitch, w)


class FakeDevice:
    """What `outofcore.device_pipeline.Device` asks for, on the CPU."""

    def __init__(
        self,
        seed: int = 0,
        memory_bytes: int = 1 << 30,
        fails: Callable[[str], bool] = lambda what: False,
        eager: str | None = None,
    ) -> None:
        self.is_closed = False
        self._left = memory_bytes
        self._fails = fails
        self._lanes = Lanes(seed, eager)
        self._buffers: list[Any] = []

    @property
    def is_used(self) -> bool:
        return bool(self._buffers)

    def attached(self) -> nullcontext[None]:
        return nullcontext()

    def allocate(self, nbytes: int, what: str) -> int:
        self._left -= nbytes
        if self._left < 0:
            raise BudgetError(f"{what} needs {nbytes} bytes")
        self._buffers.append(np.full(nbytes + 256, POISON, np.uint8))
        address = self._buffers[-1].ctypes.data
        return int(address + -address % 256)

    def event(self) -> Point:
        return Point()

    def record(self, event: Point, lane: str) -> None:
        self._lanes.record(event, lane)

    def wait(self, lane: str, event: Point) -> None:
        self._lanes.wait(lane, event)

    def is_done(self, event: Point) -> bool:
        return self._lanes.is_done(event)

    def finish(self, event: Point) -> None:
        self._lanes.finish(event)

    def copy_in(self, *copy: int) -> None:
        self._copy("in", *copy)

    def copy_out(self, *copy: int) -> None:
        self._copy("out", *copy)

    def zero(self, pointer: int, nbytes: int) -> None:
        self.compute(lambda: ctypes.memset(pointer, 0, nbytes))

    def compute(self, work: Callable[[], object]) -> None:
        assert not self.is_closed
        self._lanes.add("compute", work)

    def close(self) -> None:
        for lane in ("in", "compute", "out"):
            self._lanes.drain(lane)
        self.is_closed = True

    def _copy(self, lane: str, *copy: int) -> None:
        _, pitch, _, source_pitch, width, lines = copy
        assert min(pitch, source_pitch) >= width or lines == 1
        assert not self.is_closed
        if self._fails(lane):
            raise DeviceError(f"copying {width * lines} bytes failed")
        self._lanes.add(lane, lambda: copy_lines(*copy))


@dataclass(eq=False)
class _Pool:
    """Memory of a device, of which so much as the threshold is kept when it is free."""

    device: int
    threshold: int = 0
    reserved: int = 0
    used: int = 0


class FakeCuda:
    """The calls of a driver that streams of host operands make, for GPUs made of NumPy.

    Each call sees to it that a device is current in its thread, and that streams, events and memory
    are of that device, as the real ones want it.
    """

    SUCCESS = 0
    OUT_OF_MEMORY = 2
    NOT_READY = 600

    def __init__(self, bindings: Any, gpus: int = 1, memory_bytes: int = 1 << 30) -> None:
        self.CUresult = bindings.CUresult
        self.CUmemorytype = bindings.CUmemorytype
        self.CUpointer_attribute = bindings.CUpointer_attribute
        self.CUmemPoolProps = bindings.CUmemPoolProps
        self.CUmemPool_attribute = bindings.CUmemPool_attribute
        self.CUmemAllocationType = bindings.CUmemAllocationType
        self.CUmemLocationType = bindings.CUmemLocationType
        self.cuuint64_t = int
        self.free_bytes = [memory_bytes] * gpus
        self.memory: dict[int, tuple[_Pool, Any]] = {}  # address -> where it is from, buffer
        self.pinned: dict[int, int] = {}
        self.pools: dict[int, _Pool] = {}
        self.streams: dict[int, int] = {1: 0}
        self.events: dict[int, tuple[int, Point]] = {}
        self._lanes = Lanes(7)
        self._here = threading.local()
        self._handles = itertools.count(100)

    def cuCtxPushCurrent(self, context: Any) -> Any:
        self._stack().append(int(context))
        return (self.SUCCESS,)

    def cuCtxPopCurrent(self) -> Any:
        return self.SUCCESS, self._stack().pop()

    def cuMemGetInfo(self) -> Any:
        free = self.free_bytes[self._device()]
        return self.SUCCESS, (free, 2 * free)

    def cuStreamCreate(self, flags: int) -> Any:
        handle = next(self._handles)
        self.streams[handle] = self._device()
        return self.SUCCESS, handle

    def cuStreamDestroy(self, stream: int) -> Any:
        assert self.streams.pop(stream) == self._device()
        return (self.SUCCESS,)

    def cuStreamSynchronize(self, stream: int) -> Any:
        self._lanes.drain(self._checked(stream))
        return (self.SUCCESS,)

    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> Any:
        self._lanes.wait(self._checked(stream), self.events[event][1])
        return (self.SUCCESS,)

    def cuEventCreate(self, flags: int) -> Any:
        handle = next(self._handles)
        self.events[handle] = self._device(), Point()
        return self.SUCCESS, handle

    def cuEventDestroy(self, event: int) -> Any:
        del self.events[event]
        return (self.SUCCESS,)

    def cuEventElapsedTime(self, start: int, stop: int) -> Any:
        return self.SUCCESS, 1e3 * (self.events[stop][1].time - self.events[start][1].time)

    def cuDeviceGetCount(self) -> Any:
        return self.SUCCESS, len(self.free_bytes)

    def cuEventRecord(self, event: int, stream: int) -> Any:
        device, point = self.events[event]
        assert device == self._device()
        self._lanes.record(point, self._checked(stream))
        return (self.SUCCESS,)

    def cuEventQuery(self, event: int) -> Any:
        self._device()
        return (self.SUCCESS if self._lanes.is_done(self.events[event][1]) else self.NOT_READY,)

    def cuEventSynchronize(self, event: int) -> Any:
        self._device()
        self._lanes.finish(self.events[event][1])
        return (self.SUCCESS,)

    def cuDeviceGet(self, index: int) -> Any:
        return self.SUCCESS, index

    def cuMemAllocAsync(self, nbytes: int, stream: int) -> Any:
        return self._allocate(_Pool(self.streams[self._checked(stream)]), nbytes)

    def cuMemAllocFromPoolAsync(self, nbytes: int, pool: int, stream: int) -> Any:
        self._checked(stream)
        return self._allocate(self.pools[pool], nbytes)

    def cuMemFreeAsync(self, pointer: int, stream: int) -> Any:
        self._lanes.drain(self._checked(stream))
        pool, buffer = self.memory.pop(pointer)
        pool.used -= buffer.size - 256
        self._give_back(pool, pool.threshold)
        return (self.SUCCESS,)

    def cuMemPoolCreate(self, how: Any) -> Any:
        handle = next(self._handles)
        self.pools[handle] = _Pool(int(how.location.id))
        return self.SUCCESS, handle

    def cuMemPoolSetAttribute(self, pool: int, attribute: Any, value: int) -> Any:
        assert attribute.name == "CU_MEMPOOL_ATTR_RELEASE_THRESHOLD"
        self.pools[pool].threshold = value
        return (self.SUCCESS,)

    def cuMemPoolGetAttribute(self, pool: int, attribute: Any) -> Any:
        name = "used" if "USED" in attribute.name else "reserved"
        return self.SUCCESS, getattr(self.pools[pool], name)

    def cuMemPoolTrimTo(self, pool: int, nbytes: int) -> Any:
        self._give_back(self.pools[pool], nbytes)
        return (self.SUCCESS,)

    def cuMemHostRegister(self, pointer: int, nbytes: int, flags: int) -> Any:
        self._device()
        if pointer in self.pinned:
            return (self.CUresult.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,)
        self.pinned[pointer] = nbytes
        return (self.SUCCESS,)

    def cuMemHostUnregister(self, pointer: int) -> Any:
        if self.pinned.pop(pointer, None) is None:
            return (self.CUresult.CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,)
        return (self.SUCCESS,)

    def cuPointerGetAttribute(self, attribute: Any, pointer: int) -> Any:
        return (self.SUCCESS, 1) if self._is_pinned(pointer) else (1, None)

    def cuMemcpyHtoDAsync(self, target: int, source: int, nbytes: int, stream: int) -> Any:
        return self._copy(stream, source, target, nbytes, source, nbytes, nbytes, 1)

    def cuMemcpyDtoDAsync(self, target: int, source: int, nbytes: int, stream: int) -> Any:
        self._lanes.add(self._checked(stream), lambda: ctypes.memmove(target, source, nbytes))
        return (self.SUCCESS,)

    def cuMemcpyDtoHAsync(self, target: int, source: int, nbytes: int, stream: int) -> Any:
        if stream == DEFAULT:  # no pipeline's: others wait
            self._lanes.add(stream, lambda: ctypes.memmove(target, source, nbytes))
            return (self.SUCCESS,)
        return self._copy(stream, target, target, nbytes, source, nbytes, nbytes, 1)

    def cuMemcpy2DAsync(self, how: Any, stream: int) -> Any:
        width, lines = how.WidthInBytes, how.Height
        is_in = how.srcMemoryType == int(self.CUmemorytype.CU_MEMORYTYPE_HOST)
        source = int(how.srcHost) if is_in else int(how.srcDevice)
        target = int(how.dstDevice) if is_in else int(how.dstHost)
        assert lines == 1 or min(how.srcPitch, how.dstPitch) >= width
        place = source if is_in else target
        return self._copy(stream, place, target, how.dstPitch, source, how.srcPitch, width, lines)

    def cuMemsetD8Async(self, pointer: int, byte: int, nbytes: int, stream: int) -> Any:
        self._lanes.add(self._checked(stream), lambda: ctypes.memset(pointer, byte, nbytes))
        return (self.SUCCESS,)

    def cuGetErrorString(self, status: Any) -> Any:
        return self.SUCCESS, b"a fault"

    def quick(self) -> Quick:
        """Return the calls that are made without cuda.bindings, to the same GPUs."""

        def plain(call: Callable[..., Any]) -> Any:
            # A function of its own, whose types may be set as those of a library's are.
            return lambda *given: int(call(*given)[0])

        names = {
            "cuEventRecord": self.cuEventRecord,
            "cuEventQuery": self.cuEventQuery,
            "cuStreamWaitEvent": self.cuStreamWaitEvent,
            "cuMemcpyHtoDAsync_v2": self.cuMemcpyHtoDAsync,
            "cuMemcpyDtoHAsync_v2": self.cuMemcpyDtoHAsync,
            "cuMemcpy2DAsync_v2": self.cuMemcpy2DAsync,
            "cuLaunchKernelEx": None,
            "cuMemsetD8Async": self.cuMemsetD8Async,
        }
        return Quick(SimpleNamespace(**{name: plain(call) for name, call in names.items()}))

    def compute(self, stream: int, work: Callable[[], object]) -> None:
        """Put what stands for a kernel on a stream."""
        self._lanes.add(self._checked(stream), work)

    def _allocate(self, pool: _Pool, nbytes: int) -> Any:
        more = max(pool.used + nbytes - pool.reserved, 0)
        if more > self.free_bytes[pool.device]:
            return self.CUresult.CUDA_ERROR_OUT_OF_MEMORY, 0
        self.free_bytes[pool.device] -= more
        pool.reserved += more
        pool.used += nbytes
        buffer = np.full(nbytes + 256, POISON, np.uint8)
        address = buffer.ctypes.data + -buffer.ctypes.data % 256
        self.memory[address] = pool, buffer
        return self.SUCCESS, address

    def _give_back(self, pool: _Pool, kept: int) -> None:
        less = max(pool.reserved - max(kept, pool.used), 0)
        pool.reserved -= less
        self.free_bytes[pool.device] += less

    def _copy(self, stream: int, host: int, *copy: int) -> Any:
        assert self._is_pinned(host), "memory that is not pinned is not copied beside others"
        self._lanes.add(self._checked(stream), lambda: copy_lines(*copy))
        return (self.SUCCESS,)

    def _is_pinned(self, pointer: int) -> bool:
        return any(start <= pointer < start + nbytes for start, nbytes in self.pinned.items())

    def _stack(self) -> list[int]:
        if not hasattr(self._here, "stack"):
            self._here.stack = []
        return self._here.stack

    def _device(self) -> int:
        assert self._stack(), "no device is current in this thread"
        return self._stack()[-1]

    def _checked(self, stream: int) -> int:
        assert stream == 1 or self.streams[stream] == self._device()
        return stream
