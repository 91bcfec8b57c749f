"""Claims about who comes first: races, barriers, what is read before it is written."""

from __future__ import annotations

from ...errors import OptionError
from ...simt.hazards import Hazard
from ..evidence import Evidence
from ..findings import describe_hazard
from .base import Claim, Judgement, holds, refuted

__all__ = ["barrier_needed", "barriers_reached", "in_bounds", "initialised", "race_free"]


def race_free() -> Claim:
    """No two threads touch an element, one of them writing, without a barrier between."""

    def judge(seen: Evidence) -> Judgement:
        racing = [h for h in seen.hazards if h.second is not None]
        harmful = [h for h in racing if not h.same_value]
        if harmful:
            return _witness(harmful, seen)
        if racing:
            # That the values are equal was seen of these data only.
            harmless = describe_hazard(racing[0], seen)
            return Judgement("HOLDS", harmless.message, "this launch", racing[0].first.site.line)
        return holds(seen, "no two threads meet unordered on shared or on global memory")

    return Claim("no two threads race", judge)


def in_bounds() -> Claim:
    """Every access is within its array."""
    return _without("every access is within its array", "none is out of range", "out of range")


def initialised() -> Claim:
    """Shared memory, local arrays and variables are written before they are read."""
    return _without(
        "shared memory, local arrays and variables are written before they are read",
        "every word that is read was written before, by the block or by the thread itself",
        "uninitialised read",
        "unassigned variable",
    )


def barriers_reached() -> Claim:
    """All threads of a block that are still running meet every barrier."""
    return _without(
        "all running threads of a block meet at every barrier",
        "no barrier is missed by a running thread",
        "barrier divergence",
    )


def barrier_needed(line: int | None = None, *, nth: int | None = None) -> Claim:
    """Without the barrier on a line (or the nth of the source, from 1) something goes wrong.

    Judged by running the kernel without it: needed if that brings a race, or a read of shared
    memory that nothing has written.
    """
    if (line is None) == (nth is None) or (nth is not None and nth < 1):
        raise OptionError("barrier_needed takes a line, or nth= from 1")
    which = f"the barrier on line {line}" if nth is None else f"barrier {nth}"

    def judge(seen: Evidence) -> Judgement:
        at = line
        if nth is not None:
            lines = sorted({s.line for s in seen.program.sites if s.kind == "barrier"})
            if nth > len(lines):
                return refuted(f"{seen.program.name} has {len(lines)} barriers")
            at = lines[nth - 1]
        assert at is not None
        hazard = seen.without_barrier(at)
        if hazard is None:
            return refuted("without it no race and no unwritten read appears", at)
        message = describe_hazard(hazard, seen).message
        return holds(seen, f"without it, {message}", sizes="this grid and these sizes", line=at)

    return Claim(f"{which} is needed", judge)


def _without(sentence: str, detail: str, *kinds: str) -> Claim:
    def judge(seen: Evidence) -> Judgement:
        found = [h for h in seen.hazards if h.kind in kinds]
        return _witness(found, seen) if found else holds(seen, detail)

    return Claim(sentence, judge)


def _witness(hazards: list[Hazard], seen: Evidence) -> Judgement:
    first = min(hazards, key=lambda h: h.first.site.id)
    return refuted(describe_hazard(first, seen).message, first.first.site.line)
