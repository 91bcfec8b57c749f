"""Sizes that float32's kernels on Hopper are compiled with: for compiler and planner. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "JUDGED_TILES",
    "LISTS",
    "PIECE_TILES",
    "ROW_TILES",
    "STAGES",
    "TF32_TILES",
    "TILE",
    "SplitTile",
    "Tf32Tile",
]

#: Sides of a tile of C; flags are counted by as many rows and columns.
TILE = 128

#: Lists of what is flagged: what is computed by FMA, and what is NaN.
LISTS = 2

#: Stages of the ring of operands: what fits beside C.
STAGES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Tf32Tile:
    """A tile of C of precision "tf32", and what it takes on an H200: each 64 of K, and all else.

    These are of one run of kernels alone at 1024³ to 4096³, without a kept script.
    ``adds_chains`` says that registers hold two sums, so that K can be more than one chain.
    """

    rows: int
    columns: int
    stages: int
    step_us: float
    tile_us: float
    adds_chains: bool = False

    @property
    def name(self) -> str:
        return f"{self.rows}x{self.columns}x{self.stages}"


TF32_TILES = (
    Tf32Tile(rows=128, columns=256, stages=4, step_us=0.78, tile_us=3.0),
    Tf32Tile(rows=128, columns=128, stages=6, step_us=0.42, tile_us=2.0, adds_chains=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitTile:
    """What a block splits at a time: rows by ``depth`` of K, read along K or along rows.

    Rows that are ``whole`` have elements side by side, no more than ``depth``, and are read once.
    Threads have no more than so many ``registers``, where it is said, so that more blocks fit.
    """

    rows: int
    depth: int
    along_k: bool
    warps: int
    whole: bool = False
    registers: int | None = None


#: For operands scaled by whole rows: those that registers hold; others, some or one a block; and
#: what is read along rows. What one block reads twice has to stay in the L2 cache, so a long row is
#: one block's; of 16384, reading it twice takes less than half as long as holding it.
ROW_TILES = {
    f"k{depth}": SplitTile(
        rows=rows, depth=depth, along_k=True, warps=warps, whole=True, registers=registers
    )
    for rows, depth, warps, registers in (
        *((16, 256, 4, 80), (4, 1024, 4, 80), (2, 2048, 4, 96), (1, 4096, 4, 80), (1, 8192, 8, 80)),
    )
}
ROW_TILES |= {
    "short": SplitTile(rows=16, depth=128, along_k=True, warps=4),
    "long": SplitTile(rows=1, depth=16384, along_k=True, warps=16),
    "rows": SplitTile(rows=16, depth=512, along_k=False, warps=16),
}

#: For operands scaled by 64 of K.
PIECE_TILES = {
    "k": SplitTile(rows=64, depth=64, along_k=True, warps=4),
    "rows": SplitTile(rows=128, depth=64, along_k=False, warps=4, registers=168),
}

#: For rows that are only judged: a warp a row, or a block where there are few; elements of any
#: steps; and what is read along rows.
JUDGED_TILES = {
    "k": SplitTile(rows=4, depth=512, along_k=True, warps=4, whole=True, registers=80),
    "long": SplitTile(rows=1, depth=4096, along_k=True, warps=8, whole=True, registers=80),
    "any": SplitTile(rows=16, depth=64, along_k=True, warps=4, registers=80),
    "rows": SplitTile(rows=16, depth=128, along_k=False, warps=8, registers=64),
}
