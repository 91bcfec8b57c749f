"""Products of files: begun or gone on with, checked, and handed over, whoever computes them.

Tiles are computed by the plan's own way (``cpu_pipeline``, ``device_files``), which makes each
durable and then records it, so that a run that was stopped goes on where it was.
"""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__
from .._arrays import no_stream
from .._plan import Plan
from .._shield import unmasked
from ..errors import CheckError, FileError, OptionError, ShapeError
from ..numerics.verdict import Check, Where
from .account import Account, Progress, Report
from .files import FileOperand, FileResult, Matrix, Output, Target, open_matrix
from .journal import Journal
from .planning import how_of, layout_of, plan_onto
from .schedule import Tiling

__all__ = ["Progress", "Report", "multiply_files", "run_plan"]


def multiply_files(
    a: FileOperand,
    b: FileOperand,
    out: FileResult,
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
    tiles of the result that were finished stay. Without ``memory`` it takes the budget it had, and
    without ``devices`` those.

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
        As for `matmul`. A GPU gives the bits of operands in its memory.
    memory : int or str, optional
        Budget for what tilewise holds to multiply, beside Python's and NumPy's own 60 MiB or so:
        "2GiB", "50%". On GPUs it is for each of them, and for the host beside.
        Without one, half of the free memory, rounded down to a power of two so that runs are
        usually alike; on GPUs what is free there, and 256 MiB of the host for each unless chunks
        are larger.
    verify : bool
        Check the result by `check` before it gets its name, in parts that ``memory`` holds; tiles
        in which that finds a wrong element are computed again. What is no flat file (Zarr, chunked
        HDF5, stores) is copied for it, whole, to nameless files beside the output: that much more
        room is needed.
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


def run_plan(
    plan: Plan, a: FileOperand, b: FileOperand, out: FileResult, stream: Any, report: Report | None
) -> FileResult:
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
            devices=plan.device.split(", "),
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
        try:
            identities = a.identity(), b.identity()
            # Nothing tells whether the operands are what they were, or nothing is there to go on.
            if None in identities or not target.is_begun:
                journal.forget(set(journal.done))
            journal.begin(_identity(plan, *identities))
        except BaseException:
            if not journal.done:  # such as on a full disk: nothing is worth keeping
                with suppress(FileError):
                    journal.remove()
            raise
        try:
            output = _open_output(plan, a, b, target, journal)
            try:
                _produce(plan, a, b, target, output, journal, report)
                journal.check()
                output.commit()
            finally:
                output.close()
        except BaseException as raised:
            error = unmasked(raised)
            if journal.is_lost:
                raise error from error.__cause__  # what is there now is not of this run
            if target.is_begun and journal.done and None not in identities:
                error.add_note(
                    f"{journal.count} of {_tile_count(plan)} stay in {target.part}; the same "
                    "command goes on from there"
                )
            else:
                try:
                    target.discard()
                    journal.remove()
                except OSError as left:
                    error.add_note(f"and what was begun stays: {left}")
            raise error from error.__cause__
        try:
            journal.remove()
        except FileError as error:
            raise FileError(f"{target.name} is complete, but {error}") from error


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
    most = how_of(plan).part_bytes
    if plan.verify:
        target.check_room_to_verify(a, b, math.prod(plan.shape) * plan.dtype.itemsize)
    if journal.done:
        try:
            output = target.reopen(layout, most)
            if plan.schedule is not None:
                tiles = plan.schedule.tiles()
                journal.forget({tile for tile, box in tiles if not output.holds(box)})
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
    account = Account(plan.schedule, plan.k, 2 * math.prod(plan.shape) * plan.k, journal, report)
    while plan.schedule is not None:
        account.begin_pass()
        how_of(plan).execute(plan, a, b, output, journal, account)
        a.check_unchanged()
        b.check_unchanged()
        if not plan.verify:
            return
        found = _check(plan, a, b, output, target.folder)
        if found:
            return
        wrong = _tiles_at(plan, plan.schedule, found.where)
        journal.forget(wrong)
        if wrong <= again:
            raise CheckError(f"verify=True found a wrong result, which was not written: {found}")
        again |= wrong
        account.repaired_tiles = len(again)


def _check(plan: Plan, a: Matrix, b: Matrix, output: Output, folder: Path) -> Check:
    """Check what is written so far, within the plan's budget."""
    from ..numerics.check import check

    part_bytes = how_of(plan).part_bytes
    with (
        a.unread(folder, part_bytes) as x,
        b.unread(folder, part_bytes) as y,
        output.unread(plan.shape, folder, part_bytes) as z,
    ):
        return check(x, y, z, bound=plan.bound, memory=plan.verify_bytes)


def _tiles_at(plan: Plan, schedule: Tiling, where: Where | None) -> set[int]:
    """Return the tiles that hold the wrong elements a check located."""
    if where is None:
        return set(range(schedule.tile_count))
    batch, rows, columns = where.batch, where.rows, where.columns
    if len(schedule.grid) - 2 < len(batch):  # the batch's matrices are one tall matrix
        above = int(np.ravel_multi_index(batch, plan.batch)) * plan.m
        batch, rows = (), tuple(range(above + r.start, above + r.stop) for r in rows)
    found = set()
    for tile, (*at, high, wide) in schedule.tiles():
        if (
            all(part.start <= i < part.stop for part, i in zip(at, batch, strict=True))
            and any(high.start < r.stop and r.start < high.stop for r in rows)
            and any(wide.start < r.stop and r.start < wide.stop for r in columns)
        ):
            found.add(tile)
    return found


def _tile_count(plan: Plan) -> int:
    return 1 if plan.schedule is None else plan.schedule.tile_count
