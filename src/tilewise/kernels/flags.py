"""Rows and columns of a float32 product that float16 cannot hold: flags and lists, in Gluon.

A flag is a sum of `UNSAFE` and `NAN`, or 0. The split of an operand or a product sets it; what is
flagged is listed, `LISTS` lists to a matrix, by what has to be done about it; and ``repair`` works
the lists off. Nobody but the device knows how long they are.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# mypy: disable-error-code="untyped-decorator, no-untyped-call"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .hopper_float32_table import LISTS as _LISTS
from .hopper_float32_table import TILE

__all__ = [
    "COMPUTED",
    "FILLED",
    "LISTS",
    "NAN",
    "UNSAFE",
    "list_flagged",
    "list_of",
    "list_rows",
    "list_tile",
]

FLAGS = gl.constexpr(TILE)  # that are counted together: the side of tiles that may be left out

UNSAFE = gl.constexpr(1)  # not what float16 holds
NAN = gl.constexpr(2)  # a NaN is there, so the whole row or column of C is NaN; UNSAFE, too

COMPUTED = gl.constexpr(0)  # the list of what is computed by FMA
FILLED = gl.constexpr(1)  # of what is NaN
LISTS = gl.constexpr(_LISTS)


@gluon.jit
def list_flagged(a_flag, b_flag, a_list, b_list, a_count, b_count, a_tile, b_tile, m, n, a_tiles):
    """List flagged rows of A and columns of B, in any order, and count them by matrix and by tile.

    A matrix has `LISTS` lists, each as long as it has rows, and a count for each of them, 0 before,
    and for the rows that are not flagged. Those of A stand at the end of the first list, backwards.
    The first ``a_tiles`` programs are for A.
    """
    gdc_wait()
    gdc_launch_dependents()
    tile = gl.program_id(0)
    if tile < a_tiles:
        list_tile(a_flag, a_list, a_count, a_tile, tile, m, True)
    else:
        list_tile(b_flag, b_list, b_count, b_tile, tile - a_tiles, n, False)


@gluon.jit
def list_tile(flag, to, count, of_tile, tile, rows, LISTS_REST: gl.constexpr):
    """List what is flagged of one tile's rows; and from the end of a list back, what is not."""
    warps: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([FLAGS // (32 * warps)], [32], [warps], [0])
    tiles = gl.cdiv(rows, FLAGS)
    matrix = tile // tiles
    start = (tile % tiles) * FLAGS
    i = start + gl.arange(0, FLAGS, layout)
    inside = i < rows
    flags = gl.load(flag + matrix * rows + i, mask=inside, other=0)
    flagged = (flags & UNSAFE) != 0
    total = gl.sum(flagged.to(gl.int32), 0)
    gl.store(of_tile + tile, total)
    count += matrix * (LISTS + 1)
    if total > 0:
        for which in gl.static_range(LISTS):
            mine = flagged & (list_of(flags) == which)
            place = _places(count + which, mine)
            gl.store(to + (matrix * LISTS + which) * rows + place, i, mask=mine)
    if LISTS_REST:
        mine = inside & ~flagged
        place = rows - 1 - _places(count + LISTS, mine)
        gl.store(to + matrix * LISTS * rows + place, i, mask=mine)


@gluon.jit
def list_rows(flag, to, count, of_tile, matrix, i, rows, flags):
    """Add to rows' flags, and list them where those want it; every thread has one of the rows.

    A row stays in a list that another flag has taken it from: so `list_of` its flag is asked again
    of all that a list holds.
    """
    is_flagged = flags != 0
    was = gl.atomic_or(flag + matrix * rows + i, flags, mask=is_flagged)
    now = was | flags
    count += matrix * (LISTS + 1)
    for which in gl.static_range(LISTS):
        is_new = is_flagged & (list_of(now) == which) & (list_of(was) != which)
        place = gl.atomic_add(count + which + 0 * i, 1, mask=is_new)
        gl.store(to + (matrix * LISTS + which) * rows + place, i, mask=is_new)
    is_new = is_flagged & ((was & UNSAFE) == 0)
    gl.atomic_add(of_tile + matrix * gl.cdiv(rows, FLAGS) + i // FLAGS, 1, mask=is_new)


@gluon.jit
def list_of(flags):
    """Return which list a flag puts a row or column in, and LISTS for none."""
    return gl.where((flags & NAN) != 0, FILLED, gl.where(flags == 0, LISTS, COMPUTED))


@gluon.jit
def _places(count, mine):
    """Return the places, from a count on, of those that are `mine`; count them."""
    one = mine.to(gl.int32)
    total = gl.sum(one, 0)
    first = 0
    if total > 0:
        first = gl.atomic_add(count, total)
    return first + gl.associative_scan(one, 0, _add) - one


@gluon.jit
def _add(x, y):
    return x + y
