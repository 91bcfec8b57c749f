"""Sums of a product over random signs: where a result is off, at the cost of a few vectors.

For random signs x, ``C·x`` and ``A·(B·x)`` differ by the signed sum of the errors in each row. The
sums are taken over blocks of columns (and, from the left, over blocks of rows), and each is divided
by the size that ordinary rounding gives it. What is made of them is decided in ``check``; why they
can be trusted is in docs/numerics.md.

Everything happens in the scaled product ``A'·B' = C'`` with ``A' = 2^-p·A·2^q``,
``B' = 2^-q·B·2^-t``, ``C' = 2^-p·C·2^-t``, diagonal matrices of powers of two, so that a small row,
column or term is seen as well as a large one, and nothing overflows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, frexp, log2, sqrt

import numpy as np
from numpy.typing import NDArray

from .elements import UNIT, Array, Bools, Floats, Rule, left, right
from .panels import panels
from .room import Room
from .unread import Unread

__all__ = ["Side", "Sums", "random_sums"]

Exponents = NDArray[np.int32]
Edges = NDArray[np.int64]

_NOTHING = -(2**14)  # stands for the exponent of zero, below every other


@dataclass(frozen=True, slots=True)
class Side:
    """Sums over blocks of columns, one for every row and block; or the same, transposed.

    An error in one element that exceeds ``score·unit + floor`` of its row and block shows in each
    round with a probability of at least one half, whatever the other errors.
    """

    edges: Edges  #: of the blocks
    score: Floats  #: (rows, blocks): largest sum of random signs, over its ordinary size
    plain: Floats  #: the same for the sum without signs, which errors of one sign add up in
    unit: Floats  #: the ordinary size, in units of C
    floor: Floats  #: how far the rounding of the sums themselves may reach
    norm_log2: float  #: of the row of A (column of B) with the largest 2-norm, scaled by 2^q


@dataclass(frozen=True, slots=True)
class Sums:
    """What the passes over the operands and the result find."""

    rows: Side
    columns: Side
    inf_rows: Bools  #: (m,) rows of A with Inf and no NaN: sums say nothing of them
    inf_columns: Bools  #: (n,) the same for columns of B
    inf_blocks: Bools  #: (m, blocks of columns) in which C may have overflowed
    square_sum: float  #: of the finite elements of C
    largest: float  #: magnitude among them


def random_sums(
    a: Array | Unread,
    b: Array | Unread,
    c: Array | Unread,
    rule: Rule,
    rounds: int,
    rng: np.random.Generator,
    found_wrong: Callable[[Edges, Edges], None],
    room: Room,
) -> Sums:
    """Return the sums of one product in ``rounds`` rounds.

    Parameters
    ----------
    a, b, c : ndarray or Unread (m, k), (k, n), (m, n)
        Read in panels: a twice, b three times (float64: four), c once.
    rounds : int
        Vectors of random signs, on each side.
    found_wrong : callable
        Told the rows and columns of elements that are wrong beyond doubt: NaN where all operands
        are finite, or none where an operand is NaN.
    room : Room
        For panels, of which about five copies in float64 live at a time, and for pieces of K, whose
        sums do; and the number of blocks.
    """
    with np.errstate(all="ignore"):
        scaled = _Scaled(a, b, c, rule, found_wrong, room.sum_panel)
        by_rows = _Accumulator(*scaled.sizes, scaled.parts, rule, rounds, rng, room.blocks)
        by_columns = _Accumulator(*scaled.sizes[::-1], 1, rule, rounds, rng, room.blocks)
        for piece in scaled.pieces(room.terms):
            by_rows.begin_inner(piece)
            for rows, columns, x in scaled.panels_of_b(piece):
                by_rows.add_inner(rows, columns, x)
            by_rows.end_inner()
            by_columns.begin_inner(piece)
            for rows, columns, x in scaled.panels_of_a(piece):
                by_rows.add_outer(rows, columns, x)
                by_columns.add_inner(columns, rows, x.T)
            by_columns.end_inner()
            for rows, columns, x in scaled.panels_of_b(piece):
                by_columns.add_outer(columns, rows, x.T)
        for rows, columns, x in scaled.panels_of_c(by_rows.edges, by_columns.edges):
            by_rows.add_result(rows, columns, x)
            by_columns.add_result(columns, rows, x.T)
        row_side = by_rows.side(scaled.p, scaled.t, scaled.inf_blocks)
        del by_rows
        column_side = by_columns.side(scaled.t, scaled.p, scaled.inf_in_columns, scaled.parts)
    return Sums(
        rows=row_side,
        columns=column_side,
        inf_rows=scaled.a_seen.inf_rows,
        inf_columns=_of_pairs(scaled.b_seen.inf_columns, scaled.parts),
        inf_blocks=scaled.inf_blocks,
        square_sum=scaled.square_sum,
        largest=scaled.largest,
    )


class _Accumulator:
    """The sums over blocks of the columns of ``C' − A'·B'``, gathered panel by panel.

    The sums over blocks of its rows are those of the transposed product.
    """

    def __init__(
        self,
        rows: int,
        terms: int,
        columns: int,
        parts: int,
        rule: Rule,
        rounds: int,
        rng: np.random.Generator,
        blocks: int,
    ) -> None:
        elements = columns // parts
        self.edges = np.linspace(0, elements, min(elements, blocks) + 1).astype(np.int64)
        self._rule, self._terms = rule, terms
        self._edges = self.edges * parts
        self._width = int(np.diff(self._edges).max())
        blocks, vectors = len(self.edges) - 1, rounds + 1
        # The same signs in every block: whole rows are then summed in one call of BLAS.
        self._x = rng.integers(0, 2, (self._width, vectors)) * 2.0 - 1
        self._x[:, 0] = 1  # errors that all have one sign cannot hide from it
        # float64 operands are cut in two, so that the product of the high parts is exact: their
        # bits, and those that the sums over a block and over K add, fit into 53.
        growth = ceil(log2(self._width)) + ceil(log2(terms))
        self._bits = max((52 - growth) // 2, 4)
        self._result_bits = max(52 - growth, 8)
        self._inner: list[Floats] = []
        self._y: list[Floats] = []
        self._d = [np.zeros((rows, blocks, vectors)) for _ in range(2 if rule.is_wide else 1)]
        self._row_squares = np.zeros(rows)
        self._column_squares = np.zeros(columns)
        self._result_squares = np.zeros((rows, blocks) if rule.bound.rounding else 0)

    def begin_inner(self, piece: slice) -> None:
        """Begin with a piece of K, from whose start the terms of panels count."""
        self._y = []
        shape = piece.stop - piece.start, *self._d[0].shape[1:]
        self._inner = [np.zeros(shape) for _ in self._d]

    def add_inner(self, rows: slice, columns: slice, x: Floats) -> None:
        """Take in a panel of B': ``y = B'·x``."""
        for total, piece in zip(self._inner, self._cut(x, self._bits), strict=True):
            self._add_block_sums(total[rows], columns, piece)
        self._column_squares[columns] += np.einsum("ij,ij->j", x, x)

    def end_inner(self) -> None:
        """Make ready for A', once all of the piece of B' is in."""
        self._y = [total.reshape(len(total), -1) for total in self._inner]
        self._inner = []
        if self._rule.is_wide:
            high, rest = self._cut(self._y[0], self._bits)
            rest += self._y[1]
            self._y = [high, rest, high + rest]

    def add_outer(self, rows: slice, columns: slice, x: Floats) -> None:
        """Take in a panel of A': subtract ``A'·y``."""
        y = [part[columns] for part in self._y]
        shape = self._d[0][rows].shape
        if self._rule.is_wide:
            high, low = self._cut(x, self._bits)
            self._d[0][rows] -= (high @ y[0]).reshape(shape)
            self._d[1][rows] -= (high @ y[1] + low @ y[2]).reshape(shape)
        else:
            self._d[0][rows] -= (x @ y[0]).reshape(shape)
        self._row_squares[rows] += np.einsum("ij,ij->i", x, x)

    def add_result(self, rows: slice, columns: slice, x: Floats) -> None:
        """Take in a panel of C': add ``C'·x``."""
        for total, piece in zip(self._d, self._cut(x, self._result_bits), strict=True):
            self._add_block_sums(total[rows], columns, piece)
        if self._rule.bound.rounding:
            for j, here, _ in self._overlaps(columns):
                self._result_squares[rows, j] += np.einsum("ij,ij->i", x[:, here], x[:, here])

    def side(
        self, row_powers: Exponents, column_powers: Exponents, is_void: Bools, parts: int = 1
    ) -> Side:
        """Return the finished sums, in units of C.

        Parameters
        ----------
        row_powers, column_powers : ndarray of int
            p and t of the scaling.
        is_void : ndarray of bool (rows, blocks)
            Sums that say nothing.
        parts : int
            Rows here to a row of the result.
        """
        blocks = [column_powers[i:j] for i, j in pairwise(self._edges)]
        powers = np.array([block.max() for block in blocks])
        least = np.array([block.min() for block in blocks])
        norms = np.array([sqrt(np.ldexp(1.0, 2 * (block.min() - block)).sum()) for block in blocks])
        bound = self._rule.bound
        row_norms = np.sqrt(self._row_squares)[:, None]
        block_norms = np.sqrt(np.add.reduceat(self._column_squares, self._edges[:-1]))
        size = row_norms * block_norms
        # Roundings of random sign add up like √K, not K; see docs/numerics.md.
        unit = bound.factor / sqrt(self._rule.terms + 2) * size
        if bound.rounding:
            unit += bound.rounding * np.minimum(np.sqrt(self._result_squares), size)
        unit += np.ldexp(bound.underflow * norms, -row_powers[:, None] - least)
        totals = np.abs(sum(self._d[1:], self._d[0]))
        scores = np.where(totals == 0, 0.0, totals / unit[..., None])
        scores[np.isnan(scores)] = np.inf
        scores[is_void] = 0
        back = row_powers[:, None] + powers
        norm_log2 = np.log2(row_norms[:, 0]) + row_powers
        return Side(
            self.edges,
            _of_pairs(scores[..., 1:].max(axis=-1), parts),
            _of_pairs(scores[..., 0], parts),
            _of_pairs(np.ldexp(unit, back), parts),
            _of_pairs(np.ldexp(self._floor(row_norms, block_norms), back), parts),
            float(norm_log2.max()),
        )

    def _floor(self, row_norms: Floats, block_norms: Floats) -> Floats:
        """Return how far off the sums may be by their own rounding (docs/numerics.md)."""
        width, terms, size = self._width, self._terms, row_norms * block_norms
        if not self._rule.is_wide:
            own: Floats = (terms + 2 * width + 8) * UNIT * sqrt(width) * size
            return own
        row_sums = sqrt(terms) * row_norms  # at least the sums of magnitudes
        low = (width + 1) * row_sums + sqrt(width * terms) * block_norms
        floor: Floats = UNIT * 2.0**-self._bits * ((terms + 6) * low + (row_sums + 1) * width**2)
        if self._rule.is_rounded:
            floor += 4 * UNIT * sqrt(width) * size
        floor += terms * 2.0**-1070
        return floor

    def _cut(self, x: Floats, bits: int) -> tuple[Floats, ...]:
        """Return what ``x`` is multiplied as: in float64, a multiple of 2^-bits and the rest."""
        if not self._rule.is_wide:
            return (x,)
        large = 1.5 * 2.0 ** (52 - bits)
        high = x + large
        high -= large
        return high, x - high

    def _add_block_sums(self, total: Floats, columns: slice, x: Floats) -> None:
        """Add the sums over each block of ``x``, in all vectors, to ``total``."""
        blocks = len(self._edges) - 1
        if x.flags.c_contiguous and x.shape[1] == blocks * self._width:
            total += (x.reshape(-1, self._width) @ self._x).reshape(total.shape)
            return
        for j, here, within in self._overlaps(columns):
            total[:, j] += x[:, here] @ self._x[within]

    def _overlaps(self, columns: slice) -> Iterator[tuple[int, slice, slice]]:
        """Yield each block that meets ``columns``: its number, and which part, in x and in it."""
        first = int(np.searchsorted(self._edges, columns.start, side="right")) - 1
        for j in range(first, len(self._edges) - 1):
            edge = int(self._edges[j])
            start, stop = max(edge, columns.start), min(int(self._edges[j + 1]), columns.stop)
            if start >= stop:
                return
            yield (
                j,
                slice(start - columns.start, stop - columns.start),
                slice(start - edge, stop - edge),
            )


class _Seen:
    """What a first look at an operand tells: exponents, and where it is not finite."""

    def __init__(self, rows: int, columns: int) -> None:
        self.row_powers = np.full(rows, _NOTHING, np.int32)
        self.column_powers = np.full(columns, _NOTHING, np.int32)
        self.odd_rows, self.nan_rows = np.zeros(rows, bool), np.zeros(rows, bool)
        self.odd_columns, self.nan_columns = np.zeros(columns, bool), np.zeros(columns, bool)

    @property
    def inf_rows(self) -> Bools:
        return self.odd_rows & ~self.nan_rows

    @property
    def inf_columns(self) -> Bools:
        return self.odd_columns & ~self.nan_columns

    def look(
        self,
        rows: slice,
        columns: slice,
        x: Floats,
        row_shift: Exponents | None = None,
        column_shift: Exponents | None = None,
    ) -> None:
        """Take in a panel, whose exponents count as shifted."""
        size = np.abs(x)
        if not np.isfinite(size.max(initial=0)):
            is_odd, is_nan = ~np.isfinite(x), np.isnan(x)
            self.odd_rows[rows] |= is_odd.any(axis=1)
            self.odd_columns[columns] |= is_odd.any(axis=0)
            self.nan_rows[rows] |= is_nan.any(axis=1)
            self.nan_columns[columns] |= is_nan.any(axis=0)
            size[is_odd] = 0
        if row_shift is None and column_shift is None:
            by_row, by_column = _exponent(size.max(axis=1)), _exponent(size.max(axis=0))
        else:
            powers = _exponent(size)
            if row_shift is not None:
                powers += row_shift[rows, None]
            if column_shift is not None:
                powers += column_shift[columns]
            by_row, by_column = powers.max(axis=1), powers.max(axis=0)
        np.maximum(self.row_powers[rows], by_row, out=self.row_powers[rows])
        np.maximum(self.column_powers[columns], by_column, out=self.column_powers[columns])


class _Scaled:
    """The three matrices of the scaled product, panel by panel, without what is not finite."""

    def __init__(
        self,
        a: Array | Unread,
        b: Array | Unread,
        c: Array | Unread,
        rule: Rule,
        found_wrong: Callable[[Edges, Edges], None],
        panel_size: int,
    ) -> None:
        self._a, self._b, self._c, self._rule = a, b, c, rule
        self._panel_size = panel_size
        self._found_wrong = found_wrong
        self.parts = 2 if rule.is_complex else 1
        m, n, terms = a.shape[0], b.shape[1] * self.parts, rule.terms
        self.sizes = m, terms, n
        self.square_sum = self.largest = 0.0
        self.a_seen, self.b_seen = _Seen(m, terms), _Seen(terms, n)
        # Only float64 needs the very exponents; rough ones are mostly 0 and then cost nothing.
        settled = _settled if rule.is_wide else _coarse
        for panel in self._read(b, right, is_look=True):
            self.b_seen.look(*panel)
        self.q = settled(self.b_seen.row_powers)
        column_powers = self.b_seen.column_powers
        if self.q.any():
            again = _Seen(terms, n)
            for panel in self._read(b, right, is_look=True):
                again.look(*panel, row_shift=-self.q)
            column_powers = again.column_powers
        self.t = settled(column_powers)
        self._column_powers = column_powers
        for panel in self._read(a, left, is_look=True):
            self.a_seen.look(*panel, column_shift=self.q if self.q.any() else None)
        self.p = settled(self.a_seen.row_powers)

    def pieces(self, terms: int) -> Iterator[slice]:
        """Yield pieces of K, of so many terms of the given matrices."""
        k, step = self.sizes[1], self.parts * max(terms, 1)
        for start in range(0, k, step):
            yield slice(start, min(start + step, k))

    def panels_of_a(self, piece: slice) -> Iterator[tuple[slice, slice, Floats]]:
        q = self.q[piece]
        for rows, columns, x in self._read(self._a[:, _divided(piece, self.parts)], left):
            x[self.a_seen.odd_rows[rows]] = 0
            yield rows, columns, _shifted(x, -self.p[rows], q[columns])

    def panels_of_b(self, piece: slice) -> Iterator[tuple[slice, slice, Floats]]:
        q = self.q[piece]
        for rows, columns, x in self._read(self._b[_divided(piece, self.parts)], right):
            x[:, self.b_seen.odd_columns[columns]] = 0
            yield rows, columns, _shifted(x, -q[rows], -self.t[columns])

    def panels_of_c(
        self, column_edges: Edges, row_edges: Edges
    ) -> Iterator[tuple[slice, slice, Floats]]:
        m, _, n = self.sizes
        self.inf_blocks = np.zeros((m, len(column_edges) - 1), bool)
        self.inf_in_columns = np.zeros((n, len(row_edges) - 1), bool)
        for rows, columns, x in self._read(self._c, left):
            odd_rows = self.a_seen.odd_rows[rows]
            odd_columns = self.b_seen.odd_columns[columns]
            if odd_rows.any() or odd_columns.any() or not np.isfinite(x.sum()):
                is_expected = odd_rows[:, None] | odd_columns
                self._look_at_odd(rows, columns, x, is_expected, column_edges, row_edges)
                x[is_expected | ~np.isfinite(x)] = 0
            self.square_sum += float(np.einsum("ij,ij->", x, x))
            self.largest = max(self.largest, float(x.max()), -float(x.min()))
            yield rows, columns, _shifted(x, -self.p[rows], -self.t[columns])

    def _look_at_odd(
        self,
        rows: slice,
        columns: slice,
        x: Floats,
        is_expected: Bools,
        column_edges: Edges,
        row_edges: Edges,
    ) -> None:
        """Judge what needs no recomputation, and note what does."""
        is_nan = np.isnan(x)
        nan_expected = self.a_seen.nan_rows[rows, None] | self.b_seen.nan_columns[columns]
        wrong = nan_expected & (np.isfinite(x) if self._rule.is_complex else ~is_nan)
        in_doubt = ~is_expected & ~np.isfinite(x)
        if self._rule.has_inf:  # a NaN may be Inf − Inf where terms are large enough to overflow
            powers = self.a_seen.row_powers[rows, None].astype(np.int64)
            powers = powers + self._column_powers[columns] + self.sizes[1].bit_length()
            is_wrong_nan = in_doubt & is_nan & (powers < frexp(self._rule.sum_max)[1])
            wrong |= is_wrong_nan
            in_doubt &= ~is_wrong_nan
        if wrong.any():
            i, j = np.nonzero(wrong)
            self._found_wrong(i + rows.start, (j + columns.start) // self.parts)
        i, j = np.nonzero(in_doubt)
        i, j = i + rows.start, j + columns.start
        self.inf_blocks[i, np.searchsorted(column_edges, j // self.parts, side="right") - 1] = True
        self.inf_in_columns[j, np.searchsorted(row_edges, i, side="right") - 1] = True

    def _read(
        self, x: Array | Unread, convert: Callable[[Array], Floats], is_look: bool = False
    ) -> Iterator[tuple[slice, slice, Floats]]:
        """Yield the panels of a matrix as the real ones they stand for, in float64.

        For a mere look, float32 is left as it is.
        """
        across = self.parts
        down = self.parts if convert is right else 1
        is_left = is_look and x.dtype == np.float32 and not self._rule.is_complex
        for rows, columns, panel in panels(x, self._panel_size // (across * down)):
            if self._rule.is_complex:
                panel = panel.astype(np.complex128, copy=False)
            yield _times(rows, down), _times(columns, across), panel if is_left else convert(panel)


def _exponent(x: Floats) -> Exponents:
    """Return the least n with ``x < 2^n``, element by element."""
    powers = np.frexp(x)[1].astype(np.int32, copy=False)
    return np.where(x == 0, np.int32(_NOTHING), powers)


def _settled(powers: Exponents) -> Exponents:
    """Return exponents with 0 for rows of zeros."""
    return np.where(powers <= _NOTHING // 2, np.int32(0), powers)


def _coarse(powers: Exponents) -> Exponents:
    """Return exponents in steps of 8 about their median: mostly zeros."""
    powers = _settled(powers)
    return (8 * np.rint((powers - np.median(powers)) / 8)).astype(np.int32)


def _shifted(x: Floats, row_powers: Exponents, column_powers: Exponents) -> Floats:
    """Return ``2^row_powers · x · 2^column_powers``, rounded once at most."""
    if row_powers.any() or column_powers.any():
        x = np.ldexp(x, row_powers[:, None] + column_powers)
    return x


def _times(s: slice, factor: int) -> slice:
    return slice(s.start * factor, s.stop * factor)


def _divided(s: slice, factor: int) -> slice:
    return slice(s.start // factor, s.stop // factor)


def _of_pairs(x: Array, parts: int) -> Array:
    """Return the larger of the two parts' values for each complex element; ``x`` if real."""
    return x if parts == 1 else np.maximum(x[::2], x[1::2])
