"""Products of files by the CPU: a schedule executed, with reading and writing beside it.

The panels of the next step are read by one thread and finished parts of C are written by another
while this thread computes. All arithmetic is that of products in memory. A tile that is written is
made durable and then recorded.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from .. import _cpu
from .._plan import Plan
from .._shield import shielded
from ..errors import TilewiseError
from .account import Account
from .files import Matrix, Output
from .flat import Box
from .journal import Journal
from .planning import how_of
from .schedule import Schedule, Step, Tiles, everything, sizes

__all__ = ["execute"]

Array = NDArray[Any]
T = TypeVar("T")


def execute(
    plan: Plan,
    schedule: Schedule,
    a: Matrix,
    b: Matrix,
    output: Output,
    journal: Journal,
    account: Account,
) -> None:
    """Compute the tiles that are not done, and record each when it is durable.

    Raises
    ------
    FileError
        If an operand cannot be read or the output not be written; a note says for which tile.
    """
    most = how_of(plan).part_bytes
    if schedule.is_whole:
        if not journal.done:
            a, b = a.as_panels(a.shape, most), b.as_panels(b.shape, most)
            _multiply_whole(plan, a, b, output, journal, account)
        return
    job = schedule.job
    a = a.as_panels((*job.a.batch, job.m, job.k), most)
    b = b.as_panels((*job.b.batch, job.k, job.n), most)
    with (
        _Worker("tilewise-read") as reading,
        _Worker("tilewise-write") as writing,
        reading,  # both are left twice: a second interrupt may come as Python is about to leave one
        writing,
        np.errstate(all="ignore"),  # Inf and NaN are results here, not news
    ):
        inbox = _Inbox(schedule, a, b, journal, account, reading)
        outbox = _Outbox(schedule, plan, output, journal, account, writing)
        _multiply_tiles(plan, schedule, inbox, outbox, journal, account)


def _multiply_whole(
    plan: Plan, a: Matrix, b: Matrix, output: Output, journal: Journal, account: Account
) -> None:
    start = time.perf_counter()
    assert plan.schedule is not None
    grid = plan.schedule.grid
    x, y = (f.read(everything(f.shape), np.empty(f.nbytes, np.uint8)) for f in (a, b))
    account.read_bytes += a.nbytes + b.nbytes
    account.waited_seconds += time.perf_counter() - start
    result = np.asarray(plan.how.multiply(plan, x, y, None)).reshape(grid)
    output.write(everything(grid), result)
    journal.record(0, output.sync)
    account.written_bytes += result.nbytes
    account.flops += 2 * result.size * plan.k
    account.report()


def _multiply_tiles(
    plan: Plan,
    schedule: Schedule,
    inbox: _Inbox,
    outbox: _Outbox,
    journal: Journal,
    account: Account,
) -> None:
    inner = schedule.inner
    sums: Array | None = None
    for step in schedule.steps(frozenset(journal.done)):
        a_panel, b_panel = inbox.take()
        with _on_tile(step):
            if step.is_first:
                sums = None  # its memory goes before the next is taken
                sums = _cpu.new_sum(plan, sizes(step.c))
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
        account: Account,
        reading: _Worker,
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
        account: Account,
        writing: _Worker,
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
                self._journal.record(step.tile, self._output.sync)


class _Worker:
    """A thread that does what it is given, in order; `with` starts it, and waits for it.

    After something failed it does nothing more: the last part of a tile would be written, and the
    tile recorded, without the part that failed.

    It is waited for however often Ctrl-C is pressed, as it has files in its hands, and it is there
    before anything is asked of it, or who is interrupted would not know of it. One that everyone
    forgot ends, and keeps no process.

    Python's own pools take nothing more once the main thread has come to its end, though it waits
    for threads that are at work, and one of them may be in a product of files.
    """

    def __init__(self, name: str) -> None:
        self._given: SimpleQueue[Callable[[], bool] | None] = SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=[self._given], name=name, daemon=True)

    def __enter__(self) -> Self:
        try:
            if self._thread.ident is None:
                shielded(self._start)
        except BaseException:
            shielded(self._stop)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        shielded(self._stop)

    def __del__(self) -> None:
        self._given.put(None)

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        done: Future[T] = Future()
        self._given.put(partial(_carry_out, done, function, arguments))
        return done

    def _start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError as error:
            if "new thread" not in str(error):  # but an interrupt, see `unmasked`
                raise
            raise TilewiseError(
                f"the system has no thread left to read and write files with: {error}; allow this "
                "process more threads or memory"
            ) from error

    def _stop(self) -> None:
        """Return when all that was given is done."""
        self._given.put(None)
        if self._thread.ident is not None:
            self._thread.join()


def _serve(given: SimpleQueue[Callable[[], bool] | None]) -> None:
    has_failed = False
    while (work := given.get()) is not None:
        has_failed = has_failed or not work()
        del work  # or an error would hold it, and what it was given


def _carry_out(done: Future[T], function: Callable[..., T], arguments: tuple[Any, ...]) -> bool:
    """Do something, and return whether that was done without an error."""
    try:
        done.set_result(function(*arguments))
    except BaseException as error:
        done.set_exception(error)
        del done  # or its error would hold it
        return False
    return True


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


def _within(outer: slice, inner: slice) -> slice:
    return slice(outer.start + inner.start, outer.start + inner.stop)
