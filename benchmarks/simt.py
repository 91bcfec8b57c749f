"""The simulated GPU on the guide's kernels, beside the least NumPy that gives the same bits."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import Benchmark
from tilewise import simt
from tilewise.guide import Muld, Muld_any, naive
from tilewise.simt.fma import fma_f4

Array = NDArray[np.float32]

#: Seconds that the guide's kernel may take, by the side of the matrices.
LIMITS_S = {64: 0.05, 256: 0.4}


def main() -> None:
    bench = Benchmark("simt", "the simulated GPU on the guide's kernels")
    rng = np.random.default_rng(0)
    for n in (64, 256, 512):
        a, b = (rng.standard_normal((n, n)).astype(np.float32) for _ in range(2))
        right = _fma_chain(a, b)
        calls: dict[str, Callable[[], object]] = {
            kernel.__name__: lambda kernel=kernel, a=a, b=b: _run(kernel, a, b)
            for kernel in (Muld, Muld_any, naive)
        }
        calls["FMA chain in NumPy"] = lambda a=a, b=b: _fma_chain(a, b)
        medians = bench.compare(
            f"{n}^3",
            calls,
            check=lambda a=a, b=b, right=right: _is_right(a, b, right),
            inputs="normal",
            repeats=7 if n < 512 else 3,
        )
        if n in LIMITS_S:
            bench.claim(f"{n}^3", "Muld", medians["Muld"], LIMITS_S[n], "s")
    bench.claim("Muld", "reading and rewriting", _first_call_s(), 0.1, "s")
    bench.save()


def _run(kernel: Any, a: Array, b: Array) -> Array:
    n = len(a)
    c = np.full((n, n), np.nan, np.float32)
    simt.launch(kernel, (n // 16, n // 16), (16, 16), a, b, n, n, c)
    return c


def _fma_chain(a: Array, b: Array) -> Array:
    c = np.zeros_like(a)
    for k in range(len(b)):
        c = fma_f4(a[:, k : k + 1], b[k : k + 1], c)
    return c


def _is_right(a: Array, b: Array, right: Array) -> None:
    for kernel in (Muld, Muld_any, naive):
        assert np.array_equal(_run(kernel, a, b), right), kernel


def _first_call_s() -> float:
    """Time what a kernel's first launch costs beyond a later one: parsing, typing, writing."""
    one = np.ones((16, 16), np.float32)
    _run(Muld, one, one)
    reading = sys.modules["tilewise.simt.program"]  # the package's name for it is a function
    reading._PROGRAMS.clear()
    reading._parse.cache_clear()
    start = time.perf_counter()
    _run(Muld, one, one)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
