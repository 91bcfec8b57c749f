"""Launches on a GPU: every kind of argument, every way to fail, threads, processes, graphs."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.gpu.conftest import BUILT
from tilewise import kernels
from tilewise.errors import DeviceError
from tilewise.kernels.steps import Number, Pointer, Tensor
from tilewise.runtime import device, driver, launch, memory, streams
from tilewise.runtime.launch import Launch

pytestmark = pytest.mark.gpu

Find = Callable[[str], kernels.Built]
Vector = NDArray[np.float32]


@pytest.fixture
def stream() -> Iterator[int]:
    """Return a stream of device 0, other than the default one."""
    with device.current(0) as cuda:
        made = driver.check(cuda.cuStreamCreate(1), "making a stream")
    yield int(made)
    cuda.cuStreamDestroy(made)


def axpy(built: Find, n: int) -> Launch:
    return Launch(
        built("axpy"),
        0,
        (-(-n // 1024),),
        {"x": Pointer(0), "y": Pointer(1), "n": n, "alpha": Number(0)},
        what=f"axpy of {n} elements",
    )


def on_device(array: NDArray[np.generic], stream: int) -> memory.Memory:
    held = memory.allocate(array.nbytes, 0, stream)
    memory.write(held, array, stream)
    return held


def read(held: memory.Memory, like: NDArray[np.generic], stream: int) -> NDArray[np.generic]:
    result = np.full_like(like, 77)
    memory.read(held, result, stream)
    return result


def check_axpy(call: Launch, stream: int, n: int, alpha: float = 3.0) -> None:
    x, y = np.arange(n, dtype=np.float32), np.ones(n + 5, np.float32)
    with on_device(x, stream) as x_gmem, on_device(y, stream) as y_gmem:
        call(stream, (x_gmem.pointer, y_gmem.pointer), (alpha,))
        result = read(y_gmem, y, stream)
    np.testing.assert_array_equal(result[:n], 1 + alpha * x)
    np.testing.assert_array_equal(result[n:], 1)


@pytest.mark.parametrize("n", [1, 1023, 1024, 1025, 100_000])
@pytest.mark.parametrize("default", [True, False])
def test_numbers_and_pointers(built: Find, stream: int, n: int, default: bool) -> None:
    check_axpy(axpy(built, n), streams.DEFAULT if default else stream, n)


@pytest.mark.parametrize("n", [1, 5000])
def test_clusters_of_blocks(built: Find, stream: int, n: int) -> None:
    kernel = built("pair")
    assert kernel.blocks == 2
    check_axpy(axpy(lambda name: kernel, n), stream, n)


def test_kernels_that_start_early_wait_for_what_they_read(built: Find, stream: int) -> None:
    kernel = built("early")
    assert kernel.starts_early
    n = 1 << 20
    call, x = axpy(lambda name: kernel, n), np.ones(n, np.float32)
    with on_device(x, stream) as one, on_device(x, stream) as two:
        for turn in range(10):
            first, second = (one, two) if turn % 2 else (two, one)
            call(stream, (first.pointer, second.pointer), (1.0,))
        # The Fibonacci numbers, if each launch saw what the one before had written.
        np.testing.assert_array_equal(read(one, x, stream), np.full_like(x, 89))
        np.testing.assert_array_equal(read(two, x, stream), np.full_like(x, 144))


def test_pointers_and_numbers_may_change_from_call_to_call(built: Find, stream: int) -> None:
    call = axpy(built, 1000)
    for alpha in (1.0, 2.0, 2.0, -4.0):
        check_axpy(call, stream, 1000, alpha)
    x = np.ones(1000, np.float32)
    with on_device(x, stream) as one, on_device(x, stream) as two:
        call(stream, (one.pointer, two.pointer), (1.0,))
        call(stream, (two.pointer, one.pointer), (1.0,))
        call(stream, (two.pointer, one.pointer), (0.5,))
        np.testing.assert_array_equal(read(two, x, stream), np.full_like(x, 2))
        np.testing.assert_array_equal(read(one, x, stream), np.full_like(x, 4))


def test_a_pointer_with_an_offset(built: Find, stream: int) -> None:
    arguments = {"x": Pointer(0, 16), "y": Pointer(0), "n": 4, "alpha": 1.0}
    call = Launch(built("axpy"), 0, (1,), arguments)
    x = np.arange(8, dtype=np.float32)
    with on_device(x, stream) as held:
        call(stream, (held.pointer,))
        np.testing.assert_array_equal(read(held, x, stream), [4, 6, 8, 10, 4, 5, 6, 7])


def test_travelling_ptx_runs_where_no_cubin_does(built: Find, stream: int) -> None:
    """Case F3: a device newer than every cubin gets PTX, which its driver compiles."""
    newer = kernels.find("kernels", "axpy", (99, 0), BUILT)
    assert newer.target == "compute_80"
    check_axpy(axpy(lambda name: newer, 3000), stream, 3000)


@pytest.mark.parametrize("shape", [(64, 64), (100, 72), (1, 8), (300, 1000)])
def test_tensor_maps(built: Find, stream: int, shape: tuple[int, int]) -> None:
    """A TMA copy into a wider target: nothing beside the tile is written, zeros fill the edge."""
    rows, columns = shape
    source = np.arange(rows * columns, dtype=np.uint16).reshape(shape)
    pitch = columns + 24
    target = np.full((rows + 2, pitch), 0x7FFF, np.uint16)
    grid = (-(-rows // 64), -(-columns // 64))
    call = Launch(
        built("copy"),
        0,
        grid,
        {
            "source": Tensor(0, shape, (columns, 1), 2),
            "target": Tensor(1, shape, (pitch, 1), 2, offset_bytes=16),
        },
    )
    with on_device(source, stream) as a, on_device(source[::-1].copy(), stream) as b:
        for held, expected in ((a, source), (b, source[::-1]), (a, source)):
            with on_device(target, stream) as out:
                call(stream, (held.pointer, out.pointer))
                result = read(out, target, stream)
            np.testing.assert_array_equal(result[:rows, 8 : 8 + columns], expected)
            result[:rows, 8 : 8 + columns] = 0x7FFF
            np.testing.assert_array_equal(result, target)


def test_a_tensor_that_has_no_map_is_named(built: Find) -> None:
    with pytest.raises(DeviceError, match=r"source of shape \(64, 64\) with strides of \(63, 1\)"):
        Launch(
            built("copy"),
            0,
            (1,),
            {"source": Tensor(0, (64, 64), (63, 1), 2), "target": Tensor(1, (64, 64), (64, 1), 2)},
        )


def test_arrays_of_numba(built: Find, stream: int) -> None:
    x = np.arange(33 * 47, dtype=np.float32).reshape(33, 47)
    arguments = {"x": Tensor(0, x.shape, (47, 1), 4), "factor": Number(0)}
    call = Launch(built("scale"), 0, (3, 5), arguments, block=(16, 16))
    with on_device(x, stream) as held:
        call(stream, (held.pointer,), (-2.5,))
        np.testing.assert_array_equal(read(held, x, stream), x * np.float32(-2.5))


def test_more_shared_memory_than_is_given_unasked(built: Find, stream: int) -> None:
    x = np.arange(128 * 128, dtype=np.float32).reshape(128, 128)
    call = Launch(built("hog"), 0, (1,), {"x": Pointer(0)})
    with on_device(x, stream) as held:
        call(stream, (held.pointer,))
        np.testing.assert_array_equal(read(held, x, stream), x.T)


def test_B22_a_launch_that_fails_is_named_and_the_next_one_works(built: Find, stream: int) -> None:
    hungry = dataclasses.replace(built("axpy"), shared_bytes=40_000, name="hungry")
    arguments = {"x": Pointer(0), "y": Pointer(1), "n": 1000, "alpha": 3.0}
    bad = Launch(hungry, 0, (1,), arguments, block=(1024, 2), what="(10, 20) by (20, 30)")
    call = axpy(built, 1000)
    for _ in range(20):
        with pytest.raises(
            DeviceError,
            match=r"kernel kernels/hungry .* on cuda:0 for \(10, 20\) by \(20, 30\).*CUDA_ERROR",
        ):
            bad(stream, (256, 256))
        check_axpy(call, stream, 1000)


def test_a_misaligned_pointer_is_refused_before_the_launch(built: Find, stream: int) -> None:
    call = axpy(built, 8)
    x = np.ones(12, np.float32)
    with on_device(x, stream) as held:
        with pytest.raises(DeviceError, match="y is not aligned to 16 bytes"):
            call(stream, (held.pointer, held.pointer + 4), (1.0,))
        np.testing.assert_array_equal(read(held, x, stream), x)
        call(stream, (held.pointer, held.pointer), (1.0,))
        assert read(held, x, stream).sum() == 8 * 2 + 4


@pytest.mark.parametrize("code", [b"not a cubin", b""])
def test_code_that_does_not_load_is_named(built: Find, tmp_path: Path, code: bytes) -> None:
    import hashlib

    path = tmp_path / "broken.cubin"
    path.write_bytes(code)
    broken = dataclasses.replace(
        built("axpy"), path=path, code_sha256=hashlib.sha256(code).hexdigest()
    )
    with pytest.raises(DeviceError, match=r"kernel kernels/axpy .* does not load on cuda:0"):
        launch.load(broken, 0)


def test_F13_threads_share_a_launch_and_do_not_mix(built: Find) -> None:
    call = axpy(built, 4096)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            with device.current(0) as cuda:
                own = int(driver.check(cuda.cuStreamCreate(1), "making a stream"))
            for turn in range(50):
                check_axpy(call, own if seed % 3 else streams.DEFAULT, 4096, seed + turn)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


@pytest.mark.parametrize("default", [True, False])
def test_F15_a_thread_of_which_CUDA_knows_nothing(built: Find, stream: int, default: bool) -> None:
    """A launch in a fresh thread needs no current device, and leaves none."""
    chosen = streams.DEFAULT if default else stream
    call = axpy(built, 100)
    x = np.ones(100, np.float32)
    seen: list[object] = []

    def work() -> None:
        with on_device(x, chosen) as held:
            call(chosen, (held.pointer, held.pointer), (1.0,))
            seen.append(read(held, x, chosen))
        seen.append(int(driver.require().cuCtxGetCurrent()[1]))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    np.testing.assert_array_equal(seen[0], x * 2)
    assert seen[1] == 0


def test_a_launch_can_be_captured_in_a_graph(built: Find, stream: int) -> None:
    n = 2048
    call, x = axpy(built, n), np.ones(n, np.float32)
    space = memory.workspace(0)
    with (
        device.current(0) as cuda,
        on_device(x, stream) as x_gmem,
        on_device(0 * x, stream) as y_gmem,
    ):
        mode = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        driver.check(cuda.cuStreamBeginCapture(stream, mode), "capturing")
        assert streams.identity(stream, 0) is None
        with space.on(stream, x.nbytes) as scratch:
            copied = cuda.cuMemcpyDtoDAsync(scratch, x_gmem.pointer, x.nbytes, stream)
            driver.check(copied, "copying")
            call(stream, (scratch, y_gmem.pointer), (1.0,))
        graph = driver.check(cuda.cuStreamEndCapture(stream), "capturing")
        ready = driver.check(cuda.cuGraphInstantiate(graph, 0), "instantiating")
        for _ in range(5):
            driver.check(cuda.cuGraphLaunch(ready, stream), "replaying")
        np.testing.assert_array_equal(read(y_gmem, x, stream), 5 * x)
        cuda.cuGraphExecDestroy(ready)
        cuda.cuGraphDestroy(graph)


def faulting(results: object) -> None:
    """Launch three kernels, of which the second writes where there is nothing."""
    built = kernels.find("kernels", "axpy", device.facts(0).capability, BUILT)
    arguments = {"x": Pointer(0), "y": Pointer(1), "n": 1000, "alpha": 1.0}
    with memory.allocate(4000, 0, streams.DEFAULT) as held:
        good, bad = held.pointer, 1 << 46
        try:
            for number, pointer in enumerate((good, bad, good)):
                call = Launch(built, 0, (1,), arguments, what=f"product {number}")
                call(streams.DEFAULT, (good, pointer))
                call.finish(streams.DEFAULT)
        except DeviceError as error:
            results.send(str(error))
            os._exit(0)


def test_B23_a_fault_is_raised_by_the_kernel_that_made_it() -> None:
    """In a process of its own, since no GPU can be used in one that has seen a fault."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=faulting, args=(there,))
    child.start()
    assert here.poll(60)
    said = here.recv()
    child.join()
    assert "kernel kernels/axpy" in said
    assert "for product 1" in said
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in said
    assert "start a new one" in said


def forked(results: object) -> None:
    try:
        memory.allocate(16, 0, streams.DEFAULT)
    except DeviceError as error:
        results.send(str(error))
    else:
        results.send("it ran")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*fork")  # Python's, and JAX's where a test imported it
@pytest.mark.parametrize(
    ("method", "said"), [("fork", "was forked from one that had used CUDA"), ("spawn", "it ran")]
)
def test_F14_forked_and_spawned_processes(method: str, said: str) -> None:
    memory.allocate(16, 0, streams.DEFAULT).free()
    context = multiprocessing.get_context(method)
    here, there = context.Pipe()
    child = context.Process(target=forked, args=(there,))
    child.start()
    assert here.poll(60)
    assert said in here.recv()
    child.join()
