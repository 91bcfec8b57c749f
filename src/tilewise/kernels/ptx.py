"""Corrections to PTX between Triton and the assembler.

Triton asks for matrix instructions that are slower than the machine has (float64), or that clamp
where NumPy wraps (int8). Both are put right in the text, where they are plain to see.
"""

from __future__ import annotations

import re

from tilewise.errors import KernelError

__all__ = ["fuse_float64", "wrap_int32"]

_FLOAT64_MMA = re.compile(
    r"mma\.sync\.aligned\.m8n8k4\.row\.col\.f64\.f64\.f64\.f64 "
    r"\{ (%\w+, %\w+) \}, \{ (%\w+) \}, \{ (%\w+) \}, \{ (%\w+, %\w+) \};"
)

_BLOCK_END = re.compile(r"\$|\s*(@!?%\w+\s+)?(bra|ret)\b")  # a label, or a way out

#: Only these have an m16n8k16 unit for float64; others split it again, or do not know it.
_FUSING_TARGETS = ("sm_90a",)


def fuse_float64(ptx: str, target: str) -> tuple[str, int]:
    """Join eight m8n8k4 products into each m16n8k16, which Hopper does at twice the rate.

    Two accumulators that are fed by the same four fragments of B form the halves of one of 16 rows;
    in each, k runs on in the same order. Within a basic block every operand is written once, so
    the joined product stands where the last of the eight stood.

    Returns
    -------
    str, int
        The PTX, and the number of m16n8k16 in it.

    Raises
    ------
    KernelError
        If one product is left over, or there are none.
    """
    if target not in _FUSING_TARGETS:
        return ptx, 0
    lines = ptx.splitlines()
    fused = 0
    chains: dict[str, list[tuple[int, str, str]]] = {}
    for number, line in enumerate([*lines, "$end:"]):
        found = _FLOAT64_MMA.search(line)
        if found:
            total, a, b, addend = found.groups()
            if total != addend:
                raise KernelError(f"PTX line {number + 1}: {total} is not the sum of {addend}")
            chains.setdefault(total, []).append((number, a, b))
        elif _BLOCK_END.match(line):
            fused += _fuse_block(lines, chains)
            chains.clear()
    if not fused:
        raise KernelError("there are no float64 products to fuse in this PTX")
    return "\n".join(lines) + "\n", fused


def wrap_int32(ptx: str, target: str) -> tuple[str, int]:
    """Let int8 products wrap modulo 2^32: Triton asks the tensor cores before Hopper to clamp.

    Returns
    -------
    str, int
        The PTX, and how many products were changed.
    """
    return re.subn(r"(mma\.sync\.aligned\.m\d+n\d+k\d+\.row\.col)\.satfinite(\.s32)", r"\1\2", ptx)


def _fuse_block(lines: list[str], chains: dict[str, list[tuple[int, str, str]]]) -> int:
    """Fuse the products of one basic block in place; return how many there are then."""
    waiting: dict[tuple[int, tuple[str, ...]], tuple[str, list[tuple[int, str, str]]]] = {}
    fused = 0
    for total, chain in chains.items():
        for start in range(0, len(chain), 4):
            steps = chain[start : start + 4]
            fragments = tuple(b for _, _, b in steps)
            if (start, fragments) not in waiting:
                waiting[start, fragments] = total, steps
                continue
            upper_total, upper_steps = waiting.pop((start, fragments))
            a = [a for pair in zip(upper_steps, steps, strict=True) for _, a, _ in pair]
            for number, _, _ in (*upper_steps, *steps):
                lines[number] = ""
            last = max(upper_steps[-1][0], steps[-1][0])
            both = f"{{ {upper_total}, {total} }}"
            lines[last] = (
                f"\tmma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {both}, "
                f"{{ {', '.join(a)} }}, {{ {', '.join(fragments)} }}, {both};"
            )
            fused += 1
    if waiting:
        raise KernelError(f"{len(waiting)} float64 products have no second half to be fused with")
    return fused
