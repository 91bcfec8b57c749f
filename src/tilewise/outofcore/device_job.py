"""A product on GPUs of what is not all there, in plain numbers: operands, rates, buffers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from ..kernels.steps import round_up

__all__ = ["Factor", "Job", "Rates", "Store"]

#: Lines of at least this many bytes begin on multiples of 128; shorter ones lie end to end.
_PADDED_LINE = 1024


@dataclass(frozen=True, slots=True)
class Rates:
    """What a machine does in a second; those of an H200 and 16 cores (docs/facts.md).

    ``host_bytes`` counts what threads copy between pageable and pinned memory, both ways together,
    and the pages of new memory that are made on the way.
    """

    bus_bytes: float = 52e9
    host_bytes: float = 60e9
    start_s: float = 5e-3  #: threads, streams and buffers, and giving them back
    launch_s: float = 1e-4  #: to hand a launch and its panels from thread to thread
    multiprocessors: int = 132
    device_bytes: float = 4e12  #: of the device's memory, read and written
    flops: float = 45e12
    disk_bytes: float = math.inf  #: read and written, of operands and results in files
    stretch_s: float = 0.0  #: to begin on a stretch of such a file, one thread at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """What a schedule needs to know of one operand."""

    size: int  #: m of a, n of b
    itemsize: int
    along_k: bool  #: whether neighbours along K are neighbours in memory
    batch: tuple[int, ...] = ()  #: its own batch axes; 1 where it broadcasts
    repeats_size: bool = False  #: whether the rows of a, or columns of b, are all one
    repeats_k: bool = False
    chunk: int = 1  #: so many rows of a, or columns of b, are read as one
    strides: tuple[int, ...] | None = None
    """Bytes, along its batch axes, rows and columns, of one in the memory of the device, which is
    read there; None for one in host memory."""

    @property
    def is_there(self) -> bool:
        """Whether it is in the memory of the device, and nothing is copied."""
        return self.strides is not None

    def stored(self, size: int, k: int) -> tuple[int, int]:
        """Return what of so much of both axes there is to copy: an axis that repeats has one."""
        return 1 if self.repeats_size else size, 1 if self.repeats_k else k

    def read_bytes(self, size: int, k: int) -> int:
        """Return how many bytes so much of it is, wherever it is."""
        return math.prod(self.stored(size, k)) * self.itemsize

    def nbytes(self, size: int, k: int) -> int:
        """Return how many bytes of so much of it are copied."""
        return 0 if self.is_there else self.read_bytes(size, k)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A product on a GPU, as far as a schedule depends on it."""

    batch: tuple[int, ...]
    k: int
    a: Factor
    b: Factor
    sum_itemsize: int  #: of C as it is on the device
    c_strides: tuple[int, ...] | None = None
    """Of C in the memory of the device, which is written there, as those of a `Factor`."""
    along_n: bool = True  #: whether C is written along its rows
    is_gram: bool = False  #: whether b is a's transpose in the same memory
    is_fresh: bool = True  #: whether C's pages are yet to be touched
    piece: int = 0  #: K may be cut into pieces of this; 0 where it may not

    @property
    def m(self) -> int:
        return self.a.size

    @property
    def n(self) -> int:
        return self.b.size

    @property
    def matrices(self) -> int:
        return math.prod(self.batch)

    @property
    def flops(self) -> float:
        return 2.0 * self.matrices * self.m * self.n * self.k

    @property
    def c_bytes(self) -> int:
        """What an element of C takes in buffers, and is copied back."""
        return 0 if self.c_strides is not None else self.sum_itemsize

    def panel_bytes(self, side: Literal[0, 1], size: int, k: int) -> int:
        """Return what a panel of one matrix takes on the device."""
        return self.store(side, size, k).nbytes

    def slot_bytes(self, side: Literal[0, 1], size: int, k: int) -> int:
        """Return what a panel would take on the device, also where it is read in place."""
        return self.store(side, size, k).slot_bytes

    def store(self, side: Literal[0, 1], size: int, k: int, **of: Any) -> Store:
        """Return where panels of a (0) or b (1) lie on the device."""
        x = self.b if side else self.a
        own, depth = x.stored(size, k)
        lines, width = (own, depth) if x.along_k else (depth, own)
        if x.is_there:
            of["slots"] = 0
        return Store(lines=lines, width=width, itemsize=x.itemsize, **of)

    def c_store(self, rows: int, cols: int, **of: Any) -> Store:
        """Return where a part of C lies on the device."""
        lines, width = (rows, cols) if self.along_n else (cols, rows)
        return Store(lines=lines, width=width, itemsize=self.sum_itemsize, **of)


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """A buffer on a device: slots for stacks of matrices, each of them lines of equal length."""

    lines: int
    width: int  #: elements in a line
    itemsize: int
    slots: int = 1
    lead: tuple[int, ...] = ()  #: matrices in a slot

    @property
    def pitch(self) -> int:
        """Bytes from a line to the next."""
        nbytes = self.width * self.itemsize
        return nbytes if nbytes < _PADDED_LINE else round_up(nbytes, 128)

    @property
    def slot_bytes(self) -> int:
        return round_up(math.prod(self.lead) * self.lines * self.pitch, 256)

    @property
    def nbytes(self) -> int:
        return self.slots * self.slot_bytes

    def strides(self, is_turned: bool) -> tuple[int, ...]:
        """Return the byte strides of a slot; ``is_turned`` has the lines as its last axis."""
        step = self.lines * self.pitch
        lead: list[int] = []
        for size in reversed(self.lead):
            lead.append(step)
            step *= size
        last = (self.itemsize, self.pitch) if is_turned else (self.pitch, self.itemsize)
        return (*reversed(lead), *last)
