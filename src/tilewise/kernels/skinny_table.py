"""Which kernels there are for float32 with few rows on Hopper: for compiler and planner.

Pure data. The device code is in ``skinny``; which runs when is decided in ``skinny_plan``.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "CACHE_BYTES_PER_US",
    "KERNELS",
    "LAUNCH_US",
    "MEMORY_BYTES_PER_US",
    "PIECE_US",
    "SUMMED_TILE",
    "TILE_N",
    "TILE_US",
    "Kernel",
]

#: Columns of B in a tile: those that one instruction multiplies.
TILE_N = 64

#: Rows and columns that a block of `add_chains` adds up.
SUMMED_TILE = (4, 32)

#: Measured on an H200, 30 November 2026: what a block takes for 64 of K and a tile's columns, by
#: how B is read and the rows of A; for a tile beyond its K; a launch; what memory and L2 give.
PIECE_US = {
    **{("mapped", rows): us for rows, us in ((16, 0.49), (32, 0.49), (64, 0.49))},
    **{("any", rows): us for rows, us in ((16, 0.64), (32, 0.68), (64, 0.86))},
}
TILE_US = 1.0
LAUNCH_US = 2.5
MEMORY_BYTES_PER_US = 4.2e6
CACHE_BYTES_PER_US = 6.5e6

#: Rows of A and stages, which fill the shared memory.
_TILES = ((16, 9), (32, 8), (64, 6))


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One compiled kernel that multiplies.

    B is read in tiles of 64 columns by 64 of K: along K or along its rows, by TMA or, not
    ``is_mapped``, element by element, with any strides.
    """

    tile_m: int
    stages: int
    along_k: bool
    is_mapped: bool

    @property
    def name(self) -> str:
        return f"skinny_{self.way}"

    @property
    def way(self) -> str:
        how = f"{'k' if self.along_k else 'n'}_{'mapped' if self.is_mapped else 'any'}"
        return f"{how}_{self.tile_m}x64x{self.stages}"


KERNELS = tuple(
    Kernel(tile_m=tile_m, stages=stages, along_k=along_k, is_mapped=is_mapped)
    for tile_m, stages in _TILES
    for along_k in (False, True)
    for is_mapped in (True, False)
    if is_mapped or not along_k or tile_m < 64  # which leaves no registers for copying so
)
