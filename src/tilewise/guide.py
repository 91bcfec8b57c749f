"""Chapter 6 of the CUDA programming guide, running: ``Mul()``, a host function, and ``Muld()``.

The task is C = A·B, where A has hA rows and wA columns, B has wA rows and wB columns, and all three
lie row by row in memory. It is divided among threads like this:

* a **block** of threads computes one square sub-matrix C_sub of C;
* a **thread** of the block computes one element of C_sub.

C_sub is BLOCK_SIZE = 16 on a side. So a block has 16·16 = 256 threads, which is a multiple of the
warp size (32, so no warp is partly empty) and below the most threads a block may have.

C_sub is the product of two rectangles: the BLOCK_SIZE rows of A at its height, wA wide, and the
BLOCK_SIZE columns of B above it, wA high. They do not fit into the memory of a multiprocessor, so
both are cut into squares, BLOCK_SIZE on a side, and C_sub is the sum of the products of these
squares. For each pair of squares a block

1. loads both from global into shared memory, every thread one element of each;
2. waits, since each thread is about to read what others have loaded;
3. multiplies: every thread computes one element of the product, and adds it to what it holds in a
   register from the squares before;
4. waits again, since the next squares will overwrite these.

At the end every thread writes its one element to global memory.

What this buys. Shared memory is fast, and what a block has loaded once serves 16 of its threads.
The untiled kernel, :data:`naive`, reads every row of A once for each column of C. Here A is read
wB / BLOCK_SIZE times and B hA / BLOCK_SIZE times (the chapter says wA / BLOCK_SIZE of both, which
is the same for square matrices).

What is good for the memory of its day. If wA and wB are multiples of 16, a square starts at a
multiple of BLOCK_SIZE in its row: the 16 threads of a half-warp read 16 neighbouring floats from an
aligned 64 bytes, which the hardware does at once (*coalescing*). In shared memory, consecutive
words lie in different banks: in ``As[ty, tx]``, ``Bs[ty, tx]`` and ``Bs[k, tx]`` the threads of a
half-warp, tx = 0 ... 15, touch 16 different banks, and in ``As[ty, k]``, where ty and k are the
same for all of them, one word, which is broadcast. So there are no *bank conflicts*.

The kernel was written to show the principles, not to be fast: it reaches a seventh of what the
hardware can do (docs/facts.md). ``tilewise.explain`` proves the statements above, and shows what
holds the kernel back.

Two more things are here that the chapter leaves to the reader: :data:`Muld_any` takes sizes that
are no multiples of 16, and :data:`naive` is the kernel without squares, to compare with.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from .errors import DeviceError, DTypeError, OptionError, ShapeError, describe
from .simt import Kernel, cuda, launch

if TYPE_CHECKING:
    from .kernels.compile import Variant
    from .runtime.memory import Memory

__all__ = [
    "BLOCK_SIZE",
    "GPU",
    "Device",
    "Mul",
    "Muld",
    "Muld_any",
    "SimulatedGPU",
    "Traced",
    "naive",
    "variants",
]

#: Rows and columns of C_sub, and of the squares of A and B.
BLOCK_SIZE = 16

Array = NDArray[np.float32]


def Mul(
    A: Any,
    B: Any,
    hA: int,
    wA: int,
    wB: int,
    C: Any,
    *,
    kernel: Kernel | Callable[..., Any] | None = None,
    device: str | Device = "cpu",
) -> None:
    """Compute C = A·B on a device; the host's side of it, in the chapter's five steps.

    Parameters
    ----------
    A, B : buffer of float32, (hA, wA) and (wA, wB)
        The operands in host memory: two-dimensional, or flat and row by row. Only read.
    hA, wA, wB : int
        Height and width of A, width of B; 1 or more, and multiples of 16 for :data:`Muld`.
    C : writeable buffer of float32, (hA, wB)
        Where the result is written, likewise. It may overlap A or B: both are on the device before
        anything is written.
    kernel : kernel, optional
        :data:`Muld` by default; :data:`Muld_any` takes sizes that are no multiples of 16. Any other
        kernel with the same parameters is run on as many blocks as cover C.
    device : "cpu", "cuda:0" and so on, or Device
        "cpu" runs the kernel on :class:`SimulatedGPU`, "cuda:0" the same kernel, compiled, on a
        :class:`GPU`. ``Traced("cuda:0")`` does that and keeps what each step took.

    Raises
    ------
    ShapeError, DTypeError, OptionError, DeviceError
        For sizes that do not go with the buffers or the kernel, another element type than float32,
        a C that cannot be written, a device that is not there; before any step is taken.
    KernelError
        If the kernel does something illegal.

    Notes
    -----
    The bits are those of a chain of fused multiply-adds over k, in float32: each element of C is
    ``fma(a[k], b[k], sum)`` for k = 0, 1, ..., starting from 0.
    """
    kernel = Muld if kernel is None else kernel
    height_a, width_a, width_b = (
        _size(name, value) for name, value in (("hA", hA), ("wA", wA), ("wB", wB))
    )
    _check_fit(kernel, height_a, width_a, width_b)
    a_host = _host_matrix("A", A, height_a, width_a)
    b_host = _host_matrix("B", B, width_a, width_b)
    c_host = _host_matrix("C", C, height_a, width_b)
    if not c_host.flags.writeable:
        raise OptionError(f"{describe('C', c_host)} is read-only, and the result goes there")
    gpu = _device(device)

    # 1. Allocate global memory for A, B and C: cudaMalloc().
    a_device = gpu.allocate((height_a, width_a))
    b_device = gpu.allocate((width_a, width_b))
    c_device = gpu.allocate((height_a, width_b))
    try:
        # 2. Copy A and B from host memory to global memory: cudaMemcpy().
        gpu.copy_in(a_host, a_device)
        gpu.copy_in(b_host, b_device)
        # 3. Call Muld() to compute C on the device: a block for each C_sub, a thread an element.
        grid = (-(-width_b // BLOCK_SIZE), -(-height_a // BLOCK_SIZE))
        block = (BLOCK_SIZE, BLOCK_SIZE)
        gpu.launch(kernel, grid, block, a_device, b_device, width_a, width_b, c_device)
        # 4. Copy C from global memory to host memory: cudaMemcpy().
        gpu.copy_out(c_device, c_host)
    finally:
        # 5. Free the global memory of A, B and C: cudaFree().
        for memory in (a_device, b_device, c_device):
            gpu.free(memory)


@cuda.jit
def Muld(A: Array, B: Array, wA: int, wB: int, C: Array) -> None:
    """Compute C = A·B on the device; wA, wB and C's height are multiples of BLOCK_SIZE.

    The parameters are those of :func:`Mul`, in device memory; A, B and C are two-dimensional there,
    so that wB, which says where a row ends in flat memory, is not needed. Launch a grid of
    (wB / BLOCK_SIZE, hA / BLOCK_SIZE) blocks of (BLOCK_SIZE, BLOCK_SIZE) threads.
    """
    As = cuda.shared.array((BLOCK_SIZE, BLOCK_SIZE), np.float32)
    Bs = cuda.shared.array((BLOCK_SIZE, BLOCK_SIZE), np.float32)

    tx = cuda.threadIdx.x
    ty = cuda.threadIdx.y
    row = cuda.blockIdx.y * BLOCK_SIZE + ty
    col = cuda.blockIdx.x * BLOCK_SIZE + tx

    Csub = np.float32(0)
    for m in range(wA // BLOCK_SIZE):
        # Each thread loads one element of either square. x runs along the rows, as memory does.
        As[ty, tx] = A[row, m * BLOCK_SIZE + tx]
        Bs[ty, tx] = B[m * BLOCK_SIZE + ty, col]
        # Both squares must be whole before any thread reads what the others have loaded ...
        cuda.syncthreads()
        for k in range(BLOCK_SIZE):
            Csub += As[ty, k] * Bs[k, tx]
        # ... and no thread may overwrite them while another is still reading.
        cuda.syncthreads()

    C[row, col] = Csub


@cuda.jit
def Muld_any(A: Array, B: Array, wA: int, wB: int, C: Array) -> None:
    """Compute C = A·B on the device for every size; two guards more than :data:`Muld`.

    Threads beyond the edge of C still load and wait with the others: a thread that returned early
    would leave its elements of the squares unwritten, for others to read. Launch as many blocks as
    cover C. The bits are Muld's, but that a -0 to which a sum has underflowed becomes +0.
    """
    As = cuda.shared.array((BLOCK_SIZE, BLOCK_SIZE), np.float32)
    Bs = cuda.shared.array((BLOCK_SIZE, BLOCK_SIZE), np.float32)

    tx = cuda.threadIdx.x
    ty = cuda.threadIdx.y
    row = cuda.blockIdx.y * BLOCK_SIZE + ty
    col = cuda.blockIdx.x * BLOCK_SIZE + tx
    hA = C.shape[0]

    Csub = np.float32(0)
    for m in range((wA + BLOCK_SIZE - 1) // BLOCK_SIZE):
        # The first guard: what lies outside A and B counts as 0, and adds nothing.
        a = m * BLOCK_SIZE + tx
        b = m * BLOCK_SIZE + ty
        As[ty, tx] = A[row, a] if row < hA and a < wA else np.float32(0)
        Bs[ty, tx] = B[b, col] if b < wA and col < wB else np.float32(0)
        cuda.syncthreads()
        for k in range(BLOCK_SIZE):
            Csub += As[ty, k] * Bs[k, tx]
        cuda.syncthreads()

    # The second guard: only threads within C write.
    if row < hA and col < wB:
        C[row, col] = Csub


@cuda.jit
def naive(A: Array, B: Array, wA: int, wB: int, C: Array) -> None:
    """Compute C = A·B without squares or shared memory: each thread a row times a column.

    Launched like :data:`Muld`, for sizes like its own, and with the same bits.
    """
    row = cuda.blockIdx.y * BLOCK_SIZE + cuda.threadIdx.y
    col = cuda.blockIdx.x * BLOCK_SIZE + cuda.threadIdx.x

    total = np.float32(0)
    for k in range(wA):
        total += A[row, k] * B[k, col]

    C[row, col] = total


class Device(Protocol):
    """Where :func:`Mul` computes: the five steps, each of them one method.

    What ``allocate`` gives is the device's own; only the other methods need to understand it.
    """

    def allocate(self, shape: tuple[int, int]) -> Any:
        """Return device memory for a float32 matrix (cudaMalloc)."""

    def copy_in(self, host: Array, memory: Any) -> None:
        """Copy a matrix from the host to the device (cudaMemcpy, host to device)."""

    def launch(
        self, kernel: Any, grid: tuple[int, int], block: tuple[int, int], *arguments: Any
    ) -> None:
        """Run a kernel; arguments are device memory and ints."""

    def copy_out(self, memory: Any, host: Array) -> None:
        """Wait for the device, and copy a matrix back to the host (cudaMemcpy)."""

    def free(self, memory: Any) -> None:
        """Give device memory back (cudaFree)."""


class SimulatedGPU:
    """A GPU made of NumPy: memory is host memory, kernels run on :mod:`tilewise.simt`."""

    #: Where memory given out by cudaMalloc starts: at a multiple of this.
    alignment_bytes = 256

    def allocate(self, shape: tuple[int, int]) -> Array:
        """Return aligned memory, full of NaN so that nobody takes it for a result."""
        elements = shape[0] * shape[1]
        raw = np.full(elements + self.alignment_bytes // 4, np.nan, np.float32)
        skip = -raw.ctypes.data % self.alignment_bytes // 4
        return raw[skip : skip + elements].reshape(shape)

    def copy_in(self, host: Array, memory: Array) -> None:
        """Copy a matrix from the host to the device."""
        memory[...] = host

    def launch(
        self, kernel: Any, grid: tuple[int, int], block: tuple[int, int], *arguments: Any
    ) -> None:
        """Run a kernel on the simulated threads."""
        launch(kernel, grid, block, *arguments)

    def copy_out(self, memory: Array, host: Array) -> None:
        """Copy a matrix back to the host."""
        host[...] = memory

    def free(self, memory: Array) -> None:
        """Do nothing: Python frees what nobody holds."""


class GPU:
    """A GPU of this machine, by its name; runs what :func:`variants` names, compiled.

    Each step is one call of the driver's, and nothing is kept: the chapter as it stands.

    Raises
    ------
    OptionError, DeviceError
        For a name that is none, a device that is not there or not usable.
    """

    def __init__(self, name: str = "cuda:0") -> None:
        from .runtime import device, streams

        self._index = device.index_of(name)
        self._stream = streams.DEFAULT

    def allocate(self, shape: tuple[int, int]) -> _Matrix:
        """Return device memory for a float32 matrix."""
        from .runtime import memory

        nbytes = 4 * shape[0] * shape[1]
        return _Matrix(memory.allocate(nbytes, self._index, self._stream, "a matrix"), shape)

    def copy_in(self, host: Array, memory: _Matrix) -> None:
        """Copy a matrix from the host to the device."""
        from .runtime.memory import write

        write(memory.memory, np.ascontiguousarray(host), self._stream)

    def launch(
        self, kernel: Any, grid: tuple[int, int], block: tuple[int, int], *arguments: Any
    ) -> None:
        """Run a kernel, and wait for it, so that what it does wrong is known to be its doing."""
        from .kernels import find
        from .runtime.device import facts
        from .runtime.launch import Launch, Tensor

        if kernel not in _COMPILED:
            names = ", ".join(known.__name__ for known in _COMPILED)
            raise DeviceError(
                f"{kernel!r} is not compiled; {names} are. Decorate it with numba.cuda.jit to run "
                "it on a GPU, or use device='cpu'"
            )
        built = find("guide", kernel.__name__, facts(self._index).capability)
        matrices = [given for given in arguments if isinstance(given, _Matrix)]
        passed = [
            Tensor(matrices.index(given), given.shape, (given.shape[1], 1), item_bytes=4)
            if isinstance(given, _Matrix)
            else given
            for given in arguments
        ]
        names_of = [parameter.name for parameter in built.parameters]
        shapes = " and ".join(str(matrix.shape) for matrix in matrices)
        prepared = Launch(
            built,
            self._index,
            grid,
            dict(zip(names_of, passed, strict=True)),
            block=block,
            what=f"matrices of {shapes}",
        )
        prepared(self._stream, tuple(matrix.memory.pointer for matrix in matrices))
        prepared.finish(self._stream)

    def copy_out(self, memory: _Matrix, host: Array) -> None:
        """Copy a matrix back to the host."""
        from .runtime.memory import read

        whole = host if host.flags.c_contiguous else np.empty(host.shape, np.float32)
        read(memory.memory, whole, self._stream)
        if whole is not host:
            host[...] = whole

    def free(self, memory: _Matrix) -> None:
        """Give device memory back."""
        memory.memory.free()


class Traced:
    """A device that keeps what each step took; prints as a table.

    Parameters
    ----------
    device : "cpu", "cuda:0" and so on, or Device
        The device that does the work.

    Attributes
    ----------
    steps : list of (str, int, float)
        What was done, the bytes it was done to, and the seconds it took.
    """

    def __init__(self, device: str | Device) -> None:
        self._device = _device(device)
        self.steps: list[tuple[str, int, float]] = []

    def __str__(self) -> str:
        rows = [
            f"{name:<9}{nbytes:>15,} B {1e3 * seconds:>10.3f} ms"
            + (f" {nbytes / seconds / 1e9:>8.1f} GB/s" if name.startswith("copy") else "")
            for name, nbytes, seconds in self.steps
        ]
        return "\n".join(rows)

    def allocate(self, shape: tuple[int, int]) -> Any:
        """Allocate, and note it."""
        return self._noted("allocate", 4 * shape[0] * shape[1], self._device.allocate, shape)

    def copy_in(self, host: Array, memory: Any) -> None:
        """Copy in, and note it."""
        self._noted("copy in", host.nbytes, self._device.copy_in, host, memory)

    def launch(
        self, kernel: Any, grid: tuple[int, int], block: tuple[int, int], *arguments: Any
    ) -> None:
        """Launch, and note it; the first time it takes in that the code is loaded."""
        nbytes = sum(
            4 * given.shape[0] * given.shape[1] for given in arguments if _is_matrix(given)
        )
        self._noted("launch", nbytes, self._device.launch, kernel, grid, block, *arguments)

    def copy_out(self, memory: Any, host: Array) -> None:
        """Copy out, and note it."""
        self._noted("copy out", host.nbytes, self._device.copy_out, memory, host)

    def free(self, memory: Any) -> None:
        """Free, and note it."""
        self._noted("free", 4 * memory.shape[0] * memory.shape[1], self._device.free, memory)

    def _noted(self, name: str, nbytes: int, step: Callable[..., Any], *arguments: Any) -> Any:
        started = time.perf_counter()
        result = step(*arguments)
        self.steps.append((name, nbytes, time.perf_counter() - started))
        return result


def variants() -> tuple[Variant, ...]:
    """Return the kernels of this file as `tilewise.kernels.compile` compiles them."""
    from .kernels import TARGETS
    from .kernels.compile import Variant

    matrix = "float32[:, ::1]"
    return tuple(
        Variant(
            name=kernel.__name__,
            function=kernel,
            compiler="numba",
            signature={"A": matrix, "B": matrix, "wA": "int64", "wB": "int64", "C": matrix},
            options={"num_warps": BLOCK_SIZE * BLOCK_SIZE // 32},
            targets=TARGETS,
        )
        for kernel in _COMPILED
    )


_COMPILED = (Muld, Muld_any, naive)


class _Matrix(NamedTuple):
    """Device memory of a GPU that holds a float32 matrix."""

    memory: Memory
    shape: tuple[int, int]


def _is_matrix(given: Any) -> bool:
    return len(getattr(given, "shape", ())) == 2


def _device(device: str | Device) -> Device:
    if device == "cpu":
        return SimulatedGPU()
    return GPU(device) if isinstance(device, str) else device


def _size(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise OptionError(f"{name}={value!r} must be an integer, the number of rows or columns")
    if value < 1:
        raise OptionError(f"{name}={value} must be 1 or more: a grid has at least one block")
    return int(value)


def _check_fit(kernel: Any, hA: int, wA: int, wB: int) -> None:
    """Refuse sizes that a kernel without guards would read or write beyond."""
    if kernel is not Muld and kernel is not naive:
        return
    odd = [
        f"{name} = {size}"
        for name, size in (("hA", hA), ("wA", wA), ("wB", wB))
        if size % BLOCK_SIZE
    ]
    if odd:
        raise ShapeError(
            f"{kernel.__name__} takes sizes that are multiples of {BLOCK_SIZE}, since each block "
            f"computes a whole {BLOCK_SIZE}×{BLOCK_SIZE} square of C from whole squares of A and "
            f"B; {', '.join(odd)}. Use kernel=tilewise.guide.Muld_any, which guards the edges"
        )


def _host_matrix(name: str, buffer: Any, height: int, width: int) -> Array:
    """Return a host buffer as a (height, width) view of itself."""
    try:
        array = buffer if isinstance(buffer, np.ndarray) else np.asarray(memoryview(buffer))
    except (TypeError, ValueError):
        raise DTypeError(
            f"{name} is a {type(buffer).__name__}; the host's matrices are NumPy arrays or other "
            "buffers of float32, flat or two-dimensional"
        ) from None
    if array.dtype != np.float32 or not array.dtype.isnative:
        raise DTypeError(
            f"{describe(name, array)}: the guide's kernel multiplies float32 in native byte order; "
            "convert with .astype(np.float32), or use tilewise.matmul, which takes every type"
        )
    if array.shape == (height, width):
        return array
    if array.shape == (height * width,):
        view = array.view(np.ndarray)
        return np.lib.stride_tricks.as_strided(
            view,
            (height, width),
            (view.strides[0] * width, view.strides[0]),
            writeable=view.flags.writeable,
        )
    raise ShapeError(
        f"{describe(name, array)} does not hold a matrix of {height} rows and {width} columns; "
        f"give an array of shape ({height}, {width}) or ({height * width},)"
    )
