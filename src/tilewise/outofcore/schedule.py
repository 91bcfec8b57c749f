"""Which tile of C, from which panels of A and B, in what order: pure data, nothing is executed.

One tile of C is ``tile_m × tile_n`` and is summed over pieces of ``tile_k``; the order of summation
over K is ascending and the pieces depend on the tile sizes alone, so one plan has one set of bits.
`Tiles` cuts operands in memory. A `Schedule` adds, for operands in files, which panel is read when
and into which buffer, what is kept, and how many bytes all of it takes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

from .._memory import format_bytes
from .._operand import Box, batch_slices, batch_steps, pick
from .cuts import count, cuts, divisor, even

__all__ = [
    "Job",
    "Panel",
    "Schedule",
    "Side",
    "Step",
    "Tiles",
    "Tiling",
    "choose_tiles",
    "everything",
    "sizes",
    "whole_schedule",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """How an m×n×k product is cut into tiles, and what that costs."""

    m: int
    n: int
    k: int
    tile_m: int
    tile_n: int
    tile_k: int
    workspace_bytes: int

    @property
    def count(self) -> int:
        """Number of tiles of C."""
        return count(self.m, self.tile_m) * count(self.n, self.tile_n)

    def __iter__(self) -> Iterator[tuple[slice, slice]]:
        """Yield the rows and columns of each tile of C, row panel by row panel."""
        yield from itertools.product(cuts(self.m, self.tile_m), cuts(self.n, self.tile_n))

    def pieces(self) -> Iterator[slice]:
        """Yield the pieces of K in the order they are summed."""
        yield from cuts(self.k, self.tile_k)


@dataclass(frozen=True, slots=True)
class Side:
    """What a schedule needs to know of one operand in a file."""

    size: int  #: m of a, n of b
    itemsize: int
    along_k: bool  #: whether neighbours along K are neighbours in the file
    batch: tuple[int, ...] = ()  #: its batch axes, as many as the product's; 1 where it broadcasts
    batch_is_inside: bool = False  #: whether neighbours in the file are of different matrices
    chunk: tuple[int, int] = (1, 1)  #: what is read as one, along its size and along K
    name: str = ""  #: of the file, for people

    def elements(self, k: int, tile: int, tile_k: int) -> float:
        """Return how many elements are read for the panels of one matrix, chunks being whole."""
        return _touched(self.size, tile, self.chunk[0]) * _touched(k, tile_k, self.chunk[1])

    def runs(self, k: int, tile: int, tile_k: int) -> float:
        """Return in how many contiguous stretches the panels of one matrix are read."""
        if self.chunk != (1, 1):
            return self.elements(k, tile, tile_k) / math.prod(self.chunk)
        tiles, pieces = count(self.size, tile), count(k, tile_k)
        if self.along_k:
            return tiles if pieces <= 1 else self.size * pieces
        return pieces if tiles <= 1 else k * tiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A product of two files, as far as a schedule depends on it."""

    batch: tuple[int, ...]
    k: int
    a: Side
    b: Side
    panel_bytes: int  #: of temporary copies, for each element of a panel being multiplied
    product_bytes: int  #: of temporary products, for each element being added to a sum
    sum_itemsize: int
    out_itemsize: int
    staging_bytes: int = 0  #: for chunks on their way from and to the files

    @property
    def m(self) -> int:
        return self.a.size

    @property
    def n(self) -> int:
        return self.b.size

    @property
    def tile_bytes(self) -> int:
        """Bytes of workspace for each element of C: products, and two buffers to write from."""
        return self.product_bytes + 2 * self.out_itemsize


class Tiling(Protocol):
    """How a product of files is cut, whoever computes it: what is recorded tile by tile."""

    @property
    def grid(self) -> tuple[int, ...]:
        """The shape that places of tiles refer to: batch, rows, columns of C."""

    @property
    def parts(self) -> tuple[int, ...]:
        """What is written as one begins at multiples of these, along each axis of the grid."""

    @property
    def tile(self) -> tuple[int, int, int]:
        """What is multiplied at a time, of m, n and k."""

    @property
    def tile_count(self) -> int: ...

    @property
    def read_bytes(self) -> int: ...

    @property
    def written_bytes(self) -> int: ...

    @property
    def held_bytes(self) -> int: ...

    @property
    def budget_bytes(self) -> int: ...

    def tiles(self) -> Iterator[tuple[int, Box]]:
        """Yield each tile of C, by number and place."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain numbers and strings; equal ones number the same tiles."""


class Panel(NamedTuple):
    """A panel of an operand: which part of it, in which buffer, and whether it is read anew."""

    box: Box
    slot: int
    is_read: bool


class Step(NamedTuple):
    """The product of two panels, added to the sum of one tile of C."""

    a: Panel
    b: Panel
    c: Box
    is_first: bool  #: of the pieces of K of this tile
    is_last: bool
    tile: int  #: number of the tile, from 0 in the order they run


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How a product of files runs within a budget: steps, buffers, bytes.

    While a step is computed, the panels of the next one are read: never into a buffer that the step
    at work uses. A panel stays in its buffer until the place is needed; the one not used for the
    longest goes first.
    """

    job: Job
    order: Literal["rows", "columns"]  #: whether tiles of C follow each other along rows
    tile_m: int
    tile_n: int
    tile_k: int
    a_slots: int  #: panels of a that are held
    b_slots: int
    workspace_bytes: int  #: for the temporary arrays of a step; for all, where all is in memory
    budget_bytes: int
    at_once: int = 1  #: matrices of the batch in one tile; more than one only where tiles are whole
    is_whole: bool = False  #: whether all is in memory at once and multiplied as `matmul` does

    @property
    def grid(self) -> tuple[int, ...]:
        """The shape that places of tiles refer to."""
        return (*self.job.batch, self.job.m, self.job.n)

    @property
    def parts(self) -> tuple[int, ...]:
        """What is written as one begins at multiples of these, along each axis of the grid."""
        if self.is_whole:
            return self.grid
        at = next(self._batch_slices())
        return (*(part.stop for part in at), self.inner.tile_m, self.inner.tile_n)

    @property
    def tile(self) -> tuple[int, int, int]:
        """What is multiplied at a time, of m, n and k."""
        return self.tile_m, self.tile_n, self.tile_k

    def tiles(self) -> Iterator[tuple[int, Box]]:
        """Yield each tile of C, by number and place."""
        if self.is_whole:
            yield 0, everything(self.grid)
            return
        yield from ((step.tile, step.c) for step in self.steps() if step.is_last)

    @property
    def inner(self) -> Tiles:
        """How the work of a step is cut, so that its temporary arrays stay in the workspace.

        Along m and n the parts of one tile continue those of the next: a multiple of ``tile_m``
        rows of C is one of this ``tile_m`` too, and chunks of an output can keep to it.
        """
        tiles = choose_tiles(
            self.tile_m,
            self.tile_n,
            self.tile_k,
            panel_bytes=self.job.panel_bytes,
            tile_bytes=self.job.tile_bytes,
            budget_bytes=self.workspace_bytes // self.at_once,
        )
        assert tiles is not None, "a workspace holds at least one element of everything"
        return replace(
            tiles,
            tile_m=_part(self.job.m, self.tile_m, tiles.tile_m),
            tile_n=_part(self.job.n, self.tile_n, tiles.tile_n),
            tile_k=even(tiles.k, tiles.tile_k),
        )

    @property
    def held_bytes(self) -> int:
        """Bytes in buffers, sums and workspace."""
        if self.is_whole:
            return self.workspace_bytes
        a_panel = self.tile_m * self.tile_k * self.job.a.itemsize
        b_panel = self.tile_n * self.tile_k * self.job.b.itemsize
        panels = self.a_slots * a_panel + self.b_slots * b_panel
        return (
            self.at_once * panels + self.sum_bytes + self.workspace_bytes + self.job.staging_bytes
        )

    @property
    def sum_bytes(self) -> int:
        return self.at_once * self.tile_m * self.tile_n * self.job.sum_itemsize

    @property
    def tile_count(self) -> int:
        """Number of tiles of C."""
        if self.is_whole:
            return 1
        steps = batch_steps(self.job.batch, self.at_once)
        slices = math.prod(map(count, self.job.batch, steps))
        return self._rows * self._columns * slices

    @property
    def piece_count(self) -> int:
        """Number of pieces that K is cut into."""
        return count(self.job.k, self.tile_k)

    @property
    def a_passes(self) -> int:
        """How many times a matrix of a is read for one product."""
        kept = self.piece_count * (1 if self.order == "rows" else self._rows)
        return 1 if self.a_slots >= kept else self._columns

    @property
    def b_passes(self) -> int:
        """How many times a matrix of b is read for one product."""
        kept = self.piece_count * (1 if self.order == "columns" else self._columns)
        return 1 if self.b_slots >= kept else self._rows

    @property
    def read_bytes(self) -> int:
        """Bytes read from both files, every pass counted."""
        a_is_kept = self.a_slots >= self.piece_count * self._rows
        b_is_kept = self.b_slots >= self.piece_count * self._columns
        return self.a_passes * self._pass_bytes(self.job.a, a_is_kept) + (
            self.b_passes * self._pass_bytes(self.job.b, b_is_kept)
        )

    @property
    def flops(self) -> int:
        """Multiplications and additions of the whole product."""
        return 2 * math.prod(self.job.batch) * self.job.m * self.job.n * self.job.k

    @property
    def written_bytes(self) -> int:
        job = self.job
        return math.prod(job.batch) * job.m * job.n * job.out_itemsize

    def steps(self, done: Collection[int] = ()) -> Iterator[Step]:
        """Yield the steps in the order they run, without those of the tiles that are ``done``."""
        job = self.job
        a_slots, b_slots = _Slots(self.a_slots), _Slots(self.b_slots)
        rows, columns = list(cuts(job.m, self.tile_m)), list(cuts(job.n, self.tile_n))
        pieces = list(cuts(job.k, self.tile_k)) or [slice(0, 0)]
        number = itertools.count()
        for at in self._batch_slices():
            a_at, b_at = pick(at, job.a.batch), pick(at, job.b.batch)
            a_slots.turn_to(a_at)
            b_slots.turn_to(b_at)
            tiles = list(itertools.product(range(len(rows)), range(len(columns))))
            if self.order == "columns":
                tiles.sort(key=lambda tile: tile[::-1])
            for i, j in tiles:
                if (tile := next(number)) in done:
                    continue
                for p, piece in enumerate(pieces):
                    yield Step(
                        Panel((*a_at, rows[i], piece), *a_slots.place((i, p))),
                        Panel((*b_at, piece, columns[j]), *b_slots.place((j, p))),
                        (*at, rows[i], columns[j]),
                        p == 0,
                        p == len(pieces) - 1,
                        tile,
                    )

    def to_dict(self) -> dict[str, Any]:
        """Return the schedule as plain numbers and strings, for programs."""
        return {
            "whole": self.is_whole,
            "tile_m": self.tile_m,
            "tile_n": self.tile_n,
            "tile_k": self.tile_k,
            "matrices_at_once": self.at_once,
            "tiles": self.tile_count,
            "pieces_of_k": self.piece_count,
            "order": self.order,
            "panels_of_a": self.a_slots,
            "panels_of_b": self.b_slots,
            "read_bytes": self.read_bytes,
            "written_bytes": self.written_bytes,
            "held_bytes": self.held_bytes,
            "budget_bytes": self.budget_bytes,
        }

    def __str__(self) -> str:
        held, budget = format_bytes(self.held_bytes), format_bytes(self.budget_bytes)
        a_name, b_name = self.job.a.name or "a", self.job.b.name or "b"
        if self.is_whole:
            tiles = "one product in memory: operands and result fit the budget"
            buffers = f"{held} of {budget}"
        else:
            tiles = (
                f"{_counted(self.tile_count, 'tile')} of C, {self.tile_m} x {self.tile_n}, "
                f"along {self.order}"
            )
            if self.at_once > 1:
                tiles += f", of {self.at_once} matrices at once"
            if self.piece_count > 1:
                tiles += f"; K in {self.piece_count} pieces of {self.tile_k}"
            buffers = (
                f"{held} of {budget}: {_counted(self.a_slots, 'panel')} of {a_name}, "
                f"{self.b_slots} of {b_name}, sums {format_bytes(self.sum_bytes)}"
            )
        passes = f"{a_name} {_times(self.a_passes)}, {b_name} {_times(self.b_passes)}"
        return "\n".join(
            [
                f"tiles      {tiles}",
                f"memory     {buffers}",
                f"reads      {format_bytes(self.read_bytes)}: {passes}",
                f"writes     {format_bytes(self.written_bytes)}",
            ]
        )

    @property
    def _rows(self) -> int:
        return count(self.job.m, self.tile_m)

    @property
    def _columns(self) -> int:
        return count(self.job.n, self.tile_n)

    def _batch_slices(self) -> Iterator[Box]:
        return batch_slices(self.job.batch, self.at_once)

    def _pass_bytes(self, side: Side, is_kept: bool) -> int:
        """Bytes of reading each matrix once that the batch asks for, unless it is still there."""
        batch = self.job.batch
        times, matrices = 1, 1
        is_again = not is_kept
        sides = (1,) * (len(batch) - len(side.batch)) + side.batch
        steps = batch_steps(batch, self.at_once)
        for own, size, step in zip(*map(reversed, (sides, batch, steps)), strict=True):
            if own == 1:  # the same matrices for each slice: there yet, if no others came between
                times *= count(size, step) if is_again else min(size, 1)
            else:
                matrices *= size
                is_again |= size > step
        return times * matrices * side.size * self.job.k * side.itemsize


def whole_schedule(job: Job, held_bytes: int, budget_bytes: int) -> Schedule:
    """Return the schedule that reads both files whole and multiplies them in memory.

    ``held_bytes`` is what operands, result and the workspace of `matmul` take.
    """
    return Schedule(
        job=job,
        order="rows",
        tile_m=max(job.m, 1),
        tile_n=max(job.n, 1),
        tile_k=max(job.k, 1),
        a_slots=1,
        b_slots=1,
        workspace_bytes=held_bytes,
        budget_bytes=budget_bytes,
        at_once=max(math.prod(job.batch), 1),
        is_whole=True,
    )


def choose_tiles(
    m: int,
    n: int,
    k: int,
    *,
    panel_bytes: int,
    tile_bytes: int,
    budget_bytes: int,
) -> Tiles | None:
    """Return the largest well-shaped tiles that fit a budget, or None if not even one element fits.

    Parameters
    ----------
    m, n, k : int
        Sizes of the product.
    panel_bytes : int
        Bytes held for each element of a panel of A or B.
    tile_bytes : int
        Bytes held for each element of a tile of C (sums and the product being added).
    budget_bytes : int
        What panels and tile together may take.

    Notes
    -----
    The work on a tile is ``tile_m·tile_n·tile_k`` and its traffic ``tile_m·tile_k + tile_k·tile_n``
    read and ``tile_m·tile_n`` added, so the smallest side is doubled first.
    """

    def held(tile_m: int, tile_n: int, tile_k: int) -> int:
        return panel_bytes * tile_k * (tile_m + tile_n) + tile_bytes * tile_m * tile_n

    limits = [max(m, 1), max(n, 1), max(k, 1)]
    tile = [1, 1, 1]
    if held(1, 1, 1) > budget_bytes:
        return None
    growing = {0, 1, 2}
    while growing:
        axis = min(growing, key=lambda i: (tile[i], i))
        bigger = tile.copy()
        bigger[axis] = min(2 * tile[axis], limits[axis])
        if bigger == tile or held(*bigger) > budget_bytes:
            growing.discard(axis)
        else:
            tile = bigger
    return Tiles(
        m=m,
        n=n,
        k=k,
        tile_m=tile[0],
        tile_n=tile[1],
        tile_k=tile[2],
        workspace_bytes=held(*tile),
    )


def everything(shape: tuple[int, ...]) -> Box:
    """Return the box of all elements."""
    return tuple(slice(0, size) for size in shape)


def sizes(box: Box) -> tuple[int, ...]:
    """Return the shape of a box."""
    return tuple(part.stop - part.start for part in box)


class _Slots:
    """Which panel of the matrix at hand lies in which buffer."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))  # least recently used first
        self._holds: dict[int, tuple[int, int]] = {}
        self._matrix: Box | None = None

    def turn_to(self, matrix: Box) -> None:
        """Forget the panels unless they are of this matrix."""
        if matrix != self._matrix:
            self._matrix = matrix
            self._holds.clear()

    def place(self, panel: tuple[int, int]) -> tuple[int, bool]:
        """Return the buffer of a panel, and whether the panel must be read into it."""
        slot = next((slot for slot, held in self._holds.items() if held == panel), None)
        is_read = slot is None
        if slot is None:
            slot = self._free[0]
            self._holds[slot] = panel
        self._free.remove(slot)
        self._free.append(slot)
        return slot, is_read


def _part(size: int, tile: int, most: int) -> int:
    """Return into what a tile is cut: an even part if no tile is beside it, else a divisor."""
    return even(tile, most) if tile >= size else divisor(tile, most)


def _touched(size: int, tile: int, chunk: int) -> float:
    """Return how many elements lie in the chunks that tiles reach into, on average."""
    return size if tile >= size else size / tile * (tile + chunk - math.gcd(tile, chunk))


def _times(passes: int) -> str:
    return "once" if passes == 1 else f"{passes} times"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
