"""The tables of docs/facts.md and of README, made of the figures in benchmarks/results/.

A table stands between ``<!-- NAME.json -->`` and ``<!-- end -->``, and a choice from several files
after ``<!-- chosen.json -->``. What is between is written here and nowhere else; a test compares
the pages with the files.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS

_ROOT = Path(__file__).parents[1]
PAGES = (_ROOT / "README.md", _ROOT / "docs" / "facts.md")
#: What README shows: a file, and a case in it.
CHOSEN = (
    ("hopper", "bfloat16 4096x4096x4096 NN"),
    ("hopper", "bfloat16 16384x16384x16384 NN"),
    ("hopper", "bfloat16 4097x4097x4097 NN"),
    ("hopper", "bfloat16 16x8192x8192 NN"),
    ("float32", "float32 8192x8192x8192 NN"),
    ("float32", "float32 32768x32768x32768 NN"),
    ("float32", "float32 4097x4097x4097 NN"),
    ("float32", "float32 16x8192x8192 NN"),
    ("float32", "complex64 4096x4096x4096 NN"),
    ("portable", "float64 8192x8192x8192 NN"),
    ("portable", "float64 4097x4097x4097 NN"),
    ("portable", "int8 8192x8192x8192 NT"),
    ("portable", "int8 1000x1000x1000 NN"),
    ("portable", "float8_e4m3fn 8192x8192x8192 NT"),
)
_PLACE = re.compile(r"(<!-- (\w+)\.json -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> None:
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"-> {page}")


def filled(page: str) -> str:
    """Return a page with each of its tables made anew."""

    def table_of(place: re.Match[str]) -> str:
        if place[2] == "chosen":
            made = table({"cases": [case_of(*chosen) for chosen in CHOSEN]})
        else:
            record = recorded(place[2])
            made = _TABLES.get(record["name"], table)(record)
        return f"{place[1]}\n{made}\n\n{place[3]}"

    return _PLACE.sub(table_of, page)


def recorded(name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return record


def case_of(name: str, case: str) -> dict[str, Any]:
    """Return what a file says of a case that was timed."""
    return next(each for each in timed(recorded(name)) if each["case"] == case)


def timed(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the cases whose calls were timed, and not those that were claimed."""
    return (case for case in record["cases"] if "calls" in case)


def table(record: dict[str, Any]) -> str:
    """Return a record's cases: one row for each type and sizes, its layouts side by side."""
    rows: dict[tuple[str, str], list[tuple[str, float, float, str]]] = {}
    for case in timed(record):
        name, _, layout = case["case"].rpartition(" ")
        dtype, _, sizes = name.rpartition(" ")
        baseline = case["baseline"]
        ours = case["calls"]["tilewise"]
        theirs = case["calls"].get(baseline)
        speed = ratio(ours, theirs) if theirs else float("nan")
        rows.setdefault((dtype, sizes), []).append((layout, speed, ours["median_s"], baseline))
    lines = [
        "| operands | M × N × K | layouts | time | of the other's rate | the other |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for (dtype, sizes), cells in rows.items():
        layouts, speeds, times, others = zip(*cells, strict=True)
        lines.append(
            f"| {dtype} | {shown_sizes(sizes)} | {' / '.join(layouts)} "
            f"| {' / '.join(shown_time(seconds) for seconds in times)} "
            f"| {' / '.join('–' if speed != speed else f'{speed:.2f}' for speed in speeds)} "
            f"| {others[0]} |"
        )
    return "\n".join(lines)


def table_of_calls(record: dict[str, Any]) -> str:
    """Return a row for each kind of operands: what every call on them takes."""
    lines = ["| operands | time until a call returns |", "| --- | --- |"]
    for case in timed(record):
        times = (
            f"`{name}` {shown_time(timing['median_s'])}" for name, timing in case["calls"].items()
        )
        lines.append(f"| {case['case'].replace('^3', '³')} | {', '.join(times)} |")
    return "\n".join(lines)


def table_of_host(record: dict[str, Any]) -> str:
    """Return a row for each product of host arrays: into new memory, and into a given result."""
    lines = [
        "| float32, M × N × K | new result | given result | of CuPy's rate | of torch's |",
        "| --- | --- | --- | --- | --- |",
    ]
    for case in timed(record):
        calls = case["calls"]
        ways = [calls["tilewise"], calls["tilewise, into a result"]]
        times = " | ".join(shown_time(way["median_s"]) for way in ways)
        speeds = " | ".join(
            " / ".join(f"{ratio(way, calls[other]):.1f}" for way in ways)
            for other in ("cupy", "torch")
        )
        lines.append(f"| {shown_sizes(case['case'])} | {times} | {speeds} |")
    return "\n".join(lines)


def table_of_budgets(record: dict[str, Any]) -> str:
    """Return a row for each product within a budget of device memory."""
    lines = [
        "| float32, M × N × K | device memory | time | in the device | of that rate |",
        "| --- | --- | --- | --- | --- |",
    ]
    for case in timed(record):
        sizes, _, memory = case["case"].partition(" in ")
        ours, inside = case["calls"]["tilewise"], case["calls"][case["baseline"]]
        lines.append(
            f"| {shown_sizes(sizes)} | {memory.replace('GiB', ' GiB')} "
            f"| {shown_time(ours['median_s'])} | {shown_time(inside['median_s'])} "
            f"| {ratio(ours, inside):.2f} |"
        )
    return "\n".join(lines)


def table_of_mixed(record: dict[str, Any]) -> str:
    """Return a row for each product of arrays of which some are in the device."""
    lines = [
        "| float32, M × N × K | on the GPU | time | of CuPy's rate | of torch's |",
        "| --- | --- | --- | --- | --- |",
    ]
    for case in timed(record):
        sizes, _, places = case["case"].partition(", ")
        there = [name for name, place in zip("abc", places, strict=True) if place == "D"]
        ours = case["calls"]["tilewise"]
        speeds = " | ".join(f"{ratio(ours, case['calls'][x]):.1f}" for x in ("cupy", "torch"))
        lines.append(
            f"| {shown_sizes(sizes)} | {', '.join(there)} | {shown_time(ours['median_s'])} "
            f"| {speeds} |"
        )
    return "\n".join(lines)


_TABLES = {
    "call": table_of_calls,
    "host": table_of_host,
    "host_budgeted": table_of_budgets,
    "host_mixed": table_of_mixed,
}


def ratio(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """Return the median of the ratios of readings taken side by side."""
    pairs = zip(theirs["readings_s"], ours["readings_s"], strict=True)
    return statistics.median(other / own for other, own in pairs)


def shown_sizes(sizes: str) -> str:
    each = sizes.split("x")
    return f"{each[0]}³" if len(set(each)) == 1 else " × ".join(each)


def shown_time(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.1f} µs"


if __name__ == "__main__":
    main()
