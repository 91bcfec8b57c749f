"""Arguments as the driver finds them: read back through its list of addresses."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tilewise.errors import DeviceError
from tilewise.kernels import Built, Parameter
from tilewise.kernels.steps import Argument, Number, Pointer, Tensor
from tilewise.runtime import driver
from tilewise.runtime.arguments import Packed

MAP = {"data_type": 9, "swizzle": 3, "block_size": [64, 64]}


def kernel(*parameters: Parameter, null_pointers: int = 2) -> Built:
    return Built(
        family="some",
        name="kernel",
        target="sm_90a",
        path=Path(),
        entry="kernel",
        parameters=parameters,
        null_pointers=null_pointers,
        warps=4,
        blocks=1,
        starts_early=False,
        shared_bytes=0,
        static_shared_bytes=0,
        registers=16,
        stack_bytes=0,
        rewritten=0,
        instructions={},
        code_bytes=0,
        code_sha256="",
        compiler="none",
    )


def packed(built: Built, arguments: dict[str, Argument], encode: Any = None) -> Packed:
    return Packed(built, arguments, encode)


def passed(arguments: Packed, *types: Any) -> list[Any]:
    """Return what the driver reads: from each address of the list, as much as is declared."""
    addresses = (ctypes.c_void_p * len(types)).from_address(arguments.address)
    return [
        kind.from_address(address).value for kind, address in zip(types, addresses, strict=True)
    ]


def test_numbers_pointers_and_null_pointers() -> None:
    built = kernel(
        Parameter(name="x", type="pointer", divisible_by=16),
        Parameter(name="n", type="i64"),
        Parameter(name="small", type="i8"),
        Parameter(name="y", type="pointer"),
        Parameter(name="alpha", type="fp32"),
        Parameter(name="beta", type="fp64"),
    )
    arguments = packed(
        built,
        {
            "y": Pointer(1, 24),
            "x": Pointer(0),
            "n": -(1 << 40),
            "small": -7,
            "alpha": 0.1,
            "beta": Number(0),
        },
    )
    types = (
        *(ctypes.c_uint64, ctypes.c_int64, ctypes.c_int8, ctypes.c_uint64),
        *(ctypes.c_float, ctypes.c_double, ctypes.c_uint64, ctypes.c_uint64),
    )
    arguments.point((1 << 47, 1001))
    arguments.set_numbers((0.1,))
    alpha = ctypes.c_float(0.1).value
    assert passed(arguments, *types) == [1 << 47, -(1 << 40), -7, 1025, alpha, 0.1, 0, 0]
    arguments.point((1 << 47, 5))
    arguments.set_numbers((-0.0,))
    result = passed(arguments, *types)
    assert result == [1 << 47, -(1 << 40), -7, 29, alpha, 0, 0, 0]
    assert math.copysign(1, result[5]) == -1
    arguments.set_numbers((0.0,))
    assert math.copysign(1, passed(arguments, *types)[5]) == 1


def test_one_array_may_go_to_several_parameters() -> None:
    built = kernel(*(Parameter(name=name, type="pointer") for name in "xyz"), null_pointers=0)
    arguments = packed(built, {"x": Pointer(0), "y": Pointer(1), "z": Pointer(0, 8)})
    arguments.point((64, 128))
    assert passed(arguments, *[ctypes.c_uint64] * 3) == [64, 128, 72]


def test_an_array_of_numba_is_nine_values() -> None:
    built = kernel(Parameter(name="x", type="array", rank=2), null_pointers=0)
    arguments = packed(built, {"x": Tensor(0, (3, 5), (7, -1), 4, offset_bytes=16)})
    arguments.point((256,))
    assert passed(arguments, *[ctypes.c_int64] * 9) == [0, 0, 15, 4, 272, 3, 5, 28, -4]


class Map:
    """What stands for a tensor map: 128 bytes, whose first 8 are the address."""

    def __init__(self, *_: Any) -> None:
        self.memory = ctypes.create_string_buffer(b"\xab" * 128, 128)

    def getPtr(self) -> int:
        return ctypes.addressof(self.memory)


def test_a_tensor_map_lies_aligned_before_its_shape_and_strides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def replace(tensor_map: Map, address: int) -> tuple[int]:
        ctypes.c_uint64.from_address(tensor_map.getPtr()).value = address
        return (0,)

    monkeypatch.setattr(driver, "_driver", SimpleNamespace(cuTensorMapReplaceAddress=replace))
    built = kernel(
        Parameter(name="n", type="i32"),
        Parameter(name="a", type="tensor map", rank=2, tensor_map=MAP),
        Parameter(name="b", type="tensor map", rank=2, tensor_map=MAP),
    )
    a, b = Tensor(0, (10, 20), (24, 1), 2), Tensor(1, (1, 2), (8, 1), 2, offset_bytes=32)
    seen: list[Any] = []

    def encode(*given: Any) -> Map:
        seen.append(given)
        return Map()

    arguments = packed(built, {"n": 3, "a": a, "b": b}, encode)
    assert seen == [(built.parameters[1], a), (built.parameters[2], b)]
    addresses = (ctypes.c_void_p * 13).from_address(arguments.address)
    assert addresses[1] % 64 == addresses[6] % 64 == 0
    of_map = (ctypes.c_uint64, ctypes.c_int32, ctypes.c_int32, ctypes.c_int64, ctypes.c_int64)
    types = (ctypes.c_int32, *of_map, *of_map, ctypes.c_uint64, ctypes.c_uint64)
    for pointers in ((4096, 8192), (4096, 16), (32, 16)):
        arguments.point(pointers)
        assert passed(arguments, *types) == [
            *(3, pointers[0], 10, 20, 24, 1),
            *(pointers[1] + 32, 1, 2, 8, 1, 0, 0),
        ]
        assert ctypes.string_at(addresses[6] + 8, 120) == b"\xab" * 120
    with pytest.raises(DeviceError, match="b is not aligned to 16 bytes"):
        arguments.point((32, 24))


def test_a_refused_pointer_leaves_nothing_half_written() -> None:
    built = kernel(
        Parameter(name="x", type="pointer", divisible_by=16),
        Parameter(name="y", type="pointer", divisible_by=16),
        null_pointers=0,
    )
    arguments = packed(built, {"x": Pointer(0), "y": Pointer(1)})
    arguments.point((16, 32))
    with pytest.raises(DeviceError, match="y is not aligned to 16 bytes"):
        arguments.point((48, 40))
    arguments.point((16, 32))
    assert passed(arguments, ctypes.c_uint64, ctypes.c_uint64) == [16, 32]


@pytest.mark.parametrize("arguments", [{}, {"x": Pointer(0), "y": 1}, {"y": Pointer(0)}])
def test_arguments_go_by_the_names_of_parameters(arguments: dict[str, Argument]) -> None:
    with pytest.raises(AssertionError, match="kernel takes"):
        packed(kernel(Parameter(name="x", type="pointer")), arguments)
