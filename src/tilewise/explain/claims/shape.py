"""Claims about the division of the work: what a block and what a thread computes."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..evidence import Evidence
from ..story import Follower, position
from .base import Claim, Judgement, holds, not_checked, refuted

__all__ = [
    "block_computes_a_square",
    "block_is_warp_multiple",
    "block_reads_columns",
    "block_reads_rows",
    "each_element_written_once",
    "half_warp_is_a_row",
    "loads_one_a_tile",
    "thread_writes",
    "threads_below_limit",
    "written_at_the_end",
]

# Blocks that are followed: one of each class, and no more than this.
_FOLLOWED = 16


def block_is_warp_multiple() -> Claim:
    """The number of threads of a block is a multiple of the warp size."""

    def judge(seen: Evidence) -> Judgement:
        warps, rest = divmod(seen.threads, 32)
        detail = f"{seen.threads} threads, {warps} warps"
        if rest:
            return refuted(f"{detail} and {rest} threads over: {32 - rest} lanes stay empty")
        return Judgement("PROVED", detail, "every launch with this block")

    return Claim("the threads of a block are a multiple of the warp size", judge)


def threads_below_limit() -> Claim:
    """A block has no more threads than the target allows."""

    def judge(seen: Evidence) -> Judgement:
        limit = seen.target.max_threads_per_block
        detail = f"{seen.threads} threads, at most {limit} on {seen.target.name}"
        if seen.threads > limit:
            return refuted(detail)
        return Judgement("PROVED", detail, "every launch with this block")

    return Claim("a block has no more threads than there may be", judge)


def half_warp_is_a_row() -> Claim:
    """The 16 threads of a half-warp have one threadIdx.y, and x from 0 to 15."""

    def judge(seen: Evidence) -> Judgement:
        width = seen.trial.block[0]
        if width != 16:
            return refuted(f"a block is {width} threads wide")
        return Judgement(
            "PROVED",
            "a block is 16 threads wide; a warp of today is two rows of it",
            "every launch",
        )

    return Claim("in a half-warp, threadIdx.y is the same and threadIdx.x goes from 0 to 15", judge)


def each_element_written_once(array: str) -> Claim:
    """Every element of an array is written, by one thread."""

    def judge(seen: Evidence) -> Judgement:
        info = seen.array(array)
        found = next((c for c in seen.coverage if c.array.name == array), None)
        if found is None:
            return refuted(f"nothing writes {array}")
        total = found.never + found.once + found.many
        if found.never or found.many:
            parts = [f"{found.once:,} of {total:,} elements are written by one thread"]
            for count, what, first in (
                (found.never, "by none", found.first_never),
                (found.many, "by more than one", found.first_many),
            ):
                if count:
                    parts.append(f"{count:,} {what}, the first {_name(array, first)}")
            return refuted(", ".join(parts))
        return holds(seen, f"all {math.prod(info.shape):,} elements, each by one thread")

    return Claim(f"each element of {array} is written by one thread", judge)


def thread_writes(array: str, count: int = 1) -> Claim:
    """Every thread that writes to an array writes so many elements of it."""

    def judge(seen: Evidence) -> Judgement:
        seen.array(array)
        for block, followed in _followed(seen):
            for thread, elements in followed.writes.get(array, {}).items():
                if len(elements) != count:
                    return refuted(
                        f"thread {thread} of block {_block(seen, block)} writes "
                        f"{len(elements)} of {array}, such as {_name(array, next(iter(elements)))}"
                    )
        return _of_classes(seen, f"every thread writes {count} element{'s' * (count != 1)}")

    many = "one element" if count == 1 else f"{count} elements"
    return Claim(f"each thread computes {many} of {array}", judge)


def block_computes_a_square(array: str) -> Claim:
    """Every block writes a square part of an array, without gaps."""

    def judge(seen: Evidence) -> Judgement:
        seen.array(array)
        side = 0
        for block, followed in _followed(seen):
            elements = {e for each in followed.writes.get(array, {}).values() for e in each}
            if not elements:
                continue
            spans = [(min(axis), max(axis) + 1) for axis in zip(*elements, strict=True)]
            sides = {high - low for low, high in spans}
            if len(sides) != 1 or len(elements) != math.prod(high - low for low, high in spans):
                box = " × ".join(f"{low}–{high - 1}" for low, high in spans)
                return refuted(
                    f"block {_block(seen, block)} writes {len(elements)} elements of {array}, "
                    f"within {box}"
                )
            side = max(side, *sides)
        return _of_classes(seen, f"every block writes {side}×{side} elements, side by side")

    return Claim(f"each block computes one square sub-matrix of {array}", judge)


def block_reads_rows(array: str, output: str) -> Claim:
    """A block reads of an array the rows that it writes of the output, in full width."""
    return _reads_band(array, output, 0)


def block_reads_columns(array: str, output: str) -> Claim:
    """A block reads of an array the columns that it writes of the output, in full height."""
    return _reads_band(array, output, 1)


def loads_one_a_tile(array: str) -> Claim:
    """For each tile in shared memory, every thread loads one element of a global array."""

    def judge(seen: Evidence) -> Judgement:
        seen.array(array)
        tiles = 0
        for block, followed in _followed(seen):
            loads, fills = followed.loads.get(array), list(followed.fills.values())
            if loads is None or not fills:
                return refuted(
                    f"block {_block(seen, block)} does not stage {array} in shared memory"
                )
            for fill in fills:
                wrong = loads != fill
                if wrong.any():
                    at = int(wrong.argmax())
                    return refuted(
                        f"thread {at} of block {_block(seen, block)} loads {loads[at]} elements of "
                        f"{array} for {fill[at]} tiles"
                    )
            tiles = int(fills[0].max())
        return _of_classes(seen, f"{tiles} tiles, {tiles} loads of {array} a thread")

    return Claim(f"each thread loads one element of {array} for each tile", judge)


def written_at_the_end(array: str) -> Claim:
    """Sums are kept in a register: the array is never loaded, and stored to once a thread."""

    def judge(seen: Evidence) -> Judgement:
        loads, stores = seen.touching(array, op="load"), seen.touching(array, op="store")
        seen.array(array)
        if loads:
            return refuted(f"{loads[0].site.text} loads it", loads[0].site.line)
        if not stores:
            return not_checked(f"nothing writes {array}")
        lanes = sum(t.lanes for t in stores)
        threads = seen.threads * math.prod(seen.trial.grid)
        line = stores[0].site.line
        if lanes > threads:
            return refuted(f"{lanes:,} stores by {threads:,} threads", line)
        return holds(seen, f"{lanes:,} stores by {threads:,} threads, and no load", line=line)

    return Claim(f"sums are kept in a register, and {array} is written once at the end", judge)


def _reads_band(array: str, output: str, axis: int) -> Claim:
    what = ("rows", "columns")[axis]

    def judge(seen: Evidence) -> Judgement:
        shape = seen.array(array).shape
        seen.array(output)
        if len(shape) != 2:
            return not_checked(f"{array} is not a matrix in the source, so rows are not told apart")
        said = ""
        for each in seen.partition.classes[:_FOLLOWED]:
            block = each.representative
            followed = seen.followed(block)
            box = followed.boxes.get(array)
            elements = [e for by in followed.writes.get(output, {}).values() for e in by]
            if box is None or not elements:
                continue
            written = (min(e[axis] for e in elements), max(e[axis] for e in elements))
            across = (0, shape[1 - axis] - 1)
            if box[axis] != written or box[1 - axis] != across:
                part = ""
                if box[1 - axis] != across:
                    low, high = box[1 - axis]
                    part = f", of each only elements {low}–{high} of its {shape[1 - axis]}"
                return refuted(
                    f"block {_block(seen, block)} writes {what} {written[0]}–{written[1]} of "
                    f"{output} and reads {what} {box[axis][0]}–{box[axis][1]} of {array}{part}"
                )
            # The other blocks of the class read and write as many rows or columns farther on.
            reads, writes = seen.moved(each, array, "load"), seen.moved(each, output, "store")
            if reads is None or writes is None:
                return not_checked(f"{array} or {output} is touched in several ways")
            apart = (reads[axis] != writes[axis]) | (reads[1 - axis] != 0)
            if apart.any():
                at = int(apart.argmax())
                return refuted(
                    f"block {_block(seen, int(each.members[at]))} writes {what} "
                    f"{written[0] + writes[axis][at]}–{written[1] + writes[axis][at]} of {output} "
                    f"and reads {what} {box[axis][0] + reads[axis][at]}–"
                    f"{box[axis][1] + reads[axis][at]} of {array}"
                )
            said = f"such as {what} {written[0]}–{written[1]} in block {_block(seen, block)}"
        return _of_classes(seen, f"the {what} of {array} that it writes of {output}, {said}")

    return Claim(f"a block reads the {what} of {array} that it computes of {output}", judge)


def _followed(seen: Evidence) -> Iterator[tuple[int, Follower]]:
    """One block of each class with what it does."""
    for each in seen.partition.classes[:_FOLLOWED]:
        yield each.representative, seen.followed(each.representative)


def _of_classes(seen: Evidence, detail: str) -> Judgement:
    """What was seen of one block of each class, if all classes were looked at."""
    left = len(seen.partition.classes) - _FOLLOWED
    if left > 0:
        return Judgement("HOLDS", f"{detail}; {left} blocks were not followed", "the others")
    return holds(seen, detail)


def _block(seen: Evidence, block: int) -> str:
    width, height, _ = seen.trial.grid
    return position(
        (block % width, block // width % height, block // (width * height)), seen.trial.grid
    )


def _name(array: str, element: tuple[int, ...] | None) -> str:
    return f"{array}[{', '.join(map(str, element or ()))}]"
