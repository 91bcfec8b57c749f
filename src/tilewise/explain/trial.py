"""A launch that can be run as often as wanted: arguments as a device would hold them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds
from numpy.typing import NDArray

from .. import simt
from ..errors import KernelError, OptionError
from ..simt.arguments import buffers
from ..simt.events import Access, Barrier, Fault, Launch, Observer
from ..simt.program import Program

__all__ = ["Trial", "filled"]

# Device memory is given out in multiples of 256 bytes.
_ALIGNMENT = 256

Dim = tuple[int, int, int]


@dataclass(frozen=True)
class Trial:
    """A kernel with the arguments of one launch, to be run as often as wanted."""

    program: Program
    grid: Dim
    block: Dim
    arguments: dict[str, Any]
    max_steps: int

    def run(self, blocks: Iterable[int], *observers: Observer) -> None:
        """Run some blocks, on arguments as they were given."""
        try:
            simt.launch(
                self.program,
                self.grid,
                self.block,
                *_placed(self.program, self.arguments),
                observer=_Together(observers),
                blocks=blocks,
                max_steps=self.max_steps,
            )
        except KernelError as error:
            # Whoever has called explain can pass it there.
            raise KernelError(str(error).replace("tilewise.simt.launch", "explain")) from None


class _Together:
    """Several observers as one; a fault is carried on from where all of them would."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers

    def on_launch(self, launch: Launch) -> None:
        for observer in self._observers:
            observer.on_launch(launch)

    def on_access(self, access: Access) -> None:
        for observer in self._observers:
            observer.on_access(access)

    def on_barrier(self, barrier: Barrier) -> None:
        for observer in self._observers:
            observer.on_barrier(barrier)

    def on_fault(self, fault: Fault) -> bool:
        answers = [observer.on_fault(fault) for observer in self._observers]
        return all(answers)


def filled(name: str, argument: Any) -> Any:
    """The argument, or an array of random numbers where only a shape and a dtype are given."""
    if not isinstance(argument, tuple):
        return argument
    try:
        shape, kind = argument
        if any(int(length) != length or length < 0 for length in shape):
            raise ValueError("a shape has whole numbers of 0 or more")
        dtype = np.dtype(kind)
        size = math.prod(shape)
        filled = _aligned(size * dtype.itemsize).view(dtype).reshape(shape)
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"argument {name}={argument!r}: an array that is to be made up is given as "
            f"(shape, dtype), such as ((64, 64), 'float32') ({error})"
        ) from None
    random = np.random.default_rng(0)
    if dtype.kind == "f":
        # In pieces, so that no second array of this size is needed.
        flat = filled.reshape(-1)
        for start in range(0, size, 1 << 20):
            part = flat[start : start + (1 << 20)]
            part[...] = random.standard_normal(len(part), dtype=np.float32)
    else:
        filled[...] = random.integers(0, 2, shape)
    return filled


def _placed(program: Program, arguments: dict[str, Any]) -> list[Any]:
    """The arguments as a device would hold them: aligned, and written to without harm.

    Views of one buffer stay views of one copy of it.
    """
    stores = [s for s in program.sites if s.kind in ("store", "atomic")]
    anywhere = any(s.array is None or s.function != program.name for s in stores)
    written = set(arguments) if anywhere else {s.array for s in stores}
    buffer_of = buffers(arguments.values())
    used: dict[tuple[int, int], tuple[int, int, bool]] = {}
    for name, value in arguments.items():
        if isinstance(value, np.ndarray) and value.ndim:
            low, high = byte_bounds(value)
            buffer = buffer_of[id(value)]
            before = used.get(buffer, (low, high, False))
            touched = before[2] or name in written
            used[buffer] = min(low, before[0]), max(high, before[1]), touched
    copies: dict[tuple[int, int], NDArray[np.uint8]] = {}
    placed: list[Any] = []
    for value in arguments.values():
        if not isinstance(value, np.ndarray) or not value.ndim:
            placed.append(value)
            continue
        buffer = buffer_of[id(value)]
        low, high, touched = used[buffer]
        if not touched and buffer[0] % _ALIGNMENT == 0:
            placed.append(value)
            continue
        lead = (low - buffer[0]) % _ALIGNMENT
        if buffer not in copies:
            copies[buffer] = _aligned(lead + high - low)
        offset = lead + value.__array_interface__["data"][0] - low
        copy = np.ndarray(value.shape, value.dtype, copies[buffer], offset, value.strides)
        copy[...] = value
        placed.append(copy)
    return placed


def _aligned(nbytes: int) -> NDArray[np.uint8]:
    """Fresh memory that begins at a multiple of what device memory is aligned to."""
    memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    lead = -memory.__array_interface__["data"][0] % _ALIGNMENT
    # Through a memoryview, so that this and not the larger piece is the buffer of its views.
    return np.frombuffer(memory.data, np.uint8, nbytes, lead)
