"""Arithmetic on lanes: what a rewritten kernel calls for everything NumPy does not spell the same.

How values are held. A *varying* value is an array that broadcasts against the axes of the lanes
(block, z, y, x), as small as it can be: ``threadIdx.x`` has one element for each x, and a row of
blocks shares it. A *uniform* value, the same for all lanes, is a Python int or bool, or a NumPy
float. Integers are held in 64 bits (int64 for signed types, uint64 for unsigned ones) and are
always within the range of their type. A mask is a boolean array, or None for all lanes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .fma import fma_f4, fma_f8
from .typing_rules import dtype_of, is_float

__all__ = ["EMPTY", "MATH", "NAMESPACE", "cast", "holder", "lift", "wrap", "zero"]

Mask = NDArray[np.bool_] | None

#: A mask with no lane set.
EMPTY: NDArray[np.bool_] = np.zeros(1, np.bool_)
_TYPES = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")
_SIGN = 1 << 63
_ALL = (1 << 64) - 1


def both(mask: Mask, condition: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The lanes of ``mask`` for which ``condition`` holds."""
    return condition if mask is None else mask & condition


def but_not(mask: Mask, condition: Mask) -> NDArray[np.bool_]:
    """The lanes of ``mask`` that are not in ``condition``."""
    if condition is None:
        return EMPTY
    return ~condition if mask is None else mask & ~condition


def either(left: Mask, right: Mask) -> Mask:
    """The lanes of either mask."""
    return None if left is None or right is None else left | right


def some(mask: Mask) -> bool:
    """Whether any lane is set."""
    return mask is None or bool(mask.any())


def pick(mask: Mask, new: Any, old: Any) -> Any:
    """Return ``new`` in the lanes of ``mask`` and ``old`` elsewhere; both varying."""
    return new if mask is None else np.where(mask, new, old)


def holder(code: str) -> np.dtype[Any]:
    """Return the dtype of arrays that hold a varying value of this type."""
    return np.dtype({"i": np.int64, "u": np.uint64}.get(code[0]) or dtype_of(code))


def lift(code: str, value: Any) -> NDArray[Any]:
    """Make a uniform value of this type a varying one."""
    return np.array([value], holder(code))


def zero(code: str, uniform: bool) -> Any:
    """Return a zero of this type."""
    scalar = {"b": False, "i": 0, "u": 0}.get(code[0], dtype_of(code).type(0))
    return scalar if uniform else lift(code, scalar)


def wrap(code: str, value: Any) -> Any:
    """Bring an integer, held in 64 bits or as a Python int, into the range of its type."""
    bits = 8 * int(code[1])
    if isinstance(value, np.ndarray):
        return value if bits == 64 else value.astype(dtype_of(code)).astype(holder(code))
    value &= (1 << bits) - 1
    return value - (1 << bits) if code[0] == "i" and value >> (bits - 1) else value


def cast(source: str, target: str) -> Callable[[Any], Any]:
    """Return the function that converts a value, of either kind, from one type to another."""
    if source == target:
        return lambda value: value
    if is_float(target):
        dtype = dtype_of(target)
        if is_float(source):
            return lambda value: value.astype(dtype)
        held = holder(source)
        return lambda value: (value if isinstance(value, np.ndarray) else held.type(value)).astype(
            dtype
        )
    if target == "b1":
        return lambda value: value != 0
    if is_float(source):
        return lambda value: _float_to_integer(source, target, value)
    held = holder(target)
    fits = source == "b1" or (source[0] == target[0] and source[1] <= target[1])
    fits = fits or (source[0] == "u" and source[1] < target[1])

    def to_integer(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            value = value.astype(held)
            return value if fits else wrap(target, value)
        return int(value) if fits else wrap(target, int(value))

    return to_integer


def _float_to_integer(source: str, code: str, value: Any) -> Any:
    """Truncate; beyond the type's ends and for NaN as PTX's ``cvt.rzi`` does.

    It saturates. A NaN is 0 if it is no float64 and the integer has no 64 bits, else the highest
    bit alone (PTX ISA, "cvt"). To 8 bits numba-cuda 0.30 converts by way of 16.
    """
    array = np.atleast_1d(np.asarray(value, np.float64))
    by_way_of = code if code[1] != "1" else f"{code[0]}2"
    info = np.iinfo(dtype_of(by_way_of))
    low, high = float(info.min), float(info.max)
    inside = (array > low - 1 if low < -1 else array > -1.0) & (array < high)
    whole = np.where(inside, array, 0).astype(holder(code))
    whole = np.where(array >= high, info.max, np.where(array <= low, info.min, whole))
    if source == "f8" or code[1] == "8":
        highest = info.min if code[0] == "i" else 1 << (info.bits - 1)
        whole = np.where(np.isnan(array), highest, whole)
    whole = wrap(code, whole.astype(holder(code)))
    return whole if isinstance(value, np.ndarray) else int(whole[0])


def wrap_i8(value: int) -> int:
    """Wrap a Python int to 64 bits, signed."""
    return ((value + _SIGN) & _ALL) - _SIGN


def wrap_u8(value: int) -> int:
    """Wrap a Python int to 64 bits, unsigned."""
    return value & _ALL


def _divide(code: str, left: Any, right: Any) -> tuple[Any, Any]:
    """Floor quotient and remainder of 64-bit integers; 0 and 0 by zero and on overflow."""
    if not (isinstance(left, np.ndarray) or isinstance(right, np.ndarray)):
        if right == 0 or (right == -1 and left == -_SIGN):
            return 0, 0
        return left // right, left % right
    dtype = holder(code)
    left, right = np.asarray(left, dtype), np.asarray(right, dtype)
    void = right == 0
    if code == "i8":
        void = void | ((right == -1) & (left == -_SIGN))
    quotient, remainder = np.divmod(left, np.where(void, dtype.type(1), right))
    nought = dtype.type(0)
    return np.where(void, nought, quotient), np.where(void, nought, remainder)


def floordiv(code: str, left: Any, right: Any) -> Any:
    """``left // right`` of two values of the same 64-bit integer or float type.

    Of floats as numba does it, by what NVVM makes of a remainder.
    """
    if not is_float(code):
        return _divide(code, left, right)[0]
    rest = _remainder(code, left, right)
    quotient = (left - rest) / right
    quotient = np.where((rest != 0) & ((right < 0) != (rest < 0)), quotient - 1, quotient)
    whole = np.floor(quotient)
    whole = np.where(quotient - whole > 0.5, whole + 1, whole)
    whole = np.where(quotient == 0, left * (quotient * quotient) / right, whole)
    return np.where(right == 0, left / right, whole)[()]


def modulo(code: str, left: Any, right: Any) -> Any:
    """``left % right`` of two values of the same 64-bit integer or float type."""
    if not is_float(code):
        return _divide(code, left, right)[1]
    rest = _remainder(code, left, right)
    nought = np.where(right < 0, -dtype_of(code).type(0), dtype_of(code).type(0))
    result = np.where((right < 0) != (rest < 0), right + rest, rest)
    return np.where(right == 0, rest, np.where(rest == 0, nought, result))[()]


def _remainder(code: str, left: Any, right: Any) -> Any:
    """``frem`` as NVVM 13.5 expands it: not exact, and NaN where the divisor is infinite."""
    fma, numerator, divisor = {"f4": fma_f4, "f8": fma_f8}[code], abs(left), abs(right)
    rest = fma(-np.floor(numerator / divisor), divisor, numerator)
    return np.where(left < 0, -rest, rest)[()]


def truediv(left: Any, right: Any) -> Any:
    """``left / right`` of two floats of the same type."""
    return np.true_divide(left, right)


def shift_left(code: str, value: Any, amount: Any) -> Any:
    """``value << amount``; amounts outside 0 to 63 shift everything out."""
    if not (isinstance(value, np.ndarray) or isinstance(amount, np.ndarray)):
        shifted = value << amount if 0 <= amount < 64 else 0
        return wrap_i8(shifted) if code == "i8" else wrap_u8(shifted)
    dtype = holder(code)
    inside = (amount >= 0) & (amount < 64)
    shifted = np.asarray(value, dtype) << np.where(inside, amount, 0).astype(dtype)
    return np.where(inside, shifted, dtype.type(0))


def shift_right(code: str, value: Any, amount: Any) -> Any:
    """``value >> amount``; amounts outside 0 to 63 leave the sign."""
    if not (isinstance(value, np.ndarray) or isinstance(amount, np.ndarray)):
        if 0 <= amount < 64:
            return value >> amount
        return -1 if value < 0 else 0
    dtype = holder(code)
    inside = (amount >= 0) & (amount < 64)
    shifted = np.asarray(value, dtype) >> np.where(inside, amount, 63).astype(dtype)
    return shifted if code == "i8" else np.where(inside, shifted, dtype.type(0))


def power(code: str, base: Any, exponent: Any) -> Any:
    """``base ** exponent``; integers by repeated squaring in 64 bits, floats by the C library."""
    if is_float(code):
        wide = np.power(np.asarray(base, np.float64), np.asarray(exponent, np.float64))
        return wide.astype(dtype_of(code))[()]
    scalar = not (isinstance(base, np.ndarray) or isinstance(exponent, np.ndarray))
    dtype = holder(code)
    factor, left = (
        np.atleast_1d(np.asarray(base, dtype)),
        np.atleast_1d(np.asarray(exponent, dtype)),
    )
    negative = left < 0
    # 0 to a negative power is the smallest integer; ±1 keeps its magnitude; all else becomes 0.
    inverse = np.where(factor == 0, dtype.type(-_SIGN if code == "i8" else 0), dtype.type(0))
    inverse = np.where(factor == 1, dtype.type(1), inverse)
    if code == "i8":
        inverse = np.where(factor == -1, np.where(left & 1, -1, 1), inverse)
    result = np.ones(np.broadcast_shapes(factor.shape, left.shape), dtype)
    left = np.where(negative, dtype.type(0), left)
    while left.any():
        result = np.where(left & dtype.type(1), result * factor, result)
        factor, left = factor * factor, left >> dtype.type(1)
    result = np.where(negative, inverse, result)
    return int(result[0]) if scalar else result


def minimum(code: str, left: Any, right: Any, exact_pair: bool) -> Any:
    """``min(left, right)``: of a pair of one float type the hardware's, which passes over NaN."""
    return _extreme(code, left, right, exact_pair, np.fmin, np.less)


def maximum(code: str, left: Any, right: Any, exact_pair: bool) -> Any:
    """``max(left, right)``: of a pair of one float type the hardware's, which passes over NaN."""
    return _extreme(code, left, right, exact_pair, np.fmax, np.greater)


def _extreme(code: str, left: Any, right: Any, exact_pair: bool, pair: Any, beats: Any) -> Any:
    if is_float(code) and exact_pair:
        chosen = pair(left, right)
        zeros = (left == 0) & (right == 0)
        if np.any(zeros):  # -0 is below +0
            minus = np.signbit(left) | np.signbit(right)
            if pair is np.fmax:
                minus = np.signbit(left) & np.signbit(right)
            signed = np.where(minus, -dtype_of(code).type(0), dtype_of(code).type(0))
            chosen = np.where(zeros, signed, chosen)[()]
        return chosen
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        dtype = holder(code)
        return np.where(beats(right, left), np.asarray(right, dtype), np.asarray(left, dtype))
    return right if beats(right, left) else left


def choose(condition: Any, if_true: Any, if_false: Any) -> Any:
    """Return one of two varying values, lane by lane."""
    return np.where(condition, if_true, if_false)


def _elementwise(function: Callable[..., float]) -> Callable[..., Any]:
    """Apply one of Python's math functions to float64 lanes; NaN where it raises."""

    def one(*values: float) -> float:
        try:
            return function(*values)
        except ValueError:
            return math.nan
        except OverflowError:
            return math.inf

    return np.vectorize(one, otypes=[np.float64])


#: Functions of float arguments, by the name they have in ``math``. Those in _EXACT are computed as
#: the GPU does; the others in float64 and rounded, where the GPU's may differ in the last bits.
MATH: dict[str, Callable[..., Any]] = {
    **{name: getattr(np, name) for name in ("sqrt", "floor", "ceil", "trunc", "fabs", "copysign")},
    **{name: getattr(np, name) for name in ("fmod", "nextafter", "hypot", "degrees", "radians")},
    **{name: getattr(np, name) for name in ("exp", "expm1", "exp2", "log", "log2", "log10")},
    **{name: getattr(np, name) for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh", "log1p")},
    **{name: getattr(np, f"arc{name[1:]}") for name in ("asin", "acos", "atan", "asinh", "acosh")},
    "atanh": np.arctanh,
    "atan2": np.arctan2,
    "pow": np.power,
    **{name: _elementwise(getattr(math, name)) for name in ("erf", "erfc", "gamma", "lgamma")},
    "remainder": _elementwise(math.remainder),
    "cbrt": np.cbrt,
}
_EXACT = frozenset({"sqrt", "floor", "ceil", "trunc", "fabs", "copysign", "fmod", "nextafter"})


def math_function(name: str, code: str) -> Callable[..., Any]:
    """Return a function of :data:`MATH` for arguments of this float type."""
    function, dtype = MATH[name], dtype_of(code)
    if name in _EXACT:
        return function

    def rounded(*values: Any) -> Any:
        return np.asarray(function(*(v.astype(np.float64) for v in values))).astype(dtype)[()]

    return rounded


def is_exact(name: str) -> bool:
    """Whether a function of :data:`MATH` gives the GPU's bits."""
    return name in _EXACT


def absolute(code: str, value: Any) -> Any:
    """``abs(value)``; the smallest integer of a type is its own absolute value."""
    return abs(value) if is_float(code) or code == "u8" else wrap(code, abs(value))


def _bits(code: str, value: Any) -> NDArray[np.uint8]:
    """The bits of integers of this type, most significant first, on a last axis."""
    array = np.atleast_1d(np.asarray(value, holder(code))).astype(dtype_of(code))
    octets = array.astype(array.dtype.newbyteorder(">"))[..., None].view(np.uint8)
    return np.unpackbits(octets, axis=-1)


def _from_bits(result: NDArray[Any], code: str, value: Any) -> Any:
    held = result.astype(holder(code))
    return held if isinstance(value, np.ndarray) else int(held[0])


def popc(code: str, value: Any) -> Any:
    """Number of set bits."""
    return _from_bits(_bits(code, value).sum(-1, dtype=np.int64), code, value)


def clz(code: str, value: Any) -> Any:
    """Number of leading zeros."""
    bits = _bits(code, value)
    leading = np.where(bits.any(-1), bits.argmax(-1), bits.shape[-1])
    return _from_bits(leading, code, value)


def ffs(code: str, value: Any) -> Any:
    """Position of the lowest set bit, from 1; 0 for zero."""
    bits = _bits(code, value)[..., ::-1]
    return _from_bits(np.where(bits.any(-1), bits.argmax(-1) + 1, 0), "u4", value)


def brev(code: str, value: Any) -> Any:
    """The bits in reverse order."""
    bits = _bits(code, value)[..., ::-1]
    weights = np.uint64(1) << np.arange(bits.shape[-1] - 1, -1, -1, dtype=np.uint64)
    return _from_bits((bits * weights).sum(-1, dtype=np.uint64), code, value)


#: What a rewritten kernel finds under these names.
NAMESPACE: dict[str, Any] = {
    **{f.__name__: f for f in (both, but_not, either, some, pick, choose, wrap, wrap_i8, wrap_u8)},
    **{f.__name__: f for f in (floordiv, modulo, truediv, shift_left, shift_right, power)},
    **{f.__name__: f for f in (minimum, maximum, absolute, popc, clz, ffs, brev)},
    "fma_f4": fma_f4,
    "fma_f8": fma_f8,
    "EMPTY": EMPTY,
    "rint": np.rint,
    **{f"lift_{code}": (lambda value, code=code: lift(code, value)) for code in _TYPES},
    **{
        f"{source}_to_{target}": cast(source, target)
        for source in _TYPES
        for target in _TYPES
        if source != target
    },
    **{f"{name}_{code}": math_function(name, code) for name in MATH for code in ("f2", "f4", "f8")},
    "float32": np.float32,
    "float64": np.float64,
    "float16": np.float16,
    "isnan": np.isnan,
    "isinf": np.isinf,
    "isfinite": np.isfinite,
    "nan": math.nan,
    "inf": math.inf,
}
