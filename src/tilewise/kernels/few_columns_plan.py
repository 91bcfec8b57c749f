"""How Hopper's kernels for few columns multiply float32, and how long that takes.

Pure: shapes and strides in, launches out. Kernels are those of ``skinny`` for the product
transposed, Cᵀ = Bᵀ·Aᵀ, and they are chosen as such. What goes before and after, and when a product
is left to others, is in ``hopper_float32_plan``; the device code is in ``few_columns``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from tilewise.numerics.schemes import ROW_EXPONENTS, fp16x3_threshold

from . import skinny_plan
from .hopper_float32_table import JUDGED_TILES
from .skinny_plan import Choice
from .skinny_table import TILE_N, Kernel
from .steps import MOST_BLOCKS, Argument, Arguments, Room, Step

if TYPE_CHECKING:
    from .hopper_float32_plan import Problem

__all__ = ["MOST_COLUMNS", "Choice", "choices", "choose", "judge", "launches", "name_of", "suits"]

#: Measured on an H200, 30 November 2026: what a block takes for 64 of K and a tile's rows, by how A
#: is read and the columns of B; "any" of 32 and 64 are guessed from the others.
PIECE_US = {
    **{("mapped", columns): us for columns, us in ((16, 0.3), (32, 0.37), (64, 0.65))},
    **{("any", columns): us for columns, us in ((16, 0.69), (32, 0.76), (64, 1.04))},
}
#: Beyond which nothing was measured, and each tile's columns read A again.
MOST_COLUMNS = 128
#: For each multiprocessor: rows of which a warp takes one, and not a block.
_MANY_ROWS = 8
_BIAS = 127  # of float32's exponent field


def suits(p: Problem) -> bool:
    """Say whether these kernels compute a product; whether they should, its time says."""
    return p.n <= MOST_COLUMNS and skinny_plan.suits(p.transposed)


def choose(p: Problem, multiprocessors: int = 132) -> Choice:
    """Return the way to multiply that is expected to be the fastest; K is at least 32."""
    return min(choices(p, multiprocessors), key=lambda choice: choice.expected_us)


def choices(p: Problem, multiprocessors: int = 132) -> Iterator[Choice]:
    """Yield every way to multiply; see `choose`."""
    yield from skinny_plan.choices(p.transposed, multiprocessors, PIECE_US)


def launches(
    p: Problem, choice: Choice, given: Mapping[str, Argument], room: Room
) -> tuple[Step, ...]:
    """Return what is launched for a choice, in order, on one stream.

    Parameters
    ----------
    p : Problem
    choice : Choice
    given : mapping of str to Argument
        What there is: ``b``, split, as a tensor; ``a`` and ``c`` as pointers; ``alpha`` and
        ``beta``; and the places and steps of scales and flags, under the kernels' names.
    room : Room
        Where workspace is taken from.
    """
    kernel = choice.kernel
    multiply: Arguments = {
        **given,
        **skinny_plan.sizes(p, choice),
        "m": p.m,
        "n": p.n,
        "tiles_m": math.ceil(p.m / TILE_N),
        "tiles_n": math.ceil(p.n / kernel.tile_m),
        "a": skinny_plan.source(p.transposed, kernel, given["a"]),
        **p.a.arguments("a"),
        **p.c.arguments("c"),
    }
    return skinny_plan.summed(p, choice, name_of(kernel), multiply, room)


def judge(
    p: Problem, is_along_k: bool, given: Mapping[str, Argument], multiprocessors: int
) -> Step:
    """Return the launch that finds scales and flags of A's rows.

    ``is_along_k`` says that elements lie closest along K; ``given`` are places, by the kernel's
    names.
    """
    outer, inner = p.a.stack(p.outer, p.inner)
    rows = outer * inner * p.m
    way = "rows"
    if is_along_k:
        near = "k" if rows >= _MANY_ROWS * multiprocessors else "long"
        way = near if p.a.col == 1 else "any"
    tiles = outer * inner * -(-p.m // JUDGED_TILES[way].rows)
    arguments: Arguments = {
        **given,
        "rows": p.m,
        "k": p.k,
        "inner": inner,
        "count": outer * inner,
        "source_outer": p.a.outer,
        "source_inner": p.a.inner,
        "source_row": p.a.row,
        "source_col": p.a.col,
        "threshold": float(fp16x3_threshold(p.k)),
        "most_field": ROW_EXPONENTS[1] + _BIAS,
    }
    return Step.of(f"judge_rows_{way}", min(tiles, MOST_BLOCKS), arguments)


def name_of(kernel: Kernel) -> str:
    """Return what the kernel for columns is called that does what one for rows does."""
    return f"few_columns_{kernel.way}"
