"""Calls without cuda.bindings take what the driver's own headers say."""

from __future__ import annotations

from typing import Any

import pytest

from tilewise.runtime import quick

bindings: Any = pytest.importorskip("cuda.bindings.driver")


def test_copies_of_lines_are_laid_out_as_the_driver_reads_them() -> None:
    theirs = bindings.CUDA_MEMCPY2D()
    numbers = iter(range(3, 99))
    expected = {}
    for name in ("srcXInBytes", "srcY", "srcHost", "srcDevice", "srcPitch", "dstXInBytes", "dstY"):
        expected[name] = next(numbers)
    for name in ("dstHost", "dstDevice", "dstPitch", "WidthInBytes", "Height"):
        expected[name] = next(numbers)
    for name, number in expected.items():
        setattr(theirs, name, number)
    theirs.srcMemoryType = bindings.CUmemorytype.CU_MEMORYTYPE_HOST
    theirs.dstMemoryType = bindings.CUmemorytype.CU_MEMORYTYPE_DEVICE
    ours = quick.Copy2D.from_address(theirs.getPtr())
    assert {name: getattr(ours, name) for name in expected} == expected
    assert (ours.srcMemoryType, ours.dstMemoryType) == (quick.HOST, quick.DEVICE)


def test_lines_say_where_each_kind_of_memory_is() -> None:
    how = quick.lines((quick.HOST, 1000, 64), (quick.DEVICE, 2000, 128), 48, 7)
    assert (how.srcMemoryType, how.srcHost, how.srcPitch) == (quick.HOST, 1000, 64)
    assert (how.dstMemoryType, how.dstDevice, how.dstPitch) == (quick.DEVICE, 2000, 128)
    assert (how.WidthInBytes, how.Height, how.srcY, how.dstXInBytes) == (48, 7, 0, 0)
