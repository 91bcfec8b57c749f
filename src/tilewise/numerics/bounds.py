"""What tilewise promises of a product: the error bound of each element, by K and element types.

The promises themselves, and why they hold, are in docs/numerics.md. Whether a given result keeps
its promise is decided in ``check``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import frexp, ldexp
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DTypeError, OptionError
from .dtypes import DType, accumulator, is_float8, is_narrow

__all__ = ["Bound", "FloatFormat", "bound", "float_format"]

#: Products of float8 that a tensor core may add up by itself before the sum is promoted to float32.
FLOAT8_PIECE = 128
#: Bits of an operand of precision "tf32".
TF32_BITS = 11
#: Products that one float8 tensor core instruction adds up.
FLOAT8_STEP = 32

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """How far an element of C may lie from the exact product C*.

    ``|C − C*| ≤ factor·|A||B| + rounding·|C*| + underflow``, element by element, where ``|A||B|``
    is the product of the absolute values. For a complex product the bound holds for the real and
    the imaginary part by itself, each seen as a real product of 2K terms:
    ``Re C* = Aᵣ·Bᵣ − Aᵢ·Bᵢ`` against ``|Aᵣ||Bᵣ| + |Aᵢ||Bᵢ|`` and ``Im C* = Aᵣ·Bᵢ + Aᵢ·Bᵣ`` against
    ``|Aᵣ||Bᵢ| + |Aᵢ||Bᵣ|``.

    Attributes
    ----------
    k : int
        The number of terms of each element's sum.
    factor : float
        Coefficient of ``|A||B|``: every rounding on the way to the sum.
    underflow : float
        Absolute term, for roundings among subnormal numbers.
    rounding : float
        Coefficient of ``|C*|``: unit roundoff of the final rounding to a narrower result type, or
        0 where there is none.
    text : str
        The bound as a formula.
    """

    k: int
    factor: float
    underflow: float
    rounding: float
    text: str

    @property
    def is_exact(self) -> bool:
        """Whether no error at all is allowed."""
        return self.factor == self.rounding == self.underflow == 0

    def of(
        self, abs_product: NDArray[np.float64], exact: NDArray[np.float64] | None = None
    ) -> NDArray[np.float64]:
        """Return the allowed error of each element.

        Parameters
        ----------
        abs_product : ndarray of float64, (..., m, n)
            ``|A||B|``, of the real or the imaginary part where the product is complex.
        exact : ndarray of float64, (..., m, n), optional
            C*, of the same part. Without it ``|A||B|``, which is never less, stands in.
        """
        size = abs_product if exact is None else np.abs(exact)
        allowed = self.factor * abs_product + self.underflow
        return allowed + self.rounding * size if self.rounding else allowed

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatFormat:
    """The facts of a real floating-point type that bounds are made of.

    ``unit`` is the unit roundoff, ``least`` the smallest positive number, ``max`` the largest
    finite one; ``has_inf`` says whether overflow gives Inf (else it gives NaN).
    """

    unit: float
    least: float
    max: float
    has_inf: bool


def bound(
    k: int,
    a_dtype: DType,
    b_dtype: DType,
    result_dtype: DType,
    *,
    precision: str | None = None,
    device: str = "cpu",
) -> Bound:
    """Return the error bound promised for ``a @ b`` with K terms an element.

    Parameters
    ----------
    k : int
        Length of each sum.
    a_dtype, b_dtype, result_dtype : numpy.dtype
        Canonical element types (see ``dtypes.canonical``).
    precision : {None, "ieee", "tf32"}
        "tf32" for a product of float32 that was given up to 11 bits an operand; the others are the
        default promise.
    device : str
        ``"cpu"``, or a name that begins with ``"cuda"``. Tensor cores chop instead of rounding, so
        the promise for float16, bfloat16 and float8 is weaker there.

    Raises
    ------
    OptionError
        For a precision that has no bound here.
    DTypeError
        If the product cannot have this result type.
    """
    if precision not in (None, "ieee", "tf32"):
        raise OptionError(
            f"precision={precision!r} has no error bound here; leave it out, or say 'ieee' or "
            "'tf32'"
        )
    bits = TF32_BITS if precision == "tf32" else None
    return _bound(k, a_dtype, b_dtype, result_dtype, device.startswith("cuda"), bits)


@lru_cache(maxsize=64)
def float_format(dtype: DType) -> FloatFormat:
    """Return the facts of a floating-point type; of the parts, for a complex one."""
    finfo: Any = np.finfo
    if is_narrow(dtype) and dtype.name != "float16":
        import ml_dtypes  # whoever has such a dtype has imported it already

        finfo = ml_dtypes.finfo
    info = finfo(dtype)
    with np.errstate(all="ignore"):
        has_inf = bool(np.isinf(np.array(np.inf).astype(dtype).astype(np.complex128)))
    return FloatFormat(
        unit=float(info.eps) / 2,
        least=max(float(info.smallest_subnormal), 2.0**-1074),  # longdouble's is less
        max=float(info.max),
        has_inf=has_inf,
    )


@lru_cache(maxsize=512)
def _bound(
    k: int, a: DType, b: DType, result: DType, on_gpu: bool, bits: int | None = None
) -> Bound:
    if result.kind in "biu":
        return _exact(k, a, b, result)
    if result.kind != "c" and "c" in (a.kind, b.kind):
        raise DTypeError(f"the product of {a} and {b} is complex and cannot have dtype {result}")
    if k == 0:
        return Bound(k=0, factor=0.0, underflow=0.0, rounding=0.0, text="C = 0, an empty sum")

    held = accumulator(result, a, b)
    terms, terms_text = (2 * k, "2K") if held.kind == "c" else (k, "K")
    sums, target = float_format(held), float_format(result)
    # Two roundings of slack beside one a term; two more where operands are converted inexactly.
    extra = 2 + sum(2 if _is_rounded(operand, held) else 0 for operand in (a, b))
    chops = on_gpu and is_narrow(a) and is_narrow(b)
    if chops and is_float8(a) and is_float8(b):
        factor, text = _float8_factor(k, sums.unit)
    else:
        unit = 2 * sums.unit if chops else sums.unit
        factor = (terms + extra) * unit
        text = f"({terms_text}+{extra})·{_power(unit)}"
        if bits is not None:  # each operand is rounded to so many bits first
            factor += 2.0 ** (1 - bits)
            text = f"({_power(2.0 ** (1 - bits))}+{text})"
        text += "·|A||B|"
    # ldexp(terms, -1) first: half of the least float64 is not a float64, so round the term up.
    underflow = -(-terms // 2) * sums.least
    text += f" + {terms_text}·{_power_of_half(sums.least)}"
    rounding = 0.0
    if target.unit > sums.unit:
        rounding = target.unit
        factor *= 1 + rounding
        underflow += target.least / 2
        text = f"(1+{_power(rounding)})·({text}) + {_power(rounding)}·|C*|"
        text += f" + {_power_of_half(target.least)}"
    return Bound(
        k=k,
        factor=factor,
        underflow=underflow,
        rounding=rounding,
        text=f"|C − C*| ≤ {text}",
    )


def _exact(k: int, a: DType, b: DType, result: DType) -> Bound:
    kinds = a.kind + b.kind
    if result.kind == "b":
        if kinds != "bb":
            raise DTypeError(f"the product of {a} and {b} cannot have dtype bool")
        text = "C = C* exactly: or of ands"
    else:
        if not set(kinds) <= set("biu"):
            raise DTypeError(f"the product of {a} and {b} cannot have the integer dtype {result}")
        text = f"C = C* exactly, modulo {_power(2.0 ** (8 * result.itemsize))}"
    return Bound(k=k, factor=0.0, underflow=0.0, rounding=0.0, text=text)


def _float8_factor(k: int, unit: float) -> tuple[float, str]:
    """Return the coefficient for float8 on tensor cores, promoted to float32 every 128 of K.

    An instruction aligns its 32 products and the running sum to the largest of them and keeps
    about 14 bits: 33 chops of at most 2^-13 of the largest. Pieces are then added in float32.
    """
    piece = min(k, FLOAT8_PIECE)
    chops = piece + -(-piece // FLOAT8_STEP)
    pieces = -(-k // FLOAT8_PIECE)
    text = f"({chops}·2⁻¹³ + (⌈K/{FLOAT8_PIECE}⌉+2)·{_power(unit)})·|A||B|"
    return chops * ldexp(1.0, -13) + (pieces + 2) * unit, text


def _is_rounded(operand: DType, held: DType) -> bool:
    """Whether converting ``operand`` to the accumulator's type may round."""
    if operand.kind not in "iu":
        return False
    value_bits = 8 * operand.itemsize - (operand.kind == "i")
    return 2.0**-value_bits < float_format(held).unit


def _power(value: float) -> str:
    """Return a power of two as 2ⁿ."""
    return "2" + str(frexp(value)[1] - 1).translate(_SUPERSCRIPTS)


def _power_of_half(value: float) -> str:
    """Return half of a power of two as 2ⁿ, even where the half is below float64."""
    return "2" + str(frexp(value)[1] - 2).translate(_SUPERSCRIPTS)
