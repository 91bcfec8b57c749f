"""The errors tilewise raises: one base class, and a child for each thing a caller can mend.

Every child is also the built-in exception that a NumPy user would expect in its place, so
``except ValueError`` keeps working.
"""

from __future__ import annotations

import re
from typing import Any

__all__ = [
    "BudgetError",
    "CheckError",
    "DTypeError",
    "DeviceError",
    "FileError",
    "KernelError",
    "OptionError",
    "ShapeError",
    "TilewiseError",
    "describe",
]


class TilewiseError(Exception):
    """Base class of every error raised on purpose by tilewise."""

    def __str__(self) -> str:
        return re.sub(r"\s*\n\s*", " ", super().__str__())  # one line, whatever it quotes


class ShapeError(TilewiseError, ValueError):
    """Operands (or ``out``) whose shapes do not go together."""


class DTypeError(TilewiseError, TypeError):
    """An operand of a type that cannot be multiplied, or a wrong type of ``out``."""


class OptionError(TilewiseError, ValueError):
    """An option that is not known, contradicts another, or does not apply here."""


class BudgetError(TilewiseError, MemoryError):
    """The product cannot be done within the memory budget; raised before any work."""


class DeviceError(TilewiseError, RuntimeError):
    """A device that was asked for is not there or cannot be used."""


class FileError(TilewiseError, OSError):
    """A file that cannot be read as a matrix, or an output that cannot be written."""


class CheckError(TilewiseError, ArithmeticError):
    """``verify=True`` found that a result is not the product of its operands."""

    __str__ = ArithmeticError.__str__  # a verdict has several lines


class KernelError(TilewiseError, RuntimeError):
    """A kernel that leaves the dialect, or did something illegal; names the source line."""


def describe(name: str, operand: Any) -> str:
    """Return ``name`` with shape, dtype and strides of an operand, for a message.

    A file's strides are left out: they are those of the array it stands for.
    """
    is_file = getattr(operand, "where", "memory") == "file"
    strides = "" if is_file else f", strides {operand.strides}"
    return f"{name} (shape {operand.shape}, dtype {operand.dtype}{strides})"
