"""Pinned memory of the host that products pass through: made once, kept, and given back.

One ring is kept for the process; a second product at the same time gets one of its own, for as long
as it runs.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from tilewise._memory import format_bytes

from . import driver
from .device import current

__all__ = ["Pinned", "held_bytes", "lend", "release", "touch"]

_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: pinned for every GPU of the process

_PAGE = 4096
_HUGE_PAGE = 2 << 20
_TOUCHED_AT_ONCE = 4 * _HUGE_PAGE

_lock = threading.Lock()
_kept: Pinned | None = None
_is_lent = False


class Pinned:
    """Host memory that GPUs copy at full speed, as ``array``, one of bytes; a context manager.

    Memory that has been touched on huge pages in several threads is registered in a seventh of the
    time that cuMemHostAlloc takes (docs/facts.md).
    """

    def __init__(self, nbytes: int, index: int = 0) -> None:
        self.array: NDArray[np.uint8] = np.empty(max(nbytes, 1), np.uint8)
        touch(self.array)
        self._index = index
        self._is_held = False
        try:
            with current(index) as cuda:
                status = cuda.cuMemHostRegister(
                    self.array.ctypes.data, self.array.nbytes, _PORTABLE
                )
                driver.check(status, f"pinning {format_bytes(nbytes)} of host memory")
                self._is_held = True
        except BaseException:  # an interrupt may have come when it was pinned and not known yet
            with current(index) as cuda:
                cuda.cuMemHostUnregister(self.array.ctypes.data)
            raise

    def free(self) -> None:
        """Unpin the memory; nothing may be copying it. A second time does nothing."""
        if self._is_held:
            self._is_held = False
            with current(self._index) as cuda:
                driver.check(cuda.cuMemHostUnregister(self.array.ctypes.data), "unpinning memory")

    def __enter__(self) -> Pinned:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()


@contextmanager
def lend(nbytes: int, index: int, most: int | None = None) -> Iterator[NDArray[np.uint8]]:
    """Lend ``nbytes`` of pinned memory, to be used by every GPU.

    Parameters
    ----------
    nbytes : int
    index : int
        A device to pin it for, if there is none yet.
    most : int, optional
        What may be pinned in all: a larger ring from before is given back first.
    """
    global _kept, _is_lent
    with _lock:
        is_own = _is_lent
        if not is_own:
            _is_lent = True
    if is_own:
        with Pinned(nbytes, index) as ring:
            yield ring.array[:nbytes]
        return
    try:
        is_large = most is not None and _kept is not None and _kept.array.nbytes > most
        if _kept is None or _kept.array.nbytes < nbytes or is_large:
            release()
            _kept = Pinned(nbytes, index)
        yield _kept.array[:nbytes]
    finally:
        _is_lent = False


def held_bytes() -> int:
    """Return how much is kept pinned now."""
    return 0 if _kept is None else _kept.array.nbytes


def release() -> None:
    """Unpin and give back what is kept; nothing may be using it."""
    global _kept
    if _kept is not None:
        _kept.free()
        _kept = None


def touch(memory: NDArray[np.uint8], threads: int = 8) -> None:
    """Make the pages of new memory, in several threads."""
    with ThreadPoolExecutor(threads, "tilewise-touch") as pool:
        for _ in pool.map(memory.__setitem__, touch_pieces(memory), itertools.repeat(0)):
            pass


def touch_pieces(memory: NDArray[np.uint8]) -> Iterator[slice]:
    """Yield the pieces of new memory to write to, one thread each: a place in each of their pages.

    All but the first begin with a huge page.
    """
    start = 0
    stop = -memory.ctypes.data % _HUGE_PAGE + _TOUCHED_AT_ONCE
    while start < memory.size:
        yield slice(start, min(stop, memory.size), _PAGE)
        start, stop = stop, stop + _TOUCHED_AT_ONCE
