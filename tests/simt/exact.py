"""Rounding by exact arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np


def fma(x, y, z, dtype):
    """``x·y + z`` rounded once, by exact arithmetic."""
    if not all(math.isfinite(v) for v in (x, y, z)):
        return dtype(x) * dtype(y) + dtype(z)
    exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
    if exact == 0:
        product = dtype(math.copysign(0.0, x) * math.copysign(1.0, y)) if not (x and y) else None
        return dtype(0) if product is None else product + dtype(z)
    return round_to(exact, dtype)


def round_to(exact, dtype):
    """Round a fraction to a float type, to nearest, ties to even."""
    digits, lowest, highest = {2: (11, -24, 16), 4: (24, -149, 128), 8: (53, -1074, 1024)}[
        np.dtype(dtype).itemsize
    ]
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if size < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** max(exponent - digits + 1, lowest)
    rounded = round(size / unit) * unit
    value = math.inf if rounded >= Fraction(2) ** highest else float(rounded)
    return dtype(value if exact > 0 else -value)
