"""Compiled kernels on a GPU: loaded once, prepared once, launched with new pointers each time.

A call writes the pointers that changed and goes to the driver. It goes there directly, since
cuda.core's own launch packs every argument anew. How arguments are packed is `arguments`'.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from tilewise.errors import DeviceError
from tilewise.kernels import Built, Parameter
from tilewise.kernels.steps import Argument, Tensor

from . import driver, quick
from .arguments import Packed
from .device import current, facts, primary_context

__all__ = ["Launch", "Tensor", "load"]

_SHARED_WITHOUT_ASKING = 48 * 1024


class Launch:
    """One kernel, ready to be launched on one device with nothing but pointers and a stream.

    Parameters
    ----------
    built : Built
        The compiled kernel.
    index : int
        The device.
    grid : tuple of int
        Programs in x, y and z: blocks, or clusters of blocks for a kernel compiled for those.
    arguments : mapping of str to Argument
        One for each parameter of the kernel, by name: a number that never changes, `Number`,
        `Pointer` or `Tensor`.
    block : tuple of int, optional
        Threads in x, y and z, if not all warps in x.
    what : str
        What is being computed, with its shapes, for the message of a launch that fails.

    Raises
    ------
    DeviceError
        If the code does not load on this device, or a tensor cannot be mapped.
    """

    def __init__(
        self,
        built: Built,
        index: int,
        grid: Sequence[int],
        arguments: Mapping[str, Argument],
        *,
        block: Sequence[int] | None = None,
        what: str = "",
    ) -> None:
        self._built = built
        self._index = index
        self._what = what
        self._lock = threading.Lock()
        self._context = int(primary_context(index))
        self._grid = (grid[0] * built.blocks, *grid[1:], *(1,) * (3 - len(grid)))
        self._block = tuple(block) if block is not None else (32 * built.warps,)
        self._block += (1,) * (3 - len(self._block))
        with current(index):
            self._function = load(built, index)
            self._packed = Packed(built, arguments, self._encode)
        self._stream = 0
        self._config = self._described()

    def __call__(
        self, stream: int, pointers: tuple[int, ...], numbers: tuple[float, ...] = ()
    ) -> None:
        """Put the kernel on a stream; returns at once.

        Parameters
        ----------
        stream : int
            A handle, as `streams.handle_of` gives it.
        pointers : tuple of int
            The data of the arrays that `Pointer` and `Tensor` refer to.
        numbers : tuple of float
            Those that `Number` refers to.

        Raises
        ------
        DeviceError
            Naming kernel and shapes, if the driver refuses. What a kernel does wrong while it runs
            is raised by whatever waits for the stream, such as `finish`.
        """
        cuda = driver.require()
        is_elsewhere = int(cuda.cuCtxGetCurrent()[1]) != self._context
        if is_elsewhere:
            cuda.cuCtxPushCurrent(self._context)
        try:
            with self._lock:
                self._describe(stream, pointers, numbers)
                (status,) = cuda.cuLaunchKernelEx(
                    self._config, self._function, self._packed.address, 0
                )
        except DeviceError as error:
            raise self._failure(str(error)) from None
        finally:
            if is_elsewhere:
                cuda.cuCtxPopCurrent()
        if status != 0:
            raise self._failure(driver.error_text(status))

    def at_once(self, stream: int, pointers: tuple[int, ...], numbers: tuple[float, ...]) -> None:
        """Do the same on a stream of tilewise's own, where the device is current (see `quick`)."""
        try:
            with self._lock:
                self._describe(stream, pointers, numbers)
                status = quick.calls().launch(
                    self._config.getPtr(), int(self._function), self._packed.address, 0
                )
        except DeviceError as error:
            raise self._failure(str(error)) from None
        if status != 0:
            raise self._failure(driver.error_text(driver.require().CUresult(status)))

    def finish(self, stream: int) -> None:
        """Wait for a stream, and raise what went wrong there as this kernel's doing.

        Raises
        ------
        DeviceError
            Naming kernel and shapes.
        """
        with current(self._index) as cuda:
            status = cuda.cuStreamSynchronize(stream)[0]
        if status != 0:
            raise self._failure(driver.error_text(status))

    def _describe(self, stream: int, pointers: tuple[int, ...], numbers: tuple[float, ...]) -> None:
        """Write what differs from the last launch."""
        packed = self._packed
        if pointers != packed.pointers:
            packed.point(pointers)
        if numbers is not packed.numbers:
            packed.set_numbers(numbers)
        if stream != self._stream:
            self._config.hStream = driver.require().CUstream(stream)
            self._stream = stream

    def _encode(self, parameter: Parameter, tensor: Tensor) -> Any:
        """Return the tensor map of an array whose address is still to come."""
        cuda, how = driver.require(), parameter.tensor_map
        assert how is not None
        assert tensor.strides[-1] == 1, tensor
        shape = [cuda.cuuint64_t(size) for size in reversed(tensor.shape)]
        strides = [
            cuda.cuuint64_t(stride * tensor.item_bytes) for stride in reversed(tensor.strides[:-1])
        ]
        box = [cuda.cuuint32_t(size) for size in reversed(how["block_size"])]
        status, encoded = cuda.cuTensorMapEncodeTiled(
            cuda.CUtensorMapDataType(how["data_type"]),
            len(shape),
            16,  # any aligned address: the first call writes the real one
            shape,
            strides,
            box,
            [cuda.cuuint32_t(1)] * len(shape),
            cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            cuda.CUtensorMapSwizzle(how["swizzle"]),
            cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        if status != 0:
            raise self._failure(
                f"{parameter.name} of shape {tensor.shape} with strides of {tensor.strides} "
                f"elements has no tensor map: {driver.error_text(status)}"
            )
        return encoded

    def _described(self) -> Any:
        """Return the driver's description of the launch, all but its stream."""
        cuda, built = driver.require(), self._built
        attributes = []
        if built.blocks > 1:
            cluster = cuda.CUlaunchAttribute()
            cluster.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            cluster.value.clusterDim.x = built.blocks
            cluster.value.clusterDim.y = cluster.value.clusterDim.z = 1
            attributes.append(cluster)
        if built.starts_early:
            early = cuda.CUlaunchAttribute()
            early.id = (
                cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            )
            early.value.programmaticStreamSerializationAllowed = 1
            attributes.append(early)
        config = cuda.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = self._grid
        config.blockDimX, config.blockDimY, config.blockDimZ = self._block
        config.sharedMemBytes = built.shared_bytes
        config.attrs = attributes
        config.numAttrs = len(attributes)
        return config

    def _failure(self, reason: str) -> DeviceError:
        built = self._built
        return DeviceError(
            f"kernel {built.family}/{built.name} ({built.target}) failed on cuda:{self._index} for "
            f"{self._what or 'a product'}, grid {self._grid}: {reason}"
        )


_loading = threading.Lock()
_loaded: dict[tuple[str, str, str], Any] = {}
_functions: dict[tuple[str, str, str, int], Any] = {}


def load(built: Built, index: int) -> Any:
    """Return the driver's handle of a kernel, loaded on a device; once in the life of a process.

    Raises
    ------
    DeviceError
        If the code is damaged or does not load.
    """
    name = (built.family, built.name, built.code_sha256)
    function = _functions.get((*name, index))
    if function is not None:
        return function
    from cuda.core import Device, ObjectCode

    cuda = driver.require()
    what = f"kernel {built.family}/{built.name} ({built.target})"
    with _loading, current(index):
        Device(index).set_current()  # cuda.core wants to be told, once in each thread
        try:
            kernel = _loaded.get(name)
            if kernel is None:
                is_ptx = built.target.startswith("compute_")
                code = (ObjectCode.from_ptx if is_ptx else ObjectCode.from_cubin)(built.code())
                kernel = _loaded[name] = code.get_kernel(built.entry)
        except DeviceError:
            raise
        except Exception as error:  # cuda.core does not export the class of its errors
            raise DeviceError(
                f"{what} does not load on cuda:{index} ({facts(index).name}): {error}"
            ) from error
        if built.shared_bytes > _SHARED_WITHOUT_ASKING:
            attribute = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            given = cuda.cuKernelSetAttribute(
                attribute, built.shared_bytes, kernel.handle, cuda.cuDeviceGet(index)[1]
            )
            driver.check(given, f"giving {what} {built.shared_bytes} bytes of shared memory")
        # This loads the code now: later could be in the capture of a graph. And what it gives is
        # launched a tenth faster than the kernel that it is of.
        asked = cuda.cuKernelGetFunction(kernel.handle)
        function = driver.check(asked, f"loading {what} on cuda:{index}")
        _functions[(*name, index)] = function
    return function
