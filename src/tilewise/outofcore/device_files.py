"""Products of files on GPUs: what is planned for them, and how files look to the pipeline.

All is that of host operands (`_streamed`, ``device_pipeline``) but for where elements come from and
go to: several threads read slices of files into pinned memory, and write slices of C from there.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from numpy.typing import NDArray

from .._memory import format_bytes
from .._operand import Box
from .._plan import Plan, make_plan
from .._request import Request
from .._streamed import Files, Machine, Streams, run
from .device_job import Rates
from .device_schedule import Load
from .schedule import sizes
from .slices import shifted
from .stores import COPIES

if TYPE_CHECKING:
    from .account import Account
    from .files import Matrix, Output
    from .journal import Journal

__all__ = ["DeviceTiling", "OnGpuFiles", "plan_files_on_gpus"]

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class OnGpuFiles:
    """How operands in files are multiplied by GPUs."""

    schedule: DeviceTiling

    @property
    def part_bytes(self) -> int:
        """How much is moved to or from chunks at a time."""
        return self.schedule.streams.threads.slice_bytes

    @property
    def expected_s(self) -> float:
        return self.schedule.streams.expected_s

    def multiply(self, plan: Plan, a: Array, b: Array, out: Array | None) -> Any:
        return self.schedule.streams.multiply(plan, a, b, out)

    def execute(
        self, plan: Plan, a: Matrix, b: Matrix, output: Output, journal: Journal, account: Account
    ) -> None:
        """Compute the tiles that are not done, and record each when it is durable.

        Raises
        ------
        FileError
            If an operand cannot be read or the output not be written; a note says for which part.
        BudgetError, DeviceError
            If the memory that was planned for is not there, or a device fails.
        """
        streams, job = self.schedule.streams, self.schedule.streams.job
        done = frozenset(journal.done)
        if len(done) == self.schedule.tile_count:
            return
        account.beside_disk = self.schedule.beside_disk()[1]
        threads = len(streams.parts) * (streams.threads.gathering + streams.threads.scattering)
        turn, share = threading.Lock(), 1 / threads
        a = a.as_panels((*job.a.batch, job.m, job.k), self.part_bytes)
        b = b.as_panels((*job.b.batch, job.k, job.n), self.part_bytes)
        x, y = (_Operand(x, turn if x.chunks else nullcontext(), account, share) for x in (a, b))
        result = _Result(plan, self, output, journal, account, share)
        run(streams, x, y, result, done, account.report)

    def lines(self, plan: Plan) -> list[str]:
        *lines, host = self.schedule.streams.lines(plan)
        staged = self.schedule.held_bytes - self.schedule.streams.ring_bytes
        if staged:
            host += f", {format_bytes(staged)} for chunks"
        return [*lines, self.schedule.on_disk(plan), host]

    def to_dict(self, plan: Plan) -> dict[str, Any]:
        return {
            **self.schedule.streams.to_dict(plan),
            "schedule": {**self.schedule.to_dict(), "held_bytes": self.schedule.held_bytes},
        }


@dataclass(frozen=True, slots=True, eq=False)
class DeviceTiling:
    """How C is cut for GPUs: the parts that launches compute, numbered from device to device."""

    streams: Streams

    @property
    def grid(self) -> tuple[int, ...]:
        """The shape that places of tiles refer to."""
        job = self.streams.job
        return (*job.batch, job.m, job.n)

    @property
    def parts(self) -> tuple[int, ...]:
        """What is written as one begins at multiples of these, along each axis of the grid."""
        starts = zip(*([part.start for part in box] for _, box in self.tiles()), strict=True)
        steps = (math.gcd(*found) for found in starts)
        return tuple(step or size for step, size in zip(steps, self.grid, strict=True))

    @property
    def tile_count(self) -> int:
        return sum(part.schedule.tile_count for part in self.streams.parts)

    def tiles(self) -> Iterator[tuple[int, Box]]:
        """Yield each tile of C, by number and place."""
        for part, first in zip(self.streams.parts, self.streams.first_tiles(), strict=True):
            for tile, box in part.schedule.tiles():
                yield first + tile, shifted(box, part.origin)

    @property
    def read_bytes(self) -> int:
        """Bytes read from both files, every pass counted."""
        return sum(part.schedule.read_bytes for part in self.streams.parts)

    @property
    def written_bytes(self) -> int:
        return sum(part.schedule.written_bytes for part in self.streams.parts)

    @property
    def held_bytes(self) -> int:
        """Bytes of the host's memory."""
        return len(self.streams.parts) * self.streams.threads.held_bytes

    @property
    def budget_bytes(self) -> int:
        """What may be taken of each device."""
        return self.streams.parts[0].schedule.budget_bytes

    @property
    def tile(self) -> tuple[int, int, int]:
        """What is multiplied at a time, of m, n and k."""
        first = self.streams.parts[0].schedule
        return first.tile_m, first.tile_n, first.tile_k

    def beside_disk(self) -> tuple[float, Literal["bus", "compute"]]:
        """Return the seconds that all is expected to take but for the files, and what limits it."""
        schedules = [part.schedule for part in self.streams.parts]
        bus_s = max(max(x.read_bytes, x.written_bytes) for x in schedules) / Rates().bus_bytes
        compute_s = max(x.compute_s for x in schedules)
        return max(compute_s, bus_s), "compute" if compute_s > bus_s else "bus"

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain numbers and strings; equal ones number the same tiles."""
        return {
            "tiles": self.tile_count,
            "read_bytes": self.read_bytes,
            "written_bytes": self.written_bytes,
            "budget_bytes": self.budget_bytes,
            "devices": [
                {
                    "origin": [[part.start, part.stop] for part in each.origin],
                    **each.schedule.to_dict(),
                }
                for each in self.streams.parts
            ],
        }

    def on_disk(self, plan: Plan | None = None) -> str:
        """Return the line that says what is read and written."""
        read = [0, 0]
        for part in self.streams.parts:
            factors = part.schedule.job.a, part.schedule.job.b
            for each, times in part.schedule.kinds():
                if isinstance(each, Load):
                    items = times * math.prod(each.shape)
                    read[each.side] += items * factors[each.side].itemsize
        names = ("a", "b") if plan is None else (plan.a.name or "a", plan.b.name or "b")
        said = ", ".join(f"{n} {format_bytes(x)}" for n, x in zip(names, read, strict=True) if x)
        return f"disk       {said} in, {format_bytes(self.written_bytes)} out"

    def __str__(self) -> str:
        lines = [str(part.schedule) for part in self.streams.parts]
        return "\n".join([*lines, self.on_disk()])


def plan_files_on_gpus(
    asked: Request, machine: Machine, a: Any, b: Any, *, is_flat: bool, is_gram: bool
) -> Plan:
    """Return the plan by which GPUs multiply two operands in files; pure.

    Parameters
    ----------
    asked : Request
    machine : Machine
    a, b : Matrix or Operand
        Whose chunks are kept to.
    is_flat : bool
        Whether the output has no chunks.
    is_gram : bool
        Whether b is a's transpose, in the same place.

    Raises
    ------
    BudgetError
        If a budget does not hold the smallest tiles.
    DTypeError
        If GPUs have no kernel for the operands' types.
    """
    chunks = [getattr(x, "chunks", None) for x in (a, b)]
    chunk_bytes = [
        math.prod(each) * x.dtype.itemsize
        for each, x in zip(chunks, (a, b), strict=True)
        if each is not None
    ]
    files = Files(
        chunks=(_along(chunks[0], -2), _along(chunks[1], -1)),
        may_fold=is_flat and chunks[0] is None and (chunks[1] is None or len(asked.b.shape) <= 2),
        least_slice=max(4096, *chunk_bytes) if chunk_bytes else 4096,
        staged=COPIES * (bool(chunk_bytes) + (not is_flat)),
    )
    machine = replace(
        machine,
        device_bytes=(min(machine.device_bytes),) * len(machine.gpus),
        is_gram=is_gram,
        files=files,
    )
    # In memory they would be arrays of the host; there, verify keeps the result, and here not.
    x, y = (each._replace(where="memory") for each in (asked.a, asked.b))
    inside = asked._replace(a=x, b=y, verify=False)
    plan = make_plan(inside, gpu=machine.gpus[0], machine=machine)
    assert isinstance(plan.how, Streams)
    tiling = DeviceTiling(plan.how)
    return replace(
        plan,
        asked=asked,
        how=OnGpuFiles(tiling),
        moved_bytes=tiling.read_bytes + tiling.written_bytes,
    )


def _along(chunks: tuple[int, ...] | None, axis: int) -> int:
    """Return how long a matrix's chunks are along an axis; 1 of a vector, or of what has none."""
    return 1 if chunks is None or len(chunks) < 2 else chunks[axis]


class _Operand:
    """An operand in a file, as the pipeline reads it; a store is read by one thread at a time."""

    def __init__(
        self, matrix: Matrix, turn: AbstractContextManager[Any], account: Account, share: float
    ) -> None:
        self.shape, self.dtype, self.chunks = matrix.shape, matrix.dtype, matrix.chunks
        self._matrix, self._turn = matrix, turn
        self._account, self._share = account, share

    def view(self, box: Box) -> None:
        """No part of it lies in memory."""

    def read_into(self, box: Box, into: Array) -> None:
        start = time.perf_counter()
        with self._turn:
            self._matrix.read_into(box, into)
        waited = (time.perf_counter() - start) * self._share
        self._account.add(read=into.nbytes, waited=waited)


class _Result:
    """An output, as the pipeline writes it; a store is written by one thread at a time."""

    def __init__(
        self,
        plan: Plan,
        how: OnGpuFiles,
        output: Output,
        journal: Journal,
        account: Account,
        share: float,
    ) -> None:
        self.shape, self.dtype = how.schedule.grid, plan.dtype
        self.chunks = output.chunks
        if self.chunks and math.prod(self.chunks) * self.dtype.itemsize > how.part_bytes:
            self.chunks = None  # the caller's own are larger than slices
        self._output, self._journal = output, journal
        self._account, self._share = account, share
        self._turn: AbstractContextManager[Any] = nullcontext()
        if output.chunks:
            self._turn = threading.Lock()
        self._recording = threading.Lock()
        self._flops = {
            tile: 2 * math.prod(sizes(box)) * plan.k for tile, box in how.schedule.tiles()
        }

    def view(self, box: Box) -> None:
        """No part of it lies in memory."""

    def write(self, box: Box, values: Array) -> None:
        start = time.perf_counter()
        with self._turn:
            self._output.write(box, values)
        waited = (time.perf_counter() - start) * self._share
        self._account.add(written=values.nbytes, waited=waited)

    def finish(self, tile: int) -> None:
        """Make a tile durable, and then record it."""
        start = time.perf_counter()
        with self._recording:
            self._journal.record(tile, self._sync)
        waited = (time.perf_counter() - start) * self._share
        self._account.add(flops=self._flops[tile], waited=waited)

    def _sync(self) -> None:
        with self._turn:
            self._output.sync()
