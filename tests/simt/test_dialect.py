"""What kernels may say, construct by construct; results worked out by hand or in plain Python."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.simt import oracle
from tests.simt.generated import compiled
from tilewise import simt
from tilewise.errors import KernelError
from tilewise.simt import cuda

F = np.float32


def run(kernel, grid, block, *arguments):
    """Launch a kernel, and hold it against one thread at a time."""
    copies = [a.copy() if isinstance(a, np.ndarray) else a for a in arguments]
    oracle.run(kernel, grid, block, *copies)
    simt.launch(kernel, grid, block, *arguments)
    for have, want in zip(arguments, copies, strict=True):
        if isinstance(have, np.ndarray):
            np.testing.assert_array_equal(have, want)


def test_where_a_thread_is():
    def kernel(out):
        x, y, z = cuda.grid(3)
        i = ((z * cuda.gridsize(3)[1]) + y) * cuda.gridsize(3)[0] + x
        out[i, 0] = cuda.threadIdx.x + 10 * cuda.threadIdx.y + 100 * cuda.threadIdx.z
        out[i, 1] = cuda.blockIdx.x + 10 * cuda.blockIdx.y + 100 * cuda.blockIdx.z
        out[i, 2] = cuda.blockDim.x + 10 * cuda.blockDim.y + 100 * cuda.blockDim.z
        out[i, 3] = cuda.gridDim.x + 10 * cuda.gridDim.y + 100 * cuda.gridDim.z
        out[i, 4] = cuda.laneid

    out = np.full((4 * 6 * 6, 5), -1)
    simt.launch(kernel, (2, 3, 2), (2, 2, 3), out)
    for z, y, x in np.ndindex(6, 6, 4):
        i = (z * 6 + y) * 4 + x
        thread, block = (x % 2, y % 2, z % 3), (x // 2, y // 2, z // 3)
        lane = thread[0] + 2 * thread[1] + 4 * thread[2]
        expected = [
            thread[0] + 10 * thread[1] + 100 * thread[2],
            block[0] + 10 * block[1] + 100 * block[2],
            2 + 20 + 300,
            2 + 30 + 200,
            lane,
        ]
        assert out[i].tolist() == expected


def test_G4_lanes_of_a_block_run_along_x_first():
    """Case G4: in an 8×4 block over a flat array, lane = tx + 8·ty."""

    def kernel(lane, other):
        tx = cuda.threadIdx.x
        ty = cuda.threadIdx.y
        lane[tx + 8 * ty] = cuda.laneid
        other[ty + 4 * tx] = cuda.laneid

    lane, other = np.full(32, -1), np.full(32, -1)
    run(kernel, 1, (8, 4), lane, other)
    assert lane.tolist() == list(range(32))
    assert other.tolist() == [tx + 8 * ty for tx in range(8) for ty in range(4)]


def test_shared_arrays_on_one_line_are_two_arrays():
    def kernel(out):
        a, b = cuda.shared.array(4, np.int32), cuda.shared.array(4, np.int32)
        t = cuda.threadIdx.x
        a[t] = t
        b[t] = 10 * t
        cuda.syncthreads()
        out[t] = a[3 - t] + b[t]

    out = np.zeros(4, np.int64)
    run(kernel, 1, 4, out)
    assert out.tolist() == [3, 12, 21, 30]


def test_shared_memory_starts_poisoned_and_is_each_blocks_own():
    def kernel(floats, whole):
        s = cuda.shared.array((2, 3), np.float32)
        w = cuda.shared.array(2, np.uint16)
        if cuda.blockIdx.x == 0:
            s[0, 1] = 5
            w[1] = 7
        cuda.syncthreads()
        floats[cuda.blockIdx.x] = s[0, 1]
        whole[cuda.blockIdx.x] = w[1]

    floats, whole = np.zeros(2, F), np.zeros(2, np.uint16)
    simt.launch(kernel, 2, 1, floats, whole)
    assert floats[0] == 5
    assert np.isnan(floats[1])
    assert whole.tolist() == [7, 0xABAB]


def test_local_arrays_are_each_threads_own():
    def kernel(out):
        mine = cuda.local.array(3, np.int64)
        t = cuda.grid(1)
        for k in range(3):
            mine[k] = 100 * t + k
        cuda.syncthreads()
        out[t] = mine[0] + mine[1] + mine[2]

    out = np.zeros(10, np.int64)
    run(kernel, 2, 5, out)
    assert out.tolist() == [300 * t + 3 for t in range(10)]


def test_a_value_read_is_kept_when_memory_changes():
    def kernel(a, out):
        before = a[0]
        a[0] = 5.0
        out[0] = before
        out[1] = a[0]

    out = np.zeros(2)
    run(kernel, 1, 1, np.array([3.0]), out)
    assert out.tolist() == [3.0, 5.0]


def device_pair(x, y):
    if x > y:
        return x, y
    return y, x


def device_sum(values, count):
    total = 0.0
    for k in range(count):
        if values[k] < 0:
            break
        total += values[k]
    return total


def device_waits(shared, t):
    shared[t] = t
    cuda.syncthreads()
    return shared[(t + 1) % 4]


def test_device_functions():
    def kernel(values, out):
        t = cuda.threadIdx.x
        high, low = device_pair(values[t], values[3 - t])
        out[t, 0] = high - low
        out[t, 1] = device_sum(values, t + 1)
        shared = cuda.shared.array(4, np.int64)
        out[t, 2] = device_waits(shared, t)

    out = np.zeros((4, 3))
    run(kernel, 1, 4, np.array([1.0, 4.0, -1.0, 6.0]), out)
    assert out.tolist() == [[5, 1, 1], [5, 5, 2], [5, 5, 3], [5, 5, 0]]


def test_loops_end_for_each_thread_in_its_own_time():
    def kernel(out):
        t = cuda.grid(1)
        steps = 0
        while True:
            steps += 1
            if steps % 2 == 0:
                continue
            if steps > t:
                break
        seen = 0
        for k in range(t, 12, 3):
            if k == 9:
                break
            seen += 100
        out[t] = seen + steps
        for k in range(t):
            if k == 2:
                return
        out[t] += 10000

    out = np.zeros(9, np.int64)
    run(kernel, 3, 3, out)


def test_and_or_and_conditionals_guard_what_they_do_not_need():
    def kernel(a, out):
        i = cuda.grid(1) - 2
        out[i + 2] = 1 if i >= 0 and i < a.shape[0] and a[i] > 0 else 0
        out[i + 2] += 10 if i < 0 or i >= a.shape[0] or a[i] > 0 else 0
        out[i + 2] += 100 if 0 <= i < 3 and -1 < a[i] < 5 else 0
        out[i + 2] += int(a[i]) * 1000 if 0 <= i < 3 else -1000

    out = np.zeros(8, np.int64)
    run(kernel, 1, 8, np.array([1.0, -1.0, 2.0]), out)
    assert out.tolist() == [-990, -990, 1111, -1000, 2111, -990, -990, -990]


def test_integers_divide_shift_and_wrap_as_on_the_gpu():
    """Zero divisors give 0 (numba's error model on the GPU), the one overflow too."""

    def kernel(a, b, out):
        i = cuda.grid(1)
        out[i, 0] = a[i] // b[i]
        out[i, 1] = a[i] % b[i]
        out[i, 2] = a[i] * a[i]
        out[i, 3] = a[i] << (b[i] & 63)
        out[i, 4] = a[i] >> (b[i] & 63)
        out[i, 5] = -a[i]

    low = -(2**63)
    a = np.array([7, -7, 7, -7, 5, low, low, 2**62])
    b = np.array([2, 2, -2, -2, 0, -1, 1, 3])
    out = np.zeros((8, 6), np.int64)
    run(kernel, 1, 8, a, b, out)
    assert out[:, 0].tolist() == [3, -4, -4, 3, 0, 0, low, 2**62 // 3]
    assert out[:, 1].tolist() == [1, 1, -1, -1, 0, 0, 0, 2**62 % 3]


def test_float_division_modulo_and_conversions():
    def kernel(x, y, out, whole):
        i = cuda.grid(1)
        out[i, 0] = x[i] / y[i]
        out[i, 1] = x[i] // y[i]
        out[i, 2] = x[i] % y[i]
        whole[i] = np.int32(x[i] * 1e9)

    x, y = np.array([7.5, -7.5, 7.5, 1.0, np.nan]), np.array([2.0, 2.0, -2.0, 0.0, 1.0])
    out, whole = np.zeros((5, 3)), np.zeros(5, np.int32)
    simt.launch(kernel, 1, 5, x, y, out, whole)
    with np.errstate(all="ignore"):
        expected = np.stack([x / y, x // y, x % y], axis=1)
    np.testing.assert_array_equal(out, expected)
    assert whole.tolist() == [2**31 - 1, -(2**31), 2**31 - 1, 1_000_000_000, -(2**31)]


def test_remainders_of_floats_are_what_nvvm_makes_of_them():
    """Bits of numba-cuda 0.30.4's PTX, executed: not exact, and NaN where the divisor is inf."""

    def kernel(x, y, a, b, out):
        i = cuda.grid(1)
        out[i, 0] = x[i] % y[i]
        out[i, 1] = x[i] // y[i]
        out[i, 2] = a[i] % b[i]
        out[i, 3] = a[i] // b[i]
        if i == 0:
            z = np.float32(1e6)
            out[6, 2], out[6, 3] = divmod(z, np.float32(0.1))

    a = np.array([1e6, -1e6, 1e9, 1, -3, 6, 0])
    b = np.array([0.1, 0.1, -0.7, np.inf, np.inf, -3, -3])
    out = np.zeros((7, 4))
    simt.launch(kernel, 1, 7, a.astype(F), b.astype(F), a, b, out)
    expected = [
        [0.08509884029626846, 9999999.0, 0.09999999994448885, 9999999.0],
        [0.014901161193847656, -1e7, 5.551115123125783e-11, -1e7],
        [41.92989730834961, -1428571392.0, -0.2999999365586843, -1428571429.0],
        *[[np.nan] * 4] * 2,
        [-0.0, -2.0, -0.0, -2.0],
        [-0.0, -0.0, 9999999.0, 0.08509884029626846],
    ]
    np.testing.assert_array_equal(out, expected)
    assert np.signbit(out[5]).all()


def test_floats_beyond_an_integer_type_saturate_as_ptx_has_it():
    """Recorded from numba-cuda 0.30.4's PTX: to 8 bits by way of 16; of a NaN it is the width."""

    def kernel(x, y, u1, i1, i2, u2, i4, u8):
        i = cuda.grid(1)
        u1[i, 0] = i1[i, 0] = i2[i, 0] = u2[i, 0] = i4[i, 0] = u8[i, 0] = x[i]
        u1[i, 1] = i1[i, 1] = i2[i, 1] = u2[i, 1] = i4[i, 1] = u8[i, 1] = y[i]

    y = np.array([300.0, -300.0, 7e4, -7e4, np.inf, np.nan])
    outs = [np.zeros((6, 2), code) for code in ("u1", "i1", "i2", "u2", "i4", "u8")]
    simt.launch(kernel, 1, 6, y.astype(F), y, *outs)
    expected = [
        ([44, 0, 255, 0, 255], 0, 0),
        ([44, -44, -1, 0, -1], 0, 0),
        ([300, -300, 32767, -32768, 32767], 0, -32768),
        ([300, 0, 65535, 0, 65535], 0, 32768),
        ([300, -300, 70000, -70000, 2**31 - 1], 0, -(2**31)),
        ([300, 0, 70000, 0, 2**64 - 1], 2**63, 2**63),
    ]
    for out, (numbers, of_float32, of_float64) in zip(outs, expected, strict=True):
        assert out[:, 0].tolist() == [*numbers, of_float32], out.dtype
        assert out[:, 1].tolist() == [*numbers, of_float64], out.dtype


def test_unsigned_bounds_give_an_unsigned_loop_variable():
    """Bounds of each thread's own, too; and brev of an int64, and divmod of both signs."""

    def kernel(u, i, v, out, parts):
        g = cuda.grid(1)
        total = np.uint64(2**63)
        for k in range(u[g], u[g] + np.uint32(3)):
            total ^= k
        out[g] = total
        parts[g, 0] = cuda.brev(i[g])
        parts[g, 1], parts[g, 2] = divmod(i[g], v[g])

    out, parts = np.zeros(2, np.uint64), np.zeros((2, 3))
    u, i = np.array([4, 9], np.uint32), np.array([1, -3])
    simt.launch(kernel, 1, 2, u, i, np.array([2, 8], np.uint64), out, parts)
    assert out.tolist() == [2**63 ^ 4 ^ 5 ^ 6, 2**63 ^ 9 ^ 10 ^ 11]
    assert parts.tolist() == [[2.0**31, 0, 1], [2**32 - 2**30 - 1, -1, 5]]


def test_types_are_numbas_so_stores_round_when_they_do():
    """float32 with a literal is float64; int32 + int32 does not wrap; a branch unifies types."""

    def kernel(x, i32, out, whole):
        out[0] = x[0] + 1e-9
        whole[0] = i32[0] + i32[0]
        narrow = np.int32(i32[0] + i32[0])
        whole[1] = narrow
        v = 1
        if x[0] > 0:
            v = 2.5
        out[1] = v / 2
        out[2] = x[0] * np.float32(1e-9)

    out, whole = np.zeros(3), np.zeros(2, np.int64)
    simt.launch(kernel, 1, 1, np.array([1], F), np.array([2**31 - 1], np.int32), out, whole)
    assert out.tolist() == [1 + 1e-9, 1.25, float(F(1e-9))]
    assert whole.tolist() == [2**32 - 2, -2]


def test_math_and_extremes():
    def kernel(x, out):
        i = cuda.grid(1)
        out[i, 0] = math.sqrt(abs(x[i]))
        out[i, 1] = math.floor(x[i]) + math.ceil(x[i]) * 10
        out[i, 2] = min(x[i], np.float32(0.25))
        out[i, 3] = max(x[i], 0.25, -3)
        out[i, 4] = round(x[i])
        out[i, 5] = math.copysign(x[i], -1.0) + math.pi
        out[i, 6] = 1 if math.isnan(x[i]) or math.isinf(x[i]) else 0
        out[i, 7] = math.atan2(x[i], 2.0)
        out[i, 8] = x[i] ** 3

    x = np.array([0.5, -1.5, 2.5, np.nan, np.inf], F)
    out = np.zeros((5, 9))
    simt.launch(kernel, 1, 5, x, out)
    assert out[:, 0][:3].tolist() == [float(np.sqrt(abs(v))) for v in x[:3]]
    assert out[:3, 1].tolist() == [10, -12, 32]
    assert out[:, 2].tolist() == [0.25, -1.5, 0.25, 0.25, 0.25]
    assert out[:3, 3].tolist() == [0.5, 0.25, 2.5]
    assert out[:3, 4].tolist() == [0, -2, 2]
    assert out[:3, 5].tolist() == [math.pi - 0.5, math.pi - 1.5, math.pi - 2.5]
    assert out[:, 6].tolist() == [0, 0, 0, 1, 1]
    np.testing.assert_allclose(out[:3, 7], np.arctan2(x[:3].astype(float), 2.0), rtol=1e-15)
    assert out[:3, 8].tolist() == [float(v * (v * v)) for v in x[:3]]


def test_bits():
    def kernel(a, out):
        i = cuda.grid(1)
        out[i, 0] = cuda.popc(a[i])
        out[i, 1] = cuda.clz(a[i])
        out[i, 2] = cuda.ffs(a[i])
        out[i, 3] = cuda.brev(a[i])
        out[i, 4] = cuda.selp(a[i] > 100, 1, 2)

    a = np.array([0, 1, 0x80000000, 0x00F0], np.uint32)
    out = np.zeros((4, 5), np.int64)
    simt.launch(kernel, 1, 4, a, out)
    assert out[:, 0].tolist() == [0, 1, 1, 4]
    assert out[:, 1].tolist() == [32, 31, 0, 24]
    assert out[:, 2].tolist() == [0, 1, 32, 5]
    assert out[:, 3].tolist() == [0, 0x80000000, 1, 0x0F000000]
    assert out[:, 4].tolist() == [2, 2, 1, 1]


def test_atomics_update_one_lane_after_the_other():
    def kernel(a, counts, floats, ticket):
        i = cuda.grid(1)
        cuda.atomic.add(counts, a[i], 1)
        cuda.atomic.add(floats, 0, np.float32(0.1))
        ticket[i] = cuda.atomic.add(counts, 3, 1)
        cuda.atomic.max(counts, 4, a[i] * 10)
        cuda.atomic.min(counts, 5, -a[i])

    a = np.array([0, 1, 1, 2, 1, 0] * 3)
    counts, floats, ticket = np.zeros(6, np.int64), np.zeros(1, F), np.zeros(18, np.int64)
    run(kernel, 3, 6, a, counts, floats, ticket)
    assert counts.tolist() == [6, 9, 3, 18, 20, -2]
    assert ticket.tolist() == list(range(18))
    total = F(0)
    for _ in range(18):
        total += F(0.1)
    assert floats[0] == total


def test_other_atomics():
    def kernel(u, s, old):
        i = cuda.grid(1)
        old[i, 0] = cuda.atomic.inc(u, 0, 3)
        old[i, 1] = cuda.atomic.dec(u, 1, 3)
        old[i, 2] = cuda.atomic.exch(s, (0, 0), i)
        old[i, 3] = cuda.atomic.cas(s, (0, 1), 0, i + 5)
        cuda.atomic.or_(s, (1, 0), 1 << i)
        cuda.atomic.and_(s, (1, 1), ~(1 << i))
        cuda.atomic.xor(s, (1, 2), i)
        cuda.atomic.sub(s, (1, 3), i)

    u, s = np.zeros(2, np.uint32), np.zeros((2, 4), np.int32)
    s[1, 1] = -1
    old = np.zeros((6, 4), np.int64)
    simt.launch(kernel, 1, 6, u, s, old)
    assert old[:, 0].tolist() == [0, 1, 2, 3, 0, 1]
    assert old[:, 1].tolist() == [0, 3, 2, 1, 0, 3]
    assert old[:, 2].tolist() == [0, 0, 1, 2, 3, 4]
    assert old[:, 3].tolist() == [0, 5, 5, 5, 5, 5]
    assert s.tolist() == [[5, 5, 0, 0], [63, -64, 1, -15]]


def test_shuffles_and_votes_of_part_of_a_warp():
    def kernel(out):
        t = cuda.threadIdx.x
        if t < 8:
            out[t, 0] = cuda.shfl_down_sync(0xFF, t, 2)
            out[t, 1] = cuda.ballot_sync(0xFF, t % 3 == 0)
        else:
            out[t, 0] = cuda.shfl_up_sync(0xFFFFFF00, t, 1)
            out[t, 1] = 1 if cuda.all_sync(0xFFFFFF00, t > 7) else 0
        out[t, 2] = cuda.shfl_sync(0xFFFFFFFF, 2.5 * t, 31)
        out[t, 3] = 1 if cuda.any_sync(0xFFFFFFFF, t == 20) else 0
        out[t, 4] = cuda.shfl_xor_sync(0xFFFFFFFF, t, 5)

    out = np.zeros((32, 5))
    simt.launch(kernel, 1, 32, out)
    poisoned = np.frombuffer(b"\xab" * 4, np.int32)[0]
    assert out[:, 0].tolist() == [2, 3, 4, 5, 6, 7, poisoned, poisoned, poisoned, *range(8, 31)]
    assert out[:8, 1].tolist() == [0b1001001] * 8
    assert (out[8:, 1] == 1).all()
    assert (out[:, 2] == 77.5).all()
    assert (out[:, 3] == 1).all()
    assert out[:, 4].tolist() == [t ^ 5 for t in range(32)]


def test_a_member_mask_must_name_those_who_come():
    def misses_a_lane(out):
        t = cuda.threadIdx.x
        if t < 8:
            out[t] = cuda.shfl_sync(0xFFFFFFFF, t, 0)

    def leaves_itself_out(out):
        t = cuda.threadIdx.x
        out[t] = cuda.shfl_sync(0xFF, t, 0)

    with pytest.raises(KernelError, match="waits for lane 8"):
        simt.launch(misses_a_lane, 1, 32, np.zeros(32))
    with pytest.raises(KernelError, match="lane 8 of warp 0 .* not in the member mask"):
        simt.launch(leaves_itself_out, 1, 32, np.zeros(32))


def test_barriers_that_count():
    def kernel(out):
        t = cuda.threadIdx.x
        if t == 5:
            return
        out[t, 0] = cuda.syncthreads_count(t > 2)
        out[t, 1] = cuda.syncthreads_and(t != 5)
        out[t, 2] = cuda.syncthreads_or(t == cuda.blockIdx.x * 100)

    out = np.zeros((6, 3), np.int64)
    run(kernel, 1, 6, out)
    assert out[0].tolist() == [2, 1, 1]


def test_tuples_and_shapes():
    def kernel(a, out):
        rows, columns = a.shape
        i, j = cuda.grid(2)
        size = (columns, rows)
        if i < rows and j < columns:
            out[i, j] = size[0] * 10 + size[1] + len(a) * 100 + a.ndim * 1000 + a.size * 10000

    out = np.zeros((2, 3), np.int64)
    run_once = np.zeros((2, 3))
    simt.launch(kernel, (1, 1), (4, 4), run_once, out)
    assert (out == 62232).all()


@pytest.mark.parametrize("layout", ["C", "F", "strided", "negative"])
def test_arrays_of_any_strides(layout):
    def kernel(a, out):
        i, j = cuda.grid(2)
        out[i, j] = a[i, j] * 2
        cuda.atomic.add(out, (0, j), 1)

    a = np.arange(24.0).reshape(4, 6)
    out = np.zeros((4, 6))
    views = {
        "C": lambda x: x.copy(),
        "F": np.asfortranarray,
        "strided": lambda x: np.repeat(np.repeat(x, 2, 0), 3, 1)[::2, ::3],
        "negative": lambda x: np.ascontiguousarray(x[::-1, ::-1])[::-1, ::-1],
    }
    a_view, out_view = views[layout](a), views[layout](out)
    run(kernel, (2, 3), (2, 2), a_view, out_view)
    expected = 2 * a
    expected[0] += 4
    np.testing.assert_array_equal(out_view, expected)


def test_float16_is_held_and_added_in_its_own_type():
    def kernel(a, out):
        i = cuda.grid(1)
        out[i] = a[i] + a[i] * a[0]

    a = np.array([1.001, 2.002, 3.003], np.float16)
    out = np.zeros(3, np.float16)
    simt.launch(kernel, 1, 3, a, out)
    np.testing.assert_array_equal(out, a + a * a[0])


REFUSED = {
    "print('x')": "print cannot be called in a kernel; write to an array what is to be printed",
    "x = [1, 2]": "a list is not part of the dialect; a thread's own array is cuda.local.array",
    "assert n > 0": "assert is not part of the dialect; a kernel raises nothing: write a mark",
    "cuda.syncwarp(1, 2)": "takes 1 argument, got 2",
    "for k in a:\n        pass": "for loops run over range",
    "for k in range(n):\n        pass\n    else:\n        pass": "else after a loop",
    "x = a[0:2]": "every one needs an integer index",
    "x = b[1]": "this array has 2 axes",
    "x = a[1.5]": "an index must be an integer",
    "x = n[0]": "n is a number, not an array",
    "x = a + 1": "a is an array, where a number is needed",
    "x = unknown": "unknown is not defined",
    "x = cuda.threadIdx.w": "x, y and z, not w",
    "x = cuda.shared.array(n, np.float32)": "known when the kernel is compiled",
    "x = cuda.shared.array(0, np.float32)": "every extent must be 1 or more",
    "x = cuda.shared.array(4, 'text')": "is not an element type",
    "x = cuda.grid(4)": "takes the literal 1, 2 or 3",
    "x = n & 1.5": "no bits to combine",
    "x = y + 1\n    y = 2": "y is used before anything is assigned",
    "return n": "a kernel returns nothing",
    "x = np.sin(1.0)": "np.sin cannot be called in a kernel; use math.sin",
    "x = np.dot(1.0, 2.0)": "np.dot cannot be called in a kernel; use functions of math",
    "with n:\n        pass": "with is not part of the dialect",
    "cuda.atomic.add(n, 0, 1)": "takes an array first",
    "cuda.syncthreads(1)": "takes 0 arguments, got 1",
    "x = again(n)": "6: in again: again calls itself; recursion is not supported",
    "x = ping(n)": "ping calls itself by way of pong; recursion is not supported",
    "kernel(a, b, n)": "kernel calls itself; recursion is not supported",
    "x = sometimes(n)": "returns a value on some paths only",
    "x = math.atan2(1.0)": "wrong number of arguments",
    "x = abs(1, 2)": "wrong number of arguments",
    "x = int()": "wrong number of arguments",
    "x = min(1)": "take two numbers or more",
    "x = 'text'": "is not a number the GPU has",
    "import os": "import is not part of the dialect; write it outside of the kernel",
    "x = cuda.shfl_sync(0xffffffff, np.uint32(n), 0)": "and not uint32: convert it",
    "x = lambda: 1": "a lambda is not part of the dialect",
    "if a:\n        pass": "a is an array, where a number is needed",
    "x, y = n, n, n": "cannot unpack into 2 names",
}


@pytest.mark.parametrize("statement", REFUSED)
def test_what_is_not_of_the_dialect_is_refused_before_anything_runs(statement):
    source = (
        "import math\nimport numpy as np\nfrom tilewise.simt import cuda\n\n"
        "def again(x):\n    return again(x)\n\n"
        "def ping(x):\n    return pong(x)\n\n"
        "def pong(x):\n    return ping(x)\n\n"
        "def sometimes(x):\n    if x > 0:\n        return x\n\n"
        f"def kernel(a, b, n):\n    a[0] = 99.0\n    {statement}\n"
    )
    kernel = compiled(source)
    a = np.zeros(3)
    with pytest.raises(KernelError) as error:
        simt.launch(kernel, 1, 1, a, np.zeros((2, 2)), 3)
    message = str(error.value)
    assert REFUSED[statement] in message
    assert "\n" not in message
    assert f"{kernel.__code__.co_filename}:" in message
    assert (a == 0).all()


def test_deeply_nested_loops_are_rewritten_quickly():
    depth = 6
    lines = [f"{'    ' * (k + 1)}for k{k} in range(2):" for k in range(depth)]
    source = "\n".join(
        [
            "def kernel(out):",
            "    s = 0",
            *lines,
            f"{'    ' * (depth + 1)}s = s + k0 * 0.5",
            "    out[0] = s",
        ]
    )
    out = np.zeros(1)
    simt.launch(compiled(source), 1, 1, out)
    assert out[0] == 0.5 * 2 ** (depth - 1)


def test_how_a_function_is_decorated_is_no_part_of_it():
    source = (
        "import numpy as np\nfrom types import SimpleNamespace\nfrom tilewise.simt import cuda\n\n"
        "other = SimpleNamespace(jit=lambda **options: lambda function: function, TWO=2)\n\n"
        "@other.jit(device=True)\ndef twice(x):\n    return other.TWO * x\n\n"
        "def kernel(a):\n    a[cuda.grid(1)] = twice(cuda.grid(1))\n"
    )
    a = np.zeros(4, np.int64)
    simt.launch(compiled(source), 1, 4, a)
    assert a.tolist() == [0, 2, 4, 6]


def test_a_name_stands_for_one_array():
    def kernel(a, b):
        chosen = a
        if cuda.threadIdx.x > 0:
            chosen = b
        chosen[0] = 1

    with pytest.raises(KernelError, match="chosen is one array on one path and another on another"):
        simt.launch(kernel, 1, 2, np.zeros(1), np.zeros(1))
