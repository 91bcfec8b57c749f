"""Counts what a launch does to memory, from its events and in bounded memory.

One :class:`Recorder` reads along with one launch. It turns every access into warp requests, costs
them by :mod:`tilewise.simt.memory`, and adds them up for each place in the source; a block that
stands for others is counted as often as it stands for. What the numbers mean is said elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..simt import memory
from ..simt.events import Access, ArrayInfo, Barrier, Fault, Launch, Site
from ..simt.shadow import BlockClass, lowest_address

__all__ = ["Recorder", "Request", "SiteTotals", "Step"]

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# Distinct patterns of addresses whose cost is remembered, steps of the timeline that are kept,
# and elements whose touches are counted, over all blocks that stand for others.
_MEMO = 4096
_STEPS = 400
_TOUCHED = 1 << 24
# Beyond every address, for lanes that take no part.
_FAR = np.int64(2**62)


@dataclass(frozen=True, slots=True)
class Request:
    """One warp's request: the byte address of each lane, and which lanes take part."""

    block: int
    warp: int
    addresses: Ints
    active: Bools
    width: int
    load: bool
    cost: int
    ideal: int


@dataclass(slots=True)
class SiteTotals:
    """What all executions of one place in the source add up to, on one array.

    ``lanes`` counts accesses of threads, ``requests`` those of warps. ``cost`` is in the
    target's unit: wavefronts (steps) of shared memory, sectors (transactions) of global;
    ``histogram`` says how many requests cost how much. ``moved`` are the bytes that travel.
    ``guide_cost`` and ``guide_ideal`` are by the rules of the guide's own hardware, whatever the
    target: steps, and transactions as compute capability 1.0 has them.
    """

    site: Site
    array: ArrayInfo
    op: str
    lanes: int = 0
    requests: int = 0
    cost: int = 0
    ideal: int = 0
    conflicts: int = 0
    lines: int = 0
    distinct_bytes: int = 0
    moved: int = 0
    source_cost: int = 0
    source_ideal: int = 0
    guide_cost: int = 0
    guide_ideal: int = 0
    histogram: Counter[int] = field(default_factory=Counter)
    worst: Request | None = None

    @property
    def bytes(self) -> int:
        """Bytes that threads ask for."""
        return self.lanes * self.array.dtype.itemsize


@dataclass(slots=True)
class Step:
    """A stretch of the first traced block's life: one place, executed so often in a row."""

    site: Site
    op: str
    interval: int
    times: int


class Recorder:
    """An observer that counts. Blocks in no class stand for themselves.

    Parameters
    ----------
    classes : sequence of BlockClass
    half_warps : {None, "1.0", "1.2"}
        The rule of the guide's hardware to cost requests by; None for current hardware.
    """

    def __init__(
        self,
        classes: Sequence[BlockClass] = (),
        *,
        half_warps: memory.HalfWarpRule | None = None,
    ) -> None:
        self._half_warps = half_warps
        self._classes = {c.representative: c for c in classes}
        self._memo: dict[tuple[object, ...], _Cost] = {}
        self._merges: dict[tuple[int, str], _Merge] = {}
        self._residues: dict[tuple[int, bytes], list[tuple[int, Ints]]] = {}
        self._rows: dict[bytes, list[tuple[Any, int]]] = {}
        self._first: int | None = None
        #: By site and array: as the source has it, and as nvcc merges loads of shared memory.
        self.totals: dict[tuple[int, str], SiteTotals] = {}
        self.merged: dict[tuple[int, str], SiteTotals] = {}
        #: Barriers that blocks pass, and of places on local arrays the executions by threads and
        #: by warps; by site.
        self.barriers: Counter[int] = Counter()
        self.local_lanes: Counter[int] = Counter()
        self.local_warps: Counter[int] = Counter()
        self.timeline: list[Step] = []
        #: By array: how often each element is loaded, for each block that stands for others
        #: and each site, and under (-1, -1) for all the rest together.
        self.loaded: dict[str, dict[tuple[int, int], NDArray[np.int32]]] = {}

    def on_launch(self, launch: Launch) -> None:
        self.launch = launch
        self._warps = -(-(launch.block[0] * launch.block[1] * launch.block[2]) // memory.LANES)

    def on_barrier(self, barrier: Barrier) -> None:
        self.barriers[barrier.site.id] += int(self._weights(barrier.blocks).sum())
        self._step(barrier.site, "barrier", barrier.blocks, barrier.arrived, barrier.interval)

    def on_fault(self, fault: Fault) -> bool:
        return True

    def on_access(self, access: Access) -> None:
        array, site = access.array, access.site
        if array.space == "local":
            lanes, weights = self._by_warp(access.active), self._weights(access.blocks)
            by_block = lanes.reshape(len(weights), self._warps, memory.LANES)
            self.local_lanes[site.id] += int(weights @ by_block.sum(axis=(1, 2)))
            self.local_warps[site.id] += int(weights @ by_block.any(axis=2).sum(axis=1))
            return
        self._step(site, access.op, access.blocks, access.active, access.interval)
        width = array.dtype.itemsize
        totals = self._of(self.totals, site, array, access.op)
        address = access.offset + array.base
        costs = self._add(totals, access.blocks, address, access.active, width)
        if array.space == "global":
            if access.op != "store":
                self._load(access)
        elif access.op in ("load", "store") and self._half_warps is None:
            merge = self._merges.setdefault((site.id, array.name), _Merge())
            runs = merge.take(access.blocks, access.interval, address, access.active, width)
            if runs is None:  # stays as it is
                self._accumulate(self._of(self.merged, site, array, access.op), costs)
            for run in runs or ():
                self._add_run(totals, run)

    def finish(self) -> None:
        """Count what the merging of loads still holds back; call it after the launch."""
        for key, merge in self._merges.items():
            for run in merge.flush():
                self._add_run(self.totals[key], run)

    def _add_run(self, unmerged: SiteTotals, run: _Run) -> None:
        totals = self._of(self.merged, unmerged.site, unmerged.array, unmerged.op)
        address = np.where(run.active, run.address, 0)
        self._add(totals, run.blocks, address, run.active, run.width)

    def executions(self, site: int) -> tuple[int, int]:
        """How often threads, and how often warps, execute the access at a site."""
        lanes, warps = self.local_lanes[site], self.local_warps[site]
        for (at, _), totals in self.totals.items():
            if at == site:
                lanes, warps = lanes + totals.lanes, warps + totals.requests
        return lanes, warps

    @staticmethod
    def _of(
        table: dict[tuple[int, str], SiteTotals], site: Site, array: ArrayInfo, op: str
    ) -> SiteTotals:
        key = site.id, array.name
        if key not in table:
            table[key] = SiteTotals(site, array, op)
        return table[key]

    def _weights(self, blocks: Ints) -> Ints:
        """How many blocks each of these stands for."""
        sizes = [len(c.members) if (c := self._classes.get(b)) else 1 for b in blocks.tolist()]
        return np.array(sizes, np.int64)

    def _step(self, site: Site, op: str, blocks: Ints, active: Bools, interval: Ints) -> None:
        """Note a step of the block that was traced first."""
        if self._first is None:
            self._first = int(blocks[0])
        if blocks[0] != self._first or not active[0].any():
            return
        passed = int(interval[0])
        if self.timeline and self.timeline[-1].interval == passed:
            for step in reversed(self.timeline):
                if step.interval != passed:
                    break
                if step.site.id == site.id:
                    step.times += 1
                    return
        if len(self.timeline) < _STEPS:
            self.timeline.append(Step(site, op, passed, 1))

    def _add(
        self, totals: SiteTotals, blocks: Ints, address: Ints, active: Bools, width: int
    ) -> list[tuple[_Cost, Ints]]:
        """Cost the requests of one execution and add them up; return what was added."""
        if not active.any():
            return []
        warps, lanes = self._by_warp(address), self._by_warp(active)
        costs = []
        for shift, weights in self._shifts(totals, blocks):
            cost = self._cost(totals, warps + shift, lanes, width)
            costs.append((cost, weights))
            worst = totals.worst
            if worst is None or cost.excess > (worst.cost - worst.ideal, worst.cost):
                at = cost.worst
                block, warp = divmod(at, self._warps)
                totals.worst = Request(
                    int(blocks[block]),
                    warp,
                    warps[at] + shift,
                    lanes[at].copy(),
                    width,
                    totals.op == "load",
                    cost.excess[1],
                    cost.excess[1] - cost.excess[0],
                )
        self._accumulate(totals, costs)
        return costs

    def _by_warp(self, of_threads: NDArray[Any]) -> NDArray[Any]:
        """(blocks, threads) as (requests, 32); the lanes that a last warp lacks are zero."""
        blocks, threads = of_threads.shape
        missing = self._warps * memory.LANES - threads
        if missing:
            of_threads = np.pad(of_threads, ((0, 0), (0, missing)))
        return of_threads.reshape(blocks * self._warps, memory.LANES)

    def _shifts(self, totals: SiteTotals, blocks: Ints) -> list[tuple[int, Ints]]:
        """By how many bytes modulo a line the blocks that are stood for lie off, and how many."""
        key = totals.site.id if totals.array.space == "global" else -1, blocks.tobytes()
        if key not in self._residues:
            by_shift: dict[int, Ints] = {}
            for row, block in enumerate(blocks.tolist()):
                crowd = self._classes.get(block)
                shifts, counts = np.zeros(1, np.int64), np.ones(1, np.int64)
                if crowd is not None:
                    off = crowd.shift(key[0]) % memory.LINE_BYTES
                    shifts, counts = np.unique(off, return_counts=True)
                for shift, count in zip(shifts.tolist(), counts, strict=True):
                    by_shift.setdefault(shift, np.zeros(len(blocks), np.int64))[row] += count
            self._residues[key] = list(by_shift.items())
        return self._residues[key]

    def _cost(self, totals: SiteTotals, address: Ints, active: Bools, width: int) -> _Cost:
        """The cost of these requests, remembered by their pattern.

        Global memory costs the same a line farther on, shared memory a word: its banks turn.
        """
        space = totals.array.space
        unit = memory.LINE_BYTES if space == "global" else max(4, width)
        used = np.where(active, address, _FAR)
        pattern = used - used.min() // unit * unit
        load = totals.op == "load"
        key = (space, load, width, active.shape, pattern.tobytes())
        cost = self._memo.get(key)
        if cost is None:
            if len(self._memo) >= _MEMO:
                self._memo.clear()
            columns = self._columns(space, address, active, width, load=load)
            cost = self._memo[key] = _Cost.of(columns, self._warps)
        return cost

    def _columns(
        self, space: str, address: Ints, active: Bools, width: int, *, load: bool
    ) -> dict[str, Ints]:
        """The fields of SiteTotals, for every request."""
        lanes = active.sum(axis=1)
        halves = active.reshape(-1, 2, memory.LANES // 2).any(axis=2).sum(axis=1)
        columns = {"lanes": lanes, "requests": (lanes > 0).astype(np.int64)}
        if space == "shared":
            steps = memory.half_warp_steps(address, active, width, load=load)
            ideal = halves * max(1, width // 4)
            columns |= {"guide_cost": steps, "guide_ideal": ideal}
            if self._half_warps is not None:
                return columns | {"cost": steps, "ideal": ideal, "conflicts": steps - ideal}
            shared = memory.shared_cost(address, active, width, load=load)
            return columns | {
                "cost": shared.wavefronts,
                "ideal": shared.wavefronts - shared.conflicts,
                "conflicts": shared.conflicts,
                "source_cost": shared.source_wavefronts,
                "source_ideal": shared.source_ideal,
                "distinct_bytes": shared.bytes,
            }
        strict, _ = memory.half_warp_segments(address, active, width, rule="1.0")
        ideal = halves * max(1, width // 8)
        columns |= {"guide_cost": strict, "guide_ideal": np.minimum(ideal, strict)}
        if self._half_warps is not None:
            cost, moved = memory.half_warp_segments(address, active, width, rule=self._half_warps)
            return columns | {"cost": cost, "ideal": np.minimum(ideal, cost), "moved": moved}
        sectors = memory.global_cost(address, active, width)
        return columns | {
            "cost": sectors.sectors,
            "ideal": sectors.ideal_sectors,
            "lines": sectors.lines,
            "distinct_bytes": sectors.bytes,
            "moved": sectors.sectors * memory.SECTOR_BYTES,
            "source_cost": sectors.sectors,
            "source_ideal": sectors.ideal_sectors,
        }

    @staticmethod
    def _accumulate(totals: SiteTotals, costs: Sequence[tuple[_Cost, Ints]]) -> None:
        for cost, weights in costs:
            for name, amount in zip(cost.names, (weights @ cost.sums).tolist(), strict=True):
                setattr(totals, name, getattr(totals, name) + amount)
            for value, amount in zip(cost.values, (weights @ cost.counts).tolist(), strict=True):
                if amount:
                    totals.histogram[value] += amount

    def _load(self, access: Access) -> None:
        """Count how often each element of a global array is read."""
        array = access.array
        size = -(-array.nbytes // array.dtype.itemsize)
        start = access.offset + (array.base - lowest_address(array))
        counts = self.loaded.setdefault(array.name, {})
        for rows, crowd in self._crowds(access.blocks):
            key = (crowd, -1 if crowd < 0 else access.site.id)
            if key not in counts:
                kept = 0 if (len(counts) + 1) * size > _TOUCHED else size
                counts[key] = np.zeros(kept, np.int32)
            if len(counts[key]):
                slots = start[rows][access.active[rows]] // array.dtype.itemsize
                np.add.at(counts[key], slots, 1)

    def _crowds(self, blocks: Ints) -> list[tuple[Any, int]]:
        """The rows of an event by what they stand for: each crowd's own, and -1 for all others."""
        key = blocks.tobytes()
        if key not in self._rows:
            alone = [i for i, b in enumerate(blocks.tolist()) if not self._stands_for_more(b)]
            rows: list[tuple[Any, int]] = [(np.array(alone), -1)] if alone else []
            rows += [
                (np.array([i]), b)
                for i, b in enumerate(blocks.tolist())
                if self._stands_for_more(b)
            ]
            self._rows[key] = rows
        return self._rows[key]

    def _stands_for_more(self, block: int) -> bool:
        crowd = self._classes.get(block)
        return crowd is not None and len(crowd.members) > 1


@dataclass(frozen=True, slots=True)
class _Cost:
    """The cost of the requests of one execution, added up for each block that runs together."""

    names: tuple[str, ...]
    sums: Ints
    """(blocks, names)"""
    values: list[int]
    counts: Ints
    """(blocks, values): how many requests cost so much."""
    worst: int
    excess: tuple[int, int]
    """Of the worst request, cost beyond the ideal, and cost."""

    @classmethod
    def of(cls, columns: dict[str, Ints], warps: int) -> _Cost:
        blocks = len(columns["cost"]) // warps
        sums = np.stack([c.reshape(blocks, warps).sum(axis=1) for c in columns.values()], axis=1)
        cost, made = columns["cost"], columns["requests"] > 0
        values = np.unique(cost[made])
        counts = np.stack(
            [(made & (cost == v)).reshape(blocks, warps).sum(axis=1) for v in values], axis=1
        )
        beyond = cost - columns["ideal"]
        worst = int(np.lexsort((cost, beyond))[-1])
        return cls(
            tuple(columns),
            sums,
            values.tolist(),
            counts,
            worst,
            (int(beyond[worst]), int(cost[worst])),
        )


class _Merge:
    """Joins accesses of consecutive elements, as nvcc does in unrolled loops over shared memory.

    Executions of one load (or store) between two barriers whose addresses advance by an element
    in every thread become accesses of 16 bytes, or of 8, where these are aligned. Others may come
    between them: a compiler that unrolls loops is free to bring them together.
    """

    def __init__(self) -> None:
        # By the addresses with which a run would go on.
        self._runs: dict[bytes, _Run] = {}
        self._interval: Ints = np.zeros(0, np.int64)

    def take(
        self, blocks: Ints, interval: Ints, address: Ints, active: Bools, width: int
    ) -> list[_Run] | None:
        """Take one execution, and return those that are complete; None if it is that one alone."""
        done: list[_Run] = []
        if not np.array_equal(interval, self._interval):
            done += self.flush()
            self._interval = interval.copy()
        used = np.where(active, address, _FAR)
        run = self._runs.pop(used.tobytes(), None)
        if run is None or not np.array_equal(run.blocks, blocks):
            done += run.split() if run else []
            run = _Run(blocks.copy(), used, active.copy(), width, 0)
            run = replace(run, room=run.aligned_to() // width)
            if run.room == 1 and not done:
                return None
        run = replace(run, count=run.count + 1)
        if run.count >= run.room:
            return [*done, *run.split()]
        key = np.where(active, used + width, _FAR).tobytes()
        done += self._runs[key].split() if key in self._runs else []
        self._runs[key] = run
        return done

    def flush(self) -> list[_Run]:
        """Give up waiting for more."""
        runs, self._runs = self._runs, {}
        return [part for run in runs.values() for part in run.split()]


@dataclass(frozen=True, slots=True)
class _Run:
    """Executions whose addresses follow one another: the first, and how many there are."""

    blocks: Ints
    address: Ints
    active: Bools
    width: int
    count: int
    room: int = 1

    def aligned_to(self) -> int:
        """The widest access that may begin here."""
        first = self.address[self.active]
        return next((w for w in (16, 8) if w > self.width and not (first % w).any()), self.width)

    def split(self) -> list[_Run]:
        """The accesses that are made of them: as wide as they are many, and as aligned."""
        parts: list[_Run] = []
        done = 0
        while done < self.count:
            address = np.where(self.active, self.address + done * self.width, _FAR)
            here = replace(self, address=address)
            widest = min(here.aligned_to() // self.width, self.count - done)
            together = 1 << (widest.bit_length() - 1)
            parts.append(replace(here, width=self.width * together, count=1))
            done += together
        return parts
