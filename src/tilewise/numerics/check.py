"""`check`: is C the product of A and B, up to the rounding that was promised?

Small products are recomputed. Large ones are summed over random signs, which says where to look,
and the elements there are recomputed (docs/numerics.md has the derivation). No result is called
wrong before one of its elements was proven wrong in exact arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isqrt, log, prod, sqrt
from os import PathLike, fspath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._arrays import adopt, is_group
from .._memory import parse_budget
from .._operand import Operand, batch_slices, result_shape
from ..errors import DeviceError, DTypeError, OptionError, ShapeError, describe
from . import bounds, modular
from .checksums import Sums, random_sums
from .dtypes import DType, canonical
from .elements import Array, Bools, Floats, Rule, compare, left, prove, right
from .panels import release
from .room import Room
from .unread import Unread, broadcast_to, taken
from .verdict import Check, Mismatch, Where, Wrong, locate

__all__ = ["Check", "Mismatch", "Where", "check"]

Indices = NDArray[np.int64]
Span = slice | Indices
Matrices = tuple[Any, Any, Any]  # a, b and c, or parts of them: arrays, perhaps unread

#: Blocks with the highest scores that are looked at, from each side, however low those are; of a
#: product that is taken in parts fewer of each, but one.
ALWAYS_LOOKED_AT = 4
#: Multiply-adds that may go into looking at blocks with unusual scores, on each side, in all parts.
LOOKING_WORK = 2**29
LOOKING_INTEGER_WORK = 2**27
#: Edge of the aligned squares about wrong elements that are recomputed too.
NEIGHBOURHOOD = 128
#: Terms of sums that may be added up in exact arithmetic, about a microsecond each.
PROOF_TERMS = 2**20
#: Chance that some sum of an honest product has an unusual score.
DELTA = 2.0**-40


def check(
    a: Any,
    b: Any,
    c: Any,
    /,
    *,
    rounds: int = 8,
    seed: int | None = None,
    bound: bounds.Bound | None = None,
    memory: Any = None,
) -> Check:
    """Say whether ``c`` is ``a @ b``, up to the rounding that was promised for its type.

    Takes O(n²) time a round, and little memory: 64 MiB, and about 3 KiB for each row, column and
    term (twice that for float64, and twice for complex types); but no more than ``memory`` allows,
    and without it than 256 MiB or a sixteenth of a, b and c, whichever is more. Memory-mapped files
    are read in panels. What Inf among the operands makes of a row or column is recomputed; so is
    every product of bools, for which no faster check is known.

    Parameters
    ----------
    a, b : array_like (..., m, k) and (..., k, n)
        The operands, with np.matmul's rules for 1-D operands and for batch axes.
    c : array_like (..., m, n)
        The result to be checked. Its dtype decides what is promised.
    rounds : int
        Vectors of random signs on each side. An error above ``smallest_error`` escapes them with
        a probability of at most 4^-rounds.
    seed : int, optional
        Another draw of signs. By default they follow from the shapes, so that the same call gives
        the same verdict; draw your own where c may have been made to deceive.
    bound : Bound, optional
        What to hold the result to, such as ``plan(a, b).bound``. By default the weakest promise
        that tilewise makes for these types on any device, so that honest tensor cores pass.
    memory : int or str, optional
        Budget for what it holds: "64MiB". The sums are taken over parts of C that fit, for each of
        which some rows of A and columns of B are read again.

    Returns
    -------
    Check
        True if right; with the verdict, what was measured, and where and how ``c`` is wrong.

    Raises
    ------
    ShapeError
        If the operands do not go together, or c has not the shape of their product.
    DTypeError
        If their product cannot have c's dtype, and for longdouble; or if one is no array, or one
        that `matmul` does not take either, such as a masked one.
    DeviceError
        For an array in device memory.
    OptionError
        If rounds is not a whole number from 1 to 64, seed a negative one, or bound for another K or
        for rounding where none is allowed; or for lists of arrays: a check is for one product.
    BudgetError
        If memory does not hold the smallest parts.
    """
    if not (isinstance(rounds, (int, np.integer)) and 1 <= rounds <= 64):
        raise OptionError(f"rounds={rounds!r} is not a whole number from 1 to 64")
    if seed is not None and not (isinstance(seed, (int, np.integer)) and seed >= 0):
        raise OptionError(f"seed={seed!r} is not a whole number, 0 or more")
    a, b, c = (_adopted(x, name) for x, name in ((a, "a"), (b, "b"), (c, "c")))
    problem = _Problem.of(a, b, c, bound)
    room = Room.of(
        problem.sizes, problem.batch, problem.dtypes, problem.bound, parse_budget(memory)
    )
    search = _Search(problem, room, int(rounds), 0 if seed is None else int(seed))
    if problem.c.size:
        with np.errstate(all="ignore"):  # Inf and NaN are what is being judged
            search.run()
    return search.verdict()


def _adopted(x: Any, name: str) -> Array | Unread:
    if isinstance(x, Unread):
        return x
    if is_group(x):
        raise OptionError(f"{name} is a list of arrays, and a check is for one product; check each")
    if isinstance(x, (str, PathLike)):
        raise DTypeError(
            f"{name} is the text {fspath(x)!r}; check compares arrays, such as "
            f"np.load({name}, mmap_mode='r'), and tilewise check files"
        )
    try:
        return adopt(x, name)
    except DeviceError:
        raise DeviceError(
            f"{name} ({type(x).__name__}) is in the memory of a device; check works on the host: "
            "copy it there"
        ) from None


@dataclass(frozen=True, slots=True)
class _Problem:
    """Operands and result as batches of matrices of canonical types; nothing is copied."""

    a: Any  # (*batch, m, k), an array or unread, as are all
    b: Any
    c: Any
    given: Matrices
    dtypes: tuple[DType, DType, DType]  # canonical
    bound: bounds.Bound
    rule: Rule | None  # None where the product is exact

    @classmethod
    def of(cls, a: Any, b: Any, c: Any, bound: bounds.Bound | None) -> _Problem:
        kinds = (canonical(a.dtype, "a"), canonical(b.dtype, "b"), canonical(c.dtype, "c"))
        if any(kind.type in (np.longdouble, np.clongdouble) for kind in kinds):
            raise DTypeError("check covers types up to float64 and complex128, not longdouble")
        batch, m, n, k, shape = result_shape(Operand.of(a), Operand.of(b))
        if c.shape != shape:
            raise ShapeError(f"{describe('c', c)} should have the shape of a @ b, {shape}")
        promised = bounds.bound(k, *kinds, device="cuda")
        if bound is None:
            bound = promised
        elif not isinstance(bound, bounds.Bound):
            raise OptionError(f"bound={bound!r:.60} is not one; pass plan(a, b).bound")
        elif bound.k != k:
            raise OptionError(f"bound is one for K = {bound.k}, and a has K = {k}")
        elif promised.is_exact > bound.is_exact:
            raise OptionError(f"bound allows rounding, and c ({c.dtype}) has to be exact")
        rows = a if a.ndim > 1 else a[np.newaxis, :]
        columns = b if b.ndim > 1 else b[:, np.newaxis]
        result = c if b.ndim > 1 else c[..., np.newaxis]
        return cls(
            a=broadcast_to(rows, (*batch, m, k)),
            b=broadcast_to(columns, (*batch, k, n)),
            c=result if a.ndim > 1 else result[..., np.newaxis, :],
            given=(a, b, c),
            dtypes=kinds,
            bound=bound,
            rule=None if kinds[2].kind in "biu" else Rule.of(bound, *kinds),
        )

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.c.shape[-2], self.c.shape[-1], self.a.shape[-1]

    @property
    def batch(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.c.shape
        return shape[:-2]

    def index(self, at: tuple[int, ...], i: int, j: int) -> tuple[int, ...]:
        """Return the index into c, as it was given, of an element of one matrix."""
        a, b, _ = self.given
        return at + (i,) * int(a.ndim > 1) + (j,) * int(b.ndim > 1)


class _Search:
    """One call of `check`: looks for wrong elements, and keeps account of what was seen."""

    def __init__(self, problem: _Problem, room: Room, rounds: int, seed: int) -> None:
        self.problem, self.rule, self.room = problem, problem.rule, room
        self.tile = room.panel // 8  # elements of C that are recomputed together
        self.kept = room.panel // 4  # wrong elements that are remembered one by one
        self.rounds, self.seed = rounds, seed
        self.parts = 2 if self.rule is not None and self.rule.is_complex else 1
        self.uses_sums = False
        self.ratio = 0.0
        self.recomputed = 0
        self.proofs_left = max(PROOF_TERMS // max(problem.sizes[2], 1), 4)
        self.unsettled = 0
        self.smallest_error = 0.0
        self.square_sum = 0.0
        self.wrong_matrices = 0
        self.where: Where | None = None
        self.first: Mismatch | None = None
        self.notes: list[str] = []

    def run(self) -> None:
        if self.room.recomputes:
            self._recompute()
            return
        self.uses_sums = True
        m, n, k = self.problem.sizes
        for number, at in enumerate(np.ndindex(self.problem.batch)):
            wrong = Wrong((m, n), self.kept)
            rng = np.random.default_rng((self.seed, number, m, n, k))
            a, b, c = self._matrices(at)
            for rows in _cut(slice(0, m), self.room.rows):
                for columns in _cut(slice(0, n), self.room.columns):
                    part = a[rows], b[:, columns], c[rows, columns]
                    found = Wrong(part[2].shape, self.kept)
                    if self.rule is None:
                        self._sum_integers(part, found, rng)
                    else:
                        self._sum_floats(part, found, rng, self.rule)
                    wrong.take(found, rows.start, columns.start)
            self._report(at, wrong)

    def verdict(self) -> Check:
        """Return what was found."""
        problem = self.problem
        if self.wrong_matrices > 1:
            self.notes.insert(
                0, f"{self.wrong_matrices} of {prod(problem.batch)} matrices are wrong"
            )
        if self.unsettled:
            self.notes.append(
                f"{self.unsettled:,} elements are so near their bounds that only exact arithmetic "
                "could tell; those nearest were settled"
            )
        a, b, c = problem.given
        typical = sqrt(self.square_sum / max(problem.c.size, 1))
        is_exact = problem.bound.is_exact or not problem.c.size
        return Check(
            verdict="wrong" if self.where else "exact" if is_exact else "rounding",
            shapes=(a.shape, b.shape, c.shape),
            dtypes=(str(a.dtype), str(b.dtype), str(c.dtype)),
            bound=problem.bound.text,
            ratio=self.ratio,
            recomputed=self.recomputed,
            smallest_error=self.smallest_error,
            smallest_relative=self.smallest_error / typical if typical else None,
            confidence=1 - 0.25**self.rounds if self.uses_sums else 1.0,
            rounds=self.rounds if self.uses_sums else 0,
            where=self.where,
            first=self.first,
            notes=tuple(self.notes),
        )

    def _recompute(self) -> None:
        """Look at every element; at many matrices at a time while they are small."""
        m, n, _ = self.problem.sizes
        batch, at_once = self.problem.batch, self.room.matrices
        if at_once <= 1:
            for at in np.ndindex(batch):
                wrong = Wrong((m, n), self.kept)
                self._look(self._matrices(at), wrong, slice(0, m), slice(0, n))
                self._report(at, wrong)
            return
        start = 0
        for some in batch_slices(batch, at_once):
            is_wrong = self._measure(*self._matrices(some)).reshape(-1, m, n)
            for number in np.flatnonzero(is_wrong.any(axis=(1, 2))):
                wrong = Wrong((m, n), self.kept)
                wrong.add(*np.nonzero(is_wrong[number]))
                at = np.unravel_index(start + number, batch) if batch else ()
                self._report(tuple(map(int, at)), wrong)
            start += len(is_wrong)

    def _sum_floats(
        self, part: Matrices, wrong: Wrong, rng: np.random.Generator, rule: Rule
    ) -> None:
        """Look where the sums over random signs are unusual."""
        sums = random_sums(*part, rule, self.rounds, rng, wrong.add, self.room)
        self.square_sum += sums.square_sum
        reach = self._look_at_unusual(part, wrong, sums)
        for block, span in enumerate(_spans(sums.rows.edges)):
            self._look(part, wrong, np.flatnonzero(sums.inf_blocks[:, block] | sums.inf_rows), span)
        for span in _spans(sums.columns.edges):
            self._look(part, wrong, span, np.flatnonzero(sums.inf_columns))
        bound = rule.bound
        magnitude = 2.0 ** min(sums.rows.norm_log2 + sums.columns.norm_log2, 1023.0)
        allowed = bound.factor * magnitude + bound.rounding * sums.largest + bound.underflow
        seen = allowed + float(rule.own_error(np.array(magnitude)))
        self.smallest_error = max(self.smallest_error, reach, seen)

    def _look_at_unusual(self, part: Matrices, wrong: Wrong, sums: Sums) -> float:
        """Recompute the blocks with unusual sums; return the least error they cannot hide."""
        k = self.problem.sizes[2]
        reach, unusual, is_cut = 0.0, [], []
        always, work = (max(x // self.room.parts, 1) for x in (ALWAYS_LOOKED_AT, LOOKING_WORK))
        for side, is_row in ((sums.rows, True), (sums.columns, False)):
            spans = _spans(side.edges)
            room = max(work // (k * int(np.diff(side.edges).max())), always)
            signs, threshold = _unusual(side.score, self.rounds, 4.0, always, room)
            plain, _ = _unusual(side.plain, 1, 8.0, 1, room)
            both = np.union1d(signs, plain)
            items = np.union1d(signs[:room], plain[:room])
            unusual.append(both // len(spans))
            is_cut.append(both.size > items.size)
            if is_cut[-1]:
                # Beside the most unusual ones, the first: they hold the first wrong element.
                items = np.union1d(items, both[:room])
            for block, span in enumerate(spans):
                chosen = items[items % len(spans) == block] // len(spans)
                self._look(part, wrong, *((chosen, span) if is_row else (span, chosen)))
            escaping = threshold * side.unit if threshold else 0.0
            reach = max(reach, float(np.max(escaping + side.floor)))
        if not wrong and any(is_cut):
            self.notes.append(
                "more sums are unusual than could be looked into: errors that share a sign or a "
                "pattern, within their bounds as far as was seen"
            )
        if wrong and all(is_cut):
            wrong.is_complete = False
            wrong.rows[unusual[0]] = True
            wrong.columns[unusual[1]] = True
        elif wrong:
            self._look_around(part, wrong)
        return reach

    def _look_around(self, part: Matrices, wrong: Wrong) -> None:
        """Recompute the surroundings of what is wrong: small errors there may not stand out."""
        k = self.problem.sizes[2]
        for step in (NEIGHBOURHOOD, 1):
            rows, columns = (
                slice(int(x[0]) // step * step, min(-(-(int(x[-1]) + 1) // step) * step, size))
                for x, size in zip(wrong.extent(), wrong.shape, strict=True)
            )
            if _size(rows) * _size(columns) * k <= LOOKING_WORK // self.room.parts:
                self._look(part, wrong, rows, columns)
                return

    def _sum_integers(self, part: Matrices, wrong: Wrong, rng: np.random.Generator) -> None:
        """Look at the elements in rows and columns whose sums differ."""
        (m, n), k, room = wrong.shape, self.problem.sizes[2], self.room
        is_odd_row, is_odd_column = modular.odd_sums(
            *part, self.rounds, rng, room.sum_panel, room.terms
        )
        rows, columns = np.flatnonzero(is_odd_row), np.flatnonzero(is_odd_column)
        if not rows.size and not columns.size:
            return
        # One side may have missed what the other saw.
        rows = rows if rows.size else np.arange(m)
        columns = columns if columns.size else np.arange(n)
        most = max(LOOKING_INTEGER_WORK // room.parts // (columns.size * max(k, 1)), 1)
        self._look(part, wrong, rows[:most], columns)
        wrong.is_complete &= rows.size <= most
        if not wrong.is_complete:
            wrong.rows[rows] = True
            wrong.columns[columns] = True

    def _look(self, part: Matrices, wrong: Wrong, rows: Span, columns: Span) -> None:
        """Recompute the elements in some rows and columns of a part of C.

        What is listed is taken from its operand once; where all are, pieces of both are.
        """
        a, b, c = part
        height, width = self._tile_of(rows, columns)
        for some_columns in _cut(columns, width):
            right_factor = taken(b, slice(None), some_columns)
            for some_rows in _cut(rows, height):
                is_wrong = self._measure(
                    taken(a, some_rows, slice(None)),
                    right_factor,
                    taken(c, some_rows, some_columns),
                )
                i, j = np.nonzero(is_wrong)
                if i.size:
                    wrong.add(_indices(some_rows)[i], _indices(some_columns)[j])
                for x in part:
                    release(x)

    def _tile_of(self, rows: Span, columns: Span) -> tuple[int, int]:
        """Return the edges of the tiles that are recomputed.

        About square, or longer where K is short: then the pieces of operands are square too, and
        so are stretches of files long, in whichever order they are stored.
        """
        edge = isqrt(self.tile)
        lines = max(self.room.panel // 4 // max(self.problem.sizes[2], 1), 1)
        most = [lines if isinstance(span, np.ndarray) else self.tile for span in (rows, columns)]
        height = max(min(_size(rows), edge, most[0]), 1)
        width = min(max(_size(columns), 1), max(edge, min(self.tile // height, lines)), most[1])
        height = min(max(_size(rows), 1), max(edge, min(self.tile // width, lines)), most[0])
        return height, width

    def _measure(self, a: Any, b: Any, c: Any) -> Bools:
        """Return which elements of ``c`` (..., r, s) are not those of ``a @ b``."""
        self.recomputed += c.size
        rule, c = self.rule, np.asarray(c)
        if rule is None:
            is_wrong = modular.differs(a, b, c, self.room.panel)
            self.ratio = max(self.ratio, inf if is_wrong.any() else 0.0)
            return is_wrong
        kind = np.complex128 if rule.is_complex else np.float64
        got = left(c.astype(kind))
        found = compare(_pieces(a, b, kind, self.room.panel), got, rule)
        is_wrong, ratio = found.is_wrong, found.ratio
        unsure = np.argwhere(found.is_unsure)
        unsure = unsure[np.argsort(-ratio[found.is_unsure])]
        proofs = min(len(unsure), self.proofs_left)
        self.proofs_left -= proofs
        self.unsettled += len(unsure) - proofs
        for place in unsure[:proofs]:
            *matrix, i, j = map(int, place)
            here, (column, part) = tuple(matrix), divmod(j, self.parts)
            value = float(got[(*here, i, j)])
            row, terms = np.asarray(a[here][i]), np.asarray(b[here][:, column])
            proof = prove(row, terms, value, part, rule)
            is_wrong[(*here, i, j)] = not proof.is_right
            ratio[(*here, i, j)] = proof.ratio
        if not self.uses_sums:
            self.smallest_error = max(self.smallest_error, found.largest_allowed)
            self.square_sum += float(np.square(got[np.isfinite(got)]).sum())
        self.ratio = max(self.ratio, float(np.nanmax(ratio, initial=0.0)))
        return is_wrong if self.parts == 1 else is_wrong[..., ::2] | is_wrong[..., 1::2]

    def _report(self, at: tuple[int, ...], wrong: Wrong) -> None:
        """Take account of a wrong matrix: prove the first of its wrong elements."""
        if not wrong:
            return
        rows, columns = wrong.elements()
        candidates = zip(rows[:16].tolist(), columns[:16].tolist(), strict=True)
        proven = (self._mismatch(at, i, j) for i, j in candidates)
        first = next((mismatch for mismatch in proven if mismatch), None)
        if first is None:
            return
        self.wrong_matrices += 1
        if self.where is not None:
            return
        self.first = first
        self.where = locate(
            *wrong.extent(),
            shape=wrong.shape,
            batch=at,
            elements=rows.size,
            is_complete=wrong.is_complete,
        )

    def _mismatch(self, at: tuple[int, ...], i: int, j: int) -> Mismatch | None:
        """Return an element as proven wrong in exact arithmetic; None if it is right."""
        a, b, c = self._matrices(at)
        row, column, got = np.asarray(a[i]), np.asarray(b[:, j]), np.asarray(c[i, j])[()]
        index = self.problem.index(at, i, j)
        if self.rule is None:
            whole = modular.element(row, column, c.dtype)
            if got == whole:
                return None
            return Mismatch(index=index, got=got.item(), expected=whole, allowed=0.0)
        values = (got.real, got.imag) if self.parts == 2 else (got,)
        expected: complex
        proofs = [
            prove(row, column, float(value), part, self.rule) for part, value in enumerate(values)
        ]
        wrong = [proof for proof in proofs if not proof.is_right]
        if not wrong:
            return None
        expected = complex(*(p.expected for p in proofs)) if self.parts == 2 else proofs[0].expected
        return Mismatch(
            index=index,
            got=complex(got) if self.parts == 2 else float(got),
            expected=expected,
            allowed=wrong[0].allowed,
        )

    def _matrices(self, at: tuple[int | slice, ...]) -> Matrices:
        problem = self.problem
        return problem.a[at], problem.b[at], problem.c[at]


def _unusual(
    score: Floats, rounds: int, typical: float, always: int, room: int
) -> tuple[Indices, float]:
    """Return the sums to look at, the most unusual first, and the score that none escapes with.

    Unusual is what exceeds ``typical`` times the median, or what ordinary rounding can reach: the
    sub-Gaussian quantile √(2·ln(2·sums/δ)). A few are looked at in any case.
    """
    flat = score.ravel()
    limit = sqrt(2 * log(2 * flat.size * rounds / DELTA))
    limit = min(limit, typical * float(np.median(flat)))
    always = min(always, flat.size)
    count = max(int((flat > limit).sum()), always)
    order = np.argpartition(-flat, count - 1)[:count]
    order = order[np.argsort(-flat[order], kind="stable")]
    if count > room:
        return order, float(flat[order[max(room, 1) - 1]])
    if always == flat.size:
        return order, 0.0
    return order, min(limit, float(flat[order[always - 1]]))


def _pieces(a: Any, b: Any, kind: type, panel: int) -> Iterator[tuple[Floats, Floats]]:
    """Yield both factors in float64, cut along K into pieces of a quarter of a panel."""
    width = max(a[..., 0].size, b[..., 0, :].size, 1) if a.shape[-1] else 1
    for piece in _cut(slice(0, a.shape[-1]), max(panel // (4 * width), 1)):
        ours, others = np.asarray(a[..., piece]), np.asarray(b[..., piece, :])
        yield left(ours.astype(kind)), right(others.astype(kind))


def _spans(edges: Indices) -> list[slice]:
    return [slice(int(i), int(j)) for i, j in pairwise(edges)]


def _cut(span: Span, step: int) -> Iterator[Any]:
    if isinstance(span, slice):
        for start in range(span.start, span.stop, step):
            yield slice(start, min(start + step, span.stop))
    else:
        for start in range(0, span.size, step):
            yield span[start : start + step]


def _size(span: Span) -> int:
    return span.stop - span.start if isinstance(span, slice) else span.size


def _indices(span: Span) -> Indices:
    return np.arange(span.start, span.stop) if isinstance(span, slice) else span
