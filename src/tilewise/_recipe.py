"""Which kernels compute a product on a GPU: by which family, in which launches.

Three families of kernels multiply: ``hopper`` (bfloat16 and float16 on Hopper's tensor cores),
``hopper_float32`` (float32 and complex64 there) and ``portable`` (everything else, everywhere).
Each says for a problem what is launched, in which order, with which arguments; here problems are
made of operands. Pure; what puts launches on a stream is in `_gpu`. Bits depend on the operands and
K alone, whichever family it is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from ._memory import format_bytes
from ._operand import Operand
from .errors import BudgetError
from .kernels import hopper_float32_plan, hopper_plan, portable_plan
from .kernels.parts import in_parts
from .kernels.steps import Choice, Product, Step, Strides

if TYPE_CHECKING:
    from .runtime.device import DeviceFacts

__all__ = ["Recipe", "recipe"]

#: Hopper's kernels count rows, columns and matrices in 32 bits, whole tiles at a time.
_LARGEST_HOPPER_SIZE = 2**31 - 512

#: The float16 parts of float32 operands may take this share of a GPU's memory; products that would
#: take more are computed part by part, with the same bits.
_WORKSPACE_SHARE = 8

Family = Literal["hopper", "hopper_float32", "portable"]
Scheme = Literal["fp16x3", "tf32"]

_HOPPER_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recipe:
    """How one product is computed on a GPU: launches in order, and what they need.

    A recipe is equal to itself alone, so that a plan's launches are found without comparing them.
    """

    what: str  #: the product in words, for a launch that fails
    family: Family
    steps: tuple[Step, ...]
    workspace_bytes: int
    expected_us: float
    why: str
    offsets: tuple[tuple[int, int, int], ...]
    """Where a, b and c begin, in bytes, for each run of the steps: batches of more than two axes
    that do not merge take several."""
    scheme: Scheme | None = None
    """How float32 becomes float16 (`numerics.schemes`), where it does."""
    kept: tuple[Following, ...] = ()
    """How it goes on from what another has left in the workspace of a, and of b, if it can."""

    def after(self, before: Recipe | None, same: int) -> Recipe:
        """Return how it is computed where ``before`` was, in the same workspace.

        ``same`` is the operand that both have at the same address: 0 for a, 1 for b, -1 for none.
        """
        if same < 0 or before is None or not self.kept or not before.kept:
            return self
        left, following = self.kept[same]
        return following if left == before.kept[same].left else self

    def __str__(self) -> str:
        names = ", ".join(dict.fromkeys(step.kernel for step in self.steps)) or "none"
        return f"kernels    {names}; about {self.expected_us:.0f} µs"

    def to_dict(self) -> dict[str, Any]:
        return {
            "family": self.family,
            "launches": [step.kernel for step in self.steps],
            "expected_us": self.expected_us,
        }


class Following(NamedTuple):
    """A recipe for where what is left of an operand is equal to this."""

    left: object
    recipe: Recipe


def recipe(
    a: Operand,
    b: Operand,
    c: Operand,
    batch: tuple[int, ...],
    *,
    what: str,
    gpu: DeviceFacts,
    precision: str | None,
    updates: bool,
    workspace_bytes: int | None,
) -> Recipe:
    """Return how a product of device operands is computed; pure.

    Parameters
    ----------
    a, b, c : Operand (..., m, k), (..., k, n) and (*batch, m, n)
        With two axes at least; c is the result, which may be of another type than the product.
    batch : tuple of int
        The broadcast batch axes.
    what : str
        The product in words.
    gpu : DeviceFacts
        The device.
    precision : str, optional
        The precision asked for by name.
    updates : bool
        Whether alpha and beta come with the call.
    workspace_bytes : int, optional
        Scratch memory allowed.

    Raises
    ------
    DTypeError
        If a type has no kernel.
    BudgetError
        If the bits of the product take more scratch memory.
    """
    stacks = tuple(_stack(x, batch) for x in (a, b, c))
    (m, k), n = a.shape[-2:], b.shape[-1]
    axes = _merged(batch, stacks)
    outside, (outer, inner) = axes[:-2], axes[-2:]
    strides = [
        Strides(
            outer=outer.steps[i] // x.dtype.itemsize,
            inner=inner.steps[i] // x.dtype.itemsize,
            row=stack[-2] // x.dtype.itemsize,
            col=stack[-1] // x.dtype.itemsize,
            is_aligned=x.aligned and all(axis.steps[i] % 16 == 0 for axis in outside),
        )
        for i, (x, stack) in enumerate(zip((a, b, c), stacks, strict=True))
    ]
    product = Product(
        m=m,
        n=n,
        k=k,
        a=strides[0],
        b=strides[1],
        c=strides[2],
        outer=outer.size,
        inner=inner.size,
        updates=updates,
    )
    dtypes = a.dtype, b.dtype, c.dtype
    family, choice, scheme = _choice(product, dtypes, axes, gpu, precision, workspace_bytes)
    offsets = tuple(_places(outside))
    made = Recipe(
        what=what,
        family=family,
        steps=choice.steps,
        workspace_bytes=choice.workspace_bytes,
        expected_us=choice.expected_us * len(offsets),
        why=choice.why,
        offsets=offsets,
        scheme=scheme,
    )
    if choice.kept is None or len(offsets) > 1:
        return made
    following = (
        Following(each.left, replace(made, steps=each.steps, expected_us=each.expected_us))
        for each in choice.kept
    )
    return replace(made, kept=tuple(following))


@dataclass(frozen=True, slots=True)
class _Axis:
    """A batch axis, and the byte steps of a, b and c along it."""

    size: int
    steps: tuple[int, int, int]


def _stack(x: Operand, batch: tuple[int, ...]) -> tuple[int, ...]:
    """Return the byte steps along each batch axis (0 where repeated), the rows and the columns."""
    own = [0 if n == 1 else step for n, step in zip(x.shape[:-2], x.strides[:-2], strict=True)]
    return (*[0] * (len(batch) - len(own)), *own, *x.strides[-2:])


def _merged(batch: tuple[int, ...], stacks: tuple[tuple[int, ...], ...]) -> list[_Axis]:
    """Return the batch axes with neighbours made one where all steps allow it; two at least."""
    axes: list[_Axis] = []
    for i, size in enumerate(batch):
        if size == 1:
            continue
        steps = (stacks[0][i], stacks[1][i], stacks[2][i])
        last = axes[-1] if axes else None
        if last and all(far == size * near for far, near in zip(last.steps, steps, strict=True)):
            axes[-1] = _Axis(last.size * size, steps)
        else:
            axes.append(_Axis(size, steps))
    return [_Axis(1, (0, 0, 0))] * (2 - len(axes)) + axes


def _places(axes: list[_Axis]) -> Iterator[tuple[int, int, int]]:
    for position in itertools.product(*(range(axis.size) for axis in axes)):
        at = [(i, axis.steps) for i, axis in zip(position, axes, strict=True)]
        a, b, c = (sum(i * steps[operand] for i, steps in at) for operand in range(3))
        yield a, b, c


def _choice(
    product: Product,
    dtypes: tuple[np.dtype[Any], np.dtype[Any], np.dtype[Any]],
    axes: list[_Axis],
    gpu: DeviceFacts,
    precision: str | None,
    workspace_bytes: int | None,
) -> tuple[Family, Choice, Scheme | None]:
    """Return the family whose product it is, its choice, and how float32 becomes float16."""
    hopper = _hopper(product, dtypes, gpu)
    own, needed = None, 0
    if hopper is not None:
        with suppress(BudgetError):
            own = _in_parts(hopper, gpu, workspace_bytes)
        if own is not None and workspace_bytes is None:
            return "hopper", own, None
        least = hopper_plan.choose(hopper, gpu.multiprocessors, workspace_bytes=0)
        needed = least.workspace_bytes
        if own is not None and needed <= (workspace_bytes or 0):
            return "hopper", own, None
    single = _hopper_float32(product, dtypes, axes, gpu, precision)
    if single is not None:
        allowed = (
            gpu.memory_bytes // _WORKSPACE_SHARE if workspace_bytes is None else workspace_bytes
        )
        try:
            made = hopper_float32_plan.choose(single, gpu.multiprocessors, allowed)
        except BudgetError as error:
            raise BudgetError(f"{error}, or ask for precision='ieee', which takes less") from None
        return "hopper_float32", made, "tf32" if precision == "tf32" else "fp16x3"
    names = {f"{x}_dtype": dtype.name for x, dtype in zip("abc", dtypes, strict=True)}
    try:
        portable = portable_plan.choose(
            portable_plan.Problem.of(product, **names),
            capability=gpu.capability,
            multiprocessors=gpu.multiprocessors,
            workspace_bytes=workspace_bytes,
        )
    except BudgetError:
        if own is None:
            raise
        return "hopper", own, None
    if own is not None and own.expected_us <= portable.expected_us:
        return "hopper", own, None
    if hopper is not None:
        rules_out = (
            "memory= rules out Hopper's own kernels, which take "
            f"{format_bytes(needed, is_needed=True)} of workspace"
        )
        portable = replace(portable, why=f"{portable.why}, {rules_out}")
    return "portable", portable, None


def _in_parts(
    problem: hopper_plan.Problem, gpu: DeviceFacts, workspace_bytes: int | None
) -> Choice:
    """Return how Hopper's own kernels compute a product, in parts if need be."""
    limit = math.inf if workspace_bytes is None else workspace_bytes

    def fastest(p: hopper_plan.Problem, most: float) -> Choice:
        allowed = None if most == math.inf else int(most)
        choice = hopper_plan.choose(p, gpu.multiprocessors, workspace_bytes=allowed)
        return Choice(
            steps=hopper_plan.launches(p, choice),
            workspace_bytes=choice.workspace_bytes,
            expected_us=choice.expected_us,
            why=choice.why,
        )

    return in_parts(problem, (2, 2, 4 if problem.out == "fp32" else 2), limit, fastest)


def _hopper(
    product: Product,
    dtypes: tuple[np.dtype[Any], np.dtype[Any], np.dtype[Any]],
    gpu: DeviceFacts,
) -> hopper_plan.Problem | None:
    """Return the problem for Hopper's own kernels, if it is one of theirs."""
    a, b, c = (dtype.name for dtype in dtypes)
    if (
        gpu.capability != (9, 0)
        or a != b
        or a not in ("bfloat16", "float16")
        or c not in (a, "float32")
        or not _are_counted(product.outer, product.inner, product.m, product.n, product.k)
    ):
        return None
    return hopper_plan.Problem.of(product, dtype=_HOPPER_TYPES[a], out=_HOPPER_TYPES[c])


def _hopper_float32(
    product: Product,
    dtypes: tuple[np.dtype[Any], np.dtype[Any], np.dtype[Any]],
    axes: list[_Axis],
    gpu: DeviceFacts,
    precision: str | None,
) -> hopper_float32_plan.Problem | None:
    """Return the problem for Hopper's tensor cores if it is a product of float32 for them.

    The bits depend on whether it is: the sizes of C decide that only where there is nothing, or
    more of something than the kernels can count.
    """
    kind = dtypes[0].char
    if (
        gpu.capability != (9, 0)
        or precision == "ieee"
        or kind not in "fF"
        or (kind == "F" and product.updates)  # by complex numbers, which these kernels do not know
        or not dtypes[0] == dtypes[1] == dtypes[2]
        or product.k * (2 if kind == "F" else 1) < hopper_float32_plan.LEAST_K
        or not _are_counted(*(axis.size for axis in axes), product.m, product.n, product.k)
    ):
        return None
    return hopper_float32_plan.Problem.of(
        product,
        dtype="fp32" if kind == "f" else "c64",
        precision="tf32" if precision == "tf32" else None,
    )


def _are_counted(*sizes: int) -> bool:
    """Say whether Hopper's kernels can count so many of everything."""
    return all(0 < size < _LARGEST_HOPPER_SIZE for size in sizes)
