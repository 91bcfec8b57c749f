"""One way of measuring: results checked first, calls interleaved, medians with their spread.

A benchmark module makes one `Benchmark`, adds cases to it and saves it: a short table on the
terminal, and one JSON file in ``benchmarks/results/`` with everything that a figure's reader needs
(machine, versions, threads, inputs, repeats). Nothing here knows what is being measured.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["RESULTS", "Benchmark", "machine", "measure"]

RESULTS = Path(__file__).parent / "results"

#: A timing shorter than this is repeated within one reading, so that the clock does not show.
_LEAST_READING_S = 1e-3


class Benchmark:
    """Cases of one subject, saved together as ``results/<name>.json``."""

    def __init__(self, name: str, title: str) -> None:
        self.name = name
        self.title = title
        self.cases: list[dict[str, Any]] = []

    def compare(
        self,
        case: str,
        calls: Mapping[str, Callable[[], object]],
        *,
        check: Callable[[], None],
        inputs: str,
        repeats: int = 7,
    ) -> dict[str, float]:
        """Time calls that do the same job, interleaved; return the median of each in seconds.

        Parameters
        ----------
        case : str
            What is done, with shapes and dtypes.
        calls : mapping of str to callable
            The contenders by name, ours first; the last is the baseline of the printed ratio.
        check : callable
            Raises if a result is wrong. It runs before anything is timed, and warms up too.
        inputs : str
            The distribution of the input values.
        repeats : int
            Readings of each call.
        """
        check()
        timings = measure(calls, repeats=repeats)
        baseline = list(calls)[-1]
        medians = {name: timing["median_s"] for name, timing in timings.items()}
        self.cases.append({"case": case, "inputs": inputs, "baseline": baseline, "calls": timings})
        for name, timing in timings.items():
            self._print(
                case,
                name,
                f"{_seconds(timing['median_s'])}  ({_seconds(timing['low_s'])} to "
                f"{_seconds(timing['high_s'])})  x {medians[name] / medians[baseline]:.3f}",
            )
        return medians

    def claim(self, case: str, what: str, measured: float, limit: float, unit: str = "") -> bool:
        """Record whether a measured figure is at most its limit; return whether it is."""
        is_met = bool(measured <= limit)
        self.cases.append(
            {
                "case": case,
                "claim": what,
                "measured": measured,
                "limit": limit,
                "unit": unit,
                "met": is_met,
            }
        )
        verdict = "met" if is_met else "NOT MET"
        self._print(case, what, f"{measured:.4g} {unit} (limit {limit:.4g} {unit}): {verdict}")
        return is_met

    def save(self) -> Path:
        """Write the JSON file whole, and return its path."""
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{self.name}.json"
        record = {
            "name": self.name,
            "title": self.title,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "cases": self.cases,
        }
        part = path.with_suffix(".json.part")
        part.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        part.replace(path)
        print(f"-> {path}")
        return path

    def _print(self, case: str, name: str, text: str) -> None:
        print(f"{self.name}: {case:<32} {name:<20} {text}", flush=True)


def measure(
    calls: Mapping[str, Callable[[], object]], *, repeats: int = 7
) -> dict[str, dict[str, Any]]:
    """Time calls in turn, A B A B, so that a drift of the machine meets all of them alike.

    Returns
    -------
    dict
        For each name: median_s, low_s and high_s (the quartiles), all readings_s, and the number
        of calls averaged in one reading.
    """
    loops = {}
    for name, call in calls.items():
        start = time.perf_counter()
        call()
        once_s = time.perf_counter() - start
        loops[name] = max(1, round(_LEAST_READING_S / max(once_s, 1e-7)))
    readings: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            count = loops[name]
            start = time.perf_counter()
            for _ in range(count):
                call()
            readings[name].append((time.perf_counter() - start) / count)
    return {name: _summary(values, loops[name]) for name, values in readings.items()}


def refuse_impossible(case: str, operations: float, seconds: float, peak: float) -> None:
    """Raise where a rate is above the hardware's peak (operations a second): not all was done."""
    rate = operations / seconds
    if rate > peak:
        raise AssertionError(
            f"{case}: {rate:.3g} operations a second, where {peak:.3g} are possible"
        )


def machine() -> dict[str, Any]:
    """Return what a reader needs to judge or repeat a figure."""
    versions = {}
    for package in ("tilewise", "numpy", "ml_dtypes", "numba", "scikit-learn"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "system": platform.platform(),
        "python": sys.version.split()[0],
        "versions": versions,
        "blas": _blas(),
        "threads": {
            name: value for name, value in os.environ.items() if name.endswith("_NUM_THREADS")
        },
    }


def _summary(readings: list[float], loops: int) -> dict[str, Any]:
    low, median, high = (
        statistics.quantiles(readings, n=4, method="inclusive")
        if len(readings) > 1
        else readings * 3
    )
    return {
        "median_s": median,
        "low_s": low,
        "high_s": high,
        "readings_s": readings,
        "calls_per_reading": loops,
    }


def _seconds(value: float) -> str:
    for factor, unit in ((1.0, "s "), (1e3, "ms")):
        if value * factor >= 1:
            return f"{value * factor:7.3f} {unit}"
    return f"{value * 1e6:7.2f} µs"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _blas() -> str:
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return str(blas.get("openblas configuration") or f"{blas.get('name')} {blas.get('version')}")
