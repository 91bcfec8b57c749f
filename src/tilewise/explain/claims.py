"""What can be asserted of a kernel, and whether it is so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .evidence import Evidence
from .report import Verdict

__all__ = ["check", "default"]

default: tuple[Any, ...] = ()


def check(claims: Sequence[Any], evidence: Evidence) -> tuple[Verdict, ...]:
    """Return a verdict on each claim."""
    return tuple(claim.check(evidence) for claim in claims)
