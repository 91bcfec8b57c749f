"""What the kernels of ``hopper_bytes`` are documented to do, done in NumPy on memory by address.

Gluon has no interpreter; so what is planned for these kernels is tested without a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from tilewise.kernels.portable_table import BYTES_TILES, Kernel
from tilewise.kernels.steps import Pointer, Tensor

Array = np.ndarray[Any, np.dtype[Any]]

_TYPES = {
    "i8": (np.dtype(np.int8), np.dtype(np.int32)),
    "fp8e4nv": (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(np.float32)),
    "fp8e5": (np.dtype(ml_dtypes.float8_e5m2), np.dtype(np.float32)),
}


def multiply(
    kernel: Kernel, blocks: int, arguments: Mapping[str, Any], addresses: Sequence[int]
) -> None:
    """Do what `multiply_bytes` does."""
    x = arguments
    parts, depth, batch = x["parts"], x["depth"], (x["outer"], x["inner"])
    element, sums = _TYPES[kernel.dtype]
    a, b = (_operand(x, name, element, addresses) for name in "ab")
    assert a.shape == (*batch, x["m"], x["k"])
    assert b.shape == (*batch, x["n"], x["k"])
    assert (parts - 1) * depth < x["k"] <= parts * depth
    assert parts == 1 or depth % kernel.tile[2] == 0
    tiles = -(-x["m"] // kernel.tile[0]) * -(-x["n"] // kernel.tile[1])
    assert 0 < blocks <= tiles * parts * batch[0] * batch[1]
    c = _seen(x["c"], sums, addresses)
    assert c.shape[3] % kernel.c_vector == 0, "the copy engine writes 16 bytes at a time"
    assert c.shape[2] == x["m"]
    assert x["n"] <= c.shape[3] < x["n"] + kernel.c_vector
    wide = np.int64 if sums.kind == "i" else np.float64
    for part in range(parts):
        span = slice(part * depth, (part + 1) * depth)
        total = np.matmul(a[..., span].astype(wide), b[..., span].astype(wide).swapaxes(2, 3))
        to = c if parts == 1 else c[part].reshape(*batch, *c.shape[2:])
        to[..., : x["n"]] = total.astype(sums)
        to[..., x["n"] :] = 0  # what is beyond B is read as 0


def pack(name: str, blocks: int, arguments: Mapping[str, Any], addresses: Sequence[int]) -> None:
    """Do what `pack_bytes` does."""
    vector = int(name.rpartition("_")[2])
    first = arguments["first_blocks"]
    assert 0 < first <= blocks
    for job, count in (("first", first), ("second", blocks - first)):
        prefix = f"{job}_"
        given = {
            key.removeprefix(prefix): value
            for key, value in arguments.items()
            if key.startswith(prefix)
        }
        if count:
            _pack(vector, count, given, addresses)


def _pack(vector: int, blocks: int, x: Mapping[str, Any], addresses: Sequence[int]) -> None:
    rows, columns, inner, pitch = (x[key] for key in ("rows", "columns", "inner", "target_row"))
    steps = [x["outer_step"], x["inner_step"], x["far_step"]]
    high, wide = BYTES_TILES["k" if x["along"] else "n"]
    matrices, rest = divmod(blocks, -(-rows // high) * -(-columns // wide))
    assert rest == 0
    assert matrices % inner == 0
    assert pitch % 16 == 0
    assert pitch >= columns
    source, target = (_address(x[key], addresses) for key in ("source", "target"))
    assert source % vector == 0
    assert target % 16 == 0
    assert not any(size % vector for size in (columns if x["along"] else rows, *steps))
    steps.insert(3 if x["along"] else 2, 1)
    shape = (matrices // inner, inner, rows, columns)
    place = (inner * rows * pitch, rows * pitch, pitch, 1)
    kind = np.dtype(np.uint8)
    _view(target, (*shape[:3], pitch), place, kind)[...] = 0x55  # what pads is not defined
    _view(target, shape, place, kind)[...] = _view(source, shape, steps, kind)


def _operand(x: Mapping[str, Any], name: str, kind: np.dtype[Any], addresses: Any) -> Array:
    matrices = _seen(x[name], kind, addresses)
    at = [np.arange(x[axis]) * x[f"{name}_{axis}"] for axis in ("outer", "inner")]
    return matrices[at[0][:, None], at[1]]


def _seen(tensor: Tensor, kind: np.dtype[Any], addresses: Sequence[int]) -> Array:
    """Return what a tensor map shows, after comparing it with what the driver asks of one."""
    assert tensor.item_bytes == kind.itemsize
    assert tensor.strides[-1] == 1
    for size, step in zip(tensor.shape, tensor.strides[:-1], strict=False):
        assert 0 < size < 2**31
        assert 0 < step * kind.itemsize < 2**40
        assert step * kind.itemsize % 16 == 0
    address = _address(tensor, addresses)
    assert address % 16 == 0
    return _view(address, tensor.shape, tensor.strides, kind)


def _address(x: Pointer | Tensor, addresses: Sequence[int]) -> int:
    return addresses[x.operand] + x.offset_bytes


def _view(address: int, shape: Sequence[int], steps: Sequence[int], kind: np.dtype[Any]) -> Array:
    spans = [(size - 1) * step * kind.itemsize for size, step in zip(shape, steps, strict=True)]
    low, high = sum(min(span, 0) for span in spans), sum(max(span, 0) for span in spans)
    memory = (ctypes.c_uint8 * (high - low + kind.itemsize)).from_address(address + low)
    return np.ndarray(shape, kind, memory, -low, [step * kind.itemsize for step in steps])
