"""Products on a GPU: planned as a recipe of launches, and put on a stream.

Which kernels are launched is in `_recipe`. Launches are prepared once a plan, and a call passes
pointers.
"""

from __future__ import annotations

import math
import threading
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import _recipe
from ._arrays import check_out
from ._operand import Operand, c_strides
from ._overlap import meets
from .kernels import find
from .numerics import bounds
from .runtime import memory, streams
from .runtime.arrays import COPY_ALIGNMENT, AnyArray, DeviceArray, copied, to_device, to_host
from .runtime.device import DeviceFacts, facts
from .runtime.launch import Launch

if TYPE_CHECKING:
    from ._plan import Plan
    from ._recipe import Recipe

__all__ = [
    "OnGpu",
    "Prepared",
    "apart",
    "copied_bytes",
    "launch",
    "multiply",
    "plan_gpu",
    "prepared",
]

#: Alpha and beta of a plain product, and their imaginary parts; whole, so that integers take them.
_PLAIN = (1, 0, 0, 0)


@dataclass(frozen=True, slots=True, eq=False)
class OnGpu:
    """How one GPU multiplies operands in its memory, or copies of small ones."""

    recipe: Recipe

    def multiply(self, plan: Plan, a: AnyArray, b: AnyArray, out: AnyArray | None) -> Any:
        """Return the product of arrays; those in host memory are copied in, or out. Blocks."""
        index = int(plan.device.partition(":")[2])
        stream = streams.DEFAULT
        nbytes = math.prod(plan.shape) * plan.dtype.itemsize
        with ExitStack() as held:
            x, y = (
                apart(z, out, held)
                if isinstance(z, DeviceArray)
                else held.enter_context(to_device(z, index, stream))
                for z in (a, b)
            )
            put = prepared(self.recipe, index)
            _shrink(plan, index, stream)
            if isinstance(out, DeviceArray):
                put((x.pointer, y.pointer, out.pointer), stream)
                streams.synchronize(stream, index)
                return out
            room = held.enter_context(memory.allocate(nbytes, index, stream, "the result"))
            strides = c_strides(plan.shape, plan.dtype.itemsize)
            c = DeviceArray(room.pointer, plan.shape, strides, plan.dtype, index, False, room)
            put((x.pointer, y.pointer, c.pointer), stream)
            result = to_host(c, stream)
        if out is None:
            return result if plan.shape else result[()]
        np.copyto(out, result)
        return out

    def lines(self, plan: Plan) -> list[str]:
        return [str(self.recipe), *plan.in_bytes()]

    def to_dict(self, plan: Plan) -> dict[str, Any]:
        return {"kernels": self.recipe.to_dict()}


def plan_gpu(plan: Plan, gpu: DeviceFacts, memory_bytes: int | None) -> Plan:
    """Complete a plan by how one GPU carries it out, within so many bytes of its memory; pure."""
    asked, out = plan.asked, plan.asked.out
    held = copied_bytes(plan, on_gpu=True)
    operands = []
    for x, dtype in zip((plan.a, plan.b), plan.dtypes, strict=True):
        if x.where == "memory":
            x = x.copied(dtype)
            held += x.stored_bytes
        operands.append(x)
    if out is not None and out.where != "memory":
        check_out(out, plan.shape, plan.dtype, "c" if asked.updates else "out", True)
    else:
        # A result that goes back to the host is held on the GPU whoever holds it there.
        held += math.prod(plan.shape) * plan.dtype.itemsize
        out = Operand(plan.shape, plan.dtype, c_strides(plan.shape, plan.dtype.itemsize))
    c = out.as_result(plan.a, plan.b, plan.batch)
    made = _recipe.recipe(
        operands[0].as_matrix(is_row=True),
        operands[1].as_matrix(is_row=False),
        c,
        plan.batch,
        what=plan.what,
        gpu=gpu,
        precision=plan.precision,
        updates=asked.updates,
        workspace_bytes=None if memory_bytes is None else max(memory_bytes - held, 0),
    )
    bits = "K alone: C[i, j] depends on row i of A, column j of B and K, and on nothing else"
    why = [made.why] if made.why else []
    if (
        plan.compute_dtype.kind == "f"
        and gpu.fp64_rate < 1 / 8
        and plan.compute_dtype.itemsize == 8
    ):
        why.append(
            f"float64 runs at 1/{round(1 / gpu.fp64_rate)} of float32's rate on {gpu.name}, and "
            "that rate is the limit; float32 operands run at the full one, with a bound of "
            f"{bounds.bound(plan.k, *[np.dtype('f4')] * 3).text}"
        )
    bound = plan.bound
    if made.scheme == "tf32":
        bound = bounds.bound(plan.k, *plan.dtypes, plan.dtype, precision="tf32", device="cuda")
    if made.scheme is not None:
        parts = "three products" if made.scheme == "fp16x3" else "one product"
        why.append(
            f"each 64 of K is {parts} of float16 on the tensor cores, within the bound wherever "
            "rows and columns are fit for it; those that are not are found there, and recomputed "
            "by chains of FMAs"
        )
    return replace(
        plan,
        method=made.scheme or made.family,
        bound=bound,
        how=OnGpu(made),
        runs_on=gpu.name,
        workspace_bytes=made.workspace_bytes,
        held_bytes=held + made.workspace_bytes,
        bits=plan.bits if plan.compute_dtype.kind in "biu" else bits,
        why=tuple(why),
    )


def apart(x: Any, out: Any, held: ExitStack) -> Any:
    """Return an operand, or a copy of it while ``held`` is open if it is in memory that out writes.

    Of an ``out`` in device memory; all that was put on a stream with the arrays is done.
    """
    if not (isinstance(out, DeviceArray) and meets(out, x)):
        return x
    if not isinstance(x, DeviceArray):
        return x.copy()
    memory.pool(x.index).trim()  # what is kept of products before would stand beside the copy
    x = held.enter_context(copied(x, streams.DEFAULT))
    streams.synchronize(streams.DEFAULT, x.index)
    return x


def _shrink(plan: Plan, index: int, stream: int) -> None:
    """Give back the stream's workspace if products before had more than a budget has room for."""
    budget = plan.asked.memory_bytes
    if budget is not None:
        others = plan.held_bytes - plan.workspace_bytes
        memory.workspace(index).shrink(stream, budget - others)


def copied_bytes(plan: Plan, *, on_gpu: bool) -> int:
    """Return what copies take, there or on the host, of operands that out on a GPU overlaps."""
    out = plan.asked.out
    if out is None or not out.is_on_gpu:
        return 0
    return sum(
        x.span_bytes + COPY_ALIGNMENT
        for x, is_copied in zip((plan.a, plan.b), plan.asked.overlaps, strict=True)
        if is_copied and x.is_on_gpu == on_gpu
    )


def multiply(
    plan: Plan,
    a: DeviceArray,
    b: DeviceArray,
    c: DeviceArray,
    stream: int,
    alpha: complex = 1,
    beta: complex = 0,
) -> Prepared:
    """Put ``c = alpha·a·b + beta·c`` of device arrays on a stream; return what does so again.

    Here c may overlap an operand, which is copied then.
    """
    assert isinstance(plan.how, OnGpu)
    put = prepared(plan.how.recipe, c.index)
    _shrink(plan, c.index, stream)
    with ExitStack() as held:
        if c.overlaps(a):
            a = held.enter_context(copied(a, stream))
        if c.overlaps(b):
            b = held.enter_context(copied(b, stream))
        numbers = (alpha.real, beta.real, alpha.imag, beta.imag)
        put((a.pointer, b.pointer, c.pointer), stream, numbers)
    return put


def launch(
    made: Recipe,
    index: int,
    pointers: tuple[int, int, int, int],
    stream: int,
    numbers: tuple[float, ...],
) -> None:
    """Put a product on a stream of tilewise's own, on GPU ``index``, which is current.

    ``pointers`` say where a, b, c and the workspace are.
    """
    prepared(made, index).put(pointers, stream, numbers, is_own=True)


class Prepared:
    """A recipe on one device, ready to be put on a stream with nothing but addresses."""

    def __init__(self, made: Recipe, index: int) -> None:
        capability = facts(index).capability
        self._index = index
        self._offsets = made.offsets
        self._workspace_bytes = made.workspace_bytes
        self._steps = tuple(
            _Step(
                Launch(
                    find(made.family, step.kernel, capability),
                    index,
                    step.grid,
                    step.arguments,
                    what=made.what,
                ),
                step.operands,
                step.numbers,
                _PLAIN[: step.numbers],
            )
            for step in made.steps
        )
        #: The only step, if it takes the pointers of a call as they are.
        self._only = None
        if [step.operands for step in made.steps] == [(0, 1, 2)] and made.offsets == ((0, 0, 0),):
            (self._only,) = self._steps

    def __call__(
        self, pointers: tuple[int, int, int], stream: int, numbers: tuple[float, ...] = _PLAIN
    ) -> None:
        """Put ``c = alpha·a·b + beta·c`` on a stream.

        Parameters
        ----------
        pointers : tuple of int
            Where a, b and c begin.
        stream : int
            A handle, as `streams.handle_of` gives it.
        numbers : tuple of float
            Alpha, beta, and the imaginary parts of both.
        """
        only = self._only
        if only is not None and numbers is _PLAIN:
            only.launch(stream, pointers, only.plain)
        elif self._workspace_bytes:
            with memory.workspace(self._index).on(stream, self._workspace_bytes) as scratch:
                self.put((*pointers, scratch), stream, numbers)
        else:
            self.put((*pointers, 0), stream, numbers)

    def put(
        self,
        pointers: tuple[int, int, int, int],
        stream: int,
        numbers: tuple[float, ...],
        *,
        is_own: bool = False,
    ) -> None:
        """Do the same with scratch memory of the caller's, at the last of the pointers.

        ``is_own`` says that the stream is tilewise's, and its device is current.
        """
        a, b, c, scratch = pointers
        for a_at, b_at, c_at in self._offsets:
            here = a + a_at, b + b_at, c + c_at, scratch
            for launch, operands, count, plain in self._steps:
                given = plain if numbers is _PLAIN else numbers[:count]
                put = launch.at_once if is_own else launch
                put(stream, tuple([here[i] for i in operands]), given)


class _Step(NamedTuple):
    launch: Launch
    operands: tuple[int, ...]
    numbers: int
    plain: tuple[float, ...]  #: the same tuple every time, which a launch need not write again


_preparing = threading.Lock()


@lru_cache(maxsize=1024)
def prepared(made: Recipe, index: int) -> Prepared:
    """Return what puts a recipe's launches on a stream of GPU ``index``; prepared once."""
    with _preparing:
        return Prepared(made, index)
