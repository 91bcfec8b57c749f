"""Which type an operation has on the GPU: numba-cuda's inference, for numbers.

A type is a NumPy type code without byte order: "b1", "i1" to "i8", "u1" to "u8", "f2", "f4", "f8".
The rules were read off numba-cuda 0.30 and are compared with a table recorded from it in the tests.
The three that surprise: integer arithmetic is done in 64 bits, an integer of 32 bits or more beside
a float32 gives float64, and a literal such as 2.0 is float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import KernelError

__all__ = [
    "ARITHMETIC",
    "BITWISE",
    "SHIFTS",
    "binary",
    "comparison_operands",
    "dtype_of",
    "is_float",
    "is_integer",
    "name_of",
    "range_type",
    "type_of_dtype",
    "type_of_scalar",
    "unary",
    "unify",
]

#: AST operator names by family.
ARITHMETIC = frozenset({"Add", "Sub", "Mult", "Div", "FloorDiv", "Mod"})
BITWISE = frozenset({"BitAnd", "BitOr", "BitXor"})
SHIFTS = frozenset({"LShift", "RShift"})

_NAMES = {
    "b1": "bool",
    **{f"i{n}": f"int{8 * n}" for n in (1, 2, 4, 8)},
    **{f"u{n}": f"uint{8 * n}" for n in (1, 2, 4, 8)},
    **{f"f{n}": f"float{8 * n}" for n in (2, 4, 8)},
}
_CODES = {np.dtype(name): code for code, name in _NAMES.items()}


def binary(operator: str, left: str, right: str) -> tuple[str, str, str]:
    """Return the result type of ``left operator right``, and the types its operands are cast to.

    Parameters
    ----------
    operator : str
        Name of the AST operator: "Add", "FloorDiv", "LShift", ...

    Raises
    ------
    TypeError
        Where numba has no such operation; the message is a fragment, without the line.
    """
    if operator in SHIFTS or operator in BITWISE:
        if is_float(left) or is_float(right):
            raise TypeError(f"a {name_of(left)} and a {name_of(right)} have no bits to combine")
        if operator in SHIFTS:
            result = "u8" if left[0] == "u" else "i8"
            return result, result, "i8"
        if left == right == "b1":
            return "b1", "b1", "b1"
    if operator == "Pow":
        return _power(left, right)
    if is_float(left) or is_float(right):
        common = unify(left, right)
        if _needs_wider_float(left, right):
            common = {"f2": "f4", "f4": "f8"}.get(common, common)
        if common == "f2" and operator in ("FloorDiv", "Mod"):
            common = "f4"
        return common, common, common
    common = _machine_integer(left, right)
    if operator == "Div":
        return "f8", "f8", "f8"
    return common, common, common


def comparison_operands(left: str, right: str) -> str:
    """Return the type in which ``left < right`` is decided."""
    common = unify(left, right)
    if _needs_wider_float(left, right):
        return {"f2": "f4", "f4": "f8"}.get(common, common)
    return common


def unary(operator: str, operand: str) -> str:
    """Return the type of ``-x``, ``+x``, ``~x`` or ``not x``."""
    if operator == "Not":
        return "b1"
    if is_float(operand):
        if operator == "Invert":
            raise TypeError(f"a {name_of(operand)} has no bits to invert")
        return operand
    if operator == "Invert" and operand == "b1":
        return "b1"
    return "u8" if operand[0] == "u" else "i8"


def unify(left: str, right: str) -> str:
    """Return the type of a variable that is ``left`` on one path and ``right`` on another.

    Also the type of ``min(left, right)`` and of a conditional expression.
    """
    if left == right or right == "b1":
        return left
    if left == "b1":
        return right
    if is_float(left) and is_float(right):
        return max(left, right)
    if is_float(left) or is_float(right):
        real, whole = (left, right) if is_float(left) else (right, left)
        return max(real, {"1": "f2", "2": "f4"}.get(whole[1], "f8"))
    if left[0] == right[0]:
        return max(left, right)
    signed, unsigned = (left, right) if left[0] == "i" else (right, left)
    if unsigned == "u8":
        return "f8"
    return max(signed, f"i{2 * int(unsigned[1])}")


def range_type(*bounds: str) -> str:
    """Return the type of a loop variable over ``range`` with bounds of these types."""
    if all(bound in ("b1", "i1", "i2", "i4") for bound in bounds):
        return "i4"
    if all(bound[0] == "u" for bound in bounds) and bounds[-1] in ("u4", "u8"):
        return "u8"
    return "i8"


def is_float(code: str) -> bool:
    """Whether ``code`` is a floating-point type."""
    return code[0] == "f"


def is_integer(code: str) -> bool:
    """Whether ``code`` is an integer type (bool is not)."""
    return code[0] in "iu"


def name_of(code: str) -> str:
    """Return the type's NumPy name."""
    return _NAMES[code]


def dtype_of(code: str) -> np.dtype[Any]:
    """Return the NumPy dtype of a type."""
    return np.dtype(_NAMES[code])


def type_of_dtype(dtype: np.dtype[Any]) -> str | None:
    """Return the type of array elements of ``dtype``; None where kernels cannot hold it."""
    return _CODES.get(dtype) if dtype.isnative else None


def type_of_scalar(value: Any) -> str | None:
    """Return the type of a Python or NumPy number; None for anything else."""
    if isinstance(value, np.generic):
        return type_of_dtype(value.dtype)
    if isinstance(value, bool):
        return "b1"
    if isinstance(value, int):
        if -(1 << 63) <= value < 1 << 63:
            return "i8"
        if value < 1 << 64:
            return "u8"
        raise KernelError(f"{value} does not fit in 64 bits")
    return "f8" if isinstance(value, float) else None


def _machine_integer(left: str, right: str) -> str:
    """The 64-bit type of integer arithmetic: unsigned only where both operands are."""
    return "u8" if left[0] == right[0] == "u" else "i8"


def _needs_wider_float(left: str, right: str) -> bool:
    """Whether an unsigned integer beside a float is one step too wide for it.

    numba converts uint8 beside float16, and uint16 beside float32, by way of the next signed type.
    """
    pair = {left, right}
    return pair in ({"f2", "u1"}, {"f2", "u2"}, {"f4", "u2"})


def _power(left: str, right: str) -> tuple[str, str, str]:
    if is_float(left) and not is_float(right):
        base = max(left, "f4")
        return base, base, "u8" if right[0] == "u" else "i8"
    if is_float(left) or is_float(right):
        common = "f8" if {left, right} in ({"f4", "u2"}, {"f2", "u2"}) else unify(left, right)
        common = max(common, "f4")
        return common, common, common
    common = _machine_integer(left, right)
    return common, common, common
