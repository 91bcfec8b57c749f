"""Running a plan: is the operand the one planned for, is there room, does the result hold.

The arithmetic is elsewhere (`_cpu`, `_gpu`); what was decided, and why, stands in the plan.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from . import _arrays, _memory, _repeat
from ._overlap import meets, overlap
from ._request import IN_HOST_MEMORY, layout
from .errors import BudgetError, CheckError, OptionError, ShapeError, describe

if TYPE_CHECKING:
    from ._arrays import OnDevice
    from ._plan import Plan
    from .runtime.arrays import AnyArray, DeviceArray

__all__ = ["run", "run_across", "run_on_device", "run_on_host"]

#: A product that holds less than this is not held against the free memory: asking costs more.
_CHECKED_BYTES = 256 << 20

_ELSEWHERE = (
    "this plan differs in whether out= is given, or in where it is; make a plan with the same "
    "arguments"
)


def run(plan: Plan, a: Any, b: Any, out: Any, stream: Any) -> Any:
    """Run a plan on operands, after checking that they are those it was made for."""
    if type(a) is np.ndarray:
        if stream is None and _arrays.are_plain(a, b, out):
            _check_planned(plan, a, b)
            return run_on_host(plan, a, b, out, a, b)
    elif not plan.asked.verify:
        done = _repeat.product(a, b, out, stream, plan.how)
        if done is not None:
            return done
    there = _arrays.on_device(a, b, out, stream)
    if there is None:
        x, y = _arrays.adopt(a, "a"), _arrays.adopt(b, "b")
        _check_planned(plan, x, y)
        return run_on_host(plan, x, y, out, a, b)
    p, q, target, _, handle, blocks, is_mixed = there
    _check_planned(plan, p, q, there)
    planned_out = plan.asked.out
    is_there = planned_out is not None and planned_out.is_on_gpu
    if is_there and planned_out is not None and target.strides != planned_out.strides:
        raise ShapeError(
            f"{describe('out', target)} is not what this plan is for: strides "
            f"{planned_out.strides}; make a plan for it"
        )
    if is_mixed:
        return run_across(plan, there, out, a, b)
    return run_on_device(plan, p, q, out, target, a, b, handle, asked=plan.how, blocks=blocks)


def run_on_host(
    plan: Plan,
    x: AnyArray,
    y: AnyArray,
    out: Any,
    a: Any,
    b: Any,
    overlaps: bool | None = None,
) -> Any:
    """Run a plan, whose result is on the host, on arrays that the operands ``a`` and ``b`` became.

    ``overlaps`` says whether ``out`` shares memory with one of them, if that is known.
    """
    target = None if out is None else _arrays.adopt_out(out, plan.shape, plan.dtype, "out")
    # A wrong result must not replace what is there, nor an operand change while it is read.
    is_apart = target is None or plan.verify
    if not is_apart and target is not None:
        if overlaps is not None:
            is_apart = overlaps
        elif isinstance(x, np.ndarray) and isinstance(y, np.ndarray):  # most are: at once
            is_apart = overlap(target, x, y)
        else:
            is_apart = meets(target, x, y)
    if is_apart or plan.asked.memory_bytes is not None:
        _check_room(plan, target, is_apart)
    if target is not None and not is_apart:
        plan.how.multiply(plan, x, y, target)
        return out
    result = plan.how.multiply(plan, x, y, None)
    if plan.verify:
        _verify(plan, x, y, result)
    if target is not None:
        np.copyto(target, result)
        return out
    if a is x and b is y:
        return result
    return _arrays.give_back(result, *(z for z, w in ((a, x), (b, y)) if isinstance(w, np.ndarray)))


def run_across(plan: Plan, there: OnDevice, out: Any, a: Any, b: Any) -> Any:
    """Run a plan for arrays of which some are in host memory; blocks until done."""
    from .runtime import streams

    streams.synchronize(there.stream, there.gpu)  # what is on the device is complete then
    x, y, target = there.a, there.b, there.out
    if target is None or isinstance(target, np.ndarray):
        return run_on_host(plan, x, y, out, a, b)
    _arrays.check_out(target, plan.shape, plan.dtype, "out", not target.is_readonly)
    _check_copies(plan, x, y, target)
    if not plan.verify:
        plan.how.multiply(plan, x, y, target)
        return out
    a_host, b_host = _copied_to_host(x), _copied_to_host(y)  # before out, which may overlap them
    plan.how.multiply(plan, x, y, target)
    _verify(plan, a_host, b_host, target)
    return out


def run_on_device(
    plan: Plan,
    x: DeviceArray,
    y: DeviceArray,
    out: Any,
    target: DeviceArray | None,
    a: Any,
    b: Any,
    stream: int,
    asked: Hashable = None,
    *,
    blocks: bool = False,
) -> Any:
    """Put a plan for the device arrays ``x`` and ``y`` on a stream; returns at once or ``blocks``.

    With ``asked``, which is all that the plan depends on besides the arrays, it is kept for
    products like this one.
    """
    from . import _gpu

    result = out
    if target is None:
        result, target = _arrays.empty_like(a, b, plan.shape, plan.dtype, x.index, stream)
    else:
        _arrays.check_out(target, plan.shape, plan.dtype, "out", not target.is_readonly)
        _check_copies(plan, x, y, target)
    if not plan.verify:
        put = _gpu.multiply(plan, x, y, target, stream)
        if blocks:
            from .runtime import streams

            streams.synchronize(stream, x.index)
        elif asked is not None:
            _repeat.keep(asked, put, (a, b, result), (x, y, target), is_new=out is None)
        return result
    from .runtime.arrays import to_host

    a_host, b_host = to_host(x, stream), to_host(y, stream)  # before out, which may overlap them
    _gpu.multiply(plan, x, y, target, stream)
    _verify(plan, a_host, b_host, to_host(target, stream))
    return result


def _copied_to_host(x: Any) -> Any:
    """Return an array in host memory, or a copy there of one in device memory that is complete."""
    if isinstance(x, np.ndarray) or not hasattr(x, "owner"):
        return np.asarray(x)
    from .runtime import streams
    from .runtime.arrays import to_host

    return to_host(x, streams.DEFAULT)


def _check_planned(plan: Plan, x: Any, y: Any, seen: OnDevice | None = None) -> None:
    """Raise unless operands, and where they and the result are, are those of the plan."""
    for name, given, planned in (("a", x, plan.asked.a), ("b", y, plan.asked.b)):
        is_on_host = isinstance(given, np.ndarray)
        if is_on_host != (planned.where == "memory"):
            there = "host memory" if planned.where == "memory" else planned.where
            raise OptionError(
                f"{describe(name, given)} is in {'host' if is_on_host else 'device'} memory, and "
                f"this plan is for operands in {there}; make a plan with the same arguments"
            )
        if (
            given.shape != planned.shape
            or given.dtype != planned.dtype
            or given.strides != planned.strides
        ):
            raise ShapeError(
                f"{describe(name, given)} is not what this plan is for: shape {planned.shape}, "
                f"dtype {planned.dtype}, strides {planned.strides}; make a plan for it"
            )
    if seen is not None:
        _check_place(plan, seen)
    elif plan.asked.is_mixed:
        raise OptionError(_ELSEWHERE)


def _check_room(plan: Plan, target: NDArray[Any] | None, is_apart: bool) -> None:
    """Raise BudgetError unless what is held on the host fits the budget, and is free.

    A plan has counted the result if it is held with the ``out`` that it was made for.
    """
    planned_out, budget = plan.asked.out, plan.asked.memory_bytes
    held = plan.held_bytes
    if is_apart and planned_out is not None:
        result_bytes = math.prod(plan.shape) * plan.dtype.itemsize
        held += result_bytes
        if budget is not None and held > budget:
            raise _memory.over_budget(
                f"{plan.shape} {plan.dtype}",
                result_bytes,
                plan.held_bytes,
                budget,
                verify=plan.verify,
                overlaps=target is not None,
            )
    elif (
        budget is not None
        and target is not None
        and planned_out not in (None, IN_HOST_MEMORY)
        and layout(target) != planned_out
    ):
        raise ShapeError(
            f"{describe('out', target)} does not lie as what this plan is for, and its budget "
            "holds for that; make a plan for it"
        )
    if is_apart and held > _CHECKED_BYTES and held > (available := _memory.available_bytes()):
        size = _memory.format_bytes
        raise BudgetError(
            f"the result {plan.shape} {plan.dtype} needs {size(held)} and this machine "
            f"has {size(available)} free; pass out=np.memmap(...) to write it to a file, or "
            "multiply files with tilewise mul"
        )


def _check_place(plan: Plan, there: OnDevice) -> None:
    """Raise unless arrays are where the plan has them, and begin as it relies on."""
    planned, target = plan.asked.out, there.out
    is_there = target is not None and not isinstance(target, np.ndarray)
    if (
        plan.asked.is_mixed != there.is_mixed
        or (planned is not None and planned.is_on_gpu) != is_there
    ):
        raise OptionError(_ELSEWHERE)
    if not there.is_mixed:
        return  # kernels say themselves what they rely on, before anything is written
    if plan.device != f"cuda:{there.gpu}":
        raise OptionError(
            f"an array is on cuda:{there.gpu}, and this plan is for {plan.device}; make a plan "
            "with the same arguments"
        )
    given = (("a", there.a, plan.asked.a), ("b", there.b, plan.asked.b), ("out", target, planned))
    for name, x, place in given:
        if place is not None and place.is_on_gpu and place.aligned and not x.aligned:
            raise ShapeError(
                f"{describe(name, x)} begins at no multiple of 16 bytes, as this plan is for; make "
                "a plan for it"
            )


def _check_copies(plan: Plan, x: AnyArray, y: AnyArray, target: DeviceArray) -> None:
    """Raise BudgetError if the budget has no room for copies of what ``out`` overlaps."""
    budget = plan.asked.memory_bytes
    if budget is None:
        return
    extra = sum(
        layout(z).span_bytes
        for z, is_counted in zip((x, y), plan.asked.overlaps, strict=True)
        if meets(target, z) and not is_counted
    )
    held = budget if plan.asked.is_mixed else plan.held_bytes  # panels fill what there is
    if held + extra > budget:
        raise _memory.over_budget(
            f"{plan.shape} {plan.dtype}",
            0,
            held + extra,
            budget,
            verify=plan.verify,
            overlaps=True,
        )


def _verify(plan: Plan, x: AnyArray, y: AnyArray, result: Any) -> None:
    from .numerics.check import check

    found = check(_copied_to_host(x), _copied_to_host(y), _copied_to_host(result), bound=plan.bound)
    if not found:
        raise CheckError(f"verify=True found a wrong result: {found}")
