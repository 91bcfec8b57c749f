"""Kernels side by side as HTML: the table, bars, and their bank maps next to one another."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from html import escape

from . import charts, svg, words
from .compare import Row, compare
from .markup import scroll, section, table
from .report import Report

__all__ = ["side_by_side"]


def side_by_side(reports: Sequence[Report]) -> Iterator[str]:
    """The comparison, as what comes before the reports themselves."""
    first = reports[0]
    yield (
        '<div class="title"><h1>Side by side</h1>'
        f"<p>{escape(words.launch(first))}<br>{escape(', '.join(first.arguments))}</p></div>"
    )
    heads = [words.headline(report) for report in reports]
    badges = (f'<span class="badge {h.tone}">{h.mark} {h.word}</span>' for h in heads)
    rows = compare(reports)
    body = [("verdict", *badges), *((escape(row.label), *_cells(row)) for row in rows)]
    kernels = ("", *(escape(report.kernel) for report in reports))
    yield table("● is the best of its row", kernels, body, left=(0,))
    for row in rows:
        if row.bars:
            name = f"bars-{row.label.partition(' ')[0]}"
            yield section(name, row.label.capitalize(), 1, _bars(row, reports))
    yield from _bank_maps(reports)


def _cells(row: Row) -> Iterator[str]:
    for cell in row.cells:
        if cell is None:
            yield "–"
        else:
            yield f"<b>● {escape(cell.text)}</b>" if cell.number == row.best else escape(cell.text)


def _bars(row: Row, reports: Sequence[Report]) -> str:
    shown = [(r.kernel, c) for r, c in zip(reports, row.cells, strict=True) if c is not None]
    best = next((i for i, (_, cell) in enumerate(shown) if cell.number == row.best), None)
    bars = [(kernel, cell.number, cell.text) for kernel, cell in shown]
    said = "; ".join(f"{kernel} {cell.text}" for kernel, cell in shown)
    return scroll(charts.bars(bars, label=f"{row.label}: {said}", marked=best), row.label)


def _bank_maps(reports: Sequence[Report]) -> Iterator[str]:
    """The bank maps of the kernels next to one another, array by array and what is done to it."""
    maps = [
        ((each.array, each.op), report.kernel, svg.bank_map(each, report.block))
        for report in reports
        for each in report.bank_maps
    ]
    maps.sort(key=lambda item: item[0])
    for (array, op), group in itertools.groupby(maps, key=lambda item: item[0]):
        pictures = [(kernel, picture) for _, kernel, picture in group]
        if len(pictures) < 2 or not any(picture.shows_a_problem for _, picture in pictures):
            continue
        shown = "".join(
            f"<figure><figcaption><b>{escape(kernel)}</b>: {escape(picture.sentence)}</figcaption>"
            f"{scroll(picture.svg, f'{kernel}, {picture.title}')}"
            '<p class="readout" aria-live="polite"></p></figure>'
            for kernel, picture in pictures
        )
        legend = f'<p class="legend">{pictures[0][1].legend}</p>'
        title = f"Banks, {op} of {array}"
        yield section(f"banks-{array}-{op}", title, 1, f'<div class="pair">{shown}</div>{legend}')
