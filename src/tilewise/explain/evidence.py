"""Running a kernel under watch: everything that claims and reports are made of.

:func:`gather` reads the kernel, sorts its blocks into classes, traces one block of each on copies
of the arguments, and keeps what was seen in an :class:`Evidence`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import simt
from ..errors import KernelError, OptionError
from ..simt.arguments import Geometry, bind
from ..simt.events import Access, ArrayInfo, Barrier, Fault, Launch
from ..simt.hazards import BlockClass, Coverage, Found, Hazard, HazardWatch, elements_at
from ..simt.memory import HalfWarpRule
from ..simt.occupancy import TARGETS, Target
from ..simt.program import Program
from .classes import Partition, alone, partition
from .dataflow import Flow, analyse
from .recorder import Recorder, SiteTotals
from .story import Follower, follow
from .trial import Trial, filled
from .values import is_data

__all__ = ["MAX_STEPS", "Evidence", "gather"]

#: Loop iterations of a group of blocks before a kernel is taken to be endless.
MAX_STEPS = 50_000

_HALF_WARPS: dict[str, HalfWarpRule] = {
    "sm_10": "1.0",
    "sm_11": "1.0",
    "sm_12": "1.2",
    "sm_13": "1.2",
}

Dim = tuple[int, int, int]


@dataclass(eq=False)
class Evidence:
    """What was seen of one launch; claims are held against it."""

    trial: Trial
    target: Target
    registers: int | None
    flow: Flow
    partition: Partition
    recorder: Recorder
    hazards: list[Hazard]
    coverage: list[Coverage]
    _ablations: dict[int, Hazard | None] = field(default_factory=dict)
    _followed: dict[int, Follower] = field(default_factory=dict)
    _reads: dict[str, NDArray[np.int64] | None] = field(default_factory=dict)

    @property
    def program(self) -> Program:
        return self.trial.program

    @property
    def launch(self) -> Launch:
        return self.recorder.launch

    @property
    def threads(self) -> int:
        """Threads of a block."""
        x, y, z = self.trial.block
        return x * y * z

    @property
    def holds_for_all_data(self) -> bool:
        """Whether nothing that is loaded decides an address, a bound, a branch or a race."""
        return not self.flow.tainted and not any(map(self.agrees_by_data, self.hazards))

    @property
    def data_dependence(self) -> str:
        """In words, for what data the findings hold."""
        for hazard in filter(self.agrees_by_data, self.hazards):
            site = hazard.first.site
            return (
                f"line {site.line} writes one element by several threads ({site.text}), and what "
                "they write is loaded: that they agree holds for these data"
            )
        if not self.flow.tainted:
            return (
                "no loaded value reaches an address, a bound or a branch: this holds for all data"
            )
        line, text = min(self.flow.tainted.items())
        return f"line {line} depends on loaded values ({text}): this holds for these data"

    def agrees_by_data(self, hazard: Hazard) -> bool:
        """Whether writes that race store the same value in these data, and need not in others."""
        if not hazard.same_value or hazard.second is None:
            return False
        sites = (self.flow.sites.get(actor.site.id) for actor in (hazard.first, hazard.second))
        return any(seen is None or is_data(seen.value) for seen in sites)

    @cached_property
    def arrays(self) -> dict[str, ArrayInfo]:
        """The arrays of the launch by name."""
        return {array.name: array for array in self.launch.arrays}

    def array(self, name: str) -> ArrayInfo:
        """The array of a name, for a claim about it.

        Raises
        ------
        OptionError
            The kernel has no such array.
        """
        if name not in self.arrays:
            known = ", ".join(self.arrays) or "none"
            raise OptionError(f"{self.program.name} has no array {name!r}; its arrays are {known}")
        return self.arrays[name]

    def touching(self, name: str, *, op: str | None = None) -> list[SiteTotals]:
        """What the places that touch an array add up to, in source order."""
        found = [t for t in self.recorder.totals.values() if t.array.name == name]
        return sorted((t for t in found if op in (None, t.op)), key=lambda t: t.site.id)

    def followed(self, block: int) -> Follower:
        """What one block does, thread by thread."""
        if block not in self._followed:
            self._followed[block] = follow(self.trial, block)
        return self._followed[block]

    def moved(self, each: BlockClass, name: str, op: str) -> tuple[NDArray[np.int64], ...] | None:
        """By how many elements, an axis, the members of a class touch an array farther on.

        None where the places that touch it are shifted differently.
        """
        sites = [t.site.id for t in self.touching(name, op=op)]
        shifts = [each.shift(site) for site in sites]
        if not shifts or any((shift != shifts[0]).any() for shift in shifts):
            return None
        array = self.array(name)
        corner = self.followed(each.representative).lowest.get((name, op), 0)
        start = elements_at(array, np.array([corner]))
        return tuple(
            index - int(first[0])
            for index, first in zip(elements_at(array, corner + shifts[0]), start, strict=True)
        )

    def reads_range(self, name: str) -> tuple[int, int] | None:
        """The least and the greatest number of reads of any element of a global array.

        None where elements were not counted one by one.
        """
        counts = self.reads(name)
        return None if counts is None else (int(counts.min()), int(counts.max()))

    def reads(self, name: str) -> NDArray[np.int64] | None:
        """How often each element of a global array is read, in the array's shape; None if unknown.

        Only what one traced block reads is kept of a class, and moved to where the others read.
        """
        if name not in self._reads:
            self._reads[name] = self._count_reads(self.array(name))
        return self._reads[name]

    def _count_reads(self, array: ArrayInfo) -> NDArray[np.int64] | None:
        size = array.nbytes // array.dtype.itemsize
        if array.space != "global" or not array.nbytes or not _is_packed(array):
            return None
        total = np.zeros(size, np.int64)
        classes = {c.representative: c for c in self.partition.classes}
        for (block, site), counts in self.recorder.loaded.get(array.name, {}).items():
            if len(counts) != size:
                return None
            if block < 0:
                total += counts
            else:
                shift = classes[block].shift(site) // array.dtype.itemsize
                _add_shifted(total, counts, shift)
        return total.reshape(array.shape)

    def without_barrier(self, line: int) -> Hazard | None:
        """The first hazard that appears when the barrier on a line is taken out; None if none.

        Raises
        ------
        OptionError
            No barrier stands on that line.
        """
        if line not in self._ablations:
            self.program.without_barrier(line)  # refuses a line that has none
            known = {(h.kind, h.first.site.id) for h in self.hazards}
            watch = HazardWatch(
                self.partition.classes, stop_early=not known, warp_sync=self.flow.warp_sync
            )
            found: Sequence[Hazard]
            try:
                self.trial.run(self.partition.representatives, _Without(line, watch))
                found = watch.hazards()
            except Found as first:
                found = [first.hazard]
            fresh = [h for h in found if (h.kind, h.first.site.id) not in known]
            self._ablations[line] = next((h for h in fresh if not h.same_value), None)
        return self._ablations[line]


def gather(
    kernel: Any,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    arguments: Sequence[Any],
    *,
    target: str = "sm_90",
    registers: int | None = None,
    max_steps: int = MAX_STEPS,
) -> Evidence:
    """Trace a launch and return what was seen.

    ``arguments`` are arrays, numbers, or ``(shape, dtype)`` for an array of random numbers; arrays
    are copied, and never written to. See :func:`tilewise.explain.explain`.
    """
    if not isinstance(target, str) or target not in TARGETS:
        raise OptionError(f"target {target!r} is not known; known are {', '.join(TARGETS)}")
    most = TARGETS[target].max_registers_per_thread
    if registers is not None and registers not in range(1, most + 1):
        raise OptionError(f"registers={registers!r}: a thread on {target} has 1 to {most}")
    program = simt.program(kernel)
    if len(arguments) != len(program.parameters):
        raise KernelError(
            f"{program.name}({', '.join(program.parameters)}) takes {len(program.parameters)} "
            f"arguments, got {len(arguments)}"
        )
    extents = Geometry.of(grid, block)
    named = {
        name: filled(name, argument)
        for name, argument in zip(program.parameters, arguments, strict=True)
    }
    bind(program, tuple(named.values()))
    trial = Trial(program, extents.grid, extents.block, named, max_steps)
    flow = analyse(program, trial.grid, trial.block, named)
    parts = partition(flow, trial.grid)
    while True:
        recorder = Recorder(parts.classes, half_warps=_HALF_WARPS.get(target))
        watch = HazardWatch(parts.classes, warp_sync=flow.warp_sync)
        reach = _Reach({site for site, seen in flow.sites.items() if seen.unbounded})
        first = Follower(parts.classes[0].representative)
        trial.run(parts.representatives, recorder, watch, reach, first)
        strangers = reach.strangers(parts.classes)
        hazards = watch.hazards()
        if len(strangers):
            parts = parts.without(strangers)
        elif parts.is_compressed and any(map(_may_agree, hazards)) and _is_small(trial):
            parts = alone(trial.grid, "to compare the values that they write to one place")
        else:
            break
    recorder.finish()
    return Evidence(
        trial,
        TARGETS[target],
        registers,
        flow,
        parts,
        recorder,
        hazards,
        watch.coverage(),
        _followed={parts.classes[0].representative: first},
    )


def _is_packed(array: ArrayInfo) -> bool:
    """Whether an array's elements lie side by side, row by row."""
    stride = array.dtype.itemsize
    for length, actual in zip(reversed(array.shape), reversed(array.strides), strict=True):
        if length > 1 and actual != stride:
            return False
        stride *= length
    return True


def _add_shifted(
    total: NDArray[np.int64], counts: NDArray[np.int32], shifts: NDArray[np.int64]
) -> None:
    """Add ``counts`` to ``total``, moved by each of the shifts.

    Many blocks read the same part: shifts are counted first, and runs of equal counts are added as
    runs, by their ends.
    """
    where, times = np.unique(shifts, return_counts=True)
    steps = np.diff(counts, prepend=0, append=0)
    ends = np.flatnonzero(steps)
    change = np.zeros(len(total) + 1, np.int64)
    for shift, many in zip(where.tolist(), times.tolist(), strict=True):
        np.add.at(change, ends + shift, steps[ends] * many)
    total += np.cumsum(change[:-1])


def _may_agree(hazard: Hazard) -> bool:
    """Whether the values that race were not all seen, and might turn out to be the same."""
    return hazard.between_blocks and hazard.kind == "write-after-write"


def _is_small(trial: Trial) -> bool:
    """Whether all blocks of the launch can be traced in seconds."""
    return math.prod(trial.grid) * math.prod(trial.block) <= 1 << 20


class _Without:
    """Shows a watch a launch as if the barriers on a line were not there.

    Barriers say nothing but who comes first, so what would be accessed without them is what is.
    """

    def __init__(self, line: int, watch: HazardWatch) -> None:
        self._line = line
        self._watch = watch
        self._skipped: Counter[int] = Counter()

    def on_launch(self, launch: Launch) -> None:
        self._watch.on_launch(launch)

    def on_access(self, access: Access) -> None:
        interval = self._counted(access.blocks, access.interval)
        self._watch.on_access(replace(access, interval=interval))

    def on_barrier(self, barrier: Barrier) -> None:
        if barrier.site.line == self._line:
            self._skipped.update(barrier.blocks.tolist())
        else:
            interval = self._counted(barrier.blocks, barrier.interval)
            self._watch.on_barrier(replace(barrier, interval=interval))

    def on_fault(self, fault: Fault) -> bool:
        return self._watch.on_fault(fault)

    def _counted(self, blocks: NDArray[np.int64], interval: NDArray[np.int64]) -> Any:
        return interval - np.array([self._skipped[block] for block in blocks.tolist()])


class _Reach:
    """How far traced blocks reach at places whose range the source does not tell.

    Blocks of a class that would reach beyond the array there are not like their representative.
    """

    def __init__(self, sites: set[int]) -> None:
        self._sites = sites
        self._reach: dict[tuple[int, int], tuple[int, int, int]] = {}
        self._faulted: set[int] = set()

    def on_launch(self, launch: Launch) -> None:
        pass

    def on_barrier(self, barrier: Barrier) -> None:
        pass

    def on_fault(self, fault: Fault) -> bool:
        if fault.reason == "out of range" and fault.site.id in self._sites:
            self._faulted |= set(fault.blocks[fault.active.any(axis=1)].tolist())
        return True

    def on_access(self, access: Access) -> None:
        if access.site.id not in self._sites:
            return
        room = access.array.nbytes - access.array.dtype.itemsize
        for row in np.flatnonzero(access.active.any(axis=1)):
            offsets = access.offset[row][access.active[row]]
            key = access.site.id, int(access.blocks[row])
            low, high, _ = self._reach.get(key, (room, 0, 0))
            self._reach[key] = min(low, int(offsets.min())), max(high, int(offsets.max())), room

    def strangers(self, classes: Sequence[BlockClass]) -> NDArray[np.int64]:
        """The blocks that may not be like the representative of their class."""
        found = []
        for each in classes:
            if len(each.members) == 1:
                continue
            if each.representative in self._faulted:
                found.append(each.members)
            for site in self._sites:
                low, high, room = self._reach.get((site, each.representative), (0, 0, 0))
                shift = each.shift(site)
                found.append(each.members[(low + shift < 0) | (high + shift > room)])
        return np.unique(np.concatenate(found)) if found else np.zeros(0, np.int64)
