"""The device, its memory and its streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tilewise.errors import BudgetError, DeviceError, OptionError
from tilewise.runtime import device, driver, memory, streams
from tilewise.runtime.pinned import Pinned

pytestmark = pytest.mark.gpu


def test_the_facts_of_a_device() -> None:
    facts = device.facts(0)
    assert facts.index == 0
    assert facts.capability >= (8, 0)
    assert facts.multiprocessors > 0
    assert facts.memory_bytes >= device.free_bytes(0) > 0
    assert facts.driver_version >= driver.LEAST_VERSION
    assert facts is device.facts(0)


def test_devices_by_name() -> None:
    assert device.index_of("cuda") == device.index_of("cuda:0") == 0
    with pytest.raises(DeviceError, match="device cuda:99 was asked for, and there are"):
        device.index_of("cuda:99")
    with pytest.raises(OptionError, match="device 'gpu' is not 'cuda:0'"):
        device.index_of("gpu")


def test_what_was_current_is_current_again() -> None:
    cuda = driver.require()
    before = int(cuda.cuCtxGetCurrent()[1])
    with device.current(0):
        assert int(cuda.cuCtxGetCurrent()[1]) == int(device.primary_context(0))
        with pytest.raises(ValueError, match="inside"), device.current(0):
            raise ValueError("inside")
        assert int(cuda.cuCtxGetCurrent()[1]) == int(device.primary_context(0))
    assert int(cuda.cuCtxGetCurrent()[1]) == before


@pytest.mark.multigpu
def test_H3_the_current_device_stays_current() -> None:
    cuda = driver.require()
    with device.current(1):
        memory.allocate(64, 0, streams.DEFAULT).free()
        assert int(cuda.cuCtxGetCurrent()[1]) == int(device.primary_context(1))


def test_memory_goes_and_comes_back() -> None:
    x = np.arange(1000, dtype=np.int64)
    with memory.allocate(x.nbytes + 8, 0, streams.DEFAULT) as held:
        memory.fill(held, 0xFF, streams.DEFAULT)
        memory.write(held, x, streams.DEFAULT)
        y = np.zeros(1001, np.int64)
        memory.read(held, y, streams.DEFAULT)
    np.testing.assert_array_equal(y, [*x, -1])


def test_pinned_memory() -> None:
    with Pinned(1 << 20) as pinned:
        pinned.array[:] = np.arange(1 << 20) % 251
        with memory.allocate(1 << 20, 0, streams.DEFAULT) as held:
            memory.write(held, pinned.array, streams.DEFAULT)
            copy = np.zeros_like(pinned.array)
            memory.read(held, copy, streams.DEFAULT)
        np.testing.assert_array_equal(copy, pinned.array)
    pinned.free()
    with Pinned(100) as again:  # what was unpinned can be pinned anew
        assert again.array.nbytes == 100


def test_memory_is_given_back() -> None:
    streams.synchronize(streams.DEFAULT, 0)
    free = device.free_bytes(0)
    with memory.allocate(1 << 30, 0, streams.DEFAULT):
        assert device.free_bytes(0) <= free - (960 << 20)
    streams.synchronize(streams.DEFAULT, 0)
    assert device.free_bytes(0) >= free - (64 << 20)


def test_D_too_much_memory_is_refused_with_the_numbers() -> None:
    total = device.facts(0).memory_bytes
    with pytest.raises(BudgetError, match=r"a needs .* on cuda:0, which has .* free of .*memory="):
        memory.allocate(2 * total, 0, streams.DEFAULT, "a")
    memory.allocate(64, 0, streams.DEFAULT).free()


@pytest.mark.parametrize("array", [np.zeros((4, 4))[:, ::2], np.zeros(65)])
def test_arrays_that_do_not_fit_are_refused(array: Any) -> None:
    with memory.allocate(512, 0, streams.DEFAULT) as held:
        with pytest.raises(DeviceError, match="is not a C-contiguous array of at most 512 bytes"):
            memory.write(held, array, streams.DEFAULT)
        with pytest.raises(DeviceError, match="is not a C-contiguous"):
            memory.read(held, array, streams.DEFAULT)


def test_results_are_not_read_into_what_cannot_be_written() -> None:
    array = np.zeros(4)
    array.flags.writeable = False
    with (
        memory.allocate(32, 0, streams.DEFAULT) as held,
        pytest.raises(DeviceError, match="cannot be written"),
    ):
        memory.read(held, array, streams.DEFAULT)


@pytest.fixture
def stream() -> Iterator[Any]:
    """Return a stream of cuda.core."""
    from cuda.core import Device

    with device.current(0):
        Device(0).set_current()
        made = Device(0).create_stream()
        yield made
        made.close()


def test_a_stream_of_another_library(stream: Any) -> None:
    assert streams.handle_of(stream, 0) == int(stream.handle)
    assert streams.identity(int(stream.handle), 0) != streams.identity(streams.DEFAULT, 0)


def test_a_stream_of_torch() -> None:
    torch = pytest.importorskip("torch")
    stream = torch.cuda.Stream()
    if hasattr(stream, "__cuda_stream__"):
        assert streams.handle_of(stream, 0) == stream.cuda_stream


def test_a_stream_of_cupy() -> None:
    cupy = pytest.importorskip("cupy")
    stream = cupy.cuda.Stream()
    assert streams.handle_of(stream, 0) == stream.ptr


@pytest.mark.multigpu
def test_a_stream_of_another_device_is_refused() -> None:
    from cuda.core import Device

    with device.current(1):
        Device(1).set_current()
        other = Device(1).create_stream()
    with pytest.raises(DeviceError, match=r"is of device cuda:1 and the operands are on cuda:0"):
        streams.handle_of(other, 0)


def test_a_workspace_is_one_stretch_a_stream(stream: Any) -> None:
    space = memory.Workspace(0)
    handle = int(stream.handle)
    with space.on(handle, 1000) as first:
        pass
    with space.on(handle, 500) as again:
        assert again == first
    with space.on(streams.DEFAULT, 1000) as other:
        assert other != first
    with space.on(handle, 1 << 20):
        assert space.held_bytes == 1000 + (1 << 20)
    space.release()
    assert space.held_bytes == 0
    with space.on(handle, 8) as pointer:
        assert pointer
    space.release()
