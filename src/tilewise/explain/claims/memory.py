"""Claims about requests: sectors, banks, and how often memory is read."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...simt.memory import BANKS, SECTOR_BYTES
from ..evidence import Evidence
from ..pictures import bank_map, sector_map
from ..recorder import SiteTotals
from .base import Claim, Judgement, holds, not_checked, refuted

__all__ = ["coalesced", "conflict_free", "one_word_a_half_warp", "reads", "reused"]

Times = float | Callable[[Evidence], float]


def coalesced(array: str, *, op: str | None = None) -> Claim:
    """Every request on a global array moves no more sectors than its bytes need.

    Parameters
    ----------
    array : str
    op : {None, "load", "store"}
        Only the loads, or only the stores.
    """

    def judge(seen: Evidence) -> Judgement:
        touching = _touching(seen, array, "global", op)
        if isinstance(touching, Judgement):
            return touching
        wasteful = max(touching, key=lambda t: t.cost - t.ideal)
        if wasteful.cost > wasteful.ideal:
            assert wasteful.worst is not None
            worst = sector_map(wasteful, wasteful.worst, seen)
            return refuted(
                f"{wasteful.site.text}: {worst.sentence}; over the launch {wasteful.cost:,} "
                f"{_unit(seen, 'global')} where {wasteful.ideal:,} would do",
                wasteful.site.line,
            )
        cost, requests = (sum(getattr(t, n) for t in touching) for n in ("cost", "requests"))
        detail = f"{requests:,} requests, {cost:,} {_unit(seen, 'global')}, the least possible"
        sizes = "this grid and these sizes"
        if all(_keeps_sectors(t, seen) for t in touching):
            unit = SECTOR_BYTES // touching[0].array.dtype.itemsize
            sizes = f"every width that is a multiple of {unit}"
        return holds(seen, detail, sizes=sizes, line=touching[0].site.line)

    which = {"load": "loads from", "store": "stores to"}.get(op or "", "accesses of")
    return Claim(f"{which} {array} are coalesced", judge)


def conflict_free(array: str, *, op: str | None = None, guide: bool = False) -> Claim:
    """No request on a shared array meets a bank conflict.

    Parameters
    ----------
    array : str
    op : {None, "load", "store"}
    guide : bool
        By the rules of the guide's own hardware (half-warps, 16 banks), whatever the target.
    """

    def judge(seen: Evidence) -> Judgement:
        touching = _touching(seen, array, "shared", op)
        if isinstance(touching, Judgement):
            return touching
        cost, least = ("guide_cost", "guide_ideal") if guide else ("cost", "ideal")
        worst = max(touching, key=lambda t: getattr(t, cost) - getattr(t, least))
        paid, due = getattr(worst, cost), getattr(worst, least)
        unit = "steps of half-warps" if guide else _unit(seen, "shared")
        if paid > due:
            assert worst.worst is not None
            said = bank_map(worst, worst.worst, seen).sentence
            return refuted(
                f"{worst.site.text}: {said}; in all {paid:,} {unit} where {due:,} would do",
                worst.site.line,
            )
        requests, total = sum(t.requests for t in touching), sum(getattr(t, cost) for t in touching)
        sizes = "this grid and these sizes"
        if all(_keeps_banks(t, seen) for t in touching):
            sizes = "every size"
        detail = f"{requests:,} requests, {total:,} {unit}, none more than the width needs"
        return holds(seen, detail, sizes=sizes, line=touching[0].site.line)

    which = {"load": "loads from", "store": "stores to"}.get(op or "", "accesses of")
    return Claim(f"{which} {array} have no bank conflicts", judge)


def one_word_a_half_warp(array: str) -> Claim:
    """The 16 threads of a half-warp load one and the same word, which is broadcast."""

    def judge(seen: Evidence) -> Judgement:
        touching = _touching(seen, array, "shared", "load")
        if isinstance(touching, Judgement):
            return touching
        for totals in touching:
            # Distinct words of a warp: at most one for each half.
            words = totals.distinct_bytes // totals.array.dtype.itemsize
            if words > 2 * totals.requests or totals.worst is None:
                return refuted(f"{totals.site.text} asks for {words:,} words", totals.site.line)
            halves = totals.worst.addresses.reshape(2, 16)
            if (halves != halves[:, :1])[totals.worst.active.reshape(2, 16)].any():
                return refuted(f"{totals.site.text}: lanes of a half-warp differ", totals.site.line)
        sizes = "every size" if all(_keeps_banks(t, seen) for t in touching) else "these sizes"
        return holds(
            seen,
            "one word a half-warp: two a warp of today, in banks of their own",
            sizes=sizes,
            line=touching[0].site.line,
        )

    return Claim(f"the threads of a half-warp load one word of {array}, by broadcast", judge)


def reads(array: str, times: Times, *, formula: str | None = None) -> Claim:
    """Every element of a global array is loaded a certain number of times.

    Parameters
    ----------
    array : str
    times : number, or function of Evidence
    formula : str, optional
        How the number is written in the sentence, such as "wB / 16".
    """

    def judge(seen: Evidence) -> Judgement:
        touching = _touching(seen, array, "global", "load")
        if isinstance(touching, Judgement):
            return touching
        want = times(seen) if callable(times) else times
        size = int(np.prod(seen.array(array).shape))
        mean = sum(t.lanes for t in touching) / max(1, size)
        counted = seen.reads_range(array)
        line = touching[0].site.line
        if mean != want or (counted is not None and counted != (want, want)):
            spread = (
                ""
                if counted is None or counted[0] == counted[1]
                else (f", between {counted[0]:,} and {counted[1]:,}")
            )
            return refuted(
                f"each element of {array} is read {mean:,g} times{spread}, not {want:,g}", line
            )
        how = "on average" if counted is None else "each"
        return holds(seen, f"{size:,} elements, {how} read {want:,g} times", line=line)

    said = formula or (f"{times:,g}" if not callable(times) else "so many")
    return Claim(f"{array} is read {said} times", judge)


def reused(times: Times, *, formula: str | None = None) -> Claim:
    """Threads load so many elements from shared memory for one that they load from global."""

    def judge(seen: Evidence) -> Judgement:
        loads = [t for t in seen.recorder.totals.values() if t.op == "load"]
        staged = [t for t in loads if t.array.space == "shared"]
        shared = sum(t.lanes for t in staged)
        device = sum(t.lanes for t in loads if t.array.space == "global")
        if not shared or not device:
            return refuted("nothing is loaded from shared memory")
        want, got = times(seen) if callable(times) else times, shared / device
        detail = f"{shared:,} loads of shared memory for {device:,} of global: {got:,g} times"
        line = staged[0].site.line
        return holds(seen, detail, line=line) if got == want else refuted(detail, line)

    said = formula or (f"{times:,g}" if not callable(times) else "so many")
    return Claim(f"what is loaded from global memory is used {said} times", judge)


def _touching(
    seen: Evidence, array: str, space: str, op: str | None
) -> list[SiteTotals] | Judgement:
    """The places that touch the array, or why the claim cannot be judged."""
    info = seen.array(array)
    if info.space != space:
        return not_checked(f"{array} is in {info.space} memory, and the claim is about {space}")
    touching = seen.touching(array, op=op)
    return touching or not_checked(f"no thread of this launch {op or 'touche'}s {array}")


def _unit(seen: Evidence, space: str) -> str:
    if seen.target.half_warps:
        return "steps" if space == "shared" else "transactions"
    return "wavefronts" if space == "shared" else "sectors"


def _sized(deps: frozenset[str]) -> bool:
    """Whether something depends on the grid or on an argument, and so changes with the size."""
    return any(dep in ("grid", "block", "unknown") or dep.startswith("arg:") for dep in deps)


def _keeps_banks(totals: SiteTotals, seen: Evidence) -> bool:
    """Whether the banks that a place touches are the same for every size."""
    flow = seen.flow.sites.get(totals.site.id)
    if flow is None or flow.offset is None or _sized(flow.guard):
        return False
    return flow.offset.step % (4 * BANKS) == 0


def _keeps_sectors(totals: SiteTotals, seen: Evidence) -> bool:
    """Whether a request of this place moves as many sectors for all sizes congruent to these.

    Only for rows that begin with a sector, and for arrays whose rows are told by an index of
    their own, so that lanes of different rows never share a sector.
    """
    flow, array = seen.flow.sites.get(totals.site.id), totals.array
    if flow is None or flow.offset is None or flow.offset.block is None or _sized(flow.guard):
        return False
    steps = (flow.offset.step, *flow.offset.block, *array.strides[:-1])
    packed = array.strides[-1:] == (array.dtype.itemsize,)
    flat = len(array.shape) < 2 and (seen.trial.block[1] > 1 or seen.trial.block[2] > 1)
    return packed and not flat and not any(step % SECTOR_BYTES for step in steps)
