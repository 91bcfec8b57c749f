"""What ``explain`` returns: the data of a report, in the order in which a person reads it.

Nothing here computes, traces or draws. Every picture is here as data, so that the text, the HTML
and any program show the same. :meth:`Report.to_dict` is the versioned schema that programs read.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from ..errors import OptionError

__all__ = [
    "SCHEMA",
    "ArrayRow",
    "BankMap",
    "Figures",
    "Finding",
    "Interval",
    "LaneWord",
    "Occupancy",
    "Outcome",
    "Place",
    "Report",
    "Roof",
    "Roofs",
    "SectorMap",
    "SectorUse",
    "Severity",
    "SiteRow",
    "SourceLine",
    "ThreadMap",
    "ThreadStory",
    "Traffic",
    "Verdict",
]

#: Name and version of what :meth:`Report.to_dict` returns. The number after the slash changes
#: when a field is removed or changes its meaning; fields may be added without.
SCHEMA = "tilewise.explain/1"

Dim = tuple[int, int, int]
Outcome = Literal["PROVED", "HOLDS", "REFUTED", "NOT CHECKED"]
Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of one claim.

    Attributes
    ----------
    claim : str
        The claim as a sentence.
    outcome : str
        PROVED: for all data, and beyond what ``scope`` says. HOLDS: in this launch, on these
        data. REFUTED: ``detail`` has the witness. NOT CHECKED: ``detail`` says why.
    scope : str
        For what it is true: "all data, every width that is a multiple of 8", "this launch".
    detail : str
        The figures behind it, or the witness.
    original : str, optional
        The chapter's own words, where the claim is one of the programming guide's.
    form : {None, "as written", "corrected"}
        Which of the two, where the guide's sentence is not right as it stands.
    decides_exit : bool
        False for what is said for information only.
    line : int, optional
        The source line it is about.
    """

    claim: str
    outcome: Outcome
    scope: str = ""
    detail: str = ""
    original: str | None = None
    form: Literal["as written", "corrected"] | None = None
    decides_exit: bool = True
    line: int | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """One thread at one line; block and thread are (x, y, z)."""

    line: int
    text: str
    block: Dim
    thread: Dim
    function: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something wrong, in words and in figures.

    ``message`` says what happens, ``advice`` what to change. Of a race, ``first`` came earlier in
    the order of execution here. ``interval`` is the number of barriers the block had passed.
    ``accesses`` and ``blocks`` count all cases. ``scope`` is "all data" or "this launch".
    """

    kind: str
    severity: Severity
    message: str
    advice: str
    scope: str
    array: str | None = None
    space: str | None = None
    element: tuple[int, ...] | None = None
    first: Place | None = None
    second: Place | None = None
    interval: int | None = None
    accesses: int = 0
    blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Roof:
    """One limit on speed: the fraction of the float peak that this resource alone would allow.

    ``cycles`` are those the resource is busy on each multiprocessor if the work is spread evenly;
    ``tflops`` is the limit for ``Roofs.device``, where its clock is known.
    """

    name: str
    cycles: float
    fraction: float
    tflops: float | None
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofs:
    """The limits, and the one that binds.

    ``flops`` counts floating-point operations (2 a multiply-add); ``intensity`` is flops a byte
    of compulsory traffic. ``level`` says whether the binding roof was worked out from the loads
    of the source or from those the compiler makes of them. ``not_counted`` lists what is missing.
    """

    device: str
    level: Literal["source", "compiled"]
    flops: int
    intensity: float
    peak_tflops: float | None
    bandwidth_tbs: float | None
    roofs: tuple[Roof, ...]
    binding: str
    sentence: str
    next_step: str
    not_counted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteRow:
    """What one place in the source does to memory, over the whole launch.

    ``cost`` counts ``unit``: sectors of global memory or wavefronts of shared memory (transactions
    and steps on the guide's hardware); ``ideal`` is the least for what the threads ask for, and
    ``per_request`` the mean cost. ``bytes`` are asked for by threads, ``moved`` travel.
    ``histogram`` maps a request's cost to how many requests cost it.
    """

    line: int
    text: str
    op: str
    array: str
    space: str
    unit: str
    lanes: int
    requests: int
    cost: int
    ideal: int
    conflicts: int
    lines: int
    bytes: int
    moved: int
    per_request: float
    histogram: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayRow:
    """What is done to one array, over the whole launch.

    ``reads_per_element`` is the mean, and the range where every element's reads were counted.
    ``never_written``, ``written_once`` and ``written_more`` count elements by how many threads
    write them; None for an array that nothing writes.
    """

    name: str
    space: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    load_lanes: int
    store_lanes: int
    load_cost: int
    store_cost: int
    unit: str
    reads_per_element: float
    reads_range: tuple[int, int] | None = None
    never_written: int | None = None
    written_once: int | None = None
    written_more: int | None = None


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a launch under ncu's metric names, at one level.

    ``level`` "source" counts the loads as they are written (what numba-cuda emits); "compiled"
    with four neighbouring loads of shared memory made one, as nvcc does. Never mix the two.
    """

    level: Literal["source", "compiled"]
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class SourceLine:
    """One line of the kernel with what it costs; ``findings`` are indices into the report's."""

    number: int
    text: str
    sectors: int = 0
    wavefronts: int = 0
    requests: int = 0
    excess: int = 0
    barriers: int = 0
    findings: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LaneWord:
    """One word that one lane touches: its bank, and the wavefront that serves it, from 0."""

    lane: int
    bank: int
    word: int
    wavefront: int
    element: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BankMap:
    """One request on shared memory, lane by bank: the most costly that its place makes.

    Lanes that touch the same word of a bank share one wavefront at no cost. ``groups`` are the
    lanes that are served together, as (first, last).
    """

    line: int
    text: str
    array: str
    op: str
    width: int
    block: Dim
    warp: int
    banks: int
    words: tuple[LaneWord, ...]
    inactive: tuple[int, ...]
    wavefronts: int
    ideal: int
    groups: tuple[tuple[int, int], ...]
    sentence: str


@dataclass(frozen=True, slots=True)
class SectorUse:
    """One sector of a request: its address within the array, and the bytes that are asked for.

    ``used`` are ranges (first byte, end) within the sector; ``lanes`` those that ask for them.
    """

    offset: int
    line: int
    used: tuple[tuple[int, int], ...]
    lanes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SectorMap:
    """One request on global memory: the most wasteful that its place makes.

    ``elements`` has for each lane the element it touches, as text; "" where it is not active.
    """

    line: int
    text: str
    array: str
    op: str
    width: int
    block: Dim
    warp: int
    sectors: tuple[SectorUse, ...]
    elements: tuple[str, ...]
    sector_bytes: int
    ideal: int
    useful_bytes: int
    moved_bytes: int
    sentence: str


@dataclass(frozen=True, slots=True)
class Interval:
    """What one block does between two barriers: (line, source, op, array, times), then a barrier.

    ``findings`` are indices of the report's findings that happen in this interval.
    """

    number: int
    steps: tuple[tuple[int, str, str, str | None, int], ...]
    barrier: int | None
    findings: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadMap:
    """Which element of the output each thread of one block writes, in linear thread order.

    ``reads`` has for each array the box of it that the block reads, as (first, last) an axis.
    """

    block: Dim
    shape: Dim
    array: str
    elements: tuple[tuple[int, ...] | None, ...]
    reads: Mapping[str, tuple[tuple[int, int], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadStory:
    """What one thread does, and its block; ``text`` says it in words."""

    block: Dim
    thread: Dim
    writes: Mapping[str, tuple[tuple[int, ...], ...]]
    thread_reads: Mapping[str, int]
    block_reads: Mapping[str, tuple[tuple[int, int], ...]]
    tiles: int
    barriers: int
    text: str


@dataclass(frozen=True, slots=True)
class Traffic:
    """One bar of the traffic chart."""

    label: str
    bytes: int
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """Resident warps, by each limit and together; blocks a multiprocessor can hold."""

    threads: int
    registers: int | None
    shared_bytes: int
    blocks: int
    warps: int
    max_warps: int
    fraction: float
    limits: Mapping[str, int]
    limited_by: tuple[str, ...]
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that was found out about one launch of one kernel.

    Read it in this order, or print it: verdicts, findings, the roof that binds and the next
    step, tables, annotated source, pictures, limits, what was not checked.
    """

    kernel: str
    filename: str
    target: str
    grid: Dim
    block: Dim
    arguments: tuple[str, ...]
    verdicts: tuple[Verdict, ...]
    findings: tuple[Finding, ...]
    roofs: Roofs | None
    roofs_missing: str
    occupancy: Occupancy | None
    sites: tuple[SiteRow, ...]
    compiled_sites: tuple[SiteRow, ...]
    arrays: tuple[ArrayRow, ...]
    figures: tuple[Figures, ...]
    traffic: tuple[Traffic, ...]
    source: tuple[SourceLine, ...]
    bank_maps: tuple[BankMap, ...]
    sector_maps: tuple[SectorMap, ...]
    timeline: tuple[Interval, ...]
    timeline_block: Dim
    barriers_per_block: int
    thread_map: ThreadMap | None
    certificate: str
    all_data: bool
    data_dependence: str
    limits: tuple[str, ...]
    not_checked: tuple[str, ...]
    notes: tuple[str, ...] = ()
    tell: Callable[[Dim, Dim], ThreadStory] | None = field(default=None, compare=False, repr=False)

    @property
    def exit_code(self) -> int:
        """0 proven; 1 an error was found or a claim refuted; 2 a claim could not be checked."""
        decisive = {v.outcome for v in self.verdicts if v.decides_exit}
        if "REFUTED" in decisive or any(f.severity == "error" for f in self.findings):
            return 1
        return 2 if "NOT CHECKED" in decisive else 0

    def thread(self, block: tuple[int, ...], thread: tuple[int, ...]) -> ThreadStory:
        """Return what one thread does, in words: what it writes, what its block reads.

        Parameters
        ----------
        block, thread : tuple of int
            (x, y, z); what is left out is 0.
        """
        if self.tell is None:
            raise OptionError(
                "a report that was pickled or copied cannot trace a thread any more; ask the one "
                "that explain returned"
            )
        return self.tell(_three(block), _three(thread))

    def __getstate__(self) -> list[Any]:
        # All but what runs the kernel again, which may be a function of anywhere.
        return [None if f.name == "tell" else getattr(self, f.name) for f in fields(self)]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain lists, dicts, strings and numbers, with its schema."""
        values = {f.name: _plain(getattr(self, f.name)) for f in fields(self) if f.name != "tell"}
        return {"schema": SCHEMA, "exit_code": self.exit_code, **values}

    def to_html(self) -> str:
        """Return the report as one page that needs nothing else."""
        from .html import page

        return page(self)

    def __str__(self) -> str:
        from .text import render, to_text

        return to_text(render(self))

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from .html import notebook

        return notebook(self)

    def to_json(self, *, indent: int | None = None) -> str:
        """Return :meth:`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False)


def _three(dim: tuple[int, ...]) -> Dim:
    x, y, z = (*dim, 0, 0, 0)[:3]
    return int(x), int(y), int(z)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value
