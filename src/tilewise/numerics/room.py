"""What a check holds, and the parts it takes a product in so as to hold no more than it may.

How it looks at a part is decided in ``check``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Self

from .. import _memory
from ..errors import BudgetError
from .bounds import Bound
from .dtypes import DType
from .elements import Rule

__all__ = ["Room"]

#: Multiply-adds up to which a product is recomputed in any case: that takes milliseconds. For
#: integers, which BLAS has no products for, it is fewer.
RECOMPUTED_WORK, RECOMPUTED_INTEGER_WORK = 2**27, 2**24
#: A side so short that it is too.
RECOMPUTED_SIDE = 16

#: What takes as long as summing up an element of a, b or c, which is about 10 ns: multiply-adds
#: that are recomputed; and for each row, column or term that is summed, and for each element of c
#: that is compared, so many elements.
_WORK_PER_ELEMENT, _INTEGER_WORK_PER_ELEMENT = 80, 10
_LINE_ELEMENTS, _COMPARED_ELEMENTS = 400, 5

#: Elements of a panel in float64: 8 MiB where there is room for several, and where there is little.
PANEL, LEAST_PANEL = 2**20, 2**10
#: Rows, columns or terms of the smallest parts.
LEAST_SIDE = 16
#: Blocks that the columns, and the rows, of C are cut into, in all its parts. Smaller blocks see
#: smaller errors; each costs as much as one vector a round.
BLOCKS = 8

#: What is held if nobody says: the more of these bytes, and of this share of a, b and c.
_DEFAULT_BYTES, _DEFAULT_SHARE = 256 << 20, 16

#: What is held, as measured: for any product; for elements of a small one; for each element of a
#: panel, twice in sums; for each row, column and term that is summed, in all and in each block; for
#: the scaling of each term.
_LEAST_BYTES = 64 << 10
_OPERAND_BYTES, _RESULT_BYTES = 40, 96
_PANEL_BYTES = 32
_LINE_BYTES, _BLOCK_BYTES, _INTEGER_LINE_BYTES = 256, 352, 256
_TERM_BYTES = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """How a check goes about products of m×k by k×n, and what it holds."""

    sizes: tuple[int, int, int]  #: m, n and k
    count: int  #: products
    recomputes: bool  #: whether it looks at every element
    is_exact: bool
    real_parts: int  #: of an element of C: 2 if complex
    pieces: int  #: that sums are held in
    panel: int  #: elements of a panel that is recomputed
    sum_panel: int  #: of one that is summed
    rows: int  #: of a part of C whose sums are held together
    columns: int
    terms: int  #: of K that are summed together
    blocks: int  #: that the rows, and the columns, of a part are cut into

    @classmethod
    def of(
        cls,
        sizes: tuple[int, int, int],
        batch: tuple[int, ...],
        dtypes: tuple[DType, DType, DType],
        bound: Bound,
        memory_bytes: int | None = None,
    ) -> Self:
        """Return how to check a product within a budget, or within a default if there is none.

        Parameters
        ----------
        sizes, batch : tuple of int
            m, n and k; and the batch axes.
        dtypes : tuple of dtype
            Those of a, b and c, canonical.
        bound : Bound
        memory_bytes : int, optional

        Raises
        ------
        BudgetError
            If the budget does not hold the smallest parts.
        """
        m, n, k = sizes
        result = dtypes[2]
        is_exact = result.kind in "biu"
        room = cls(
            sizes=sizes,
            count=prod(batch),
            recomputes=_recomputes(m, n, k, result),
            is_exact=is_exact,
            real_parts=2 if result.kind == "c" else 1,
            pieces=2 if not is_exact and Rule.of(bound, *dtypes).is_wide else 1,
            panel=PANEL,
            sum_panel=PANEL,
            rows=m,
            columns=n,
            terms=k,
            blocks=BLOCKS,
        )
        least = room._least()
        if memory_bytes is None:
            a, b, c = (dtype.itemsize for dtype in dtypes)
            share = (a * m * k + b * k * n + c * m * n) // _DEFAULT_SHARE
            memory_bytes = max(_DEFAULT_BYTES, share, least.nbytes)
        if room.nbytes <= memory_bytes:
            return room
        if least.nbytes > memory_bytes:
            size = _memory.format_bytes
            raise BudgetError(
                f"a check of {sizes[0]}x{sizes[2]} @ {sizes[2]}x{sizes[1]} takes at least "
                f"{size(least.nbytes, is_needed=True)}, and memory= allows {size(memory_bytes)}; "
                "raise the budget, or do without the check"
            )
        return least._grown(memory_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes that are held at most."""
        m, n, k = self.sizes
        size = _OPERAND_BYTES * (m * k + k * n) + _RESULT_BYTES * m * n
        small = self.real_parts * min(self.count, self.matrices) * size
        large = _PANEL_BYTES * self.panel
        if not self.recomputes:
            large = max(large, self._sum_panel_bytes * self.sum_panel + self._line_bytes)
        return _LEAST_BYTES + min(small, self._fixed_bytes + large)

    @property
    def matrices(self) -> int:
        """How many matrices are recomputed together."""
        m, n, k = self.sizes
        return max(self.panel // 8 // (max(m * k, k * n, m * n, 1) * self.real_parts**2), 1)

    @property
    def parts(self) -> int:
        """How many parts C is taken in."""
        m, n, _ = self.sizes
        return -(-m // self.rows) * -(-n // self.columns)

    def _least(self) -> Self:
        """Return the same with the smallest parts."""
        m, n, k = (min(size, LEAST_SIDE) for size in self.sizes)
        return replace(
            self, panel=LEAST_PANEL, sum_panel=LEAST_PANEL, rows=m, columns=n, terms=k, blocks=1
        )

    def _grown(self, memory_bytes: int) -> Self:
        """Return the largest panels, and, with half of the memory, the parts that are fewest."""
        m, n, k = self.sizes
        free = memory_bytes - _LEAST_BYTES - self._fixed_bytes
        panel, sum_panel = (
            max(min(PANEL, 1 << max(each.bit_length() - 1, 0)), LEAST_PANEL)
            for each in (free // _PANEL_BYTES, free // 2 // self._sum_panel_bytes)
        )
        room = replace(self, panel=panel, sum_panel=sum_panel)
        if self.recomputes:
            return replace(room, rows=m, columns=n, terms=k)
        free -= sum_panel * self._sum_panel_bytes
        counts = (BLOCKS >> i for i in range(BLOCKS.bit_length()))
        found = (replace(room, blocks=count) for count in counts)
        return min(
            (x._widened(free) for x in found if x._line_bytes <= free), key=lambda x: x.parts
        )

    def _widened(self, free: int) -> Self:
        """Return the largest parts, none of which has larger blocks than all of C would have."""
        m, n, k = self.sizes
        lines = free // self._each_bytes
        most_m = max(m * self.blocks // BLOCKS, self.rows)
        most_n = max(n * self.blocks // BLOCKS, self.columns)
        # Pieces of K cost nothing; for each part of the rows B is read again, of the columns A.
        terms = min(k, max(lines // 4, self.terms, lines - most_m - most_n))
        rows = min(most_m, max((lines - terms) // 2, self.rows, lines - terms - most_n))
        columns = min(most_n, lines - terms - rows)
        return replace(self, rows=_evenly(m, rows), columns=_evenly(n, columns), terms=terms)

    @property
    def _fixed_bytes(self) -> int:
        m, n, k = self.sizes
        has_scales = not (self.recomputes or self.is_exact)
        return 2 * (m + n) + has_scales * _TERM_BYTES * self.real_parts * k

    @property
    def _sum_panel_bytes(self) -> int:
        return _PANEL_BYTES * (1 if self.is_exact else 2)

    @property
    def _line_bytes(self) -> int:
        return self._each_bytes * (self.rows + self.columns + self.terms)

    @property
    def _each_bytes(self) -> int:
        if self.is_exact:
            return _INTEGER_LINE_BYTES
        return (_LINE_BYTES + _BLOCK_BYTES * self.blocks) * self.real_parts * self.pieces


def _evenly(size: int, most: int) -> int:
    """Return the least part that cuts ``size`` into no more parts than ``most`` does."""
    return -(-size // -(-size // most))


def _recomputes(m: int, n: int, k: int, result: DType) -> bool:
    """Say whether every element of a product is recomputed: if that is as quick as the sums."""
    work, elements = m * n * k, m * k + k * n + m * n
    if result.kind in "biu":
        most = max(RECOMPUTED_INTEGER_WORK, _INTEGER_WORK_PER_ELEMENT * elements)
        return work <= most or result.kind == "b"
    by_sums = elements + _LINE_ELEMENTS * (m + n + k)
    is_quicker = work / _WORK_PER_ELEMENT + _COMPARED_ELEMENTS * m * n <= by_sums
    return is_quicker or work <= RECOMPUTED_WORK or min(m, n, k) <= RECOMPUTED_SIDE
