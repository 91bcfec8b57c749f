"""Copies of operands in the type, order and alignment that a kernel reads fastest, in Triton.

`pack` copies and converts, and spells complex matrices as real ones; `pack_limbs` cuts integers
into signed bytes. Sources have any strides; targets are rows of unit stride, padded with zeros.
Which operand is packed, and when, is decided in ``portable_plan``.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, attr-defined"
from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["as_integer", "as_real", "pack", "pack_limbs"]

# How a real number is stored, as `portable_table.STORED` has it: 0 is an integer.
_FLOAT16 = tl.constexpr(1)
_BFLOAT16 = tl.constexpr(2)
_FLOAT32 = tl.constexpr(3)
_FLOAT64 = tl.constexpr(4)
_FLOAT8_E4M3 = tl.constexpr(5)
_FLOAT8_E5M2 = tl.constexpr(6)


@triton.jit
def pack(
    source,
    target,
    across_size,
    along_size,
    across_step,
    along_step,
    outer_step,
    inner_step,
    inner,
    rows,
    row_step,
    tiles_m,
    tiles_n,
    is_turned,
    stored,
    size,
    sign,
    reals,
    across_pairs,
    along_pairs,
    sums_across,
    SUM: tl.constexpr,
    TILE: tl.constexpr,
):
    """Copy source into the rows of target, in target's type, and fill their rest with zeros.

    The source is read ``along`` the axis on which its elements lie closest; that is the axis of
    target's rows unless the copy ``is_turned``. ``stored``, ``size`` and ``sign`` say how its real
    numbers are stored; SUM is a type that holds every value. A target of uint8 takes bytes as they
    are.

    Complex matrices become real ones: an axis that has pairs is twice as long, and holds re and im
    in turn. One operand has pairs along K; the other along both axes, and then each element is
    ``[[re, im], [-im, re]]``, K being ``across`` or not as ``sums_across`` says. ``reals`` is how
    many real numbers an element of the source has.
    """
    item, i, j = _tile(tiles_m, tiles_n, TILE)
    across = tl.where(is_turned != 0, j, i)
    along = tl.where(is_turned != 0, i, j)
    odd_across = (across & across_pairs)[:, None]
    odd_along = (along & along_pairs)[None, :]
    part = odd_across ^ odd_along
    at = (item // inner) * outer_step + (item % inner) * inner_step
    at += ((across >> across_pairs) * across_step)[:, None]
    at += ((along >> along_pairs) * along_step)[None, :]
    is_in = (across < across_size)[:, None] & (along < along_size)[None, :]
    if target.dtype.element_ty == tl.uint8:
        value = tl.load(source + at, mask=is_in, other=0)
    else:
        value = as_real(
            source, at * reals + part * (reals - 1), is_in & (part < reals), stored, size, sign, SUM
        )
        is_negative = tl.where(sums_across != 0, odd_across > odd_along, odd_along > odd_across)
        value = tl.where(is_negative & (across_pairs == along_pairs), -value, value)
    if is_turned:
        value = tl.trans(value)
    place = (item * rows + i)[:, None] * row_step + j[None, :]
    is_in = (i < rows)[:, None] & (j < row_step)[None, :]
    tl.store(target + place, value.to(target.dtype.element_ty), mask=is_in)


@triton.jit
def pack_limbs(
    source,
    target,
    across_size,
    along_size,
    across_step,
    along_step,
    outer_step,
    inner_step,
    inner,
    rows,
    row_step,
    tiles_m,
    tiles_n,
    is_turned,
    size,
    sign,
    limbs,
    limb_first,
    limb_step,
    TILE: tl.constexpr,
):
    """Cut integers into ``limbs`` bytes: ``x = Σ x_l · 256^l`` modulo 256^limbs, -128 ≤ x_l < 128.

    A row of target is ``row_step`` bytes; limb ``l`` of all its elements begins ``limb_first +
    l · limb_step`` bytes into it. Otherwise as `pack`.
    """
    item, i, j = _tile(tiles_m, tiles_n, TILE)
    across = tl.where(is_turned != 0, j, i)
    along = tl.where(is_turned != 0, i, j)
    at = (item // inner) * outer_step + (item % inner) * inner_step
    at += (across * across_step)[:, None] + (along * along_step)[None, :]
    is_in = (across < across_size)[:, None] & (along < along_size)[None, :]
    rest = as_integer(source, at, is_in, size, sign)
    if is_turned:
        rest = tl.trans(rest)
    place = target + ((item * rows + i)[:, None] * row_step + j[None, :] + limb_first)
    is_in = (i < rows)[:, None] & (j < tl.abs(limb_step))[None, :]
    for _ in range(limbs):
        limb = ((rest + 128) & 255) - 128
        tl.store(place, limb.to(tl.int8), mask=is_in)
        rest = (rest - limb) >> 8
        place += limb_step


@triton.jit
def as_integer(source, at, is_in, size, sign):
    """Load integers of ``size`` bytes as int64; ``sign`` is their sign bit, 0 for unsigned ones."""
    value = tl.zeros(at.shape, tl.int64)
    if size == 1:
        value = tl.load(source + at, mask=is_in, other=0).to(tl.int64)
    elif size == 2:
        value = tl.load(source.to(tl.pointer_type(tl.uint16)) + at, mask=is_in, other=0).to(
            tl.int64
        )
    elif size == 4:
        value = tl.load(source.to(tl.pointer_type(tl.uint32)) + at, mask=is_in, other=0).to(
            tl.int64
        )
    else:
        value = tl.load(source.to(tl.pointer_type(tl.int64)) + at, mask=is_in, other=0)
    return (value ^ sign) - sign


@triton.jit
def as_real(source, at, is_in, stored, size, sign, SUM: tl.constexpr):
    """Load real numbers, however they are stored, as SUM."""
    value = tl.zeros(at.shape, SUM)
    if stored == _FLOAT16:
        value = tl.load(source.to(tl.pointer_type(tl.float16)) + at, mask=is_in, other=0.0).to(SUM)
    elif stored == _BFLOAT16:
        value = tl.load(source.to(tl.pointer_type(tl.bfloat16)) + at, mask=is_in, other=0.0).to(SUM)
    elif stored == _FLOAT32:
        value = tl.load(source.to(tl.pointer_type(tl.float32)) + at, mask=is_in, other=0.0).to(SUM)
    elif stored == _FLOAT64:
        if value.dtype == tl.float64:
            value = tl.load(source.to(tl.pointer_type(tl.float64)) + at, mask=is_in, other=0.0)
    elif stored == _FLOAT8_E4M3:
        value = _from_e4m3(tl.load(source + at, mask=is_in, other=0)).to(SUM)
    elif stored == _FLOAT8_E5M2:
        bits = tl.load(source + at, mask=is_in, other=0).to(tl.uint16) << 8
        value = bits.to(tl.float16, bitcast=True).to(SUM)
    else:
        whole = as_integer(source, at, is_in, size, sign)
        value = whole.to(SUM)
        if (size == 8) & (sign == 0):
            value = whole.to(tl.uint64, bitcast=True).to(SUM)
    return value


@triton.jit
def _from_e4m3(bits):
    """Return float8 e4m3fn as float32; no GPU before sm_89 converts it."""
    wide = bits.to(tl.uint16)
    # The same digits in float16, whose exponent's bias is greater by 8; 0x7f is NaN.
    magnitude = ((wide & 0x7F) << 7).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    magnitude = tl.where((wide & 0x7F) == 0x7F, float("nan"), magnitude)
    return tl.where((wide & 0x80) != 0, -magnitude, magnitude)


@triton.jit
def _tile(tiles_m, tiles_n, TILE: tl.constexpr):
    """Return this program's matrix of the batch, and its rows and columns."""
    program = tl.program_id(0)
    tile = program % (tiles_m * tiles_n)
    item = (program // (tiles_m * tiles_n)).to(tl.int64)
    i = (tile // tiles_n).to(tl.int64) * TILE + tl.arange(0, TILE)
    j = (tile % tiles_n).to(tl.int64) * TILE + tl.arange(0, TILE)
    return item, i, j
