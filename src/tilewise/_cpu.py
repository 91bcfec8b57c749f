"""Products on the CPU: NumPy's BLAS, and what BLAS lacks, computed with BLAS panel by panel.

Which of both, and why, is planned here; then it is carried out.

A tile of C is summed over pieces of K in ascending order. A piece of A and one of B are converted
to the type the sum is held in (a copy of a panel, never of an operand), multiplied by BLAS, and
added; the finished sum is rounded once into the result. Batches are multiplied many matrices at a
time while they are small, and broadcast operands are never expanded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ._operand import batch_slices, pick
from ._overlap import overlap
from .numerics import dtypes, limbs
from .outofcore.schedule import Tiles, choose_tiles

if TYPE_CHECKING:
    from ._plan import Method, Plan

__all__ = [
    "Epilogue",
    "OnCpu",
    "add_product",
    "finish",
    "held_per_element",
    "new_sum",
    "plan_cpu",
    "update",
]

Array = NDArray[Any]

#: Workspace of the panel methods where no budget says otherwise. Tiles of this size keep BLAS
#: at its full rate (docs/facts.md) and are small beside any matrix that is worth cutting.
_WORKSPACE_BYTES = 128 << 20

#: Products below this many multiplications are left to np.matmul for integers: the loop it has for
#: them costs less than the call of a faster method.
_SMALL_INTEGER_PRODUCT = 4096

#: Nanoseconds of integer products (docs/facts.md). NumPy's loop takes so long for each
#: multiplication, near elements or ones that are more than a cache line apart, and for each element
#: of C; limbs for each element of an operand and of C, and for a call.
_NUMPY_NEAR, _NUMPY_FAR, _NUMPY_RESULT = 1.2, 6.0, 3.0
_LIMBS_OPERAND, _LIMBS_RESULT, _LIMBS_CALL = 2.5, 8.0, 30_000.0
#: Of so many cache lines the first is still in the cache when the last has been read.
_LINE_BYTES, _CACHED_LINES = 64, 512


@dataclass(frozen=True, slots=True)
class Epilogue:
    """What becomes of a finished sum: ``out = alpha·sum + beta·out``."""

    alpha: Any = 1
    beta: Any = 0

    @property
    def is_plain(self) -> bool:
        return bool(self.alpha == 1 and self.beta == 0)


PLAIN = Epilogue()


@dataclass(frozen=True, slots=True)
class OnCpu:
    """How NumPy multiplies arrays in memory: tile by tile, or all in one call of np.matmul."""

    tiles: Tiles | None = None  #: None where one call does all
    matrices_at_once: int = 0  #: of a batch, computed by tiles, or by BLAS apart from the result

    @np.errstate(all="ignore")  # Inf and NaN are results here, not news
    def multiply(
        self, plan: Plan, a: Array, b: Array, out: Array | None, epilogue: Epilogue = PLAIN
    ) -> Any:
        """Return ``a @ b`` computed as ``plan`` says, in ``out`` if there is one.

        ``out`` must not overlap an operand. A product of two vectors comes back as a scalar.
        """
        if plan.method == "blas":
            if out is None or not self.matrices_at_once:
                return np.matmul(a, b, out=out)
            return self._apart(plan, a, b, out)
        return self._by_panels(plan, a, b, out, epilogue)

    def lines(self, plan: Plan) -> list[str]:
        """Return what print(plan) says of it."""
        t = self.tiles
        if t is None:
            return plan.in_bytes()
        count = t.count * math.prod(plan.batch)
        cut = f"{t.tile_m} x {t.tile_n} of C, {t.tile_k} of K at a time; {count} in all"
        return [f"tiles      {cut}", *plan.in_bytes()]

    def to_dict(self, plan: Plan) -> dict[str, Any]:
        t = self.tiles
        if t is None:
            return {}
        sides = {"tile_m": t.tile_m, "tile_n": t.tile_n, "tile_k": t.tile_k}
        return {"tiles": {**sides, "count": t.count * math.prod(plan.batch)}}

    def _apart(self, plan: Plan, a: Array, b: Array, out: Array) -> Array:
        """Multiply by BLAS, and copy to where it cannot write, some matrices at a time."""
        a, b, c = _as_matrices(a, b, out)
        for at in batch_slices(plan.batch, self.matrices_at_once):
            np.copyto(c[at], np.matmul(a[pick(at, a.shape[:-2])], b[pick(at, b.shape[:-2])]))
        return out

    def _by_panels(
        self, plan: Plan, a: Array, b: Array, out: Array | None, epilogue: Epilogue
    ) -> Any:
        result = np.empty(plan.shape, plan.dtype) if out is None else out
        a, b, c = _as_matrices(a, b, result)
        if self.tiles is None:
            a, b = (x.astype(plan.compute_dtype, copy=False) for x in (a, b))
            if epilogue.is_plain and c.dtype == plan.compute_dtype and c.flags.aligned:
                np.matmul(a, b, out=c)
            else:
                finish(plan, np.matmul(a, b), c, epilogue)
        elif c.size:
            self._by_tiles(plan, self.tiles, a, b, c, epilogue)
        return result if out is not None or plan.shape else result[()]

    def _by_tiles(
        self, plan: Plan, tiles: Tiles, a: Array, b: Array, c: Array, epilogue: Epilogue
    ) -> None:
        for at in batch_slices(plan.batch, self.matrices_at_once):
            a_some, b_some = a[pick(at, a.shape[:-2])], b[pick(at, b.shape[:-2])]
            for rows, columns in tiles:
                c_tile = c[at][..., rows, columns]
                total = new_sum(plan, c_tile.shape)
                for i, piece in enumerate(tiles.pieces()):
                    add_product(
                        plan,
                        total,
                        a_some[..., rows, piece],
                        b_some[..., piece, columns],
                        is_first=i == 0,
                    )
                finish(plan, total, c_tile, epilogue)


def plan_cpu(plan: Plan) -> Plan:
    """Complete a plan by how the CPU carries it out; pure."""
    why: list[str] = []
    method = _choose_method(plan, why)
    room, budget = _WORKSPACE_BYTES, plan.asked.memory_bytes
    if budget is not None:
        room = min(room, max(budget - plan.held_bytes, 0))
    tiles = None
    matrices_at_once = workspace = 0
    if method == "blas" and not _is_written_by_blas(plan):
        matrix_bytes = plan.m * plan.n * plan.dtype.itemsize
        left = math.inf if budget is None else budget - plan.held_bytes
        if matrix_bytes > left:
            method = "panels"
            why = ["memory= leaves no room for a matrix that BLAS can write: panels are copied"]
        else:
            matrices_at_once = max(min(room // matrix_bytes, math.prod(plan.batch)), 1)
            workspace = matrices_at_once * matrix_bytes
            why.append(
                "out: strides, alignment or byte order that BLAS cannot write; a copy goes there"
            )
    in_one_call = method == "numpy" and plan.compute_dtype.kind in "biu"
    if in_one_call:
        workspace = _whole_bytes(plan)
        if budget is not None and workspace > budget - plan.held_bytes:
            method = "or-and" if plan.compute_dtype.kind == "b" else "limbs"
            workspace, in_one_call = 0, False
            why = ["memory= leaves no room for whole operands in the type of the sums"]
    if method != "blas" and not in_one_call:
        panel_bytes, tile_bytes = held_per_element(method, plan.compute_dtype)
        tiles = choose_tiles(
            plan.m,
            plan.n,
            plan.k,
            panel_bytes=panel_bytes,
            tile_bytes=tile_bytes,
            budget_bytes=room,
        )
        calls = math.inf
        if tiles is None:
            workspace = 2 * panel_bytes + tile_bytes
        else:
            pieces = -(-plan.k // tiles.tile_k)
            is_whole = tiles.count == 1 and pieces <= 1
            matrices_at_once = room // tiles.workspace_bytes if is_whole else 1
            matrices_at_once = max(min(matrices_at_once, math.prod(plan.batch)), 1)
            workspace = matrices_at_once * tiles.workspace_bytes
            calls = math.prod(plan.batch) * tiles.count * pieces / matrices_at_once
        if method in ("limbs", "or-and") and _is_for_numpy(plan) and _is_quick(plan, calls):
            method, tiles, matrices_at_once, workspace = "numpy", None, 0, 0
            why = ["memory= leaves so little that NumPy's own loop is quicker, which takes nothing"]
    bits = plan.bits
    if method == "blas":
        bits = "this plan: np.matmul's; same BLAS and threads, same bits"
    elif plan.compute_dtype.kind not in "biu":
        bits = "this plan: same BLAS and threads, same bits"
    return replace(
        plan,
        method=method,
        how=OnCpu(tiles, matrices_at_once),
        workspace_bytes=workspace,
        held_bytes=plan.held_bytes + workspace,
        bits=bits,
        why=tuple(why),
        runs_on=_blas(),
    )


def update(plan: Plan, a: Array, b: Array, c: Array, alpha: Any, beta: Any) -> None:
    """Compute ``c = alpha·a·b + beta·c``; here c may overlap an operand, which is copied then."""
    if alpha == 0:  # BLAS's rule: the product is not formed, so a NaN in it does not show
        _scale(plan, c, beta)
        return
    if overlap(c, a):
        a = _copied(a)
    if overlap(c, b):
        b = _copied(b)
    assert isinstance(plan.how, OnCpu)
    plan.how.multiply(plan, a, b, c, Epilogue(alpha, beta))


def new_sum(plan: Plan, shape: tuple[int, ...]) -> Array:
    """Return zeros to sum products in: int64 for integers, float32 counts for bool."""
    if plan.method == "limbs" or plan.compute_dtype.kind in "iu":
        return np.zeros(shape, np.int64)
    return np.zeros(shape, np.float32 if plan.compute_dtype.kind == "b" else plan.compute_dtype)


def add_product(plan: Plan, total: Array, a: Array, b: Array, *, is_first: bool) -> None:
    """Add the product of two panels to ``total``, which is still zero if ``is_first``."""
    if total.dtype == np.int64:
        limbs.multiply_add(a, b, total, 8 * plan.compute_dtype.itemsize)
        return
    a, b = _converted(a, total.dtype), _converted(b, total.dtype)
    if is_first:
        np.matmul(a, b, out=total)
    else:
        np.add(total, np.matmul(a, b), out=total)


def finish(plan: Plan, total: Array, out: Array, epilogue: Epilogue = PLAIN) -> None:
    """Round the finished sum once into ``out``, after ``alpha`` and ``beta``."""
    if plan.compute_dtype.kind == "b":
        if epilogue.is_plain:
            np.greater(total, 0, out=out, casting="unsafe")
            return
        total = (total > 0).astype(np.int64)
    if not epilogue.is_plain:
        if total.dtype.kind in "iu":
            total = total.astype(np.int64)  # in which alpha and beta are, and everything wraps
        kind = total.dtype.type
        total = total * kind(epilogue.alpha)
        if epilogue.beta != 0:
            total += out.astype(total.dtype) * kind(epilogue.beta)
    np.copyto(out, total, casting="unsafe")


def _scale(plan: Plan, out: Array, beta: Any) -> None:
    """Compute ``out = beta·out`` in the type of the plan's sums; with 0 out is not read."""
    if beta == 0:
        out[...] = 0
        return
    with np.errstate(all="ignore"):
        kind = new_sum(plan, ()).dtype
        np.multiply(out, kind.type(beta), out=out, dtype=kind, casting="unsafe")


def held_per_element(method: Method, compute: np.dtype[Any]) -> tuple[int, int]:
    """Return the bytes held for each element of a panel, and of a tile of C."""
    if method == "limbs":
        # The panel in int64, what is left of it, and up to four limbs; the sum and two products.
        return 6 * 8, 3 * 8
    item = max(compute.itemsize, 4)
    return 2 * item, 2 * item


def _copied(x: Array) -> Array:
    """Return a copy, in which an axis that is repeated still is."""
    steps = zip(x.shape, x.strides, strict=True)
    single = tuple(slice(0, 1) if n > 1 and not step else slice(None) for n, step in steps)
    return np.broadcast_to(x[single].copy(), x.shape)


def _as_matrices(a: Array, b: Array, c: Array) -> tuple[Array, Array, Array]:
    """Return vectors, and the result of them, as the matrices they are multiplied as."""
    if a.ndim == 1:
        a, c = a[np.newaxis, :], np.expand_dims(c, -1 if b.ndim == 1 else -2)
    if b.ndim == 1:
        b, c = b[:, np.newaxis], np.expand_dims(c, -1)
    return a, b, c


def _is_written_by_blas(plan: Plan) -> bool:
    """Say whether the place of the result, if there is one, is as BLAS writes it."""
    out = plan.asked.out
    if out is None or out.shape != plan.shape or 0 in plan.shape:
        return True
    return out.as_result(plan.a, plan.b, plan.batch).is_plain


def _whole_bytes(plan: Plan) -> int:
    """Return what one call of np.matmul takes besides operands and result: all in one type."""
    kind = plan.compute_dtype
    converted = sum(
        x.nbytes // x.dtype.itemsize * kind.itemsize
        for x, dtype in zip((plan.a, plan.b), plan.dtypes, strict=True)
        if dtype != kind or not x.dtype.isnative
    )
    return converted + (0 if _is_written_as_it_is(plan) else math.prod(plan.shape) * kind.itemsize)


def _is_written_as_it_is(plan: Plan) -> bool:
    """Say whether NumPy's loop writes the result to its place, and not a copy first."""
    out = plan.asked.out
    is_there = out is None or not out.shape or (out.aligned and out.dtype == plan.dtype)
    return is_there and not plan.asked.updates


def _is_quick_in_numpy(plan: Plan) -> bool:
    """Say whether NumPy's own loop multiplies integers or bools sooner than BLAS does.

    It does where an element is used so seldom that to convert it costs more: products of vectors,
    of short K, of small matrices. That is for what it takes without a copy of whole operands.
    """
    work = math.prod(plan.batch) * plan.m * plan.n * plan.k
    return 0 < work <= _SMALL_INTEGER_PRODUCT or (_is_for_numpy(plan) and _is_quick(plan))


def _is_for_numpy(plan: Plan) -> bool:
    """Say whether NumPy's loop reads both operands, and writes the result, without any copy."""
    return _is_written_as_it_is(plan) and all(
        x.dtype == plan.compute_dtype and x.aligned and x.where == "memory" and 0 not in x.shape
        for x in (plan.a, plan.b)
    )


def _is_quick(plan: Plan, calls: float = 1) -> bool:
    """Say whether NumPy's loop takes less time than so many calls for the limbs of all tiles."""
    a_step, b_step = plan.a.strides[-1], plan.b.strides[max(len(plan.b.strides) - 2, 0)]
    is_far = max(abs(a_step), abs(b_step)) > _LINE_BYTES and plan.k > _CACHED_LINES
    matrices, results = math.prod(plan.batch), plan.m * plan.n
    by_numpy = results * (plan.k * (_NUMPY_FAR if is_far else _NUMPY_NEAR) + _NUMPY_RESULT)
    by_limbs = _LIMBS_OPERAND * (plan.m + plan.n) * plan.k + _LIMBS_RESULT * results
    return matrices * by_numpy < matrices * by_limbs + calls * _LIMBS_CALL


def _choose_method(plan: Plan, why: list[str]) -> Method:
    a, b, result, compute = plan.a, plan.b, plan.dtype, plan.compute_dtype
    a_dtype, b_dtype = plan.dtypes
    if compute not in dtypes.BLAS_DTYPES and compute.kind in "fc":
        why.append(f"no BLAS has {compute}; NumPy's own loop multiplies it")
        return "numpy"
    if compute.kind in "biu" and _is_quick_in_numpy(plan):
        why.append("elements are used too seldom for anything but NumPy's own loop to pay")
        return "numpy"
    if compute.kind == "b":
        why.append(
            "bool is or-and: a float32 product counts the hits, which are then compared to 0"
        )
        return "or-and"
    if compute.kind in "iu":
        why.append(
            "BLAS has no integers: exact products of limbs in floating-point BLAS, 10 to "
            "60 times as fast as NumPy's own loop"
        )
        return "limbs"
    if a_dtype == b_dtype == result == compute:
        if plan.asked.updates:
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
    rounded = "" if result == compute else f"; one rounding to {result}"
    why.append(
        f"panels are converted to {compute}, multiplied by BLAS and summed in {compute}{rounded}"
    )
    return "panels"


@lru_cache(maxsize=1)
def _blas() -> str:
    """Say which BLAS NumPy was built with; how many threads it takes is its own setting."""
    try:
        blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    except Exception:  # an older NumPy, or one built without this record
        return "NumPy's BLAS"
    return f"NumPy's BLAS ({blas.get('name', 'unknown')} {blas.get('version', '')})".replace(
        " )", ")"
    )


def _converted(panel: Array, dtype: np.dtype[Any]) -> Array:
    """Return the panel as BLAS reads it, of type ``dtype``: itself if it is so, or a copy."""
    if panel.dtype == dtype:
        row, column = panel.strides[-2:]
        item = dtype.itemsize
        by_rows = column == item and row >= item * panel.shape[-1] and row % item == 0
        by_columns = row == item and column >= item * panel.shape[-2] and column % item == 0
        if (by_rows or by_columns) and panel.flags.aligned:
            return panel
    elif panel.dtype.name == "bfloat16":
        # bfloat16 is the upper half of a float32; shifting the bits is faster than a cast.
        wide = panel.view(np.uint16).astype(np.uint32)
        np.left_shift(wide, 16, out=wide)
        return wide.view(np.float32).astype(dtype, copy=False)
    return panel.astype(dtype, order="C")
