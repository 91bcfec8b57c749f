"""Blocks that stand for others: what is seen through them equals what is seen of every block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.explain import matmul_kernels
from tests.explain.support import all_blocks, floats, hazard_counts, totals
from tilewise import guide
from tilewise.explain.evidence import gather
from tilewise.simt import cuda

float32 = np.float32


def grid_stride(A, n, C):  # type: ignore[no-untyped-def]
    i = cuda.grid(1)
    while i < n:
        C[i] = A[i] * float32(2)
        i += cuda.gridsize(1)


def swizzled(A, C):  # type: ignore[no-untyped-def]
    """Blocks are dealt out by a division and a remainder of blockIdx."""
    b = cuda.blockIdx.x
    row = b // 4 * 8 + cuda.threadIdx.y
    col = b % 4 * 8 + cuda.threadIdx.x
    C[row, col] = A[row, col]


def overlapping(A, C):  # type: ignore[no-untyped-def]
    """Every block also writes the first element of the next: a race between blocks."""
    i = cuda.blockIdx.x * 32 + cuda.threadIdx.x
    if i < 32 * cuda.gridDim.x - 1:
        C[i + 1] = A[i]
    if cuda.threadIdx.x == 0:
        C[i] = A[i]


def in_place(A):  # type: ignore[no-untyped-def]
    """Neighbours read what others write, in and between blocks."""
    i = cuda.grid(1)
    if i + 1 < A.shape[0]:
        A[i] = A[i + 1]


def odd_rows(A, C):  # type: ignore[no-untyped-def]
    row = cuda.blockIdx.y * 4 + cuda.threadIdx.y
    col = cuda.blockIdx.x * 8 + cuda.threadIdx.x
    if cuda.blockIdx.y % 2 == 1:
        C[row, col] = A[row, col]
    elif cuda.blockIdx.x == 2:
        C[row, col] = A[row, 0]


def ranged(A, C):  # type: ignore[no-untyped-def]
    """A triangular loop: its bound is the block's own."""
    total = float32(0)
    for k in range(cuda.blockIdx.x + 1):
        total += A[k, cuda.threadIdx.x]
    C[cuda.blockIdx.x, cuda.threadIdx.x] = total


def wrapped(A, C):  # type: ignore[no-untyped-def]
    """Integers that wrap: what is linear in blockIdx is so within a type's range only."""
    i = cuda.grid(1)
    C[i] = A[np.int64(np.uint8(i * 3))] + A[np.int64(np.int8(i)) + 128]


def flat_muld(A, B, wA, wB, C):  # type: ignore[no-untyped-def]
    """The kernel as in the guide's C source: flat arrays, and a loop that steps through them."""
    As = cuda.shared.array((16, 16), float32)
    Bs = cuda.shared.array((16, 16), float32)
    tx = cuda.threadIdx.x
    ty = cuda.threadIdx.y
    a = wA * 16 * cuda.blockIdx.y
    end = a + wA
    b = 16 * cuda.blockIdx.x
    total = float32(0)
    while a < end:
        As[ty, tx] = A[a + wA * ty + tx]
        Bs[ty, tx] = B[b + wB * ty + tx]
        cuda.syncthreads()
        for k in range(16):
            total += As[ty, k] * Bs[k, tx]
        cuda.syncthreads()
        a += 16
        b += 16 * wB
    C[wB * (16 * cuda.blockIdx.y + ty) + 16 * cuda.blockIdx.x + tx] = total


def times_its_transpose(A, C):  # type: ignore[no-untyped-def]
    """Two places touch one buffer, each shifted its own way: no matter, since it is only read."""
    row = cuda.blockIdx.y * 8 + cuda.threadIdx.y
    col = cuda.blockIdx.x * 8 + cuda.threadIdx.x
    total = float32(0)
    for k in range(A.shape[1]):
        total += A[row, k] * A[col, k]
    C[row, col] = total


def meets_itself(A):  # type: ignore[no-untyped-def]
    """A block meets itself, or another, by its place: both are written."""
    A[cuda.blockIdx.x * 8 + cuda.threadIdx.x] = float32(1)
    A[24 + cuda.threadIdx.x] = A[cuda.threadIdx.x]


def load_row(A, row, col):  # type: ignore[no-untyped-def]
    return A[row, col] if row < A.shape[0] and col < A.shape[1] else float32(0)


def by_device_function(A, B, C):  # type: ignore[no-untyped-def]
    row = cuda.blockIdx.y * 8 + cuda.threadIdx.y
    col = cuda.blockIdx.x * 8 + cuda.threadIdx.x
    if row < C.shape[0] and col < C.shape[1]:
        C[row, col] = load_row(A, row, col) + load_row(B, row, col)


# kernel, grid, block, arguments, classes (None: as many as blocks)
LAUNCHES: list[tuple[Callable[..., Any], Any, Any, tuple[Any, ...], int | None]] = [
    (guide.Muld, (4, 3), (16, 16), (floats(48, 64), floats(64, 64), 64, 64, floats(48, 64)), 1),
    (guide.naive, (3, 2), (16, 16), (floats(32, 40), floats(40, 48), 40, 48, floats(32, 48)), 1),
    (guide.Muld_any, (4, 4), (16, 16), (floats(50, 37), floats(37, 61), 37, 61, floats(50, 61)), 4),
    (
        matmul_kernels.guarded(16),
        (3, 3),
        (16, 16),
        (floats(33, 33), floats(33, 33), 33, floats(33, 33)),
        4,
    ),
    (
        matmul_kernels.tiled(8, pitch=9),
        (3, 5),
        (8, 8),
        (floats(40, 40), floats(40, 40), 40, floats(40, 40)),
        1,
    ),
    (flat_muld, (4, 4), (16, 16), (floats(64 * 64), floats(64 * 64), 64, 64, floats(64 * 64)), 1),
    (grid_stride, 5, 64, (floats(1000), 1000, floats(1000)), None),
    (swizzled, 12, (8, 8), (floats(24, 32), floats(24, 32)), None),
    (overlapping, 9, 32, (floats(288), floats(288)), 9),
    (in_place, 7, 64, (floats(448),), 2),
    (in_place, 7, 60, (floats(400),), 2),
    (odd_rows, (5, 6), (8, 4), (floats(24, 40), floats(24, 40)), None),
    (wrapped, 8, 32, (floats(1024), floats(256)), None),
    (times_its_transpose, (3, 3), (8, 8), (floats(24, 20), floats(24, 24)), 1),
    (meets_itself, 6, 8, (floats(48),), None),
    (ranged, 6, 32, (floats(6, 32), floats(6, 32)), None),
    (by_device_function, (4, 4), (8, 8), (floats(30, 29), floats(30, 29), floats(30, 29)), 4),
]


@pytest.mark.parametrize(
    ("kernel", "grid", "block", "arguments", "classes"),
    LAUNCHES,
    ids=[f"{i}-{getattr(k, '__name__', 'kernel')}" for i, (k, *_) in enumerate(LAUNCHES)],
)
def test_classes_see_what_all_blocks_do(
    kernel: Any, grid: Any, block: Any, arguments: tuple[Any, ...], classes: int | None
) -> None:
    seen = gather(kernel, grid, block, arguments)
    blocks = int(np.prod(seen.trial.grid))
    assert seen.flow.opaque is None
    if classes is not None:
        assert len(seen.partition.classes) == classes
    assert sorted(np.concatenate([c.members for c in seen.partition.classes])) == [*range(blocks)]

    recorder, watch = all_blocks(seen)
    assert totals(seen.recorder) == totals(recorder)
    assert seen.recorder.barriers == recorder.barriers
    assert hazard_counts(seen.hazards) == hazard_counts(watch.hazards())
    assert seen.coverage == watch.coverage()
    for name in seen.trial.arguments:
        counts = recorder.loaded.get(name, {}).get((-1, -1))
        if counts is not None:
            assert np.array_equal(seen.reads(name).ravel(), counts)


def test_a_launch_of_many_blocks_is_one_class() -> None:
    def twice(A, C):  # type: ignore[no-untyped-def]
        i = cuda.grid(1)
        C[i] = A[i] * float32(2)

    blocks = 1 << 16
    seen = gather(twice, blocks, 32, (((blocks * 32,), "int8"), ((blocks * 32,), "int8")))
    assert len(seen.partition.classes) == 1
    (coverage,) = seen.coverage
    assert (coverage.never, coverage.once, coverage.many) == (0, blocks * 32, 0)


def test_rows_of_another_width_are_told_apart_by_their_alignment() -> None:
    """Width 1001: blocks of odd rows start in the middle of a line, and cost other lines."""
    seen = gather(
        guide.naive, (2, 2), (16, 16), (floats(32, 41), floats(41, 41), 41, 32, floats(32, 41))
    )
    recorder, _ = all_blocks(seen)
    assert totals(seen.recorder) == totals(recorder)


# Kernels whose blocks must not stand for one another: the reason is given, with its line.
def gather_by_index(A, index, C):  # type: ignore[no-untyped-def]
    i = cuda.grid(1)
    C[i] = A[index[i]]


def until_small(A, C):  # type: ignore[no-untyped-def]
    i = cuda.grid(1)
    value = A[i]
    while value > float32(1):
        value = value * float32(0.5)
    C[i] = value


def by_a_flag(A, C):  # type: ignore[no-untyped-def]
    if A[cuda.blockIdx.x] > float32(0):
        C[cuda.grid(1)] = float32(1)


def through_shared(A, index, C):  # type: ignore[no-untyped-def]
    where = cuda.shared.array(64, np.int32)
    where[cuda.threadIdx.x] = index[cuda.grid(1)]
    cuda.syncthreads()
    C[cuda.grid(1)] = A[where[63 - cuda.threadIdx.x]]


INDEX = np.random.default_rng(1).permutation(256).astype(np.int32)


@pytest.mark.parametrize(
    ("kernel", "arguments", "text"),
    [
        (gather_by_index, (floats(256), INDEX, floats(256)), "index[i]"),
        (until_small, (floats(256), floats(256)), "value > float32(1)"),
        (by_a_flag, (floats(256), floats(256)), "A[cuda.blockIdx.x] > float32(0)"),
        (through_shared, (floats(256), INDEX, floats(256)), "where[63 - cuda.threadIdx.x]"),
    ],
)
def test_what_loaded_values_decide_is_traced_block_by_block(
    kernel: Any, arguments: tuple[Any, ...], text: str
) -> None:
    seen = gather(kernel, 4, 64, arguments)
    assert not seen.holds_for_all_data
    assert text in seen.data_dependence
    assert len(seen.partition.classes) == 4
    assert "every block was traced, since line" in seen.partition.certificate
    recorder, watch = all_blocks(seen)
    assert totals(seen.recorder) == totals(recorder)
    assert hazard_counts(seen.hazards) == hazard_counts(watch.hazards())


def test_loaded_values_that_are_only_computed_with_decide_nothing() -> None:
    def scaled(A, s, C):  # type: ignore[no-untyped-def]
        staged = cuda.shared.array(64, float32)
        tx = cuda.threadIdx.x
        staged[tx] = A[cuda.grid(1)] * s
        cuda.syncthreads()
        C[cuda.grid(1)] = staged[63 - tx]

    seen = gather(scaled, 4, 64, (floats(256), np.float32(2), floats(256)))
    assert seen.holds_for_all_data
    assert len(seen.partition.classes) == 1


def test_arguments_are_never_written_to() -> None:
    A, C = np.ones((32, 32), float32), np.full((32, 32), 7, float32)
    gather(guide.naive, (2, 2), (16, 16), (A, A, 32, 32, C))
    assert (C == 7).all()
