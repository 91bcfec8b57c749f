"""The tables of docs/facts.md, made of the figures in benchmarks/results/.

A table stands between ``<!-- NAME.json -->`` and ``<!-- end -->``; what is between them is written
here and nowhere else, and a test compares the page with the files.
"""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS

PAGE = Path(__file__).parents[1] / "docs" / "facts.md"
_PLACE = re.compile(r"(<!-- (\w+)\.json -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> None:
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"-> {PAGE}")


def filled(page: str) -> str:
    """Return a page with each of its tables made anew."""

    def table_of(place: re.Match[str]) -> str:
        record = json.loads((RESULTS / f"{place[2]}.json").read_text(encoding="utf-8"))
        made = table_of_calls(record) if record["name"] == "call" else table(record)
        return f"{place[1]}\n{made}\n\n{place[3]}"

    return _PLACE.sub(table_of, page)


def table(record: dict[str, Any]) -> str:
    """Return a record's cases: one row for each type and sizes, its layouts side by side."""
    rows: dict[tuple[str, str], list[tuple[str, float, float, str]]] = {}
    for case in record["cases"]:
        if "calls" not in case:
            continue
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
    for case in record["cases"]:
        if "calls" in case:
            times = (
                f"`{name}` {shown_time(timing['median_s'])}"
                for name, timing in case["calls"].items()
            )
            lines.append(f"| {case['case'].replace('^3', '³')} | {', '.join(times)} |")
    return "\n".join(lines)


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
