"""What one warp's memory request costs: pure functions on the addresses of its lanes.

Here live the rules of current hardware (32 banks of 4 bytes, 32-byte sectors, 128-byte
lines), measured on sm_90 and reproduced there count for count (docs/facts.md), and the rules
of compute capability 1.x that the programming guide was written for (half-warps, 16 banks,
64-byte segments). Which requests a kernel makes is the machine's affair, and what to think of
their cost is ``explain``'s.

Every function takes many requests at once: ``addresses`` (requests, 32) in bytes, ``active``
(requests, 32) saying which lanes take part, and the ``width`` in bytes that each lane moves.
Addresses are multiples of the width, as the hardware demands. Shared addresses count from a
word in bank 0, global ones from a multiple of 128 bytes.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "BANKS",
    "LANES",
    "LINE_BYTES",
    "SECTOR_BYTES",
    "GlobalCost",
    "HalfWarpRule",
    "SharedCost",
    "global_cost",
    "half_warp_segments",
    "half_warp_steps",
    "shared_cost",
]

LANES = 32
BANKS = 32
SECTOR_BYTES = 32
LINE_BYTES = 128

HalfWarpRule = Literal["1.0", "1.2"]

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# Larger than any address, so that the words of inactive lanes sort behind all others.
_NONE = np.int64(2**62)


class SharedCost(NamedTuple):
    """The cost of shared-memory requests, each field of shape (requests,)."""

    requests: Ints
    """1, or 0 where no lane is active."""
    wavefronts: Ints
    """Passes through the data pipe: ``l1tex__data_pipe_lsu_wavefronts_mem_shared_op_*``."""
    conflicts: Ints
    """Passes more than the width needs: ``l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_*``."""
    source_wavefronts: Ints
    """ncu's own model of them in its source view: ``memory_l1_wavefronts_shared``."""
    source_ideal: Ints
    """The least that ncu's model allows: ``memory_l1_wavefronts_shared_ideal``."""
    bytes: Ints
    """Distinct bytes touched: ``smsp__sass_data_bytes_mem_shared_op_*``."""


class GlobalCost(NamedTuple):
    """The cost of global-memory requests, each field of shape (requests,)."""

    requests: Ints
    """1, or 0 where no lane is active: ``l1tex__t_requests_*``."""
    sectors: Ints
    """Distinct 32-byte sectors: ``l1tex__t_sectors_*``, ``..._theoretical_sectors_global``."""
    ideal_sectors: Ints
    """The same if the lanes' bytes lay side by side: ``..._theoretical_sectors_global_ideal``."""
    lines: Ints
    """Distinct 128-byte lines: ``l1tex__t_set_accesses_*``, ``memory_l1_tag_requests_global``."""
    bytes: Ints
    """Distinct bytes; over sectors they are ``smsp__sass_average_data_bytes_per_sector_*``."""


def shared_cost(addresses: Ints, active: Bools, width: int, *, load: bool) -> SharedCost:
    """Return what each shared-memory request costs on a GPU of sm_80 or later.

    A wavefront serves every bank one 4-byte word, to any number of lanes. Accesses of 8 bytes
    are served by half-warps and of 16 bytes by quarter-warps, except that a *load* whose lanes
    repeat in pairs has neighbouring groups served together.

    Parameters
    ----------
    addresses : (requests, 32) int64
        Byte addresses within the block's shared memory.
    active : (requests, 32) bool
    width : 1, 2, 4, 8 or 16
        Bytes a lane moves.
    load : bool
        False for a store, to which the pair rule does not apply.

    Returns
    -------
    SharedCost
        The rules reproduce every idle-pipe count of the H200 table (docs/facts.md).
    """
    groups = _groups(width)
    words = _words(addresses, width)
    touched = np.repeat(active, words.shape[1] // LANES, axis=1)
    degree = _degree(words, touched, groups)
    wavefronts = degree.sum(axis=1)
    nonempty = (degree > 0).sum(axis=1)
    source = wavefronts
    if load and groups > 1:
        merged = _degree(words, touched, groups // 2)
        pairs = _repeats_in_pairs(addresses, active, LANES)[:, 0]
        source = _source_wavefronts(addresses, active, degree, merged)
        wavefronts = np.where(pairs, merged.sum(axis=1), wavefronts)
        nonempty = np.where(pairs, (merged > 0).sum(axis=1), nonempty)
    lanes = active.sum(axis=1)
    return SharedCost(
        requests=(lanes > 0).astype(np.int64),
        wavefronts=wavefronts,
        conflicts=wavefronts - nonempty,
        source_wavefronts=source,
        source_ideal=np.minimum(source, _ceil_div(lanes * max(width, 4), 4 * BANKS)),
        bytes=_distinct(addresses, active) * width,
    )


def global_cost(addresses: Ints, active: Bools, width: int) -> GlobalCost:
    """Return what each global-memory request costs on a GPU of sm_80 or later.

    Loads and stores of any width follow one rule: the request moves every distinct 32-byte
    sector that its active lanes touch.

    Parameters
    ----------
    addresses : (requests, 32) int64
        Byte addresses; multiples of ``width``, so that no lane straddles a sector.
    active : (requests, 32) bool
    width : 1, 2, 4, 8 or 16
        Bytes a lane moves.

    Returns
    -------
    GlobalCost
        Every such count of the H200 table is reproduced (docs/facts.md).
    """
    _groups(width)
    lanes = active.sum(axis=1)
    sectors = _distinct(addresses // SECTOR_BYTES, active)
    return GlobalCost(
        requests=(lanes > 0).astype(np.int64),
        sectors=sectors,
        ideal_sectors=np.minimum(sectors, _ceil_div(lanes * width, SECTOR_BYTES)),
        lines=_distinct(addresses // LINE_BYTES, active),
        bytes=_distinct(addresses, active) * width,
    )


def half_warp_steps(addresses: Ints, active: Bools, width: int, *, load: bool) -> Ints:
    """Return the steps each shared-memory request takes on compute capability 1.x.

    A half-warp reads 16 banks of 4 bytes. In each step one word is broadcast to every lane
    that wants it, and each other bank serves one lane. The hardware does not say which word
    it broadcasts: this is the count for the best choice. Stores have no broadcast, and lanes
    storing to one word are counted once. 8 and 16 bytes are 2 and 4 accesses of a word each.
    A half-warp without an active lane takes none.

    Source: CUDA Programming Guide 1.1 to 2.3, section 5.1.2.5.
    """
    _groups(width)
    requests = len(addresses)
    halves = active.reshape(-1, LANES // 2)
    steps = np.zeros(len(halves), np.int64)
    for part in range(max(1, width // 4)):
        words = (addresses // 4 + part).reshape(-1, LANES // 2)
        if load:
            steps += _broadcast_steps(words, halves)
        else:
            steps += _degree(words, halves, 1, banks=16)[:, 0]
    total: Ints = steps.reshape(requests, 2).sum(axis=1)
    return total


def half_warp_segments(
    addresses: Ints, active: Bools, width: int, *, rule: HalfWarpRule
) -> tuple[Ints, Ints]:
    """Return the memory transactions of each global request on compute capability 1.x, and bytes.

    Under rule "1.0" (1.0 and 1.1) a half-warp is coalesced when lane k accesses word k of an
    aligned segment: one transaction of 64 bytes (128, twice 128 for words of 8 and 16 bytes);
    otherwise every active lane is a transaction of 32 bytes. Under "1.2" (1.2 and 1.3) it is
    the segments of 128 bytes (32 and 64 for words of 1 and 2) that hold the addresses, each
    halved while only one half of it is used, down to 32 bytes.

    Source: CUDA Programming Guide 2.3, section 5.1.2.1.
    """
    _groups(width)
    lanes = addresses.reshape(-1, LANES // 2)
    halves = active.reshape(-1, LANES // 2)
    if rule == "1.0":
        transactions, moved = _coalesced_or_not(lanes, halves, width)
    else:
        transactions, moved = _covering_segments(lanes, halves, width)
    return transactions.reshape(-1, 2).sum(axis=1), moved.reshape(-1, 2).sum(axis=1)


def _groups(width: int) -> int:
    """How many groups of lanes a warp's access of this width is served in."""
    if width not in (1, 2, 4, 8, 16):
        raise ValueError(f"a lane moves 1, 2, 4, 8 or 16 bytes in one request, not {width}")
    return max(1, width // 4)


def _words(addresses: Ints, width: int) -> Ints:
    """Every 4-byte word touched, (requests, 32 · words a lane), lane by lane."""
    first = addresses // 4
    if width <= 4:
        return first
    parts = first[:, :, None] + np.arange(width // 4)
    return parts.reshape(len(addresses), LANES * (width // 4))


def _degree(words: Ints, touched: Bools, groups: int, banks: int = BANKS) -> Ints:
    """The largest number of distinct words in one bank, (requests, groups)."""
    requests = len(words)
    by_group = (requests * groups, words.shape[1] // groups)
    rows, first = _firsts(words.reshape(by_group), touched.reshape(by_group))
    row, column = np.nonzero(first)
    cells = row * banks + rows[row, column] % banks
    counts = np.bincount(cells, minlength=len(rows) * banks).reshape(requests, groups, banks)
    degree: Ints = counts.max(axis=2, initial=0)
    return degree


def _distinct(values: Ints, active: Bools) -> Ints:
    """The number of distinct values among the active lanes of each request."""
    count: Ints = _firsts(values, active)[1].sum(axis=1)
    return count


def _firsts(values: Ints, active: Bools) -> tuple[Ints, Bools]:
    """Each row sorted, and where in it a value of an active lane stands for the first time."""
    rows = np.where(active, values, _NONE)
    rows.sort(axis=1)
    first = rows != _NONE
    first[:, 1:] &= rows[:, 1:] != rows[:, :-1]
    return rows, first


def _repeats_in_pairs(addresses: Ints, active: Bools, span: int) -> Bools:
    """Whether, within each ``span`` of lanes, all pairs (l, l^1), or all (l, l^2), are equal.

    An inactive partner breaks no pair, one unequal active pair breaks all, and the two kinds
    do not mix. Shape (requests, 32 / span).
    """
    lanes = np.arange(LANES)
    kinds = []
    for flip in (1, 2):
        equal = addresses == addresses[:, lanes ^ flip]
        equal |= ~(active & active[:, lanes ^ flip])
        kinds.append(equal.reshape(len(addresses), LANES // span, span).all(axis=2))
    either: Bools = kinds[0] | kinds[1]
    return either


def _source_wavefronts(addresses: Ints, active: Bools, degree: Ints, merged: Ints) -> Ints:
    """ncu's source-view model: it merges only groups that then need no second wavefront.

    For 16 bytes it also looks for pairs in each half-warp by itself. ``degree`` is by groups,
    ``merged`` by pairs of groups.
    """
    apart = degree.reshape(*merged.shape, 2).sum(axis=2)
    pairs = _repeats_in_pairs(addresses, active, LANES // merged.shape[1])
    wavefronts: Ints = np.where(pairs & (merged <= 1), merged, apart).sum(axis=1)
    return wavefronts


def _broadcast_steps(words: Ints, active: Bools) -> Ints:
    """Steps of each half-warp when every step broadcasts the word that helps most."""
    waiting = active.copy()
    same_word = words[:, :, None] == words[:, None, :]
    same_bank = (words % 16)[:, :, None] == (words % 16)[:, None, :]
    earlier = np.tri(words.shape[1], k=-1, dtype=bool)
    steps = np.zeros(len(words), np.int64)
    while (left := waiting.any(axis=1)).any():
        steps += left
        queue = np.where(waiting, (same_bank & waiting[:, None, :]).sum(axis=2), 0)
        sharers = np.where(waiting, (same_word & waiting[:, None, :]).sum(axis=2), 0)
        # The longest queue decides how long it takes; within it, the most wanted word.
        chosen = np.argmax(queue * LANES + sharers, axis=1)
        broadcast = np.take_along_axis(same_word, chosen[:, None, None], axis=1)[:, 0]
        its_bank = np.take_along_axis(same_bank, chosen[:, None, None], axis=1)[:, 0]
        first_in_bank = ~(same_bank & earlier & waiting[:, None, :]).any(axis=2)
        waiting &= ~(broadcast | (first_in_bank & ~its_bank))
    return steps


def _coalesced_or_not(addresses: Ints, active: Bools, width: int) -> tuple[Ints, Ints]:
    """Transactions and bytes of each half-warp under the strict rule of 1.0 and 1.1."""
    lanes = active.sum(axis=1)
    if width < 4:
        return lanes, 32 * lanes
    start = addresses - width * np.arange(LANES // 2)
    base = np.where(active, start, _NONE).min(axis=1)
    in_order = ((start == base[:, None]) | ~active).all(axis=1) & (lanes > 0)
    coalesced = in_order & (base % (16 * width) == 0)
    pieces, piece_bytes = (2, 128) if width == 16 else (1, 16 * width)
    transactions = np.where(coalesced, pieces, lanes)
    return transactions, transactions * np.where(coalesced, piece_bytes, 32)


def _covering_segments(addresses: Ints, active: Bools, width: int) -> tuple[Ints, Ints]:
    """Transactions and bytes of each half-warp under the rule of 1.2 and 1.3."""
    size = {1: 32, 2: 64}.get(width, 128)
    waiting = active.copy()
    transactions = np.zeros(len(addresses), np.int64)
    moved = np.zeros(len(addresses), np.int64)
    while (left := waiting.any(axis=1)).any():
        # The lane of lowest number that is still waiting chooses the segment.
        leader = np.take_along_axis(addresses, np.argmax(waiting, axis=1)[:, None], axis=1)
        served = waiting & (addresses // size == leader // size)
        low = np.where(served, addresses, _NONE).min(axis=1)
        high = np.where(served, addresses + width - 1, -1).max(axis=1)
        segment = np.full(len(addresses), size)
        for half in (64, 32):
            segment = np.where((segment > half) & (low // half == high // half), half, segment)
        transactions += left
        moved += np.where(left, segment, 0)
        waiting &= ~served
    return transactions, moved


def _ceil_div(a: Ints, b: int) -> Ints:
    return -(-a // b)
