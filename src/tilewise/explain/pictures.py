"""The data of the pictures: banks and sectors of one request, the barriers of one block."""

from __future__ import annotations

import numpy as np

from ..simt import memory
from ..simt.events import ArrayInfo
from ..simt.hazards import element_at, unravel
from .evidence import Evidence
from .recorder import Request, SiteTotals
from .report import BankMap, Finding, Interval, LaneWord, SectorMap, SectorUse

__all__ = ["bank_map", "bank_maps", "sector_map", "sector_maps", "timeline"]


def bank_maps(evidence: Evidence) -> tuple[BankMap, ...]:
    """The most costly request of each place that touches shared memory."""
    return tuple(
        bank_map(totals, totals.worst, evidence)
        for totals in evidence.recorder.totals.values()
        if totals.array.space == "shared" and totals.worst is not None
    )


def sector_maps(evidence: Evidence) -> tuple[SectorMap, ...]:
    """The most wasteful request of each place that touches global memory."""
    return tuple(
        sector_map(totals, totals.worst, evidence)
        for totals in evidence.recorder.totals.values()
        if totals.array.space == "global" and totals.worst is not None
    )


def timeline(evidence: Evidence, findings: tuple[Finding, ...]) -> tuple[Interval, ...]:
    """What the block that was traced first does between its barriers."""
    intervals: dict[int, list[tuple[int, str, str, str | None, int]]] = {}
    barrier: dict[int, int] = {}
    for step in evidence.recorder.timeline:
        steps = intervals.setdefault(step.interval, [])
        if step.op == "barrier":
            barrier[step.interval] = step.site.line
        else:
            steps.append((step.site.line, step.site.text, step.op, step.site.array, step.times))
    return tuple(
        Interval(
            number,
            tuple(steps),
            barrier.get(number),
            tuple(i for i, finding in enumerate(findings) if finding.interval == number),
        )
        for number, steps in intervals.items()
    )


def bank_map(totals: SiteTotals, request: Request, evidence: Evidence) -> BankMap:
    """One request of a place, lane by bank."""
    banks = 16 if evidence.target.half_warps else memory.BANKS
    spans = _groups(request, evidence.target.half_warps)
    words: list[LaneWord] = []
    done = 0
    for first, last in spans:
        seen: dict[int, list[int]] = {}
        for lane in range(first, last + 1):
            if not request.active[lane]:
                continue
            address = int(request.addresses[lane])
            element = _name(totals.array, address)
            for word in range(address // 4, (address + max(4, request.width) - 1) // 4 + 1):
                in_bank = seen.setdefault(word % banks, [])
                if word not in in_bank:
                    in_bank.append(word)
                turn = done + in_bank.index(word)
                words.append(LaneWord(lane, word % banks, word, turn, element))
        done += max(map(len, seen.values()), default=0)
    return BankMap(
        line=totals.site.line,
        text=totals.site.text,
        array=totals.array.name,
        op=totals.op,
        width=request.width,
        block=unravel(request.block, evidence.trial.grid),
        warp=request.warp,
        banks=banks,
        words=tuple(words),
        inactive=tuple(int(lane) for lane in np.flatnonzero(~request.active)),
        wavefronts=request.cost,
        ideal=request.ideal,
        groups=spans,
        sentence=_bank_sentence(request, words, spans, banks),
    )


def _groups(request: Request, half_warps: bool) -> tuple[tuple[int, int], ...]:
    """The lanes that are served together."""
    size = 16 if half_warps else memory.LANES // max(1, request.width // 4)
    groups = memory.LANES // size
    if not half_warps and groups > 1 and request.load:
        # Neighbouring groups are served together where lanes repeat in pairs: then fewer
        # wavefronts are needed than there are groups of themselves.
        apart = memory.shared_cost(
            request.addresses[None], request.active[None], request.width, load=False
        )
        if request.cost < int(apart.wavefronts[0]):
            size *= 2
    return tuple((start, start + size - 1) for start in range(0, memory.LANES, size))


def _bank_sentence(
    request: Request, words: list[LaneWord], spans: tuple[tuple[int, int], ...], banks: int
) -> str:
    together = "" if len(spans) == 1 else f" in {len(spans)} groups of {spans[0][1] + 1} lanes"
    distinct = len({word.word for word in words})
    lanes = len({word.lane for word in words})
    said = f"{lanes} lanes touch {distinct} word{'s' * (distinct != 1)}{together}: "
    wavefronts = f"{request.cost} wavefront{'s' * (request.cost != 1)}"
    if request.cost <= request.ideal:
        if distinct < len(words):
            said += "lanes that share a word are served at once, "
        return f"{said}no bank is asked for two words at a time, {wavefronts}"
    held: dict[tuple[int, int], set[int]] = {}
    for word in words:
        group = next(i for i, (first, last) in enumerate(spans) if first <= word.lane <= last)
        held.setdefault((group, word.bank), set()).add(word.word)
    (_, bank), most = max(held.items(), key=lambda item: len(item[1]))
    return (
        f"{said}bank {bank} of {banks} is asked for {len(most)} different words, which it gives "
        f"one after the other: {wavefronts} where {request.ideal} would do"
    )


def sector_map(totals: SiteTotals, request: Request, evidence: Evidence) -> SectorMap:
    """One request of a place, sector by sector."""
    array, width = totals.array, request.width
    sectors: dict[int, tuple[set[int], list[int]]] = {}
    for lane in np.flatnonzero(request.active).tolist():
        address = int(request.addresses[lane])
        used, lanes = sectors.setdefault(address // memory.SECTOR_BYTES, (set(), []))
        used.update(range(address % memory.SECTOR_BYTES, address % memory.SECTOR_BYTES + width))
        lanes.append(lane)
    uses = tuple(
        SectorUse(
            sector * memory.SECTOR_BYTES - array.base,
            sector * memory.SECTOR_BYTES // memory.LINE_BYTES,
            _ranges(used),
            tuple(lanes),
        )
        for sector, (used, lanes) in sorted(sectors.items())
    )
    useful = sum(len(used) for used, _ in sectors.values())
    moved = len(sectors) * memory.SECTOR_BYTES
    lanes_active = int(request.active.sum())
    ideal = min(len(sectors), -(-lanes_active * width // memory.SECTOR_BYTES))
    said = (
        f"{lanes_active} lanes ask for {useful} bytes, which lie in {len(sectors)} sectors of "
        f"{memory.SECTOR_BYTES} bytes: "
    )
    said += (
        "nothing is wasted"
        if useful == moved
        else f"{moved - useful} of {moved} bytes are not wanted"
    )
    if len(sectors) > ideal:
        said += f"; side by side they would need {ideal}"
    return SectorMap(
        line=totals.site.line,
        text=totals.site.text,
        array=array.name,
        op=totals.op,
        width=width,
        block=unravel(request.block, evidence.trial.grid),
        warp=request.warp,
        sectors=uses,
        elements=tuple(
            _name(array, int(address)) if active else ""
            for address, active in zip(request.addresses, request.active, strict=True)
        ),
        sector_bytes=memory.SECTOR_BYTES,
        ideal=ideal,
        useful_bytes=useful,
        moved_bytes=moved,
        sentence=said,
    )


def _name(array: ArrayInfo, address: int) -> str:
    return f"{array.name}[{', '.join(map(str, element_at(array, address - array.base)))}]"


def _ranges(numbers: set[int]) -> tuple[tuple[int, int], ...]:
    """Sorted numbers as (first, end) of each run."""
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return tuple(runs)
