"""Products on Hopper, planned and launched by hand: operands in NaN, and nothing written outside.

Operands lie in larger arrays of NaN, and so does C: what is read outside shows in C, what is
written outside in its margins. The workspace begins as NaN too.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from tests.conftest import missing
from tilewise import kernels
from tilewise.errors import DeviceError
from tilewise.kernels.steps import Step, Strides
from tilewise.runtime import device, memory, streams
from tilewise.runtime.launch import Launch

__all__ = [
    "APART",
    "AWKWARD",
    "LAYOUTS",
    "Stack",
    "carry_out",
    "exact",
    "filled",
    "need_hopper",
    "normal",
    "operands",
    "sizes_and_strides",
]

Array = NDArray[Any]

LAYOUTS = ("NN", "NT", "TN", "TT")
#: Steps of 70 by 70 elements that no kernel would choose.
AWKWARD = {
    "rows of odd bytes": (0, 0, 75, 1),
    "every second column": (0, 0, 150, 2),
    "by columns, odd": (0, 0, 1, 75),
    "rows in reverse": (0, 0, -80, 1),
    "all in reverse": (0, 0, -80, -1),
    "one row for all": (0, 0, 0, 1),
    "one column for all": (0, 0, 1, 0),
    "overlapping rows": (0, 0, 8, 1),
    "overlapping rows, odd": (0, 0, 3, 1),
}
#: Those of them that a result can have.
APART = [why for why in AWKWARD if "one" not in why and "over" not in why]

_MARGIN = 128


@dataclass
class Stack:
    """Matrices (outer, inner, rows, columns) as a view of a flat array that is NaN elsewhere."""

    flat: Array
    first: int
    view: Array

    @classmethod
    def of(cls, shape: Sequence[int], steps: Sequence[int], dtype: str, first: int = 0) -> Stack:
        spans = [(size - 1) * step for size, step in zip(shape, steps, strict=True)]
        first += _MARGIN - sum(min(span, 0) for span in spans)
        size = first + sum(max(span, 0) for span in spans) + 1 + _MARGIN
        flat = np.full(size, np.nan, _dtype_of(dtype))
        item = flat.itemsize
        return cls(flat, first, as_strided(flat[first:], shape, [item * step for step in steps]))

    @classmethod
    def dense(cls, rows: int, columns: int, dtype: str, order: str = "N", pitch: int = 8) -> Stack:
        """One matrix by rows ("N") or columns ("T"), which start on multiples of ``pitch``."""
        near, far = (columns, rows) if order == "N" else (rows, columns)
        step = -(-near // pitch) * pitch
        steps = (step, 1) if order == "N" else (1, step)
        return cls.of((1, 1, rows, columns), (far * step, far * step, *steps), dtype)

    @property
    def strides(self) -> Strides:
        steps = (step // self.flat.itemsize for step in self.view.strides)
        return Strides(*steps, is_aligned=self.first * self.flat.itemsize % 16 == 0)

    @property
    def dtype(self) -> str:
        """The name that planners have for the type of its elements."""
        return next(name for name in _NAMES if _dtype_of(name) == self.flat.dtype)

    def values_in(self, flat: Array) -> Array:
        """Return what ``flat`` has in its place, once nothing else of it has been written."""
        view = as_strided(flat[self.first :], self.view.shape, self.view.strides)
        values = view.copy()
        view[...] = self.view
        np.testing.assert_array_equal(flat.view(np.uint8), self.flat.view(np.uint8), "margins of C")
        return values


def need_hopper(config: pytest.Config, family: str) -> None:
    """Skip a test, or fail it where a GPU is required, unless a family's kernels can run."""
    if device.facts(0).capability != (9, 0):
        missing(config, "compute capability 9.0 is needed")
    try:
        kernels.manifest(family)
    except DeviceError as error:
        missing(config, str(error))


def sizes_and_strides(a: Stack, b: Stack, c: Stack) -> dict[str, Any]:
    """Return what a problem of any family is made of."""
    outer, inner, m, n = c.view.shape
    sizes = {"m": m, "n": n, "k": a.view.shape[3], "outer": outer, "inner": inner}
    return sizes | {"a": a.strides, "b": b.strides, "c": c.strides}


def carry_out(
    family: str,
    steps: Sequence[Step],
    workspace_bytes: int,
    stacks: tuple[Stack, Stack, Stack],
    alpha: float = 1,
    beta: float = 0,
) -> tuple[Array, Array]:
    """Launch on copies of a, b and c; return C and what is in the workspace then."""
    stream = streams.DEFAULT
    with ExitStack() as held:
        pointers = []
        for stack in stacks:
            place = held.enter_context(memory.allocate(stack.flat.nbytes, 0, stream))
            memory.write(place, stack.flat.view(np.uint8), stream)
            pointers.append(place.pointer + stack.first * stack.flat.itemsize)
        workspace = np.empty(max(workspace_bytes, 1), np.uint8)
        room = held.enter_context(memory.allocate(workspace.nbytes, 0, stream))
        memory.fill(room, 0xFF, stream)
        pointers.append(room.pointer)
        for step in steps:
            built = kernels.find(family, step.kernel, (9, 0))
            launch = Launch(built, 0, step.grid, step.arguments)
            given = tuple(pointers[i] for i in step.operands)
            launch(stream, given, (alpha, beta)[: step.numbers])
        flat = np.empty_like(stacks[2].flat)
        memory.read(place, flat.view(np.uint8), stream)
        memory.read(room, workspace, stream)
    return stacks[2].values_in(flat), workspace


def filled(stack: Stack, seed: int, low: int = -2, high: int = 2) -> Stack:
    """Integers, of which sums are exact in any order."""
    stack.view[...] = np.random.default_rng(seed).integers(low, high + 1, stack.view.shape)
    return stack


def normal(stack: Stack, seed: int) -> Stack:
    stack.view[...] = np.random.default_rng(seed).standard_normal(stack.view.shape)
    return stack


def exact(a: Stack, b: Stack) -> Array:
    with np.errstate(invalid="ignore"):  # NaN and Inf are values here
        return np.matmul(a.view.astype(np.float64), b.view.astype(np.float64))


def operands(
    m: int, n: int, k: int, dtype: str, layout: str, pitch: int = 8
) -> tuple[Stack, Stack]:
    a = Stack.dense(m, k, dtype, layout[0], pitch)
    return a, Stack.dense(k, n, dtype, layout[1], pitch)


_NAMES = ("bf16", "fp16", "fp32", "c64")


def _dtype_of(name: str) -> np.dtype[Any]:
    import ml_dtypes

    known = (ml_dtypes.bfloat16, np.float16, np.float32, np.complex64)
    return np.dtype(dict(zip(_NAMES, known, strict=True))[name])
