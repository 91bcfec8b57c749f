"""Every kernel launched at least once, small enough for compute-sanitizer to watch.

``compute-sanitizer --tool racecheck python -m tests.gpu.sanitized hopper`` (or others) ends with
the sanitizer's own summary; what it reports stands below the names of kernels not run before.
Results are compared too, and pytest is not in the way. Which kernel a problem needs is known
without a GPU: ``tests/kernels/test_compile.py`` looks that `JOBS` leave none out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain, product
from typing import Any, NamedTuple

import numpy as np

from tests.gpu import test_few_columns as few_columns
from tests.gpu import test_float32 as float32
from tests.gpu import test_hopper as hopper
from tests.gpu import test_portable as portable
from tests.gpu import test_skinny as skinny
from tests.gpu.stacks import LAYOUTS, Stack, exact, filled, operands
from tests.kernels.products import ALL, Array, placed, poison, problem_of, reference, ways_of
from tests.kernels.products import whole as integers
from tilewise import guide
from tilewise.kernels import few_columns_plan
from tilewise.kernels.hopper_float32_plan import Choice
from tilewise.kernels.hopper_plan import choices, launches, paced
from tilewise.kernels.portable_steps import Steps
from tilewise.numerics.dtypes import product_dtype

__all__ = ["JOBS", "Job", "main"]


class Job(NamedTuple):
    """Names of kernels of a family, and what launches them and looks at what they made."""

    names: frozenset[str]
    run: Callable[[], None]


def main(families: list[str]) -> None:
    for family in families:
        ran: set[str] = set()
        for names, run in JOBS[family]():
            if not names <= ran:
                print(f"{family}: {', '.join(sorted(names - ran))}", flush=True)
                run()
                ran |= names
        print(f"{family}: {len(ran)} kernels ran and their results are right", flush=True)


def hopper_jobs() -> Iterator[Job]:
    """A K longer than every ring of stages, then one of pieces; sizes that end inside a tile."""
    sizes = ((200, 840), (16, 840), (32, 840), (200, 16400))
    for dtype, layout in product(("bf16", "fp16"), LAYOUTS):
        for (m, k), (n, pitch) in product(sizes, ((264, 8), (261, 1))):
            a, b = operands(m, n, k, dtype, layout, pitch)
            filled(a, 1, -1, 1), filled(b, 2, -1, 1)
            c = Stack.dense(m, n, dtype, pitch=pitch)
            # So few blocks have many tiles each, and are made to wait for each other.
            for choice in choices(hopper.problem(a, b, c), multiprocessors=2):
                choice = choice if choice.parts > 1 else paced(choice)
                steps = launches(hopper.problem(a, b, c), choice)
                yield Job(_names(steps), partial(_run_hopper, choice, a, b, c))


def float32_jobs() -> Iterator[Job]:
    """Lengths and steps that splits tell apart; a row and a column are flagged when it runs."""
    sizes = ((1100, 80), (200, 840), (200, 1500), (200, 2100), (33, 5000), (33, 9000), (33, 17000))
    for (m, k), n, layout, pitch in product(sizes, (136, 65), LAYOUTS, (8, 1, -2)):
        for precision, dtype in product((None, "tf32"), ("fp32", "c64")):
            a = Stack.dense(m, k, dtype, layout[0], abs(pitch))
            if pitch < 0:  # every second element
                a = Stack.of((1, 1, m, k), (0, 0, 2 * k, 2), dtype)
            b = Stack.dense(k, n, dtype, layout[1])
            c = Stack.dense(m, n, dtype, pitch=abs(pitch))
            p = float32.problem(a, b, c, dtype=dtype, precision=precision)
            blocks = 1 if m == 1100 else 132  # one takes all tiles, and counts as it goes
            ways = [float32.choices(p, blocks)]
            if (precision, dtype) == (None, "fp32"):
                ways.append(skinny.every_way(p))
                if few_columns_plan.suits(p):
                    ways.append(few_columns.every_way(p))
            for choice in chain.from_iterable(ways):
                yield Job(_names(choice.steps), partial(_run_float32, choice, a, b, c))


def portable_jobs() -> Iterator[Job]:
    rng = np.random.default_rng(5)
    layouts = [((130, 72, 200), *x) for x in product("CF", "CF", (16, 3))]
    in_pieces = [((m, n, 17000), "C", "C", 16) for m, n in ((10, 24), (40, 136))]
    for dtype in ALL:
        for (m, n, k), a_order, b_order, margin in (*layouts, *in_pieces):
            a, _ = placed(integers(rng, (m, k), dtype), a_order, margin)
            b, _ = placed(integers(rng, (k, n), dtype), b_order, margin)
            c, _ = placed(np.zeros((m, n), product_dtype(a.dtype, b.dtype)), "C", margin)
            for way in ways_of(problem_of(a, b, c)):
                yield Job(_names(way.steps), partial(_run_portable, way, a, b, c))


def guide_jobs() -> Iterator[Job]:
    for kernel in (guide.Muld, guide.Muld_any, guide.naive):
        yield Job(frozenset({kernel.__name__}), partial(_run_guide, kernel))


JOBS: Mapping[str, Callable[[], Iterator[Job]]] = {
    "hopper": hopper_jobs,
    "hopper_float32": float32_jobs,
    "portable": portable_jobs,
    "guide": guide_jobs,
}


def _names(steps: Any) -> frozenset[str]:
    return frozenset(step.kernel for step in steps)


def _run_hopper(choice: hopper.Choice, a: Stack, b: Stack, c: Stack) -> None:
    found = hopper.result(hopper.problem(a, b, c), choice, a, b, c)
    np.testing.assert_array_equal(found, exact(a, b).astype(c.flat.dtype), str(choice))


def _run_float32(choice: Choice, a: Stack, b: Stack, c: Stack) -> None:
    small = [float32.small(x, seed) for seed, x in enumerate((a, b))]
    for x, at in zip(small, ((0, 0, 3, 0), (0, 0, 0, 5)), strict=True):
        x.view[at] = float32.TINY
    found = float32.carried_out(choice, a, b, c)
    wide = np.result_type(c.flat.dtype, np.float64)
    exactly = np.matmul(*(x.view.astype(wide) for x in small))
    float32.close_to(found, exactly.astype(c.flat.dtype), choice.why)


def _run_portable(way: Steps, a: Array, b: Array, c: Array) -> None:
    poison(c)
    portable.run(way, a, b, c)
    assert (c == reference(a, b, c.dtype)).all(), way.why


def _run_guide(kernel: Any) -> None:
    a = np.arange(48 * 64, dtype=np.float32).reshape(48, 64) % 7
    b = np.arange(64 * 32, dtype=np.float32).reshape(64, 32) % 5
    c = np.full((48, 32), np.nan, np.float32)
    guide.Mul(a, b, 48, 64, 32, c, kernel=kernel, device="cuda:0")
    np.testing.assert_array_equal(c, a.astype(np.float64) @ b)


if __name__ == "__main__":
    main(sys.argv[1:] or list(JOBS))
