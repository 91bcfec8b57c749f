"""Operands of other libraries: adopted without a copy, and answered in kind."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

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


def test_device_arrays_are_refused_by_name() -> None:
    with pytest.raises(DeviceError, match="a is in host memory, b is on cuda:0.*one place"):
        tw.matmul(np.ones((2, 2)), Tensor(np.ones((2, 2)), device=(2, 0)))
    there = Tensor(np.ones((2, 2)), device=(2, 0))
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

    with pytest.raises(DTypeError, match="a is sparse"):
        tw.matmul(Sparse(), np.ones((2, 2)))
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
