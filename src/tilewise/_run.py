"""Running a plan: is the operand the one planned for, is there room, does the result hold.

The arithmetic is elsewhere (`_cpu`); what was decided, and why, stands in the plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from . import _arrays, _cpu, _memory
from .errors import BudgetError, CheckError, ShapeError, describe

if TYPE_CHECKING:
    from ._plan import Plan

__all__ = ["run", "run_adopted"]

#: A product that holds less than this is not held against the free memory: asking costs more.
_CHECKED_BYTES = 256 << 20


def run(plan: Plan, a: Any, b: Any, out: Any) -> Any:
    """Run a plan on operands, after checking that they are those it was made for."""
    x, y = _arrays.adopt(a, "a"), _arrays.adopt(b, "b")
    for name, given, planned in (("a", x, plan.a), ("b", y, plan.b)):
        if (
            given.shape != planned.shape
            or given.dtype != planned.dtype
            or given.strides != planned.strides
        ):
            raise ShapeError(
                f"{describe(name, given)} is not what this plan is for: shape {planned.shape}, "
                f"dtype {planned.dtype}, strides {planned.strides}; make a plan for it"
            )
    return run_adopted(plan, x, y, out, a, b)


def run_adopted(plan: Plan, x: NDArray[Any], y: NDArray[Any], out: Any, a: Any, b: Any) -> Any:
    """Run a plan on the arrays ``x`` and ``y`` that the operands ``a`` and ``b`` became."""
    if out is None:
        if plan.held_bytes > _CHECKED_BYTES:
            _check_available(plan)
        result = _cpu.execute(plan, x, y, None)
        if plan.verify:
            _verify(x, y, result)
        if a is x and b is y:
            return result
        return _arrays.give_back(result, a, b)
    target = _arrays.adopt_out(out, plan.shape, plan.dtype, "out")
    if plan.verify or _arrays.overlap(target, x, y):
        # A wrong result must not replace what is there, nor an operand change while it is read.
        result = _cpu.execute(plan, x, y, None)
        if plan.verify:
            _verify(x, y, result)
        np.copyto(target, result)
    else:
        _cpu.execute(plan, x, y, target)
    return out


def _check_available(plan: Plan) -> None:
    available = _memory.available_bytes()
    if plan.held_bytes > available:
        size = _memory.format_bytes
        raise BudgetError(
            f"the result {plan.shape} {plan.dtype} needs {size(plan.held_bytes)} and this machine "
            f"has {size(available)} free; pass out=np.memmap(...) to write it to a file, or "
            "multiply files with tilewise mul"
        )


def _verify(x: NDArray[Any], y: NDArray[Any], result: Any) -> None:
    from .numerics.check import check

    found = check(x, y, np.asarray(result))
    if not found:
        raise CheckError(f"verify=True found a wrong result: {found}")
