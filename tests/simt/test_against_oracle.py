"""Random kernels, on lanes and one thread at a time: every bit of every array must agree."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simt import oracle
from tests.simt.generated import compiled, kernel_source
from tilewise import simt

SHAPES = (((2,), (8,)), ((1,), (4, 3)), ((3,), (32,)), ((2,), (5, 2)))


def arguments(seed, threads, n):
    rng = np.random.default_rng(seed)
    singles = (rng.standard_normal(n) * 2.0 ** rng.integers(-4, 6, n)).astype(np.float32)
    doubles = rng.standard_normal(n) * 10.0 ** rng.integers(-3, 4, n)
    return [
        singles,
        rng.integers(-(2**31), 2**31, n).astype(np.int32),
        doubles,
        rng.integers(0, 2**63, n).astype(np.uint64),
        rng.integers(-128, 128, n).astype(np.int8),
        rng.integers(0, 2, n).astype(bool),
        n,
        np.full((threads, 2), np.nan, np.float32),
        np.zeros(threads, np.int64),
        np.zeros(threads, np.int16),
        np.zeros(threads, bool),
        np.zeros(4, np.int64),
        np.zeros(4, np.int32),
        np.zeros((1, 3), np.uint32),
        np.full(threads, np.nan),
    ]


def bits(array):
    """The array's bits; NaNs alike, since their payload is not modelled."""
    if array.dtype.kind == "f":
        array = np.where(np.isnan(array), np.nan, array).astype(array.dtype)
    return array.view(np.dtype(f"u{array.itemsize}"))


def compare(source, seed, shape, n=11):
    kernel = compiled(source)
    grid, block = shape
    threads = int(np.prod(grid) * np.prod(block))
    expected, found = arguments(seed, threads, n), arguments(seed, threads, n)
    oracle.run(kernel, grid, block, *expected)
    simt.launch(kernel, grid, block, *found)
    for want, have in zip(expected, found, strict=True):
        if isinstance(want, np.ndarray):
            np.testing.assert_array_equal(bits(have), bits(want), err_msg=source)


@given(seed=st.integers(0, 2**32), statements=st.integers(1, 16), shape=st.sampled_from(SHAPES))
@settings(max_examples=150, deadline=None)
def test_random_kernels_have_the_bits_of_one_thread_at_a_time(seed, statements, shape):
    compare(kernel_source(seed, statements), seed, shape)
