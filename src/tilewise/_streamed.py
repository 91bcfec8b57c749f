"""Products on GPUs of what is not all in their memory: what is planned for them, and how it runs.

Operands become the plain numbers that ``outofcore.device_schedule`` knows, a schedule for each GPU
is chosen with the kernels of its launches, and the pipeline is given the arrays. What is in the
memory of the GPU stays there. The kernels are those that would multiply device arrays, and so are
the bits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from . import _recipe
from ._memory import format_bytes, over_budget
from ._operand import Box, Operand, stored, stored_shape
from .errors import BudgetError, OptionError
from .kernels.steps import chains
from .numerics.dtypes import is_extension
from .outofcore.device_choice import choose, deal, least_bytes, sample
from .outofcore.device_job import Factor, Job, Rates
from .outofcore.device_pipeline import Device, Share, Threads
from .outofcore.device_pipeline import multiply as run_pipeline
from .outofcore.device_schedule import Launch, Schedule
from .outofcore.device_time import expected
from .outofcore.slices import HostArray, InPlace, Sink, Source
from .runtime.arrays import AnyArray, DeviceArray

if TYPE_CHECKING:
    from ._plan import Plan
    from ._recipe import Recipe
    from .runtime.device import DeviceFacts

__all__ = ["Files", "Machine", "Streams", "faster", "multiply", "plan_streams", "run"]

Array = NDArray[Any]

#: Products of fewer bytes are copied in, multiplied and copied out: threads would cost more.
_STREAMED_BYTES = 8 << 20

#: Pieces of K for integers, whose sums are exact in any order.
_INTEGER_PIECE = 4096

#: What one core copies between pageable and pinned memory, beside others; not all of 16 are felt.
_CORE_BYTES_PER_S = 3.75e9
_MOST_CORES = 16

#: What the host copies for several GPUs together, which share its memory, whatever its cores
#: (docs/facts.md).
_SHARED_BYTES_PER_S = 45e9

#: What one core computes with NumPy's BLAS, by the type of the sums, and reads from memory; twice
#: this much for complex numbers, and an eighth for integers.
_CORE_FLOPS = {4: 75e9, 8: 37e9}
_CORE_READS_PER_S = 6e9

#: The CPU is left alone, if nobody asks, unless a GPU needs this much less time.
_WORTH_IT = 1 / 2

#: What a disk reads and writes in a second, as far as a plan can know, and what it costs to begin
#: on a stretch of a file.
_DISK_BYTES_PER_S = 3e9
_STRETCH_S = 1e-5

_Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """What a plan for operands in files depends on, beside the operands."""

    chunks: tuple[int, int]  #: rows of a, and columns of b, that are read as one
    may_fold: bool  #: whether a stack of matrices may be read, and written, as one tall matrix
    least_slice: int  #: bytes that are read as one
    staged: int  #: slices that stores hold beside the pinned ones


@dataclass(frozen=True, slots=True)
class Machine:
    """What a plan for GPUs and arrays outside them depends on, beside the arrays."""

    gpus: tuple[DeviceFacts, ...]
    device_bytes: tuple[int, ...]  #: what may be taken of each GPU
    cores: int
    is_gram: bool  #: whether both operands begin at the same address
    is_offer: bool  #: whether no device was asked for, so that the CPU may do it
    files: Files | None = None  #: for operands in files
    free_bytes: tuple[int, ...] = field(default=(), compare=False)
    """Of each GPU, what could be taken if all of it were: asked of files that were begun alone."""

    def streams(self, plan: Plan) -> bool:
        """Say whether a product is cut into pieces that are copied as it runs."""
        if 0 in (*plan.batch, plan.m, plan.n, plan.k):
            return False
        if self.files is not None:
            return True
        out = plan.asked.out
        result_bytes = math.prod(plan.shape) * plan.dtype.itemsize
        nbytes = plan.a.stored_bytes + plan.b.stored_bytes + result_bytes
        is_tight = 4 * nbytes > self.device_bytes[0]  # some kernels take twice as much again
        copied = 0 if out is not None and out.is_on_gpu else result_bytes
        copied += sum(x.stored_bytes for x in (plan.a, plan.b) if not x.is_on_gpu)
        return copied >= _STREAMED_BYTES or len(self.gpus) > 1 or is_tight


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """What one GPU does: its share of C, the schedule, and the kernels of each kind of launch."""

    index: int
    origin: Box
    schedule: Schedule
    recipes: dict[_Key, Recipe]
    expected_s: float
    limit: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Streams:
    """How operands are multiplied on one GPU, or host operands on several."""

    whole: Recipe  #: by which one GPU would compute all of it in its memory
    job: Job  #: all of it
    parts: tuple[Part, ...]
    threads: Threads
    is_folded: bool  #: whether the batch of a is part of its rows
    most_pinned: int | None  #: bytes, what is kept from before included

    @property
    def ring_bytes(self) -> int:
        """Pinned memory that everything passes through."""
        return len(self.parts) * self.threads.ring_bytes

    @property
    def expected_s(self) -> float:
        return max(part.expected_s for part in self.parts)

    def first_tiles(self) -> list[int]:
        """Return the number of each device's first tile."""
        counts = (part.schedule.tile_count for part in self.parts[:-1])
        return list(itertools.accumulate(counts, initial=0))

    def multiply(self, plan: Plan, a: AnyArray, b: AnyArray, out: AnyArray | None) -> Any:
        from ._gpu import apart

        with ExitStack() as held:
            a, b = apart(a, out, held), apart(b, out, held)
            return multiply(plan, self, a, b, out)

    def to_dict(self, plan: Plan) -> dict[str, Any]:
        streams = {
            "devices": [
                {
                    "device": f"cuda:{part.index}",
                    "rows": [part.origin[-2].start, part.origin[-2].stop],
                    "columns": [part.origin[-1].start, part.origin[-1].stop],
                    "expected_s": part.expected_s,
                    "limit": part.limit,
                    **part.schedule.to_dict(),
                }
                for part in self.parts
            ],
            "pinned_bytes": self.ring_bytes,
            "threads": len(self.parts) * (self.threads.gathering + self.threads.scattering),
        }
        return {"kernels": self.whole.to_dict(), "streams": streams}

    def lines(self, plan: Plan) -> list[str]:
        lines = [str(self.whole)]
        for part in self.parts:
            if len(self.parts) > 1:
                box = ", ".join(f"{axis.start}:{axis.stop}" for axis in part.origin)
                lines.append(f"on cuda:{part.index}  c[{box}]")
            lines.append(str(part.schedule))
            lines.append(f"expected   {_duration(part.expected_s)}, limited by {part.limit}")
        threads = self.threads.gathering + self.threads.scattering
        lines.append(
            f"on host    {format_bytes(self.ring_bytes)} pinned, "
            f"{len(self.parts) * threads} threads"
        )
        return lines


def plan_streams(plan: Plan, machine: Machine) -> Plan:
    """Complete a plan by a schedule for each GPU; pure.

    Parameters
    ----------
    plan : Plan
        By which one GPU would compute all of it in its memory.
    machine : Machine

    Raises
    ------
    BudgetError
        If a budget does not hold the smallest tiles.
    """
    from ._gpu import OnGpu, copied_bytes

    assert isinstance(plan.how, OnGpu)
    whole, out, memory_bytes = plan.how.recipe, plan.asked.out, plan.asked.memory_bytes
    job, is_folded = _job(plan, whole, machine)
    flops = job.flops / max(whole.expected_us * 1e-6, 1e-9)
    shares = deal(job, len(machine.gpus))
    cores = machine.cores
    host = _CORE_BYTES_PER_S * min(cores, _MOST_CORES)
    if len(shares) > 1:
        host = min(host, _SHARED_BYTES_PER_S) / len(shares)
    parts = []
    for gpu, budget, (share, origin) in zip(
        machine.gpus, machine.device_bytes, shares, strict=False
    ):
        rates = Rates(host_bytes=host, flops=flops, multiprocessors=gpu.multiprocessors)
        if machine.files is not None:
            rates = replace(rates, disk_bytes=_DISK_BYTES_PER_S, stretch_s=_STRETCH_S)
        budget -= copied_bytes(plan, on_gpu=True)
        parts.append(_part(plan, whole, share, origin, gpu, budget, rates))
    result_bytes = 0 if out is not None else math.prod(plan.shape) * plan.dtype.itemsize
    result_bytes += copied_bytes(plan, on_gpu=False)
    moved = max(p.schedule.read_bytes + p.schedule.written_bytes for p in parts)
    room = None if memory_bytes is None else (memory_bytes - result_bytes) // len(parts)
    beside = () if machine.files is None else (machine.files.least_slice, machine.files.staged)
    threads = Threads.suited(moved, cores // len(parts), room, *beside)
    if room is not None and threads.held_bytes > room:
        raise over_budget(
            f"{plan.shape} {plan.dtype}",
            result_bytes,
            len(parts) * threads.held_bytes,
            memory_bytes or 0,
            verify=plan.verify,
            overlaps=any(plan.asked.overlaps),
        )
    streams = Streams(
        whole=whole,
        job=job,
        parts=tuple(parts),
        threads=threads,
        is_folded=is_folded,
        most_pinned=memory_bytes,
    )
    return replace(
        plan,
        device=", ".join(f"cuda:{part.index}" for part in parts),
        how=streams,
        workspace_bytes=max(part.schedule.workspace_bytes for part in parts),
        held_bytes=result_bytes + len(parts) * threads.held_bytes,
    )


def faster(on_gpu: Plan, on_cpu: Plan, machine: Machine) -> Plan:
    """Return the plan that is expected to be done well before the other, or else the CPU's."""
    streams = on_gpu.how
    cores = machine.cores
    compute = on_cpu.compute_dtype
    flops = 2 * math.prod(on_cpu.batch) * on_cpu.m * on_cpu.n * on_cpu.k
    real = compute.itemsize // 2 if compute.kind == "c" else compute.itemsize
    rate = cores * _CORE_FLOPS[8 if real > 4 else 4]
    rate *= {"c": 1 / 4, "f": 1}.get(compute.kind, 1 / 8)
    cpu_s = max(flops / rate, on_cpu.moved_bytes / (min(cores, _MOST_CORES) * _CORE_READS_PER_S))
    if machine.files is not None:
        cpu_s = max(cpu_s, on_cpu.moved_bytes / _DISK_BYTES_PER_S)
    expected_s: float | None = getattr(streams, "expected_s", None)
    if expected_s is None or expected_s > _WORTH_IT * cpu_s:
        return on_cpu
    why = (
        f"no device was asked for: {on_gpu.device} is expected to take "
        f"{_duration(expected_s)}, copies included, and the CPU {_duration(cpu_s)}"
    )
    return replace(on_gpu, why=(*on_gpu.why, why))


def multiply(plan: Plan, streams: Streams, a: AnyArray, b: AnyArray, out: AnyArray | None) -> Any:
    """Return the product of arrays, in ``out`` if there is one; blocks until done.

    ``out`` must not overlap an operand, and what is in device memory must be complete.
    """
    is_folded = streams.is_folded
    x: Source | InPlace
    y: Source | InPlace
    if isinstance(a, DeviceArray):
        x = InPlace(a.pointer)
    else:
        a = a[None] if a.ndim == 1 else a
        a = a.reshape(-1, a.shape[-1]) if is_folded else a
        x = HostArray(stored(_carried(a)))
    if isinstance(b, DeviceArray):
        y = InPlace(b.pointer)
    else:
        b = b[:, None] if b.ndim == 1 else b
        b = b[(0,) * (b.ndim - 2)] if is_folded else b
        y = HostArray(stored(_carried(b)))
    if streams.parts[0].schedule.job.is_gram and not _is_transpose(a, b):
        raise OptionError(
            "this plan is for a product with the transpose of the same array; make a plan for these"
        )
    if isinstance(out, DeviceArray):
        run(streams, x, y, InPlace(out.pointer))
        return out
    result = np.empty(plan.shape, plan.dtype) if out is None else out
    c = result
    if len(plan.b.shape) == 1:
        c = c[..., None]
    if len(plan.a.shape) == 1:
        c = c[..., None, :]
    if is_folded:
        c = c.reshape(-1, c.shape[-1])  # a copy, if this out does not lie as the planned one
    run(streams, x, y, HostArray(_carried(c)))
    if out is not None and not np.may_share_memory(c, out):
        np.copyto(out, c.reshape(out.shape))
    return result if plan.shape else result[()]


def run(
    streams: Streams,
    a: Source | InPlace,
    b: Source | InPlace,
    out: Sink | InPlace,
    done: Collection[int] = (),
    watch: Callable[[], object] | None = None,
) -> None:
    """Write the product of ``a`` and ``b``, as ``streams.job`` has them, into ``out``.

    Without the tiles that are ``done``; ``watch`` is called in this thread when others are. They
    are numbered from device to device.
    """
    from . import _gpu
    from .runtime import pinned, transfers

    numbers = (1, 0, 0, 0), (1, 1, 0, 0)

    def share(part: Part, first: int) -> Share:
        before: Recipe | None = None

        def compute(device: Device, launch: Launch, pointers: tuple[int, int, int, int]) -> None:
            nonlocal before
            assert isinstance(device, transfers.Gpu)
            whole = part.recipes[_key(part.schedule, launch)]
            made, before = whole.after(before, launch.same), whole
            given = numbers[part.schedule.pieces > 1]
            _gpu.launch(made, part.index, pointers, device.stream("compute"), given)

        def is_pinned(array: Array) -> bool:
            low, high = np.lib.array_utils.byte_bounds(array)
            return transfers.is_pinned(low, high - 1, part.index)

        return Share(
            name=f"cuda:{part.index}",
            schedule=part.schedule,
            origin=part.origin,
            open=lambda: transfers.Gpu(
                part.index, part.schedule.held_bytes, part.schedule.budget_bytes
            ),
            compute=compute,
            is_pinned=is_pinned,
            first_tile=first,
            done=done,
        )

    index = streams.parts[0].index
    shares = list(map(share, streams.parts, streams.first_tiles()))
    with pinned.lend(streams.ring_bytes, index, streams.most_pinned) as ring:
        run_pipeline(shares, a, b, out, ring, streams.threads, watch)


def _job(plan: Plan, whole: Recipe, machine: Machine) -> tuple[Job, bool]:
    """Return what a schedule knows of a product, and whether a's batch is part of its rows."""
    dtypes, out = plan.dtypes, plan.asked.out
    a, b = plan.a.as_matrix(is_row=True), plan.b.as_matrix(is_row=False)
    batch, m = plan.batch, plan.m
    files, is_gram = machine.files, machine.is_gram
    row_step = a.row_step if files is None or files.may_fold else None
    is_folded = row_step is not None and math.prod(b.shape[:-2]) == 1 and len(batch) > 0
    c = None
    if out is not None and out.shape == plan.shape:
        c = out.as_result(plan.a, plan.b, plan.batch)
        is_folded &= c.row_step is not None  # no part of it is copied for that
    c_strides = c.strides if c is not None and c.is_on_gpu else None
    if row_step is not None and is_folded:
        if c is not None and c_strides is not None:
            c_strides = c.row_step or 0, c_strides[-1]
        batch, m = (), math.prod(batch) * m
        a = a._replace(shape=(m, plan.k), strides=(row_step, a.strides[-1]))
        b = b._replace(shape=b.shape[-2:], strides=b.strides[-2:])
    is_gram = (
        is_gram
        and not batch
        and plan.a.dtype == plan.b.dtype  # in byte order too
        and a.shape == b.shape[::-1]
        and a.strides == b.strides[::-1]
        and 0 not in a.strides
    )
    along_n = out is None or len(out.shape) < 2 or abs(out.strides[-1]) <= abs(out.strides[-2])
    left = _factor(a, m, a.strides[-2], a.strides[-1], plan.k, dtypes[0])
    right = _factor(b, plan.n, b.strides[-1], b.strides[-2], plan.k, dtypes[1])
    if files is not None:
        left, right = replace(left, chunk=files.chunks[0]), replace(right, chunk=files.chunks[1])
    return (
        Job(
            batch=batch,
            k=plan.k,
            a=left,
            b=right,
            sum_itemsize=plan.dtype.itemsize,
            c_strides=c_strides,
            along_n=along_n,
            is_gram=is_gram,
            is_fresh=out is None,
            piece=0 if c_strides is not None else _piece(plan, whole),
        ),
        is_folded,
    )


def _factor(
    x: Operand, size: int, size_step: int, k_step: int, k: int, dtype: np.dtype[Any]
) -> Factor:
    repeats_size, repeats_k = size_step == 0 and size > 1, k_step == 0 and k > 1
    far = size > 1 and not repeats_size, k > 1 and not repeats_k
    along_k = far[1] and (not far[0] or abs(k_step) <= abs(size_step))
    return Factor(
        size=size,
        itemsize=dtype.itemsize,
        along_k=along_k,
        batch=stored_shape(x.shape[:-2], x.strides[:-2]),
        repeats_size=repeats_size,
        repeats_k=repeats_k,
        strides=x.strides if x.is_on_gpu else None,
    )


def _piece(plan: Plan, whole: Recipe) -> int:
    """Return in pieces of what K may be cut with equal bits; 0 if in none.

    Integers add up exactly. A float chain that the portable kernels cut by themselves can be cut
    there; others carry more from step to step than C holds.
    """
    compute = plan.compute_dtype
    if compute != plan.dtype or compute.kind not in "iuf":
        return 0
    if compute.kind in "iu":
        return _INTEGER_PIECE
    parts, depth = chains(plan.k)
    return depth if parts > 1 and whole.family == "portable" else 0


def _part(
    plan: Plan,
    whole: Recipe,
    job: Job,
    origin: Box,
    gpu: DeviceFacts,
    budget: int,
    rates: Rates,
) -> Part:
    found: dict[Schedule, dict[_Key, Recipe]] = {}

    def fit(schedule: Schedule) -> Schedule | None:
        """Return a schedule with what its launches take, if their kernels fit and keep the bits."""
        room = budget - schedule.held_bytes
        if room < 0:
            return None
        recipes: dict[_Key, Recipe] = {}
        us = 0.0
        for launch, times in schedule.kinds():
            if not isinstance(launch, Launch):
                continue
            key = _key(schedule, launch)
            if key not in recipes:
                try:
                    made = _launched(plan, schedule, launch, gpu, room)
                except BudgetError:
                    return None
                if made.family != whole.family:
                    return None
                recipes[key] = made
            made = recipes[key]
            us += times * made.after(made, launch.same).expected_us
        workspace = max((made.workspace_bytes for made in recipes.values()), default=0)
        fitted = replace(schedule, workspace_bytes=workspace, compute_s=us * 1e-6)
        found[fitted] = recipes
        return fitted

    schedule = choose(job, budget, rates, fit, _workspace_share(plan, job, gpu))
    if schedule is None:
        size = format_bytes
        reason = "as c in place is written once" if _piece(plan, whole) else "for its order of sums"
        needs = "" if job.piece else f"; all of K = {job.k} has to be there, {reason}"
        raise BudgetError(
            f"the smallest tiles of {plan.a} @ {plan.b} take {size(least_bytes(job))} and a "
            f"workspace on cuda:{gpu.index}, and {size(budget)} may be taken there{needs}; raise "
            "memory=, or free memory of the device (other libraries keep some for later)"
        )
    expected_s, limit = expected(schedule, rates)
    return Part(
        index=gpu.index,
        origin=origin,
        schedule=schedule,
        recipes=found[schedule],
        expected_s=expected_s,
        limit=limit,
    )


def _workspace_share(plan: Plan, job: Job, gpu: DeviceFacts) -> float:
    """Return the workspace of a product of panels, for each byte of them."""
    schedule = sample(job)
    (launch,) = (x for x in schedule.operations() if isinstance(x, Launch))
    made = _launched(plan, schedule, launch, gpu, None)
    return made.workspace_bytes / (schedule.a_store.nbytes + schedule.b_store.nbytes)


def _launched(
    plan: Plan,
    schedule: Schedule,
    launch: Launch,
    gpu: DeviceFacts,
    room: int | None,
) -> Recipe:
    """Return how a launch is computed in device memory, with so much of it for workspace."""
    where = f"cuda:{gpu.index}"
    given = plan.a, plan.b, plan.asked.out
    begins = [x is None or x.aligned or not x.is_on_gpu for x in given]
    layouts = schedule.layout(launch, 0), schedule.layout(launch, 1), schedule.c_layout(launch)
    a, b, c = (
        Operand(layout.shape, dtype, layout.strides, is_first and layout.is_aligned, where)
        for layout, dtype, is_first in zip(layouts, (*plan.dtypes, plan.dtype), begins, strict=True)
    )
    return _recipe.recipe(
        a,
        b,
        c,
        launch.shape[:-2],
        what=f"{plan.what}, c[{', '.join(f'{x.start}:{x.stop}' for x in launch.c)}]",
        gpu=gpu,
        precision=plan.precision,
        updates=schedule.pieces > 1,
        workspace_bytes=room,
    )


def _key(schedule: Schedule, launch: Launch) -> _Key:
    """Return what the kernels of a launch depend on."""
    layouts = schedule.layout(launch, 0), schedule.layout(launch, 1), schedule.c_layout(launch)
    return (launch.shape, launch.k, *(layout.is_aligned for layout in layouts))


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 10 else f"{1e3 * seconds:.0f} ms"


def _is_transpose(a: Any, b: Any) -> bool:
    """Say whether b is a's transpose in the same memory, both being matrices that go together."""
    place = a.__array_interface__["data"][0], b.__array_interface__["data"][0]
    steps = zip(a.shape, a.strides, b.strides[::-1], strict=True)
    return place[0] == place[1] and all(own == other for n, own, other in steps if n > 1)


def _carried(x: Array) -> Array:
    """Return types that NumPy does not know as integers of their size, which it copies freely."""
    return x.view(f"u{x.dtype.itemsize}") if is_extension(x.dtype) else x
