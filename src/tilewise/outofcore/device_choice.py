"""Which schedule a GPU multiplies host operands by, and which part of C each of several gets.

Pure. Candidates differ in what stays on the device: both operands, one of them, a batch's
matrices, or a tile of C; the one that is expected to be done first is taken.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

from .._operand import Box, batch_steps
from ..kernels.steps import round_up
from .cuts import count, cuts, even
from .device_job import Factor, Job, Rates
from .device_schedule import Schedule
from .device_time import expected

__all__ = ["candidates", "choose", "deal", "least_bytes", "resident", "sample"]

#: Of the tiles of every kernel this is a multiple.
_GRAIN = 128

#: Panels of an operand where all of it stays on the device, if both are of a size: more of them
#: start sooner, fewer are handed over faster. Large products have time for more.
_PANELS, _PANELS_OF_LARGE, _LARGE_BYTES = 4, 8, 1 << 30
#: Where the other operand comes whole before the first is multiplied, so many times more of them.
_FINER = 4
#: Smaller panels cost more to hand over than they gain, and lines of memory shorter than the second
#: are slow to copy on the host (docs/facts.md). Where only one operand is cut, half will do.
_PANEL_BYTES, _LINE_BYTES = 32 << 20, 8 << 10
#: Where K is cut, this many panels of each operand are on the device: one at work, two on the way.
_RING = 3

#: A launch is computed whole, or in so many parts: these take less workspace for the operand that
#: is cut, which stays.
_PARTS = (1, 2, 4)

#: Of the candidates that look best, so many are completed by their kernels, of each of these ways.
_TRIED = 4

_SAMPLE = 1024

#: A copy below this does not fill the bus, so many small matrices go together.
_CHUNK_BYTES = 16 << 20
_MOST_CHUNKS = 16
_LARGEST_CHUNK = 256 << 20

#: Completes a schedule by workspace and time of its launches; None if they do not fit.
Fit = Callable[[Schedule], Schedule | None]


def choose(
    job: Job, budget_bytes: int, rates: Rates, fit: Fit, workspace: float = 0.0
) -> Schedule | None:
    """Return the schedule that is expected to be done first, or None if none fits the budget.

    Parameters
    ----------
    job : Job
    budget_bytes : int
    rates : Rates
    fit : callable
        Completes a candidate by what its launches really take.
    workspace : float
        About what a launch takes, for each byte of its operands.

    Notes
    -----
    Where both operands fit, they are read once, and nothing moves less; where C fits too, no launch
    waits for the threads that bring it back. Files are read in long stretches then, if need be all
    of one before the other.
    """
    are_files = rates.disk_bytes < math.inf
    staying = (fit(replace(s, budget_bytes=budget_bytes)) for s in resident(job, are_files))
    if fitting := [s for s in staying if s is not None]:
        return min(fitting, key=lambda s: (not s.holds_c, expected(s, rates)[0]))
    # Kernels have ways that take less workspace, or round up what they take.
    for share in (workspace, 2 * workspace + 1 / 4, 0.0, 4 * workspace + 1):
        near: dict[Schedule, None] = {}
        for parts in _PARTS:
            ranked = sorted(
                (expected(s, rates, _compute_s(s, rates, share, parts))[0], i, s)
                for i, s in enumerate(candidates(job, budget_bytes, share, parts))
            )[:_TRIED]
            near |= {s: None for seconds, _, s in ranked if seconds <= 2 * ranked[0][0]}
        fitted = (fit(replace(s, budget_bytes=budget_bytes)) for s in near)
        if fitting := [s for s in fitted if s is not None]:
            return min(fitting, key=lambda s: expected(s, rates)[0])
    return None


def candidates(
    job: Job, budget_bytes: int, workspace: float = 0.0, parts: int = 1
) -> Iterator[Schedule]:
    """Yield schedules in which panels come and go, and whose buffers fit a budget.

    ``workspace`` is what a launch takes for each byte of its panels; less where it is computed in
    parts, and few other schedules are worth that.
    """
    job = replace(job, is_gram=False)
    every = [
        _many(job, budget_bytes, workspace) if parts == 1 else (),
        _lines_within(job, budget_bytes, workspace, parts, "rows"),
        _lines_within(job, budget_bytes, workspace, parts, "columns"),
    ]
    if parts == 1 and 0 < job.piece < job.k:
        every.append(_pieces_within(job, budget_bytes, workspace))
    return (s for s in itertools.chain(*every) if s.held_bytes <= budget_bytes)


def least_bytes(job: Job) -> int:
    """Return what the buffers of the smallest schedule take, workspace aside."""
    plain = _plain(replace(job, is_gram=False))
    m, n = min(job.m, _GRAIN), min(job.n, _GRAIN)
    small = [
        replace(plain, tile_m=1, tile_n=n, a_slots=1, b_slots=min(2, count(job.n, n))),
        replace(plain, tile_m=m, tile_n=1, a_slots=min(2, count(job.m, m)), b_slots=1),
    ]
    if 0 < job.piece < job.k:
        cut = replace(plain, tile_m=1, tile_n=n, tile_k=job.piece)
        small.append(replace(cut, a_slots=_RING, b_slots=_RING, c_slots=1))
    return min(schedule.held_bytes for schedule in small)


def sample(job: Job) -> Schedule:
    """Return the schedule of one launch of usual size, of a part of a product that is copied."""
    job = replace(
        job,
        batch=(),
        a=replace(job.a, size=min(job.m, _SAMPLE), batch=(), strides=None),
        b=replace(job.b, size=min(job.n, _SAMPLE), batch=(), strides=None),
        c_strides=None,
        is_gram=False,
        piece=0,
    )
    return replace(_plain(job), a_slots=1, b_slots=1)


def deal(job: Job, devices: int) -> list[tuple[Job, Box]]:
    """Return each device's part of a product and where in C it is; fewer where there is less work.

    C is cut along a batch axis, if one is long enough, or else along the operand that is larger, so
    that what all devices need is the smaller one.
    """
    whole = tuple(slice(0, size) for size in (*job.batch, job.m, job.n))
    if devices == 1:
        return [(job, whole)]
    job = replace(job, is_gram=False)
    parts: list[tuple[Job, Box]] = []
    axis = max(range(len(job.batch)), key=lambda i: job.batch[i], default=None)
    if axis is not None and job.batch[axis] >= devices:
        for part in cuts(job.batch[axis], count(job.batch[axis], devices)):
            size = part.stop - part.start
            batch = (*job.batch[:axis], size, *job.batch[axis + 1 :])
            own = [_with_batch(x, len(job.batch), axis, size) for x in (job.a, job.b)]
            share = replace(job, batch=batch, a=own[0], b=own[1])
            parts.append((share, (*whole[:axis], part, *whole[axis + 1 :])))
        return parts
    a_bytes, b_bytes = job.a.nbytes(job.m, job.k), job.b.nbytes(job.n, job.k)
    by_rows = job.m >= devices and (a_bytes >= b_bytes or job.n < devices)
    x = job.a if by_rows else job.b
    step = count(x.size, devices)
    if step >= _grain(x):
        step = round_up(step, _grain(x))
    for part in cuts(x.size, step):
        own_x = replace(x, size=part.stop - part.start)
        share = replace(job, a=own_x) if by_rows else replace(job, b=own_x)
        last = (part, whole[-1]) if by_rows else (whole[-2], part)
        parts.append((share, (*whole[:-2], *last)))
    return parts


def _plain(job: Job) -> Schedule:
    return Schedule(
        job=job,
        order="rows",
        tile_m=max(job.m, 1),
        tile_n=max(job.n, 1),
        tile_k=max(job.k, 1),
        a_slots=2,
        b_slots=2,
        c_slots=2,
        budget_bytes=0,
    )


def resident(job: Job, are_files: bool = False) -> Iterator[Schedule]:
    """Yield schedules whose operands stay on the device, if there is one matrix alone.

    Of files, also such as have one operand or both whole before they begin: that is read in one
    stretch, and so are rows of C written if all columns are multiplied at once.
    """
    if job.matrices != 1:
        return
    a_bytes, b_bytes = job.a.nbytes(job.m, job.k), job.b.nbytes(job.n, job.k)
    panels = _PANELS_OF_LARGE if max(a_bytes, b_bytes) > _LARGE_BYTES else _PANELS
    least = _least_tile(job)

    def tiles(panels: int) -> list[int]:
        wanted = (1 if panels * s < 2 else round(min(panels * s, 4 * panels)) for s in skews)
        return [
            even(x.size, max(count(x.size, parts), size), _grain(x))
            for x, parts, size in zip((job.a, job.b), wanted, least, strict=True)
        ]

    skews = _skews(job, a_bytes, b_bytes)
    tile_m, tile_n = tiles(panels)
    if job.is_gram:
        tile_m = tile_n = max(tile_m, tile_n)
    elif not are_files and max(a_bytes, b_bytes) < _PANELS * _PANEL_BYTES:
        tile_m, tile_n = _stretches(job) or (tile_m, tile_n)
    ways = [(tile_m, tile_n, False)]
    if are_files:
        tile_m, tile_n = tiles(_FINER * panels)
        ways.append((tile_m, job.n, True))
        if not job.is_gram:
            ways += [(tile_m, job.n, False), (job.m, tile_n, False)]
    for (tile_m, tile_n, loads_first), c_slots in itertools.product(ways, (1, 4, 2)):
        # All of C, or that many launches' parts of it.
        yield replace(
            _plain(job),
            order="corner",
            tile_m=tile_m,
            tile_n=tile_n,
            a_slots=1,
            b_slots=1,
            c_slots=c_slots,
            loads_first=loads_first,
        )


def _skews(job: Job, a_bytes: int, b_bytes: int) -> tuple[float, float]:
    """Return how many times as many panels as the other each operand is cut into.

    One that is on the device is not cut, as long as the other is not there.
    """
    if job.is_gram:
        return 1.0, 1.0
    if a_bytes and b_bytes:
        skew = math.sqrt(a_bytes / b_bytes)
        return skew, 1 / skew
    if bool(a_bytes) == bool(b_bytes):  # C alone is copied: its lines stay whole
        return (math.inf, 0.0) if job.along_n else (0.0, math.inf)
    return (math.inf, 0.0) if a_bytes else (0.0, math.inf)


def _stretches(job: Job) -> tuple[int, int] | None:
    """Return tiles that leave the smaller operand whole, if no part of anything is then cut lines.

    They are for operands of fewer panels than there should be: cutting one alone gives as many.
    """
    x, other = (job.a, job.b) if job.along_n else (job.b, job.a)
    if not x.along_k or x.nbytes(x.size, job.k) < other.nbytes(other.size, job.k) or x.is_there:
        return None
    least = _PANEL_BYTES // 2 // max(x.nbytes(1, job.k), 1)
    size = even(x.size, max(count(x.size, _PANELS), least), _grain(x))
    return (size, job.n) if job.along_n else (job.m, size)


def _least_tile(job: Job) -> tuple[int, int]:
    """Return the least m and n of tiles whose panels and lines are not small."""
    least = []
    for x, other, is_line_of_c in (
        (job.a, job.b, not job.along_n),
        (job.b, job.a, job.along_n),
    ):
        step = x.nbytes(1, job.k)
        if x.is_there and other.is_there:
            step = other.size * job.sum_itemsize
        size = _PANEL_BYTES // max(step, 1)
        if not x.along_k:
            size = max(size, _LINE_BYTES // x.itemsize)
        if is_line_of_c:
            size = max(size, _LINE_BYTES // job.sum_itemsize)
        least.append(min(max(size, x.chunk), x.size))
    return least[0], least[1]


def _many(job: Job, budget_bytes: int, workspace: float) -> Iterator[Schedule]:
    """Yield the schedule of whole matrices of a batch, several at a time if they are small."""
    if job.matrices == 1:
        return
    plain = _plain(replace(job, is_gram=False))
    each = job.a.nbytes(job.m, job.k) + job.b.nbytes(job.n, job.k)
    each += job.m * job.n * job.c_bytes
    read = job.a.read_bytes(job.m, job.k) + job.b.read_bytes(job.n, job.k)
    read += job.m * job.n * job.sum_itemsize
    most = min(int(budget_bytes / (2 * each + workspace * read)), job.matrices)
    wanted = max(_CHUNK_BYTES // max(each, 1), job.matrices // _MOST_CHUNKS, 1)
    wanted = min(wanted, max(_LARGEST_CHUNK // max(each, 1), 1), most)
    while wanted >= 1:
        at_once = math.prod(batch_steps(job.batch, wanted))
        schedule = replace(plain, at_once=at_once)
        over = schedule.held_bytes - budget_bytes
        if over <= 0:  # lines and slots are longer than what they hold
            yield schedule
            return
        wanted = at_once - count(over, 2 * each)


def _lines_within(
    job: Job, budget_bytes: int, workspace: float, parts: int, order: Literal["rows", "columns"]
) -> Iterator[Schedule]:
    outer, inner = (0, 1) if order == "rows" else (1, 0)
    sizes, grains = (job.m, job.n), (_grain(job.a), _grain(job.b))
    for inner_tile in _sizes(sizes[inner], grains[inner]):
        panels = count(sizes[inner], inner_tile)
        panel = job.panel_bytes(1 if inner else 0, inner_tile, job.k)
        read = job.slot_bytes(1 if inner else 0, inner_tile, job.k)
        for inner_slots, outer_slots in itertools.product({min(2, panels), panels}, (1, 2)):
            room = budget_bytes - inner_slots * panel - workspace * read
            line = workspace / parts * job.slot_bytes(1 if outer else 0, 1, job.k)
            line += outer_slots * job.panel_bytes(1 if outer else 0, 1, job.k)
            line += 2 * inner_tile * job.c_bytes
            if room < line:
                continue
            most = min(int(room / line), sizes[outer]) if line else sizes[outer]
            outer_tile = even(sizes[outer], most, grains[outer])
            tiles, slots = (outer_tile, inner_tile), (outer_slots, inner_slots)
            if order == "columns":
                tiles, slots = tiles[::-1], slots[::-1]
            yield replace(
                _plain(job),
                order=order,
                tile_m=tiles[0],
                tile_n=tiles[1],
                a_slots=slots[0],
                b_slots=slots[1],
            )


def _pieces_within(job: Job, budget_bytes: int, workspace: float) -> Iterator[Schedule]:
    for tile_n, c_slots in itertools.product(_sizes(job.n, _grain(job.b)), (1, 2)):
        room = budget_bytes - workspace * job.slot_bytes(1, tile_n, job.piece)
        room -= _RING * job.panel_bytes(1, tile_n, job.piece)
        line = workspace * job.slot_bytes(0, 1, job.piece) + c_slots * tile_n * job.c_bytes
        line += _RING * job.panel_bytes(0, 1, job.piece)
        if room < line:
            continue
        yield replace(
            _plain(job),
            tile_m=even(job.m, min(int(room / line), job.m), _grain(job.a)),
            tile_n=tile_n,
            tile_k=job.piece,
            a_slots=_RING,
            b_slots=_RING,
            c_slots=c_slots,
        )


def _compute_s(schedule: Schedule, rates: Rates, workspace: float, parts: int) -> float:
    """Return about how long the launches take.

    The last wave of tiles of each is not full, and each makes its workspace anew, but for what is
    left of the operand that stays; or else, for each of its parts, of what the part needs.
    """
    job, tile_m, tile_n = schedule.job, schedule.tile_m, schedule.tile_n
    k = schedule.tile_k
    a, b = float(job.a.read_bytes(tile_m, k)), float(job.b.read_bytes(tile_n, k))
    made = min(a, b) * parts + max(a, b)
    if parts == schedule.pieces == 1 and schedule.order == "rows":
        made = b + a / count(job.n, tile_n)
    elif parts == schedule.pieces == 1 and schedule.order == "columns":
        made = a + b / count(job.m, tile_m)
    tiles = count(tile_m, _GRAIN) * count(tile_n, _GRAIN) * schedule.at_once
    of_part = count(tiles, parts)
    waves = parts * count(of_part, rates.multiprocessors)
    full = job.flops / rates.flops * waves * rates.multiprocessors / tiles
    made *= schedule.launches * schedule.at_once * workspace
    return full + 2 * made / rates.device_bytes


def _grain(x: Factor) -> int:
    """Return at multiples of what panels should begin: of tiles, or of chunks and of 16 bytes."""
    return _GRAIN if x.chunk == 1 else math.lcm(x.chunk, max(16 // x.itemsize, 1))


def _with_batch(x: Factor, axes: int, axis: int, size: int) -> Factor:
    """Return an operand of which a part of a batch axis of the product is taken."""
    own = axis - (axes - len(x.batch))
    if own < 0 or x.batch[own] == 1:
        return x
    return replace(x, batch=(*x.batch[:own], size, *x.batch[own + 1 :]))


def _sizes(size: int, grain: int) -> list[int]:
    """Return the tile sizes to try along an axis: each a quarter smaller, then of each grain.

    Of small ones, the tiles of a kernel fill its last wave, or leave it nearly empty.
    """
    sizes = [max(size, 1)]
    while sizes[-1] > _GRAIN:
        most = sizes[-1] * 3 // 4 if sizes[-1] > 16 * _GRAIN else sizes[-1] - _GRAIN
        sizes.append(even(size, max(most, _GRAIN), grain))
    return list(dict.fromkeys(sizes))
