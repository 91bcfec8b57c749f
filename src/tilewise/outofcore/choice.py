"""Which schedule of all that fit a budget: each is weighed in bytes read, and what they cost.

What a schedule is, and what follows from its sizes, stands in `schedule`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from .._operand import batch_steps
from .cuts import count, even
from .schedule import Job, Schedule, Side

__all__ = ["choose_schedule", "least_budget"]

#: Tiles are not cut below this side: their panels would be read more often than they are used.
_LEAST_TILE = 64

# What the choice of tiles weighs, in bytes read from a file, each about a nanosecond.
_RUN_COST = 16 << 10  # to start on one contiguous stretch of a file
_DECODE_COST = 4  # to decompress one byte of a chunk
_ADD_COST = 0.4  # to add one byte of a product to a sum in memory
_FLOP_COST = 0.01  # one operation of BLAS at its full rate
_HALF_RATE_TILE = 64  # side of a tile at which BLAS takes twice as long as it should

#: Nothing is cut to fit into less.
_LEAST_BUDGET = 64 << 10

#: Matrices that lie inside one another and are read together.
_MOST_INSIDE = 1024

#: What the temporary arrays of a step get of a budget, so that BLAS is called on large tiles;
#: beyond some size larger ones gain little, and beyond another nothing.
_WORKSPACE_SHARE = 1 / 4
_ENOUGH_WORKSPACE = 64 << 20
_LARGEST_WORKSPACE = 128 << 20

#: Parts of tiles with shorter sides are for what cannot be cut otherwise.
_LEAST_PART = 16


def choose_schedule(job: Job, budget_bytes: int) -> Schedule | None:
    """Return the schedule of least cost within a budget, or None below `least_budget`.

    Notes
    -----
    Two extremes bound what is possible. Tiles of C stay in place while panels stream past: each
    byte read serves a whole side of a tile, and the traffic of ``2·m·n·k / side`` is of the least
    possible order (Hong and Kung, 1981), but every piece of K reads and writes the sums again. Or a
    row panel of one operand stays, over all of K, while the other streams: smaller tiles, but no
    sum is touched twice, and files are read in long stretches. These and all between them differ
    only in tile sizes and in how many panels are kept; that space is searched, each point weighed
    in bytes read, stretches begun, bytes added and BLAS slowed down.
    """
    room = budget_bytes - job.staging_bytes
    if room < _LEAST_BUDGET:
        return None
    matrices = math.prod(job.batch)
    # Matrices that lie inside one another are read together, in as few stretches as one of them.
    is_inside = job.a.batch_is_inside or job.b.batch_is_inside
    at_once = min(matrices, _MOST_INSIDE) if is_inside else 1
    many = _many_matrices(job, room)
    if many is not None and many.at_once >= at_once:
        return replace(many, budget_bytes=budget_bytes)
    while at_once:
        ranked = sorted(_schedules_within(job, room // at_once), key=_cost)
        if ranked:
            finished = (_finished(each, at_once, budget_bytes) for each in ranked)
            whole = next((x for x in finished if not _is_splintered(x)), None)
            return whole or _finished(ranked[0], at_once, budget_bytes)
        at_once //= 2
    return None


def least_budget(job: Job) -> int:
    """Return the bytes that the smallest schedule takes, its workspace included."""
    m, n, k = (min(size, _LEAST_TILE) for size in (job.m, job.n, job.k))
    held = 2 * k * (m * job.a.itemsize + n * job.b.itemsize) + m * n * job.sum_itemsize
    return max(math.ceil(held / (1 - _WORKSPACE_SHARE)), _LEAST_BUDGET) + job.staging_bytes


def _finished(schedule: Schedule, at_once: int, budget_bytes: int) -> Schedule:
    """Return a schedule with what its tiles leave over, for fewer and larger calls of BLAS."""
    schedule = replace(
        schedule, at_once=at_once, workspace_bytes=at_once * schedule.workspace_bytes
    )
    spare = budget_bytes - schedule.held_bytes + schedule.workspace_bytes
    schedule = replace(
        schedule, budget_bytes=budget_bytes, workspace_bytes=min(spare, _LARGEST_WORKSPACE)
    )
    return replace(schedule, workspace_bytes=at_once * schedule.inner.workspace_bytes)


def _is_splintered(schedule: Schedule) -> bool:
    """Whether BLAS gets slivers: a tile as long as a chunk of 131 has no even parts but of 1."""
    inner = schedule.inner
    sides = ((schedule.tile_m, inner.tile_m), (schedule.tile_n, inner.tile_n))
    return any(part < min(tile, _LEAST_PART) for tile, part in sides)


def _schedules_within(job: Job, budget_bytes: int) -> Iterator[Schedule]:
    """Yield the candidates of `choose_schedule`: for all else given, the largest tile that fits."""
    workspace = int(min(budget_bytes * _WORKSPACE_SHARE, _ENOUGH_WORKSPACE))
    spare = 0 if math.prod(job.batch) == 1 else 1  # the next matrix is read before this one is done
    chunks_k = {job.a.chunk[1], job.b.chunk[1], math.lcm(job.a.chunk[1], job.b.chunk[1])}
    sizes_k = sorted({size for chunk in chunks_k for size in _sizes(job.k, chunk)})
    for order, tile_k in itertools.product(("rows", "columns"), sizes_k):
        outer, inner = (job.a, job.b) if order == "rows" else (job.b, job.a)
        pieces = max(count(job.k, tile_k), 1)
        for inner_tile in _sizes(inner.size, inner.chunk[0]):
            panels = pieces * count(inner.size, inner_tile)
            for inner_slots in {min(2, panels + spare), panels + spare}:
                room = budget_bytes - workspace
                room -= inner_slots * inner_tile * tile_k * inner.itemsize
                for outer_slots in {2, pieces + 1}:
                    line = outer_slots * tile_k * outer.itemsize + inner_tile * job.sum_itemsize
                    if room // line < min(outer.size, _LEAST_TILE):
                        continue
                    outer_tile = even(outer.size, room // line, outer.chunk[0])
                    most = pieces * count(outer.size, outer_tile) + spare
                    tiles, slots = (outer_tile, inner_tile), (min(outer_slots, most), inner_slots)
                    if order == "columns":
                        tiles, slots = tiles[::-1], slots[::-1]
                    yield Schedule(
                        job=job,
                        order="rows" if order == "rows" else "columns",
                        tile_m=tiles[0],
                        tile_n=tiles[1],
                        tile_k=tile_k,
                        a_slots=slots[0],
                        b_slots=slots[1],
                        workspace_bytes=workspace,
                        budget_bytes=budget_bytes,
                    )


def _cost(schedule: Schedule) -> float:
    """Return what one matrix costs, in bytes read."""
    s, job = schedule, schedule.job
    m, n, k = job.m, job.n, job.k
    rows, columns = count(m, s.tile_m), count(n, s.tile_n)
    a, b = _pass_cost(job.a, k, s.tile_m, s.tile_k), _pass_cost(job.b, k, s.tile_n, s.tile_k)
    written = _RUN_COST * (rows if columns == 1 else m * columns)
    added = _ADD_COST * m * n * job.sum_itemsize * (s.piece_count - 1)
    lost = 1 / s.tile_m + 1 / s.tile_n + 1 / s.tile_k
    computed = _FLOP_COST * 2 * m * n * k * _HALF_RATE_TILE * lost
    # Nothing is computed while the first panels are read, or while the last tile is written.
    alone = s.tile_k * (s.tile_m * job.a.itemsize + s.tile_n * job.b.itemsize)
    alone += s.tile_m * s.tile_n * job.out_itemsize
    return s.a_passes * a + s.b_passes * b + written + added + computed + alone


def _pass_cost(side: Side, k: int, tile: int, tile_k: int) -> float:
    """Return what it costs to read one matrix once."""
    weight = 1 if side.chunk == (1, 1) else _DECODE_COST
    elements = side.elements(k, tile, tile_k)
    return weight * elements * side.itemsize + _RUN_COST * side.runs(k, tile, tile_k)


def _many_matrices(job: Job, budget_bytes: int) -> Schedule | None:
    """Return a schedule of many whole matrices at a time, or None if not two of them fit."""
    panels = 2 * job.k * (job.m * job.a.itemsize + job.n * job.b.itemsize)
    workspace = job.panel_bytes * job.k * (job.m + job.n) + job.tile_bytes * job.m * job.n
    each = panels + job.m * job.n * job.sum_itemsize + workspace
    at_once = min(math.prod(job.batch), budget_bytes // max(each, 1))
    if at_once < 2:
        return None
    at_once = math.prod(batch_steps(job.batch, at_once))
    return Schedule(
        job=job,
        order="rows",
        tile_m=max(job.m, 1),
        tile_n=max(job.n, 1),
        tile_k=max(job.k, 1),
        a_slots=2,
        b_slots=2,
        workspace_bytes=at_once * workspace,
        budget_bytes=budget_bytes,
        at_once=at_once,
    )


def _sizes(size: int, chunk: int) -> list[int]:
    """Return the tile sizes to try along an axis: even cuts, each about a quarter smaller."""
    sizes = [max(size, 1)]
    parts = 1
    while sizes[-1] > _LEAST_TILE:
        parts += max(parts // 4, 1)
        sizes.append(max(even(size, -(-size // parts), chunk), min(size, _LEAST_TILE)))
    return list(dict.fromkeys(sizes))
