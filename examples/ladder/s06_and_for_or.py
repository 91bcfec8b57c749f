"""Mistake: a range test with "and" where "or" is meant.

Only threads outside in both directions return; those outside in one go on, and touch memory
that is not theirs.
explain says: error: out of range of A
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise.simt import cuda

TILE = 16

Array = np.ndarray[Any, np.dtype[np.float32]]


@cuda.jit
def and_for_or(A: Array, B: Array, wA: int, wB: int, C: Array) -> None:
    As = cuda.shared.array((TILE, TILE), np.float32)
    Bs = cuda.shared.array((TILE, TILE), np.float32)
    tx = cuda.threadIdx.x
    ty = cuda.threadIdx.y
    row = cuda.blockIdx.y * TILE + ty
    col = cuda.blockIdx.x * TILE + tx
    if row >= C.shape[0] and col >= wB:
        return
    total = np.float32(0)
    for m in range((wA + TILE - 1) // TILE):
        a = m * TILE + tx
        b = m * TILE + ty
        As[ty, tx] = A[row, a] if a < wA else np.float32(0)
        Bs[ty, tx] = B[b, col] if b < wA else np.float32(0)
        cuda.syncthreads()
        for k in range(TILE):
            total += As[ty, k] * Bs[k, tx]
        cuda.syncthreads()
    C[row, col] = total


def launch(n: int) -> tuple[tuple[int, int], tuple[int, int], tuple[Any, ...]]:
    """Grid, block and arguments for n×n matrices."""
    matrix = ((n, n), "float32")
    blocks = -(-n // TILE)
    return (blocks, blocks), (TILE, TILE), (matrix, matrix, n, n, matrix)


if __name__ == "__main__":
    from tilewise.explain import explain

    grid, block, arguments = launch(17)
    report = explain(and_for_or, grid, block, *arguments)
    for finding in report.findings:
        print(f"{finding.severity}: {finding.message}")
    print(report.roofs.sentence if report.roofs else report.roofs_missing)
