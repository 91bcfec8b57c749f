"""Words and numbers that the terminal and the HTML share: the headline, the witness, units.

Nothing here is worked out anew: it is chosen from a :class:`~.report.Report` and put into words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from .report import Dim, Finding, Place, Report, SiteRow, Verdict

__all__ = [
    "Headline",
    "Marked",
    "asides",
    "at",
    "bytes_of",
    "count",
    "excerpt",
    "extent",
    "headline",
    "index",
    "launch",
    "listed",
    "main_finding",
    "percent",
    "ratio",
    "sentence",
    "usual_scope",
    "wasteful",
    "who",
]

Tone = Literal["good", "bad", "unsure"]

# Lines of source that an excerpt shows before it leaves some out.
_EXCERPT = 9
# What the first and the second thread of a finding do to the element.
_DOES = {
    "read-after-write": ("writes {}", "reads {}"),
    "write-after-read": ("reads {}", "writes {}"),
    "write-after-write": ("writes {}", "writes {}"),
    "out of range": ("is out of range at {}", ""),
    "uninitialised read": ("reads {}, which nobody wrote", ""),
    "exit before barrier": ("has returned and never gets here", ""),
    "barrier divergence": ("does not get here", ""),
    "division by zero": ("divides by 0", ""),
    "unassigned variable": ("reads {}, which it has not assigned", ""),
}
# The kinds of error as clauses.
_CLAUSES = {
    "read-after-write": "threads race on {} (read-after-write)",
    "write-after-read": "threads race on {} (write-after-read)",
    "write-after-write": "threads race on {} (write-after-write)",
    "out of range": "accesses of {} are out of range",
    "uninitialised read": "threads read elements of {} that nobody wrote",
    "exit before barrier": "threads return before a barrier",
    "barrier divergence": "not all threads meet at a barrier",
    "cannot be launched": "no multiprocessor can hold a block",
    "unassigned variable": "threads read {} before anything is assigned to it",
}


@dataclass(frozen=True, slots=True)
class Headline:
    """The verdict on a whole launch: a word, a mark that stands for it, and a sentence."""

    word: str
    mark: str
    tone: Tone
    sentence: str


@dataclass(frozen=True, slots=True)
class Marked:
    """A line of an excerpt; ``marks`` is what happens there. Number 0 stands for lines left out."""

    number: int
    text: str
    marks: tuple[str, ...] = ()


def headline(report: Report) -> Headline:
    """Say in a word what became of a launch, and why in a sentence."""
    errors = [f for f in report.findings if f.severity == "error"]
    decisive = [v for v in report.verdicts if v.decides_exit]
    refuted = [v for v in decisive if v.outcome == "REFUTED"]
    unchecked = [v for v in decisive if v.outcome == "NOT CHECKED"]
    if errors:
        return Headline("WRONG", "✘", "bad", _clauses(errors))
    if refuted:
        said = f"{len(refuted)} of {_plural(len(decisive), 'claim')} refuted: {refuted[0].claim}"
        return Headline("REFUTED", "✘", "bad", said)
    if unchecked:
        said = f"{len(unchecked)} of {_plural(len(decisive), 'claim')} could not be checked"
        return Headline("NOT CHECKED", "?", "unsure", f"{said}: {unchecked[0].claim}")
    raced = any(f.second is not None for f in report.findings)  # with the same values
    said = f"no {'harmful ' * raced}race, nothing out of range or read before it is written, "
    said += "for all data" if report.all_data else "in this launch and on these data"
    if decisive:
        said += f"; {_plural(len(decisive), 'claim')} hold{'s' * (len(decisive) == 1)}"
    warnings = [f for f in report.findings if f.severity == "warning"]
    if warnings:
        said += f"; {_plural(len(warnings), 'warning')}"
    return Headline("CLEAN", "✔", "good", said)


def main_finding(report: Report) -> Finding | None:
    """The finding that explains the headline best: the first error, or else the first warning."""
    worst = [f for f in report.findings if f.severity == "error"]
    worst += [f for f in report.findings if f.severity == "warning"]
    return worst[0] if worst else None


def excerpt(report: Report, finding: Finding) -> list[Marked]:
    """The lines of source that a finding is about, with what each thread does there."""
    marks: dict[int, list[str]] = {}
    element = _subject(finding)
    if finding.element is not None:
        element = at(element, finding.element)
    known = {line.number: line.text for line in report.source}
    places = [p for p in (finding.first, finding.second) if p is not None and p.line in known]
    alike = len(places) == 2 and places[0].block == places[1].block
    for number, place in enumerate(places, 1):
        does = _DOES.get(finding.kind, ("is here", "is here"))[number - 1].format(element)
        who_does = f"thread {index(place.thread, report.block)}" if alike else who(place, report)
        said = f"{who_does} {does}"
        marks.setdefault(place.line, []).append(f"{number}. {said}" if len(places) > 1 else said)
    if not marks:
        return []
    first, last = min(marks), max(marks)
    shown = [n for n in range(first, last + 1) if n in known]
    if len(shown) > _EXCERPT:
        near = {n for line in marks for n in range(line - 2, line + 3)}
        shown = [n for n in shown if n in near]
    lines: list[Marked] = []
    for before, number in zip([shown[0], *shown], shown, strict=False):
        if number > before + 1:
            lines.append(Marked(0, "⋮"))
        lines.append(Marked(number, known[number], tuple(marks.get(number, ()))))
    indent = min(len(m.text) - len(m.text.lstrip()) for m in lines if m.number and m.text.strip())
    return [Marked(m.number, m.text[indent:] if m.number else m.text, m.marks) for m in lines]


def who(place: Place, report: Report) -> str:
    """A thread by its index, and its block where there is more than one."""
    said = f"thread {index(place.thread, report.block)}"
    blocks = report.grid[0] * report.grid[1] * report.grid[2]
    return said if blocks == 1 else f"{said} of block {index(place.block, report.grid)}"


def wasteful(report: Report) -> list[SiteRow]:
    """The places that cost more than the least there could be, worst first."""
    found = [site for site in report.sites if site.cost > site.ideal]
    return sorted(found, key=lambda site: site.ideal - site.cost)


def usual_scope(verdicts: Sequence[Verdict]) -> str:
    """The scope that most proved claims share, so that it need not be said of each."""
    scopes = Counter(v.scope for v in verdicts if v.outcome == "PROVED" and v.scope)
    return max(scopes, key=lambda scope: scopes[scope], default="")


def asides(verdict: Verdict, usual: str) -> list[str]:
    """What is said of a claim beside it: form, line, and a scope other than the usual one."""
    said: list[str] = []
    if verdict.form is not None:
        said.append(verdict.form)
    if verdict.line is not None:
        said.append(f"line {verdict.line}")
    if not verdict.decides_exit:
        said.append("for information")
    if verdict.scope and (verdict.scope != usual or verdict.outcome != "PROVED"):
        said.append(verdict.scope)
    return said


def launch(report: Report) -> str:
    """Grid, block and target, on one line."""
    return f"grid {extent(report.grid)}, block {extent(report.block)}, {report.target}"


def index(dim: Dim, of: Dim) -> str:
    """``(3, 1)``, or ``3`` where the launch has one axis only."""
    axes = max((i + 1 for i in range(3) if of[i] > 1), default=1)
    return str(dim[0]) if axes == 1 else f"({', '.join(map(str, dim[:axes]))})"


def extent(dim: Dim) -> str:
    """``16×16``, without trailing ones."""
    axes = max((i + 1 for i in range(3) if dim[i] > 1), default=1)
    return "×".join(f"{n:,}" for n in dim[:axes])


def at(name: str, index: Sequence[object]) -> str:
    """``As[0, 3]``."""
    return f"{name}[{', '.join(map(str, index))}]"


def count(number: int, unit: str = "") -> str:
    """``16,384 sectors``."""
    if not unit:
        return f"{number:,}"
    return f"{number:,} {unit.removesuffix('s') if number == 1 else unit}"


def bytes_of(number: int) -> str:
    """``2.00 MiB``; bytes up to 10 KiB are not rounded."""
    if number < 10240:
        return f"{number:,} B"
    power = min((number.bit_length() - 1) // 10, 4)
    return f"{number / 1024**power:.3g} {'KMGT'[power - 1]}iB"


def percent(fraction: float) -> str:
    """``14 %``."""
    return f"{100 * fraction:.0f} %"


def ratio(number: float) -> str:
    """``2.5``, with no more digits than say something."""
    return f"{number:,.2f}".rstrip("0").rstrip(".") if number < 100 else f"{number:,.0f}"


def sentence(text: str) -> str:
    """The text with a capital and a full stop."""
    if not text:
        return ""
    ended = text if text[-1] in ".!?…" else f"{text}."
    return ended[0].upper() + ended[1:]


def _clauses(errors: Sequence[Finding]) -> str:
    """``threads race on As and Bs (read-after-write)``, and so on for each kind of error."""
    arrays: dict[str, dict[str, None]] = {}
    for finding in errors:
        arrays.setdefault(finding.kind, {})[_subject(finding) or "memory"] = None
    clauses = (
        _CLAUSES.get(kind, f"{kind} on {{}}").format(listed(names))
        for kind, names in arrays.items()
    )
    return "; ".join(clauses)


def _subject(finding: Finding) -> str:
    """The array or variable that a finding is about; "" if it is about neither."""
    if finding.kind == "unassigned variable" and finding.first is not None:
        return finding.first.text
    return finding.array or ""


def listed(names: Iterable[str]) -> str:
    """``A, B and C``."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def _plural(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
