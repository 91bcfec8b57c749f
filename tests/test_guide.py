"""The guide's chapter: what its two functions do, step by step, and which bits they give."""

from __future__ import annotations

import array
import inspect
from itertools import product

import numpy as np
import pytest

from tests.simt import exact
from tests.support import guarded, margins_are_whole
from tilewise import guide, simt
from tilewise.errors import (
    DeviceError,
    DTypeError,
    KernelError,
    OptionError,
    ShapeError,
    TilewiseError,
)
from tilewise.guide import BLOCK_SIZE, Mul, Muld, Muld_any, naive
from tilewise.simt import cuda

F = np.float32


def whole_numbers(rng, *shape, low=-3, high=3):
    return rng.integers(low, high, shape, endpoint=True).astype(F)


def multiply(a, b, **options):
    c = np.full((a.shape[0], b.shape[1]), np.nan, F)
    Mul(a, b, a.shape[0], a.shape[1], b.shape[1], c, **options)
    return c


def fma_chain(a, b):
    """Element by element fma(a[k], b[k], sum), by exact arithmetic."""
    c = np.zeros((a.shape[0], b.shape[1]), F)
    for i, j in np.ndindex(*c.shape):
        total = F(0)
        for k in range(a.shape[1]):
            total = exact.fma(a[i, k], b[k, j], total, F)
        c[i, j] = total
    return c


class Recorder:
    def __init__(self):
        self.accesses, self.barriers = [], 0

    def on_launch(self, launch):
        self.launch = launch

    def on_access(self, access):
        self.accesses.append((access.site, access.op, access.active.copy(), access.offset.copy()))

    def on_barrier(self, barrier):
        self.barriers += 1

    def on_fault(self, fault):
        return False


# -- 6.1: how the task is divided


def test_a_block_is_a_whole_number_of_warps_and_within_the_limit():
    assert BLOCK_SIZE == 16
    assert BLOCK_SIZE * BLOCK_SIZE % 32 == 0
    assert BLOCK_SIZE * BLOCK_SIZE <= 1024


def test_each_block_computes_one_square_and_each_thread_one_element_of_it():
    seen = Recorder()
    a, b, c = np.ones((32, 48), F), np.ones((48, 64), F), np.full((32, 64), np.nan, F)
    simt.launch(Muld, (4, 2), (16, 16), a, b, 48, 64, c, observer=seen)
    stores = [entry for entry in seen.accesses if entry[0].array == "C"]
    (store,) = stores
    _, op, active, offset = store
    assert op == "store"
    assert active.all()
    for block, thread in np.ndindex(8, 256):
        row = block // 4 * 16 + thread // 16
        col = block % 4 * 16 + thread % 16
        assert offset[block, thread] == 4 * (64 * row + col)


def test_each_thread_loads_one_element_of_either_square_between_barriers():
    seen = Recorder()
    a, b, c = np.ones((16, 48), F), np.ones((48, 32), F), np.full((16, 32), np.nan, F)
    simt.launch(Muld, (2, 1), (16, 16), a, b, 48, 32, c, observer=seen)
    squares = 48 // 16
    assert seen.barriers == 2 * squares
    for name in ("A", "B"):
        loads = [offset for site, _, active, offset in seen.accesses if site.array == name]
        assert len(loads) == squares
        for offset in loads:
            for block in offset:
                assert len(set(block)) == 256  # one element each, no two the same
    for name in ("As", "Bs"):
        entries = [(op, active) for site, op, active, _ in seen.accesses if site.array == name]
        assert [op for op, _ in entries] == (["store"] + ["load"] * 16) * squares
        assert all(active.all() for _, active in entries)
    loaded = {site.array for site, op, *_ in seen.accesses if op == "load"}
    assert loaded == {"A", "B", "As", "Bs"}  # C is never read: the sum stays in a register
    assert [info.name for info in seen.launch.arrays if info.space == "shared"] == ["As", "Bs"]


# -- 6.3.1: Mul()


class RecordingGPU(guide.SimulatedGPU):
    def __init__(self):
        self.steps, self.held = [], {}

    def allocate(self, shape):
        memory = super().allocate(shape)
        self.held[id(memory)] = memory
        self.steps.append(f"allocate {shape}")
        return memory

    def copy_in(self, host, memory):
        self.steps.append("copy in")
        super().copy_in(host, memory)

    def launch(self, kernel, grid, block, *arguments):
        self.steps.append(f"launch {grid} {block}")
        super().launch(kernel, grid, block, *arguments)

    def copy_out(self, memory, host):
        self.steps.append("copy out")
        super().copy_out(memory, host)

    def free(self, memory):
        self.steps.append("free")
        del self.held[id(memory)]


def test_Mul_takes_the_chapters_five_steps():
    gpu = RecordingGPU()
    a, b = np.eye(32, 48, dtype=F), np.arange(48 * 16, dtype=F).reshape(48, 16)
    c = multiply(a, b, device=gpu)
    assert np.array_equal(c, b[:32])
    assert gpu.steps == [
        "allocate (32, 48)",
        "allocate (48, 16)",
        "allocate (32, 16)",
        "copy in",
        "copy in",
        "launch (1, 2) (16, 16)",
        "copy out",
        "free",
        "free",
        "free",
    ]


@cuda.jit
def runs_out_of_range(A, B, wA, wB, C):
    C[cuda.grid(1), 0] = A[0, wA]


def test_memory_is_freed_when_the_kernel_fails_and_C_is_untouched():
    gpu = RecordingGPU()
    c = np.full((16, 16), 7, F)
    with pytest.raises(KernelError, match="out of range"):
        Mul(np.ones((16, 16), F), np.ones((16, 16), F), 16, 16, 16, c, kernel=runs_out_of_range,
            device=gpu)  # fmt: skip
    assert gpu.held == {}
    assert (c == 7).all()


def test_device_memory_is_aligned_and_poisoned():
    gpu = guide.SimulatedGPU()
    for shape in ((1, 1), (16, 48), (3, 5)):
        memory = gpu.allocate(shape)
        assert memory.ctypes.data % 256 == 0
        assert memory.shape == shape
        assert np.isnan(memory).all()


def test_Mul_has_the_chapters_parameters():
    parameters = list(inspect.signature(Mul).parameters.values())
    assert [p.name for p in parameters[:6]] == ["A", "B", "hA", "wA", "wB", "C"]
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters[6:])
    for kernel in (Muld, Muld_any, naive):
        assert simt.program(kernel).parameters == ("A", "B", "wA", "wB", "C")


@pytest.mark.parametrize("kernel", [Muld, Muld_any, naive])
def test_buffers_may_be_flat_or_two_dimensional_strided_and_read_only(kernel):
    rng = np.random.default_rng(0)
    a, b = whole_numbers(rng, 32, 16), whole_numbers(rng, 16, 48)
    right = a @ b
    a.flags.writeable = False
    layouts = {
        "matrix": lambda x: x,
        "flat": lambda x: x.ravel(),
        "transposed": lambda x: np.asfortranarray(x),
        "strided flat": lambda x: np.repeat(x.ravel(), 3)[::3],
        "backwards": lambda x: np.ascontiguousarray(x[::-1, ::-1])[::-1, ::-1],
    }
    for (_, take_a), (_, take_b), (name, take_c) in product(layouts.items(), repeat=3):
        c = take_c(np.full((32, 48), np.nan, F))
        Mul(take_a(a), take_b(b), 32, 16, 48, c, kernel=kernel)
        assert np.array_equal(c.reshape(32, 48), right), name


def test_other_buffers_than_numpys():
    a, b = array.array("f", range(256)), memoryview(np.eye(16, dtype=F))
    c = array.array("f", [0]) * 256
    Mul(a, b, 16, 16, 16, c)
    assert list(c) == list(range(256))


def test_C_may_overlap_A_and_B():
    rng = np.random.default_rng(1)
    buffer = whole_numbers(rng, 16 * 40)
    a, b, c = buffer[:256], buffer[128:384], buffer[64:320]
    right = a.reshape(16, 16) @ b.reshape(16, 16)
    Mul(a, b, 16, 16, 16, c)
    assert np.array_equal(c.reshape(16, 16), right)
    Mul(c, c, 16, 16, 16, c)
    assert np.array_equal(c.reshape(16, 16), right @ right)


# -- 6.3.2: Muld(), and its bits


@pytest.mark.parametrize("kernel", [Muld, Muld_any, naive])
def test_the_bits_are_those_of_an_fma_chain(kernel):
    rng = np.random.default_rng(2)
    a, b = rng.standard_normal((16, 48)).astype(F), rng.standard_normal((48, 16)).astype(F)
    c = multiply(a, b, kernel=kernel)
    assert np.array_equal(c, fma_chain(a, b))
    by_two_roundings = np.zeros((16, 16), F)
    for k in range(48):
        by_two_roundings += a[:, k : k + 1] * b[k : k + 1]
    assert (c != by_two_roundings).mean() > 0.3


def test_the_bits_survive_subnormals_infinities_and_nan():
    rng = np.random.default_rng(3)
    a = (rng.standard_normal((16, 16)) * 2.0 ** rng.integers(-80, -60, (16, 16))).astype(F)
    b = (rng.standard_normal((16, 16)) * 2.0 ** rng.integers(-80, -60, (16, 16))).astype(F)
    a[3, 4], b[5, 6], a[7, 8], b[9, 2] = np.inf, -np.inf, np.nan, 0
    c, expected = multiply(a, b), fma_chain(a, b)
    assert np.array_equal(c, expected, equal_nan=True)
    finite = np.isfinite(expected)
    assert ((np.abs(expected) < 2.0**-126) & (expected != 0))[finite].mean() > 0.5


@pytest.mark.parametrize("kernel", [Muld, Muld_any])
def test_a_row_of_the_product_has_the_same_bits_alone(kernel):
    rng = np.random.default_rng(4)
    a, b = rng.standard_normal((64, 80)).astype(F), rng.standard_normal((80, 96)).astype(F)
    c = multiply(a, b, kernel=kernel)
    assert np.array_equal(multiply(a[16:32], b[:, 32:48], kernel=kernel), c[16:32, 32:48])
    if kernel is Muld_any:
        assert np.array_equal(multiply(a[5:6], b[:, 7:8], kernel=kernel), c[5:6, 7:8])


# -- sizes


A1_SIZES = [(4, 4, 4), (5, 7, 3), (17, 33, 15), (3, 40, 50)]


@pytest.mark.parametrize(("m", "k", "n"), A1_SIZES)
def test_A1_tiny_and_odd_sizes_are_exact(m, k, n):
    """Case A1: the guarded kernel where a tiled kernel from a manual went wrong."""
    rng = np.random.default_rng(5)
    a, b = whole_numbers(rng, m, k), whole_numbers(rng, k, n)
    if m == k == n == 4:
        a, b = np.arange(16, dtype=F).reshape(4, 4), np.ones((4, 4), F)
    assert np.array_equal(multiply(a, b, kernel=Muld_any), a @ b)
    check_guarded(a, b)


def check_guarded(a, b):
    """Run the kernel itself on views inside buffers of NaN: nothing beyond may be read or hit."""
    (a_in, _), (b_in, _) = guarded(a), guarded(b)
    c, whole = guarded(np.full((a.shape[0], b.shape[1]), np.nan, F))
    grid = (-(-b.shape[1] // 16), -(-a.shape[0] // 16))
    simt.launch(Muld_any, grid, (16, 16), a_in, b_in, a.shape[1], b.shape[1], c)
    assert np.array_equal(c, (a.astype(np.int64) @ b.astype(np.int64)).astype(F))
    assert margins_are_whole(c, whole)


@pytest.mark.slow
def test_A2_1000_is_no_multiple_of_the_tile():
    """Case A2: every element of C is written, and no foreign data come in."""
    rng = np.random.default_rng(6)
    a, b = whole_numbers(rng, 1000, 1000), whole_numbers(rng, 1000, 1000)
    assert np.array_equal(multiply(a, b, kernel=Muld_any), a @ b)


A5_SIDES = (1, 2, 7, 15, 16, 17, 33)
A5_NAMED = [(33, 32, 32), (35, 79, 19), (3, 3, 431), (100, 127, 129), (256, 128, 256)]


@pytest.mark.parametrize("m", A5_SIDES)
def test_A5_sizes_around_the_tile(m):
    """Case A5: a cross of sizes around the tile."""
    rng = np.random.default_rng(7)
    for k, n in product(A5_SIDES, repeat=2):
        a, b = whole_numbers(rng, m, k, low=-2, high=2), whole_numbers(rng, k, n, low=-2, high=2)
        assert np.array_equal(multiply(a, b, kernel=Muld_any), a @ b), (m, k, n)


@pytest.mark.parametrize(("m", "n", "k"), A5_NAMED)
def test_A5_sizes_that_were_reported(m, n, k):
    """Case A5: the sizes by name, inside buffers of NaN."""
    rng = np.random.default_rng(8)
    check_guarded(
        whole_numbers(rng, m, k, low=-2, high=2), whole_numbers(rng, k, n, low=-2, high=2)
    )


@pytest.mark.slow
def test_A5_a_tall_matrix():
    """Case A5: 30000 rows."""
    rng = np.random.default_rng(9)
    a = whole_numbers(rng, 30000, 64, low=-2, high=2)
    b = whole_numbers(rng, 64, 64, low=-2, high=2)
    assert np.array_equal(multiply(a, b, kernel=Muld_any), a @ b)
    assert np.array_equal(multiply(a, b), a @ b)


@pytest.mark.parametrize("kernel", [Muld, naive])
def test_other_sizes_are_refused_with_the_way_out(kernel):
    c = np.full((16, 20), 7, F)
    with pytest.raises(ShapeError) as error:
        Mul(np.ones((16, 30), F), np.ones((30, 20), F), 16, 30, 20, c, kernel=kernel)
    message = str(error.value)
    assert f"{kernel.__name__} takes sizes that are multiples of 16" in message
    assert "wA = 30, wB = 20" in message
    assert "hA" not in message
    assert "kernel=tilewise.guide.Muld_any" in message
    assert (c == 7).all()


def test_Muld_without_its_wrapper_runs_out_of_range_and_says_so():
    with pytest.raises(KernelError, match=r"B\[m \* BLOCK_SIZE \+ ty, col\] reads out of range"):
        simt.launch(Muld, (2, 1), (16, 16), np.ones((16, 16), F), np.ones((16, 20), F), 16, 20,
                    np.ones((16, 20), F))  # fmt: skip


# -- bad input

GOOD = {
    "A": np.ones((16, 32), F),
    "B": np.ones((32, 48), F),
    "hA": 16,
    "wA": 32,
    "wB": 48,
    "C": np.zeros((16, 48), F),
}
READ_ONLY = np.zeros((16, 48), F)
READ_ONLY.flags.writeable = False
BAD = [
    ({"A": np.ones((32, 16), F)}, ShapeError, "A (shape (32, 16)"),
    ({"B": np.ones(32 * 47, F)}, ShapeError, "does not hold a matrix of 32 rows and 48 columns"),
    ({"C": np.ones((16, 48, 1), F)}, ShapeError, "C (shape (16, 48, 1)"),
    ({"hA": 32}, ShapeError, "32 rows and 32 columns"),
    ({"A": np.ones((16, 32))}, DTypeError, "float64"),
    ({"B": np.ones((32, 48), ">f4")}, DTypeError, "native byte order"),
    ({"A": np.ones((16, 32), int)}, DTypeError, "tilewise.matmul, which takes every type"),
    ({"A": [[1.0] * 32] * 16}, DTypeError, "A is a list"),
    ({"C": None}, DTypeError, "C is a NoneType"),
    ({"C": READ_ONLY}, OptionError, "C (shape (16, 48)"),
    ({"C": bytes(16 * 48 * 4)}, DTypeError, "C (shape (3072,)"),
    ({"hA": 0}, OptionError, "hA=0 must be 1 or more"),
    ({"wB": -16}, OptionError, "wB=-16 must be 1 or more"),
    ({"wA": 32.0}, OptionError, "wA=32.0 must be an integer"),
    ({"wA": True}, OptionError, "wA=True must be an integer"),
    ({"device": "cuda:99"}, DeviceError, ""),
    ({"device": "tpu"}, OptionError, "tpu"),
]


@pytest.mark.parametrize(("change", "kind", "message"), BAD)
def test_bad_input_is_refused_before_any_step(change, kind, message):
    arguments = {**GOOD, "C": GOOD["C"].copy(), **change}
    gpu = RecordingGPU()
    arguments.setdefault("device", gpu)
    with pytest.raises(kind) as error:
        Mul(**arguments)
    assert isinstance(error.value, TilewiseError)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert gpu.steps == []
    if isinstance(arguments["C"], np.ndarray):
        assert not arguments["C"].astype(bool).any() or "C" in change
    Mul(**{**GOOD, "C": GOOD["C"].copy()})


def test_a_kernel_of_ones_own():
    """Any kernel with the same parameters can be multiplied with, on any size."""

    @cuda.jit
    def columns(A, B, wA, wB, C):
        i = cuda.blockIdx.y * 16 + cuda.threadIdx.y
        j = cuda.blockIdx.x * 16 + cuda.threadIdx.x
        if i < C.shape[0] and j < wB:
            total = np.float32(0)
            for k in range(wA):
                total += A[i, k] * B[k, j]
            C[i, j] = total

    a, b = np.ones((5, 6), F), np.ones((6, 7), F)
    assert np.array_equal(multiply(a, b, kernel=columns), np.full((5, 7), 6, F))
    assert np.array_equal(multiply(a, b, kernel=columns.py_func), np.full((5, 7), 6, F))
