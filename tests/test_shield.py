"""Ctrl-C may come at any step, also in a call of the driver, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import itertools
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.storage import LocalStore

import tilewise as tw
from tests.outofcore.fake_device import FakeCuda
from tests.outofcore.fake_gpus import fake_gpus
from tests.support import small_integers
from tilewise._shield import shielded
from tilewise.outofcore.flat import FlatFile
from tilewise.outofcore.pipeline import multiply_files


@pytest.fixture
def cuda(monkeypatch: Any) -> Iterator[FakeCuda]:
    """GPUs of which all has to be given back by the end of a test."""
    with fake_gpus(monkeypatch) as fake:
        yield fake


def interrupt() -> None:
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


@pytest.mark.parametrize(
    ("name", "nth"),
    [
        ("cuMemHostRegister", 0),
        ("cuStreamCreate", 0),
        ("cuStreamCreate", 2),
        ("cuMemAllocFromPoolAsync", 0),
        ("cuEventCreate", 1),
        ("cuMemFreeAsync", 0),
        ("cuEventDestroy", 1),
        ("cuStreamDestroy", 0),
    ],
)
def test_control_c_in_a_call_of_the_driver_leaves_nothing_behind(
    cuda: FakeCuda, monkeypatch: Any, name: str, nth: int
) -> None:
    a = small_integers(np.random.default_rng(5), (300, 300), "float32")
    real, calls = getattr(cuda, name), itertools.count()

    def interrupted(*given: Any) -> Any:
        result = real(*given)
        if next(calls) == nth:
            interrupt()  # raised in the main thread, if this is it, before the result is known
        return result

    with monkeypatch.context() as patch:
        patch.setattr(cuda, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            tw.matmul(a, a, devices="cuda:0", memory="2MiB")
    assert (tw.matmul(a, a, devices="cuda:0", memory="2MiB") == a @ a).all()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, TimeoutError])
def test_work_is_done_to_its_end_and_then_the_interrupt_is_raised(
    kind: type[BaseException],
) -> None:
    done = []

    def handler(*_: object) -> None:
        raise kind

    def work() -> None:
        interrupt()
        time.sleep(0.05)
        interrupt()
        done.append(threading.current_thread().name)

    threads = threading.active_count()
    before = signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises(kind):
            shielded(work)
    finally:
        signal.signal(signal.SIGINT, before)
    assert done == ["tilewise-shielded"]
    assert threading.active_count() == threads


def test_an_interrupt_is_told_to_the_work_at_once() -> None:
    told, stop = [], threading.Event()

    def work() -> None:
        interrupt()
        assert stop.wait(20)

    def interrupted(error: BaseException) -> None:
        told.append(error)
        stop.set()

    with pytest.raises(KeyboardInterrupt) as caught:
        shielded(work, interrupted)
    assert set(told) == {caught.value}


@pytest.mark.parametrize("is_main", [False, True])
def test_the_calling_thread_does_something_meanwhile(is_main: bool) -> None:
    done, goes_on = [], threading.Event()

    def meanwhile() -> None:
        done.append(threading.current_thread())
        goes_on.set()

    def call() -> None:
        shielded(lambda: goes_on.wait(20), meanwhile=meanwhile)

    caller = threading.main_thread() if is_main else threading.Thread(target=call)
    if is_main:
        call()
    else:
        caller.start()
        caller.join()
    assert done == [caller]


def masked(*_: object, interrupt: BaseException | None = None) -> None:
    """Do as CPython does where an interrupt comes to one who waits for a condition."""
    condition = threading.Condition()
    try:
        condition.acquire()
        condition.release()
        raise interrupt or KeyboardInterrupt
    finally:
        condition.release()


def test_an_interrupt_that_breaks_a_lock_is_an_interrupt(
    tmp_path: Path, monkeypatch: Any, cuda: FakeCuda
) -> None:
    with pytest.raises(RuntimeError, match="un-acquired lock"):
        masked()
    ended = threading.Event()
    with pytest.raises(KeyboardInterrupt):
        shielded(lambda: ended.wait(20), lambda _: ended.set(), masked)
    a = small_integers(np.random.default_rng(1), (60, 40), "float32")
    for devices in ("cpu", "cuda:0"):
        with pytest.raises(KeyboardInterrupt):
            multiply_files(a, a.T, tmp_path / "c.npy", progress=masked, devices=devices)
    for interrupt in (SystemExit(143), TimeoutError()):  # of SIGTERM, of a handler of one's own
        with pytest.raises(type(interrupt)):
            multiply_files(
                a, a.T, tmp_path / "c.npy", progress=partial(masked, interrupt=interrupt)
            )
    assert list(tmp_path.iterdir()) == []
    start = threading.Thread.start

    def broken(self: threading.Thread) -> None:
        start(self)
        masked()

    monkeypatch.setattr(threading.Thread, "start", broken)
    with pytest.raises(KeyboardInterrupt):
        shielded(lambda: None)


def test_an_error_of_the_work_comes_before_an_interrupt() -> None:
    def work() -> None:
        interrupt()
        raise ValueError("the work's own")

    with pytest.raises(ValueError, match="the work's own"):
        shielded(work)


@pytest.mark.parametrize("is_begun", [False, True])
def test_control_c_while_the_thread_is_started(monkeypatch: Any, is_begun: bool) -> None:
    real, done = threading.Thread.start, []

    def start(self: threading.Thread) -> None:
        if is_begun:
            real(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(KeyboardInterrupt):
        shielded(lambda: done.append(1))
    assert done == [1]


def test_without_threads_the_main_one_does_it(monkeypatch: Any) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    done = []
    shielded(lambda: done.append(threading.current_thread()))
    assert done == [threading.main_thread()]


def test_other_threads_are_not_interrupted_and_do_it_themselves() -> None:
    done: list[threading.Thread] = []
    worker = threading.Thread(
        target=shielded, args=(lambda: done.append(threading.current_thread()),)
    )
    worker.start()
    worker.join()
    assert done == [worker]


@pytest.mark.parametrize("name", ["tilewise-read", "tilewise-write"])
def test_threads_that_have_files_are_waited_for(
    tmp_path: Path, monkeypatch: Any, name: str
) -> None:
    a = small_integers(np.random.default_rng(5), (300, 300), "float64")
    np.save(tmp_path / "a.npy", a)
    real_start, real_read = threading.Thread.start, FlatFile.read
    product = partial(multiply_files, tmp_path / "a.npy", a, tmp_path / "c.npy", memory="500KiB")

    def start(self: threading.Thread) -> None:
        real_start(self)
        if self.name.startswith(name):
            interrupt()

    def read(self: FlatFile, *given: Any) -> Any:
        interrupt()
        time.sleep(0.05)
        return real_read(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        patch.setattr(FlatFile, "read", read)
        with pytest.raises(KeyboardInterrupt):
            product()
    assert not [each for each in threading.enumerate() if "tilewise" in each.name]
    product()
    assert (np.load(tmp_path / "c.npy") == a @ a).all()


@pytest.mark.parametrize("nth", [0, 1])
def test_zarr_writes_nothing_after_an_interrupt(tmp_path: Path, monkeypatch: Any, nth: int) -> None:
    a = small_integers(np.random.default_rng(5), (30, 30), "float64")
    real, calls = LocalStore.set, itertools.count()

    async def late(self: LocalStore, *given: Any) -> None:
        if next(calls) == nth:  # its metadata, its chunk
            interrupt()
            await asyncio.sleep(0.05)
        await real(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "set", late)
        with pytest.raises(KeyboardInterrupt):
            multiply_files(a, a, tmp_path / "c.zarr")
    time.sleep(0.1)
    assert list(tmp_path.iterdir()) == []
    multiply_files(a, a, tmp_path / "c.zarr")
    assert (zarr.open_array(tmp_path / "c.zarr", mode="r")[:] == a @ a).all()
