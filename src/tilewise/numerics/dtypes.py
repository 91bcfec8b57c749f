"""Element types: which can be multiplied, what their product's type is, and what accumulates it.

The rules are NumPy's. The floats of ``ml_dtypes`` (bfloat16 and float8) are recognised by name, so
that the package is never imported here: an operand of such a type has imported it already.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import numpy as np

from ..errors import DTypeError, OptionError

__all__ = [
    "BLAS_DTYPES",
    "EXTENSION_NAMES",
    "accumulator",
    "as_numpy",
    "canonical",
    "dtype_named",
    "is_extension",
    "is_float8",
    "is_narrow",
    "of_result",
    "product_dtype",
]

DType = np.dtype[Any]

#: The types that BLAS multiplies itself.
BLAS_DTYPES: frozenset[DType] = frozenset(np.dtype(char) for char in "fdFD")

_FLOAT8_NAMES = frozenset(
    f"float8_{suffix}"
    for suffix in ("e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")
)

#: The types of ``ml_dtypes`` that can be multiplied, which files keep as raw bytes.
EXTENSION_NAMES = _FLOAT8_NAMES | {"bfloat16"}


def is_extension(dtype: DType) -> bool:
    """Whether ``dtype`` is one of ``ml_dtypes``, which neither files nor other libraries know."""
    return dtype.isbuiltin == 2


def is_float8(dtype: DType) -> bool:
    """Whether ``dtype`` is one of the 8-bit floats of ``ml_dtypes``."""
    return dtype.name in _FLOAT8_NAMES


@cache
def is_narrow(dtype: DType) -> bool:
    """Whether ``dtype`` is a float narrower than float32, which float32 holds exactly."""
    return dtype.name in ("float16", "bfloat16") or is_float8(dtype)


def canonical(dtype: DType, operand: str) -> DType:
    """Return ``dtype`` in native byte order, or raise if matrices of it cannot be multiplied.

    Parameters
    ----------
    dtype : numpy.dtype
        The element type as the operand has it.
    operand : str
        The operand's name, for the message.

    Raises
    ------
    DTypeError
        For object, string, void, structured and date types, with what to do instead.
    """
    if is_narrow(dtype) and dtype.isnative:
        return dtype
    if dtype.kind in "biufc":
        return dtype.newbyteorder("=")
    raise DTypeError(f"{operand} has dtype {dtype}, which cannot be multiplied: {_way_out(dtype)}")


def of_result(dtype: DType) -> DType:
    """Return ``dtype`` in native byte order, or raise if no product is of it."""
    try:
        return canonical(dtype, "dtype=")
    except DTypeError:
        raise DTypeError(
            f"dtype={str(dtype)!r} is no type of numbers that a product can have; choose one that "
            "is, such as 'float64' or 'int32'"
        ) from None


def product_dtype(a: DType, b: DType) -> DType:
    """Return the type of ``a @ b`` for operands of two canonical types.

    NumPy's promotion, with two additions for types that NumPy cannot promote: float8 acts as
    float32 (the product of two float8 matrices is float32), and bfloat16 acts as float32 beside
    float16 or an integer of more than 8 bits.
    """
    return _product_dtype(a, b)


def accumulator(result: DType, a: DType, b: DType) -> DType:
    """Return the type in which sums of products are held for a result of type ``result``."""
    if result.kind in "iu" and {a.kind, b.kind} <= set("biu"):
        return result  # sums modulo the result's width, whatever the operands' signs
    computed = np.promote_types(as_numpy(a), as_numpy(b))
    if is_narrow(result) or (result.kind == "f" and result.itemsize <= 4):
        result = np.dtype(np.float32)
    if computed.kind == "f" and result.kind == "f" and computed.itemsize <= 4:
        computed = np.dtype(np.float32)
    return np.promote_types(computed, result)


def dtype_named(dtype: Any) -> DType:
    """Return the numpy dtype for whatever a caller gave as ``dtype=``, names included.

    Names of ``ml_dtypes`` types ("bfloat16") are understood where that package is installed.
    """
    try:
        known: DType = np.dtype(dtype)
    except (TypeError, ValueError, SyntaxError, DeprecationWarning) as error:  # "5%", "f4,(2", "a"
        if isinstance(dtype, str) and dtype in EXTENSION_NAMES:
            try:
                import ml_dtypes
            except ImportError:
                raise DTypeError(
                    f"dtype {dtype!r} needs the package ml_dtypes: pip install ml_dtypes"
                ) from None
            extension: DType = np.dtype(getattr(ml_dtypes, dtype))
            return extension
        raise OptionError(f"dtype={dtype!r} is not an element type: {error}") from None
    return known


def as_numpy(dtype: DType) -> DType:
    """Return float32 in place of the narrow floats NumPy does not know."""
    if is_narrow(dtype) and dtype.name != "float16":
        return np.dtype(np.float32)
    return dtype


@lru_cache(maxsize=512)
def _product_dtype(a: DType, b: DType) -> DType:
    if is_float8(a) or is_float8(b):
        return np.promote_types(as_numpy(a), as_numpy(b))
    try:
        return np.promote_types(a, b)
    except TypeError:
        return np.promote_types(as_numpy(a), as_numpy(b))


def _way_out(dtype: DType) -> str:
    if dtype.kind == "O":
        return "convert it to a number type first, for example with .astype(float)"
    if dtype.kind in "SUT":
        return "it holds text; convert it to a number type first"
    if dtype.names:
        return f"multiply one of its fields, such as x[{dtype.names[0]!r}]"
    if dtype.kind in "mM":
        return "it holds dates or times; convert it to a number type first"
    if dtype.type is np.void and dtype.itemsize in (1, 2):
        return (
            "raw bytes, as .npy files keep bfloat16 and float8; say which it is with "
            "x.view(ml_dtypes.bfloat16)"
        )
    if is_extension(dtype):
        wider = "int8" if "int" in dtype.name else "float32"
        wider = "complex64" if dtype.name in ("complex32", "bcomplex32") else wider
        return f"convert it to a type that holds its values, with .astype(np.{wider})"
    return "convert it to a number type first"
