"""The plan for a product of files: how operands and output lie there, and what fits a budget."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

from numpy.typing import NDArray

from .. import _memory
from .._cpu import OnCpu, held_per_element, new_sum
from .._devices import device_names, machine_for
from .._operand import Operand, result_shape
from .._plan import Plan, make_plan
from .._request import IN_HOST_MEMORY, request
from ..errors import BudgetError, DeviceError, DTypeError
from .choice import choose_schedule, least_budget
from .cuts import divisor, even
from .files import FileOperand, FileResult, Matrix, Target, open_matrix
from .flat import FlatFile
from .journal import recorded
from .schedule import Job, Schedule, Side, Tiling, whole_schedule
from .stores import COPIES, LARGEST_PART, Layout

if TYPE_CHECKING:
    from .._request import Request
    from .._streamed import Machine
    from .account import Account
    from .device_files import OnGpuFiles
    from .files import Output
    from .journal import Journal

__all__ = ["OnFiles", "how_of", "layout_of", "plan_files", "plan_onto", "plan_paths"]

#: Products of fewer multiplications, about a second's work, run as one call where they fit: their
#: bits are np.matmul's. Longer ones are cut, to read and write beside, and to answer an interrupt.
_WHOLE_WORK = 1 << 36
_TILED_BITS = "this plan: same tiles, BLAS and threads, same bits"
_TILED_WHY = ("panels are read, and results written, beside BLAS at work",)

#: A chunk of an output that has chunks is no larger, nor this share of the budget.
_LARGEST_CHUNK = 4 << 20
#: One of less than this part of that is small, and not about square if it is larger so.
_SMALL_SHARE = 8
_PART_SHARE = 32


@dataclass(frozen=True, slots=True)
class OnFiles:
    """How operands in files are multiplied: read and written as scheduled, or all in memory."""

    schedule: Schedule | None  #: None where the result has no elements
    in_memory: OnCpu  #: how what has been read whole is multiplied

    @property
    def part_bytes(self) -> int:
        """How much is moved to or from chunks at a time."""
        return _part_bytes(LARGEST_PART if self.schedule is None else self.schedule.budget_bytes)

    def execute(
        self, plan: Plan, a: Matrix, b: Matrix, output: Output, journal: Journal, account: Account
    ) -> None:
        """Compute the tiles that are not done, and record each when it is durable."""
        from .cpu_pipeline import execute

        assert self.schedule is not None
        execute(plan, self.schedule, a, b, output, journal, account)

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
    begun_bytes: int | None = None,
) -> Plan:
    """Return the plan by which `multiply_files` multiplies two operands in files.

    ``is_flat`` says whether the output has no chunks, ``begun_bytes`` with which budget of each GPU
    it was begun.

    Raises
    ------
    ShapeError, DTypeError, OptionError, BudgetError, DeviceError
        As `multiply_files` does.
    """
    names = None if devices is None else device_names(devices)
    left, right = (Operand.of(x)._replace(where="file") for x in (a, b))
    asked = request(
        left, right, IN_HOST_MEMORY, dtype=dtype, memory=memory, precision=precision, verify=verify
    )
    machine = _machine(left, right, names, memory)
    if machine is None:
        return _checked(_plan_on_cpu(asked, a, b, is_flat))
    on_gpu = None
    try:
        on_gpu = _plan_as_begun(asked, machine, a, b, is_flat, memory, begun_bytes)
        on_gpu = on_gpu or _plan_on_gpus(asked, machine, a, b, is_flat)
    except (BudgetError, DeviceError, DTypeError):  # no room there, or no kernel
        if not machine.is_offer:
            raise
    if on_gpu is not None and not machine.is_offer:
        return _checked(on_gpu)
    on_cpu = _plan_on_cpu(asked, a, b, is_flat)
    if on_gpu is None:
        return _checked(on_cpu)
    from .._streamed import faster

    return _checked(faster(on_gpu, on_cpu, machine))


def _checked(plan: Plan) -> Plan:
    """Count what a check takes of the host's memory, when all else has been given back.

    Raises
    ------
    BudgetError
        If the budget does not hold the smallest parts of it.
    """
    if not plan.verify:
        return plan
    from ..numerics.room import Room

    budget, is_on_cpu = plan.asked.memory_bytes, plan.device == "cpu"
    if budget is None and is_on_cpu and plan.schedule is not None:
        budget = plan.schedule.budget_bytes
    sizes, dtypes = (plan.m, plan.n, plan.k), (*plan.dtypes, plan.dtype)
    taken = Room.of(sizes, plan.batch, dtypes, plan.bound, budget).nbytes
    held = max(plan.held_bytes, taken) if is_on_cpu else plan.held_bytes
    return replace(plan, verify_bytes=taken, held_bytes=held)


def _machine(
    left: Operand, right: Operand, names: tuple[str, ...] | None, memory: Any
) -> Machine | None:
    """Return the GPUs that may multiply two files, or None for the CPU alone."""
    batch, m, n, k, _ = result_shape(left, right)
    x, y = (operand._replace(where="memory") for operand in (left, right))
    machine = machine_for(x, y, names, memory)
    return None if 0 in (*batch, m, n, k) else machine  # nothing is multiplied then


def _plan_as_begun(
    asked: Request,
    machine: Machine,
    a: Matrix | Operand,
    b: Matrix | Operand,
    is_flat: bool,
    memory: Any,
    begun_bytes: int | None,
) -> Plan | None:
    """Return the plan by which GPUs began, if it is asked for and what it takes of them is free.

    The rest of its budget may have been taken by other programs since.
    """
    wanted = {_memory.parse_budget(memory, gpu.memory_bytes) for gpu in machine.gpus}
    if begun_bytes is None or wanted != {begun_bytes}:
        return None
    machine = replace(machine, device_bytes=(begun_bytes,) * len(machine.gpus))
    plan = _plan_on_gpus(asked, machine, a, b, is_flat)
    parts = cast("OnGpuFiles", plan.how).schedule.streams.parts
    taken = zip([part.schedule.held_bytes for part in parts], machine.free_bytes, strict=False)
    return plan if all(held <= free for held, free in taken) else None


def _plan_on_gpus(
    asked: Request, machine: Machine, a: Matrix | Operand, b: Matrix | Operand, is_flat: bool
) -> Plan:
    for x, file in ((asked.a, a), (asked.b, b)):
        if _batch_is_inside(x):
            raise DeviceError(
                f"{getattr(file, 'name', x)} is a stack in Fortran order, whose matrices lie "
                "inside one another, so that a GPU would read it element by element; leave "
                "devices out, or write the stack in C order"
            )
    from .device_files import plan_files_on_gpus

    is_gram = (
        isinstance(a, FlatFile)
        and isinstance(b, FlatFile)
        and (a.stamp, a.offset) == (b.stamp, b.offset)
        and os.path.sameopenfile(a.file.fileno(), b.file.fileno())
    )
    return plan_files_on_gpus(asked, machine, a, b, is_flat=is_flat, is_gram=is_gram)


def _plan_on_cpu(asked: Request, a: Matrix | Operand, b: Matrix | Operand, is_flat: bool) -> Plan:
    budget = asked.memory_bytes
    if budget is None:
        budget = _default_budget()
    plan = make_plan(asked._replace(memory_bytes=None))
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
        grid = plan.schedule.grid
        if len(grid) - 2 == rank:
            chunks = _chunks(plan, plan.schedule)
    formats = [getattr(getattr(x, "store", None), "metadata", None) for x in (a, b)]
    return Layout(
        shape=plan.shape,
        dtype=plan.dtype,
        grid=grid,
        added=added,
        chunks=tuple(size for axis, size in enumerate(chunks) if axis not in added),
        zarr_format=min(getattr(x, "zarr_format", 3) for x in formats),
    )


class HowOfFiles(Protocol):
    """What `Plan.how` is of a product of files: `OnFiles`, or `OnGpuFiles`."""

    @property
    def part_bytes(self) -> int:
        """How much is moved to or from chunks at a time."""

    def execute(
        self, plan: Plan, a: Matrix, b: Matrix, output: Output, journal: Journal, account: Account
    ) -> None:
        """Compute the tiles that are not done, and record each when it is durable."""


def how_of(plan: Plan) -> HowOfFiles:
    """Return how a product of files is multiplied."""
    return cast(HowOfFiles, plan.how)


def _part_bytes(budget: int) -> int:
    return max(min(budget // _PART_SHARE, LARGEST_PART), 1)


def _chunks(plan: Plan, schedule: Tiling) -> tuple[int, ...]:
    """Return chunks that no two parts of tiles share: about square, and of some MiB at most."""
    *_, m, n = schedule.grid
    *at, part_m, part_n = schedule.parts
    most = max(min(how_of(plan).part_bytes, _LARGEST_CHUNK) // plan.dtype.itemsize, 1)
    shapes = (
        (columns, _chunk(m, part_m, most // columns))
        for columns in (
            _chunk(n, part_n, max(math.isqrt(most), most // m)),
            _chunk(n, part_n, most),  # the only other divisor of a prime number
        )
    )
    columns, rows = max(shapes, key=lambda shape: min(_SMALL_SHARE * math.prod(shape), most))
    batch = [1] * len(at)
    if batch:
        batch[-1] = _chunk(schedule.grid[-3], at[-1], max(most // (rows * columns), 1))
    return (*batch, rows, columns)


def _chunk(size: int, part: int, most: int) -> int:
    return even(size, most) if part >= size else divisor(part, most)


def plan_onto(
    out: FileResult,
    a: Matrix,
    b: Matrix,
    *,
    memory: Any,
    devices: Any,
    verify: bool,
    **options: Any,
) -> tuple[Plan, Target]:
    """Return the plan for an output that is to be written there, and where that is.

    Without ``memory`` it has the budget of what an earlier run has begun, without ``devices`` its
    devices.

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
    before = recorded(target.journal_path) if target.is_begun else {}
    if memory is None:
        memory = before.get("budget_bytes")
    begun_on = before.get("device") if devices is None else None
    if isinstance(begun_on, str):
        devices = begun_on.split(", ")
    begun_bytes = before.get("budget_bytes") if before.get("device") != "cpu" else None
    options |= {"memory": memory, "devices": devices, "verify": verify, "begun_bytes": begun_bytes}
    try:
        return plan_files(a, b, is_flat=target.is_flat, **options), target
    except DeviceError as error:
        if begun_on is not None:
            error.add_note(
                f"{target.part} was begun there; remove it and {target.journal_path} to begin anew "
                "elsewhere"
            )
        raise


def plan_paths(
    a: FileOperand, b: FileOperand, out: FileResult | None, *, verify: bool, **options: Any
) -> Plan:
    """Return the plan for operands that are not open yet: paths or stores."""
    with open_matrix(a, "a") as left, open_matrix(b, "b") as right:
        if out is None:
            return plan_files(left, right, verify=verify, **options)
        plan, target = plan_onto(out, left, right, verify=verify, **options)
        if target.kind == "store":  # looks at its shape and dtype
            target.reopen(layout_of(plan, left, right), how_of(plan).part_bytes)
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
