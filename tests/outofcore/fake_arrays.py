"""Arrays in the memory of GPUs made of NumPy, of a library that has a stream of its own."""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from tests.outofcore.fake_device import FakeCuda
from tilewise import _arrays
from tilewise.runtime.arrays import DeviceArray
from tilewise.runtime.streams import DEFAULT

__all__ = ["Onboard", "late", "onboard_library"]


class Onboard:
    """An array in device memory: ``array`` is what its GPU sees there, now."""

    __module__ = "onboard"

    def __init__(self, array: Any, index: int = 0, is_readonly: bool = False) -> None:
        self.array, self.index, self.is_readonly = array, index, is_readonly

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.index


def late(fake: FakeCuda, x: Any) -> Onboard:
    """Return an array whose elements come when its library's stream has come so far."""
    raw = np.full(x.nbytes + 256, 0xA5, np.uint8)
    there = np.ndarray(x.shape, x.dtype, raw, -raw.ctypes.data % 16)
    values = np.ascontiguousarray(x)
    place = there.ctypes.data, values.ctypes.data, values.nbytes
    kept = raw, values
    fake.compute(DEFAULT, lambda: (kept, ctypes.memmove(*place)))
    return Onboard(there)


def onboard_library(monkeypatch: Any) -> None:
    """Let tilewise know the library of `Onboard`, as it knows torch."""

    def adopt(x: Onboard, name: str, is_out: bool) -> DeviceArray:
        array = x.array
        pointer = array.__array_interface__["data"][0]
        steps = array.strides
        return DeviceArray(pointer, array.shape, steps, array.dtype, x.index, x.is_readonly, x)

    library = SimpleNamespace(array=Onboard, stream=lambda index: 0, adopt=adopt)
    known = _arrays.known_library
    monkeypatch.setitem(sys.modules, "onboard", ModuleType("onboard"))
    monkeypatch.setattr(
        _arrays, "known_library", lambda name: library if name == "onboard" else known(name)
    )
