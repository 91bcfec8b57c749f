"""How GPUs multiply what is in host memory, all of it or some: pure data, nothing is executed.

A `Schedule` says which part of A and B is copied into which buffer of the device, which part of C
is launched after that and leaves which buffer, and in what order; from sizes, budget and rates. K
is cut only in pieces that the kernels themselves add up one by one, so that every schedule gives
the same bits. Which schedule is taken is chosen in ``device_choice``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from .._memory import format_bytes
from .._operand import Box, batch_slices, batch_steps, pick
from .cuts import count, cuts
from .device_job import Factor, Job, Store
from .schedule import sizes

__all__ = ["Launch", "Layout", "Load", "Schedule"]

#: Slices of a batch axis after which the rest are alike: more than an operand has slots for.
_FEW_SLICES = 4
#: As many panels of an operand as differ from one another, besides those it has slots for.
_FEW_PANELS = 4

#: Where all panels stay, so many of them make a launch at most: longer ones keep C back.
_STRIP = 4


class Load(NamedTuple):
    """A part of an operand goes to a slot, where it begins ``at`` rows of a, or columns of b."""

    side: Literal[0, 1]
    box: Box  #: along the operand's axes in memory, of which those that repeat have one place
    slot: int
    at: int
    after: int  #: the launch that is the last to read what was there; -1 for none

    @property
    def shape(self) -> tuple[int, ...]:
        return sizes(self.box)


class Layout(NamedTuple):
    """How an operand of a launch lies in the device's memory."""

    offset: int  #: bytes from where its buffer begins, or the array
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    is_aligned: bool
    """Whether the offset is a multiple of 16; in place, whether that of every launch is."""


class Launch(NamedTuple):
    """A part of C is computed, when all loads before it are done."""

    a_slot: int
    a_at: int
    b_slot: int
    b_at: int
    c: Box
    k_at: int  #: where in K it begins
    k: int  #: how much of K
    c_slot: int
    is_first: bool  #: of the pieces of K of this part
    is_last: bool
    tile: int  #: number of the part, from 0 in the order they run
    same: Literal[-1, 0, 1] = -1
    """The operand of which the launch before has read the same part: 0 for a, 1 for b."""

    @property
    def shape(self) -> tuple[int, ...]:
        return sizes(self.c)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How one GPU computes its share of a product within a budget: loads, launches, buffers.

    ``order`` is how the tiles of C follow each other. "corner": both operands stay, their panels
    come in turn, and each is multiplied at once with all that is there; or both come whole, and
    then tiles follow each other. "rows": a panel of a stays
    while those of b pass, back and forth; "columns" the other way round.
    """

    job: Job
    order: Literal["corner", "rows", "columns"]
    tile_m: int
    tile_n: int
    tile_k: int
    a_slots: int
    b_slots: int
    c_slots: int
    budget_bytes: int
    at_once: int = 1  #: matrices of the batch in one launch; more than one only where whole
    loads_first: bool = False  #: in a corner: whether all is there before anything is launched
    workspace_bytes: int = 0
    compute_s: float = 0.0  #: what the launches are expected to take

    @property
    def pieces(self) -> int:
        """Number of pieces that K is cut into."""
        return max(count(self.job.k, self.tile_k), 1)

    @property
    def a_store(self) -> Store:
        return self._store(0, self.a_slots, self.tile_m)

    @property
    def b_store(self) -> Store:
        return self._store(1, self.b_slots, self.tile_n)

    @property
    def holds_c(self) -> bool:
        """Whether all of C has a place, and launches write parts of it."""
        return self.order == "corner" and self.c_slots == 1

    @property
    def c_slot_bytes(self) -> int:
        """What the largest launch writes, or all of C; nothing if C is on the device."""
        if self.job.c_strides is not None:
            return 0
        if self.holds_c:
            return self.job.c_store(self.job.m, self.job.n).slot_bytes
        rows, cols, strip = self.tile_m, self.tile_n, 1
        if self.order == "corner":
            strip = _STRIP
        job = self.job
        shapes = {(min(rows * strip, job.m), cols), (rows, min(cols * strip, job.n))}
        lead = (self.at_once,) if self.at_once > 1 else ()
        return max(job.c_store(*shape, lead=lead).slot_bytes for shape in shapes)

    @property
    def held_bytes(self) -> int:
        """Bytes of the device in buffers and workspace."""
        b_bytes = 0 if self.job.is_gram else self.b_store.nbytes
        c_bytes = self.c_slots * self.c_slot_bytes
        return self.a_store.nbytes + b_bytes + c_bytes + self.workspace_bytes

    @property
    def read_bytes(self) -> int:
        """Bytes that go to the device."""
        sides = (self.job.a, self.job.b)
        return sum(
            times * math.prod(each.shape) * sides[each.side].itemsize
            for each, times in self.kinds()
            if isinstance(each, Load)
        )

    @property
    def tile_count(self) -> int:
        """Number of parts of C that are computed as one."""
        return sum(
            times for each, times in self.kinds() if isinstance(each, Launch) and each.is_last
        )

    @property
    def written_bytes(self) -> int:
        """Bytes that come back."""
        return self.job.matrices * self.job.m * self.job.n * self.job.c_bytes

    def operations(self, done: Collection[int] = ()) -> Iterator[Load | Launch]:
        """Yield loads and launches, each load before the launches that need it.

        Without what is for tiles alone that are ``done``.
        """
        operations = self._lines(done)
        if self.order == "corner":
            operations = self._corner_without(done) if done else self._corner()
        sides = self.job.a, self.job.b
        for each in _compared(operations):
            if isinstance(each, Launch) or not sides[each.side].is_there:
                yield each

    def kinds(self) -> list[tuple[Load | Launch, int]]:
        """Return one of the operations of each shape, and how many of them there are.

        Nothing is enumerated for each of many matrices, or tiles. Slices of a batch differ from one
        another in what is still there of those before alone; along an axis all but the first few
        are alike, so what four and five of them count says what any number does. So it is with
        the lines of tiles, and with the tiles of a line.
        """
        found: dict[Any, tuple[Load | Launch, int]] = {}
        for short, weight in self._shortened():
            for each in short.operations():
                kind: tuple[Any, ...] = each[:1], each.shape
                if isinstance(each, Launch):
                    kind = each.shape, (each.k, each.a_at, each.b_at, each.is_last, each.same)
                first, times = found.get(kind, (each, 0))
                found[kind] = first, times + weight
        return [(each, times) for each, times in found.values() if times]

    def _shortened(self) -> Iterator[tuple[Schedule, int]]:
        """Yield schedules of less whose operations, weighted, add up to those of this."""
        job, ways = self.job, []
        for size, step in zip(job.batch, batch_steps(job.batch, self.at_once), strict=True):
            slices, rest = divmod(size, step)
            few, more = _FEW_SLICES * step + rest, (_FEW_SLICES + 1) * step + rest
            extra = slices - _FEW_SLICES
            ways.append([(size, 1)] if extra < 2 else [(few, 1 - extra), (more, extra)])
        down = [(job.m, self.a_slots, 1)]
        across = [(job.n, self.b_slots, 1)]
        if self.order != "corner":
            down = _fewer(job.m, self.tile_m, self.a_slots, self.pieces)
            across = _fewer(job.n, self.tile_n, self.b_slots, self.pieces)
        for (m, a_slots, rows), (n, b_slots, columns) in itertools.product(down, across):
            for way in itertools.product(*ways):
                box = tuple(slice(0, size) for size, _ in way)
                a, b = (pick(box, x.batch) for x in (job.a, job.b))
                less = replace(
                    job,
                    batch=sizes(box),
                    a=replace(job.a, size=m, batch=sizes(a)),
                    b=replace(job.b, size=n, batch=sizes(b)),
                )
                weight = rows * columns * math.prod(weight for _, weight in way)
                yield replace(self, job=less, a_slots=a_slots, b_slots=b_slots), weight

    def tiles(self) -> Iterator[tuple[int, Box]]:
        """Yield the number and the place of each part of C that is computed as one."""
        for each in self.operations():
            if isinstance(each, Launch) and each.is_last:
                yield each.tile, each.c

    def layout(self, launch: Launch, side: Literal[0, 1]) -> Layout:
        """Return how a launch finds its part of a (0) or b (1)."""
        x, slot, at = self.job.a, launch.a_slot, launch.a_at
        if side:
            x, slot, at = self.job.b, launch.b_slot, launch.b_at
        if x.strides is not None:
            return self._in_place(x, x.strides, launch, side)
        store = self.b_store if side and not self.job.is_gram else self.a_store
        lead = tuple(part.stop - part.start for part in pick(launch.c[:-2], x.batch))
        *outer, rows, cols = replace(store, lead=lead).strides(x.along_k == (side == 1))
        size = launch.shape[-1 if side else -2]
        if x.repeats_size:
            rows, cols, at = (rows, 0, 0) if side else (0, cols, 0)
        if x.repeats_k:
            rows, cols = (0, cols) if side else (rows, 0)
        offset = slot * store.slot_bytes + at * (store.pitch if x.along_k else store.itemsize)
        own = (launch.k, size) if side else (size, launch.k)
        return Layout(offset, (*lead, *own), (*outer, rows, cols), offset % 16 == 0)

    def c_layout(self, launch: Launch) -> Layout:
        """Return where a launch writes."""
        job = self.job
        if job.c_strides is not None:
            is_aligned = self._begins_aligned(job.batch, job.c_strides, "mn")
            offset = _offset(launch.c, job.c_strides)
            return Layout(offset, launch.shape, job.c_strides, is_aligned)
        store = self.c_store(launch)
        offset = launch.c_slot * self.c_slot_bytes
        if self.holds_c:
            row, col = launch.c[-2].start, launch.c[-1].start
            line, place = (row, col) if job.along_n else (col, row)
            offset = line * store.pitch + place * store.itemsize
        is_aligned = offset % 16 == 0
        return Layout(offset, launch.shape, store.strides(not job.along_n), is_aligned)

    def c_store(self, launch: Launch) -> Store:
        """Return how the result of a launch lies in its slot."""
        lead, (rows, cols) = launch.shape[:-2], launch.shape[-2:]
        if self.holds_c:
            rows, cols = self.job.m, self.job.n
        return self.job.c_store(rows, cols, lead=lead)

    @property
    def launches(self) -> int:
        """Number of launches, where panels come and go."""
        tiles = count(self.job.m, self.tile_m) * count(self.job.n, self.tile_n)
        return count(self.job.matrices, self.at_once) * tiles * self.pieces

    def _store(self, side: Literal[0, 1], slots: int, tile: int) -> Store:
        x = self.job.b if side else self.job.a
        if self.order == "corner":
            return self.job.store(side, x.size, self.job.k)
        lead: tuple[int, ...] = ()
        if self.at_once > 1:
            first = tuple(slice(0, step) for step in batch_steps(self.job.batch, self.at_once))
            lead = sizes(pick(first, x.batch))
        return self.job.store(side, tile, self.tile_k, slots=slots, lead=lead)

    def _in_place(
        self, x: Factor, strides: tuple[int, ...], launch: Launch, side: Literal[0, 1]
    ) -> Layout:
        """Return how a launch finds its part of an operand that is in the device's memory."""
        own = pick(launch.c[:-2], x.batch)
        part, size = launch.c[-1 if side else -2], launch.shape[-1 if side else -2]
        if x.repeats_size:
            part = slice(0, 1)
        depth = slice(launch.k_at, launch.k_at + launch.k)
        last, shape = (part, depth), (size, launch.k)
        if side:
            last, shape = (depth, part), (launch.k, size)
        is_aligned = self._begins_aligned(x.batch, strides, "kn" if side else "mk")
        offset = _offset((*own, *last), strides)
        return Layout(offset, (*sizes(own), *shape), strides, is_aligned)

    def _begins_aligned(self, batch: tuple[int, ...], strides: tuple[int, ...], axes: str) -> bool:
        """Say whether all tiles of an array in place begin at multiples of 16 bytes from it.

        An axis that is not cut has one place to begin at, whatever its size.
        """
        job = self.job
        cut = {"m": (job.m, self.tile_m), "n": (job.n, self.tile_n), "k": (job.k, self.tile_k)}
        pairs = [(size, 1) for size in batch] + [cut[axis] for axis in axes]
        return all(
            tile * step % 16 == 0
            for (size, tile), step in zip(pairs, strides, strict=True)
            if size > tile
        )

    def _corner(self) -> Iterator[Load | Launch]:
        job = self.job
        rows, columns = list(cuts(job.m, self.tile_m)), list(cuts(job.n, self.tile_n))
        number = itertools.count()
        at = tuple(slice(0, 1) for _ in job.batch)

        def launch(these: list[slice], those: list[slice]) -> Launch:
            down, across = _joined(these), _joined(those)
            c, tile = (*at, down, across), next(number)
            slot = tile % self.c_slots
            return Launch(0, down.start, 0, across.start, c, 0, job.k, slot, True, True, tile)

        if self.loads_first:
            for side, size in ((0, job.m), (1, job.n))[: 1 if job.is_gram else 2]:
                yield self._load(side, at, slice(0, size), slice(0, job.k), 0, 0, -1)
            for part, strip in itertools.product(rows, _strips(columns)):
                yield launch([part], strip)
            return
        if job.is_gram:
            for i, part in enumerate(rows):
                yield self._load(0, at, part, slice(0, job.k), 0, part.start, -1)
                for strip in _strips(columns[: i + 1]):
                    yield launch([part], strip)
                for strip in _strips(rows[:i]):
                    yield launch(strip, [part])
            return
        # In step with each other; where both are as far, the smaller operand goes first.
        small_a = job.a.nbytes(job.m, job.k) <= job.b.nbytes(job.n, job.k)
        turns = sorted(
            [(i / len(rows), not small_a, 0, i) for i in range(len(rows))]
            + [(j / len(columns), small_a, 1, j) for j in range(len(columns))]
        )
        done = [0, 0]
        for _, _, side, i in turns:
            if side == 0:
                part = rows[i]
                yield self._load(0, at, part, slice(0, job.k), 0, part.start, -1)
                for strip in _strips(columns[: done[1]]):
                    yield launch([part], strip)
            else:
                part = columns[i]
                yield self._load(1, at, part, slice(0, job.k), 0, part.start, -1)
                for strip in _strips(rows[: done[0]]):
                    yield launch(strip, [part])
            done[side] += 1

    def _corner_without(self, done: Collection[int]) -> Iterator[Load | Launch]:
        """Yield the launches of tiles that are not done, and the panels that these need."""
        operations = list(self._corner())
        left = [each for each in operations if isinstance(each, Launch) and each.tile not in done]
        for each in operations:
            if isinstance(each, Launch):
                if each.tile not in done:
                    yield each
                continue
            x = self.job.b if each.side else self.job.a
            stop = each.at + (x.size if x.repeats_size else _length(each.box[-2:][each.side]))
            sides = (0, 1) if self.job.is_gram else (each.side,)
            parts = (launch.c[-2:][side] for launch in left for side in sides)
            if any(part.start < stop and each.at < part.stop for part in parts):
                yield each

    def _lines(self, done: Collection[int]) -> Iterator[Load | Launch]:
        job = self.job
        rows, columns = list(cuts(job.m, self.tile_m)), list(cuts(job.n, self.tile_n))
        pieces = list(cuts(job.k, self.tile_k)) or [slice(0, 0)]
        slots = (_Slots(self.a_slots), _Slots(self.b_slots))
        number = itertools.count()
        launches = tiles = 0
        for at in batch_slices(job.batch, self.at_once):
            for i, j in self._tiles(len(rows), len(columns)):
                if (tile := next(number)) in done:
                    continue
                for p, piece in enumerate(pieces):
                    used = []
                    for side, x, part in ((0, job.a, rows[i]), (1, job.b, columns[j])):
                        own = pick(at, x.batch)
                        key = (own, 0 if x.repeats_size else part.start, piece.start)
                        slot, after = slots[side].place(key, launches)
                        if after is not None:
                            yield self._load(side, own, part, piece, slot, 0, after)
                        used.append(slot)
                    yield Launch(
                        used[0],
                        0,
                        used[1],
                        0,
                        (*at, rows[i], columns[j]),
                        piece.start,
                        piece.stop - piece.start,
                        tiles % self.c_slots,
                        p == 0,
                        p == len(pieces) - 1,
                        tile,
                    )
                    launches += 1
                tiles += 1

    def _tiles(self, rows: int, columns: int) -> Iterator[tuple[int, int]]:
        """Yield the tiles of C line by line, every other line backwards."""
        outer, inner = (rows, columns) if self.order == "rows" else (columns, rows)
        for i in range(outer):
            for j in range(inner) if i % 2 == 0 else reversed(range(inner)):
                yield (i, j) if self.order == "rows" else (j, i)

    def _load(
        self, side: int, at: Box, part: slice, piece: slice, slot: int, start: int, after: int
    ) -> Load:
        x = self.job.b if side else self.job.a
        if self.order == "corner":
            at = pick(at, x.batch)
        if x.repeats_size:
            part, start = slice(0, 1), 0
        if x.repeats_k:
            piece = slice(0, 1)
        last = (piece, part) if side else (part, piece)
        return Load(1 if side else 0, (*at, *last), slot, start, after)

    def to_dict(self) -> dict[str, Any]:
        """Return the schedule as plain numbers and strings, for programs."""
        return {
            "order": self.order,
            "tile_m": self.tile_m,
            "tile_n": self.tile_n,
            "tile_k": self.tile_k,
            "matrices_at_once": self.at_once,
            "loads_first": self.loads_first,
            "pieces_of_k": self.pieces,
            "panels_of_a": self.a_slots,
            "panels_of_b": self.b_slots,
            "read_bytes": self.read_bytes,
            "written_bytes": self.written_bytes,
            "held_bytes": self.held_bytes,
            "budget_bytes": self.budget_bytes,
        }

    def __str__(self) -> str:
        m, n, size = self.tile_m, self.tile_n, format_bytes
        job = self.job
        there = [name for name, x in (("a", job.a), ("b", job.b)) if x.is_there]
        if self.loads_first:
            tiles = f"a and b whole, then {m} x {n} of C at a time"
            if job.is_gram:
                tiles = f"a whole, of which b is the transpose, then {m} x {n} of C at a time"
        elif self.order == "corner" and len(there) == 2:
            tiles = f"{m} x {n} of C at a time"
        elif self.order == "corner" and there:
            name, panels = "b", f"{n} columns"
            if job.b.is_there:
                name, panels = "a", f"{m} rows"
            tiles = f"{name} in panels of {panels}, multiplied as they come"
        elif self.order == "corner":
            b_rows = "" if job.is_gram else f", b in panels of {n} columns"
            tiles = f"a in panels of {m} rows{b_rows}, multiplied as they come"
            if job.is_gram:
                tiles += "; b is a's transpose and is not copied again"
        elif self.at_once > 1:
            tiles = f"{self.at_once} matrices of the batch at a time"
        else:
            number = count(job.m, m) * count(job.n, n) * job.matrices
            tiles = f"{number} tiles of C, {m} x {n}, along {self.order}"
            if self.pieces > 1:
                tiles += f"; K in {self.pieces} pieces of {self.tile_k}"
        if there:
            tiles += f"; {' and '.join(there)} read in place"
        if job.c_strides is not None:
            tiles += "; c written in place"
        held, budget = size(self.held_bytes), size(self.budget_bytes)
        return "\n".join(
            [
                f"tiles      {tiles}",
                f"on device  {held} of {budget} (workspace {size(self.workspace_bytes)})",
                f"bus        {size(self.read_bytes)} in, {size(self.written_bytes)} out",
            ]
        )


class _Slots:
    """Which panel lies in which slot, and which launch was the last to read it."""

    def __init__(self, slots: int) -> None:
        self._slots: dict[int, tuple[Any, int]] = dict.fromkeys(range(slots), (None, -1))

    def place(self, key: Any, launch: int) -> tuple[int, int | None]:
        """Return the slot of a panel that ``launch`` will read.

        If it has to be loaded, the last launch that reads what it replaces comes with it.
        """
        found = next((slot for slot, (held, _) in self._slots.items() if held == key), None)
        after = None
        if found is None:
            found = next(iter(self._slots))  # the one not used for the longest
            after = self._slots[found][1]
        del self._slots[found]
        self._slots[found] = (key, launch)
        return found, after


def _compared(operations: Iterator[Load | Launch]) -> Iterator[Load | Launch]:
    """Yield the operations, launches with the operand that each shares with the one before."""
    read: tuple[Any, ...] = (None, None)
    for each in operations:
        if isinstance(each, Load):
            if read[each.side] is not None and read[each.side][0] == each.slot:
                read = (None, read[1]) if each.side == 0 else (read[0], None)
            yield each
            continue
        now = (
            (each.a_slot, each.a_at, each.c[-2], each.k_at, each.k),
            (each.b_slot, each.b_at, each.c[-1], each.k_at, each.k),
        )
        if read[0] == now[0]:
            each = each._replace(same=0)
        elif read[1] == now[1]:
            each = each._replace(same=1)
        read = now
        yield each


def _offset(box: Box, strides: tuple[int, ...]) -> int:
    return sum(part.start * step for part, step in zip(box, strides, strict=True))


def _strips(parts: list[slice]) -> Iterator[list[slice]]:
    for start in range(0, len(parts), _STRIP):
        yield parts[start : start + _STRIP]


def _fewer(size: int, tile: int, slots: int, pieces: int) -> list[tuple[int, int, int]]:
    """Return sizes of fewer panels, slots for them, and weights by which they add up to all of it.

    Lines go back and forth, so what two lines more add is what any two do: all but those at the
    edges, and those that are there still when a line begins, are alike.
    """
    panels = count(size, tile)
    stay = slots >= panels
    few = _FEW_PANELS + (0 if stay else slots)
    few += (panels - few) % 2
    extra = (panels - few) // 2
    if extra < 2 or (stay and pieces > 1):
        return [(size, slots, 1)]
    return [
        (size - (panels - n) * tile, n if stay else slots, weight)
        for n, weight in ((few, 1 - extra), (few + 2, extra))
    ]


def _length(part: slice) -> int:
    length: int = part.stop - part.start
    return length


def _joined(parts: list[slice]) -> slice:
    return slice(parts[0].start, parts[-1].stop)
