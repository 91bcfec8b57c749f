"""What can be known of a number in a kernel without running it.

A :class:`Value` says what a number depends on, between which bounds it lies, and how it changes
from block to block and from size to size. :mod:`tilewise.explain.dataflow` computes with these in
place of numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..simt import typing_rules

__all__ = ["NOTHING", "STILL", "Block", "Deps", "Value", "constant", "is_data", "join", "unknown"]

Deps = frozenset[str]
Block = tuple[int, int, int]

NOTHING: Deps = frozenset()
STILL: Block = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class Value:
    """A number that is ``block · blockIdx + rest``, where ``rest`` is the same in every block.

    Attributes
    ----------
    block : (int, int, int), optional
        The coefficients of blockIdx.x, .y and .z; None where the number differs between blocks
        in a way not known.
    low, high : float
        Bounds of ``rest`` in this launch: integers, or infinite.
    step : int
        In every launch of the same block shape and of sizes congruent to these, ``rest`` is what
        it is here plus a multiple of ``step``; 0 where it is the same.
    deps : frozenset of str
        What the number depends on: "thread", "block", "grid", "arg:n" (an argument or its
        shape), "data:A" (what was loaded from A), "unknown".
    code : str, optional
        Its type, as typing_rules spells it; None where not known.
    """

    block: Block | None = STILL
    low: float = -math.inf
    high: float = math.inf
    step: int = 1
    deps: Deps = NOTHING
    code: str | None = None

    @property
    def is_constant(self) -> bool:
        """Whether every thread of every block has the same number in this launch."""
        return self.block == STILL and self.low == self.high

    @property
    def is_float(self) -> bool:
        return self.code is not None and typing_rules.is_float(self.code)

    @property
    def number(self) -> int:
        """The one number that a constant is."""
        return int(self.low)

    def with_deps(self, deps: Deps) -> Value:
        """The same number, known to depend on more."""
        return self if deps <= self.deps else replace(self, deps=self.deps | deps)

    def __add__(self, other: Value) -> Value:
        return self._plus(other, 1, self.low + other.low, self.high + other.high)

    def __sub__(self, other: Value) -> Value:
        return self._plus(other, -1, self.low - other.high, self.high - other.low)

    def __mul__(self, other: Value) -> Value:
        """The product; one of the two must not differ between blocks."""
        if not self.is_constant:
            self, other = other, self
        steps = (self._fixed * other.step, self.step * other._fixed, self.step * other.step)
        ends = [_times(a, b) for a in (self.low, self.high) for b in (other.low, other.high)]
        block = other.block
        if block not in (None, STILL):
            block = _combine(block, STILL, self.number, 0) if self.is_constant else None
        elif self.block != STILL:
            block = None
        return Value(block, min(ends), max(ends), math.gcd(*steps), self.deps | other.deps)

    def over(self, divisor: int) -> Value | None:
        """The number // a positive one; None where that cannot be told block by block."""
        block = self._divided(divisor)
        if block is None:
            return None
        step = self.step // divisor if self.step % divisor == 0 else 1
        return Value(block, _floor(self.low, divisor), _floor(self.high, divisor), step, self.deps)

    def modulo(self, divisor: int) -> Value | None:
        """The number % a positive one; None where that cannot be told block by block."""
        if self._divided(divisor) is None:
            return None
        low, high = 0.0, float(divisor - 1)
        if _floor(self.low, divisor) == _floor(self.high, divisor):
            low, high = self.low % divisor, self.high % divisor
        return Value(STILL, low, high, 0 if self.step % divisor == 0 else 1, self.deps)

    @property
    def _fixed(self) -> int:
        """The part that no size changes where it is one number; else 1, which divides any."""
        if not self.is_constant or "thread" in self.deps:
            return 1
        return self.number % self.step if self.step else self.number

    def _plus(self, other: Value, sign: int, low: float, high: float) -> Value:
        if math.isnan(low) or math.isnan(high):
            low, high = -math.inf, math.inf
        block = None
        if self.block is not None and other.block is not None:
            block = _combine(self.block, other.block, 1, sign)
        return Value(block, low, high, math.gcd(self.step, other.step), self.deps | other.deps)

    def _divided(self, divisor: int) -> Block | None:
        if self.block is None or any(c % divisor for c in self.block):
            return None
        x, y, z = self.block
        return x // divisor, y // divisor, z // divisor


def constant(number: float, deps: Deps = NOTHING, step: int = 0) -> Value:
    """A number known exactly: a literal, an outside name, an argument."""
    code = typing_rules.type_of_scalar(number)
    low = high = float(number)
    if not low.is_integer():
        low, high = -math.inf, math.inf
    return Value(STILL, low, high, step, deps, code)


def unknown(deps: Deps, code: str | None = None) -> Value:
    """A number of which only the dependences are known."""
    return Value(None, deps=deps, code=code)


def join(values: Iterable[Value]) -> Value:
    """What is known of a number that is one of several."""
    first, *others = values
    for other in others:
        if other == first:
            continue
        step = 1
        if first.is_constant and other.is_constant:
            step = math.gcd(first.step, other.step, first.number - other.number)
        code = None
        if first.code is not None and other.code is not None:
            code = typing_rules.unify(first.code, other.code)
        first = Value(
            first.block if first.block == other.block else None,
            min(first.low, other.low),
            max(first.high, other.high),
            step,
            first.deps | other.deps,
            code,
        )
    return first


def is_data(deps: Deps) -> bool:
    """Whether something loaded from memory is among the dependences."""
    return any(dep == "unknown" or dep.startswith("data:") for dep in deps)


def _combine(left: Block, right: Block, a: int, b: int) -> Block:
    x, y, z = (a * p + b * q for p, q in zip(left, right, strict=True))
    return x, y, z


def _times(a: float, b: float) -> float:
    return 0.0 if 0 in (a, b) else a * b


def _floor(end: float, divisor: int) -> float:
    return end if math.isinf(end) else end // divisor
