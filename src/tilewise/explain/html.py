"""A report as one HTML file: no network, no framework, inline SVG, light and dark, keyboard, print.

The style sheet and the script are page.css and page.js beside this module; pictures come from
:mod:`.svg` and :mod:`.charts`. The order is that of the report: verdict, errors, what limits it,
memory, source, pictures, limits, what was not checked. Words are explained where they first come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources
from pathlib import Path

from . import charts, svg, words
from .html_compare import side_by_side
from .markup import figure, number, scroll, section, table
from .ncu import Comparison
from .report import Finding, Report, Roof, SiteRow, Verdict
from .svg import Picture, tag

__all__ = ["notebook", "page"]

_MARKS = {"PROVED": "✔", "HOLDS": "✔", "REFUTED": "✘", "NOT CHECKED": "?"}
_OUTCOMES = {"PROVED": "good", "HOLDS": "good", "REFUTED": "bad", "NOT CHECKED": "unsure"}
_SEVERITIES = {"error": ("✘", "bad"), "warning": ("!", "unsure"), "note": ("·", "plain")}

_GLOBAL_TERMS = (
    "The 32 threads of a <dfn>warp</dfn> go through the program together; what they ask of memory "
    "in one step is a <dfn>request</dfn>. Global memory moves in <dfn>sectors</dfn> of 32 bytes: a "
    "request costs as many sectors as its threads touch, wanted or not. 32 neighbouring floats are "
    "128 bytes, 4 sectors: that is <dfn>coalesced</dfn>."
)
_SHARED_TERMS = (
    "Shared memory has 32 <dfn>banks</dfn>, each 4 bytes wide: word <i>w</i> lies in bank "
    "<i>w</i> mod 32. A bank gives one word at a time. One such step of all banks is a "
    "<dfn>wavefront</dfn>; threads that ask one bank for different words, a <dfn>bank "
    "conflict</dfn>, need several. Threads that ask for the same word share it at no cost "
    "(<dfn>broadcast</dfn>)."
)
_OLD_TERMS = (
    "On this hardware a <dfn>half-warp</dfn> of 16 threads asks together, of 16 banks, and global "
    "memory answers in segments of 32 to 128 bytes."
)
_ROOF_TERMS = (
    "A <dfn>roof</dfn> is the speed that one resource alone would allow. No kernel is faster than "
    "its lowest roof; how far below it one stays is latency, which is not modelled. "
    "<dfn>Intensity</dfn> is how many floating-point operations come with each byte that has to be "
    "moved."
)


def page(reports: Report | Sequence[Report], *, ncu: Comparison | None = None) -> str:
    """Return one self-contained HTML file.

    Parameters
    ----------
    reports : Report or sequence of Report
        Several are laid side by side first, and follow in full.
    ncu : Comparison, optional
        What ncu has measured of the first, beside what was predicted.
    """
    several = [reports] if isinstance(reports, Report) else list(reports)
    head = words.headline(several[0])
    if len(several) == 1:
        title = f"{several[0].kernel}: {head.word}"
        body = _report(several[0], "", ncu)
    else:
        title = " · ".join(report.kernel for report in several)
        body = "".join((*side_by_side(several), *_folded(several, ncu)))
    links = _links(several)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)} – tilewise explain</title>\n"
        f"<style>\n{_asset('page.css')}</style>\n</head>\n<body>\n"
        '<a class="skip" href="#main">Skip to the verdict</a>\n'
        f"{_PATTERNS}\n"
        f'<header><b>tilewise explain</b><nav aria-label="Sections">{links}</nav>'
        '<button id="theme" type="button" hidden>Dark</button></header>\n'
        f'<main id="main" tabindex="-1">\n{body}</main>\n'
        f"<script>\n{_asset('page.js')}</script>\n</body>\n</html>\n"
    )


def notebook(report: Report, *, height: int = 720) -> str:
    """Return the page in a frame, so that a notebook's styles and the page's stay apart."""
    frame = {"width": "100%", "height": height, "style": "border: 0", "title": report.kernel}
    return tag("iframe", " ", srcdoc=page(report), **frame)


# Hatchings and the arrow head that pictures refer to.
_PATTERNS = (
    '<svg width="0" height="0" aria-hidden="true" class="defs"><defs>'
    '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><path d="M0 0V6" class="hatching"/></pattern>'
    '<marker id="arrow" viewBox="0 0 10 10" refX="2" refY="5" markerWidth="4.5" markerHeight="4.5" '
    'orient="auto"><path d="M0 0L10 5L0 10z" class="arrowhead"/></marker></defs></svg>'
)


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _links(reports: Sequence[Report]) -> str:
    if len(reports) > 1:
        targets = [("Side by side", "main")]
        targets += [(r.kernel, f"kernel-{i}") for i, r in enumerate(reports)]
    else:
        report = reports[0]
        targets = [("Verdicts", "verdicts")] if report.verdicts else []
        targets += [("Found", "found")] if report.findings else []
        targets += [("Limit", "limit"), ("Memory", "memory"), ("Source", "source")]
        targets += [("Pictures", "pictures"), ("Limits", "limits")]
    return "".join(f'<a href="#{where}">{escape(text)}</a>' for text, where in targets)


def _folded(reports: Sequence[Report], ncu: Comparison | None) -> Iterator[str]:
    """Each report in full, to unfold; what ncu measured belongs to the first."""
    for i, report in enumerate(reports):
        content = _report(report, f"k{i}-", None if i else ncu)
        summary = f"<summary><b>{escape(report.kernel)}</b> in full</summary>"
        yield f'<details class="kernel" id="kernel-{i}">{summary}{content}</details>\n'


def _report(report: Report, prefix: str, ncu: Comparison | None = None) -> str:
    """The parts of one report; ``prefix`` keeps ids apart where there are several."""
    level = 1 if not prefix else 2
    return "".join(
        (
            _title(report, level),
            _verdict(report, prefix),
            _verdicts(report, prefix, level),
            _found(report, prefix, level),
            _limit(report, prefix, level),
            _memory(report, prefix, level, ncu),
            _source(report, prefix, level),
            _pictures(report, prefix, level),
            _limits(report, prefix, level),
        )
    )


def _title(report: Report, level: int) -> str:
    return (
        f'<div class="title"><h{level}>{escape(report.kernel)}</h{level}>'
        f"<p>{escape(words.launch(report))}<br>{escape(', '.join(report.arguments))}</p></div>\n"
    )


def _verdict(report: Report, prefix: str) -> str:
    """The verdict in a word, the witness in the source, and what to change."""
    head = words.headline(report)
    parts = [
        f'<p class="word"><span aria-hidden="true">{head.mark}</span> {head.word}</p>',
        f'<p class="gist">{escape(words.sentence(head.sentence))}</p>',
    ]
    main = words.main_finding(report)
    if main is not None and main.severity == "error":
        said = f"<p>{escape(words.sentence(main.message))}</p>"
        said += _excerpt(report, main, prefix) + _advice(main)
        parts.append(f'<div id="{prefix}F{report.findings.index(main)}">{said}</div>')
    parts.append(f'<dl class="facts">{"".join(_facts(report))}</dl>')
    return f'<section class="verdict {head.tone}" id="{prefix}verdict">{"".join(parts)}</section>\n'


def _facts(report: Report) -> Iterator[str]:
    """What a person asks next: for which data, how fast at best, what is wasted."""
    reason = report.data_dependence.partition(":")[0]
    yield _fact("True for", "all data" if report.all_data else "these data", reason)
    if report.roofs is not None:
        binding = min(report.roofs.roofs, key=lambda roof: roof.fraction)
        at_best = f"{words.percent(binding.fraction)} of the float peak"
        yield _fact(
            "Speed, at best", at_best, f"{report.roofs.binding} binds on {report.roofs.device}"
        )
    waste = words.wasteful(report)
    if waste:
        worst = waste[0]
        cost = words.count(worst.cost, worst.unit)
        extra = f"line {worst.line}: {cost} where {words.count(worst.ideal)} would do"
        factor = f"▲ {words.ratio(worst.cost / max(1, worst.ideal))} times the least"
        yield _fact("Memory wasted", factor, extra, "waste-text")
    elif report.sites:
        yield _fact("Memory wasted", "nothing", "every request costs the least it can")


def _fact(name: str, value: str, detail: str, style: str = "") -> str:
    said = f'<b class="{style}">{escape(value)}</b> {escape(detail)}'
    return f"<div><dt>{name}</dt><dd>{said}</dd></div>"


def _excerpt(report: Report, finding: Finding, prefix: str) -> str:
    """Lines of source, those of the finding marked and linked to the annotated source."""
    lines = words.excerpt(report, finding)
    if not lines:
        return ""
    rows = []
    for line in lines:
        number = f'<a href="#{prefix}L{line.number}">{line.number}</a>' if line.number else ""
        marks = "".join(f"<em>{escape(mark)}</em>" for mark in line.marks)
        rows.append(
            f'<tr{" class=hit" if line.marks else ""}><th scope="row">{number}</th>'
            f"<td><code>{escape(line.text)}</code></td><td>{marks}</td></tr>"
        )
    return scroll(f'<table class="excerpt"><tbody>{"".join(rows)}</tbody></table>', "Source")


def _advice(finding: Finding) -> str:
    if not finding.advice:
        return ""
    return f'<p class="advice"><b>To fix it:</b> {escape(words.sentence(finding.advice))}</p>'


def _verdicts(report: Report, prefix: str, level: int) -> str:
    if not report.verdicts:
        return ""
    usual = words.usual_scope(report.verdicts)
    told = {finding.message for finding in report.findings}
    items = "".join(_claim(verdict, usual, told) for verdict in report.verdicts)
    intro = f"PROVED means: for {escape(usual)}. " if usual else ""
    intro += "HOLDS means: in this launch and on these data."
    return section(
        f"{prefix}verdicts",
        "Verdicts",
        level,
        f'<p class="intro">{intro}</p><ul class="claims">{items}</ul>',
    )


def _claim(verdict: Verdict, usual: str, told: set[str]) -> str:
    tone = _OUTCOMES[verdict.outcome] if verdict.decides_exit else "plain"
    badge = f'<span class="badge {tone}">{_MARKS[verdict.outcome]} {verdict.outcome}</span>'
    aside = ", ".join(words.asides(verdict, usual))
    said = f"<p>{escape(words.sentence(verdict.claim))}"
    said += f" <small>{escape(aside)}</small></p>" if aside else "</p>"
    told_here = ""
    if verdict.detail and verdict.detail not in told:
        told_here = escape(words.sentence(verdict.detail))
    if verdict.original:
        language = ' lang="zh"' if any("\u4e00" <= c <= "\u9fff" for c in verdict.original) else ""
        told_here += f" The guide: <q{language}>{escape(verdict.original)}</q>"
    if told_here:
        said += f'<p class="detail">{told_here}</p>'
    return f"<li>{badge}<div>{said}</div></li>"


def _found(report: Report, prefix: str, level: int) -> str:
    """The race drawn between two threads, and what the verdict has not said already."""
    if not report.findings:
        return ""
    items = []
    main = words.main_finding(report)
    for i, finding in enumerate(report.findings):
        if finding is main and finding.severity == "error":
            continue
        mark, tone = _SEVERITIES[finding.severity]
        badge = f'<span class="badge {tone}">{mark} {finding.severity}</span>'
        said = f"<p>{escape(words.sentence(finding.message))} <small>{finding.scope}</small></p>"
        said += _excerpt(report, finding, prefix) + _advice(finding)
        items.append(f'<li id="{prefix}F{i}">{badge}<div>{said}</div></li>')
    picture = charts.timeline(report)
    content = ""
    if picture is not None and picture.shows_a_problem:
        content = figure(picture, f"{prefix}timeline", is_open=True)
    content += f'<ul class="claims">{"".join(items)}</ul>' if items else ""
    return section(f"{prefix}found", "Found", level, content) if content else ""


def _limit(report: Report, prefix: str, level: int) -> str:
    parts = []
    roofs = report.roofs
    if roofs is not None:
        parts.append(f"<p class=lead>{escape(words.sentence(roofs.sentence))}</p>")
        parts.append(
            f"<p class=advice><b>Next step:</b> {escape(words.sentence(roofs.next_step))}</p>"
        )
        parts.append(f"<p class=intro>{_ROOF_TERMS}</p>")
        rows = [(r.name, r.fraction, _roof_text(r, roofs.binding)) for r in roofs.roofs]
        marked = next((i for i, r in enumerate(roofs.roofs) if r.name == roofs.binding), None)
        chart = charts.bars(
            rows, label="Bars of roofs: " + "; ".join(f"{n} {t}" for n, _, t in rows), marked=marked
        )
        parts.append(scroll(chart, "Roofs"))
        picture = charts.roofline(report)
        parts.append(figure(picture, f"{prefix}roofline", is_open=True) if picture else "")
        parts += [f"<p class=intro>Not counted: {escape(text)}.</p>" for text in roofs.not_counted]
    elif report.roofs_missing:
        parts.append(f"<p>{escape(words.sentence(report.roofs_missing))}</p>")
    if report.occupancy is not None:
        said = words.sentence(report.occupancy.sentence)
        meaning = "<dfn>Occupancy</dfn>, the warps that a multiprocessor holds at once"
        parts.append(f"<p>{meaning}: {escape(said)}</p>")
    return section(f"{prefix}limit", "What limits it", level, "".join(parts))


def _roof_text(roof: Roof, binding: str) -> str:
    said = words.percent(roof.fraction)
    if roof.tflops is not None:
        said += f", {roof.tflops:,.1f} TFLOP/s"
    return f"{said}: binds" if roof.name == binding else said


def _memory(report: Report, prefix: str, level: int, ncu: Comparison | None) -> str:
    parts = []
    for space, terms in (("global", _GLOBAL_TERMS), ("shared", _SHARED_TERMS)):
        rows = [site for site in report.sites if site.space == space]
        if rows:
            old = rows[0].unit in ("transactions", "steps")
            parts.append(f"<p class=intro>{_OLD_TERMS if old else terms}</p>")
            parts.append(_sites(f"{space.capitalize()} memory, as the source has it", rows))
    compiled = [site for site in report.compiled_sites if site not in report.sites]
    if compiled:
        parts.append(
            _sites(
                "As nvcc compiles it: four neighbouring loads of shared memory made one", compiled
            )
        )
    parts.append(_arrays(report))
    picture = charts.traffic(report)
    if picture is not None:
        parts.append(figure(picture, f"{prefix}traffic", is_open=True))
    if ncu is not None:
        parts.append(_ncu(ncu))
    parts.append(_metrics(report))
    return section(f"{prefix}memory", "Memory", level, "".join(parts))


def _sites(caption: str, rows: Sequence[SiteRow]) -> str:
    unit = rows[0].unit
    body = []
    for site in rows:
        wasted = site.cost > site.ideal
        times = f"▲ {words.ratio(site.cost / max(1, site.ideal))}×" if wasted else "✔ least"
        body.append(
            (
                str(site.line),
                f"<code>{escape(site.text)}</code> {escape(site.op)}",
                words.count(site.requests),
                words.count(site.cost),
                words.count(site.ideal),
                words.ratio(site.per_request),
                f'<span class="{"waste-text" if wasted else "muted"}">{times}</span>',
            )
        )
    heads = ("line", "access", "requests", unit, f"least {unit}", "each request", "")
    return table(caption, heads, body, left=(1,))


def _arrays(report: Report) -> str:
    rows = []
    for array in report.arrays:
        reads = words.ratio(array.reads_per_element)
        if array.reads_range is not None and array.reads_range[0] != array.reads_range[1]:
            reads += f" ({array.reads_range[0]:,} to {array.reads_range[1]:,})"
        written = "–"
        if array.never_written is not None:
            counts = {
                "never": array.never_written,
                "once": array.written_once,
                "more": array.written_more,
            }
            written = ", ".join(f"{n:,} {what}" for what, n in counts.items() if n)
        shape = "×".join(f"{n:,}" for n in array.shape)
        rows.append(
            (
                f"<b>{escape(array.name)}</b>",
                f"{escape(array.space)}, {escape(array.dtype)} {shape}",
                words.bytes_of(array.bytes),
                words.count(array.load_lanes),
                words.count(array.store_lanes),
                reads,
                written,
            )
        )
    heads = (
        "array",
        "kind",
        "size",
        "reads of threads",
        "writes",
        "reads an element",
        "elements written",
    )
    return table("Arrays", heads, rows, left=(0, 1))


def _metrics(report: Report) -> str:
    if not report.figures:
        return ""
    names = [n for n in report.figures[0].metrics if any(f.metrics.get(n) for f in report.figures)]
    heads = ("metric", *(_LEVELS[figures.level] for figures in report.figures))
    rows = [
        (f"<code>{n}</code>", *(number(f.metrics.get(n)) for f in report.figures)) for n in names
    ]
    shown = table(
        "Figures under the names that Nsight Compute (ncu) gives them", heads, rows, left=(0,)
    )
    return f"<details><summary>The same under ncu's metric names</summary>{shown}</details>"


_LEVELS = {"source": "as written (numba-cuda)", "compiled": "loads merged (nvcc)"}


def _ncu(compared: Comparison) -> str:
    rows = [
        (
            f"<code>{escape(r.metric)}</code>",
            number(r.measured),
            number(r.predicted),
            escape(r.difference),
        )
        for r in compared.rows
    ]
    shown = table("Measured by ncu", ("metric", "ncu", "predicted", "difference"), rows, left=(0,))
    notes = "".join(f"<p class=intro>{escape(words.sentence(note))}</p>" for note in compared.notes)
    return f"<p>{escape(words.sentence(compared.sentence))}</p>{shown}{notes}"


def _source(report: Report, prefix: str, level: int) -> str:
    most_sectors = max((line.sectors for line in report.source), default=0)
    most_wavefronts = max((line.wavefronts for line in report.source), default=0)
    rows = []
    seen: set[int] = set()
    for line in report.source:
        marks = [
            f'<a class="bad" href="#{prefix}F{n}">{_SEVERITIES[report.findings[n].severity][0]} '
            f"{escape(report.findings[n].kind)}</a>"
            for n in line.findings
        ]
        if line.excess:
            said = f"▲ {line.excess:,} more than the least"
            marks.append(f'<span class="waste-text">{said}</span>')
        if line.barriers:
            marks.append(f'<span class="muted">passed {words.count(line.barriers, "times")}</span>')
        hit = ' class="hit"' if line.findings else ""
        costs = _heat(line.sectors, most_sectors) if most_sectors else ""
        costs += _heat(line.wavefronts, most_wavefronts) if most_wavefronts else ""
        # Device functions of other files may have lines of the same number.
        name = "" if line.number in seen else f' id="{prefix}L{line.number}"'
        seen.add(line.number)
        rows.append(
            f'<tr{name}{hit}><th scope="row">{line.number}</th>{costs}'
            f"<td><code>{escape(line.text)}</code>{''.join(marks)}</td></tr>"
        )
    spaces = zip(_units(report), (most_sectors, most_wavefronts), strict=True)
    columns = ("line", *(unit for unit, most in spaces if most), "code")
    heads = "".join(f"<th scope=col>{column}</th>" for column in columns)
    shown = (
        f'<table class="source"><caption>{escape(Path(report.filename).name)}</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )
    return section(f"{prefix}source", "Source", level, scroll(shown, "Annotated source"))


def _units(report: Report) -> tuple[str, str]:
    """What is counted of global and of shared memory."""
    units = {site.space: site.unit for site in report.sites}
    return units.get("global", "sectors"), units.get("shared", "wavefronts")


def _heat(cost: int, most: int) -> str:
    """A cell with a bar behind its number."""
    if not cost:
        return "<td></td>"
    return f'<td class="heat" style="--share:{100 * cost / most:.0f}%">{cost:,}</td>'


def _pictures(report: Report, prefix: str, level: int) -> str:
    drawn: list[tuple[Picture, str]] = []
    for picture in (charts.thread_map(report), charts.timeline(report)):
        if picture is not None and not picture.shows_a_problem:
            drawn.append((picture, "wide"))
    requests = [svg.bank_map(each, report.block) for each in report.bank_maps]
    requests += [svg.sector_map(each, report.block) for each in report.sector_maps]
    # Those that show what is wasted come first.
    drawn += [(p, "") for p in sorted(requests, key=lambda p: not p.shows_a_problem)]
    if not drawn:
        return ""
    figures = "".join(
        figure(picture, f"{prefix}picture-{i}", style, is_open=picture.shows_a_problem or i < 4)
        for i, (picture, style) in enumerate(drawn)
    )
    intro = (
        "<p class=intro>Of each access, the request that costs most beyond its least. In a "
        "picture, the arrow keys go from lane to lane.</p>"
    )
    content = f'{intro}<div class="pictures">{figures}</div>'
    return section(f"{prefix}pictures", "Pictures", level, content)


def _limits(report: Report, prefix: str, level: int) -> str:
    said = [report.data_dependence, report.certificate, *report.limits]
    parts = (
        f"<ul>{''.join(f'<li>{escape(words.sentence(text))}</li>' for text in said if text)}</ul>"
    )
    unchecked = [*report.not_checked, *report.notes]
    if unchecked:
        parts += f"<h{level + 2}>Not checked</h{level + 2}><ul>"
        parts += "".join(f"<li>{escape(words.sentence(text))}</li>" for text in unchecked) + "</ul>"
    return section(f"{prefix}limits", "Limits", level, parts)
