"""The plan of the kernels for few rows: what they are told makes up the whole product.

No kernel runs here. `multiply` and `add` do in NumPy what the launches are documented to do, on
flat memory with margins of NaN, so that strides, maps, chains and batches are tested without a GPU.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from tilewise.kernels.hopper_float32_plan import Problem
from tilewise.kernels.skinny_plan import Choice, choices, choose, launches, suits
from tilewise.kernels.skinny_table import KERNELS, SUMMED_TILE
from tilewise.kernels.steps import LONGEST_CHAIN, Pointer, Room, Step, Strides, Tensor

Array = NDArray[Any]

MARGIN = 40


class Memory:
    """Matrices (outer, inner, rows, columns) as a view of flat float64 that is NaN elsewhere."""

    def __init__(self, shape: tuple[int, ...], steps: tuple[int, ...]) -> None:
        spans = [(size - 1) * step for size, step in zip(shape, steps, strict=True)]
        self.first = MARGIN - sum(min(span, 0) for span in spans)
        size = self.first + sum(max(span, 0) for span in spans) + 1 + MARGIN
        self.flat = np.full(size, np.nan)
        self.view = self.at(shape, steps)
        self.steps = steps

    @property
    def strides(self) -> Strides:
        return Strides(*self.steps)

    def at(self, shape: tuple[int, ...], steps: tuple[int, ...], offset: int = 0) -> Array:
        """Return elements as an array of those steps, within this memory."""
        last = self.first + offset + sum((n - 1) * s for n, s in zip(shape, steps, strict=True))
        assert 0 <= self.first + offset < self.flat.size
        assert 0 <= last < self.flat.size
        return as_strided(self.flat[self.first + offset :], shape, [8 * step for step in steps])


def product(
    shape: tuple[int, int, int], batch: tuple[int, int], layout: str, shared: str = "", pad: int = 0
) -> tuple[Problem, Memory, Memory, Memory]:
    m, n, k = shape

    def memory(rows: int, columns: int, order: str, name: str) -> Memory:
        near = columns if order == "N" else rows
        pitch = -(-near // 4) * 4 + pad
        matrix = pitch * (rows if order == "N" else columns)
        steps = [batch[1] * matrix, matrix, *((pitch, 1) if order == "N" else (1, pitch))]
        if name == shared:
            steps[:2] = 0, 0
        return Memory((*batch, rows, columns), tuple(steps))

    a, b, c = memory(m, k, "N", "a"), memory(k, n, layout[0], "b"), memory(m, n, layout[1], "c")
    rng = np.random.default_rng(m * n + k)
    a.view[...], b.view[...] = rng.integers(-3, 4, a.view.shape), rng.integers(-3, 4, b.view.shape)
    p = Problem(
        m=m, n=n, k=k, a=a.strides, b=b.strides, c=c.strides, outer=batch[0], inner=batch[1]
    )
    return p, a, b, c


def given_of(p: Problem) -> dict[str, Any]:
    """Return what `launches` is given, by operands that `carry_out` knows."""
    outer, inner = (p.outer if p.a.outer else 1), (p.inner if p.a.inner else 1)
    b_outer, b_inner = (p.outer if p.b.outer else 1), (p.inner if p.b.inner else 1)
    return {
        "a": Tensor(3, (outer * inner, 2, p.m, p.k), (2 * p.m * p.k, p.m * p.k, p.k, 1), 2),
        "b": Pointer(1),
        "c": Pointer(2),
        "alpha": 1.0,
        "beta": 0.0,
        "a_next_outer": inner if outer > 1 else 0,
        "a_next_inner": int(inner > 1),
        "b_next_outer": b_inner if b_outer > 1 else 0,
        "b_next_inner": int(b_inner > 1),
        **{name: Pointer(3) for name in ("a_scale", "a_flag", "b_flag")},
    }


def carry_out(p: Problem, choice: Choice, a: Memory, b: Memory, c: Memory) -> None:
    room = Room()
    steps = launches(p, choice, given_of(p), room)
    stacked = [slice(None) if step else slice(1) for step in (p.a.outer, p.a.inner)]
    rows = a.view[tuple(stacked)].reshape(-1, p.m, p.k)
    sums = Memory((1, 1, 1, room.nbytes // 4 + 1), (0, 0, 0, 1))
    for step in steps:
        if step.kernel == "add_chains":
            add(step, sums, c)
        else:
            multiply(step, rows, b, sums if len(steps) > 1 else c)


def multiply(step: Step, a: Array, b: Memory, c: Memory) -> None:
    x: Any = step.arguments
    kernel = next(kernel for kernel in KERNELS if kernel.name == step.kernel)
    assert step.grid[0] <= x["items"]
    for item in range(x["items"]):
        rest, row = divmod(item, x["tiles_m"])
        rest, col = divmod(rest, x["tiles_n"])
        rest, chain = divmod(rest, x["chains"])
        outer, inner = divmod(rest, x["inner"])
        row, col, begin = row * kernel.tile_m, col * 64, chain * x["chain_k"]
        high, wide = min(kernel.tile_m, x["m"] - row), min(64, x["n"] - col)
        depth = min(x["chain_k"], x["k"] - begin)
        assert min(high, wide, depth) > 0
        b_matrix = x["b_next_outer"] > 0, x["b_next_inner"] > 0
        if kernel.is_mapped:
            t = x["b"]
            whole = b.at(t.shape, t.strides, t.offset_bytes // 4)
            assert all(step % 4 == 0 for step in t.strides[:3])
            tile = whole[outer if b_matrix[0] else 0, inner if b_matrix[1] else 0]
            tile = tile.T if kernel.along_k else tile
            tile = tile[begin : begin + depth, col : col + wide]
        else:
            place = outer * x["b_outer"] + inner * x["b_inner"]
            place += begin * x["b_row"] + col * x["b_col"]
            tile = b.at((depth, wide), (x["b_row"], x["b_col"]), place)
        matrix = outer * x["a_next_outer"] + inner * x["a_next_inner"]
        place = outer * x["c_outer"] + (inner * x["chains"] + chain) * x["c_inner"]
        place += row * x["c_row"] + col * x["c_col"]
        target = c.at((high, wide), (x["c_row"], x["c_col"]), place)
        assert np.isnan(target).all(), "written twice"
        target[...] = a[matrix, row : row + high, begin : begin + depth] @ tile


def add(step: Step, sums: Memory, c: Memory) -> None:
    x: Any = step.arguments
    tiles = math.ceil(x["m"] / SUMMED_TILE[0]) * math.ceil(x["n"] / SUMMED_TILE[1])
    matrices, rest = divmod(step.grid[0], tiles)
    assert rest == 0
    shape = (x["chains"], x["m"], x["n"])
    for matrix in range(matrices):
        place = matrix // x["inner"] * x["c_outer"] + matrix % x["inner"] * x["c_inner"]
        terms = sums.at(shape, (x["sum_chain"], x["sum_row"], 1), matrix * x["sum_matrix"])
        c.at(shape[1:], (x["c_row"], x["c_col"]), place)[...] = terms.sum(axis=0)


def check(p: Problem, a: Memory, b: Memory, c: Memory) -> None:
    for choice in choices(p):
        c.flat[...] = np.nan
        carry_out(p, choice, a, b, c)
        np.testing.assert_array_equal(c.view, a.view @ b.view, str(choice))
        c.view[...] = np.nan
        assert np.isnan(c.flat).all(), "written outside"


@given(
    st.tuples(st.integers(1, 150), st.integers(1, 300), st.integers(32, 200)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.sampled_from(["NN", "NT", "TN", "TT"]),
    st.sampled_from(["", "a", "b"]),
    st.sampled_from([0, 1]),
)
@settings(max_examples=25, deadline=None)
def test_every_choice_computes_the_product(
    shape: tuple[int, int, int], batch: tuple[int, int], layout: str, shared: str, pad: int
) -> None:
    check(*product(shape, batch, layout, shared, pad))


@pytest.mark.parametrize("shared", ["", "a", "b"])
def test_chains_of_a_long_k_are_added_up(shared: str) -> None:
    check(*product((3, 66, LONGEST_CHAIN + 40), (1, 2), "NT", shared))


@pytest.mark.parametrize("steps", [(0, 0, -80, 1), (0, 0, -80, -1), (0, 0, 0, 1), (0, 0, 150, 2)])
def test_b_of_any_steps(steps: tuple[int, int, int, int]) -> None:
    p, a, _, c = product((5, 70, 70), (1, 1), "NN")
    b = Memory((1, 1, 70, 70), steps)
    b.view[...] = np.random.default_rng(0).integers(-3, 4, b.view.shape)
    p = Problem(m=5, n=70, k=70, a=p.a, b=b.strides, c=p.c)
    assert not any(choice.kernel.is_mapped for choice in choices(p))
    check(p, a, b, c)


@pytest.mark.parametrize(("pad", "is_mapped"), [(0, True), (1, False), (2, False), (4, True)])
@pytest.mark.parametrize("layout", ["NN", "TN"])
def test_tma_reads_b_where_it_can(pad: int, is_mapped: bool, layout: str) -> None:
    p = product((16, 640, 640), (1, 1), layout, pad=pad)[0]
    kernel = choose(p).kernel
    assert kernel.is_mapped == is_mapped
    assert kernel.along_k == (layout[0] == "T")
    assert not any(
        x.kernel.is_mapped for x in choices(replace(p, b=replace(p.b, is_aligned=False)))
    )


def test_tiles_are_no_higher_than_they_need_to_be() -> None:
    for m, tile_m in ((1, 16), (16, 16), (17, 32), (32, 32), (33, 64), (64, 64), (128, 64)):
        p = product((m, 8192, 64), (1, 1), "NN")[0]
        assert choose(replace(p, k=8192)).kernel.tile_m == tile_m, m


def test_what_these_kernels_are_not_for() -> None:
    p = product((16, 64, 64), (1, 1), "NN")[0]
    assert suits(p)
    assert not suits(replace(p, precision="tf32"))
    assert not suits(replace(p, dtype="c64"))
    assert not suits(replace(p, outer=2**20, inner=2**8))
