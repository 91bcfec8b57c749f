"""Claims about the roofs."""

from __future__ import annotations

from ..evidence import Evidence
from ..roofs import roofs
from .base import Claim, Judgement, not_checked, refuted

__all__ = ["limited_to"]


def limited_to(fraction: float) -> Claim:
    """No run of this kernel can reach more than a fraction of the target's float peak."""

    def judge(seen: Evidence) -> Judgement:
        found, why = roofs(seen)
        if found is None:
            return not_checked(why)
        lowest = min(roof.fraction for roof in found.roofs)
        if lowest > fraction:
            return refuted(found.sentence)
        return Judgement("PROVED", found.sentence, f"all data, {found.device}")

    return Claim(f"the kernel cannot pass {100 * fraction:.0f} % of the float peak", judge)
