"""`check`: is C the product of A and B, up to the rounding that was promised?

Small products are recomputed. Large ones are summed over random signs, which says where to look,
and the elements there are recomputed (docs/numerics.md has the derivation). No result is called
wrong before one of its elements was proven wrong in exact arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import inf, log, prod, sqrt
from os import PathLike, fspath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._arrays import adopt
from ..errors import DeviceError, DTypeError, OptionError, ShapeError, describe
from . import bounds, modular
from .checksums import PANEL, Sums, random_sums
from .dtypes import DType, canonical
from .elements import Array, Bools, Floats, Rule, compare, left, prove, right
from .panels import release
from .verdict import Check, Mismatch, Where, locate

__all__ = ["Check", "Mismatch", "Where", "check", "most_held_bytes"]

Indices = NDArray[np.int64]
Span = slice | Indices

#: Multiply-adds up to which recomputing a product in float64 takes no longer than the sums.
RECOMPUTED_WORK = 2**27
#: A side so short that recomputing costs no more than the sums, however long the others.
RECOMPUTED_SIDE = 16
#: The same for integers, which BLAS has no products for.
RECOMPUTED_INTEGER_WORK = 2**24

#: Blocks with the highest scores that are looked at, from each side, however low those are.
ALWAYS_LOOKED_AT = 4
#: Multiply-adds that may go into looking at blocks with unusual scores, on each side.
LOOKING_WORK = 2**29
LOOKING_INTEGER_WORK = 2**27
#: Edge of the aligned squares about wrong elements that are recomputed too.
NEIGHBOURHOOD = 128
#: Terms of sums that may be added up in exact arithmetic, about a microsecond each.
PROOF_TERMS = 2**20
#: Chance that some sum of an honest product has an unusual score.
DELTA = 2.0**-40

#: What `most_held_bytes` counts, as measured: for any product; for elements of a small one; for
#: panels, of which sums take twice as many; for each row, column and term that has sums.
_LEAST_BYTES = 64 << 10
_OPERAND_BYTES, _RESULT_BYTES = 40, 96
_PANELS_BYTES = 32 << 20
_LINE_BYTES = 3 << 10

_TILE = 2**17  # elements of C that are recomputed together
_WRONG_KEPT = 2**18  # wrong elements remembered one by one


def check(
    a: Any,
    b: Any,
    c: Any,
    /,
    *,
    rounds: int = 8,
    seed: int | None = None,
    bound: bounds.Bound | None = None,
) -> Check:
    """Say whether ``c`` is ``a @ b``, up to the rounding that was promised for its type.

    Takes O(n²) time a round, and little memory: 64 MiB, and about 3 KiB for each row, column and
    term (twice that for float64, and twice for complex types). Memory-mapped files are read in
    panels. What Inf among the operands makes of a row or column is recomputed; so is every product
    of bools, for which no faster check is known.

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
        If rounds is not a whole number from 1 to 64, seed a negative one, or bound for another K.
    """
    if not (isinstance(rounds, (int, np.integer)) and 1 <= rounds <= 64):
        raise OptionError(f"rounds={rounds!r} is not a whole number from 1 to 64")
    if seed is not None and not (isinstance(seed, (int, np.integer)) and seed >= 0):
        raise OptionError(f"seed={seed!r} is not a whole number, 0 or more")
    a, b, c = (_adopted(x, name) for x, name in ((a, "a"), (b, "b"), (c, "c")))
    problem = _Problem.of(a, b, c, bound)
    search = _Search(problem, int(rounds), 0 if seed is None else int(seed))
    if problem.c.size:
        with np.errstate(all="ignore"):  # Inf and NaN are what is being judged
            search.run()
    return search.verdict()


def most_held_bytes(
    matrices: int,
    m: int,
    n: int,
    k: int,
    dtypes: tuple[DType, DType, DType],
    bound: bounds.Bound,
) -> int:
    """Return what `check` takes at most, for so many products of m×k by k×n.

    ``dtypes`` are those of a, b and c, canonical.
    """
    result = dtypes[2]
    parts = 2 if result.kind == "c" else 1
    at_once = min(matrices, _matrices_at_once(m, n, k, parts))
    small = parts * at_once * (_OPERAND_BYTES * (m * k + k * n) + _RESULT_BYTES * m * n)
    if _recomputes(m, n, k, result):
        large = _PANELS_BYTES + 2 * (m + n)
    elif result.kind in "iu":
        large = _PANELS_BYTES + 256 * (m + n + k)
    else:
        width = parts * (2 if Rule.of(bound, *dtypes).is_wide else 1)
        large = 2 * _PANELS_BYTES + _LINE_BYTES * width * (m + n + k)
    return _LEAST_BYTES + min(small, large)


def _adopted(x: Any, name: str) -> Array:
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

    a: Array  # (*batch, m, k)
    b: Array
    c: Array
    given: tuple[Array, Array, Array]
    bound: bounds.Bound
    rule: Rule | None  # None where the product is exact

    @classmethod
    def of(cls, a: Array, b: Array, c: Array, bound: bounds.Bound | None) -> _Problem:
        kinds = [canonical(x.dtype, name) for name, x in (("a", a), ("b", b), ("c", c))]
        if any(kind.type in (np.longdouble, np.clongdouble) for kind in kinds):
            raise DTypeError("check covers types up to float64 and complex128, not longdouble")
        for name, x in (("a", a), ("b", b)):
            if x.ndim == 0:
                raise ShapeError(f"{name} is a scalar; a matrix product needs at least one axis")
        rows = a if a.ndim > 1 else a[np.newaxis, :]
        columns = b if b.ndim > 1 else b[:, np.newaxis]
        k = rows.shape[-1]
        if columns.shape[-2] != k:
            raise ShapeError(
                f"{describe('a', a)} and {describe('b', b)} do not go together: the sums over "
                f"axis {a.ndim - 1} of a and axis {max(b.ndim - 2, 0)} of b differ in length"
            )
        try:
            batch = np.broadcast_shapes(rows.shape[:-2], columns.shape[:-2])
        except ValueError:
            raise ShapeError(
                f"the batch axes of {describe('a', a)} and {describe('b', b)} do not broadcast"
            ) from None
        m, n = rows.shape[-2], columns.shape[-1]
        shape = batch + (m,) * (a.ndim > 1) + (n,) * (b.ndim > 1)
        if c.shape != shape:
            raise ShapeError(f"{describe('c', c)} should have the shape of a @ b, {shape}")
        if bound is None:
            bound = bounds.bound(k, *kinds, device="cuda")
        elif bound.k != k:
            raise OptionError(f"bound is one for K = {bound.k}, and a has K = {k}")
        result = c if b.ndim > 1 else c[..., np.newaxis]
        return cls(
            a=np.broadcast_to(rows, (*batch, m, k)),
            b=np.broadcast_to(columns, (*batch, k, n)),
            c=result if a.ndim > 1 else result[..., np.newaxis, :],
            given=(a, b, c),
            bound=bound,
            rule=None if kinds[2].kind in "biu" else Rule.of(bound, *kinds),
        )

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.c.shape[-2], self.c.shape[-1], self.a.shape[-1]

    @property
    def batch(self) -> tuple[int, ...]:
        return self.c.shape[:-2]

    def index(self, at: tuple[int, ...], i: int, j: int) -> tuple[int, ...]:
        """Return the index into c, as it was given, of an element of one matrix."""
        a, b, _ = self.given
        return at + (i,) * (a.ndim > 1) + (j,) * (b.ndim > 1)


class _Wrong:
    """The wrong elements of one matrix: their rows and columns, and, while there is room, which."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.shape = shape
        self.is_complete = True
        self.rows, self.columns = (np.zeros(size, bool) for size in shape)
        self._found: list[Indices] = []  # into the flattened matrix, some of them twice

    def add(self, rows: Indices, columns: Indices) -> None:
        self.rows[rows] = True
        self.columns[columns] = True
        self._found.append(rows * self.shape[1] + columns)
        if sum(x.size for x in self._found) > 2 * _WRONG_KEPT:
            self._settle()

    def __bool__(self) -> bool:
        return bool(self._found)

    def extent(self) -> tuple[Indices, Indices]:
        """Return the rows, and the columns, that hold wrong elements."""
        return np.flatnonzero(self.rows), np.flatnonzero(self.columns)

    def elements(self) -> tuple[Indices, Indices]:
        """Return the rows and columns of the elements kept, in row-major order."""
        self._settle()
        rows, columns = np.divmod(self._found[0], self.shape[1])
        return rows, columns

    def _settle(self) -> None:
        found = np.sort(np.concatenate(self._found))
        found = found[np.diff(found, prepend=-1) > 0]
        self.is_complete &= found.size <= _WRONG_KEPT
        self._found = [found[:_WRONG_KEPT]]


class _Search:
    """One call of `check`: looks for wrong elements, and keeps account of what was seen."""

    def __init__(self, problem: _Problem, rounds: int, seed: int) -> None:
        self.problem, self.rule = problem, problem.rule
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
        m, n, k = self.problem.sizes
        if _recomputes(m, n, k, self.problem.c.dtype):
            self._recompute()
            return
        self.uses_sums = True
        for number, at in enumerate(np.ndindex(self.problem.batch)):
            wrong = _Wrong((m, n))
            rng = np.random.default_rng((self.seed, number, m, n, k))
            if self.rule is None:
                self._sum_integers(at, wrong, rng)
            else:
                self._sum_floats(at, wrong, rng, self.rule)
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
        m, n, k = self.problem.sizes
        batch = self.problem.batch
        at_once = _matrices_at_once(m, n, k, self.parts)
        if at_once <= 1:
            for at in np.ndindex(batch):
                wrong = _Wrong((m, n))
                self._look(at, wrong, slice(0, m), slice(0, n))
                self._report(at, wrong)
            return
        for start in range(0, prod(batch), at_once):
            stop = min(start + at_once, prod(batch))
            some = np.unravel_index(np.arange(start, stop), batch) if batch else ...
            a, b, c = (x[some] for x in (self.problem.a, self.problem.b, self.problem.c))
            is_wrong = self._measure(a, b, c).reshape(stop - start, m, n)
            for number in np.flatnonzero(is_wrong.any(axis=(1, 2))):
                wrong = _Wrong((m, n))
                wrong.add(*np.nonzero(is_wrong[number]))
                at = np.unravel_index(start + number, batch) if batch else ()
                self._report(tuple(map(int, at)), wrong)

    def _sum_floats(
        self, at: tuple[int, ...], wrong: _Wrong, rng: np.random.Generator, rule: Rule
    ) -> None:
        """Look where the sums over random signs are unusual."""
        a, b, c = self._matrices(at)
        sums = random_sums(a, b, c, rule, self.rounds, rng, wrong.add)
        self.square_sum += sums.square_sum
        reach = self._look_at_unusual(at, wrong, sums)
        for block, span in enumerate(_spans(sums.rows.edges)):
            self._look(at, wrong, np.flatnonzero(sums.inf_blocks[:, block] | sums.inf_rows), span)
        for span in _spans(sums.columns.edges):
            self._look(at, wrong, span, np.flatnonzero(sums.inf_columns))
        bound = rule.bound
        magnitude = 2.0 ** min(sums.rows.norm_log2 + sums.columns.norm_log2, 1023.0)
        allowed = bound.factor * magnitude + bound.rounding * sums.largest + bound.underflow
        seen = allowed + float(rule.own_error(np.array(magnitude)))
        self.smallest_error = max(self.smallest_error, reach, seen)

    def _look_at_unusual(self, at: tuple[int, ...], wrong: _Wrong, sums: Sums) -> float:
        """Recompute the blocks with unusual sums; return the least error they cannot hide."""
        k = self.problem.sizes[2]
        reach, unusual, is_cut = 0.0, [], []
        for side, is_row in ((sums.rows, True), (sums.columns, False)):
            spans = _spans(side.edges)
            room = max(LOOKING_WORK // (k * int(np.diff(side.edges).max())), ALWAYS_LOOKED_AT)
            signs, threshold = _unusual(side.score, self.rounds, 4.0, ALWAYS_LOOKED_AT, room)
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
                self._look(at, wrong, *((chosen, span) if is_row else (span, chosen)))
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
            self._look_around(at, wrong)
        return reach

    def _look_around(self, at: tuple[int, ...], wrong: _Wrong) -> None:
        """Recompute the surroundings of what is wrong: small errors there may not stand out."""
        k = self.problem.sizes[2]
        for step in (NEIGHBOURHOOD, 1):
            rows, columns = (
                slice(int(x[0]) // step * step, min(-(-(int(x[-1]) + 1) // step) * step, size))
                for x, size in zip(wrong.extent(), wrong.shape, strict=True)
            )
            if _size(rows) * _size(columns) * k <= LOOKING_WORK:
                self._look(at, wrong, rows, columns)
                return

    def _sum_integers(self, at: tuple[int, ...], wrong: _Wrong, rng: np.random.Generator) -> None:
        """Look at the elements in rows and columns whose sums differ."""
        m, n, k = self.problem.sizes
        is_odd_row, is_odd_column = modular.odd_sums(*self._matrices(at), self.rounds, rng)
        rows, columns = np.flatnonzero(is_odd_row), np.flatnonzero(is_odd_column)
        if not rows.size and not columns.size:
            return
        # One side may have missed what the other saw.
        rows = rows if rows.size else np.arange(m)
        columns = columns if columns.size else np.arange(n)
        room = max(LOOKING_INTEGER_WORK // (columns.size * max(k, 1)), 1)
        self._look(at, wrong, rows[:room], columns)
        wrong.is_complete &= rows.size <= room
        if not wrong.is_complete:
            wrong.rows[rows] = True
            wrong.columns[columns] = True

    def _look(self, at: tuple[int, ...], wrong: _Wrong, rows: Span, columns: Span) -> None:
        """Recompute the elements in some rows and columns of one matrix."""
        a, b, c = self._matrices(at)
        k = max(self.problem.sizes[2], 1)
        width = min(max(PANEL // k, 1), _TILE) if isinstance(columns, np.ndarray) else _TILE
        for some_columns in _cut(columns, width):
            height = max(_TILE // _size(some_columns), 1)
            if isinstance(rows, np.ndarray):
                height = min(height, max(PANEL // k, 1))
            for some_rows in _cut(rows, height):
                part = c[some_rows][:, some_columns]
                is_wrong = self._measure(a[some_rows], b[:, some_columns], part)
                i, j = np.nonzero(is_wrong)
                if i.size:
                    wrong.add(_indices(some_rows)[i], _indices(some_columns)[j])
                for x in (a, b, c):
                    release(x)

    def _measure(self, a: Array, b: Array, c: Array) -> Bools:
        """Return which elements of ``c`` (..., r, s) are not those of ``a @ b``."""
        self.recomputed += c.size
        rule = self.rule
        if rule is None:
            is_wrong = modular.differs(a, b, c)
            self.ratio = max(self.ratio, inf if is_wrong.any() else 0.0)
            return is_wrong
        kind = np.complex128 if rule.is_complex else np.float64
        got = left(c.astype(kind))
        found = compare(_pieces(a, b, kind), got, rule)
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
            proof = prove(a[here][i], b[here][:, column], value, part, rule)
            is_wrong[(*here, i, j)] = not proof.is_right
            ratio[(*here, i, j)] = proof.ratio
        if not self.uses_sums:
            self.smallest_error = max(self.smallest_error, found.largest_allowed)
            self.square_sum += float(np.square(got[np.isfinite(got)]).sum())
        self.ratio = max(self.ratio, float(np.nanmax(ratio, initial=0.0)))
        return is_wrong if self.parts == 1 else is_wrong[..., ::2] | is_wrong[..., 1::2]

    def _report(self, at: tuple[int, ...], wrong: _Wrong) -> None:
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
        index, got = self.problem.index(at, i, j), c[i, j]
        if self.rule is None:
            whole = modular.element(a[i], b[:, j], c.dtype)
            if got == whole:
                return None
            return Mismatch(index=index, got=got.item(), expected=whole, allowed=0.0)
        values = (got.real, got.imag) if self.parts == 2 else (got,)
        expected: complex
        proofs = [
            prove(a[i], b[:, j], float(value), part, self.rule) for part, value in enumerate(values)
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

    def _matrices(self, at: tuple[int, ...]) -> tuple[Array, Array, Array]:
        problem = self.problem
        return problem.a[at], problem.b[at], problem.c[at]


def _matrices_at_once(m: int, n: int, k: int, parts: int) -> int:
    """Return how many matrices are recomputed together."""
    return max(PANEL // 8 // (max(m * k, k * n, m * n, 1) * parts**2), 1)


def _recomputes(m: int, n: int, k: int, result: DType) -> bool:
    """Say whether every element of a product is recomputed."""
    if result.kind in "biu":
        return m * n * k <= RECOMPUTED_INTEGER_WORK or result.kind == "b"
    return m * n * k <= RECOMPUTED_WORK or min(m, n, k) <= RECOMPUTED_SIDE


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


def _pieces(a: Array, b: Array, kind: type) -> Iterator[tuple[Floats, Floats]]:
    """Yield both factors in float64, cut along K into pieces of a few megabytes."""
    width = max(a[..., 0].size, b[..., 0, :].size, 1) if a.shape[-1] else 1
    step = max(PANEL // (4 * width), 1)
    for start in range(0, a.shape[-1], step):
        piece = slice(start, start + step)
        yield left(a[..., piece].astype(kind)), right(b[..., piece, :].astype(kind))


def _spans(edges: Indices) -> list[slice]:
    return [slice(int(i), int(j)) for i, j in pairwise(edges)]


def _cut(span: Span, step: int) -> Iterator[Span]:
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
