"""Races and other hazards, found by CUDA's rules and not by the order of execution.

Two accesses of one byte by different threads, at least one of them a plain write, are a race
unless a barrier lies between them: a block barrier for threads of a block, ``syncwarp`` for
lanes of a warp, nothing for threads of different blocks. Atomics race with plain accesses only.
Since block barriers cut an execution into intervals whose accesses commute, one execution
without a race means that no schedule of that launch has one.

Here is the watching; :mod:`tilewise.explain` says what to do about what is seen. Blocks that
stand for others (:class:`BlockClass`) have their findings multiplied and their global addresses
moved, so that races between blocks that were never run are found too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tilewise.simt.events import Access, ArrayInfo, Barrier, Fault, Launch, Site
from tilewise.simt.shadow import (
    BlockClass,
    GlobalLog,
    Lanes,
    Mode,
    Region,
    SharedShadow,
    lowest_address,
    regions,
)

__all__ = [
    "Actor",
    "BlockClass",
    "Coverage",
    "Found",
    "Hazard",
    "HazardKind",
    "HazardWatch",
    "element_at",
    "elements_at",
    "unravel",
]

HazardKind = Literal[
    "read-after-write",
    "write-after-read",
    "write-after-write",
    "uninitialised read",
    "out of range",
    "barrier divergence",
    "exit before barrier",
    "division by zero",
    "unassigned variable",
]

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Dim = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Actor:
    """One thread at one place in the source; block and thread are (x, y, z)."""

    block: Dim
    thread: Dim
    site: Site


@dataclass(slots=True)
class Hazard:
    """Something that CUDA forbids or leaves undefined, with the first case of it found.

    Attributes
    ----------
    element : tuple of int, optional
        Index of the element (out of range: the index that was asked for).
    first, second : Actor
        The two threads of a race, in the order of execution here; on a GPU either may come
        first. Other hazards have one actor.
    interval : int, optional
        The barriers that the block had passed; None where the two are of different blocks.
    accesses, blocks : int
        All cases of the same kind between the same two places: the accesses that conflict
        (between blocks: the elements), and the blocks where they do. Divisions by zero are those
        of the blocks that were traced.
    same_value : bool
        Every one of these writes stores what the other does: undefined, but harmless.
    in_buffer : int
        Out of range: how many hit another element of the same array, and so go unnoticed.
    """

    kind: HazardKind
    array: ArrayInfo | None
    element: tuple[int, ...] | None
    first: Actor
    second: Actor | None = None
    interval: int | None = None
    accesses: int = 0
    blocks: int = 0
    same_value: bool = False
    in_buffer: int = 0

    @property
    def between_blocks(self) -> bool:
        return self.second is not None and self.first.block != self.second.block


@dataclass(frozen=True, slots=True)
class Coverage:
    """How many elements of a written array no thread writes, one thread, and more than one."""

    array: ArrayInfo
    never: int
    once: int
    many: int
    first_never: tuple[int, ...] | None
    first_many: tuple[int, ...] | None


class Found(Exception):
    """Raised through the launch by a watch that is to stop at the first hazard."""

    def __init__(self, hazard: Hazard) -> None:
        super().__init__(hazard.kind)
        self.hazard = hazard


class HazardWatch:
    """An observer that collects hazards, and which elements of global memory are written.

    Parameters
    ----------
    classes : sequence of BlockClass, optional
        What each traced block stands for; a block in none stands for itself.
    stop_early : bool
        Raise :class:`Found` at the first race on shared memory or read of unwritten shared
        memory, for a caller who only asks whether there is one.
    warp_sync : bool
        Whether the kernel calls ``syncwarp``; False saves time where it does not.
    """

    def __init__(
        self,
        classes: Sequence[BlockClass] = (),
        *,
        stop_early: bool = False,
        warp_sync: bool = True,
    ) -> None:
        self._classes = tuple(classes)
        self._warp_sync = warp_sync
        self._crowds = {c.representative: c for c in classes}
        self._weight = {c.representative: len(c.members) for c in classes}
        self._stop_early = stop_early
        self._found: dict[tuple[object, ...], Hazard] = {}
        self._seen_in: dict[tuple[object, ...], set[int]] = {}
        self._shadows: dict[int, SharedShadow] = {}
        self._logs: dict[int, GlobalLog] = {}
        self._slot_of: dict[int, int] = {}
        self._array_at: dict[tuple[int, int], ArrayInfo] = {}

    def on_launch(self, launch: Launch) -> None:
        self._launch = launch
        self._sites = {site.id: site for site in launch.sites}
        stores = [s for s in launch.sites if s.kind in ("store", "atomic")]
        # In a device function the name of an array is that of a parameter: it may be any.
        anywhere = any(s.array is None or s.function != launch.kernel for s in stores)
        self._named = {s.array for s in stores if s.function == launch.kernel}
        self._written = {a.name for a in launch.arrays} if anywhere else self._named
        self._regions: dict[tuple[str, int], tuple[int, Region]] = {}
        for space in ("shared", "global"):
            for region in regions([a for a in launch.arrays if a.space == space]):
                number = len(self._shadows) + len(self._logs)
                if space == "shared":
                    self._shadows[number] = SharedShadow(region, warp_sync=self._warp_sync)
                elif any(a.name in self._written for a in region.arrays):
                    self._logs[number] = GlobalLog(region, warp_sync=self._warp_sync)
                else:
                    continue
                self._regions |= {_place(a): (number, region) for a in region.arrays}

    def on_access(self, access: Access) -> None:
        number, region = self._regions.get(_place(access.array), (-1, None))
        if region is None or not access.active.any():
            return
        lanes = Lanes.of(access, self._slots(access.blocks), region)
        mode: Mode = "read" if access.op == "load" else "atomic"
        if access.op == "store":
            mode = "write"
        self._array_at[number, access.site.id] = access.array
        if number in self._logs:
            self._logs[number].append(access.site.id, mode, lanes)
            return
        shadow = self._shadows[number]
        if mode != "write" and (fresh := shadow.unwritten(lanes)).any():
            rows = np.flatnonzero(fresh)
            reader = self._actor(int(lanes.block[rows[0]]), int(lanes.thread[rows[0]]), access.site)
            element = self._element(region, access.array, int(lanes.granule[rows[0]]))
            self._note(
                ("uninitialised read", access.site.id),
                Hazard(
                    "uninitialised read",
                    access.array,
                    element,
                    reader,
                    None,
                    int(lanes.interval[rows[0]]),
                ),
                lanes.block[rows],
            )
        for conflict in shadow.touch(access.site.id, mode, lanes):
            row = conflict.rows[0]
            block = int(lanes.block[row])
            earlier = self._actor(block, int(conflict.thread[0]), self._sites[conflict.other])
            later = self._actor(block, int(lanes.thread[row]), access.site)
            kind = _race_kind(shadow.mode(conflict.other), mode)
            self._note(
                (kind, conflict.other, access.site.id),
                Hazard(
                    kind,
                    access.array,
                    self._element(region, access.array, int(lanes.granule[row])),
                    earlier,
                    later,
                    int(lanes.interval[row]),
                    same_value=conflict.same_value,
                ),
                lanes.block[conflict.rows],
            )

    def on_barrier(self, barrier: Barrier) -> None:
        here = np.asarray(barrier.arrived.any(axis=1))
        gone = ~barrier.live & here[:, None]
        rows, threads = np.nonzero(gone)
        key = ("exit before barrier", barrier.site.id)
        # A thread is gone at every later barrier as well: count it at the first.
        before = self._seen_in.get(key, set())
        fresh = ~np.isin(barrier.blocks[rows], list(before))
        if fresh.any():
            block, thread = int(barrier.blocks[rows[fresh][0]]), int(threads[fresh][0])
            first = self._actor(block, thread, barrier.site)
            self._note(
                key,
                Hazard("exit before barrier", None, None, first),
                barrier.blocks[rows[fresh]],
            )

    def on_fault(self, fault: Fault) -> bool:
        rows, threads = np.nonzero(fault.active)
        if len(rows):
            blocks = fault.blocks[rows]
            indices = [axis[rows, threads] for axis in fault.indices]
            element = tuple(int(axis[0]) for axis in indices) or None
            culprit = self._actor(int(blocks[0]), int(threads[0]), fault.site)
            where: object = fault.site.id
            if fault.reason == "unassigned variable":  # x * x is one thing to mend
                where = (fault.site.filename, fault.site.line, fault.site.text)
            hazard = self._note(
                (fault.reason, where),
                Hazard(fault.reason, fault.array, element, culprit),
                blocks,
            )
            if fault.reason == "out of range" and fault.array is not None:
                hazard.in_buffer += self._unnoticed(fault.site, fault.array, indices, blocks)
        return True

    def hazards(self) -> list[Hazard]:
        """Return everything found, races between blocks included; call it after the launch."""
        found = dict(self._found)
        for number, log in self._logs.items():
            between = ((m, True) for m in log.between_blocks(self._classes))
            within = ((m, False) for m in log.within_blocks())
            for meeting, apart in (*within, *between):
                a, b = meeting.actors
                kind = _race_kind(log.mode(a), log.mode(b))
                array = self._array_at[number, a]
                actors = [
                    self._actor(block, thread, self._sites[site])
                    for block, thread, site in zip(
                        meeting.blocks, meeting.threads, meeting.actors, strict=True
                    )
                ]
                blocks = 0 if apart else self._weigh(np.unique(meeting.cases))
                found[kind, a, b, apart] = Hazard(
                    kind,
                    array,
                    self._element(self._regions[_place(array)][1], array, meeting.granule),
                    actors[0],
                    actors[1],
                    meeting.interval,
                    len(meeting.cases) if apart else self._weigh(meeting.cases),
                    blocks,
                    meeting.same_value,
                )
        return list(found.values())

    def coverage(self) -> list[Coverage]:
        """Return, for each global array that some site writes, how often its elements are."""
        stored = {
            array.name
            for (number, site), array in self._array_at.items()
            if number in self._logs and self._sites[site].kind != "load"
        }
        covered = []
        for number, region in dict(self._regions.values()).items():
            if number not in self._logs:
                continue
            writers = self._logs[number].writers(self._classes)
            for array in region.arrays:
                if array.name not in stored | self._named or not all(array.shape):
                    continue
                count = writers[region.granules(array)]
                never, many = count == 0, count > 1
                covered.append(
                    Coverage(
                        array,
                        int(never.sum()),
                        int((count == 1).sum()),
                        int(many.sum()),
                        _first_index(never),
                        _first_index(many),
                    )
                )
        return covered

    def _slots(self, blocks: Ints) -> Ints:
        """Number the blocks of an event among those that run together."""
        ids = blocks.tolist()
        if not any(block in self._slot_of for block in ids):
            self._slot_of = {block: slot for slot, block in enumerate(ids)}
            for shadow in self._shadows.values():
                shadow.reset(len(ids))
        return np.array([self._slot_of[block] for block in ids])

    def _note(self, key: tuple[object, ...], hazard: Hazard, blocks: Ints) -> Hazard:
        """Count cases of a hazard, one a block of ``blocks``; the first of them is kept."""
        shared = hazard.array is not None and hazard.array.space == "shared"
        ordering = hazard.second is not None or (hazard.kind == "uninitialised read" and shared)
        if self._stop_early and ordering and not hazard.same_value:
            raise Found(hazard)
        kept = self._found.setdefault(key, hazard)
        kept.same_value &= hazard.same_value
        seen = self._seen_in.setdefault(key, set())
        fresh = set(blocks.tolist()) - seen
        if hazard.kind == "division by zero":  # of values, in which a block stands for itself alone
            kept.accesses += len(blocks)
            kept.blocks += len(fresh)
        else:
            kept.accesses += self._weigh(blocks)
            kept.blocks += sum(self._weight.get(block, 1) for block in fresh)
        seen |= fresh
        return kept

    def _unnoticed(
        self, site: Site, array: ArrayInfo, indices: Sequence[Ints], blocks: Ints
    ) -> int:
        """How many of these indices, out of range, are still within the bytes an array spans."""
        offset = np.full(len(blocks), array.base - lowest_address(array))
        for index, stride in zip(indices, array.strides, strict=True):
            offset += index * stride
        last = array.nbytes - array.dtype.itemsize
        total = 0
        for block in np.unique(blocks).tolist():
            crowd = self._crowds.get(block)
            shift = np.zeros(1, np.int64) if crowd is None else crowd.shift(site.id)
            here = np.sort(offset[blocks == block])
            beyond = np.searchsorted(here, last - shift, "right")
            total += int((beyond - np.searchsorted(here, -shift, "left")).clip(0).sum())
        return total

    def _weigh(self, blocks: Ints) -> int:
        """How many blocks, traced or stood for, these are."""
        each, times = np.unique(blocks, return_counts=True)
        weights = [self._weight.get(block, 1) for block in each.tolist()]
        return int(np.dot(times, np.array(weights, np.int64)))

    def _actor(self, block: int, thread: int, site: Site) -> Actor:
        return Actor(unravel(block, self._launch.grid), unravel(thread, self._launch.block), site)

    @staticmethod
    def _element(region: Region, array: ArrayInfo, granule: int) -> tuple[int, ...]:
        return element_at(array, region.low + granule * region.granule - array.base)


def _place(array: ArrayInfo) -> tuple[str, int]:
    """Where an array lies; two functions may each have a shared array of one name."""
    return array.space, array.base


def unravel(index: int, extent: Dim) -> Dim:
    """Return (x, y, z) of a linear block or thread id."""
    x, y, _ = extent
    return index % x, index // x % y, index // (x * y)


def element_at(array: ArrayInfo, offset: int) -> tuple[int, ...]:
    """Return the index of the element that holds the byte at ``offset`` from element 0."""
    return tuple(int(axis[0]) for axis in elements_at(array, np.array([offset])))


def elements_at(array: ArrayInfo, offsets: Ints) -> tuple[Ints, ...]:
    """Return the indices, one array an axis, of the elements that hold bytes at some offsets."""
    rest = offsets - (lowest_address(array) - array.base)
    index = [np.zeros(len(offsets), np.int64)] * len(array.shape)
    for axis in sorted(range(len(index)), key=lambda i: -abs(array.strides[i])):
        length, stride = array.shape[axis], array.strides[axis]
        if stride and length > 1:
            steps, rest = np.divmod(rest, abs(stride))
            index[axis] = length - 1 - steps if stride < 0 else steps
    return tuple(index)


def _race_kind(earlier: Mode, later: Mode) -> HazardKind:
    if earlier == "read":
        return "write-after-read"
    return "read-after-write" if later == "read" else "write-after-write"


def _first_index(mask: Bools) -> tuple[int, ...] | None:
    if not mask.any():
        return None
    return tuple(int(axis) for axis in np.unravel_index(int(mask.argmax()), mask.shape))
