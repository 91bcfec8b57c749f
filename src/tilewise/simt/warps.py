"""What the lanes of a warp do together: shuffles, votes, and waiting for each other.

A warp is 32 consecutive threads of a block in linear order. Here values are brought into the form
(block, warp, lane), worked on, and brought back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import KernelError
from .lanes import Mask
from .storage import poison
from .typing_rules import dtype_of

if TYPE_CHECKING:
    from .machine import Machine

__all__ = ["active_lanes", "shuffle", "syncwarp", "vote"]

_LANES = np.arange(32)


def shuffle(
    machine: Machine,
    how: str,
    code: str,
    mask: Mask,
    line: int,
    members: Any,
    value: Any,
    operand: Any,
) -> NDArray[Any]:
    """Return for every lane the value of another lane of its warp.

    A lane outside the warp gives the lane's own value; a lane that does not take part gives poison.
    """
    active, _ = _members(machine, mask, line, members)
    values = _to_warps(machine, value)
    amount = _to_warps(machine, operand) & 31
    source = {
        "index": amount,
        "up": _LANES - amount,
        "down": _LANES + amount,
        "xor": _LANES ^ amount,
    }[how]
    source = np.where((source < 0) | (source > 31), _LANES, source)
    moved = np.take_along_axis(values, source, axis=-1)
    nobody = np.asarray(poison(dtype_of(code))).astype(values.dtype)
    there = np.take_along_axis(active, source, axis=-1)
    return _from_warps(machine, np.where(there, moved, nobody))


def vote(
    machine: Machine, how: str, mask: Mask, line: int, members: Any, condition: Any
) -> NDArray[Any]:
    """Return for every lane what its members say together: all, any, eq, or the ballot."""
    active, named = _members(machine, mask, line, members)
    says = _to_warps(machine, condition)
    bits = (named[..., :, None] >> _LANES) & 1 == 1  # (block, warp, lane, member)
    heard = bits & active[..., None, :]
    yes = heard & says[..., None, :]
    if how == "ballot":
        ballot = (yes.astype(np.int64) << _LANES).sum(-1)
        return _from_warps(machine, ballot - ((ballot >> 31) << 32))  # int32, as numba has it
    every = (yes == heard).all(-1)
    if how == "any":
        return _from_warps(machine, yes.any(-1))
    return _from_warps(machine, every if how == "all" else every | ~yes.any(-1))


def syncwarp(machine: Machine, mask: Mask, line: int, members: Any) -> None:
    """Note that lanes have passed a ``syncwarp``: what those it names did before it is done."""
    active, named = _members(machine, mask, line, members)
    alive = _to_warps(machine, True if machine.gone is None else ~machine.gone)
    unnamed = alive[..., None, :] & ((named[..., :, None] >> _LANES) & 1 == 0)
    apart = (alive & ~active).any(-1) | (unnamed & active[..., None]).any((-1, -2))
    here = active.any(-1)
    machine.warp_interval = machine.warp_interval + (here & ~apart)
    if not (here & apart).any() and machine.some_lanes is None:
        return
    passed, last = machine.some_lanes if machine.some_lanes is not None else (0 * named, 0 * named)
    some = active & apart[..., None]
    together = (here & ~apart)[..., None]
    passed = np.where(together, 0, passed + some)
    machine.some_lanes = np.stack((passed, np.where(together, 0, np.where(some, named, last))))


def active_lanes(machine: Machine, mask: Mask) -> NDArray[Any]:
    """Return for every lane which lanes of its warp are at this place, as bits."""
    active = _active(machine, mask)
    bits = (active.astype(np.uint64) << _LANES.astype(np.uint64)).sum(-1, dtype=np.uint64)
    return _from_warps(machine, np.broadcast_to(bits[..., None], active.shape))


def _to_warps(machine: Machine, value: Any) -> NDArray[Any]:
    array = machine.full(value)
    padding = -array.shape[1] % 32
    if padding:
        array = np.pad(array, ((0, 0), (0, padding)))
    return array.reshape(len(array), -1, 32)


def _from_warps(machine: Machine, array: NDArray[Any]) -> NDArray[Any]:
    flat = array.reshape(len(array), -1)[:, : machine.threads]
    return flat.reshape(machine.lanes)


def _active(machine: Machine, mask: Mask) -> NDArray[np.bool_]:
    return _to_warps(machine, True if mask is None else mask)


def _members(
    machine: Machine, mask: Mask, line: int, members: Any
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Return the active lanes, and each one's member mask, checked against each other."""
    active = _active(machine, mask)
    named = _to_warps(machine, members) & 0xFFFFFFFF
    unnamed = active & ((named >> _LANES) & 1 == 0)
    if unnamed.any():
        block, warp, lane = (int(axis[0]) for axis in np.nonzero(unnamed))
        raise KernelError(
            f"{machine.filename}:{line}: lane {lane} of warp {warp} in block "
            f"{machine.block_name(block)} is not in the member mask that it gives, "
            f"{int(named[block, warp, lane]):#010x}"
        )
    alive = _to_warps(machine, True if machine.gone is None else ~machine.gone)
    expected = np.where(active, named, 0)
    all_named = np.bitwise_or.reduce(expected, axis=-1)[..., None] >> _LANES & 1 == 1
    missing = all_named & alive & ~active
    if missing.any():
        block, warp, lane = (int(axis[0]) for axis in np.nonzero(missing))
        raise KernelError(
            f"{machine.filename}:{line}: warp {warp} of block {machine.block_name(block)} waits "
            f"for lane {lane}, which its member mask names and which is not here; all lanes that "
            "a mask names must reach the same call"
        )
    return active, named
