"""Arrays as a kernel sees them: bounds, loads, stores and atomics over many lanes at once.

An index is what a rewritten kernel computes: a Python int where it is the same for all lanes, else
an int64 array that broadcasts against the axes of the lanes. Where fewer axes than those of the
lanes vary, as in a row of a tile that all of its threads read, less is loaded: the result
broadcasts likewise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import KernelError
from .events import Access, ArrayInfo
from .lanes import Mask, holder
from .typing_rules import type_of_dtype

if TYPE_CHECKING:
    from .machine import Machine

__all__ = ["Storage", "poison"]

Index = int | NDArray[np.int64]

#: What integers hold before anything is written, byte by byte; floats hold NaN.
_PATTERN = 0xAB


def poison(dtype: np.dtype[Any]) -> Any:
    """Return the value that memory holds before anything is written to it."""
    if dtype.kind == "f":
        return dtype.type(np.nan)
    if dtype.kind == "b":
        return np.True_
    return np.frombuffer(bytes([_PATTERN] * dtype.itemsize), dtype)[0]


class Storage:
    """One array: a global argument, or what each block or thread has of a declared one.

    Parameters
    ----------
    data : ndarray
        For a global array the array itself, else ``(owners, elements)``, an owner being a block
        (shared) or a thread (local).
    owner : int64 array or None
        The owner of each lane, shaped to broadcast against the lanes; None for a global array.
    """

    def __init__(
        self,
        machine: Machine,
        info: ArrayInfo,
        data: NDArray[Any],
        owner: NDArray[np.int64] | None = None,
    ) -> None:
        self.info = info
        self.shape = info.shape
        self.size = int(np.prod(info.shape))
        self._machine = machine
        self._data = data
        self._flat = data.reshape(-1) if data.flags.c_contiguous else None
        self._base: Index = 0 if owner is None else owner * self.size
        #: Which elements were written, of a local array and for who reads along.
        self._written: NDArray[np.bool_] | None = None
        if info.space == "local" and machine.observer is not None:
            self._written = np.zeros(data.shape, np.bool_)
        code = type_of_dtype(info.dtype)
        assert code is not None
        self._held = holder(code)
        self._converted = self._held != info.dtype
        strides = [1]
        for extent in reversed(info.shape[1:]):
            strides.insert(0, strides[0] * extent)
        self._axes = tuple(zip(info.shape, strides, strict=True))

    # -- what a rewritten kernel calls

    def declared(self, mask: Mask) -> None:
        """Begin a local array anew, for the lanes of a mask: none of its elements is written."""
        if self._written is not None:
            self._written[self._machine.full(True if mask is None else mask).reshape(-1)] = False

    def load(self, site: int, mask: Mask, *index: Index) -> NDArray[Any]:
        """Return the elements at an index, for the lanes of a mask; elsewhere anything."""
        where, kept = self._locate(site, mask, index)
        if where is None:  # no lane is left that may read
            return np.broadcast_to(np.asarray(poison(self.info.dtype)).astype(self._held), 1)
        if self._written is not None:
            self._look_for_unwritten(site, _within(mask, kept), where, index)
        value = self._get(where)
        if kept is not None:
            value = np.where(kept, value, poison(self.info.dtype))
        if self._machine.observer is not None:
            self._report(site, "load", _within(mask, kept), index, value)
        return value.astype(self._held) if self._converted else value

    def store(self, site: int, mask: Mask, value: Any, *index: Index) -> None:
        """Write elements, for the lanes of a mask; of lanes that meet, the last one wins."""
        self._may_write(site)
        where, kept = self._locate(site, mask, index)
        if where is None:
            return
        mask = _within(mask, kept)
        if self._machine.observer is not None:
            self._report(site, "store", mask, index, np.asarray(value))
        if mask is not None:
            shape = np.broadcast_shapes(np.shape(where), np.shape(value), mask.shape)
            mask = np.broadcast_to(mask, shape)
            where = np.broadcast_to(where, shape)[mask]
            if isinstance(value, np.ndarray):
                value = np.broadcast_to(value, shape)[mask]
        elif isinstance(value, np.ndarray):
            shape = np.broadcast_shapes(np.shape(where), value.shape)
            where, value = np.broadcast_to(where, shape), np.broadcast_to(value, shape)
        if self._written is not None:
            self._written.reshape(-1)[where] = True
        self._put(where, value)

    def atomic(
        self, how: str, site: int, mask: Mask, operand: Any, wanted: bool, *index: Index
    ) -> NDArray[Any] | None:
        """Do one atomic operation a lane, in the lanes' order; return what was there before."""
        self._may_write(site)
        where, kept = self._locate(site, mask, index)
        mask = _within(mask, kept)
        operands = operand if isinstance(operand, tuple) else (operand,)
        lanes = self._machine.lanes
        if where is None:
            return np.broadcast_to(np.asarray(poison(self.info.dtype)).astype(self._held), lanes)
        if self._machine.observer is not None:
            self._report(site, how, mask, index, np.asarray(operands[-1]))
        if self._written is not None:
            self._look_for_unwritten(site, mask, where, index)
        active = np.broadcast_to(True if mask is None else mask, lanes)
        where = np.broadcast_to(where, lanes)[active]
        if self._written is not None:
            self._written.reshape(-1)[where] = True
        values = [
            np.broadcast_to(np.asarray(value), lanes)[active].astype(self.info.dtype)
            for value in operands
        ]
        in_place = _AT.get((how, self.info.dtype.kind))
        if not wanted and in_place is not None:
            if self._flat is not None:
                in_place(self._flat, where, values[0])
            else:
                in_place(self._data, np.unravel_index(where, self.shape), values[0])
            return None
        before = np.full(lanes, poison(self.info.dtype)).astype(self._held)
        before[active] = self._one_by_one(_ATOMICS[how], where, values)
        return before

    # -- how it is done

    def _look_for_unwritten(
        self, site: int, mask: Mask, where: Index, index: tuple[Index, ...]
    ) -> None:
        assert self._written is not None
        fresh = ~self._written.reshape(-1)[where]
        fresh = fresh if mask is None else fresh & mask
        if fresh.any():
            self._machine.unwritten(site, self.info, fresh, index)

    def _one_by_one(
        self,
        update: Callable[..., NDArray[Any]],
        where: NDArray[np.int64],
        values: list[NDArray[Any]],
    ) -> NDArray[Any]:
        """Update elements in the lanes' order: in round r the r-th lane of every element."""
        order = np.argsort(where, kind="stable")
        target = where[order]
        first = np.searchsorted(target, target, side="left")
        turn = np.arange(len(order)) - first
        before = np.zeros(len(order), self.info.dtype)
        for round_ in range(int(turn.max(initial=-1)) + 1):
            lanes = order[turn == round_]
            old = self._get(where[lanes])
            before[lanes] = old
            self._put(where[lanes], update(old, *(value[lanes] for value in values)))
        return before

    def _get(self, where: Index) -> NDArray[Any]:
        if self._flat is not None:
            if isinstance(where, np.ndarray):
                return self._flat.take(where)
            return self._flat[where : where + 1].copy()  # later stores must not show in it
        at = np.unravel_index(np.atleast_1d(where), self.shape)
        return np.asarray(self._data[at])

    def _put(self, where: Index, value: Any) -> None:
        if self._flat is not None:
            self._flat[where] = value
        else:
            self._data[np.unravel_index(np.atleast_1d(where), self.shape)] = value

    def _locate(self, site: int, mask: Mask, index: tuple[Index, ...]) -> tuple[Index | None, Mask]:
        """Return the element numbers, and the lanes to keep where some were out of range.

        Inactive lanes may be out of range: they are given element 0 to look at.
        """
        where: Any = self._base
        known = self._machine.largest
        for position, (extent, stride) in zip(index, self._axes, strict=True):
            if isinstance(position, int):
                if not 0 <= position < extent:
                    break
            elif known.get(id(position), extent) >= extent and not (
                position.view(np.uint64).max() < extent  # below zero is huge
            ):
                break
            where = where + position * stride if stride != 1 else where + position
        else:
            return where, None
        return self._locate_some(site, mask, index)

    def _locate_some(
        self, site: int, mask: Mask, index: tuple[Index, ...]
    ) -> tuple[Index | None, Mask]:
        inside: Any = True
        for position, extent in zip(index, self.shape, strict=True):
            inside = inside & (np.asarray(position) >= 0) & (np.asarray(position) < extent)
        inside = np.atleast_1d(inside)
        outside = ~inside if mask is None else mask & ~inside
        kept: Mask = None
        if outside.any():
            self._machine.out_of_range(site, self.info, outside, index)
            kept = inside
        wanted = inside if mask is None else inside & mask
        if not wanted.any():
            return None, kept
        where: Any = self._base
        for position, (_, stride) in zip(index, self._axes, strict=True):
            where = where + np.where(inside, position, 0) * stride
        return where, kept

    def _may_write(self, site: int) -> None:
        if not self._data.flags.writeable:
            raise KernelError(
                f"{self._machine.place(site)}: {self.info.name} is read-only and the kernel "
                "writes to it; pass a writeable array"
            )

    def _some_lanes(self) -> NDArray[np.int64] | None:
        known = self._machine.some_lanes
        if known is None:
            return None
        return known.reshape(2, len(self._machine.blocks), -1)[..., : self._machine.threads]

    def _report(
        self, site: int, op: str, mask: Mask, index: tuple[Index, ...], value: NDArray[Any]
    ) -> None:
        machine = self._machine
        offset: Any = 0
        for position, stride in zip(index, self.info.strides, strict=True):
            offset = offset + np.asarray(position, np.int64) * stride
        assert machine.observer is not None
        machine.observer.on_access(
            Access(
                site=machine.sites[site],
                array=self.info,
                op=op,
                blocks=machine.blocks,
                active=machine.full(True if mask is None else mask),
                offset=machine.full(offset),
                value=machine.full(value).astype(self.info.dtype, copy=False),
                interval=machine.interval,
                warp_interval=machine.warp_interval,
                some_lanes=self._some_lanes(),
            )
        )


def _within(mask: Mask, kept: Mask) -> Mask:
    if kept is None or mask is None:
        return mask if kept is None else kept
    return mask & kept


def _larger(old: NDArray[Any], value: NDArray[Any]) -> NDArray[Any]:
    return np.where(value > old, value, old)


def _smaller(old: NDArray[Any], value: NDArray[Any]) -> NDArray[Any]:
    return np.where(value < old, value, old)


def _swapped(old: NDArray[Any], expected: NDArray[Any], value: NDArray[Any]) -> NDArray[Any]:
    return np.where(old == expected, value, old)


#: What each atomic leaves in memory, from what was there and its operands.
_ATOMICS: dict[str, Callable[..., NDArray[Any]]] = {
    "add": np.add,
    "sub": np.subtract,
    "max": _larger,
    "min": _smaller,
    "nanmax": lambda old, value: np.where(np.isnan(old), value, _larger(old, value)),
    "nanmin": lambda old, value: np.where(np.isnan(old), value, _smaller(old, value)),
    "and_": np.bitwise_and,
    "or_": np.bitwise_or,
    "xor": np.bitwise_xor,
    "inc": lambda old, limit: np.where(old >= limit, old.dtype.type(0), old + old.dtype.type(1)),
    "dec": lambda old, limit: np.where((old == 0) | (old > limit), limit, old - old.dtype.type(1)),
    "exch": lambda old, value: value,
    "cas": _swapped,
    "compare_and_swap": _swapped,
}

#: NumPy does these in order by itself, where what was there before is not asked for.
_AT: dict[tuple[str, str], Callable[..., None]] = {
    **{("add", kind): np.add.at for kind in "iuf"},
    **{("sub", kind): np.subtract.at for kind in "iuf"},
    **{("max", kind): np.maximum.at for kind in "iu"},
    **{("min", kind): np.minimum.at for kind in "iu"},
    **{("and_", kind): np.bitwise_and.at for kind in "iu"},
    **{("or_", kind): np.bitwise_or.at for kind in "iu"},
    **{("xor", kind): np.bitwise_xor.at for kind in "iu"},
}
