"""Products of int8 and float8 on Hopper (sm_90a), in Gluon: what ``portable_plan`` takes there.

`multiply_bytes` is built like the kernels of ``hopper``: one producer warp fills a ring of tiles by
the copy engine (TMA), one to three consumers of four warps multiply 64 rows each by wgmma, and C
goes back by TMA. Tensor cores take bytes along K alone, so that other operands are copied first,
by `pack_bytes`. How both are called is in ``portable_steps``.

int8 is summed in int32, which wraps. The tensor core keeps about 14 bits of a sum of float8, so
that sums over 128 terms are added up in float32.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# mypy: disable-error-code="untyped-decorator, no-untyped-call, call-arg"

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .compile import Variant
from .hopper import STREAMED, Mapped, Work
from .portable_table import BYTES_TILES, KERNELS, Kernel

__all__ = ["multiply_bytes", "pack_bytes", "variants"]

# 128 bytes are the widest row that shared memory swizzles: terms of a step, and sums of a store.
TILE_K = gl.constexpr(128)
CHUNK = gl.constexpr(32)

ALONG_K = gl.constexpr(BYTES_TILES["k"])
ACROSS = gl.constexpr(BYTES_TILES["n"])


@gluon.jit
def multiply_bytes(
    a,
    b,
    c,
    m,
    n,
    k,
    outer,
    inner,
    a_outer,
    a_inner,
    b_outer,
    b_inner,
    parts,
    depth,
    group,
    CONSUMERS: gl.constexpr,
    TILE_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Write C = A·B, or its parts over ``depth`` terms of K, in int32 or float32.

    The maps hold (outer, inner, rows, columns): A of m×k, B of n×k, C of m×n; with ``parts`` > 1
    C's first axis is the part, and its second the matrix. ``a_outer`` and its like are 1, or 0
    where an operand has one matrix for all of a batch axis.
    """
    work = Work(m, n, k, inner, outer * inner, parts, depth, group, 64 * CONSUMERS, TILE_N)
    staging = gl.allocate_shared_memory(c.dtype, [2 * CONSUMERS, 1, 1, 64, CHUNK], c.layout)
    policy: gl.constexpr = STREAMED if CONSUMERS * TILE_N >= 384 else None
    out = Mapped(c, staging, 2, policy)
    steps = (a_outer, a_inner, b_outer, b_inner)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    ring = Ring(
        gl.allocate_shared_memory(a.dtype, [STAGES * CONSUMERS, 1, 1, 64, TILE_K], a.layout),
        gl.allocate_shared_memory(b.dtype, [STAGES, 1, 1, TILE_N, TILE_K], b.layout),
        full,
        empty,
        CONSUMERS,
        STAGES,
    )
    if CONSUMERS == 1:
        gl.warp_specialize(
            [(_consume, (ring, work, out, 0)), (_produce, (a, b, ring, work, steps))],
            [1],
            [24],
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (ring, work, out, 0)),
                (_consume, (ring, work, out, 1)),
                (_produce, (a, b, ring, work, steps)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (ring, work, out, 0)),
                (_consume, (ring, work, out, 1)),
                (_consume, (ring, work, out, 2)),
                (_produce, (a, b, ring, work, steps)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )


@gluon.jit
def pack_bytes(
    first_source,
    first_target,
    first_rows,
    first_columns,
    first_inner,
    first_outer_step,
    first_inner_step,
    first_far_step,
    first_target_row,
    first_along,
    first_blocks,
    second_source,
    second_target,
    second_rows,
    second_columns,
    second_inner,
    second_outer_step,
    second_inner_step,
    second_far_step,
    second_target_row,
    second_along,
    VECTOR: gl.constexpr,
):
    """Copy one or two stacks of matrices of bytes into rows of unit stride.

    The source of ``rows`` by ``columns`` has the unit stride along its rows (``along``) or its
    columns, and ``far_step`` along the other axis; it is read in vectors. Rows of target are
    ``target_row`` apart, and what pads them is not defined. The first stack takes
    ``first_blocks`` of the grid.
    """
    gdc_launch_dependents()
    gdc_wait()
    block = gl.program_id(0)
    if block < first_blocks:
        _pack(
            block,
            first_source,
            first_target,
            first_rows,
            first_columns,
            first_inner,
            (first_outer_step, first_inner_step, first_far_step, first_target_row),
            first_along,
            VECTOR,
        )
    else:
        _pack(
            block - first_blocks,
            second_source,
            second_target,
            second_rows,
            second_columns,
            second_inner,
            (second_outer_step, second_inner_step, second_far_step, second_target_row),
            second_along,
            VECTOR,
        )


def variants() -> tuple[Variant, ...]:
    """Return the kernels of `portable_table.KERNELS` that are written here, and the copies."""
    return (
        *(_multiply_variant(kernel) for kernel in KERNELS if kernel.is_mapped),
        *(_pack_variant(vector) for vector in (1, 4)),
    )


@gluon.aggregate
class Ring:
    """Tiles of A and B on their way from the producer to the consumers, and who may touch them."""

    a: gl.shared_memory_descriptor
    b: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    CONSUMERS: gl.constexpr
    STAGES: gl.constexpr

    @gluon.jit
    def tiles(self, stage, CONSUMER: gl.constexpr):
        """A consumer's 64 rows of A, as (rows, k), and B as (k, columns)."""
        a = self.a.index(stage * self.CONSUMERS + CONSUMER).reshape([64, TILE_K])
        b = self.b.index(stage).reshape([self.b.shape[3], TILE_K]).permute((1, 0))
        return a, b

    @gluon.jit
    def next(self, stage, phase):
        stage += 1
        if stage == self.STAGES:
            stage = 0
            phase ^= 1
        return stage, phase


@gluon.jit
def _produce(a, b, ring, work, steps):
    """Load tiles of A and B, one stage after the other, wherever a stage is free."""
    gdc_wait()
    a_outer, a_inner, b_outer, b_inner = steps
    stage = 0
    phase = 1
    for index in range(gl.program_id(0), work.count(), gl.num_programs(0)):
        outer, inner, part, row, col = work.item(index)
        begin, end = work.span(part)
        for k in range(begin, end, TILE_K):
            full = ring.full.index(stage)
            mbarrier.wait(ring.empty.index(stage), phase)
            mbarrier.expect(full, ring.CONSUMERS * a.nbytes_per_cta + b.nbytes_per_cta)
            for i in gl.static_range(ring.CONSUMERS):
                at = [outer * a_outer, inner * a_inner, row + 64 * i, k]
                tma.async_load(a, at, full, ring.a.index(stage * ring.CONSUMERS + i))
            at = [outer * b_outer, inner * b_inner, col, k]
            tma.async_load(b, at, full, ring.b.index(stage))
            stage, phase = ring.next(stage, phase)


@gluon.jit
def _consume(ring, work, out, CONSUMER: gl.constexpr):
    """Multiply 64 rows of each tile and write them."""
    gdc_wait()
    stage = 0
    phase = 0
    for index in range(gl.program_id(0), work.count(), gl.num_programs(0)):
        outer, inner, part, row, col = work.item(index)
        begin, end = work.span(part)
        if ring.a.dtype == gl.int8:
            total, stage, phase = _wrapping(ring, work.TILE_N, stage, phase, begin, end, CONSUMER)
        else:
            total, stage, phase = _promoted(ring, work.TILE_N, stage, phase, begin, end, CONSUMER)
        if work.pieces > 1:
            inner = outer * work.inner + inner
            outer = part
        out.write(total, outer, inner, part, row + 64 * CONSUMER, col, CONSUMER)
    gdc_launch_dependents()
    out.finish()


@gluon.jit
def _wrapping(ring, TILE_N: gl.constexpr, stage, phase, begin, end, CONSUMER: gl.constexpr):
    """Sum products of int8 over begin <= k < end; return the sum modulo 2^32, stage, phase."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_N, 32])
    total = gl.zeros([64, TILE_N], gl.int32, layout)
    last = 0
    for k in range(begin, end, TILE_K):
        mbarrier.wait(ring.full.index(stage), phase)
        a, b = ring.tiles(stage, CONSUMER)
        total = warpgroup_mma(a, b, total, is_async=True)
        # One step stays in flight; the step before it has read its stage.
        total = warpgroup_mma_wait(1, deps=[total])
        mbarrier.arrive(ring.empty.index(last), count=1, pred=k > begin)
        last = stage
        stage, phase = ring.next(stage, phase)
    total = warpgroup_mma_wait(0, deps=[total])
    mbarrier.arrive(ring.empty.index(last), count=1, pred=end > begin)
    return total, stage, phase


@gluon.jit
def _promoted(ring, TILE_N: gl.constexpr, stage, phase, begin, end, CONSUMER: gl.constexpr):
    """Do the same for float8: a step in the tensor core, the steps on the float32 units."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_N, 32])
    total = gl.zeros([64, TILE_N], gl.float32, layout)
    for _ in range(begin, end, TILE_K):
        mbarrier.wait(ring.full.index(stage), phase)
        a, b = ring.tiles(stage, CONSUMER)
        term = gl.zeros([64, TILE_N], gl.float32, layout)
        term = warpgroup_mma(a, b, term, use_acc=False, is_async=True)
        # Meanwhile the tensor cores work for the other consumers.
        term = warpgroup_mma_wait(0, deps=[term])
        mbarrier.arrive(ring.empty.index(stage), count=1)
        total += term
        stage, phase = ring.next(stage, phase)
    return total, stage, phase


@gluon.jit
def _pack(index, source, target, rows, columns, inner, steps, is_along, VECTOR: gl.constexpr):
    """Copy one tile, read along its rows or its columns."""
    if is_along:
        by_rows: gl.constexpr = gl.BlockedLayout([1, VECTOR], [1, 32], [8, 1], [1, 0])
        columns = columns // VECTOR * VECTOR  # as it is: so the compiler knows, too
        _pack_tile(index, source, target, rows, columns, inner, steps, ALONG_K, by_rows)
    else:
        by_columns: gl.constexpr = gl.BlockedLayout([VECTOR, 16], [32, 1], [1, 8], [0, 1])
        rows = rows // VECTOR * VECTOR
        _pack_tile(index, source, target, rows, columns, inner, steps, ACROSS, by_columns)


@gluon.jit
def _pack_tile(
    index,
    source,
    target,
    rows,
    columns,
    inner,
    steps,
    TILE: gl.constexpr,
    NEAR: gl.constexpr,
):
    outer_step, inner_step, far_step, target_row = steps
    tiles_n = gl.cdiv(columns, TILE[1])
    tiles = gl.cdiv(rows, TILE[0]) * tiles_n
    matrix = index // tiles
    row = (index % tiles // tiles_n) * TILE[0]
    col = (index % tiles % tiles_n) * TILE[1]
    i = row + gl.arange(0, TILE[0], gl.SliceLayout(1, NEAR))
    j = col + gl.arange(0, TILE[1], gl.SliceLayout(0, NEAR))
    source += (matrix // inner).to(gl.int64) * outer_step
    source += (matrix % inner).to(gl.int64) * inner_step
    if NEAR.order[0] == 1:
        at = (i.to(gl.int64) * far_step)[:, None] + j[None, :]
    else:
        at = i[:, None] + (j.to(gl.int64) * far_step)[None, :]
    x = gl.load(source + at, mask=(i < rows)[:, None] & (j < columns)[None, :], other=0)
    wide: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [8, 1], [1, 0])
    i = row + gl.arange(0, TILE[0], gl.SliceLayout(1, wide))
    j = col + gl.arange(0, TILE[1], gl.SliceLayout(0, wide))
    to_row = target + (matrix.to(gl.int64) * rows + i) * target_row
    inside = (i < rows)[:, None] & (j < target_row)[None, :]
    gl.store(to_row[:, None] + j[None, :], gl.convert_layout(x, wide), mask=inside)


def _multiply_variant(kernel: Kernel) -> Variant:
    """Return what the compiler is told of a kernel that multiplies."""
    element = {"i8": gl.int8, "fp8e4nv": gl.float8e4nv, "fp8e5": gl.float8e5}[kernel.dtype]
    sums = {"i32": gl.int32, "fp32": gl.float32}[kernel.sums]
    tile_m, tile_n, tile_k = kernel.tile
    assert tile_k == TILE_K.value

    def tensor_map(name: str, dtype: Any, rows: int, columns: int) -> str:
        layout = gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], dtype)
        return f"tensordesc<{name}[1,1,{rows},{columns}],{layout!r}>"

    return _variant(
        kernel.name,
        multiply_bytes,
        {
            "a": tensor_map(kernel.dtype, element, 64, tile_k),
            "b": tensor_map(kernel.dtype, element, tile_n, tile_k),
            "c": tensor_map(kernel.sums, sums, 64, CHUNK.value),
        },
        {"CONSUMERS": tile_m // 64, "TILE_N": tile_n, "STAGES": kernel.stages},
        warps=kernel.warps,
    )


def _pack_variant(vector: int) -> Variant:
    """Return what the compiler is told of copies that read ``vector`` bytes at a time."""
    types: dict[str, str] = {}
    attrs: dict[str, int] = {}
    steps = ("outer_step", "inner_step", "far_step")
    for name in ("first", "second"):
        types |= {f"{name}_source": "*u8", f"{name}_target": "*u8"}
        types |= {f"{name}_{key}": "i64" for key in (*steps, "target_row")}
        attrs |= {f"{name}_{key}": vector for key in ("source", *steps)}
        attrs |= {f"{name}_target": 16, f"{name}_target_row": 16}
    return _variant(f"pack_bytes_{vector}", pack_bytes, types, {"VECTOR": vector}, attrs)


def _variant(
    name: str,
    function: Any,
    types: dict[str, str],
    constexprs: dict[str, Any],
    attrs: dict[str, int] | None = None,
    warps: int = 8,
) -> Variant:
    """Describe a kernel to the compiler; what ``types`` leaves out are sizes of 32 bits."""
    names = [name for name in function.arg_names if name not in constexprs]
    return Variant(
        name=name,
        function=function,
        compiler="gluon",
        signature={name: types.get(name, "i32") for name in names},
        constexprs=constexprs,
        attrs=attrs or {},
        options={"num_warps": warps, "enable_fp_fusion": True, "launch_pdl": True},
        targets=("sm_90a",),
    )
