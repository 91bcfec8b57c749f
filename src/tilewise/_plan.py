"""From a problem to a plan: what will run, why, how many bytes, which error bound, which bits.

Planning is pure: it sees shapes, dtypes and strides, never data, and does no work. Facts about the
machine come in as an argument. Every "why this method? why these tiles?" is answered here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from . import _memory
from ._arrays import check_out
from ._operand import Operand, c_strides, result_shape
from ._run import run
from .errors import DTypeError, OptionError
from .numerics import bounds, dtypes
from .outofcore.schedule import Tiles, choose_tiles

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._gpu import Recipe
    from ._streamed import Machine, Streams
    from .outofcore.pipeline import Progress
    from .outofcore.schedule import Schedule
    from .runtime.device import DeviceFacts

__all__ = ["Plan", "held_per_element", "make_plan"]

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

#: Workspace of the panel methods where no budget says otherwise. Tiles of this size keep BLAS
#: at its full rate (docs/facts.md) and are small beside any matrix that is worth cutting.
DEFAULT_WORKSPACE_BYTES = 128 << 20

#: Products below this many multiplications are left to np.matmul for integers: the loop it has for
#: them costs less than the call of a faster method.
_SMALL_INTEGER_PRODUCT = 4096

PRECISIONS = (None, "ieee", "tf32", "fp64-int8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What would run for a product, and why; call it to run it: ``plan(a, b, out=c)``.

    A plan is for operands of exactly these shapes, dtypes and strides. Calling it checks just that.
    """

    a: Operand
    b: Operand
    shape: tuple[int, ...]  #: of the result
    dtype: np.dtype[Any]  #: of the result
    batch: tuple[int, ...]
    m: int
    n: int
    k: int
    device: str
    method: Method
    compute_dtype: np.dtype[Any]  #: in which sums are held
    precision: str | None
    tiles: Tiles | None  #: None where one call of np.matmul does all
    matrices_at_once: int  #: of a batch
    workspace_bytes: int
    held_bytes: int  #: result (unless out= takes it as it is computed) and workspace
    moved_bytes: int  #: operands read once and result written once, in main memory
    bound: bounds.Bound
    bits: str
    why: tuple[str, ...]
    verify: bool = False
    runs_on: str = field(default="", compare=False)  #: the BLAS, or the GPU's name
    schedule: Schedule | None = None  #: how a product of files is cut; None in memory
    streams: Streams | None = None  #: what of host operands goes to which GPU when
    recipe: Recipe | None = None  #: what is launched; None on the CPU
    out: Operand | None = None  #: where a GPU writes, if that was given

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
        if self.a.where == "file":
            from .outofcore.pipeline import run_plan

            return run_plan(self, a, b, out, stream, progress)
        if progress is not None:
            raise OptionError("progress= is for products of files; this plan is for arrays")
        return run(self, a, b, out, stream)

    @property
    def what(self) -> str:
        """The product, in words."""
        return f"{self.a} @ {self.b} -> {self.shape} {self.dtype}"

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain numbers, strings and lists, for programs."""
        return {
            "a": _operand_dict(self.a),
            "b": _operand_dict(self.b),
            "result": {"shape": list(self.shape), "dtype": str(self.dtype)},
            "batch": list(self.batch),
            "m": self.m,
            "n": self.n,
            "k": self.k,
            "device": self.device,
            "method": self.method,
            "compute_dtype": str(self.compute_dtype),
            "precision": self.precision,
            "tiles": None
            if self.tiles is None
            else {
                "tile_m": self.tiles.tile_m,
                "tile_n": self.tiles.tile_n,
                "tile_k": self.tiles.tile_k,
                "count": self.tiles.count * math.prod(self.batch),
            },
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
            "kernels": None
            if self.recipe is None
            else {
                "family": self.recipe.family,
                "launches": [step.kernel for step in self.recipe.steps],
                "expected_us": self.recipe.expected_us,
            },
            "schedule": None if self.schedule is None else self.schedule.to_dict(),
            "streams": None if self.streams is None else self.streams.to_dict(),
        }

    def __str__(self) -> str:
        lines = [
            f"product    {self.what}",
            f"runs on    {self.device}" + (f", {self.runs_on}" if self.runs_on else ""),
            f"method     {self.method}, sums in {self.compute_dtype}",
            *([str(cut)] if (cut := self.schedule or self.streams) else self._in_memory()),
            f"error      {self.bound.text}",
            f"bits       {self.bits}",
        ]
        if self.recipe is not None:
            names = ", ".join(dict.fromkeys(step.kernel for step in self.recipe.steps)) or "none"
            lines.insert(3, f"kernels    {names}; about {self.recipe.expected_us:.0f} µs")
        if self.verify:
            lines.append("verify     the result is checked before it is returned")
        lines += [("why        " if i == 0 else "           ") + w for i, w in enumerate(self.why)]
        return "\n".join(lines)

    def _in_memory(self) -> list[str]:
        size = _memory.format_bytes
        lines = [
            f"memory     holds {size(self.held_bytes)} (workspace {size(self.workspace_bytes)})",
            f"moves      {size(self.moved_bytes)}: operands read once, result written once",
        ]
        if self.tiles is not None:
            t = self.tiles
            lines.insert(
                0,
                f"tiles      {t.tile_m} x {t.tile_n} of C, {t.tile_k} of K at a time; "
                f"{t.count * math.prod(self.batch)} in all",
            )
        return lines


def make_plan(
    a: Operand,
    b: Operand,
    *,
    dtype: np.dtype[Any] | None = None,
    precision: str | None = None,
    memory_bytes: int | None = None,
    out: Operand | None = None,
    updates: bool = False,
    verify: bool = False,
    gpu: DeviceFacts | None = None,
    machine: Machine | None = None,
    blas: str = "",
) -> Plan:
    """Return the plan for ``a @ b``, or raise before any work.

    Parameters
    ----------
    a, b : Operand
        The operands, described.
    dtype : numpy.dtype, optional
        Result type, computed without overflow on the way.
    precision : {None, "ieee", "tf32", "fp64-int8"}
        Less than the default promise is allowed only by name; the plan says what is given.
    memory_bytes : int, optional
        What tilewise may hold where it computes: the result, unless ``out`` takes it as it is
        computed, and its workspace; of host operands that a GPU multiplies, their copies or pinned
        memory too.
    out : Operand, optional
        Where the result goes, if the caller says.
    updates : bool
        Whether the result is scaled and added to what is there, as `gemm` does.
    gpu : DeviceFacts, optional
        The GPU to multiply on; without it, the CPU does.
    machine : Machine, optional
        What host operands are multiplied on, by one GPU or several; ``gpu`` is the first.
    blas : str
        What to call the CPU's BLAS.

    Raises
    ------
    ShapeError, DTypeError, OptionError, BudgetError
        Naming the operand, and what to do.
    """
    a_dtype, b_dtype = dtypes.canonical(a.dtype, "a"), dtypes.canonical(b.dtype, "b")
    batch, m, n, k, shape = result_shape(a, b)
    promoted = dtypes.product_dtype(a_dtype, b_dtype)
    result = promoted if dtype is None else dtypes.canonical(dtype, "dtype=")
    _check_cast(promoted, result, a_dtype, b_dtype)
    _check_precision(precision, promoted)
    compute = dtypes.accumulator(result, a_dtype, b_dtype)
    if verify and compute.type in (np.longdouble, np.clongdouble):
        raise DTypeError(
            f"verify=True checks types up to float64 and complex128, and {a.name or 'a'} @ "
            f"{b.name or 'b'} is summed in {compute}; leave it out, or convert the operands"
        )
    if verify and out is not None and out.where == "memory":
        out = None  # which gets a copy of the result once it is checked
    result_bytes = math.prod(shape) * result.itemsize
    held_bytes = 0 if out is not None else result_bytes
    plan = Plan(
        a=a,
        b=b,
        shape=shape,
        dtype=result,
        batch=batch,
        m=m,
        n=n,
        k=k,
        device="cpu" if gpu is None else f"cuda:{gpu.index}",
        method="numpy",
        compute_dtype=compute,
        precision=precision,
        tiles=None,
        matrices_at_once=0,
        workspace_bytes=0,
        held_bytes=held_bytes,
        moved_bytes=a.nbytes + b.nbytes + result_bytes,
        bound=bounds.bound(k, a_dtype, b_dtype, result, device="cpu" if gpu is None else "cuda"),
        bits="exact: every device and every plan gives these",
        why=(),
        verify=verify,
        runs_on=blas if gpu is None else gpu.name,
    )
    if gpu is None:
        plan = _on_cpu(plan, a_dtype, b_dtype, updates, memory_bytes)
    elif machine is None or not machine.streams(plan):
        plan = _on_gpu(plan, a_dtype, b_dtype, updates, memory_bytes, out, gpu)
    else:
        from ._streamed import plan_streams

        plan = _on_gpu(plan, a_dtype, b_dtype, updates, None, out, gpu)
        plan = plan_streams(
            plan, machine, dtypes=(a_dtype, b_dtype), memory_bytes=memory_bytes, out=out
        )
    if precision in ("tf32", "fp64-int8") and plan.method != precision:
        less = f"precision {precision!r} allows less; this gives the full bound"
        plan = replace(plan, why=(*plan.why, less))
    if memory_bytes is not None and plan.held_bytes > memory_bytes:
        rest_bytes = plan.held_bytes - held_bytes
        raise _memory.over_budget(
            f"{shape} {result}", held_bytes, rest_bytes, memory_bytes, verify=verify
        )
    return plan


def _on_cpu(
    plan: Plan,
    a_dtype: np.dtype[Any],
    b_dtype: np.dtype[Any],
    updates: bool,
    memory_bytes: int | None,
) -> Plan:
    why: list[str] = []
    method = _choose_method(plan, a_dtype, b_dtype, updates, why)
    room = DEFAULT_WORKSPACE_BYTES
    if memory_bytes is not None:
        room = min(room, max(memory_bytes - plan.held_bytes, 0))
    tiles = None
    matrices_at_once = workspace = 0
    if method in ("panels", "limbs", "or-and"):
        panel_bytes, tile_bytes = held_per_element(method, plan.compute_dtype)
        tiles = choose_tiles(
            plan.m,
            plan.n,
            plan.k,
            panel_bytes=panel_bytes,
            tile_bytes=tile_bytes,
            budget_bytes=room,
        )
        if tiles is None:
            workspace = 2 * panel_bytes + tile_bytes
        else:
            is_whole = tiles.count == 1 and tiles.tile_k >= plan.k
            matrices_at_once = room // tiles.workspace_bytes if is_whole else 1
            matrices_at_once = max(min(matrices_at_once, math.prod(plan.batch)), 1)
            workspace = matrices_at_once * tiles.workspace_bytes
    bits = plan.bits
    if method == "blas":
        bits = "this plan: np.matmul's; same BLAS and threads, same bits"
    elif plan.compute_dtype.kind not in "biu":
        bits = "this plan: same BLAS and threads, same bits"
    return replace(
        plan,
        method=method,
        tiles=tiles,
        matrices_at_once=matrices_at_once,
        workspace_bytes=workspace,
        held_bytes=plan.held_bytes + workspace,
        bits=bits,
        why=tuple(why),
    )


def _on_gpu(
    plan: Plan,
    a_dtype: np.dtype[Any],
    b_dtype: np.dtype[Any],
    updates: bool,
    memory_bytes: int | None,
    out: Operand | None,
    gpu: DeviceFacts,
) -> Plan:
    from ._gpu import recipe

    held = 0
    operands = []
    for x, dtype in ((plan.a, a_dtype), (plan.b, b_dtype)):
        if x.where == "memory":
            x = x.copied(dtype)
            held += x.stored_bytes
        operands.append(x)
    if out is not None and out.where != "memory":
        check_out(out, plan.shape, plan.dtype, "c" if updates else "out", True)
        plan = replace(plan, out=out)
    else:
        # A result that goes back to the host is held on the GPU whoever holds it there.
        held += math.prod(plan.shape) * plan.dtype.itemsize
        out = Operand(plan.shape, plan.dtype, c_strides(plan.shape, plan.dtype.itemsize))
    strides = list(out.strides)
    if len(plan.b.shape) == 1:
        strides.append(0)
    if len(plan.a.shape) == 1:
        strides.insert(len(strides) - 1, 0)
    c = replace(out, shape=(*plan.batch, plan.m, plan.n), strides=tuple(strides))
    made = recipe(
        operands[0].as_matrix(is_row=True),
        operands[1].as_matrix(is_row=False),
        c,
        plan.batch,
        what=plan.what,
        gpu=gpu,
        precision=plan.precision,
        updates=updates,
        workspace_bytes=None if memory_bytes is None else max(memory_bytes - held, 0),
    )
    bits = "K alone: C[i, j] depends on row i of A, column j of B and K, and on nothing else"
    why = [made.why] if made.why else []
    if (
        plan.compute_dtype.kind == "f"
        and gpu.fp64_rate < 1 / 8
        and plan.compute_dtype.itemsize == 8
    ):
        why.append(
            f"float64 runs at 1/{round(1 / gpu.fp64_rate)} of float32's rate on {gpu.name}, and "
            "that rate is the limit; float32 operands run at the full one, with a bound of "
            f"{bounds.bound(plan.k, *[np.dtype('f4')] * 3).text}"
        )
    bound = plan.bound
    if made.scheme == "tf32":
        bound = bounds.bound(plan.k, a_dtype, b_dtype, plan.dtype, precision="tf32", device="cuda")
    if made.scheme is not None:
        parts = "three products" if made.scheme == "fp16x3" else "one product"
        why.append(
            f"each 64 of K is {parts} of float16 on the tensor cores, within the bound wherever "
            "rows and columns are fit for it; those that are not are found there, and recomputed "
            "by chains of FMAs"
        )
    return replace(
        plan,
        method=made.scheme or made.family,
        bound=bound,
        recipe=made,
        workspace_bytes=made.workspace_bytes,
        held_bytes=held + made.workspace_bytes,
        bits=plan.bits if plan.compute_dtype.kind in "biu" else bits,
        why=tuple(why),
    )


def _choose_method(
    plan: Plan, a_dtype: np.dtype[Any], b_dtype: np.dtype[Any], updates: bool, why: list[str]
) -> Method:
    a, b, result, compute = plan.a, plan.b, plan.dtype, plan.compute_dtype
    if compute not in dtypes.BLAS_DTYPES and compute.kind in "fc":
        why.append(f"no BLAS has {compute}; NumPy's own loop multiplies it")
        return "numpy"
    if compute.kind == "b":
        why.append(
            "bool is or-and: a float32 product counts the hits, which are then compared to 0"
        )
        return "or-and"
    if compute.kind in "iu":
        if math.prod(plan.batch) * plan.m * plan.n * plan.k <= _SMALL_INTEGER_PRODUCT:
            why.append("too small for anything but NumPy's own loop to pay")
            return "numpy"
        why.append(
            "BLAS has no integers: exact products of limbs in floating-point BLAS, 10 to "
            "60 times as fast as NumPy's own loop"
        )
        return "limbs"
    if a_dtype == b_dtype == result == compute:
        if updates:
            why.append("each tile of the product is scaled and added to c as it is finished")
            return "panels"
        if a.is_plain and b.is_plain:
            why.append("both operands are as BLAS reads them: one call, nothing copied")
            return "blas"
        named = ((a.name or "a", a), (b.name or "b", b))
        odd = " and ".join(name for name, x in named if not x.is_plain)
        why.append(
            f"{odd}: strides, alignment or byte order that BLAS cannot read; panels are "
            "copied, never a whole operand"
        )
        return "panels"
    why.append(
        f"panels are converted to {compute}, multiplied by BLAS and summed in {compute}; "
        f"one rounding to {result}"
    )
    return "panels"


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


def held_per_element(method: Method, compute: np.dtype[Any]) -> tuple[int, int]:
    """Return the bytes held for each element of a panel, and of a tile of C."""
    if method == "limbs":
        # The panel in int64, what is left of it, and up to four limbs; the sum and two products.
        return 6 * 8, 3 * 8
    item = max(compute.itemsize, 4)
    return 2 * item, 2 * item


def _operand_dict(x: Operand) -> dict[str, Any]:
    return {"shape": list(x.shape), "dtype": str(x.dtype), "strides": list(x.strides)}
