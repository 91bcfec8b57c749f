"""Products of float32 with few columns on Hopper (sm_90a), at the speed of memory, in Gluon.

A is read twice: by `split.judge_rows`, since rows are scaled whole; and by `multiply_few_columns`,
which scales and splits it in registers, 64 rows at a time. Of B there is
little, and it is taken as `split.split_pieces` leaves it. The arithmetic and its order, so the
bits, are those of ``hopper_float32``. What is launched is decided in ``few_columns_plan``.

Blocks work as those of ``skinny`` do, on the product transposed: a row of A is one of its columns
of B. The tensor cores compute C = A·B here, 64 rows of A coming from registers.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# mypy: disable-error-code="untyped-decorator, no-untyped-call, call-arg, assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .compile import Variant
from .few_columns_plan import name_of
from .hopper import columns
from .repair import write
from .skinny import (
    SUM,
    Mapped,
    Strided,
    Work,
    allocate_ring,
    multiply_variant,
    produce,
)
from .skinny_table import KERNELS
from .split import PIECE, row_factor

__all__ = ["multiply_few_columns", "variants"]


@gluon.jit
def multiply_few_columns(
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
    tiles_n,
    chains,
    chain_k,
    items,
    a_next_outer,
    a_next_inner,
    b_next_outer,
    b_next_inner,
    alpha,
    beta,
    a_outer,
    a_inner,
    a_row,
    a_col,
    c_outer,
    c_inner,
    c_row,
    c_col,
    TILE_N: gl.constexpr,
    STAGES: gl.constexpr,
    ALONG_K: gl.constexpr,
    MAPPED: gl.constexpr,
):
    """Write C = alpha·A·B + beta·C where neither row nor column is flagged.

    ``b`` maps (matrix, hi or lo, column, k). ``a`` maps (outer, inner, row, k) or, not ALONG_K,
    (outer, inner, k, row); not MAPPED, it is a pointer, and A has the steps ``a_row`` and so on.
    Scales and flags are as `split.judge_rows` and `split.split_pieces` leave them. With ``chains``
    > 1 each ``chain_k`` of K is a result of its own, as `skinny.multiply_skinny` has it.

    Started once `repair.repair` has waited for all of that, it waits for `repair` itself only at
    the end: the two write different elements of C, and a few rows that are repaired take long.
    """
    ring = allocate_ring(b, TILE_N, STAGES, 3 if TILE_N < 64 else 2, ALONG_K, MAPPED)
    work = Work(n, m, k, tiles_n, tiles_m, inner, chains, chain_k, items, TILE_N)
    if MAPPED:
        source = Mapped(a, a_next_outer > 0, a_next_inner > 0, ALONG_K, a.nbytes_per_cta)
    else:
        source = Strided(a, m, k, a_outer, a_inner, a_col, a_row, ALONG_K, 0)
    out = Out(
        c,
        a_scale,
        b_scale,
        a_flag,
        b_flag,
        m,
        n,
        a_next_outer,
        a_next_inner,
        b_next_outer,
        b_next_inner,
        alpha,
        beta,
        c_outer,
        c_inner,
        c_row,
        c_col,
    )
    # Registers are dealt out anew: a producer needs few, and what it leaves holds accumulators.
    # These numbers are those with which nothing spills.
    producer: gl.constexpr = 1 if MAPPED else 4
    element_wise: gl.constexpr = [144, 144, 88] if ALONG_K else [152, 152, 56]
    if TILE_N > 32:
        gl.warp_specialize(
            [
                (_consume, (ring, work, out, 0)),
                (_consume, (ring, work, out, 1)),
                (produce, (b, source, ring, work, b_next_outer, b_next_inner, False)),
            ],
            [4, producer],
            [232, 40] if MAPPED else [216, 80],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (ring, work, out, 0)),
                (_consume, (ring, work, out, 1)),
                (_consume, (ring, work, out, 2)),
                (produce, (b, source, ring, work, b_next_outer, b_next_inner, False)),
            ],
            [4, 4, producer],
            [152, 160, 40] if MAPPED else element_wise,
        )


def variants() -> tuple[Variant, ...]:
    """Return a kernel for each of `skinny_table.KERNELS`, for sm_90a."""
    return tuple(
        multiply_variant(
            name_of(kernel), multiply_few_columns, kernel, "b", "a", {"TILE_N": kernel.tile_m}
        )
        for kernel in KERNELS
    )


@gluon.aggregate
class Out:
    """C, the scales and flags, and all that decides what is written there."""

    c: gl.tensor
    a_scale: gl.tensor
    b_scale: gl.tensor
    a_flag: gl.tensor
    b_flag: gl.tensor
    m: gl.tensor
    n: gl.tensor
    a_next_outer: gl.tensor
    a_next_inner: gl.tensor
    b_next_outer: gl.tensor
    b_next_inner: gl.tensor
    alpha: gl.tensor
    beta: gl.tensor
    c_outer: gl.tensor
    c_inner: gl.tensor
    c_row: gl.tensor
    c_col: gl.tensor

    @gluon.jit
    def of_a(self, outer, inner):
        """Return which matrix of A multiplies."""
        return outer * self.a_next_outer + inner * self.a_next_inner

    @gluon.jit
    def of_b(self, outer, inner):
        return outer * self.b_next_outer + inner * self.b_next_inner

    @gluon.jit
    def scales_of_rows(self, outer, inner, row, layout: gl.constexpr):
        rows = row + gl.arange(0, 64, gl.SliceLayout(1, layout))
        at = self.a_scale + self.of_a(outer, inner) * self.m + rows
        return gl.load(at, mask=rows < self.m, other=1.0)

    @gluon.jit
    def scales_of_piece(self, k, outer, inner, at):
        """Return where that is with which a piece of K is promoted, column by column."""
        piece = self.of_b(outer, inner) * gl.cdiv(k, PIECE) + at // PIECE
        return self.b_scale + piece * self.n

    @gluon.jit
    def write(self, work, ring, outer, inner, chain, col, row):
        """Write the sums of a tile, 16 columns at a time."""
        rows = row + gl.arange(0, 64, gl.SliceLayout(1, SUM))
        is_safe = self.a_flag + self.of_a(outer, inner) * self.m + rows
        is_safe = gl.load(is_safe, mask=rows < self.m, other=1) == 0
        scale = self.scales_of_rows(outer, inner, row, SUM)
        from_row = self.c + outer.to(gl.int64) * self.c_outer + rows.to(gl.int64) * self.c_row
        from_row += (inner * work.chains + chain).to(gl.int64) * self.c_inner
        for i in range(work.TILE_M // 16):
            cols = col + 16 * i + gl.arange(0, 16, gl.SliceLayout(0, SUM))
            flag = self.b_flag + self.of_b(outer, inner) * self.n + cols
            inside = gl.load(flag, mask=cols < self.n, other=1) == 0
            at = from_row[:, None] + (cols.to(gl.int64) * self.c_col)[None, :]
            x = ring.sums.index(i).load(SUM)
            if work.chains == 1:  # otherwise what is scaled is their sum
                x = x * scale[:, None]
            write(at, is_safe[:, None] & inside[None, :], x, self.alpha, self.beta)


@gluon.jit
def _consume(ring, work, out, CONSUMER: gl.constexpr):
    """Multiply every third piece of K, add it to the running sum when it is its turn."""
    operand: gl.constexpr = _operand(ring.TILE_M)
    stage = CONSUMER
    phase = 0
    mine = CONSUMER
    # Nobody gives the first turn.
    turn = 1 if CONSUMER == 0 else 0
    for index in range(gl.program_id(0), work.items, gl.num_programs(0)):
        outer, inner, chain, col, row = work.item(index)
        begin, pieces = work.pieces(chain)
        factor = row_factor(out.scales_of_rows(outer, inner, row, operand))
        for p in range(mine, pieces, ring.CONSUMERS):
            at = out.scales_of_piece(work.k, outer, inner, begin + p * PIECE)
            mbarrier.wait(ring.full.index(stage), phase)
            terms, scales = _multiply_piece(ring, stage, factor, at, col, out.n)
            mbarrier.arrive(ring.empty.index(stage), count=1)
            mbarrier.wait(ring.turn.index(CONSUMER), turn)
            totals = ()
            for i in gl.static_range(ring.TILE_M // 16):
                total = gl.where(p == 0, 0.0, ring.sums.index(i).load(SUM))
                totals += (gl.fma(terms[i], scales[i][None, :], total),)
            for i in gl.static_range(ring.TILE_M // 16):
                ring.sums.index(i).store(totals[i])
            if p == pieces - 1:
                out.write(work, ring, outer, inner, chain, col, row)
            mbarrier.arrive(ring.turn.index((CONSUMER + 1) % ring.CONSUMERS), count=1)
            turn ^= 1
            stage += ring.CONSUMERS
            if stage >= ring.STAGES:
                stage -= ring.STAGES
                phase ^= 1
        mine += gl.cdiv(pieces - mine, ring.CONSUMERS) * ring.CONSUMERS - pieces
    gdc_launch_dependents()
    gdc_wait()


@gluon.jit
def _multiply_piece(ring, stage, factor, scale, col, n):
    """Return A·B over a piece of K, and what each column is promoted with, 16 columns at a time."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ring.TILE_M, 16])
    x = ring.b_tile(stage).load(_operand(ring.TILE_M)) * factor[:, None]
    hi = x.to(gl.float16)
    lo = (x - hi.to(gl.float32)).to(gl.float16)
    term = gl.zeros([64, ring.TILE_M], gl.float32, layout)
    # What is small comes first: the tensor cores cut sums off.
    term = warpgroup_mma(lo, ring.a_tile(stage, 0), term, use_acc=False, is_async=True)
    term = warpgroup_mma(hi, ring.a_tile(stage, 1), term, is_async=True)
    term = warpgroup_mma(hi, ring.a_tile(stage, 0), term, is_async=True)
    scales = ()
    for i in gl.static_range(ring.TILE_M // 16):
        cols = col + 16 * i + gl.arange(0, 16, gl.SliceLayout(0, SUM))
        scales += (gl.load(scale + cols, mask=cols < n, other=0.0),)
    term = warpgroup_mma_wait(0, deps=[term])
    return columns(term, ring.TILE_M // 16), scales


@gluon.constexpr_function
def _operand(columns):
    """Return how four warps hold 64 rows of A for so many columns of B."""
    sums = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])
    return gl.DotOperandLayout(0, sums, 2)
