"""A kernel's arguments in the order and form in which the driver takes them.

Everything that does not change from call to call is laid out once; a call writes the pointers that
changed, and numbers. Nothing here launches anything, and all but tensor maps needs no driver.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tilewise.errors import DeviceError
from tilewise.kernels import Built, Parameter
from tilewise.kernels.steps import Argument, Number, Pointer, Tensor

from . import driver

__all__ = ["Packed"]

_FORMATS = {
    **dict(zip(("i1", "i8", "i16", "i32", "i64"), "bbhiq", strict=True)),
    **dict(zip(("u1", "u8", "u16", "u32", "u64"), "BBHIQ", strict=True)),
    **dict(zip(("fp32", "fp64"), "fd", strict=True)),
    "pointer": "Q",  # a number only if it is null
}

_CELL = 8  # every value has a cell of its own, of which the driver takes as much as is declared
_MAP_BYTES = 128
_MAP_ALIGNMENT = 64  # of CUtensorMap, by the driver's reference
_MOST_MAPS = 64  # of one array at different addresses
_MAP_ADDRESS_ALIGNMENT = 16  # of the array that a map describes


class Packed:
    """The arguments of one kernel, in memory of ours, with a list of their places for the driver.

    Parameters
    ----------
    built : Built
        The kernel.
    arguments : mapping of str to Argument
        One for each of its parameters, by name.
    encode : callable
        ``encode(parameter, tensor)`` makes a tensor map, whose address is still to come.
    """

    def __init__(
        self,
        built: Built,
        arguments: Mapping[str, Argument],
        encode: Callable[[Parameter, Tensor], Any],
    ) -> None:
        names = {parameter.name for parameter in built.parameters}
        assert names == arguments.keys(), f"{built.name} takes {names}, not {[*arguments]}"
        self._encode = encode
        self._cells: list[bytes] = []
        self._places: list[int] = []
        self._targets: dict[int, list[_Target]] = {}
        self._numbered: dict[int, tuple[int, str]] = {}
        #: Those of the last call. (Numbers that are equal may still differ in a zero's sign.)
        self.pointers: tuple[int, ...] = ()
        self.numbers: tuple[float, ...] = ()
        for parameter in built.parameters:
            self._add(parameter, arguments[parameter.name])
        for _ in range(built.null_pointers):
            self._add_bytes(bytes(_CELL))

        size = _CELL * len(self._cells)
        self._memory = ctypes.create_string_buffer(size + _MAP_ALIGNMENT)
        start = -ctypes.addressof(self._memory) % _MAP_ALIGNMENT
        self._base = ctypes.addressof(self._memory) + start
        self._bytes = memoryview(self._memory).cast("B")[start : start + size]
        self._words = self._bytes.cast("Q")
        self._bytes[:] = b"".join(self._cells)
        addresses = [self._base + _CELL * place for place in self._places]
        self._list = (ctypes.c_void_p * len(addresses))(*addresses)
        #: Where the driver finds the addresses of all arguments.
        self.address = ctypes.addressof(self._list)

    def point(self, pointers: tuple[int, ...]) -> None:
        """Write the pointers that differ from the last call's, into cells and tensor maps.

        Raises
        ------
        DeviceError
            If one is not aligned as the kernel was compiled to rely on.
        """
        last = self.pointers
        assert len(pointers) == len(self._targets), (pointers, self._targets)
        self.pointers = ()  # if one of them is refused, the next call writes all
        for operand, pointer in enumerate(pointers):
            if last and pointer == last[operand]:
                continue
            for cell, offset, divisor, tensor_map, name in self._targets[operand]:
                address = pointer + offset
                if address % divisor:
                    raise DeviceError(f"{name} is not aligned to {divisor} bytes")
                if tensor_map is None:
                    self._words[cell] = address
                else:
                    place = _CELL * cell
                    self._bytes[place : place + _MAP_BYTES] = tensor_map.at(address)
        self.pointers = pointers

    def set_numbers(self, numbers: tuple[float, ...]) -> None:
        """Write the numbers of a call."""
        assert len(numbers) == len(self._numbered), (numbers, self._numbered)
        self.numbers = ()  # as for pointers
        for position, number in enumerate(numbers):
            cell, form = self._numbered[position]
            struct.pack_into(form, self._bytes, _CELL * cell, number)
        self.numbers = numbers

    def _add(self, parameter: Parameter, argument: Argument) -> None:
        kind, name, divisor = parameter.type, parameter.name, parameter.divisible_by
        if isinstance(argument, Tensor):
            assert parameter.rank == len(argument.shape) == len(argument.strides), parameter
            add = self._add_map if kind == "tensor map" else self._add_array
            add(parameter, argument)
        elif isinstance(argument, Pointer):
            assert kind == "pointer", parameter
            target = _Target(len(self._cells), argument.offset_bytes, divisor, None, name)
            self._add_target(argument.operand, target)
        elif isinstance(argument, Number):
            cell = self._add_bytes(bytes(_CELL))
            self._numbered[argument.position] = (cell, f"<{_FORMATS[kind]}")
        else:
            assert divisor == 1 or argument % divisor == 0, (parameter, argument)
            self._add_number(kind, argument)

    def _add_map(self, parameter: Parameter, tensor: Tensor) -> None:
        while len(self._cells) * _CELL % _MAP_ALIGNMENT:
            self._cells.append(bytes(_CELL))
        tensor_map = _Map(self._encode(parameter, tensor), parameter.name)
        target = _Target(
            len(self._cells),
            tensor.offset_bytes,
            _MAP_ADDRESS_ALIGNMENT,
            tensor_map,
            parameter.name,
        )
        self._add_target(tensor.operand, target, _MAP_BYTES)
        for size in tensor.shape:
            self._add_number("i32", size)
        for stride in tensor.strides:
            self._add_number("i64", stride)

    def _add_array(self, parameter: Parameter, tensor: Tensor) -> None:
        assert parameter.type == "array", parameter
        item = tensor.item_bytes
        for number in (0, 0, math.prod(tensor.shape), item):
            self._add_number("i64", number)
        target = _Target(len(self._cells), tensor.offset_bytes, item, None, parameter.name)
        self._add_target(tensor.operand, target)
        for number in (*tensor.shape, *(stride * item for stride in tensor.strides)):
            self._add_number("i64", number)

    def _add_target(self, operand: int, target: _Target, nbytes: int = _CELL) -> None:
        self._targets.setdefault(operand, []).append(target)
        self._add_bytes(bytes(nbytes))

    def _add_number(self, kind: str, value: float) -> None:
        self._add_bytes(struct.pack(f"<{_FORMATS[kind]}", value))

    def _add_bytes(self, data: bytes) -> int:
        place = len(self._cells)
        self._places.append(place)
        for at in range(0, len(data), _CELL):
            self._cells.append(data[at : at + _CELL].ljust(_CELL, b"\0"))
        return place


class _Target(NamedTuple):
    """Where a pointer goes: a cell, or a tensor map and the cells that it is copied to."""

    cell: int
    offset_bytes: int
    divisible_by: int
    tensor_map: _Map | None
    name: str


class _Map:
    """A tensor map, and what it reads as for the addresses that it was last given.

    Products go round a few arrays, and having the driver write an address takes 1 µs.
    """

    def __init__(self, encoded: Any, name: str) -> None:
        self._encoded = encoded
        self._name = name
        self._known: dict[int, bytes] = {}

    def at(self, address: int) -> bytes:
        known = self._known.get(address)
        if known is None:
            (status,) = driver.require().cuTensorMapReplaceAddress(self._encoded, address)
            if status != 0:
                raise DeviceError(f"mapping {self._name} failed: {driver.error_text(status)}")
            if len(self._known) >= _MOST_MAPS:
                self._known.clear()
            known = self._known[address] = ctypes.string_at(self._encoded.getPtr(), _MAP_BYTES)
        return known
