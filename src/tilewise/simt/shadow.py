"""Who touched which bytes: the bookkeeping behind :mod:`tilewise.simt.hazards`.

Shared memory is small, so each access leaves a mark on a dense shadow and meets those of the
others at once (:class:`SharedShadow`). Global memory is large and most of it only read, so the
accesses to regions that are written are noted down and compared in the end (:class:`GlobalLog`).
Both count in granules, the largest unit that no access splits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tilewise.simt.events import Access, ArrayInfo

__all__ = [
    "BlockClass",
    "Conflict",
    "GlobalLog",
    "Lanes",
    "Meeting",
    "Mode",
    "Region",
    "SharedShadow",
    "can_race",
    "lowest_address",
    "regions",
]

Mode = Literal["read", "write", "atomic"]

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_LARGE = np.int64(2**62)

# Bits that count the syncwarps of some lanes within a stretch of those of all, and bits that count
# both; what a block can pass before a kernel is taken to be endless fits, and block barriers above.
_SOME_LANES, _STRETCHES = 21, 42

# Rows of a log that are gathered before repeats are dropped, and spread over blocks at a time.
_COMPACT_ROWS = 1 << 21


@dataclass(frozen=True, slots=True)
class BlockClass:
    """Blocks that do the same, but for a constant shift of each site's global addresses.

    ``members`` are linear block ids in ascending order, the representative among them;
    ``shifts`` gives for a site's id the bytes by which each member's addresses lie beyond the
    representative's. A site that is left out is not shifted.
    """

    representative: int
    members: Ints
    shifts: Mapping[int, Ints] = field(default_factory=dict)

    def shift(self, site: int) -> Ints:
        """The shift of each member's addresses at a site, in bytes."""
        return self.shifts.get(site, np.zeros(len(self.members), np.int64))


@dataclass(eq=False, slots=True)
class Region:
    """Arrays that overlap in memory, directly or through others, and so must be watched as one."""

    space: str
    arrays: tuple[ArrayInfo, ...]
    low: int = field(init=False)
    granule: int = field(init=False)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        lows = [lowest_address(a) for a in self.arrays]
        self.low = min(lows)
        end = max(low + a.nbytes for low, a in zip(lows, self.arrays, strict=True))
        units = [a.dtype.itemsize for a in self.arrays]
        units += [step for a in self.arrays for step in a.strides]
        self.granule = math.gcd(*units, *(a.base - self.low for a in self.arrays))
        self.size = -(-(end - self.low) // self.granule)

    def granules(self, array: ArrayInfo) -> Ints:
        """The granule at which each element of the array begins, in the array's shape."""
        start = np.full(array.shape, array.base - self.low, np.int64)
        for axis, (length, stride) in enumerate(zip(array.shape, array.strides, strict=True)):
            along = np.arange(length) * stride
            start += along.reshape([-1 if i == axis else 1 for i in range(len(array.shape))])
        return start // self.granule


class Lanes(NamedTuple):
    """The active lanes of one access, a row a granule touched; ascending by block and thread."""

    slot: Ints
    block: Ints
    thread: Ints
    granule: Ints
    interval: Ints
    stretch: Ints
    """What the lane has passed of ``syncwarp``: all lanes' in the upper bits, and some lanes'."""
    value: Ints | None
    """The bits stored; None for a read."""
    named: Ints | None
    """The lanes that each thread's last ``syncwarp`` of some lanes named, a row each lane here."""

    @classmethod
    def of(cls, access: Access, slots: Ints, region: Region) -> Lanes:
        """Flatten an access; ``slots`` numbers its blocks."""
        threads = access.active.shape[1]
        where = np.flatnonzero(access.active)
        row, thread = np.divmod(where, threads)
        start = access.offset.ravel()[where] + (access.array.base - region.low)
        granule = start // region.granule
        value = None if access.op == "load" else _bits(access.value, where)
        stretch = access.warp_interval[row, thread // 32] << _SOME_LANES
        named = None
        if access.some_lanes is not None:
            stretch |= access.some_lanes[0][row, thread]
            named = access.some_lanes[1][row]
        parts = access.array.dtype.itemsize // region.granule
        if parts > 1:
            granule = (granule[:, None] + np.arange(parts)).ravel()
            row, thread = np.repeat(row, parts), np.repeat(thread, parts)
            value = None if value is None else np.repeat(value, parts)
            stretch = np.repeat(stretch, parts)
            named = None if named is None else np.repeat(named, parts, axis=0)
        return cls(
            slots[row],
            access.blocks[row],
            thread,
            granule,
            access.interval[row],
            stretch,
            value,
            named,
        )


class Conflict(NamedTuple):
    """Lanes that race with what another actor did: rows of a :class:`Lanes`, one a conflict."""

    other: int
    rows: Ints
    thread: Ints
    """The other's thread, for each of the rows."""
    same_value: bool


class SharedShadow:
    """The marks on a region of shared memory, for every block that runs together."""

    def __init__(self, region: Region, *, warp_sync: bool) -> None:
        self._size = region.size
        self._warp_sync = warp_sync
        self._cells = 0
        self._marks: dict[int, tuple[Mode, _Marks]] = {}
        self._written = np.zeros(0, bool)

    def reset(self, slots: int) -> None:
        """Forget all: other blocks run from here on, numbered from 0."""
        self._cells = slots * self._size
        self._marks.clear()
        self._written = np.zeros(self._cells, bool)

    def unwritten(self, lanes: Lanes) -> Bools:
        """Which lanes touch a granule that nothing was stored to."""
        fresh: Bools = ~self._written[lanes.slot * self._size + lanes.granule]
        return fresh

    def mode(self, actor: int) -> Mode:
        """What an actor that has been here does."""
        return self._marks[actor][0]

    def touch(self, actor: int, mode: Mode, lanes: Lanes) -> list[Conflict]:
        """Mark an access, and return the races it has with those before it and in itself."""
        cell = lanes.slot * self._size + lanes.granule
        found = [
            # Only of two writes does it say anything that they store the same.
            conflict._replace(same_value=conflict.same_value and mode == theirs == "write")
            for other, (theirs, marks) in self._marks.items()
            if other != actor and can_race(mode, theirs)
            for conflict in marks.meet(other, cell, lanes)
        ]
        if actor not in self._marks:
            self._marks[actor] = (mode, _Marks(self._cells, self._warp_sync))
        marks = self._marks[actor][1]
        marks.add(cell, lanes)
        if mode == "write":
            found += marks.meet(actor, cell, lanes)
        if mode != "read":
            self._written[cell] = True
        return found


class _Marks:
    """Who, at one place in the source, touched each cell in the current barrier interval.

    The lowest and the highest thread are kept: two distinct ones, where there are two, so that a
    third always finds one that is not itself. A second layer, of the stretch between two
    ``syncwarp``, decides among lanes of one warp, for cells that one warp has to itself; a third
    among lanes that have last waited for different ones, since all of the warp have for each other.
    """

    def __init__(self, cells: int, warp_sync: bool) -> None:
        self.stamp = np.zeros(cells, np.int64)
        self.low = np.zeros(cells, np.int32)
        self.high = np.zeros(cells, np.int32)
        self.value = np.zeros(cells, np.int64)
        self.mixed = np.zeros(cells, bool)
        self.within_warp = _Marks(cells, False) if warp_sync else None
        self.between_lanes = _Marks(cells, False) if warp_sync else None

    def add(self, cell: Ints, lanes: Lanes) -> None:
        now = lanes.interval + 1
        self._mark(cell, now, lanes)
        if self.within_warp is not None and self.between_lanes is not None:
            self.within_warp._mark(cell, now << _STRETCHES | lanes.stretch, lanes)
            self.between_lanes._mark(cell, now << _STRETCHES | lanes.stretch >> _SOME_LANES, lanes)

    def _mark(self, cell: Ints, now: Ints, lanes: Lanes) -> None:
        live = self.stamp[cell] == now
        low = np.where(live, np.minimum(self.low[cell], lanes.thread), lanes.thread)
        high = np.where(live, np.maximum(self.high[cell], lanes.thread), lanes.thread)
        self.stamp[cell] = now
        # A repeated index keeps what is assigned last, and threads come in ascending order.
        self.high[cell] = high
        self.low[cell[::-1]] = low[::-1]
        if lanes.value is None:
            return
        differs = live & (self.mixed[cell] | (self.value[cell] != lanes.value))
        self.value[cell] = lanes.value
        self.mixed[cell] = False
        self.mixed[cell[differs | (self.value[cell] != lanes.value)]] = True

    def meet(self, actor: int, cell: Ints, lanes: Lanes) -> Iterator[Conflict]:
        """Yield the lanes that find another thread's mark in their own interval."""
        now, thread = lanes.interval + 1, lanes.thread
        live = self.stamp[cell] == now
        if not live.any():
            return
        low, high = self.low[cell], self.high[cell]
        if self.within_warp is None:
            hit = live & ((low != thread) | (high != thread))
            other = np.where(low != thread, low, high)
        else:
            low_far = low // 32 != thread // 32
            hit = live & (low_far | (high // 32 != thread // 32))
            other = np.where(low_far, low, high)
            layer = self.within_warp
            near = layer.stamp[cell] == now << _STRETCHES | lanes.stretch
            low, high = layer.low[cell], layer.high[cell]
            near &= ~hit & ((low != thread) | (high != thread))
            other = np.where(near, np.where(low != thread, low, high), other)
            hit |= near
            if lanes.named is not None and self.between_lanes is not None:
                layer, rows = self.between_lanes, np.arange(len(cell))
                near = layer.stamp[cell] == now << _STRETCHES | lanes.stretch >> _SOME_LANES
                low, high = layer.low[cell], layer.high[cell]
                mine = lanes.named[rows, thread]
                low_apart = lanes.named[rows, low] != mine
                near &= ~hit & (low_apart | (lanes.named[rows, high] != mine))
                other = np.where(near, np.where(low_apart, low, high), other)
                hit |= near
        rows = np.flatnonzero(hit)
        if len(rows):
            at, same = cell[rows], False
            if lanes.value is not None:
                same = not (self.mixed[at] | (self.value[at] != lanes.value[rows])).any()
            yield Conflict(actor, rows, other[rows], same)


class Meeting(NamedTuple):
    """Two places in the source that race on global memory."""

    actors: tuple[int, int]
    blocks: tuple[int, int]
    threads: tuple[int, int]
    granule: int
    interval: int | None
    """None between blocks."""
    cases: Ints
    """The block of every case within blocks, the granule of every case between them."""
    same_value: bool


class GlobalLog:
    """The accesses to a region of global memory that is written."""

    def __init__(self, region: Region, *, warp_sync: bool) -> None:
        self._region = region
        self._warp_sync = warp_sync
        self._modes: dict[int, Mode] = {}
        self._pending: list[_Rows] = []
        self._gathered = 0

    def append(self, actor: int, mode: Mode, lanes: Lanes) -> None:
        """Note an access."""
        self._modes[actor] = mode
        count = len(lanes.block)
        nothing = np.zeros(count, np.int64)
        self._pending.append(
            _Rows(
                lanes.block,
                lanes.interval,
                # Syncwarps of some lanes are not taken to order anything here.
                lanes.stretch >> _SOME_LANES if self._warp_sync else nothing,
                lanes.granule,
                lanes.thread,
                np.full(count, actor),
                nothing if lanes.value is None else lanes.value,
                np.zeros(count, bool),
            )
        )
        self._gathered += count
        if self._gathered > _COMPACT_ROWS:
            self._gathered = len(self._rows().block) // 2

    def mode(self, actor: int) -> Mode:
        """What an actor that has been here does."""
        return self._modes[actor]

    def within_blocks(self) -> Iterator[Meeting]:
        """Yield the races between threads of one block."""
        rows = self._rows()
        cell = _ids(rows.block, rows.interval, rows.granule)
        # A syncwarp orders threads of one warp only, so those of two warps are looked at first.
        stretch = _ids(cell, rows.thread // 32, rows.warp_interval)
        layers = [(cell, 32), (stretch, 1)] if self._warp_sync else [(cell, 1)]
        found: dict[tuple[int, int], list[tuple[_Race, Ints, bool]]] = {}
        for group, crowd in layers:
            low, high = _bounds(group, rows.thread // crowd)
            contested = (low != high)[group]
            if not contested.any():
                continue
            some, where = rows.take(contested), group[contested]
            marks = {}
            for actor in self._modes:  # in the order of their first execution
                of = some.actor == actor
                marks[actor] = _bounds(where[of], some.thread[of], len(low))
            unlike = _unlike(where, some, self._modes, len(low))
            row_of = np.zeros(len(low), np.int64)
            row_of[group] = np.arange(len(group))
            for race in _races(marks, self._modes, crowd):
                same = race.writes_only and not unlike[race.where].any()
                found.setdefault(race.actors, []).append((race, row_of[race.where], same))
        for actors, races in found.items():
            at = races[0][1][0]
            block = int(rows.block[at])
            met = np.concatenate([where for _, where, _ in races])
            met = met[np.unique(cell[met], return_index=True)[1]]
            yield Meeting(
                actors,
                (block, block),
                races[0][0].agents,
                int(rows.granule[at]),
                int(rows.interval[at]),
                rows.block[met],
                all(same for *_, same in races),
            )

    def between_blocks(self, classes: Sequence[BlockClass]) -> Iterator[Meeting]:
        """Yield the races between different blocks, whatever was traced of them."""
        rows = self._rows()
        marks = {}
        for actor in self._modes:
            low = np.full(self._region.size, _LARGE)
            high = np.full(self._region.size, -1)
            for granule, block, _ in self._spread(rows, classes, (actor,)):
                # A repeated index keeps what is assigned last, and blocks come in ascending order.
                high[granule] = np.maximum(high[granule], block)
                low[granule[::-1]] = np.minimum(low[granule], block)[::-1]
            marks[actor] = (low, high)
        all_traced = all(len(c.members) == 1 for c in classes)
        unlike = _unlike(rows.granule, rows, self._modes, self._region.size)
        for race in _races(marks, self._modes):
            at = int(race.where[0])
            a, b = (
                self._thread(rows, classes, actor, block, at)
                for actor, block in zip(race.actors, race.agents, strict=True)
            )
            yield Meeting(
                race.actors,
                race.agents,
                (a, b),
                at,
                None,
                race.where,
                race.writes_only and all_traced and not unlike[race.where].any(),
            )

    def writers(self, classes: Sequence[BlockClass]) -> Ints:
        """Return how many threads write each granule of the region."""
        rows = self._rows()
        count = np.zeros(self._region.size, np.int64)
        writing = [actor for actor, mode in self._modes.items() if mode != "read"]
        for granule, _, threads in self._spread(rows, classes, writing):
            np.add.at(count, granule, threads)
        return count

    def _rows(self) -> _Rows:
        """Everything noted, each (actor, thread, granule, interval) once."""
        if not self._pending:
            none = np.zeros(0, np.int64)
            return _Rows(none, none, none, none, none, none, none, none.astype(bool))
        rows = _Rows(*(np.concatenate(column) for column in zip(*self._pending, strict=True)))
        same = _ids(
            rows.block, rows.interval, rows.warp_interval, rows.granule, rows.thread, rows.actor
        )
        low, high = _bounds(same, rows.value)
        _, first = np.unique(same, return_index=True)
        mixed = low != high
        mixed[same[rows.mixed]] = True
        self._pending = [rows.take(first)._replace(mixed=mixed)]
        return self._pending[0]

    def _spread(
        self, rows: _Rows, classes: Sequence[BlockClass], actors: Sequence[int]
    ) -> Iterator[tuple[Ints, Ints, Ints]]:
        """Yield (granule, block, threads) for every block, traced or stood for, blocks ascending.

        ``threads`` counts the threads of the block that touch the granule.
        """
        rows = rows.take(np.isin(rows.actor, actors))
        crowds = [c for c in classes if len(c.members) > 1]
        alone = ~np.isin(rows.block, [c.representative for c in crowds])
        yield _count_threads(rows.take(alone))
        for crowd in crowds:
            mine = rows.take(rows.block == crowd.representative)
            shifts: dict[bytes, list[int]] = {}
            for actor in actors:
                shifts.setdefault(crowd.shift(actor).tobytes(), []).append(actor)
            for together in shifts.values():
                granule, _, threads = _count_threads(mine.take(np.isin(mine.actor, together)))
                if not len(granule):
                    continue
                shift = crowd.shift(together[0]) // self._region.granule
                step = max(1, _COMPACT_ROWS // len(granule))
                for start in range(0, len(shift), step):
                    part = slice(start, start + step)
                    moved = (granule + shift[part, None]).ravel()
                    yield (
                        moved,
                        np.repeat(crowd.members[part], len(granule)),
                        np.tile(threads, len(shift[part])),
                    )

    def _thread(
        self, rows: _Rows, classes: Sequence[BlockClass], actor: int, block: int, granule: int
    ) -> int:
        """A thread of the block that touches the granule there."""
        for crowd in classes:
            at = int(np.searchsorted(crowd.members, block))
            if at < len(crowd.members) and crowd.members[at] == block:
                granule -= int(crowd.shift(actor)[at]) // self._region.granule
                block = crowd.representative
                break
        here = (rows.block == block) & (rows.granule == granule) & (rows.actor == actor)
        return int(rows.thread[here][0])


class _Rows(NamedTuple):
    """Columns of a log: what an actor's thread did to a granule in an interval."""

    block: Ints
    interval: Ints
    warp_interval: Ints
    granule: Ints
    thread: Ints
    actor: Ints
    value: Ints
    mixed: Bools

    def take(self, index: Any) -> _Rows:
        return _Rows(*(column[index] for column in self))


class _Race(NamedTuple):
    """Two actors that meet with different agents (threads or blocks), and in which groups."""

    actors: tuple[int, int]
    agents: tuple[int, int]
    where: Ints
    writes_only: bool


def _races(
    marks: Mapping[int, tuple[Ints, Ints]], modes: Mapping[int, Mode], crowd: int = 1
) -> Iterator[_Race]:
    """Yield the races among actors, from each one's lowest and highest agent in each group.

    ``crowd`` consecutive agents do not race with each other.
    """
    for a, b in itertools.combinations_with_replacement(marks, 2):
        if not can_race(modes[a], modes[b]):
            continue
        (a_low, a_high), (b_low, b_high) = marks[a], marks[b]
        ends = [a_low, a_high, b_low, b_high]
        if crowd > 1:
            ends = [end // crowd for end in ends]
        together = (ends[0] == ends[1]) & (ends[2] == ends[3]) & (ends[0] == ends[2])
        where = np.flatnonzero((a_high >= 0) & (b_high >= 0) & ~together)
        if not len(where):
            continue
        at = where[0]
        left = a_low[at]
        right = b_high[at] if b_high[at] // crowd != left // crowd else b_low[at]
        if left // crowd == right // crowd:
            left = a_high[at]
        yield _Race((a, b), (int(left), int(right)), where, modes[a] == modes[b] == "write")


def can_race(one: Mode, other: Mode) -> bool:
    """Whether two accesses of one place by different threads need an order."""
    return one != other or one == "write"


def regions(arrays: Sequence[ArrayInfo]) -> list[Region]:
    """Group the arrays of one memory space by overlap."""
    groups: list[list[ArrayInfo]] = []
    end = -1
    for array in sorted(arrays, key=lowest_address):
        low = lowest_address(array)
        if not groups or low >= end:
            groups.append([])
        groups[-1].append(array)
        end = max(end, low + array.nbytes)
    return [Region(group[0].space, tuple(group)) for group in groups]


def lowest_address(array: ArrayInfo) -> int:
    """The address of the first byte an array spans; below its base where a stride is negative."""
    below = ((n - 1) * step for n, step in zip(array.shape, array.strides, strict=True) if step < 0)
    return array.base + sum(below)


def _count_threads(rows: _Rows) -> tuple[Ints, Ints, Ints]:
    """Each (granule, block) once, by block, and how many threads touch it."""
    each = rows.take(np.unique(_ids(rows.block, rows.granule, rows.thread), return_index=True)[1])
    cell = _ids(each.block, each.granule)
    _, first, threads = np.unique(cell, return_index=True, return_counts=True)
    return each.granule[first], each.block[first], threads


def _unlike(group: Ints, rows: _Rows, modes: Mapping[int, Mode], size: int) -> Bools:
    """In which groups different values are written."""
    stored = np.isin(rows.actor, [actor for actor, mode in modes.items() if mode == "write"])
    low, high = _bounds(group[stored], rows.value[stored], size)
    unlike = low < high
    unlike[group[stored & rows.mixed]] = True
    return unlike


def _ids(*columns: Ints) -> Ints:
    """Number the distinct rows of some columns, in the order of the columns."""
    size = len(columns[0])
    telling = [c for c in columns if size and c.min() != c.max()] or [np.zeros(size, np.int64)]
    order = np.lexsort(telling[::-1])
    changes = np.zeros(size, np.int64)
    for column in telling:
        changes[1:] |= np.diff(column[order]) != 0
    ids = np.empty(size, np.int64)
    ids[order] = np.cumsum(changes)
    return ids


def _bounds(group: Ints, values: Ints, size: int | None = None) -> tuple[Ints, Ints]:
    """The lowest and highest value of each group; where there is none, low is above high."""
    count = int(group.max(initial=-1)) + 1 if size is None else size
    low, high = np.full(count, _LARGE), np.full(count, np.iinfo(np.int64).min)
    np.minimum.at(low, group, values)
    np.maximum.at(high, group, values)
    return low, high


def _bits(values: NDArray[Any] | None, where: Ints) -> Ints:
    """The bits of the chosen values, as one integer each."""
    if values is None:
        return np.zeros(len(where), np.int64)
    chosen = values.ravel()[where]
    size = chosen.dtype.itemsize
    if size > 8:
        halves = chosen.view(np.int64).reshape(len(where), -1)
        bits: Ints = halves[:, 0] ^ (halves[:, 1:].sum(axis=1) * 0x9E3779B1)
        return bits
    return chosen.view(f"i{size}").astype(np.int64)
