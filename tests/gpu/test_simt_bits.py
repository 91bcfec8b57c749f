"""The simulated GPU against a real one: random kernels compiled by numba-cuda, bit for bit."""

from __future__ import annotations

import types
import warnings
from typing import Any

import numpy as np
import pytest

from tests.simt import test_contraction as contraction
from tests.simt.generated import arguments, bits, compiled, kernel_source
from tilewise import simt

pytestmark = pytest.mark.gpu

GRID, BLOCK = 2, 32


@pytest.fixture
def numba_cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    # Names that numba-cuda 0.30 asks for and NumPy 2.5 no longer has.
    for old, new in (("row_stack", "vstack"), ("in1d", "isin"), ("trapz", "trapezoid")):
        if not hasattr(np, old):
            monkeypatch.setattr(np, old, getattr(np, new), raising=False)
    return pytest.importorskip("numba.cuda", reason="numba-cuda compiles the kernels")


def on_the_gpu(numba_cuda: Any, kernel: Any, grid: int, block: int, *given: Any) -> None:
    """Run a kernel compiled by numba-cuda; arrays are changed in place."""
    function = types.FunctionType(
        kernel.__code__, {**kernel.__globals__, "cuda": numba_cuda}, kernel.__name__
    )
    held = [numba_cuda.to_device(a) if isinstance(a, np.ndarray) else a for a in given]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        numba_cuda.jit(function)[grid, block](*held)
    for array, there in zip(given, held, strict=True):
        if isinstance(array, np.ndarray):
            there.copy_to_host(array)


@pytest.mark.parametrize("kernel", contraction.CASES, ids=lambda kernel: kernel.__name__)
def test_products_are_fused_as_compiled(numba_cuda: Any, kernel: Any) -> None:
    a, b, c, d = contraction.inputs()
    here, there = np.full((2, len(a)), np.nan, np.float32)
    simt.launch(kernel, 2, 200, a, b, c, d.copy(), here)
    on_the_gpu(numba_cuda, kernel, 2, 200, a, b, c, d.copy(), there)
    np.testing.assert_array_equal(here, there)


@pytest.mark.parametrize("seed", range(100))
def test_random_kernels_have_the_gpus_bits(numba_cuda: Any, seed: int) -> None:
    source = kernel_source(seed, 1 + seed % 9, tame=True)
    here, there = (arguments(seed, GRID * BLOCK, tame=True) for _ in range(2))
    simt.launch(compiled(source), GRID, BLOCK, *here)
    for_numba = source.replace("from tilewise.simt import cuda", "from numba import cuda")
    on_the_gpu(numba_cuda, compiled(for_numba), GRID, BLOCK, *there)
    for ours, theirs in zip(here, there, strict=True):
        if isinstance(ours, np.ndarray):
            np.testing.assert_array_equal(bits(ours), bits(theirs), err_msg=source)
