"""Products on the CPU: NumPy's BLAS, and what BLAS lacks, computed with BLAS panel by panel.

A tile of C is summed over pieces of K in ascending order. A piece of A and one of B are converted
to the type the sum is held in (a copy of a panel, never of an operand), multiplied by BLAS, and
added; the finished sum is rounded once into the result. Batches are multiplied many matrices at a
time while they are small, and broadcast operands are never expanded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .numerics import limbs
from .outofcore.schedule import batch_slices, pick

if TYPE_CHECKING:
    from ._plan import Plan
    from .outofcore.schedule import Tiles

__all__ = ["Epilogue", "add_product", "execute", "finish", "new_sum", "scale"]

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Epilogue:
    """What becomes of a finished sum: ``out = alpha·sum + beta·out``."""

    alpha: Any = 1
    beta: Any = 0

    @property
    def is_plain(self) -> bool:
        return bool(self.alpha == 1 and self.beta == 0)


PLAIN = Epilogue()


def execute(plan: Plan, a: Array, b: Array, out: Array | None, epilogue: Epilogue = PLAIN) -> Any:
    """Return ``a @ b`` computed as ``plan`` says, in ``out`` if there is one.

    ``out`` must not overlap an operand. A product of two vectors comes back as a scalar.
    """
    with np.errstate(all="ignore"):  # Inf and NaN are results here, not news
        if plan.method == "blas":
            return np.matmul(a, b, out=out)
        return _by_panels(plan, a, b, out, epilogue)


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


def scale(plan: Plan, out: Array, beta: Any) -> None:
    """Compute ``out = beta·out`` in the type of the plan's sums; with 0 out is not read."""
    if beta == 0:
        out[...] = 0
        return
    with np.errstate(all="ignore"):
        kind = new_sum(plan, ()).dtype
        np.copyto(out, out.astype(kind) * kind.type(beta), casting="unsafe")


def _by_panels(plan: Plan, a: Array, b: Array, out: Array | None, epilogue: Epilogue) -> Any:
    result = np.empty(plan.shape, plan.dtype) if out is None else out
    c = result
    if a.ndim == 1:
        a, c = a[np.newaxis, :], np.expand_dims(c, -1 if b.ndim == 1 else -2)
    if b.ndim == 1:
        b, c = b[:, np.newaxis], np.expand_dims(c, -1)
    if plan.tiles is None:
        total = np.matmul(
            a.astype(plan.compute_dtype, copy=False), b.astype(plan.compute_dtype, copy=False)
        )
        finish(plan, total, c, epilogue)
    elif c.size:
        _by_tiles(plan, plan.tiles, a, b, c, epilogue)
    return result if out is not None or plan.shape else result[()]


def _by_tiles(plan: Plan, tiles: Tiles, a: Array, b: Array, c: Array, epilogue: Epilogue) -> None:
    for at in batch_slices(plan.batch, plan.matrices_at_once):
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


def _converted(panel: Array, dtype: np.dtype[Any]) -> Array:
    """Return the panel as BLAS reads it, of type ``dtype``: itself if it is so, or a copy."""
    if panel.dtype.name == "bfloat16":
        # bfloat16 is the upper half of a float32; shifting the bits is faster than a cast.
        wide = panel.view(np.uint16).astype(np.uint32)
        np.left_shift(wide, 16, out=wide)
        return wide.view(np.float32).astype(dtype, copy=False)
    if panel.dtype == dtype and panel.flags.aligned:
        row, column = panel.strides[-2:]
        item = dtype.itemsize
        if (column == item and row >= item * panel.shape[-1] and row % item == 0) or (
            row == item and column >= item * panel.shape[-2] and column % item == 0
        ):
            return panel
    return panel.astype(dtype, order="C")
