"""The launches of a product of float32 or complex64 on Hopper's tensor cores, with all arguments.

`Steps` shares out the workspace and puts together what every such product is made of: operands
split into float16 parts, a multiplication, what float16 cannot hold computed again by FMA. Pure;
which ways there are, and which is taken, is in ``hopper_float32_plan``. The device code is in
``split``, ``hopper_float32`` and ``repair``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from tilewise.numerics.schemes import (
    PIECE,
    ROW_EXPONENTS,
    TF32_THRESHOLD,
    column_exponents,
    fp16x3_threshold,
    tf32_exponents,
)

from .hopper_float32_table import LISTS, PIECE_TILES, ROW_TILES, TILE
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
    round_up,
)

__all__ = ["ITEM_BYTES", "Problem", "Steps", "is_along_k", "parts_of"]

ITEM_BYTES = 4  # of a real number
_VECTOR = MAP_BYTES // ITEM_BYTES
_BIAS = 127  # of float32's exponent field

#: Bytes of A that splitting holds in the L2 cache between its two passes, and the least of blocks.
_CACHED_BYTES = 32 << 20
_LEAST_BLOCKS = 528
#: Of rows that are split some at a time.
_SHORT_K = 2048
#: Words that a block sets to 0 at a time.
_CLEARED_AT_ONCE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem(Product):
    """A product of float32, or of complex64, of which nothing is empty; K is at least `LEAST_K`.

    Alpha and beta are real.
    """

    dtype: Literal["fp32", "c64"] = "fp32"
    precision: Literal["tf32"] | None = None

    @property
    def pairs(self) -> int:
        """1 where elements are pairs of real numbers."""
        return int(self.dtype == "c64")


@dataclass(frozen=True, slots=True)
class _Rows:
    """A, or the transpose of B: where it is, and where what becomes of it goes."""

    source: Pointer
    target: Pointer
    scale: Pointer
    flag: Pointer
    strides: Strides
    rows: int
    stack: tuple[int, int]


class Steps:
    """A product by large tiles: the operands split, the workspace shared out, launch by launch.

    Complex matrices are real ones to the kernels: C and A have twice the columns, B twice of both.
    """

    _splits_a = True
    _splits_b = True
    _parts = 2

    def __init__(self, p: Problem, multiprocessors: int) -> None:
        self._p = p
        self._multiprocessors = multiprocessors
        self._reals = reals = 1 + p.pairs
        self._m, self._n, self._k = p.m, p.n * reals, p.k * reals
        self._a, self._b, self._c = (x.scaled(reals) for x in (p.a, p.b, p.c))
        self._at = [Pointer(i) for i in range(3)]
        self._a_stack, self._b_stack = p.a.stack(p.outer, p.inner), p.b.stack(p.outer, p.inner)
        self._a_count, self._b_count = math.prod(self._a_stack), math.prod(self._b_stack)
        self._depth = round_up(self._k, PIECE)
        self._tiles_m, self._tiles_n = -(-self._m // TILE), -(-self._n // TILE)

        self._room = room = Room()
        # What the larger operand leaves lies in the same places, whatever the size of the other.
        takes = [self._take_a, self._take_b]
        if self._a_count * self._m < self._b_count * self._n:
            takes.reverse()
        for take in takes:
            take(room)
        self._a_list = room.take(4 * LISTS * self._a_count * self._m)
        self._b_list = room.take(4 * LISTS * self._b_count * self._n)
        self._a_tile = room.take(4 * self._a_count * self._tiles_m)

    def _take_a(self, room: Room) -> None:
        rows = self._a_count * self._m
        parts = room.take(2 * self._parts * rows * self._depth * self._splits_a)
        scale, flag = room.take(4 * rows), room.take(4 * rows)
        self._rows = _Rows(self._at[0], parts, scale, flag, self._a, self._m, self._a_stack)

    def _take_b(self, room: Room) -> None:
        rows = self._b_count * self._n
        parts = room.take(2 * self._parts * rows * self._depth * self._splits_b)
        scales = self._depth // PIECE if self._parts == 2 else 1
        scale = room.take(4 * rows * scales * self._splits_b)
        # What counts from zero: flags of columns, which several blocks set; rows and columns of
        # each list, and of none, by matrix; flagged columns by tile; and stretches of K begun.
        counts = (LISTS + 1) * (self._a_count + self._b_count)
        counts += self._b_count * self._tiles_n + 1
        flag = room.take(4 * rows)
        self._counts = room.take(4 * counts)
        flags = (self._counts.offset_bytes - flag.offset_bytes) // 4
        self._cleared = flag, flags + counts
        columns = self._b.transposed
        self._columns = _Rows(self._at[1], parts, scale, flag, columns, self._n, self._b_stack)

    def _left(self, x: _Rows) -> object:
        """Return what is equal for products that leave the same of the same operand."""
        return self._parts, self._p.pairs, self._k, x

    @property
    def _a_flagged(self) -> Pointer:
        return self._counts

    @property
    def _b_flagged(self) -> Pointer:
        return self._counts.moved(4 * (LISTS + 1) * self._a_count)

    @property
    def _b_tile(self) -> Pointer:
        return self._b_flagged.moved(4 * (LISTS + 1) * self._b_count)

    @property
    def _marks(self) -> Arguments:
        """Flags, and lists and counts of what is flagged."""
        return {
            "a_flag": self._rows.flag,
            "b_flag": self._columns.flag,
            "a_list": self._a_list,
            "b_list": self._b_list,
            "a_count": self._a_flagged,
            "b_count": self._b_flagged,
            "a_tile": self._a_tile,
            "b_tile": self._b_tile,
            "m": self._m,
            "a_tiles": self._a_count * self._tiles_m,
        }

    def _pace(self, tiles: int) -> Arguments:
        """Return where the blocks of a launch count, if they keep pace."""
        word = self._b_tile.moved(4 * self._b_count * self._tiles_n)
        return {"progress": word if drifts(tiles, self._multiprocessors) else 0}

    @property
    def _threshold(self) -> float:
        return float(fp16x3_threshold(self._k) if self._parts == 2 else TF32_THRESHOLD)

    @property
    def _alpha_beta(self) -> Arguments:
        if self._p.updates:
            return {"alpha": Number(0), "beta": Number(1)}
        return {"alpha": 1.0, "beta": 0.0}

    @property
    def _nexts(self) -> Arguments:
        """How far on the next matrix of an operand is along each batch axis, in matrices."""
        return {
            "a_next_outer": self._a_stack[1] if self._a_stack[0] > 1 else 0,
            "a_next_inner": int(self._a_stack[1] > 1),
            "b_next_outer": self._b_stack[1] if self._b_stack[0] > 1 else 0,
            "b_next_inner": int(self._b_stack[1] > 1),
        }

    def _split_rows(self, *, keeps_b: bool = False) -> Step:
        """Return the launch that splits A and clears what counts, but flags of a B to be kept."""
        flags = (self._counts.offset_bytes - self._columns.flag.offset_bytes) // 4
        but_flags = self._counts, self._cleared[1] - flags
        return self._split_whole(self._rows, but_flags if keeps_b else self._cleared)

    def _clear(self) -> Step:
        """Return the launch that does nothing else, where A is split already."""
        split = self._split_rows()
        blocks = min(-(-self._cleared[1] // _CLEARED_AT_ONCE), _LEAST_BLOCKS)
        return replace(split, grid=(blocks,), arguments={**split.arguments, "count": 0})

    def _split_whole(
        self, x: _Rows, cleared: tuple[Pointer, int] | None = None, *, is_paired: bool = False
    ) -> Step:
        """Return the launch that scales whole rows, which are paired of a complex B transposed."""
        cleared = cleared or (self._counts, 0)
        safe = ROW_EXPONENTS if self._parts == 2 else tf32_exponents(self._k)
        along_k = is_along_k(x.strides, x.rows)
        is_dense = x.strides.col == self._reals and not is_paired
        fitting = (way for way, tile in ROW_TILES.items() if tile.whole and self._k <= tile.depth)
        whole = list(fitting) if is_dense else []
        way = whole[0] if whole else "short" if self._k <= _SHORT_K else "long"
        way = way if along_k else "rows"
        rows, count = ROW_TILES[way].rows, math.prod(x.stack)
        blocks = count * -(-x.rows // rows)
        if 8 * blocks < self._multiprocessors:  # then a row a block, however slowly it is read
            single = (way for way in whole if ROW_TILES[way].rows == 1)
            way, rows, blocks = next(single, "long"), 1, count * x.rows
        # Of what is read twice, the second time should come from the L2 cache; and what follows
        # starts when all blocks have.
        cached = _CACHED_BYTES // (4 * rows * self._k)
        arguments: Arguments = {
            "source": x.source,
            "target": x.target,
            "scale": x.scale,
            "flag": x.flag,
            "cleared": cleared[0],
            "clear_count": cleared[1],
            "rows": x.rows,
            "k": self._k,
            "inner": x.stack[1],
            "count": count,
            "source_outer": x.strides.outer,
            "source_inner": x.strides.inner,
            "source_row": x.strides.row,
            "source_col": x.strides.col,
            "target_row": self._depth,
            "pairs": self._p.pairs,
            "threshold": self._threshold,
            "most_field": safe[1] + _BIAS,
        }
        blocks = min(blocks, max(cached, _LEAST_BLOCKS))
        way += "_paired" * is_paired
        return Step.of(f"split_rows_{self._parts}_{way}", blocks, arguments)

    def _split_pieces(self) -> Step:
        along_k = is_along_k(self._b.transposed, self._n)
        way = "k" if along_k else "rows"
        rows = PIECE_TILES[way].rows
        blocks = self._b_count * -(-self._n // rows) * (self._depth // PIECE)
        arguments: Arguments = {
            "source": self._at[1],
            "target": self._columns.target,
            "scale": self._columns.scale,
            **self._marks,
            "rows": self._n,
            "k": self._k,
            "inner": self._b_stack[1],
            "count": self._b_count,
            "source_outer": self._b.outer,
            "source_inner": self._b.inner,
            "source_row": self._b.col,
            "source_col": self._b.row,
            "target_row": self._depth,
            "threshold": self._threshold,
            "most_field": column_exponents(self._k)[1] + _BIAS,
        }
        way += "_complex" * self._p.pairs
        # As many programs list rows of A.
        blocks = min(max(blocks, self._a_count * self._tiles_m), MOST_BLOCKS)
        return Step.of(f"split_pieces_{self._parts}_{way}", blocks, arguments)

    def _list(self) -> Step:
        """List what is flagged, where `_split_pieces` has not done so."""
        tiles = self._a_count * self._tiles_m + self._b_count * self._tiles_n
        return Step.of("list_flagged", tiles, self._marks | {"n": self._n})

    def _multiply(self) -> Step:
        p, depth = self._p, self._depth
        tiles = p.outer * p.inner * self._tiles_m * self._tiles_n
        arguments: Arguments = {
            "a": parts_of(self._rows.target, (self._a_count, 2, self._m, depth)),
            "b": parts_of(self._columns.target, (self._b_count, 2, self._n, depth)),
            "a_scale": self._rows.scale,
            "b_scale": self._columns.scale,
            "a_flagged": self._a_tile,
            "b_flagged": self._b_tile,
            **self._pace(tiles),
            "m": self._m,
            "n": self._n,
            "k": self._k,
            "chain_k": self._reals * chains(p.k)[1],
            "outer": p.outer,
            "inner": p.inner,
            # A wave of tiles that is nearly square reads the least of A and B.
            "group": max(1, round(math.sqrt(self._multiprocessors))),
            **self._nexts,
        }
        blocks = min(tiles, self._multiprocessors)
        if self._is_mapped:
            sizes = (p.outer, p.inner, self._m, self._n)
            arguments["c"] = Tensor.mapped(self._at[2], self._c_of_reals, sizes, ITEM_BYTES)
            return Step.of("multiply", blocks, arguments)
        arguments |= {
            "c": self._at[2],
            "a_flag": self._rows.flag,
            "b_flag": self._columns.flag,
            **self._c.arguments("c"),
            "pairs": p.pairs,
            **self._alpha_beta,
        }
        return Step.of("multiply_any", blocks, arguments)

    def _repair(self) -> Step:
        p = self._p
        matrices = p.outer * p.inner
        share = max(1, self._multiprocessors // matrices)
        order = "mk"[is_along_k(self._a, self._m)]
        order += "nk"[is_along_k(self._b.transposed, self._n)]
        order += "_complex" * p.pairs
        arguments: Arguments = {
            "a": self._at[0],
            "b": self._at[1],
            "c": self._at[2],
            "a_list": self._a_list,
            "b_list": self._b_list,
            "a_count": self._a_flagged,
            "b_count": self._b_flagged,
            "b_flag": self._columns.flag,
            "m": self._m,
            "n": self._n,
            "k": self._k,
            "chain_k": self._reals * chains(p.k)[1],
            "inner": p.inner,
            "matrices": matrices,
            "share": share,
            **self._nexts,
            **self._alpha_beta,
            **self._a.arguments("a"),
            **self._b.arguments("b"),
            **self._c.arguments("c"),
        }
        blocks = share * min(matrices, self._multiprocessors // share)
        return Step.of(f"repair_{order}", blocks, arguments)

    @property
    def _is_mapped(self) -> bool:
        """Whether TMA can write C: along rows, in whole vectors, over nothing that lies between."""
        suits = self._c_of_reals.suits_map(self._m, self._n, ITEM_BYTES)
        return suits and not self._p.updates and self._n % _VECTOR == 0

    @property
    def _c_of_reals(self) -> Strides:
        """The steps that are taken in C, whose pairs lie together if its columns do."""
        p = self._p
        taken = p.c.taken(p.outer, p.inner, p.m, p.n)
        return replace(taken.scaled(self._reals), col=taken.col)


def is_along_k(strides: Strides, rows: int) -> bool:
    """Say whether an operand, given as rows over k, has its elements closest along k."""
    return rows == 1 or (strides.col != 0 and abs(strides.col) <= abs(strides.row))


def parts_of(pointer: Pointer, shape: tuple[int, int, int, int]) -> Tensor:
    """Describe contiguous float16."""
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(4))
    return Tensor(pointer.operand, shape, strides, 2, pointer.offset_bytes)
