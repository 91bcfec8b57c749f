"""Hopper's kernels for few rows of float32: the model's bits, at every edge, in every layout.

Operands and C lie in larger arrays of NaN (``stacks``). What is flagged stays as it was.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.float32_data import over_the_promise
from tests.gpu.stacks import (
    AWKWARD,
    LAYOUTS,
    Stack,
    carry_out,
    exact,
    filled,
    need_hopper,
    normal,
    operands,
    sizes_and_strides,
)
from tilewise.kernels import skinny_plan
from tilewise.kernels.hopper_float32_plan import Choice, Problem, choices
from tilewise.kernels.steps import LONGEST_CHAIN, Pointer, chains
from tilewise.numerics import schemes

pytestmark = pytest.mark.gpu

Array = NDArray[Any]

FAMILY = "hopper_float32"

#: Around the sides of tiles, of pieces and of instructions.
EDGES = (
    *((1, 1, 32), (1, 63, 64), (2, 64, 65), (15, 65, 127), (16, 130, 40), (17, 8, 128)),
    *((31, 129, 192), (33, 200, 193), (63, 72, 33), (64, 64, 64), (65, 67, 129), (130, 70, 66)),
)


@pytest.fixture(autouse=True)
def on_hopper(request: pytest.FixtureRequest) -> None:
    need_hopper(request.config, FAMILY)


def problem(a: Stack, b: Stack, c: Stack, *, updates: bool = False) -> Problem:
    return Problem(**sizes_and_strides(a, b, c), updates=updates)


def every_way(p: Problem) -> Iterator[Choice]:
    """Yield a whole choice, split to repair, for each of the kernels for few rows."""
    with pytest.MonkeyPatch.context() as patch:
        for multiply in list(skinny_plan.choices(p)):
            patch.setattr(skinny_plan, "choose", lambda *_, chosen=multiply: chosen)
            yield list(choices(p))[1]


def best(p: Problem) -> Choice:
    return list(choices(p))[1]


def multiplied(
    p: Problem, choice: Choice, a: Stack, b: Stack, c: Stack, alpha: float = 1, beta: float = 0
) -> tuple[Array, Array, Array]:
    """Return C before anything is repaired, and the flags of rows and of columns."""
    listed = choice.steps[-2]
    assert listed.kernel == "list_flagged"
    steps, nbytes = choice.steps[:-2], choice.workspace_bytes
    values, raw = carry_out(FAMILY, steps, nbytes, (a, b, c), alpha, beta)
    flags = []
    for name, size, strides in (("a_flag", p.m, p.a), ("b_flag", p.n, p.b)):
        at = listed.arguments[name]
        assert isinstance(at, Pointer)
        count = size * (p.outer if strides.outer else 1) * (p.inner if strides.inner else 1)
        flags.append(raw[at.offset_bytes :][: 4 * count].view(np.int32))
    return values, flags[0], flags[1]


def result(
    p: Problem, choice: Choice, a: Stack, b: Stack, c: Stack, alpha: float = 1, beta: float = 0
) -> Array:
    """Return C of a product in which nothing is flagged."""
    values, rows, cols = multiplied(p, choice, a, b, c, alpha, beta)
    assert not np.concatenate((rows, cols)).any(), "flags"
    return values


def model(a: Stack, b: Stack) -> schemes.Product:
    """Return the model of one product, cut into chains as its K wants it."""
    k = a.view.shape[3]
    return schemes.fp16x3(a.view[0, 0].copy(), b.view[0, 0].copy(), chain=chains(k)[1])


def bits(x: Array) -> Array:
    return np.ascontiguousarray(x).view(np.uint32)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pitch", [4, 1])
def test_every_kernel_is_exact_at_every_edge(layout: str, pitch: int) -> None:
    for m, n, k in EDGES:
        a, b = operands(m, n, k, "fp32", layout, pitch)
        filled(a, 1), filled(b, 2)
        c = Stack.dense(m, n, "fp32", pitch=pitch)
        p = problem(a, b, c)
        every = list(every_way(p))
        assert len(every) in (5, 8, 11)  # the last of which TMA reads
        for choice in every:
            np.testing.assert_array_equal(
                result(p, choice, a, b, c), exact(a, b), f"{m}x{n}x{k} {choice}"
            )


@pytest.mark.parametrize("k", [40, 100, 190, 300])
def test_a_block_takes_one_tile_after_the_other(k: int) -> None:
    """With fewer pieces of K than take turns, and more."""
    a, b = operands(17, 64 * 300 + 5, k, "fp32", "NN", 4)
    filled(a, 1), filled(b, 2)
    c = Stack.dense(17, 64 * 300 + 5, "fp32")
    p = problem(a, b, c)
    for choice in every_way(p):
        np.testing.assert_array_equal(result(p, choice, a, b, c), exact(a, b), str(choice))


@pytest.mark.parametrize("k", [32, 64, 100, 1000])
@pytest.mark.parametrize("layout", ["NN", "TT"])
def test_bits_are_those_of_the_model(k: int, layout: str) -> None:
    a, b = operands(37, 100, k, "fp32", layout, 4)
    normal(a, 1), normal(b, 2)
    c = Stack.dense(37, 100, "fp32")
    p = problem(a, b, c)
    expected = model(a, b)
    for choice in every_way(p):
        values, rows, cols = multiplied(p, choice, a, b, c)
        np.testing.assert_array_equal(rows != 0, expected.rows)
        np.testing.assert_array_equal(cols != 0, expected.columns)
        safe = ~expected.rows[:, None] & ~expected.columns
        assert safe.any()
        np.testing.assert_array_equal(bits(values[0, 0])[safe], bits(expected.c)[safe], str(choice))
        assert np.isnan(values[0, 0][~safe]).all()


@pytest.mark.parametrize("k", [LONGEST_CHAIN, LONGEST_CHAIN + 1, 20000])
def test_a_long_k_is_cut_into_chains(k: int) -> None:
    a, b = operands(3, 70, k, "fp32", "NN", 4)
    normal(a, 1), normal(b, 2)
    c = Stack.dense(3, 70, "fp32")
    p = problem(a, b, c)
    expected = model(a, b)
    assert (chains(k)[0] > 1) == (k > LONGEST_CHAIN)
    for choice in every_way(p):
        values = multiplied(p, choice, a, b, c)[0][0, 0]
        safe = ~expected.rows[:, None] & ~expected.columns
        np.testing.assert_array_equal(bits(values)[safe], bits(expected.c)[safe], str(choice))


@pytest.mark.parametrize("k", [40, 5000, 20000])
def test_bits_depend_on_row_column_and_k_alone(k: int) -> None:
    m, n = 70, 264
    a, b = operands(m, n, k, "fp32", "NN", 4)
    # Without small magnitudes, so that nothing is flagged.
    for stack, seed in ((a, 1), (b, 2)):
        rng = np.random.default_rng(seed)
        signs = rng.choice([-1, 1], stack.view.shape)
        stack.view[...] = signs * rng.uniform(0.5, 4, stack.view.shape)
    c = Stack.dense(m, n, "fp32")
    p = problem(a, b, c)
    every = [result(p, choice, a, b, c) for choice in every_way(p)]
    for found in every[1:]:
        np.testing.assert_array_equal(bits(found), bits(every[0]))
    for rows, columns in (((7, 8), (0, n)), ((0, m), (31, 32)), ((5, 25), (17, 90))):
        part_a = Stack.dense(rows[1] - rows[0], k, "fp32", "T")
        part_b = Stack.dense(k, columns[1] - columns[0], "fp32", "T")
        part_a.view[...] = a.view[:, :, slice(*rows)]
        part_b.view[...] = b.view[..., slice(*columns)]
        part_c = Stack.dense(rows[1] - rows[0], columns[1] - columns[0], "fp32")
        p = problem(part_a, part_b, part_c)
        whole = every[0][:, :, slice(*rows), slice(*columns)]
        for choice in every_way(p):
            found = result(p, choice, part_a, part_b, part_c)
            np.testing.assert_array_equal(bits(found), bits(whole), str(choice))


@pytest.mark.parametrize("k", [32, 64, 1000, 8192])
def test_errors_keep_the_promise(k: int) -> None:
    a, b = operands(48, 200, k, "fp32", "NN", 4)
    normal(a, 1), normal(b, 2)
    c = Stack.dense(48, 200, "fp32")
    p = problem(a, b, c)
    values, rows, cols = multiplied(p, best(p), a, b, c)
    safe = (rows == 0)[:, None] & (cols == 0)
    assert safe.mean() > 0.5
    assert (over_the_promise(values[0, 0], a.view[0, 0], b.view[0, 0])[safe] <= 1).all()


def test_flags_on_both_sides_of_the_threshold() -> None:
    k = 200
    least = float(schemes.fp16x3_threshold(k)) * 2.0**-14
    low, high = schemes.column_exponents(k)
    below = float(np.nextafter(np.float32(least), np.float32(0)))
    cases: list[tuple[float, float, bool]] = [
        *((1, least, False), (1, below, True), (1, 0, False), (1, np.nan, True)),
        *((1, np.inf, True), (1, -np.inf, True), (1, 2.0**-149, True), (0, 0, False)),
        *((2.0**low, 0, False), (2.0 ** (low - 1), 0, True), (2.0**-140, 0, True)),
        *((2.0**high, 0, False), (2.0 ** (high + 1), 0, True), (2.0**127, 0, True)),
    ]
    for place in (0, 63, 64, 199):
        a, b = operands(20, len(cases), k, "fp32", "NN", 4)
        filled(a, 1)
        for j, (largest, other, _) in enumerate(cases):
            b.view[..., j] = largest
            b.view[0, 0, place, j] = other
        c = Stack.dense(20, len(cases), "fp32")
        p = problem(a, b, c)
        for choice in every_way(p):
            values, rows, cols = multiplied(p, choice, a, b, c)
            assert not rows.any()
            assert (cols != 0).tolist() == [flag for *_, flag in cases], f"{place} {choice}"
            np.testing.assert_array_equal(cols != 0, model(a, b).columns)
            safe = cols == 0
            expected = exact(a, b)[..., safe]
            allowed = 1e-5 * np.abs(a.view.astype(float)) @ np.abs(b.view[..., safe].astype(float))
            assert (np.abs(values[..., safe] - expected) <= allowed).all()
            assert np.isnan(values[..., ~safe]).all(), "flagged, and written"


def test_rows_are_flagged_as_columns_are() -> None:
    k = 100
    least = float(schemes.fp16x3_threshold(k)) * 2.0**-14
    below = float(np.nextafter(np.float32(least), np.float32(0)))
    others = [least, below, 0, np.nan, np.inf, 2.0**-149]
    scales = [1.0, 2.0**-106, 2.0**-107, 2.0**127, 2.0**-140]
    a, b = operands(len(others) + len(scales) + 1, 70, k, "fp32", "NN", 4)
    a.view[...] = 1
    a.view[0, 0, -1] = 0
    a.view[0, 0, : len(others), 77] = others
    a.view[0, 0, len(others) : -1] *= np.array(scales)[:, None]
    filled(b, 1)
    c = Stack.dense(a.view.shape[2], 70, "fp32")
    p = problem(a, b, c)
    for choice in every_way(p):
        values, rows, cols = multiplied(p, choice, a, b, c)
        np.testing.assert_array_equal(rows != 0, model(a, b).rows)
        assert (rows != 0).tolist() == [bool(x) for x in (0, 1, 0, 1, 1, 1, 0, 0, 1, 0, 1, 0)]
        assert not cols.any()
        assert np.isnan(values[0, 0, rows != 0]).all(), "flagged, and written"
        safe = (rows == 0) & (np.arange(rows.size) != 9)  # 2^127 times a sum may overflow
        np.testing.assert_array_equal(
            bits(values[0, 0, safe]), bits(model(a, b).c[safe]), str(choice)
        )


@pytest.mark.parametrize("k", [72, 20000])
def test_alpha_and_beta(k: int) -> None:
    a, b = operands(20, 136, k, "fp32", "NN", 4)
    filled(a, 1, 0, 1), filled(b, 2, 0, 1)
    for beta in (0.0, 0.5):
        c = Stack.dense(20, 136, "fp32")
        if beta:
            filled(c, 3, -64, 64)
        p = problem(a, b, c, updates=True)
        expected = 2 * exact(a, b) + (beta * c.view.astype(np.float64) if beta else 0)
        for choice in every_way(p):
            np.testing.assert_array_equal(result(p, choice, a, b, c, 2, beta), expected)


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
        p = problem(a, b, c)
        for choice in every_way(p):
            np.testing.assert_array_equal(result(p, choice, a, b, c), exact(a, b), str(choice))


@pytest.mark.parametrize("shared", ["none", "a outer", "a all", "b inner", "both"])
@pytest.mark.parametrize("k", [36, LONGEST_CHAIN + 1])
def test_batches_and_what_they_share(shared: str, k: int) -> None:
    outer, inner, m, n = 3, 2, 17, 70

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
    p = problem(a, b, c)
    for choice in every_way(p):
        np.testing.assert_array_equal(result(p, choice, a, b, c), exact(a, b), str(choice))


def test_E9_the_same_bits_every_time() -> None:
    for (m, n, k), layout in itertools.product(((16, 9000, 1024), (64, 700, 3000)), ("NN", "NT")):
        a, b = operands(m, n, k, "fp32", layout, 4)
        normal(a, 1), normal(b, 2)
        c = Stack.dense(m, n, "fp32")
        p = problem(a, b, c)
        first = bits(multiplied(p, best(p), a, b, c)[0])
        for _ in range(5):
            np.testing.assert_array_equal(bits(multiplied(p, best(p), a, b, c)[0]), first, layout)


@pytest.mark.parametrize("k", [100, 1000, 20000])
def test_bits_are_those_of_a_large_product_flagged_or_not(k: int) -> None:
    m, n = 200, 150
    a, b = operands(m, n, k, "fp32", "NT", 4)
    normal(a, 1), normal(b, 2)
    a.view[0, 0, [3, 77, 190], 11] = np.nan, np.inf, 1e-30
    b.view[0, 0, k - 1, [0, 70, 149]] = -np.inf, 1e-30, np.nan
    c = Stack.dense(m, n, "fp32")
    p = problem(a, b, c)
    tiles = next(choices(p))
    assert any(step.kernel.startswith("split_pieces") for step in tiles.steps)
    whole = carry_out(FAMILY, tiles.steps, tiles.workspace_bytes, (a, b, c))[0]
    for first, last in ((0, 16), (70, 134), (190, 191)):
        part, part_c = Stack.dense(last - first, k, "fp32"), Stack.dense(last - first, n, "fp32")
        part.view[...] = a.view[:, :, first:last]
        p = problem(part, b, part_c)
        for choice in every_way(p):
            nbytes = choice.workspace_bytes
            found = carry_out(FAMILY, choice.steps, nbytes, (part, b, part_c))[0]
            np.testing.assert_array_equal(bits(found), bits(whole[:, :, first:last]), str(choice))
