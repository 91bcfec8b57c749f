"""Host arrays multiplied on GPUs against CuPy and torch, from NumPy to NumPy, copies included.

Needs a GPU, CuPy and torch. Operands are normal float32 in pageable memory; results are fresh each
time. Peers copy in, multiply and copy out, which is what their users write. A sample of every
result is compared with float64 first, and all of it with NaN. Then the same from a budget of device
memory against the product alone in the device; with some of the arrays in the device, against
peers that copy the others; and two GPUs against one, where there are two.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

import tilewise as tw
from benchmarks.harness import Benchmark
from tilewise.errors import DeviceError
from tilewise.runtime import device

Array = NDArray[Any]

#: m, n, k; then at least how many times as fast as CuPy and as torch.
FRESH = (
    ((4096, 4096, 4096), 5.0, 7.0),
    ((8192, 8192, 8192), 4.3, 7.0),
    ((16384, 16384, 16384), 7.5, 12.0),
    ((65536, 4096, 4096), 7.0, 11.0),
)
#: n, device memory, and at least what part of the rate of the product in the device.
BUDGETED = ((32768, "2GiB", 0.5), (65536, "8GiB", 0.75))
#: m, n, k; where a, b and the result are (D for the device); then as for `FRESH`.
MIXED = (
    ((16384, 16384, 16384), "DHH", 5.0, 6.0),
    ((16384, 16384, 16384), "DDH", 5.0, 6.0),
    ((16384, 16384, 16384), "HHD", 5.0, 6.0),
    ((262144, 2048, 2048), "HDH", 3.5, 3.5),
)
#: n, and at least how many times as fast two GPUs are as one.
SHARED = ((49152, 1.5),)

INPUTS = "standard normal, pageable memory"


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["fresh", "budgeted", "mixed", "shared"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--most", type=int, default=3 * 10**9, help="elements of C at most")
    given = parser.parse_args(arguments)
    try:
        gpus = device.count()
    except DeviceError as error:
        print(f"host: not run, {error}")
        return
    alone = {"budgeted": "host_budgeted", "mixed": "host_mixed", "shared": "host_two_gpus"}
    name = alone.get(",".join(given.parts), "host")
    bench = Benchmark(name, "host arrays on GPUs, copies included, against CuPy and torch")
    if "fresh" in given.parts:
        for (m, n, k), cupy_least, torch_least in FRESH:
            if m * n <= given.most:
                against_peers(bench, m, n, k, cupy_least, torch_least, given.repeats)
    if "budgeted" in given.parts:
        for n, memory, least in BUDGETED:
            if n * n <= given.most:
                within_budget(bench, n, memory, least, given.repeats)
    if "mixed" in given.parts:
        for (m, n, k), places, cupy_least, torch_least in MIXED:
            if m * n <= given.most:
                mixed(bench, m, n, k, places, cupy_least, torch_least, given.repeats)
    if "shared" in given.parts and gpus > 1:
        for n, least in SHARED:
            if n * n <= given.most:
                on_two(bench, n, least)
    bench.save()


def against_peers(
    bench: Benchmark, m: int, n: int, k: int, cupy_least: float, torch_least: float, repeats: int
) -> None:
    import cupy
    import torch

    a, b = normal(m, k, seed=1), normal(k, n, seed=2)
    plan = tw.plan(a, b, devices="cuda:0")

    def by_cupy() -> object:
        return cupy.asnumpy(cupy.asarray(a) @ cupy.asarray(b))

    def by_torch() -> object:
        return (torch.from_numpy(a).cuda() @ torch.from_numpy(b).cuda()).cpu()

    reused = np.empty((m, n), np.float32)

    def check() -> None:
        reused[...] = np.nan
        compare(plan(a, b, out=reused), a, b)
        compare(plan(a, b), a, b)

    case = f"{m}x{n}x{k}"
    times = bench.compare(
        case,
        {
            "tilewise": lambda: plan(a, b),
            "tilewise, into a result": lambda: plan(a, b, out=reused),
            "torch": by_torch,
            "cupy": by_cupy,
        },
        check=check,
        inputs=INPUTS,
        repeats=repeats,
    )
    claim(bench, case, times, cupy_least, torch_least)
    cupy.get_default_memory_pool().free_all_blocks()
    torch.cuda.empty_cache()


def within_budget(bench: Benchmark, n: int, memory: str, least: float, repeats: int) -> None:
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()
    a, b = normal(n, n, seed=1), normal(n, n, seed=2)
    out = np.full((n, n), np.nan, np.float32)
    plan = tw.plan(a, b, out=out, devices="cuda:0", memory=memory)
    print(plan, flush=True)
    x, y, z = cupy.asarray(a), cupy.asarray(b), cupy.full((n, n), np.nan, np.float32)

    def inside() -> None:
        tw.matmul(x, y, out=z)
        cupy.cuda.Device().synchronize()

    def check() -> None:
        compare(plan(a, b, out=out), a, b)
        inside()
        for start in range(0, n, 4096):
            rows = slice(start, start + 4096)
            if not (cupy.asarray(out[rows]) == z[rows]).all():
                raise AssertionError("the bits are not those of the product in the device")

    case = f"{n}x{n}x{n} in {memory}"
    times = bench.compare(
        case,
        {"tilewise": lambda: plan(a, b, out=out), "in the device": inside},
        check=check,
        inputs=INPUTS,
        repeats=repeats,
    )
    ratio = times["tilewise"] / times["in the device"]
    bench.claim(case, "our time, of that in the device", ratio, 1 / least)


def mixed(
    bench: Benchmark,
    m: int,
    n: int,
    k: int,
    places: str,
    cupy_least: float,
    torch_least: float,
    repeats: int,
) -> None:
    """Multiply with some arrays in the device, into a given result."""
    import cupy
    import torch

    cupy.get_default_memory_pool().free_all_blocks()
    torch.cuda.empty_cache()
    a, b = normal(m, k, seed=1), normal(k, n, seed=2)
    out = np.full((m, n), np.nan, np.float32)
    x, y, z = (
        cupy.asarray(array) if place == "D" else array
        for array, place in zip((a, b, out), places, strict=True)
    )
    there = [torch.as_tensor(array, device="cuda") for array in (x, y, z)]  # no copies of CuPy's
    left, right, target = (
        each if place == "D" else torch.from_numpy(array)
        for each, array, place in zip(there, (a, b, out), places, strict=True)
    )
    del there
    plan = tw.plan(x, y, out=z)
    print(plan, flush=True)

    def by_cupy() -> None:
        made = cupy.matmul(cupy.asarray(x), cupy.asarray(y))
        if places[2] == "D":
            z[...] = made
            cupy.cuda.Device().synchronize()
        else:
            made.get(out=z)

    def by_torch() -> None:
        target.copy_(left.cuda() @ right.cuda())
        torch.cuda.synchronize()

    def check() -> None:
        z[...] = np.nan
        got = plan(x, y, out=z)
        compare(got if isinstance(got, np.ndarray) else got.get(), a, b)

    case = f"{m}x{n}x{k}, {places}"
    times = bench.compare(
        case,
        {"tilewise": lambda: plan(x, y, out=z), "torch": by_torch, "cupy": by_cupy},
        check=check,
        inputs=INPUTS,
        repeats=repeats,
    )
    claim(bench, case, times, cupy_least, torch_least)


def claim(
    bench: Benchmark, case: str, times: dict[str, float], cupy_least: float, torch_least: float
) -> None:
    """Claim at least so many times the peers' rates."""
    ours = times["tilewise"]
    bench.claim(case, "our time, of CuPy's", ours / times["cupy"], 1 / cupy_least)
    bench.claim(case, "our time, of torch's", ours / times["torch"], 1 / torch_least)


def on_two(bench: Benchmark, n: int, least: float) -> None:
    a, b = normal(n, n, seed=1), normal(n, n, seed=2)
    out = np.full((n, n), np.nan, np.float32)
    times = []
    for devices in (["cuda:0"], ["cuda:0", "cuda:1"]):
        plan = tw.plan(a, b, out=out, devices=devices)
        compare(plan(a, b, out=out), a, b)
        times.append(seconds(lambda plan=plan: plan(a, b, out=out)))  # type: ignore[misc]
        print(f"host: {n}³ on {plan.device}: {1e3 * times[-1]:.0f} ms", flush=True)
    bench.claim(f"{n}^3", "two GPUs' time, of one's", times[1] / times[0], 1 / least)


def seconds(
    call: Callable[[], object], wait: Callable[[], object] = lambda: None, repeats: int = 2
) -> float:
    wait()  # for what was put on the device before
    readings = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        wait()
        readings.append(time.perf_counter() - start)
    return statistics.median(readings)


def compare(c: Array, a: Array, b: Array) -> None:
    """Raise unless a sample of ``c`` is right, and none of it NaN."""
    rng = np.random.default_rng(0)
    rows = rng.choice(a.shape[0], 8, replace=False)
    cols = rng.choice(b.shape[1], 64, replace=False)
    x, y = a[rows].astype(float), b[:, cols].astype(float)
    bound = (a.shape[1] + 2) * 2.0**-24 * (abs(x) @ abs(y))
    error = abs(c[np.ix_(rows, cols)] - x @ y)
    if not (error <= bound).all() or math.isnan(float(c.sum())):
        raise AssertionError(f"the result is wrong: {float((error / bound).max())} of the bound")


def normal(rows: int, cols: int, seed: int) -> Array:
    """Return random numbers, made by all cores."""
    made = np.empty((rows, cols), np.float32)
    parts = np.array_split(made, os.cpu_count() or 1)
    seeds = np.random.SeedSequence(seed).spawn(len(parts))

    def fill(part: Array, own: Any) -> None:
        np.random.default_rng(own).standard_normal(dtype=np.float32, out=part)

    with ThreadPoolExecutor(len(parts)) as pool:
        list(pool.map(fill, parts, seeds))
    return made


if __name__ == "__main__":
    main(sys.argv[1:])
