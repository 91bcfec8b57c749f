"""Which of the portable kernels compute a product.

Pure: shapes, types and strides in; names, grids and arguments out. Every product has at least one
way here, on every architecture, and `choose` takes the one that is expected to be done first. What
a way consists of is put together in ``portable_steps``; the device code is in ``portable``,
``packing`` and, for int8 and float8 on Hopper, ``hopper_bytes``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from tilewise._memory import format_bytes
from tilewise.errors import DTypeError

from . import targets_for
from .parts import in_parts
from .portable_problem import Problem
from .portable_steps import Steps
from .portable_table import KERNELS, STORED, Kernel
from .steps import Choice, chains, round_up

__all__ = ["Choice", "Problem", "choose", "every_way"]

Way = Callable[[Steps], None]

_REAL = {"fp32": "float32", "fp64": "float64"}
_COMPLEX = {"fp32": "complex64", "fp64": "complex128"}
_EXACT_TERMS = 2**17 - 128  # products of int8 whose sum an int32 holds in any case
_MOST_COUNTED = 2**31 - 2**10  # by 32 bits, a tile or a step at a time

#: How much slower a way within a budget is before a plan says so.
_SLOWED = 1.25


def choose(
    problem: Problem,
    *,
    capability: tuple[int, int] = (9, 0),
    multiprocessors: int = 132,
    workspace_bytes: int | None = None,
) -> Choice:
    """Return the way to compute a product that is expected to be done first.

    Parameters
    ----------
    problem : Problem
        Sizes of 0 too; nothing is launched where C is empty.
    capability, multiprocessors
        Of the device.
    workspace_bytes : int, optional
        Leave out ways that take more device memory than this.

    Raises
    ------
    DTypeError
        If a type has no kernel.
    BudgetError
        If every way takes more workspace.

    Notes
    -----
    The bits of C are the same whichever way it is: on one kind of GPU they depend on the operands
    and K alone.
    """
    names = (problem.a_dtype, problem.b_dtype, problem.c_dtype)
    for name in names:
        if name not in STORED:
            raise DTypeError(f"no GPU kernel takes {name}; convert it to float32 first")
    if 0 in (problem.m, problem.n, problem.outer, problem.inner):
        return Choice(steps=(), workspace_bytes=0, expected_us=0.0, why="C is empty")
    limit = math.inf if workspace_bytes is None else workspace_bytes
    problem = _folded(problem)
    targets = targets_for(capability)

    def fastest(p: Problem, most: float) -> Choice:
        ways = _ways(p, targets)
        drafts = [_put_together(way, p, multiprocessors, most, is_draft=True) for way in ways]
        allowed = max(most, min(draft.workspace_bytes for draft in drafts))
        fitting = [
            (draft.us, number)
            for number, draft in enumerate(drafts)
            if draft.workspace_bytes <= allowed
        ]
        best = _put_together(ways[min(fitting)[1]], p, multiprocessors, most)
        return Choice(
            steps=tuple(best.steps),
            workspace_bytes=best.workspace_bytes,
            expected_us=best.us,
            why=", ".join(best.why),
        )

    sizes = [STORED[x][1] << x.startswith("complex") for x in names]
    best = in_parts(problem, (sizes[0], sizes[1], sizes[2]), limit, fastest)
    if workspace_bytes is None:
        return best
    roomy = fastest(problem, math.inf)
    if best.expected_us <= _SLOWED * roomy.expected_us:
        return best
    return replace(
        best,
        why=f"{best.why}, memory= rules out what is {best.expected_us / roomy.expected_us:.1f} "
        f"times as fast in {format_bytes(roomy.workspace_bytes, is_needed=True)} of workspace",
    )


def every_way(
    problem: Problem,
    *,
    capability: tuple[int, int] = (9, 0),
    multiprocessors: int = 132,
    workspace_bytes: float = math.inf,
) -> list[Steps]:
    """Return all that `choose` chooses from, for a problem whose C is not empty."""
    problem = _folded(problem)
    return [
        _put_together(way, problem, multiprocessors, workspace_bytes)
        for way in _ways(problem, targets_for(capability))
    ]


def _put_together(
    way: Way, problem: Problem, multiprocessors: int, limit: float, is_draft: bool = False
) -> Steps:
    steps = Steps(problem, multiprocessors, limit, is_draft)
    way(steps)
    return steps


def _ways(p: Problem, targets: tuple[str, ...]) -> list[Way]:
    """Return every way to compute a product with what is compiled for a device."""
    dtype, is_complex = _computed_in(p)
    kernels = [kernel for kernel in KERNELS if not set(targets).isdisjoint(kernel.targets)]
    if dtype.startswith("fp8") and all(kernel.dtype != dtype for kernel in kernels):
        dtype = "fp16"  # which holds every float8; its products are summed in float32 too
    kernels = [kernel for kernel in kernels if kernel.dtype == dtype]
    kernels = [kernel for kernel in kernels if not kernel.is_mapped or _can_map(p, kernel)]
    if p.k == 0:
        return [partial(_finish_nothing, sums=kernels[0].sums, is_complex=is_complex)]
    if dtype == "i8":
        return [_multiply_integers, *(partial(_multiply_limbs, kernel=each) for each in kernels)]
    if not (is_complex and p.a_dtype == p.b_dtype == _COMPLEX[dtype]):
        kernels = [kernel for kernel in kernels if not kernel.is_complex]
    return [partial(_multiply_floats, kernel=each, is_complex=is_complex) for each in kernels]


def _can_map(p: Problem, kernel: Kernel) -> bool:
    """Whether a product is one for ``hopper_bytes``, which counts in 32 bits and steps along K.

    The limbs of a number, 9 at most, lie along K.
    """
    tile_m, tile_n, tile_k = kernel.tile
    terms = p.k + 16 if kernel.sums == "fp32" else 9 * (p.k + 16)
    tiles = math.ceil(p.m / tile_m) * math.ceil(p.n / tile_n) * p.outer * p.inner
    parts, depth = chains(p.k) if kernel.sums == "fp32" else (terms // _EXACT_TERMS + 132, tile_k)
    copied = (math.ceil(p.m / 16) + math.ceil(p.n / 16)) * math.ceil(p.k / 128)
    copied *= p.outer * p.inner  # tiles, at most
    is_whole = parts == 1 or depth % tile_k == 0
    return is_whole and max(p.m, p.n, terms, tiles * parts, copied) < _MOST_COUNTED


def _folded(p: Problem) -> Problem:
    """Return the product with batch axes made part of m or n, where one operand has no such axis.

    A matrix that multiplies many small ones multiplies a large one then.
    """
    for axis, size in (("inner", p.inner), ("outer", p.outer)):
        a, b, c = (getattr(strides, axis) for strides in (p.a, p.b, p.c))
        if size == 1:
            continue
        if b == 0 and (p.m == 1 or (a == p.m * p.a.row and c == p.m * p.c.row)):
            rows = (a, c) if p.m == 1 else (p.a.row, p.c.row)
            p = replace(p, m=p.m * size, a=replace(p.a, row=rows[0]), c=replace(p.c, row=rows[1]))
        elif a == 0 and (p.n == 1 or (b == p.n * p.b.col and c == p.n * p.c.col)):
            cols = (b, c) if p.n == 1 else (p.b.col, p.c.col)
            p = replace(p, n=p.n * size, b=replace(p.b, col=cols[0]), c=replace(p.c, col=cols[1]))
        else:
            continue
        p = replace(p, inner=1) if axis == "inner" else replace(p, outer=1)
    return p


def _computed_in(p: Problem) -> tuple[str, bool]:
    """Return the type whose kernels compute a product, and whether it is complex."""
    c = np.dtype(_known(p.c_dtype))
    computed = np.promote_types(_known(p.a_dtype), _known(p.b_dtype))
    if computed.kind in "biu" and c.kind in "biu":
        return "i8", False
    is_complex = "c" in (computed.kind, c.kind)
    least = "c8" if is_complex else "f4"
    computed = np.promote_types(np.promote_types(computed, c), least)
    if computed in (np.float64, np.complex128):
        return "fp64", is_complex
    both = {p.a_dtype, p.b_dtype}
    if is_complex:
        return "fp32", True
    if both in ({"float8_e4m3fn"}, {"float8_e5m2"}):
        return {"float8_e4m3fn": "fp8e4nv", "float8_e5m2": "fp8e5"}[p.a_dtype], False
    # Types that a narrow float holds exactly join it: their products are summed in float32.
    small = {"int8", "uint8", "bool"}
    if both - small and both <= {"bfloat16"} | small:
        return "bf16", False
    if both - small and both <= {"float16", "float8_e4m3fn", "float8_e5m2"} | small:
        return "fp16", False
    return "fp32", False


def _finish_nothing(steps: Steps, sums: str, is_complex: bool) -> None:
    steps.why.append("K is 0")
    steps.finish_nothing(sums, is_complex)


def _multiply_integers(steps: Steps) -> None:
    steps.why.append("integers one by one")
    steps.multiply_integers()


def _multiply_floats(steps: Steps, kernel: Kernel, is_complex: bool) -> None:
    """Pack what the kernel does not read as it is, multiply, and finish what it does not write."""
    p, a, b = steps.problem, steps.a, steps.b
    is_expanded = is_complex and not kernel.is_complex
    a_by_rows, b_by_rows = kernel.order[0] == "n", kernel.order[1] == "t"
    if kernel.order == "any":
        a_by_rows, b_by_rows = a.is_by_rows, b.is_by_rows
    if kernel.is_mapped:
        a, b = steps.mapped(kernel, a, b)
    else:
        if is_expanded or not a.suits(kernel, a_by_rows):
            a = steps.pack(a, kernel, a_by_rows, is_expanded)
        if is_expanded or not b.suits(kernel, b_by_rows):
            b = steps.pack(b, kernel, b_by_rows, is_expanded)
    steps.why.append(kernel.name)
    parts, depth = chains(p.k)
    wide = (_COMPLEX if is_complex else _REAL)[kernel.sums]
    is_direct = parts == 1 and p.c_dtype in (wide, kernel.narrow)
    if kernel.order != "any":
        is_direct &= not p.updates and steps.c_suits(kernel)
    elif is_complex:  # whose kernels know real factors alone
        is_direct &= not p.updates and (kernel.is_complex or steps.c.strides.col == 1)
    if is_direct:
        steps.multiply(kernel, a, b, p.k, 1, depth, is_complex)
    else:
        steps.multiply_apart(kernel, a, b, p.k, parts, depth, is_complex)


def _multiply_limbs(steps: Steps, kernel: Kernel) -> None:
    """Multiply integers as sums of signed bytes, ``x = Σ x_l·256^l``, on the unit for int8.

    The s-th power of 256 has the products of a's limbs and b's whose numbers add up to s. Limbs lie
    along K, a's lowest first and b's highest first: so each power is one product over a longer K.
    Powers beyond the result's width are nothing to it.
    """
    p, a, b = steps.problem, steps.a, steps.b
    size = steps.integer_size
    a_limbs, b_limbs = _limb_count(p.a_dtype, size), _limb_count(p.b_dtype, size)
    is_single = a_limbs == b_limbs == 1
    is_read_as_it_is = is_single and a.suits(kernel, True) and b.suits(kernel, True)
    if kernel.vector < 16 and not is_read_as_it_is:
        steps.us = math.inf  # what is packed can be read in whole vectors
    if is_single and kernel.is_mapped:
        a, b = steps.mapped(kernel, a, b)
    else:
        if not (is_single and a.suits(kernel, True)):
            a = steps.pack_limbs(a, a_limbs, is_reversed=False)
        if not (is_single and b.suits(kernel, True)):
            b = steps.pack_limbs(b, b_limbs, is_reversed=True)
    steps.why.append(f"{kernel.name} on {a_limbs} by {b_limbs} bytes")
    plane = p.k if is_single else round_up(p.k, 16)
    powers = min(a_limbs + b_limbs - 1, max(size, 1))
    for power in range(powers):
        first = max(0, power - b_limbs + 1)
        terms = (min(power, a_limbs - 1) - first + 1) * plane
        # As many parts as occupy the device; and if higher bits of a sum count than int32 has, so
        # many that none is lost.
        programs = steps.tiles(kernel) * p.outer * p.inner
        parts = max(1, min(steps.multiprocessors // programs, terms // 512))
        if size == 0 or 8 * (size - power) > 32:
            parts = max(parts, math.ceil(terms / _EXACT_TERMS))
        depth = round_up(math.ceil(terms / parts), kernel.tile[2])
        parts = math.ceil(terms / depth)
        x = a.from_column(first * plane)
        y = b.from_column((b_limbs - 1 - power + first) * plane)
        is_whole = parts == powers == 1 and size == 4
        if is_whole and not p.updates and steps.c_suits(kernel):
            steps.multiply(kernel, x, y, terms, parts, depth)
        else:
            steps.multiply_apart(kernel, x, y, terms, parts, depth, power=power)


def _limb_count(dtype: str, size: int) -> int:
    """Return how many signed bytes an integer is, as far as a result of ``size`` bytes can see."""
    if dtype in ("int8", "bool"):
        return 1
    limbs = STORED[dtype][1]
    # What the last byte does not hold with a sign is carried into one more.
    return limbs if size <= limbs else limbs + 1


def _known(dtype: str) -> str:
    """Return float32 in place of a type that NumPy does not know, and does not promote."""
    return "float32" if dtype == "bfloat16" or dtype.startswith("float8") else dtype
