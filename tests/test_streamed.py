"""Host operands on GPUs made of NumPy: everything but the kernels, from call to result."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilewise as tw
from benchmarks import timeline
from tests.outofcore.fake_device import FakeCuda
from tests.outofcore.fake_gpus import bindings, fake_gpus
from tests.support import goes_on, planned, poisoned, small_integers
from tests.test_gpu_plan import gpu
from tilewise import _api, _devices, _recipe, _streamed
from tilewise._operand import Operand
from tilewise.errors import BudgetError, DeviceError, OptionError
from tilewise.outofcore import device_pipeline
from tilewise.outofcore.device_schedule import Launch
from tilewise.runtime import device, memory, pinned, streams, transfers

BF16 = np.dtype(ml_dtypes.bfloat16)
TYPES = ("float32", "float64", "float16", BF16, "int8", "uint16", "int64", "complex64", "bool")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(2026)


@pytest.fixture
def cuda(monkeypatch: Any) -> Iterator[FakeCuda]:
    with fake_gpus(monkeypatch) as fake:
        yield fake


def exact(a: Any, b: Any) -> Any:
    if a.dtype == bool:
        return np.matmul(a, b)
    wide = complex if a.dtype.kind == "c" else np.int64 if a.dtype.kind in "iu" else float
    return np.matmul(a.astype(wide), b.astype(wide))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_type_in_budgets_from_one_tile_up(cuda: Any, rng: Any, dtype: Any) -> None:
    a, b = small_integers(rng, (300, 210), dtype), small_integers(rng, (210, 270), dtype)
    for item_budget in (200 << 10, 300 << 10, 8 << 20):
        out = poisoned((300, 270), dtype)
        tw.matmul(a, b, out=out, devices="cuda:0", memory=item_budget * a.itemsize)
        assert (out == exact(a, b).astype(dtype)).all()
    assert (tw.matmul(a, b, devices="cuda:0") == exact(a, b).astype(dtype)).all()


@pytest.mark.parametrize("dtype", ["float64", "int32"])
def test_k_in_pieces(cuda: Any, rng: Any, dtype: Any) -> None:
    a, b = small_integers(rng, (40, 20_000), dtype), small_integers(rng, (20_000, 30), dtype)
    out = poisoned((40, 30), dtype)
    plan = tw.plan(a, b, out=out, devices="cuda:0", memory=2 << 20)
    assert plan.how.parts[0].schedule.pieces > 1
    plan(a, b, out=out)
    assert (out == exact(a, b)).all()


@pytest.mark.parametrize("order", ["C", "F"])
def test_an_operand_that_stays_is_split_once(cuda: Any, rng: Any, order: Any) -> None:
    a, b = (np.asarray(small_integers(rng, x, "f4"), order=order) for x in ((700, 300), (300, 650)))
    seen = set()
    for budget in (800 << 10, 900 << 10, 1200 << 10, 1600 << 10):
        out = poisoned((700, 650), "f4", order)
        given: dict[str, Any] = {"devices": "cuda:0", "memory": budget, "precision": "tf32"}
        plan = tw.plan(a, b, out=out, **given)
        seen.add(plan.how.parts[0].schedule.order)
        assert goes_on(plan) > 3 / 4
        plan(a, b, out=out)
        assert (out == exact(a, b)).all()
    assert seen == {"rows", "columns"}


def test_layouts_of_operands_and_result(cuda: Any, rng: Any) -> None:
    m, k, n = 200, 150, 230
    a, b = small_integers(rng, (m, k), "float32"), small_integers(rng, (k, n), "float32")
    expected = a @ b
    raw = np.zeros(b.nbytes + 1, np.uint8)
    unaligned = np.ndarray(b.shape, b.dtype, raw, 1)
    unaligned[...] = b
    lefts = (a, np.asfortranarray(a), a[::-1, ::-1].copy()[::-1, ::-1], a.astype(">f4"))
    rights = (b, np.asfortranarray(b), np.repeat(b, 2, 1)[:, ::2], unaligned)
    for x, y in itertools.product(lefts, rights):
        outs = (
            poisoned((m, n), "f4"),
            poisoned((m, n), "f4", "F"),
            poisoned((m + 2, n + 2), "f4")[1:-1, 1:-1],
            poisoned((m, n), ">f4")[::-1],
        )
        for out in outs:
            assert tw.matmul(x, y, out=out, devices="cuda:0", memory="300KiB") is out
            assert (out == expected).all()
            assert out.base is None or np.isnan(out.base).sum() == out.base.size - out.size


@pytest.mark.parametrize(
    ("a_shape", "b_shape"),
    [
        ((20, 30, 25), (20, 25, 35)),
        ((20, 30, 25), (25, 35)),
        ((3, 1, 30, 25), (4, 25, 35)),
        ((3, 4, 30, 25), (3, 1, 25, 35)),
        ((130, 25), (6, 25, 300)),
        ((25,), (6, 25, 35)),
        ((6, 30, 25), (25,)),
        ((9000,), (9000,)),
        ((500, 3, 3), (500, 3, 1)),
        ((1, 1, 30, 25), (25, 35)),
        ((4, 1, 25), (25, 35)),
        ((4, 30, 25), (1, 25, 35)),
    ],
    ids=str,
)
def test_batches_and_vectors(cuda: Any, rng: Any, a_shape: Any, b_shape: Any) -> None:
    a, b = small_integers(rng, a_shape, "float32"), small_integers(rng, b_shape, "float32")
    expected = np.matmul(a, b)
    for budget in (80 << 10, 600 << 10, None):
        got = tw.matmul(a, b, devices="cuda:0")
        assert got.shape == expected.shape
        assert (got == expected).all()
        out = poisoned(expected.shape, "float32") if expected.shape else None
        if out is not None:
            tw.matmul(a, b, out=out, devices="cuda:0", memory=budget)
            assert (out == expected).all()


@pytest.mark.parametrize("dtype", ["float16", "float64", "int32", "complex64"])
def test_foreign_byte_order_is_turned_on_the_way(cuda: Any, rng: Any, dtype: Any) -> None:
    a, b = small_integers(rng, (40, 30), dtype), small_integers(rng, (30, 50), dtype)
    foreign = np.dtype(dtype).newbyteorder()
    for x, y in ((a.astype(foreign), b), (a, b.astype(foreign)), (a[::-1].astype(foreign), b)):
        expected = exact(x.astype(dtype), y.astype(dtype))
        assert (tw.matmul(x, y, devices="cuda:0") == expected).all()
    out = np.zeros((40, 50), foreign)
    tw.matmul(a, b, out=out, devices="cuda:0")
    assert (out == exact(a, b)).all()


def test_operands_of_odd_sizes_are_aligned_where_their_kernels_are_told_so(
    cuda: Any, rng: Any
) -> None:
    for m, k, n in ((33, 7, 45), (45, 51, 9), (9, 300, 77), (130, 3, 131), (257, 129, 259)):
        a, b = small_integers(rng, (m, k), "float16"), small_integers(rng, (k, n), "float16")
        for x, y in itertools.product((a, np.asfortranarray(a)), (b, np.asfortranarray(b))):
            for out in (poisoned((m, n), "f2"), poisoned((m, n), "f2", "F")):
                tw.matmul(x, y, out=out, devices="cuda:0")
                assert (out == a @ b).all()


def test_a_batch_goes_into_matrices_that_lie_apart_and_no_copy_is_made(cuda: Any, rng: Any) -> None:
    a, b = small_integers(rng, (5, 300, 25), "float32"), small_integers(rng, (25, 350), "float32")
    out = poisoned((5, 400, 350), "float32")[:, :300]
    plan = tw.plan(a, b, out=out, devices="cuda:0", memory="4MiB")
    assert not plan.how.is_folded
    assert tw.plan(a, b, out=np.empty(out.shape, "f4"), devices="cuda:0").how.is_folded
    plan(a, b, out=out)
    assert (out == a @ b).all()
    assert np.isnan(out.base[:, 300:]).all()
    anew = tw.plan(a, b, devices="cuda:0")
    assert anew.how.is_folded
    out[...] = np.nan
    anew(a, b, out=out)  # not planned for such a place: it goes through a copy
    assert (out == a @ b).all()


def test_what_is_held_on_the_host_and_each_device_is_counted(cuda: Any, rng: Any) -> None:
    a = small_integers(rng, (700, 700), "float32")
    free = tw.plan(a, a, out=np.empty_like(a), devices="cuda:0")
    apart = tw.plan(a, a, out=a, devices="cuda:0")
    assert apart.held_bytes == free.held_bytes + a.nbytes
    checked = tw.plan(a, a, out=np.empty_like(a), devices="cuda:0", verify=True)
    assert checked.held_bytes == free.held_bytes + a.nbytes + checked.verify_bytes
    with pytest.raises(BudgetError, match="do without verify="):
        tw.plan(a, a, devices="cuda:0", verify=True, memory="8MiB")
    expected = a @ a
    with pytest.raises(BudgetError, match="shares no memory with an operand"):
        tw.matmul(a, a, out=a, devices="cuda:0", memory=a.nbytes + 1000)
    tw.matmul(a, a, out=a, devices="cuda:0")
    assert (a == expected).all()


def test_what_repeats_is_stored_and_moved_once(cuda: Any, rng: Any) -> None:
    b = small_integers(rng, (200, 150), "float32")
    row, column = small_integers(rng, (1, 200), "float32"), small_integers(rng, (90, 1), "float32")
    for a, nbytes in (
        (np.broadcast_to(row, (90, 200)), 4 * 200),
        (np.broadcast_to(column, (90, 200)), 4 * 90),
    ):
        plan = tw.plan(a, b, devices="cuda:0")
        assert plan.how.parts[0].schedule.read_bytes == nbytes + b.nbytes
        assert (plan(a, b) == a @ b).all()
    x, stack = small_integers(rng, (4, 60, 200), "float32"), np.broadcast_to(b, (4, 200, 150))
    plan = tw.plan(x, stack, devices="cuda:0")
    assert plan.how.parts[0].schedule.read_bytes == x.nbytes + b.nbytes
    assert (plan(x, stack) == x @ b).all()


def test_a_product_with_its_own_transpose_is_read_once(cuda: Any, rng: Any) -> None:
    a = small_integers(rng, (400, 90), "float32")
    for x in (a, np.asfortranarray(a)):
        plan = tw.plan(x, x.T, devices="cuda:0")
        assert plan.how.parts[0].schedule.read_bytes == x.nbytes
        assert (plan(x, x.T) == x @ x.T).all()
        with pytest.raises(OptionError, match="transpose of the same array"):
            plan(x, x.T.copy(order="K"))


@pytest.mark.parametrize("shape", [(1, 200, 300), (1, 1, 300, 200), (1, 1, 300), (1, 300, 1)])
def test_the_transpose_of_a_lone_matrix_of_a_batch(cuda: Any, rng: Any, shape: Any) -> None:
    a = small_integers(rng, shape, "float32")
    for x in (a, np.asfortranarray(a), a[..., ::-1]):
        y = x.swapaxes(-1, -2)
        assert (tw.matmul(x, y, devices="cuda:0") == exact(x, y)).all()


def test_the_same_bytes_in_another_order_are_another_matrix(cuda: Any, rng: Any) -> None:
    a = small_integers(rng, (200, 300), "int32")
    b = a.T.view(a.dtype.newbyteorder())
    assert (tw.matmul(a, b, devices="cuda:0") == a @ b.astype("int32")).all()


def test_pinned_memory_is_used_as_it_is(cuda: Any, rng: Any, monkeypatch: Any) -> None:
    a, b = small_integers(rng, (200, 150), "float32"), small_integers(rng, (150, 130), "float32")
    copied = []
    real = np.copyto
    monkeypatch.setattr(
        device_pipeline.np,
        "copyto",
        lambda to, source: (copied.append(to.nbytes), real(to, source)),
    )
    with pinned.Pinned(a.nbytes) as p, pinned.Pinned(4 * 200 * 130) as r:
        x = p.array[: a.nbytes].view("f4").reshape(a.shape)
        out = r.array.view("f4").reshape(200, 130)
        x[...], out[...] = a, np.nan
        tw.matmul(x, b, out=out, devices="cuda:0", memory="1MiB")
        assert (out == a @ b).all()
    assert sum(copied) == b.nbytes


def test_two_gpus_share_c(cuda: Any, rng: Any) -> None:
    for shapes in (((500, 90), (90, 70)), ((7, 90), (90, 700)), ((5, 80, 70), (5, 70, 60))):
        a, b = (small_integers(rng, shape, "float32") for shape in shapes)
        for devices in (["cuda:0", "cuda:1"], ["cuda:1", "cuda:0"], "cuda:1"):
            plan = tw.plan(a, b, devices=devices)
            assert plan.device == (devices if isinstance(devices, str) else ", ".join(devices))
            assert (plan(a, b) == np.matmul(a, b)).all()
        out = poisoned(np.matmul(a, b).shape, "float32")
        tw.matmul(a, b, out=out, devices=["cuda:0", "cuda:1"], memory="400KiB")
        assert (out == np.matmul(a, b)).all()


def test_devices_that_make_no_sense_are_refused(cuda: Any) -> None:
    x = np.ones((4, 4), "float32")
    for devices, message in (
        (["cuda:0", "cuda:0"], "names a device twice"),
        (["cpu", "cpu"], "names a device twice"),
        (["cuda", "cuda:0"], "names a device twice"),
        (["cpu", "cuda:0"], "the CPU does not share a product with a GPU"),
    ):
        with pytest.raises(OptionError, match=message):
            tw.matmul(x, x, devices=devices)
    with pytest.raises(DeviceError, match="'cuda:2' was asked for"):
        tw.matmul(x, x, devices=["cuda:0", "cuda:2"])
    with pytest.raises(OptionError, match="'gpu' is not .*'cuda:0'"):
        tw.matmul(x, x, devices="gpu")


def test_memory_that_is_gone_at_the_call_is_named_and_nothing_is_kept(cuda: Any, rng: Any) -> None:
    a = small_integers(rng, (600, 500), "float32")
    plan = tw.plan(a, a.T.copy(), devices="cuda:0")
    cuda.free_bytes[0] = 1 << 20
    with pytest.raises(BudgetError, match="cuda:0's part of the product needs"):
        plan(a, a.T.copy())
    assert not cuda.memory
    assert (tw.matmul(a, a.T.copy(), devices="cuda:0") == a @ a.T).all()  # plans for what is left
    cuda.free_bytes[0] += (1 << 30) - (1 << 20)
    assert (plan(a, a.T.copy()) == a @ a.T).all()


def test_what_is_kept_is_used_again_and_given_back_when_it_is_asked_for(
    cuda: Any, rng: Any
) -> None:
    a = small_integers(rng, (900, 800), "float32")
    b = small_integers(rng, (800, 700), "float32")
    whole = cuda.free_bytes[0]
    tw.matmul(a, b, devices="cuda:0")
    kept = memory.pool(0).kept_bytes
    assert kept == whole - cuda.free_bytes[0] > a.nbytes + b.nbytes
    tw.matmul(a, b, devices="cuda:0")
    assert whole - cuda.free_bytes[0] == kept
    budget = kept // 2
    out = poisoned((900, 700), "float32")
    tw.matmul(a, b, out=out, devices="cuda:0", memory=budget)
    assert (out == a @ b).all()
    assert whole - cuda.free_bytes[0] <= budget
    tw.matmul(a, b, devices="cuda:0")
    with device.current(0), memory.allocate(whole - kept // 2, 0, streams.DEFAULT):
        assert memory.pool(0).held_bytes == 0


def test_no_more_is_kept_than_an_eighth_of_a_device(cuda: Any, rng: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(memory, "_KEPT", 1 / 4096)
    a = small_integers(rng, (900, 800), "float32")
    tw.matmul(a, a.T.copy(), devices="cuda:0")
    assert memory.pool(0).kept_bytes <= (2 << 30) / 4096


def test_a_time_line_shows_every_thread_and_lane(cuda: Any, rng: Any) -> None:
    a, b = small_integers(rng, (900, 800), "float32"), small_integers(rng, (800, 700), "float32")
    plan = tw.plan(a, b, devices="cuda:0")
    with timeline.watched() as recorder:
        assert (plan(a, b) == a @ b).all()
    spans = recorder.spans
    of = {name: [span for span in spans if span.name == name] for name in ("gather", "scatter")}
    assert sum(span.nbytes for span in of["gather"]) == a.nbytes + b.nbytes
    assert sum(span.nbytes for span in of["scatter"]) == 900 * 700 * 4
    for lane, nbytes in (("in", a.nbytes + b.nbytes), ("out", 900 * 700 * 4)):
        assert sum(span.nbytes for span in spans if span.row == f"cuda:0 {lane}") == nbytes
    for row in {span.row for span in spans if span.row.startswith("thread")}:
        own = sorted(span[2:4] for span in spans if span.row == row)
        assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(own))
    took = max(span.stop for span in spans)
    lines = timeline.picture(spans, took).splitlines()
    assert [line[:16].strip() for line in lines[:3]] == [
        "cuda:0 compute",
        "cuda:0 in",
        "cuda:0 out",
    ]
    assert "scatter" in timeline.totals(spans)
    assert len(timeline.chrome(spans)) == len(spans)


def test_a_stream_that_cannot_be_made_leaves_none_behind(
    cuda: Any, rng: Any, monkeypatch: Any
) -> None:
    a, b = small_integers(rng, (300, 200), "float32"), small_integers(rng, (200, 250), "float32")
    real, calls = cuda.cuStreamCreate, itertools.count()

    def refuses(*given: Any) -> Any:
        none_left = bindings.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
        return none_left if next(calls) == 1 else real(*given)

    with monkeypatch.context() as patch:
        patch.setattr(cuda, "cuStreamCreate", refuses)
        with pytest.raises(DeviceError, match="making a stream failed"):
            tw.matmul(a, b, devices="cuda:0")
    assert list(cuda.streams) == [1]
    assert (tw.matmul(a, b, devices="cuda:0") == a @ b).all()


def test_too_small_a_budget_is_refused_with_numbers(cuda: Any) -> None:
    x = np.ones((40, 20_000), "float16")
    with pytest.raises(BudgetError, match="all of K = 20000 has to be there"):
        tw.matmul(x, x.T, devices="cuda:0", memory="200KiB")
    with pytest.raises(BudgetError, match=r"takes .* computed with at least .*np\.memmap"):
        tw.matmul(np.ones((900, 20)), np.ones((20, 900)), devices="cuda:0", memory="1MiB")


@pytest.mark.parametrize(
    ("method", "number"), [("copy_in", 1), ("copy_out", 1), ("copy_out", 3), ("copy_out", 8)]
)
def test_a_fault_names_its_place_and_the_next_product_works(
    cuda: Any, rng: Any, monkeypatch: Any, method: str, number: int
) -> None:
    a, b = small_integers(rng, (300, 200), "float32"), small_integers(rng, (200, 300), "float32")
    real: Callable[..., None] = getattr(transfers.Gpu, method)
    calls = itertools.count()

    def dies(*given: Any) -> None:
        is_cut = next(calls) == number
        time.sleep(0.05 if is_cut else 0.002)  # the other threads wait for what this one holds
        if is_cut:
            raise DeviceError("the bus is cut")
        real(*given)

    with monkeypatch.context() as patch:
        patch.setattr(transfers.Gpu, method, dies)
        with pytest.raises(DeviceError, match="the bus is cut") as caught:
            tw.matmul(a, b, devices="cuda:0", memory="700KiB")
    assert "cuda:0" in caught.value.__notes__[0]
    assert (tw.matmul(a, b, devices="cuda:0") == a @ b).all()


def test_verify_and_overlapping_results(cuda: Any, rng: Any) -> None:
    a, b = small_integers(rng, (300, 300), "float32"), small_integers(rng, (300, 300), "float32")
    expected = a @ b
    assert (tw.matmul(a, b, devices="cuda:0", verify=True) == expected).all()
    tw.matmul(a, b, out=a, devices="cuda:0")
    assert (a == expected).all()


def test_a_gpu_takes_what_nobody_placed_but_not_updates_in_place(
    cuda: Any, rng: Any, monkeypatch: Any
) -> None:
    a, b = small_integers(rng, (300, 200), "float32"), small_integers(rng, (200, 250), "float32")
    monkeypatch.setattr(_devices, "_OFFERED_WORK", 0)
    monkeypatch.setattr(_streamed, "_WORTH_IT", 1e9)
    assert tw.plan(a, b).device == "cuda:0"
    assert tw.plan(a, b, devices="cpu").device == "cpu"
    assert (tw.matmul(a, b) == a @ b).all()
    with monkeypatch.context() as patch:
        patch.setattr(_devices, "_OFFERED_WORK", 2 * 300 * 200 * 250)
        assert tw.plan(a, b).device == "cpu"
        for x, y in ((a, np.stack([b, b])), (np.stack([a, a]), b)):
            assert tw.plan(x, y).device == "cuda:0"
    c = np.ones((300, 250), "float32")
    tw.gemm(a, b, c, alpha=2, beta=3)
    assert (c == 2 * (a @ b) + 3).all()
    wide = a.astype(np.longdouble)
    assert tw.plan(wide, wide.T).device == "cpu"
    monkeypatch.setattr(_streamed, "_WORTH_IT", 0.0)
    _api._cached_plan.cache_clear()
    assert tw.plan(a, b).device == "cpu"


def machine(budget: int, **options: Any) -> _streamed.Machine:
    given: dict[str, Any] = {"cores": 16, "is_gram": False, "is_offer": False} | options
    return _streamed.Machine((gpu(),), (budget,), **given)


def big(n: int, dtype: Any = "float32") -> Operand:
    item = np.dtype(dtype).itemsize
    return Operand((n, n), np.dtype(dtype), (n * item, item))


def test_D12_a_plan_says_where_everything_goes_and_what_limits_it() -> None:
    for n in (64, 2000, 16384, 60_000, 200_000):
        plan = planned(
            big(n), big(n), gpu=gpu(), machine=machine(64 << 30), out=big(n) if n > 60_000 else None
        )
        text = str(plan)
        assert "NVIDIA H200" in text
        if n == 64:
            assert not isinstance(plan.how, _streamed.Streams)
            continue
        for word in ("tiles  ", "on device  ", "bus  ", "expected  ", "limited by", "on host  "):
            assert word in text
        made = json.loads(json.dumps(plan.to_dict()))["streams"]["devices"][0]
        assert made["held_bytes"] <= made["budget_bytes"] == 64 << 30
        assert made["written_bytes"] == 4 * n * n


def test_H7_a_plan_for_several_gpus_names_what_they_wait_for() -> None:
    """Two copied no faster than one, on twice the cores: 49152³ took 1.04 to 1.15 s."""
    expected, limits = {}, {}
    for count in (1, 2, 4):
        gpus = tuple(replace(gpu(), index=index) for index in range(count))
        host = _streamed.Machine(gpus, (120 << 30,) * count, 16 * count, False, False)
        for n in (40_000, 49_152):
            plan = planned(big(n), big(n), gpu=gpus[0], machine=host, out=big(n))
            expected[n, count] = plan.how.expected_s
            limits[n, count] = {part.limit for part in plan.how.parts}
    assert limits[40_000, 1] == {"compute"}
    assert 0.9 < expected[49_152, 2] < 1.2
    for (n, count), seconds in expected.items():
        is_faster = expected[n, 1] >= {1: 1, 2: 1.7, 4: 3}[count] * seconds
        assert is_faster or limits[n, count] == {"the host's memory"}, (n, count)


def test_D7_a_plan_of_what_is_far_too_large_fits_its_budget() -> None:
    n = 50_000
    made = planned(
        big(n, "float64"), big(n, "float64"), gpu=gpu(), machine=machine(8 << 30), out=big(n, "f8")
    )
    assert made.how.parts[0].schedule.held_bytes <= 8 << 30


def test_kernels_of_a_schedule_are_those_of_its_own_strides(monkeypatch: Any) -> None:
    """Narrow tiles at the edge have one shape in many schedules, and the pitch of one of them."""
    made_for = {}
    real = _recipe.recipe

    def recipe(a: Operand, b: Operand, *others: Any, **options: Any) -> Any:
        made = real(a, b, *others, **options)
        made_for[id(made)] = made, a.strides, b.strides
        return made

    monkeypatch.setattr(_recipe, "recipe", recipe)
    plan = planned(big(1100), big(1100), gpu=gpu(), machine=machine(4 << 20), out=big(1100))
    (part,) = plan.how.parts
    kinds = [x for x in part.schedule.kinds() if isinstance(x[0], Launch)]
    assert len(kinds) > 1
    for launch, _ in kinds:
        made = part.recipes[_streamed._key(part.schedule, launch)]
        layouts = [part.schedule.layout(launch, side) for side in (0, 1)]
        assert made_for[id(made)][1:] == tuple(layout.strides for layout in layouts)


def test_a_gpu_is_offered_where_it_is_worth_it() -> None:
    offer = machine(64 << 30, is_offer=True)
    for n, device_name in ((3000, "cpu"), (16384, "cuda:0")):
        on_gpu = planned(big(n), big(n), gpu=gpu(), machine=offer)
        on_cpu = planned(big(n), big(n))
        slow = _streamed.Machine(
            offer.gpus, offer.device_bytes, 1000 if n == 3000 else 16, False, True
        )
        chosen = _streamed.faster(on_gpu, on_cpu, slow)
        assert chosen.device == device_name
        if device_name != "cpu":
            assert "no device was asked for: cuda:0 is expected to take" in chosen.why[-1]
