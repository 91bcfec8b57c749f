"""Roofs bound what was measured; the merging of loads is nvcc's; the next step fits the roof."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.explain import matmul_kernels
from tests.explain.support import floats, kernel_from
from tilewise import guide
from tilewise.explain import explain
from tilewise.explain.roofs import DEVICES
from tilewise.simt import cuda

TABLE = Path(__file__).parent.parent / "data" / "ncu_h200.csv"
float32 = np.float32


def _measured() -> dict[str, float]:
    """Milliseconds on the H200, by kernel, at n = 1024."""
    with TABLE.open(newline="") as lines:
        return {
            re.fullmatch(r"mm\.(\w+)\.n1024", row["id"])[1]: float(row["events_median_ms"])
            for row in csv.DictReader(lines)
            if row["id"].endswith(".n1024")
        }


@pytest.mark.parametrize("name", ["tiled16", "tiled32", "naive16", "tiled16_T_p16", "tiled16_p17"])
def test_no_measured_kernel_passes_its_roof(name: str) -> None:
    """Counts scale with n cubed, so 128 tells the roof of 1024."""
    n, side = 128, 16 if "16" in name else 32
    matrix, blocks = floats(n, n), n // side
    kernel = matmul_kernels.of_row(name)
    report = explain(kernel, (blocks, blocks), (side, side), matrix, matrix, n, matrix)
    assert report.roofs is not None
    roof = min(r.tflops for r in report.roofs.roofs if r.name != "memory")
    reached = 2 * 1024**3 / _measured()[name] * 1e-9
    assert 0.5 * roof < reached < roof
    assert report.roofs.binding == "shared memory pipe"


def test_the_lowest_roof_is_named_with_both_levels() -> None:
    matrix = floats(256, 256)
    report = explain(guide.Muld, (16, 16), (16, 16), matrix, matrix, 256, 256, matrix)
    roofs = report.roofs
    assert roofs is not None
    assert roofs.roofs[0].name == roofs.binding
    assert [r.cycles for r in roofs.roofs] == sorted((r.cycles for r in roofs.roofs), reverse=True)
    assert {r.name for r in roofs.roofs} == {
        "shared memory pipe", "issue", "float arithmetic", "memory",
    }  # fmt: skip
    assert "14 %" in roofs.sentence
    assert "11 %" in roofs.sentence
    assert "4×4 to about 57 %" in roofs.next_step
    assert roofs.not_counted == ()


def test_the_next_step_fits_what_binds() -> None:
    matrix = floats(64, 64)
    conflicts = matmul_kernels.tiled(16, transposed=True)
    report = explain(conflicts, (4, 4), (16, 16), matrix, matrix, 64, matrix)
    assert "remove the bank conflicts of line" in report.roofs.next_step
    assert "As[tx, ty]" in report.roofs.next_step
    report = explain(guide.naive, (4, 4), (16, 16), matrix, matrix, 64, 64, matrix)
    assert "stage tiles of the operands in shared memory" in report.roofs.next_step

    def axpy(x, y, a):  # type: ignore[no-untyped-def]
        i = cuda.grid(1)
        y[i] = a * x[i] + y[i]

    report = explain(axpy, 64, 256, floats(16384), floats(16384), float32(2))
    assert report.roofs.binding == "memory"
    assert "only moving fewer bytes helps" in report.roofs.next_step
    assert report.roofs.intensity == pytest.approx(2 / 8)


def test_arithmetic_that_cannot_be_counted_is_named() -> None:
    def kernel(x, y):  # type: ignore[no-untyped-def]
        i = cuda.grid(1)
        s = x[i] * x[i]
        if i % 3 == 0:
            s = s * s
        y[i] = s

    report = explain(kernel, 1, 32, floats(32), floats(32))
    line = kernel.__code__.co_firstlineno + 4
    assert report.roofs.not_counted == (f"the arithmetic on line {line}",)


def test_a_kernel_without_arithmetic_has_no_roof() -> None:
    def copied(x, y):  # type: ignore[no-untyped-def]
        y[cuda.grid(1)] = x[cuda.grid(1)]

    report = explain(copied, 1, 32, floats(32), floats(32))
    assert report.roofs is None
    assert "no floating-point instruction" in report.roofs_missing
    assert report.roofs_missing in report.not_checked


@pytest.mark.parametrize("target", DEVICES)
def test_every_device_has_roofs(target: str) -> None:
    matrix = floats(64, 64)
    report = explain(guide.Muld, (4, 4), (16, 16), matrix, matrix, 64, 64, matrix, target=target)
    assert report.roofs is not None
    assert report.roofs.device == DEVICES[target].name
    assert 0 < min(r.fraction for r in report.roofs.roofs) <= 1


def _compiled_loads(body: str, pitch: int = 16) -> dict[int, Any]:
    """The loads of shared memory after merging, by how wide they are: requests."""
    kernel = kernel_from(
        "import numpy as np\nfrom tilewise.simt import cuda\n\n"
        f"def kernel(A, C):\n    s = cuda.shared.array((32, {pitch}), np.float32)\n"
        "    tx = cuda.threadIdx.x\n"
        "    for k in range(16):\n        s[tx, k] = A[tx, k]\n"
        "    cuda.syncthreads()\n    total = np.float32(0)\n"
        f"    {body}\n    C[tx] = total\n",
        "kernel",
    )
    report = explain(kernel, 1, 32, floats(32, 16), floats(32))
    return {row.text: row for row in report.compiled_sites if row.op == "load" and row.array == "s"}


@pytest.mark.parametrize(
    ("body", "pitch", "requests"),
    [
        ("for k in range(16):\n        total += s[tx, k]", 16, 4),  # four loads of 16 bytes
        ("for k in range(16):\n        total += s[tx, k]", 18, 8),  # rows aligned to 8 bytes
        ("for k in range(16):\n        total += s[tx, k]", 17, 16),  # and to 4
        ("for k in range(15):\n        total += s[tx, k]", 16, 5),  # 3 of 16, then 8 and 4
        ("for k in range(16):\n        total += s[k, tx % 16]", 16, 16),  # not neighbours
        ("for k in range(16):\n        total += s[tx, 15 - k]", 16, 16),  # the wrong way round
        ("for k in range(16):\n        total += s[tx, k]\n        cuda.syncthreads()", 16, 16),
        ("for k in range(4):\n        for j in range(4):\n            total += s[tx, k + 4 * j]",
         16, 4),  # the loops may be exchanged
    ],
)  # fmt: skip
def test_loads_of_shared_memory_are_merged_as_nvcc_does(
    body: str, pitch: int, requests: int
) -> None:
    (row,) = _compiled_loads(body, pitch).values()
    assert row.requests == requests
    assert row.lanes == 32 * requests
