"""Executes schedules of GPUs: gather, copy in, launch, copy out, scatter, all at the same time.

Threads gather slices of the operands into pinned memory, from which they go to the device; the
calling thread launches what has arrived; other threads bring results back and scatter them. NumPy
copies outside the interpreter's lock, so they run side by side. Whatever fails, in whichever
thread, stops the others at their next slice; all is given back before the error is raised.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..runtime.pinned import touch_pieces
from .device_schedule import Job, Launch, Load, Schedule, Store
from .schedule import Box
from .slices import Slice, is_copied_directly, named, packed, slices

__all__ = ["Device", "Share", "Threads", "multiply"]

Array = NDArray[Any]

_LARGE_BYTES = 1 << 30
_MIB = 1 << 20


class Device(Protocol):
    """What a pipeline asks of a GPU; `runtime.transfers.Gpu` has it."""

    def attached(self) -> AbstractContextManager[Any]: ...
    def allocate(self, nbytes: int, what: str, /) -> int: ...
    def event(self) -> Any: ...
    def record(self, event: Any, lane: Any, /) -> None: ...
    def wait(self, lane: Any, event: Any, /) -> None: ...
    def finish(self, event: Any, /) -> None: ...
    def copy_in(
        self, target: int, pitch: int, source: int, source_pitch: int, width: int, lines: int, /
    ) -> None: ...
    def copy_out(
        self, target: int, pitch: int, source: int, source_pitch: int, width: int, lines: int, /
    ) -> None: ...
    def zero(self, pointer: int, nbytes: int, /) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Share:
    """One device's part of a product."""

    name: str  #: of the device, for messages
    schedule: Schedule
    origin: Box  #: where in C it is
    open: Callable[[], Device]
    compute: Callable[[Device, Launch, tuple[int, int, int, int]], None]
    """Puts a launch on the device's lane of kernels, given a, b, c and the workspace."""
    is_pinned: Callable[[Array], bool]


@dataclass(frozen=True, slots=True)
class Threads:
    """How many threads a device's pipeline has, and how much each of them copies at a time.

    Slices below 4 MiB cost more in hand-offs of the interpreter's lock than they gain, and 16
    threads are more than twice as fast as 8 only above 1 GiB (docs/facts.md).
    """

    gathering: int
    scattering: int
    slice_bytes: int

    @classmethod
    def suited(cls, moved_bytes: int, cores: int, most_bytes: int | None = None) -> Threads:
        """Return what suits a device that moves so much, on so many cores, within pinned memory."""
        is_large = moved_bytes >= _LARGE_BYTES
        count = min(16 if is_large else 8, max(cores, 2), max(moved_bytes // (8 * _MIB), 2))
        half = count // 2
        made = cls(half, half, 8 * _MIB if is_large else 4 * _MIB)
        while most_bytes is not None and made.ring_bytes > most_bytes and made.slice_bytes > 4096:
            if made.gathering > 1 and made.slice_bytes <= _MIB:
                made = replace(made, gathering=made.gathering // 2, scattering=made.scattering // 2)
            else:
                made = replace(made, slice_bytes=made.slice_bytes // 2)
        return made

    @property
    def blocks(self) -> tuple[int, int]:
        """Slices of pinned memory on the way in and on the way out.

        Threads that have gathered all scatter too: each of them has a block on the way out.
        """
        return 2 * self.gathering, self.gathering + self.scattering

    @property
    def ring_bytes(self) -> int:
        return sum(self.blocks) * self.slice_bytes


def multiply(
    shares: Sequence[Share],
    a: Array,
    b: Array,
    out: Array,
    ring: NDArray[np.uint8],
    threads: Threads,
    *,
    is_fresh: bool,
) -> None:
    """Write ``a @ b`` into ``out``, which no operand overlaps; blocks until done.

    Parameters
    ----------
    shares : sequence of Share
        Together they cover C.
    a, b : array (..., m, k) and (..., k, n)
        Axes that repeat have length 1 here.
    out : array (..., m, n)
    ring : array of bytes
        Pinned, ``threads.ring_bytes`` for each share.
    threads : Threads
        For each share.
    is_fresh : bool
        Whether ``out`` is new memory, contiguous, whose pages are best made in parallel.
    """
    halt = _Halt()
    pages = _Pages(out if is_fresh else None)
    ready: list[Future[_Run]] = [Future() for _ in shares]
    devices: list[Device] = []
    workers: list[threading.Thread] = []
    each = threads.ring_bytes

    def start(role: Callable[[], None], count: int) -> None:
        for _ in range(count):
            worker = threading.Thread(target=halt.guarded, args=(role,), name="tilewise-pipeline")
            worker.start()
            workers.append(worker)

    try:
        for coming in ready:  # pages are made while devices are opened
            start(partial(_scatter, coming, pages, halt), threads.scattering)
        for i, share in enumerate(shares):
            devices.append(share.open())
            part = ring[i * each : (i + 1) * each]
            with devices[-1].attached():
                run = _Run(share, devices[-1], a, b, out, part, threads, halt)
            ready[i].set_result(run)
            start(run.gather, threads.gathering)
        for coming in ready[1:]:
            start(coming.result().launch, 1)
        halt.guarded(ready[0].result().launch)
    except BaseException as error:
        halt.stop(error)
    for coming in ready:
        if not coming.done():
            coming.set_exception(_Stopped())
    _join(workers, halt)
    for device in devices:
        halt.guarded(device.close)
    if halt.error is not None:
        raise halt.error


class _Stopped(Exception):
    """Another thread failed; there is nothing to report."""


class _Halt:
    """The first error of a product, and the conditions by which its threads wait for each other.

    All share one lock, and each is for one kind of thread: who wakes takes the interpreter's lock.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.error: BaseException | None = None
        self._conditions: list[threading.Condition] = []

    def condition(self) -> threading.Condition:
        made = threading.Condition(self.lock)
        self._conditions.append(made)
        return made

    def stop(self, error: BaseException) -> None:
        with self.lock:
            self.error = self.error or error
            for condition in self._conditions:
                condition.notify_all()

    def check(self) -> None:
        if self.error is not None:
            raise _Stopped

    def wait(self, condition: threading.Condition) -> None:
        """Sleep until a condition may have changed, holding the lock."""
        self.check()
        condition.wait()
        self.check()

    def guarded(self, role: Callable[[], None]) -> None:
        try:
            role()
        except _Stopped:
            pass
        except BaseException as error:
            self.stop(error)


class _Pages:
    """The pages of a new result, made in parallel before anything is written there."""

    def __init__(self, out: Array | None) -> None:
        self._lock = threading.Lock()
        self._pieces = iter(()) if out is None else touch_pieces(out)

    def touch_next(self) -> bool:
        """Make some; False when all are made, or being made."""
        with self._lock:
            piece = next(self._pieces, None)
        if piece is None:
            return False
        piece[...] = 0
        return True


class _Block(NamedTuple):
    memory: NDArray[np.uint8]
    event: Any  #: of the last copy that uses it


class _Blocks:
    """Slices of pinned memory, the one used longest ago first."""

    def __init__(self, ring: NDArray[np.uint8], count: int, device: Device, halt: _Halt) -> None:
        size = ring.size // count
        self._device, self._halt, self._is_free = device, halt, halt.condition()
        self._free = deque(
            _Block(ring[i * size : (i + 1) * size], device.event()) for i in range(count)
        )

    def take(self) -> _Block:
        with self._halt.lock:
            while not self._free:
                self._halt.wait(self._is_free)
            block = self._free.popleft()
        self._device.finish(block.event)
        return block

    def put(self, block: _Block) -> None:
        with self._halt.lock:
            self._free.append(block)
            self._is_free.notify()


@dataclass(slots=True)
class _Tile:
    """A finished part of C on its way back."""

    number: int  #: of its launch
    launch: Launch
    slices: Iterator[Slice]
    left: int  #: slices whose copy is not on its lane yet
    is_ordered: bool = False  #: whether copies to come wait for the launch


@dataclass(slots=True)
class _Progress:
    loads_left: list[int]  #: slices of each load that are not on their lane yet
    loaded: int = 0  #: loads before this are on their lane
    launched: int = 0
    tiles: deque[_Tile] = field(default_factory=deque)
    in_slot: list[_Tile | None] = field(default_factory=list)  #: for each slot of C


class _Run:
    """One device at work on its share; `gather`, `launch` and `scatter` are roles of threads."""

    def __init__(
        self,
        share: Share,
        device: Device,
        a: Array,
        b: Array,
        out: Array,
        ring: NDArray[np.uint8],
        threads: Threads,
        halt: _Halt,
    ) -> None:
        self._share, self._device, self._halt = share, device, halt
        self._may_launch, self._has_launched, self._may_scatter = (
            halt.condition() for _ in range(3)
        )
        self._schedule = schedule = share.schedule
        self._job = job = schedule.job
        self._sources = (_part(a, job, 0, share.origin), _part(b, job, 1, share.origin))
        self._out = out[share.origin]
        operations = list(schedule.operations())
        self._loads = [each for each in operations if isinstance(each, Load)]
        self._launches = [each for each in operations if isinstance(each, Launch)]
        self._needs = [
            count
            for count, each in zip(_loads_before(operations), operations, strict=True)
            if isinstance(each, Launch)
        ]
        self._slice_bytes = threads.slice_bytes
        self._a_store = schedule.a_store
        self._b_store = self._a_store if job.is_gram else schedule.b_store
        what = f"{share.name}'s part of the product"
        self._a = device.allocate(self._a_store.nbytes, what)
        self._b = self._a if job.is_gram else device.allocate(self._b_store.nbytes, what)
        self._c = device.allocate(schedule.c_slots * schedule.c_slot_bytes, what)
        workspace = schedule.workspace_bytes
        self._workspace = device.allocate(workspace, what) if workspace else 0
        coming, going = threads.blocks
        edge = coming * threads.slice_bytes
        self._in = _Blocks(ring[:edge], coming, device, halt)
        self._out_blocks = _Blocks(ring[edge:], going, device, halt)
        self._loaded = [device.event() for _ in self._loads]
        self._is_ordered = [False] * len(self._loads)
        self._launched = [device.event() for _ in self._launches]
        self._emptied = [device.event() for _ in range(schedule.c_slots)]
        self._is_direct = tuple(share.is_pinned(x) for x in self._sources)
        self._out_is_direct = share.is_pinned(self._out)
        parts = [list(self._slices_of(load)) for load in self._loads]
        self._to_gather = iter([(i, each) for i, those in enumerate(parts) for each in those])
        self._progress = _Progress(
            loads_left=[len(those) for those in parts], in_slot=[None] * schedule.c_slots
        )

    def gather(self) -> None:
        """Bring slices of the operands to the device; when there are none left, help to scatter."""
        with self._device.attached():
            self._gather()
            self._scatter()

    def launch(self) -> None:
        """Put every launch on its lane as soon as what it needs is on its own."""
        with self._device.attached():
            self._launch()

    def scatter(self) -> None:
        """Bring finished parts of C back."""
        with self._device.attached():
            self._scatter()

    def _gather(self) -> None:
        device, halt = self._device, self._halt
        while True:
            with halt.lock:
                halt.check()
                item = next(self._to_gather, None)
            if item is None:
                break
            number, part = item
            try:
                self._gather_one(number, part)
            except Exception as error:
                load = self._loads[number]
                place = named("ab"[load.side], load.box)
                error.add_note(f"while {self._share.name} was given {place}")
                raise
            with halt.lock:
                left = self._progress.loads_left
                left[number] -= 1
                if left[number] == 0:
                    device.record(self._loaded[number], "in")
                    while self._progress.loaded < len(left) and not left[self._progress.loaded]:
                        self._progress.loaded += 1
                    self._may_launch.notify()

    def _launch(self) -> None:
        device, halt, progress = self._device, self._halt, self._progress
        ordered = 0
        for number, launch in enumerate(self._launches):
            slot = launch.c_slot
            with halt.lock:
                needed = self._needs[number]
                before = progress.in_slot[slot] if launch.is_first else None
                while progress.loaded < needed or (before is not None and before.left > 0):
                    halt.wait(self._may_launch)
            try:
                for event in self._loaded[ordered:needed]:
                    device.wait("compute", event)
                ordered = max(ordered, needed)
                self._launch_one(launch, before)
                device.record(self._launched[number], "compute")
            except Exception as error:
                error.add_note(f"while {self._share.name} computed {named('c', launch.c)}")
                raise
            with halt.lock:
                progress.launched = number + 1
                if launch.is_last:
                    slices = list(self._slices_from(launch))
                    tile = _Tile(number, launch, iter(slices), len(slices))
                    progress.in_slot[slot] = tile
                    progress.tiles.append(tile)
                    self._may_scatter.notify_all()
                self._has_launched.notify_all()

    def _scatter(self) -> None:
        while (item := self._next_out()) is not None:
            tile, part = item
            try:
                self._scatter_one(tile, part)
            except Exception as error:
                place = named("c", tile.launch.c)
                error.add_note(f"while {place} came back from {self._share.name}")
                raise

    def _gather_one(self, number: int, part: Slice) -> None:
        device, halt, load = self._device, self._halt, self._loads[number]
        source, block = part.host, None
        if not self._is_direct[load.side] or not is_copied_directly(source):
            block = self._in.take()
            source = packed(block.memory, source)
            np.copyto(source, part.host)
        with halt.lock:
            while self._progress.launched <= load.after:
                halt.wait(self._has_launched)
        if load.after >= 0 and not self._is_ordered[number]:
            device.wait("in", self._launched[load.after])
            self._is_ordered[number] = True
        pitch = source.strides[-2] if source.shape[-2] > 1 else part.width_bytes
        address = int(source.__array_interface__["data"][0])
        device.copy_in(part.place, part.pitch, address, pitch, part.width_bytes, part.lines)
        if block is not None:
            device.record(block.event, "in")
            self._in.put(block)

    def _launch_one(self, launch: Launch, before: _Tile | None) -> None:
        device, schedule = self._device, self._schedule
        c = self._c + launch.c_slot * schedule.c_slot_bytes
        if launch.is_first:
            if before is not None:
                device.wait("compute", self._emptied[launch.c_slot])
            if schedule.pieces > 1:  # every piece is added to what is there
                device.zero(c, schedule.c_slot_bytes)
        a = self._a + schedule.layout(launch, 0).offset
        b = self._b + schedule.layout(launch, 1).offset
        self._share.compute(device, launch, (a, b, c, self._workspace))

    def _next_out(self) -> tuple[_Tile, Slice] | None:
        """Return a slice of C that waits to come back, when there is one; None after the last."""
        progress, halt = self._progress, self._halt
        with halt.lock:
            while True:
                while progress.tiles:
                    part = next(progress.tiles[0].slices, None)
                    if part is not None:
                        return progress.tiles[0], part
                    progress.tiles.popleft()
                halt.check()
                if progress.launched == len(self._launches):
                    return None
                halt.wait(self._may_scatter)

    def _scatter_one(self, tile: _Tile, part: Slice) -> None:
        device, halt = self._device, self._halt
        block = self._out_blocks.take()
        target = part.host
        is_direct = self._out_is_direct and is_copied_directly(target)
        if not is_direct:
            target = packed(block.memory, target)
        pitch = target.strides[-2] if target.shape[-2] > 1 else part.width_bytes
        address = int(target.__array_interface__["data"][0])
        if not tile.is_ordered:
            device.wait("out", self._launched[tile.number])
            tile.is_ordered = True
        device.copy_out(address, pitch, part.place, part.pitch, part.width_bytes, part.lines)
        device.record(block.event, "out")
        with halt.lock:
            tile.left -= 1
            if tile.left == 0:
                device.record(self._emptied[tile.launch.c_slot], "out")
                self._may_launch.notify()
        device.finish(block.event)
        if not is_direct:
            np.copyto(part.host, target)
        self._out_blocks.put(block)

    def _slices_of(self, load: Load) -> Iterator[Slice]:
        x = self._job.b if load.side else self._job.a
        store = self._b_store if load.side else self._a_store
        base = self._b if load.side else self._a
        source = self._sources[load.side][load.box]
        if x.along_k == (load.side == 1):  # the axis that lies closer becomes the last
            source = source.swapaxes(-1, -2)
        base = _place(base, store, load.slot, load.at, x.along_k)
        yield from slices(source, base, store, self._slice_bytes)

    def _slices_from(self, launch: Launch) -> Iterator[Slice]:
        store = self._schedule.c_store(launch)
        base = self._c + launch.c_slot * self._schedule.c_slot_bytes
        target = self._out[launch.c]
        if not self._job.along_n:
            target = target.swapaxes(-1, -2)
        yield from slices(target, base, store, self._slice_bytes)


def _scatter(run: Future[_Run], pages: _Pages, halt: _Halt) -> None:
    """Make the pages of the result, and then fill them."""
    while pages.touch_next():
        halt.check()
    run.result().scatter()


def _part(x: Array, job: Job, side: int, origin: Box) -> Array:
    """Return what a share needs of an operand, whose axes that repeat have length 1."""
    factor = job.b if side else job.a
    axis = -1 if side else -2
    own = tuple(
        slice(0, 1) if size == 1 else part
        for size, part in zip(
            x.shape[:-2], origin[len(origin) - 2 - (x.ndim - 2) : len(origin) - 2], strict=True
        )
    )
    part = slice(0, 1) if factor.repeats_size else origin[axis]
    every = slice(None)
    return x[(*own, every, part)] if side else x[(*own, part, every)]


def _loads_before(operations: list[Load | Launch]) -> Iterator[int]:
    return itertools.accumulate(isinstance(each, Load) for each in operations)


def _place(base: int, store: Store, slot: int, at: int, by_lines: bool) -> int:
    return base + slot * store.slot_bytes + at * (store.pitch if by_lines else store.itemsize)


def _join(workers: list[threading.Thread], halt: _Halt) -> None:
    """Wait for every thread, however often Ctrl-C is pressed: they use the caller's memory."""
    for worker in workers:
        while worker.ident is not None and worker.is_alive():
            try:
                worker.join()
            except KeyboardInterrupt as error:
                halt.stop(error)
