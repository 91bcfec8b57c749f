"""Learning and understanding kernels: cases G1 to G14, by id."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tests.explain import matmul_kernels
from tests.explain.support import floats, kernel_from, site
from tilewise import guide
from tilewise.explain import explain
from tilewise.simt import cuda

float32 = np.float32


def x_is_the_row(side: int, pitch: int | None = None) -> Any:
    """The manual's habit: x runs down the rows."""
    pitch = side if pitch is None else pitch

    def kernel(A, B, n, C):  # type: ignore[no-untyped-def]
        As = cuda.shared.array((side, pitch), float32)
        Bs = cuda.shared.array((side, pitch), float32)
        tx = cuda.threadIdx.x
        ty = cuda.threadIdx.y
        x, y = cuda.grid(2)
        total = float32(0)
        for m in range(n // side):
            As[tx, ty] = A[x, ty + m * side]
            Bs[tx, ty] = B[tx + m * side, y]
            cuda.syncthreads()
            for k in range(side):
                total += As[tx, k] * Bs[k, ty]
            cuda.syncthreads()
        C[x, y] = total

    return kernel


def _explain(kernel: Any, n: int, side: int) -> Any:
    matrix, blocks = floats(n, n), -(-n // side)
    return explain(kernel, (blocks, blocks), (side, side), matrix, matrix, n, matrix)


@pytest.mark.parametrize(("side", "wasted"), [(16, 16), (32, 32)])
def test_G1_sectors_of_a_warp_load(side: int, wasted: int) -> None:
    guide_like = _explain(matmul_kernels.tiled(side), 64, side)
    load = site(guide_like, "A[row, m * side + tx]", "load")
    store = site(guide_like, "C[row, col]", "store")
    assert (load.per_request, store.per_request) == (4, 4)
    twin = _explain(x_is_the_row(side), 64, side)
    load, store = site(twin, "A[x, ty + m * side]", "load"), site(twin, "C[x, y]", "store")
    assert (load.per_request, store.per_request) == (wasted, wasted)
    assert load.ideal / load.requests == store.ideal / store.requests == 4
    picture = next(s for s in twin.sector_maps if s.text == "A[x, ty + m * side]")
    assert (len(picture.sectors), picture.ideal) == (wasted, 4)
    assert f"in {wasted} sectors" in picture.sentence
    assert "would need 4" in picture.sentence


@pytest.mark.parametrize(("side", "ways"), [(16, 8), (32, 32)])
def test_G2_bank_conflicts(side: int, ways: int) -> None:
    """The transposed vector store of the same case is in tests/simt/test_memory.py."""
    guide_like = _explain(matmul_kernels.tiled(side), 64, side)
    shared = [row for row in guide_like.sites if row.space == "shared"]
    assert len(shared) == 4
    assert all(row.per_request == 1 and row.conflicts == 0 for row in shared)
    twin = _explain(x_is_the_row(side), 64, side)
    assert site(twin, "As[tx, k]", "load").per_request == ways
    assert site(twin, "As[tx, ty]", "store").per_request == ways
    assert site(twin, "Bs[k, ty]", "load").per_request == 1
    picture = next(b for b in twin.bank_maps if b.text == "As[tx, k]")
    assert (picture.wavefronts, picture.ideal) == (ways, 1)
    assert max(word.wavefront for word in picture.words) == ways - 1


@pytest.mark.parametrize(
    ("make", "side", "pitch", "load", "store"),
    [
        (matmul_kernels.tiled, 16, 17, 1, 2),
        (matmul_kernels.tiled, 32, 33, 1, 1),
        (x_is_the_row, 16, 17, 1, 2),
        (x_is_the_row, 32, 33, 1, 1),
    ],
)
def test_G3_padding_helps_or_hurts(make: Any, side: int, pitch: int, load: int, store: int) -> None:
    report = _explain(make(side, pitch=pitch), 64, side)
    for row in report.sites:
        if row.space == "shared":
            assert row.per_request == (load if row.op == "load" else store), row.text


def test_G4_lanes_of_a_two_dimensional_block() -> None:
    def both_ways(A, C):  # type: ignore[no-untyped-def]
        along = cuda.shared.array(32, float32)
        across = cuda.shared.array(32, float32)
        tx = cuda.threadIdx.x
        ty = cuda.threadIdx.y
        along[tx + 8 * ty] = A[tx + 8 * ty]
        across[ty + 4 * tx] = A[ty + 4 * tx]
        cuda.syncthreads()
        C[tx + 8 * ty] = along[tx + 8 * ty] + across[ty + 4 * tx]

    report = explain(both_ways, 1, (8, 4), floats(32), floats(32))
    shared = [row for row in report.sites if row.space == "shared"]
    assert [row.per_request for row in shared] == [1] * 4
    picture = next(b for b in report.bank_maps if b.array == "along" and b.op == "store")
    assert [(word.lane, word.element) for word in picture.words] == [
        (lane, f"along[{lane}]") for lane in range(32)
    ]
    assert report.thread_map.elements == tuple((i,) for i in range(32))
    assert report.thread(block=(0,), thread=(3, 2)).writes == {"C": ((19,),)}


def _guarded(test: str) -> Any:
    source = f"""
import numpy as np
from tilewise.simt import cuda

def kernel(A, B, n, C):
    As = cuda.shared.array((16, 16), np.float32)
    Bs = cuda.shared.array((16, 16), np.float32)
    tx = cuda.threadIdx.x
    ty = cuda.threadIdx.y
    row = cuda.blockIdx.y * 16 + ty
    col = cuda.blockIdx.x * 16 + tx
    if {test}:
        return
    total = np.float32(0)
    for m in range((n + 15) // 16):
        a = m * 16 + tx
        b = m * 16 + ty
        As[ty, tx] = A[row, a] if a < n else np.float32(0)
        Bs[ty, tx] = B[b, col] if b < n else np.float32(0)
        cuda.syncthreads()
        for k in range(16):
            total += As[ty, k] * Bs[k, tx]
        cuda.syncthreads()
    C[row, col] = total
"""
    return kernel_from(source, "kernel")


def test_G6_threads_that_return_before_a_barrier() -> None:
    report = _explain(_guarded("row >= n or col >= n"), 17, 16)
    gone = [f for f in report.findings if f.kind == "exit before barrier"]
    assert {(f.accesses, f.blocks, f.first.line) for f in gone} == {(735, 3, 20), (735, 3, 23)}
    assert "735 threads in 3 blocks have returned" in gone[0].message
    assert "barrier on line 20" in gone[0].message
    unwritten = {f.array for f in report.findings if f.kind == "uninitialised read"}
    assert unwritten == {"As", "Bs"}
    assert report.exit_code == 1


def test_G7_a_range_test_with_and_for_or() -> None:
    report = _explain(_guarded("row >= n and col >= n"), 17, 16)
    gone = next(f for f in report.findings if f.kind == "exit before barrier")
    assert gone.accesses == 225
    astray = {f.array: f for f in report.findings if f.kind == "out of range"}
    assert set(astray) == {"A", "B", "C"}
    assert astray["C"].accesses == 735 - 225 == 510
    for finding in astray.values():
        assert f"{finding.array} has shape (17, 17)" in finding.message
        assert finding.first.text in finding.message
        assert f"line {finding.first.line}" in finding.message


def test_G8_launched_in_one_dimension() -> None:
    n = 160
    matrix = floats(n, n)
    report = explain(guide.Muld, 100, 10, matrix, matrix, n, n, matrix)
    (covered,) = (row for row in report.arrays if row.name == "C")
    assert (covered.never_written, covered.written_once, covered.written_more) == (
        n * n - 100,
        100,
        0,
    )
    never = next(f for f in report.findings if f.kind == "never written")
    assert f"{n * n - 100:,} elements of C's {n * n:,} are never written" in never.message


def test_G9_reads_beyond_the_matrix_are_counted() -> None:
    def sample(A, B, n, C):  # type: ignore[no-untyped-def]
        """As NVIDIA's matrixMul: the grid is rounded down, the loop over tiles up."""
        As = cuda.shared.array((32, 32), float32)
        Bs = cuda.shared.array((32, 32), float32)
        tx = cuda.threadIdx.x
        ty = cuda.threadIdx.y
        row = cuda.blockIdx.y * 32 + ty
        col = cuda.blockIdx.x * 32 + tx
        total = float32(0)
        for m in range((n + 31) // 32):
            As[ty, tx] = A[row, m * 32 + tx]
            Bs[ty, tx] = B[m * 32 + ty, col]
            cuda.syncthreads()
            for k in range(32):
                total += As[ty, k] * Bs[k, tx]
            cuda.syncthreads()
        C[row, col] = total

    matrix = floats(1000, 1000)
    report = explain(sample, (31, 31), (32, 32), matrix, matrix, 1000, matrix)
    astray = {f.array: f for f in report.findings if f.kind == "out of range"}
    assert set(astray) == {"A", "B"}
    assert astray["A"].accesses == astray["B"].accesses == 738048
    assert "738,048 in another row of it, unnoticed" in astray["A"].message
    assert "738,048 outside the memory of B" in astray["B"].message
    (covered,) = (row for row in report.arrays if row.name == "C")
    assert covered.never_written == 15936
    assert covered.written_once == 992 * 992


def test_G10_what_one_thread_does_in_words() -> None:
    matrix = floats(64, 64)
    report = explain(guide.Muld, (4, 4), (16, 16), matrix, matrix, 64, 64, matrix)
    story = report.thread(block=(2, 3), thread=(5, 1))
    for words in (
        "C row 49, column 37",
        "A rows 48–63",
        "B columns 32–47",
        "4 tiles",
        "8 barriers",
    ):
        assert words in story.text
    assert story.writes == {"C": ((49, 37),)}
    assert (story.tiles, story.barriers) == (4, 8)
    assert story.thread_reads == {"A": 4, "B": 4}
    assert story.block_reads == {"A": ((48, 63), (0, 63)), "B": ((0, 63), (32, 47))}


FAULTY = """
import numpy as np
from tilewise.simt import cuda, launch
from tilewise.explain import explain

def faulty(A, C):
    tx = cuda.threadIdx.x
    C[tx] = A[tx + 1000 if tx == 3 else tx]
    cuda.syncthreads()

def test_simulated():
    launch(faulty, 2, 8, np.zeros(8, np.float32), np.zeros(8, np.float32))

def test_explained():
    report = explain(faulty, 2, 8, np.zeros(8, np.float32), np.zeros(8, np.float32))
    assert not report.exit_code, report.findings[0].message
"""


def test_G11_a_fault_before_a_barrier_ends_the_run_at_once(tmp_path: Any) -> None:
    file = tmp_path / "test_faulty.py"
    file.write_text(FAULTY)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 1
    assert "2 failed" in done.stdout
    assert "thread (3, 0, 0) of block (0, 0, 0)" in done.stdout
    assert "thread 3 of block 0 reads A[1003] on line 8" in done.stdout


PLAIN = """
import json, sys
from tilewise import guide
from tilewise.explain import claims, explain

matrix = ((64, 64), "float32")
report = explain(guide.Muld, (4, 4), (16, 16), matrix, matrix, 64, 64, matrix, claims=claims.guide)
top = {name.partition(".")[0] for name in sys.modules}
print(json.dumps({"exit": report.exit_code, "modules": sorted(top - set(sys.stdlib_module_names)),
                  "sectors": sum(s.cost for s in report.sites if s.space == "global")}))
"""


def test_G13_G14_explain_needs_python_and_numpy_and_nothing_else() -> None:
    """No GPU, driver, root or network: without them here, and nothing that could look for them."""
    done = subprocess.run(
        [sys.executable, "-c", PLAIN], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["exit"] == 0
    assert said["sectors"] == 2 * 2048 + 512
    own = {name for name in said["modules"] if not name.startswith("_")}
    assert own <= {"tilewise", "numpy", "psutil", "sitecustomize", "cython_runtime"}
