"""Kernels with one known fault each, and kernels without any: explain must tell them apart.

The faults are of the kinds that a course on CUDA warns of; many show in one block only, or in one
thread, or with some data, and most give right values when lanes run in lockstep.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tilewise as tw
from tests.explain.support import floats
from tilewise.simt import cuda

f4 = np.float32
RACES = {"read-after-write", "write-after-read", "write-after-write"}
FAULTY: dict[str, Any] = {}
CLEAN: dict[str, Any] = {}


def faulty(kind: str, *launch: Any) -> Callable[[Any], Any]:
    def known(kernel: Any) -> Any:
        FAULTY[kernel.__name__] = (kind, kernel, launch)
        return kernel

    return known


def clean(*launch: Any) -> Callable[[Any], Any]:
    def known(kernel: Any) -> Any:
        CLEAN[kernel.__name__] = (kernel, launch)
        return kernel

    return known


def ints(*shape: int) -> Any:
    return shape, "int32"


BUFFER = np.arange(600, dtype=f4)
COLLIDING = np.where(np.arange(512) == 300, 299, np.arange(512))
TOO_FAR = np.where(np.arange(512) == 300, 512, np.arange(512))
MOST = np.arange(512) != 300


@cuda.jit(device=True)
def helper(x, n):
    if x < n:
        y = x
    return y


@cuda.jit(device=True)
def stash(i, v, full):
    w = cuda.local.array(2, f4)
    if full:
        w[0] = v
        w[1] = v
    return w[0] + w[1]


@cuda.jit(device=True)
def devstore(s, i, v):
    s[i] = v


@faulty("barrier divergence", 4, 128, floats(512), floats(512))
def barrier_in_if(a, c):
    s = cuda.shared.array(128, f4)
    t = cuda.threadIdx.x
    i = cuda.grid(1)
    if t < 64:
        s[t] = a[i]
        cuda.syncthreads()
    c[i] = s[t % 64]


@faulty("barrier divergence", 4, 64, floats(256), floats(256))
def break_before_barrier(a, c):
    t = cuda.threadIdx.x
    for k in range(4):
        if t > k * 10 + 20:
            break
        cuda.syncthreads()
    c[cuda.grid(1)] = a[cuda.grid(1)]


@faulty("barrier divergence", 8, 64, MOST, floats(512))
def data_barrier(m, c):
    if m[cuda.grid(1)]:
        cuda.syncthreads()
    c[cuda.grid(1)] = 1


@faulty("barrier divergence", 64, 64, floats(4096))
def late_block_div(c):
    t = cuda.threadIdx.x
    if cuda.blockIdx.x * 64 + t < 4090:
        cuda.syncthreads()
    c[cuda.grid(1)] = 1


@faulty("out of range", 4, 128, floats(500), floats(500))
def no_guard(a, c):
    i = cuda.grid(1)
    c[i] = a[i]


@faulty("out of range", 4, 128, floats(512), floats(512))
def stencil_edges(a, c):
    i = cuda.grid(1)
    c[i] = a[i - 1] + a[i + 1]


@faulty("out of range", 8, 64, TOO_FAR, floats(512))
def data_index_range(ix, c):
    c[ix[cuda.grid(1)]] = cuda.grid(1)


@faulty("out of range", 1, 32, floats(32))
def shared_negative(c):
    s = cuda.shared.array(32, f4)
    t = cuda.threadIdx.x
    s[t - 1] = 1
    cuda.syncthreads()
    c[t] = s[t - 1]


@faulty("race", 4, 128, ints(512), ints(16))
def histogram_no_atomic(a, h):
    h[a[cuda.grid(1)] % 16] += 1


@faulty("race", 4, 128, floats(512))
def shift_in_place(a):
    i = cuda.grid(1)
    if i < 511:
        a[i] = a[i + 1]


@faulty("race", 4, 128, floats(512), floats(512))
def warp_reduce_no_syncwarp(a, c):
    s = cuda.shared.array(128, f4)
    t = cuda.threadIdx.x
    s[t] = a[cuda.grid(1)]
    cuda.syncthreads()
    h = 64
    while h > 16:
        if t < h:
            s[t] += s[t + h]
        cuda.syncthreads()
        h //= 2
    if t < 16:
        s[t] += s[t + 16]
        s[t] += s[t + 8]
    if t == 0:
        c[cuda.blockIdx.x] = s[0]


@faulty("race", 4, (16, 16), floats(4, 16, 16), floats(4, 16, 16))
def transpose_no_barrier(a, c):
    s = cuda.shared.array((16, 16), f4)
    tx = cuda.threadIdx.x
    ty = cuda.threadIdx.y
    b = cuda.blockIdx.x
    s[ty, tx] = a[b, ty, tx]
    c[b, ty, tx] = s[tx, ty]


@faulty("race", 1, 64, floats(64), floats(64))
def pingpong_same_buffer(a, c):
    s = cuda.shared.array(64, f4)
    t = cuda.threadIdx.x
    s[t] = a[t]
    cuda.syncthreads()
    for _ in range(4):
        s[t] = s[(t + 1) % 64]
        cuda.syncthreads()
    c[t] = s[t]


@faulty("race", 4, 128, BUFFER[:512], BUFFER[1:513])
def overlap_views(a, c):
    i = cuda.grid(1)
    c[i] = a[i]


@faulty("race", 1, 32, floats(32), floats(32))
def half_syncwarp(a, c):
    s = cuda.shared.array(32, f4)
    t = cuda.threadIdx.x
    s[t] = a[t]
    if t < 16:
        cuda.syncwarp(0xFFFF)
    c[t] = s[31 - t]


@faulty("race", 1, 64, floats(64), floats(1), floats(64))
def atomic_and_plain(a, s, c):
    t = cuda.threadIdx.x
    cuda.atomic.add(s, 0, a[t])
    c[t] = s[0]


@faulty("race", 8, 64, floats(512), floats(512))
def overlap_blocks(a, c):
    c[cuda.blockIdx.x * 63 + cuda.threadIdx.x] = a[cuda.threadIdx.x] + cuda.blockIdx.x


@faulty("race", 8, 64, COLLIDING, floats(512))
def data_index_collision(ix, c):
    c[ix[cuda.grid(1)]] = cuda.grid(1)


@faulty("race", 2, 64, floats(128))
def block_dependent_barrier(c):
    s = cuda.shared.array(64, f4)
    t = cuda.threadIdx.x
    s[t] = t
    if cuda.blockIdx.x == 0:
        cuda.syncthreads()
    c[cuda.grid(1)] = s[63 - t]


@faulty("race", 1, 64, floats(64), floats(64))
def tiles_of_16_across(a, c):
    s = cuda.shared.array(64, f4)
    t = cuda.threadIdx.x
    half = t % 32 // 16
    s[t] = a[t]
    cuda.syncwarp(0xFFFF << (16 * half))
    c[t] = s[t // 32 * 32 + 31 - t % 32]


@faulty("race", 64, 64, floats(4096), floats(4096))
def neighbor_block(a, c):
    i = cuda.grid(1)
    a[i] = 1
    c[i] = a[(i + 64) % 4096]


@faulty("race", 64, 64, floats(4096))
def last_only(c):
    b = cuda.blockIdx.x
    if b == 63:
        b = 0
    c[b * 64 + cuda.threadIdx.x] = cuda.blockIdx.x


@faulty("race", 64, 64, floats(4096))
def float_block(c):
    b = int(cuda.blockIdx.x * 0.99)
    c[b * 64 + cuda.threadIdx.x] = cuda.blockIdx.x


@faulty("race", 64, 64, floats(4096))
def loop_block(c):
    b = 0
    for k in range(cuda.blockIdx.x):
        if k != 30:
            b += 1
    c[b * 64 + cuda.threadIdx.x] = cuda.blockIdx.x


@faulty("race", 64, 64, floats(4096), ints(1))
def atomic_ticket(c, n):
    t = cuda.threadIdx.x
    k = cuda.atomic.add(n, 0, 1) // 2
    c[k] = t


@faulty("read-after-write", 4, 128, floats(512), floats(512))
def no_barrier(a, c):
    s = cuda.shared.array(128, f4)
    t = cuda.threadIdx.x
    i = cuda.grid(1)
    s[t] = a[i]
    c[i] = s[127 - t]


@faulty("unassigned variable", 8, 64, floats(512))
def device_unassigned(c):
    c[cuda.grid(1)] = helper(cuda.grid(1), 500)


@faulty("uninitialised read", 4, 128, floats(512), floats(512))
def uninit_accumulate(a, c):
    s = cuda.shared.array(128, f4)
    t = cuda.threadIdx.x
    i = cuda.grid(1)
    s[t] += a[i]
    c[i] = s[t]


@faulty("uninitialised read", 4, 128, ints(512), ints(4))
def uninit_atomic(a, c):
    s = cuda.shared.array(1, np.int32)
    cuda.atomic.add(s, 0, a[cuda.grid(1)])
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        c[cuda.blockIdx.x] = s[0]


@faulty("uninitialised read", 8, 64, floats(512))
def local_uninit_block(c):
    w = cuda.local.array(2, f4)
    w[0] = 1
    if cuda.blockIdx.x < 6:
        w[1] = 2
    c[cuda.grid(1)] = w[0] + w[1]


@faulty("uninitialised read", 8, 64, floats(512))
def device_local_second_call(c):
    i = cuda.grid(1)
    x = stash(i, f4(1), True)
    c[i] = x + stash(i, f4(1), False)


@faulty("write-after-read", 4, 128, floats(512), floats(512))
def no_second_barrier(a, c):
    s = cuda.shared.array(128, f4)
    t = cuda.threadIdx.x
    i = cuda.grid(1)
    tot = f4(0)
    for k in range(3):
        s[t] = a[(i + k) % 512]
        cuda.syncthreads()
        tot += s[127 - t]
    c[i] = tot


@faulty("write-after-write", 4, 128, floats(512), floats(1))
def sum_race(a, c):
    c[0] = a[cuda.grid(1)]


@faulty("write-after-write", 4, 64, floats(256))
def dev_store_race(c):
    devstore(c, cuda.threadIdx.x, cuda.blockIdx.x)


@clean(4, 128, floats(500), floats(500))
def guarded(a, c):
    i = cuda.grid(1)
    if i < c.size:
        c[i] = a[i]


@clean(4, 128, floats(512), floats(512))
def reverse_ok(a, c):
    s = cuda.shared.array(128, f4)
    t = cuda.threadIdx.x
    i = cuda.grid(1)
    s[t] = a[i]
    cuda.syncthreads()
    c[i] = s[127 - t]


@clean(4, 128, floats(512), floats(4))
def reduce_ok(a, c):
    s = cuda.shared.array(128, f4)
    t = cuda.threadIdx.x
    s[t] = a[cuda.grid(1)]
    cuda.syncthreads()
    h = 64
    while h > 0:
        if t < h:
            s[t] += s[t + h]
        cuda.syncthreads()
        h //= 2
    if t == 0:
        c[cuda.blockIdx.x] = s[0]


@clean(4, 128, floats(512), floats(4))
def reduce_warp_ok(a, c):
    s = cuda.shared.array(128, f4)
    t = cuda.threadIdx.x
    s[t] = a[cuda.grid(1)]
    cuda.syncthreads()
    h = 64
    while h > 16:
        if t < h:
            s[t] += s[t + h]
        cuda.syncthreads()
        h //= 2
    if t < 32:
        h = 16
        while h > 0:
            v = s[t]
            if t < h:
                v = s[t] + s[t + h]
            cuda.syncwarp()
            s[t] = v
            cuda.syncwarp()
            h //= 2
    if t == 0:
        c[cuda.blockIdx.x] = s[0]


@clean(4, 128, floats(512), floats(1))
def atomic_sum(a, c):
    cuda.atomic.add(c, 0, a[cuda.grid(1)])


@clean(4, 128, ints(512), ints(16))
def histogram_ok(a, h):
    s = cuda.shared.array(16, np.int32)
    t = cuda.threadIdx.x
    if t < 16:
        s[t] = 0
    cuda.syncthreads()
    cuda.atomic.add(s, a[cuda.grid(1)] % 16, 1)
    cuda.syncthreads()
    if t < 16:
        cuda.atomic.add(h, t, s[t])


@clean(4, 128, floats(1000), floats(1000))
def grid_stride(a, c):
    i = cuda.grid(1)
    while i < 1000:
        c[i] = a[i]
        i += cuda.gridsize(1)


@clean(4, 128, floats(1000), floats(1000))
def grid_stride_for(a, c):
    for i in range(cuda.grid(1), 1000, cuda.gridsize(1)):
        c[i] = a[i]


@clean((4, 4), (16, 16), floats(64, 64), floats(64, 64))
def transpose_ok(a, c):
    s = cuda.shared.array((16, 17), f4)
    tx = cuda.threadIdx.x
    ty = cuda.threadIdx.y
    x = cuda.blockIdx.x * 16 + tx
    y = cuda.blockIdx.y * 16 + ty
    s[ty, tx] = a[y, x]
    cuda.syncthreads()
    c[cuda.blockIdx.x * 16 + ty, cuda.blockIdx.y * 16 + tx] = s[tx, ty]


@clean(4, 128, floats(512), floats(512))
def shuffle_sum(a, c):
    i = cuda.grid(1)
    v = a[i]
    d = 16
    while d > 0:
        v += cuda.shfl_down_sync(0xFFFFFFFF, v, d)
        d //= 2
    c[i] = v


@clean(4, 128, floats(512), floats(512))
def local_window(a, c):
    i = cuda.grid(1)
    w = cuda.local.array(3, f4)
    for k in range(3):
        w[k] = a[(i + k) % 512]
    c[i] = w[0] + w[1] + w[2]


@clean(4, 128, floats(514), floats(512))
def halo(a, c):
    s = cuda.shared.array(130, f4)
    t = cuda.threadIdx.x
    i = cuda.grid(1)
    s[t + 1] = a[i + 1]
    if t == 0:
        s[0] = a[i]
    if t == 127:
        s[129] = a[i + 2]
    cuda.syncthreads()
    c[i] = s[t] + s[t + 1] + s[t + 2]


@clean(1, 64, floats(64), floats(64))
def pingpong_ok(a, c):
    s = cuda.shared.array((2, 64), f4)
    t = cuda.threadIdx.x
    s[0, t] = a[t]
    cuda.syncthreads()
    p = 0
    for _ in range(4):
        s[1 - p, t] = s[p, (t + 1) % 64]
        cuda.syncthreads()
        p = 1 - p
    c[t] = s[p, t]


@clean(1, 64, floats(64), floats(64))
def scan_ok(a, c):
    s = cuda.shared.array(64, f4)
    t = cuda.threadIdx.x
    s[t] = a[t]
    cuda.syncthreads()
    d = 1
    while d < 64:
        v = f4(0)
        if t >= d:
            v = s[t - d]
        cuda.syncthreads()
        s[t] += v
        cuda.syncthreads()
        d *= 2
    c[t] = s[t]


@clean(4, 128, floats(512), floats(512))
def masked_index(a, c):
    i = cuda.grid(1)
    c[i] = a[i - 1] if i > 0 else f4(0)


@clean(4, 128, floats(512), floats(512))
def short_circuit(a, c):
    i = cuda.grid(1)
    if i > 0 and a[i - 1] > 0:
        c[i] = a[i]
    else:
        c[i] = 0


@clean(1, 32, floats(32), floats(32))
def half_syncwarp_ok(a, c):
    s = cuda.shared.array(32, f4)
    t = cuda.threadIdx.x
    s[t] = a[t]
    if t < 16:
        cuda.syncwarp(0xFFFF)
        c[t] = s[15 - t]


@clean(1, 64, floats(64), floats(64))
def tiles_of_16(a, c):
    s = cuda.shared.array(64, f4)
    t = cuda.threadIdx.x
    half = t % 32 // 16
    s[t] = a[t]
    cuda.syncwarp(0xFFFF << (16 * half))
    v = s[t // 16 * 16 + 15 - t % 16]
    cuda.syncwarp(0xFFFF << (16 * half))
    s[t] = v
    cuda.syncwarp(0xFFFF << (16 * half))
    c[t] = s[t // 16 * 16 + (t + 1) % 16]


@clean(1, 64, floats(64), floats(64))
def tiles_then_all(a, c):
    s = cuda.shared.array(64, f4)
    t = cuda.threadIdx.x
    half = t % 32 // 16
    s[t] = a[t]
    cuda.syncwarp(0xFFFF << (16 * half))
    s[t] = s[t] + 1
    cuda.syncwarp()
    c[t] = s[t // 32 * 32 + 31 - t % 32]


def errors(kernel: Any, launch: Any) -> set[str]:
    report = tw.explain(kernel, *launch)
    assert report.exit_code == (1 if any(f.severity == "error" for f in report.findings) else 0)
    return {f.kind for f in report.findings if f.severity == "error"}


@pytest.mark.parametrize("name", FAULTY)
def test_a_fault_is_found_and_no_other(name: str) -> None:
    kind, kernel, launch = FAULTY[name]
    found = errors(kernel, launch)
    assert found
    assert found <= (RACES if kind == "race" else {kind})


@pytest.mark.parametrize("name", CLEAN)
def test_nothing_is_found_where_nothing_is_wrong(name: str) -> None:
    assert errors(*CLEAN[name]) == set()


def test_writes_that_agree_in_these_data_are_not_said_to_agree_in_all() -> None:
    def one_of_many(a, c):  # type: ignore[no-untyped-def]
        c[0] = a[cuda.grid(1)]

    alike = tw.explain(one_of_many, 4, 128, np.ones(512, f4), floats(1))
    assert (alike.exit_code, alike.all_data) == (0, False)
    races = [f for f in alike.findings if f.kind == "write-after-write"]
    assert {(f.severity, f.scope) for f in races} == {("warning", "this launch")}
    assert "no harmful race" in str(alike)
    assert "for all data" not in str(alike)
    assert "what they write is loaded" in alike.data_dependence
    assert tw.explain(one_of_many, 4, 128, np.arange(512, dtype=f4), floats(1)).exit_code == 1
