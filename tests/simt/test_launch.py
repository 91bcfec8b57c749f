"""Launching: what is refused up front, what stops a kernel, and what an error says."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace

import numpy as np
import pytest

from tests.simt.generated import compiled
from tilewise import simt
from tilewise.errors import KernelError, OptionError
from tilewise.guide import BLOCK_SIZE
from tilewise.simt import cuda

F = np.float32


def fill(out, value):
    out[cuda.grid(1)] = value


def line_of(function, text):
    """The line number of the one line of a function that contains a text."""
    import inspect

    lines, first = inspect.getsourcelines(function)
    (found,) = [first + i for i, line in enumerate(lines) if text in line]
    return found


# -- the ways to launch


def test_the_ways_to_launch_a_kernel_are_one():
    decorated = cuda.jit(fill)
    with_options = cuda.jit("void(float64[:], float64)", fastmath=False)(fill)
    as_numba_has_it = SimpleNamespace(py_func=fill)
    for start in (
        lambda *a: simt.launch(fill, 2, 3, *a),
        lambda *a: simt.launch((decorated), (2,), (3, 1, 1), *a),
        lambda *a: simt.launch(as_numba_has_it, 2, 3, *a),
        lambda *a: simt.launch(simt.program(fill), 2, 3, *a),
        lambda *a: decorated[2, 3](*a),
        lambda *a: with_options[(2, 1), (3,)](*a),
        lambda *a: decorated[2, 3, 0](*a),
    ):
        out = np.zeros(6)
        start(out, 2.5)
        assert (out == 2.5).all()
    with pytest.raises(KernelError, match=r"launch it as fill\[grid, block\]"):
        decorated(np.zeros(6), 1.0)
    with pytest.raises(OptionError, match="grid, block"):
        decorated[6]
    with pytest.raises(OptionError, match="dynamic shared memory"):
        decorated[2, 3, 0, 128]


def test_a_device_function_stays_a_function():
    @cuda.jit(device=True)
    def twice(x):
        return 2 * x

    def kernel(out):
        out[0] = twice(21)

    assert twice(4) == 8
    out = np.zeros(1)
    simt.launch(kernel, 1, 1, out)
    assert out[0] == 42


def test_only_the_blocks_asked_for_run():
    out = np.zeros((3, 4))

    def kernel(out):
        out[cuda.blockIdx.y, cuda.blockIdx.x] = 1

    simt.launch(kernel, (4, 3), 1, out, blocks=[5, 0, 11])
    assert np.flatnonzero(out).tolist() == [0, 5, 11]
    simt.launch(kernel, (4, 3), 1, out * 0, blocks=[])
    for wrong in ([12], [-1], [0.5]):
        with pytest.raises(OptionError, match="blocks must be"):
            simt.launch(kernel, (4, 3), 1, out, blocks=wrong)


def test_many_blocks_run_in_groups_with_the_same_result():
    def kernel(out, total):
        i = cuda.grid(1)
        out[i] = i * 2
        cuda.atomic.add(total, 0, 1)

    out, total = np.zeros(100_000, np.int64), np.zeros(1, np.int64)
    simt.launch(kernel, 1000, 100, out, total)
    assert (out == 2 * np.arange(100_000)).all()
    assert total[0] == 100_000


def test_the_stand_in_says_where_it_belongs():
    with pytest.raises(KernelError, match=r"cuda\.threadIdx has a meaning only inside a kernel"):
        cuda.threadIdx.x  # noqa: B018
    with pytest.raises(KernelError, match=r"cuda\.syncthreads has a meaning only inside a kernel"):
        cuda.syncthreads()
    with pytest.raises(AttributeError, match="not part of tilewise.simt's dialect"):
        cuda.to_device  # noqa: B018


# -- refused up front


@pytest.mark.parametrize(
    ("grid", "block", "message"),
    [
        (0, 1, "grid=0: x must be within 1"),
        (1, 0, "block=0: x must be within 1 to 1024"),
        (1, 1025, "block=1025: x must be within 1 to 1024, got 1025"),
        ((1, 65536), 1, "y must be within 1 to 65535, got 65536"),
        ((1, 1, 65536), 1, "z must be within"),
        (2**31, 1, "within 1 to 2147483647"),
        (1, (32, 33), "has 1056 threads; CUDA allows 1024"),
        (1, (1, 1, 65), "z must be within 1 to 64"),
        (1.5, 1, "must be an integer or a tuple of 1 to 3 integers"),
        (True, 1, "must be an integer"),
        ((1, 1, 1, 1), 1, "tuple of 1 to 3"),
        ((), 1, "tuple of 1 to 3"),
        ("1", 1, "must be an integer"),
    ],
)
def test_grids_and_blocks_that_cuda_does_not_allow(grid, block, message):
    with pytest.raises(OptionError) as error:
        simt.launch(fill, grid, block, np.zeros(4), 1.0)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.zeros(4),), r"fill(out, value) takes 2 arguments, got 1"),
        ((np.zeros(4), 1.0, 2.0), "takes 2 arguments, got 3"),
        (([0.0], 1.0), "argument out of fill is a list; kernels take NumPy arrays and numbers"),
        ((np.zeros(4), "1"), "argument value of fill is a str"),
        ((np.zeros(4), None), "argument value of fill is a NoneType"),
        ((np.zeros(4, complex), 1.0), "dtype complex128"),
        ((np.zeros(4, ">f4"), 1.0), "byte order '>'"),
        ((np.zeros(4, object), 1.0), "dtype object"),
        ((np.ma.zeros(4), 1.0), "MaskedArray"),
        ((3, 1.0), "out is a number, not an array"),
        ((np.zeros((2, 2)), 1.0), "this array has 2 axes"),
        ((np.zeros(4), np.zeros(4)), "an element is a number; this is an array"),
        ((np.zeros(4), 2**64), "does not fit in 64 bits"),
    ],
)
def test_arguments_that_a_kernel_cannot_take(arguments, message):
    with pytest.raises(KernelError) as error:
        simt.launch(fill, 1, 1, *arguments)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_things_that_are_no_kernels():
    for thing in (3, np.sin, len, "fill"):
        with pytest.raises(KernelError, match="a kernel is a Python function"):
            simt.launch(thing, 1, 1)
    namespace = {}
    exec("def kernel(out):\n    out[0] = 1\n", namespace)
    with pytest.raises(KernelError, match="source of kernel cannot be read"):
        simt.launch(namespace["kernel"], 1, 1, np.zeros(1))

    def with_default(out, value=1):
        out[0] = value

    with pytest.raises(KernelError, match="plain positional parameters"):
        simt.launch(with_default, 1, 1, np.zeros(1), 2)


def test_too_much_shared_memory():
    def kernel(out):
        a = cuda.shared.array((64, 64), np.float32)
        b = cuda.shared.array((64, 129), np.float32)
        a[0, 0] = 1
        b[0, 0] = 2
        out[0] = a[0, 0] + b[0, 0]

    with pytest.raises(KernelError, match=r"49408 bytes of shared memory; .* 49152 \(48 KiB\)"):
        simt.launch(kernel, 1, 1, np.zeros(1))


def test_a_thread_has_local_arrays_up_to_a_limit():
    def kernel(out):
        a = cuda.local.array((256, 256), np.float64)
        b = cuda.local.array(1, np.float64)
        b[0] = 2
        a[255, 255] = cuda.grid(1)
        out[cuda.grid(1)] = a[255, 255] + b[0]

    def within(out):
        a = cuda.local.array((256, 256), np.float64)
        a[255, 255] = cuda.grid(1)
        out[cuda.grid(1)] = a[255, 255]

    with pytest.raises(KernelError, match=r"524296 bytes of local arrays; .* 524288 \(512 KiB\)"):
        simt.launch(kernel, 1, 1, np.zeros(1))
    out = np.zeros(1024)
    simt.launch(within, 32, 32, out)  # block by block, or it would take 512 MiB
    assert (out == np.arange(1024)).all()


def test_a_read_only_array_is_not_written():
    out = np.zeros(4)
    out.flags.writeable = False
    with pytest.raises(KernelError, match="out is read-only") as error:
        simt.launch(fill, 1, 4, out, 1.0)
    assert f"{__file__}:{line_of(fill, 'out[')}" in str(error.value)


# -- stopped while running


def test_an_access_out_of_range_names_everything():
    def kernel(a, out):
        i, j = cuda.grid(2)
        out[i, j] = a[i, j + 1]

    a, out = np.zeros((4, 6)), np.zeros((4, 6))
    with pytest.raises(KernelError) as error:
        simt.launch(kernel, (2, 3), (2, 2), a, out)
    message = str(error.value)
    line = line_of(kernel, "out[i, j]")
    assert f"{__file__}:{line}: in kernel: a[i, j + 1] reads out of range" in message
    assert "thread (0, 1, 0) of block (0, 2, 0) asks for a[0, 6], and a has shape (4, 6)" in message
    assert "3 other threads" in message


def test_negative_indices_do_not_wrap():
    def kernel(out):
        out[cuda.grid(1) - 1] = 1

    out = np.zeros(4)
    with pytest.raises(KernelError, match=r"asks for out\[-1\].*negative index does not count"):
        simt.launch(kernel, 1, 4, out)
    assert (out == 0).all()


def test_shared_and_local_arrays_are_checked_too():
    def kernel(out, n):
        s = cuda.shared.array(4, np.float32)
        m = cuda.local.array(2, np.float32)
        s[cuda.threadIdx.x] = 1
        m[n] = 1
        out[0] = s[0] + m[0]

    with pytest.raises(KernelError, match=r"writes out of range.*s\[4\], and s has shape \(4,\)"):
        simt.launch(kernel, 1, 5, np.zeros(1), 0)
    with pytest.raises(KernelError, match=r"m\[2\], and m has shape \(2,\)"):
        simt.launch(kernel, 1, 4, np.zeros(1), 2)


def test_masked_threads_may_compute_any_index():
    def kernel(a, out):
        i = cuda.grid(1)
        if i < a.shape[0]:
            out[i] = a[i] + a[a.shape[0] - 1 - i]

    out = np.zeros(5)
    simt.launch(kernel, 2, 8, np.arange(5.0), out)
    assert (out == 4).all()
    simt.launch(kernel, 1, 8, np.zeros(0), np.zeros(0))


def test_endless_loops_are_stopped_and_said_so():
    def spins(out):
        while out[0] == 0:
            out[1] += 1

    def counts(out, n):
        for k in range(n):
            out[0] += k * 0

    for kernel, extra in ((spins, ()), (counts, (10**12,)), (counts, (2**63 - 1,))):
        start = time.process_time()
        with pytest.raises(KernelError, match=r"still going after 2000 iterations .* max_steps"):
            simt.launch(kernel, 1, 1, np.zeros(2), *extra, max_steps=2000)
        assert time.process_time() - start < 5
    with pytest.raises(OptionError, match="max_steps"):
        simt.launch(spins, 1, 1, np.zeros(2), max_steps=0)


def test_a_step_of_zero():
    def uniform(n):
        for _ in range(0, 4, n):
            pass

    def varying(n):
        for _ in range(0, 4, cuda.threadIdx.x * n):
            pass

    for kernel in (uniform, varying):
        with pytest.raises(KernelError, match="a step of 0 never ends"):
            simt.launch(kernel, 1, 4, 0)


# -- barriers


def test_a_barrier_that_live_threads_miss_is_an_error():
    def kernel(out):
        t = cuda.threadIdx.x
        if t < 3:
            cuda.syncthreads()
        out[t] = 1

    with pytest.raises(KernelError) as error:
        simt.launch(kernel, 2, 8, np.zeros(8))
    message = str(error.value)
    assert f"{__file__}:{line_of(kernel, 'syncthreads')}" in message
    assert "only 3 of block (0, 0, 0)'s live threads reach this barrier" in message
    assert "thread (0, 0, 0) waits there, thread (3, 0, 0) has not exited" in message


def test_a_barrier_in_a_loop_of_different_length_is_an_error():
    def kernel(out):
        for _ in range(cuda.threadIdx.x):
            cuda.syncthreads()
        out[cuda.threadIdx.x] = 1

    with pytest.raises(KernelError, match="reach this barrier"):
        simt.launch(kernel, 1, 4, np.zeros(4))


def test_a_barrier_does_not_wait_for_threads_that_have_exited():
    def kernel(out):
        t = cuda.threadIdx.x
        if t > 4:
            return
        cuda.syncthreads()
        out[t] = 1

    out = np.zeros(8)
    simt.launch(kernel, 1, 8, out)
    assert out.tolist() == [1] * 5 + [0] * 3


def test_whole_blocks_may_skip_a_barrier():
    def kernel(out):
        s = cuda.shared.array(4, np.int64)
        t = cuda.threadIdx.x
        if cuda.blockIdx.x == 1:
            s[t] = t
            cuda.syncthreads()
            out[t] = s[3 - t]

    out = np.zeros(4)
    simt.launch(kernel, 3, 4, out)
    assert out.tolist() == [3, 2, 1, 0]


# -- what goes wrong with the guide's kernel

_KERNEL = """
import numpy as np
from tilewise.simt import cuda

def kernel(A, B, wA, wB, C):
    As = cuda.shared.array((16, 16), np.float32)
    Bs = cuda.shared.array((16, 16), np.float32)
    tx = cuda.threadIdx.x
    ty = cuda.threadIdx.y
    row = cuda.blockIdx.y * 16 + ty
    col = cuda.blockIdx.x * 16 + tx
    if row >= C.shape[0] {word} col >= C.shape[1]:
        return
    total = np.float32(0)
    for m in range((wA + 15) // 16):
        As[ty, tx] = A[row, m * 16 + tx]{a_guard}
        Bs[ty, tx] = B[m * 16 + ty, col]{b_guard}
        cuda.syncthreads()
        for k in range(min(16, wA - m * 16)):
            total += As[ty, k] * Bs[k, tx]
        cuda.syncthreads()
    C[row, col] = total
"""


def product(kernel, n):
    rng = np.random.default_rng(5)
    a, b = (rng.integers(-3, 4, (n, n)).astype(F) for _ in range(2))
    c = np.full((n, n), np.nan, F)
    blocks = -(-n // BLOCK_SIZE)
    simt.launch(kernel, (blocks, blocks), (BLOCK_SIZE, BLOCK_SIZE), a, b, n, n, c)
    return c, a @ b


def test_G6_threads_that_returned_left_holes_that_show():
    """Case G6: no hang; what the 735 threads outside C did not load is poison, not a number."""
    kernel = compiled(
        _KERNEL.format(
            word="or",
            a_guard=" if m * 16 + tx < wA else np.float32(0)",
            b_guard=" if m * 16 + ty < wA else np.float32(0)",
        )
    )
    c, right = product(kernel, 17)
    assert np.array_equal(c[:16, :16], right[:16, :16])
    assert np.isnan(c[16, :]).all()
    assert np.isnan(c[:, 16]).all()


def test_G7_and_for_or_runs_into_memory_that_is_not_there():
    """Case G7: 225 of the 735 threads outside stop, and the others' accesses are an error."""
    kernel = compiled(_KERNEL.format(word="and", a_guard="", b_guard=""))
    with pytest.raises(KernelError) as error:
        product(kernel, 17)
    assert "B[m * 16 + ty, col] reads out of range" in str(error.value) or (
        "A[row, m * 16 + tx] reads out of range" in str(error.value)
    )


def test_G8_launched_with_too_few_threads_gives_poison_and_no_numbers():
    """Case G8: the guide's kernel on 100 blocks of 10 threads."""
    from tilewise.guide import Muld

    a, b = np.ones((16, 16), F), np.ones((16, 1600), F)
    c = np.full((16, 1600), 7, F)
    simt.launch(Muld, 100, 10, a, b, 16, 1600, c)
    assert (c[1:] == 7).all()
    written = np.arange(1600) % 16 < 10
    assert np.isnan(c[0, written]).all()
    assert (c[0, ~written] == 7).all()


def test_G11_an_error_before_a_barrier_ends_the_process_at_once():
    """Case G11: thread 3 runs out of range before a barrier; no thread is left waiting."""
    script = textwrap.dedent("""
        import sys
        sys.path[:0] = [path for path in {path!r} if path]
        import numpy as np
        from tests.simt.test_launch import thread_3_is_wrong
        from tilewise import simt

        simt.launch(thread_3_is_wrong, 4, 8, np.zeros(8))
    """).format(path=sys.path)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "thread (3, 0, 0) of block (0, 0, 0) asks for out[103]" in last
    assert f"{__file__}:{line_of(thread_3_is_wrong, '+ 100')}" in last


def thread_3_is_wrong(out):
    t = cuda.threadIdx.x
    if t == 3:
        out[t + 100] = 1
    cuda.syncthreads()
    out[t] = 1
