"""Which GPUs there are, what each is, and making one current for a while."""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tilewise.errors import DeviceError, OptionError

from . import driver

__all__ = ["DeviceFacts", "count", "current", "facts", "free_bytes", "index_of", "primary_context"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """What does not change about a GPU, as far as a plan or a launch depends on it."""

    index: int
    name: str
    capability: tuple[int, int]
    multiprocessors: int
    memory_bytes: int
    driver_version: int

    @property
    def fp64_rate(self) -> float:
        """The rate of float64 arithmetic, of float32's.

        Source: CUDA C++ Programming Guide, "Arithmetic Instructions", operations a clock cycle.
        """
        return 1 / 2 if self.capability in ((8, 0), (9, 0), (10, 0)) else 1 / 64


def count() -> int:
    """Return how many GPUs this process sees."""
    cuda = driver.require()
    return int(driver.check(cuda.cuDeviceGetCount(), "counting devices"))


@lru_cache
def facts(index: int) -> DeviceFacts:
    """Return the facts of a GPU; asked once in the life of the process.

    Raises
    ------
    DeviceError
        If there is no such device.
    """
    cuda = driver.require()
    if not 0 <= index < count():
        raise DeviceError(f"device cuda:{index} was asked for, and there are {count()} here")
    from cuda.core import Device

    properties = Device(index).properties
    handle = driver.check(cuda.cuDeviceGet(index), f"opening cuda:{index}")
    return DeviceFacts(
        index=index,
        name=str(Device(index).name),
        capability=(properties.compute_capability_major, properties.compute_capability_minor),
        multiprocessors=properties.multiprocessor_count,
        memory_bytes=driver.check(cuda.cuDeviceTotalMem(handle), f"asking cuda:{index}"),
        driver_version=driver.check(cuda.cuDriverGetVersion(), "asking for the driver's version"),
    )


def index_of(name: str) -> int:
    """Return the number in ``"cuda:1"``, of a device that is there; "cuda" is the first."""
    match = re.fullmatch(r"cuda(?::(\d+))?", name)
    if match is None:
        raise OptionError(f"device {name!r} is not 'cuda:0', 'cuda:1' and so on")
    return facts(int(match[1] or 0)).index


def free_bytes(index: int) -> int:
    """Return the memory of a GPU that nobody holds."""
    with current(index) as cuda:
        return int(driver.check(cuda.cuMemGetInfo(), f"asking cuda:{index} for free memory")[0])


class current:
    """Make a GPU current in this thread, and afterwards whatever was; gives the driver.

    The context is the device's primary one, which torch, CuPy and JAX share. (A class, since a
    generator costs three times as much.)
    """

    __slots__ = ("_index",)

    def __init__(self, index: int) -> None:
        self._index = index

    def __enter__(self) -> Any:
        context = primary_context(self._index)
        cuda = driver.require()
        driver.check(cuda.cuCtxPushCurrent(context), f"making cuda:{self._index} current")
        return cuda

    def __exit__(self, *_: object) -> None:
        driver.require().cuCtxPopCurrent()


_primary_lock = threading.Lock()
_primary_contexts: dict[int, Any] = {}


def primary_context(index: int) -> Any:
    """Return a GPU's primary context, which this process then keeps for as long as it lives."""
    context = _primary_contexts.get(index)
    if context is None:
        facts(index)
        cuda = driver.require()
        with _primary_lock:
            if index not in _primary_contexts:
                device = driver.check(cuda.cuDeviceGet(index), f"opening cuda:{index}")
                _primary_contexts[index] = driver.check(
                    cuda.cuDevicePrimaryCtxRetain(device), f"starting cuda:{index}"
                )
        context = _primary_contexts[index]
    return context
