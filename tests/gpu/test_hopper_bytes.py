"""Hopper's kernels for int8 and float8 at their own edges, and one call close upon another.

``test_portable`` computes every kind of product by these kernels too, as by all others.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.conftest import missing
from tests.gpu.test_portable import check, run, ways
from tests.kernels.products import full_range, named, placed, poison, whole
from tilewise import kernels
from tilewise.errors import DeviceError
from tilewise.runtime import device

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def on_hopper(request: pytest.FixtureRequest) -> None:
    if device.facts(0).capability != (9, 0):
        missing(request.config, "compute capability 9.0 is needed")
    try:
        kernels.manifest("portable")
    except DeviceError as error:
        missing(request.config, str(error))


@pytest.mark.parametrize("orders", ["CC", "CF", "FC", "FF"])
def test_A5_int8_around_the_sides_of_tiles(orders: str) -> None:
    rng = np.random.default_rng(5)
    sizes = ((1, 1, 1), (63, 4, 127), (65, 127, 128), (191, 129, 129), (193, 128, 16))
    for number, (m, n, k) in enumerate((*sizes, (385, 260, 1000), (192, 516, 2050))):
        margin = (16, 8, 3)[number % 3]
        a, _ = placed(full_range(rng, (m, k), "int8"), orders[0], margin)
        b, _ = placed(full_range(rng, (k, n), "int8"), orders[1], margin)
        for result in ("int32", ("int8", "int64")[number % 2]):
            check(a, b, result, order="CF"[number % 2], margin=margin)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_has_the_same_bits_by_every_kernel(dtype: str) -> None:
    rng = np.random.default_rng(8)
    for m, n, k in ((191, 132, 127), (65, 260, 1000), (300, 128, 16400)):
        a = rng.standard_normal((m, k)).astype(named(dtype))
        b = np.asfortranarray(rng.standard_normal((k, n)).astype(named(dtype)))
        c, first = np.empty((m, n), np.float32), None
        for way in ways(a, b, c):
            poison(c)
            run(way, a, b, c)
            first = c.copy() if first is None else first
            np.testing.assert_array_equal(c.view(np.uint32), first.view(np.uint32), str(way.why))
        exact = a.astype(np.float64) @ b.astype(np.float64)
        size = abs(a.astype(np.float64)) @ abs(b.astype(np.float64))
        assert (abs(c - exact) <= 2.0**-10 * size).all()


def test_B6_extremes_of_int8_over_a_long_k_wrap() -> None:
    for k in (131_071, 131_072, 131_073, 300_001):
        a = np.full((3, k), -128, np.int8)
        b = np.asfortranarray(np.full((k, 5), -128, np.int8))
        for result in ("int32", "int64"):
            check(a, b, result)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_batches_share_matrices(dtype: str) -> None:
    rng = np.random.default_rng(23)
    for a_batch, b_batch in itertools.product([(2, 3), (2, 1), (1, 3), (1, 1)], repeat=2):
        a, _ = placed(whole(rng, (*a_batch, 65, 32), dtype), "C", 16)
        b, _ = placed(whole(rng, (*b_batch, 32, 132), dtype), "F", 16)
        check(a, b, "int32" if dtype == "int8" else None, margin=4)


@pytest.mark.parametrize(
    ("m", "n", "k"), [(1000, 1000, 1000), (333, 516, 1001), (128, 128, 20_000)]
)
def test_E9_calls_in_a_row_do_not_meet_in_the_workspace(m: int, n: int, k: int) -> None:
    """A copy starts while the launch before it still runs, and the workspace is shared."""
    import torch

    rng = np.random.default_rng(9)
    products: list[tuple[Any, Any, Any, Any]] = []
    for _ in range(3):
        a, b = full_range(rng, (m, k), "int8"), full_range(rng, (k, n), "int8")
        exact = torch.from_numpy((a.astype(np.float64) @ b.astype(np.float64)).astype("i4")).cuda()
        out = torch.empty(m, n, dtype=torch.int32, device="cuda")
        products.append((torch.from_numpy(a).cuda(), torch.from_numpy(b).cuda(), out, exact))
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(100):
        for a, b, out, _ in products:
            out.fill_(-1)
            tw.matmul(a, b, out=out, dtype=np.int32)
        for *_, out, exact in products:
            wrong += (out != exact).sum()
    assert int(wrong) == 0
