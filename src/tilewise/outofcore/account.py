"""How far a product of files has come: what a run has done, and what is told of it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

from .journal import Journal
from .schedule import Tiling, sizes

__all__ = ["Account", "Progress", "Report"]

Report = Callable[["Progress"], object]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a product of files has come."""

    flops: int  #: multiplications and additions that are done, in earlier runs too
    total_flops: int
    read_bytes: int  #: in this run, as the two below
    written_bytes: int
    seconds: float
    waited_seconds: float
    """Of these, in which nothing was computed for want of data or of room; with GPUs, in which a
    thread read or wrote files, on average."""
    kept_flops: int = 0  #: of ``flops``, in earlier runs
    repaired_tiles: int = 0  #: computed again, since ``verify`` found wrong elements in them
    beside_disk: Literal["compute", "bus"] = "compute"  #: what a GPU is limited by if not by files

    @property
    def flops_per_s(self) -> float:
        return (self.flops - self.kept_flops) / max(self.seconds, 1e-9)

    @property
    def seconds_left(self) -> float:
        """What the rest takes at the rate so far."""
        return (self.total_flops - self.flops) / max(self.flops_per_s, 1e-9)

    @property
    def limit(self) -> str:
        """What a faster one of would help: "disk", "compute", or "bus" between host and GPU."""
        return "disk" if self.waited_seconds > self.seconds / 2 else self.beside_disk


class Account:
    """What a run has done, over all passes of it; made into a `Progress` after each step."""

    def __init__(
        self, schedule: Tiling | None, k: int, total_flops: int, journal: Journal, report: Report
    ) -> None:
        self._schedule, self._k, self._total_flops = schedule, k, total_flops
        self._journal, self._report = journal, report
        self._start = time.perf_counter()
        self._earlier = frozenset(journal.done)
        self.read_bytes = self.written_bytes = 0
        self.waited_seconds = 0.0
        self.flops = self._kept_flops = 0
        self.repaired_tiles = 0
        self.beside_disk: Literal["compute", "bus"] = "compute"
        self._lock = threading.Lock()

    def add(self, *, read: int = 0, written: int = 0, flops: int = 0, waited: float = 0.0) -> None:
        """Count what was done, in bytes, operations and seconds; in whichever thread."""
        with self._lock:
            self.read_bytes += read
            self.written_bytes += written
            self.flops += flops
            self.waited_seconds += waited

    def begin_pass(self) -> None:
        """Count what is finished anew: tiles that must be done again are not."""
        done = frozenset(self._journal.done)
        self.flops = self._flops_of(done)
        self._kept_flops = self._flops_of(done & self._earlier)
        if self._schedule is None or len(done) == self._schedule.tile_count:  # no step follows
            self.report()

    def report(self) -> None:
        self._report(
            Progress(
                self.flops,
                self._total_flops,
                self.read_bytes,
                self.written_bytes,
                time.perf_counter() - self._start,
                self.waited_seconds,
                self._kept_flops,
                self.repaired_tiles,
                self.beside_disk,
            )
        )

    def _flops_of(self, done: Collection[int]) -> int:
        if not done or self._schedule is None:
            return 0
        return sum(
            2 * math.prod(sizes(box)) * self._k
            for tile, box in self._schedule.tiles()
            if tile in done
        )
