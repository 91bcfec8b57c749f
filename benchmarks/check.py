"""check against the product it checks, in memory and on files."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Benchmark
from tilewise.numerics.check import check


def main() -> None:
    bench = Benchmark("check", "check against the product it checks")
    rng = np.random.default_rng(0)
    for dtype, n in (("float32", 4096), ("float64", 2048), ("complex64", 2048), ("float32", 1024)):
        _against_matmul(bench, rng, dtype, n)
    _integers(bench, rng)
    _files(bench, rng, 16384)
    bench.save()


def _against_matmul(bench: Benchmark, rng: np.random.Generator, dtype: str, n: int) -> None:
    a, b = _normal(rng, n, dtype), _normal(rng, n, dtype)
    c = a @ b
    case = f"{dtype} {n}^3"
    medians = bench.compare(
        case,
        {"check": lambda: check(a, b, c), "np.matmul": lambda: np.matmul(a, b, out=c)},
        check=lambda: _finds_a_flipped_bit(a, b, c),
        inputs="normal",
        repeats=5,
    )
    if n == 4096 and dtype == "float32":
        share = medians["check"] / medians["np.matmul"]
        bench.claim(case, "time, of the product's", share, 1.0)


def _integers(bench: Benchmark, rng: np.random.Generator) -> None:
    a, b = (rng.integers(-(2**40), 2**40, (1024, 1024)) for _ in "ab")
    c = a @ b
    bench.compare(
        "int64 1024^3",
        {"check": lambda: check(a, b, c), "np.matmul": lambda: a @ b},
        check=lambda: _finds_a_flipped_bit(a, b, c),
        inputs="integers below 2^40",
        repeats=3,
    )


def _files(bench: Benchmark, rng: np.random.Generator, n: int) -> None:
    """Check files of n² float32; b is a scaled permutation, so that c is quickly made."""
    with tempfile.TemporaryDirectory() as folder:
        a, b, c = (
            np.lib.format.open_memmap(Path(folder, f"{name}.npy"), "w+", np.float32, (n, n))
            for name in "abc"
        )
        order, scales = rng.permutation(n), rng.standard_normal(n, np.float32)
        b[order, np.arange(n)] = scales
        for start in range(0, n, 1024):
            rows = slice(start, start + 1024)
            a[rows] = rng.standard_normal((1024, n), np.float32)
            c[rows] = a[rows][:, order] * scales
        del a, b, c
        a, b, c = (np.load(Path(folder, f"{name}.npy"), mmap_mode="r") for name in "abc")

        def read() -> None:
            for x in (a, b, c):
                for start in range(0, n, 128):
                    x[start : start + 128].sum(dtype=np.float64)

        medians = bench.compare(
            f"files of {n}^2 float32",
            {"check": lambda: _right(check(a, b, c)), "reading them once": read},
            check=lambda: _right(check(a, b, c)),
            inputs="a normal, b a scaled permutation; in the page cache",
            repeats=3,
        )
        square = rng.standard_normal((2048, 2048)).astype(np.float32)
        square @ square
        start = time.perf_counter()
        square @ square
        product_s = (time.perf_counter() - start) * (n / 2048) ** 3
        bench.claim(
            f"files of {n}^2 float32",
            "time, of the product's (from 2048^3)",
            medians["check"] / product_s,
            1.0,
        )


def _normal(rng: np.random.Generator, n: int, dtype: str) -> Any:
    x = rng.standard_normal((n, n), np.float32).astype(dtype)
    return x + 1j * rng.standard_normal((n, n), np.float32) if dtype == "complex64" else x


def _finds_a_flipped_bit(a: Any, b: Any, c: Any) -> None:
    _right(check(a, b, c))
    bad = c.copy()
    bad[17, 23] = -bad[17, 23] - 1
    first = check(a, b, bad).first
    assert first is not None
    assert first.index == (17, 23), first


def _right(found: Any) -> None:
    assert found, found


if __name__ == "__main__":
    main()
