"""What `check` found, for people (``print``) and for programs (``to_dict``)."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite, prod
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

__all__ = ["Check", "Mismatch", "Where", "Wrong", "locate", "runs"]

Number = bool | int | float | complex


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """One element proven wrong in exact arithmetic.

    Attributes
    ----------
    index : tuple of int
        Into c.
    got, expected : number
        What c holds, and C* as far as a Python number can hold it; Inf or NaN where the operands
        make it so.
    allowed : float
        The largest error that the promise allows here; of one part, if complex.
    """

    index: tuple[int, ...]
    got: Number
    expected: Number
    allowed: float

    def __str__(self) -> str:
        place = ", ".join(map(str, self.index))
        text = f"c[{place}]" if self.index else "c"
        text += f" is {_number(self.got)}, expected {_number(self.expected)}"
        return f"{text} ± {self.allowed:.2g}" if self.allowed else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Where the wrong elements of one matrix are.

    Attributes
    ----------
    batch : tuple of int
        Index of the matrix along the batch axes.
    rows, columns : tuple of range
        Runs of rows and columns that hold wrong elements.
    elements : int
        Wrong elements found.
    is_complete : bool
        Whether those are all: False where so much is wrong that only a part was recomputed.
    tile : tuple of int, optional
        Number of the tile (down, across) that the wrong elements form, if they do.
    tile_shape : tuple of int, optional
        Its rows and columns.
    shape : tuple of int
        Of the matrix.
    """

    batch: tuple[int, ...]
    rows: tuple[range, ...]
    columns: tuple[range, ...]
    elements: int
    is_complete: bool
    tile: tuple[int, int] | None
    tile_shape: tuple[int, int] | None
    shape: tuple[int, int]

    def __str__(self) -> str:
        text = f"{_spans('row', self.rows, self.shape[0])}, "
        text += _spans("column", self.columns, self.shape[1])
        if self.tile is not None and self.tile_shape is not None:
            high, wide = self.tile_shape
            text = f"tile ({self.tile[0]}, {self.tile[1]}) of {high}×{wide}: {text}"
        if self.batch:
            text += f" of matrix {list(self.batch)}"
        if self.elements > 1:
            some = "" if self.is_complete else "at least "
            text += f" ({some}{self.elements:,} elements)"
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The verdict on a product; true if it is right.

    Attributes
    ----------
    verdict : {"exact", "rounding", "wrong"}
        Right to the last bit, as integers must be; right but for the rounding that was promised;
        or wrong.
    bound : str
        What was promised, as a formula.
    ratio : float
        The largest measured error over the allowed one, among the elements recomputed.
    recomputed : int
        How many those were: all of them where the product is small, else the most suspicious.
    smallest_error : float
        An error in one element beyond this is sure to be seen.
    smallest_relative : float or None
        The same, relative to a typical (root mean square) element of c; None if c is zero.
    confidence : float
        Probability, at least, that such an error is seen, whatever else is wrong.
    rounds : int
        Rounds of random signs from either side; 0 where everything was recomputed.
    where : Where or None
        Where the wrong elements are; of the first wrong matrix, if there are several.
    first : Mismatch or None
        The first of them.
    notes : tuple of str
        What else a reader should know.
    """

    verdict: Literal["exact", "rounding", "wrong"]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, str, str]
    bound: str
    ratio: float
    recomputed: int
    smallest_error: float
    smallest_relative: float | None
    confidence: float
    rounds: int
    where: Where | None = None
    first: Mismatch | None = None
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.verdict != "wrong"

    def __bool__(self) -> bool:
        return self.ok

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as JSON types; Inf, NaN and complex numbers as strings."""
        where, first = self.where, self.first
        return {
            "ok": self.ok,
            "verdict": self.verdict,
            "shapes": [list(shape) for shape in self.shapes],
            "dtypes": list(self.dtypes),
            "bound": self.bound,
            "ratio": _plain(self.ratio),
            "recomputed": self.recomputed,
            "smallest_error": _plain(self.smallest_error),
            "smallest_relative": _plain(self.smallest_relative),
            "confidence": self.confidence,
            "rounds": self.rounds,
            "where": where
            and {
                "batch": list(where.batch),
                "rows": [[r.start, r.stop] for r in where.rows],
                "columns": [[r.start, r.stop] for r in where.columns],
                "elements": where.elements,
                "is_complete": where.is_complete,
                "tile": where.tile and list(where.tile),
                "tile_shape": where.tile_shape and list(where.tile_shape),
            },
            "first": first
            and {
                "index": list(first.index),
                "got": _plain(first.got),
                "expected": _plain(first.expected),
                "allowed": _plain(first.allowed),
            },
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        a, b, c = (
            f"{dtype} {shape}" for dtype, shape in zip(self.dtypes, self.shapes, strict=True)
        )
        total = prod(self.shapes[2])
        lines = []
        if self.where is not None:
            lines.append(f"WRONG at {self.where}")
            lines.append(f"  first     {self.first}")
        elif self.verdict == "exact":
            lines.append("right: exact")
        else:
            lines.append("right: what differs is rounding")
        lines.append(f"  product   {a} @ {b} -> {c}")
        lines.append(f"  promised  {self.bound}")
        if self.verdict == "rounding":
            some = "all" if self.recomputed >= total else f"the likeliest {self.recomputed:,} of"
            lines.append(
                f"  measured  {self.ratio:.3g} of that at most, in {some} {total:,} elements"
            )
        if self.rounds and self.ok:
            seen = "any error"
            if self.verdict == "rounding":
                seen = f"an error above {self.smallest_error:.3g} in one element"
                if self.smallest_relative is not None:
                    seen += f" ({self.smallest_relative:.2g} of a typical one)"
            lines.append(f"  sees      {seen}, but for a chance of {1 - self.confidence:.1g}")
        how = "every element recomputed"
        if self.rounds:
            how = f"{self.rounds} rounds of random signs by rows and by columns"
        lines.append(f"  how       {how}")
        lines.extend(f"  note      {note}" for note in self.notes)
        return "\n".join(lines)


class Wrong:
    """The wrong elements of one matrix: their rows and columns, and, while there is room, which."""

    def __init__(self, shape: tuple[int, int], kept: int) -> None:
        self.shape, self._kept = shape, kept
        self.is_complete = True
        self.rows, self.columns = (np.zeros(size, bool) for size in shape)
        self._found: list[NDArray[np.int64]] = []  # into the flattened matrix, some of them twice

    def add(self, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> None:
        self.rows[rows] = True
        self.columns[columns] = True
        self._found.append(rows * self.shape[1] + columns)
        if sum(x.size for x in self._found) > 2 * self._kept:
            self._settle()

    def take(self, part: Wrong, row: int, column: int) -> None:
        """Add what is wrong in a part of the matrix that begins there."""
        if part:
            rows, columns = part.elements()
            self.add(rows + row, columns + column)
        self.rows[row : row + part.shape[0]] |= part.rows
        self.columns[column : column + part.shape[1]] |= part.columns
        self.is_complete &= part.is_complete

    def __bool__(self) -> bool:
        return bool(self._found)

    def extent(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the rows, and the columns, that hold wrong elements."""
        return np.flatnonzero(self.rows), np.flatnonzero(self.columns)

    def elements(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the rows and columns of the elements kept, in row-major order."""
        self._settle()
        rows, columns = np.divmod(self._found[0], self.shape[1])
        return rows, columns

    def _settle(self) -> None:
        found = np.sort(np.concatenate(self._found))
        found = found[np.diff(found, prepend=-1) > 0]
        self.is_complete &= found.size <= self._kept
        self._found = [found[: self._kept]]


def locate(
    rows: NDArray[np.int64],
    columns: NDArray[np.int64],
    shape: tuple[int, int],
    batch: tuple[int, ...],
    elements: int,
    is_complete: bool,
) -> Where:
    """Return where the wrong elements are, and the tile that they form, if they do.

    Parameters
    ----------
    rows, columns : ndarray of int
        The rows, and the columns, that hold wrong elements; ascending.
    """
    tile: tuple[int, int] | None = None
    tile_shape: tuple[int, int] | None = None
    height, width = (int(x[-1] - x[0] + 1) for x in (rows, columns))
    # A wrong tile may hold many errors below their bounds, but few rows or columns of them alone.
    fills = 4 * rows.size >= 3 * height and 4 * columns.size >= 3 * width
    fills = fills and is_complete and 8 * elements >= height * width and min(height, width) > 1
    if fills and (height, width) != shape:
        down = _tile_edge(int(rows[0]), height, shape[0])
        across = _tile_edge(int(columns[0]), width, shape[1])
        if down and across:
            tile, tile_shape = (int(rows[0]) // down, int(columns[0]) // across), (down, across)
    return Where(
        batch=batch,
        rows=runs(rows),
        columns=runs(columns),
        elements=elements,
        is_complete=is_complete,
        tile=tile,
        tile_shape=tile_shape,
        shape=shape,
    )


def runs(indices: NDArray[np.int64]) -> tuple[range, ...]:
    """Return ascending integers as runs of consecutive ones."""
    breaks = np.flatnonzero(np.diff(indices) != 1) + 1
    return tuple(
        range(int(run[0]), int(run[-1]) + 1) for run in np.split(indices, breaks) if run.size
    )


def _tile_edge(start: int, length: int, total: int) -> int | None:
    """Return the edge of the tile that [start, start + length) is, or all but a little of.

    The last tile of a matrix is cut off, and in the outermost rows of a wrong tile every error may
    happen to be within the bound, so the least power of two that holds the run is tried first.
    """
    stop = start + length
    if length == total:
        return total
    edge = 1
    while start // edge != (stop - 1) // edge:
        edge *= 2
    inside = min(edge * (start // edge + 1), total) - edge * (start // edge)
    if 4 * length >= 3 * inside:
        return edge
    return length if start % length == 0 else None


def _spans(noun: str, ranges: tuple[range, ...], total: int) -> str:
    if ranges == (range(total),):
        return f"all {total} {noun}s" if total > 1 else f"{noun} 0"
    if len(ranges) == 1 and len(ranges[0]) == 1:
        return f"{noun} {ranges[0].start}"
    shown = [str(r.start) if len(r) == 1 else f"{r.start}–{r.stop - 1}" for r in ranges[:6]]
    text = f"{noun}s {', '.join(shown)}"
    return text if len(ranges) <= 6 else f"{text}, … ({sum(map(len, ranges))} in all)"


def _number(x: Number) -> str:
    return f"{x:.9g}" if isinstance(x, (float, complex)) else str(x)


def _plain(x: Number | None) -> Number | str | None:
    if isinstance(x, complex) or (isinstance(x, float) and not isfinite(x)):
        return str(x)
    return x
