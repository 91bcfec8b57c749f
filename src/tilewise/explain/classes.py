"""Which blocks of a launch do the same, so that one of them can be traced for all.

Two blocks are alike when every comparison that a block's position enters comes out the same, for
each of their threads, and nothing else of the position reaches a bound or a branch: then they make
the same accesses, each shifted by a constant. :mod:`tilewise.explain.dataflow` has collected those
comparisons; here they are evaluated for every block of the grid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..simt.shadow import BlockClass
from .dataflow import Flow, Guard

__all__ = ["Partition", "alone", "partition"]

Ints = NDArray[np.int64]
Dim = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Partition:
    """The classes of a launch's blocks, and in words why they may be traced by one member."""

    classes: tuple[BlockClass, ...]
    certificate: str

    @property
    def representatives(self) -> Ints:
        return np.array([c.representative for c in self.classes])

    def without(self, strangers: Ints) -> Partition:
        """The same classes, but that each of these blocks is one of its own."""
        classes = []
        for each in self.classes:
            strange = np.isin(each.members, strangers)
            parts = [~strange, *(np.arange(len(strange)) == i for i in np.flatnonzero(strange))]
            for part in parts:
                members = each.members[part]
                if len(members):
                    shifts = {k: v[part] - v[part][0] for k, v in each.shifts.items()}
                    classes.append(BlockClass(int(members[0]), members, shifts))
        return Partition(tuple(classes), self.certificate)

    @property
    def is_compressed(self) -> bool:
        return any(len(c.members) > 1 for c in self.classes)


def partition(flow: Flow, grid: Dim) -> Partition:
    """Sort the blocks of a grid into classes of blocks that do the same.

    Every site's addresses in a member lie a constant number of bytes beyond those in the
    representative; where that cannot be shown, every block is a class of its own.
    """
    count = grid[0] * grid[1] * grid[2]
    ids = np.arange(count)
    where = np.stack([ids % grid[0], ids // grid[0] % grid[1], ids // (grid[0] * grid[1])])
    if flow.opaque is not None:
        return alone(grid, f"since {flow.opaque}")
    label = np.zeros(count, np.int64)
    for guard in sorted(flow.guards, key=repr):
        outcome = _outcome(guard, np.array(guard.block) @ where)
        label = _numbered(label * (count + 2) + outcome)
    order = np.argsort(label, kind="stable")
    starts = np.flatnonzero(np.diff(label[order], prepend=-1))
    parts = sorted(np.split(order, starts[1:]), key=lambda members: int(members[0]))
    classes = tuple(_class(members, flow, where) for members in parts)
    traced = f"{len(classes)} of {count} blocks traced" if count > 1 else "the one block traced"
    if len(classes) == count:
        return Partition(classes, traced)
    return Partition(
        classes,
        f"{traced}: the others differ from one of them only by a constant shift of each address; "
        f"blockIdx reaches no bound or branch but through {len(flow.guards)} comparisons, which "
        "come out the same for every thread of a class",
    )


def alone(grid: Dim, why: str) -> Partition:
    """Every block as a class of its own."""
    ids = np.arange(grid[0] * grid[1] * grid[2])
    classes = tuple(BlockClass(block, ids[block : block + 1]) for block in ids.tolist())
    return Partition(classes, f"every block was traced, {why}")


def _class(members: Ints, flow: Flow, where: Ints) -> BlockClass:
    away = where[:, members] - where[:, members[:1]]
    shifts: Mapping[int, Ints] = {
        site: np.array(seen.offset.block) @ away
        for site, seen in flow.sites.items()
        if seen.offset is not None and seen.offset.block not in (None, (0, 0, 0))
    }
    return BlockClass(int(members[0]), members, shifts)


def _outcome(guard: Guard, shift: Ints) -> Ints:
    """Number the outcomes: the same number only where all threads decide the same.

    The decision is whether ``shift + rest`` is negative, for a rest between the guard's bounds.
    """
    always, never = shift + guard.high < 0, shift + guard.low >= 0
    if guard.exact:
        always = never = np.zeros(len(shift), bool)
    # Blocks that do not all decide alike are told apart by their shift, from 2 up.
    rank = _numbered(np.where(always | never, shift.min(), shift)) + 2
    return np.where(always, 0, np.where(never, 1, rank))


def _numbered(labels: Ints) -> Ints:
    """The same partition with labels from 0 up."""
    numbered: Ints = np.unique(labels, return_inverse=True)[1]
    return numbered
