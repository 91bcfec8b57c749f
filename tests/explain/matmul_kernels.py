"""The matrix-product kernels of the H200 table, as Python: what nvcc was given there in C++.

``tiled`` and its variants differ in side, pitch, layout of As and barriers; ``guarded`` takes sizes
that are no multiple of the side; ``naive`` has no tiles. All take (A, B, n, C).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tilewise.simt import cuda

float32 = np.float32


def of_row(name: str) -> Callable[..., Any]:
    """The kernel that a row of the table names, such as "tiled16_T_p17" or "naive_guard16"."""
    kind, side = re.match(r"([a-z_]+)(\d+)", name).groups()
    if kind == "tiled":
        pitch = re.search(r"_p(\d+)", name)
        return tiled(
            int(side),
            pitch=int(pitch[1]) if pitch else int(side),
            transposed="_T" in name,
            first_barrier="_nobar1" not in name,
            second_barrier="_nobar2" not in name,
        )
    return {"guard": guarded, "naive": naive, "naive_guard": naive_guarded}[kind](int(side))


def tiled(
    side: int,
    *,
    pitch: int | None = None,
    transposed: bool = False,
    first_barrier: bool = True,
    second_barrier: bool = True,
) -> Callable[..., Any]:
    pitch = side if pitch is None else pitch

    def kernel(A, B, n, C):  # type: ignore[no-untyped-def]
        As = cuda.shared.array((side, pitch), float32)
        Bs = cuda.shared.array((side, pitch), float32)
        tx = cuda.threadIdx.x
        ty = cuda.threadIdx.y
        row = cuda.blockIdx.y * side + ty
        col = cuda.blockIdx.x * side + tx
        total = float32(0)
        for m in range(n // side):
            if transposed:
                As[tx, ty] = A[row, m * side + tx]
            else:
                As[ty, tx] = A[row, m * side + tx]
            Bs[ty, tx] = B[m * side + ty, col]
            if first_barrier:
                cuda.syncthreads()
            for k in range(side):
                if transposed:
                    total += As[k, ty] * Bs[k, tx]
                else:
                    total += As[ty, k] * Bs[k, tx]
            if second_barrier:
                cuda.syncthreads()
        C[row, col] = total

    return kernel


def guarded(side: int) -> Callable[..., Any]:
    def kernel(A, B, n, C):  # type: ignore[no-untyped-def]
        As = cuda.shared.array((side, side), float32)
        Bs = cuda.shared.array((side, side), float32)
        tx = cuda.threadIdx.x
        ty = cuda.threadIdx.y
        row = cuda.blockIdx.y * side + ty
        col = cuda.blockIdx.x * side + tx
        total = float32(0)
        for m in range((n + side - 1) // side):
            a = m * side + tx
            b = m * side + ty
            As[ty, tx] = A[row, a] if row < n and a < n else float32(0)
            Bs[ty, tx] = B[b, col] if b < n and col < n else float32(0)
            cuda.syncthreads()
            for k in range(side):
                total += As[ty, k] * Bs[k, tx]
            cuda.syncthreads()
        if row < n and col < n:
            C[row, col] = total

    return kernel


def naive(side: int) -> Callable[..., Any]:
    def kernel(A, B, n, C):  # type: ignore[no-untyped-def]
        row = cuda.blockIdx.y * side + cuda.threadIdx.y
        col = cuda.blockIdx.x * side + cuda.threadIdx.x
        total = float32(0)
        for k in range(n):
            total += A[row, k] * B[k, col]
        C[row, col] = total

    return kernel


def naive_guarded(side: int) -> Callable[..., Any]:
    def kernel(A, B, n, C):  # type: ignore[no-untyped-def]
        row = cuda.blockIdx.y * side + cuda.threadIdx.y
        col = cuda.blockIdx.x * side + cuda.threadIdx.x
        if row < n and col < n:
            total = float32(0)
            for k in range(n):
                total += A[row, k] * B[k, col]
            C[row, col] = total

    return kernel
