"""Which kernels of Hopper's there are, and what was measured of them: for compiler and planner.

Pure data. The device code is in ``hopper`` and ``hopper_passes``; which kernel runs when is decided
in ``hopper_plan``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

__all__ = ["KERNELS", "LINE", "PACKED_TILE", "SECTOR", "SUMMED_TILE", "TIMES", "Kernel", "Times"]

Way = Literal["mapped", "paired", "any", "promoted"]

#: Elements in the 128 bytes of a line of the L2 cache, and in the 32 that it hands out at least.
LINE = 64
SECTOR = 16

#: Rows and columns that a block of `pack` copies at a time, and that one of `add_pieces` adds up.
PACKED_TILE = (4, 1024)
SUMMED_TILE = (4, 32)

#: Where the times of one machine are kept; written by ``python -m benchmarks hopper_times``.
TIMES = Path(__file__).parent / "hopper_times.json"

#: Rows, columns and stages of each kernel's tiles, of a pair those of one block. Stages fill the
#: shared memory that is left beside the buffers of C. Tiles of less than 64 rows read no more rows
#: of A than they have.
_TILES: dict[Way, tuple[tuple[int, int, int], ...]] = {
    "mapped": (
        *((128, 256, 4), (192, 128, 4), (128, 128, 6)),
        *((64, 128, 8), (64, 64, 12), (32, 64, 12), (16, 64, 12)),
    ),
    "paired": ((128, 256, 4), (192, 128, 4), (64, 128, 8)),
    "any": ((128, 256, 4), (192, 128, 4), (64, 128, 7), (64, 64, 10), (16, 64, 10)),
    "promoted": ((192, 128, 4),),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One compiled kernel that multiplies.

    ``way`` is how C comes about: "mapped" writes it by TMA, in the operands' type; "paired" does so
    by two blocks a tile, which share what they read of B; "any" writes any strides, float32 too,
    adds beta·C, and can leave pieces of K apart; "promoted" is "any" that adds the pieces up in
    registers.
    """

    dtype: str
    tile_m: int
    tile_n: int
    stages: int
    a_along_k: bool
    b_along_k: bool
    way: Way

    @property
    def name(self) -> str:
        order = f"{'k' if self.a_along_k else 'm'}{'k' if self.b_along_k else 'n'}"
        return f"{self.dtype}_{order}_{self.tile_m}x{self.tile_n}x{self.stages}_{self.way}"

    @property
    def is_mapped(self) -> bool:
        """Whether TMA writes C."""
        return self.way in ("mapped", "paired")

    @property
    def blocks(self) -> int:
        """Blocks that compute a tile together."""
        return 2 if self.way == "paired" else 1

    @property
    def rows(self) -> int:
        """Rows of C that a tile computes, whether it reads as many or not."""
        return self.blocks * max(64, self.tile_m)

    @property
    def tile(self) -> str:
        """What `Times.tiles` knows it by."""
        return f"{self.rows}x{self.tile_n}" + " by two" * (self.blocks > 1)


KERNELS = tuple(
    Kernel(
        dtype=dtype,
        tile_m=tile_m,
        tile_n=tile_n,
        stages=stages,
        a_along_k=a_along_k,
        b_along_k=b_along_k,
        way=way,
    )
    for dtype in ("bf16", "fp16")
    for a_along_k in (True, False)
    for b_along_k in (True, False)
    for way, tiles in _TILES.items()
    for tile_m, tile_n, stages in tiles
    if a_along_k or tile_m >= 64  # TMA writes short rows of k×m without the gaps that wgmma wants
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """What the time of a product is made of, on one kind of GPU.

    A tile costs ``tile_us`` and, for each 64 of K, ``step_us``; with more than one tile for each of
    ``multiprocessors`` the chip's power allows ``flop_per_us`` in all. Memory and L2 cache give
    ``memory_bytes_per_us`` and ``cache_bytes_per_us``; operands whose rows do not start on lines of
    128 bytes count ``broken_line`` times there, and those off sectors of 32 ``broken_sector``
    times. Writing C element by element costs ``any_us`` for each element of a tile, adding up
    pieces in registers ``promoted`` times the steps, a launch ``launch_us``.
    """

    launch_us: float
    memory_bytes_per_us: float
    cache_bytes_per_us: float
    flop_per_us: float
    broken_line: float
    broken_sector: float
    any_us: float
    promoted: float
    multiprocessors: int
    tiles: Mapping[str, tuple[float, float]]  #: step_us and tile_us, by what a tile computes

    def lines(self, pitch: int) -> float:
        """Return how often rows so many elements apart count in the L2 cache."""
        return self.broken_sector if pitch % SECTOR else self.broken_line if pitch % LINE else 1.0

    @classmethod
    def read(cls, path: Path = TIMES) -> Times:
        return cls(**json.loads(path.read_text())["times"])

    @classmethod
    def of_h200(cls) -> Times:
        """Return the times that were measured, read once."""
        return _measured()


@lru_cache(maxsize=1)
def _measured() -> Times:
    return Times.read()
