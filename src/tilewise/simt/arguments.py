"""What a launch is given: grid and block, arrays and numbers, checked before anything runs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import KernelError, OptionError
from .events import ArrayInfo
from .program import Program
from .typing_rules import type_of_dtype, type_of_scalar
from .values import ArrayValue, Value

__all__ = ["Geometry", "bind", "buffers", "describe_arguments"]

_GRID_LIMITS = (2**31 - 1, 65535, 65535)
_BLOCK_LIMITS = (1024, 1024, 64)
_REGION = 2 << 20  # simulated addresses: every buffer starts a region aligned to this


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shape of a launch; ``axes`` are those of a block without leading ones, z before x."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]

    @classmethod
    def of(cls, grid: int | Sequence[int], block: int | Sequence[int]) -> Geometry:
        """Check a grid and a block against CUDA's limits."""
        checked = cls(_triple("grid", grid, _GRID_LIMITS), _triple("block", block, _BLOCK_LIMITS))
        if checked.threads > 1024:
            raise OptionError(f"block={block!r} has {checked.threads} threads; CUDA allows 1024")
        return checked

    @property
    def threads(self) -> int:
        """Threads of a block."""
        x, y, z = self.block
        return x * y * z

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        x, y, z = self.grid
        return x * y * z

    @property
    def axes(self) -> tuple[int, ...]:
        """Extents of a block, slowest first, without leading ones."""
        x, y, z = self.block
        if z > 1:
            return z, y, x
        return (y, x) if y > 1 else (x,)

    def block_ids(self, wanted: Iterable[int] | None) -> Sequence[int] | NDArray[np.int64]:
        """Return the linear ids of the blocks to run."""
        if wanted is None:
            return range(self.blocks)
        ids = np.asarray(list(wanted))
        if ids.size and (ids.dtype.kind not in "iu" or ids.ndim != 1):
            raise OptionError("blocks must be integers: linear ids of blocks")
        ids = ids.astype(np.int64)
        if ids.size and not (ids.min() >= 0 and ids.max() < self.blocks):
            raise OptionError(f"blocks must be within 0 to {self.blocks - 1}, the grid's blocks")
        return ids


def bind(
    source: Program, arguments: tuple[Any, ...]
) -> tuple[tuple[Value | ArrayValue, ...], list[Any]]:
    """Return the types of a launch's arguments, and their values as kernels hold them."""
    if len(arguments) != len(source.parameters):
        names = ", ".join(source.parameters)
        raise KernelError(
            f"{source.name}({names}) takes {len(source.parameters)} arguments, got {len(arguments)}"
        )
    types: list[Value | ArrayValue] = []
    values: list[Any] = []
    for name, argument in zip(source.parameters, arguments, strict=True):
        if isinstance(argument, np.ndarray) and argument.ndim:
            code = type_of_dtype(argument.dtype)
            if code is None or isinstance(argument, np.ma.MaskedArray):
                raise KernelError(
                    f"argument {name} of {source.name} is a {type(argument).__name__} of dtype "
                    f"{argument.dtype} (byte order {argument.dtype.byteorder!r}); kernels take "
                    "plain arrays of bool, int8 to int64, uint8 to uint64 and float16 to float64 "
                    "in native byte order"
                )
            types.append(ArrayValue(name, code, argument.ndim))
            values.append(argument.view(np.ndarray))
            continue
        scalar = argument[()] if isinstance(argument, np.ndarray) else argument
        kind = type_of_scalar(scalar)
        if kind is None:
            raise KernelError(
                f"argument {name} of {source.name} is a {type(argument).__name__}; kernels take "
                "NumPy arrays and numbers"
            )
        types.append(Value(name, kind, True))
        if kind[0] == "f":
            scalar = np.float64(scalar) if kind == "f8" else scalar
        else:
            scalar = bool(scalar) if kind == "b1" else int(scalar)
        values.append(scalar)
    return tuple(types), values


def buffers(arrays: Iterable[Any]) -> dict[int, tuple[int, int]]:
    """Return for each array, by its ``id``, where the memory that it is a view of begins and ends.

    Arrays that share memory have one buffer, also where NumPy does not know it: two that were made
    of one ``bytearray``, or what ``as_strided`` returns. What is no array is left out.
    """
    spans = {}
    for array in arrays:
        if isinstance(array, np.ndarray):
            root: Any = array
            while isinstance(root.base, np.ndarray):
                root = root.base
            low, high = np.lib.array_utils.byte_bounds(root)
            spans[id(array)] = low, max(high, low)
    merged: list[tuple[int, int]] = []
    for low, high in sorted(spans.values()):
        if merged and low < merged[-1][1]:
            merged[-1] = merged[-1][0], max(high, merged[-1][1])
        else:
            merged.append((low, high))
    starts = [low for low, _ in merged]
    return {key: merged[bisect_right(starts, low) - 1] for key, (low, _) in spans.items()}


def describe_arguments(source: Program, values: Sequence[Any]) -> list[ArrayInfo | None]:
    """Describe the arrays among a launch's values, each placed in a simulated address space."""
    placed: dict[tuple[int, int], int] = {}
    buffer_of = buffers(values)
    free = _REGION
    found: list[ArrayInfo | None] = []
    for name, array in zip(source.parameters, values, strict=True):
        if not isinstance(array, np.ndarray):
            found.append(None)
            continue
        buffer = low, high = buffer_of[id(array)]
        if buffer not in placed:
            placed[buffer] = free + low % 256
            free += -(-(low % 256 + high - low + 1) // _REGION) * _REGION
        first, last = np.lib.array_utils.byte_bounds(array)
        found.append(
            ArrayInfo(
                name=name,
                space="global",
                dtype=array.dtype,
                shape=array.shape,
                strides=array.strides,
                base=placed[buffer] + array.__array_interface__["data"][0] - low,
                nbytes=last - first if array.size else 0,
            )
        )
    return found


def _triple(name: str, value: Any, limits: tuple[int, int, int]) -> tuple[int, int, int]:
    items = tuple(value) if isinstance(value, Sequence) else (value,)
    whole = all(
        isinstance(item, (int, np.integer)) and not isinstance(item, bool) for item in items
    )
    if not whole or not 1 <= len(items) <= 3:
        raise OptionError(f"{name}={value!r} must be an integer or a tuple of 1 to 3 integers")
    x, y, z = (*(int(item) for item in items), 1, 1)[:3]
    for axis, extent, limit in zip("xyz", (x, y, z), limits, strict=True):
        if not 1 <= extent <= limit:
            raise OptionError(f"{name}={value!r}: {axis} must be within 1 to {limit}, got {extent}")
    return x, y, z
