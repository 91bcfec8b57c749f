"""Mistake: threadIdx.x along the rows.

Neighbouring threads touch different rows: each load of a warp moves 16 sectors for 4 sectors' worth
of data, and the tiles are read down their columns.
explain says: A[row, m * TILE + ty] (load) takes 16 sectors a request where 4 would do
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise.simt import cuda

TILE = 16

Array = np.ndarray[Any, np.dtype[np.float32]]


@cuda.jit
def x_is_the_row(A: Array, B: Array, wA: int, wB: int, C: Array) -> None:
    As = cuda.shared.array((TILE, TILE), np.float32)
    Bs = cuda.shared.array((TILE, TILE), np.float32)
    tx = cuda.threadIdx.x
    ty = cuda.threadIdx.y
    row = cuda.blockIdx.x * TILE + tx
    col = cuda.blockIdx.y * TILE + ty
    total = np.float32(0)
    for m in range(wA // TILE):
        As[tx, ty] = A[row, m * TILE + ty]
        Bs[tx, ty] = B[m * TILE + tx, col]
        cuda.syncthreads()
        for k in range(TILE):
            total += As[tx, k] * Bs[k, ty]
        cuda.syncthreads()
    C[row, col] = total


def launch(n: int) -> tuple[tuple[int, int], tuple[int, int], tuple[Any, ...]]:
    """Grid, block and arguments for n×n matrices."""
    matrix = ((n, n), "float32")
    blocks = n // TILE
    return (blocks, blocks), (TILE, TILE), (matrix, matrix, n, n, matrix)


if __name__ == "__main__":
    from tilewise.explain import explain

    grid, block, arguments = launch(64)
    report = explain(x_is_the_row, grid, block, *arguments)
    for finding in report.findings:
        print(f"{finding.severity}: {finding.message}")
    print(report.roofs.sentence if report.roofs else report.roofs_missing)
