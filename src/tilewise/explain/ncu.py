"""Reads what ncu printed with ``--csv``, and lays it beside a report's figures.

Both of ncu's layouts are read: a row for each metric (``--page details``, the default) and a row
for each launch (``--page raw``). Only metrics that a report predicts are compared; the others
depend on what else the machine does (docs/facts.md).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import FileError, OptionError
from .report import Dim, Figures, Report

__all__ = ["Comparison", "MeasuredLaunch", "beside", "read_ncu"]

_PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
# The metric by which it is told whether loads were merged: how many were executed.
_LOADS = "smsp__inst_executed_op_shared_ld.sum"
_BUSY = (
    "wavefronts and bank conflicts are measured on a busy pipe, where the hardware adds some by "
    "arbitration, up to a fifth; the prediction is of an idle one"
)


@dataclass(frozen=True, slots=True)
class MeasuredLaunch:
    """One launch that ncu has measured; old versions of it do not print grid and block."""

    id: str
    kernel: str
    grid: Dim | None
    block: Dim | None
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric, as measured and as predicted."""

    metric: str
    measured: float
    predicted: float

    @property
    def difference(self) -> str:
        """``equal``, or ``+1.3 %`` of the prediction."""
        if self.measured == self.predicted:
            return "equal"
        if not self.predicted:
            return f"{self.measured - self.predicted:+,.0f}"
        return f"{100 * (self.measured / self.predicted - 1):+.2f} %"


@dataclass(frozen=True, slots=True)
class Comparison:
    """A launch beside its prediction; ``sentence`` says which launch and at which level."""

    sentence: str
    level: str
    rows: tuple[MetricRow, ...]
    notes: tuple[str, ...] = field(default=())


def beside(report: Report, launches: Sequence[MeasuredLaunch]) -> Comparison:
    """Lay the last launch of a report's kernel beside its figures.

    Raises
    ------
    OptionError
        There is no launch of that kernel, grid and block, or nothing in it that is predicted.
    """
    if not report.figures:
        raise OptionError(f"nothing is predicted under ncu's names for {report.target}")
    alike = [m for m in launches if _is_of(m, report)]
    if not alike:
        seen = dict.fromkeys(f"{_short(m.kernel)} {m.grid} {m.block}" for m in launches)
        raise OptionError(
            f"ncu's file has no launch of {report.kernel} with grid {report.grid} and block "
            f"{report.block}; it has {', '.join(seen)}"
        )
    measured = alike[-1]
    figures = _level(report.figures, measured.metrics)
    common = [name for name in figures.metrics if name in measured.metrics]
    if not common:
        raise OptionError(
            f"ncu's file has none of the metrics that are predicted; measure with --metrics "
            f"{','.join(name for name in figures.metrics if '__' in name)}"
        )
    rows = tuple(MetricRow(n, measured.metrics[n], figures.metrics[n]) for n in common)
    equal = sum(row.measured == row.predicted for row in rows)
    how = "as written" if figures.level == "source" else "with loads merged, as nvcc does"
    return Comparison(
        f"launch {measured.id} of {_short(measured.kernel)}: {equal} of {len(rows)} metrics equal "
        f"those predicted, the kernel taken {how}",
        figures.level,
        rows,
        _notes(rows),
    )


def read_ncu(path: str | Path) -> list[MeasuredLaunch]:
    """Read the launches of a file that ``ncu --csv`` has printed.

    Raises
    ------
    FileError
        The file cannot be read, or is not what ncu prints.
    """
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}") from None
    # Above the table stand what the program printed, and ncu's own lines, which begin with ==.
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if '"Kernel Name"' in line), None)
    if start is None:
        raise FileError(
            f'{path} is not a table of ncu\'s: no line has a column "Kernel Name"; make it with '
            "ncu --csv --metrics ... > report.csv"
        )
    rows = list(csv.DictReader(line for line in lines[start:] if not line.startswith("==")))
    launches = _by_metric(rows) if rows and "Metric Name" in rows[0] else _by_launch(rows)
    if not launches:
        raise FileError(f"{path} has no launch in it")
    return launches


def _by_metric(rows: Iterable[Mapping[str, str]]) -> list[MeasuredLaunch]:
    """A row is one metric of one launch."""
    launches: dict[str, MeasuredLaunch] = {}
    for row in rows:
        launch = launches.setdefault(row["ID"], _launch(row, {}))
        value = _number(row.get("Metric Value", ""), row.get("Metric Unit", ""))
        if value is not None:
            assert isinstance(launch.metrics, dict)
            launch.metrics[row["Metric Name"]] = value
    return list(launches.values())


def _by_launch(rows: Sequence[Mapping[str, str]]) -> list[MeasuredLaunch]:
    """A row is one launch; the first row has the units."""
    units: Mapping[str, str] = {}
    if rows and not rows[0]["Kernel Name"]:
        units, rows = rows[0], rows[1:]
    launches = []
    for row in rows:
        # Of the columns, metrics have an underscore in their names.
        names = [name for name in row if name and "_" in name]
        values = {name: _number(row[name], units.get(name, "")) for name in names}
        metrics = {name: value for name, value in values.items() if value is not None}
        launches.append(_launch(row, metrics))
    return launches


def _launch(row: Mapping[str, str], metrics: dict[str, float]) -> MeasuredLaunch:
    grid = row.get("Grid Size") or "-".join(row.get(f"launch__grid_dim_{a}", "") for a in "xyz")
    block = row.get("Block Size") or "-".join(row.get(f"launch__block_dim_{a}", "") for a in "xyz")
    return MeasuredLaunch(row["ID"], row["Kernel Name"], _dim(grid), _dim(block), metrics)


def _dim(text: str) -> Dim | None:
    """``(16, 16, 1)``."""
    numbers = [int(n) for n in re.findall(r"\d+", text)]
    if not numbers:
        return None
    x, y, z = (*numbers, 1, 1)[:3]
    return x, y, z


def _number(text: str | None, unit: str | None) -> float | None:
    """A metric's value; "1.05" of "Kbyte/block" is 1050. None where it is no number."""
    try:
        value = float((text or "").replace(",", ""))
    except ValueError:
        return None
    scaled = re.match(r"([KMGT])byte", unit or "")
    return round(value * _PREFIXES[scaled[1]], 6) if scaled else value


def _is_of(launch: MeasuredLaunch, report: Report) -> bool:
    """Whether a launch may be the report's; its name is a C++ signature, or a mangled one."""
    name = re.escape(report.kernel)
    return (
        re.search(rf"(?<!\w){name}(?!\w)|{len(report.kernel)}{name}", launch.kernel) is not None
        and launch.grid in (None, report.grid)
        and launch.block in (None, report.block)
    )


def _level(figures: Sequence[Figures], metrics: Mapping[str, float]) -> Figures:
    """The figures whose number of loads is nearer to the one that was measured."""
    loads = metrics.get(_LOADS)
    if loads is None:
        return figures[-1]
    return min(figures, key=lambda f: abs(f.metrics.get(_LOADS, 0) - loads))


def _notes(rows: Sequence[MetricRow]) -> tuple[str, ...]:
    busy = [r for r in rows if "wavefronts" in r.metric or "conflicts" in r.metric]
    if not any(row.measured > row.predicted for row in busy):
        return ()
    return (_BUSY,)


def _short(kernel: str) -> str:
    return kernel.partition("(")[0].partition("[")[0]
