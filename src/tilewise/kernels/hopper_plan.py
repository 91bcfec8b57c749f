"""Which of Hopper's kernels compute a product of bfloat16 or float16, how, and how long it takes.

Pure: shapes, types and strides in, names, grids and arguments out. `choose` weighs tiles, strips
and the two ways of adding up a long K by the times of ``hopper_table``; `launches` spells a choice
out for `runtime.launch`. The device code is in ``hopper``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from .hopper_table import KERNELS, LINE, PACKED_TILE, SECTOR, SUMMED_TILE, Kernel, Times
from .steps import (
    MAP_BYTES,
    MOST_BLOCKS,
    Arguments,
    Number,
    Pointer,
    Product,
    Room,
    Step,
    Strides,
    Tensor,
    chains,
    drifts,
    limited_by,
    round_up,
)

__all__ = [
    "Choice",
    "Problem",
    "choices",
    "choose",
    "launches",
    "paced",
]

#: What sticks out over whole tiles by no more than this can be a product of its own.
WIDEST_STRIP = 64

_TILE_K = 64
_ITEM_BYTES = 2
_VECTOR = MAP_BYTES // _ITEM_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem(Product):
    """A product of which nothing is empty; ``dtype`` is that of A and B, C is of ``out``."""

    dtype: str = "bf16"
    out: str = "bf16"  #: the same, or "fp32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How a problem is computed, and what that is expected to take.

    ``is_transposed``: rows and columns change places first, and all that follows is of the
    transposed problem. The kernel computes ``rows`` and ``cols`` of C, each from where to where;
    what is beyond them is left to ``strips``. Chains are ``piece_k`` of K long, and ``parts`` of
    them are left apart, to be added up by a launch of their own. Of so many ``tiles``, ``group``
    rows are walked at a time by so many ``programs``: blocks, or pairs of them, that wait for each
    other if the choice ``is_paced``. Microseconds and bytes are of all of it.
    """

    kernel: Kernel
    is_transposed: bool
    packs_a: bool
    packs_b: bool
    rows: tuple[int, int]
    cols: tuple[int, int]
    piece_k: int
    parts: int
    group: int
    programs: int
    tiles: int
    expected_us: float
    workspace_bytes: int
    why: str
    strips: tuple[Choice, ...] = ()
    is_paced: bool = False


def choose(
    problem: Problem,
    multiprocessors: int = 132,
    times: Times | None = None,
    *,
    workspace_bytes: int | None = None,
) -> Choice:
    """Return the way to compute a product that is expected to be the fastest.

    Parameters
    ----------
    problem : Problem
    multiprocessors : int
        Of the device.
    times : Times, optional
        By default those of an H200.
    workspace_bytes : int, optional
        Scratch memory allowed. Where nothing does with so little, the choice is what takes the
        least, and says how much that is.

    Returns
    -------
    Choice
        Its bits are the same whichever it is: they depend on the operands and K alone.
    """
    every = list(choices(problem, multiprocessors, times))
    least = min(choice.workspace_bytes for choice in every)
    allowed = math.inf if workspace_bytes is None else max(workspace_bytes, least)
    fitting = (choice for choice in every if choice.workspace_bytes <= allowed)
    chosen = min(fitting, key=lambda choice: choice.expected_us)
    if chosen.parts > 1 or not drifts(chosen.tiles, chosen.programs):
        return chosen
    kept = paced(chosen)
    return kept if kept.workspace_bytes <= allowed else chosen


def paced(choice: Choice) -> Choice:
    """Return a choice, of one part, whose blocks wait for each other: see ``pace``."""
    nbytes = choice.workspace_bytes + Room.STEP
    return replace(choice, is_paced=True, workspace_bytes=nbytes)


def choices(
    problem: Problem, multiprocessors: int = 132, times: Times | None = None
) -> Iterator[Choice]:
    """Yield every way to compute a product; see `choose`."""
    times = times or Times.of_h200()
    # C is best written along its rows; reading a few rows of A instead of a few columns of B can be
    # worth more.
    c, m, n = problem.c, problem.m, problem.n
    is_transposed = m > 1 and (n == 1 or abs(c.row) < abs(c.col))
    yield from _choices(problem, is_transposed, multiprocessors, times)
    if min(m, n) < 64:
        yield from _choices(problem, not is_transposed, multiprocessors, times)


def launches(problem: Problem, choice: Choice) -> tuple[Step, ...]:
    """Return what is launched for a choice, in order, on one stream.

    The workspace, ``choice.workspace_bytes`` on an address that is a multiple of 256, is for this
    product alone until it is done.
    """
    p = problem.transposed if choice.is_transposed else problem
    kernel, room = choice.kernel, Room()
    steps: list[Step] = []
    a, b = (Pointer(1), Pointer(0)) if choice.is_transposed else (Pointer(0), Pointer(1))
    if choice.packs_a:
        step, a, strides = _pack(p, a, p.a, p.m, kernel.a_along_k, room)
        steps.append(step)
        p = replace(p, a=strides)
    if choice.packs_b:
        step, b, strides = _pack(p, b, p.b.transposed, p.n, kernel.b_along_k, room)
        steps.append(step)
        p = replace(p, b=strides.transposed)
    for part in (choice, *choice.strips):
        steps += _product(p, part, a, b, room)
    return tuple(steps)


def _choices(
    problem: Problem, is_transposed: bool, multiprocessors: int, times: Times
) -> Iterator[Choice]:
    p = problem.transposed if is_transposed else problem
    a_along_k, a_fits = _order(p.a, p, p.m)
    b_along_k, b_fits = _order(p.b.transposed, p, p.n)
    how = (p.dtype, a_along_k, b_along_k)
    kernels = [k for k in KERNELS if (k.dtype, k.a_along_k, k.b_along_k) == how]
    # Rows that straddle sectors are read at half the speed: packing them too can be worth it.
    a_straddles, b_straddles = (pitch % SECTOR != 0 for pitch in _pitches(p, kernels[0]))
    for packs in {(not a_fits, not b_fits), (not a_fits or a_straddles, not b_fits or b_straddles)}:
        yield from _packed_choices(p, kernels, packs, is_transposed, multiprocessors, times)


def _packed_choices(
    p: Problem,
    kernels: Sequence[Kernel],
    packs: tuple[bool, bool],
    is_transposed: bool,
    multiprocessors: int,
    times: Times,
) -> Iterator[Choice]:
    """Yield what kernels make of a product of which these operands are packed first."""
    room, us = Room(), 0.0
    if packs[0]:
        us += times.launch_us + 2 * _operand_bytes(p, p.a, p.m) / times.memory_bytes_per_us
        p = replace(p, a=_packed(p, p.a, p.m, kernels[0].a_along_k, room))
    if packs[1]:
        us += times.launch_us + 2 * _operand_bytes(p, p.b, p.n) / times.memory_bytes_per_us
        b = _packed(p, p.b.transposed, p.n, kernels[0].b_along_k, room)
        p = replace(p, b=b.transposed)
    if all(pitch % SECTOR == 0 for pitch in _pitches(p, kernels[0])):
        # What pairs spare the L2 cache is then not missed: they were no faster.
        kernels = [kernel for kernel in kernels if kernel.blocks == 1]
    base = Choice(
        kernel=kernels[0],
        is_transposed=is_transposed,
        packs_a=packs[0],
        packs_b=packs[1],
        rows=(0, p.m),
        cols=(0, p.n),
        piece_k=chains(p.k)[1],
        parts=1,
        group=1,
        programs=1,
        tiles=1,
        expected_us=0.0,
        workspace_bytes=room.nbytes,
        why="",
    )

    @cache
    def part(rows: tuple[int, int], cols: tuple[int, int]) -> _Part:
        return _part(p, replace(base, rows=rows, cols=cols))

    @cache
    def strip(rows: tuple[int, int], cols: tuple[int, int]) -> Choice:
        every = (_single(part(rows, cols), other, multiprocessors, times) for other in kernels)
        return min((x for x in every if x), key=lambda x: x.expected_us)

    for kernel in kernels:
        for bottom, right in _ends(p, kernel, multiprocessors):
            bulk = _single(part((0, bottom), (0, right)), kernel, multiprocessors, times)
            if bulk is None:
                continue
            places = [((0, p.m), (right, p.n)), ((bottom, p.m), (0, right))]
            strips = [strip(*place) for place in places if all(end > begin for begin, end in place)]
            whole_us = us + bulk.expected_us + sum(each.expected_us for each in strips)
            why = f"{bulk.why}; {len(strips)} strips" if strips else bulk.why
            yield replace(bulk, strips=tuple(strips), expected_us=whole_us, why=why)


class _Part(NamedTuple):
    """What is known of a choice for rows and columns of C, and whether TMA can write them."""

    base: Choice
    product: Problem
    is_mapped: bool


def _part(p: Problem, base: Choice) -> _Part:
    p = _cut(p, base)
    is_plain = chains(p.k)[0] == 1 and not p.updates and p.out == p.dtype
    # TMA reads to the element, but writes rows in whole vectors, over what lies behind C.
    is_mapped = is_plain and p.n % _VECTOR == 0 and _suits_map(p.c, p, p.m, p.n)
    return _Part(base, p, is_mapped)


def _single(part: _Part, kernel: Kernel, multiprocessors: int, times: Times) -> Choice | None:
    """Return how one kernel computes a part of C, if it can."""
    base, p, is_mapped = part
    pieces, _ = chains(p.k)
    if (
        kernel.is_mapped != is_mapped
        or (kernel.way == "promoted" and pieces == 1)
        or kernel.tile_m < min(p.m, 64)
    ):
        return None
    parts = pieces if kernel.way == "any" else 1
    items = math.ceil(p.m / kernel.rows) * math.ceil(p.n / kernel.tile_n)
    items *= p.outer * p.inner * parts
    at_once = multiprocessors // kernel.blocks
    us, why = _weigh(p, kernel, parts, items, multiprocessors, times)
    parts_bytes = _parts_bytes(p, parts) if parts > 1 else 0
    return replace(
        base,
        kernel=kernel,
        parts=parts,
        # A wave of tiles about as wide as it is high reads the least of A and B.
        group=max(1, round(math.sqrt(at_once * kernel.tile_n / kernel.rows))),
        programs=min(items, at_once),
        tiles=items,
        expected_us=us,
        workspace_bytes=base.workspace_bytes + round_up(parts_bytes, Room.STEP),
        why=why,
    )


def _weigh(
    p: Problem, kernel: Kernel, parts: int, items: int, multiprocessors: int, times: Times
) -> tuple[float, str]:
    """Return the microseconds of a product without packing, and what it is bound by."""
    rows, columns = kernel.rows, kernel.tile_n
    at_once = multiprocessors // kernel.blocks
    waves = math.ceil(items / at_once)
    share = multiprocessors / times.multiprocessors
    step_us, tile_us = times.tiles[kernel.tile]
    if kernel.way == "promoted":
        step_us *= times.promoted
    if not kernel.is_mapped:
        tile_us += times.any_us * rows * columns
    steps = math.ceil((chains(p.k)[1] if parts > 1 else p.k) / _TILE_K)
    # What is idle in a last wave leaves power to the others, but not all that it would take.
    flop = (items + waves * at_once) * rows * columns * steps * _TILE_K
    moved = p.m * p.n * p.outer * p.inner * (4 if p.out == "fp32" else 2) * (1 + p.updates)
    moved += _operand_bytes(p, p.a, p.m) + _operand_bytes(p, p.b, p.n)
    a_pitch, b_pitch = _pitches(p, kernel)
    lines = kernel.blocks * kernel.tile_m * times.lines(a_pitch)
    lines += columns * times.lines(b_pitch)
    us = times.launch_us
    if parts > 1:  # written while nothing is multiplied, and read
        us += times.launch_us + 2 * _parts_bytes(p, parts) / times.memory_bytes_per_us
    cached = items * steps * lines * _TILE_K * _ITEM_BYTES
    bounds = {
        "the multiprocessors": waves * (tile_us + steps * step_us),
        "power": flop / (times.flop_per_us * share) if waves > 1 else 0.0,
        "memory": moved / times.memory_bytes_per_us,
        "the L2 cache": cached / (times.cache_bytes_per_us * share),
    }
    bound_us, limit = limited_by(bounds)
    why = f"{items} tiles of {kernel.tile} in {waves} waves, bound by {limit}"
    return us + bound_us, why


def _ends(p: Problem, kernel: Kernel, multiprocessors: int) -> Iterator[tuple[int, int]]:
    """Yield down to which row and up to which column a kernel may go before strips begin.

    It is all of C; or what whole tiles cover; or, where the last wave would be half empty at least,
    the rows or the columns of tiles that fit into the waves before it.
    """
    if chains(p.k)[0] > 1:
        yield p.m, p.n
        return
    bottoms = {p.m, _whole_tiles(p.m, kernel.rows)}
    rights = {p.n, _whole_tiles(p.n, kernel.tile_n)}
    yield from itertools.product(bottoms, rights)
    at_once = multiprocessors // kernel.blocks
    high, wide = math.ceil(p.m / kernel.rows), math.ceil(p.n / kernel.tile_n)
    matrices = p.outer * p.inner
    full, rest = divmod(high * wide * matrices, at_once)
    if full and 0 < rest <= at_once // 2:
        room = full * at_once // matrices
        if room >= wide:
            yield room // wide * kernel.rows, p.n
        if room >= high:
            yield p.m, room // high * kernel.tile_n


def _whole_tiles(size: int, tile: int) -> int:
    """Return how much of a side whole tiles cover, if what is left makes a strip."""
    rest = size % tile
    return size - rest if size > tile and rest <= WIDEST_STRIP else size


def _cut(p: Problem, part: Choice) -> Problem:
    """Return the product of a part of the rows and columns."""
    (top, bottom), (left, right) = part.rows, part.cols
    a = replace(p.a, is_aligned=p.a.is_aligned and top * p.a.row % _VECTOR == 0)
    b = replace(p.b, is_aligned=p.b.is_aligned and left * p.b.col % _VECTOR == 0)
    place = top * p.c.row + left * p.c.col
    c = replace(p.c, is_aligned=p.c.is_aligned and place % _VECTOR == 0)
    return replace(p, m=bottom - top, n=right - left, a=a, b=b, c=c)


def _product(p: Problem, part: Choice, a: Pointer, b: Pointer, room: Room) -> Iterator[Step]:
    """Yield the launches that compute a part of C from operands that TMA can read."""
    kernel, (top, _), (left, _) = part.kernel, part.rows, part.cols
    wide = p.out == "fp32"
    a = a.moved(top * p.a.row * _ITEM_BYTES)
    b = b.moved(left * p.b.col * _ITEM_BYTES)
    c = Pointer(2, (top * p.c.row + left * p.c.col) * (4 if wide else _ITEM_BYTES))
    p = _cut(p, part)
    common: Arguments = {"m": p.m, "n": p.n, "k": p.k, "outer": p.outer, "inner": p.inner}
    common |= {"group": part.group, "progress": 0}
    if part.is_paced:
        common["progress"] = progress = room.take(Room.STEP)
        yield Step.of("clear", 1, {"progress": progress})
    # B is described as its transpose, n×k, like A.
    for name, pointer, strides, rows, along_k in (
        ("a", a, p.a, p.m, kernel.a_along_k),
        ("b", b, p.b.transposed, p.n, kernel.b_along_k),
    ):
        common[name] = _tensor(p, pointer, strides, rows, p.k, along_k)
        outer, inner = strides.stack(p.outer, p.inner)
        common |= {f"{name}_outer": int(outer > 1), f"{name}_inner": int(inner > 1)}
    if kernel.is_mapped:
        mapped: Arguments = {"c": _tensor(p, c, p.c, p.m, p.n, True), "alpha": Number(0)}
        yield Step.of(kernel.name, part.programs, common | mapped)
        return
    out: Arguments = {
        "c": c,
        "alpha": Number(0),
        "beta": Number(1),
        "is_wide": int(wide),
        **p.c.arguments("c"),
    }
    common |= {"pieces": part.parts, "piece_k": part.piece_k}
    if part.parts == 1:
        yield Step.of(kernel.name, part.programs, common | out | {"c_piece": 0})
        return
    row = round_up(p.n, _VECTOR)
    piece, matrix = p.m * row, p.m * row * part.parts
    parts = room.take(_parts_bytes(p, part.parts))
    apart: Arguments = {
        "c": parts,
        "alpha": 1.0,
        "beta": 0.0,
        "is_wide": 1,
        "c_outer": matrix * p.inner,
        "c_inner": matrix,
        "c_piece": piece,
        "c_row": row,
        "c_col": 1,
    }
    yield Step.of(kernel.name, part.programs, common | apart)
    sums: Arguments = {
        "parts": parts,
        "part_matrix": matrix,
        "part_piece": piece,
        "part_row": row,
        "m": p.m,
        "n": p.n,
        "inner": p.inner,
        "pieces": part.parts,
    }
    high, broad = SUMMED_TILE
    tiles = math.ceil(p.m / high) * math.ceil(p.n / broad) * p.outer * p.inner
    yield Step.of(f"add_pieces_{p.dtype}", tiles, sums | out)


def _pack(
    p: Problem, source: Pointer, strides: Strides, rows: int, along_k: bool, room: Room
) -> tuple[Step, Pointer, Strides]:
    """Return the launch that packs an operand, given as rows×k; where the copy is; its strides."""
    high, wide = (rows, p.k) if along_k else (p.k, rows)
    outer, inner = strides.stack(p.outer, p.inner)
    target = Pointer(3, room.nbytes)
    packed = _packed(p, strides, rows, along_k, room)
    arguments: Arguments = {
        "source": source,
        "target": target,
        "rows": high,
        "columns": wide,
        "inner": inner,
        "count": outer * inner,
        "source_outer": strides.outer,
        "source_inner": strides.inner,
        "source_row": strides.row if along_k else strides.col,
        "source_col": strides.col if along_k else strides.row,
        "target_row": packed.row if along_k else packed.col,
    }
    tiles = math.ceil(high / PACKED_TILE[0]) * math.ceil(wide / PACKED_TILE[1]) * outer * inner
    return Step.of("pack_16", min(tiles, MOST_BLOCKS), arguments), target, packed


def _packed(p: Problem, strides: Strides, rows: int, along_k: bool, room: Room) -> Strides:
    """Take room for the copy of an operand, given as rows×k; return its strides."""
    high, wide = (rows, p.k) if along_k else (p.k, rows)
    outer, inner = strides.stack(p.outer, p.inner)
    pitch = round_up(wide, LINE)
    room.take(outer * inner * high * pitch * _ITEM_BYTES)
    return Strides(
        outer=high * pitch * inner if outer > 1 else 0,
        inner=high * pitch if inner > 1 else 0,
        row=pitch if along_k else 1,
        col=1 if along_k else pitch,
    )


def _tensor(
    p: Problem, pointer: Pointer, strides: Strides, rows: int, columns: int, along_columns: bool
) -> Tensor:
    """Describe a stack of matrices for a tensor map, its axis of unit stride last."""
    if not along_columns:
        strides, rows, columns = strides.transposed, columns, rows
    sizes = (p.outer, p.inner, rows, columns)
    return Tensor.mapped(pointer, strides.taken(*sizes), sizes, _ITEM_BYTES)


def _order(strides: Strides, p: Problem, rows: int) -> tuple[bool, bool]:
    """Say whether an operand, given as rows×k, is read along k, and whether TMA can read it."""
    if _suits_map(strides, p, rows, p.k):
        return True, True
    if _suits_map(strides.transposed, p, p.k, rows):
        return False, True
    # Then it is packed, along the axis on which its elements lie closest.
    far = [
        size > 1 and (abs(step) or math.inf)
        for size, step in ((rows, strides.row), (p.k, strides.col))
    ]
    return rows == 1 or (p.k > 1 and far[1] <= far[0]), False


def _suits_map(strides: Strides, p: Problem, rows: int, columns: int) -> bool:
    taken = strides.taken(p.outer, p.inner, rows, columns)
    return taken.suits_map(rows, columns, _ITEM_BYTES)


def _pitches(p: Problem, kernel: Kernel) -> tuple[int, int]:
    """Return how far rows of A and of B are apart, as the kernel reads them."""
    a_pitch = p.a.row if kernel.a_along_k else p.a.col
    b_pitch = p.b.col if kernel.b_along_k else p.b.row
    return a_pitch, b_pitch


def _operand_bytes(p: Problem, strides: Strides, rows: int) -> int:
    return math.prod(strides.stack(p.outer, p.inner)) * rows * p.k * _ITEM_BYTES


def _parts_bytes(p: Problem, parts: int) -> int:
    return 4 * p.outer * p.inner * parts * p.m * round_up(p.n, _VECTOR)
