"""matmul against np.matmul on the CPU: the cost of a call, BLAS types, integers, narrow floats."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

import tilewise as tw
from benchmarks.harness import Benchmark


def main() -> None:
    bench = Benchmark("matmul", "matmul against np.matmul on the CPU")
    rng = np.random.default_rng(0)
    _overhead(bench, rng)
    _blas_types(bench, rng)
    _integers(bench, rng)
    _integers_seldom_used(bench, rng)
    _narrow(bench, rng)
    bench.save()


def _overhead(bench: Benchmark, rng: np.random.Generator) -> None:
    for dtype, shape in (
        ("float32", (3, 3)),
        ("float32", (64, 64)),
        ("float64", (16, 16)),
        ("int64", (3, 3)),
        ("float32", (64,)),
        ("float32", (8, 16, 16)),
    ):
        a, b = (rng.integers(-9, 10, shape).astype(dtype) for _ in range(2))
        plan, case = tw.plan(a, b), f"a call, {dtype} {shape}"
        calls: dict[str, Callable[[], Any]] = {
            "matmul": partial(tw.matmul, a, b),
            "a called plan": partial(plan, a, b),
        }
        if plan.shape:
            out = np.empty(plan.shape, dtype)
            for call in ("matmul", "a called plan"):
                calls[f"{call}, out="] = partial(calls[call], out=out)
            calls["np.matmul, out="] = partial(np.matmul, a, b, out=out)
        calls["np.matmul"] = partial(np.matmul, a, b)
        medians = bench.compare(
            case,
            calls,
            check=lambda calls=calls: [
                _equal(call(), calls["np.matmul"]()) for call in calls.values()
            ],
            inputs="uniform integers in [-9, 9]",
            repeats=101,
        )
        for name, limit_us in (("matmul", 10.0), ("a called plan", 5.0)):
            for to in ("", ", out=") if plan.shape else ("",):
                over = 1e6 * (medians[name + to] - medians["np.matmul" + to])
                bench.claim(case, f"{name + to}, over np.matmul", over, limit_us, "µs")


def _blas_types(bench: Benchmark, rng: np.random.Generator) -> None:
    for dtype, n in (("float32", 4096), ("float64", 3072)):
        a, b = (rng.standard_normal((n, n)).astype(dtype) for _ in range(2))
        out = np.empty((n, n), dtype)
        case = f"{dtype} {n}^3"
        medians = bench.compare(
            case,
            {
                "matmul": lambda a=a, b=b, out=out: tw.matmul(a, b, out=out),
                "np.matmul": lambda a=a, b=b, out=out: np.matmul(a, b, out=out),
            },
            check=lambda a=a, b=b: _equal(tw.matmul(a, b), np.matmul(a, b)),
            inputs="normal",
            repeats=9,
        )
        bench.claim(case, "time, of np.matmul's", medians["matmul"] / medians["np.matmul"], 1.02)


def _integers(bench: Benchmark, rng: np.random.Generator) -> None:
    n = 512
    for name, dtype, low, high, result in (
        ("int64, all 64 bits", "int64", -(2**63), 2**63 - 1, None),
        ("int64, to ±1000", "int64", -1000, 1000, None),
        ("int8 to int32", "int8", -128, 127, np.int32),
        ("uint8", "uint8", 0, 255, None),
    ):
        a, b = (rng.integers(low, high, (n, n), dtype=dtype, endpoint=True) for _ in range(2))
        case = f"{name}, {n}^3"
        medians = bench.compare(
            case,
            {
                "matmul": lambda a=a, b=b, r=result: tw.matmul(a, b, dtype=r),
                "np.matmul": lambda a=a, b=b, r=result: np.matmul(a, b, dtype=r),
            },
            check=lambda a=a, b=b, r=result: _equal(
                tw.matmul(a, b, dtype=r), np.matmul(a, b, dtype=r)
            ),
            inputs=f"uniform integers in [{low}, {high}]",
            repeats=5,
        )
        bench.claim(case, "time, of np.matmul's", medians["matmul"] / medians["np.matmul"], 1 / 3)


def _integers_seldom_used(bench: Benchmark, rng: np.random.Generator) -> None:
    for shapes in (
        ((1_000_000,), (1_000_000,)),
        ((3000, 3000), (3000,)),
        ((3000, 1), (1, 3000)),
        ((100_000, 3, 3), (100_000, 3, 3)),
    ):
        a, b = (rng.integers(-1000, 1000, shape) for shape in shapes)
        case = f"int64, {shapes[0]} @ {shapes[1]}"
        medians = bench.compare(
            case,
            {
                "matmul": lambda a=a, b=b: tw.matmul(a, b),
                "np.matmul": lambda a=a, b=b: np.matmul(a, b),
            },
            check=lambda a=a, b=b: _equal(tw.matmul(a, b), np.matmul(a, b)),
            inputs="uniform integers in [-1000, 1000)",
            repeats=9,
        )
        bench.claim(case, "time, of np.matmul's", medians["matmul"] / medians["np.matmul"], 1.3)


def _narrow(bench: Benchmark, rng: np.random.Generator) -> None:
    n = 1024
    for dtype in (np.dtype("float16"), np.dtype(ml_dtypes.bfloat16)):
        a, b = (rng.standard_normal((n, n)).astype(dtype) for _ in range(2))
        exact = a.astype(float) @ b.astype(float)
        calls: dict[str, Callable[[], Any]] = {
            "matmul": lambda a=a, b=b: tw.matmul(a, b),
            "np.matmul": lambda a=a, b=b: np.matmul(a, b),
        }
        errors = {
            name: float(np.linalg.norm(call().astype(float) - exact) / np.linalg.norm(exact))
            for name, call in calls.items()
        }
        case = f"{dtype.name} {n}^3"
        medians = bench.compare(
            case, calls, check=lambda e=errors: _finite(e), inputs="normal", repeats=3
        )
        bench.claim(case, "time, of np.matmul's", medians["matmul"] / medians["np.matmul"], 0.1)
        # np.matmul's bfloat16 product is a float32: its error has no rounding to bfloat16.
        limit = errors["np.matmul"] if dtype == "float16" else 2.0**-8
        bench.claim(case, "relative Frobenius error", errors["matmul"], limit)


def _equal(got: Any, expected: Any) -> None:
    if not np.array_equal(got, expected):
        raise AssertionError("the results differ: no time is given for a wrong answer")


def _finite(errors: dict[str, float]) -> None:
    if not all(error < 0.01 for error in errors.values()):
        raise AssertionError(f"errors of {errors}: no time is given for a wrong answer")


if __name__ == "__main__":
    main()
