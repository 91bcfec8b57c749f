"""Products for the portable kernels, with the places of their operands in memory."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from tests.support import exact_integers, small_integers
from tilewise.kernels.portable_plan import Problem, every_way
from tilewise.kernels.portable_steps import Steps
from tilewise.kernels.steps import Strides

Array = np.ndarray[Any, np.dtype[Any]]

NARROW = {
    name: np.dtype(getattr(ml_dtypes, name))
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")
}
FLOATS = ("float16", *NARROW, "float32", "float64")
COMPLEX = ("complex64", "complex128")
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
ALL = (*FLOATS, *COMPLEX, *INTEGERS, "bool")


def named(dtype: str) -> np.dtype[Any]:
    return NARROW[dtype] if dtype in NARROW else np.dtype(dtype)


def placed(x: Array, order: str = "C", margin: int = 3) -> tuple[Array, Array]:
    """Return a copy of the last two axes of ``x`` in an aligned buffer of 0xFF, and the buffer.

    Between matrices, and around each, are ``margin`` elements of rows and columns.
    """
    *batch, rows, cols = x.shape
    high, wide = (rows, cols) if order == "C" else (cols, rows)
    shape = (*batch, high + 2 * margin, wide + 2 * margin)
    nbytes = int(np.prod(shape)) * x.itemsize
    raw = np.full(nbytes + 64, 0xFF, np.uint8)
    start = -raw.ctypes.data % 64
    buffer = raw[start : start + nbytes].view(x.dtype).reshape(shape)
    inside = buffer[..., margin : margin + high, margin : margin + wide]
    inside = inside if order == "C" else inside.swapaxes(-1, -2)
    inside[...] = x
    return inside, raw


def stack(x: Array) -> Array:
    return x.reshape((1,) * (4 - x.ndim) + x.shape) if x.ndim < 4 else x


def strides_of(x: Array) -> Strides:
    steps = [step // x.itemsize for step in stack(x).strides]
    return Strides(*steps, is_aligned=x.ctypes.data % 16 == 0)


def problem_of(a: Array, b: Array, c: Array, updates: bool = False) -> Problem:
    outer, inner, m, n = stack(c).shape
    a, b = (np.broadcast_to(x, (outer, inner, *x.shape[-2:])) for x in (a, b))
    return Problem(
        m=m,
        n=n,
        k=a.shape[-1],
        a=strides_of(a),
        b=strides_of(b),
        c=strides_of(c),
        a_dtype=a.dtype.name,
        b_dtype=b.dtype.name,
        c_dtype=c.dtype.name,
        outer=outer,
        inner=inner,
        updates=updates,
    )


def ways_of(problem: Problem, capability: tuple[int, int] = (9, 0)) -> list[Steps]:
    return every_way(problem, capability=capability, multiprocessors=4)


def reference(a: Array, b: Array, dtype: np.dtype[Any]) -> Array:
    """Return a @ b of whole numbers as ``dtype``."""
    if dtype.kind == "b":
        return np.matmul(a.astype(np.int64), b.astype(np.int64)) > 0
    if dtype.kind in "iu":
        return exact_integers(a, b, dtype)
    wide = np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64
    return np.matmul(a.astype(wide), b.astype(wide)).astype(dtype)


def poison(c: Array) -> None:
    c[...] = np.full(c.itemsize, 0xFF, np.uint8).view(c.dtype)


def whole(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array:
    return small_integers(rng, shape, named(dtype))


def full_range(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array:
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    limits = np.iinfo(dtype)
    return rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)


def wrapped(values: Any, dtype: np.dtype[Any]) -> Array:
    """Return exact numbers as ``dtype`` has them: integers wrapped, bool by or."""
    if dtype.kind == "b":
        return np.asarray(values).astype(np.int64) != 0
    if dtype.kind in "iu":
        unsigned = [int(v) % (1 << 8 * dtype.itemsize) for v in np.ravel(values)]
        return np.array(unsigned, f"u{dtype.itemsize}").view(dtype).reshape(np.shape(values))
    wide = np.complex128 if dtype.kind == "c" else np.float64
    return np.asarray(values).astype(wide).astype(dtype)


def sticky(x: Array) -> Array:
    """Return float64 as float32, cut off, with its last bit set if anything was.

    So ml_dtypes, which goes by way of float32, rounds to float8 but once.
    """
    near = x.astype(np.float32)
    cut = np.where(abs(near) > abs(x), np.nextafter(near, np.float32(0)), near)
    return (cut.view(np.int32) | (cut != x)).view(np.float32)
