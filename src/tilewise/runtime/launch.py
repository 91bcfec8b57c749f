"""Compiled kernels on a GPU: loaded once, prepared once, launched with new pointers each time.

What a launch passes is laid out when it is prepared, tensor maps included; a call writes the
pointers that changed and goes to the driver. cuda.core's own launch packs every argument anew, so
the driver is called directly here.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tilewise.errors import DeviceError
from tilewise.kernels import Built, Parameter

from . import driver
from .device import current, facts, primary_context

__all__ = ["Launch", "Number", "Pointer", "Tensor", "load"]

_FORMATS = {
    **dict(zip(("i1", "i8", "i16", "i32", "i64"), "bbhiq", strict=True)),
    **dict(zip(("u1", "u8", "u16", "u32", "u64"), "BBHIQ", strict=True)),
    **dict(zip(("fp32", "fp64"), "fd", strict=True)),
}

_CELL = 8  # every value gets a cell of its own; the driver takes of it what the kernel declares
_SHARED_WITHOUT_ASKING = 48 * 1024


@dataclass(frozen=True, slots=True)
class Pointer:
    """The pointer of a call's ``operand``-th array, some bytes on."""

    operand: int
    offset_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Number:
    """A number given with each call, its ``position``-th."""

    position: int


@dataclass(frozen=True, slots=True)
class Tensor:
    """A call's ``operand``-th array with its shape, and its strides in elements.

    For a tensor map the last stride is 1 and the others are multiples of 16 bytes.
    """

    operand: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int
    offset_bytes: int = 0


class _Target(NamedTuple):
    """Where a pointer of a call goes: a cell, or a tensor map and the cells it is copied to."""

    cell: int
    offset_bytes: int
    divisible_by: int
    tensor_map: Any
    name: str


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
        arguments: Mapping[str, Number | Pointer | Tensor | float],
        *,
        block: Sequence[int] | None = None,
        what: str = "",
    ) -> None:
        names = {parameter.name for parameter in built.parameters}
        assert names == arguments.keys(), f"{built.name} takes {names}, not {[*arguments]}"
        self._built = built
        self._index = index
        self._what = what
        self._lock = threading.Lock()
        self._context = int(primary_context(index))
        self._grid = (grid[0] * built.blocks, *grid[1:], *(1,) * (3 - len(grid)))
        self._block = tuple(block) if block is not None else (32 * built.warps,)
        self._block += (1,) * (3 - len(self._block))
        self._targets: list[list[_Target]] = []
        self._number_cells: list[tuple[int, str]] = []
        self._pointers: tuple[int, ...] = ()
        self._numbers: tuple[float, ...] = ()
        self._cuda = driver.require()
        with current(index):
            self._function = load(built, index)
            self._lay_out(arguments)
        self._shape = (self._function, *self._grid, *self._block, built.shared_bytes)
        self._config = self._extended_config()

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
                if pointers != self._pointers:
                    self._point(pointers)
                if numbers != self._numbers:
                    self._set_numbers(numbers)
                if self._config is None:
                    status = cuda.cuLaunchKernel(*self._shape, stream, self._list_address, 0)[0]
                else:
                    self._config.hStream = cuda.CUstream(stream)
                    status = cuda.cuLaunchKernelEx(
                        self._config, self._function, self._list_address, 0
                    )[0]
        finally:
            if is_elsewhere:
                cuda.cuCtxPopCurrent()
        if status != 0:
            raise self._failure(driver.error_text(status))

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

    def _lay_out(self, arguments: Mapping[str, Number | Pointer | Tensor | float]) -> None:
        """Give every value a place in one buffer, and point the driver's list at the places."""
        places: list[int] = []
        cells: list[bytes] = []

        def add(data: bytes) -> int:
            # The driver wants tensor maps on addresses that are multiples of 64 bytes.
            if len(data) > _CELL:
                cells.extend([bytes(_CELL)] * (-len(cells) % (64 // _CELL)))
            place = len(cells)
            cells.extend(
                data[at : at + _CELL].ljust(_CELL, b"\0") for at in range(0, len(data), _CELL)
            )
            places.append(place)
            return place

        def add_number(kind: str, value: float) -> int:
            return add(struct.pack(f"<{_FORMATS[kind]}", value))

        def add_pointer(operand: int, target: _Target) -> None:
            self._targets.extend([] for _ in range(operand + 1 - len(self._targets)))
            self._targets[operand].append(target)

        for parameter in self._built.parameters:
            argument = arguments[parameter.name]
            divisor = parameter.divisible_by
            if isinstance(argument, Tensor):
                assert parameter.rank == len(argument.shape) == len(argument.strides)
                offset = argument.offset_bytes
                if parameter.type == "tensor map":
                    encoded = self._encode(parameter, argument)
                    cell = add(bytes(128))
                    target = _Target(cell, offset, 16, encoded, parameter.name)
                    for size in argument.shape:
                        add_number("i32", size)
                    for stride in argument.strides:
                        add_number("i64", stride)
                else:
                    assert parameter.type == "array", parameter
                    add(bytes(8))
                    add(bytes(8))
                    items = 1
                    for size in argument.shape:
                        items *= size
                    add_number("i64", items)
                    add_number("i64", argument.item_bytes)
                    cell = add(bytes(8))
                    target = _Target(cell, offset, argument.item_bytes, None, parameter.name)
                    for size in argument.shape:
                        add_number("i64", size)
                    for stride in argument.strides:
                        add_number("i64", stride * argument.item_bytes)
                add_pointer(argument.operand, target)
            elif isinstance(argument, Pointer):
                assert parameter.type == "pointer", parameter
                cell = add(bytes(8))
                target = _Target(cell, argument.offset_bytes, divisor, None, parameter.name)
                add_pointer(argument.operand, target)
            elif isinstance(argument, Number):
                kind = _FORMATS[parameter.type]
                count = argument.position + 1 - len(self._number_cells)
                self._number_cells.extend([(0, "")] * count)
                self._number_cells[argument.position] = (add(bytes(8)), f"<{kind}")
            else:
                assert divisor == 1 or argument % divisor == 0, (parameter, argument)
                add_number(parameter.type, argument)
        for _ in range(self._built.null_pointers):
            add(bytes(8))
        size = _CELL * len(cells)
        self._memory = ctypes.create_string_buffer(size + 64)
        start = ctypes.addressof(self._memory)
        base = -(-start // 64) * 64
        ctypes.memmove(base, b"".join(cells), size)
        self._base = base
        self._cells = (
            memoryview(self._memory).cast("B")[base - start : base - start + size].cast("Q")
        )
        self._list = (ctypes.c_void_p * len(places))(*(base + _CELL * place for place in places))
        self._list_address = ctypes.addressof(self._list)

    def _point(self, pointers: tuple[int, ...]) -> None:
        """Write the pointers that differ from the last call's into cells and tensor maps."""
        assert len(pointers) == len(self._targets), (pointers, self._targets)
        last = self._pointers
        self._pointers = ()  # if one of them is refused, the next call writes all
        for position, pointer in enumerate(pointers):
            if last and pointer == last[position]:
                continue
            for cell, offset, divisor, tensor_map, name in self._targets[position]:
                address = pointer + offset
                if address % divisor:
                    raise self._failure(f"{name} is not aligned to {divisor} bytes")
                if tensor_map is None:
                    self._cells[cell] = address
                else:
                    replaced = self._cuda.cuTensorMapReplaceAddress(tensor_map, address)
                    driver.check(replaced, f"mapping {name} for {self._what}")
                    ctypes.memmove(self._base + _CELL * cell, tensor_map.getPtr(), 128)
        self._pointers = pointers

    def _set_numbers(self, numbers: tuple[float, ...]) -> None:
        for (cell, form), number in zip(self._number_cells, numbers, strict=True):
            data = struct.pack(form, number)
            ctypes.memmove(self._base + _CELL * cell, data, len(data))
        self._numbers = numbers

    def _encode(self, parameter: Parameter, tensor: Tensor) -> Any:
        """Return the tensor map of an array whose address is still to come."""
        cuda, how = self._cuda, parameter.tensor_map
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

    def _extended_config(self) -> Any:
        """Return the driver's description of a launch, where the plain call cannot say it all."""
        cuda, built = self._cuda, self._built
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
        if not attributes:
            return None
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
        # Asking for the function loads the code now: later could be in the capture of a graph.
        driver.check(cuda.cuKernelGetFunction(kernel.handle), f"loading {what} on cuda:{index}")
        function = _functions[(*name, index)] = cuda.CUfunction(int(kernel.handle))
    return function
