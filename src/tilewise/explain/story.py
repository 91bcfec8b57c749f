"""One block and one thread followed: what they read, and which elements they write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import OptionError
from ..simt.events import Access, ArrayInfo, Barrier, Fault, Launch
from ..simt.hazards import elements_at, unravel
from .report import ThreadMap, ThreadStory
from .trial import Trial

__all__ = ["Box", "Follower", "follow", "position", "thread_map", "thread_story"]

Dim = tuple[int, int, int]
Box = tuple[tuple[int, int], ...]


class Follower:
    """An observer of one block: what of each array it reads, and what its threads do."""

    def __init__(self, block: int) -> None:
        self._block = block
        self.arrays: dict[str, ArrayInfo] = {}
        #: The least and the greatest index, an axis, of what the block reads of a global array.
        self.boxes: dict[str, Box] = {}
        #: How often each thread loads from a global array, and stores to a shared one.
        self.loads: dict[str, NDArray[np.int64]] = {}
        self.fills: dict[str, NDArray[np.int64]] = {}
        #: The elements of global arrays that each thread writes, without repeats.
        self.writes: dict[str, dict[int, dict[tuple[int, ...], None]]] = {}
        #: The lowest byte offset that is touched, by array and "load" or "store".
        self.lowest: dict[tuple[str, str], int] = {}
        self.barriers = 0

    def on_launch(self, launch: Launch) -> None:
        pass

    def on_fault(self, fault: Fault) -> bool:
        return True

    def on_barrier(self, barrier: Barrier) -> None:
        self.barriers += int(self._block in barrier.blocks)

    def on_access(self, access: Access) -> None:
        array = access.array
        rows = np.flatnonzero(access.blocks == self._block)
        if array.space == "local" or not len(rows):
            return
        active = access.active[rows[0]]
        if not active.any():
            return
        self.arrays[array.name] = array
        if array.space == "shared":
            if access.op == "store":
                self._count(self.fills, array, active)
            return
        offsets = access.offset[rows[0]][active]
        lowest = int(offsets.min())
        key = array.name, access.op
        self.lowest[key] = min(lowest, self.lowest.get(key, lowest))
        index = elements_at(array, offsets)
        if access.op != "store":
            self._count(self.loads, array, active)
            ends = [(int(axis.min()), int(axis.max())) for axis in index]
            seen = self.boxes.get(array.name, ends)
            self.boxes[array.name] = tuple(
                (min(low, a), max(high, b)) for (low, high), (a, b) in zip(seen, ends, strict=True)
            )
        if access.op != "load":
            writes = self.writes.setdefault(array.name, {})
            each = zip(*(axis.tolist() for axis in index), strict=True)
            for thread, element in zip(np.flatnonzero(active).tolist(), each, strict=True):
                writes.setdefault(thread, {})[element] = None

    @staticmethod
    def _count(table: dict[str, NDArray[np.int64]], array: ArrayInfo, active: Any) -> None:
        table.setdefault(array.name, np.zeros(len(active), np.int64))
        table[array.name] += active


def thread_map(trial: Trial, block: int, follower: Follower) -> ThreadMap | None:
    """Which element of the output each thread of a block writes; None if it writes none."""
    if not follower.writes:
        return None
    # The output is the array that most threads write.
    name = max(follower.writes, key=lambda n: len(follower.writes[n]))
    by_thread = follower.writes[name]
    threads = trial.block[0] * trial.block[1] * trial.block[2]
    return ThreadMap(
        block=unravel(block, trial.grid),
        shape=trial.block,
        array=name,
        elements=tuple(next(iter(by_thread.get(t, ())), None) for t in range(threads)),
        reads=follower.boxes,
    )


def thread_story(trial: Trial, block: Dim, thread: Dim) -> ThreadStory:
    """What one thread of one block does.

    Raises
    ------
    OptionError
        The launch has no such block or thread.
    """
    for what, at, extent in (("block", block, trial.grid), ("thread", thread, trial.block)):
        if any(not 0 <= i < n for i, n in zip(at, extent, strict=True)):
            raise OptionError(f"{what}={at} is not in this launch, which has {extent}")
    follower = follow(trial, _linear(block, trial.grid))
    number = _linear(thread, trial.block)
    writes = {
        name: tuple(by_thread[number])
        for name, by_thread in follower.writes.items()
        if number in by_thread
    }
    loads = {name: int(count[number]) for name, count in follower.loads.items() if count[number]}
    tiles = max((int(count[number]) for count in follower.fills.values()), default=0)
    return ThreadStory(
        block=block,
        thread=thread,
        writes=writes,
        thread_reads=loads,
        block_reads=follower.boxes,
        tiles=tiles,
        barriers=follower.barriers,
        text=_in_words(trial, block, thread, writes, loads, tiles, follower),
    )


def follow(trial: Trial, block: int) -> Follower:
    """Run one block and see what it does."""
    follower = Follower(block)
    trial.run([block], follower)
    return follower


def position(dim: Dim, extent: Dim) -> str:
    """(x, y, z) without the axes that the launch does not have."""
    axes = max((i + 1 for i in range(3) if extent[i] > 1), default=1)
    return f"({', '.join(map(str, dim[:axes]))})" if axes > 1 else str(dim[0])


def _linear(at: Dim, extent: Dim) -> int:
    return at[0] + extent[0] * (at[1] + extent[1] * at[2])


def _in_words(
    trial: Trial,
    block: Dim,
    thread: Dim,
    writes: Mapping[str, tuple[tuple[int, ...], ...]],
    loads: Mapping[str, int],
    tiles: int,
    follower: Follower,
) -> str:
    who = f"Thread {position(thread, trial.block)} of block {position(block, trial.grid)}"
    said = [_written(writes, who)]
    if follower.boxes:
        boxes = [
            f"{name} {_box(box, follower.arrays[name].shape)}"
            for name, box in follower.boxes.items()
        ]
        through = f", through {tiles} tiles in shared memory" if tiles else ""
        said.append(f"Its block reads {'; '.join(boxes)}{through}.")
    if loads:
        each = " and ".join(f"{n} element{'s' * (n != 1)} of {name}" for name, n in loads.items())
        said.append(f"The thread itself loads {each}.")
    plural = "s" * (follower.barriers != 1)
    said.append(f"The block passes {follower.barriers} barrier{plural}.")
    return " ".join(said)


def _written(writes: Mapping[str, tuple[tuple[int, ...], ...]], who: str) -> str:
    if not writes:
        return f"{who} writes nothing to global memory."
    parts = []
    for name, elements in writes.items():
        if len(elements) > 1:
            box = tuple((min(axis), max(axis)) for axis in zip(*elements, strict=True))
            parts.append(f"{len(elements)} elements of {name}: {_spans(box)}")
        elif len(elements[0]) == 2:
            row, column = elements[0]
            parts.append(f"{name} row {row}, column {column}")
        else:
            parts.append(f"{name}[{', '.join(map(str, elements[0]))}]")
    return f"{who} computes {' and '.join(parts)}."


def _box(box: Box, shape: tuple[int, ...]) -> str:
    whole = [ends == (0, length - 1) for ends, length in zip(box, shape, strict=True)]
    if len(box) == 2 and whole[1] and not whole[0]:
        return f"{_range('row', box[0])} (all columns)"
    if len(box) == 2 and whole[0] and not whole[1]:
        return f"{_range('column', box[1])} (all rows)"
    return "whole" if all(whole) else _spans(box)


def _spans(box: Box) -> str:
    if len(box) == 2:
        return f"{_range('row', box[0])}, {_range('column', box[1])}"
    return ", ".join(_range("element", ends) for ends in box)


def _range(what: str, ends: tuple[int, int]) -> str:
    first, last = ends
    return f"{what} {first}" if first == last else f"{what}s {first}–{last}"
