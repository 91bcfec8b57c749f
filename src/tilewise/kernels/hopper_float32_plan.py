"""How Hopper computes a product of float32 or complex64 on tensor cores, and how long it takes.

Pure: shapes and strides in, launches out (``hopper_float32_steps``). The operands are split into
float16 parts, multiplied, and what float16 cannot hold is computed again by FMA: where there is
none of that, those launches are done at once, which only the device knows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from tilewise.numerics.schemes import LEAST_K, PIECE

from . import few_columns_plan, skinny_plan
from .hopper_float32_steps import ITEM_BYTES, Problem, Steps, is_along_k, parts_of
from .hopper_float32_table import ROW_TILES, TF32_TILES, TILE, Tf32Tile
from .parts import in_parts
from .steps import Arguments, Choice, Kept, Step, Tensor, chains

__all__ = ["LEAST_K", "Choice", "Problem", "choices", "choose"]

#: Measured on an H200: a launch, bytes that a split moves, what a tile takes and each 64 of its K.
_LAUNCH_US = 2.0
_BYTES_PER_US = 3.6e6
_TILE_US = 2.0
_PIECE_US = 1.12
#: What reading as much of a row as a block holds takes, twice.
_ROUND_US = 1.6
#: What the chip's power allows in all, of products of float16.
_FLOP_PER_US = 7.0e8


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

    item = ITEM_BYTES << problem.pairs
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


class _Tiles(Steps):
    """A product by large tiles."""

    def choice(self) -> Choice:
        us, why = self._weigh()
        splits = self._split_rows(), self._split_pieces()
        return self._completed(splits, (self._multiply(), self._repair()), us, why)

    def _completed(
        self, splits: tuple[Step, Step], rest: tuple[Step, ...], us: float, why: str
    ) -> Choice:
        """Return the choice, and how it goes on where one of the operands is split already."""
        a_us, b_us = self._split_us
        # What is flagged is listed by a launch of its own where B, with which it is, is not split.
        own_list = () if any(step.kernel == "list_flagged" for step in rest) else (self._list(),)
        without_a = self._clear(), splits[1], *rest
        without_b = self._split_rows(keeps_b=True), *own_list, *rest
        return Choice(
            steps=(*splits, *rest),
            workspace_bytes=self._room.nbytes,
            expected_us=us,
            why=why,
            kept=(
                Kept(self._left(self._rows), without_a, us - a_us),
                Kept(self._left(self._columns), without_b, us - b_us),
            ),
        )

    def _weigh(self) -> tuple[float, str]:
        """Return the microseconds that all of it takes, and what the product is bound by."""
        us, how = self._weigh_tiles(TILE, TILE, _PIECE_US, _TILE_US)
        return 4 * _LAUNCH_US + sum(self._split_us) + us, f"fp16x3, {how}"

    @property
    def _split_us(self) -> tuple[float, float]:
        """The microseconds that splitting A and B takes, launches aside."""
        each = (4 + 2 * self._parts) * self._depth / _BYTES_PER_US
        return each * self._a_count * self._m, each * self._b_count * self._n

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
        us += 5 * _LAUNCH_US + sum(self._split_us)
        rest = self._list(), self._multiply(), self._repair()
        return self._completed(
            (self._split_rows(), self._split_columns()), rest, us, f"tf32, {how}"
        )

    def _split_columns(self) -> Step:
        return self._split_whole(self._columns, is_paired=bool(self._p.pairs))

    def _multiply(self) -> Step:
        p, tile = self._p, self._tile
        tiles_m, tiles_n = -(-self._m // tile.rows), -(-self._n // tile.columns)
        tiles = p.outer * p.inner * tiles_m * tiles_n
        arguments: Arguments = {
            "a": parts_of(self._rows.target, (*self._a_stack, self._m, self._depth)),
            "b": parts_of(self._columns.target, (*self._b_stack, self._n, self._depth)),
            "a_scale": self._rows.scale,
            "b_scale": self._columns.scale,
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
            arguments["c"] = Tensor.mapped(self._at[2], self._c_of_reals, sizes, ITEM_BYTES)
            return Step.of(f"multiply_tf32_{tile.name}", blocks, arguments)
        arguments |= {
            "c": self._at[2],
            "a_flag": self._rows.flag,
            "b_flag": self._columns.flag,
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
            "b": parts_of(self._columns.target, (self._b_count, self._parts, self._n, self._depth)),
            "c": self._at[2],
            "a_scale": self._rows.scale,
            "b_scale": self._columns.scale,
            "a_flag": self._rows.flag,
            "b_flag": self._columns.flag,
            **self._nexts,
            **self._alpha_beta,
        }
        launches = few_columns_plan.launches(p, multiply, given, self._room)
        judged: Arguments = {
            "source": self._at[0],
            "scale": self._rows.scale,
            "flag": self._rows.flag,
            "cleared": self._cleared[0],
            "clear_count": self._cleared[1],
        }
        along_k = is_along_k(self._a, self._m)
        judge = few_columns_plan.judge(p, along_k, judged, self._multiprocessors)
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
            "a": parts_of(self._rows.target, (self._a_count, self._parts, self._m, self._depth)),
            "b": self._at[1],
            "c": self._at[2],
            "a_scale": self._rows.scale,
            "a_flag": self._rows.flag,
            "b_flag": self._columns.flag,
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
