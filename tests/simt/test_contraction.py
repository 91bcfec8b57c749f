"""Which products are fused into FMAs: what numba-cuda 0.30 was seen to compile, case by case.

Each case was compiled for sm_90 and its machine code read: CASES says where an FMA stood. The
inputs are random, so that any other choice of what to fuse gives other bits.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.simt.exact import fma
from tilewise import simt
from tilewise.simt import cuda

F = np.float32


def f(x, y, z):
    return fma(x, y, z, np.float32)


def two_products(a, b, c, d, o):
    i = cuda.grid(1)
    o[i] = a[i] * b[i] + c[i] * d[i]


def two_products_loaded_the_other_way(a, b, c, d, o):
    i = cuda.grid(1)
    x = a[i]
    y = b[i]
    u = c[i]
    v = d[i]
    o[i] = u * v + x * y


def two_products_subtracted(a, b, c, d, o):
    i = cuda.grid(1)
    o[i] = a[i] * b[i] - c[i] * d[i]


def three_terms(a, b, c, d, o):
    i = cuda.grid(1)
    o[i] = a[i] + c[i] * d[i] + b[i]


def sum_of_sums(a, b, c, d, o):
    i = cuda.grid(1)
    o[i] = (a[i] * b[i] + c[i] * d[i]) + a[i]


def negated(a, b, c, d, o):
    i = cuda.grid(1)
    o[i] = -(a[i] * b[i]) - c[i]


def subtrahend(a, b, c, d, o):
    i = cuda.grid(1)
    o[i] = c[i] - a[i] * b[i]


def named_and_used_once(a, b, c, d, o):
    i = cuda.grid(1)
    t = a[i] * b[i]
    o[i] = t + c[i]


def named_and_added_twice(a, b, c, d, o):
    i = cuda.grid(1)
    t = a[i] * b[i]
    o[i] = (t + c[i]) + t


def named_and_also_stored(a, b, c, d, o):
    i = cuda.grid(1)
    t = a[i] * b[i]
    o[i] = t + c[i]
    d[i] = t


def computed_twice_and_also_stored(a, b, c, d, o):
    i = cuda.grid(1)
    x = a[i]
    y = b[i]
    o[i] = x * y + c[i]
    d[i] = x * y


def across_a_barrier(a, b, c, d, o):
    i = cuda.grid(1)
    t = a[i] * b[i]
    cuda.syncthreads()
    o[i] = t + c[i]


def inside_an_if(a, b, c, d, o):
    i = cuda.grid(1)
    t = a[i] * b[i]
    if c[i] > -1e9:
        o[i] = t + d[i]


def in_both_branches(a, b, c, d, o):
    i = cuda.grid(1)
    t = a[i] * b[i]
    if c[i] > -1e9:
        o[i] = t + d[i]
    else:
        o[i] = t - c[i]


def from_outside_a_loop(a, b, c, d, o):
    i = cuda.grid(1)
    t = a[i] * b[i]
    total = c[i]
    for _ in range(d.shape[0] // 200):  # a loop of known length would be unrolled, and fuse
        total = (total + t) * total
    o[i] = total


def in_a_conditional(a, b, c, d, o):
    i = cuda.grid(1)
    t = a[i] * b[i] if c[i] > -1e9 else F(0)
    o[i] = t + d[i]


def through_abs(a, b, c, d, o):
    i = cuda.grid(1)
    o[i] = abs(a[i] * b[i]) + c[i]


def squared(a, b, c, d, o):
    i = cuda.grid(1)
    o[i] = a[i] ** 2 + c[i]


def accumulated(a, b, c, d, o):
    i = cuda.grid(1)
    t = a[i] * b[i]
    t += c[i] * d[i]
    t += a[i] * d[i]
    o[i] = t


def doubled(a, b, c, d, o):
    i = cuda.grid(1)
    t = a[i] * b[i]
    o[i] = t + t


def through_a_type_of_its_own(a, b, c, d, o):
    i = cuda.grid(1)
    o[i] = np.float32(a[i] * b[i]) + c[i]


def with_a_plus(a, b, c, d, o):
    i = cuda.grid(1)
    o[i] = d[i] - (+(a[i] * b[i]))


def product_of_three(a, b, c, d, o):
    i = cuda.grid(1)
    o[i] = a[i] * b[i] * c[i] + d[i]


def of_a_sum(a, b, c, d, o):
    i = cuda.grid(1)
    x = (a[i] + b[i]) * c[i]
    y = d[i] * a[i]
    o[i] = y + x


def sum_across_a_root(a, b, c, d, o):
    i = cuda.grid(1)
    o[i] = a[i] * b[i] + math.sqrt(abs(c[i]))


def difference_across_a_root(a, b, c, d, o):
    i = cuda.grid(1)
    o[i] = a[i] * b[i] - math.sqrt(abs(c[i]))


def difference_after_a_root(a, b, c, d, o):
    i = cuda.grid(1)
    o[i] = math.sqrt(abs(c[i])) - a[i] * b[i]


def sum_across_a_division(a, b, c, d, o):
    i = cuda.grid(1)
    o[i] = a[i] * b[i] + c[i] / d[i]


def negated_across_a_division(a, b, c, d, o):
    i = cuda.grid(1)
    o[i] = -(a[i] * b[i]) + c[i] / d[i]


CASES = {
    two_products: lambda a, b, c, d: f(a, b, c * d),
    two_products_loaded_the_other_way: lambda a, b, c, d: f(a, b, c * d),
    two_products_subtracted: lambda a, b, c, d: f(a, b, -(c * d)),
    three_terms: lambda a, b, c, d: f(c, d, a) + b,
    sum_of_sums: lambda a, b, c, d: f(a, b, c * d) + a,
    negated: lambda a, b, c, d: f(-a, b, -c),
    subtrahend: lambda a, b, c, d: f(-a, b, c),
    named_and_used_once: lambda a, b, c, d: f(a, b, c),
    named_and_added_twice: lambda a, b, c, d: f(a, b, f(a, b, c)),
    named_and_also_stored: lambda a, b, c, d: a * b + c,
    computed_twice_and_also_stored: lambda a, b, c, d: a * b + c,
    across_a_barrier: lambda a, b, c, d: f(a, b, c),
    inside_an_if: lambda a, b, c, d: f(a, b, d),
    in_both_branches: lambda a, b, c, d: a * b + d,
    from_outside_a_loop: lambda a, b, c, d: ((c + a * b) * c + a * b) * ((c + a * b) * c),
    in_a_conditional: lambda a, b, c, d: a * b + d,
    through_abs: lambda a, b, c, d: abs(a * b) + c,
    squared: lambda a, b, c, d: f(a, a, c),
    accumulated: lambda a, b, c, d: f(a, d, f(a, b, c * d)),
    doubled: lambda a, b, c, d: f(a, b, a * b),
    through_a_type_of_its_own: lambda a, b, c, d: f(a, b, c),
    with_a_plus: lambda a, b, c, d: f(-a, b, d),
    product_of_three: lambda a, b, c, d: f(a * b, c, d),
    sum_across_a_root: lambda a, b, c, d: f(a, b, np.sqrt(abs(c))),
    difference_across_a_root: lambda a, b, c, d: a * b - np.sqrt(abs(c)),
    difference_after_a_root: lambda a, b, c, d: f(-a, b, np.sqrt(abs(c))),
    sum_across_a_division: lambda a, b, c, d: f(a, b, c / d),
    negated_across_a_division: lambda a, b, c, d: -(a * b) + c / d,
    of_a_sum: lambda a, b, c, d: f(a + b, c, d * a),
}


def inputs(n=400):
    rng = np.random.default_rng(7)
    return [rng.standard_normal(n).astype(F) for _ in range(4)]


@pytest.mark.parametrize("kernel", CASES, ids=lambda kernel: kernel.__name__)
def test_products_are_fused_where_the_compiler_fuses_them(kernel):
    a, b, c, d = inputs()
    out = np.full(len(a), np.nan, F)
    simt.launch(kernel, 2, 200, a, b, c, d.copy(), out)
    expected = np.array([CASES[kernel](*lane) for lane in zip(a, b, c, d, strict=True)])
    assert expected.dtype == F
    np.testing.assert_array_equal(out, expected)


def test_float64_products_are_fused_too():
    a, b, c, d = (x.astype(np.float64) / 3 for x in inputs())
    out = np.full(len(a), np.nan)
    simt.launch(accumulated, 2, 200, a, b, c, d, out)
    expected = [
        fma(a_, d_, fma(a_, b_, c_ * d_, np.float64), np.float64)
        for a_, b_, c_, d_ in zip(a, b, c, d, strict=True)
    ]
    np.testing.assert_array_equal(out, expected)
    assert not np.array_equal(out, a * b + c * d + a * d)


def product_in_a_wider_sum(a, b, o):
    i = cuda.grid(1)
    total = 1.0
    total += a[i] * b[i]
    o[i] = total


def test_a_float32_product_is_rounded_before_a_float64_sum():
    a, b, *_ = inputs()
    out = np.zeros(400)
    simt.launch(product_in_a_wider_sum, 2, 200, a, b, out)
    np.testing.assert_array_equal(out, 1.0 + (a * b).astype(np.float64))


def divided_between(a, b, n, d, o):
    i = cuda.grid(1)
    t = (a[i] + d[i]) * (b[i] - a[i])
    o[i] = t + a[(i + 1) % n]


def test_an_integer_division_ends_a_stretch_of_code():
    """numba asks whether a divisor is 0, and products were not seen to be fused across that."""
    a, b, _, d = inputs()
    out = np.full(400, np.nan, F)
    simt.launch(divided_between, 2, 200, a, b, 400, d, out)
    np.testing.assert_array_equal(out, (a + d) * (b - a) + np.roll(a, -1))


def constant_product(a, o):
    i = cuda.grid(1)
    o[i] = a[i] - 1e-3 * 27.5


def test_a_product_of_constants_is_a_constant():
    a = np.random.default_rng(8).standard_normal(400)
    out = np.zeros(400)
    simt.launch(constant_product, 2, 200, a, out)
    np.testing.assert_array_equal(out, a - 1e-3 * 27.5)


class Notes:
    def on_launch(self, launch):
        self.notes = launch.notes

    def on_access(self, access):
        pass

    def on_barrier(self, barrier):
        pass

    def on_fault(self, fault):
        return False


def notes_of(kernel):
    observer = Notes()
    simt.launch(kernel, 2, 200, *inputs(), np.zeros(400, F), observer=observer)
    return observer.notes


def test_what_is_ambiguous_is_said():
    """The notes name file and line, and are empty where there is nothing to say."""
    (note,) = notes_of(two_products)
    assert "joins two products" in note
    assert f"{__file__}:{two_products.__code__.co_firstlineno + 2}:" in note
    assert any("used in several ways" in note for note in notes_of(named_and_also_stored))
    assert notes_of(subtrahend) == ()


def uses_exp_and_atomics(a, b, c, d, o):
    i = cuda.grid(1)
    cuda.atomic.add(o, 0, math_exp(a[i]) * 2)
    cuda.threadfence()


def math_exp(x):
    return math.exp(x)


def test_E15_what_is_not_modelled_is_said():
    """Case E15: a launch lists where a GPU's bits may differ, line by line."""
    notes = notes_of(uses_exp_and_atomics)
    text = "\n".join(notes)
    assert "math.exp comes from the host's library" in text
    assert "atomics on floats are done in the order of threads" in text
    assert "computed in float64: a float32 meets an int64" in text
    assert "an order that a fence makes with flags or atomics is not followed" in text
    assert len(notes) == 4
