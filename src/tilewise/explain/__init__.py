"""What a kernel does to memory, proven without a GPU.

:func:`explain` runs a thread-level kernel under watch and returns a :class:`~.report.Report`;
``claims`` are what can be asserted of it. Importing this costs next to nothing: the work is done by
modules that are imported when it is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .report import Report

__all__ = ["explain"]


def explain(
    kernel: Any,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    *args: Any,
    target: str = "sm_90",
    claims: Sequence[Any] | None = None,
    registers: int | None = None,
    max_steps: int = 50_000,
) -> Report:
    """Prove or refute what a kernel does to memory, and say what limits it.

    Parameters
    ----------
    kernel : function
        A kernel in the numba-cuda dialect of Python, decorated or plain.
    grid, block : int or sequence of 1 to 3 ints
        Blocks of the grid and threads of a block, in x, y, z.
    *args : ndarray, number or (shape, dtype)
        The kernel's arguments. Arrays are copied and never written to; ``((64, 64), "float32")``
        stands for an array of random numbers.
    target : str
        "sm_80", "sm_86", "sm_89", "sm_90", "sm_100" or "sm_120"; or "sm_10" to "sm_13", the
        hardware of the guide's time.
    claims : sequence of Claim, optional
        What is to be proven, from :mod:`tilewise.explain.claims`; by default that nothing races,
        nothing is out of range and nothing is read before it is written.
    registers : int, optional
        Registers a thread, as the compiled kernel has them, for the occupancy; a block that takes
        more than a multiprocessor has is an error that the report tells.
    max_steps : int
        Loop iterations of a group of blocks before a kernel is taken to be endless.

    Returns
    -------
    Report
        ``print`` it, or read its fields; ``exit_code`` is 0 when everything is proven.

    Raises
    ------
    KernelError
        Not a kernel, outside the dialect, wrong arguments, or an endless loop.
    OptionError
        A grid, block or target that cannot be launched, or a claim about what is not there.
    """
    from .build import build
    from .claims import check, default
    from .evidence import gather

    evidence = gather(
        kernel, grid, block, args, target=target, registers=registers, max_steps=max_steps
    )
    return build(evidence, check(default if claims is None else claims, evidence))
