"""How a length is cut into even parts: arithmetic that schedules and their choice share."""

from __future__ import annotations

import math
from collections.abc import Iterator

__all__ = ["count", "cuts", "divisor", "even"]


def count(size: int, part: int) -> int:
    """Return how many parts there are, the last one perhaps shorter."""
    return -(-size // part)


def cuts(size: int, part: int) -> Iterator[slice]:
    """Yield the parts, in order."""
    for start in range(0, size, part):
        yield slice(start, min(start + part, size))


def even(size: int, most: int, chunk: int = 1) -> int:
    """Return a part of at most ``most`` that cuts ``size`` evenly.

    If possible it is a multiple of ``chunk``, which a file is read in, and else of 16.
    """
    if most >= size:
        return size
    grain = chunk if chunk >= 16 else math.lcm(chunk, 16)
    if grain > most:
        grain = 16 if most >= 16 else 1
    part = count(size, count(size, most - most % grain))
    return count(part, grain) * grain


def divisor(size: int, most: int) -> int:
    """Return the largest divisor of ``size`` that is at most ``most``."""
    return next(size // n for n in range(count(size, most), size + 1) if size % n == 0)
