"""The guide's Mul on a GPU: the bits of the simulated one, every size, the five steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tilewise import guide, kernels
from tilewise.errors import DeviceError, TilewiseError
from tilewise.runtime import device
from tilewise.simt import cuda

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def compiled() -> None:
    """Skip where `make kernels` has not run."""
    try:
        kernels.manifest("guide")
    except DeviceError as error:
        pytest.skip(str(error))


def product(
    a: NDArray[np.float32], b: NDArray[np.float32], kernel: Any, where: Any
) -> NDArray[np.float32]:
    c = np.full((a.shape[0], b.shape[1]), np.nan, np.float32)
    guide.Mul(a, b, *a.shape, b.shape[1], c, kernel=kernel, device=where)
    return c


def awkward(rng: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float32]:
    """Return numbers over the whole range of exponents, subnormal ones and zeros among them."""
    values = rng.standard_normal(shape) * 10.0 ** rng.integers(-30, 18, shape)
    values[rng.random(shape) < 0.1] *= 1e-12
    values[rng.random(shape) < 0.05] = 0
    return values.astype(np.float32)


@pytest.mark.parametrize("kernel", [guide.Muld, guide.Muld_any, guide.naive])
@pytest.mark.parametrize("shape", [(16, 16, 16), (64, 48, 80), (32, 512, 16), (256, 256, 256)])
@pytest.mark.parametrize("make", [awkward, lambda rng, shape: rng.random(shape, np.float32)])
def test_G12_the_bits_are_the_simulated_ones(kernel: Any, shape: Any, make: Any) -> None:
    m, k, n = shape
    rng = np.random.default_rng(m + k + n)
    a, b = make(rng, (m, k)), make(rng, (k, n))
    here, there = product(a, b, kernel, "cpu"), product(a, b, kernel, "cuda:0")
    np.testing.assert_array_equal(here.view(np.uint32), there.view(np.uint32))


sizes = st.integers(1, 70)


@settings(max_examples=200, deadline=None)
@given(m=sizes, k=sizes, n=sizes, seed=st.integers(0, 1 << 30))
def test_G12_random_shapes_have_the_simulated_bits(m: int, k: int, n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = awkward(rng, (m, k)), awkward(rng, (k, n))
    here, there = (product(a, b, guide.Muld_any, where) for where in ("cpu", "cuda:0"))
    np.testing.assert_array_equal(here.view(np.uint32), there.view(np.uint32))


@pytest.mark.parametrize(
    "shape", [(4, 4, 4), (5, 7, 3), (17, 33, 15), (3, 40, 50), (1, 1, 1), (1000, 1000, 1000)]
)
def test_A1_A2_sizes_that_are_no_multiples_of_the_tile(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    rng = np.random.default_rng(1)
    a = rng.integers(-3, 3, (m, k), endpoint=True).astype(np.float32)
    b = rng.integers(-3, 3, (k, n), endpoint=True).astype(np.float32)
    expected = a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_array_equal(product(a, b, guide.Muld_any, "cuda:0"), expected)


def test_buffers_may_be_flat_strided_read_only_or_overlap() -> None:
    rng = np.random.default_rng(2)
    a = rng.integers(-3, 3, (32, 16)).astype(np.float32)
    b = rng.integers(-3, 3, (16, 32)).astype(np.float32)
    a.flags.writeable = False
    expected = a @ b
    wide = np.full((32, 64), np.nan, np.float32)
    guide.Mul(a.reshape(-1), b.T.copy().T, 32, 16, 32, wide[:, ::2], device="cuda:0")
    np.testing.assert_array_equal(wide[:, ::2], expected)
    assert np.isnan(wide[:, 1::2]).all()
    square = rng.integers(-3, 3, (32, 32)).astype(np.float32)
    expected = square @ square
    guide.Mul(square, square, 32, 32, 32, square, device="cuda:0")
    np.testing.assert_array_equal(square, expected)


def test_a_trace_of_the_five_steps() -> None:
    rng = np.random.default_rng(3)
    a, b = rng.random((512, 256), np.float32), rng.random((256, 1024), np.float32)
    traced = guide.Traced("cuda:0")
    c = product(a, b, guide.Muld, traced)
    np.testing.assert_allclose(c, a @ b, rtol=1e-5)
    assert [name for name, _, _ in traced.steps][3:7] == [
        "copy in",
        "copy in",
        "launch",
        "copy out",
    ]


def test_a_kernel_that_is_not_compiled_is_refused_and_memory_comes_back() -> None:
    @cuda.jit
    def other(A: Any, B: Any, wA: int, wB: int, C: Any) -> None:
        C[cuda.threadIdx.y, cuda.threadIdx.x] = 0

    a = np.ones((16, 16), np.float32)
    product(a, a, guide.Muld, "cuda:0")
    free = device.free_bytes(0)
    for _ in range(20):
        with pytest.raises(TilewiseError, match="is not compiled; Muld, Muld_any, naive are"):
            product(a, a, other, "cuda:0")
    np.testing.assert_array_equal(product(a, a, guide.Muld, "cuda:0"), 16)
    assert device.free_bytes(0) >= free
