"""All causes, in the order in which they are looked for."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from emulate.errors import WrongUse
from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause
from emulate.verify.causes.loss_scaling import DOUBLE_ALL_REDUCE, LOSS_SCALING
from emulate.verify.causes.unexplained import UNEXPLAINED
from emulate.verify.verdict import Finding

_CAUSES: tuple[Cause, ...] = (
    DOUBLE_ALL_REDUCE,
    LOSS_SCALING,
    UNEXPLAINED,
)


def all_causes() -> tuple[Cause, ...]:
    """Every known cause."""
    return _CAUSES


def get(code: str) -> Cause:
    """The cause with this code.

    Raises:
        WrongUse: When there is none.
    """
    known = {cause.code: cause for cause in _CAUSES}
    if code not in known:
        near = difflib.get_close_matches(code, known, 1)
        hint = f"Did you mean '{near[0]}'? " if near else ""
        raise WrongUse(f"A cause must be one of the catalogue. Received: code={code!r}. {hint}`gpudist causes` lists all.")
    return known[code]


def find_causes(case: Case, allow: Collection[str] = ()) -> tuple[Finding, ...]:
    """Every cause seen in a case, in the order in which to mend them; differences by design come last."""
    for cause in _CAUSES:
        finding = cause.look(case)
        if finding is not None:
            case.found.append(_allowed(finding) if finding.code in allow else finding)
    return tuple(sorted(case.found, key=lambda finding: finding.by_design))


def _allowed(finding: Finding) -> Finding:
    return Finding(finding.code, finding.summary, finding.evidence, finding.fix, finding.by_design, allowed=True)
