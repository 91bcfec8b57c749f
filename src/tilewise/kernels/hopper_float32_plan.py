"""How Hopper computes a product of float32 or complex64 on tensor cores, and how long it takes.

Pure: shapes and strides in, launches out. The operands are split into float16 parts, multiplied,
and what float16 cannot hold is computed again by FMA: where there is none of that, those launches
are done at once, which only the device knows. The device code is in ``split``, ``hopper_float32``
and ``repair``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from tilewise.numerics.schemes import (
    LEAST_K,
    PIECE,
    ROW_EXPONENTS,
    TF32_THRESHOLD,
    column_exponents,
    fp16x3_threshold,
    tf32_exponents,
)

from . import few_columns_plan, skinny_plan
from .hopper_float32_table import LISTS, PIECE_TILES, ROW_TILES, TF32_TILES, TILE, Tf32Tile
from .parts import in_parts
from .steps import (
    MAP_BYTES,
    MOST_BLOCKS,
    Arguments,
    Choice,
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

__all__ = ["LEAST_K", "Choice", "Problem", "choices", "choose"]

_ITEM_BYTES = 4  # of a real number
_VECTOR = MAP_BYTES // _ITEM_BYTES
_BIAS = 127  # of float32's exponent field

#: Measured on an H200: a launch, bytes that a split moves, what a tile takes and each 64 of its K.
_LAUNCH_US = 2.0
_BYTES_PER_US = 3.6e6
_TILE_US = 2.0
_PIECE_US = 1.12
#: What reading as much of a row as a block holds takes, twice.
_ROUND_US = 1.6
#: What the chip's power allows in all, of products of float16.
_FLOP_PER_US = 7.0e8
#: Bytes of A that splitting holds in the L2 cache between its two passes, and the least of blocks.
_CACHED_BYTES = 32 << 20
_LEAST_BLOCKS = 528
#: Of rows that are split some at a time.
_SHORT_K = 2048


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


def choose(
    problem: Problem, multiprocessors: int = 132, workspace_bytes: int | None = None
) -> Choice:
    """Return the way to compute a product that is expected to be the fastest.

    Parameters
    ----------
    problem : Problem
    multiprocessors : int
        Of the device.
    workspace_bytes : int, optional
        Scratch memory allowed: a product that takes more is computed part by part.

    Raises
    ------
    BudgetError
        If the least part takes more.
    """
    limit = math.inf if workspace_bytes is None else workspace_bytes

    def fastest(p: Problem, most: float) -> Choice:
        every = list(choices(p, multiprocessors))
        allowed = max(most, min(choice.workspace_bytes for choice in every))
        fitting = (choice for choice in every if choice.workspace_bytes <= allowed)
        return min(fitting, key=lambda choice: choice.expected_us)

    item = _ITEM_BYTES << problem.pairs
    return in_parts(problem, (item, item, item), limit, fastest)


def choices(problem: Problem, multiprocessors: int = 132) -> Iterator[Choice]:
    """Yield every way to compute a product whole; see `choose`."""
    if problem.precision == "tf32":
        for tile in TF32_TILES:
            if tile.adds_chains or chains(problem.k)[0] == 1:
                yield _Tf32(problem, multiprocessors, tile).choice()
        return
    yield _Tiles(problem, multiprocessors).choice()
    if skinny_plan.suits(problem):
        yield _Skinny(problem, multiprocessors).choice()
    if few_columns_plan.suits(problem):
        yield _FewColumns(problem, multiprocessors).choice()


@dataclass(frozen=True, slots=True)
class _Rows:
    """An operand that is split by whole rows: where it is, and where to."""

    source: Pointer
    target: Pointer
    scale: Pointer
    flag: Pointer
    strides: Strides
    rows: int


class _Tiles:
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
        a_rows, b_rows = self._a_count * self._m, self._b_count * self._n
        self._a_parts = room.take(2 * self._parts * a_rows * self._depth * self._splits_a)
        self._b_parts = room.take(2 * self._parts * b_rows * self._depth * self._splits_b)
        self._a_scale = room.take(4 * a_rows)
        scales = self._depth // PIECE if self._parts == 2 else 1
        self._b_scale = room.take(4 * b_rows * scales * self._splits_b)
        # What counts from zero: rows and columns of each list, and of none, by matrix; flagged
        # columns by tile; flags of columns, which several blocks set; and stretches of K begun.
        b_tiles = self._b_count * self._tiles_n
        counts = (LISTS + 1) * (self._a_count + self._b_count)
        self._clear_count = counts + b_tiles + b_rows + 1
        self._counts = room.take(4 * self._clear_count)
        self._a_flag = room.take(4 * a_rows)
        self._a_list, self._b_list = (room.take(4 * LISTS * rows) for rows in (a_rows, b_rows))
        self._a_tile = room.take(4 * self._a_count * self._tiles_m)

    def choice(self) -> Choice:
        us, why = self._weigh()
        return Choice(
            steps=(
                self._split_rows(),
                self._split_pieces(),
                self._multiply(),
                self._repair(),
            ),
            workspace_bytes=self._room.nbytes,
            expected_us=us,
            why=why,
        )

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
    def _b_flag(self) -> Pointer:
        return self._b_tile.moved(4 * self._b_count * self._tiles_n)

    @property
    def _marks(self) -> Arguments:
        """Flags, and lists and counts of what is flagged."""
        return {
            "a_flag": self._a_flag,
            "b_flag": self._b_flag,
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
        word = self._counts.moved(4 * (self._clear_count - 1))
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

    def _split_rows(self) -> Step:
        return self._split_whole(
            _Rows(self._at[0], self._a_parts, self._a_scale, self._a_flag, self._a, self._m),
            self._a_stack,
            clear_count=self._clear_count,
        )

    def _split_whole(
        self, x: _Rows, stack: tuple[int, int], *, clear_count: int = 0, is_paired: bool = False
    ) -> Step:
        """Return the launch that scales whole rows, which are paired of a complex B transposed."""
        safe = ROW_EXPONENTS if self._parts == 2 else tf32_exponents(self._k)
        along_k = _is_along_k(x.strides, x.rows)
        is_dense = x.strides.col == self._reals and not is_paired
        fitting = (way for way, tile in ROW_TILES.items() if tile.whole and self._k <= tile.depth)
        whole = list(fitting) if is_dense else []
        way = whole[0] if whole else "short" if self._k <= _SHORT_K else "long"
        way = way if along_k else "rows"
        rows, count = ROW_TILES[way].rows, math.prod(stack)
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
            "cleared": self._counts,
            "clear_count": clear_count,
            "rows": x.rows,
            "k": self._k,
            "inner": stack[1],
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
        along_k = _is_along_k(self._b.transposed, self._n)
        way = "k" if along_k else "rows"
        rows = PIECE_TILES[way].rows
        blocks = self._b_count * -(-self._n // rows) * (self._depth // PIECE)
        arguments: Arguments = {
            "source": self._at[1],
            "target": self._b_parts,
            "scale": self._b_scale,
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
            "a": _tensor(self._a_parts, (self._a_count, 2, self._m, depth)),
            "b": _tensor(self._b_parts, (self._b_count, 2, self._n, depth)),
            "a_scale": self._a_scale,
            "b_scale": self._b_scale,
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
            arguments["c"] = Tensor.mapped(self._at[2], self._c_of_reals, sizes, _ITEM_BYTES)
            return Step.of("multiply", blocks, arguments)
        arguments |= {
            "c": self._at[2],
            "a_flag": self._a_flag,
            "b_flag": self._b_flag,
            **self._c.arguments("c"),
            "pairs": p.pairs,
            **self._alpha_beta,
        }
        return Step.of("multiply_any", blocks, arguments)

    def _repair(self) -> Step:
        p = self._p
        matrices = p.outer * p.inner
        share = max(1, self._multiprocessors // matrices)
        order = "mk"[_is_along_k(self._a, self._m)]
        order += "nk"[_is_along_k(self._b.transposed, self._n)]
        order += "_complex" * p.pairs
        arguments: Arguments = {
            "a": self._at[0],
            "b": self._at[1],
            "c": self._at[2],
            "a_list": self._a_list,
            "b_list": self._b_list,
            "a_count": self._a_flagged,
            "b_count": self._b_flagged,
            "b_flag": self._b_flag,
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
        suits = self._c_of_reals.suits_map(self._m, self._n, _ITEM_BYTES)
        return suits and not self._p.updates and self._n % _VECTOR == 0

    @property
    def _c_of_reals(self) -> Strides:
        """The steps that are taken in C, whose pairs lie together if its columns do."""
        p = self._p
        taken = p.c.taken(p.outer, p.inner, p.m, p.n)
        return replace(taken.scaled(self._reals), col=taken.col)

    def _weigh(self) -> tuple[float, str]:
        """Return the microseconds that all of it takes, and what the product is bound by."""
        us, how = self._weigh_tiles(TILE, TILE, _PIECE_US, _TILE_US)
        return 4 * _LAUNCH_US + self._split_us + us, f"fp16x3, {how}"

    @property
    def _split_us(self) -> float:
        elements = (self._a_count * self._m + self._b_count * self._n) * self._depth
        return (4 + 2 * self._parts) * elements / _BYTES_PER_US

    def _weigh_tiles(
        self, rows: int, columns: int, step_us: float, tile_us: float
    ) -> tuple[float, str]:
        """Return the microseconds that multiplying takes by tiles of this kind, and why."""
        p = self._p
        tiles = p.outer * p.inner * -(-self._m // rows) * -(-self._n // columns)
        waves = -(-tiles // self._multiprocessors)
        pieces = self._depth // PIECE
        products = 3 if self._parts == 2 else 1
        flop = 2 * products * tiles * rows * columns * self._depth
        bounds = {
            "the multiprocessors": waves * (tile_us + pieces * step_us),
            "power": flop / (_FLOP_PER_US * self._multiprocessors / 132),
        }
        largest = max(bounds, key=lambda name: bounds[name])
        why = f"{_tiles(tiles, rows, columns)} in {waves} waves, bound by {largest}"
        return bounds[largest], why


class _Tf32(_Tiles):
    """A product of high parts alone: columns of B are scaled as rows of A are."""

    _parts = 1

    def __init__(self, p: Problem, multiprocessors: int, tile: Tf32Tile) -> None:
        super().__init__(p, multiprocessors)
        self._tile = tile

    def choice(self) -> Choice:
        tile = self._tile
        us, how = self._weigh_tiles(tile.rows, tile.columns, tile.step_us, tile.tile_us)
        return Choice(
            steps=(
                self._split_rows(),
                self._split_columns(),
                self._list(),
                self._multiply(),
                self._repair(),
            ),
            workspace_bytes=self._room.nbytes,
            expected_us=5 * _LAUNCH_US + self._split_us + us,
            why=f"tf32, {how}",
        )

    def _split_columns(self) -> Step:
        columns = self._b.transposed
        return self._split_whole(
            _Rows(self._at[1], self._b_parts, self._b_scale, self._b_flag, columns, self._n),
            self._b_stack,
            is_paired=bool(self._p.pairs),
        )

    def _multiply(self) -> Step:
        p, tile = self._p, self._tile
        tiles_m, tiles_n = -(-self._m // tile.rows), -(-self._n // tile.columns)
        tiles = p.outer * p.inner * tiles_m * tiles_n
        arguments: Arguments = {
            "a": _tensor(self._a_parts, (*self._a_stack, self._m, self._depth)),
            "b": _tensor(self._b_parts, (*self._b_stack, self._n, self._depth)),
            "a_scale": self._a_scale,
            "b_scale": self._b_scale,
            **self._pace(tiles),
            "m": self._m,
            "n": self._n,
            "k": self._k,
            "outer": p.outer,
            "inner": p.inner,
            "group": max(1, round(math.sqrt(self._multiprocessors * tile.columns / tile.rows))),
            **self._nexts,
        }
        blocks = min(tiles, self._multiprocessors)
        if self._is_mapped and chains(p.k)[0] == 1:
            sizes = (p.outer, p.inner, self._m, self._n)
            arguments["c"] = Tensor.mapped(self._at[2], self._c_of_reals, sizes, _ITEM_BYTES)
            return Step.of(f"multiply_tf32_{tile.name}", blocks, arguments)
        arguments |= {
            "c": self._at[2],
            "a_flag": self._a_flag,
            "b_flag": self._b_flag,
            "chain_k": self._reals * chains(p.k)[1],
            **self._c.arguments("c"),
            "pairs": p.pairs,
            **self._alpha_beta,
        }
        return Step.of(f"multiply_any_tf32_{tile.name}", blocks, arguments)


class _FewColumns(_Tiles):
    """A product of few columns: what multiplies splits A, too, which is only judged before."""

    _splits_a = False

    def choice(self) -> Choice:
        p = self._p
        multiply = few_columns_plan.choose(p, self._multiprocessors)
        given: Arguments = {
            "a": self._at[0],
            "b": _tensor(self._b_parts, (self._b_count, self._parts, self._n, self._depth)),
            "c": self._at[2],
            "a_scale": self._a_scale,
            "b_scale": self._b_scale,
            "a_flag": self._a_flag,
            "b_flag": self._b_flag,
            **self._nexts,
            **self._alpha_beta,
        }
        launches = few_columns_plan.launches(p, multiply, given, self._room)
        judged: Arguments = {
            "source": self._at[0],
            "scale": self._a_scale,
            "flag": self._a_flag,
            "cleared": self._counts,
            "clear_count": self._clear_count,
        }
        is_along_k = _is_along_k(self._a, self._m)
        judge = few_columns_plan.judge(p, is_along_k, judged, self._multiprocessors)
        judge_us = 4 * self._a_count * self._m * self._depth / _BYTES_PER_US
        split_us = 8 * self._b_count * self._n * self._depth / _BYTES_PER_US
        return Choice(
            steps=(judge, self._split_pieces(), self._repair(), *launches),
            workspace_bytes=self._room.nbytes,
            expected_us=3 * _LAUNCH_US + judge_us + split_us + multiply.expected_us,
            why=f"fp16x3, A split as it is read, {_tiles(multiply.items, *multiply.size[::-1])} "
            f"{multiply.why}",
        )


class _Skinny(_Tiles):
    """A product of few rows: what multiplies splits B, too, and reads it once."""

    _splits_b = False

    def choice(self) -> Choice:
        p = self._p
        multiply = skinny_plan.choose(p, self._multiprocessors)
        given: Arguments = {
            "a": _tensor(self._a_parts, (self._a_count, self._parts, self._m, self._depth)),
            "b": self._at[1],
            "c": self._at[2],
            "a_scale": self._a_scale,
            "a_flag": self._a_flag,
            "b_flag": self._b_flag,
            **self._nexts,
            **self._alpha_beta,
        }
        launches = skinny_plan.launches(p, multiply, given, self._room)
        a_rows = self._a_count * self._m
        # A long row is read by one block, round by round; many rows are bound by memory.
        rounds = -(-self._k // ROW_TILES["long"].depth)
        split_us = max(_ROUND_US * rounds, 8 * a_rows * self._depth / _BYTES_PER_US)
        return Choice(
            steps=(self._split_rows(), *launches, self._list(), self._repair()),
            workspace_bytes=self._room.nbytes,
            expected_us=3 * _LAUNCH_US + split_us + multiply.expected_us,
            why=f"fp16x3, B split as it is read, {_tiles(multiply.items, *multiply.size)} "
            f"{multiply.why}",
        )


def _tiles(count: int, rows: int, columns: int) -> str:
    return f"{count} tiles of {rows}x{columns}"


def _is_along_k(strides: Strides, rows: int) -> bool:
    """Say whether an operand, given as rows over k, has its elements closest along k."""
    return rows == 1 or (strides.col != 0 and abs(strides.col) <= abs(strides.row))


def _tensor(pointer: Pointer, shape: tuple[int, int, int, int]) -> Tensor:
    """Describe contiguous float16."""
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(4))
    return Tensor(pointer.operand, shape, strides, 2, pointer.offset_bytes)
