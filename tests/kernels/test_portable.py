"""The portable kernels in Triton's interpreter: each product by every way there is to compute it.

Tiles are made small, so that small matrices have many. Operands lie in larger buffers of NaN (or
0xFF), C and the workspace are full of it: what is read outside shows in the result.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from tests.kernels import interpreter, mapped
from tests.kernels.products import (
    ALL,
    COMPLEX,
    FLOATS,
    INTEGERS,
    Array,
    full_range,
    named,
    placed,
    poison,
    problem_of,
    reference,
    sticky,
    ways_of,
    whole,
    wrapped,
)
from tilewise.kernels import portable_plan, portable_table
from tilewise.kernels.portable_plan import choose
from tilewise.kernels.portable_steps import Steps
from tilewise.kernels.steps import Choice
from tilewise.numerics.dtypes import product_dtype

Variants = dict[str, Any]

#: Kernels that are not interpreted.
MAPPED = {kernel.name: kernel for kernel in portable_table.KERNELS if kernel.is_mapped}


@pytest.fixture(scope="module")
def variants() -> Iterator[Variants]:
    """Return all kernels by name, interpreted and with small tiles."""
    modules = interpreter.interpreted("tilewise.kernels.packing", "tilewise.kernels.portable")
    portable = modules[1]
    small = [
        kernel
        if kernel.is_mapped
        else replace(kernel, tile=(32, 32, 128 if "fp8" in kernel.dtype else 16))
        for kernel in portable_table.KERNELS
        if not kernel.is_mapped or kernel.tile[0] == 64
    ]
    # With equal tiles, some of them are the same kernel.
    kernels = tuple({kernel.name: kernel for kernel in small}.values())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(portable, "KERNELS", kernels)
        patch.setattr(portable_plan, "KERNELS", kernels)
        for width in portable_table.FINISH_TILES:
            patch.setitem(portable_table.FINISH_TILES, width, (32, 32))
        for target in portable_table.PACK_TILES:
            patch.setitem(portable_table.PACK_TILES, target, 32)
        yield {variant.name: variant for variant in portable.variants()}


def run(
    variants: Variants,
    way: Steps | Choice,
    a: Array,
    b: Array,
    c: Array,
    factors: Sequence[complex] = (1, 0),
) -> None:
    """Carry out one way, in a workspace that holds nothing but NaN."""
    raw = np.full(way.workspace_bytes + 512, 0xFF, np.uint8)
    start = -raw.ctypes.data % 256
    addresses = [a.ctypes.data, b.ctypes.data, c.ctypes.data, raw.ctypes.data + start]
    numbers = list(factors)
    if c.dtype.kind not in "iub":
        numbers = [x.real for x in factors] + [x.imag for x in factors]
    for step in way.steps:
        given = [addresses[operand] for operand in step.operands]
        kernel = MAPPED.get(step.kernel)
        if kernel is not None:
            mapped.multiply(kernel, step.grid[0], step.arguments, given)
        elif step.kernel.startswith("pack_bytes"):
            mapped.pack(step.kernel, step.grid[0], step.arguments, given)
        else:
            interpreter.run(variants[step.kernel], step.grid[0], step.arguments, given, numbers)
    assert (raw[:start] == 0xFF).all()
    assert (raw[start + way.workspace_bytes :] == 0xFF).all(), "written beyond the workspace"


def check(
    variants: Variants,
    a: Array,
    b: Array,
    dtype: str | None = None,
    *,
    order: str = "C",
    margin: int = 3,
    capability: tuple[int, int] = (9, 0),
    only: int | None = None,
) -> list[Steps]:
    """Multiply by every way, or one, and compare with the exact product; return the ways."""
    result = named(dtype) if dtype else product_dtype(a.dtype, b.dtype)
    expected = reference(a, b, result)
    c, buffer = placed(expected, order, margin)
    untouched = buffer.copy()
    ways = ways_of(problem_of(a, b, c), capability)
    if only is not None:
        ways = [ways[only % len(ways)]]
    for way in ways:
        poison(c)
        run(variants, way, a, b, c)
        assert (c == expected).all(), (way.why, a.strides, b.strides, c.strides)
        c[...] = expected  # zeros have the signs they had
        assert (buffer == untouched).all(), f"{way.why}: written outside of C"
    return ways


def test_A5_sizes_around_tiles(variants: Variants) -> None:
    rng = np.random.default_rng(5)
    for number, (m, n, k) in enumerate(itertools.product((1, 7, 32, 33), repeat=3)):
        a, _ = placed(whole(rng, (m, k), "float32"))
        b, _ = placed(whole(rng, (k, n), "float32"))
        check(variants, a, b, only=number)


@pytest.mark.parametrize(("dtype", "k"), [("int16", 20), ("bool", 20), ("float8_e4m3fn", 40)])
def test_parts_within_a_budget_are_the_whole(variants: Variants, dtype: str, k: int) -> None:
    rng = np.random.default_rng(7)
    a, _ = placed(whole(rng, (2, 3, 130, k), dtype), "C")
    b, _ = placed(whole(rng, (2, 3, k, 7), dtype), "F")
    result = product_dtype(a.dtype, b.dtype)
    expected = reference(a, b, result)
    c, buffer = placed(expected, "C")
    untouched = buffer.copy()
    problem = problem_of(a, b, c)
    roomy = choose(problem, multiprocessors=4)
    choice = choose(problem, multiprocessors=4, workspace_bytes=roomy.workspace_bytes // 2)
    assert "parts; " in choice.why
    poison(c)
    run(variants, choice, a, b, c)
    assert (c == expected).all()
    c[...] = expected
    assert (buffer == untouched).all()


@pytest.mark.parametrize("dtype", ALL)
def test_A5_every_type(variants: Variants, dtype: str) -> None:
    rng = np.random.default_rng(6)
    cases = ((3, 31, 7, "CF", 3), (16, 32, 32, "CF", 16), (33, 16, 17, "FC", 16))
    for number, (m, n, k, orders, margin) in enumerate(cases):
        a, _ = placed(whole(rng, (m, k), dtype), orders[0], margin)
        b, _ = placed(whole(rng, (k, n), dtype), orders[1], margin)
        check(variants, a, b, order="CF"[m % 2], margin=margin, only=number)


@pytest.mark.parametrize("dtype", ["float32", "int8", "complex64"])
def test_A16_every_order(variants: Variants, dtype: str) -> None:
    rng = np.random.default_rng(16)
    for number, orders in enumerate(itertools.product("CF", repeat=3)):
        margin = 16 if number % 3 else 1
        a, _ = placed(whole(rng, (16, 32), dtype), orders[0], margin)
        b, _ = placed(whole(rng, (32, 48), dtype), orders[1], margin)
        check(variants, a, b, order=orders[2], margin=margin)


@pytest.mark.parametrize("dtype", ["float32", "int16", "complex64"])
def test_A13_A15_B13_strides(variants: Variants, dtype: str) -> None:
    rng = np.random.default_rng(13)
    base, _ = placed(whole(rng, (36, 36), dtype))
    views = (
        base[::2, 1:19],
        base[::-1, :18][:18],
        base[:18, ::-1][:, :18],
        base[::-2, ::-2],
        base[1:36:2, ::2].T,
        np.broadcast_to(base[3], (18, 36))[:, :18],
        np.broadcast_to(base[:18, 3:4], (18, 18)),
        np.broadcast_to(base[0, 0], (18, 18)),
    )
    for number, a in enumerate(views):
        check(variants, a, views[number - 3], only=number)
        c_base, buffer = placed(np.zeros((40, 40), a.dtype))
        c = c_base[38::-2, 3:39:2][:18]
        before = buffer.copy()
        expected = reference(a, a, a.dtype)
        ways = ways_of(problem_of(a, a, c))
        way = ways[number % len(ways)]
        poison(c)
        run(variants, way, a, a, c)
        assert (c == expected).all(), way.why
        c[...] = 0
        assert (buffer == before).all(), f"{way.why}: written outside of C"


def test_A9_every_k(variants: Variants) -> None:
    for k in range(1, 71):
        dtype = ("float32", "bfloat16", "float16")[k % 3]
        a, b = np.ones((16, k), named(dtype)), np.ones((k, 16), named(dtype))
        check(variants, a, b if k % 2 else np.asfortranarray(b), dtype, only=k % 4)


def test_A8_outer_products(variants: Variants) -> None:
    rng = np.random.default_rng(8)
    for dtype in ("float16", "bfloat16", "float32", "float64", "complex64", "int8"):
        for m, n in ((1, 40), (35, 17), (1, 1)):
            check(variants, whole(rng, (m, 1), dtype), whole(rng, (1, n), dtype))


@pytest.mark.parametrize("dtype", ["float32", "complex64", "int8"])
def test_batches_broadcast(variants: Variants, dtype: str) -> None:
    rng = np.random.default_rng(23)
    for a_batch, b_batch in (((2, 3), (2, 3)), ((2, 1), (1, 3)), ((1, 1), (2, 2)), ((1, 3), ())):
        a, _ = placed(whole(rng, (*a_batch, 5, 17), dtype))
        b, _ = placed(whole(rng, (*b_batch, 17, 9), dtype), "F")
        check(variants, a, b)


def test_A23_one_matrix_times_many_is_one_product(variants: Variants) -> None:
    rng = np.random.default_rng(23)
    many = whole(rng, (2, 5, 3, 4), "float32")
    for a, b in (
        (many, whole(rng, (4, 6), "float32")),
        (whole(rng, (7, 3), "float32"), many[..., :1]),
        (many[:, :, :1], whole(rng, (4, 6), "float32")),
    ):
        expected = np.matmul(a, b)
        c = np.empty_like(expected)
        for way in ways_of(problem_of(a, b, c)):
            assert (way.problem.outer, way.problem.inner) == (1, 1)
            poison(c)
            run(variants, way, a, b, c)
            assert (c == expected).all(), way.why


def test_A14_strides_of_axes_of_length_1_are_not_believed(variants: Variants) -> None:
    rng = np.random.default_rng(14)
    a, _ = placed(whole(rng, (1, 5, 4), "float32"))
    b, _ = placed(whole(rng, (4, 6), "float32"))
    wild = np.lib.stride_tricks.as_strided(a, strides=(123456, *a.strides[1:]))
    check(variants, wild, b)
    row = np.lib.stride_tricks.as_strided(a[:, :1], strides=(a.strides[0], 396, a.strides[2]))
    check(variants, row, b)
    column = np.lib.stride_tricks.as_strided(b[:, :1], strides=(b.strides[0], 99992))
    check(variants, a, column)


@pytest.mark.parametrize("dtype", ALL)
def test_k_of_0_gives_zeros(variants: Variants, dtype: str) -> None:
    a, b = np.empty((3, 0), named(dtype)), np.empty((0, 5), named(dtype))
    check(variants, a, b)


@pytest.mark.parametrize(
    ("a_dtype", "b_dtype", "result"),
    [
        ("int8", "int8", "int16"),
        ("int8", "int8", "int32"),
        ("int8", "int8", "int64"),
        ("uint8", "uint8", "uint16"),
        ("uint8", "uint8", "int32"),
        ("uint8", "int8", "int16"),
        ("int16", "int16", "int32"),
        ("uint16", "uint16", "uint64"),
        ("int32", "int32", "int64"),
        ("uint32", "int64", "int64"),
        ("int16", "uint8", "int16"),
        ("bool", "int8", "int8"),
        ("bool", "bool", "int32"),
    ],
)
def test_A19_wider_results(variants: Variants, a_dtype: str, b_dtype: str, result: str) -> None:
    rng = np.random.default_rng(19)
    a, b = full_range(rng, (17, 40), a_dtype), full_range(rng, (40, 19), b_dtype)
    check(variants, a, b, result)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_A17_B17_integers_wrap(variants: Variants, dtype: str) -> None:
    rng = np.random.default_rng(17)
    check(variants, full_range(rng, (17, 40), dtype), full_range(rng, (40, 19), dtype))
    extreme = np.iinfo(dtype).min if np.dtype(dtype).kind == "i" else np.iinfo(dtype).max
    check(variants, np.full((3, 50), extreme, dtype), np.full((50, 4), extreme, dtype), only=1)


def test_A20_complex_by_real_and_mixed_types(variants: Variants) -> None:
    rng = np.random.default_rng(20)
    pairs = [("complex64", "float32"), ("float32", "complex64"), ("complex64", "complex128")]
    pairs += [("complex64", "int16"), ("float16", "complex64"), ("int64", "complex128")]
    pairs += [("float32", "float64"), ("float16", "float32"), ("bfloat16", "float32")]
    pairs += [("int8", "float32"), ("int32", "float32"), ("uint64", "float64")]
    pairs += [("bfloat16", "float16"), ("float16", "int8"), ("bfloat16", "uint8")]
    pairs += [("float8_e4m3fn", "float8_e5m2"), ("float8_e5m2", "float16"), ("bool", "float64")]
    pairs += [("uint64", "int64"), ("float8_e4m3fn", "bfloat16"), ("int16", "float16")]
    for number, (a_dtype, b_dtype) in enumerate(pairs):
        a, _ = placed(whole(rng, (17, 20), a_dtype))
        b, _ = placed(whole(rng, (20, 9), b_dtype), "F")
        assert check(variants, a, b, only=number)


def test_float8_before_ada_is_multiplied_as_float16(variants: Variants) -> None:
    rng = np.random.default_rng(89)
    a, b = whole(rng, (17, 20), "float8_e4m3fn"), whole(rng, (20, 9), "float8_e4m3fn")
    for way in check(variants, a, b, capability=(8, 0)):
        assert all("fp8" not in step.kernel for step in way.steps)


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX])
def test_parts_of_k_add_up(variants: Variants, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portable_plan, "chains", lambda k: (-(-k // 64), 64))
    rng = np.random.default_rng(1)
    a, _ = placed(whole(rng, (18, 140), dtype))
    b, _ = placed(whole(rng, (140, 33), dtype))
    for way in check(variants, a, b):
        assert any(step.kernel.startswith("finish") for step in way.steps)


def test_parts_are_added_in_their_order(
    variants: Variants, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(portable_plan, "chains", lambda k: (-(-k // 64), 64))
    rng = np.random.default_rng(2)
    parts = rng.standard_normal((20, 5)).astype(np.float32)
    a = np.zeros((3, 20 * 64), np.float32)
    b = np.zeros((20 * 64, 5), np.float32)
    a[:, ::64] = 1  # each part of K has one term: its sum is exact
    b[::64] = parts
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    c = np.empty((3, 5), np.float32)
    for way in ways_of(problem_of(a, b, c)):
        run(variants, way, a, b, c)
        assert (c == total).all(), way.why


def test_integer_sums_beyond_int32_are_cut_before_they_overflow(
    variants: Variants, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(portable_plan, "_EXACT_TERMS", 128)
    for dtype, result in (("int8", "int64"), ("bool", "bool"), ("int32", "int64")):
        a, b = (full_range(np.random.default_rng(3), (3, 300), dtype) for _ in range(2))
        check(variants, a, b.T, result, only=1)


def test_little_memory_for_sums_cuts_c(variants: Variants, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portable_plan, "chains", lambda k: (-(-k // 64), 64))
    rng = np.random.default_rng(4)
    a, b = whole(rng, (2, 2, 130, 70), "float32"), whole(rng, (2, 2, 70, 3), "float32")
    expected = reference(a, b, np.dtype(np.float32))
    c = np.empty(expected.shape, np.float32)
    matrix = 2 * 130 * 3 * 4
    for limit, pieces in ((1, 8), (matrix, 4), (3 * matrix, 2)):
        way = portable_plan.every_way(problem_of(a, b, c), workspace_bytes=limit)[-1]
        assert len(way.steps) == 2 * pieces
        poison(c)
        run(variants, way, a, b, c)
        assert (c == expected).all(), (limit, way.why)


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint16", "bfloat16", "float32", "float64", "complex64"]
)
def test_A24_alpha_and_beta(variants: Variants, dtype: str) -> None:
    rng = np.random.default_rng(24)
    a, b = whole(rng, (17, 20), dtype), whole(rng, (20, 9), dtype)
    result = product_dtype(a.dtype, b.dtype)
    product = reference(a, b, result)
    old = whole(rng, product.shape, result.name)
    factors: list[tuple[complex, complex]] = [(1, 0), (0, 1), (1, 1)]
    if dtype != "bool":
        factors += [(3, 0), (2, -3), (0, 0)]
    if result.kind == "c":
        factors += [(1 + 2j, -2j), (1j, 0)]
    for alpha, beta in factors:
        c = np.empty_like(product)
        with np.errstate(all="ignore"):
            scaled = np.multiply(alpha, product.astype(object)) if alpha else 0 * product
            added = scaled + (np.multiply(beta, old.astype(object)) if beta else 0)
            expected = wrapped(added, result)
        for way in ways_of(problem_of(a, b, c, updates=True)):
            c[...] = old
            if beta == 0:
                poison(c)
            run(variants, way, a, b, c, (alpha, beta))
            assert (c == expected).all(), (way.why, alpha, beta)


def test_A24_alpha_0_shows_no_nan_of_a(variants: Variants) -> None:
    for dtype in ("float32", "float16", "complex64"):
        a, b = np.full((5, 7), np.nan, dtype), np.ones((7, 3), dtype)
        c = np.empty((5, 3), dtype)
        for way in ways_of(problem_of(a, b, c, updates=True)):
            c.fill(2)
            run(variants, way, a, b, c, (0, 3))
            assert (c == 6).all(), way.why


@pytest.mark.parametrize("sums", ["float32", "float64"])
@pytest.mark.parametrize("result", FLOATS)
def test_results_of_every_type_are_rounded_once(variants: Variants, sums: str, result: str) -> None:
    rng = np.random.default_rng(7)
    values = rng.standard_normal(300) * 2.0 ** rng.integers(-45, 20, 300)
    ties = np.arange(-75, 75) * 2.0 ** rng.integers(-26, 8, 150)
    near = np.nextafter(ties, np.inf)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 448, 464, 465, 57344, 61440, 65520])
    values = np.concatenate([values, ties, near, special, -special, 2.0**-9 * np.arange(40) / 3])
    x = values.astype(sums)[:, None]
    x[x == 0] = 0  # a sum that begins with 0 is never -0
    one = np.ones((1, 1), sums)
    with np.errstate(all="ignore"):
        expected = (sticky(x) if "float8" in result else x).astype(named(result))
    c = np.empty(expected.shape, named(result))
    for way in ways_of(problem_of(x, one, c))[-1:]:
        run(variants, way, x, one, c)
        is_nan = np.isnan(expected.astype(np.float64))
        assert np.isnan(c[is_nan].astype(np.float64)).all(), way.why
        assert c[~is_nan].tobytes() == expected[~is_nan].tobytes(), way.why


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_every_float8_is_read_right(variants: Variants, dtype: str) -> None:
    x = np.arange(256, dtype=np.uint8).view(named(dtype))[:, None]
    one = np.ones((1, 1), np.float16)
    c = np.empty((256, 1), np.float32)
    for way in ways_of(problem_of(x, one, c)):
        run(variants, way, x, one, c)
        np.testing.assert_array_equal(c, x.astype(np.float32))
