"""Host arrays copied to the GPU with everything around them: strides, margins and alignment."""

from __future__ import annotations

from typing import Any

import numpy as np


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
