"""What an observer sees, and what a program tells a static analysis."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.simt.test_launch import line_of
from tilewise import simt
from tilewise.errors import KernelError, OptionError
from tilewise.guide import Muld
from tilewise.simt import cuda

F = np.float32


class Recorder:
    """Keeps every event; ``carry_on`` answers faults."""

    def __init__(self, carry_on=False):
        self.accesses, self.barriers, self.faults, self.carry_on = [], [], [], carry_on

    def on_launch(self, launch):
        self.launch = launch

    def on_access(self, access):
        access.active, access.offset = access.active.copy(), access.offset.copy()
        access.value = access.value.copy()
        self.accesses.append(access)

    def on_barrier(self, barrier):
        self.barriers.append(barrier)

    def on_fault(self, fault):
        self.faults.append(fault)
        return self.carry_on

    def at(self, text):
        return [access for access in self.accesses if access.site.text == text]


def guide(n=32, **options):
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((n, n)).astype(F) for _ in range(2))
    c = np.full((n, n), np.nan, F)
    recorder = Recorder()
    simt.launch(Muld, (n // 16, n // 16), (16, 16), a, b, n, n, c, observer=recorder, **options)
    return recorder, a, b, c


def test_the_launch_is_described_before_anything_runs():
    recorder, *_ = guide()
    launch = recorder.launch
    assert (launch.kernel, launch.grid, launch.block) == ("Muld", (2, 2, 1), (16, 16, 1))
    assert launch.scalars == {"wA": 32, "wB": 32}
    assert launch.shared_bytes == 2048
    assert [(a.name, a.space, a.base) for a in launch.arrays[3:]] == [
        ("As", "shared", 0),
        ("Bs", "shared", 1024),
    ]
    assert [a.name for a in launch.arrays[:3]] == ["A", "B", "C"]
    kinds = Counter(site.kind for site in launch.sites)
    assert kinds == {"load": 4, "store": 3, "barrier": 2, "branch": 2, "division": 1}
    assert [site.id for site in launch.sites] == list(range(len(launch.sites)))
    assert [site.line for site in launch.sites] == sorted(site.line for site in launch.sites)


def test_every_access_of_the_guides_kernel_is_seen():
    recorder, a, b, c = guide()
    tiles = 2
    loads = {"A[row, m * BLOCK_SIZE + tx]": tiles, "As[ty, k]": 16 * tiles, "Bs[k, tx]": 16 * tiles}
    for text, count in loads.items():
        assert len(recorder.at(text)) == count
    for access in recorder.accesses:
        assert access.active.shape == access.offset.shape == (4, 256)
        assert access.active.all()
        assert access.blocks.tolist() == [0, 1, 2, 3]
    (store,) = recorder.at("C[row, col]")
    block, thread = np.meshgrid(np.arange(4), np.arange(256), indexing="ij")
    row, col = block // 2 * 16 + thread // 16, block % 2 * 16 + thread % 16
    assert np.array_equal(store.offset, (row * 32 + col) * 4)
    assert np.array_equal(store.value, c[row, col])
    for m, load in enumerate(recorder.at("A[row, m * BLOCK_SIZE + tx]")):
        col = m * 16 + thread % 16
        assert np.array_equal(load.offset, (row * 32 + col) * 4)
        assert np.array_equal(load.value, a[row, col])
        assert (load.interval == 2 * m).all()
    for step, load in enumerate(recorder.at("Bs[k, tx]")):
        m, k = divmod(step, 16)
        assert np.array_equal(load.offset, (k * 16 + thread % 16) * 4)
        assert np.array_equal(load.value, b[m * 16 + k, block % 2 * 16 + thread % 16])
        assert (load.interval == 2 * m + 1).all()
    assert [barrier.interval.tolist() for barrier in recorder.barriers] == [
        [i] * 4 for i in range(4)
    ]


def test_watching_changes_nothing():
    _, a, b, c = guide()
    unseen = np.full_like(c, np.nan)
    simt.launch(Muld, (2, 2), (16, 16), a, b, 32, 32, unseen)
    assert np.array_equal(c, unseen)


def test_masks_offsets_and_values_of_other_accesses():
    def kernel(a, out):
        t = cuda.threadIdx.x
        if t % 2 == 1:
            out[t, 0] += a[3 - t]
            cuda.syncwarp(0b1010)
        cuda.atomic.max(out, (0, 1), t * 10)

    a = np.arange(8, dtype=np.int16)[::-2]
    out = np.zeros((4, 3), np.int32)
    recorder = Recorder()
    simt.launch(kernel, 1, 4, a, out, observer=recorder)
    old, load, store, atomic = recorder.accesses
    odd = [False, True, False, True]
    assert load.active[0].tolist() == store.active[0].tolist() == odd
    assert load.offset[0][odd].tolist() == [-8, 0]  # a is read backwards in memory
    assert load.value[0][odd].tolist() == [3, 7]
    assert load.value.dtype == np.int16
    assert (old.op, store.op, atomic.op) == ("load", "store", "max")
    assert old.site.kind == "load"
    assert store.site.kind == "store"
    assert old.site.line == store.site.line
    assert store.value[0][odd].tolist() == [3, 7]
    assert atomic.offset[0].tolist() == [4] * 4
    assert atomic.value[0].tolist() == [0, 10, 20, 30]
    assert load.warp_interval.tolist() == [[0]]
    assert atomic.warp_interval.tolist() == [[0]]  # not all of the warp have waited
    assert load.some_lanes is None
    assert atomic.some_lanes.tolist() == [[[0, 1, 0, 1]], [[0, 10, 0, 10]]]


def test_addresses_keep_the_alignment_and_the_overlap_of_real_ones():
    def kernel(a, b, other):
        other[0] = a[0] + b[0]

    buffer = np.zeros(1000, F)
    a, b, other = buffer[10:20], buffer[15:500:7], np.zeros(5, F)
    recorder = Recorder()
    simt.launch(kernel, 1, 1, a, b, other, observer=recorder)
    info = {array.name: array for array in recorder.launch.arrays}
    assert info["b"].base - info["a"].base == 20
    for name, array in (("a", a), ("b", b), ("other", other)):
        assert info[name].base % 256 == array.ctypes.data % 256
    assert info["other"].base // (2 << 20) != info["a"].base // (2 << 20)
    assert info["b"].strides == (28,)
    assert info["b"].nbytes == 28 * 69 + 4


def test_faults_can_be_carried_on():
    def kernel(a, out):
        i = cuda.grid(1)
        out[i + 1] = a[i]

    recorder = Recorder(carry_on=True)
    out = np.zeros(5)
    simt.launch(kernel, 1, 6, np.arange(4.0), out, observer=recorder)
    read, write = recorder.faults
    assert read.active[0].tolist() == [False] * 4 + [True] * 2
    assert read.indices[0][0].tolist() == [0, 1, 2, 3, 4, 5]
    assert read.array.name == "a"
    assert write.active[0].tolist() == [False] * 4 + [True] * 2
    assert write.reason == "out of range"
    assert out[:4].tolist() == [0, 0, 1, 2]
    load, store = recorder.accesses
    assert load.active[0].tolist() == store.active[0].tolist() == [True] * 4 + [False] * 2
    with pytest.raises(KernelError, match="out of range"):
        simt.launch(kernel, 1, 6, np.arange(4.0), out, observer=Recorder())


def test_reads_out_of_range_that_are_carried_on_give_poison():
    def kernel(a, whole, out):
        i = cuda.grid(1)
        out[i] = a[i * 4] + whole[i * 4]

    out = np.zeros(2)
    simt.launch(
        kernel, 1, 2, np.ones(2), np.ones(2, np.int32), out, observer=Recorder(carry_on=True)
    )
    assert out[0] == 2
    assert np.isnan(out[1])


def test_barriers_that_diverge_can_be_carried_on():
    def kernel(out):
        t = cuda.threadIdx.x
        if t < 3:
            cuda.syncthreads()
        out[t] = 1

    recorder = Recorder(carry_on=True)
    out = np.zeros(8)
    simt.launch(kernel, 1, 8, out, observer=recorder)
    (fault,) = recorder.faults
    assert fault.reason == "barrier divergence"
    assert fault.active[0].tolist() == [False] * 3 + [True] * 5
    (barrier,) = recorder.barriers
    assert barrier.arrived[0].tolist() == [True] * 3 + [False] * 5
    assert barrier.live.all()
    assert (out == 1).all()


def test_integers_divided_by_zero_are_told_of_and_are_0():
    def kernel(x, y, out):
        t = cuda.threadIdx.x
        out[t, 0] = x[t] // y[t]
        out[t, 1], out[t, 2] = divmod(x[t], y[t])
        out[t, 3] = x[t] % y[t] if y[t] != 0 else -1
        if y[t] != 0:
            out[t, 4] = x[t] % y[t]
        out[t, 5] = 7
        out[t, 5] %= y[t]
        out[t, 6] = t // (len(y.shape) - 1)

    recorder = Recorder()
    y = np.array([2, 0, -3, 0], np.int32)
    out = np.full((4, 7), -1, np.int64)
    simt.launch(kernel, 1, 4, np.full(4, 7, np.int32), y, out, observer=recorder)
    by_y = [False, True, False, True]
    assert [(f.site.text, f.active[0].tolist()) for f in recorder.faults] == [
        ("x[t] // y[t]", by_y),
        ("divmod(x[t], y[t])", by_y),
        ("y[t]", by_y),
        ("t // (len(y.shape) - 1)", [True] * 4),
    ]
    assert {f.reason for f in recorder.faults} == {"division by zero"}
    assert out[1].tolist() == [0, 0, 0, -1, -1, 0, 0]
    assert out[0].tolist() == [3, 3, 1, 1, 1, 1, 0]


def test_floats_divided_by_zero_are_infinite_and_no_fault():
    def kernel(x, out):
        t = cuda.threadIdx.x
        out[t] = x[t] / F(0)

    recorder, out = Recorder(), np.zeros(2, F)
    simt.launch(kernel, 1, 2, np.ones(2, F), out, observer=recorder)
    assert np.isinf(out).all()
    assert not recorder.faults


def test_a_program_tells_what_a_static_analysis_needs():
    program = simt.program(Muld)
    assert program is simt.program(Muld.py_func)
    assert program.name == "Muld"
    assert program.parameters == ("A", "B", "wA", "wB", "C")
    assert program.constants["BLOCK_SIZE"] == 16
    assert isinstance(program.tree, ast.FunctionDef)
    subscripts = [node for node in ast.walk(program.tree) if isinstance(node, ast.Subscript)]
    found = [program.site(node, "load") or program.site(node, "store") for node in subscripts]
    assert sorted(site.text for site in found) == sorted(
        ["A[row, m * BLOCK_SIZE + tx]", "As[ty, k]", "As[ty, tx]", "B[m * BLOCK_SIZE + ty, col]",
         "Bs[k, tx]", "Bs[ty, tx]", "C[row, col]"]
    )  # fmt: skip
    lines = Path(program.filename).read_text().splitlines()
    for site in program.sites:
        assert lines[site.line - 1][site.column : site.end_column] == site.text


def helper(values, t):
    cuda.syncthreads()
    return values[t]


def test_device_functions_have_their_sites_in_the_program():
    def kernel(out):
        out[0] = helper(out, 0)

    program = simt.program(kernel)
    assert [f.name for f in program.functions] == ["kernel", "helper"]
    assert [(s.function, s.kind, s.array) for s in program.sites] == [
        ("kernel", "store", "out"),
        ("helper", "barrier", None),
        ("helper", "load", "values"),
    ]


def test_a_barrier_can_be_taken_out():
    def kernel(out):
        s = cuda.shared.array(4, np.int64)
        t = cuda.threadIdx.x
        s[t] = t
        cuda.syncthreads()
        out[t] = s[3 - t]
        total = cuda.syncthreads_count(t > 1)
        out[t] += 10 * total

    program = simt.program(kernel)
    line = line_of(kernel, "cuda.syncthreads()")
    ablated = program.without_barrier(line)
    for version, barriers in ((program, 2), (ablated, 1), (program, 2)):
        recorder, out = Recorder(), np.zeros(4)
        simt.launch(version, 1, 4, out, observer=recorder)
        assert out.tolist() == [23, 22, 21, 20]  # in lockstep the values come out all the same
        assert len(recorder.barriers) == barriers
    with pytest.raises(
        OptionError, match=f"no barrier on line {line + 1}; .* lines {line}, {line + 2}"
    ):
        program.without_barrier(line + 1)
