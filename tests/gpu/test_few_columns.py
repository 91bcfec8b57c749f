"""Hopper's kernels for few columns of float32: the bits of large tiles, at every edge and layout.

Operands and C lie in larger arrays of NaN (``stacks``). Kernels for few rows, whose blocks and
plans these share, are in ``test_skinny``; the model's bits in ``test_float32_promise``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.float32_data import DISTRIBUTIONS
from tests.gpu.stacks import (
    AWKWARD,
    LAYOUTS,
    Stack,
    exact,
    filled,
    need_hopper,
    normal,
    operands,
)
from tests.gpu.test_float32 import carried_out, problem, same_bits
from tests.gpu.test_skinny import EDGES, FAMILY
from tilewise import kernels
from tilewise.kernels import few_columns_plan
from tilewise.kernels.hopper_float32_plan import Choice, Problem, choices
from tilewise.kernels.steps import LONGEST_CHAIN
from tilewise.runtime import memory, streams
from tilewise.runtime.launch import Launch

pytestmark = pytest.mark.gpu

Array = NDArray[Any]


@pytest.fixture(autouse=True)
def on_hopper(request: pytest.FixtureRequest) -> None:
    need_hopper(request.config, FAMILY)


def every_way(p: Problem) -> Iterator[Choice]:
    """Yield a whole choice, from A as it is to repair, for each of the kernels for few columns."""
    with pytest.MonkeyPatch.context() as patch:
        for multiply in list(few_columns_plan.choices(p)):
            patch.setattr(few_columns_plan, "choose", lambda *_, chosen=multiply: chosen)
            yield list(choices(p))[2]


def by_tiles(p: Problem) -> Choice:
    """Return the choice whose operands are both split before they are multiplied."""
    choice = next(choices(p))
    assert choice.steps[0].kernel.startswith("split_rows_2")
    assert choice.steps[2].kernel.startswith("multiply")
    return choice


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pitch", [4, 1])
def test_every_kernel_is_exact_at_every_edge(layout: str, pitch: int) -> None:
    for n, m, k in (edge for edge in EDGES if edge[0] <= few_columns_plan.MOST_COLUMNS):
        a, b = operands(m, n, k, "fp32", layout, pitch)
        filled(a, 1), filled(b, 2)
        c = Stack.dense(m, n, "fp32", layout[1], pitch)
        every = list(every_way(problem(a, b, c)))
        assert len(every) in (5, 8, 11)  # the last of which TMA reads
        for choice in every:
            found = carried_out(choice, a, b, c)
            np.testing.assert_array_equal(found, exact(a, b), f"{m}x{n}x{k} {choice}")


@pytest.mark.parametrize("k", [40, 100, 190, 300])
def test_a_block_takes_one_tile_after_the_other(k: int) -> None:
    """With fewer pieces of K than take turns, and more."""
    a, b = operands(64 * 300 + 5, 17, k, "fp32", "NN", 4)
    filled(a, 1), filled(b, 2)
    c = Stack.dense(64 * 300 + 5, 17, "fp32")
    for choice in every_way(problem(a, b, c)):
        np.testing.assert_array_equal(carried_out(choice, a, b, c), exact(a, b), str(choice))


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_bits_are_those_of_large_tiles_on_every_distribution(name: str) -> None:
    """Flagged rows and columns, zeros and subnormal numbers are among them."""
    rng = np.random.default_rng(3)
    for n, k in ((1, 64), (16, 200), (33, 1000), (64, 130)):
        a, b = operands(150, n, k, "fp32", "NN", 4)
        a.view[0, 0], b.view[0, 0] = DISTRIBUTIONS[name](rng, 150, k, n)
        c = Stack.dense(150, n, "fp32")
        p = problem(a, b, c)
        expected = carried_out(by_tiles(p), a, b, c)
        for choice in every_way(p):
            same_bits(carried_out(choice, a, b, c), expected)


@pytest.mark.parametrize("k", [100, 8192, LONGEST_CHAIN, 20000])
@pytest.mark.parametrize("layout", ["NN", "TT"])
def test_bits_are_those_of_a_large_product_flagged_or_not(k: int, layout: str) -> None:
    m, n = 150, 200
    a, b = operands(m, n, k, "fp32", layout, 4)
    normal(a, 1), normal(b, 2)
    a.view[0, 0, [3, 77, 149], 11] = np.nan, np.inf, 1e-30
    a.view[0, 0, 40] = 0
    b.view[0, 0, k - 1, [0, 70, 199]] = -np.inf, 1e-30, np.nan
    b.view[0, 0, :, 150] = 2.0**-140
    c = Stack.dense(m, n, "fp32")
    whole = carried_out(by_tiles(problem(a, b, c)), a, b, c)
    for first, last in ((0, 1), (1, 17), (70, 134), (140, 200)):
        part, part_c = Stack.dense(k, last - first, "fp32"), Stack.dense(m, last - first, "fp32")
        part.view[...] = b.view[..., first:last]
        for choice in every_way(problem(a, part, part_c)):
            same_bits(carried_out(choice, a, part, part_c), whole[..., first:last])


@pytest.mark.parametrize("k", [72, 20000])
def test_alpha_and_beta(k: int) -> None:
    a, b = operands(136, 20, k, "fp32", "NN", 4)
    filled(a, 1, 0, 1), filled(b, 2, 0, 1)
    for beta in (0.0, 0.5):
        c = Stack.dense(136, 20, "fp32")
        if beta:
            filled(c, 3, -64, 64)
        expected = 2 * exact(a, b) + (beta * c.view.astype(np.float64) if beta else 0)
        for choice in every_way(problem(a, b, c, updates=True)):
            found = carried_out(choice, a, b, c, alpha=2, beta=beta)
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("why", AWKWARD)
@pytest.mark.parametrize("first", [0, 1])
def test_operands_of_any_strides(why: str, first: int) -> None:
    n = 70
    for swapped in (False, True):
        a = filled(Stack.of((1, 1, n, n), AWKWARD[why], "fp32", first), 1)
        b = filled(Stack.dense(n, n, "fp32"), 2)
        if swapped:
            a, b = b, a
        c = Stack.of((1, 1, n, n), AWKWARD["every second column"], "fp32", first)
        for choice in every_way(problem(a, b, c)):
            np.testing.assert_array_equal(carried_out(choice, a, b, c), exact(a, b), str(choice))


@pytest.mark.parametrize("shared", ["none", "a outer", "a all", "b inner", "both"])
@pytest.mark.parametrize("k", [36, LONGEST_CHAIN + 1])
def test_batches_and_what_they_share(shared: str, k: int) -> None:
    outer, inner, m, n = 3, 2, 70, 17

    def steps(rows: int, columns: int, name: str) -> tuple[int, ...]:
        row = -(-columns // 4) * 4
        step = [inner * rows * row, rows * row, row, 1]
        if shared in (f"{name} outer", f"{name} all", "both"):
            step[0] = 0
        if shared in (f"{name} inner", f"{name} all", "both"):
            step[1] = 0
        return tuple(step)

    a = filled(Stack.of((outer, inner, m, k), steps(m, k, "a"), "fp32"), 1, -1, 1)
    b = filled(Stack.of((outer, inner, k, n), steps(k, n, "b"), "fp32"), 2, -1, 1)
    c = Stack.of((outer, inner, m, n), (inner * m * n, m * n, n, 1), "fp32")
    for choice in every_way(problem(a, b, c)):
        np.testing.assert_array_equal(carried_out(choice, a, b, c), exact(a, b), str(choice))


def test_E9_the_same_bits_every_time() -> None:
    for (m, n, k), layout in itertools.product(((9000, 16, 1024), (700, 64, 3000)), ("NN", "TN")):
        a, b = operands(m, n, k, "fp32", layout, 4)
        normal(a, 1), normal(b, 2)
        c = Stack.dense(m, n, "fp32")
        choice = list(choices(problem(a, b, c)))[2]
        first = carried_out(choice, a, b, c)
        for _ in range(5):
            same_bits(carried_out(choice, a, b, c), first)


def test_products_follow_each_other_in_one_workspace() -> None:
    """Rows that are repaired while others are multiplied, and what the next product clears."""
    m, n, k, stream = 700, 5, 4000, streams.DEFAULT
    sets = []
    for seed in range(4):
        a, b = operands(m, n, k, "fp32", "NN", 4)
        normal(a, seed), normal(b, 10 + seed)
        a.view[0, 0, [seed, 300 + seed, 699], seed] = 1e-30, np.inf, np.nan
        sets.append((a, b, Stack.dense(m, n, "fp32")))
    choice = list(choices(problem(*sets[0])))[2]
    with ExitStack() as held:

        def place(nbytes: int) -> memory.Memory:
            return held.enter_context(memory.allocate(nbytes, 0, stream))

        room = place(choice.workspace_bytes)
        memory.fill(room, 0xFF, stream)
        places = []
        for stacks in sets:
            places.append([place(stack.flat.nbytes) for stack in stacks])
            for at, stack in zip(places[-1], stacks, strict=True):
                memory.write(at, stack.flat.view(np.uint8), stream)
        for stacks, taken in 3 * list(zip(sets, places, strict=True)):
            firsts = [x.first * x.flat.itemsize for x in stacks]
            pointers = [x.pointer + first for x, first in zip(taken, firsts, strict=True)]
            for step in choice.steps:
                built = kernels.find(FAMILY, step.kernel, (9, 0))
                given = tuple([*pointers, room.pointer][i] for i in step.operands)
                Launch(built, 0, step.grid, step.arguments)(stream, given)
        for (a, b, c), (*_, at) in zip(sets, places, strict=True):
            flat = np.empty_like(c.flat)
            memory.read(at, flat.view(np.uint8), stream)
            same_bits(c.values_in(flat), carried_out(by_tiles(problem(a, b, c)), a, b, c))
