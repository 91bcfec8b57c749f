"""What an observer of a launch sees: places in the source, arrays, and what happened at them.

This is the seam between the machine, which executes, and whatever reads along (counting memory
requests, looking for races). Records only; no analysis and no execution lives here.

An event covers many threads at once: ``B`` blocks that run together, ``T`` threads each. Axis 0 is
the block (its linear id ``x + y·Gx + z·Gx·Gy`` stands in ``blocks``), axis 1 the thread in linear
order ``x + y·Dx + z·Dx·Dy``; warp ``t // 32``, lane ``t % 32``. Arrays in events may be read-only
broadcast views, and are valid only until the observer returns: copy what is to be kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Access",
    "ArrayInfo",
    "Barrier",
    "Fault",
    "FaultKind",
    "Launch",
    "Observer",
    "Site",
    "Space",
]

Space = Literal["global", "shared", "local"]
SiteKind = Literal["load", "store", "atomic", "barrier", "branch", "division", "variable"]

FaultKind = Literal[
    "out of range",
    "barrier divergence",
    "division by zero",
    "unassigned variable",
    "uninitialised read",
]


@dataclass(frozen=True, slots=True)
class Site:
    """One place in the source that touches memory, is a barrier or branches, or may go wrong.

    What may go wrong without touching memory is a division by 0, and the read of a variable that
    not every path to it assigns.

    ``id`` counts from 0 within a program, in source order. ``x[i] += 1`` is two sites, a load and
    a store. Lines count from 1 and columns, in characters, from 0; ``text`` is the source between
    the two columns (up to the end of the line where it spans several). ``array`` is the name in the
    source, None where it may stand for one array or another.
    """

    id: int
    kind: SiteKind
    function: str
    filename: str
    line: int
    column: int
    end_column: int
    text: str
    array: str | None = None


@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """An array that a launch can touch.

    ``strides`` are in bytes. ``base`` is a byte address: for a global argument in a simulated
    address space, where each distinct array has a region of its own that starts at a multiple of
    2 MiB plus the array's real address modulo 256 (views of one buffer share its region); for a
    shared array its offset within the block's shared memory, in order of declaration; for a local
    array 0. ``nbytes`` is the size of what the array's elements span, from the lowest address.
    """

    name: str
    space: Space
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    base: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Launch:
    """What is about to run: sent once, before any block starts.

    ``grid`` and ``block`` are (x, y, z). ``arrays`` holds global arguments in parameter order,
    then shared and local arrays in order of declaration; ``scalars`` the other arguments by name.
    ``notes`` says in words what the machine had to decide or does not model for this kernel.
    """

    kernel: str
    filename: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    arrays: tuple[ArrayInfo, ...]
    scalars: Mapping[str, Any]
    sites: tuple[Site, ...]
    shared_bytes: int
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class Access:
    """One execution of one site by the blocks that run together.

    Attributes
    ----------
    op : str
        "load", "store", or an atomic's name such as "add".
    blocks : (B,) int64
        Linear block ids.
    active : (B, T) bool
        The threads that execute the access, all of them within range.
    offset : (B, T) int64
        Byte offset from the array's element 0 (negative where a stride is); meaningless where
        not active.
    value : (B, T) or None
        What was loaded or stored, in the array's dtype; for an atomic its operand.
    interval : (B,) int64
        How many block barriers each block has passed.
    warp_interval : (B, W) int64
        How many ``syncwarp`` all running lanes of each warp have passed together.
    some_lanes : (2, B, T) int64, optional
        Since the last of these, how many ``syncwarp`` that name fewer lanes each thread has passed,
        and the lanes that the last of them named. None while there are none.
    """

    site: Site
    array: ArrayInfo
    op: str
    blocks: NDArray[np.int64]
    active: NDArray[np.bool_]
    offset: NDArray[np.int64]
    value: NDArray[Any] | None
    interval: NDArray[np.int64]
    warp_interval: NDArray[np.int64]
    some_lanes: NDArray[np.int64] | None = None


@dataclass(slots=True)
class Barrier:
    """One execution of a block barrier, by the blocks where any thread arrived.

    ``arrived`` and ``live`` are (B, T): the threads at the barrier, and those that have not
    exited. Where they differ, a :class:`Fault` has come first. ``interval`` is the count of
    barriers passed before this one.
    """

    site: Site
    blocks: NDArray[np.int64]
    arrived: NDArray[np.bool_]
    live: NDArray[np.bool_]
    interval: NDArray[np.int64]


@dataclass(slots=True)
class Fault:
    """Something a kernel must not do, about to become an error.

    ``reason`` is "out of range" (``active`` marks the offending threads, and ``indices`` holds
    what they asked for, one (B, T) array an axis), "barrier divergence" (``active`` marks the
    threads that are alive and not at the barrier), or one of three that are no errors of the
    machine: "division by zero", of integers, whose quotient is 0; "unassigned variable", which
    holds 0; and "uninitialised read" of a local array, which gives poison. ``message`` is the
    text of an error, or would be.
    """

    site: Site
    array: ArrayInfo | None
    blocks: NDArray[np.int64]
    active: NDArray[np.bool_]
    indices: tuple[NDArray[np.int64], ...] = ()
    reason: FaultKind = "out of range"
    message: str = field(default="")


class Observer(Protocol):
    """Reads along with a launch. Nothing of this is computed when there is no observer."""

    def on_launch(self, launch: Launch) -> None:
        """Learn what is about to run."""

    def on_access(self, access: Access) -> None:
        """Learn of one access; called before a store or atomic changes memory, after a load."""

    def on_barrier(self, barrier: Barrier) -> None:
        """Learn of one block barrier."""

    def on_fault(self, fault: Fault) -> bool:
        """Return True to carry on (reads give poison, writes are dropped), False to raise.

        A barrier that is carried on is passed by the threads that arrived.
        """
