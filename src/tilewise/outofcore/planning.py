"""The plan for a product of files: how operands and output lie there, and what fits a budget."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from .. import _memory
from .._cpu import OnCpu, held_per_element, new_sum
from .._devices import device_names
from .._operand import Operand
from .._plan import Plan, make_plan
from .._request import IN_HOST_MEMORY, request
from ..errors import BudgetError, DeviceError
from .choice import choose_schedule, least_budget
from .cuts import divisor, even
from .files import FileOperand, Matrix, Target, open_matrix
from .journal import recorded
from .schedule import Job, Schedule, Side, batch_slices, whole_schedule
from .stores import COPIES, LARGEST_PART, Layout

__all__ = ["OnFiles", "layout_of", "part_bytes_of", "plan_files", "plan_onto", "plan_paths"]

#: Products of fewer multiplications, about a second's work, run as one call where they fit: their
#: bits are np.matmul's. Longer ones are cut, to read and write beside, and to answer an interrupt.
_WHOLE_WORK = 1 << 36
_TILED_BITS = "this plan: same tiles, BLAS and threads, same bits"
_TILED_WHY = ("panels are read, and results written, beside BLAS at work",)

#: A chunk of an output that has chunks is no larger, nor this share of the budget.
_LARGEST_CHUNK = 4 << 20
_PART_SHARE = 32


@dataclass(frozen=True, slots=True)
class OnFiles:
    """How operands in files are multiplied: read and written as scheduled, or all in memory."""

    schedule: Schedule | None  #: None where the result has no elements
    in_memory: OnCpu  #: how what has been read whole is multiplied

    def multiply(
        self, plan: Plan, a: NDArray[Any], b: NDArray[Any], out: NDArray[Any] | None
    ) -> Any:
        return self.in_memory.multiply(plan, a, b, out)

    def lines(self, plan: Plan) -> list[str]:
        if self.schedule is None:
            lines = ("tiles      none: the result has no elements", "memory     0 B")
            return [*lines, "reads      0 B", "writes     0 B"]
        return [str(self.schedule)]

    def to_dict(self, plan: Plan) -> dict[str, Any]:
        if self.schedule is None:
            return {}
        return {**self.in_memory.to_dict(plan), "schedule": self.schedule.to_dict()}


def plan_files(
    a: Matrix | Operand,
    b: Matrix | Operand,
    *,
    dtype: Any = None,
    memory: Any = None,
    devices: Any = None,
    precision: str | None = None,
    verify: bool = False,
    is_flat: bool = True,
) -> Plan:
    """Return the plan by which `multiply_files` multiplies two operands in files.

    ``is_flat`` says whether the output has no chunks.

    Raises
    ------
    ShapeError, DTypeError, OptionError, BudgetError, DeviceError
        As `multiply_files` does.
    """
    for name in () if devices is None else device_names(devices):
        if name != "cpu":
            raise DeviceError(
                f"device {name!r} was asked for, and this version multiplies files on the CPU; "
                "leave it out, or give memory maps (np.load with mmap_mode='r') to matmul"
            )
    budget = _memory.parse_budget(memory)
    if budget is None:
        budget = _default_budget()
    left, right = (Operand.of(x)._replace(where="file") for x in (a, b))
    plan = make_plan(
        request(left, right, IN_HOST_MEMORY, dtype=dtype, precision=precision, verify=verify)
    )
    assert isinstance(plan.how, OnCpu)
    in_memory = plan.how
    job = _job(plan, a, b, budget, is_flat)
    work = math.prod(plan.batch) * plan.m * plan.n * plan.k
    result_bytes = math.prod(plan.shape) * plan.dtype.itemsize
    whole_bytes = plan.a.nbytes + plan.b.nbytes + result_bytes + plan.workspace_bytes
    whole_bytes += job.staging_bytes
    if not result_bytes:
        return replace(
            plan, how=OnFiles(None, in_memory), held_bytes=0, workspace_bytes=0, moved_bytes=0
        )
    if whole_bytes <= budget and work <= _WHOLE_WORK:
        whole = OnFiles(whole_schedule(job, whole_bytes, budget), in_memory)
        return replace(plan, how=whole, held_bytes=whole_bytes)
    schedule = choose_schedule(job, budget)
    if schedule is None:
        needed = budget
        while (least := least_budget(job)) > needed:  # a larger budget holds larger parts of chunks
            needed = least
            job = _job(plan, a, b, needed, is_flat)
        size = _memory.format_bytes
        chunks = f", {size(job.staging_bytes)} of it for chunks" if job.staging_bytes else ""
        raise BudgetError(
            f"the smallest tiles of {plan.a} @ {plan.b} take {size(needed, is_needed=True)}"
            f"{chunks}, and memory= allows {size(budget)}; raise the budget"
        )
    return replace(
        plan,
        how=OnFiles(schedule, OnCpu()),
        workspace_bytes=schedule.workspace_bytes,
        held_bytes=schedule.held_bytes,
        moved_bytes=schedule.read_bytes + schedule.written_bytes,
        bits=_TILED_BITS if plan.compute_dtype.kind in "fc" else plan.bits,
        why=_TILED_WHY if plan.method == "blas" else plan.why,
    )


def layout_of(plan: Plan, a: Matrix, b: Matrix) -> Layout:
    """Return what the output of a plan is, and the chunks it has if it has any."""
    rank = len(plan.batch)
    added = (rank,) * (len(plan.a.shape) == 1) + (rank + 1,) * (len(plan.b.shape) == 1)
    grid = plan.shape
    chunks = (*plan.batch, plan.m, plan.n)
    if plan.schedule is not None:
        job = plan.schedule.job
        grid = (*job.batch, job.m, job.n)
        if len(job.batch) == rank:
            chunks = _chunks(plan)
    formats = [getattr(getattr(x, "store", None), "metadata", None) for x in (a, b)]
    return Layout(
        shape=plan.shape,
        dtype=plan.dtype,
        grid=grid,
        added=added,
        chunks=tuple(size for axis, size in enumerate(chunks) if axis not in added),
        zarr_format=min(getattr(x, "zarr_format", 3) for x in formats),
    )


def part_bytes_of(plan: Plan) -> int:
    """Return how much is moved to or from chunks at a time."""
    budget = LARGEST_PART if plan.schedule is None else plan.schedule.budget_bytes
    return _part_bytes(budget)


def _part_bytes(budget: int) -> int:
    return max(min(budget // _PART_SHARE, LARGEST_PART), 1)


def _chunks(plan: Plan) -> tuple[int, ...]:
    """Return chunks that no two parts of tiles share: about square, and of some MiB at most."""
    schedule = plan.schedule
    assert schedule is not None
    job, inner = schedule.job, schedule.inner if not schedule.is_whole else None
    tile_m, tile_n = (inner.tile_m, inner.tile_n) if inner else (job.m, job.n)
    most = max(min(_part_bytes(schedule.budget_bytes), _LARGEST_CHUNK) // plan.dtype.itemsize, 1)
    columns = _chunk(job.n, tile_n, max(math.isqrt(most), most // job.m))
    rows = _chunk(job.m, tile_m, most // columns)
    batch = [1] * len(job.batch)
    if batch:
        step = next(batch_slices(job.batch, schedule.at_once))[-1].stop
        batch[-1] = _chunk(job.batch[-1], step, max(most // (rows * columns), 1))
    return (*batch, rows, columns)


def _chunk(size: int, part: int, most: int) -> int:
    return even(size, most) if part >= size else divisor(part, most)


def plan_onto(
    out: FileOperand, a: Matrix, b: Matrix, *, memory: Any, verify: bool, **options: Any
) -> tuple[Plan, Target]:
    """Return the plan for an output that is to be written there, and where that is.

    Without ``memory`` it has the budget of what an earlier run has begun.

    Raises
    ------
    FileError
        If the output's place cannot be written, or is that of an operand.
    ShapeError, DTypeError, OptionError, BudgetError, DeviceError
        As `multiply_files` does.
    """
    target = Target.of(out, verify)
    for x in (a, b):
        target.check_apart(x)
    if memory is None:
        memory = recorded(target.journal_path).get("budget_bytes")
    is_flat = target.kind in ("npy", "hdf5")
    plan = plan_files(a, b, memory=memory, verify=verify, is_flat=is_flat, **options)
    return plan, target


def plan_paths(
    a: FileOperand, b: FileOperand, out: FileOperand | None, *, verify: bool, **options: Any
) -> Plan:
    """Return the plan for operands that are not open yet: paths or stores."""
    with open_matrix(a, "a") as left, open_matrix(b, "b") as right:
        if out is None:
            return plan_files(left, right, verify=verify, **options)
        plan, target = plan_onto(out, left, right, verify=verify, **options)
        if target.kind == "store":  # looks at its shape and dtype
            target.reopen(layout_of(plan, left, right), part_bytes_of(plan))
        return plan


def _job(plan: Plan, x: Matrix | Operand, y: Matrix | Operand, budget: int, is_flat: bool) -> Job:
    a, b = plan.a, plan.b
    batch, m, a_batch = plan.batch, plan.m, a.shape[:-2]
    a_chunk, b_chunk = _chunk_of(x, is_row=True), _chunk_of(y, is_row=False)
    a_along_k = len(a.shape) == 1 or a.strides[-1] <= a.strides[-2]
    is_stack = len(b.shape) <= 2 and a_batch and a_along_k and a.strides[0] == max(a.strides)
    if is_stack and is_flat and _chunks_of(x) is None:
        # C-ordered matrices one after the other, times one matrix: they are one tall matrix.
        batch, m, a_batch = (), math.prod(batch) * m, ()
    part = _part_bytes(budget)
    staging = 0
    for chunks, operand in ((_chunks_of(x), a), (_chunks_of(y), b)):
        if chunks is not None:
            chunk_bytes = math.prod(chunks) * operand.dtype.itemsize
            staging = max(staging, COPIES * max(chunk_bytes, part))
    if not is_flat:
        staging += COPIES * part
    sums = new_sum(plan, (0,))
    # BLAS reads such panels as they are; those of a foreign byte order are not equal here.
    is_plain = sums.dtype.kind in "fc" and a.dtype == b.dtype == sums.dtype
    panel_bytes, tile_bytes = held_per_element(plan.method, plan.compute_dtype)
    return Job(
        batch=batch,
        k=plan.k,
        a=Side(m, a.dtype.itemsize, a_along_k, a_batch, _batch_is_inside(a), a_chunk, a.name),
        b=Side(
            plan.n,
            b.dtype.itemsize,
            len(b.shape) == 1 or b.strides[-2] < b.strides[-1],
            b.shape[:-2],
            _batch_is_inside(b),
            b_chunk,
            b.name,
        ),
        panel_bytes=0 if is_plain else panel_bytes,
        product_bytes=tile_bytes - sums.itemsize,
        sum_itemsize=sums.itemsize,
        out_itemsize=plan.dtype.itemsize,
        staging_bytes=staging,
    )


def _batch_is_inside(x: Operand) -> bool:
    """Whether neighbours in a file are of different matrices, as in F-ordered stacks."""
    return len(x.shape) > 2 and x.strides[0] < min(x.strides[-2:])


def _default_budget() -> int:
    half = _memory.available_bytes() // 2
    return 1 << max(half.bit_length() - 1, 0)


def _chunks_of(x: Matrix | Operand) -> tuple[int, ...] | None:
    """Return the chunks of an operand in a store; None of one that has none."""
    chunks: tuple[int, ...] | None = getattr(x, "chunks", None)
    return chunks


def _chunk_of(x: Matrix | Operand, *, is_row: bool) -> tuple[int, int]:
    """Return an operand's chunk along its own axis and along K."""
    chunks = _chunks_of(x) or (1, 1)
    if len(chunks) == 1:
        return 1, chunks[0]
    return (chunks[-2], chunks[-1]) if is_row else (chunks[-1], chunks[-2])
