"""Products of every element type, stride and size, on every NVIDIA architecture, in Triton.

Three kernels multiply or finish a product: `multiply` sums one tile of C in one chain over K, on
whatever unit the compiler has for the type; `multiply_integers` is its plain twin for integers of
any width; `finish` adds up the parts of a product that was cut along K, and does what the others
leave out: alpha, beta, other result types, any strides. The copies that bring an operand into the
order a kernel reads fastest are in ``packing``; what multiplies int8 and float8 on Hopper is in
``hopper_bytes``. What is compiled is in ``portable_table``, and what runs when in
``portable_plan``.

Offsets are 64 bits wide everywhere; the grid has one dimension. Nothing outside an operand is read,
and every element of C is written once, by one thread.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, attr-defined"
from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import triton
import triton.language as tl

from .compile import Variant
from .packing import as_integer, as_real, pack, pack_limbs
from .portable_table import (
    EVERYWHERE,
    FINISH_TILES,
    INTEGERS_TILE,
    KERNELS,
    PACK_TILES,
    Kernel,
    fixed_arguments,
)
from .ptx import fuse_float64, wrap_int32

__all__ = ["finish", "multiply", "multiply_integers", "variants"]

# How a real number is stored, as `portable_table.STORED` has it.
_FLOAT16 = tl.constexpr(1)
_BFLOAT16 = tl.constexpr(2)
_FLOAT32 = tl.constexpr(3)
_FLOAT64 = tl.constexpr(4)
_FLOAT8_E4M3 = tl.constexpr(5)
_FLOAT8_E5M2 = tl.constexpr(6)

_TRITON = {"fp16": tl.float16, "bf16": tl.bfloat16, "fp32": tl.float32, "fp64": tl.float64}
_TRITON |= {"i32": tl.int32}

#: Arguments of 32 bits: what counts programs, and choices.
_COUNTS = {"tiles_m", "tiles_n", "inner", "parts", "wide", "stored", "size", "power", "limbs"}
_COUNTS |= {"is_turned", "reals", "across_pairs", "along_pairs", "sums_across"}
_COUNTS |= {"a_size", "b_size", "c_size"}


@triton.jit
def multiply(
    a,
    b,
    c,
    m,
    n,
    k,
    a_row,
    a_col,
    b_row,
    b_col,
    c_row,
    c_col,
    a_outer,
    a_inner,
    b_outer,
    b_inner,
    c_outer,
    c_inner,
    c_part,
    depth,
    parts,
    inner,
    tiles_m,
    tiles_n,
    alpha,
    beta,
    wide,
    SUM: tl.constexpr,
    NARROW: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    GROUP: tl.constexpr,
    VECTOR: tl.constexpr,
    A_ALONG_K: tl.constexpr,
    B_ALONG_K: tl.constexpr,
    COMPLEX: tl.constexpr,
    PROMOTED: tl.constexpr,
    UPDATE: tl.constexpr,
):
    """Write one tile of C: alpha·a·b + beta·C, or the part of a·b over ``depth`` terms of K.

    Sizes and strides are in elements. Programs run over tiles, then parts, then the two batch axes;
    parts of a tile lie ``c_part`` apart. C is of type SUM where ``wide`` is set, else NARROW.
    Operands with a unit stride are read in aligned vectors of VECTOR elements along it, so up to
    the next multiple of VECTOR, which lies in a row's padding or does not exist.

    COMPLEX reads interleaved complex matrices as real ones of twice the size, with b's element
    ``[[re, im], [-im, re]]`` for each of its own; sizes and strides are then in real numbers.
    """
    tile, part, outer, at_inner = _place(tiles_m * tiles_n, parts, inner)
    tile_m, tile_n = _tile_order(tile, tiles_m, tiles_n, GROUP)
    row_0 = tile_m.to(tl.int64) * TILE_M
    col_0 = tile_n.to(tl.int64) * TILE_N
    k_0 = part * depth
    terms = tl.minimum(k - k_0, depth)
    if UPDATE:
        terms = tl.where(alpha == 0, 0, terms)

    rows = tl.arange(0, TILE_M)
    cols = tl.arange(0, TILE_N)
    inside = tl.arange(0, TILE_K)
    a_rows = m - row_0
    b_cols = n - col_0
    a_terms = terms
    b_terms = terms
    if A_ALONG_K:
        a_terms = _round_up(terms, VECTOR)
    else:
        a_rows = _round_up(a_rows, VECTOR)
    if B_ALONG_K:
        b_terms = _round_up(terms, VECTOR)
    else:
        b_cols = _round_up(b_cols, VECTOR)
    row_is_in = rows < tl.minimum(a_rows, TILE_M).to(tl.int32)
    col_is_in = cols < tl.minimum(b_cols, TILE_N).to(tl.int32)

    if COMPLEX:
        pair, pairs = inside // 2, cols // 2
        imaginary, imaginaries = inside % 2, cols % 2
        a_inside = pair.to(tl.int64) * a_col + imaginary
        b_inside = pair.to(tl.int64)[:, None] * b_row + (imaginary[:, None] ^ imaginaries[None, :])
        b_across = pairs.to(tl.int64) * b_col
        sign = tl.where(imaginary[:, None] > imaginaries[None, :], -1.0, 1.0).to(SUM)
        a_at = a + (row_0 * a_row + (k_0 // 2) * a_col)
        b_at = b + ((col_0 // 2) * b_col + (k_0 // 2) * b_row)
        a_step = (TILE_K // 2) * a_col
        b_step = (TILE_K // 2) * b_row
    else:
        a_inside = inside.to(tl.int64) * a_col
        b_inside = (inside.to(tl.int64) * b_row)[:, None]
        b_across = cols.to(tl.int64) * b_col
        a_at = a + (row_0 * a_row + k_0 * a_col)
        b_at = b + (col_0 * b_col + k_0 * b_row)
        a_step = TILE_K * a_col
        b_step = TILE_K * b_row
    a_at += outer * a_outer + at_inner * a_inner
    b_at += outer * b_outer + at_inner * b_inner
    a_tile = a_at + (rows.to(tl.int64) * a_row)[:, None] + a_inside[None, :]
    b_tile = b_at + b_inside + b_across[None, :]

    total = tl.zeros((TILE_M, TILE_N), SUM)
    for done in range(0, terms, TILE_K):
        a_is_in = inside < tl.minimum(a_terms - done, TILE_K).to(tl.int32)
        b_is_in = inside < tl.minimum(b_terms - done, TILE_K).to(tl.int32)
        x = tl.load(a_tile, mask=row_is_in[:, None] & a_is_in[None, :], other=0.0)
        y = tl.load(b_tile, mask=b_is_in[:, None] & col_is_in[None, :], other=0.0)
        if COMPLEX:
            y = y * sign
        if PROMOTED:
            total = tl.dot(x, y, total, out_dtype=SUM, max_num_imprecise_acc=PROMOTED)
        else:
            total = tl.dot(x, y, total, input_precision="ieee", out_dtype=SUM)
        a_tile += a_step
        b_tile += b_step

    is_in = (rows < tl.minimum(m - row_0, TILE_M).to(tl.int32))[:, None] & (
        cols < tl.minimum(n - col_0, TILE_N).to(tl.int32)
    )[None, :]
    if COMPLEX:
        across = ((col_0 + cols) // 2) * c_col + cols % 2
    else:
        across = (col_0 + cols) * c_col
    c_at = outer * c_outer + at_inner * c_inner + part * c_part
    c_at = c_at + ((row_0 + rows) * c_row)[:, None] + across[None, :]
    if wide:
        _write(c + c_at, total, is_in, alpha, beta, UPDATE)
    else:
        _write(c.to(tl.pointer_type(NARROW)) + c_at, total, is_in, alpha, beta, UPDATE)


@triton.jit
def multiply_integers(
    a,
    b,
    c,
    m,
    n,
    k,
    a_row,
    a_col,
    b_row,
    b_col,
    c_row,
    c_col,
    a_outer,
    a_inner,
    b_outer,
    b_inner,
    c_outer,
    c_inner,
    inner,
    tiles_m,
    tiles_n,
    alpha,
    beta,
    a_size,
    a_sign,
    b_size,
    b_sign,
    c_size,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Write one tile of C = alpha·a·b + beta·C for integers of any types, modulo 2^64 throughout.

    Sizes of elements are in bytes, signs are sign bits, as for `packing.as_integer`; a result of
    size 0 is bool. No unit multiplies 64-bit integers: this is for what is too small for `multiply`
    on limbs, or has no room for them.
    """
    tile, _, outer, at_inner = _place(tiles_m * tiles_n, 1, inner)
    rows = (tile // tiles_n).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    cols = (tile % tiles_n).to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
    inside = tl.arange(0, TILE_K).to(tl.int64)
    a_at = outer * a_outer + at_inner * a_inner + (rows * a_row)[:, None]
    b_at = outer * b_outer + at_inner * b_inner + (cols * b_col)[None, :]
    steps = tl.where(alpha == 0, 0, tl.cdiv(k, TILE_K))
    total = tl.zeros((TILE_M, TILE_N), tl.int64)
    for step in range(steps):
        term = inside + step * TILE_K
        a_is_in = (rows < m)[:, None] & (term < k)[None, :]
        b_is_in = (term < k)[:, None] & (cols < n)[None, :]
        x = as_integer(a, a_at + (term * a_col)[None, :], a_is_in, a_size, a_sign)
        y = as_integer(b, b_at + (term * b_row)[:, None], b_is_in, b_size, b_sign)
        total += tl.sum(x[:, :, None] * y[None, :, :], axis=1)
    c_at = outer * c_outer + at_inner * c_inner + (rows * c_row)[:, None] + (cols * c_col)[None, :]
    is_in = (rows < m)[:, None] & (cols < n)[None, :]
    _write_integer(c, c_at, total, is_in, alpha, beta, c_size)


@triton.jit
def finish(
    sums,
    c,
    rows,
    cols,
    c_row,
    c_col,
    c_outer,
    c_inner,
    inner,
    sums_row,
    parts,
    part_step,
    tiles_m,
    tiles_n,
    alpha,
    beta,
    alpha_imag,
    beta_imag,
    stored,
    power,
    COMPLEX: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """Write C = alpha·Σ sums + beta·C, the parts added in their order, in any type and strides.

    ``sums[part, item, i, j]`` is contiguous but for rows of ``sums_row``, each part ``part_step``
    numbers on. ``stored`` is how C's real numbers are stored, or for integer sums C's size in
    bytes; those get the factor 256^power too. With COMPLEX, sums and C hold re and im in turn, and
    ``cols``, ``sums_row`` and C's strides count pairs.
    """
    tile, _, outer, at_inner = _place(tiles_m * tiles_n, 1, inner)
    i = (tile // tiles_n).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    j = (tile % tiles_n).to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
    is_in = (i < rows)[:, None] & (j < cols)[None, :]
    at = ((outer * inner + at_inner) * rows + i)[:, None] * sums_row + j[None, :]
    c_at = outer * c_outer + at_inner * c_inner + (i * c_row)[:, None] + (j * c_col)[None, :]
    if COMPLEX:
        re = _sum_parts(sums + 2 * at, parts, part_step, is_in)
        im = _sum_parts(sums + 2 * at + 1, parts, part_step, is_in)
        real = alpha * re - alpha_imag * im
        imag = alpha * im + alpha_imag * re
        if alpha_imag == 0:
            real, imag = _scaled(re, alpha), _scaled(im, alpha)
        if (beta != 0) | (beta_imag != 0):
            old_re = as_real(c, 2 * c_at, is_in, stored, 0, 0, re.dtype)
            old_im = as_real(c, 2 * c_at + 1, is_in, stored, 0, 0, re.dtype)
            real += beta * old_re - beta_imag * old_im
            imag += beta * old_im + beta_imag * old_re
        _write_real(c, 2 * c_at, real, is_in, stored)
        _write_real(c, 2 * c_at + 1, imag, is_in, stored)
    elif sums.dtype.element_ty == tl.int32:
        total = _sum_parts(sums + at, parts, part_step, is_in)
        _write_integer(c, c_at, total << (8 * power), is_in, alpha, beta, stored)
    else:
        total = _sum_parts(sums + at, parts, part_step, is_in)
        total = _scaled(total, alpha)
        if beta != 0:
            old = as_real(c, c_at, is_in, stored, 0, 0, total.dtype)
            total = tl.fma(old, tl.zeros_like(old) + beta, total)
        _write_real(c, c_at, total, is_in, stored)


@triton.jit
def _place(tiles, parts, inner):
    """Return what this program works on: tile, part, and position on the two batch axes."""
    program = tl.program_id(0)
    item = program // tiles
    matrix = item // parts
    return (
        program % tiles,
        (item % parts).to(tl.int64),
        (matrix // inner).to(tl.int64),
        (matrix % inner).to(tl.int64),
    )


@triton.jit
def _tile_order(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Return a tile's row and column: GROUP rows of tiles go together, and share b in the L2."""
    first = tile // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    within = tile % (GROUP * tiles_n)
    return first + within % height, within // height


@triton.jit
def _round_up(size, VECTOR: tl.constexpr):
    return (size + VECTOR - 1) // VECTOR * VECTOR


@triton.jit
def _write(c, total, is_in, alpha, beta, UPDATE: tl.constexpr):
    """Store a tile of float sums as it is, or scaled and added to what is there."""
    if UPDATE:
        total = _scaled(total, alpha)
        if beta != 0:
            old = tl.load(c, mask=is_in, other=0.0).to(total.dtype)
            total = tl.fma(old, tl.zeros_like(old) + beta, total)
    tl.store(c, total.to(c.dtype.element_ty), mask=is_in)


@triton.jit
def _scaled(total, alpha):
    """Return alpha·total, and 0 for alpha = 0 whatever total is."""
    return tl.where(alpha == 0, tl.zeros_like(total), alpha * total)


@triton.jit
def _sum_parts(sums, parts, part_step, is_in):
    """Add up parts in their order; int32 ones as int64."""
    total = tl.load(sums, mask=is_in & (parts > 0), other=0.0)
    if total.dtype == tl.int32:
        total = total.to(tl.int64)
    # Eight loads in flight: one alone waits for the L2 longer than its addition takes.
    for part in range(1, parts, 8):
        at = sums + part * part_step
        x_0 = tl.load(at, mask=is_in, other=0.0)
        x_1 = tl.load(at + part_step, mask=is_in & (part + 1 < parts), other=0.0)
        x_2 = tl.load(at + 2 * part_step, mask=is_in & (part + 2 < parts), other=0.0)
        x_3 = tl.load(at + 3 * part_step, mask=is_in & (part + 3 < parts), other=0.0)
        x_4 = tl.load(at + 4 * part_step, mask=is_in & (part + 4 < parts), other=0.0)
        x_5 = tl.load(at + 5 * part_step, mask=is_in & (part + 5 < parts), other=0.0)
        x_6 = tl.load(at + 6 * part_step, mask=is_in & (part + 6 < parts), other=0.0)
        x_7 = tl.load(at + 7 * part_step, mask=is_in & (part + 7 < parts), other=0.0)
        total = total + x_0 + x_1 + x_2 + x_3 + x_4 + x_5 + x_6 + x_7
    return total


@triton.jit
def _write_real(c, at, value, is_in, stored):
    """Store real numbers in one of the types of `packing.as_real`, with one rounding."""
    if stored == _FLOAT64:
        tl.store(c.to(tl.pointer_type(tl.float64)) + at, value.to(tl.float64), mask=is_in)
    elif stored == _FLOAT32:
        tl.store(c.to(tl.pointer_type(tl.float32)) + at, value.to(tl.float32), mask=is_in)
    else:
        near = _rounded_to_odd(value)
        if stored == _FLOAT16:
            tl.store(c.to(tl.pointer_type(tl.float16)) + at, near.to(tl.float16), mask=is_in)
        elif stored == _BFLOAT16:
            tl.store(c.to(tl.pointer_type(tl.bfloat16)) + at, near.to(tl.bfloat16), mask=is_in)
        elif stored == _FLOAT8_E4M3:
            tl.store(c + at, _to_float8(near, 3, 7, 0x7F, 0x7F), mask=is_in)
        else:
            tl.store(c + at, _to_float8(near, 2, 15, 0x7C, 0x7E), mask=is_in)


@triton.jit
def _rounded_to_odd(value):
    """Return float64 as float32 such that rounding it again, to fewer digits, rounds once.

    Of two neighbours, the one whose last digit is odd is on the same side of every midpoint.
    """
    near = value.to(tl.float32)
    if value.dtype == tl.float64:
        back = near.to(tl.float64)
        bits = near.to(tl.int32, bitcast=True)
        step = tl.where(tl.abs(back) < tl.abs(value), 1, -1)
        bits += tl.where((back != value) & ((bits & 1) == 0), step, 0)
        near = bits.to(tl.float32, bitcast=True)
    return near


@triton.jit
def _to_float8(
    value,
    DIGITS: tl.constexpr,
    BIAS: tl.constexpr,
    OVERFLOW: tl.constexpr,
    NAN: tl.constexpr,
):
    """Return float32 rounded to the bits of a float8, half to even; no GPU before sm_89 does it."""
    bits = value.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    cut: tl.constexpr = 23 - DIGITS
    code = (size + (1 << (cut - 1)) - 1 + ((size >> cut) & 1)) >> cut
    code -= (127 - BIAS) << DIGITS
    # Below the least normal number: whole multiples of the least subnormal one, which is the last
    # digit of ONE. What is added lines the digits up, and the addition rounds.
    ONE: tl.constexpr = 2.0 ** (23 + 1 - BIAS - DIGITS)
    lined_up = (tl.abs(value) + ONE).to(tl.int32, bitcast=True)
    origin = tl.full(value.shape, ONE, tl.float32).to(tl.int32, bitcast=True)
    code = tl.where(code < 1 << DIGITS, lined_up - origin, code)
    code = tl.where(code >= OVERFLOW, OVERFLOW, code)
    code = tl.where(value != value, NAN, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _write_integer(c, at, total, is_in, alpha, beta, size):
    """Store alpha·total + beta·C modulo 2^(8·size), or for size 0 the or of and."""
    total *= alpha
    if beta != 0:
        total += beta * as_integer(c, at, is_in, tl.maximum(size, 1), 0)
    if size == 0:
        tl.store(c + at, (total != 0).to(tl.uint8), mask=is_in)
    elif size == 1:
        tl.store(c + at, total.to(tl.uint8), mask=is_in)
    elif size == 2:
        tl.store(c.to(tl.pointer_type(tl.uint16)) + at, total.to(tl.uint16), mask=is_in)
    elif size == 4:
        tl.store(c.to(tl.pointer_type(tl.uint32)) + at, total.to(tl.uint32), mask=is_in)
    else:
        tl.store(c.to(tl.pointer_type(tl.int64)) + at, total, mask=is_in)


def variants() -> tuple[Variant, ...]:
    """Return all portable kernels, each with the targets it is compiled for."""
    from . import hopper_bytes  # in Gluon, which has no interpreter

    finished = [
        _finish_variant(sums, is_complex, width)
        for sums, is_complex in itertools.product(("fp32", "fp64", "i32"), (False, True))
        for width in FINISH_TILES
        if not (is_complex and sums == "i32")
    ]
    packed = [_pack_variant(target, False) for target in ("u8", "fp16", "bf16", "fp32", "fp64")]
    packed += [_pack_variant(target, True) for target in ("fp32", "fp64")]
    tile = dict.fromkeys(("TILE_M", "TILE_N", "TILE_K"), INTEGERS_TILE)
    return (
        *(_multiply_variant(kernel) for kernel in KERNELS if not kernel.is_mapped),
        *hopper_bytes.variants(),
        _variant("integers", multiply_integers, dict.fromkeys("abc", "*u8"), tile),
        *finished,
        *packed,
        _variant(
            "pack_limbs",
            pack_limbs,
            {"source": "*u8", "target": "*i8"},
            {"TILE": PACK_TILES["limbs"]},
        ),
    )


def _multiply_variant(kernel: Kernel) -> Variant:
    tile_m, tile_n, tile_k = kernel.tile
    sums = kernel.sums
    factor = "fp32" if sums == "i32" else sums
    constants = {
        "SUM": _TRITON[sums],
        "NARROW": _TRITON[kernel.dtype] if kernel.narrow else None,
        "TILE_M": tile_m,
        "TILE_N": tile_n,
        "TILE_K": tile_k,
        "GROUP": 8,
        "VECTOR": kernel.vector,
        "A_ALONG_K": kernel.order[0] == "n",
        "B_ALONG_K": kernel.order[1] == "t",
        "COMPLEX": kernel.is_complex,
        "PROMOTED": 128 if kernel.dtype.startswith("fp8") else 0,
        "UPDATE": kernel.order == "any",
        **fixed_arguments(kernel),
    }
    divisors = {}
    if kernel.order != "any":
        steps = ("a_row", "a_col", "a_outer", "a_inner", "b_row", "b_col", "b_outer", "b_inner")
        divisors = dict.fromkeys(steps, kernel.vector) | {"a": 16, "b": 16, "depth": 16}
    if kernel.c_vector > 1:
        divisors |= dict.fromkeys(("c_row", "c_outer", "c_inner", "c_part"), kernel.c_vector)
        divisors["c"] = 16
    return _variant(
        kernel.name,
        multiply,
        {"a": f"*{kernel.dtype}", "b": f"*{kernel.dtype}", "c": f"*{sums}"}
        | dict.fromkeys(("alpha", "beta"), factor),
        constants,
        divisors,
        warps=kernel.warps,
        stages=kernel.stages,
        registers=kernel.registers,
        targets=kernel.targets,
        rewrite_ptx={"fp64": fuse_float64, "i8": wrap_int32}.get(kernel.dtype),
    )


def _finish_variant(sums: str, is_complex: bool, width: str) -> Variant:
    factor = "i64" if sums == "i32" else sums
    factors = ("alpha", "beta", "alpha_imag", "beta_imag")
    constants: dict[str, Any] = {"COMPLEX": is_complex}
    constants |= dict(zip(("TILE_M", "TILE_N"), FINISH_TILES[width], strict=True))
    if not is_complex:
        constants |= {"alpha_imag": 0, "beta_imag": 0}
    if sums != "i32":
        constants["power"] = 0
    types = {"sums": f"*{sums}", "c": "*u8"} | dict.fromkeys(factors, factor)
    name = f"finish_{sums}" + "_complex" * is_complex + width
    return _variant(name, finish, types, constants)


def _pack_variant(target: str, is_complex: bool) -> Variant:
    constants = {
        "SUM": tl.float64 if target == "fp64" else tl.float32,
        "TILE": PACK_TILES[target],
    }
    if target == "u8":
        constants |= {"stored": 0, "size": 1, "sign": 0}
    if not is_complex:
        constants |= {"reals": 1, "across_pairs": 0, "along_pairs": 0, "sums_across": 0}
    types = {"source": "*u8", "target": f"*{target}"}
    divisors = {"target": 16, "row_step": 16}
    name = f"pack_{target}" + "_complex" * is_complex
    return _variant(name, pack, types, constants, divisors, warps=8)


def _variant(
    name: str,
    function: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    divisors: Mapping[str, int] | None = None,
    *,
    warps: int = 4,
    stages: int = 3,
    registers: int | None = None,
    targets: tuple[str, ...] = EVERYWHERE,
    rewrite_ptx: Callable[[str, str], tuple[str, int]] | None = None,
) -> Variant:
    """Describe a kernel to the compiler; what ``types`` leaves out are counts and offsets."""
    signature = {
        argument: types.get(argument, "i32" if argument in _COUNTS else "i64")
        for argument in function.arg_names
        if argument not in constants
    }
    # Fused multiply-adds are asked for by name where they matter, and by the products themselves.
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    if registers is not None:
        options["maxnreg"] = registers
    return Variant(
        name=name,
        function=function,
        compiler="triton",
        signature=signature,
        targets=targets,
        constexprs=constants,
        attrs={key: value for key, value in (divisors or {}).items() if key in signature},
        options=options,
        rewrite_ptx=rewrite_ptx,
    )
