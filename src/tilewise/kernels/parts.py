"""Products whose workspace would be too large, computed part by part; for kernels of every family.

Pure. A part is a range of a batch axis, or of the rows or columns of C: all of K, so that bits are
those of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from tilewise._memory import format_bytes
from tilewise.errors import BudgetError

from .steps import MAP_BYTES, Choice, Product, Step, Strides, round_up

__all__ = ["in_parts"]

P = TypeVar("P", bound=Product)

#: Rows and columns are cut at multiples of this, which keep any element aligned as it was.
_GRAIN = 128
#: A product is not cut into more parts: to plan and to prepare these takes seconds.
_MOST_PARTS = 8192
_AXES = ("outer", "inner", "m", "n")

#: How a part is computed, and where it begins in a, b and c, in bytes.
_Part = tuple[Choice, tuple[int, int, int]]


def in_parts(
    product: P,
    item_bytes: tuple[int, int, int],
    limit: float,
    fastest: Callable[[P, float], Choice],
) -> Choice:
    """Return the way to compute a product, whole or in parts, that is expected to be done first.

    Parameters
    ----------
    product : Product
    item_bytes : tuple of int
        Of an element of a, b and c.
    limit : float
        Bytes of workspace allowed; ``math.inf`` if any.
    fastest : callable
        Given a product and so many bytes, returns the fastest way to compute it whole, or the one
        that takes the least if all take more.

    Raises
    ------
    BudgetError
        If the least part takes more.
    """
    known: dict[tuple[P, float], Choice] = {}
    cut: dict[tuple[P, int], list[_Part]] = {}

    def way(p: P, most: float) -> Choice:
        if (p, most) not in known:
            known[p, most] = fastest(p, most)
        return known[p, most]

    def fits(choice: Choice) -> bool:
        return choice.workspace_bytes <= limit

    def parts(p: P, count: int) -> list[_Part]:
        """Return the parts of one of so many parts."""
        if (p, count) not in cut:
            cut[p, count] = list(halved(p, count))
        return cut[p, count]

    def halved(p: P, count: int) -> Iterator[_Part]:
        if fits(way(p, math.inf)):
            yield way(p, math.inf), (0, 0, 0)
            return
        halves = [_halves(p, axis, item_bytes) for axis in _AXES if _half(p, axis)]
        if not halves or 2 * count > _MOST_PARTS:
            if not fits(way(p, limit)):
                raise _too_small(product, way(p, limit), limit)
            yield way(p, limit), (0, 0, 0)
            return
        # Of the axes, the one that takes most of the workspace.
        best = min(halves, key=lambda pair: way(pair[0][0], math.inf).workspace_bytes)
        for half, at in best:
            for choice, (a, b, c) in parts(half, 2 * count):
                yield choice, (at[0] + a, at[1] + b, at[2] + c)

    if fits(way(product, math.inf)):
        return way(product, math.inf)
    single = way(product, limit)
    try:
        apart = parts(product, 1)
    except BudgetError:
        if fits(single):
            return single
        raise
    apart_us = sum(choice.expected_us for choice, _ in apart)
    return single if fits(single) and single.expected_us <= apart_us else _together(apart)


def _too_small(p: Product, least: Choice, limit: float) -> BudgetError:
    return BudgetError(
        f"a product of {p.m}x{p.k} by {p.k}x{p.n} takes at least "
        f"{format_bytes(least.workspace_bytes, is_needed=True)} of workspace on the GPU, and "
        f"memory= leaves {format_bytes(int(limit))} for it; raise it"
    )


def _together(cut: list[_Part]) -> Choice:
    steps: list[Step] = []
    for choice, at in cut:
        steps += [step.moved(at) for step in choice.steps]
    return Choice(
        steps=tuple(steps),
        workspace_bytes=max(choice.workspace_bytes for choice, _ in cut),
        expected_us=sum(choice.expected_us for choice, _ in cut),
        why=(f"{len(cut)} parts; " if len(cut) > 1 else "") + cut[0][0].why,
    )


def _half(p: Product, axis: str) -> int:
    """Return how much of an axis the first half is; 0 if it is not cut."""
    size: int = getattr(p, axis)
    half = -(-size // 2) if axis in ("outer", "inner") else round_up(-(-size // 2), _GRAIN)
    return half if half < size else 0


def _halves(
    p: P, axis: str, item_bytes: tuple[int, int, int]
) -> list[tuple[P, tuple[int, int, int]]]:
    """Return the products of both halves of an axis, and where they begin in a, b and c."""
    half = _half(p, axis)
    second, at = _cut(p, axis, half, item_bytes)
    return [(_of_size(p, axis, half), (0, 0, 0)), (second, at)]


def _cut(
    p: P, axis: str, first: int, item_bytes: tuple[int, int, int]
) -> tuple[P, tuple[int, int, int]]:
    """Return the product without the first of an axis, and where it begins, in bytes."""
    outer, inner, m, n = (first if axis == name else 0 for name in _AXES)

    def moved(s: Strides, row: int, col: int, item: int) -> tuple[Strides, int]:
        at = item * (outer * s.outer + inner * s.inner + row * s.row + col * s.col)
        return replace(s, is_aligned=s.is_aligned and at % MAP_BYTES == 0), at

    (a, a_at), (b, b_at), (c, c_at) = (
        moved(s, *steps, item)
        for s, steps, item in zip(
            (p.a, p.b, p.c), ((m, 0), (0, n), (m, n)), item_bytes, strict=True
        )
    )
    rest = _of_size(p, axis, getattr(p, axis) - first)
    return replace(rest, a=a, b=b, c=c), (a_at, b_at, c_at)


def _of_size(p: P, axis: str, size: int) -> P:
    sizes: dict[str, Any] = {axis: size}
    return replace(p, **sizes)
