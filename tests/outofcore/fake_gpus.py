"""GPUs made of NumPy beneath all of tilewise: everything but the kernels, from call to result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.outofcore.fake_device import FakeCuda
from tests.test_gpu_plan import gpu
from tilewise import _api, _gpu, _recipe, _streamed
from tilewise._operand import Operand
from tilewise.errors import DeviceError
from tilewise.outofcore import device_choice
from tilewise.runtime import device, driver, memory, pinned, quick

__all__ = ["bindings", "fake_gpus"]

bindings = pytest.importorskip("cuda.bindings.driver")


@contextmanager
def fake_gpus(monkeypatch: Any) -> Iterator[FakeCuda]:
    """Two GPUs of 1 GiB, whose kernels are NumPy's products; every product is cut for them.

    What a product leaves of its operands in its workspace is there for the next one to go on from,
    whatever has become of the operands.
    """
    fake = FakeCuda(bindings, gpus=2)
    operands: dict[int, Any] = {}
    left: dict[int, list[Any]] = {}
    real_recipe = _recipe.recipe

    def recipe(a: Operand, b: Operand, c: Operand, batch: Any, **options: Any) -> Any:
        made = real_recipe(a, b, c, batch, **options)
        for side, recipe in enumerate((*(each.recipe for each in made.kept), made)):
            operands[id(recipe)] = recipe, side if recipe is not made else None, a, b, c
        return made

    def launch(made: Any, index: int, pointers: Any, stream: int, numbers: Any) -> None:
        _, kept, *described = operands[id(made)]
        a, b, c = (view(at, x) for at, x in zip(pointers, described, strict=False))
        assert made.workspace_bytes == 0 or pointers[3]
        for at, x in zip(pointers, described, strict=False):
            assert at % (16 if x.aligned else 1) == 0, "kernels were chosen for aligned operands"

        def work() -> None:
            given = [a, b]
            if kept is not None:
                given[kept] = left[pointers[3]][kept]
            left[pointers[3]] = [x.copy() for x in given]
            wide = {"b": bool, "c": complex}.get(np.result_type(a, b).kind, float)
            wide = np.int64 if c.dtype.kind in "iu" else wide
            product = np.matmul(*(x.astype(wide) for x in given))
            c[...] = (product + numbers[1] * c if numbers[1] else product).astype(c.dtype)

        fake.compute(stream, work)

    def facts(index: int) -> Any:
        if index > 1:
            raise DeviceError(f"device cuda:{index} was asked for, and there are 2 here")
        return gpu_numbered(index)

    monkeypatch.setattr(driver, "_driver", fake)
    monkeypatch.setattr(quick, "calls", fake.quick)
    monkeypatch.setattr(device, "facts", facts)
    monkeypatch.setattr(memory, "facts", facts)
    monkeypatch.setattr(device, "_primary_contexts", {0: 0, 1: 1})
    monkeypatch.setattr(memory, "_pools", {})
    monkeypatch.setattr(_recipe, "recipe", recipe)
    monkeypatch.setattr(_gpu, "launch", launch)
    monkeypatch.setattr(_streamed, "_STREAMED_BYTES", 0)
    monkeypatch.setattr(device_choice, "_PANEL_BYTES", 1)
    monkeypatch.setattr(device_choice, "_LINE_BYTES", 1)
    _api._cached_plan.cache_clear()
    yield fake
    pinned.release()
    _api._cached_plan.cache_clear()
    for pool in memory._pools.values():
        pool.trim()
    assert fake.free_bytes == [1 << 30] * 2
    assert not fake.memory
    assert not fake.events
    assert list(fake.streams) == [1]
    assert not fake.pinned


def gpu_numbered(index: int) -> Any:
    return replace(gpu(), index=index, memory_bytes=2 << 30)


def view(pointer: int, x: Operand) -> Any:
    steps = [(n - 1) * step for n, step in zip(x.shape, x.strides, strict=True)]
    before = -sum(step for step in steps if step < 0)
    nbytes = before + sum(step for step in steps if step > 0) + x.dtype.itemsize
    raw = (np.ctypeslib.ctypes.c_uint8 * nbytes).from_address(pointer - before)
    return np.ndarray(x.shape, x.dtype, raw, before, x.strides)
