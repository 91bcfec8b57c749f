"""The pipeline of GPUs on a device made of NumPy, late by nature: right bits, clean ends."""

from __future__ import annotations

import _thread
import itertools
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.outofcore.fake_device import FakeDevice
from tests.outofcore.test_device_schedule import jobs
from tests.support import no_more_threads_than, thread_count
from tilewise.errors import BudgetError, DeviceError
from tilewise.outofcore import device_choice, halt
from tilewise.outofcore.device_choice import candidates, deal, resident
from tilewise.outofcore.device_job import Factor, Job
from tilewise.outofcore.device_pipeline import Share, Threads, multiply
from tilewise.outofcore.device_schedule import Schedule
from tilewise.outofcore.slices import HostArray


@pytest.fixture(autouse=True, scope="module")
def panels_of_any_size() -> Iterator[None]:
    """Cut small operands too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_choice, "_PANEL_BYTES", 1)
        patch.setattr(device_choice, "_LINE_BYTES", 1)
        yield


TYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def operand(rng: Any, x: Factor, k: int, side: int) -> Any:
    """Return random numbers as a factor describes them, without what repeats."""
    size, depth = x.stored(x.size, k)
    shape = (*x.batch, *((size, depth) if x.along_k else (depth, size)))
    values = rng.integers(0, 200, shape).astype(TYPES[x.itemsize])
    return values if x.along_k == (side == 0) else values.swapaxes(-1, -2)


def view(pointer: int, layout: Any, dtype: Any) -> Any:
    span = sum(step * (n - 1) for step, n in zip(layout.strides, layout.shape, strict=True))
    raw = (np.ctypeslib.ctypes.c_uint8 * (span + np.dtype(dtype).itemsize)).from_address(pointer)
    first = np.frombuffer(raw, dtype, 1)
    return np.lib.stride_tricks.as_strided(first, layout.shape, layout.strides)


def share_of(schedule: Schedule, origin: Any, device: FakeDevice, is_pinned: bool = False) -> Share:
    job = schedule.job

    def compute(device: Any, launch: Any, pointers: Any) -> None:
        def work() -> None:
            a = view(pointers[0], schedule.layout(launch, 0), TYPES[job.a.itemsize])
            b = view(pointers[1], schedule.layout(launch, 1), TYPES[job.b.itemsize])
            c = view(pointers[2], schedule.c_layout(launch), TYPES[job.sum_itemsize])
            product = np.matmul(a.astype(np.uint64), b.astype(np.uint64))
            if schedule.pieces > 1:
                product += c
            c[...] = product.astype(c.dtype)

        device.compute(work)

    return Share(
        name="cuda:0",
        schedule=schedule,
        origin=origin,
        open=lambda: device,
        compute=compute,
        is_pinned=lambda array: is_pinned,
    )


def run(
    job: Job,
    schedules: list[tuple[Schedule, Any]],
    *,
    threads: Threads | None = None,
    out_order: str = "C",
    is_pinned: bool = False,
    devices: list[FakeDevice] | None = None,
    seed: int = 0,
    watch: Any = None,
) -> tuple[Any, Any]:
    """Multiply by schedules that cover C; return what came out and what should have."""
    rng = np.random.default_rng(seed)
    a = operand(rng, job.a, job.k, 0)
    b = a.swapaxes(-1, -2) if job.is_gram else operand(rng, job.b, job.k, 1)
    threads = threads or Threads(2, 2, 64)
    out: Any = np.empty((*job.batch, job.m, job.n), TYPES[job.sum_itemsize], out_order)
    out.reshape(-1, order="A").view(np.uint8)[...] = 0xFF
    ring = np.zeros(threads.ring_bytes * len(schedules), np.uint8)
    devices = devices or [FakeDevice(seed + i) for i in range(len(schedules))]
    shares = [
        share_of(schedule, origin, device, is_pinned)
        for (schedule, origin), device in zip(schedules, devices, strict=True)
    ]
    multiply(shares, HostArray(a), HostArray(b), HostArray(out), ring, threads, watch)
    assert all(device.is_closed for device in devices)
    wide_a = np.broadcast_to(a, (*a.shape[:-2], job.m, job.k)).astype(np.uint64)
    wide_b = np.broadcast_to(b, (*b.shape[:-2], job.k, job.n)).astype(np.uint64)
    return out, np.broadcast_to(np.matmul(wide_a, wide_b).astype(out.dtype), out.shape)


def whole(job: Job) -> Any:
    return tuple(slice(0, size) for size in (*job.batch, job.m, job.n))


@settings(deadline=None, max_examples=60)
@given(jobs(), st.integers(0, 10**6), st.integers(0, 10**6), st.sampled_from([16, 64, 4096]))
def test_every_schedule_gives_the_product(job: Job, which: int, seed: int, slices: int) -> None:
    made = [*resident(job, are_files=True), *itertools.islice(candidates(job, 1 << 22), 60)]
    schedule = made[which % len(made)]
    got, expected = run(
        schedule.job,
        [(schedule, whole(job))],
        threads=Threads(1 + seed % 3, 1 + seed % 2, slices),
        out_order="C" if job.along_n else "F",
        is_pinned=seed % 5 == 0,
        seed=seed,
    )
    np.testing.assert_array_equal(got, expected)


@settings(deadline=None, max_examples=25)
@given(jobs(), st.integers(2, 5), st.integers(0, 10**6))
def test_several_devices_give_the_same_product(job: Job, count: int, seed: int) -> None:
    shares = []
    for part, origin in deal(job, count):
        made = list(itertools.islice(candidates(part, 1 << 22), 60))
        shares.append((made[seed % len(made)], origin))
    got, expected = run(job, shares, seed=seed)
    np.testing.assert_array_equal(got, expected)


def big(m: int = 700, n: int = 600, k: int = 300, **options: Any) -> Job:
    factor = Factor(size=m, itemsize=4, along_k=True)
    b = Factor(size=n, itemsize=4, along_k=False)
    return Job(batch=(), k=k, a=factor, b=b, sum_itemsize=4, **options)


def corner(job: Job) -> Schedule:
    return next(resident(job))


@pytest.mark.parametrize("is_gram", [False, True])
def test_operands_that_stay_are_read_once(is_gram: bool) -> None:
    job = big(is_gram=is_gram)
    if is_gram:
        job = replace(job, b=replace(job.a), a=replace(job.a))
    schedule = corner(job)
    assert schedule.read_bytes == job.m * job.k * 4 + (0 if is_gram else job.k * job.n * 4)
    got, expected = run(job, [(schedule, whole(job))], threads=Threads(4, 4, 4096))
    np.testing.assert_array_equal(got, expected)


def lines(job: Job, budget: int = 600_000) -> Schedule:
    return next(s for s in candidates(job, budget) if s.order == "rows" and s.tile_m < job.m)


@pytest.mark.parametrize("eager", ["in", "compute", "out"])
@pytest.mark.parametrize("slots", [1, 2])
def test_a_lane_that_runs_ahead_overtakes_nobody(eager: str, slots: int) -> None:
    job = big(500, 400, 130)
    for schedule in (lines(job, 200_000), replace(corner(job), c_slots=slots)):
        schedule = replace(schedule, c_slots=slots, a_slots=1)
        got, expected = run(
            job,
            [(schedule, whole(job))],
            threads=Threads(2, 2, 1 << 14),
            devices=[FakeDevice(eager=eager)],
        )
        np.testing.assert_array_equal(got, expected)


def test_foreign_byte_order_is_turned_on_the_way() -> None:
    job = big(50, 40, 30)
    rng = np.random.default_rng(1)
    a, b = (rng.integers(0, 99, s).astype(np.uint32) for s in ((50, 30), (30, 40)))
    out = np.zeros((50, 40), ">u4")
    threads = Threads(1, 1, 256)
    share = share_of(corner(job), whole(job), FakeDevice())
    ring = np.zeros(threads.ring_bytes, np.uint8)
    multiply([share], HostArray(a.astype(">u4")), HostArray(b), HostArray(out), ring, threads)
    np.testing.assert_array_equal(out, a @ b)


@pytest.mark.parametrize(("lane", "note"), [("in", "was given a["), ("out", "gave back c[")])
def test_a_thread_that_dies_stops_all_and_says_where_it_was(lane: str, note: str) -> None:
    job = big()
    count = itertools.count()
    device = FakeDevice(fails=lambda what: what == lane and next(count) == 5)
    before = thread_count()
    with pytest.raises(DeviceError, match="copying") as caught:
        run(job, [(lines(job), whole(job))], threads=Threads(3, 3, 4096), devices=[device])
    assert any(note in each for each in caught.value.__notes__), caught.value.__notes__
    assert device.is_closed
    assert no_more_threads_than(before)


def test_a_launch_that_fails_is_named_by_its_tile() -> None:
    job, device = big(), FakeDevice()
    schedule = lines(job)
    share = share_of(schedule, whole(job), device)
    left = iter([None, None, None])

    def compute(*given: Any) -> None:
        if next(left, 1) == 1:
            raise DeviceError("the device is lost")
        share.compute(*given)

    threads = Threads(2, 2, 4096)
    ring, out = np.zeros(threads.ring_bytes, np.uint8), np.zeros((job.m, job.n), np.uint32)
    a, b = np.ones((job.m, job.k), np.uint32), np.ones((job.k, job.n), np.uint32)
    with pytest.raises(DeviceError, match="the device is lost") as caught:
        multiply([replace(share, compute=compute)], *map(HostArray, (a, b, out)), ring, threads)
    assert "computed c[" in caught.value.__notes__[0]
    assert device.is_closed


def test_memory_that_is_not_there_ends_before_any_work() -> None:
    job = big()
    schedule = lines(job)
    devices = [FakeDevice(), FakeDevice(memory_bytes=schedule.held_bytes - 1)]
    half = (slice(0, 350), slice(0, 600))
    with pytest.raises(BudgetError, match="part of the product"):
        run(job, [(schedule, half), (schedule, half)], devices=devices)
    assert all(device.is_closed for device in devices)


def test_control_c_stops_every_thread() -> None:
    job, device = big(), FakeDevice()
    schedule = lines(job)
    share = share_of(schedule, whole(job), device)
    calls = itertools.count()

    def compute(*given: Any) -> None:
        if next(calls) == 2:
            raise KeyboardInterrupt
        share.compute(*given)

    threads = Threads(2, 2, 4096)
    ring, out = np.zeros(threads.ring_bytes, np.uint8), np.zeros((job.m, job.n), np.uint32)
    a, b = np.ones((job.m, job.k), np.uint32), np.ones((job.k, job.n), np.uint32)
    before = thread_count()
    with pytest.raises(KeyboardInterrupt):
        multiply([replace(share, compute=compute)], *map(HostArray, (a, b, out)), ring, threads)
    assert device.is_closed
    assert no_more_threads_than(before)


@pytest.mark.parametrize("is_begun", [False, True])
def test_control_c_while_the_thread_that_conducts_is_started(
    monkeypatch: Any, is_begun: bool
) -> None:
    job, device, real = big(), FakeDevice(), threading.Thread.start

    def start(self: threading.Thread) -> None:
        if is_begun:
            real(self)
        raise KeyboardInterrupt

    before = thread_count()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(KeyboardInterrupt):
            run(job, [(lines(job), whole(job))], threads=Threads(3, 3, 4096), devices=[device])
    assert device.is_closed == device.is_used
    assert no_more_threads_than(before)


def test_a_thread_that_cannot_be_started_stops_those_that_were(monkeypatch: Any) -> None:
    job, device, calls = big(), FakeDevice(), itertools.count()
    real = _thread.start_new_thread

    def start(*given: Any) -> Any:
        if next(calls) == 3:
            raise RuntimeError("can't start new thread")
        return real(*given)

    before = thread_count()
    with monkeypatch.context() as patch:
        patch.setattr(halt._thread, "start_new_thread", start)
        with pytest.raises(RuntimeError, match="can't start"):
            run(job, [(lines(job), whole(job))], threads=Threads(3, 3, 4096), devices=[device])
    assert device.is_closed
    assert no_more_threads_than(before)


@pytest.mark.parametrize("is_main", [False, True])
def test_who_watches_is_told_in_the_calling_thread(is_main: bool) -> None:
    job, told = big(120, 90, 50), []

    def watched() -> None:
        run(
            job,
            [(lines(job, 20_000), whole(job))],
            watch=lambda: told.append(threading.current_thread()),
        )

    caller = threading.main_thread() if is_main else threading.Thread(target=watched)
    if is_main:
        watched()
    else:
        caller.start()
        caller.join()
    assert set(told) == {caller}


def test_what_is_raised_by_who_watches_stops_all() -> None:
    job, device = big(), FakeDevice()

    def watch() -> None:
        raise ValueError("enough")

    before = thread_count()
    with pytest.raises(ValueError, match="enough"):
        run(job, [(lines(job), whole(job))], devices=[device], watch=watch)
    assert device.is_closed
    assert no_more_threads_than(before)


@pytest.mark.parametrize("watch", [None, lambda: None])
def test_a_signal_reaches_a_product_that_waits(watch: Any) -> None:
    job, device = big(), FakeDevice()
    schedule = lines(job)
    goes_on = threading.Event()
    real = device.copy_in

    def waits(*copy: int) -> None:
        assert goes_on.wait(20)
        real(*copy)

    device.copy_in = waits  # type: ignore[method-assign]
    main = threading.main_thread().ident
    assert main is not None
    timers = [
        threading.Timer(0.2, lambda: signal.pthread_kill(main, signal.SIGINT)),
        threading.Timer(0.4, goes_on.set),
    ]
    for timer in timers:
        timer.start()
    with pytest.raises(KeyboardInterrupt):
        run(
            job,
            [(schedule, whole(job))],
            threads=Threads(2, 2, 4096),
            devices=[device],
            watch=watch,
        )
    for timer in timers:
        timer.join()
    assert device.is_closed


@pytest.mark.parametrize("moved", [1 << 20, 64 << 20, 8 << 30])
@pytest.mark.parametrize("cores", [1, 2, 16, 64])
def test_pinned_memory_stays_in_its_budget(moved: int, cores: int) -> None:
    free = Threads.suited(moved, cores)
    assert free.ring_bytes <= 256 << 20
    assert 2 <= free.gathering + free.scattering <= 16
    for budget in (1 << 16, 1 << 20, 10 << 20, 100 << 20):
        made = Threads.suited(moved, cores, budget)
        assert made.ring_bytes <= budget
        assert made.gathering >= 1 <= made.scattering
