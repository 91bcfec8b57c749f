"""Arrays of which some are on the GPU and others in host memory: bits, order, memory, places."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from benchmarks.host import normal
from tests.gpu.support import EXACT, INEXACT, PoolHigh, download, in_memory, random, upload
from tests.support import small_integers, within_bound
from tilewise import _streamed
from tilewise._memory import parse_budget
from tilewise.errors import BudgetError, CheckError, DeviceError, OptionError
from tilewise.runtime import pinned
from tilewise.runtime.memory import pool, workspace

pytestmark = pytest.mark.gpu

PLACES = [x for x in itertools.product("HD", "HD", "-HD") if len({*x} - {"-"}) == 2]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(1811)


@pytest.fixture(params=["as they are", "cut"])
def way(request: pytest.FixtureRequest) -> str:
    """Copied whole, as products of this size are, and in panels."""
    if request.param == "cut":
        request.getfixturevalue("cuts_everything")
    return str(request.param)


def multiplied(a: Any, b: Any, places: Any, **options: Any) -> Any:
    """Return the product of arrays that are put there, as a NumPy array."""
    x, y = (upload(z) if place == "D" else z for z, place in zip((a, b), places, strict=False))
    if places[2] == "-":
        got = tw.matmul(x, y, **options)
        assert type(got) is np.ndarray or not got.shape
        return got
    made = tw.plan(a, b, dtype=options.get("dtype"), devices="cpu")
    out = np.empty(made.shape, made.dtype)
    out.view(np.uint8)[...] = 0xFF
    target = upload(out) if places[2] == "D" else out
    assert tw.matmul(x, y, out=target, **options) is target
    return download(target) if places[2] == "D" else out


@pytest.mark.parametrize("places", list(itertools.product("HD", "HD", "HD")), ids="".join)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_D8_every_mix_of_places(rng: Any, way: str, dtype: str, places: Any) -> None:
    a, b = random(rng, (1000, 1000), dtype), random(rng, (1000, 100), dtype)
    options = {"devices": "cuda:0"} if places == ("H", "H", "H") else {}
    got = multiplied(a, b, places, **options)
    assert within_bound(got, a, b, 2.0 ** -(24 if dtype == "float32" else 53))
    assert got.tobytes() == in_memory(a, b).tobytes()


@pytest.mark.usefixtures("cuts_everything")
def test_D11_a_larger_operand_streams_past_one_on_the_device(rng: Any) -> None:
    """Of a budget, the array on the device takes three fifths, and the one on the host twice."""
    import cupy

    budget, k = 1 << 30, 16384
    a = normal(budget * 3 // 5 // 4 // k, k, seed=1)
    b = normal(k, 2 * budget // 4 // k, seed=2)
    x = cupy.asarray(a)
    expected = cupy.empty((len(a), b.shape[1]), np.float32)
    tw.matmul(x, cupy.asarray(b), out=expected)
    expected = expected.get()
    cupy.get_default_memory_pool().free_all_blocks()
    for memory in (budget, budget * 2 // 5):  # what tilewise takes, and what there is beside a
        out = np.full(expected.shape, np.nan, np.float32)
        plan = tw.plan(x, b, out=out, memory=memory)
        (part,) = plan.how.parts
        assert part.schedule.read_bytes == b.nbytes
        pool(0).trim()
        high = PoolHigh()
        plan(x, b, out=out)
        assert high.used_bytes() <= memory
        assert high.held_bytes() <= 1.05 * memory + 100e6
        assert out.tobytes() == expected.tobytes()
    columns = rng.choice(b.shape[1], 16, replace=False)
    assert within_bound(out[:, columns], a, b[:, columns])
    pinned.release()
    pool(0).trim()


@pytest.mark.usefixtures("cuts_everything")
@pytest.mark.parametrize("dtype", [*INEXACT, *EXACT], ids=str)
def test_bits_are_those_of_device_operands(rng: Any, dtype: Any) -> None:
    a, b = random(rng, (700, 520), dtype), random(rng, (520, 900), dtype)
    expected = in_memory(a, b)
    for places in PLACES:
        for memory in (4 << 20, 20 << 20):
            got = multiplied(a, b, places, memory=memory * max(a.itemsize, 2))
            assert got.tobytes() == expected.tobytes(), (places, memory)


@pytest.mark.parametrize("precision", [None, "tf32", "ieee"])
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_bits_where_an_operand_in_place_is_split_once(
    rng: Any, cuts_everything: None, dtype: Any, precision: Any
) -> None:
    m, k, n = 2000, 1000, 1800
    a, b = random(rng, (m, k), dtype), random(rng, (k, n), dtype)
    for x, size in ((a, m), (b.T, n)):
        rows = rng.choice(size, 30, replace=False)
        x[rows[:10], 500] = np.nan
        x[rows[10:20], 999] = 1e-30
        x[rows[20:]] *= np.float32(1e-25)
    expected = in_memory(a, b, precision=precision)
    for places, memory in itertools.product(PLACES, (None, "40MiB", "60MiB")):
        got = multiplied(a, b, places, memory=memory, precision=precision)
        assert got.tobytes() == expected.tobytes(), (places, memory)


def layouts(x: Any, rng: Any) -> Any:
    """Return the same matrix as it may lie in memory."""
    inside = np.full((x.shape[0] + 3, x.shape[1] + 5), 9, x.dtype)[2:-1, 3:-2]
    inside[...] = x
    stepped = np.full((2 * x.shape[0], 3 * x.shape[1]), 9, x.dtype)[::2, ::3]
    stepped[...] = x
    ways = (x, np.asfortranarray(x), x[::-1, ::-1].copy()[::-1, ::-1], inside, stepped)
    return ways[rng.integers(len(ways))]


@pytest.mark.parametrize("dtype", ["float16", "float32", "int8", "float64"])
def test_layouts_batches_and_vectors(rng: Any, way: str, dtype: str) -> None:
    shapes = (
        ((130, 90), (90, 150)),
        ((256, 128), (128, 384)),
        ((5, 40, 64), (5, 64, 32)),
        ((5, 40, 25), (25, 35)),
        ((3, 1, 30, 25), (4, 25, 35)),
        ((64,), (6, 64, 35)),
        ((6, 30, 25), (25,)),
        ((900,), (900, 70)),
        ((30, 0), (0, 20)),
        ((0, 30), (30, 20)),
    )
    for (a_shape, b_shape), places in itertools.product(shapes, PLACES):
        a, b = small_integers(rng, a_shape, dtype), small_integers(rng, b_shape, dtype)
        x, y = (layouts(z, rng) if z.ndim == 2 and z.size else z for z in (a, b))
        budget = None if a.size == 0 else rng.choice(["600KiB", "2MiB", "64MiB"])
        expected = in_memory(x, y) if a.size else np.matmul(a, b)
        got = multiplied(x, y, places, memory=budget)
        exact = np.matmul(a.astype("f8"), b.astype("f8"))
        wrapped = exact.astype("i8").astype(dtype)
        assert (got == wrapped).all(), (a_shape, b_shape, places)
        assert got.tobytes() == expected.tobytes()


@pytest.mark.usefixtures("cuts_everything")
def test_a_result_in_the_device_lies_as_it_is_asked_for(rng: Any) -> None:
    import cupy

    a, b = small_integers(rng, (300, 200), "float32"), small_integers(rng, (200, 260), "float32")
    for make in (
        lambda: cupy.full((300, 260), 9, np.float32),
        lambda: cupy.full((260, 300), 9, np.float32).T,
        lambda: cupy.full((303, 265), 9, np.float32)[2:-1, 3:-2],
        lambda: cupy.full((600, 520), 9, np.float32)[::2, ::2],
        lambda: cupy.full((300, 260), 9, np.float32)[::-1, ::-1],
    ):
        for x, memory in itertools.product((a, cupy.asarray(a)), ("600KiB", None)):
            out = make()
            assert tw.matmul(x, b, out=out, memory=memory) is out
            assert (out.get() == a @ b).all()
            base = out if out.base is None else out.base
            if base.size > out.size:
                assert int((base == 9).sum()) >= base.size - out.size


def test_F9_what_is_before_on_the_library_s_stream_is_waited_for(way: str) -> None:
    import cupy
    import torch

    b = np.random.default_rng(3).standard_normal((900, 800), np.float32)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for seed in range(4):
            torch.cuda._sleep(2**26)
            a = torch.full((700, 900), float(seed + 1), device="cuda")
            assert np.allclose(tw.matmul(a, b), (seed + 1) * b.sum(0, dtype=float), atol=1e-2)
            torch.cuda._sleep(2**26)
            out = torch.zeros((700, 800), device="cuda")
            torch.cuda._sleep(2**26)
            out.fill_(7)  # comes before the product, not after
            tw.matmul(np.ones((700, 900), np.float32), b, out=out)
            assert np.allclose(out.cpu().numpy(), b.sum(0, dtype=float), atol=1e-2)
    with cupy.cuda.Stream(non_blocking=True) as other:
        torch.cuda._sleep(2**20)
        x = cupy.full((700, 900), 2, np.float32)
        assert np.allclose(tw.matmul(x, b), 2 * b.sum(0, dtype=float), atol=1e-2)
        x.fill(3)
        got = tw.matmul(x, b, stream=other)
        assert np.allclose(got, 3 * b.sum(0, dtype=float), atol=1e-2)


def test_F7_a_foreign_array_is_ordered_by_dlpack(way: str) -> None:
    """What only hands itself over by DLPack, as JAX's arrays do."""
    import torch

    class Foreign:
        def __init__(self, x: Any) -> None:
            self.x, self.streams = x, []

        shape = property(lambda self: tuple(self.x.shape))
        dtype = property(lambda self: np.dtype("float32"))

        def __dlpack_device__(self) -> Any:
            return self.x.__dlpack_device__()

        def __dlpack__(self, *given: Any, **options: Any) -> Any:
            self.streams.append(options.get("stream"))
            return self.x.__dlpack__(*given, **options)

    b = np.random.default_rng(3).standard_normal((900, 800), np.float32)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(2**27)
        foreign = Foreign(torch.full((700, 900), 5.0, device="cuda"))
        got = tw.matmul(foreign, b)
    assert np.allclose(got, 5 * b.sum(0, dtype=float), atol=1e-2)
    assert foreign.streams[-1] is not None


def test_F7_jax_arrays_beside_host_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = pytest.importorskip("jax", reason="jax is not installed")
    if jax.default_backend() != "gpu":
        pytest.skip("jax sees no GPU")
    b = np.ones((3000, 2000), np.float32)
    for _ in range(5):
        a = jax.numpy.ones((2500, 3000), jax.numpy.float32)
        for _ in range(20):
            a = (a @ jax.numpy.ones((3000, 3000), jax.numpy.float32)) / 3000 + 1
        got = tw.matmul(a, b)
        assert type(got) is np.ndarray
        assert (got == np.asarray(a)[:, :1].astype(float) * 3000).all()


def test_a_result_over_an_operand(rng: Any, way: str) -> None:
    import cupy

    n = 400
    a, b = small_integers(rng, (n, n), "float32"), small_integers(rng, (n, n), "float32")
    for memory in (None, "4MiB"):
        x = cupy.asarray(a)
        assert (tw.matmul(x, b, out=x, memory=memory).get() == a @ b).all()
        y = cupy.asarray(b)
        assert (tw.matmul(a, y, out=y, memory=memory).get() == a @ b).all()
        z = a.copy()
        assert (tw.matmul(z, cupy.asarray(b), out=z, memory=memory) == a @ b).all()
        raw = cupy.zeros(n * n + n, np.float32)
        raw[: n * n] = cupy.asarray(a).ravel()
        out = raw[n:].reshape(n, n)
        tw.matmul(raw[: n * n].reshape(n, n), b, out=out, memory=memory)
        assert (out.get() == a @ b).all()


def test_memory_that_the_host_and_the_gpu_both_see(rng: Any, way: str) -> None:
    """Pinned memory has one address for both: an out on one side is an operand on the other."""
    import cupy

    n = 700
    a, b = small_integers(rng, (n, n), "float32"), small_integers(rng, (n, n), "float32")
    mapped = cupy.cuda.alloc_pinned_memory(a.nbytes)
    host = np.frombuffer(mapped, np.float32, n * n).reshape(n, n)
    memory = cupy.cuda.UnownedMemory(mapped.ptr, a.nbytes, mapped, 0)
    there = cupy.ndarray((n, n), np.float32, cupy.cuda.MemoryPointer(memory, 0))
    for left, right, out in (
        (there, b, host),
        (b, there, host),
        (host, b, there),
        (b, host, there),
        (host, cupy.asarray(b), there),
    ):
        host[...] = a
        expected = b @ a if left is b else a @ b
        tw.matmul(left, right, out=out)
        assert (host == expected).all()


def test_verified_results(rng: Any, way: str, monkeypatch: Any) -> None:
    a, b = random(rng, (300, 200), "float32"), random(rng, (200, 100), "float32")
    for places in PLACES:
        multiplied(a, b, places, verify=True)
    monkeypatch.setattr("tilewise.numerics.check.check", lambda *x, **y: False)
    for places in PLACES:
        with pytest.raises(CheckError):
            multiplied(a, b, places, verify=True)


def test_D2_a_product_of_device_operands_goes_to_a_file(rng: Any, tmp_path: Path) -> None:
    import cupy

    x = random(rng, (20_000, 58), "float32")
    there = cupy.asarray(x)
    out = np.memmap(tmp_path / "gram.bin", "f4", "w+", shape=(20_000, 20_000))
    pool(0).trim()
    high = PoolHigh()
    tw.matmul(there, there.T, out=out, memory="128MiB")
    assert high.used_bytes() <= parse_budget("128MiB")
    rows = slice(4000, 4100)
    assert within_bound(np.asarray(out[rows]), x[rows], x.T)
    assert np.asarray(out[rows]).tobytes() == in_memory(x[rows], x.T).tobytes()


def test_D2_no_room_for_a_result_in_the_device_is_said_with_the_way_out() -> None:
    import cupy
    import torch

    x = cupy.ones((203_743, 58), np.float32)
    with pytest.raises(BudgetError, match=r"154\.6\d GiB.*np\.memmap"):
        tw.matmul(x, x.T)
    taken = cupy.empty(70 << 30, np.uint8)
    x = cupy.ones((150_000, 58), np.float32)
    for there in (x, torch.as_tensor(x, device="cuda")):
        with pytest.raises(BudgetError, match=r"83\.8\d GiB.*cuda:0 has no room.*np\.memmap"):
            tw.matmul(there, there.T)
    del taken, there
    cupy.get_default_memory_pool().free_all_blocks()
    assert float(tw.matmul(x[:100], x[:100].T)[0, 0]) == 58


def test_the_kind_of_a_result_is_the_host_operand_s(rng: Any) -> None:
    import cupy
    import torch

    a, b = small_integers(rng, (30, 20), "float32"), small_integers(rng, (20, 10), "float32")
    for there in (cupy.asarray(a), torch.from_numpy(a).cuda()):
        assert type(tw.matmul(there, b)) is np.ndarray
        got = tw.matmul(there, torch.from_numpy(b))
        assert isinstance(got, torch.Tensor)
        assert got.device.type == "cpu"
        assert (got.numpy() == a @ b).all()
    half = torch.from_numpy(a).bfloat16().cuda()
    assert tw.matmul(half, torch.from_numpy(b).bfloat16()).dtype is torch.bfloat16
    lazy = torch.from_numpy(a + 1j * a).cuda().conj()
    assert (tw.matmul(lazy, b) == np.conj(a + 1j * a) @ b).all()
    with pytest.raises(tw.TilewiseError, match="detach"):
        tw.matmul(torch.ones((3, 3), device="cuda", requires_grad=True), np.ones((3, 3)))


def test_places_that_are_refused(rng: Any) -> None:
    import cupy

    x, b = cupy.ones((30, 30), np.float32), np.ones((30, 30), np.float32)
    with pytest.raises(DeviceError, match="operands are on cuda:0"):
        tw.matmul(x, b, devices="cpu")
    with pytest.raises(OptionError, match="where they are"):
        tw.matmul(x, b, devices=["cuda:0", "cuda:1"])
    with pytest.raises(DeviceError, match="one place"):
        tw.gemm(x, b, cupy.zeros((30, 30), np.float32))
    plan = tw.plan(x, b)
    assert (plan(x, b) == 30).all()
    for given in ((x, x), (b, b), (b, x)):
        with pytest.raises(tw.TilewiseError, match="make a plan"):
            plan(*given)


def test_a_budget_takes_back_the_workspace_of_products_before() -> None:
    import cupy

    workspace(0).release()  # of other streams, which a budget does not reach
    x = cupy.ones((4096, 4096), np.float32)
    tw.matmul(x, x, stream=cupy.cuda.Stream.null)
    assert workspace(0).held_bytes > 64 << 20
    small = np.ones((200, 300), np.float32)
    assert (tw.matmul(x[:100, :200], small, memory="16MiB") == 200).all()
    cupy.cuda.Device().synchronize()
    assert workspace(0).held_bytes <= 16 << 20


def test_groups_and_memory_that_is_given_back(rng: Any) -> None:
    import cupy

    a = [small_integers(rng, (400, 300), "float32") for _ in range(4)]
    b = [small_integers(rng, (300, 200), "float32") for _ in range(4)]
    left = [cupy.asarray(a[0]), a[1], a[2], cupy.asarray(a[3])]
    right = [b[0], cupy.asarray(b[1]), b[2], cupy.asarray(b[3])]
    for _ in range(3):
        got = tw.matmul(left, right, memory="64MiB")
        for x, y, c in zip(a, b, got, strict=True):
            assert ((c if isinstance(c, np.ndarray) else c.get()) == x @ y).all()
    assert type(got[3]) is cupy.ndarray
    big, wide = cupy.ones((3000, 3000), np.float32), np.ones((3000, 5000), np.float32)
    tw.matmul(big, wide)
    cupy.get_default_memory_pool().free_all_blocks()
    pinned.release()
    pool(0).trim()
    before = cupy.cuda.runtime.memGetInfo()[0]
    for _ in range(10):
        tw.matmul(big, wide, memory="200MiB")
    pinned.release()
    pool(0).trim()
    assert cupy.cuda.runtime.memGetInfo()[0] >= before - (4 << 20)
    assert isinstance(tw.plan(big, wide).how, _streamed.Streams)
