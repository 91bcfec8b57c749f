"""Step 0: a thread an element, straight from global memory.

Every multiply-add loads both of its operands: the pipe to memory is all that counts.
explain says: shared memory pipe binds: at most 12 % of the float peak
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise.simt import cuda

TILE = 16

Array = np.ndarray[Any, np.dtype[np.float32]]


@cuda.jit
def naive(A: Array, B: Array, wA: int, wB: int, C: Array) -> None:
    row = cuda.blockIdx.y * TILE + cuda.threadIdx.y
    col = cuda.blockIdx.x * TILE + cuda.threadIdx.x
    total = np.float32(0)
    for k in range(wA):
        total += A[row, k] * B[k, col]
    C[row, col] = total


def launch(n: int) -> tuple[tuple[int, int], tuple[int, int], tuple[Any, ...]]:
    """Grid, block and arguments for n×n matrices."""
    matrix = ((n, n), "float32")
    blocks = n // TILE
    return (blocks, blocks), (TILE, TILE), (matrix, matrix, n, n, matrix)


if __name__ == "__main__":
    from tilewise.explain import explain

    grid, block, arguments = launch(64)
    report = explain(naive, grid, block, *arguments)
    for finding in report.findings:
        print(f"{finding.severity}: {finding.message}")
    print(report.roofs.sentence if report.roofs else report.roofs_missing)
