"""Products of dask arrays: a lazy dask array, whose every task is a product of two chunks.

Scheduling, retries, spilling and clusters are dask's. What it is given is one task for each chunk
of C and each piece of K, which multiplies a chunk of A by one of B and adds the sum that the task
for the piece before has left. So no task holds more than a chunk of A, one of B, two of C (a third,
rounded, in the last one) and what tilewise multiplies with, however long K is; and the pieces of K
are added in order, so that no bit depends on which task was done first, or how often.

Sums are held in the type that tilewise sums in, and the last task rounds them once. A chain of
partial sums keeps to the error bound for K (docs/numerics.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from typing import Any

import dask.array as da
import numpy as np
from dask.array.utils import meta_from_array
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph
from dask.task_spec import Task, TaskRef

from . import _api, _arrays, _memory
from ._devices import device_names
from ._operand import Operand, c_strides
from ._plan import Plan, make_plan
from ._request import request
from .errors import BudgetError, DTypeError, OptionError, ShapeError

__all__ = ["matmul"]

#: Sizes of the chunks along one axis.
Chunks = tuple[int, ...]


def matmul(
    a: Any,
    b: Any,
    *,
    out: Any = None,
    dtype: Any = None,
    precision: Any = None,
    stream: Any = None,
    memory: Any = None,
    devices: Any = None,
    verify: Any = False,
) -> da.Array:
    """Return ``a @ b``, of which at least one is a dask array, as one; nothing is computed.

    Parameters
    ----------
    a : array_like (..., m, k) or (k,)
    b : array_like (..., k, n) or (k,)
        As `tilewise.matmul` takes them. What is no dask array becomes one (by
        ``dask.array.from_array``, which copies it), cut along K as the other is. Where chunks of
        both differ along K or a batch axis, both are cut at the boundaries of either: no chunk
        becomes larger.
    out, stream
        Refused: nothing is written, or put on a stream, before dask computes.
    dtype, precision, memory, devices, verify
        As of `tilewise.matmul`, for each task: what it may hold beside the chunks it is given,
        where it multiplies, whether it checks its product. Whether there is such a device where it
        runs, it finds out there.

    Returns
    -------
    dask.array.Array (..., m, n)
        In a's chunks of rows by b's chunks of columns, each of the kind that the product of two
        chunks is.

    Raises
    ------
    ShapeError, DTypeError, OptionError, BudgetError
        At the call, naming the operand.
    """
    memory = _checked_options(out, stream, memory)
    names = None if devices is None else device_names(devices)
    a, b = _taken(a, "a"), _taken(b, "b")
    asked: dict[str, Any] = {"dtype": dtype, "precision": precision, "verify": verify}
    plan = make_plan(request(_described(a), _described(b), None, **asked))
    a, b = _as_dask(a, b, (-1, -2)), _as_dask(b, a, (-2, -1))
    meta = _meta(a, b, plan)
    a, b = _aligned(a, b)
    work = _Work(plan.compute_dtype, plan.dtype, plan.precision, memory, names, plan.verify)
    _check_room(a, b, work)

    batch = _batch_chunks(a, b)
    token = tokenize(a.name, b.name, work, work.dtype.name)  # to dask most float8 types are one
    tasks = _tasks(token, a, b, tuple(map(len, batch)), work)
    graph = HighLevelGraph.from_collections(f"matmul-{token}", tasks, dependencies=[a, b])
    chunks = (*batch, *a.chunks[-2:-1], *(b.chunks[-1:] if b.ndim > 1 else ()))
    return da.Array(graph, f"matmul-{token}", chunks, meta=meta)


@dataclass(frozen=True, slots=True)
class _Work:
    """What every task of a product does; plain values, which travel to wherever it runs."""

    sum_dtype: np.dtype[Any]
    dtype: np.dtype[Any]
    precision: str | None
    memory: int | str | None
    devices: tuple[str, ...] | None
    verify: bool

    def __call__(self, a: Any, b: Any, total: Any, is_last: bool) -> Any:
        """Return ``total + a @ b``, rounded if it is the last; ``total`` is None for the first.

        What is given is never written to: other tasks read it, and this one may be done again.
        """
        is_only = total is None and is_last
        part = _api.matmul(
            a,
            b,
            dtype=self.dtype if is_only else self.sum_dtype,
            precision=self.precision,
            memory=self.memory,
            devices=self.devices,
            verify=self.verify,
        )
        if is_only:
            return part
        with np.errstate(all="ignore"):  # Inf and NaN are results here, and integers wrap
            if total is not None and self.sum_dtype.kind == "b":
                part |= total
            elif total is not None:
                part += total
            return part.astype(self.dtype) if is_last and self.dtype != self.sum_dtype else part


def _checked_options(out: Any, stream: Any, memory: Any) -> int | str | None:
    """Return the budget of a task, in bytes if it is no share of a machine's, or raise."""
    if da.array_expr_enabled():
        raise OptionError(
            "dask's setting array.query-planning is on, and tilewise makes graphs for dask arrays "
            "without it; set it to False before dask.array is imported"
        )
    if out is not None:
        raise OptionError(
            "out= was given, and the product of dask arrays is computed later; leave it out, and "
            "store what is returned with dask.array.store(c, target) or c.to_zarr(path)"
        )
    if stream is not None:
        raise OptionError(
            f"stream={stream!r} was given, and the product of dask arrays is computed later, by "
            "dask's workers; leave it out"
        )
    budget = _memory.parse_budget(memory)
    return memory if isinstance(memory, str) and "%" in memory else budget


def _taken(x: Any, name: str) -> Any:
    """Return a dask array that can be multiplied, or a NumPy array, or one of CuPy's as it is."""
    if not isinstance(x, da.Array):
        is_known = hasattr(x, "__array_function__") and _arrays.is_on_gpu(x, name)
        return x if is_known else _arrays.adopt(x, name)
    if any(size != size for size in x.shape):
        raise ShapeError(
            f"{name} has shape {x.shape}: the sizes of its chunks are not known; call "
            f"{name}.compute_chunk_sizes() first"
        )
    try:
        if not _arrays.is_on_gpu(x._meta, name):
            _arrays.adopt(x._meta, name)
    except DTypeError as error:
        raise DTypeError(
            f"{name} has chunks that are not multiplied: {error} (convert them with "
            f"{name}.map_blocks)"
        ) from None
    return x


def _described(x: Any) -> Operand:
    return Operand.of(x)._replace(where="memory", name="")


def _as_dask(x: Any, other: Any, axes: tuple[int, int]) -> da.Array:
    """Return an operand as a dask array, cut as the other one is where they meet.

    ``axes`` are those of K, of x and of the other.
    """
    if isinstance(x, da.Array):
        return x
    chunks: list[Any] = [-1 if 0 in x.shape else "auto"] * x.ndim  # "auto" divides by sizes
    for mine, its in _meeting(x, other, axes):
        if x.shape[mine] == other.shape[its]:
            chunks[mine] = other.chunks[its]
    return da.from_array(x, tuple(chunks), asarray=False)


def _meeting(x: Any, other: Any, axes: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the axes of two operands that go together, counted from the end: K, then batches."""
    mine, its = (max(axis, -z.ndim) for axis, z in zip(axes, (x, other), strict=True))
    rank = min(x.ndim, other.ndim)
    return [(mine, its), *((-i, -i) for i in range(3, rank + 1))]


def _aligned(a: da.Array, b: da.Array) -> tuple[da.Array, da.Array]:
    """Cut both operands at the boundaries of either along K and batch axes, where they differ."""
    a_cuts, b_cuts = {}, {}
    for p, q in _meeting(a, b, (-1, -2)):
        own, its = a.chunks[p], b.chunks[q]
        if a.shape[p] != b.shape[q]:  # one of both is broadcast: a chunk of one element serves all
            a_cuts[a.ndim + p], b_cuts[b.ndim + q] = _common(own, own), _common(its, its)
        else:
            a_cuts[a.ndim + p] = b_cuts[b.ndim + q] = _common(own, its)
    return _cut(a, a_cuts), _cut(b, b_cuts)


def _cut(x: da.Array, cuts: dict[int, Chunks]) -> da.Array:
    cuts = {axis: chunks for axis, chunks in cuts.items() if chunks != x.chunks[axis]}
    return x.rechunk(cuts) if cuts else x


def _common(x: Chunks, y: Chunks) -> Chunks:
    """Return chunks with the boundaries of both; none is empty but that of an empty axis."""
    ends = sorted({0, *accumulate(x), *accumulate(y)})
    return tuple(stop - start for start, stop in pairwise(ends)) or (0,)


def _batch_chunks(a: da.Array, b: da.Array) -> tuple[Chunks, ...]:
    """Return the chunks of the result's batch axes."""
    found = []
    for i in range(max(a.ndim, b.ndim), 2, -1):
        is_bs = i > a.ndim or (i <= b.ndim and a.shape[-i] == 1)
        found.append((b if is_bs else a).chunks[-i])
    return tuple(found)


def _meta(a: da.Array, b: da.Array, plan: Plan) -> Any:
    """Return an empty array of the kind that results are; nothing is computed to find out."""
    metas = a._meta, b._meta
    on_gpu = [_arrays.is_on_gpu(x, name) for x, name in zip(metas, "ab", strict=True)]
    example: Any = np.empty(())
    if all(on_gpu) or not any(on_gpu):  # else the result is in host memory, and NumPy's
        _arrays.common_library(*metas)
        example = next((x for x in metas if type(x) is not np.ndarray), example)
    return meta_from_array(example, ndim=len(plan.shape), dtype=plan.dtype)


def _check_room(a: da.Array, b: da.Array, work: _Work) -> None:
    """Raise BudgetError if the largest chunks cannot be multiplied within the budget of a task.

    A share, and what a GPU needs, are for whoever runs the task to see.
    """
    if not isinstance(work.memory, int) or work.devices not in (None, ("cpu",)):
        return
    x, y = (Operand(z.chunksize, z.dtype, c_strides(z.chunksize, z.dtype.itemsize)) for z in (a, b))
    is_rounded_after = a.numblocks[-1] > 1 and work.dtype != work.sum_dtype
    dtype = work.dtype if a.numblocks[-1] == 1 else work.sum_dtype
    asked: dict[str, Any] = {
        "precision": work.precision,
        "verify": work.verify,
        "memory": work.memory,
    }
    try:
        plan = make_plan(request(x, y, None, dtype=dtype, **asked))
    except BudgetError as error:
        needed = str(error).partition(";")[0]
    else:
        both_bytes = math.prod(plan.shape) * (work.sum_dtype.itemsize + work.dtype.itemsize)
        if not is_rounded_after or both_bytes <= work.memory:
            return
        size = _memory.format_bytes
        needed = (
            f"the sum and what it is rounded to take {size(both_bytes, is_needed=True)}, and "
            f"memory= allows {size(work.memory)}"
        )
    raise BudgetError(
        f"chunks of {x.shape} and {y.shape}: {needed}, for each task; raise the budget, or make "
        "chunks smaller with rechunk"
    )


def _tasks(
    token: str, a: da.Array, b: da.Array, batch: tuple[int, ...], work: _Work
) -> dict[Any, Task]:
    """Return the tasks by their keys; ``batch`` counts chunks.

    There is a chain of tasks for each chunk of the result, which the last of them is.
    """
    tasks = {}
    for at in product(*map(range, batch)):
        columns = _references(b, at, is_row=False)
        for i, row in enumerate(_references(a, at, is_row=True)):
            for j, column in enumerate(columns):
                place = (*at, *(i,) * (a.ndim > 1), *(j,) * (b.ndim > 1))
                total = None
                pieces = list(zip(row, column, strict=False))  # dask cuts no array of size 0
                for piece, (x, y) in enumerate(pieces, 1):
                    is_last = piece == len(pieces)
                    key: Any = (f"matmul-sum-{token}", *place, piece)
                    if is_last:
                        key = (f"matmul-{token}", *place)
                    tasks[key] = Task(key, work, x, y, total, is_last)
                    total = TaskRef(key)
    return tasks


def _references(x: da.Array, at: tuple[int, ...], *, is_row: bool) -> list[list[TaskRef]]:
    """Return the chunks of each row (or column) of chunks, along K, at a place of the batch."""
    if x.ndim == 1:
        return [[TaskRef((x.name, k)) for k in range(x.numblocks[0])]]
    counts = x.numblocks[:-2]
    own = at[len(at) - len(counts) :]
    # One chunk of a broadcast axis serves all; so does one of an empty axis.
    start = (x.name, *map(min, own, (count - 1 for count in counts)))
    rows, columns = map(range, x.numblocks[-2:])
    if is_row:
        return [[TaskRef((*start, i, k)) for k in columns] for i in rows]
    return [[TaskRef((*start, k, j)) for k in rows] for j in columns]
