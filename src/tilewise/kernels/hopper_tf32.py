"""Products of float32 at float16's rate on Hopper (sm_90a), by name, in Gluon: precision="tf32".

`multiply_tf32` and `multiply_any_tf32` take A and B as ``split`` leaves them, the high parts alone,
whole rows of A and whole columns of B scaled by one power of two each: so K is summed as ``hopper``
does, by the same code, and all scales are applied at the end. They differ in how they write C: by
TMA, or element by element with any strides and beta. What is flagged is recomputed after them.

**Order of summation.** That of ``hopper``: a chain is one accumulator over k, 16 terms an
instruction, whatever the tile. How K is cut into chains depends on K alone, and they are added in
order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# mypy: disable-error-code="untyped-decorator, no-untyped-call, call-arg"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from .hopper import STREAMED, Work, accumulator, columns, multiply_tiles
from .pace import Pace
from .repair import write

__all__ = ["multiply_any_tf32", "multiply_tf32"]

CHUNK = gl.constexpr(32)  # columns of float32 in the 128 bytes that shared memory swizzles


@gluon.jit
def multiply_tf32(
    a,
    b,
    c,
    a_scale,
    b_scale,
    progress,
    m,
    n,
    k,
    outer,
    inner,
    a_next_outer,
    a_next_inner,
    b_next_outer,
    b_next_inner,
    group,
    CONSUMERS: gl.constexpr,
    TILE_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Write C = A·B by TMA, K in one chain; flagged rows and columns of it hold anything.

    The maps hold (outer, inner, row, k), B transposed, and C (outer, inner, row, column); along
    batch axes A's next scales are those of ``a_next_outer`` or ``a_next_inner`` matrices on.
    """
    work = Work(m, n, k, inner, outer * inner, gl.to_tensor(1), k, group, 64 * CONSUMERS, TILE_N)
    scales = Scales(a_scale, b_scale, m, n, a_next_outer, a_next_inner, b_next_outer, b_next_inner)
    staging = gl.allocate_shared_memory(gl.float32, [2 * CONSUMERS, 1, 1, 64, CHUNK], c.layout)
    out = Mapped(c, staging, scales)
    pace = Pace(progress, k)
    steps = scales.steps()
    multiply_tiles(a, b, out, work, pace, steps, 1.0, CONSUMERS, STAGES, True, True, False)


@gluon.jit
def multiply_any_tf32(
    a,
    b,
    c,
    a_scale,
    b_scale,
    a_flag,
    b_flag,
    progress,
    m,
    n,
    k,
    chain_k,
    outer,
    inner,
    a_next_outer,
    a_next_inner,
    b_next_outer,
    b_next_inner,
    group,
    alpha,
    beta,
    c_outer,
    c_inner,
    c_row,
    c_col,
    pairs,
    CONSUMERS: gl.constexpr,
    TILE_N: gl.constexpr,
    STAGES: gl.constexpr,
    PROMOTED: gl.constexpr,
):
    """Write C = alpha·A·B + beta·C, in any strides, but for flagged rows and columns.

    PROMOTED adds up chains, of ``chain_k`` of K each; else K is one. ``pairs`` is 1 where columns
    of C are parts of complex numbers, and ``c_col`` leads from one of those to the next.
    """
    work = Work(
        m, n, k, inner, outer * inner, gl.to_tensor(1), chain_k, group, 64 * CONSUMERS, TILE_N
    )
    scales = Scales(a_scale, b_scale, m, n, a_next_outer, a_next_inner, b_next_outer, b_next_inner)
    staging = gl.allocate_shared_memory(
        gl.float32, [CONSUMERS, 64, 64], gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    )
    out = Strided(
        c, staging, scales, a_flag, b_flag, alpha, beta, c_outer, c_inner, c_row, c_col, pairs
    )
    pace = Pace(progress, k)
    steps = scales.steps()
    multiply_tiles(a, b, out, work, pace, steps, 1.0, CONSUMERS, STAGES, True, True, PROMOTED)


@gluon.aggregate
class Scales:
    """What rows and columns of C are multiplied by, and which matrices of A and B have them."""

    a: gl.tensor
    b: gl.tensor
    m: gl.tensor
    n: gl.tensor
    a_next_outer: gl.tensor
    a_next_inner: gl.tensor
    b_next_outer: gl.tensor
    b_next_inner: gl.tensor

    @gluon.jit
    def steps(self):
        """Return whether the next matrix along each batch axis is another one, of A and of B."""
        return (
            gl.minimum(self.a_next_outer, 1),
            gl.minimum(self.a_next_inner, 1),
            gl.minimum(self.b_next_outer, 1),
            gl.minimum(self.b_next_inner, 1),
        )

    @gluon.jit
    def first_row(self, outer, inner):
        """Return the place, in all rows of A, of a matrix's first."""
        return (outer * self.a_next_outer + inner * self.a_next_inner) * self.m

    @gluon.jit
    def first_column(self, outer, inner):
        return (outer * self.b_next_outer + inner * self.b_next_inner) * self.n

    @gluon.jit
    def of_rows(self, outer, inner, row, layout: gl.constexpr):
        i = row + gl.arange(0, 64, layout)
        at = self.a + self.first_row(outer, inner) + i
        return gl.load(at, mask=i < self.m, other=0.0)

    @gluon.jit
    def of_columns(self, outer, inner, col, WIDE: gl.constexpr, layout: gl.constexpr):
        j = col + gl.arange(0, WIDE, layout)
        at = self.b + self.first_column(outer, inner) + j
        return gl.load(at, mask=j < self.n, other=0.0)


@gluon.aggregate
class Mapped:
    """C as TMA writes it, some columns at a time, by way of a consumer's two buffers."""

    c: tma.tensor_descriptor
    staging: gl.shared_memory_descriptor
    scales: Scales

    @gluon.jit
    def write(self, x, outer, inner, piece, row, col, CONSUMER: gl.constexpr):
        layout: gl.constexpr = accumulator(CHUNK, 1)
        of_rows = self.scales.of_rows(outer, inner, row, gl.SliceLayout(1, layout))
        parts = columns(x, x.shape[1] // CHUNK)
        for i in gl.static_range(x.shape[1] // CHUNK):
            at = col + i * CHUNK
            wide = self.scales.of_columns(outer, inner, at, CHUNK, gl.SliceLayout(0, layout))
            buffer = self.staging.index(2 * CONSUMER + i % 2)
            tma.store_wait(1)
            buffer.reshape([64, CHUNK]).store(parts[i] * wide[None, :] * of_rows[:, None])
            fence_async_shared()
            tma.async_store(self.c, [outer, inner, row, at], buffer, cache_policy=STREAMED)

    @gluon.jit
    def finish(self):
        tma.store_wait(0)


@gluon.aggregate
class Strided:
    """C of any strides, written element by element, a warp along a row, by way of shared memory."""

    c: gl.tensor
    staging: gl.shared_memory_descriptor
    scales: Scales
    a_flag: gl.tensor
    b_flag: gl.tensor
    alpha: gl.tensor
    beta: gl.tensor
    c_outer: gl.tensor
    c_inner: gl.tensor
    c_row: gl.tensor
    c_col: gl.tensor
    pairs: gl.tensor

    @gluon.jit
    def write(self, x, outer, inner, piece, row, col, CONSUMER: gl.constexpr):
        held: gl.constexpr = accumulator(64, 1)
        layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
        staging = self.staging.index(CONSUMER)
        slabs = staging.reinterpret(gl.float32, [4, 16, 64], self.staging.layout)
        base = outer.to(gl.int64) * self.c_outer + inner.to(gl.int64) * self.c_inner
        of_rows = self.scales.of_rows(outer, inner, row, gl.SliceLayout(1, held))
        a_flag = self.a_flag + self.scales.first_row(outer, inner)
        b_flag = self.b_flag + self.scales.first_column(outer, inner)
        parts = columns(x, x.shape[1] // 64)
        for part in gl.static_range(x.shape[1] // 64):
            first = col + part * 64
            wide = self.scales.of_columns(outer, inner, first, 64, gl.SliceLayout(0, held))
            staging.store(parts[part] * wide[None, :] * of_rows[:, None])
            j = first + gl.arange(0, 64, gl.SliceLayout(0, layout))
            from_col = (j >> self.pairs).to(gl.int64) * self.c_col + (j & self.pairs)
            j_inside = gl.load(b_flag + j, mask=j < self.scales.n, other=1) == 0
            for slab in range(4):
                i = row + 16 * slab + gl.arange(0, 16, gl.SliceLayout(1, layout))
                i_inside = gl.load(a_flag + i, mask=i < self.scales.m, other=1) == 0
                at = base + (i.to(gl.int64) * self.c_row)[:, None] + from_col[None, :]
                inside = i_inside[:, None] & j_inside[None, :]
                slab_x = slabs.index(slab).load(layout)
                write(self.c + at, inside, slab_x, self.alpha, self.beta)

    @gluon.jit
    def finish(self):
        pass
