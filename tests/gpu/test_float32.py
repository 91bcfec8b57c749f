"""float32's kernels on Hopper at their own edges: what they read, write, leave alone and list.

That their bits are those of the models on all kinds of data is in ``test_float32_promise``. Here
launches are planned and made one by one, on operands and C that lie in NaN (``stacks``).
"""

from __future__ import annotations

import itertools
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
from tilewise.kernels.hopper_float32_plan import Choice, Problem, choices, choose
from tilewise.kernels.steps import LONGEST_CHAIN

pytestmark = pytest.mark.gpu

Array = NDArray[Any]

#: Around the sides of tiles, of what is split at a time and of pieces of K.
EDGES = (
    *((1, 1, 32), (1, 200, 64), (200, 1, 65), (127, 129, 63), (129, 127, 129), (128, 128, 128)),
    *((33, 260, 257), (300, 65, 2049), (5, 7, 4097), (257, 516, 130)),
    *((7, 9, 1025), (3, 5, 8193)),
)


#: Flags its row or column, and changes no sum of integers.
TINY = 2.0**-126


@pytest.fixture(autouse=True)
def on_hopper(request: pytest.FixtureRequest) -> None:
    need_hopper(request.config, "hopper_float32")


def problem(a: Stack, b: Stack, c: Stack, **more: Any) -> Problem:
    return Problem(**sizes_and_strides(a, b, c), **more)


def carried_out(choice: Choice, a: Stack, b: Stack, c: Stack, **numbers: float) -> Array:
    steps, nbytes = choice.steps, choice.workspace_bytes
    return carry_out("hopper_float32", steps, nbytes, (a, b, c), **numbers)[0]


def result(a: Stack, b: Stack, c: Stack, limit: int | None = None, **more: Any) -> Array:
    """Return C, the same bits by every way or within a limit."""
    numbers = {name: more.pop(name) for name in ("alpha", "beta") if name in more}
    p = problem(a, b, c, **more)
    every = choices(p) if limit is None else [choose(p, workspace_bytes=limit)]
    found = [carried_out(choice, a, b, c, **numbers) for choice in every]
    for other in found[1:]:
        same_bits(other, found[0])
    return found[0]


def small(stack: Stack, seed: int) -> Stack:
    """Integers whose products are exact whichever way they are computed."""
    return filled(stack, seed, -8, 8)


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
        a, b = operands(m, n, k, "fp32", layout, pitch)
        small(a, 1), small(b, 2)
        c = Stack.dense(m, n, "fp32", pitch=pitch)
        np.testing.assert_array_equal(result(a, b, c), exact(a, b), f"{m}x{n}x{k}")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_repairs_are_exact_at_every_edge(layout: str) -> None:
    rng = np.random.default_rng(3)
    for m, n, k in EDGES:
        for rows, columns in ((1, 0), (0, 1), (16, 17), (17, 16), (m, 3), (m, n)):
            a, b = operands(m, n, k, "fp32", layout, 1)
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


@pytest.mark.parametrize("why", APART)
@pytest.mark.parametrize("first", [0, 1])
def test_results_of_any_strides(why: str, first: int) -> None:
    n = 70
    a, b = operands(n, n, n, "fp32", "NN")
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
        one_a, one_b = operands(m, n, k, "fp32", "NN")
        one_a.view[0, 0], one_b.view[0, 0] = a.view[i, j], b.view[i, j]
        same_bits(result(one_a, one_b, Stack.dense(m, n, "fp32"))[0, 0], whole[i, j])


@pytest.mark.parametrize("precision", [None, "tf32"])
def test_parts_of_rows_and_columns_have_the_bits_of_the_whole(precision: str | None) -> None:
    a, b = operands(300, 520, 200, "fp32", "NT")
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
        a, b = operands(150, 140, k, "fp32", "NN")
        small(a, 1), small(b, 2)
        a.view[0, 0, 33, -1] = b.view[0, 0, 3, 50] = TINY
        old = small(out, 3).view.copy()
        found = result(a, b, out, updates=True, alpha=-2.0, beta=0.5)
        expected = -2 * np.matmul(a.view.astype(float), b.view.astype(float)) + 0.5 * old
        close_to(found, expected.astype(np.float32))


#: What an FMA makes of any NaN.
NAN_BITS = 0x7FFFFFFF


@pytest.mark.parametrize("dtype", ["fp32", "c64"])
@pytest.mark.parametrize("rows", [[3], [0, 3, 77, 149], list(range(150))])
def test_a_nan_makes_of_its_row_or_column_what_an_fma_makes(dtype: str, rows: list[int]) -> None:
    m, n, k = 150, 140, 300
    columns = [5, 60, 61, 139]
    a, b = operands(m, n, k, dtype, "NT")
    small(a, 1), small(b, 2)
    a.view[0, 0, 20, 9] = TINY
    a.view[0, 0, rows, 200] = np.nan
    a.view[0, 0, rows[0], [3, 7]] = np.inf, TINY
    # Columns are flagged by one piece after the other, for one reason and for the other.
    b.view[0, 0, 70, columns], b.view[0, 0, 5, columns[:2]] = np.nan, TINY
    b.view[0, 0, 290, columns[1:3]], b.view[0, 0, 290, 11] = np.inf, TINY
    if dtype == "c64":  # the other part is a number
        a.view.real[0, 0, rows[::2], 200], b.view.real[0, 0, 70, columns[::2]] = 1, 1
        a.view.imag[0, 0, rows[::2], 200], b.view.imag[0, 0, 70, columns[::2]] = np.nan, np.nan
    is_nan = np.zeros((1, 1, m, n), bool)
    is_nan[:, :, rows], is_nan[..., columns] = True, True
    wide = np.result_type(a.flat.dtype, np.float64)
    with np.errstate(invalid="ignore"):
        expected = np.matmul(a.view.astype(wide), b.view.astype(wide))
    c = Stack.dense(m, n, dtype)
    found = result(a, b, c, dtype=dtype)
    parts = np.ascontiguousarray(found[is_nan]).view(np.uint32)
    np.testing.assert_array_equal(parts, NAN_BITS)
    close_to(found[~is_nan], expected[~is_nan])
    if dtype == "fp32":
        old = small(c, 3).view.copy()
        for alpha in (-2.0, 0.0):
            found = result(a, b, c, updates=True, alpha=alpha, beta=0.5)
            wanted = 0.5 * old if alpha == 0 else alpha * expected + 0.5 * old
            close_to(found, np.where(is_nan & (alpha != 0), np.nan, wanted))


def test_tiles_that_are_flagged_whole_are_left_to_repairs() -> None:
    a, b = operands(300, 260, 96, "fp32", "NN")
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
    a, b = operands(m, 2 * n, 2 * k, "fp32", "NN")
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
