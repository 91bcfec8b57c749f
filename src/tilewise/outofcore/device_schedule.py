"""How GPUs multiply operands that stay in host memory: pure data, nothing is executed.

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
from ..kernels.steps import round_up
from .cuts import count, cuts
from .schedule import Box, batch_slices, pick

__all__ = [
    "Factor",
    "Job",
    "Launch",
    "Layout",
    "Load",
    "Rates",
    "Schedule",
    "Store",
]

#: Where all panels stay, so many of them make a launch at most: longer ones keep C back.
_STRIP = 4

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
    stretch_s: float = 0.0  #: to begin on a stretch of such a file


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """What a schedule needs to know of one operand in host memory."""

    size: int  #: m of a, n of b
    itemsize: int
    along_k: bool  #: whether neighbours along K are neighbours in memory
    batch: tuple[int, ...] = ()  #: its own batch axes; 1 where it broadcasts
    repeats_size: bool = False  #: whether the rows of a, or columns of b, are all one
    repeats_k: bool = False
    chunk: int = 1  #: so many rows of a, or columns of b, are read as one

    def stored(self, size: int, k: int) -> tuple[int, int]:
        """Return what of so much of both axes there is to copy: an axis that repeats has one."""
        return 1 if self.repeats_size else size, 1 if self.repeats_k else k

    def nbytes(self, size: int, k: int) -> int:
        return math.prod(self.stored(size, k)) * self.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A product of host operands, as far as a schedule depends on it."""

    batch: tuple[int, ...]
    k: int
    a: Factor
    b: Factor
    sum_itemsize: int  #: of C as it is on the device
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

    def panel_bytes(self, side: Literal[0, 1], size: int, k: int) -> int:
        """Return what a panel of one matrix takes on the device."""
        return self.store(side, size, k).nbytes

    def store(self, side: Literal[0, 1], size: int, k: int, **of: Any) -> Store:
        """Return where panels of a (0) or b (1) lie on the device."""
        x = self.b if side else self.a
        own, depth = x.stored(size, k)
        lines, width = (own, depth) if x.along_k else (depth, own)
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


class Load(NamedTuple):
    """A part of an operand goes to a slot, where it begins ``at`` rows of a, or columns of b."""

    side: Literal[0, 1]
    box: Box  #: along the operand's axes in memory, of which those that repeat have one place
    slot: int
    at: int
    after: int  #: the launch that is the last to read what was there; -1 for none


class Layout(NamedTuple):
    """How an operand of a launch lies in the device's memory."""

    offset: int  #: bytes from where its buffer begins
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Launch(NamedTuple):
    """A part of C is computed, when all loads before it are done."""

    a_slot: int
    a_at: int
    b_slot: int
    b_at: int
    c: Box
    k: int  #: how much of K
    c_slot: int
    is_first: bool  #: of the pieces of K of this part
    is_last: bool
    tile: int  #: number of the part, from 0 in the order they run

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(part.stop - part.start for part in self.c)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How one GPU computes its share of a product within a budget: loads, launches, buffers.

    ``order`` is how the tiles of C follow each other. "corner": both operands stay, their panels
    come in turn, and each is multiplied at once with all that is there. "rows": a panel of a stays
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
        """What the largest launch writes, or all of C."""
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
            math.prod(part.stop - part.start for part in load.box) * sides[load.side].itemsize
            for load in self.operations()
            if isinstance(load, Load)
        )

    @property
    def written_bytes(self) -> int:
        """Bytes that come back."""
        return self.job.matrices * self.job.m * self.job.n * self.job.sum_itemsize

    def operations(self, done: Collection[int] = ()) -> Iterator[Load | Launch]:
        """Yield loads and launches, each load before the launches that need it.

        Without what is for tiles alone that are ``done``.
        """
        if self.order != "corner":
            return self._lines(done)
        return self._corner_without(done) if done else self._corner()

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
        return Layout(offset, (*lead, *own), (*outer, rows, cols))

    def c_layout(self, launch: Launch) -> Layout:
        """Return where a launch writes."""
        store, job = self.c_store(launch), self.job
        offset = launch.c_slot * self.c_slot_bytes
        if self.holds_c:
            row, col = launch.c[-2].start, launch.c[-1].start
            line, place = (row, col) if job.along_n else (col, row)
            offset = line * store.pitch + place * store.itemsize
        return Layout(offset, launch.shape, store.strides(not job.along_n))

    def c_store(self, launch: Launch) -> Store:
        """Return how the result of a launch lies in its slot."""
        lead, (rows, cols) = launch.shape[:-2], launch.shape[-2:]
        if self.holds_c:
            rows, cols = self.job.m, self.job.n
        return self.job.c_store(rows, cols, lead=lead)

    def seconds(self, rates: Rates, compute_s: float | None = None) -> tuple[float, str]:
        """Return the time that all is expected to take, and what limits it."""
        read, written = self._moved()
        bounds = {
            "compute": self.compute_s if compute_s is None else compute_s,
            "the bus": max(read, written) / rates.bus_bytes,
            "the host's memory": (read + written * (1 + self.job.is_fresh)) / rates.host_bytes,
            "hand-offs between threads": self.launches * rates.launch_s,
            "the disk": (read + written) / rates.disk_bytes,
            "short stretches of the files": self._stretches() * rates.stretch_s,
        }
        limit = max(bounds, key=lambda name: bounds[name])
        first = sum(
            math.prod(store.lead) * store.lines * store.pitch for store in self._first_stores()
        )
        # Nothing is computed while the first panels come, and nothing else while the last part of C
        # leaves; and a lone buffer is not filled while it is read, or emptied while it is written.
        last = self.job.c_store(self.tile_m, self.tile_n).nbytes * self.at_once
        alone = (first + last) / min(rates.bus_bytes, rates.disk_bytes)
        lines = count(self.job.m, self.tile_m), count(self.job.n, self.tile_n)
        if self.order == "corner":  # each panel brings more work than the one before it
            alone += bounds["compute"] / min(3, max(lines))
        outer = {"rows": 0, "columns": 1}.get(self.order)
        if outer is not None and (self.a_slots, self.b_slots)[outer] < min(lines[outer], 2):
            alone += (lines[outer] - 1) * first / rates.bus_bytes
        if self.c_slots == 1 and not self.holds_c:
            alone += written / rates.bus_bytes
        return rates.start_s + bounds[limit] + alone, limit

    @property
    def launches(self) -> int:
        """Number of launches, where panels come and go."""
        tiles = count(self.job.m, self.tile_m) * count(self.job.n, self.tile_n)
        return count(self.job.matrices, self.at_once) * tiles * self.pieces

    def _moved(self) -> tuple[int, int]:
        """Return bytes read and written, by formula; what goes back and forth counts whole."""
        job = self.job
        each_a, each_b = job.a.nbytes(job.m, job.k), job.b.nbytes(job.n, job.k)
        count_a, count_b = (max(math.prod(x.batch), 1) for x in (job.a, job.b))
        a_passes, b_passes = self._passes()
        read = each_a * count_a * a_passes + (0 if job.is_gram else each_b * count_b * b_passes)
        return read, self.written_bytes

    def _passes(self) -> tuple[int, int]:
        """Return how often each operand is read; what goes back and forth counts whole."""
        rows, columns = count(self.job.m, self.tile_m), count(self.job.n, self.tile_n)
        a_passes = b_passes = 1
        if self.order != "corner":
            if self.pieces > 1 or (self.order == "columns" and self.a_slots < rows):
                a_passes = columns
            if self.pieces > 1 or (self.order == "rows" and self.b_slots < columns):
                b_passes = rows
        return a_passes, b_passes

    def _stretches(self) -> int:
        """Return in how many stretches operands in files are read, and a result is written."""
        job = self.job
        columns = count(job.n, self.tile_n)
        found = job.matrices * (count(job.m, self.tile_m) if columns == 1 else job.m * columns)
        for x, tile, passes in zip(
            (job.a, job.b), (self.tile_m, self.tile_n), self._passes(), strict=True
        ):
            panels = count(x.size, tile)
            if x.along_k:
                each = panels if self.pieces == 1 else x.size * self.pieces
            else:
                each = self.pieces if panels == 1 else job.k * panels
            found += max(math.prod(x.batch), 1) * passes * each
        return found

    def _first_stores(self) -> list[Store]:
        job = self.job
        lead = (self.at_once,) if self.at_once > 1 else ()
        stores = [job.store(0, self.tile_m, self.tile_k, lead=lead)]
        if not job.is_gram:
            stores.append(job.store(1, self.tile_n, self.tile_k, lead=lead))
        return stores

    def _store(self, side: Literal[0, 1], slots: int, tile: int) -> Store:
        x = self.job.b if side else self.job.a
        if self.order == "corner":
            return self.job.store(side, x.size, self.job.k)
        lead: tuple[int, ...] = ()
        if self.at_once > 1:
            first = next(batch_slices(self.job.batch, self.at_once))
            lead = tuple(part.stop - part.start for part in pick(first, x.batch))
        return self.job.store(side, tile, self.tile_k, slots=slots, lead=lead)

    def _corner(self) -> Iterator[Load | Launch]:
        job = self.job
        rows, columns = list(cuts(job.m, self.tile_m)), list(cuts(job.n, self.tile_n))
        number = itertools.count()
        at = tuple(slice(0, 1) for _ in job.batch)

        def launch(these: list[slice], those: list[slice]) -> Launch:
            down, across = _joined(these), _joined(those)
            c, tile = (*at, down, across), next(number)
            slot = tile % self.c_slots
            return Launch(0, down.start, 0, across.start, c, job.k, slot, True, True, tile)

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
        if self.order == "corner":
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


def _strips(parts: list[slice]) -> Iterator[list[slice]]:
    for start in range(0, len(parts), _STRIP):
        yield parts[start : start + _STRIP]


def _length(part: slice) -> int:
    length: int = part.stop - part.start
    return length


def _joined(parts: list[slice]) -> slice:
    return slice(parts[0].start, parts[-1].stop)
