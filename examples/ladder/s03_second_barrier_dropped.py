"""Mistake: the barrier after multiplying is missing.

A fast thread loads the next tile while a slow one still multiplies with this one.
explain says: error: write-after-read of As
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise.simt import cuda

TILE = 16

Array = np.ndarray[Any, np.dtype[np.float32]]


@cuda.jit
def no_second_barrier(A: Array, B: Array, wA: int, wB: int, C: Array) -> None:
    As = cuda.shared.array((TILE, TILE), np.float32)
    Bs = cuda.shared.array((TILE, TILE), np.float32)
    tx = cuda.threadIdx.x
    ty = cuda.threadIdx.y
    row = cuda.blockIdx.y * TILE + ty
    col = cuda.blockIdx.x * TILE + tx
    total = np.float32(0)
    for m in range(wA // TILE):
        As[ty, tx] = A[row, m * TILE + tx]
        Bs[ty, tx] = B[m * TILE + ty, col]
        cuda.syncthreads()
        for k in range(TILE):
            total += As[ty, k] * Bs[k, tx]
    C[row, col] = total


def launch(n: int) -> tuple[tuple[int, int], tuple[int, int], tuple[Any, ...]]:
    """Grid, block and arguments for n×n matrices."""
    matrix = ((n, n), "float32")
    blocks = n // TILE
    return (blocks, blocks), (TILE, TILE), (matrix, matrix, n, n, matrix)


if __name__ == "__main__":
    from tilewise.explain import explain

    grid, block, arguments = launch(64)
    report = explain(no_second_barrier, grid, block, *arguments)
    for finding in report.findings:
        print(f"{finding.severity}: {finding.message}")
    print(report.roofs.sentence if report.roofs else report.roofs_missing)
