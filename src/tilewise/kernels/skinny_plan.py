"""How Hopper's kernels for few rows multiply float32, and how long that takes.

Pure: shapes and strides in, launches out. `choose` picks tiles, and `launches` spells a choice out,
from a split A to C where nothing is flagged. What goes before and after, and when a product is left
to the kernels for large ones, is in ``hopper_float32_plan``; the device code is in ``skinny``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilewise.numerics.schemes import PIECE, column_exponents, fp16x3_threshold

from .skinny_table import (
    CACHE_BYTES_PER_US,
    KERNELS,
    LAUNCH_US,
    MEMORY_BYTES_PER_US,
    PIECE_US,
    SUMMED_TILE,
    TILE_N,
    TILE_US,
    Kernel,
)
from .steps import (
    MAP_BYTES,
    Argument,
    Arguments,
    Pointer,
    Room,
    Step,
    Strides,
    Tensor,
    chains,
    limited_by,
    round_up,
)

if TYPE_CHECKING:
    from .hopper_float32_plan import Problem

__all__ = ["Choice", "choices", "choose", "launches", "sizes", "source", "suits", "summed"]

_ITEM_BYTES = 4
_MOST_FLAGS = 2**31 - 1  # which kernels count in 32 bits
_SECTOR = 8  # elements in the 32 bytes that memory moves at least
_BIAS = 127  # of float32's exponent field

#: What a kernel that multiplies is told of C, and what adds up chains, too.
_OF_C = (
    *("c", "a_scale", "a_flag", "b_flag", "m", "n", "inner", "chains", "alpha", "beta"),
    *("a_next_outer", "a_next_inner", "b_next_outer", "b_next_inner"),
    *("c_outer", "c_inner", "c_row", "c_col"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How a product is multiplied, and what that is expected to take.

    K is cut into ``chains`` of ``chain_k``; ``items`` are the tiles of all of them.
    """

    kernel: Kernel
    chains: int
    chain_k: int
    items: int
    blocks: int
    expected_us: float
    why: str

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns of a tile."""
        return self.kernel.tile_m, TILE_N


def suits(p: Problem) -> bool:
    """Say whether these kernels compute a product; whether they should, its time says."""
    items = math.ceil(p.m / 16) * math.ceil(p.n / TILE_N) * chains(p.k)[0] * p.outer * p.inner
    flags = max(p.m, p.n) * p.outer * p.inner
    return p.dtype == "fp32" and p.precision is None and max(items, flags) <= _MOST_FLAGS


def choose(p: Problem, multiprocessors: int = 132) -> Choice:
    """Return the way to multiply that is expected to be the fastest; K is at least 32.

    Its bits are the same whichever it is: they depend on the operands and K alone.
    """
    return min(choices(p, multiprocessors), key=lambda choice: choice.expected_us)


def choices(
    p: Problem,
    multiprocessors: int = 132,
    piece_us: Mapping[tuple[str, int], float] = PIECE_US,
) -> Iterator[Choice]:
    """Yield every way to multiply; see `choose`.

    ``piece_us`` is what a tile takes for a piece of K, by how B is read and the rows of A.
    """
    for kernel in KERNELS:
        b, sizes = _far_and_near(p, kernel)
        if not kernel.is_mapped or b.suits_map(*sizes[2:], _ITEM_BYTES):
            way = "mapped" if kernel.is_mapped else "any"
            yield _choice(p, kernel, multiprocessors, piece_us[way, kernel.tile_m])


def launches(
    p: Problem, choice: Choice, given: Mapping[str, Argument], room: Room
) -> tuple[Step, ...]:
    """Return what is launched for a choice, in order, on one stream.

    Parameters
    ----------
    p : Problem
    choice : Choice
    given : mapping of str to Argument
        What there is: ``a``, split, as a tensor; ``b`` and ``c`` as pointers; ``alpha`` and
        ``beta``; and the places and steps of scales and flags, under the kernels' names.
    room : Room
        Where workspace is taken from.
    """
    multiply: Arguments = {
        **given,
        **sizes(p, choice),
        "m": p.m,
        "n": p.n,
        "tiles_m": math.ceil(p.m / choice.kernel.tile_m),
        "tiles_n": math.ceil(p.n / TILE_N),
        "threshold": float(fp16x3_threshold(p.k)),
        "most_field": column_exponents(p.k)[1] + _BIAS,
        "b": source(p, choice.kernel, given["b"]),
        **p.b.arguments("b"),
        **p.c.arguments("c"),
    }
    return summed(p, choice, choice.kernel.name, multiply, room)


def sizes(p: Problem, choice: Choice) -> Arguments:
    """Return how many of everything there are, by the kernels' names, but for rows and columns."""
    return {
        "k": p.k,
        "inner": p.inner,
        "chains": choice.chains,
        "chain_k": choice.chain_k,
        "items": choice.items,
    }


def source(p: Problem, kernel: Kernel, b: Argument) -> Argument:
    """Return B as a kernel reads it, which is given as a pointer."""
    assert isinstance(b, Pointer)
    if not kernel.is_mapped:
        return b
    return Tensor.mapped(b, *_far_and_near(p, kernel), _ITEM_BYTES)


def summed(
    p: Problem, choice: Choice, name: str, multiply: Arguments, room: Room
) -> tuple[Step, ...]:
    """Return the launch of a kernel that multiplies, and of what adds up chains if there are."""
    if choice.chains == 1:
        return (Step.of(name, choice.blocks, multiply),)
    row = round_up(p.n, MAP_BYTES // _ITEM_BYTES)
    chain, matrix = p.m * row, p.m * row * choice.chains
    sums = room.take(_ITEM_BYTES * p.outer * p.inner * matrix)
    added: Arguments = {
        **{name: multiply[name] for name in _OF_C},
        "sums": sums,
        "sum_matrix": matrix,
        "sum_chain": chain,
        "sum_row": row,
    }
    multiply |= {
        "c": sums,
        "alpha": 1.0,
        "beta": 0.0,
        "c_outer": p.inner * matrix,
        "c_inner": chain,
        "c_row": row,
        "c_col": 1,
    }
    high, broad = SUMMED_TILE
    programs = math.ceil(p.m / high) * math.ceil(p.n / broad) * p.outer * p.inner
    return (
        Step.of(name, choice.blocks, multiply),
        Step.of("add_chains", programs, added),
    )


def _choice(p: Problem, kernel: Kernel, multiprocessors: int, piece_us: float) -> Choice:
    count, chain_k = chains(p.k)
    tiles_m, tiles_n = math.ceil(p.m / kernel.tile_m), math.ceil(p.n / TILE_N)
    items = tiles_m * tiles_n * count * p.outer * p.inner
    waves = math.ceil(items / multiprocessors)
    pieces = math.ceil(min(p.k, chain_k) / PIECE)
    moved = _ITEM_BYTES * p.k * p.n * math.prod(p.b.stack(p.outer, p.inner))
    if not kernel.is_mapped:  # whatever the step of a warp, it gets whole sectors
        moved *= min(_SECTOR, max(1, abs(p.b.row if kernel.along_k else p.b.col)))
    cached = _ITEM_BYTES * items * (kernel.tile_m + TILE_N) * min(p.k, chain_k)
    bounds = {
        "the multiprocessors": waves * (TILE_US + pieces * piece_us),
        "memory": moved / MEMORY_BYTES_PER_US,
        "the L2 cache": cached / CACHE_BYTES_PER_US,
    }
    us, limit = limited_by(bounds)
    return Choice(
        kernel=kernel,
        chains=count,
        chain_k=chain_k,
        items=items,
        blocks=min(items, multiprocessors),
        expected_us=LAUNCH_US * (1 if count == 1 else 2) + us,
        why=f"in {waves} waves, bound by {limit}",
    )


def _far_and_near(p: Problem, kernel: Kernel) -> tuple[Strides, tuple[int, int, int, int]]:
    """Return B's steps and sizes, the axis of unit stride that a map needs last."""
    b, rows, columns = (p.b.transposed, p.n, p.k) if kernel.along_k else (p.b, p.k, p.n)
    sizes = (p.outer, p.inner, rows, columns)
    return b.taken(*sizes), sizes
