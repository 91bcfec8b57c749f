"""References that are not ours, and operands that are awkward on purpose."""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise import _streamed
from tilewise._operand import Operand
from tilewise._plan import Plan, make_plan
from tilewise._request import Request
from tilewise.outofcore.device_schedule import Launch

Array = NDArray[Any]

FLOATS = ("float16", "float32", "float64")
COMPLEX = ("complex64", "complex128")
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


def exact_integers(a: Array, b: Array, dtype: Any) -> Array:
    """Return a @ b of integers, wrapped into ``dtype`` as C wraps: NumPy's loop modulo 2⁶⁴."""
    product = np.matmul(a.astype(np.uint64), b.astype(np.uint64))
    unsigned = product.astype(f"u{np.dtype(dtype).itemsize}")
    return unsigned.view(dtype) if np.dtype(dtype).kind == "i" else unsigned


def small_integers(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, low: int = -2, high: int = 2
) -> Array:
    """Return whole numbers in [low, high] as ``dtype``; unsigned types and bool get [0, high]."""
    kind = np.dtype(dtype).kind
    values = rng.integers(0 if kind in "ub" else low, high, shape, endpoint=True)
    if kind == "c":
        return (values + 1j * rng.integers(low, high, shape, endpoint=True)).astype(dtype)
    return values.astype(dtype)


def no_more_threads_than(count: int) -> bool:
    """Whether there are soon that many threads, those that `threading` does not list among them."""
    for _ in range(200):
        if thread_count() <= count:
            return True
        time.sleep(0.01)  # one that has nothing left to do ends by itself
    return False


def thread_count() -> int:
    return len(sys._current_frames())


def poisoned(shape: tuple[int, ...], dtype: Any, order: Any = "C") -> Array:
    """Return a place for a result in which whatever is not written shows."""
    out: Array = np.empty(shape, dtype, order)
    out.reshape(-1, order="A").view(np.uint8)[...] = 0xFF
    return out


def guarded(x: Array, margin: int = 3) -> tuple[Array, Array]:
    """Return a copy of ``x`` inside a larger buffer of NaN (or 0xFF), and that buffer.

    The copy is a strided view; a read outside it shows as NaN in a result, a write outside it as a
    changed margin.
    """
    shape = tuple(size + 2 * margin for size in x.shape)
    buffer = np.empty(shape, x.dtype)
    buffer.view(np.uint8)[...] = 0xFF
    inside = buffer[tuple(slice(margin, margin + size) for size in x.shape)]
    inside[...] = x
    return inside, buffer


def margins_are_whole(inside: Array, buffer: Array) -> bool:
    """Whether nothing but the guarded view was written; overwrites the view."""
    inside.view(np.uint8)[...] = 0xFF
    return bool((buffer.view(np.uint8) == 0xFF).all())


def within_bound(c: Array, a: Array, b: Array, unit: float = 2.0**-24, out_unit: float = 0) -> bool:
    """Rule BOUND: |c − c*| ≤ (K+2)·u·|a||b| + u_out·|c*|, with c* in float64 or complex128."""
    wide = np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64
    a_wide, b_wide = a.astype(wide), b.astype(wide)
    exact = np.matmul(a_wide, b_wide)
    allowed = (a.shape[-1] + 2) * unit * np.matmul(abs(a_wide), abs(b_wide))
    if wide is np.complex128:
        allowed = 2 * allowed
    allowed = allowed + out_unit * abs(exact) + 2.0**-149
    return bool((abs(c.astype(wide) - exact) <= allowed).all())


def planned(a: Operand, b: Operand, *, gpu: Any = None, machine: Any = None, **asked: Any) -> Plan:
    """Return the plan for operands that are described, on a machine that need not be there."""
    return make_plan(Request(a, b, **asked), gpu=gpu, machine=machine)


def goes_on(plan: Any) -> float:
    """Return which share of the launches on the first GPU go on from what the one before left."""
    (part, *_) = plan.how.parts
    before, found = None, []
    for launch in part.schedule.operations():
        if isinstance(launch, Launch):
            made = part.recipes[_streamed._key(part.schedule, launch)]
            found.append(made.after(before, launch.same) is not made)
            before = made
    return sum(found) / len(found)
