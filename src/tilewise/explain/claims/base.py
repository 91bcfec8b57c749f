"""What a claim is, and how far a judgement reaches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from ..evidence import Evidence
from ..report import Outcome, Verdict

__all__ = ["Claim", "Judgement", "holds", "not_checked", "refuted"]


@dataclass(frozen=True, slots=True)
class Judgement:
    """The outcome, for what it holds, and the figures or the witness."""

    outcome: Outcome
    detail: str
    scope: str = ""
    line: int | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """A sentence about a kernel, and how to judge it.

    The functions of :mod:`tilewise.explain.claims` make these; one of your own needs a sentence
    and a function from :class:`~tilewise.explain.evidence.Evidence` to :class:`Judgement`.
    """

    sentence: str
    judge: Callable[[Evidence], Judgement]
    original: str | None = None
    form: Literal["as written", "corrected"] | None = None
    decides_exit: bool = True

    def quoting(
        self,
        original: str,
        sentence: str | None = None,
        *,
        form: Literal["as written", "corrected"] | None = None,
        for_information: bool = False,
    ) -> Claim:
        """The same claim in the words of a text.

        A sentence that errs as it is written is for information, and does not decide the exit.
        """
        return replace(
            self,
            sentence=sentence or self.sentence,
            original=original,
            form=form,
            decides_exit=not for_information and form != "as written",
        )

    def check(self, evidence: Evidence) -> Verdict:
        """Judge the claim.

        Raises
        ------
        OptionError
            The claim is about an array or a barrier that the kernel does not have.
        """
        judged = self.judge(evidence)
        return Verdict(
            claim=self.sentence,
            outcome=judged.outcome,
            scope=judged.scope,
            detail=judged.detail,
            original=self.original,
            form=self.form,
            decides_exit=self.decides_exit,
            line=judged.line,
        )


def holds(
    seen: Evidence,
    detail: str,
    *,
    sizes: str = "this grid and these sizes",
    line: int | None = None,
) -> Judgement:
    """True of what was seen; PROVED where nothing that is loaded could change it."""
    if seen.holds_for_all_data:
        return Judgement("PROVED", detail, f"all data, {sizes}", line)
    return Judgement("HOLDS", f"{detail}; {seen.data_dependence}", "this launch", line)


def refuted(detail: str, line: int | None = None) -> Judgement:
    """Not true of what was seen."""
    return Judgement("REFUTED", detail, "this launch", line)


def not_checked(why: str) -> Judgement:
    """Could not be judged."""
    return Judgement("NOT CHECKED", why)
