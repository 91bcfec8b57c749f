"""Host operands on a GPU: the bits of device operands, within a budget, whatever happens."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from benchmarks.host import normal
from tests.gpu.support import EXACT, INEXACT, PoolHigh, download, in_memory, random, upload
from tests.support import (
    exact_integers,
    goes_on,
    no_more_threads_than,
    planned,
    poisoned,
    small_integers,
    thread_count,
    within_bound,
)
from tilewise import _api, _streamed
from tilewise._memory import parse_budget
from tilewise._operand import Operand
from tilewise.errors import BudgetError, DeviceError, OptionError
from tilewise.runtime import device, driver, pinned, streams, transfers
from tilewise.runtime.memory import pool, workspace

pytestmark = pytest.mark.gpu


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(2026)


@pytest.fixture(autouse=True)
def streams_everything(cuts_everything: None) -> None:
    """Products of any size are cut."""


def streamed(a: Any, b: Any, budget: Any, out: Any = None, **options: Any) -> Any:
    """Multiply in pieces, into a poisoned result, within a budget that is kept; return both."""
    if out is None:
        plan = tw.plan(a, b, devices="cuda:0", **options)
        out = poisoned(plan.shape, plan.dtype)
    plan = tw.plan(a, b, devices="cuda:0", memory=budget, out=out, **options)
    pool(0).trim()
    high = PoolHigh()
    assert plan(a, b, out=out) is out
    held = sum(part.schedule.held_bytes for part in plan.how.parts)
    assert high.used_bytes() <= held + (1 << 20)
    assert high.held_bytes() <= 1.05 * parse_budget(budget) + 100e6
    return out, plan


@pytest.mark.parametrize("dtype", [*INEXACT, *EXACT], ids=str)
def test_bits_are_those_of_device_operands(rng: Any, dtype: Any) -> None:
    a, b = random(rng, (700, 520), dtype), random(rng, (520, 900), dtype)
    expected = in_memory(a, b)
    for memory in (700 << 10, 1500 << 10, 20 << 20):
        out, plan = streamed(a, b, memory * a.itemsize)
        assert out.tobytes() == expected.tobytes(), (memory, str(plan))
    assert tw.matmul(a, b, devices="cuda:0").tobytes() == expected.tobytes()


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("precision", [None, "tf32"])
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_what_is_left_of_an_operand_that_stays_gives_the_same_bits(
    rng: Any, dtype: Any, precision: Any, order: Any
) -> None:
    """Rows and columns that are computed again by FMA among the rest."""
    m, k, n = 4000, 1000, 3700
    a, b = random(rng, (m, k), dtype), random(rng, (k, n), dtype)
    for x, size in ((a, m), (b.T, n)):
        rows = rng.choice(size, 40, replace=False)
        x[rows[:10], 500] = np.nan
        x[rows[10:20], 17] = np.inf
        x[rows[20:30], 999] = 1e-30
        x[rows[30:]] *= np.float32(1e-25)
    a, b = np.asarray(a, order=order), np.asarray(b, order=order)
    expected = in_memory(a, b, precision=precision)
    out = poisoned((m, n), dtype, order)
    for memory in (mib * a.itemsize << 18 for mib in range(50, 24, -2)):
        plan = tw.plan(a, b, out=out, devices="cuda:0", memory=memory, precision=precision)
        if goes_on(plan) > 3 / 4:
            break
    assert plan.how.parts[0].schedule.order == {"C": "columns", "F": "rows"}[order]
    assert goes_on(plan) > 3 / 4
    streamed(a, b, memory, out, precision=precision)
    assert np.ascontiguousarray(out).tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "int64"])
def test_long_k_keeps_its_order_of_sums(rng: Any, dtype: Any) -> None:
    a, b = random(rng, (300, 20_000), dtype), random(rng, (20_000, 260), dtype)
    expected = in_memory(a, b)
    whole = 128 * 20_000 * np.dtype(dtype).itemsize
    seen = set()
    for memory in (whole, 8 * whole, 20 * whole):
        if dtype == "float32" and memory == whole and not is_cut(a, b, memory):
            with pytest.raises(BudgetError, match="all of K = 20000 has to be there"):
                streamed(a, b, memory)
            continue
        out, plan = streamed(a, b, memory)
        seen.add(plan.how.parts[0].schedule.pieces > 1)
        assert out.tobytes() == expected.tobytes(), str(plan)
    assert False in seen
    assert True in seen or dtype == "float32"


def is_cut(a: Any, b: Any, memory: int) -> bool:
    """Whether the kernels of a product can take K in pieces."""
    try:
        return isinstance(tw.plan(a, b, devices="cuda:0", memory=memory).how, _streamed.Streams)
    except BudgetError:
        return False


def test_every_layout_of_operands_and_result(rng: Any) -> None:
    m, k, n = 420, 333, 517
    padded = random(rng, (2 * m + 3, 2 * k + 5), "float32")
    base_b = random(rng, (k + 1, n + 3), "float32")
    a = padded[1 : m + 1, 2 : k + 2]
    b = base_b[:k, 1 : n + 1]
    expected = in_memory(np.ascontiguousarray(a), np.ascontiguousarray(b))
    lefts = {
        "C": np.ascontiguousarray(a),
        "F": np.asfortranarray(a),
        "part": a,
        "foreign": a.astype(">f4"),
        "backwards": np.ascontiguousarray(a[::-1, ::-1])[::-1, ::-1],
        "every second": np.repeat(np.repeat(a, 2, 0), 2, 1)[::2, ::2],
    }
    rights = {
        "C": np.ascontiguousarray(b),
        "F": np.asfortranarray(b),
        "part": b,
        "unaligned": _unaligned(b),
    }
    outs = {
        "C": poisoned((m, n), "f4"),
        "F": poisoned((m, n), "f4", "F"),
        "part": poisoned((m + 4, n + 6), "f4")[2:-2, 3:-3],
        "foreign": poisoned((m, n), ">f4"),
        "backwards": poisoned((m, n), "f4")[::-1, ::-1],
    }
    for (i, x), (j, y), (p, out) in itertools.product(lefts.items(), rights.items(), outs.items()):
        out.view(f"{out.dtype.byteorder}u4")[...] = 0xFFFFFFFF
        got, _ = streamed(x, y, "1MiB", out)
        assert got.astype("f4").tobytes() == expected.tobytes(), (i, j, p)
    part = outs["part"].base
    assert np.isnan(part[:2]).all()
    assert np.isnan(part[:, -3:]).all()


def _unaligned(x: Any) -> Any:
    raw = np.zeros(x.nbytes + 1, np.uint8)
    view = np.ndarray(x.shape, x.dtype, raw, 1)
    view[...] = x
    return view


@pytest.mark.parametrize(
    ("a_shape", "b_shape"),
    [
        ((40, 70, 60), (40, 60, 50)),
        ((40, 70, 60), (60, 50)),
        ((70, 60), (40, 60, 50)),
        ((5, 1, 70, 60), (8, 60, 50)),
        ((5, 8, 70, 60), (5, 1, 60, 50)),
        ((3, 400, 300), (3, 300, 500)),
        ((200, 300), (300, 4)),
        ((300,), (6, 300, 500)),
        ((9, 300, 500), (500,)),
        ((2000, 3, 3), (2000, 3, 1)),
    ],
    ids=str,
)
def test_batches_and_vectors(rng: Any, a_shape: Any, b_shape: Any) -> None:
    a, b = random(rng, a_shape, "float32"), random(rng, b_shape, "float32")
    expected = in_memory(a, b)
    assert expected.shape == np.matmul(a, b).shape
    for memory in ("1MiB", "3MiB", "1GiB"):
        out, _ = streamed(a, b, memory)
        assert out.tobytes() == expected.tobytes(), memory
    assert tw.matmul(a, b, devices="cuda:0").tobytes() == expected.tobytes()


def test_what_repeats_is_not_copied(rng: Any) -> None:
    b = random(rng, (2048, 1024), "float32")
    row, column = random(rng, (1, 2048), "float32"), random(rng, (3000, 1), "float32")
    for a, nbytes in (
        (np.broadcast_to(row, (3000, 2048)), 4 * 2048),
        (np.broadcast_to(column, (3000, 2048)), 4 * 3000),
    ):
        plan = tw.plan(a, b, devices="cuda:0")
        assert plan.how.parts[0].schedule.read_bytes == nbytes + b.nbytes
        got = tw.matmul(a, b, devices="cuda:0")
        assert got.tobytes() == in_memory(np.ascontiguousarray(a), b).tobytes()
    stack = np.broadcast_to(b, (4, 2048, 1024))
    x = random(rng, (4, 300, 2048), "float32")
    plan = tw.plan(x, stack, devices="cuda:0")
    assert plan.how.parts[0].schedule.read_bytes == x.nbytes + b.nbytes
    assert tw.matmul(x, stack, devices="cuda:0").tobytes() == in_memory(x, b).tobytes()


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_product_with_its_own_transpose_is_read_once(rng: Any, order: Any) -> None:
    a = np.asarray(random(rng, (1500, 700), "float32"), order=order)
    plan = tw.plan(a, a.T, devices="cuda:0")
    assert plan.how.parts[0].schedule.read_bytes == a.nbytes
    x = upload(a)
    assert plan(a, a.T).tobytes() == download(tw.matmul(x, x.T)).tobytes()
    out, _ = streamed(a, a.T, "2MiB")
    assert out.tobytes() == download(tw.matmul(x, x.T)).tobytes()
    with pytest.raises(OptionError, match="transpose of the same array"):
        plan(a, np.asarray(a.T.copy(), order="F" if order == "C" else "C"))


def test_pinned_operands_and_results_are_used_as_they_are(rng: Any) -> None:
    a, b = random(rng, (1000, 800), "float32"), random(rng, (800, 1200), "float32")
    expected = in_memory(a, b)
    with pinned.Pinned(a.nbytes) as p, pinned.Pinned(b.nbytes) as q, pinned.Pinned(4_800_000) as r:
        x = p.array.view("f4").reshape(a.shape)
        y = q.array.view("f4").reshape(b.shape)
        z = r.array.view("f4").reshape(1000, 1200)
        x[...], y[...] = a, b
        for memory in ("1MiB", "64MiB"):
            for left, right in ((x, y), (x, b), (a, y), (x[::-1][::-1], y)):
                z[...] = np.nan
                tw.matmul(left, right, out=z, devices="cuda:0", memory=memory)
                assert z.tobytes() == expected.tobytes()


def test_F9_a_result_is_complete_when_it_is_handed_over(rng: Any) -> None:
    import cupy

    a, b = small_integers(rng, (4000, 16), "float32"), small_integers(rng, (16, 4000), "float32")
    last = float(a[-1] @ b[:, -1])
    with cupy.cuda.Stream(non_blocking=True), pinned.Pinned(64_000_000) as memory:
        out = memory.array.view("f4").reshape(4000, 4000)
        plan = tw.plan(a, b, out=out, devices="cuda:0")
        for _ in range(60):
            out[-1, -1] = np.nan
            plan(a, b, out=out)
            assert out[-1, -1] == last


def test_two_devices_shares_meet_in_one_result(rng: Any) -> None:
    facts = device.facts(0)
    for shapes in (((900, 500), (500, 700)), ((300, 500), (500, 2000)), ((8, 90, 80), (8, 80, 70))):
        a, b = (random(rng, shape, "float32") for shape in shapes)
        for count in (2, 3):
            machine = _streamed.Machine((facts,) * count, (1 << 30,) * count, 16, False, False)
            plan = planned(Operand.of(a), Operand.of(b), gpu=facts, machine=machine)
            assert len(plan.how.parts) == count
            assert plan(a, b).tobytes() == in_memory(a, b).tobytes()


def test_a_gpu_is_taken_if_it_is_worth_it(rng: Any) -> None:
    small = np.ones((500, 500), "float32")
    assert tw.plan(small, small).device == "cpu"
    large = Operand.of(np.broadcast_to(np.float32(1), (16384, 16384)))
    large = Operand((16384, 16384), large.dtype, (65536, 4))
    plan = tw.plan(large, large)
    assert plan.device == "cuda:0"
    assert "no device was asked for: cuda:0 is expected to take" in " ".join(plan.why)
    assert tw.plan(large, large, devices="cpu").device == "cpu"
    wide = Operand((16384, 16384), np.dtype("longdouble"), (16384 * 16, 16))
    assert tw.plan(wide, wide).device == "cpu"


def test_D1_no_scratch_of_three_axes(rng: Any) -> None:
    a, b = random(rng, (20, 50_000), "float32"), random(rng, (50_000, 3072), "float32")
    high = PoolHigh()
    got = tw.matmul(a, b, devices="cuda:0")
    assert high.used_bytes() <= a.nbytes + b.nbytes + got.nbytes + (64 << 20)
    assert got.tobytes() == in_memory(a, b).tobytes()


def test_D2_a_result_beyond_memory_is_refused_with_the_way_out(rng: Any, tmp_path: Path) -> None:
    huge = Operand((203_743, 58), np.dtype("f4"), (232, 4))
    with pytest.raises(BudgetError, match=r"154\.6\d GiB.*np\.memmap"):
        tw.plan(huge, Operand((58, 203_743), np.dtype("f4"), (4, 232)), memory="64GiB")
    x = random(rng, (9000, 58), "float32")
    out = np.memmap(tmp_path / "gram.bin", "f4", "w+", shape=(9000, 9000))
    got, plan = streamed(x, x.T, "32MiB", out)
    assert plan.how.parts[0].schedule.held_bytes <= 32 << 20
    rows = slice(4000, 4100)
    assert within_bound(np.asarray(got[rows]), x[rows], x.T)


def test_D4_D7_float64_within_a_small_budget(rng: Any) -> None:
    a, b = random(rng, (2500, 2500), "float64"), random(rng, (2500, 2500), "float64")
    out, plan = streamed(a, b, "32MiB")
    assert within_bound(out[:200], a[:200], b, 2.0**-53)
    moved = plan.how.parts[0].schedule
    assert moved.held_bytes <= 32 << 20
    assert moved.read_bytes <= 10 * (a.nbytes + b.nbytes)
    big = Operand((50_000, 50_000), np.dtype("f8"), (400_000, 8))
    nowhere = np.empty((50_000, 50_000))  # of which no page is touched
    dry = tw.plan(big, big, out=nowhere, devices="cuda:0", memory="8GiB")
    assert dry.how.parts[0].schedule.held_bytes <= 8 << 30


def test_D5_bytes_stay_bytes(rng: Any) -> None:
    x = rng.integers(0, 2, (1500, 9000), dtype=np.uint8)
    out, plan = streamed(x, x.T, "12MiB", dtype=np.int32)
    assert plan.how.parts[0].schedule.job.a.itemsize == 1
    assert (out == x.astype("f4") @ x.T.astype("f4")).all()


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class PeakRss:
    """The largest resident set while a block runs, read every few milliseconds."""

    def __enter__(self) -> PeakRss:
        self.before = self.peak = rss_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.peak = max(self.peak, rss_bytes())

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def extra(self) -> int:
        return self.peak - self.before


def test_D6_D9_D13_memory_is_flat_and_given_back(rng: Any) -> None:
    b = random(rng, (2000, 2000), "float32")
    pinned.release()
    peaks = []
    for m in (20_000, 40_000):
        a = np.full((m, 2000), 0.5, "float32")
        out = np.full((m, 2000), np.nan, "float32")
        high = PoolHigh()
        with PeakRss() as rss:
            tw.matmul(a, b, out=out, devices="cuda:0", memory="100MiB")
        peaks.append(high.held_bytes())
        assert high.held_bytes() <= 100 << 20
        assert rss.extra <= (100 << 20) * 1.05 + 100e6
        rows = slice(m - 3, m)
        assert within_bound(out[rows], a[rows], b)
    assert abs(peaks[0] - peaks[1]) <= 0.05 * peaks[0]
    strided = np.full((20_000, 4000), 0.5, "float32")[:, ::2]
    with PeakRss() as rss:
        tw.matmul(strided, b, out=out[:20_000], devices="cuda:0", memory="100MiB")
    assert rss.extra <= 256 << 20
    streams.synchronize(streams.DEFAULT, 0)
    free = device.free_bytes(0)
    for i in range(60):
        m = 300 + 37 * (i % 9)
        tw.matmul(a[:m], b, devices="cuda:0")
    streams.synchronize(streams.DEFAULT, 0)
    assert device.free_bytes(0) >= free - (4 << 20)
    assert pinned.held_bytes() <= 256 << 20
    pinned.release()
    assert pinned.held_bytes() == 0


def test_D10_memory_maps_of_any_offset_and_order(rng: Any, tmp_path: Path) -> None:
    a, b = random(rng, (1200, 900), "float32"), random(rng, (900, 1100), "float32")
    expected = in_memory(a, b)
    for dtype, offset, mode in (("<f4", 13, "r"), (">f4", 0, "r"), ("<f4", 8, "c")):
        path = tmp_path / "a.bin"
        path.write_bytes(b"\0" * offset + a.astype(dtype).tobytes())
        mapped = np.memmap(path, dtype, mode, offset, a.shape)
        out = np.memmap(tmp_path / "c.bin", "f4", "w+", shape=(1200, 1100))
        assert tw.matmul(mapped, b, out=out, devices="cuda:0", memory="4MiB") is out
        assert out.tobytes() == expected.tobytes()


def test_D14_what_another_library_holds_is_not_counted_on(rng: Any) -> None:
    import cupy

    a, b = random(rng, (9000, 3000), "float32"), random(rng, (3000, 9000), "float32")
    expected = in_memory(a, b)
    cupy.get_default_memory_pool().free_all_blocks()
    streams.synchronize(streams.DEFAULT, 0)
    pool(0).trim()
    free = device.free_bytes(0)
    held = cupy.cuda.alloc(free - (400 << 20))  # code that is loaded meanwhile needs some too
    try:
        left = device.free_bytes(0)
        plan = tw.plan(a, b, devices="cuda:0")
        assert plan.how.parts[0].schedule.held_bytes <= left
        assert plan(a, b).tobytes() == expected.tobytes()
        before = device.free_bytes(0)
        huge = Operand((64, 300_000_000), np.dtype("f2"), (600_000_000, 2))
        wide = Operand((300_000_000, 64), np.dtype("f2"), (2, 600_000_000))
        with pytest.raises(BudgetError, match="may be taken there"):
            tw.plan(huge, wide, devices="cuda:0")
        assert device.free_bytes(0) == before
    finally:
        del held
        cupy.get_default_memory_pool().free_all_blocks()


def test_memory_that_another_takes_in_between_is_named(rng: Any) -> None:
    import cupy

    a, b = random(rng, (3000, 3000), "float32"), random(rng, (3000, 3000), "float32")
    plan = tw.plan(a, b, devices="cuda:0")
    pool(0).trim()
    workspace(0).release()  # which would be given back in need
    held = cupy.cuda.alloc(device.free_bytes(0) - (40 << 20))
    try:
        with pytest.raises(BudgetError, match="part of the product needs .* free"):
            plan(a, b)
    finally:
        del held
        cupy.get_default_memory_pool().free_all_blocks()
    assert plan(a, b).tobytes() == in_memory(a, b).tobytes()


def test_what_is_kept_for_the_next_product_is_there_for_others(rng: Any) -> None:
    import cupy

    a = random(rng, (8000, 8000), "float32")
    expected = tw.matmul(a, a.T, devices="cuda:0").tobytes()
    kept = pool(0).kept_bytes
    assert 1.5 * a.nbytes <= kept == pool(0).held_bytes <= device.facts(0).memory_bytes / 16
    held = cupy.cuda.alloc(device.free_bytes(0) + kept // 2)
    try:
        assert pool(0).held_bytes == 0
    finally:
        del held
        cupy.get_default_memory_pool().free_all_blocks()
    assert tw.matmul(a, a.T, devices="cuda:0").tobytes() == expected


@pytest.mark.parametrize("method", ["copy_in", "copy_out"])
def test_a_thread_that_dies_names_its_place_and_leaves_nothing(
    rng: Any, monkeypatch: Any, method: str
) -> None:
    a, b = random(rng, (3000, 2000), "float32"), random(rng, (2000, 3000), "float32")
    expected = tw.matmul(a, b, devices="cuda:0")
    free, threads = device.free_bytes(0), thread_count()
    real = getattr(transfers.Gpu, method)
    calls = itertools.count()

    def dies(*given: Any) -> None:
        if next(calls) == 3:
            raise DeviceError("the bus is cut")
        real(*given)

    with monkeypatch.context() as patch:
        patch.setattr(transfers.Gpu, method, dies)
        with pytest.raises(DeviceError, match="the bus is cut") as caught:
            tw.matmul(a, b, devices="cuda:0")
    assert "cuda:0" in caught.value.__notes__[0]
    assert "[" in caught.value.__notes__[0]
    streams.synchronize(streams.DEFAULT, 0)
    assert device.free_bytes(0) >= free - (4 << 20)
    assert no_more_threads_than(threads)
    assert tw.matmul(a, b, devices="cuda:0").tobytes() == expected.tobytes()


def test_control_c_stops_a_product_and_the_next_one_works(rng: Any) -> None:
    a = np.full((16384, 8192), 0.5, "float32")
    out = np.zeros((16384, 16384), "float32")
    tw.matmul(a[:1000], a[:1000].T, devices="cuda:0")
    threads = thread_count()
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.03, lambda: signal.pthread_kill(main, signal.SIGINT))
    timer.start()
    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        deque((tw.matmul(a, a.T, out=out, devices="cuda:0") for _ in range(50)), maxlen=0)
    assert time.perf_counter() - start < 3
    timer.join()
    assert no_more_threads_than(threads)
    assert PoolHigh().used_bytes() == 0
    x = random(rng, (2000, 1500), "float32")
    assert tw.matmul(x, x.T, devices="cuda:0").shape == (2000, 2000)


def test_products_of_several_threads_do_not_disturb_each_other(rng: Any) -> None:
    operands = [
        (
            small_integers(rng, (900 + 50 * i, 700), "float32"),
            small_integers(rng, (700, 1500), "float32"),
        )
        for i in range(4)
    ]
    failures = []

    def work(a: Any, b: Any) -> None:
        for _ in range(5):
            if not (tw.matmul(a, b, devices="cuda:0") == a @ b).all():
                failures.append(a.shape)

    workers = [threading.Thread(target=work, args=pair) for pair in operands]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures


def test_integers_are_exact_however_they_are_cut(rng: Any) -> None:
    a = rng.integers(-(2**63), 2**63 - 1, (90, 40_000), dtype=np.int64)
    b = rng.integers(-(2**63), 2**63 - 1, (40_000, 40), dtype=np.int64)
    out, plan = streamed(a, b, "16MiB")
    assert plan.how.parts[0].schedule.pieces > 1
    assert (out[:2] == exact_integers(a[:2], b, np.int64)).all()


@pytest.mark.multigpu
class TestSeveralGpus:
    """Case group H, as far as two GPUs show it."""

    BOTH = ("cuda:0", "cuda:1")

    def test_H3_H8_each_list_of_devices_is_honoured(self, rng: Any) -> None:
        a, b = random(rng, (3000, 2000), "float32"), random(rng, (2000, 2500), "float32")
        expected = in_memory(a, b)
        for devices in (["cuda:0"], list(self.BOTH), ["cuda:1"], ["cuda:1", "cuda:0"]):
            cuda = driver.require()
            before = int(cuda.cuCtxGetCurrent()[1])
            plan = tw.plan(a, b, devices=devices)
            assert plan.device == ", ".join(devices)
            assert plan(a, b).tobytes() == expected.tobytes()
            assert int(cuda.cuCtxGetCurrent()[1]) == before
        with pytest.raises(OptionError, match="names a device twice"):
            tw.matmul(a, b, devices=["cuda:0", "cuda:0"])
        with pytest.raises(OptionError, match="the CPU does not share"):
            tw.matmul(a, b, devices=["cuda:0", "cpu"])

    def test_H3_operands_on_two_gpus_are_refused_by_name(self) -> None:
        import cupy

        with cupy.cuda.Device(0):
            x = cupy.ones((4, 4))
        with cupy.cuda.Device(1):
            y = cupy.ones((4, 4))
        with pytest.raises(DeviceError, match="a is on cuda:0, b is on cuda:1"):
            tw.matmul(x, y)
        with cupy.cuda.Device(0):
            assert (tw.matmul(y, y).get() == 4).all()

    def test_H4_uneven_pieces_are_exact(self, rng: Any) -> None:
        for shapes in (
            ((1000, 777), (777, 1003)),
            ((777, 1000), (1000, 3)),
            ((3, 1000), (1000, 777)),
            ((5, 400, 300), (300, 200)),
            ((5, 400, 300), (5, 300, 200)),
        ):
            a, b = (small_integers(rng, shape, "float32") for shape in shapes)
            got = tw.matmul(a, b, devices=self.BOTH)
            assert (got == np.matmul(a, b)).all()

    def test_H5_H6_float64_at_the_sum_of_the_budgets(self, rng: Any) -> None:
        budget = 64 << 20
        n = int((0.8 * 2 * budget / 8 / 2) ** 0.5)
        a, b = random(rng, (n, n), "float64"), random(rng, (n, n), "float64")
        out = poisoned((n, n), "float64")
        for index in (0, 1):
            pool(index).trim()
        high = [PoolHigh(index) for index in (0, 1)]
        tw.matmul(a, b, out=out, devices=self.BOTH, memory=budget)
        for each in high:
            assert each.used_bytes() <= budget
            assert each.held_bytes() <= 1.05 * budget + 100e6
        assert within_bound(out[:100], a[:100], b, 2.0**-53)
        assert out.tobytes() == in_memory(a, b).tobytes()

    def test_H7_two_are_faster_or_the_plan_says_what_they_wait_for(self) -> None:
        n = 40_000
        a, b = normal(n, n, seed=1), normal(n, n, seed=2)
        out = np.full((n, n), np.nan, np.float32)
        seconds, limits = [], set()
        for devices in (self.BOTH[:1], self.BOTH):
            plan = tw.plan(a, b, out=out, devices=devices)
            plan(a, b, out=out)
            start = time.perf_counter()
            plan(a, b, out=out)
            seconds.append(time.perf_counter() - start)
            limits = {part.limit for part in plan.how.parts}
        assert within_bound(out[:8, :64], a[:8], b[:, :64])
        assert seconds[0] >= 1.7 * seconds[1] or limits != {"compute"}, seconds


def test_options_that_contradict_are_refused() -> None:
    x = np.ones((4, 4), "float32")
    with pytest.raises(OptionError, match="names a device twice"):
        tw.plan(x, x, devices=["cuda:0", "cuda:0"])
    with pytest.raises(OptionError, match="the CPU does not share"):
        tw.plan(x, x, devices=["cpu", "cuda:0"])
    assert _api.plan(x, x, devices="cuda:0").device == "cuda:0"
