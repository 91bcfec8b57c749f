"""What can be asserted of a kernel: small objects that :func:`tilewise.explain.explain` judges.

A claim is made by one of the functions here and judged against what was seen of a launch.
``guide`` is everything that chapter 6 of the programming guide says of its kernel; ``default`` is
what is judged when nothing is asked for.

    from tilewise.explain import explain, claims
    explain(kernel, grid, block, a, b, c, claims=[claims.coalesced("a"), claims.race_free()])
"""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import OptionError
from ..evidence import Evidence
from ..report import Verdict
from .base import Claim, Judgement
from .chapter import guide
from .memory import coalesced, conflict_free, one_word_a_half_warp, reads, reused
from .order import barrier_needed, barriers_reached, in_bounds, initialised, race_free
from .shape import (
    block_computes_a_square,
    block_is_warp_multiple,
    block_reads_columns,
    block_reads_rows,
    each_element_written_once,
    half_warp_is_a_row,
    loads_one_a_tile,
    thread_writes,
    threads_below_limit,
    written_at_the_end,
)
from .speed import limited_to

__all__ = [
    "Claim",
    "Judgement",
    "barrier_needed",
    "barriers_reached",
    "block_computes_a_square",
    "block_is_warp_multiple",
    "block_reads_columns",
    "block_reads_rows",
    "check",
    "coalesced",
    "conflict_free",
    "default",
    "each_element_written_once",
    "guide",
    "half_warp_is_a_row",
    "in_bounds",
    "initialised",
    "limited_to",
    "loads_one_a_tile",
    "one_word_a_half_warp",
    "race_free",
    "reads",
    "reused",
    "thread_writes",
    "threads_below_limit",
    "written_at_the_end",
]

#: What is judged of every kernel unless other claims are given.
default: tuple[Claim, ...] = (race_free(), in_bounds(), initialised(), barriers_reached())


def check(claims: Sequence[Claim], evidence: Evidence) -> tuple[Verdict, ...]:
    """Judge claims; the order is kept.

    Raises
    ------
    OptionError
        If these are no claims.
    """
    if not isinstance(claims, Sequence):
        raise OptionError(f"claims={claims!r} is no list of claims")
    for claim in claims:
        if not isinstance(claim, Claim):
            raise OptionError(
                f"claims: {claim!r} is no claim; make one, such as claims.coalesced('A')"
            )
    return tuple(claim.check(evidence) for claim in claims)
