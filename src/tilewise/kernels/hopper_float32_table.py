"""Sizes that float32's kernels on Hopper are compiled with: for compiler and planner. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LONGEST_K", "PIECE_TILES", "ROW_TILES", "STAGES", "TILE", "SplitTile"]

#: Sides of a tile of C; flags are counted by as many rows and columns.
TILE = 128

#: Stages of the ring of operands, by the parts that they are split into: what fits beside C.
STAGES = {1: 6, 2: 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitTile:
    """What a block splits at a time: rows by ``depth`` of K, read along K or along rows."""

    rows: int
    depth: int
    along_k: bool
    warps: int


#: For operands scaled by whole rows, by how long those are. What one block reads twice has to stay
#: in the L2 cache, so a long row is one block's.
ROW_TILES = {
    "short": SplitTile(rows=16, depth=128, along_k=True, warps=4),
    "middle": SplitTile(rows=4, depth=512, along_k=True, warps=4),
    "long": SplitTile(rows=1, depth=4096, along_k=True, warps=8),
    "rows": SplitTile(rows=32, depth=256, along_k=False, warps=16),
}
LONGEST_K = {"short": 256, "middle": 2048}

#: For operands scaled by 64 of K.
PIECE_TILES = {
    "k": SplitTile(rows=64, depth=64, along_k=True, warps=4),
    "rows": SplitTile(rows=128, depth=64, along_k=False, warps=4),
}
