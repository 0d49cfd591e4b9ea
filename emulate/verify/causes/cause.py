"""The one interface of a cause."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from emulate.verify.case import Case
from emulate.verify.verdict import Finding


@dataclass(frozen=True)
class Sign:
    """What a cause saw in a case: one sentence, the numbers, and the fix where it is more special than the cause's own."""

    summary: str
    evidence: str
    fix: str | None = None


@dataclass(frozen=True)
class Cause:
    """One reason why a program does not train the same model on several devices.

    Attributes:
        code: The stable kebab-case code.
        title: A few words.
        meaning: What goes wrong and why.
        evidence: What is looked for, and what tells it from its neighbours.
        fix: What to change, with code.
        search: Looks at a case; None where the cause is not seen.
        by_design: Whether the strategy makes this difference on purpose.
    """

    code: str
    title: str
    meaning: str
    evidence: str
    fix: str
    search: Callable[[Case], Sign | None]
    by_design: bool = False

    def look(self, case: Case) -> Finding | None:
        """The finding, where this cause is seen in the case."""
        sign = self.search(case)
        if sign is None:
            return None
        return Finding(self.code, sign.summary, sign.evidence, sign.fix or self.fix, self.by_design)
