"""Products of float32 with few rows on Hopper (sm_90a), at the speed of memory, in Gluon.

`multiply_skinny` takes A as `split.split_rows` leaves it, and reads B once, as float32, and scales
and splits it in registers as `split.split_pieces` does. Its bits are those of ``hopper_float32``,
since it does the same arithmetic in the same order. Where a long K is cut into chains of sums,
`add_chains` adds them up. What is launched is decided in ``skinny_plan``.

A block of `multiply_skinny` is a producer, which keeps a ring of tiles of A and B in shared memory
full, and three consumers of four warps. Consumers take pieces of 64 of K in turn: what costs time,
reading, scaling, splitting and multiplying a piece, they do side by side, and what has to happen in
the order of K, adding its sum to the running one, they do one after the other, handing the running
sum on through shared memory. The tensor cores compute Cᵀ = Bᵀ·Aᵀ: 64 columns of B are the rows of
an instruction, which it takes from registers, and the few rows of A its columns.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# mypy: disable-error-code="untyped-decorator, no-untyped-call, call-arg, assignment"

from __future__ import annotations

import re
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language import PropagateNan
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .compile import Variant
from .hopper import columns
from .hopper_passes import write
from .skinny_table import KERNELS, SUMMED_TILE, TILE_N, Kernel
from .split import LEAST_PIECE_FIELD, MAGNITUDE, PIECE, judge, power

__all__ = ["add_chains", "multiply_skinny", "multiply_variant", "variants"]

COLUMNS = gl.constexpr(TILE_N)
CONSUMERS = gl.constexpr(3)

ALL = gl.constexpr(PropagateNan.ALL)

# How a consumer holds 16 rows of a sum, of C transposed.
SUM = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))


@gluon.jit
def multiply_skinny(
    a,
    b,
    c,
    a_scale,
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
    threshold,
    most_field,
    alpha,
    beta,
    b_outer,
    b_inner,
    b_row,
    b_col,
    c_outer,
    c_inner,
    c_row,
    c_col,
    TILE_M: gl.constexpr,
    STAGES: gl.constexpr,
    ALONG_K: gl.constexpr,
    MAPPED: gl.constexpr,
):
    """Write C = alpha·A·B + beta·C where neither row nor column is flagged, and flag columns.

    ``a`` maps (matrix, hi or lo, row, k). ``b`` maps (outer, inner, k, column) or, ALONG_K, (outer,
    inner, column, k); not MAPPED, it is a pointer, and B has the steps ``b_row`` and so on. Matrix
    ``outer · a_next_outer + inner · a_next_inner`` of A multiplies; B's flags lie in such order.
    ``threshold`` is the least scaled magnitude and ``most_field`` the largest exponent field of a
    piece that are safe at this K (docs/numerics.md). With ``chains`` > 1 each ``chain_k`` of K is a
    result of its own, without the scale of rows: C then has ``chains`` times as many matrices along
    its inner axis.
    """
    ring = allocate_ring(a, TILE_M, STAGES, CONSUMERS, ALONG_K, MAPPED)
    work = Work(m, n, k, tiles_m, tiles_n, inner, chains, chain_k, items, TILE_M)
    if MAPPED:
        source = Mapped(b, b_next_outer > 0, b_next_inner > 0, ALONG_K, b.nbytes_per_cta)
    else:
        source = Strided(b, n, k, b_outer, b_inner, b_row, b_col, ALONG_K, 0)
    out = Out(
        c,
        a_scale,
        a_flag,
        b_flag,
        a_next_outer,
        a_next_inner,
        b_next_outer,
        b_next_inner,
        threshold,
        most_field,
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
    gl.warp_specialize(
        [
            (_consume, (ring, work, out, 0)),
            (_consume, (ring, work, out, 1)),
            (_consume, (ring, work, out, 2)),
            (produce, (a, source, ring, work, a_next_outer, a_next_inner, True)),
        ],
        [4, 4, producer],
        [152, 160, 40] if MAPPED else element_wise,
    )


@gluon.jit
def add_chains(
    sums,
    c,
    a_scale,
    a_flag,
    b_flag,
    m,
    n,
    inner,
    chains,
    a_next_outer,
    a_next_inner,
    b_next_outer,
    b_next_inner,
    alpha,
    beta,
    sum_matrix,
    sum_chain,
    sum_row,
    c_outer,
    c_inner,
    c_row,
    c_col,
    TILE_M: gl.constexpr,
    TILE_N: gl.constexpr,
    AT_ONCE: gl.constexpr,
):
    """Write C = alpha·(sums[0] + sums[1] + ...) + beta·C, added in that order, unless flagged."""
    gdc_wait()
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [gl.num_warps(), 1], [1, 0])
    tiles_n = gl.cdiv(n, TILE_N)
    tiles = gl.cdiv(m, TILE_M) * tiles_n
    matrix = gl.program_id(0) // tiles
    tile = gl.program_id(0) % tiles
    rows = (tile // tiles_n) * TILE_M + gl.arange(0, TILE_M, gl.SliceLayout(1, layout))
    cols = (tile % tiles_n) * TILE_N + gl.arange(0, TILE_N, gl.SliceLayout(0, layout))
    first = (matrix // inner) * a_next_outer + (matrix % inner) * a_next_inner
    row_is_safe = gl.load(a_flag + first * m + rows, mask=rows < m, other=1) == 0
    scale = gl.load(a_scale + first * m + rows, mask=rows < m, other=0.0)
    first = (matrix // inner) * b_next_outer + (matrix % inner) * b_next_inner
    col_is_safe = gl.load(b_flag + first * n + cols, mask=cols < n, other=1) == 0
    inside = row_is_safe[:, None] & col_is_safe[None, :]
    place = sums + matrix.to(gl.int64) * sum_matrix
    place += (rows.to(gl.int64) * sum_row)[:, None] + cols[None, :]
    # Adding -0.0 changes no bit, so it stands for chains that are not there.
    total = gl.full([TILE_M, TILE_N], -0.0, gl.float32, layout)
    for first in range(0, chains, AT_ONCE):
        for i in gl.static_range(AT_ONCE):
            there = inside & (first + i < chains)
            total += gl.load(place + (first + i) * sum_chain, mask=there, other=-0.0)
    at = (matrix // inner).to(gl.int64) * c_outer + (matrix % inner).to(gl.int64) * c_inner
    at += (rows.to(gl.int64) * c_row)[:, None] + (cols.to(gl.int64) * c_col)[None, :]
    write(c, at, inside, total * scale[:, None] * alpha, beta, True)


def variants() -> tuple[Variant, ...]:
    """Return every kernel of `skinny_table.KERNELS`, and what adds up chains, for sm_90a."""
    tile = {"TILE_M": SUMMED_TILE[0], "TILE_N": SUMMED_TILE[1], "AT_ONCE": 16}
    added = _variant("add_chains", add_chains, {}, tile)
    multiplied = [
        multiply_variant(kernel.name, multiply_skinny, kernel, "a", "b", {"TILE_M": kernel.tile_m})
        for kernel in KERNELS
    ]
    return (*multiplied, added)


def multiply_variant(
    name: str, function: Any, kernel: Kernel, few: str, many: str, constexprs: dict[str, Any]
) -> Variant:
    """Return what the compiler is told of a kernel that multiplies.

    Its argument ``few`` maps the operand that is in parts, and ``many`` is the one that is read as
    it is.
    """

    def tensor_map(dtype: str, element: Any, rows: int) -> str:
        layout = gl.NVMMASharedLayout.get_default_for([1, 1, rows, 64], element)
        return f"tensordesc<{dtype}[1,1,{rows},64],{layout!r}>"

    return _variant(
        name,
        function,
        {
            few: tensor_map("fp16", gl.float16, kernel.tile_m),
            many: tensor_map("fp32", gl.float32, 64) if kernel.is_mapped else "*fp32",
        },
        {
            **constexprs,
            "STAGES": kernel.stages,
            "ALONG_K": kernel.along_k,
            "MAPPED": kernel.is_mapped,
        },
    )


@gluon.aggregate
class Work:
    """The tiles of all matrices and chains of K, in the order in which blocks take them."""

    m: gl.tensor
    n: gl.tensor
    k: gl.tensor
    tiles_m: gl.tensor
    tiles_n: gl.tensor
    inner: gl.tensor
    chains: gl.tensor
    chain_k: gl.tensor
    items: gl.tensor
    TILE_M: gl.constexpr

    @gluon.jit
    def item(self, index):
        """Outer and inner batch index, chain, first row and first column of an item.

        Those that read the same part of B follow each other, so that it comes from memory once.
        """
        row = (index % self.tiles_m) * self.TILE_M
        index = index // self.tiles_m
        col = (index % self.tiles_n) * COLUMNS
        index = index // self.tiles_n
        chain = index % self.chains
        index = index // self.chains
        return index // self.inner, index % self.inner, chain, row, col

    @gluon.jit
    def pieces(self, chain):
        """Return where a chain begins, and how many pieces it has."""
        begin = chain * self.chain_k
        return begin, gl.cdiv(gl.minimum(self.chain_k, self.k - begin), PIECE)


@gluon.aggregate
class Ring:
    """What producer and consumers share: tiles, who may touch them, and the running sum."""

    a: gl.shared_memory_descriptor
    b: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    turn: gl.shared_memory_descriptor
    sums: gl.shared_memory_descriptor
    flags: gl.shared_memory_descriptor
    STAGES: gl.constexpr
    CONSUMERS: gl.constexpr
    TILE_M: gl.constexpr
    ALONG_K: gl.constexpr

    @gluon.jit
    def a_tile(self, stage, PART: gl.constexpr):
        """Hi (0) or lo (1) of A, as (k, rows)."""
        return self.a.index(2 * stage + PART).reshape([self.TILE_M, PIECE]).permute((1, 0))

    @gluon.jit
    def b_tile(self, stage):
        """B as (columns, k)."""
        tile = self.b.index(stage).reshape([64, 64])
        return tile if self.ALONG_K else tile.permute((1, 0))


@gluon.jit
def allocate_ring(
    a,
    TILE_M: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    ALONG_K: gl.constexpr,
    MAPPED: gl.constexpr,
):
    """Take a block's shared memory; ``a`` maps the parts of A."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        # What copies element by element arrives thread by thread.
        mbarrier.init(full.index(i), count=1 if MAPPED else 129)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(turn.index(i), count=1)
    wide: gl.constexpr = gl.NVMMASharedLayout(128, 32, rank=4)
    # Swizzled, so that threads that hold neighbouring rows of an accumulator use different banks.
    sums: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 2, [1, 0])
    return Ring(
        gl.allocate_shared_memory(a.dtype, [2 * STAGES, 1, 1, TILE_M, PIECE], a.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, 1, 64, 64], wide),
        full,
        empty,
        turn,
        gl.allocate_shared_memory(gl.float32, [TILE_M // 16, COLUMNS, 16], sums),
        gl.allocate_shared_memory(gl.int32, [COLUMNS], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        STAGES,
        CONSUMERS,
        TILE_M,
        ALONG_K,
    )


@gluon.aggregate
class Mapped:
    """B as TMA reads it."""

    b: tma.tensor_descriptor
    has_outer: gl.tensor
    has_inner: gl.tensor
    ALONG_K: gl.constexpr
    NBYTES: gl.constexpr

    @gluon.jit
    def load(self, outer, inner, col, k, full, tile):
        outer = gl.where(self.has_outer, outer, 0)
        inner = gl.where(self.has_inner, inner, 0)
        at = [outer, inner, col, k] if self.ALONG_K else [outer, inner, k, col]
        tma.async_load(self.b, at, full, tile)


@gluon.aggregate
class Strided:
    """B of any strides, copied element by element, a warp along the axis of the smaller step."""

    b: gl.tensor
    n: gl.tensor
    k: gl.tensor
    outer: gl.tensor
    inner: gl.tensor
    row: gl.tensor
    col: gl.tensor
    ALONG_K: gl.constexpr
    NBYTES: gl.constexpr

    @gluon.jit
    def load(self, outer, inner, col, k, full, tile):
        layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
        far = gl.arange(0, 8, gl.SliceLayout(1, layout))
        near = gl.arange(0, 64, gl.SliceLayout(0, layout))
        source = self.b + outer.to(gl.int64) * self.outer + inner.to(gl.int64) * self.inner
        rows, cols = k + far, col + near
        if self.ALONG_K:
            rows, cols = k + near, col + far
        for i in gl.static_range(8):  # in slices, whose addresses the registers hold
            from_row, from_col = rows.to(gl.int64) * self.row, cols.to(gl.int64) * self.col
            if self.ALONG_K:
                at = from_row[None, :] + from_col[:, None]
                inside = (rows < self.k)[None, :] & (cols < self.n)[:, None]
                cols += 8
            else:
                at = from_row[:, None] + from_col[None, :]
                inside = (rows < self.k)[:, None] & (cols < self.n)[None, :]
                rows += 8
            part = tile.reshape([64, 64]).slice(8 * i, 8, dim=0)
            async_copy.async_load(part, source + at, mask=inside)
        async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.aggregate
class Out:
    """C, the flags, and all that decides what is written there."""

    c: gl.tensor
    a_scale: gl.tensor
    a_flag: gl.tensor
    b_flag: gl.tensor
    a_next_outer: gl.tensor
    a_next_inner: gl.tensor
    b_next_outer: gl.tensor
    b_next_inner: gl.tensor
    threshold: gl.tensor
    most_field: gl.tensor
    alpha: gl.tensor
    beta: gl.tensor
    c_outer: gl.tensor
    c_inner: gl.tensor
    c_row: gl.tensor
    c_col: gl.tensor

    @gluon.jit
    def write(self, work, ring, flags, outer, inner, chain, row, col):
        """Write the sums of a tile, 16 rows at a time, and add the flags of its columns."""
        cols = col + gl.arange(0, COLUMNS, gl.SliceLayout(1, SUM))
        first = (outer * self.b_next_outer + inner * self.b_next_inner) * work.n
        gl.atomic_or(self.b_flag + first + cols, flags, mask=(cols < work.n) & (flags != 0))
        first = (outer * self.a_next_outer + inner * self.a_next_inner) * work.m
        from_col = self.c + outer.to(gl.int64) * self.c_outer + cols.to(gl.int64) * self.c_col
        from_col += (inner * work.chains + chain).to(gl.int64) * self.c_inner
        for i in range(work.TILE_M // 16):
            rows = row + 16 * i + gl.arange(0, 16, gl.SliceLayout(0, SUM))
            scale = gl.load(self.a_scale + first + rows, mask=rows < work.m, other=0.0)
            is_safe = gl.load(self.a_flag + first + rows, mask=rows < work.m, other=1) == 0
            inside = ((cols < work.n) & (flags == 0))[:, None] & is_safe[None, :]
            at = from_col[:, None] + (rows.to(gl.int64) * self.c_row)[None, :]
            x = ring.sums.index(i).load(SUM)
            if work.chains == 1:  # otherwise what is scaled is their sum
                x = x * scale[None, :]
            write(at, 0, inside, x * self.alpha, self.beta, True)


@gluon.jit
def produce(a, source, ring, work, a_next_outer, a_next_inner, WAITS: gl.constexpr):
    """Load tiles of A and B, one stage after the other, wherever a stage is free.

    Unless it WAITS, A is there when the kernel starts, as B is.
    """
    nbytes: gl.constexpr = 2 * a.nbytes_per_cta + source.NBYTES
    # The first tiles of B are on their way while A is still being split.
    outer, inner, chain, row, col = work.item(gl.program_id(0))
    begin, pieces = work.pieces(chain)
    for p in range(gl.minimum(pieces, ring.STAGES)):
        mbarrier.expect(ring.full.index(p), nbytes)
        source.load(outer, inner, col, begin + p * PIECE, ring.full.index(p), ring.b.index(p))
    if WAITS:
        gdc_wait()
    stage = 0
    phase = 1
    for index in range(gl.program_id(0), work.items, gl.num_programs(0)):
        outer, inner, chain, row, col = work.item(index)
        begin, pieces = work.pieces(chain)
        for p in range(pieces):
            full = ring.full.index(stage)
            k = begin + p * PIECE
            if (index != gl.program_id(0)) | (p >= ring.STAGES):
                mbarrier.wait(ring.empty.index(stage), phase)
                mbarrier.expect(full, nbytes)
                source.load(outer, inner, col, k, full, ring.b.index(stage))
            matrix = outer * a_next_outer + inner * a_next_inner
            for part in gl.static_range(2):
                tma.async_load(a, [matrix, part, row, k], full, ring.a.index(2 * stage + part))
            stage += 1
            if stage == ring.STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def _consume(ring, work, out, CONSUMER: gl.constexpr):
    """Multiply every third piece of K, add it to the running sum when it is its turn."""
    stage = CONSUMER
    phase = 0
    mine = CONSUMER
    # Nobody gives the first turn.
    turn = 1 if CONSUMER == 0 else 0
    for index in range(gl.program_id(0), work.items, gl.num_programs(0)):
        outer, inner, chain, row, col = work.item(index)
        _, pieces = work.pieces(chain)
        for p in range(mine, pieces, CONSUMERS):
            mbarrier.wait(ring.full.index(stage), phase)
            terms, scale, flags = _multiply_piece(ring, stage, out.threshold, out.most_field)
            mbarrier.arrive(ring.empty.index(stage), count=1)
            mbarrier.wait(ring.turn.index(CONSUMER), turn)
            totals = ()
            for i in gl.static_range(ring.TILE_M // 16):
                total = gl.where(p == 0, 0.0, ring.sums.index(i).load(SUM))
                totals += (gl.fma(terms[i], scale[:, None], total),)
            flags |= gl.where(p == 0, 0, ring.flags.load(gl.SliceLayout(1, SUM)))
            for i in gl.static_range(ring.TILE_M // 16):
                ring.sums.index(i).store(totals[i])
            ring.flags.store(flags)
            if p == pieces - 1:
                out.write(work, ring, flags, outer, inner, chain, row, col)
            mbarrier.arrive(ring.turn.index((CONSUMER + 1) % CONSUMERS), count=1)
            turn ^= 1
            stage += CONSUMERS
            if stage >= ring.STAGES:
                stage -= ring.STAGES
                phase ^= 1
        mine += gl.cdiv(pieces - mine, CONSUMERS) * CONSUMERS - pieces
    gdc_launch_dependents()


@gluon.jit
def _multiply_piece(ring, stage, threshold, most_field):
    """Return Bᵀ·Aᵀ over a piece of K, what each column of B is multiplied by, and its flags."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ring.TILE_M, 16])
    x = ring.b_tile(stage).load(gl.DotOperandLayout(0, layout, 2))
    high = gl.reduce(gl.abs(x), 1, _larger).to(gl.int32, bitcast=True)
    # Twice the magnitude less one: as unsigned integers, zero is above all others.
    rank = gl.reduce(x.to(gl.uint32, bitcast=True) * 2 - 1, 1, _smaller)
    low = gl.where(high == 0, MAGNITUDE, ((rank + 1) >> 1).to(gl.int32, bitcast=True))
    field, flags = judge(high, low, threshold, LEAST_PIECE_FIELD, most_field)
    x = x * power(268 - field)[:, None]
    hi = x.to(gl.float16)
    lo = (x - hi.to(gl.float32)).to(gl.float16)
    term = gl.zeros([COLUMNS, ring.TILE_M], gl.float32, layout)
    # What is small comes first: the tensor cores cut sums off.
    term = warpgroup_mma(hi, ring.a_tile(stage, 1), term, use_acc=False, is_async=True)
    term = warpgroup_mma(lo, ring.a_tile(stage, 0), term, is_async=True)
    term = warpgroup_mma(hi, ring.a_tile(stage, 0), term, is_async=True)
    term = warpgroup_mma_wait(0, deps=[term])
    scale = gl.convert_layout(power(field - 8), gl.SliceLayout(1, SUM), assert_trivial=True)
    flags = gl.convert_layout(flags, gl.SliceLayout(1, SUM), assert_trivial=True)
    return columns(term, ring.TILE_M // 16), scale, flags


@gluon.jit
def _larger(x, y):
    return gl.maximum(x, y, propagate_nan=ALL)


@gluon.jit
def _smaller(x, y):
    return gl.minimum(x, y)


def _variant(
    name: str, function: Any, types: dict[str, str], constexprs: dict[str, Any]
) -> Variant:
    """Describe a kernel by its pointers; other arguments are told by their names."""
    kinds = {
        r"[abc]_(outer|inner|row|col)|sum_\w+": "i64",
        r"[ab]_flag": "*i32",
        r"c|sums|[ab]_scale": "*fp32",
        r"alpha|beta|threshold": "fp32",
    }
    signature = {}
    for argument in function.arg_names:
        if argument not in constexprs:
            told = (kind for names, kind in kinds.items() if re.fullmatch(names, argument))
            signature[argument] = types.get(argument) or next(told, "i32")
    return Variant(
        name=name,
        function=function,
        compiler="gluon",
        signature=signature,
        constexprs=constexprs,
        # An addition fused to a product rounds once, and then bits would be the compiler's choice.
        options={"num_warps": 4, "enable_fp_fusion": False, "launch_pdl": True},
        targets=("sm_90a",),
    )
