"""What was asked of a product, in plain values: how operands and result lie, and the options.

Options come in the forms that callers write them in, and are checked here; shapes and types are
looked at by `_plan`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import _memory
from ._operand import Operand
from .errors import BudgetError, OptionError
from .numerics import dtypes

__all__ = ["IN_HOST_MEMORY", "Request", "array_key", "layout", "request"]

#: A place for a result in host memory, wherever that is: then it does not matter to a plan.
IN_HOST_MEMORY = Operand((), np.dtype(np.uint8), ())


class Request(NamedTuple):
    """All that a plan depends on besides the machine; a tuple, which is quickly found again."""

    a: Operand
    b: Operand
    out: Operand | None = None  #: where the result goes, if the caller says
    dtype: np.dtype[Any] | None = None  #: of the result, if not the product's own
    precision: str | None = None
    memory_bytes: int | None = None
    devices: tuple[str, ...] | None = None
    verify: bool = False
    updates: bool = False  #: whether it is scaled and added to what is there, as `gemm` does
    overlaps: tuple[bool, bool] = (False, False)  #: whether out shares memory with a, with b
    is_mixed: bool = False  #: whether some of a, b and out are on a GPU, and others in host memory


def request(
    a: Operand,
    b: Operand,
    out: Operand | None,
    *,
    dtype: Any = None,
    precision: Any = None,
    memory: Any = None,
    devices: tuple[str, ...] | None = None,
    verify: Any = False,
    updates: bool = False,
    overlaps: tuple[bool, bool] = (False, False),
    is_mixed: bool = False,
    whole_bytes: int | None = None,
    taken_bytes: int = 0,
) -> Request:
    """Return what was asked, of options as `matmul` takes them, devices by their full names.

    ``whole_bytes`` is what per cent are of, if not of this machine's memory; ``taken_bytes`` of the
    budget are for other products.

    Raises
    ------
    DTypeError, OptionError
        If an option is not one.
    """
    if precision is not None and not isinstance(precision, str):
        raise OptionError(f"precision={precision!r} is not text; None is the default bound")
    budget = None if memory is None else _memory.parse_budget(memory, whole_bytes)
    if budget is not None and taken_bytes > budget:
        size = _memory.format_bytes
        raise BudgetError(
            f"the results of all others take {size(taken_bytes, is_needed=True)}, and memory= "
            f"allows {size(budget)} for the group; raise the budget, pass out=, or multiply fewer "
            "at a time"
        )
    if budget is not None:
        budget -= taken_bytes
    return Request(
        a,
        b,
        out,
        None if dtype is None else dtypes.dtype_named(dtype),
        precision,
        budget,
        devices,
        verify if type(verify) is bool else _switch(verify, "verify"),
        updates,
        overlaps,
        is_mixed,
    )


def array_key(x: NDArray[Any]) -> tuple[Any, ...]:
    """Return what a plan depends on of a NumPy array, in the order of `Operand`'s fields."""
    return x.shape, x.dtype, x.strides, x.flags.aligned


def layout(x: Any) -> Operand:
    """Describe an array in host or device memory, or return what is a description already."""
    if type(x) is np.ndarray:
        return Operand(*array_key(x))
    if type(x) is Operand:
        return x
    return Operand(x.shape, x.dtype, x.strides, x.aligned, x.where)


def _switch(value: Any, name: str) -> bool:
    """Return an on-off option; text such as "false" would silently switch it on."""
    if isinstance(value, (int, np.bool_)) and value in (0, 1):
        return bool(value)
    raise OptionError(f"{name}={value!r} is not True or False")
