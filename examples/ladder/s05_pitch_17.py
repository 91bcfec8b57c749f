"""Mistake: padding used as a charm.

A row of 17 words helps where a column is read; here it moves the second row of a warp onto the
banks of the first, and the kernel gets slower.
explain says: As[ty, tx] (store) takes 2 wavefronts a request where 1 would do
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise.simt import cuda

TILE = 16
PITCH = 17

Array = np.ndarray[Any, np.dtype[np.float32]]


@cuda.jit
def padded(A: Array, B: Array, wA: int, wB: int, C: Array) -> None:
    As = cuda.shared.array((TILE, PITCH), np.float32)
    Bs = cuda.shared.array((TILE, PITCH), np.float32)
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
    report = explain(padded, grid, block, *arguments)
    for finding in report.findings:
        print(f"{finding.severity}: {finding.message}")
    print(report.roofs.sentence if report.roofs else report.roofs_missing)
