"""Executes schedules of GPUs: gather, copy in, launch, copy out, scatter, all at the same time.

Threads gather slices of the operands into pinned memory, from which they go to the device; the
calling thread launches what has arrived; other threads bring results back and scatter them. NumPy
copies outside the interpreter's lock, so they run side by side; what they do between two copies is
kept short, since it is done by one at a time. Whatever fails, in whichever thread, stops the others
at their next slice; all is given back before the error is raised.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from .._operand import Box
from .._shield import shielded
from ..kernels.steps import round_up
from .device_job import Job, Store
from .device_schedule import Launch, Load, Schedule
from .halt import Halt
from .slices import (
    End,
    InPlace,
    Sink,
    Slice,
    Source,
    is_copied_directly,
    lines_of,
    named,
    shifted,
    slices,
)

__all__ = ["Device", "Share", "Threads", "multiply"]

Array = NDArray[Any]
_Task = Callable[[], None]
_Way = Callable[[bool], _Task | None]

_ALIGNMENT = 256
_MIB = 1 << 20

#: What the slices of a device take of the host, unless a slice cannot be so small.
_MOST_BYTES = 256 * _MIB


class Device(Protocol):
    """What a pipeline asks of a GPU; `runtime.transfers.Gpu` has it."""

    def attached(self) -> AbstractContextManager[Any]: ...
    def allocate(self, nbytes: int, what: str, /) -> int: ...
    def event(self) -> Any: ...
    def record(self, event: Any, lane: Any, /) -> None: ...
    def wait(self, lane: Any, event: Any, /) -> None: ...
    def is_done(self, event: Any, /) -> bool: ...
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
    first_tile: int = 0  #: the number of its first tile, of all that C is made of
    done: Collection[int] = ()  #: tiles that are there already


@dataclass(frozen=True, slots=True)
class Threads:
    """How many threads a device's pipeline has, and how much each of them copies at a time.

    Slices below 8 MiB cost more in hand-offs of the interpreter's lock than they gain, and so do
    more threads than 12 (docs/facts.md).
    """

    gathering: int
    scattering: int
    slice_bytes: int
    staged: int = 0  #: slices that stores hold beside, at most

    @classmethod
    def suited(
        cls,
        moved_bytes: int,
        cores: int,
        most_bytes: int | None = None,
        least_slice: int = 4096,
        staged: int = 0,
    ) -> Threads:
        """Return what suits a device that moves so much, on so many cores, within host memory.

        Where ``least_slice``, which is not cut, is large, there are fewer threads.
        """
        most = 12 if moved_bytes >= 512 * _MIB else 8
        count = min(most, max(cores, 2), max(moved_bytes // (8 * _MIB), 2))
        is_large = moved_bytes >= 128 * _MIB
        half = count // 2
        made = cls(half, half, max(8 * _MIB if is_large else 4 * _MIB, least_slice), staged)
        limit = _MOST_BYTES if most_bytes is None else min(most_bytes, _MOST_BYTES)
        while made.held_bytes > limit:
            if made.gathering > 1 and made.slice_bytes <= max(_MIB, least_slice):
                made = replace(made, gathering=made.gathering // 2, scattering=made.scattering // 2)
            elif made.slice_bytes > least_slice:
                made = replace(made, slice_bytes=max(made.slice_bytes // 2, least_slice))
            else:
                break
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

    @property
    def held_bytes(self) -> int:
        """Bytes of the host, pinned or not."""
        return self.ring_bytes + self.staged * self.slice_bytes


def multiply(
    shares: Sequence[Share],
    a: Source | InPlace,
    b: Source | InPlace,
    out: Sink | InPlace,
    ring: NDArray[np.uint8],
    threads: Threads,
    watch: Callable[[], object] | None = None,
) -> None:
    """Write ``a @ b`` into ``out``, which no operand overlaps; blocks until done.

    What is in the device's memory, which only one share's can be, is complete.

    Parameters
    ----------
    shares : sequence of Share
        Together they cover C.
    a, b : Source of (..., m, k) and (..., k, n)
        Axes that repeat have length 1 here.
    out : Sink of (..., m, n)
    ring : array of bytes
        Pinned, ``threads.ring_bytes`` for each share.
    threads : Threads
        For each share.
    watch : callable, optional
        Called in this thread when tiles are finished; what it raises stops all.
    """
    halt = Halt()
    each = threads.ring_bytes

    def conduct() -> None:
        devices: list[Device] = []
        runs: list[_Run] = []
        try:
            for i, share in enumerate(shares):
                halt.check()
                devices.append(share.open())
                part = ring[i * each : (i + 1) * each]
                with devices[-1].attached():
                    runs.append(_Run(share, devices[-1], a, b, out, part, threads, halt))
            for run in runs:
                halt.start(partial(run.work, is_gathering=True), threads.gathering)
                halt.start(partial(run.work, is_gathering=False), threads.scattering)
            for run in runs[1:]:
                halt.start(run.launch)
            runs[0].launch()
        except BaseException as error:
            halt.stop(error)
        halt.join()
        for device in devices:
            try:
                device.close()
            except BaseException as error:
                halt.stop(error)
        if halt.error is not None:
            raise halt.error

    # The caller's thread waits: it alone is interrupted, and nobody could give back what it took.
    shielded(conduct, halt.stop, None if watch is None else partial(halt.watch, watch))


class _Host(NamedTuple):
    """An operand that is copied to a device, or a result that is copied back."""

    end: Any  #: a Source or a Sink
    region: Box  #: the part that the device has to do with
    dtype: np.dtype[Any]  #: in the machine's byte order
    is_pinned: bool  #: whether that part is

    def lines(self, part: Slice) -> tuple[int, int] | None:
        """Return where the lines of a slice are in pinned memory of the caller's, and their pitch.

        None if they pass the ring.
        """
        view = self.end.view(part.box) if self.is_pinned else None
        if view is None or not is_copied_directly(part.turned(view)):
            return None
        return lines_of(part.turned(view))


class _Block(NamedTuple):
    """A slice of pinned memory."""

    memory: NDArray[np.uint8]
    address: int
    event: Any  #: of the last copy that uses it


@dataclass(slots=True)
class _Tile:
    """A finished part of C on its way back."""

    number: int  #: of its launch
    launch: Launch
    out: _Host
    slices: deque[Slice]  #: whose copy is not on its lane yet
    missing: int  #: slices that are not where they belong yet
    is_ordered: bool = False  #: whether copies to come wait for the launch
    is_emptied: bool = False  #: whether its slot may be written, once the event has come


class _Coming(NamedTuple):
    """A slice of C that is copied out, or has been."""

    tile: _Tile
    part: Slice
    block: _Block


class _Run:
    """One device at work on its share.

    `launch` is one thread's; any number of threads `work`, at whatever there is to copy.
    """

    def __init__(
        self,
        share: Share,
        device: Device,
        a: Source | InPlace,
        b: Source | InPlace,
        out: Sink | InPlace,
        ring: NDArray[np.uint8],
        threads: Threads,
        halt: Halt,
    ) -> None:
        self._share, self._device, self._halt = share, device, halt
        self._may_launch, self._may_work = halt.condition(), halt.condition()
        self._schedule = schedule = share.schedule
        self._job = job = schedule.job
        self._sources = {
            side: self._end_of(x, _region(x, job, side, share.origin))
            for side, x in enumerate((a, b))
            if not isinstance(x, InPlace)
        }
        self._out = None if isinstance(out, InPlace) else self._end_of(out, share.origin)
        done = frozenset(tile - share.first_tile for tile in share.done)
        operations = list(schedule.operations(done))
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
        sizes = (
            self._a_store.nbytes,
            0 if job.is_gram else self._b_store.nbytes,
            schedule.c_slots * schedule.c_slot_bytes,
            schedule.workspace_bytes,
        )
        starts = itertools.accumulate((round_up(size, _ALIGNMENT) for size in sizes), initial=0)
        # One stretch for all: a driver takes memory for each in steps of 32 MiB.
        *places, nbytes = starts
        base = device.allocate(nbytes, f"{share.name}'s part of the product")
        self._workspace = base + places[-1]
        self._a, self._b, self._c = (
            x.pointer if isinstance(x, InPlace) else base + place
            for x, place in zip((a, b, out), places, strict=False)
        )
        if job.is_gram:
            self._b = self._a
        coming, going = threads.blocks
        size, start = threads.slice_bytes, ring.ctypes.data
        blocks = [
            _Block(ring[at : at + size], start + at, device.event())
            for at in range(0, (coming + going) * size, size)
        ]
        self._free_in, self._free_out = deque(blocks[:coming]), deque(blocks[coming:])
        self._loaded = [device.event() for _ in self._loads]
        self._launched = [device.event() for _ in self._launches]
        self._emptied = [device.event() for _ in range(schedule.c_slots)]
        self._slices_left = [0] * len(self._loads)  # not on their lane yet
        self._is_loaded = [False] * len(self._loads)
        self._is_ordered = [False] * len(self._loads)  # whether copies wait for the last reader
        self._to_gather = self._all_slices()
        self._next_slice = next(self._to_gather, None)
        self._loads_done = 0  # loads before this are on their lane
        self._launches_done = 0
        self._tiles: deque[_Tile] = deque()
        self._coming: deque[_Coming] = deque()
        self._in_slot: list[_Tile | None] = [None] * schedule.c_slots

    def launch(self) -> None:
        """Put every launch on its lane as soon as what it needs is on its own."""
        with self._device.attached():
            ordered = 0
            for number, launch in enumerate(self._launches):
                before = self._in_slot[launch.c_slot] if launch.is_first else None
                needed = self._needs[number]
                with self._halt:
                    while self._loads_done < needed or not (before is None or before.is_emptied):
                        self._halt.wait(self._may_launch)
                with self._noted("computed", "c", launch.c):
                    for event in self._loaded[ordered:needed]:
                        self._device.wait("compute", event)
                    ordered = max(ordered, needed)
                    self._launch(number, launch, before)

    def work(self, *, is_gathering: bool) -> None:
        """Copy what there is to copy, operands or results first, until all is done."""
        ways: list[_Way] = [self._next_in, self._next_out]
        if not is_gathering:
            ways.reverse()
        with self._device.attached():
            while (task := self._next(ways)) is not None:
                task()

    def _launch(self, number: int, launch: Launch, before: _Tile | None) -> None:
        device, schedule = self._device, self._schedule
        c = self._c + schedule.c_layout(launch).offset
        if before is not None:
            device.wait("compute", self._emptied[launch.c_slot])
        if launch.is_first and schedule.pieces > 1:  # every piece is added to what is there
            device.zero(self._c + launch.c_slot * schedule.c_slot_bytes, schedule.c_slot_bytes)
        a = self._a + schedule.layout(launch, 0).offset
        b = self._b + schedule.layout(launch, 1).offset
        self._share.compute(device, launch, (a, b, c, self._workspace))
        device.record(self._launched[number], "compute")
        tile = None
        if launch.is_last and self._out is not None:
            parts = deque(self._slices_from(launch, self._out))
            tile = _Tile(number, launch, self._out, parts, len(parts))
        with self._halt:
            self._launches_done = number + 1
            if tile is not None:
                self._tiles.append(tile)
                if not schedule.holds_c:
                    self._in_slot[launch.c_slot] = tile
                self._copy_out()
            if self._launches_done == len(self._launches):
                self._may_work.notify_all()
            else:
                self._may_work.notify()

    def _next(self, ways: list[_Way]) -> _Task | None:
        """Return what a thread is to do now, when there is something; None when all is given out.

        What need not be waited for comes first. A thread that is woken wakes another if there is
        more: each sleeps until it is needed.
        """
        with self._halt:
            while True:
                for may_wait in (False, True):
                    for way in ways:
                        if (task := way(may_wait)) is not None:
                            if self._may_gather() or self._coming:
                                self._may_work.notify()
                            return task
                if self._is_all_given():
                    self._may_work.notify()
                    return None
                self._halt.wait(self._may_work)

    def _is_all_given(self) -> bool:
        is_out = not self._tiles and not self._coming
        return is_out and self._launches_done == len(self._launches)

    def _may_gather(self) -> bool:
        """Say whether there is a slice to gather, and pinned memory and a slot to take it."""
        if self._next_slice is None or not self._free_in:
            return False
        return self._loads[self._next_slice[0]].after < self._launches_done

    def _next_in(self, may_wait: bool) -> _Task | None:
        if not self._may_gather() or self._next_slice is None:
            return None
        block = self._free_block(may_wait)
        if block is None:
            return None
        number, part = self._next_slice
        self._next_slice = next(self._to_gather, None)
        return partial(self._gather, number, part, block)

    def _free_block(self, may_wait: bool) -> _Block | None:
        """Take the block that was copied from last, which is in the cache, or is free first."""
        if may_wait:
            return self._free_in.popleft()
        for at in range(len(self._free_in) - 1, -1, -1):
            block = self._free_in[at]
            if self._device.is_done(block.event):
                del self._free_in[at]
                return block
        return None

    def _next_out(self, may_wait: bool) -> _Task | None:
        if not self._coming:
            return None
        if not may_wait and not self._device.is_done(self._coming[0].block.event):
            return None
        return partial(self._scatter, self._coming.popleft())

    def _gather(self, number: int, part: Slice, block: _Block) -> None:
        """Bring a slice of an operand to the device."""
        device, load = self._device, self._loads[number]
        source = self._sources[load.side]
        with self._noted("was given", "ab"[load.side], part.box):
            device.finish(block.event)
            lines = source.lines(part)
            if lines is None:
                source.end.read_into(part.box, part.packed(block.memory, source.dtype))
            if load.after >= 0 and not self._is_ordered[number]:
                device.wait("in", self._launched[load.after])
                self._is_ordered[number] = True
            address, pitch = lines or (block.address, part.width_bytes)
            for place, host in part.copies(address, pitch):
                device.copy_in(place, part.pitch, host, pitch, part.width_bytes, part.lines)
            device.record(block.event, "in")
        with self._halt:
            self._free_in.append(block)
            self._slices_left[number] -= 1
            if self._slices_left[number] > 0:
                return
            device.record(self._loaded[number], "in")
            self._is_loaded[number] = True
            while self._loads_done < len(self._loads) and self._is_loaded[self._loads_done]:
                self._loads_done += 1
            self._may_launch.notify()

    def _copy_out(self) -> None:
        """Put copies of what is finished on their lane, as far as there is pinned memory for it.

        Holding the lock, since slices are waited for in the order of the lane.
        """
        device = self._device
        while self._tiles and self._free_out:
            tile = self._tiles[0]
            part, block = tile.slices.popleft(), self._free_out.pop()  # the one last read
            with self._noted("gave back", "c", part.box):
                lines = tile.out.lines(part)
                address, pitch = lines or (block.address, part.width_bytes)
                if not tile.is_ordered:
                    device.wait("out", self._launched[tile.number])
                    tile.is_ordered = True
                for place, host in part.copies(address, pitch):
                    device.copy_out(host, pitch, place, part.pitch, part.width_bytes, part.lines)
                device.record(block.event, "out")
                self._coming.append(_Coming(tile, part, block))
                if not tile.slices:
                    self._tiles.popleft()
                    device.record(self._emptied[tile.launch.c_slot], "out")
                    tile.is_emptied = True
                    self._may_launch.notify()

    def _scatter(self, coming: _Coming) -> None:
        """Bring a slice of C, once it is in pinned memory, to where it belongs."""
        tile, part, block = coming
        with self._noted("gave back", "c", part.box):
            self._device.finish(block.event)
            if tile.out.lines(part) is None:
                tile.out.end.write(part.box, part.packed(block.memory, tile.out.dtype))
        with self._halt:
            self._free_out.append(block)
            self._copy_out()
            tile.missing -= 1
            is_finished = not tile.missing
        if is_finished:
            with self._noted("finished", "c", shifted(tile.launch.c, self._share.origin)):
                tile.out.end.finish(self._share.first_tile + tile.launch.tile)
            self._halt.tell()

    def _noted(self, doing: str, name: str, box: Box) -> _Noted:
        return _Noted((self._share.name, doing, name, box))

    def _all_slices(self) -> Iterator[tuple[int, Slice]]:
        """Yield the slices of all loads in order, each with the number of its load."""
        for number, load in enumerate(self._loads):
            parts = list(self._slices_of(load))
            self._slices_left[number] = len(parts)
            for part in parts:
                yield number, part

    def _slices_of(self, load: Load) -> Iterator[Slice]:
        x = self._job.b if load.side else self._job.a
        store = self._b_store if load.side else self._a_store
        base = self._b if load.side else self._a
        source = self._sources[load.side]
        box = shifted(load.box, source.region)
        is_turned = x.along_k == (load.side == 1)  # the axis that lies closer becomes the last
        base = _place(base, store, load.slot, load.at, x.along_k)
        yield from slices(source.end, box, is_turned, base, store, self._slice_bytes)

    def _slices_from(self, launch: Launch, out: _Host) -> Iterator[Slice]:
        store = self._schedule.c_store(launch)
        base = self._c + self._schedule.c_layout(launch).offset
        box = shifted(launch.c, self._share.origin)
        is_turned = not self._job.along_n
        yield from slices(out.end, box, is_turned, base, store, self._slice_bytes)

    def _end_of(self, end: End, region: Box) -> _Host:
        view = end.view(region)
        is_pinned = view is not None and self._share.is_pinned(view)
        return _Host(end, region, end.dtype.newbyteorder("="), is_pinned)


class _Noted:
    """Lets an error say where it was met. (A generator would cost several times as much.)"""

    __slots__ = ("_where",)

    def __init__(self, where: tuple[str, str, str, Box]) -> None:
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            device, doing, name, box = self._where
            error.add_note(f"while {device} {doing} {named(name, box)}")


def _region(x: Source, job: Job, side: int, origin: Box) -> Box:
    """Return what a share needs of an operand, whose axes that repeat have length 1."""
    factor = job.b if side else job.a
    axis = -1 if side else -2
    own = tuple(
        slice(0, 1) if size == 1 else part
        for size, part in zip(
            x.shape[:-2], origin[len(origin) - len(x.shape) : len(origin) - 2], strict=True
        )
    )
    part = slice(0, 1) if factor.repeats_size else origin[axis]
    depth = slice(0, x.shape[-2 if side else -1])
    return (*own, depth, part) if side else (*own, part, depth)


def _loads_before(operations: list[Load | Launch]) -> Iterator[int]:
    return itertools.accumulate(isinstance(each, Load) for each in operations)


def _place(base: int, store: Store, slot: int, at: int, by_lines: bool) -> int:
    return base + slot * store.slot_bytes + at * (store.pitch if by_lines else store.itemsize)
