"""float32 → float16, scaled and cut in two for tensor cores, at the speed of memory, in Gluon.

An element times a power of two is ``hi + lo``, each the nearest float16. `split_rows` scales A,
each row by one power; `split_pieces` scales B, each column by one for every 64 of K, so that B is
read once. `judge_rows` only finds the powers for A, for what scales it where it multiplies. Of hi
alone, "tf32", the columns of B are scaled as the rows of A are. All flag what cannot be computed so
(docs/numerics.md).

Targets hold ``(matrix, part, row, k)``, part 0 being hi, rows on lines of 128 bytes and padded with
zeros; B lies there transposed. Sources have any strides. Where ``pairs`` is 1, matrices are complex
and spelled as real ones: A twice as long along k, B along both axes, an element of it being
``[[re, im], [-im, re]]``.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# mypy: disable-error-code="untyped-decorator, no-untyped-call"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .flags import NAN, UNSAFE, list_rows, list_tile

__all__ = [
    "LEAST_HIGH_FIELD",
    "LEAST_PIECE_FIELD",
    "LEAST_ROW_FIELD",
    "MAGNITUDE",
    "PIECE",
    "judge",
    "judge_rows",
    "magnitude",
    "power",
    "row_factor",
    "split_pieces",
    "split_rows",
]

PIECE = gl.constexpr(64)  # of K, of which B has a scale

INFINITY = gl.constexpr(0x7F800000)
MAGNITUDE = gl.constexpr(0x7FFFFFFF)
ZERO_FIELD = gl.constexpr(141)  # the exponent field of what is all zeros: scaled by 1
#: Exponent fields below which scales, or products of what is scaled, would leave float32's range:
#: of rows of A, of pieces of columns of B, and of what is split into high parts alone.
LEAST_ROW_FIELD = gl.constexpr(21)
LEAST_PIECE_FIELD = gl.constexpr(34)
LEAST_HIGH_FIELD = gl.constexpr(40)
#: A result is multiplied by 2^(E − ROW_UNIT) for its row, where columns' scales have the rest; of
#: high parts alone, by 2^(E − HIGH_UNIT) for its row and for its column.
ROW_UNIT = gl.constexpr(20)
HIGH_UNIT = gl.constexpr(14)


@gluon.jit
def split_rows(
    source,
    target,
    scale,
    flag,
    cleared,
    clear_count,
    rows,
    k,
    inner,
    count,
    source_outer,
    source_inner,
    source_row,
    source_col,
    target_row,
    pairs,
    threshold,
    most_field,
    ROWS: gl.constexpr,
    DEPTH: gl.constexpr,
    WHOLE: gl.constexpr,
    ALONG_K: gl.constexpr,
    PARTS: gl.constexpr,
    PAIRED: gl.constexpr,
):
    """Split A, or the transpose of B; ``scale`` gets what C is multiplied by at the end.

    A row is flagged that holds what is not finite, less than ``threshold`` when scaled, or an
    exponent field above ``most_field``. Rows are read once where they are WHOLE: no longer than
    DEPTH, their elements side by side; else twice. PAIRED is for the transpose of a complex B. Sets
    ``clear_count`` words of ``cleared`` to 0 for what follows.
    """
    gdc_wait()
    # In this order: `skinny` reads B, which is there now, before it waits itself.
    gdc_launch_dependents()
    _clear(cleared, clear_count)
    near: gl.constexpr = _near(ALONG_K, ROWS, gl.num_warps())
    wide: gl.constexpr = _wide(ROWS, DEPTH, gl.num_warps())
    tiles = gl.cdiv(rows, ROWS)
    for index in range(gl.program_id(0), tiles * count, gl.num_programs(0)):
        matrix = index // tiles
        row = (index % tiles) * ROWS
        i = row + gl.arange(0, ROWS, gl.SliceLayout(1, near))
        x_at = source + _start(matrix, inner, source_outer, source_inner)
        x_at += ((i >> PAIRED).to(gl.int64) * source_row)[:, None]
        is_row = (i < rows)[:, None]
        if WHOLE:
            j = gl.arange(0, DEPTH, gl.SliceLayout(0, near))
            x = gl.load(x_at + j[None, :], mask=is_row & (j < k)[None, :], other=0.0)
            high, low = _magnitudes(x)
        else:
            high = gl.zeros([ROWS, DEPTH], gl.int32, near)
            low = gl.full([ROWS, DEPTH], MAGNITUDE, gl.int32, near)
            for done in range(0, k, DEPTH):
                x = _read(x_at, done, i, is_row, k, source_col, pairs, DEPTH, PAIRED, near)
                most, least = _magnitudes(x)
                high, low = gl.maximum(high, most), gl.minimum(low, least)
        least_field: gl.constexpr = LEAST_ROW_FIELD if PARTS == 2 else LEAST_HIGH_FIELD
        field, flags = judge(gl.max(high, 1), gl.min(low, 1), threshold, least_field, most_field)
        place = matrix * rows + i
        unit: gl.constexpr = ROW_UNIT if PARTS == 2 else HIGH_UNIT
        gl.store(scale + place, power(field - unit), mask=i < rows)
        gl.store(flag + place, flags, mask=i < rows)
        factor = power(268 - field)[:, None]
        at = target + (matrix.to(gl.int64) * PARTS * rows) * target_row
        if WHOLE:
            _write(at, x * factor, row, 0, rows, target_row, PARTS, wide)
        else:
            for done in range(0, target_row, DEPTH):
                x = _read(x_at, done, i, is_row, k, source_col, pairs, DEPTH, PAIRED, near)
                _write(at, x * factor, row, done, rows, target_row, PARTS, wide)


@gluon.jit
def judge_rows(
    source,
    scale,
    flag,
    cleared,
    clear_count,
    rows,
    k,
    inner,
    count,
    source_outer,
    source_inner,
    source_row,
    source_col,
    threshold,
    most_field,
    ROWS: gl.constexpr,
    DEPTH: gl.constexpr,
    WHOLE: gl.constexpr,
    ALONG_K: gl.constexpr,
):
    """Do what `split_rows` does, of two parts, but split: read A once and write scales and flags.

    WHOLE, the elements of a row lie side by side, however many.
    """
    gdc_wait()
    gdc_launch_dependents()
    _clear(cleared, clear_count)
    near: gl.constexpr = _near(ALONG_K, ROWS, gl.num_warps())
    tiles = gl.cdiv(rows, ROWS)
    for index in range(gl.program_id(0), tiles * count, gl.num_programs(0)):
        matrix = index // tiles
        i = (index % tiles) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, near))
        j = gl.arange(0, DEPTH, gl.SliceLayout(0, near))
        col = gl.to_tensor(1).to(gl.int64) if WHOLE else source_col
        # Beyond the last row and element it is these again, so that loads need no mask.
        x_at = source + _start(matrix, inner, source_outer, source_inner)
        x_at += (gl.minimum(i, rows - 1).to(gl.int64) * source_row)[:, None]
        start = (k - 1) // DEPTH * DEPTH
        at = gl.minimum(start + j, k - 1).to(gl.int64) * col
        high, low = _magnitudes(gl.load(x_at + at[None, :]))
        # Backwards, since what follows begins with what was read last and may be in the L2 cache.
        for done in range(DEPTH, start + DEPTH, DEPTH):
            before = (start - done + j).to(gl.int64) * col
            most, least = _magnitudes(gl.load(x_at + before[None, :]))
            high, low = gl.maximum(high, most), gl.minimum(low, least)
        high, low = gl.max(high, 1), gl.min(low, 1)
        field, flags = judge(high, low, threshold, LEAST_ROW_FIELD, most_field)
        gl.store(scale + matrix * rows + i, power(field - ROW_UNIT), mask=i < rows)
        gl.store(flag + matrix * rows + i, flags, mask=i < rows)


@gluon.jit
def split_pieces(
    source,
    target,
    scale,
    a_flag,
    a_list,
    a_count,
    a_tile,
    b_flag,
    b_list,
    b_count,
    b_tile,
    m,
    a_tiles,
    rows,
    k,
    inner,
    count,
    source_outer,
    source_inner,
    source_row,
    source_col,
    target_row,
    threshold,
    most_field,
    ROWS: gl.constexpr,
    ALONG_K: gl.constexpr,
    PARTS: gl.constexpr,
    PAIRS: gl.constexpr,
):
    """Split the transpose of B; ``scale[matrix, piece, column]`` is what a piece is promoted with.

    A column is flagged that has in a piece what is not finite, less than ``threshold`` when scaled,
    or an exponent field above ``most_field``. Lists flagged columns, and the rows that `split_rows`
    flagged in ``a_tiles`` tiles, as `flags.list_flagged` does.
    """
    # Started once `split_rows` has waited for all that came before: what is read and written up to
    # the flags is touched by nothing that still runs.
    gdc_launch_dependents()
    near: gl.constexpr = _near(ALONG_K, ROWS, gl.num_warps())
    wide: gl.constexpr = _wide(ROWS, PIECE, gl.num_warps())
    tiles = gl.cdiv(rows, ROWS)
    pieces = gl.cdiv(k, PIECE)
    for index in range(gl.program_id(0), tiles * pieces * count, gl.num_programs(0)):
        matrix = index // (tiles * pieces)
        piece = index // tiles % pieces
        row = index % tiles * ROWS
        i = row + gl.arange(0, ROWS, gl.SliceLayout(1, near))
        j = piece * PIECE + gl.arange(0, PIECE, gl.SliceLayout(0, near))
        x_at = source + _start(matrix, inner, source_outer, source_inner)
        x_at += ((i >> PAIRS).to(gl.int64) * source_row)[:, None]
        x_at += ((j >> PAIRS).to(gl.int64) * source_col)[None, :]
        inside = (i < rows)[:, None] & (j < k)[None, :]
        if PAIRS:
            odd_i = (i & 1)[:, None]
            odd_j = (j & 1)[None, :]
            x = gl.load(x_at + (odd_i ^ odd_j), mask=inside, other=0.0)
            x = gl.where(odd_j > odd_i, -x, x)
        else:
            x = gl.load(x_at, mask=inside, other=0.0)
        high, low = _magnitudes(x)
        high, low = gl.max(high, 1), gl.min(low, 1)
        field, flags = judge(high, low, threshold, LEAST_PIECE_FIELD, most_field)
        gl.store(scale + (matrix * pieces + piece) * rows + i, power(field - 8), mask=i < rows)
        at = target + (matrix.to(gl.int64) * PARTS * rows) * target_row
        x = x * power(268 - field)[:, None]
        _write(at, x, row, piece * PIECE, rows, target_row, PARTS, wide)
        gdc_wait()
        one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        i = row + gl.arange(0, ROWS, one)
        flags = gl.where(i < rows, gl.convert_layout(flags, one), 0)
        list_rows(b_flag, b_list, b_count, b_tile, matrix, i, rows, flags)
    gdc_wait()
    for tile in range(gl.program_id(0), a_tiles, gl.num_programs(0)):
        list_tile(a_flag, a_list, a_count, a_tile, tile, m, True)


@gluon.constexpr_function
def _near(along_k, rows, warps):
    """Return how a tile is read: a warp reads neighbours, along k or along rows."""
    if along_k:
        high = min(warps, rows)
        return gl.BlockedLayout([1, 1], [1, 32], [high, warps // high], [1, 0])
    lanes, high = min(32, rows), max(1, min(warps, rows // 32))
    return gl.BlockedLayout([1, 1], [lanes, 32 // lanes], [high, warps // high], [0, 1])


@gluon.constexpr_function
def _wide(rows, depth, warps):
    """Return how a tile is written: in vectors of 16 bytes along k."""
    lanes = min(32, depth // 8)
    high = max(1, min(warps, rows * lanes // 32))
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [high, warps // high], [1, 0])


@gluon.jit
def _start(matrix, inner, outer_step, inner_step):
    outer = (matrix // inner).to(gl.int64) * outer_step
    return outer + (matrix % inner).to(gl.int64) * inner_step


@gluon.jit
def _clear(words, count):
    """Set words to 0, all programs together."""
    flat: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    for first in range(gl.program_id(0) * 1024, count, gl.num_programs(0) * 1024):
        at = first + gl.arange(0, 1024, flat)
        gl.store(words + at, gl.zeros([1024], gl.int32, flat), mask=at < count)


@gluon.jit
def _read(
    at,
    done,
    i,
    is_row,
    k,
    col,
    pairs,
    DEPTH: gl.constexpr,
    PAIRED: gl.constexpr,
    near: gl.constexpr,
):
    """Return DEPTH of K of rows ``i``, zeros beyond it."""
    j = done + gl.arange(0, DEPTH, gl.SliceLayout(0, near))
    inside = is_row & (j < k)[None, :]
    if PAIRED:
        odd_i, odd_j = (i & 1)[:, None], (j & 1)[None, :]
        at += ((j >> 1).to(gl.int64) * col)[None, :]
        x = gl.load(at + (odd_i ^ odd_j), mask=inside, other=0.0)
        x = gl.where(odd_j > odd_i, -x, x)
    else:
        at += ((j >> pairs).to(gl.int64) * col + (j & pairs))[None, :]
        x = gl.load(at, mask=inside, other=0.0)
    return x


@gluon.jit
def _magnitudes(x):
    """Return the bits of magnitudes, as `judge` wants those of the largest and of the least."""
    bits = magnitude(x)
    return bits, gl.where(bits == 0, MAGNITUDE, bits)


@gluon.jit
def magnitude(x):
    return x.to(gl.int32, bitcast=True) & MAGNITUDE


@gluon.jit
def power(field):
    """Return the power of two of an exponent field."""
    return (field << 23).to(gl.float32, bitcast=True)


@gluon.jit
def row_factor(scale):
    """Return what a row is scaled by, from what C is multiplied by for it at the end."""
    return power(268 - ROW_UNIT - (scale.to(gl.int32, bitcast=True) >> 23))


@gluon.jit
def judge(high, low, threshold, least_field, most_field):
    """Return exponent fields to scale by, and flags, from the bits of magnitudes."""
    field = high >> 23
    safe = gl.maximum(field, least_field)
    safe = gl.where(high == 0, ZERO_FIELD, safe)
    least = low.to(gl.float32, bitcast=True) * power(268 - safe)
    is_far = (high != 0) & ((field < least_field) | (field > most_field))
    is_unsafe = (high >= INFINITY) | is_far | (least < threshold)
    return safe, gl.where(high > INFINITY, UNSAFE + NAN, is_unsafe.to(gl.int32) * UNSAFE)


@gluon.jit
def _write(target, x, row, col, rows, target_row, PARTS: gl.constexpr, wide: gl.constexpr):
    """Store a tile's parts."""
    i = row + gl.arange(0, x.shape[0], gl.SliceLayout(1, wide))
    j = col + gl.arange(0, x.shape[1], gl.SliceLayout(0, wide))
    at = target + (i.to(gl.int64) * target_row)[:, None] + j[None, :]
    inside = (i < rows)[:, None] & (j < target_row)[None, :]
    hi = x.to(gl.float16)
    gl.store(at, gl.convert_layout(hi, wide), mask=inside)
    if PARTS == 2:
        lo = (x - hi.to(gl.float32)).to(gl.float16)
        gl.store(at + rows.to(gl.int64) * target_row, gl.convert_layout(lo, wide), mask=inside)
