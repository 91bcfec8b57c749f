"""Host arrays copied to the GPU with everything around them: strides, margins and alignment.

And what tests of products of host memory and of files share.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

import tilewise as tw
from tilewise.runtime import device
from tilewise.runtime.memory import pool

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E5M2 = np.dtype(ml_dtypes.float8_e5m2)
INEXACT = ("float16", BF16, "float32", "float64", "complex64", "complex128", E4M3, E5M2)
EXACT = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool")


def upload(x: Any) -> Any:
    """Return ``x`` on the GPU inside a copy of the buffer it is a view of, strides and all.

    A CuPy array; a torch tensor for the types of ml_dtypes, which then has no negative strides.
    """
    import cupy

    owner = x
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    low, high = np.lib.array_utils.byte_bounds(owner)
    start = x.__array_interface__["data"][0] - low
    raw = np.ctypeslib.as_array(
        np.ctypeslib.ctypes.cast(low, np.ctypeslib.ctypes.POINTER(np.ctypeslib.ctypes.c_uint8)),
        (max(high - low, x.dtype.itemsize),),
    )
    if x.dtype.isbuiltin != 1:
        import torch

        dtype = getattr(torch, x.dtype.name)
        item = x.dtype.itemsize
        flat = torch.from_numpy(raw.copy()).cuda().view(dtype)
        return flat.as_strided(x.shape, [step // item for step in x.strides], start // item)
    memory = cupy.cuda.alloc(raw.size)
    buffer = cupy.ndarray(raw.shape, np.uint8, memory)
    buffer.set(raw)
    return cupy.ndarray(x.shape, x.dtype, memory + start, x.strides)


def download(x: Any) -> Any:
    """Return a device array as a NumPy array."""
    if type(x).__module__.startswith("torch"):
        import ml_dtypes

        name = str(x.dtype).removeprefix("torch.")
        carrier = getattr(np, f"uint{8 * x.element_size()}")
        import torch

        bits = x.contiguous().view(getattr(torch, f"uint{8 * x.element_size()}")).cpu().numpy()
        scalar = getattr(ml_dtypes, name, None) or getattr(np, name.replace("bool", "bool_"))
        return bits.astype(carrier, copy=False).view(scalar)
    return x.get()


def random(rng: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    dtype = np.dtype(dtype)
    if dtype.kind in "iub":
        return rng.integers(0, 100, shape).astype(dtype)
    values = rng.standard_normal(shape)
    if dtype.kind == "c":
        values = values + 1j * rng.standard_normal(shape)
    return values.astype(dtype)


def in_memory(a: Any, b: Any, **options: Any) -> Any:
    """Return the product of device operands."""
    return download(tw.matmul(upload(a), upload(b), **options))


class PoolHigh:
    """How much of a GPU has been in use by products at most, since this was made."""

    def __init__(self, index: int = 0) -> None:
        self._index = index
        with device.current(index) as cuda:
            attribute = cuda.CUmemPool_attribute
            self._used = attribute.CU_MEMPOOL_ATTR_USED_MEM_HIGH
            self._held = attribute.CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH
            for each in (self._used, self._held):
                cuda.cuMemPoolSetAttribute(pool(index).handle, each, cuda.cuuint64_t(0))

    def used_bytes(self) -> int:
        return self._asked(self._used)

    def held_bytes(self) -> int:
        """What was kept for products counts too, and what the driver takes at least."""
        return self._asked(self._held)

    def _asked(self, attribute: Any) -> int:
        with device.current(self._index) as cuda:
            return int(cuda.cuMemPoolGetAttribute(pool(self._index).handle, attribute)[1])
