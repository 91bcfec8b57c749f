"""Small kernels that the tests of the compiler and of the launcher are made with."""

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tilewise.kernels import TARGETS
from tilewise.kernels.compile import Variant
from tilewise.simt import cuda


@triton.jit
def _axpy(x, y, n, alpha, tile: tl.constexpr):
    """y += alpha·x over n elements."""
    place = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    inside = place < n
    total = tl.load(y + place, mask=inside) + alpha * tl.load(x + place, mask=inside)
    tl.store(y + place, total, mask=inside)


@triton.jit
def _early(x, y, n, alpha, tile: tl.constexpr):
    """Do what `_axpy` does, having started while the launch before is still running."""
    gdc_launch_dependents()
    gdc_wait()
    _axpy(x, y, n, alpha, tile)


@triton.jit
def _hog(x, tile: tl.constexpr):
    """Sort a tile through shared memory, more of it than a block gets without asking."""
    place = tl.arange(0, tile)[:, None] * tile + tl.arange(0, tile)[None, :]
    tl.store(x + place, tl.trans(tl.load(x + place)))


@gluon.jit
def _copy(source, target):
    """Copy one tile from a tensor map to another; what is outside of source reads as 0."""
    row = gl.program_id(0) * source.block_shape[0]
    column = gl.program_id(1) * source.block_shape[1]
    tile = gl.allocate_shared_memory(source.dtype, source.block_shape, source.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    mbarrier.expect(ready, source.nbytes_per_cta)
    tma.async_load(source, [row, column], ready, tile)
    mbarrier.wait(ready, 0)
    tma.async_store(target, [row, column], tile)
    tma.store_wait(0)


@triton.jit
def _scratch(x, tile: tl.constexpr):
    """Make a tensor map on the device, which takes scratch memory."""
    x_map = tl.make_tensor_descriptor(x, [tile, tile], [tile, 1], [tile, tile])
    x_map.store([0, 0], x_map.load([0, 0]) + 1)


def _scale(x, factor):
    """Multiply each element of a matrix, one thread an element."""
    row, column = cuda.grid(2)
    if row < x.shape[0] and column < x.shape[1]:
        x[row, column] = _times(x[row, column], factor)


def _times(x, factor):
    return x * factor


def variants() -> tuple[Variant, ...]:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    tile = f"tensordesc<bf16[64,64],{layout!r}>"
    axpy = Variant(
        name="axpy",
        function=_axpy,
        compiler="triton",
        signature={"x": "*fp32", "y": "*fp32", "n": "i64", "alpha": "fp32"},
        constexprs={"tile": 1024},
        attrs={"x": 16, "y": 16},
        options={"num_warps": 4, "enable_fp_fusion": True},
        targets=TARGETS,
    )
    hopper = replace(axpy, targets=("sm_90a",))
    return (
        axpy,
        replace(hopper, name="pair", options={**axpy.options, "num_ctas": 2}),
        replace(
            hopper, name="early", function=_early, options={**axpy.options, "launch_pdl": True}
        ),
        Variant(
            name="hog",
            function=_hog,
            compiler="triton",
            signature={"x": "*fp32"},
            constexprs={"tile": 128},
            options={"num_warps": 8, "enable_fp_fusion": True},
            targets=("sm_90a",),
        ),
        Variant(
            name="copy",
            function=_copy,
            compiler="gluon",
            signature={"source": tile, "target": tile},
            options={"num_warps": 4, "enable_fp_fusion": True},
            targets=("sm_90a",),
        ),
        Variant(
            name="scale",
            function=_scale,
            compiler="numba",
            signature={"x": "float32[:, ::1]", "factor": "float32"},
            options={"num_warps": 8},
            targets=("sm_90a", "compute_80"),
        ),
    )
