"""What one product of device arrays costs its caller: the time until the call returns.

Needs an NVIDIA GPU and torch; CuPy joins where it is installed. Products are small, so that the
host is what takes long, and calls are timed in bursts that the queue of a stream holds: what the
GPU does meanwhile is waited for between readings and in none of them. Operands are normal; every
result is compared with a float64 product, on NaN, before anything is timed.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.harness import Benchmark
from tilewise import kernels, matmul, plan
from tilewise._gpu import OnGpu, prepared
from tilewise._plan import Plan
from tilewise.errors import DeviceError
from tilewise.runtime import device, streams

N = 512
#: What a call may cost at most, in microseconds.
LIMITS = {"plan": 10.0, "matmul out=": 18.0, "matmul": 18.0}
BASELINE = "torch.mm out="

_BURST = 50
_READINGS = 101
#: An error allowed, of the scale |A||B|: K + 2 roundings, and one of the result.
_UNIT = {"bfloat16": 2.0**-8, "float32": 2.0**-24}


def main() -> None:
    reason = missing()
    if reason:
        print(f"call: not run, {reason}")
        return
    bench = Benchmark("call", "host time of a call on device arrays")
    on_torch(bench, "bfloat16", None)
    on_torch(bench, "float32", "ieee")
    on_torch(bench, "float32", None)
    on_cupy(bench)
    bench.save()


def missing() -> str:
    """Return what this needs and is not there, or nothing."""
    try:
        import torch  # noqa: F401

        kernels.manifest("portable")
        device.facts(0)
    except (ImportError, DeviceError) as error:
        return str(error)
    return ""


def on_torch(bench: Benchmark, dtype: str, precision: str | None) -> None:
    """Time a plan, `matmul` and torch on tensors of one type."""
    import torch

    kind = getattr(torch, dtype)
    sets = [[torch.randn(N, N, device="cuda").to(kind) for _ in "abc"] for _ in range(4)]
    a, b, c = sets[0]
    made = plan(a, b, out=c, precision=precision)
    turns = itertools.cycle(sets)

    def in_turn() -> None:
        x, y, z = next(turns)
        made(x, y, out=z)

    assert isinstance(made.how, OnGpu)
    put, pointers = prepared(made.how.recipe, 0), (a.data_ptr(), b.data_ptr(), c.data_ptr())
    calls: dict[str, Callable[[], object]] = {
        "launch alone": lambda: put(pointers, streams.DEFAULT),
        "plan": lambda: made(a, b, out=c),
        "plan, arrays in turn": in_turn,
        "matmul out=": lambda: matmul(a, b, out=c, precision=precision),
        "matmul": lambda: matmul(a, b, precision=precision),
        "torch.mm": lambda: torch.mm(a, b),
        BASELINE: lambda: torch.mm(a, b, out=c),
    }
    for name in ("plan", "matmul out=", "matmul"):
        for _ in range(3):  # the second and the third are recognised
            c.fill_(torch.nan)
            check(a, b, calls[name](), dtype)
    for *_, z in sets:
        z.fill_(torch.nan)
    for x, y, z in [*sets, *sets]:
        in_turn()
        check(x, y, z, dtype)
    compare(bench, f"{dtype} {precision or ''} {N}^3, torch".replace("  ", " "), made, calls)


def on_cupy(bench: Benchmark) -> None:
    """Time the same on CuPy's arrays, against CuPy."""
    try:
        import cupy
    except ImportError:
        return
    a, b, c = (cupy.random.standard_normal((N, N), dtype=cupy.float32) for _ in "abc")
    made = plan(a, b, out=c, precision="ieee")
    calls: dict[str, Callable[[], object]] = {
        "plan": lambda: made(a, b, out=c),
        "matmul out=": lambda: matmul(a, b, out=c, precision="ieee"),
        "matmul": lambda: matmul(a, b, precision="ieee"),
        "cupy.matmul": lambda: cupy.matmul(a, b),
        "cupy.matmul out=": lambda: cupy.matmul(a, b, out=c),
    }
    for name in ("plan", "matmul out=", "matmul"):
        for _ in range(3):
            c.fill(cupy.nan)
            check(a, b, calls[name](), "float32")
    compare(bench, f"float32 ieee {N}^3, CuPy", made, calls)


def check(a: Any, b: Any, c: Any, dtype: str) -> None:
    """Raise unless c is a·b within the error that its type allows."""
    import torch

    x, y, z = (torch.as_tensor(t, device="cuda").double() for t in (a, b, c))
    allowed = ((N + 2) * 2.0**-24 + _UNIT[dtype]) * (x.abs() @ y.abs())
    assert bool(((z - x @ y).abs() <= allowed).all()), f"{dtype}: wrong"


def compare(
    bench: Benchmark, case: str, made: Plan, calls: dict[str, Callable[[], object]]
) -> None:
    """Time bursts of each call in turn, print medians, and record them.

    The limits are for what one launch computes; each launch more costs what "launch alone" does.
    """
    import torch

    readings: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(_READINGS):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(_BURST):
                call()
            readings[name].append((time.perf_counter() - start) / _BURST)
    torch.cuda.synchronize()
    timings: dict[str, dict[str, Any]] = {}
    for name, values in readings.items():
        low, median, high = statistics.quantiles(values, n=4)
        timings[name] = {
            "median_s": median,
            "low_s": low,
            "high_s": high,
            "readings_s": values,
            "calls_per_reading": _BURST,
        }
        print(
            f"call: {case:<24} {name:<22} {1e6 * median:7.2f} us  "
            f"({1e6 * low:.2f} to {1e6 * high:.2f})",
            flush=True,
        )
    assert isinstance(made.how, OnGpu)
    launches = [step.kernel for step in made.how.recipe.steps]
    bench.cases.append(
        {
            "case": case,
            "inputs": "normal",
            "baseline": list(calls)[-1],
            "launches": launches,
            "calls": timings,
        }
    )
    if len(launches) > 1:
        return
    for name, limit in LIMITS.items():
        bench.claim(case, name, 1e6 * timings[name]["median_s"], limit, "µs")


if __name__ == "__main__":
    main()
