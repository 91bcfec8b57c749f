"""Kernels side by side: the figures that are worth laying next to each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import words
from .report import Report, SiteRow

__all__ = ["Cell", "Row", "compare"]


@dataclass(frozen=True, slots=True)
class Cell:
    """A figure: the number that is compared, and how it is shown."""

    number: float
    text: str


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of every kernel; None where a kernel has no such figure.

    ``more_is_better`` is None for what is only shown. ``bars`` marks what is worth drawing.
    """

    label: str
    cells: tuple[Cell | None, ...]
    more_is_better: bool | None = False
    bars: bool = False

    @property
    def best(self) -> float | None:
        """The best number of the row, where the kernels differ."""
        numbers = {cell.number for cell in self.cells if cell is not None}
        if self.more_is_better is None or len(numbers) < 2:
            return None
        return max(numbers) if self.more_is_better else min(numbers)


def compare(reports: Sequence[Report]) -> list[Row]:
    """Return the rows of a comparison, most telling first; rows that no kernel has are left out."""
    rows = [
        Row("errors", _each(reports, _errors)),
        Row("float peak, at most", _each(reports, _peak), more_is_better=True, bars=True),
        Row("limited by", _each(reports, _binding), more_is_better=None),
        Row("global sectors", _each(reports, _sum("global", "cost")), bars=True),
        Row("sectors a request", _each(reports, _mean("global")), more_is_better=None),
        Row("shared wavefronts", _each(reports, _sum("shared", "cost")), bars=True),
        Row("bank conflicts", _each(reports, _sum("shared", "conflicts"))),
        Row("requests", _each(reports, _requests), more_is_better=None),
        Row("occupancy", _each(reports, _occupancy), more_is_better=True),
        Row("barriers a block", _each(reports, _barriers), more_is_better=None),
    ]
    return [row for row in rows if any(row.cells)]


Figure = Callable[[Report], Cell | None]


def _each(reports: Sequence[Report], figure: Figure) -> tuple[Cell | None, ...]:
    return tuple(figure(report) for report in reports)


def _counted(number: int) -> Cell:
    return Cell(number, words.count(number))


def _errors(report: Report) -> Cell:
    return _counted(sum(finding.severity == "error" for finding in report.findings))


def _peak(report: Report) -> Cell | None:
    if report.roofs is None:
        return None
    fraction = min((roof.fraction for roof in report.roofs.roofs), default=0.0)
    return Cell(fraction, words.percent(fraction))


def _binding(report: Report) -> Cell | None:
    return None if report.roofs is None else Cell(0, report.roofs.binding)


def _sites(report: Report, space: str) -> list[SiteRow]:
    return [site for site in report.sites if site.space == space]


def _sum(space: str, name: str) -> Figure:
    def figure(report: Report) -> Cell | None:
        sites = _sites(report, space)
        return _counted(sum(getattr(site, name) for site in sites)) if sites else None

    return figure


def _mean(space: str) -> Figure:
    def figure(report: Report) -> Cell | None:
        sites = _sites(report, space)
        if not sites:
            return None
        mean = sum(site.cost for site in sites) / max(1, sum(site.requests for site in sites))
        return Cell(round(mean, 3), words.ratio(mean))

    return figure


def _requests(report: Report) -> Cell:
    return _counted(sum(site.requests for site in report.sites))


def _occupancy(report: Report) -> Cell | None:
    if report.occupancy is None:
        return None
    return Cell(report.occupancy.fraction, words.percent(report.occupancy.fraction))


def _barriers(report: Report) -> Cell:
    return _counted(report.barriers_per_block)
