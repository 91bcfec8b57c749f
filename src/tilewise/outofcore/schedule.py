"""Which tile of C, from which panels of A and B, in what order: pure data, nothing is executed.

One tile of C is ``tile_m × tile_n`` and is summed over pieces of ``tile_k``; the order of summation
over K is ascending and the pieces depend on the tile sizes alone, so one plan has one set of bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Tiles", "choose_tiles"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """How an m×n×k product is cut into tiles, and what that costs."""

    m: int
    n: int
    k: int
    tile_m: int
    tile_n: int
    tile_k: int
    workspace_bytes: int

    @property
    def count(self) -> int:
        """Number of tiles of C."""
        return -(-self.m // self.tile_m) * -(-self.n // self.tile_n)

    def __iter__(self) -> Iterator[tuple[slice, slice]]:
        """Yield the rows and columns of each tile of C, row panel by row panel."""
        for row in range(0, self.m, self.tile_m):
            for column in range(0, self.n, self.tile_n):
                yield (
                    slice(row, min(row + self.tile_m, self.m)),
                    slice(column, min(column + self.tile_n, self.n)),
                )

    def pieces(self) -> Iterator[slice]:
        """Yield the pieces of K in the order they are summed."""
        for start in range(0, self.k, self.tile_k):
            yield slice(start, min(start + self.tile_k, self.k))


def choose_tiles(
    m: int,
    n: int,
    k: int,
    *,
    panel_bytes: int,
    tile_bytes: int,
    budget_bytes: int,
) -> Tiles | None:
    """Return the largest well-shaped tiles that fit a budget, or None if not even one element fits.

    Parameters
    ----------
    m, n, k : int
        Sizes of the product.
    panel_bytes : int
        Bytes held for each element of a panel of A or B.
    tile_bytes : int
        Bytes held for each element of a tile of C (sums and the product being added).
    budget_bytes : int
        What panels and tile together may take.

    Notes
    -----
    The work on a tile is ``tile_m·tile_n·tile_k`` and its traffic ``tile_m·tile_k + tile_k·tile_n``
    read and ``tile_m·tile_n`` added, so the smallest side is doubled first.
    """

    def held(tile_m: int, tile_n: int, tile_k: int) -> int:
        return panel_bytes * tile_k * (tile_m + tile_n) + tile_bytes * tile_m * tile_n

    limits = [max(m, 1), max(n, 1), max(k, 1)]
    tile = [1, 1, 1]
    if held(1, 1, 1) > budget_bytes:
        return None
    growing = {0, 1, 2}
    while growing:
        axis = min(growing, key=lambda i: (tile[i], i))
        bigger = tile.copy()
        bigger[axis] = min(2 * tile[axis], limits[axis])
        if bigger == tile or held(*bigger) > budget_bytes:
            growing.discard(axis)
        else:
            tile = bigger
    return Tiles(
        m=m,
        n=n,
        k=k,
        tile_m=tile[0],
        tile_n=tile[1],
        tile_k=tile[2],
        workspace_bytes=held(*tile),
    )
