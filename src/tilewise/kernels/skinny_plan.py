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

__all__ = ["Choice", "choices", "choose", "launches", "suits"]

_ITEM_BYTES = 4
_MOST_FLAGS = 2**31 - 1  # which kernels count in 32 bits
_SECTOR = 8  # elements in the 32 bytes that memory moves at least
_BIAS = 127  # of float32's exponent field


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


def choices(p: Problem, multiprocessors: int = 132) -> Iterator[Choice]:
    """Yield every way to multiply; see `choose`."""
    for kernel in KERNELS:
        b, sizes = _far_and_near(p, kernel)
        if not kernel.is_mapped or b.suits_map(*sizes[2:], _ITEM_BYTES):
            yield _choice(p, kernel, multiprocessors)


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
    kernel = choice.kernel
    multiply: Arguments = {
        **given,
        "m": p.m,
        "n": p.n,
        "k": p.k,
        "inner": p.inner,
        "tiles_m": math.ceil(p.m / kernel.tile_m),
        "tiles_n": math.ceil(p.n / TILE_N),
        "chains": choice.chains,
        "chain_k": choice.chain_k,
        "items": choice.items,
        "threshold": float(fp16x3_threshold(p.k)),
        "most_field": column_exponents(p.k)[1] + _BIAS,
        **p.b.arguments("b"),
        **p.c.arguments("c"),
    }
    if kernel.is_mapped:
        at = given["b"]
        assert isinstance(at, Pointer)
        multiply["b"] = Tensor.mapped(at, *_far_and_near(p, kernel), _ITEM_BYTES)
    if choice.chains == 1:
        return (Step.of(kernel.name, choice.blocks, multiply),)
    row = round_up(p.n, MAP_BYTES // _ITEM_BYTES)
    chain, matrix = p.m * row, p.m * row * choice.chains
    sums = room.take(_ITEM_BYTES * p.outer * p.inner * matrix)
    multiply |= {
        "c": sums,
        "alpha": 1.0,
        "beta": 0.0,
        "c_outer": p.inner * matrix,
        "c_inner": chain,
        "c_row": row,
        "c_col": 1,
    }
    added: Arguments = {
        **{name: x for name, x in given.items() if name not in ("a", "b")},
        "sums": sums,
        "m": p.m,
        "n": p.n,
        "inner": p.inner,
        "chains": choice.chains,
        "sum_matrix": matrix,
        "sum_chain": chain,
        "sum_row": row,
        **p.c.arguments("c"),
    }
    high, broad = SUMMED_TILE
    programs = math.ceil(p.m / high) * math.ceil(p.n / broad) * p.outer * p.inner
    return (
        Step.of(kernel.name, choice.blocks, multiply),
        Step.of("add_chains", programs, added),
    )


def _choice(p: Problem, kernel: Kernel, multiprocessors: int) -> Choice:
    count, chain_k = chains(p.k)
    tiles_m, tiles_n = math.ceil(p.m / kernel.tile_m), math.ceil(p.n / TILE_N)
    items = tiles_m * tiles_n * count * p.outer * p.inner
    waves = math.ceil(items / multiprocessors)
    pieces = math.ceil(min(p.k, chain_k) / PIECE)
    way = "mapped" if kernel.is_mapped else "any"
    moved = _ITEM_BYTES * p.k * p.n * math.prod(p.b.stack(p.outer, p.inner))
    if not kernel.is_mapped:  # whatever the step of a warp, it gets whole sectors
        moved *= min(_SECTOR, max(1, abs(p.b.row if kernel.along_k else p.b.col)))
    cached = _ITEM_BYTES * items * (kernel.tile_m + TILE_N) * min(p.k, chain_k)
    bounds = {
        "the multiprocessors": waves * (TILE_US + pieces * PIECE_US[way, kernel.tile_m]),
        "memory": moved / MEMORY_BYTES_PER_US,
        "the L2 cache": cached / CACHE_BYTES_PER_US,
    }
    us, limit = limited_by(bounds)
    size = f"{kernel.tile_m}x{TILE_N}"
    return Choice(
        kernel=kernel,
        chains=count,
        chain_k=chain_k,
        items=items,
        blocks=min(items, multiprocessors),
        expected_us=LAUNCH_US * (1 if count == 1 else 2) + us,
        why=f"B split as it is read, {items} tiles of {size} in {waves} waves, bound by {limit}",
    )


def _far_and_near(p: Problem, kernel: Kernel) -> tuple[Strides, tuple[int, int, int, int]]:
    """Return B's steps and sizes, the axis of unit stride that a map needs last."""
    b, rows, columns = (p.b.transposed, p.n, p.k) if kernel.along_k else (p.b, p.k, p.n)
    sizes = (p.outer, p.inner, rows, columns)
    return b.taken(*sizes), sizes
