"""What goes over memory before and after Hopper's products, in Gluon: packing, adding up.

`pack` copies an operand that TMA cannot read into one that it can; `add_pieces` adds up the pieces
of a long K. Both run at the speed of memory. When they do is decided in ``hopper_plan``.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# mypy: disable-error-code="untyped-decorator, no-untyped-call"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

__all__ = ["add_pieces", "clear", "pack", "write"]


@gluon.jit
def pack(
    source,
    target,
    rows,
    columns,
    inner,
    count,
    source_outer,
    source_inner,
    source_row,
    source_col,
    target_row,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
):
    """Copy ``count`` matrices of any strides into rows of unit stride, ``target_row`` apart.

    Elements are moved as integers. What pads a row of target is set to 0.
    """
    gdc_wait()
    # A warp reads 32 neighbours, whatever their alignment, and writes vectors of 16 bytes.
    near: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, gl.num_warps()], [1, 0])
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, gl.num_warps()], [1, 0])
    tiles_n = gl.cdiv(columns, COLUMNS)
    tiles = gl.cdiv(rows, ROWS) * tiles_n
    for index in range(gl.program_id(0), tiles * count, gl.num_programs(0)):
        matrix = index // tiles
        row = (index % tiles // tiles_n) * ROWS
        col = (index % tiles % tiles_n) * COLUMNS
        i = gl.arange(0, ROWS, gl.SliceLayout(1, near))
        j = gl.arange(0, COLUMNS, gl.SliceLayout(0, near))
        first = source + (matrix // inner).to(gl.int64) * source_outer
        first += (matrix % inner).to(gl.int64) * source_inner
        first += row.to(gl.int64) * source_row + col.to(gl.int64) * source_col
        from_row = first + i.to(gl.int64) * source_row
        is_whole = (row + ROWS <= rows) & (col + COLUMNS <= columns)
        if is_whole & (source_col == 1):
            x = gl.load(from_row[:, None] + j[None, :])
        else:
            inside = (row + i < rows)[:, None] & (col + j < columns)[None, :]
            at = from_row[:, None] + (j.to(gl.int64) * source_col)[None, :]
            x = gl.load(at, mask=inside, other=0)
        i = row + gl.arange(0, ROWS, gl.SliceLayout(1, wide))
        j = col + gl.arange(0, COLUMNS, gl.SliceLayout(0, wide))
        to_row = target + (matrix.to(gl.int64) * rows + i) * target_row
        inside = (i < rows)[:, None] & (j < target_row)[None, :]
        gl.store(to_row[:, None] + j[None, :], gl.convert_layout(x, wide), mask=inside)


@gluon.jit
def clear(progress):
    """Set what `pace.Pace` counts in to zero."""
    gdc_wait()
    gl.store(progress, 0)


@gluon.jit
def add_pieces(
    parts,
    c,
    m,
    n,
    inner,
    pieces,
    alpha,
    beta,
    is_wide,
    part_matrix,
    part_piece,
    part_row,
    c_outer,
    c_inner,
    c_row,
    c_col,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    AT_ONCE: gl.constexpr,
):
    """Write C = alpha·(parts[0] + parts[1] + ...) + beta·C, added in that order."""
    gdc_wait()
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [gl.num_warps(), 1], [1, 0])
    tiles_n = gl.cdiv(n, COLUMNS)
    tiles = gl.cdiv(m, ROWS) * tiles_n
    matrix = gl.program_id(0) // tiles
    tile = gl.program_id(0) % tiles
    rows = (tile // tiles_n) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    cols = (tile % tiles_n) * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    inside = (rows < m)[:, None] & (cols < n)[None, :]
    place = parts + matrix.to(gl.int64) * part_matrix
    place += (rows.to(gl.int64) * part_row)[:, None] + cols[None, :]
    # Adding -0.0 changes no bit, so it stands for pieces that are not there.
    total = gl.full([ROWS, COLUMNS], -0.0, gl.float32, layout)
    for first in range(0, pieces, AT_ONCE):
        for i in gl.static_range(AT_ONCE):
            there = inside & (first + i < pieces)
            total += gl.load(place + (first + i) * part_piece, mask=there, other=-0.0)
    at = (matrix // inner).to(gl.int64) * c_outer + (matrix % inner).to(gl.int64) * c_inner
    at += (rows.to(gl.int64) * c_row)[:, None] + (cols.to(gl.int64) * c_col)[None, :]
    write(c, at, inside, total * alpha, beta, is_wide)


@gluon.jit
def write(c, at, inside, x, beta, is_wide):
    """Write x + beta·C in C's type, or in float32 if that is what C holds."""
    if is_wide:
        c_wide = c.to(gl.pointer_type(gl.float32), bitcast=True)
        if beta != 0.0:
            x = gl.fma(beta, gl.load(c_wide + at, mask=inside, other=0.0), x)
        gl.store(c_wide + at, x, mask=inside)
    else:
        if beta != 0.0:
            x = gl.fma(beta, gl.load(c + at, mask=inside, other=0.0).to(gl.float32), x)
        gl.store(c + at, x.to(c.dtype.element_ty), mask=inside)
