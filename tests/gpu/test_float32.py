"""float32's kernels on Hopper at their own edges: what they read, write, leave alone and list.

That their bits are those of the models on all kinds of data is in ``test_float32_promise``. Here
launches are planned and made one by one, on a workspace of NaN, and operands and C lie in larger
arrays of NaN: what is read outside shows in C, what is written outside in its margins.
"""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.conftest import missing
from tests.gpu.test_hopper import AWKWARD, LAYOUTS, Stack, normal
from tilewise import kernels
from tilewise.errors import DeviceError
from tilewise.kernels.hopper_float32_plan import Choice, Problem, choices, choose
from tilewise.kernels.hopper_plan import LONGEST_CHAIN
from tilewise.runtime import device, memory, streams
from tilewise.runtime.launch import Launch

pytestmark = pytest.mark.gpu

Array = NDArray[Any]

#: Around the sides of tiles, of what is split at a time and of pieces of K.
EDGES = (
    *((1, 1, 32), (1, 200, 64), (200, 1, 65), (127, 129, 63), (129, 127, 129), (128, 128, 128)),
    *((33, 260, 257), (300, 65, 2049), (5, 7, 4097), (257, 516, 130)),
)


#: Flags its row or column, and changes no sum of integers.
TINY = 2.0**-126


@pytest.fixture(autouse=True)
def on_hopper(request: pytest.FixtureRequest) -> None:
    if device.facts(0).capability != (9, 0):
        missing(request.config, "compute capability 9.0 is needed")
    try:
        kernels.manifest("hopper_float32")
    except DeviceError as error:
        missing(request.config, str(error))


def problem(a: Stack, b: Stack, c: Stack, **more: Any) -> Problem:
    outer, inner, m, n = c.view.shape
    p = Problem(m=m, n=n, k=a.view.shape[3], a=a.strides, b=b.strides, c=c.strides)
    return replace(p, outer=outer, inner=inner, **more)


def carry_out(
    choice: Choice, stacks: tuple[Stack, Stack, Stack], alpha: float = 1, beta: float = 0
) -> Array:
    """Launch a choice on copies of a, b and c; return what its c holds then, all of it."""
    stream = streams.DEFAULT
    with ExitStack() as held:
        pointers = []
        for stack in stacks:
            place = held.enter_context(memory.allocate(stack.flat.nbytes, 0, stream))
            memory.write(place, stack.flat.view(np.uint8), stream)
            pointers.append(place.pointer + stack.first * stack.flat.itemsize)
        room = held.enter_context(memory.allocate(choice.workspace_bytes, 0, stream))
        memory.fill(room, 0xFF, stream)
        pointers.append(room.pointer)
        for step in choice.steps:
            built = kernels.find("hopper_float32", step.kernel, (9, 0))
            launch = Launch(built, 0, step.grid, step.arguments)
            given = tuple(pointers[i] for i in step.operands)
            launch(stream, given, (alpha, beta)[: step.numbers])
        flat = np.empty_like(stacks[2].flat)
        memory.read(place, flat.view(np.uint8), stream)
    return flat


def result(a: Stack, b: Stack, c: Stack, limit: int | None = None, **more: Any) -> Array:
    """Return C, the same bits by every way or within a limit, after a look at its margins."""
    numbers = {name: more.pop(name) for name in ("alpha", "beta") if name in more}
    p = problem(a, b, c, **more)
    every = choices(p) if limit is None else [choose(p, workspace_bytes=limit)]
    found = [cut_out(carry_out(choice, (a, b, c), **numbers), c) for choice in every]
    for other in found[1:]:
        same_bits(other, found[0])
    return found[0]


def cut_out(flat: Array, like: Stack) -> Array:
    view = view_of(flat, like)
    values = view.copy()
    view[...] = like.view
    np.testing.assert_array_equal(flat.view(np.uint8), like.flat.view(np.uint8), "margins of C")
    return values


def view_of(flat: Array, like: Stack) -> Array:
    return np.lib.stride_tricks.as_strided(flat[like.first :], like.view.shape, like.view.strides)


def small(stack: Stack, seed: int) -> Stack:
    """Integers whose products are exact whichever way they are computed."""
    stack.view[...] = np.random.default_rng(seed).integers(-8, 9, stack.view.shape)
    return stack


def exact(a: Stack, b: Stack) -> Array:
    wide = np.matmul(a.view.astype(np.float64), b.view.astype(np.float64))
    return wide.astype(np.float32)


def operands(m: int, n: int, k: int, layout: str, pitch: int = 8) -> tuple[Stack, Stack]:
    a = Stack.dense(m, k, "fp32", layout[0], pitch)
    return a, Stack.dense(k, n, "fp32", layout[1], pitch)


def close_to(found: Array, expected: Array, why: str = "") -> None:
    """Compare integers with what `TINY` may have been added to."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=2.0**-100, err_msg=why)


def same_bits(x: Array, y: Array) -> None:
    """Compare bits; a NaN is any other."""
    x, y = (np.ascontiguousarray(z).view(np.float32) for z in (x, y))
    is_nan = np.isnan(x) & np.isnan(y)
    bits = [np.where(is_nan, 0, z).view(np.uint32) for z in (x, y)]
    np.testing.assert_array_equal(*bits)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_are_exact_at_every_edge(layout: str) -> None:
    for (m, n, k), pitch in itertools.product(EDGES, (8, 1)):
        a, b = operands(m, n, k, layout, pitch)
        small(a, 1), small(b, 2)
        c = Stack.dense(m, n, "fp32", pitch=pitch)
        np.testing.assert_array_equal(result(a, b, c), exact(a, b), f"{m}x{n}x{k}")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_repairs_are_exact_at_every_edge(layout: str) -> None:
    rng = np.random.default_rng(3)
    for m, n, k in EDGES:
        for rows, columns in ((1, 0), (0, 1), (16, 17), (17, 16), (m, 3), (m, n)):
            a, b = operands(m, n, k, layout, 1)
            small(a, 1), small(b, 2)
            a.view[0, 0, rng.permutation(m)[:rows], 0] = TINY
            b.view[0, 0, 0, rng.permutation(n)[:columns]] = TINY
            c = Stack.dense(m, n, "fp32", pitch=1)
            close_to(result(a, b, c), exact(a, b), f"{m}x{n}x{k} {rows} {columns}")


@pytest.mark.parametrize("why", AWKWARD)
@pytest.mark.parametrize("first", [0, 1])
def test_operands_of_any_strides(why: str, first: int) -> None:
    n = 70
    for swapped in (False, True):
        a = small(Stack.of((1, 1, n, n), AWKWARD[why], "fp32", first), 1)
        b = small(Stack.dense(n, n, "fp32"), 2)
        if swapped:
            a, b = b, a
        c = Stack.dense(n, n, "fp32")
        np.testing.assert_array_equal(result(a, b, c), exact(a, b))


@pytest.mark.parametrize("why", [why for why in AWKWARD if "one" not in why and "over" not in why])
@pytest.mark.parametrize("first", [0, 1])
def test_results_of_any_strides(why: str, first: int) -> None:
    n = 70
    a, b = operands(n, n, n, "NN")
    small(a, 1), small(b, 2)
    c = Stack.of((1, 1, n, n), AWKWARD[why], "fp32", first)
    np.testing.assert_array_equal(result(a, b, c), exact(a, b))


@pytest.mark.parametrize("shared", ["none", "a outer", "a all", "b inner", "b all"])
def test_batches_and_their_parts_have_the_bits_of_single_products(shared: str) -> None:
    outer, inner, m, n, k = 3, 5, 70, 132, 100

    def stack(name: str, rows: int, columns: int) -> Stack:
        step = [inner * rows * columns, rows * columns, columns, 1]
        if shared in (f"{name} outer", f"{name} all"):
            step[0] = 0
        if shared in (f"{name} inner", f"{name} all"):
            step[1] = 0
        return Stack.of((outer, inner, rows, columns), step, "fp32")

    a, b, c = normal(stack("a", m, k), 1), normal(stack("b", k, n), 2), stack("c", m, n)
    a.view[1, 2, 3, 4], b.view[2, 4, 5, 6] = 1e-9, 1e-9
    whole = result(a, b, c)
    takes = max(choice.workspace_bytes for choice in choices(problem(a, b, c)))
    for share in (2, 5):
        same_bits(result(a, b, c, limit=takes // share), whole)
    for i, j in ((0, 0), (1, 2), (2, 4)):
        one_a, one_b = operands(m, n, k, "NN")
        one_a.view[0, 0], one_b.view[0, 0] = a.view[i, j], b.view[i, j]
        same_bits(result(one_a, one_b, Stack.dense(m, n, "fp32"))[0, 0], whole[i, j])


@pytest.mark.parametrize("precision", [None, "tf32"])
def test_parts_of_rows_and_columns_have_the_bits_of_the_whole(precision: str | None) -> None:
    a, b = operands(300, 520, 200, "NT")
    normal(a, 1), normal(b, 2)
    a.view[0, 0, 130, 9], b.view[0, 0, 7, 300] = 1e-30, np.nan
    c = Stack.dense(300, 520, "fp32")
    whole = result(a, b, c, precision=precision)
    every = choices(problem(a, b, c, precision=precision))
    limit = max(choice.workspace_bytes for choice in every) // 3
    same_bits(result(a, b, c, limit=limit, precision=precision), whole)


@pytest.mark.parametrize("k", [100, LONGEST_CHAIN + 100])
def test_alpha_and_beta_reach_every_element_once(k: int) -> None:
    for out in (Stack.dense(150, 140, "fp32"), Stack.dense(150, 140, "fp32", "T", pitch=1)):
        a, b = operands(150, 140, k, "NN")
        small(a, 1), small(b, 2)
        a.view[0, 0, 33, -1] = b.view[0, 0, 3, 50] = TINY
        old = small(out, 3).view.copy()
        found = result(a, b, out, updates=True, alpha=-2.0, beta=0.5)
        expected = -2 * np.matmul(a.view.astype(float), b.view.astype(float)) + 0.5 * old
        close_to(found, expected.astype(np.float32))


def test_tiles_that_are_flagged_whole_are_left_to_repairs() -> None:
    a, b = operands(300, 260, 96, "NN")
    small(a, 1), small(b, 2)
    a.view[..., :256, 0] = np.nan
    c = Stack.dense(300, 260, "fp32")
    found = result(a, b, c)
    assert np.isnan(found[..., :256, :]).all()
    np.testing.assert_array_equal(found[..., 256:, :], exact(a, b)[..., 256:, :])
    b.view[..., 5, :128] = np.inf
    found = result(a, b, c)
    assert not np.isfinite(found[..., :128]).any()
    np.testing.assert_array_equal(found[..., 256:, 128:], exact(a, b)[..., 256:, 128:])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_complex_products_have_the_bits_of_the_real_ones_they_are(layout: str) -> None:
    rng = np.random.default_rng(4)
    m, n, k = 90, 66, 77
    x = rng.standard_normal((m, k, 2)).astype(np.float32)
    y = rng.standard_normal((k, n, 2)).astype(np.float32)
    x[3, 4, 0], y[5, 6, 1] = 1e-9, np.nan
    a, b = operands(m, 2 * n, 2 * k, "NN")
    a.view[0, 0] = x.reshape(m, 2 * k)
    b.view[0, 0, 0::2, 0::2], b.view[0, 0, 1::2, 0::2] = y[..., 0], -y[..., 1]
    b.view[0, 0, 0::2, 1::2], b.view[0, 0, 1::2, 1::2] = y[..., 1], y[..., 0]
    expected = result(a, b, Stack.dense(m, 2 * n, "fp32"))[0, 0]
    a, b = Stack.dense(m, k, "c64", layout[0], 1), Stack.dense(k, n, "c64", layout[1], 1)
    for stack, parts in ((a, x), (b, y)):
        stack.view.real[0, 0], stack.view.imag[0, 0] = parts[..., 0], parts[..., 1]
    found = result(a, b, Stack.dense(m, n, "c64", pitch=1), dtype="c64")[0, 0]
    assert np.isnan(expected).any()
    same_bits(found, expected)
