"""A report for the terminal, as Rich renderables, in the order in which a person reads.

A clean kernel's report is short, a wrong kernel's begins with what goes wrong; ``verbose`` adds
every table, the annotated source and the figures under ncu's names. Colour says nothing that words
do not say as well. Nothing here is worked out: it is all in the :class:`~.report.Report`.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from . import words
from .compare import Cell, compare
from .ncu import Comparison
from .report import BankMap, Finding, Report, SectorMap, SiteRow

__all__ = ["WIDTH", "against_ncu", "render", "side_by_side", "to_text"]

#: Columns that a report is made for; it can still be read at 80.
WIDTH = 100

_OUTCOMES = {
    "PROVED": ("✔", "green"),
    "HOLDS": ("✔", "green"),
    "REFUTED": ("✘", "bold red"),
    "NOT CHECKED": ("?", "yellow"),
}
_TONES = {"good": "bold green", "bad": "bold red", "unsure": "bold yellow"}
_SEVERITIES = {"error": ("✘", "red"), "warning": ("!", "yellow"), "note": ("·", "")}


def to_text(rendered: RenderableType, *, width: int = WIDTH) -> str:
    """Return what a terminal would show, as plain text without colour."""
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False)
    console.print(rendered)
    assert isinstance(console.file, io.StringIO)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    return "\n".join(lines) + "\n"


def render(report: Report, *, verbose: bool = False) -> RenderableType:
    """Return a report for the terminal.

    Parameters
    ----------
    report : Report
    verbose : bool
        Show all tables, the annotated source and ncu's figures, and not only what stands out.
    """
    parts: list[RenderableType] = [_head(report)]
    main = words.main_finding(report)
    if main is not None:
        parts += [_witness(report, main)]
    parts += _section("Verdicts", _verdicts(report, verbose=verbose))
    others = [finding for finding in report.findings if finding is not main]
    parts += _section("Also found", *(_finding(report, f, verbose=verbose) for f in others))
    parts += _section("What limits it", *_limit(report))
    parts += _section("Memory", *_memory(report, verbose=verbose))
    if verbose:
        parts += _section("Arrays", _arrays(report))
        parts += _section("Under ncu's names", *_figures(report))
        parts += _section("Source", _source(report))
    parts += _section("Wasted", *_pictures(report))
    parts += _section("Limits", *_limits(report, verbose=verbose))
    unchecked = [*report.not_checked, *report.notes]
    parts += _section("Not checked", *(_bullet(text) for text in unchecked))
    return Group(*parts)


def side_by_side(reports: Sequence[Report]) -> RenderableType:
    """Return a table that lays kernels side by side, each figure with its ratio to the first's."""
    table = _table("", *(report.kernel for report in reports))
    table.columns[0].justify = "left"
    heads = [words.headline(report) for report in reports]
    table.add_row("verdict", *(Text(f"{h.mark} {h.word}", style=_TONES[h.tone]) for h in heads))
    for row in compare(reports):
        table.add_row(row.label, *(_cell(cell, row.best) for cell in row.cells))
    note = Text("◂ best of its row", style="dim")
    steps = [
        _bullet(r.roofs.next_step, r.kernel)
        for r in reports
        if r.roofs is not None and words.headline(r).tone == "good"
    ]
    same = _launch_line(reports[0])
    return Group(
        Text("Side by side", style="bold"), same, Text(), table, note, *_section("Next", *steps)
    )


def against_ncu(compared: Comparison) -> RenderableType:
    """Return ncu's figures of one launch beside those predicted, with the difference."""
    table = _table("metric", "ncu", "predicted", "difference")
    table.columns[0].justify = "left"
    table.columns[0].overflow = "fold"
    for row in compared.rows:
        agrees = row.measured == row.predicted
        table.add_row(
            row.metric,
            _figure(row.measured),
            _figure(row.predicted),
            Text(row.difference, style="green" if agrees else "yellow"),
        )
    said = [_bullet(text) for text in compared.notes]
    return Group(*_section("Beside ncu", _wrap(compared.sentence), table, *said))


def _head(report: Report) -> RenderableType:
    head = words.headline(report)
    title = Text(report.kernel, style="bold")
    title.append(f"   {words.launch(report)}", style="dim")
    verdict = Text.assemble((f"{head.mark} {head.word}", _TONES[head.tone]), f"  {head.sentence}")
    return Group(title, _launch_line(report), Text(), verdict)


def _launch_line(report: Report) -> Text:
    return Text(", ".join(report.arguments), style="dim")


def _witness(report: Report, finding: Finding) -> RenderableType:
    return Group(Text(), _indent(_finding(report, finding, verbose=True)))


def _finding(report: Report, finding: Finding, *, verbose: bool) -> RenderableType:
    """A finding: what happens, where in the source, and what to change."""
    mark, style = _SEVERITIES[finding.severity]
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    said = Text(words.sentence(finding.message))
    if not report.all_data and finding.severity == "error":
        said.append(f" ({finding.scope})", style="dim")
    grid.add_row(Text(f"{mark} {finding.severity}", style=style), said)
    if verbose and (lines := words.excerpt(report, finding)):
        grid.add_row("", Text())
        grid.add_row("", _Excerpt(lines))
        grid.add_row("", Text())
    if finding.advice:
        grid.add_row(
            Text("→ fix", style="bold" if verbose else "dim"), Text(words.sentence(finding.advice))
        )
    return grid


@dataclass(frozen=True, slots=True)
class _Excerpt:
    """Lines of source with what happens there beside them, or below where there is no room."""

    lines: Sequence[words.Marked]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        margin = max(len(str(line.number)) for line in self.lines)
        widest = max(len(line.text) for line in self.lines)
        longest = max((len(mark) for line in self.lines for mark in line.marks), default=0)
        is_beside = margin + 3 + widest + 2 + longest <= options.max_width
        said = Text(no_wrap=True, overflow="ellipsis")
        for line in self.lines:
            said.append(f"{line.number or '':>{margin}} ", style="dim")
            said.append("▸ " if line.marks else "  ", style="red")
            said.append(line.text, style="bold" if line.marks else "dim")
            for i, mark in enumerate(line.marks):
                gap = " " * (widest - len(line.text) + 2)
                if not is_beside:
                    gap = f"\n{' ' * (margin + 3)}  ╰ "
                elif i:
                    gap = f"\n{' ' * (margin + 3 + widest + 2)}"
                said.append(f"{gap}{mark}", style="red")
            said.append("\n")
        said.right_crop()
        yield said


def _verdicts(report: Report, *, verbose: bool) -> RenderableType | None:
    if not report.verdicts:
        return None
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    usual = words.usual_scope(report.verdicts)
    told = {finding.message for finding in report.findings}
    for verdict in report.verdicts:
        mark, style = _OUTCOMES[verdict.outcome]
        if verdict.outcome == "REFUTED" and not verdict.decides_exit:
            style = "yellow"
        said = Text(verdict.claim)
        if aside := ", ".join(words.asides(verdict, usual)):
            said.append(f"  {aside}", style="dim")
        grid.add_row(Text(f"{mark} {verdict.outcome}", style=style), said)
        needed = verdict.outcome in ("REFUTED", "NOT CHECKED") and verdict.detail not in told
        if verdict.detail and (verbose or needed):
            grid.add_row("", Text(words.sentence(verdict.detail), style="" if needed else "dim"))
    return Group(grid, Text(f"proved for {usual}", style="dim")) if usual else grid


def _limit(report: Report) -> Iterable[RenderableType]:
    if report.roofs is not None:
        yield _labelled("roof", words.sentence(report.roofs.sentence))
        yield _labelled("next", words.sentence(report.roofs.next_step))
        for missing in report.roofs.not_counted:
            yield _labelled("", f"Not counted: {missing}.")
    if report.occupancy is not None:
        yield _labelled("occupancy", words.sentence(report.occupancy.sentence))


def _memory(report: Report, *, verbose: bool) -> Iterable[RenderableType]:
    for space in ("global", "shared"):
        rows = [site for site in report.sites if site.space == space]
        if rows:
            yield _sites(space, rows)
    compiled = [s for s in report.compiled_sites if s not in report.sites]
    if verbose and compiled:
        yield Text("As nvcc compiles it, four neighbouring loads made one:", style="dim")
        yield _sites("shared", compiled)


def _sites(space: str, rows: Sequence[SiteRow]) -> Table:
    unit = rows[0].unit
    is_wasteful = any(site.cost > site.ideal for site in rows)
    over = "waste" if is_wasteful else ""
    table = _table("line", f"{space} memory", "requests", unit, "least", "each", over)
    table.columns[1].justify = table.columns[6].justify = "left"
    table.columns[1].min_width = 24
    for column in table.columns:
        column.no_wrap = True
    for site in rows:
        excess = site.cost > site.ideal
        table.add_row(
            str(site.line),
            Text(f"{site.op:5} {site.text}", overflow="ellipsis"),
            words.count(site.requests),
            words.count(site.cost),
            words.count(site.ideal),
            words.ratio(site.per_request),
            Text(f"▲ {words.ratio(site.cost / site.ideal)}×", style="yellow") if excess else "",
        )
    return table


def _arrays(report: Report) -> Table:
    table = _table(
        "array", "", "bytes", "reads", "writes", "reads an element", "written by threads"
    )
    table.columns[0].justify = table.columns[1].justify = "left"
    for array in report.arrays:
        reads = words.ratio(array.reads_per_element)
        if array.reads_range is not None and len(set(array.reads_range)) > 1:
            reads += f" ({array.reads_range[0]}–{array.reads_range[1]})"
        written = ""
        if array.never_written is not None:
            times = {
                "never": array.never_written,
                "once": array.written_once,
                "more": array.written_more,
            }
            written = ", ".join(f"{words.count(n)} {what}" for what, n in times.items() if n)
        table.add_row(
            array.name,
            f"{array.space} {array.dtype} {'×'.join(map(str, array.shape))}",
            words.bytes_of(array.bytes),
            words.count(array.load_lanes),
            words.count(array.store_lanes),
            reads,
            written,
        )
    return table


def _figures(report: Report) -> Iterable[RenderableType]:
    if not report.figures:
        return
    levels = [figures.level for figures in report.figures]
    table = _table("metric", *(f"as {_LEVELS[level]}" for level in levels))
    table.columns[0].justify = "left"
    table.columns[0].overflow = "fold"
    for metric in report.figures[0].metrics:
        if any(figures.metrics.get(metric) for figures in report.figures):
            table.add_row(metric, *(_figure(f.metrics.get(metric)) for f in report.figures))
    yield table


_LEVELS = {"source": "written", "compiled": "compiled"}


def _source(report: Report) -> Text:
    said = Text(no_wrap=True, overflow="ellipsis")
    said.append(f"{'line':>5} {'sectors':>11} {'wavefronts':>11}\n", style="dim")
    for line in report.source:
        costs = (words.count(n) if n else "" for n in (line.sectors, line.wavefronts))
        said.append(f"{line.number:>5} {next(costs):>11} {next(costs):>11} ", style="dim")
        said.append("▸ " if line.findings else "▲ " if line.excess else "  ", style="yellow")
        said.append(line.text)
        if line.barriers:
            said.append(f"  ─ passed {words.count(line.barriers, 'times')}", style="dim")
        said.append("\n")
    said.append("▸ something found here, ▲ more than the least", style="dim")
    return said


def _pictures(report: Report) -> Iterable[RenderableType]:
    """Of each place that wastes something, the request that wastes most, drawn in a line."""
    for sectors in report.sector_maps:
        if len(sectors.sectors) > sectors.ideal:
            yield _sector_strip(sectors)
    for banks in report.bank_maps:
        if banks.wavefronts > banks.ideal:
            yield _bank_strip(banks)


def _sector_strip(sectors: SectorMap) -> RenderableType:
    """``██░░░░░░``, a block for every four bytes of a sector: wanted or not."""
    said = f"Line {sectors.line}, {sectors.text}: {words.sentence(sectors.sentence)}"
    strips = []
    for sector in sectors.sectors[:8]:
        wanted = {i // 4 for first, end in sector.used for i in range(first, end)}
        strips.append(
            "".join("█" if i in wanted else "░" for i in range(sectors.sector_bytes // 4))
        )
    more = len(sectors.sectors) - len(strips)
    tail = f"; {more} more sectors are not shown" if more else ""
    legend = Text(f"█ 4 bytes wanted, ░ 4 bytes moved in vain{tail}", style="dim")
    return Group(_wrap(said), _indent(Group(Text(" ".join(strips)), legend)))


def _bank_strip(banks: BankMap) -> RenderableType:
    """A digit a bank: how many different words it is asked for at a time."""
    said = f"Line {banks.line}, {banks.text}: {words.sentence(banks.sentence)}"
    most = [0] * banks.banks
    for first, last in banks.groups:
        asked: list[set[int]] = [set() for _ in range(banks.banks)]
        for word in banks.words:
            if first <= word.lane <= last:
                asked[word.bank].add(word.word)
        most = [max(a, len(b)) for a, b in zip(most, asked, strict=True)]
    digits = "".join("·" if n == 0 else f"{n}" if n < 10 else "+" for n in most)
    strip = " ".join(digits[i : i + 8] for i in range(0, banks.banks, 8))
    key = "words that each bank is asked for at once, · none" + (
        ", + ten or more" * ("+" in digits)
    )
    legend = Text(f"bank 0 to {banks.banks - 1}: {key}", style="dim")
    return Group(_wrap(said), _indent(Group(Text(strip), legend)))


def _limits(report: Report, *, verbose: bool) -> Iterable[RenderableType]:
    yield _bullet(report.data_dependence)
    yield _bullet(report.certificate if verbose else report.certificate.partition(";")[0])
    if verbose:
        yield from (_bullet(text) for text in report.limits)
    elif report.limits:
        yield _bullet("not modelled: caches' hit rates, latency, time")


def _section(title: str, *parts: RenderableType | None) -> list[RenderableType]:
    shown = [part for part in parts if part is not None]
    if not shown:
        return []
    return [Text(), Text(title, style="bold"), *(_indent(part) for part in shown)]


def _table(*headers: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for header in headers:
        table.add_column(Text(header), justify="right")
    return table


def _indent(part: RenderableType) -> RenderableType:
    return Padding(part, (0, 0, 0, 2), expand=False)


def _labelled(label: str, text: str) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True, width=9, style="dim")
    grid.add_column(overflow="fold")
    grid.add_row(label, Text(text))
    return grid


def _bullet(text: str, subject: str = "") -> RenderableType:
    said = Text(f"{subject}: " if subject else "", style="bold", overflow="fold")
    said.append(words.sentence(text), style="not bold")
    grid = Table.grid(padding=(0, 1))
    grid.add_row("·", said)
    return grid


def _wrap(text: str) -> Text:
    return Text(text, overflow="fold")


def _cell(cell: Cell | None, best: float | None) -> Text:
    if cell is None:
        return Text("–  ")
    return Text(f"{cell.text} ◂" if cell.number == best else f"{cell.text}  ")


def _figure(number: float | None) -> str:
    if number is None or math.isnan(number):
        return "–"
    return f"{number:,.0f}" if float(number).is_integer() else f"{number:,.2f}"
