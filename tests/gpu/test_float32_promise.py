"""float32 on a GPU keeps float32's own promise on every kind of data, with the bits of its models.

On Hopper an element is either what `numerics.schemes` says of fp16x3, or a plain chain of fused
multiply-adds where its row or column is flagged; which of them is a function of the row, the column
and K. References are NumPy, float64, and an emulated FMA. What is written is poisoned first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.float32_data import DISTRIBUTIONS, lognormal, lossy, normal, over_the_promise
from tests.gpu.support import upload
from tests.support import within_bound
from tilewise.kernels.steps import chains
from tilewise.numerics import schemes
from tilewise.numerics.bounds import bound
from tilewise.runtime import device
from tilewise.simt.fma import fma_f4

pytestmark = pytest.mark.gpu

Array = np.ndarray[Any, np.dtype[Any]]

#: Around pieces of K, tiles of C, and the sizes at which one way of multiplying ends.
SHAPES = [(48, 33, 40), (5, 64, 129), (130, 97, 3), (33, 500, 70), (1, 1000, 1), (300, 65, 260)]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(8)


@pytest.fixture
def on_hopper() -> None:
    if device.facts(0).capability != (9, 0):
        pytest.skip("compute capability 9.0 is needed")


def product(a: Array, b: Array, **options: Any) -> Array:
    """Return a @ b as a GPU gives it, written over NaN."""
    import cupy

    x, y = upload(a), upload(b)
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    out = cupy.full(shape, np.nan, np.result_type(a, b))
    result: Array = tw.matmul(x, y, out=out, **options).get()
    return result


def chain(a: Array, b: Array) -> Array:
    """Return a @ b by chains of FMAs, one an element up to a K of 16384.

    K is padded with zeros to a multiple of 16: what has underflowed to −0 becomes 0.
    """
    length = chains(a.shape[1])[1]
    sums = []
    with np.errstate(all="ignore"):
        for start in range(0, a.shape[1], length):
            c = np.zeros((a.shape[0], b.shape[1]), np.float32)
            part = slice(start, start + length)
            for x, y in zip(a.T[part], b[part], strict=True):
                c = fma_f4(np.repeat(x[:, np.newaxis], b.shape[1], 1), y[np.newaxis], c)
            sums.append(c + np.float32(0) if a.shape[1] % 16 else c)
        return functools.reduce(np.add, sums)


def by_model(a: Array, b: Array, scheme: Callable[..., schemes.Product] = schemes.fp16x3) -> Array:
    """Return a @ b as the models have it: by the scheme, or by chains where that is not safe."""
    parts, length = chains(a.shape[1])
    found = scheme(a, b, chain=length if parts > 1 else None)
    plain = found.rows[:, np.newaxis] | found.columns
    return np.where(plain, chain(a, b), found.c) if plain.any() else found.c


def check_bits(got: Array, expected: Array, what: object = "") -> None:
    """Compare all bits; a NaN is any other."""
    differ = got.view(np.uint32) != expected.view(np.uint32)
    differ &= ~(np.isnan(got) & np.isnan(expected))
    if differ.any():
        places = np.argwhere(differ)
        first = tuple(places[0].tolist())
        rows, columns = (np.unique(at)[:9].tolist() for at in places.T[-2:])
        pytest.fail(
            f"{what}: {differ.sum()} of {differ.size} differ, in rows {rows}, columns {columns}; "
            f"the first is {got[first]!r}, not {expected[first]!r}"
        )


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_promise_holds_on_every_distribution(name: str, rng: Any) -> None:
    for m, k, n in SHAPES:
        a, b = DISTRIBUTIONS[name](rng, m, k, n)
        assert over_the_promise(product(a, b), a, b).max() <= 1, (m, k, n)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_bits_are_those_of_the_models(name: str, rng: Any, on_hopper: None) -> None:
    for m, k, n in SHAPES:
        a, b = DISTRIBUTIONS[name](rng, m, k, n)
        check_bits(product(a, b), by_model(a, b), (m, k, n))


@pytest.mark.parametrize("m", [16, 64, 65, 200])
def test_bits_are_those_of_the_models_in_every_layout(m: int, rng: Any, on_hopper: None) -> None:
    a, b = normal(rng, m, 200, 136)
    a[m // 2, 7], b[9, 100], b[70:, 3] = np.nan, 1e-6, np.inf
    expected = by_model(a, b)
    a_far, b_far = np.full((m, 2, 203), np.nan, np.float32), np.full((405, 137), np.nan, np.float32)
    a_far[:, 0, 2:202], b_far[:400:2, 1:] = a, b
    a_back, b_back = (x[::-1, ::-1].copy()[::-1, ::-1] for x in (a, b))
    for x in (a, np.asfortranarray(a), a_far[:, 0, 2:202], a_back):
        for y in (b, np.asfortranarray(b), b_far[:400:2, 1:], b_back):
            check_bits(product(x, y), expected)
    wide = np.broadcast_to(b[:, 8:9], (200, 50))
    check_bits(product(a, wide), np.repeat(expected[:, 8:9], 50, axis=1))


def test_a_long_k_is_chains_added_in_their_order(rng: Any, on_hopper: None) -> None:
    for k, data in ((16384, normal), (16385, normal), (20000, DISTRIBUTIONS["subnormal"])):
        a, b = data(rng, 4, k, 3)
        a[0, 5] *= np.float32(1e-9)
        check_bits(product(a, b), by_model(a, b), k)
        tall = np.concatenate([a] * 40)
        check_bits(product(tall, b), np.concatenate([product(a, b)] * 40), k)


def test_short_k_and_precision_ieee_are_chains_of_fmas(rng: Any) -> None:
    for k in (1, 7, 31):
        a, b = normal(rng, 70, k, 40)
        check_bits(product(a, b), chain(a, b), k)
    a, b = lognormal(rng, 70, 300, 40)
    check_bits(product(a, b, precision="ieee"), chain(a, b))


def test_bits_are_a_function_of_row_column_and_k(rng: Any) -> None:
    a, b = normal(rng, 1000, 300, 520)
    a[17, 5], a[40, 8], b[200, 31] = np.inf, 1e-7, 1e-7
    whole = product(a, b)
    check_bits(product(a[17:18], b), whole[17:18])
    check_bits(product(a[10:50], b), whole[10:50])
    check_bits(product(a[:, :], b[:, 30:47]), whole[:, 30:47])
    check_bits(product(a[39:41], b[:, 31:32]), whole[39:41, 31:32])
    stack = a.reshape(10, 100, 300)
    check_bits(product(stack, b), whole.reshape(10, 100, 520))
    check_bits(product(stack, np.stack([b] * 10)), whole.reshape(10, 100, 520))
    taller = np.concatenate([rng.standard_normal((900, 300)).astype(np.float32), a])
    check_bits(product(taller, b)[900:], whole)
    for memory in (None, "1MiB", "2MiB", None):
        check_bits(product(a, b, memory=memory), whole)


@pytest.mark.parametrize("k", [32, 100, 2000])
def test_flags_are_set_from_the_threshold_on(k: int, rng: Any, on_hopper: None) -> None:
    least = schemes.fp16x3_threshold(k)
    below = np.nextafter(least, np.float32(0))
    a, b = rng.uniform(1, 2, (6, k)).astype(np.float32), rng.uniform(1, 2, (k, 5))
    b = b.astype(np.float32)
    a[:, 3], b[3] = 2.0**14, 0  # the largest meet zeros, and hide nothing
    a[:, 4], b[4] = 0, 2.0**14
    a[2, 9], a[4, 9], b[9, 1], b[9, 3] = least, below, least, below
    got, by_parts, by_chain = product(a, b), schemes.fp16x3(a, b), chain(a, b)
    assert by_parts.rows.tolist() == [i == 4 for i in range(6)]
    assert by_parts.columns.tolist() == [j == 3 for j in range(5)]
    assert (by_parts.c != by_chain).mean() > 0.5  # so that bits tell which of them it was
    check_bits(got, by_model(a, b))
    # Without flags, half of the threshold would break the promise.
    if k > 64:
        a, b = lossy(rng, 6, k, 5, times=0.5)
        assert over_the_promise(schemes.fp16x3(a, b).c, a, b).min() > 1
        assert over_the_promise(product(a, b), a, b).max() <= 1


def test_flags_are_set_where_exponents_leave_the_safe_range(rng: Any, on_hopper: None) -> None:
    k = 130
    low, high = schemes.column_exponents(k)
    a, b = rng.uniform(1, 2, (8, k)), rng.uniform(1, 2, (k, 8))
    a[1:5] *= 2.0 ** np.array([[-106], [-107], [127], [-140]])
    b[64:128, 1] *= 2.0**low
    b[64:128, 2] *= 2.0 ** (low - 1)
    b[:64, 3] *= 2.0**high
    b[:64, 4] *= 2.0 ** (high + 1)
    b[128:, 5] *= 2.0**-149
    a, b = a.astype(np.float32), b.astype(np.float32)
    found = schemes.fp16x3(a, b)
    assert found.rows.tolist() == [i in (2, 4) for i in range(8)]
    assert found.columns.tolist() == [j in (2, 4, 5) for j in range(8)]
    check_bits(product(a, b), by_model(a, b))


def test_inf_nan_overflow_underflow_and_zeros_are_those_of_a_chain(rng: Any) -> None:
    k = 96
    a, b = normal(rng, 12, k, 10)
    a[0, 0], a[1, 5], a[2, 95] = np.nan, np.inf, -np.inf
    b[7, 0], b[5, 1] = np.inf, 0  # Inf·0 is NaN
    a[3, :2], b[:2, 2] = (np.inf, -np.inf), 1
    a[4], b[:, 3] = 0, -0.0
    a[5] *= np.float32(2.0**127 / np.abs(a[5]).max())
    b[:, 4] *= np.float32(2.0**20)
    a[6] *= np.float32(2.0**-80)
    b[:, 5] = -np.abs(b[:, 5]) * np.float32(2.0**-60)
    a[7] = np.abs(a[7]) * np.float32(2.0**-84)
    b[:, 6] = -np.abs(b[:, 6]) * np.float32(2.0**-92)  # C underflows, to −0 in places
    got, expected = product(a, b), chain(a, b)
    is_special = np.zeros(got.shape, bool)
    is_special[:4] = is_special[:, 0] = True
    check_bits(got[is_special], expected[is_special])
    assert np.isnan(got[is_special]).sum() > 12
    with np.errstate(all="ignore"):
        exact = a.astype(float) @ b.astype(float)
    overflows = ~is_special & (np.abs(exact) > 2.0**128)
    assert overflows.sum() > 3
    assert np.array_equal(got[overflows], np.copysign(np.float32(np.inf), exact[overflows]))
    zero = expected == 0
    zero[6] = False  # of either sign, as the last term or as the sum of all
    assert zero.sum() > 15
    assert np.signbit(expected[zero]).any()
    check_bits(got[zero], expected[zero])
    assert over_the_promise(got, a, b)[~is_special].max() <= 1


def test_flagged_rows_and_columns_by_the_hundred(rng: Any) -> None:
    a, b = normal(rng, 700, 160, 600)
    for count in (1, 7, 350, 700):
        a[:count, 11] = np.nan
        b[5, : count // 2] = 1e-9
        got = product(a, b)
        assert np.isnan(got[:count]).all()
        assert over_the_promise(got, a, b)[count:].max(initial=0) <= 1
    a, b = lognormal(rng, 300, 200, 280)
    check_bits(product(a, b), chain(a, b))


def test_alpha_beta_and_out_reach_flagged_and_other_elements(rng: Any) -> None:
    a, b = normal(rng, 150, 100, 140)
    a[33, 3], b[4, 50] = 1e-9, 1e-9
    c = rng.standard_normal((150, 140)).astype(np.float32)
    got = tw.gemm(upload(a), upload(b), upload(c), alpha=-2.5, beta=0.5).get()
    wide_a, wide_b = a.astype(float), b.astype(float)
    exact = -2.5 * (wide_a @ wide_b) + 0.5 * c
    size = 2.5 * (abs(wide_a) @ abs(wide_b))
    assert (abs(got - exact) <= 106 * 2.0**-24 * (size + abs(0.5 * c))).all()
    poisoned = np.full_like(c, np.nan)
    got = tw.gemm(upload(a), upload(b), upload(poisoned), alpha=1, beta=0).get()
    check_bits(got, product(a, b))


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_tf32_keeps_its_own_promise(name: str, rng: Any, on_hopper: None) -> None:
    single = np.dtype(np.float32)
    for m, k, n in SHAPES:
        a, b = DISTRIBUTIONS[name](rng, m, k, n)
        got = product(a, b, precision="tf32")
        check_bits(got, by_model(a, b, schemes.tf32), (m, k, n))
        wide_a, wide_b = a.astype(float), b.astype(float)
        allowed = bound(k, single, single, single, precision="tf32").of(abs(wide_a) @ abs(wide_b))
        with np.errstate(all="ignore"):
            assert (abs(got - wide_a @ wide_b) <= allowed).all(), (m, k, n)
    plan = tw.plan(upload(a), upload(b), precision="tf32")
    assert "2⁻¹⁰" in str(plan)


def test_E1_multiplying_by_one_changes_nothing(rng: Any) -> None:
    numbers = np.arange(46 * 46, dtype=np.float32).reshape(46, 46)
    assert np.array_equal(product(np.eye(46, dtype=np.float32), numbers), numbers)
    assert np.array_equal(product(numbers, np.eye(46, dtype=np.float32)), numbers)
    a = np.zeros((1, 40), np.float32)
    a[0, 0] = 1024.5
    assert product(a, np.ones((40, 1), np.float32))[0, 0] == 1024.5
    a, b = 50 * rng.random((100_000, 36)), 50 * rng.random((36, 4))
    a, b = a.astype(np.float32), b.astype(np.float32)
    assert within_bound(product(a, b), a, b)


def test_E2_each_call_follows_its_own_precision(rng: Any, on_hopper: None) -> None:
    a, b = normal(rng, 64, 256, 48)
    expected = {
        None: by_model(a, b),
        "ieee": chain(a, b),
        "tf32": by_model(a, b, schemes.tf32),
    }
    for precision in (None, "ieee", "tf32", None, "tf32", "ieee"):
        check_bits(product(a, b, precision=precision), expected[precision])
        plan = tw.plan(upload(a), upload(b), precision=precision)
        assert plan.precision == precision
        assert plan.method == {None: "fp16x3", "ieee": "portable", "tf32": "tf32"}[precision]


def test_E3_a_product_and_its_transpose_agree_within_the_bound(rng: Any) -> None:
    a, b = normal(rng, 6, 1500, 900)
    a, b = np.float32(1e10) * a, np.float32(1e10) * b
    one, other = product(a, b), product(b.T, a.T).T
    ratio = [over_the_promise(c, a, b).max() for c in (one, other)]
    assert max(ratio) <= 1


def test_E4_the_error_is_below_that_of_a_chain(rng: Any, on_hopper: None) -> None:
    for name, k, times in (("normal", 512, 1), ("normal", 4096, 5), ("positive", 4096, 5)):
        a, b = DISTRIBUTIONS[name](rng, 256, k, 256)
        exact = a.astype(float) @ b.astype(float)
        errors = [
            np.linalg.norm(product(a, b, precision=p) - exact) / np.linalg.norm(exact)
            for p in (None, "ieee")
        ]
        assert errors[0] <= 1e-6
        assert errors[0] <= errors[1] / times, name


def test_E14_check_calls_it_rounding_and_one_term_short_a_bug(rng: Any) -> None:
    a, b = normal(rng, 1000, 500, 500)
    c = product(a, b)
    assert tw.check(a, b, c).verdict == "rounding"
    c[32:64, 128:160] -= np.outer(a[32:64, -1], b[-1, 128:160])
    found = tw.check(a, b, c)
    assert not found
    assert found.where.tile == (1, 4)
    assert tw.matmul(upload(a), upload(b), precision="tf32", verify=True).get().shape == c.shape


def test_E16_complex64_is_not_reduced(rng: Any) -> None:
    a, b = (
        (rng.standard_normal((256, 256)) + 1j * rng.standard_normal((256, 256))).astype(
            np.complex64
        )
        for _ in range(2)
    )
    for alter in (lambda x: x, np.conj, np.transpose):
        x, y = alter(a), alter(b)
        got = product(x, y)
        for c, left, right in (
            (got.real, [x.real, -x.imag], [y.real, y.imag]),
            (got.imag, [x.real, x.imag], [y.imag, y.real]),
        ):
            joined = np.concatenate(left, axis=1), np.concatenate(right, axis=0)
            assert over_the_promise(np.ascontiguousarray(c), *joined).max() <= 1
    one = np.zeros((40, 40), np.complex64)
    one[0, 0], one[1, 1] = 1024.5 + 2049j, -2049j
    assert np.array_equal(product(one, np.eye(40, dtype=np.complex64)), one)


def test_complex_inf_and_nan_stay_in_their_rows_and_columns(rng: Any) -> None:
    a, b = (
        (rng.standard_normal((50, 50)) + 1j * rng.standard_normal((50, 50))).astype(np.complex64)
        for _ in range(2)
    )
    a[3, 4], b[5, 6] = complex(np.nan, 1), complex(1e-20, np.inf)
    got = product(a, b)
    untouched = np.delete(np.delete(got, 3, axis=0), 6, axis=1)
    assert np.isfinite(untouched).all()
    assert not np.isfinite(got[3]).any()
    assert not np.isfinite(got[:, 6]).any()
