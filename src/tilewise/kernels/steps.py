"""What planners of every family say of a product: where operands lie, and what is launched.

Pure data, and the arithmetic on it that they share; nothing here knows a kernel. `chains` is the
order of summation that all of them keep.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

__all__ = [
    "MAP_BYTES",
    "MOST_BLOCKS",
    "Argument",
    "Arguments",
    "Choice",
    "Kept",
    "Number",
    "Pointer",
    "Product",
    "Room",
    "Step",
    "Strides",
    "Tensor",
    "chains",
    "drifts",
    "limited_by",
    "round_up",
]

#: A tensor map's address and steps are multiples of this, and its steps less than the other.
MAP_BYTES = 16
_MOST_MAP_STEP = 2**40

#: Blocks of a grid of one dimension.
MOST_BLOCKS = 2**31 - 1

#: The longest K that is one chain of sums. Large products run at full rate only so: the tiles that
#: are fastest leave no registers for a second accumulator.
LONGEST_CHAIN = 16384
#: A longer K is cut into pieces of this, or of more if there were more than MOST_PIECES then.
#: 66 pieces of a 128x128 result, in tiles of 64x128, occupy the 132 multiprocessors of an H200.
LEAST_PIECE = 1536
MOST_PIECES = 128
#: Pieces are whole tiles along K, of whichever kernel.
_TILE_K = 64

#: Rounds of tiles after which blocks are still near each other.
_UNPACED_WAVES = 4


def chains(k: int) -> tuple[int, int]:
    """Return into how many chains K is cut, and the length of all but the last.

    This is what the order of summation depends on, and it sees nothing but K.
    """
    if k <= LONGEST_CHAIN:
        return 1, round_up(k, _TILE_K)
    piece = max(LEAST_PIECE, round_up(math.ceil(k / MOST_PIECES), _TILE_K))
    return math.ceil(k / piece), piece


def drifts(tiles: int, at_once: int) -> bool:
    """Say whether blocks that compute so many tiles, so many at once, drift apart: see ``pace``."""
    return tiles > _UNPACED_WAVES * at_once


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

    def scaled(self, factor: int) -> Strides:
        """Return the steps in parts of an element, of which it has ``factor``."""
        outer, inner, row, col = (
            factor * step for step in (self.outer, self.inner, self.row, self.col)
        )
        return replace(self, outer=outer, inner=inner, row=row, col=col)

    def taken(self, outer: int, inner: int, rows: int, cols: int) -> Strides:
        """Return the steps in a stack of these sizes.

        One that is never taken becomes one that suits every kernel: 0, or 1 along the columns.
        """
        return replace(
            self,
            outer=self.outer if outer > 1 else 0,
            inner=self.inner if inner > 1 else 0,
            row=self.row if rows > 1 else 0,
            col=self.col if cols > 1 else 1,
        )

    def suits_map(self, rows: int, cols: int, item_bytes: int) -> bool:
        """Whether TMA can read or write matrices along their rows; steps are as `taken`."""
        is_apart = rows == 1 or self.row >= cols
        far = [step * item_bytes for step in (self.outer, self.inner, self.row)]
        is_whole = all(0 <= step < _MOST_MAP_STEP and step % MAP_BYTES == 0 for step in far)
        return self.is_aligned and self.col == 1 and is_apart and is_whole

    def arguments(self, name: str) -> Arguments:
        """Return them as the kernels of all families call them."""
        return {f"{name}_{axis}": getattr(self, axis) for axis in ("outer", "inner", "row", "col")}


@dataclass(frozen=True, slots=True)
class Pointer:
    """The pointer of a call's ``operand``-th array, some bytes on."""

    operand: int
    offset_bytes: int = 0

    def moved(self, nbytes: int) -> Pointer:
        return Pointer(self.operand, self.offset_bytes + nbytes)


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

    def moved(self, nbytes: int) -> Tensor:
        return replace(self, offset_bytes=self.offset_bytes + nbytes)

    @classmethod
    def mapped(
        cls,
        pointer: Pointer,
        strides: Strides,
        sizes: tuple[int, int, int, int],
        item_bytes: int,
    ) -> Tensor:
        """Describe a stack of matrices for a map: outer and inner axis, rows, columns.

        ``strides``, as they are `taken`, suit a map; a batch axis of step 0 is one matrix for all.
        """
        outer, inner, rows, cols = sizes
        # Steps that are never taken have to be such as a map holds.
        row = strides.row or round_up(cols, MAP_BYTES // item_bytes)
        matrix = rows * row
        shape = (*strides.stack(outer, inner), rows, cols)
        steps = (strides.outer or matrix, strides.inner or matrix, row, 1)
        return cls(pointer.operand, shape, steps, item_bytes, pointer.offset_bytes)


#: What a parameter of a kernel may be given; a plain number is one that never changes.
Argument = Number | Pointer | Tensor | float
Arguments = dict[str, Argument]


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """C = alpha·A·B + beta·C over two batch axes, a: m×k, b: k×n, c: m×n.

    Strides of 0 along a batch axis share one matrix; an axis of size 1 has any. ``updates`` says
    that alpha may be other than 1, or beta other than 0: launches are then given them as `Number`.
    Of what type it is, the families say each in their own terms.
    """

    m: int
    n: int
    k: int
    a: Strides
    b: Strides
    c: Strides
    outer: int = 1
    inner: int = 1
    updates: bool = False

    @classmethod
    def of(cls, product: Product, **more: Any) -> Self:
        """Return a product in a family's own terms."""
        return cls(**{each.name: getattr(product, each.name) for each in fields(Product)}, **more)

    @property
    def transposed(self) -> Self:
        """The same product as Cᵀ = Bᵀ·Aᵀ."""
        a, b, c = self.b.transposed, self.a.transposed, self.c.transposed
        return replace(self, m=self.n, n=self.m, a=a, b=b, c=c)


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

    def moved(self, at: tuple[int, int, int]) -> Step:
        """Return the launch for a, b and c that begin so many bytes on."""
        if not any(at):
            return self
        far = (*at, 0)
        arguments = {
            name: x.moved(far[self.operands[x.operand]]) if isinstance(x, Pointer | Tensor) else x
            for name, x in self.arguments.items()
        }
        return replace(self, arguments=arguments)


@dataclass(frozen=True, slots=True)
class Kept:
    """What a product leaves of an operand in its workspace, and how one that finds it goes on.

    A product is computed by ``steps`` alone where the one before it, in the same workspace, had the
    same operand at the same address, and ``left`` of both is equal.
    """

    left: object
    steps: tuple[Step, ...]
    expected_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How a product is computed: launches, in order, on one stream; and what that takes.

    The workspace, on an address that is a multiple of 256, is for this product alone until it is
    done. Bits are the same whichever choice it is: they depend on the operands and K alone.
    """

    steps: tuple[Step, ...]
    workspace_bytes: int
    expected_us: float
    why: str
    kept: tuple[Kept, Kept] | None = None  #: of a and of b, if anything


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


def limited_by(bounds: Mapping[str, float]) -> tuple[float, str]:
    """Return how long something takes that takes each of these at least, and the largest's name.

    Where two are close, both are felt: a power mean instead of the largest.
    """
    largest = max(bounds, key=lambda name: bounds[name])
    return sum(bound**16 for bound in bounds.values()) ** (1 / 16), largest
