"""What Hopper's planner weighs by: every kernel on many shapes, and the times that explain them.

Writes ``src/tilewise/kernels/hopper_times.json``. The model is the planner's own: what is fitted is
`hopper_plan.Times`, until the expected times are the measured ones.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks import hopper
from benchmarks.harness import RESULTS, machine
from tilewise.kernels.hopper_plan import Choice, Problem, choices
from tilewise.kernels.hopper_table import TIMES, Times
from tilewise.kernels.steps import Strides
from tilewise.runtime import device

SHAPES = (
    *((n, n, n) for n in (256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)),
    *((n, n, n) for n in (600, 1000, 1200, 2000, 3000, 5000, 10000)),  # off the lines of L2
    *((2048, 2048, k) for k in (64, 256, 1024, 8192)),
    *((4096, 4096, k) for k in (64, 256, 1024, 2048, 8192)),
    *((m, 4096, k) for m in (16, 32, 64, 256) for k in (1024, 4096, 16384)),
    *((16, 8192, 8192), (64, 7168, 2112), (128, 4096, 7168), (8192, 64, 8192)),
    *((100000, 128, 128), (1736, 584, 4720)),
    *((65, 47, 40), (1025, 1025, 1025), (777, 3333, 5555), (4097, 4097, 4097)),
    *((128, 128, 100000), (2048, 2048, 20000), (16, 8192, 32768)),
)
TIMINGS = RESULTS / "hopper_times.json"

_READINGS = 5
_TOLERANCE = 0.05  # errors beyond this weigh as their size, not as its square
_PRIOR = 1.0  # of a logarithm, in units of what an error of _TOLERANCE weighs

Row = tuple[Problem, str, float]


def main() -> None:
    reason = hopper.missing()
    if reason:
        print(f"hopper_times: not run, {reason}")
        return
    sweep()
    fit()


def sweep(path: Path = TIMINGS) -> None:
    """Measure every kernel on every shape, and save what came out."""
    timings = [
        {"m": p.m, "n": p.n, "k": p.k, "kernel": name, "us": us}
        for shape in SHAPES
        for p, name, us in measured(*shape)
    ]
    gpu = device.facts(0)
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": gpu.name,
        "driver": gpu.driver_version,
        "machine": machine(),
        "timings": timings,
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"-> {path}")


def fit(path: Path = TIMINGS, target: Path = TIMES) -> None:
    """Write the times that explain what was saved."""
    record = json.loads(path.read_text())
    rows = [
        (dense(row["m"], row["n"], row["k"]), row["kernel"], row["us"]) for row in record["timings"]
    ]
    times = fitted(rows, replace(Times.read(target), flop_per_us=sustained()))
    rms = float(np.sqrt(np.mean(misfit(rows, times) ** 2)))
    lost = statistics.geometric_mean(regrets(rows, times))
    source = (
        f"{len(rows)} timings of {len(SHAPES)} shapes in bfloat16 on {record['gpu']}, CUDA "
        f"{record['driver'] // 1000}, {record['date'][:10]}, by python -m benchmarks hopper_times; "
        "power by squares of 16384 in results/hopper.json; "
        f"expected times are within {100 * rms:.0f} % of them (rms), and what is chosen takes "
        f"{100 * lost - 100:.1f} % longer than the fastest"
    )
    print(f"hopper_times: {source}")
    text = json.dumps({"source": source, "times": asdict(times)}, indent=1)
    target.write_text(text + "\n", encoding="utf-8")


def sustained() -> float:
    """Return the operations in a microsecond of squares of 16384, as ``hopper`` measured them.

    Power limits a product only after a while: the sweep's readings are too short to show it.
    """
    cases = json.loads((RESULTS / "hopper.json").read_text())["cases"]
    name = "bfloat16 16384x16384x16384 NN"
    case = next(case for case in cases if case["case"] == name and "calls" in case)
    us = 1e6 * case["calls"]["tilewise"]["median_s"]
    return float(f"{2 * 16384**3 / us:.4g}")


def dense(m: int, n: int, k: int) -> Problem:
    a, b, c = Strides(0, 0, k, 1), Strides(0, 0, n, 1), Strides(0, 0, n, 1)
    return Problem(m=m, n=n, k=k, a=a, b=b, c=c)


def measured(m: int, n: int, k: int) -> list[Row]:
    """Return the microseconds of each choice for one product."""
    with hopper.operands(m, n, k, "NN", "bfloat16") as sets:
        p = hopper.problem(*sets[0])
        every = {choice.kernel.name: choice for choice in plain(p)}
        calls = {
            name: [hopper.prepare(p, choice, *tensors) for tensors in sets]
            for name, choice in every.items()
        }
        least = min(choice.expected_us for choice in every.values())
        timings = hopper.measure(calls, sets, least, _READINGS)
    return [(p, name, 1e6 * timing["median_s"]) for name, timing in timings.items()]


def fitted(rows: list[Row], times: Times) -> Times:
    """Return times that explain the rows: Gauss-Newton on logarithms, damped and robust.

    What the rows do not show, such as the steps of tiles that always wait for memory, stays near
    what it was.
    """
    pack, unpack = _logarithms(times)
    start = x = pack(times)

    def cost(x: NDArray[np.float64]) -> float:
        errors = misfit(rows, unpack(x)) / _TOLERANCE
        return float(np.sum(np.sqrt(1 + errors**2)) + _PRIOR * np.sum((x - start) ** 2))

    damping, least = 1e-2, cost(x)
    for _ in range(30):
        now = misfit(rows, unpack(x))
        shifts = 1e-4 * np.eye(len(x))
        slopes = np.stack([(misfit(rows, unpack(x + shift)) - now) / 1e-4 for shift in shifts])
        weighed = slopes / (_TOLERANCE * np.sqrt(_TOLERANCE**2 + now**2))
        curvature = weighed @ slopes.T + 2 * _PRIOR * np.eye(len(x))
        downhill = weighed @ now + 2 * _PRIOR * (x - start)
        step = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), downhill)
        trial = cost(x - step)
        if trial < least:
            x, least, damping = x - step, trial, damping / 3
        else:
            damping *= 4
    return unpack(x)


def misfit(rows: list[Row], times: Times) -> NDArray[np.float64]:
    """Return the logarithms of expected over measured times."""
    problems = dict.fromkeys(p for p, _, _ in rows)
    expected = {p: {x.kernel.name: x.expected_us for x in plain(p, times)} for p in problems}
    return np.array([np.log(expected[p][name] / us) for p, name, us in rows])


def plain(p: Problem, times: Times | None = None) -> Iterator[Choice]:
    """Yield what each kernel does by itself: no strips, and no packing that it can do without."""
    found: dict[str, Choice] = {}
    for choice in choices(p, times=times):
        if choice.is_transposed or choice.strips:
            continue
        other = found.setdefault(choice.kernel.name, choice)
        if choice.workspace_bytes < other.workspace_bytes:
            found[choice.kernel.name] = choice
    return iter(found.values())


def regrets(rows: list[Row], times: Times) -> list[float]:
    """Return for each problem how much slower the choice is than the fastest."""
    ratios = []
    for p in dict.fromkeys(p for p, _, _ in rows):
        mine = {name: us for other, name, us in rows if other == p}
        pick = min(plain(p, times), key=lambda choice: choice.expected_us)
        ratios.append(mine[pick.kernel.name] / min(mine.values()))
    return ratios


def _logarithms(
    times: Times,
) -> tuple[Callable[[Times], NDArray[np.float64]], Callable[[NDArray[np.float64]], Times]]:
    """Return how times become a vector, and back; what is not fitted stays."""
    names = [
        name
        for name, value in asdict(times).items()
        if isinstance(value, float) and name != "flop_per_us"
    ]
    tiles = list(times.tiles)

    def pack(given: Times) -> NDArray[np.float64]:
        single = [getattr(given, name) for name in names]
        return np.log(np.array([*single, *(x for tile in tiles for x in given.tiles[tile])]))

    def unpack(x: NDArray[np.float64]) -> Times:
        values = [float(f"{value:.6g}") for value in np.exp(x)]
        pairs = np.reshape(values[len(names) :], (-1, 2)).tolist()
        single = dict(zip(names, values, strict=False))
        return replace(
            times, **single, tiles={t: (a, b) for t, (a, b) in zip(tiles, pairs, strict=True)}
        )

    return pack, unpack


if __name__ == "__main__":
    main()
