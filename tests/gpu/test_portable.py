"""The portable kernels on a GPU: each product by every way there is to compute it, bit for bit.

Operands lie in larger buffers of NaN (or 0xFF); C and the workspace are full of it. Products by the
public calls are in ``test_products``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from tests.conftest import missing
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
    ways_of,
    whole,
    wrapped,
)
from tilewise import kernels
from tilewise.errors import DeviceError
from tilewise.kernels import portable_plan
from tilewise.kernels.portable_plan import Problem, choose
from tilewise.kernels.portable_steps import Steps
from tilewise.kernels.steps import Strides, chains
from tilewise.numerics.bounds import bound
from tilewise.numerics.dtypes import product_dtype
from tilewise.runtime import device, memory, streams
from tilewise.runtime.launch import Launch

pytestmark = pytest.mark.gpu

#: Around the sides of all tiles, and below them.
SIZES = ((1, 1, 1), (3, 130, 40), (130, 1, 17), (63, 65, 33), (64, 128, 64), (129, 127, 130))


@pytest.fixture(autouse=True)
def are_built(request: pytest.FixtureRequest) -> None:
    try:
        kernels.manifest("portable")
    except DeviceError as error:
        missing(request.config, str(error))


@lru_cache
def capability() -> tuple[int, int]:
    return device.facts(0).capability


@lru_cache
def built(kernel: str, target: str) -> kernels.Built:
    if target:
        return kernels.manifest("portable")[kernel, target]
    return kernels.find("portable", kernel, capability())


def ways(a: Array, b: Array, c: Array, *, updates: bool = False) -> list[Steps]:
    return ways_of(problem_of(a, b, c, updates), capability())


def bytes_of_owner(x: Array) -> Array:
    """Return all bytes of the memory that x is a view of, in place."""
    while isinstance(x.base, np.ndarray):
        x = x.base
    raw = x.ravel(order="K").view(np.uint8)
    assert not x.size or np.may_share_memory(raw, x), "a copy"
    return raw


def run(
    way: Steps,
    a: Array,
    b: Array,
    c: Array,
    factors: Sequence[complex] = (1, 0),
    target: str = "",
) -> None:
    """Carry out one way on copies of all that a, b and c are views of, and read C's back."""
    numbers = list(factors)
    if c.dtype.kind not in "iub":
        numbers = [x.real for x in factors] + [x.imag for x in factors]
    stream = streams.DEFAULT
    places, pointers = [], []
    try:
        for x in (a, b, c):
            raw = bytes_of_owner(x)
            # Addresses keep what they are modulo 256.
            shift = raw.ctypes.data % 256
            place = memory.allocate(raw.size + 256, 0, stream)
            places.append(place)
            memory.write(place, np.concatenate([np.zeros(shift, np.uint8), raw]), stream)
            pointers.append(place.pointer + shift + x.ctypes.data - raw.ctypes.data)
        places.append(memory.allocate(way.workspace_bytes + 256, 0, stream))
        memory.fill(places[3], 0xFF, stream)
        pointers.append(places[3].pointer)
        for step in way.steps:
            launch = Launch(
                built(step.kernel, target), 0, step.grid, step.arguments, what=str(way.why)
            )
            launch(
                stream, tuple(pointers[i] for i in step.operands), tuple(numbers[: step.numbers])
            )
        raw = bytes_of_owner(c)
        shift = raw.ctypes.data % 256
        found = np.empty(shift + raw.size, np.uint8)
        memory.read(places[2], found, stream)
        raw[...] = found[shift:]
        beyond = np.empty(way.workspace_bytes + 256, np.uint8)
        memory.read(places[3], beyond, stream)
        assert (beyond[way.workspace_bytes :] == 0xFF).all(), "written beyond the workspace"
    finally:
        for place in places:
            place.free()


def check(
    a: Array,
    b: Array,
    dtype: str | None = None,
    *,
    order: str = "C",
    margin: int = 3,
    target: str = "",
    only: int | None = None,
) -> None:
    """Multiply by every way, or one, and compare with the exact product."""
    result = named(dtype) if dtype else product_dtype(a.dtype, b.dtype)
    expected = reference(a, b, result)
    c, buffer = placed(expected, order, margin)
    untouched = buffer.copy()
    every = ways(a, b, c)
    if target:
        every = [way for way in every if all(is_built(step.kernel, target) for step in way.steps)]
    for way in every if only is None else [every[only % len(every)]]:
        poison(c)
        run(way, a, b, c, target=target)
        assert (c == expected).all(), (way.why, a.shape, b.shape, a.strides, b.strides)
        c[...] = expected
        assert (buffer == untouched).all(), f"{way.why}: written outside of C"


def is_built(kernel: str, target: str) -> bool:
    return (kernel, target) in kernels.manifest("portable")


@pytest.mark.parametrize("dtype", ALL)
def test_every_way_is_exact_at_every_edge(dtype: str) -> None:
    rng = np.random.default_rng(5)
    for number, (m, n, k) in enumerate(SIZES):
        for turn, orders in enumerate(itertools.product("CF", repeat=2)):
            margin = 16 if (number + turn) % 2 else 1
            a, _ = placed(whole(rng, (m, k), dtype), orders[0], margin)
            b, _ = placed(whole(rng, (k, n), dtype), orders[1], margin)
            check(a, b, order="CCF"[(number + turn) % 3], margin=margin)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_A5_all_small_sizes(dtype: str) -> None:
    sizes = (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 100, 127, 129)
    rng = np.random.default_rng(6)
    a, b = whole(rng, (129, 129), dtype), whole(rng, (129, 129), dtype)
    for number, (m, n, k) in enumerate(itertools.product(sizes, sizes, sizes)):
        if number % 5 == 0:
            check(a[:m, :k], b[:k, :n], "int32" if dtype == "int8" else None, only=number)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_A9_every_k_from_1_to_70_of_ones(dtype: str) -> None:
    for k in range(1, 71):
        a, b = np.ones((128, k), named(dtype)), np.ones((k, 128), named(dtype))
        check(a, b if k % 2 else np.asfortranarray(b), dtype)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "int8", "int32"])
def test_A13_A15_B13_strides(dtype: str) -> None:
    rng = np.random.default_rng(13)
    base, _ = placed(whole(rng, (140, 140), dtype))
    views = (
        base[::2, 1:71],
        base[::-1, :70][:70],
        base[:70, ::-1][:, :70],
        base[::-2, ::-2],
        base[1:140:2, ::2].T,
        np.broadcast_to(base[3], (70, 140))[:, :70],
        np.broadcast_to(base[:70, 3:4], (70, 70)),
        np.broadcast_to(base[0, 0], (70, 70)),
    )
    for number, a in enumerate(views):
        check(a, views[number - 3])
        around, buffer = placed(np.zeros((150, 150), a.dtype))
        before = buffer.copy()
        c = around[148:8:-2, 3:143:2]
        expected = reference(a, a, a.dtype)
        for way in ways(a, a, c):
            poison(c)
            run(way, a, a, c)
            assert (c == expected).all(), way.why
            c[...] = 0
            assert (buffer == before).all(), f"{way.why}: written outside of C"


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "float8_e4m3fn", "int8"])
def test_B9_every_alignment(dtype: str) -> None:
    rng = np.random.default_rng(9)
    item = named(dtype)
    for shift in range(17):
        flat = whole(rng, (shift + 33 * 40,), dtype)
        other = whole(rng, (16 - shift + 40 * 24,), dtype)
        check(flat[shift:].reshape(33, 40), other[16 - shift :].reshape(40, 24), only=shift)
    assert item.itemsize <= 16


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "int8", "int16"])
def test_batches_broadcast(dtype: str) -> None:
    rng = np.random.default_rng(23)
    batches = [(2, 3), (2, 1), (1, 3), (1, 1)]
    for a_batch, b_batch in itertools.product(batches, repeat=2):
        a, _ = placed(whole(rng, (*a_batch, 33, 20), dtype), "C", 4)
        b, _ = placed(whole(rng, (*b_batch, 20, 41), dtype), "F", 4)
        check(a, b)


@pytest.mark.parametrize("dtype", ["float32", "int8", "complex128"])
def test_A23_more_than_65535_matrices(dtype: str) -> None:
    rng = np.random.default_rng(24)
    a = np.broadcast_to(whole(rng, (3, 3), dtype), (1, 70_001, 3, 3))
    b = whole(rng, (1, 70_001, 3, 1), dtype)
    c = np.empty((1, 70_001, 3, 1), product_dtype(a.dtype, b.dtype))
    expected = np.matmul(a, b)
    for way in ways(a, b, c):
        poison(c)
        run(way, a, b, c)
        assert (c == expected).all(), way.why


@pytest.mark.parametrize("dtype", INTEGERS)
def test_A17_B17_integers_wrap(dtype: str) -> None:
    rng = np.random.default_rng(17)
    a, b = full_range(rng, (70, 300), dtype), full_range(rng, (300, 65), dtype)
    check(a, b)
    for result in ("int8", "uint16", "int32", "int64"):
        if np.can_cast(dtype, result) and result != dtype:
            check(a, b, result)


def test_integer_sums_of_a_long_k() -> None:
    for target in ("", "compute_80"):  # tensor cores before Hopper would clamp
        a = np.full((3, 200_000), -128, np.int8)
        b = np.asfortranarray(np.full((200_000, 5), -128, np.int8))
        for result in ("int32", "int64"):
            check(a, b, result, target=target)
        ones = np.ones((3, 200_000), bool)
        check(ones, np.asfortranarray(np.ones((200_000, 5), bool)), target=target)


def test_mixed_types() -> None:
    rng = np.random.default_rng(20)
    for a_dtype, b_dtype in itertools.product(ALL, repeat=2):
        try:
            product_dtype(named(a_dtype), named(b_dtype))
        except TypeError:
            continue
        check(whole(rng, (17, 20), a_dtype), whole(rng, (20, 33), b_dtype).copy("F"))


@pytest.mark.parametrize("dtype", ALL)
def test_A24_alpha_and_beta(dtype: str) -> None:
    rng = np.random.default_rng(24)
    for k in (20, 0):
        a, b = whole(rng, (70, k), dtype), whole(rng, (k, 65), dtype)
        result = product_dtype(a.dtype, b.dtype)
        product = reference(a, b, result)
        old = whole(rng, product.shape, result.name)
        factors: list[tuple[complex, complex]] = [(1, 0), (0, 1), (1, 1)]
        factors += [] if dtype == "bool" else [(3, 0), (2, -3), (0, 0)]
        factors += [(1 + 2j, -2j), (1j, 0)] if result.kind == "c" else []
        for alpha, beta in factors:
            c = np.empty_like(product)
            scaled = np.multiply(alpha, product.astype(object)) if alpha else 0 * product
            added = scaled + (np.multiply(beta, old.astype(object)) if beta else 0)
            expected = wrapped(added, result)
            for way in ways(a, b, c, updates=True):
                c[...] = old
                if beta == 0:
                    poison(c)
                run(way, a, b, c, (alpha, beta))
                assert (c == expected).all(), (way.why, alpha, beta)


def test_A24_alpha_0_shows_no_nan_of_a() -> None:
    for dtype in (*FLOATS, *COMPLEX):
        a, b = np.full((70, 40), np.nan, named(dtype)), np.ones((40, 65), named(dtype))
        c = np.empty((70, 65), product_dtype(a.dtype, b.dtype))
        for way in ways(a, b, c, updates=True):
            c[...] = 2
            run(way, a, b, c, (0, 3))
            assert (c == 6).all(), way.why


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX])
@pytest.mark.parametrize("k", [40, 1000, 16384, 20001])
def test_bits_depend_on_row_column_and_k_alone(dtype: str, k: int) -> None:
    rng = np.random.default_rng(2)
    a, b = normal(rng, (72, k), dtype), normal(rng, (k, 136), dtype)
    whole_c = every_way(a, b)
    assert np.isfinite(whole_c).all()
    for rows, columns in (
        (slice(7, 8), slice(None)),
        (slice(None), slice(31, 32)),
        (slice(5, 70), slice(17, 90)),
    ):
        part = every_way(a[rows], np.asfortranarray(b[:, columns]))
        np.testing.assert_array_equal(bits(part), bits(whole_c[rows, columns].copy()))
    batch = every_way(np.stack([a[:9], a[9:18]])[None], b)
    np.testing.assert_array_equal(bits(batch[0, 1]), bits(whole_c[9:18].copy()))


def every_way(a: Array, b: Array) -> Array:
    """Return a product in its sums' type, which has the same bits by every way."""
    result = product_dtype(a.dtype, b.dtype)
    result = np.dtype(np.float32) if result.itemsize < 4 else result
    c = np.empty((*a.shape[:-1], b.shape[-1]), result)
    first = None
    for way in ways(a, b, c):
        poison(c)
        run(way, a, b, c)
        if first is None:
            first = c.copy()
        np.testing.assert_array_equal(bits(c), bits(first), str(way.why))
    assert first is not None
    return first


def bits(x: Array) -> Array:
    return x.view(np.uint32)


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array:
    x = rng.standard_normal(shape)
    if named(dtype).kind == "c":
        return (x + 1j * rng.standard_normal(shape)).astype(dtype)
    return x.astype(named(dtype))


def test_float32_is_one_chain_of_fused_multiply_adds() -> None:
    rng = np.random.default_rng(3)
    for k in (7, 1000, 16384):
        a, b = normal(rng, (5, k), "float32"), normal(rng, (k, 6), "float32")
        chain = np.zeros((5, 6), np.float32)
        for term in range(k):  # a product of float32 is exact in float64
            added = a[:, term, None].astype(np.float64) * b[term] + chain
            chain = added.astype(np.float32)
        np.testing.assert_array_equal(every_way(a, b), chain)


def some(data: str, rng: np.random.Generator, rows: int, k: int, dtype: str) -> Array:
    """Return rows of one kind of data, in the range that ``dtype`` and its products have."""
    if data == "positive":
        x = rng.random((rows, k))
    elif data == "alternating":
        x = (1 + rng.random((rows, k))) * (-1.0) ** np.arange(k)
    else:
        x = rng.standard_normal((rows, k))
    if data == "rows of all sizes":
        most = 3 if named(dtype).itemsize < 4 else 30
        x = x * 2.0 ** rng.integers(-most, most, (rows, 1))
    return (x * (1 - 0.5j) if named(dtype).kind == "c" else x).astype(named(dtype))


@pytest.mark.parametrize("data", ["normal", "positive", "alternating", "rows of all sizes"])
@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX])
def test_errors_are_within_the_bound(dtype: str, data: str) -> None:
    rng = np.random.default_rng(4)
    for k in (16, 1000, 20000):
        a = some(data, rng, 40, k, dtype)
        b = np.ascontiguousarray(some(data, rng, 36, k, dtype).T)
        result = product_dtype(a.dtype, b.dtype)
        promise = bound(k, a.dtype, b.dtype, result, device="cuda:0")
        c = np.empty((40, 36), result)
        exact = [x @ y for x, y in real_products(a, b)]
        sizes = [(abs(x) @ abs(y)).astype(np.float64) for x, y in real_products(a, b)]
        for way in ways(a, b, c):
            poison(c)
            run(way, a, b, c)
            found = (c.real, c.imag) if result.kind == "c" else (c.astype(np.float64),)
            for part, true, size in zip(found, exact, sizes, strict=True):
                allowed = promise.of(size, true.astype(np.float64))
                error = abs(part - true)
                assert (error <= allowed).all(), (way.why, k, float((error / allowed).max()))


def real_products(a: Array, b: Array) -> list[tuple[Array, Array]]:
    """Return the factors of a·b, or of its real and its imaginary part, with digits to spare."""
    wide = np.longdouble
    if a.dtype.kind != "c":
        return [(a.astype(np.float64).astype(wide), b.astype(np.float64).astype(wide))]
    x = np.concatenate([a.real, a.imag], axis=1).astype(wide)
    real, imag = np.concatenate([b.real, -b.imag]), np.concatenate([b.imag, b.real])
    return [(x, real.astype(wide)), (x, imag.astype(wide))]


def test_inf_and_nan_come_out_where_a_chain_puts_them() -> None:
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        a, b = np.ones((70, 40), named(dtype)), np.ones((40, 65), named(dtype))
        a[3, 7], a[5, 1], b[20, 9], b[0, 11] = np.inf, np.nan, -np.inf, 0
        a[7, 0] = np.inf  # times 0 in column 11
        c = np.empty((70, 65), named(dtype))
        expected = np.full((70, 65), 40.0)
        expected[:, 9], expected[3], expected[7] = -np.inf, np.inf, np.inf
        expected[:, 11] = 39
        expected[3, 11], expected[7, 11] = np.inf, np.nan
        expected[3, 9] = expected[7, 9] = np.nan
        expected[5] = np.nan
        for way in ways(a, b, c):
            run(way, a, b, c)
            np.testing.assert_array_equal(c.astype(np.float64), expected, str(way.why))


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "float16", "int8", "int16"])
def test_ptx_gives_what_the_cubins_give(dtype: str) -> None:
    rng = np.random.default_rng(80)
    for m, n, k in SIZES:
        check(whole(rng, (m, k), dtype), whole(rng, (k, n), dtype), target="compute_80")


@pytest.mark.parametrize("dtype", ["int8", "int16", "float16", "float32", "float64", "complex64"])
def test_B6_offsets_beyond_32_bits(dtype: str) -> None:
    """Rows of A, columns of B, rows of C, each further apart than 32 bits can say."""
    import torch

    item = named(dtype).itemsize
    rng = np.random.default_rng(32)
    rows, far = 35, 2**26 + 16
    a, b = whole(rng, (rows, 32), dtype), whole(rng, (32, 40), dtype)
    expected = reference(a, b, a.dtype)
    near = memory_of(b)
    for spread in ("a", "c"):
        huge = torch.empty(rows * far * item, dtype=torch.uint8, device="cuda")
        small = memory_of(a if spread == "c" else np.zeros_like(expected))
        table = huge.view(rows, far * item)
        wide = expected.shape[1] * item
        if spread == "a":
            table[:, : 32 * item] = memory_of(a).view(rows, -1)
            pointers = (huge, near, small)
        else:
            pointers = (small, near, huge)
        problem = Problem(
            m=rows,
            n=40,
            k=32,
            a=Strides(0, 0, far if spread == "a" else 32, 1),
            b=Strides(0, 0, 40, 1),
            c=Strides(0, 0, far if spread == "c" else 40, 1),
            a_dtype=dtype,
            b_dtype=dtype,
            c_dtype=dtype,
        )
        for way in ways_of(problem, capability()):
            workspace = torch.empty(way.workspace_bytes + 256, dtype=torch.uint8, device="cuda")
            addresses = [x.data_ptr() for x in (*pointers, workspace)]
            for step in way.steps:
                launch = Launch(built(step.kernel, ""), 0, step.grid, step.arguments)
                launch(0, tuple(addresses[i] for i in step.operands))
            found = (table[:, :wide] if spread == "c" else small).cpu().numpy()
            found = np.ascontiguousarray(found).view(a.dtype).reshape(expected.shape)
            assert (found == expected).all(), (spread, way.why)
            (table[:, :wide] if spread == "c" else small).fill_(0xFF)
        del huge, table


def memory_of(x: Array) -> Any:
    import torch

    return torch.from_numpy(np.ascontiguousarray(x).view(np.uint8).reshape(-1)).cuda()


def test_E9_the_same_bits_every_time() -> None:
    rng = np.random.default_rng(9)
    for dtype, (m, n, k) in itertools.product(
        ("float32", "float64", "complex64"), ((64, 64, 20000), (333, 257, 1000))
    ):
        a, b = normal(rng, (m, k), dtype), normal(rng, (k, n), dtype)
        c = np.empty((m, n), dtype)
        way = min(ways(a, b, c), key=lambda way: way.us)
        run(way, a, b, c)
        first = c.copy()
        for _ in range(10):
            run(way, a, b, c)
            np.testing.assert_array_equal(bits(c), bits(first))


def test_what_is_chosen_is_within_its_budget() -> None:
    rng = np.random.default_rng(10)
    for dtype in ("float32", "int32", "complex64"):
        a, b = whole(rng, (300, 20000), dtype), whole(rng, (20000, 200), dtype)
        c = np.empty((300, 200), dtype)
        problem = problem_of(a, b, c)
        least = min(way.workspace_bytes for way in ways(a, b, c))
        for budget in (least, 40 << 20):
            choice = choose(problem, capability=capability(), workspace_bytes=budget)
            assert choice.workspace_bytes <= budget
    assert chains(20000)[0] > 1
    assert portable_plan.KERNELS
