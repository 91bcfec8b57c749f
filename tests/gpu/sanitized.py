"""Kernels of every family launched a few times, small enough for compute-sanitizer to watch.

``compute-sanitizer --tool racecheck python -m tests.gpu.sanitized hopper`` (or others) ends with
the sanitizer's own summary; results are compared too. pytest is not in the way, so whatever the
sanitizer reports is the kernels'.
"""

from __future__ import annotations

import itertools
import sys

import numpy as np

import tilewise as tw
from tests.gpu import test_hopper as hopper
from tests.gpu import test_portable as portable
from tests.gpu.support import download, upload
from tests.kernels.products import ALL, placed, whole
from tilewise.kernels.hopper_plan import choices


def main(families: list[str]) -> None:
    ran = set()
    for family in families:
        ran |= FAMILIES[family]()
    print(f"{len(ran)} kernels ran and their results are right")


def run_hopper() -> set[str]:
    """A K longer than every ring of stages, and sizes that end inside a tile."""
    ran: set[str] = set()
    for dtype, layout, pitch in itertools.product(("bf16", "fp16"), hopper.LAYOUTS, (8, 1)):
        m, n, k = 200, 264, 840
        a, b = hopper.operands(m, n, k, dtype, layout, pitch)
        hopper.filled(a, 1), hopper.filled(b, 2)
        c = hopper.Stack.dense(m, n, dtype, pitch=pitch)
        expected = hopper.exact(a, b).astype(c.flat.dtype)
        problem = hopper.problem(a, b, c)
        for choice in choices(problem):
            names = {step.kernel for step in hopper.launches(problem, choice)}
            if names <= ran:
                continue
            found = hopper.result(problem, choice, a, b, c)
            np.testing.assert_array_equal(found, expected, str(choice))
            ran |= names
    return ran


def run_portable() -> set[str]:
    ran: set[str] = set()
    for dtype, orders in itertools.product(ALL, itertools.product("CF", repeat=2)):
        rng = np.random.default_rng(5)
        a, _ = placed(whole(rng, (130, 200), dtype), orders[0], 16)
        b, _ = placed(whole(rng, (200, 70), dtype), orders[1], 16)
        result = portable.product_dtype(a.dtype, b.dtype)
        expected = portable.reference(a, b, result)
        c, _ = placed(expected, "C", 3)
        for way in portable.ways(a, b, c):
            names = {step.kernel for step in way.steps}
            if names <= ran:
                continue
            portable.poison(c)
            portable.run(way, a, b, c)
            assert (c == expected).all(), way.why
            ran |= names
    return ran


def run_public() -> set[str]:
    """Kernels that a plan picks by size: float32 on tensor cores, wide and skinny, and bytes."""
    ran: set[str] = set()
    rng = np.random.default_rng(7)
    for dtype in ("float32", "complex64", "int8", "float8_e4m3fn"):
        for m, n, k in ((200, 264, 840), (16, 300, 840), (33, 65, 17000)):
            for orders in itertools.product("CF", repeat=2):
                a, _ = placed(whole(rng, (m, k), dtype), orders[0], 16)
                b, _ = placed(whole(rng, (k, n), dtype), orders[1], 16)
                if dtype == "float32":
                    a[3] *= np.geomspace(1e-20, 1e20, k).astype(np.float32)  # flagged
                x, y = upload(a), upload(b)
                options = {"dtype": np.int32} if dtype == "int8" else {}
                plan = tw.plan(x, y, **options)
                assert plan.recipe is not None
                names = {f"{plan.recipe.family}/{step.kernel}" for step in plan.recipe.steps}
                if names <= ran:
                    continue
                found = download(plan(x, y))
                expected = portable.reference(a, b, plan.dtype)
                rows = [i for i in range(m) if i != 3]
                assert (found[rows] == expected[rows]).all(), plan
                ran |= names
    return ran


FAMILIES = {"hopper": run_hopper, "portable": run_portable, "public": run_public}

if __name__ == "__main__":
    main(sys.argv[1:] or list(FAMILIES))
