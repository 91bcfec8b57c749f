"""Memory of the host: what is there, what is free, and budgets as people write them."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from .errors import BudgetError, OptionError

__all__ = ["available_bytes", "format_bytes", "over_budget", "parse_budget", "total_bytes"]

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgtp", 1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgtp", 1)},
}
_MOST_BYTES = 2**63
_CGROUP = Path("/sys/fs/cgroup")


def parse_budget(memory: Any, whole_bytes: int | None = None) -> int | None:
    """Return a budget in bytes.

    Parameters
    ----------
    memory : int, float, str or None
        Bytes; "2GiB", "500 MB"; "80%" of this machine's memory; None for no budget.
    whole_bytes : int, optional
        What per cent are of, if not of this machine's memory.

    Raises
    ------
    OptionError
        For anything else: NaN, negative, unknown units.
    """
    if memory is None:
        return None
    way_out = "give bytes, or text such as '2GiB', '500MB' or '80%'"
    wrong = OptionError(f"memory={memory!r} is not a budget; {way_out}")
    if isinstance(memory, bool):
        raise wrong
    if isinstance(memory, str):
        match = re.fullmatch(r"\s*(-?[0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*(%|[a-z]*)\s*", memory.lower())
        if match is None or match[2] not in {*_UNITS, "%"}:
            raise wrong
        number, unit = float(match[1]), match[2]
        if unit == "%" and number > 100:
            raise OptionError(f"memory={memory!r} is more than there is: at most '100%'")
        whole = total_bytes() if whole_bytes is None else whole_bytes
        size = whole / 100 if unit == "%" else _UNITS[unit]
    else:
        try:
            number, size = float(memory), 1
        except (TypeError, ValueError):
            raise wrong from None
        except OverflowError:
            number, size = math.inf, 1
    if math.isnan(number):
        raise wrong
    if number < 0:
        raise OptionError(f"memory={memory!r} is less than nothing; {way_out}")
    if number * size > _MOST_BYTES:
        raise OptionError(f"memory={memory!r} is more than any machine has; {way_out}")
    return int(number * size)


def format_bytes(count: int, *, is_needed: bool = False) -> str:
    """Return a byte count as people read it: ``1.50 GiB``.

    One that is needed is rounded up, so that who gives what a message asks for gives enough.
    """
    if count < 1024:
        return f"{count} B"
    power = min((count.bit_length() - 1) // 10, 5)
    unit = 1024**power
    hundredths = -(-100 * count // unit) if is_needed else 100 * count / unit
    return f"{hundredths / 100:.2f} {'KMGTP'[power - 1]}iB"


def over_budget(
    result: str,
    result_bytes: int,
    rest_bytes: int,
    budget_bytes: int,
    *,
    verify: bool,
    overlaps: bool = False,
) -> BudgetError:
    """Return the error for a product that a budget does not hold.

    Parameters
    ----------
    result : str
        Shape and type of the result.
    result_bytes : int
        What is held of it; 0 where the caller's ``out`` takes it.
    rest_bytes : int
        The least that it is computed, and checked, with.
    budget_bytes : int
    verify : bool
        Whether it is checked, and held until then.
    overlaps : bool
        Whether ``out`` shares memory with an operand, so that one of both is held apart.
    """
    rest, budget = format_bytes(rest_bytes, is_needed=True), format_bytes(budget_bytes)
    beside = f" and what it is computed with at least {rest}," if rest_bytes else ","
    ways_out = ["raise the budget"]
    if overlaps:
        ways_out.append("pass an out that shares no memory with an operand")
    elif result_bytes:
        ways_out.append("pass out=np.memmap(...) to write the result to a file")
    if verify:
        ways_out.append("do without verify=, which holds the result and what it checks it with")
    way_out = ", or ".join(ways_out)
    if not result_bytes:
        return BudgetError(
            f"the result {result} is computed with at least {rest}, and memory= allows {budget}; "
            f"{way_out}"
        )
    result_needs = format_bytes(result_bytes, is_needed=True)
    return BudgetError(
        f"the result {result} takes {result_needs}{beside} and memory= allows {budget}; {way_out}"
    )


def no_room(result: str, result_bytes: int, device: str) -> BudgetError:
    """Return the error for a result, by shape and type, that a device has no room for."""
    return BudgetError(
        f"the result {result} takes {format_bytes(result_bytes, is_needed=True)}, and {device} has "
        "no room for that; pass out= in host memory, such as np.memmap(...): it is written there "
        "piece by piece"
    )


def total_bytes() -> int:
    """Return the memory of this machine, or of the container that limits this process."""
    import psutil

    total = int(psutil.virtual_memory().total)
    limit = _cgroup_number("memory.max", "memory/memory.limit_in_bytes")
    return total if limit is None else min(total, limit)


def available_bytes() -> int:
    """Return the memory that can still be taken without swapping."""
    import psutil

    available = int(psutil.virtual_memory().available)
    limit = _cgroup_number("memory.max", "memory/memory.limit_in_bytes")
    used = _cgroup_number("memory.current", "memory/memory.usage_in_bytes")
    if limit is not None and used is not None:
        available = min(available, max(limit - used, 0))
    return available


def _cgroup_number(*names: str) -> int | None:
    """Return a number from the control group's files (version 2, then 1), if it limits anything."""
    for name in names:
        try:
            text = (_CGROUP / name).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            return int(text)
    return None
