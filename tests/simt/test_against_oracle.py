"""Random kernels, on lanes and one thread at a time: every bit of every array must agree."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simt import oracle
from tests.simt.generated import arguments, bits, compiled, kernel_source
from tilewise import simt

SHAPES = (((2,), (8,)), ((1,), (4, 3)), ((3,), (32,)), ((2,), (5, 2)))


def compare(source, seed, shape):
    kernel = compiled(source)
    grid, block = shape
    threads = int(np.prod(grid) * np.prod(block))
    expected, found = arguments(seed, threads), arguments(seed, threads)
    oracle.run(kernel, grid, block, *expected)
    simt.launch(kernel, grid, block, *found)
    for want, have in zip(expected, found, strict=True):
        if isinstance(want, np.ndarray):
            np.testing.assert_array_equal(bits(have), bits(want), err_msg=source)


@given(seed=st.integers(0, 2**32), statements=st.integers(1, 16), shape=st.sampled_from(SHAPES))
@settings(max_examples=80, deadline=None)
def test_random_kernels_have_the_bits_of_one_thread_at_a_time(seed, statements, shape):
    compare(kernel_source(seed, statements), seed, shape)
