"""What planners of every family say of a product: where operands lie, and what is launched.

Pure data; nothing here knows a kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

__all__ = [
    "Argument",
    "Number",
    "Pointer",
    "Room",
    "Step",
    "Strides",
    "Tensor",
    "round_up",
]


@dataclass(frozen=True, slots=True)
class Strides:
    """Steps of a stack of matrices from one element to the next, in elements, along each axis.

    ``is_aligned`` says whether the first element's address is a multiple of 16 bytes.
    """

    outer: int
    inner: int
    row: int
    col: int
    is_aligned: bool = True

    @property
    def transposed(self) -> Strides:
        return replace(self, row=self.col, col=self.row)

    def stack(self, outer: int, inner: int) -> tuple[int, int]:
        """Return along how much of each batch axis there is a matrix of its own."""
        return outer if self.outer else 1, inner if self.inner else 1


@dataclass(frozen=True, slots=True)
class Pointer:
    """The pointer of a call's ``operand``-th array, some bytes on."""

    operand: int
    offset_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Number:
    """A number given with each call, its ``position``-th."""

    position: int


@dataclass(frozen=True, slots=True)
class Tensor:
    """A call's ``operand``-th array with its shape, and its strides in elements.

    For a tensor map the last stride is 1 and the others are multiples of 16 bytes.
    """

    operand: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int
    offset_bytes: int = 0


#: What a parameter of a kernel may be given; a plain number is one that never changes.
Argument = Number | Pointer | Tensor | float


@dataclass(frozen=True, slots=True)
class Step:
    """One launch: a kernel's name, its grid, and an argument for each parameter.

    The launch is given ``operands``, out of a, b, c and the workspace (0 to 3), in this order, to
    which its arguments refer by position, and the first ``numbers`` of alpha and beta.
    """

    kernel: str
    grid: tuple[int]
    arguments: Mapping[str, Argument]
    operands: tuple[int, ...]
    numbers: int

    @classmethod
    def of(cls, kernel: str, programs: int, given: Mapping[str, Argument]) -> Step:
        """Return a launch of arguments that refer to operands by the numbers above."""
        used = sorted({x.operand for x in given.values() if isinstance(x, Pointer | Tensor)})
        local = {
            name: replace(x, operand=used.index(x.operand))
            if isinstance(x, Pointer | Tensor)
            else x
            for name, x in given.items()
        }
        numbers = sum(isinstance(x, Number) for x in given.values())
        return cls(kernel, (programs,), local, tuple(used), numbers)


@dataclass(slots=True)
class Room:
    """The workspace, as it is taken piece by piece."""

    nbytes: int = 0
    STEP: ClassVar[int] = 256

    def take(self, nbytes: int) -> Pointer:
        pointer = Pointer(3, self.nbytes)
        self.nbytes = round_up(self.nbytes + nbytes, self.STEP)
        return pointer


def round_up(size: int, step: int) -> int:
    """Return the least multiple of ``step`` that is not below ``size``."""
    return -(-size // step) * step
