"""Operands of other libraries: adopted without a copy, and answered in kind."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilewise as tw
from tilewise import _arrays
from tilewise.errors import DeviceError, DTypeError


class Tensor:
    """An array of a library of our own that speaks DLPack and nothing else."""

    def __init__(self, data: Any, device: tuple[int, int] = (1, 0)) -> None:
        self.data = data
        self.device = device
        self.shape = data.shape

    def __dlpack__(self, **options: Any) -> Any:
        return self.data.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


@pytest.fixture
def library(monkeypatch: Any) -> ModuleType:
    module = ModuleType("otherlib")
    module.from_dlpack = lambda x: Tensor(np.from_dlpack(x))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "otherlib", module)
    monkeypatch.setattr(Tensor, "__module__", "otherlib.tensors")
    return module


def test_the_result_is_of_the_operands_kind(library: ModuleType) -> None:
    a = np.arange(6.0).reshape(2, 3)
    for x, y in ((Tensor(a), Tensor(a.T)), (Tensor(a), a.T), (a, Tensor(a.T))):
        got = tw.matmul(x, y)
        assert type(got) is Tensor
        assert np.array_equal(got.data, a @ a.T)
    out = Tensor(np.empty((2, 2)))
    assert tw.matmul(Tensor(a), a.T, out=out) is out
    assert np.array_equal(out.data, a @ a.T)


def test_a_library_says_how_its_arrays_are_made_and_never_narrows_a_result() -> None:
    """As JAX has it: arrays are of a package that makes none, and of 32 bits unless told."""

    class Array(Tensor):
        dtype = property(lambda self: self.data.dtype)

        def __array_namespace__(self) -> Any:
            return SimpleNamespace(from_dlpack=from_dlpack, asarray=lambda x: Array(x))

    def from_dlpack(x: Any) -> Array:
        if x.dtype.kind == "b":
            raise BufferError("not of bools")
        return Array(x.astype({"f8": "f4", "i8": "i4"}.get(x.dtype.str[1:], x.dtype)))

    ones = np.ones((2, 2), "f4")
    got = tw.matmul(Array(ones), ones)
    assert type(got) is Array
    assert got.data.dtype == "f4"
    assert type(tw.matmul(Array(ones > 0), Array(ones > 0))) is Array
    for dtype in ("f8", "i8"):
        wide = tw.matmul(Array(ones.astype("i1")), ones.astype("i1"), dtype=dtype)
        assert type(wide) is Array
        assert wide.data.dtype == dtype


def test_a_result_that_its_library_has_no_type_for_stays_with_numpy(monkeypatch: Any) -> None:
    def refuse(x: Any) -> Any:
        raise TypeError(f"can't convert np.ndarray of type {x.dtype}")

    torch = ModuleType("torch")
    torch.from_numpy = refuse  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    tensor = type("Tensor", (), {"__module__": "torch"})()
    for result in (np.ones((2, 2), "g"), np.ones((2, 2), ml_dtypes.float8_e3m4)):
        assert _arrays.give_back(result, tensor) is result


def test_a_device_library_that_narrows_what_is_asked_for_gets_no_product(monkeypatch: Any) -> None:
    """Its array would be too small for what a kernel writes."""

    def empty(shape: Any, dtype: Any, device: Any) -> Any:
        return Tensor(np.empty(shape, np.float32), (2, 0))

    class Array(Tensor):
        def __array_namespace__(self) -> Any:
            return SimpleNamespace(empty=empty, float32=np.float32, float64=np.float64)

    monkeypatch.setattr(_arrays, "_adopt_device", lambda x, *_: x.data)
    x = Array(np.ones((2, 2), np.float32), (2, 0))
    made, target = _arrays.empty_like(x, x, (2, 2), np.dtype("f4"), 0, 0)
    assert (type(made), target.dtype) == (Tensor, np.float32)
    for dtype in ("f8", "i8"):
        with pytest.raises(DTypeError, match="makes no array of .*64.*pass out="):
            _arrays.empty_like(x, x, (2, 2), np.dtype(dtype), 0, 0)


def test_adoption_copies_nothing(library: ModuleType) -> None:
    a = np.arange(6.0).reshape(2, 3)[::-1]
    assert np.shares_memory(_arrays.adopt(Tensor(a), "a"), a)
    assert _arrays.adopt(a, "a") is a


def test_an_array_that_does_not_say_where_it_is_and_a_class_of_arrays_are_refused() -> None:
    class Spread(Tensor):
        def __dlpack_device__(self) -> tuple[int, int]:
            raise BufferError("it is on two devices")

    x = np.ones((2, 2))
    with pytest.raises(DeviceError, match=r"b \(Spread\) is on no device .*: it is on two devices"):
        tw.matmul(x, Spread(x))
    for call in (tw.matmul, tw.plan):
        with pytest.raises(DTypeError, match="a is the class ndarray; pass an array"):
            call(np.ndarray, x)


def test_an_array_on_a_device_of_another_kind_needs_no_shape_to_be_refused() -> None:
    there = Tensor(np.ones((2, 2)), device=(8, 0))
    del there.shape
    with pytest.raises(DeviceError, match=r"a \(Tensor\) is in the memory of a device that"):
        tw.matmul(there, there)
    with pytest.raises(DeviceError, match="check works on the host"):
        tw.check(there, there, np.ones((2, 2)))


def test_device_arrays_are_refused_by_name() -> None:
    there = Tensor(np.ones((2, 2)), device=(2, 0))
    other = Tensor(np.ones((2, 2)), device=(2, 1))
    with pytest.raises(DeviceError, match="a is on cuda:0, b is on cuda:1.*different GPUs"):
        tw.matmul(there, other)
    with pytest.raises(DeviceError, match="c is in host memory; operands and c must"):
        tw.gemm(there, there, np.ones((2, 2)))


def test_two_libraries_have_no_common_kind(library: ModuleType) -> None:
    class Other(Tensor):
        pass

    Other.__module__ = "thirdlib"
    with pytest.raises(DTypeError, match="otherlib, thirdlib"):
        tw.matmul(Tensor(np.ones((2, 2))), Other(np.ones((2, 2))))


def test_sparse_and_dask_operands_are_refused_by_name() -> None:
    class Sparse:
        nnz = 3
        shape = (2, 2)
        dtype = np.dtype("f4")

    for call in (tw.matmul, tw.plan):
        with pytest.raises(DTypeError, match="a is sparse"):
            call(Sparse(), np.ones((2, 2)))
    chunked = type("Array", (), {"__module__": "dask.array.core"})()
    with pytest.raises(DTypeError, match="dask"):
        tw.matmul(chunked, np.ones((2, 2)))


def test_torch_tensors_share_memory_and_come_back_as_tensors() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    a = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    got = tw.matmul(a, a.T)
    assert type(got) is torch.Tensor
    assert torch.equal(got, a @ a.T)
    half = a.to(torch.bfloat16)
    assert tw.matmul(half, half.T).dtype is torch.bfloat16
    with pytest.raises(DTypeError, match=r"detach"):
        tw.matmul(a.requires_grad_(), a.detach().T)
