"""Products of float32 on Hopper's tensor cores (sm_90a), in Gluon.

`multiply` and `multiply_any` take A and B as `split` leaves them, in two float16 parts each, and
differ in how they write C: by the copy engine (TMA), or element by element with any strides and
beta. Which kernel runs when, with what around it, is in ``hopper_float32_plan``.

A block is one producer warp, which keeps a ring of tiles in shared memory full, and consumers of
four warps, each of which computes 64 columns of the tile, transposed: so the columns of C, whose
scales change with every 64 of K, are the rows of the accumulator, of which a thread has two.

**Order of summation.** For each 64 of K, lo·hi, hi·lo and hi·hi of A and B are summed in this
order, 16 terms an instruction, from zero; the sum times the piece's power of two is added to the
chain's by one FMA in float32. How K is cut into chains depends on K alone; their sums are added in
order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# mypy: disable-error-code="untyped-decorator, no-untyped-call, call-arg"

from __future__ import annotations

import re
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from . import few_columns, skinny
from .compile import Variant
from .flags import list_flagged
from .hopper import STREAMED, Work, columns, next_stage
from .hopper_float32_table import (
    JUDGED_TILES,
    PIECE_TILES,
    ROW_TILES,
    STAGES,
    TF32_TILES,
    TILE,
    SplitTile,
    Tf32Tile,
)
from .hopper_tf32 import multiply_any_tf32, multiply_tf32
from .pace import Pace
from .repair import repair, write
from .split import PIECE, judge_rows, split_pieces, split_rows

__all__ = ["multiply", "multiply_any", "variants"]

CONSUMERS = gl.constexpr(2)  # of 64 columns each
PARTS = gl.constexpr(2)  # of an operand: hi and lo
TILE_M = gl.constexpr(TILE)
TILE_N = gl.constexpr(TILE)


@gluon.jit
def multiply(
    a,
    b,
    c,
    a_scale,
    b_scale,
    a_flagged,
    b_flagged,
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
    STAGES: gl.constexpr,
):
    """Write C = A·B by TMA; flagged rows and columns of it are left as they are, or hold anything.

    The maps hold (matrix, part, row, k), B transposed, and C (outer, inner, row, column); along
    batch axes A's next matrix is ``a_next_outer`` or ``a_next_inner`` on. Each ``chain_k`` of K is
    a chain. ``a_flagged`` and ``b_flagged`` count what is flagged, by matrix and tile.
    """
    work = Work(m, n, k, inner, outer * inner, gl.to_tensor(1), k, group, TILE_M, TILE_N)
    staging = gl.allocate_shared_memory(c.dtype, [2 * CONSUMERS, 1, 1, 32, 64], c.layout)
    marks = Marks(
        a_scale,
        b_scale,
        a_flagged,
        b_flagged,
        a_next_outer,
        a_next_inner,
        b_next_outer,
        b_next_inner,
    )
    pace = Pace(progress, k)
    _multiply(a, b, Mapped(c, staging), work, marks, pace, chain_k, STAGES)


@gluon.jit
def multiply_any(
    a,
    b,
    c,
    a_scale,
    b_scale,
    a_flagged,
    b_flagged,
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
    STAGES: gl.constexpr,
):
    """Write C = alpha·A·B + beta·C, in any strides, but for flagged rows and columns.

    ``pairs`` is 1 where columns of C are parts of complex numbers, and ``c_col`` leads from one of
    those to the next.
    """
    work = Work(m, n, k, inner, outer * inner, gl.to_tensor(1), k, group, TILE_M, TILE_N)
    staging = gl.allocate_shared_memory(
        gl.float32, [CONSUMERS, 32, 64], gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    )
    marks = Marks(
        a_scale,
        b_scale,
        a_flagged,
        b_flagged,
        a_next_outer,
        a_next_inner,
        b_next_outer,
        b_next_inner,
    )
    out = Strided(c, staging, a_flag, b_flag, alpha, beta, c_outer, c_inner, c_row, c_col, pairs)
    pace = Pace(progress, k)
    _multiply(a, b, out, work, marks, pace, chain_k, STAGES)


@gluon.aggregate
class Marks:
    """What `split` says of rows and columns: their scales, and how many of a tile are flagged."""

    a_scale: gl.tensor
    b_scale: gl.tensor
    a_flagged: gl.tensor
    b_flagged: gl.tensor
    a_next_outer: gl.tensor
    a_next_inner: gl.tensor
    b_next_outer: gl.tensor
    b_next_inner: gl.tensor

    @gluon.jit
    def of_a(self, outer, inner):
        """Return which matrix of A multiplies."""
        return outer * self.a_next_outer + inner * self.a_next_inner

    @gluon.jit
    def of_b(self, outer, inner):
        return outer * self.b_next_outer + inner * self.b_next_inner

    @gluon.jit
    def wants(self, work, index):
        """Say whether a tile has an element that is not flagged."""
        outer, inner, _, row, col = work.item(gl.minimum(index, work.count() - 1))
        at = self.of_a(outer, inner) * gl.cdiv(work.m, work.TILE_M) + row // work.TILE_M
        rows = gl.load(self.a_flagged + at)
        at = self.of_b(outer, inner) * gl.cdiv(work.n, work.TILE_N) + col // work.TILE_N
        columns = gl.load(self.b_flagged + at)
        return (rows < gl.minimum(work.m - row, work.TILE_M)) & (
            columns < gl.minimum(work.n - col, work.TILE_N)
        )


@gluon.aggregate
class Ring:
    """Tiles on their way from the producer to the consumers, and who may touch them."""

    a: gl.shared_memory_descriptor
    b: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.jit
    def a_tile(self, stage, PART: gl.constexpr):
        """A part of A, as (k, rows)."""
        tile = self.a.index(stage * PARTS + PART)
        return tile.reshape([TILE_M, PIECE]).permute((1, 0))

    @gluon.jit
    def b_tile(self, stage, PART: gl.constexpr, CONSUMER: gl.constexpr):
        """A part of a consumer's columns of B, as (columns, k)."""
        tile = self.b.index((stage * PARTS + PART) * CONSUMERS + CONSUMER)
        return tile.reshape([64, PIECE])


@gluon.aggregate
class Mapped:
    """C as TMA writes it, 32 rows at a time, by way of a consumer's two buffers."""

    c: tma.tensor_descriptor
    staging: gl.shared_memory_descriptor

    @gluon.jit
    def write(self, x, work, marks, outer, inner, row, col, CONSUMER: gl.constexpr):
        parts = columns(x, 4)
        for i in gl.static_range(4):
            buffer = self.staging.index(2 * CONSUMER + i % 2)
            tma.store_wait(1)
            buffer.reshape([32, 64]).store(parts[i].permute((1, 0)))
            fence_async_shared()
            at = [outer, inner, row + 32 * i, col]
            tma.async_store(self.c, at, buffer, cache_policy=STREAMED)

    @gluon.jit
    def finish(self):
        tma.store_wait(0)


@gluon.aggregate
class Strided:
    """C of any strides, written element by element, a warp along a row, by way of shared memory."""

    c: gl.tensor
    staging: gl.shared_memory_descriptor
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
    def write(self, x, work, marks, outer, inner, row, col, CONSUMER: gl.constexpr):
        layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
        staging = self.staging.index(CONSUMER)
        base = outer.to(gl.int64) * self.c_outer + inner.to(gl.int64) * self.c_inner
        j = col + gl.arange(0, 64, gl.SliceLayout(0, layout))
        from_col = (j >> self.pairs).to(gl.int64) * self.c_col + (j & self.pairs)
        j_flag = self.b_flag + marks.of_b(outer, inner) * work.n + j
        j_inside = gl.load(j_flag, mask=j < work.n, other=1) == 0
        parts = columns(x, 4)
        for part in gl.static_range(4):
            staging.store(parts[part].permute((1, 0)))
            i = row + part * 32 + gl.arange(0, 32, gl.SliceLayout(1, layout))
            i_flag = self.a_flag + marks.of_a(outer, inner) * work.m + i
            i_inside = gl.load(i_flag, mask=i < work.m, other=1) == 0
            inside = i_inside[:, None] & j_inside[None, :]
            at = self.c + base + (i.to(gl.int64) * self.c_row)[:, None] + from_col[None, :]
            write(at, inside, staging.load(layout), self.alpha, self.beta)

    @gluon.jit
    def finish(self):
        pass


@gluon.jit
def _multiply(
    a,
    b,
    out,
    work,
    marks,
    pace,
    chain_k,
    STAGES: gl.constexpr,
):
    """Divide a block's warps into the producer and the consumers."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    ring = Ring(
        gl.allocate_shared_memory(a.dtype, [STAGES * PARTS, 1, 1, TILE_M, PIECE], a.layout),
        gl.allocate_shared_memory(b.dtype, [STAGES * PARTS * CONSUMERS, 1, 1, 64, PIECE], b.layout),
        full,
        empty,
        STAGES,
    )
    # Registers are dealt out anew: a producer needs few, and what it leaves holds accumulators.
    gl.warp_specialize(
        [
            (_consume, (ring, work, marks, chain_k, out, 0)),
            (_consume, (ring, work, marks, chain_k, out, 1)),
            (_produce, (a, b, ring, work, marks, pace)),
        ],
        [4, 1],
        [232, 40],
    )


@gluon.jit
def _produce(a, b, ring, work, marks, pace):
    """Load tiles of A and B, one stage after the other, wherever a stage is free."""
    gdc_wait()
    stage = 0
    phase = 1
    patience = pace.patience()
    wanted = marks.wants(work, gl.program_id(0))
    for index in range(gl.program_id(0), work.count(), gl.num_programs(0)):
        # Asked one tile ahead, since memory takes its time to answer.
        then = marks.wants(work, index + gl.num_programs(0))
        outer, inner, _, row, col = work.item(index)
        end = work.k
        if not wanted:
            end = 0
            pace.skip(patience)
        x = marks.of_a(outer, inner)
        y = marks.of_b(outer, inner)
        for k in range(0, end, PIECE):
            patience = pace.begin(index, k, patience)
            full = ring.full.index(stage)
            mbarrier.wait(ring.empty.index(stage), phase)
            tile_bytes: gl.constexpr = a.nbytes_per_cta + CONSUMERS * b.nbytes_per_cta
            mbarrier.expect(full, PARTS * tile_bytes)
            for part in gl.static_range(PARTS):
                at = stage * PARTS + part
                tma.async_load(a, [x, part, row, k], full, ring.a.index(at))
                for i in gl.static_range(CONSUMERS):
                    tile = ring.b.index(at * CONSUMERS + i)
                    tma.async_load(b, [y, part, col + 64 * i, k], full, tile)
            stage, phase = next_stage(stage, phase, ring.STAGES)
        wanted = then
    pace.finish(work.count(), patience)


@gluon.jit
def _consume(ring, work, marks, chain_k, out, CONSUMER: gl.constexpr):
    """Multiply 64 columns of each tile and write them."""
    gdc_wait()
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_M, 16])
    stage = 0
    phase = 0
    wanted = marks.wants(work, gl.program_id(0))
    for index in range(gl.program_id(0), work.count(), gl.num_programs(0)):
        then = marks.wants(work, index + gl.num_programs(0))
        if wanted:
            outer, inner, _, row, col = work.item(index)
            col += 64 * CONSUMER
            j = col + gl.arange(0, 64, gl.SliceLayout(1, layout))
            at = marks.b_scale + j
            at += marks.of_b(outer, inner) * gl.cdiv(work.k, PIECE) * work.n
            scale = gl.load(at, mask=j < work.n, other=0.0)
            total = gl.zeros([64, TILE_M], gl.float32, layout)
            for first in range(0, work.k, chain_k):
                chain = gl.zeros([64, TILE_M], gl.float32, layout)
                for k in range(first, gl.minimum(first + chain_k, work.k), PIECE):
                    at += work.n
                    ahead = gl.load(at, mask=(j < work.n) & (k + PIECE < work.k), other=0.0)
                    term, stage, phase = _piece(ring, stage, phase, CONSUMER)
                    chain = gl.fma(term, scale[:, None], chain)
                    scale = ahead
                total += chain
            i = row + gl.arange(0, TILE_M, gl.SliceLayout(0, layout))
            of_row = marks.a_scale + marks.of_a(outer, inner) * work.m + i
            total = total * gl.load(of_row, mask=i < work.m, other=0.0)[None, :]
            out.write(total, work, marks, outer, inner, row, col, CONSUMER)
        wanted = then
    gdc_launch_dependents()
    out.finish()


@gluon.jit
def _piece(ring, stage, phase, CONSUMER: gl.constexpr):
    """Sum the products of a piece of K on the tensor cores; return the sum, stage, phase."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_M, 16])
    term = gl.zeros([64, TILE_M], gl.float32, layout)
    mbarrier.wait(ring.full.index(stage), phase)
    hi = ring.b_tile(stage, 0, CONSUMER)
    lo = ring.b_tile(stage, 1, CONSUMER)
    term = warpgroup_mma(hi, ring.a_tile(stage, 1), term, use_acc=False, is_async=True)
    term = warpgroup_mma(lo, ring.a_tile(stage, 0), term, is_async=True)
    term = warpgroup_mma(hi, ring.a_tile(stage, 0), term, is_async=True)
    term = warpgroup_mma_wait(0, deps=[term])
    mbarrier.arrive(ring.empty.index(stage), count=1)
    stage, phase = next_stage(stage, phase, ring.STAGES)
    return term, stage, phase


def variants() -> tuple[Variant, ...]:
    """Return all kernels for float32 on Hopper, with those that split operands and repair C."""
    multiplied = [_multiply_variant(function) for function in (multiply, multiply_any)]
    multiplied += [
        _tf32_variant(function, tile)
        for function in (multiply_tf32, multiply_any_tf32)
        for tile in TF32_TILES
    ]
    split = [
        _split_variant(
            split_rows,
            f"split_rows_{parts}_{way}" + "_paired" * paired,
            tile,
            {"PARTS": parts, "DEPTH": tile.depth, "WHOLE": tile.whole, "PAIRED": paired},
        )
        for way, tile in ROW_TILES.items()
        for parts, paired in ((2, 0), (1, 0), (1, 1))
        if not (paired and tile.whole)
    ]
    split += [
        _split_variant(
            split_pieces,
            f"split_pieces_2_{way}" + "_complex" * pairs,
            tile,
            {"PARTS": 2, "PAIRS": pairs},
        )
        for way, tile in PIECE_TILES.items()
        for pairs in (0, 1)
    ]
    split += [
        _split_variant(
            judge_rows,
            f"judge_rows_{way}",
            tile,
            {"DEPTH": tile.depth, "WHOLE": tile.whole},
        )
        for way, tile in JUDGED_TILES.items()
    ]
    repairs = [
        _variant(
            f"repair_{'k' if a_along_k else 'm'}{'k' if b_along_k else 'n'}" + "_complex" * pairs,
            repair,
            dict.fromkeys("abc", "*fp32"),
            {"A_ALONG_K": a_along_k, "B_ALONG_K": b_along_k, "PAIRS": pairs},
            warps=8,
        )
        for pairs in (0, 1)
        for a_along_k in (True, False)
        for b_along_k in (True, False)
    ]
    listed = _variant("list_flagged", list_flagged, {}, {}, warps=1)
    few = (*skinny.variants(), *few_columns.variants())
    return (*multiplied, *split, listed, *repairs, *few)


def _multiply_variant(function: Any) -> Variant:
    """Return what the compiler is told of a kernel that multiplies operands of two parts."""
    return _variant(
        function.__name__,
        function,
        {
            "a": _tensor_map("fp16", TILE, 64),
            "b": _tensor_map("fp16", 64, 64),
            "c": _tensor_map("fp32", 32, 64) if function is multiply else "*fp32",
        },
        {"STAGES": STAGES},
    )


def _tf32_variant(function: Any, tile: Tf32Tile) -> Variant:
    """Return what the compiler is told of a kernel that multiplies high parts alone."""
    is_mapped = function is multiply_tf32
    constexprs = {"CONSUMERS": tile.rows // 64, "TILE_N": tile.columns, "STAGES": tile.stages}
    if not is_mapped:
        constexprs["PROMOTED"] = tile.adds_chains
    return _variant(
        f"{function.__name__}_{tile.name}",
        function,
        {
            "a": _tensor_map("fp16", 64, 64),
            "b": _tensor_map("fp16", tile.columns, 64),
            "c": _tensor_map("fp32", 64, 32) if is_mapped else "*fp32",
        },
        constexprs,
    )


def _tensor_map(dtype: str, rows: int, columns: int) -> str:
    """Describe what TMA moves at a time to the compiler."""
    element = {"fp16": gl.float16, "fp32": gl.float32}[dtype]
    layout = gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], element)
    return f"tensordesc<{dtype}[1,1,{rows},{columns}],{layout!r}>"


def _split_variant(function: Any, name: str, tile: SplitTile, more: dict[str, int]) -> Variant:
    """Return what the compiler is told of a kernel that splits or judges operands."""
    aligned = {name: 16 for name in ("target", "target_row") if name in function.arg_names}
    return _variant(
        name,
        function,
        {"source": "*fp32", "target": "*fp16", "scale": "*fp32", "flag": "*i32"},
        {"ROWS": tile.rows, "ALONG_K": tile.along_k, **more},
        warps=tile.warps,
        registers=tile.registers,
        **aligned,
    )


def _variant(
    name: str,
    function: Any,
    types: dict[str, str],
    constexprs: dict[str, Any],
    *,
    warps: int = 4,
    registers: int | None = None,
    **attrs: int,
) -> Variant:
    """Describe a kernel by its pointers; other arguments are told by their names."""
    kinds = {
        r"[abc]_(outer|inner|row|col)|(source|target)_\w+": "i64",
        r"[ab]_(flag|flagged|list|count|tile)|cleared|progress": "*i32",
        r"[ab]_scale": "*fp32",
        r"alpha|beta|threshold": "fp32",
    }
    options = {"num_warps": warps, "launch_pdl": True}
    if registers is not None:
        options["maxnreg"] = registers
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
        attrs=attrs,
        # An addition fused to a product rounds once, and then bits would be the compiler's choice.
        options=options | {"enable_fp_fusion": False},
        targets=("sm_90a",),
    )
