"""Products of bfloat16 and float16 on Hopper (sm_90a), in Gluon.

`multiply` and `multiply_any` differ in how they write C: through shared memory by the copy engine
(TMA), or element by element with any strides, beta and result type. What runs before and after them
is in ``hopper_passes``; which kernel runs when, with which tiles, in ``hopper_plan``.

A block is one producer warp, which keeps a ring of tiles of A and B in shared memory full, and one
to three consumers of four warps, each of which multiplies 64 rows of the tile by wgmma and writes
them. Blocks stay, one on each multiprocessor, and take one tile of C after the other; while
consumers write one, the producer already loads the next. Two blocks can be a pair, a cluster that
computes twice the rows: each consumer has 64 in either block, and what the first block loads of B
arrives in both, which halves what the L2 cache is asked for it.

**Order of summation.** Within a chain, C[i, j] is summed by one accumulator over k, 16 terms an
instruction, whatever the tile; so all kernels agree in every bit. How K is cut into chains depends
on K alone, and their sums are added in order, by `multiply_any` or by `add_pieces`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# mypy: disable-error-code="untyped-decorator, no-untyped-call, call-arg"

from __future__ import annotations

import re
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    CachePolicy,
    FractionalEvictionPolicy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .compile import Variant
from .hopper_passes import add_pieces, clear, pack, write
from .hopper_table import KERNELS, PACKED_TILE, SUMMED_TILE, Kernel
from .pace import Pace

__all__ = ["multiply", "multiply_any", "multiply_tiles", "variants"]

# 64 elements of 16 bits are 128 bytes: the widest row that shared memory swizzles.
TILE_K = gl.constexpr(64)

# A result that fills the L2 cache pushes operands out of it, so large tiles ask to be evicted
# first: 1 to 2.7 % at 8192 and 16384.
STREAMED = gl.constexpr(CachePolicy(l2=FractionalEvictionPolicy("evict_first", 1.0)))


@gluon.jit
def multiply(
    a,
    b,
    c,
    progress,
    m,
    n,
    k,
    outer,
    inner,
    a_outer,
    a_inner,
    b_outer,
    b_inner,
    group,
    alpha,
    CONSUMERS: gl.constexpr,
    TILE_N: gl.constexpr,
    STAGES: gl.constexpr,
    A_ALONG_K: gl.constexpr,
    B_ALONG_K: gl.constexpr,
):
    """Write C = alpha·A·B by TMA, K in one chain.

    The maps hold (outer, inner, rows, columns); A is m×k or, not A_ALONG_K, k×m; B is n×k or k×n.
    ``a_outer`` and its like are 1, or 0 where an operand has one matrix for all of a batch axis.
    """
    rows: gl.constexpr = 64 * gl.num_ctas()
    work = Work(m, n, k, inner, outer * inner, gl.to_tensor(1), k, group, rows * CONSUMERS, TILE_N)
    buffers: gl.constexpr = min(2, TILE_N // 64)
    staging = gl.allocate_shared_memory(c.dtype, [buffers * CONSUMERS, 1, 1, rows, 64], c.layout)
    policy: gl.constexpr = STREAMED if CONSUMERS * TILE_N >= 384 else None
    out = Mapped(c, staging, buffers, policy)
    steps = (a_outer, a_inner, b_outer, b_inner)
    pace = Pace(progress, k)
    multiply_tiles(
        a, b, out, work, pace, steps, alpha, CONSUMERS, STAGES, A_ALONG_K, B_ALONG_K, False
    )


@gluon.jit
def multiply_any(
    a,
    b,
    c,
    progress,
    m,
    n,
    k,
    outer,
    inner,
    a_outer,
    a_inner,
    b_outer,
    b_inner,
    pieces,
    piece_k,
    group,
    alpha,
    beta,
    is_wide,
    c_outer,
    c_inner,
    c_piece,
    c_row,
    c_col,
    CONSUMERS: gl.constexpr,
    TILE_N: gl.constexpr,
    STAGES: gl.constexpr,
    A_ALONG_K: gl.constexpr,
    B_ALONG_K: gl.constexpr,
    PROMOTED: gl.constexpr,
):
    """Write C = alpha·A·B + beta·C, of the operands' type or (``is_wide``) float32, any strides.

    With ``pieces`` > 1 each piece of ``piece_k`` of K is a result of its own, ``c_piece`` elements
    on. PROMOTED adds up the pieces here instead: ``pieces`` is 1, and each ``piece_k`` of K is a
    chain.
    """
    work = Work(m, n, k, inner, outer * inner, pieces, piece_k, group, 64 * CONSUMERS, TILE_N)
    chunk: gl.constexpr = min(64, TILE_N)
    staging = gl.allocate_shared_memory(
        gl.float32, [CONSUMERS, 64, chunk], gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    )
    out = Strided(c, staging, m, n, beta, is_wide, c_outer, c_inner, c_piece, c_row, c_col)
    steps = (a_outer, a_inner, b_outer, b_inner)
    pace = Pace(progress, k)
    multiply_tiles(
        a, b, out, work, pace, steps, alpha, CONSUMERS, STAGES, A_ALONG_K, B_ALONG_K, PROMOTED
    )


def variants() -> tuple[Variant, ...]:
    """Return every kernel of `hopper_table.KERNELS`, and those around them, for sm_90a."""
    passes = [
        _variant("clear", clear, {}, {}),
        _pass_variant("pack_16", pack, "i16", PACKED_TILE),
    ]
    for dtype in ("bf16", "fp16"):
        passes.append(_pass_variant(f"add_pieces_{dtype}", add_pieces, dtype, SUMMED_TILE))
    return (*(_multiply_variant(kernel) for kernel in KERNELS), *passes)


@gluon.aggregate
class Work:
    """The tiles of all matrices and pieces of K, in the order in which blocks take them."""

    m: gl.tensor
    n: gl.tensor
    k: gl.tensor
    inner: gl.tensor
    matrices: gl.tensor
    pieces: gl.tensor
    piece_k: gl.tensor
    group: gl.tensor
    TILE_M: gl.constexpr
    TILE_N: gl.constexpr

    @gluon.jit
    def count(self):
        tiles = gl.cdiv(self.m, self.TILE_M) * gl.cdiv(self.n, self.TILE_N)
        return tiles * self.matrices * self.pieces

    @gluon.jit
    def item(self, index):
        """Outer and inner batch index, piece, first row and first column of an item.

        ``group`` rows of tiles are walked column by column, so that what runs at one time is nearly
        square and its operands fit into the L2 cache.
        """
        tiles_m = gl.cdiv(self.m, self.TILE_M)
        tiles_n = gl.cdiv(self.n, self.TILE_N)
        tile = index % (tiles_m * tiles_n)
        slab = index // (tiles_m * tiles_n)
        first = tile // (self.group * tiles_n) * self.group
        height = gl.minimum(tiles_m - first, self.group)
        within = tile % (self.group * tiles_n)
        row = (first + within % height) * self.TILE_M
        col = (within // height) * self.TILE_N
        matrix = slab // self.pieces
        return matrix // self.inner, matrix % self.inner, slab % self.pieces, row, col

    @gluon.jit
    def span(self, piece):
        """Return the part of K that is a piece."""
        begin = piece * self.piece_k
        return begin, gl.minimum(begin + self.piece_k, self.k)


@gluon.aggregate
class Ring:
    """Tiles of A and B on their way from the producer to the consumers, and who may touch them.

    Of a pair, each block has its own ``full`` and ``empty``; what the first one loads for both
    waits for ``both``, which is one barrier, that of the first.
    """

    a: gl.shared_memory_descriptor
    b: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    both: gl.shared_memory_descriptor
    CONSUMERS: gl.constexpr
    STAGES: gl.constexpr
    A_ALONG_K: gl.constexpr
    B_ALONG_K: gl.constexpr

    @gluon.jit
    def a_tile(self, stage, CONSUMER: gl.constexpr):
        """A consumer's rows of A, as (rows, k)."""
        tile = self.a.index(stage * self.CONSUMERS + CONSUMER)
        if self.A_ALONG_K:
            tile = tile.reshape([64 * gl.num_ctas(), TILE_K])
        else:
            tile = tile.reshape([TILE_K, 64 * gl.num_ctas()]).permute((1, 0))
        return tile

    @gluon.jit
    def b_tile(self, stage):
        """B as (k, columns)."""
        tile = self.b.index(stage).reshape([self.b.shape[3], self.b.shape[4]])
        return tile.permute((1, 0)) if self.B_ALONG_K else tile

    @gluon.jit
    def free(self, stage, pred):
        """Let go of a stage; every consumer does."""
        mbarrier.arrive(self.empty.index(stage), count=1, pred=pred)
        if gl.num_ctas() > 1:
            mbarrier.arrive(self.both.index(stage), count=1, pred=pred)


@gluon.aggregate
class Mapped:
    """C as TMA writes it: in chunks of columns, by way of a consumer's buffers in turn."""

    c: tma.tensor_descriptor
    staging: gl.shared_memory_descriptor
    BUFFERS: gl.constexpr
    POLICY: gl.constexpr

    @gluon.jit
    def write(self, x, outer, inner, piece, row, col, CONSUMER: gl.constexpr):
        chunk: gl.constexpr = self.c.block_shape[3]
        parts = columns(x.to(self.c.dtype), x.shape[1] // chunk)
        for i in gl.static_range(x.shape[1] // chunk):
            buffer = self.staging.index(self.BUFFERS * CONSUMER + i % self.BUFFERS)
            tma.store_wait(self.BUFFERS - 1)
            buffer.reshape([x.shape[0], chunk]).store(parts[i])
            fence_async_shared()
            at = [outer, inner, row, col + i * chunk]
            tma.async_store(self.c, at, buffer, cache_policy=self.POLICY)

    @gluon.jit
    def finish(self):
        tma.store_wait(0)


@gluon.aggregate
class Strided:
    """C of any strides, written element by element, a warp along a row.

    A chunk of columns goes through shared memory, from where it is taken in a loop: unrolled over
    the accumulator's registers, the addresses alone would spill.
    """

    c: gl.tensor
    staging: gl.shared_memory_descriptor
    m: gl.tensor
    n: gl.tensor
    beta: gl.tensor
    is_wide: gl.tensor
    c_outer: gl.tensor
    c_inner: gl.tensor
    c_piece: gl.tensor
    c_row: gl.tensor
    c_col: gl.tensor

    @gluon.jit
    def write(self, x, outer, inner, piece, row, col, CONSUMER: gl.constexpr):
        chunk: gl.constexpr = self.staging.shape[2]
        layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
        staging = self.staging.index(CONSUMER)
        slabs = staging.reinterpret(gl.float32, [4, 16, chunk], self.staging.layout)
        base = outer.to(gl.int64) * self.c_outer + inner.to(gl.int64) * self.c_inner
        base += piece.to(gl.int64) * self.c_piece
        parts = columns(x, x.shape[1] // chunk)
        for i in gl.static_range(x.shape[1] // chunk):
            staging.store(parts[i])
            cols = col + i * chunk + gl.arange(0, chunk, gl.SliceLayout(0, layout))
            for j in range(4):
                rows = row + 16 * j + gl.arange(0, 16, gl.SliceLayout(1, layout))
                at = (base + rows.to(gl.int64) * self.c_row)[:, None]
                at += (cols.to(gl.int64) * self.c_col)[None, :]
                inside = (rows < self.m)[:, None] & (cols < self.n)[None, :]
                write(self.c, at, inside, slabs.index(j).load(layout), self.beta, self.is_wide)

    @gluon.jit
    def finish(self):
        pass


@gluon.jit
def multiply_tiles(
    a,
    b,
    out,
    work,
    pace,
    steps,
    alpha,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    A_ALONG_K: gl.constexpr,
    B_ALONG_K: gl.constexpr,
    PROMOTED: gl.constexpr,
):
    """Divide a block's warps into the producer and the consumers.

    ``out`` has what a consumer calls with its part of a tile, ``write``, and ``finish`` at the end.
    """
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    both = empty
    if gl.num_ctas() > 1:
        both = mbarrier.allocate_mbarrier(batch=STAGES, two_ctas=True)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
        if gl.num_ctas() > 1:
            mbarrier.init(both.index(i), count=CONSUMERS)  # of each block
    a_rows: gl.constexpr = max(64, a.block_shape[2])
    b_rows: gl.constexpr = b.block_shape[2]
    b_columns: gl.constexpr = b.block_shape[3]
    ring = Ring(
        gl.allocate_shared_memory(
            a.dtype, [STAGES * CONSUMERS, 1, 1, a_rows, a.block_shape[3]], a.layout
        ),
        gl.allocate_shared_memory(b.dtype, [STAGES, 1, 1, b_rows, b_columns], b.layout),
        full,
        empty,
        both,
        CONSUMERS,
        STAGES,
        A_ALONG_K,
        B_ALONG_K,
    )
    # Registers are dealt out anew: a producer needs few, and what it leaves holds accumulators.
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_consume, (ring, work, out, alpha, 0, PROMOTED)),
                (_produce, (a, b, ring, work, pace, steps, PROMOTED)),
            ],
            [1],
            [40],
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (ring, work, out, alpha, 0, PROMOTED)),
                (_consume, (ring, work, out, alpha, 1, PROMOTED)),
                (_produce, (a, b, ring, work, pace, steps, PROMOTED)),
            ],
            [4, 1],
            [232, 40],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (ring, work, out, alpha, 0, PROMOTED)),
                (_consume, (ring, work, out, alpha, 1, PROMOTED)),
                (_consume, (ring, work, out, alpha, 2, PROMOTED)),
                (_produce, (a, b, ring, work, pace, steps, PROMOTED)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )


@gluon.jit
def _produce(a, b, ring, work, pace, steps, PROMOTED: gl.constexpr):
    """Load tiles of A and B, one stage after the other, wherever a stage is free."""
    gdc_wait()
    a_outer, a_inner, b_outer, b_inner = steps
    stage = 0
    phase = 1
    patience = pace.patience()
    for index in range(gl.program_id(0), work.count(), gl.num_programs(0)):
        outer, inner, piece, row, col = work.item(index)
        begin, end = work.span(piece)
        if PROMOTED:
            end = work.k
        for k in range(begin, end, TILE_K):
            patience = pace.begin(index, k, patience)
            full = ring.full.index(stage)
            mbarrier.wait(ring.empty.index(stage), phase)
            if gl.num_ctas() > 1:
                mbarrier.wait(ring.both.index(stage), phase)
            mbarrier.expect(full, ring.CONSUMERS * a.nbytes_per_cta + b.nbytes_per_cta)
            for i in gl.static_range(ring.CONSUMERS):
                first = row + 64 * gl.num_ctas() * i
                at = [outer * a_outer, inner * a_inner, first, k]
                if not ring.A_ALONG_K:
                    at = [outer * a_outer, inner * a_inner, k, first]
                tile = ring.a.index(stage * ring.CONSUMERS + i)
                # Rows that a short tile lacks stay as they are: they reach no row that is written.
                if a.block_shape[2] < 64:
                    tile = tile.slice(0, a.block_shape[2], dim=2)
                tma.async_load(a, at, full, tile)
            at = [outer * b_outer, inner * b_inner, col, k]
            if not ring.B_ALONG_K:
                at = [outer * b_outer, inner * b_inner, k, col]
            tma.async_load(b, at, full, ring.b.index(stage), multicast=gl.num_ctas() > 1)
            stage, phase = next_stage(stage, phase, ring.STAGES)
    pace.finish(work.count(), patience)


@gluon.jit
def _consume(ring, work, out, alpha, CONSUMER: gl.constexpr, PROMOTED: gl.constexpr):
    """Multiply 64 rows of each tile, in each block, and write them."""
    gdc_wait()
    stage = 0
    phase = 0
    for index in range(gl.program_id(0), work.count(), gl.num_programs(0)):
        outer, inner, piece, row, col = work.item(index)
        begin, end = work.span(piece)
        total, stage, phase = _chain(ring, work.TILE_N, stage, phase, begin, end, CONSUMER)
        if PROMOTED:
            for i in range(1, gl.cdiv(work.k, work.piece_k)):
                begin, end = work.span(i)
                term, stage, phase = _chain(ring, work.TILE_N, stage, phase, begin, end, CONSUMER)
                total += term
        row += 64 * gl.num_ctas() * CONSUMER
        out.write(total * alpha, outer, inner, piece, row, col, CONSUMER)
    gdc_launch_dependents()
    out.finish()


@gluon.jit
def _chain(ring, TILE_N: gl.constexpr, stage, phase, begin, end, CONSUMER: gl.constexpr):
    """Sum the products of begin <= k < end on the tensor cores; return the sum, stage, phase."""
    layout: gl.constexpr = accumulator(TILE_N, gl.num_ctas())
    total = gl.zeros([64 * gl.num_ctas(), TILE_N], gl.float32, layout)
    last = 0
    for k in range(begin, end, TILE_K):
        mbarrier.wait(ring.full.index(stage), phase)
        a = ring.a_tile(stage, CONSUMER)
        total = warpgroup_mma(a, ring.b_tile(stage), total, is_async=True)
        # One step stays in flight; the step before it has read its stage.
        total = warpgroup_mma_wait(1, deps=[total])
        ring.free(last, k > begin)
        last = stage
        stage, phase = next_stage(stage, phase, ring.STAGES)
    total = warpgroup_mma_wait(0, deps=[total])
    ring.free(last, end > begin)
    return total, stage, phase


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.constexpr_function
def accumulator(COLUMNS, BLOCKS):
    """How four warps of each block of a cluster hold 64 rows of a sum."""
    rows = [[1, 0]] if BLOCKS > 1 else []
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16], cga_layout=rows)


@gluon.jit
def columns(x, COUNT: gl.constexpr):
    """Cut an accumulator into ``COUNT`` parts of its columns; no data moves."""
    parts = (x,)
    if COUNT > 1:
        half: gl.constexpr = x.shape[1] // 2
        layout: gl.constexpr = accumulator(half, gl.num_ctas())
        left, right = x.reshape([x.shape[0], 2, half]).permute((0, 2, 1)).split()
        left = gl.convert_layout(left, layout, assert_trivial=True)
        right = gl.convert_layout(right, layout, assert_trivial=True)
        parts = columns(left, COUNT // 2) + columns(right, COUNT // 2)
    return parts


def _multiply_variant(kernel: Kernel) -> Variant:
    """Return what the compiler is told of a kernel that multiplies."""
    element = {"bf16": gl.bfloat16, "fp16": gl.float16}[kernel.dtype]

    def tensor_map(rows: int, columns: int, high: int = 1, wide: int = 1) -> str:
        """Describe a tile by a block's part of it, and how many of those a pair has in each way."""
        shape = [1, 1, high * rows, wide * columns]
        parts = [[0, 0, high - 1, wide - 1]] if kernel.blocks > 1 else None
        layout = gl.NVMMASharedLayout.get_default_for(shape, element, cga_layout=parts)
        return f"tensordesc<{kernel.dtype}[{','.join(map(str, shape))}],{layout!r}>"

    blocks = kernel.blocks
    constexprs = {
        "CONSUMERS": kernel.rows // blocks // 64,
        "TILE_N": kernel.tile_n,
        "STAGES": kernel.stages,
        "A_ALONG_K": kernel.a_along_k,
        "B_ALONG_K": kernel.b_along_k,
    }
    if not kernel.is_mapped:
        constexprs["PROMOTED"] = kernel.way == "promoted"
    return _variant(
        kernel.name,
        multiply if kernel.is_mapped else multiply_any,
        {
            "a": tensor_map(min(64, kernel.tile_m), 64, high=blocks)
            if kernel.a_along_k
            else tensor_map(64, 64, wide=blocks),
            "b": tensor_map(kernel.tile_n, 64)
            if kernel.b_along_k
            else tensor_map(64, kernel.tile_n),
            "c": tensor_map(64, 64, high=blocks) if kernel.is_mapped else f"*{kernel.dtype}",
            "alpha": "fp32",
            "beta": "fp32",
        },
        constexprs,
        blocks,
    )


def _pass_variant(name: str, function: Any, dtype: str, tile: tuple[int, int]) -> Variant:
    """Return what the compiler is told of a kernel that packs or adds up."""
    constexprs = {"ROWS": tile[0], "COLUMNS": tile[1]}
    if function is pack:
        pointers = {"source": f"*{dtype}", "target": f"*{dtype}"}
        return _variant(name, pack, pointers, constexprs, target=16, target_row=16)
    types = {"parts": "*fp32", "c": f"*{dtype}", "alpha": "fp32", "beta": "fp32"}
    return _variant(name, add_pieces, types, {**constexprs, "AT_ONCE": 64})


def _variant(
    name: str,
    function: Any,
    types: dict[str, str],
    constexprs: dict[str, Any],
    blocks: int = 1,
    **attrs: int,
) -> Variant:
    """Describe a kernel whose other arguments are strides, of 64 bits, and sizes, of 32."""
    strides = re.compile(r"(c|part|source|target)_\w+")
    types = {"progress": "*i32", **types}
    names = [name for name in function.arg_names if name not in constexprs]
    signature = {
        name: types.get(name, "i64" if strides.fullmatch(name) else "i32") for name in names
    }
    return Variant(
        name=name,
        function=function,
        compiler="gluon",
        signature=signature,
        constexprs=constexprs,
        attrs=attrs,
        options={
            "num_warps": 4,
            "num_ctas": blocks,
            "enable_fp_fusion": True,
            "launch_pdl": True,
        },
        targets=("sm_90a",),
    )
