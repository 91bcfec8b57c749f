"""Products of float32 with few columns on Hopper (sm_90a), at the speed of memory, in Gluon.

`multiply_thin` takes B as `split.split_pieces` leaves it, and A as it is: with the scales that
`split.split_rows` has found, it scales and splits A in registers. So A is read twice, once for its
scales, and never written. Bits are those of ``hopper_float32``, since the arithmetic is the same in
the same order, on an older instruction of the tensor cores: 16 rows suit a warp.

Nothing is shared: a block is one warp, which holds all that it works on in registers, and loads two
pieces of 64 of K ahead of the one that it multiplies.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# mypy: disable-error-code="untyped-decorator, no-untyped-call, call-arg"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .hopper_float32_table import THIN_M
from .repair import write
from .split import PIECE, power

__all__ = ["multiply_thin"]

ROWS = gl.constexpr(THIN_M)


@gluon.jit
def multiply_thin(
    a,
    b,
    c,
    a_scale,
    b_scale,
    a_flag,
    b_flag,
    m,
    n,
    k,
    inner,
    tiles_m,
    items,
    a_next_outer,
    a_next_inner,
    b_next_outer,
    b_next_inner,
    a_outer,
    a_inner,
    a_row,
    a_col,
    b_depth,
    c_outer,
    c_inner,
    c_row,
    c_col,
    alpha,
    beta,
    TILE_N: gl.constexpr,
    DENSE: gl.constexpr,
):
    """Write C = alpha·A·B + beta·C of no more than TILE_N columns, but for what is flagged.

    ``b`` is (matrix, hi or lo, column, ``b_depth`` of k). Along batch axes A's next matrix is
    ``a_next_outer`` or ``a_next_inner`` on, which counts scales and flags. Where A is DENSE,
    elements lie side by side along k.
    """
    gdc_wait()
    gdc_launch_dependents()
    sums: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    of_a: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        matrix = item // tiles_m
        outer, within = matrix // inner, matrix % inner
        row = item % tiles_m * ROWS
        first = (outer * a_next_outer + within * a_next_inner) * m
        i = row + gl.arange(0, ROWS, gl.SliceLayout(1, of_a))
        # Rows beyond the last are computed like it, and not written.
        i = gl.minimum(i, m - 1)
        a_at = a + outer.to(gl.int64) * a_outer + within.to(gl.int64) * a_inner
        a_at += (i.to(gl.int64) * a_row)[:, None]
        bits = gl.load(a_scale + first + i).to(gl.int32, bitcast=True)
        # What the end multiplies by is 2^(E − 20), and what the beginning does, 2^(14 − E).
        factor = power(268 - ((bits >> 23) + 20))[:, None]
        left = Left(a_at, a_col, k, DENSE)
        second = outer * b_next_outer + within * b_next_inner
        right = Right(
            b + second.to(gl.int64) * 2 * n * b_depth,
            b_scale + second * gl.cdiv(k, PIECE) * n,
            n,
            b_depth,
            TILE_N,
        )
        total = gl.zeros([ROWS, TILE_N], gl.float32, sums)
        x = left.load(0, of_a)
        for piece in range(0, gl.cdiv(k, PIECE), 2):
            # By turns, so that nothing that is still being loaded has to be moved.
            y = left.load(piece + 1, of_a)
            total = _add(total, x * factor, right, piece)
            x = left.load(piece + 2, of_a)
            if piece * PIECE + PIECE < k:
                total = _add(total, y * factor, right, piece + 1)
        i = row + gl.arange(0, ROWS, gl.SliceLayout(1, sums))
        j = gl.arange(0, TILE_N, gl.SliceLayout(0, sums))
        scale = gl.load(a_scale + first + i, mask=i < m, other=0.0)
        safe_row = gl.load(a_flag + first + i, mask=i < m, other=1) == 0
        safe_column = gl.load(b_flag + second * n + j, mask=j < n, other=1) == 0
        at = c + outer.to(gl.int64) * c_outer + within.to(gl.int64) * c_inner
        at += (i.to(gl.int64) * c_row)[:, None] + (j.to(gl.int64) * c_col)[None, :]
        inside = safe_row[:, None] & safe_column[None, :]
        write(at, inside, total * scale[:, None], alpha, beta)


@gluon.aggregate
class Left:
    """A's rows, as float32."""

    at: gl.tensor
    col: gl.tensor
    k: gl.tensor
    DENSE: gl.constexpr

    @gluon.jit
    def load(self, piece, layout: gl.constexpr):
        """Load 64 of K, zeros beyond it."""
        j = gl.arange(0, PIECE, gl.SliceLayout(0, layout))
        inside = (j < self.k - piece * PIECE)[None, :]
        if self.DENSE:
            at = self.at + piece * PIECE + j[None, :]
        else:
            at = self.at + (piece * PIECE + j).to(gl.int64)[None, :] * self.col
        return gl.load(at, mask=inside, other=0.0)


@gluon.aggregate
class Right:
    """B's columns, split, and their pieces' scales."""

    at: gl.tensor
    scale: gl.tensor
    n: gl.tensor
    depth: gl.tensor
    TILE_N: gl.constexpr

    @gluon.jit
    def load(self, piece, layout: gl.constexpr, sums: gl.constexpr):
        """Load hi, lo, and what a piece is promoted with: zeros beyond N."""
        k = gl.arange(0, PIECE, gl.SliceLayout(1, layout))
        j = gl.arange(0, self.TILE_N, gl.SliceLayout(0, layout))
        at = self.at + piece * PIECE + (j * self.depth)[None, :] + k[:, None]
        inside = (j < self.n)[None, :]
        hi = gl.load(at, mask=inside, other=0.0)
        lo = gl.load(at + self.n * self.depth, mask=inside, other=0.0)
        j = gl.arange(0, self.TILE_N, gl.SliceLayout(0, sums))
        return hi, lo, gl.load(self.scale + piece * self.n + j, mask=j < self.n, other=0.0)


@gluon.jit
def _add(total, x, right, piece):
    """Add a piece of K: small products first, since the tensor cores cut sums off."""
    sums: gl.constexpr = total.type.layout
    b_hi, b_lo, scale = right.load(piece, gl.DotOperandLayout(1, sums, 2), sums)
    hi = x.to(gl.float16)
    lo = (x - hi.to(gl.float32)).to(gl.float16)
    term = gl.zeros(total.shape, gl.float32, sums)
    term = mma_v2(lo, b_hi, term)
    term = mma_v2(hi, b_lo, term)
    term = mma_v2(hi, b_hi, term)
    return gl.fma(term, scale[None, :], total)
