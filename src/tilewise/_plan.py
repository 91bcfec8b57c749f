"""From a request to a plan: what will run, why, how many bytes, which error bound, which bits.

Planning is pure: it sees shapes, dtypes and strides, never data, and does no work. Facts about the
machine come in as an argument. What all products have is decided here; the method, and why it is
the one, by whoever multiplies then: `_cpu`, `_gpu`, `_streamed` or ``outofcore.planning``.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from . import _memory
from ._cpu import OnCpu, plan_cpu
from ._operand import Operand, result_shape
from ._request import Request
from ._run import run
from .errors import DTypeError, OptionError
from .numerics import bounds, dtypes

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._streamed import Machine
    from .outofcore.pipeline import Progress
    from .outofcore.schedule import Tiling
    from .runtime.device import DeviceFacts

__all__ = ["How", "Method", "Plan", "make_plan"]

Method = Literal[
    "blas",
    "panels",
    "limbs",
    "or-and",
    "numpy",
    "hopper",
    "hopper_float32",
    "portable",
    "fp16x3",
    "tf32",
]

PRECISIONS = (None, "ieee", "tf32", "fp64-int8")


class How(Hashable, Protocol):
    """How a product is carried out: `OnCpu`, `OnGpu`, `Streams` and `OnFiles` say it in full."""

    def multiply(self, plan: Plan, a: Any, b: Any, out: Any) -> Any:
        """Return the product of host arrays, in ``out`` if there is one, which overlaps neither.

        Of `OnGpu` and `Streams`, some may be in device memory, complete, and ``out`` there too.
        """

    def lines(self, plan: Plan) -> list[str]:
        """Return what print(plan) says of it."""

    def to_dict(self, plan: Plan) -> dict[str, Any]:
        """Return what ``plan.to_dict()`` has of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What would run for a product, and why; call it to run it: ``plan(a, b, out=c)``.

    A plan is for operands of exactly these shapes, dtypes and strides. Calling it checks just that.
    """

    asked: Request
    dtypes: tuple[np.dtype[Any], np.dtype[Any]]  #: of a and b, in the machine's byte order
    shape: tuple[int, ...]  #: of the result
    dtype: np.dtype[Any]  #: of the result
    batch: tuple[int, ...]
    m: int
    n: int
    k: int
    device: str
    method: Method
    how: How
    compute_dtype: np.dtype[Any]  #: in which sums are held
    workspace_bytes: int
    held_bytes: int  #: result (unless out= takes it as it is computed) and workspace
    moved_bytes: int  #: operands read once and result written once, in main memory
    bound: bounds.Bound
    bits: str
    why: tuple[str, ...]
    verify_bytes: int = 0  #: of host memory, that the check takes; part of what the CPU holds
    runs_on: str = field(default="", compare=False)  #: the BLAS, or the GPU's name

    def __call__(
        self,
        a: Any,
        b: Any,
        /,
        *,
        out: Any = None,
        stream: Any = None,
        progress: Callable[[Progress], object] | None = None,
    ) -> Any:
        """Return ``a @ b`` as planned; host operands block until done, device operands do not.

        Parameters
        ----------
        a, b : array_like
            Operands of the planned shapes, dtypes and strides; files for a plan for files.
        out : array, optional
            Where to write the result: exactly its shape and dtype, any strides. A plan for files
            needs it, a path or store as `multiply_files` takes.
        stream : object, optional
            For operands in device memory; anything with ``__cuda_stream__``.
        progress : callable, optional
            For a plan for files: called with a `Progress` after each step.

        Raises
        ------
        ShapeError
            If an operand is not the one that was planned for.
        OptionError
            If ``progress`` is given for operands in memory, or ``stream`` for others than a
            device's.
        """
        if self.asked.a.where == "file":
            from .outofcore.pipeline import run_plan

            return run_plan(self, a, b, out, stream, progress)
        if progress is not None:
            raise OptionError("progress= is for products of files; this plan is for arrays")
        return run(self, a, b, out, stream)

    @property
    def a(self) -> Operand:
        return self.asked.a

    @property
    def b(self) -> Operand:
        return self.asked.b

    @property
    def precision(self) -> str | None:
        return self.asked.precision

    @property
    def verify(self) -> bool:
        return self.asked.verify

    @property
    def schedule(self) -> Tiling | None:
        """How a product of files is cut; None of arrays."""
        schedule: Tiling | None = getattr(self.how, "schedule", None)
        return schedule

    @property
    def what(self) -> str:
        """The product, in words."""
        return f"{self.a} @ {self.b} -> {self.shape} {self.dtype}"

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain numbers, strings and lists, for programs."""
        return {
            "a": self.a.to_dict(),
            "b": self.b.to_dict(),
            "result": {"shape": list(self.shape), "dtype": str(self.dtype)},
            "batch": list(self.batch),
            "m": self.m,
            "n": self.n,
            "k": self.k,
            "device": self.device,
            "method": self.method,
            "compute_dtype": str(self.compute_dtype),
            "precision": self.precision,
            "tiles": None,
            "workspace_bytes": self.workspace_bytes,
            "held_bytes": self.held_bytes,
            "moved_bytes": self.moved_bytes,
            "bound": {
                "factor": self.bound.factor,
                "underflow": self.bound.underflow,
                "rounding": self.bound.rounding,
                "text": self.bound.text,
            },
            "bits": self.bits,
            "why": list(self.why),
            "verify": self.verify,
            "verify_bytes": self.verify_bytes,
            "kernels": None,
            "schedule": None,
            "streams": None,
            **self.how.to_dict(self),
        }

    def __str__(self) -> str:
        lines = [
            f"product    {self.what}",
            f"runs on    {self.device}" + (f", {self.runs_on}" if self.runs_on else ""),
            f"method     {self.method}, sums in {self.compute_dtype}",
            *self.how.lines(self),
            f"error      {self.bound.text}",
            f"bits       {self.bits}",
        ]
        if self.verify:
            most = _memory.format_bytes(self.verify_bytes, is_needed=True)
            lines.append(
                f"verify     the result is checked before it is returned, in {most} at most"
            )
        lines += [("why        " if i == 0 else "           ") + w for i, w in enumerate(self.why)]
        return "\n".join(lines)

    def in_bytes(self) -> list[str]:
        """Return the lines that say what a product in memory holds and moves."""
        size = _memory.format_bytes
        budget = self.asked.memory_bytes
        where = self.device if self.device.startswith("cuda") else "this machine"
        allowed = "" if budget is None else f" of {size(budget)} allowed on {where}"
        held = f"{size(self.held_bytes)}{allowed} (workspace {size(self.workspace_bytes)})"
        return [
            f"memory     holds {held}",
            f"moves      {size(self.moved_bytes)}: operands read once, result written once",
        ]


def make_plan(
    asked: Request, *, gpu: DeviceFacts | None = None, machine: Machine | None = None
) -> Plan:
    """Return the plan for ``a @ b``, or raise before any work.

    Parameters
    ----------
    asked : Request
    gpu : DeviceFacts, optional
        The GPU to multiply on; without it, the CPU does.
    machine : Machine, optional
        What host operands are multiplied on, by one GPU or several; ``gpu`` is the first.

    Raises
    ------
    ShapeError, DTypeError, OptionError, BudgetError
        Naming the operand, and what to do.
    """
    a, b, verify = asked.a, asked.b, asked.verify
    a_dtype, b_dtype = dtypes.canonical(a.dtype, "a"), dtypes.canonical(b.dtype, "b")
    batch, m, n, k, shape = result_shape(a, b)
    promoted = dtypes.product_dtype(a_dtype, b_dtype)
    result = promoted if asked.dtype is None else dtypes.of_result(asked.dtype)
    _check_cast(promoted, result, a_dtype, b_dtype)
    _check_precision(asked.precision, promoted)
    compute = dtypes.accumulator(result, a_dtype, b_dtype)
    if verify and compute.type in (np.longdouble, np.clongdouble):
        raise DTypeError(
            f"verify=True checks types up to float64 and complex128, and {a.name or 'a'} @ "
            f"{b.name or 'b'} is summed in {compute}; leave it out, or convert the operands"
        )
    goes_to_host = asked.out is not None and asked.out.where == "memory"
    if goes_to_host and not asked.updates and (verify or any(asked.overlaps)):
        # A wrong result must not replace what is there, nor an operand change while it is read: out
        # gets a copy of the result.
        asked = asked._replace(out=None)
    result_bytes = math.prod(shape) * result.itemsize
    held_bytes = 0 if asked.out is not None else result_bytes
    plan = Plan(
        asked=asked,
        dtypes=(a_dtype, b_dtype),
        shape=shape,
        dtype=result,
        batch=batch,
        m=m,
        n=n,
        k=k,
        device="cpu" if gpu is None else f"cuda:{gpu.index}",
        method="numpy",
        how=OnCpu(),
        compute_dtype=compute,
        workspace_bytes=0,
        held_bytes=held_bytes,
        moved_bytes=a.nbytes + b.nbytes + result_bytes,
        bound=bounds.bound(k, a_dtype, b_dtype, result, device="cpu" if gpu is None else "cuda"),
        bits="exact: every device and every plan gives these",
        why=(),
    )
    budget = asked.memory_bytes
    is_streamed = gpu is not None and machine is not None and machine.streams(plan)
    if gpu is None:
        plan = plan_cpu(plan)
    else:
        from ._gpu import plan_gpu

        if not is_streamed:
            room = budget if budget is None or machine is None else machine.device_bytes[0]
            plan = plan_gpu(plan, gpu, room)
        else:
            from ._streamed import plan_streams

            assert machine is not None
            plan = plan_streams(plan_gpu(plan, gpu, None), machine)
    if asked.precision in ("tf32", "fp64-int8") and plan.method != asked.precision:
        less = f"precision {asked.precision!r} allows less; this gives the full bound"
        plan = replace(plan, why=(*plan.why, less))
    if verify:
        plan = _with_check(plan, held_bytes, is_streamed)
    is_on_host = gpu is None or machine is not None
    needed = max(plan.held_bytes, plan.verify_bytes + held_bytes * is_on_host)
    if gpu is not None and not is_on_host and held_bytes > gpu.memory_bytes:
        raise _memory.no_room(f"{shape} {result}", held_bytes, plan.device)
    if budget is not None and needed > budget:
        raise _memory.over_budget(
            f"{shape} {result}",
            held_bytes,
            needed - held_bytes,
            budget,
            verify=verify,
            overlaps=any(asked.overlaps),
        )
    return plan


def _with_check(plan: Plan, result_bytes: int, is_streamed: bool) -> Plan:
    """Count what a check takes of the host's memory, after all but pinned memory is free again."""
    from .numerics.room import Room

    a, b = plan.a, plan.b
    sizes, dtypes = (plan.m, plan.n, plan.k), (*plan.dtypes, plan.dtype)
    taken = Room.of(sizes, plan.batch, dtypes, plan.bound).nbytes
    held, out = plan.held_bytes, plan.asked.out
    taken += sum(x.span_bytes for x in (a, b, out) if x is not None and x.is_on_gpu)  # of copies
    if plan.device == "cpu":
        held = max(held, result_bytes + taken)
    elif out is None and a.is_on_gpu and b.is_on_gpu and not plan.asked.is_mixed:
        taken += math.prod(plan.shape) * plan.dtype.itemsize
    elif is_streamed:
        held += taken
    return replace(plan, verify_bytes=taken, held_bytes=held)


def _check_cast(
    promoted: np.dtype[Any], result: np.dtype[Any], a: np.dtype[Any], b: np.dtype[Any]
) -> None:
    if result == promoted or dtypes.is_narrow(result):
        kinds = "biuf" if dtypes.is_narrow(result) else "biufcV"
        if dtypes.is_narrow(promoted) or promoted.kind in kinds:
            return
    elif np.can_cast(dtypes.as_numpy(promoted), result, "same_kind"):
        return
    raise DTypeError(
        f"{a} @ {b} is {promoted}, which does not become {result} without changing its kind; "
        f"choose another dtype=, or convert the operands"
    )


def _check_precision(precision: str | None, promoted: np.dtype[Any]) -> None:
    if precision not in PRECISIONS:
        choices = ", ".join(repr(p) for p in PRECISIONS)
        raise OptionError(f"precision={precision!r} is not one of {choices}")
    if precision == "tf32" and promoted.char not in "fF":
        raise OptionError(f"precision='tf32' is for float32 and complex64, not {promoted}")
    if precision == "fp64-int8" and promoted.char not in "dD":
        raise OptionError(f"precision='fp64-int8' is for float64 and complex128, not {promoted}")
