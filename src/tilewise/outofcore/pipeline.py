"""Products of files: a schedule executed by the CPU, with reading and writing beside it.

The panels of the next step are read by one thread and finished parts of C are written by another
while this thread computes. All arithmetic is that of products in memory. A tile that is written is
made durable and then recorded, so that a run that was stopped goes on where it was.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import __version__, _cpu
from .._arrays import no_stream
from .._plan import Plan
from ..errors import CheckError, FileError, OptionError, ShapeError, TilewiseError
from ..numerics.verdict import Where
from .files import FileOperand, Matrix, Output, Target, open_matrix
from .flat import Box
from .journal import Journal
from .planning import layout_of, part_bytes_of, plan_onto
from .schedule import Schedule, Step, Tiles
from .stores import Layout

__all__ = ["Progress", "multiply_files", "run_plan"]

Array = NDArray[Any]
Report = Callable[["Progress"], object]


def multiply_files(
    a: FileOperand,
    b: FileOperand,
    out: FileOperand,
    /,
    *,
    dtype: Any = None,
    memory: Any = None,
    devices: Any = None,
    precision: str | None = None,
    verify: bool = False,
    progress: Report | None = None,
) -> Plan:
    """Write the matrix product of two files, ``out = a @ b``, within a memory budget.

    A run that was stopped, by whatever, goes on when it is called again with the same arguments:
    tiles of the result that were finished stay. Without ``memory`` it takes the budget it had.

    Parameters
    ----------
    a : path or store of an array (..., m, k) or (k,)
    b : path or store of an array (..., k, n) or (k,)
        .npy files in C or Fortran order; Zarr arrays (``tilewise[zarr]``) and HDF5 datasets
        (``tilewise[hdf5]``), the one there is or ``"A.h5:/group/x"``; of any type and byte order
        that `matmul` takes. Files have bfloat16 and float8 as raw bytes; a name such as
        ``"A.npy:bfloat16"`` says which. ``"A.npy:T"`` is the transpose. Or an object with
        ``shape``, ``dtype`` and slicing.
    out : path or store of an array (..., m, n)
        A .npy, .zarr or .h5 file, C-ordered. It appears, or replaces the one that is there, when
        all of it is written and durable; until then its data is in ``<out>.part`` beside it, and
        what is done in ``<out>.journal``. An object that takes slices, of exactly the result's
        shape and dtype, is written in place, and from the beginning each time.
    dtype, precision, devices
        As for `matmul`.
    memory : int or str, optional
        Budget for what tilewise holds to multiply, beside Python's and NumPy's own 60 MiB or so:
        "2GiB", "50%".
        Without one, half of the free memory, rounded down to a power of two so that runs are
        usually alike.
    verify : bool
        Check the result by `check` before it gets its name; tiles in which that finds a wrong
        element are computed again. When all buffers have been given back, it holds what `check`
        says, which may be more than ``memory``. What cannot be mapped (Zarr, chunked HDF5, stores)
        is copied for it, whole, to nameless files beside the output: that much more room is needed.
    progress : callable, optional
        Called with a `Progress` after each step, in the calling thread; once where none is left.

    Returns
    -------
    Plan
        What ran: ``plan.schedule`` has the tiles, and the bytes read and written.

    Raises
    ------
    FileError
        If a file cannot be read, or the result not be written, for example for want of space; or
        if operands or plan are not those of the finished tiles that are there.
    ShapeError, DTypeError, OptionError, BudgetError, DeviceError
        As `matmul` does, before any work.
    CheckError
        If ``verify`` found the result wrong, and again after computing it anew.
    """
    report = _report(progress)
    with open_matrix(a, "a") as left, open_matrix(b, "b") as right:
        plan, target = plan_onto(
            out,
            left,
            right,
            memory=memory,
            verify=verify,
            dtype=dtype,
            devices=devices,
            precision=precision,
        )
        _run(plan, left, right, target, report)
    return plan


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a product of files has come."""

    flops: int  #: multiplications and additions that are done, in earlier runs too
    total_flops: int
    read_bytes: int  #: in this run, as the two below
    written_bytes: int
    seconds: float
    waited_seconds: float  #: of these, in which nothing was computed for want of data or of room
    kept_flops: int = 0  #: of ``flops``, in earlier runs
    repaired_tiles: int = 0  #: computed again, since ``verify`` found wrong elements in them

    @property
    def flops_per_s(self) -> float:
        return (self.flops - self.kept_flops) / max(self.seconds, 1e-9)

    @property
    def seconds_left(self) -> float:
        """What the rest takes at the rate so far."""
        return (self.total_flops - self.flops) / max(self.flops_per_s, 1e-9)

    @property
    def limit(self) -> str:
        """What a faster one of would help: "disk" or "compute"."""
        return "disk" if self.waited_seconds > self.seconds / 2 else "compute"


def run_plan(
    plan: Plan, a: FileOperand, b: FileOperand, out: FileOperand, stream: Any, report: Report | None
) -> FileOperand:
    """Run a plan for files on operands, after checking that they are those it was made for."""
    if stream is not None:
        raise no_stream(stream)
    report = _report(report)
    with open_matrix(a, "a") as left, open_matrix(b, "b") as right:
        again, target = plan_onto(
            out,
            left,
            right,
            memory=plan.schedule.budget_bytes if plan.schedule is not None else None,
            verify=plan.verify,
            dtype=plan.dtype,
            devices=plan.device,
            precision=plan.precision,
        )
        for x, planned in ((again.a, plan.a), (again.b, plan.b)):
            if (x.shape, x.dtype, x.strides) != (planned.shape, planned.dtype, planned.strides):
                raise ShapeError(f"{x} is not what this plan is for: {planned}; make a plan for it")
        _run(again, left, right, target, report)
    return out


def _report(progress: Report | None) -> Report:
    if progress is None:
        return lambda _: None
    if not callable(progress):
        raise OptionError(f"progress={progress!r} cannot be called; give a function of a Progress")
    return progress


def _run(plan: Plan, a: Matrix, b: Matrix, target: Target, report: Report) -> None:
    """Write the product to its place; whatever happens, finished tiles stay and the rest goes."""
    with target.journal() as journal:
        identities = a.identity(), b.identity()
        if None in identities:  # nothing tells whether they are still what they were
            journal.forget(set(journal.done))
        try:
            journal.begin(_identity(plan, *identities))
        except FileError:
            if not journal.done:  # such as on a full disk: nothing is worth keeping
                journal.remove()
            raise
        try:
            output = _open_output(plan, a, b, target, journal)
            try:
                _produce(plan, a, b, target, output, journal, report)
                output.commit()
            finally:
                output.close()
        except BaseException as error:
            if target.part is not None and journal.done and None not in identities:
                error.add_note(
                    f"{journal.count} of {_tile_count(plan)} stay in {target.part}; the same "
                    "command goes on from there"
                )
            else:
                target.discard()
                journal.remove()
            raise
        journal.remove()


def _identity(plan: Plan, a: dict[str, Any] | None, b: dict[str, Any] | None) -> dict[str, Any]:
    """Return all that the bits of a tile depend on, as a journal keeps it."""
    schedule = {} if plan.schedule is None else plan.schedule.to_dict()
    return {
        "tilewise": __version__,
        "a": a,
        "b": b,
        "result": f"{plan.shape} {plan.dtype}",
        "budget_bytes": schedule.get("budget_bytes"),
        "device": plan.device,
        "runs_on": plan.runs_on,
        "precision": plan.precision,
        "plan": {"method": plan.method, "sums": str(plan.compute_dtype), **schedule},
    }


def _open_output(plan: Plan, a: Matrix, b: Matrix, target: Target, journal: Journal) -> Output:
    layout = layout_of(plan, a, b)
    most = part_bytes_of(plan)
    if plan.verify:
        target.check_room_to_verify(a, b, math.prod(plan.shape) * plan.dtype.itemsize)
    if journal.done:
        try:
            output = target.reopen(layout, most)
            journal.forget({tile for tile, box in _boxes(plan, layout) if not output.holds(box)})
            return output
        except FileError:  # the journal outlived it
            journal.forget(set(journal.done))
    return target.create(layout, most)


def _produce(
    plan: Plan,
    a: Matrix,
    b: Matrix,
    target: Target,
    output: Output,
    journal: Journal,
    report: Report,
) -> None:
    """Compute the tiles that are not done, until the result is right if that was asked for."""
    again: set[int] = set()
    account = _Account(plan, journal, report)
    while True:
        _execute(plan, a, b, output, journal, account)
        a.check_unchanged()
        b.check_unchanged()
        if not plan.verify:
            return
        from ..numerics.check import check

        operands = a.mapped(target.folder), b.mapped(target.folder)
        result = output.mapped(target.folder).reshape(plan.shape)
        found = check(*operands, result, bound=plan.bound)
        if found:
            return
        del operands, result
        wrong = _tiles_at(plan, found.where)
        journal.forget(wrong)
        if wrong <= again:
            raise CheckError(f"verify=True found a wrong result, which was not written: {found}")
        again |= wrong
        account.repaired_tiles = len(again)


class _Account:
    """What a run has done, over all passes of it; made into a `Progress` after each step."""

    def __init__(self, plan: Plan, journal: Journal, report: Report) -> None:
        self._plan, self._journal, self._report = plan, journal, report
        self._start = time.perf_counter()
        self._earlier = frozenset(journal.done)
        self.read_bytes = self.written_bytes = 0
        self.waited_seconds = 0.0
        self.flops = self._kept_flops = 0
        self.repaired_tiles = 0

    def begin_pass(self) -> None:
        """Count what is finished anew: tiles that must be done again are not."""
        done = frozenset(self._journal.done)
        self.flops = self._flops_of(done)
        self._kept_flops = self._flops_of(done & self._earlier)
        if len(done) == _tile_count(self._plan):  # no step follows
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
            )
        )

    @property
    def _total_flops(self) -> int:
        return 2 * math.prod(self._plan.shape) * self._plan.k

    def _flops_of(self, tiles: frozenset[int]) -> int:
        schedule = self._plan.schedule
        if not tiles or schedule is None or schedule.is_whole:
            return self._total_flops if tiles else 0
        todo = sum(
            2 * math.prod(_shape(step.c)) * _shape(step.a.box)[-1] for step in schedule.steps(tiles)
        )
        return self._total_flops - todo


def _tiles_at(plan: Plan, where: Where | None) -> set[int]:
    """Return the tiles that hold the wrong elements a check located."""
    schedule = plan.schedule
    if schedule is None or schedule.is_whole or where is None:
        return set(range(_tile_count(plan)))
    job = schedule.job
    batch, rows, columns = where.batch, where.rows, where.columns
    if not where.is_complete:
        rows, columns = (range(plan.m),), (range(plan.n),)
    if len(job.batch) < len(batch):  # the batch's matrices are one tall matrix
        above = int(np.ravel_multi_index(batch, plan.batch)) * plan.m
        batch, rows = (), tuple(range(above + r.start, above + r.stop) for r in rows)
    found = set()
    for step in schedule.steps():
        *at, high, wide = step.c
        if (
            all(part.start <= i < part.stop for part, i in zip(at, batch, strict=True))
            and any(high.start < r.stop and r.start < high.stop for r in rows)
            and any(wide.start < r.stop and r.start < wide.stop for r in columns)
        ):
            found.add(step.tile)
    return found


def _boxes(plan: Plan, layout: Layout) -> Iterator[tuple[int, Box]]:
    """Yield each tile of a result, by number and place."""
    schedule = plan.schedule
    if schedule is None or schedule.is_whole:
        yield 0, _everything(layout.grid)
        return
    yield from ((step.tile, step.c) for step in schedule.steps() if step.is_last)


def _tile_count(plan: Plan) -> int:
    if plan.schedule is None or plan.schedule.is_whole:
        return 1
    return plan.schedule.tile_count


def _execute(
    plan: Plan, a: Matrix, b: Matrix, output: Output, journal: Journal, account: _Account
) -> None:
    schedule = plan.schedule
    if schedule is None:  # the result has no elements
        return
    account.begin_pass()
    most = part_bytes_of(plan)
    if schedule.is_whole:
        if not journal.done:
            a, b = a.as_panels(a.shape, most), b.as_panels(b.shape, most)
            _multiply_whole(plan, a, b, output, journal, account)
        return
    job = schedule.job
    a = a.as_panels((*job.a.batch, job.m, job.k), most)
    b = b.as_panels((*job.b.batch, job.k, job.n), most)
    with (
        ThreadPoolExecutor(1, "tilewise-read") as reading,
        ThreadPoolExecutor(1, "tilewise-write") as writing,
        np.errstate(all="ignore"),  # Inf and NaN are results here, not news
    ):
        inbox = _Inbox(schedule, a, b, journal, account, reading)
        outbox = _Outbox(schedule, plan, output, journal, account, writing)
        _multiply_tiles(plan, schedule, inbox, outbox, journal, account)


def _multiply_whole(
    plan: Plan, a: Matrix, b: Matrix, output: Output, journal: Journal, account: _Account
) -> None:
    start = time.perf_counter()
    grid = layout_of(plan, a, b).grid
    x, y = (f.read(_everything(f.shape), np.empty(f.nbytes, np.uint8)) for f in (a, b))
    account.read_bytes += a.nbytes + b.nbytes
    account.waited_seconds += time.perf_counter() - start
    result = np.asarray(plan.how.multiply(plan, x, y, None)).reshape(grid)
    output.write(_everything(grid), result)
    output.sync()
    journal.record(0)
    account.written_bytes += result.nbytes
    account.flops += 2 * result.size * plan.k
    account.report()


def _multiply_tiles(
    plan: Plan,
    schedule: Schedule,
    inbox: _Inbox,
    outbox: _Outbox,
    journal: Journal,
    account: _Account,
) -> None:
    inner = schedule.inner
    sums: Array | None = None
    for step in schedule.steps(frozenset(journal.done)):
        a_panel, b_panel = inbox.take()
        with _on_tile(step):
            if step.is_first:
                sums = None  # its memory goes before the next is taken
                sums = _cpu.new_sum(plan, _shape(step.c))
            assert sums is not None
            cut = replace(inner, m=sums.shape[-2], n=sums.shape[-1], k=a_panel.shape[-1])
            for i, tile in enumerate(cut, 1):
                _add_tile(plan, step, cut, tile, sums, a_panel, b_panel)
                if step.is_last:
                    outbox.put(step, tile, sums, is_end=i == cut.count)
        account.flops += 2 * sums.size * cut.k
        account.report()
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
        self,
        schedule: Schedule,
        a: Matrix,
        b: Matrix,
        journal: Journal,
        account: _Account,
        reading: ThreadPoolExecutor,
    ) -> None:
        depth = schedule.at_once * schedule.tile_k
        self._account = account
        self._files = a, b
        self._buffers = [
            [np.empty(tile * depth * f.dtype.itemsize, np.uint8) for _ in range(count)]
            for f, tile, count in (
                (a, schedule.tile_m, schedule.a_slots),
                (b, schedule.tile_n, schedule.b_slots),
            )
        ]
        self._reading = reading
        self._steps = schedule.steps(frozenset(journal.done))
        self._pending = self._load_next()

    def take(self) -> list[Array]:
        """Return the panels of the next step, and begin to read those of the step after it."""
        assert self._pending is not None, "a panel is taken for each step"
        start = time.perf_counter()
        panels = self._pending.result()
        self._account.waited_seconds += time.perf_counter() - start
        self._pending = self._load_next()
        return panels

    def _load_next(self) -> Future[list[Array]] | None:
        step = next(self._steps, None)
        return None if step is None else self._reading.submit(self._load, step)

    def _load(self, step: Step) -> list[Array]:
        panels = []
        with _on_tile(step):
            for file, buffers, panel in zip(self._files, self._buffers, step[:2], strict=True):
                if panel.is_read:
                    panels.append(file.read(panel.box, buffers[panel.slot]))
                    self._account.read_bytes += panels[-1].nbytes
                else:
                    panels.append(file.view(panel.box, buffers[panel.slot]))
        return panels


class _Outbox:
    """Finished sums on their way to the file: one buffer is filled, the other is written.

    Of one tile at a time: when a stop comes, at most this one and the one being computed are lost.
    """

    def __init__(
        self,
        schedule: Schedule,
        plan: Plan,
        output: Output,
        journal: Journal,
        account: _Account,
        writing: ThreadPoolExecutor,
    ) -> None:
        size = schedule.at_once * schedule.inner.tile_m * schedule.inner.tile_n
        self._account = account
        self._plan, self._output, self._journal = plan, output, journal
        self._writing = writing
        self._buffers = [np.empty(size, plan.dtype) for _ in range(2)]
        self._pending: deque[Future[None]] = deque()
        self._tile: int | None = None

    def put(self, step: Step, tile: tuple[slice, slice], sums: Array, *, is_end: bool) -> None:
        """Round a finished part of the sums into a buffer and send it to its place in the file."""
        self._wait_for(len(self._buffers) - 1 if step.tile == self._tile else 0)
        self._tile = step.tile
        self._buffers.reverse()
        rows, columns = tile
        part = sums[..., rows, columns]
        values = self._buffers[0][: part.size].reshape(part.shape)
        _cpu.finish(self._plan, part, values)
        box = (*step.c[:-2], _within(step.c[-2], rows), _within(step.c[-1], columns))
        self._pending.append(self._writing.submit(self._write, step, box, values, is_end))
        self._account.written_bytes += values.nbytes

    def close(self) -> None:
        """Return when everything is in the file."""
        self._wait_for(0)

    def _wait_for(self, most: int) -> None:
        start = time.perf_counter()
        while len(self._pending) > most:
            self._pending.popleft().result()
        self._account.waited_seconds += time.perf_counter() - start

    def _write(self, step: Step, box: Box, values: Array, is_end: bool) -> None:
        with _on_tile(step):
            self._output.write(box, values)
            if is_end:
                self._output.sync()
                self._journal.record(step.tile)


@contextmanager
def _on_tile(step: Step) -> Iterator[None]:
    """Say on which tile an error came, and let no thread end for a reason that nobody sees."""
    try:
        yield
    except Exception as error:
        if not hasattr(error, "__notes__"):
            place = ", ".join(f"{part.start}:{part.stop}" for part in step.c)
            error.add_note(f"on tile {step.tile} of the result, [{place}]")
        raise
    except BaseException as error:
        if threading.current_thread() is threading.main_thread():
            raise
        raise TilewiseError(f"a thread at work on tile {step.tile} ended: {error!r}") from error


def _everything(shape: tuple[int, ...]) -> Box:
    return tuple(slice(0, size) for size in shape)


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in box)


def _within(outer: slice, inner: slice) -> slice:
    return slice(outer.start + inner.start, outer.start + inner.stop)
