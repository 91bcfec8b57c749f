"""Hazards put into words: what happens, between whom, and what to change."""

from __future__ import annotations

from collections.abc import Sequence

from ..simt.hazards import Actor, Coverage, Hazard
from .evidence import Evidence
from .report import Finding, Place, Severity
from .story import position

__all__ = ["describe_hazard", "findings", "place"]

_VERBS = {"load": "reads", "store": "writes", "atomic": "updates", "barrier": "waits at"}


def findings(evidence: Evidence, too_large: str = "") -> tuple[Finding, ...]:
    """Everything wrong that was seen, worst first; ``too_large`` says why no block can be held."""
    found = [describe_hazard(hazard, evidence) for hazard in evidence.hazards]
    if too_large:
        found.append(
            Finding(
                kind="cannot be launched",
                severity="error",
                message=too_large,
                advice="give a block less: threads, registers a thread, or shared memory",
                scope="all data",
            )
        )
    racing = {hazard.array.name for hazard in evidence.hazards if hazard.array and hazard.second}
    for coverage in evidence.coverage:
        found += _coverage(coverage, evidence, racing)
    order = {"error": 0, "warning": 1, "note": 2}
    return tuple(sorted(found, key=lambda f: (order[f.severity], f.first.line if f.first else 0)))


def describe_hazard(hazard: Hazard, evidence: Evidence) -> Finding:
    """One hazard as a finding."""
    if hazard.second is not None:
        severity, message, advice = _race(hazard, hazard.second, evidence)
    elif hazard.kind == "out of range":
        severity, message, advice = _out_of_range(hazard, evidence)
    elif hazard.kind == "uninitialised read":
        severity, message, advice = _uninitialised(hazard, evidence)
    elif hazard.kind == "unassigned variable":
        severity, message, advice = _unassigned(hazard, evidence)
    elif hazard.kind == "division by zero":
        severity, message, advice = _by_zero(hazard, evidence)
    else:
        severity, message, advice = _at_barrier(hazard, evidence)
    array = hazard.array
    return Finding(
        kind=hazard.kind,
        severity=severity,
        message=message,
        advice=advice,
        # What is divided by is a value, and values are those of this launch.
        scope="all data"
        if evidence.holds_for_all_data and hazard.kind != "division by zero"
        else "this launch",
        array=None if array is None else array.name,
        space=None if array is None else array.space,
        element=hazard.element,
        first=place(hazard.first),
        second=None if hazard.second is None else place(hazard.second),
        interval=hazard.interval,
        accesses=hazard.accesses,
        blocks=hazard.blocks,
    )


def place(actor: Actor) -> Place:
    """An actor as a report has it."""
    site = actor.site
    return Place(site.line, site.text, actor.block, actor.thread, site.function)


def _who(actor: Actor, evidence: Evidence) -> str:
    trial = evidence.trial
    thread = f"thread {position(actor.thread, trial.block)}"
    if trial.grid == (1, 1, 1):
        return thread
    return f"{thread} of block {position(actor.block, trial.grid)}"


def _element(hazard: Hazard) -> str:
    assert hazard.array is not None
    assert hazard.element is not None
    return f"{hazard.array.name}[{', '.join(map(str, hazard.element))}]"


def _reads(hazard: Hazard) -> str:
    return f"{_count(hazard.accesses, 'read')} in {_count(hazard.blocks, 'block')}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _race(hazard: Hazard, second: Actor, evidence: Evidence) -> tuple[Severity, str, str]:
    first, element = hazard.first, _element(hazard)
    did, does = _VERBS[first.site.kind], _VERBS[second.site.kind]
    where = f"on line {second.site.line}"
    if hazard.between_blocks:
        message = (
            f"{_who(first, evidence)} {did} {element} on line {first.site.line}, and "
            f"{_who(second, evidence)} {does} it {where}: blocks run in any order, and no barrier "
            f"orders them ({_count(hazard.accesses, 'element')})"
        )
        advice = (
            "give each block elements of its own, combine them with cuda.atomic, or split the "
            "work into two launches"
        )
    else:
        if first.site.id == second.site.id:
            where = "on the same line"
        other = f"thread {position(second.thread, evidence.trial.block)}"
        message = (
            f"{_who(first, evidence)} {did} {element} on line {first.site.line}, and {other} "
            f"{does} it {where}, with no barrier between: {hazard.kind}"
        )
        if hazard.accesses:
            accesses = _count(hazard.accesses, "access" if hazard.accesses == 1 else "accesse")
            message += f" ({accesses} in {_count(hazard.blocks, 'block')})"
        advice = _where_to_wait(first, second)
    if hazard.same_value and evidence.agrees_by_data(hazard):
        return "warning", f"{message}; all write the same value, in these data", advice
    if hazard.same_value:
        return "note", f"{message}; all write the same value, which does no harm here", advice
    return "error", message, advice


def _where_to_wait(first: Actor, second: Actor) -> str:
    a, b = first.site, second.site
    if a.id == b.id:
        return f"let one thread write it, or use cuda.atomic: line {a.line}"
    if a.line < b.line:
        return f"put cuda.syncthreads() between line {a.line} and line {b.line}"
    if a.line == b.line:
        return f"split line {a.line} in two statements, with cuda.syncthreads() between them"
    return (
        f"put cuda.syncthreads() after line {a.line}, at the end of the loop, before it comes back "
        f"to line {b.line}"
    )


def _out_of_range(hazard: Hazard, evidence: Evidence) -> tuple[Severity, str, str]:
    assert hazard.array is not None
    site = hazard.first.site
    what = {"load": "read", "store": "write", "atomic": "update"}[site.kind]
    beyond = hazard.accesses - hazard.in_buffer
    fate = []
    if beyond:
        fate.append(f"{beyond:,} outside the memory of {hazard.array.name}")
    if hazard.in_buffer:
        fate.append(f"{hazard.in_buffer:,} in another row of it, unnoticed by any tool")
    message = (
        f"{_who(hazard.first, evidence)} {what}s {_element(hazard)} on line {site.line} "
        f"({site.text}), but {hazard.array.name} has shape {hazard.array.shape}: "
        f"{_count(hazard.accesses, what)} out of range, {' and '.join(fate)}"
    )
    return "error", message, f"let only threads whose index is within {hazard.array.name} {what} it"


def _uninitialised(hazard: Hazard, evidence: Evidence) -> tuple[Severity, str, str]:
    assert hazard.array is not None
    name = hazard.array.name
    is_own = hazard.array.space == "local"
    lacks = f"it has not written since it declared {name}"
    message = (
        f"{_who(hazard.first, evidence)} reads {_element(hazard)} on line "
        f"{hazard.first.site.line}, which "
        f"{lacks if is_own else 'no thread of its block has written'} ({_reads(hazard)})"
    )
    if is_own:
        return "error", message, f"write every element of {name} that is read, 0 if nothing else"
    advice = (
        f"let every thread write its element of {name} before the barrier; where there is nothing "
        "to load, it writes 0"
    )
    return "error", message, advice


def _unassigned(hazard: Hazard, evidence: Evidence) -> tuple[Severity, str, str]:
    site = hazard.first.site
    message = (
        f"{_who(hazard.first, evidence)} reads {site.text} on line {site.line} before anything is "
        f"assigned to it ({_reads(hazard)}): 0 in numba-cuda, anything in CUDA C++, and an "
        "UnboundLocalError in Python"
    )
    advice = f"assign {site.text} on every path to line {site.line}: before the branch or loop"
    return "error", message, advice


def _by_zero(hazard: Hazard, evidence: Evidence) -> tuple[Severity, str, str]:
    site = hazard.first.site
    message = (
        f"{_who(hazard.first, evidence)} divides an integer by 0 on line {site.line} "
        f"({site.text}): {_count(hazard.accesses, 'division')} in "
        f"{_count(hazard.blocks, 'traced block')}, giving 0 in numba-cuda, and anything in CUDA C++"
    )
    return "warning", message, "let only threads divide whose divisor is not 0"


def _at_barrier(hazard: Hazard, evidence: Evidence) -> tuple[Severity, str, str]:
    line = hazard.first.site.line
    threads = _count(hazard.accesses, "thread")
    blocks = _count(hazard.blocks, "block")
    who = _who(hazard.first, evidence)
    if hazard.kind == "barrier divergence":
        message = (
            f"{threads} in {blocks} do not reach the barrier on line {line} though they are still "
            f"running, the first of them {who}: the others wait for ever, or pass out of step"
        )
        advice = (
            f"move the barrier on line {line} out of the condition, so that all threads meet it"
        )
        return "error", message, advice
    message = (
        f"{threads} in {blocks} have returned and do not reach the barrier on line {line}, the "
        f"first of them {who}: what they were to load is missing"
    )
    severity: Severity = "warning"
    if evidence.target.half_warps:
        severity = "error"
        message += f"; on {evidence.target.name} the others wait for ever"
    return (
        severity,
        message,
        "do not return before a barrier: put the loads and the store under the condition",
    )


def _coverage(
    coverage: Coverage, evidence: Evidence, racing: Sequence[str] | set[str]
) -> list[Finding]:
    array = coverage.array
    scope = "all data" if evidence.holds_for_all_data else "this launch"
    total = coverage.never + coverage.once + coverage.many
    found = []
    if coverage.never:
        first = ", ".join(map(str, coverage.first_never or ()))
        found.append(
            Finding(
                kind="never written",
                severity="warning",
                message=f"{_count(coverage.never, 'element')} of {array.name}'s {total:,} are "
                f"never written, the first {array.name}[{first}]",
                advice="round the grid up, and guard the store; or launch as many blocks as "
                "the array needs",
                scope=scope,
                array=array.name,
                space=array.space,
                element=coverage.first_never,
                accesses=coverage.never,
            )
        )
    if coverage.many and array.name not in racing:
        first = ", ".join(map(str, coverage.first_many or ()))
        found.append(
            Finding(
                kind="written more than once",
                severity="note",
                message=f"{_count(coverage.many, 'element')} of {array.name}'s {total:,} are "
                f"written by more than one thread, the first {array.name}[{first}]",
                advice="nothing, if that is meant",
                scope=scope,
                array=array.name,
                space=array.space,
                element=coverage.first_many,
                accesses=coverage.many,
            )
        )
    return found
