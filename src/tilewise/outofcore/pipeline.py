"""Products of files: a schedule executed by the CPU, with reading and writing beside it.

The panels of the next step are read by one thread and finished parts of C are written by another
while this thread computes. All arithmetic is that of products in memory.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import _api, _cpu, _memory
from .._plan import Operand, Plan, held_per_element
from ..errors import BudgetError, CheckError, DeviceError, FileError
from .choice import choose_schedule, least_budget
from .files import NpyFile, NpyOutput, check_output_path, open_npy
from .schedule import (
    Box,
    Job,
    Schedule,
    Side,
    Step,
    Tiles,
    whole_schedule,
)

__all__ = ["Progress", "multiply_files", "plan_files"]

Array = NDArray[Any]
FilePath = str | os.PathLike[str]
Report = Callable[["Progress"], object]

#: Products of fewer multiplications, about a second's work, run as one call where they fit: their
#: bits are np.matmul's. Longer ones are cut, to read and write beside, and to answer an interrupt.
_WHOLE_WORK = 1 << 36
_TILED_BITS = "this plan: same tiles, BLAS and threads, same bits"
_TILED_WHY = ("panels are read, and results written, beside BLAS at work",)


def multiply_files(
    a: FilePath,
    b: FilePath,
    out: FilePath,
    /,
    *,
    dtype: Any = None,
    memory: Any = None,
    devices: Any = None,
    precision: str | None = None,
    verify: bool = False,
    progress: Report | None = None,
) -> Plan:
    """Write the matrix product of two .npy files, ``out = a @ b``, within a memory budget.

    Parameters
    ----------
    a : path of an array (..., m, k) or (k,)
    b : path of an array (..., k, n) or (k,)
        .npy files in C or Fortran order, of any type and byte order that `matmul` takes. NumPy
        stores bfloat16 and float8 as raw bytes; a name such as ``"A.npy:bfloat16"`` says which.
    out : path of an array (..., m, n)
        A .npy file, C-ordered. It appears, or replaces the one that is there, when all of it is
        written and durable; until then its data is in ``<out>.part-…`` beside it.
    dtype, precision, devices
        As for `matmul`.
    memory : int or str, optional
        Budget for what tilewise holds, beside Python's and NumPy's own 60 MiB or so: "2GiB", "50%".
        Without one, half of the free memory, rounded down to a power of two so that runs are
        usually alike.
    verify : bool
        Check the result by `check` before it gets its name. That holds what `check` says, when
        all buffers have been given back.
    progress : callable, optional
        Called with a `Progress` after each step, in the calling thread.

    Returns
    -------
    Plan
        What ran: ``plan.schedule`` has the tiles, and the bytes read and written.

    Raises
    ------
    FileError
        If a file cannot be read, or the result not be written, for example for want of space.
    ShapeError, DTypeError, OptionError, BudgetError, DeviceError
        As `matmul` does, before any work.
    CheckError
        If ``verify`` found the result wrong; nothing is written then.
    """
    with open_npy(a, "a") as left, open_npy(b, "b") as right:
        target = check_output_path(out)
        for operand in (left, right):
            if operand.is_same_file(target):
                raise FileError(
                    f"out ({out}) is the same file as {operand.name}; inputs are never "
                    "overwritten, so give the result another name"
                )
        plan = plan_files(
            left,
            right,
            dtype=dtype,
            memory=memory,
            devices=devices,
            precision=precision,
            verify=verify,
        )
        with NpyOutput(target, plan.shape, plan.dtype, _grid(plan)) as output:
            _execute(plan, left, right, output, progress or (lambda _: None))
            left.check_unchanged()
            right.check_unchanged()
            if verify:
                _verify(plan, left, right, output)
            output.commit()
    return plan


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a product of files has come."""

    flops: int  #: multiplications and additions that are done
    total_flops: int
    read_bytes: int
    written_bytes: int


def plan_files(
    a: NpyFile | Operand,
    b: NpyFile | Operand,
    *,
    dtype: Any = None,
    memory: Any = None,
    devices: Any = None,
    precision: str | None = None,
    verify: bool = False,
) -> Plan:
    """Return the plan by which `multiply_files` multiplies two operands in files.

    Raises
    ------
    ShapeError, DTypeError, OptionError, BudgetError, DeviceError
        As `multiply_files` does.
    """
    budget = _memory.parse_budget(memory)
    if budget is None:
        budget = _default_budget()
    plan = _api.plan(
        a,
        b,
        dtype=dtype,
        devices="cpu" if devices is None else devices,
        precision=precision,
        verify=verify,
        out=True,
    )
    if plan.device != "cpu":
        raise DeviceError(
            f"device {plan.device!r} was asked for, and this version multiplies files on the CPU; "
            "leave it out, or use devices='cpu'"
        )
    plan = replace(plan, a=replace(plan.a, where="file"), b=replace(plan.b, where="file"))
    job = _job(plan)
    work = math.prod(plan.batch) * plan.m * plan.n * plan.k
    result_bytes = math.prod(plan.shape) * plan.dtype.itemsize
    whole_bytes = plan.a.nbytes + plan.b.nbytes + result_bytes + plan.workspace_bytes
    if not result_bytes:
        return plan
    if whole_bytes <= budget and work <= _WHOLE_WORK:
        return replace(
            plan, schedule=whole_schedule(job, whole_bytes, budget), held_bytes=whole_bytes
        )
    schedule = choose_schedule(job, budget)
    if schedule is None:
        size = _memory.format_bytes
        raise BudgetError(
            f"the smallest tiles of {plan.a} @ {plan.b} take {size(least_budget(job))}, and "
            f"memory= allows {size(budget)}; raise the budget"
        )
    return replace(
        plan,
        schedule=schedule,
        tiles=None,
        matrices_at_once=schedule.at_once,
        workspace_bytes=schedule.workspace_bytes,
        held_bytes=schedule.held_bytes,
        moved_bytes=schedule.read_bytes + schedule.written_bytes,
        bits=_TILED_BITS if plan.compute_dtype.kind in "fc" else plan.bits,
        why=_TILED_WHY if plan.method == "blas" else plan.why,
    )


def _job(plan: Plan) -> Job:
    a, b = plan.a, plan.b
    batch, m, a_batch = plan.batch, plan.m, a.shape[:-2]
    a_along_k = len(a.shape) == 1 or a.strides[-1] <= a.strides[-2]
    if len(b.shape) <= 2 and a_batch and a_along_k and a.strides[0] == max(a.strides):
        # C-ordered matrices one after the other, times one matrix: they are one tall matrix.
        batch, m, a_batch = (), math.prod(batch) * m, ()
    sums = _cpu.new_sum(plan, (0,))
    # BLAS reads such panels as they are; those of a foreign byte order are not equal here.
    is_plain = sums.dtype.kind in "fc" and a.dtype == b.dtype == sums.dtype
    panel_bytes, tile_bytes = held_per_element(plan.method, plan.compute_dtype)
    return Job(
        batch=batch,
        k=plan.k,
        a=Side(m, a.dtype.itemsize, a_along_k, a_batch, _batch_is_inside(a)),
        b=Side(
            plan.n,
            b.dtype.itemsize,
            len(b.shape) == 1 or b.strides[-2] < b.strides[-1],
            b.shape[:-2],
            _batch_is_inside(b),
        ),
        panel_bytes=0 if is_plain else panel_bytes,
        product_bytes=tile_bytes - sums.itemsize,
        sum_itemsize=sums.itemsize,
        out_itemsize=plan.dtype.itemsize,
    )


def _batch_is_inside(x: Operand) -> bool:
    """Whether neighbours in a file are of different matrices, as in F-ordered stacks."""
    return len(x.shape) > 2 and x.strides[0] < min(x.strides[-2:])


def _default_budget() -> int:
    half = _memory.available_bytes() // 2
    return 1 << max(half.bit_length() - 1, 0)


def _grid(plan: Plan) -> tuple[int, ...]:
    """Return the result's shape as the schedule cuts it: batch, rows, columns."""
    if plan.schedule is None:
        return plan.shape
    job = plan.schedule.job
    return (*job.batch, job.m, job.n)


def _execute(plan: Plan, a: NpyFile, b: NpyFile, output: NpyOutput, report: Report) -> None:
    schedule = plan.schedule
    if schedule is None:  # the result has no elements
        return
    if schedule.is_whole:
        _multiply_whole(plan, a, b, output, report)
        return
    job = schedule.job
    a = a.reshaped((*job.a.batch, job.m, job.k))
    b = b.reshaped((*job.b.batch, job.k, job.n))
    with (
        ThreadPoolExecutor(1, "tilewise-read") as reading,
        ThreadPoolExecutor(1, "tilewise-write") as writing,
        np.errstate(all="ignore"),  # Inf and NaN are results here, not news
    ):
        inbox = _Inbox(schedule, a, b, reading)
        outbox = _Outbox(schedule, plan, output, writing)
        _multiply_tiles(plan, schedule, inbox, outbox, report)


def _multiply_whole(plan: Plan, a: NpyFile, b: NpyFile, output: NpyOutput, report: Report) -> None:
    x, y = (f.read(_everything(f.shape), np.empty(f.nbytes, np.uint8)) for f in (a, b))
    result = np.asarray(_cpu.execute(plan, x, y, None)).reshape(output.grid)
    output.write(_everything(output.grid), result)
    flops = 2 * result.size * plan.k
    report(Progress(flops, flops, a.nbytes + b.nbytes, output.nbytes))


def _multiply_tiles(
    plan: Plan, schedule: Schedule, inbox: _Inbox, outbox: _Outbox, report: Report
) -> None:
    inner = schedule.inner
    flops = 0
    sums: Array | None = None
    for step in schedule.steps():
        a_panel, b_panel = inbox.take()
        if step.is_first:
            sums = None  # its memory goes before the next is taken
            sums = _cpu.new_sum(plan, _shape(step.c))
        assert sums is not None
        cut = replace(inner, m=sums.shape[-2], n=sums.shape[-1], k=a_panel.shape[-1])
        for tile in cut:
            _add_tile(plan, step, cut, tile, sums, a_panel, b_panel)
            if step.is_last:
                outbox.put(step, tile, sums)
        flops += 2 * sums.size * cut.k
        report(Progress(flops, schedule.flops, inbox.read_bytes, outbox.written_bytes))
    outbox.close()


def _add_tile(
    plan: Plan,
    step: Step,
    cut: Tiles,
    tile: tuple[slice, slice],
    sums: Array,
    a_panel: Array,
    b_panel: Array,
) -> None:
    """Add the product of two panels to a part of the sums, piece by piece of K."""
    rows, columns = tile
    for i, piece in enumerate(cut.pieces()):
        _cpu.add_product(
            plan,
            sums[..., rows, columns],
            a_panel[..., rows, piece],
            b_panel[..., piece, columns],
            is_first=step.is_first and i == 0,
        )


class _Inbox:
    """Panels of the files, read by a thread one step ahead into the buffers of the schedule."""

    def __init__(
        self, schedule: Schedule, a: NpyFile, b: NpyFile, reading: ThreadPoolExecutor
    ) -> None:
        depth = schedule.at_once * schedule.tile_k
        self.read_bytes = 0
        self._files = a, b
        self._buffers = [
            [np.empty(tile * depth * f.dtype.itemsize, np.uint8) for _ in range(count)]
            for f, tile, count in (
                (a, schedule.tile_m, schedule.a_slots),
                (b, schedule.tile_n, schedule.b_slots),
            )
        ]
        self._reading = reading
        self._steps = schedule.steps()
        self._pending = self._load_next()

    def take(self) -> list[Array]:
        """Return the panels of the next step, and begin to read those of the step after it."""
        assert self._pending is not None, "a panel is taken for each step"
        panels = self._pending.result()
        self._pending = self._load_next()
        return panels

    def _load_next(self) -> Future[list[Array]] | None:
        step = next(self._steps, None)
        return None if step is None else self._reading.submit(self._load, step)

    def _load(self, step: Step) -> list[Array]:
        panels = []
        for file, buffers, panel in zip(self._files, self._buffers, step[:2], strict=True):
            if panel.is_read:
                panels.append(file.read(panel.box, buffers[panel.slot]))
                self.read_bytes += panels[-1].nbytes
            else:
                panels.append(file.view(panel.box, buffers[panel.slot]))
        return panels


class _Outbox:
    """Finished sums on their way to the file: one buffer is filled, the other is written."""

    def __init__(
        self, schedule: Schedule, plan: Plan, output: NpyOutput, writing: ThreadPoolExecutor
    ) -> None:
        size = schedule.at_once * schedule.inner.tile_m * schedule.inner.tile_n
        self.written_bytes = 0
        self._plan, self._output, self._writing = plan, output, writing
        self._buffers = [np.empty(size, plan.dtype) for _ in range(2)]
        self._pending: deque[Future[None]] = deque()

    def put(self, step: Step, tile: tuple[slice, slice], sums: Array) -> None:
        """Round a finished part of the sums into a buffer and send it to its place in the file."""
        if len(self._pending) == len(self._buffers):
            self._pending.popleft().result()
        self._buffers.reverse()
        rows, columns = tile
        part = sums[..., rows, columns]
        values = self._buffers[0][: part.size].reshape(part.shape)
        _cpu.finish(self._plan, part, values)
        box = (*step.c[:-2], _within(step.c[-2], rows), _within(step.c[-1], columns))
        self._pending.append(self._writing.submit(self._output.write, box, values))
        self.written_bytes += values.nbytes

    def close(self) -> None:
        """Return when everything is in the file."""
        while self._pending:
            self._pending.popleft().result()


def _verify(plan: Plan, a: NpyFile, b: NpyFile, output: NpyOutput) -> None:
    from ..numerics.check import check

    result = output.mapped().reshape(plan.shape)
    found = check(a.mapped(), b.mapped(), result, bound=plan.bound)
    if not found:
        raise CheckError(f"verify=True found a wrong result, which was not written: {found}")


def _everything(shape: tuple[int, ...]) -> Box:
    return tuple(slice(0, size) for size in shape)


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in box)


def _within(outer: slice, inner: slice) -> slice:
    return slice(outer.start + inner.start, outer.start + inner.stop)
