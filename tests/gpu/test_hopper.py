"""Hopper's kernels on a Hopper GPU: exact at every edge, in every layout, and always the same bits.

Operands and C lie in larger arrays of NaN (``stacks``).
"""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.gpu.stacks import (
    APART,
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
from tilewise import kernels
from tilewise.kernels.hopper_plan import Choice, Problem, choices, choose, launches
from tilewise.kernels.steps import LONGEST_CHAIN
from tilewise.numerics.bounds import bound
from tilewise.runtime import memory, streams
from tilewise.runtime.launch import Launch

pytestmark = pytest.mark.gpu

Array = NDArray[Any]

#: Around the sides of tiles and of instructions, and below them.
EDGES = (
    *((1, 1, 1), (1, 130, 40), (130, 1, 40), (15, 63, 17), (16, 64, 64), (17, 65, 65)),
    *((63, 127, 127), (65, 129, 8), (129, 257, 72), (193, 129, 136), (200, 392, 200)),
    *((385, 520, 72), (17, 8, 65), (63, 136, 127), (31, 264, 33)),
)


@pytest.fixture(autouse=True)
def on_hopper(request: pytest.FixtureRequest) -> None:
    need_hopper(request.config, "hopper")


def problem(a: Stack, b: Stack, c: Stack, *, updates: bool = False) -> Problem:
    return Problem(**sizes_and_strides(a, b, c), dtype=a.dtype, out=c.dtype, updates=updates)


def result(p: Problem, choice: Choice, a: Stack, b: Stack, c: Stack, **numbers: float) -> Array:
    steps = launches(p, choice)
    return carry_out("hopper", steps, choice.workspace_bytes, (a, b, c), **numbers)[0]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_kernel_is_exact_at_every_edge(layout: str, dtype: str) -> None:
    for (m, n, k), out, pitch in itertools.product(EDGES, (dtype, "fp32"), (8, 1)):
        a, b = operands(m, n, k, dtype, layout, pitch)
        filled(a, 1), filled(b, 2)
        c = Stack.dense(m, n, out, pitch=pitch)
        expected = exact(a, b).astype(c.flat.dtype)
        p = problem(a, b, c)
        for choice in choices(p):
            np.testing.assert_array_equal(
                result(p, choice, a, b, c), expected, f"{m}x{n}x{k} {choice}"
            )


@pytest.mark.parametrize("layout", ["NN", "TN"])
def test_A9_every_k_from_1_to_70_of_ones(layout: str) -> None:
    for k in range(1, 71):
        a, b = operands(128, 128, k, "bf16", layout)
        a.view[...] = b.view[...] = 1
        c = Stack.dense(128, 128, "bf16")
        p = problem(a, b, c)
        assert (result(p, choose(p), a, b, c) == k).all(), k


@pytest.mark.parametrize("m", [1744, 1752, 1760])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_A6_rows_not_a_multiple_of_16(m: int, layout: str) -> None:
    a, b = operands(m, 4720, 584, "fp16", layout, pitch=1)
    filled(a, 1), filled(b, 2)
    c = Stack.dense(m, 4720, "fp16", pitch=1)
    p = problem(a, b, c)
    expected = exact(a, b).astype(np.float16)
    np.testing.assert_array_equal(result(p, choose(p), a, b, c), expected)


@pytest.mark.parametrize("layout", ["NN", "TT"])
@pytest.mark.parametrize("sizes", [(3, 70, LONGEST_CHAIN + 1), (200, 136, 20000)])
def test_a_long_k_in_pieces_is_exact(sizes: tuple[int, int, int], layout: str) -> None:
    a, b = operands(*sizes, "bf16", layout)
    filled(a, 1, -1, 1), filled(b, 2, -1, 1)
    c = Stack.dense(*sizes[:2], "fp32")
    p = problem(a, b, c)
    assert {choice.kernel.way for choice in choices(p)} == {"any", "promoted"}
    for choice in choices(p):
        np.testing.assert_array_equal(result(p, choice, a, b, c), exact(a, b), str(choice))


@pytest.mark.parametrize("k", [40, 1000, 5000, LONGEST_CHAIN, LONGEST_CHAIN + 1, 30001])
@pytest.mark.parametrize("layout", ["NN", "NT"])
def test_bits_depend_on_row_column_and_k_alone(k: int, layout: str) -> None:
    m, n = 144, 264
    a, b = operands(m, n, k, "bf16", layout)
    normal(a, 1), normal(b, 2)
    c = Stack.dense(m, n, "fp32")
    p = problem(a, b, c)
    every = [result(p, choice, a, b, c) for choice in choices(p)]
    for found in every[1:]:
        np.testing.assert_array_equal(found.view(np.uint32), every[0].view(np.uint32))
    whole = every[0]
    assert np.isfinite(whole).all()
    rounded = Stack.dense(m, n, "bf16")
    p = problem(a, b, rounded)
    for choice in choices(p):  # by TMA, too
        bits = result(p, choice, a, b, rounded).view(np.uint16)
        np.testing.assert_array_equal(bits, whole.astype(rounded.flat.dtype).view(np.uint16))
    for rows, columns in (((7, 8), (0, n)), ((0, m), (31, 32)), ((5, 101), (17, 90))):
        part_a = Stack.dense(rows[1] - rows[0], k, "bf16", layout[0])
        part_b = Stack.dense(k, columns[1] - columns[0], "bf16", layout[1])
        part_a.view[...] = a.view[:, :, slice(*rows)]
        part_b.view[...] = b.view[..., slice(*columns)]
        part_c = Stack.dense(rows[1] - rows[0], columns[1] - columns[0], "fp32")
        p = problem(part_a, part_b, part_c)
        for choice in choices(p):
            np.testing.assert_array_equal(
                result(p, choice, part_a, part_b, part_c).view(np.uint32),
                whole[:, :, slice(*rows), slice(*columns)].copy().view(np.uint32),
                str(choice),
            )


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("k", [64, 4096, 20000])
def test_errors_are_within_the_bound(dtype: str, k: int) -> None:
    for out, data in itertools.product(
        (dtype, "fp32"), (normal, lambda x, seed: filled(x, seed, 0, 1))
    ):
        a, b = operands(200, 136, k, dtype, "NN")
        data(a, 1), data(b, 2)
        c = Stack.dense(200, 136, out)
        p = problem(a, b, c)
        promise = bound(k, a.flat.dtype, b.flat.dtype, c.flat.dtype, device="cuda:0")
        magnitude = np.abs(a.view).astype(np.float64) @ np.abs(b.view).astype(np.float64)
        true = exact(a, b)
        allowed = promise.factor * magnitude + promise.rounding * np.abs(true) + promise.underflow
        for choice in choices(p):
            error = np.abs(result(p, choice, a, b, c).astype(np.float64) - true)
            assert (error <= allowed).all(), choice


@pytest.mark.parametrize("out", ["bf16", "fp32"])
@pytest.mark.parametrize("k", [72, 20000])
def test_alpha_and_beta(out: str, k: int) -> None:
    a, b = operands(70, 136, k, "bf16", "NN")
    filled(a, 1, 0, 1), filled(b, 2, 0, 1)
    for beta in (0.0, 0.5):
        c = Stack.dense(70, 136, out)
        if beta:
            filled(c, 3, -64, 64)
        p = problem(a, b, c, updates=True)
        expected = 2 * exact(a, b) + (beta * c.view.astype(np.float64) if beta else 0)
        for choice in choices(p):
            found = result(p, choice, a, b, c, alpha=2, beta=beta)
            np.testing.assert_array_equal(found, expected.astype(c.flat.dtype), str(choice))


def test_alpha_reaches_what_is_written_by_tma() -> None:
    a, b = operands(64, 64, 64, "bf16", "NN")
    filled(a, 1), filled(b, 2)
    c = Stack.dense(64, 64, "bf16")
    p = problem(a, b, c)
    assert choose(p).kernel.way == "mapped"
    expected = (-0.5 * exact(a, b)).astype(c.flat.dtype)
    np.testing.assert_array_equal(result(p, choose(p), a, b, c, alpha=-0.5), expected)


@pytest.mark.parametrize("why", AWKWARD)
@pytest.mark.parametrize("first", [0, 1])
def test_operands_of_any_strides(why: str, first: int) -> None:
    n = 70
    for swapped in (False, True):
        a = filled(Stack.of((1, 1, n, n), AWKWARD[why], "bf16", first), 1)
        b = filled(Stack.dense(n, n, "bf16"), 2)
        if swapped:
            a, b = b, a
        c = Stack.dense(n, n, "bf16")
        p = problem(a, b, c)
        expected = exact(a, b).astype(c.flat.dtype)
        for choice in choices(p):
            np.testing.assert_array_equal(result(p, choice, a, b, c), expected, str(choice))


@pytest.mark.parametrize("why", APART)
@pytest.mark.parametrize("first", [0, 1])
def test_results_of_any_strides(why: str, first: int) -> None:
    n = 70
    a, b = operands(n, n, n, "bf16", "NN")
    filled(a, 1), filled(b, 2)
    c = Stack.of((1, 1, n, n), AWKWARD[why], "bf16", first)
    p = problem(a, b, c)
    for choice in choices(p):
        expected = exact(a, b).astype(c.flat.dtype)
        np.testing.assert_array_equal(result(p, choice, a, b, c), expected, str(choice))


@pytest.mark.parametrize("shared", ["none", "a outer", "a all", "b inner", "both"])
@pytest.mark.parametrize("pitch", [8, 1])
def test_batches_and_what_they_share(shared: str, pitch: int) -> None:
    outer, inner, m, n, k = 3, 5, 33, 41, 27

    def steps(rows: int, columns: int, name: str) -> tuple[int, ...]:
        row = -(-columns // pitch) * pitch
        step = [inner * rows * row, rows * row, row, 1]
        if shared in (f"{name} outer", f"{name} all", "both"):
            step[0] = 0
        if shared in (f"{name} inner", f"{name} all", "both"):
            step[1] = 0
        return tuple(step)

    a = filled(Stack.of((outer, inner, m, k), steps(m, k, "a"), "bf16"), 1)
    b = filled(Stack.of((outer, inner, k, n), steps(k, n, "b"), "bf16"), 2)
    c = Stack.of(
        (outer, inner, m, n),
        steps(m, n, "c") if shared != "both" else (inner * m * n, m * n, n, 1),
        "bf16",
    )
    p = problem(a, b, c)
    expected = exact(a, b).astype(c.flat.dtype)
    for choice in choices(p):
        np.testing.assert_array_equal(result(p, choice, a, b, c), expected, str(choice))


def test_more_than_65535_matrices() -> None:
    count = 70_001
    a = filled(Stack.of((1, count, 8, 8), (0, 64, 8, 1), "fp16"), 1)
    b = filled(Stack.of((1, count, 8, 8), (0, 64, 8, 1), "fp16"), 2)
    c = Stack.of((1, count, 8, 8), (0, 64, 8, 1), "fp16")
    p = problem(a, b, c)
    np.testing.assert_array_equal(result(p, choose(p), a, b, c), exact(a, b))


def test_E9_the_same_bits_every_time() -> None:
    for m, n, k in ((64, 64, 16384), (512, 512, 1000), (128, 128, 20000), (777, 333, 555)):
        a, b = operands(m, n, k, "bf16", "NN", pitch=1)
        normal(a, 1), normal(b, 2)
        c = Stack.dense(m, n, "bf16", pitch=1)
        p = problem(a, b, c)
        first = result(p, choose(p), a, b, c).view(np.uint16)
        for _ in range(20):
            np.testing.assert_array_equal(result(p, choose(p), a, b, c).view(np.uint16), first)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_E9_pairs_and_strips_of_many_waves_have_the_bits_of_single_blocks(layout: str) -> None:
    a, b = operands(3000, 2200, 328, "fp16", layout)
    normal(a, 1), normal(b, 2)
    c = Stack.dense(3000, 2200, "fp16")
    p = problem(a, b, c)
    every = list(choices(p))
    assert {choice.kernel.way for choice in every} == {"mapped", "paired"}
    assert any(choice.strips for choice in every)
    first = result(p, every[0], a, b, c)
    np.testing.assert_allclose(first, exact(a, b), rtol=2**-10, atol=0.05)
    for choice in every:
        for _ in range(choice.kernel.blocks):
            found = result(p, choice, a, b, c)
            np.testing.assert_array_equal(found.view(np.uint16), first.view(np.uint16), str(choice))


def test_a_product_that_starts_early_waits_for_the_one_before() -> None:
    n, turns = 520, 20
    rng = np.random.default_rng(0)
    order = rng.permutation(n)
    permutation = np.eye(n)[order]
    one, two = Stack.dense(n, n, "bf16"), Stack.dense(n, n, "bf16")
    b = Stack.dense(n, n, "bf16")
    b.view[...] = permutation
    filled(one, 1, -100, 100)
    p = problem(one, b, two)
    for choice in choices(p):
        prepared = []
        for step in launches(p, choice):
            built = kernels.find("hopper", step.kernel, (9, 0))
            prepared.append((step, Launch(built, 0, step.grid, step.arguments)))
        stream = streams.DEFAULT
        with ExitStack() as held:
            places = [
                held.enter_context(memory.allocate(x.flat.nbytes, 0, stream)) for x in (one, b, two)
            ]
            for place, x in zip(places, (one, b, two), strict=True):
                memory.write(place, x.flat.view(np.uint8), stream)
            at = [x.pointer + y.first * 2 for x, y in zip(places, (one, b, two), strict=True)]
            # Shared by all turns, as a stream's workspace is.
            room = held.enter_context(memory.allocate(max(choice.workspace_bytes, 1), 0, stream))
            for turn in range(turns):
                source, target = (at[0], at[2]) if turn % 2 == 0 else (at[2], at[0])
                for step, launch in prepared:
                    given = tuple((source, at[1], target, room.pointer)[i] for i in step.operands)
                    launch(stream, given, (1.0, 0.0)[: step.numbers])
            flat = np.empty_like(one.flat)
            memory.read(places[0], flat.view(np.uint8), stream)
        found = one.values_in(flat)
        expected = one.view.astype(np.float64)
        for _ in range(turns):
            expected = expected @ permutation
        np.testing.assert_array_equal(found, expected, str(choice))
