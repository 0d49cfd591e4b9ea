"""Define the interface of a cause."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from emulate.verify.case import Case
from emulate.verify.causes.text import GENERAL, CauseText, plain, read
from emulate.verify.fit import Fit
from emulate.verify.lines import Blame, locate
from emulate.verify.verdict import Finding, url_of

OF_GROUPS = (
    "One device has the gradients of this run if it does what each replica does with its own examples, and adds up the "
    "results. The sum depends on which replica has which examples"
)
"""The evidence where `Case.is_of_groups`."""


@dataclass(frozen=True)
class Sign:
    """Describe a cause as gpudist saw it in a case.

    Attributes:
        summary: One sentence.
        evidence: The numbers.
        fix: Headings of the fixes that suit this case, as the cause's file has them. None: the general fix.
        advice: Whether the same model is trained all the same.
        places: Lines to blame that the search itself knows, `train.py:9` say.
        blame: Where else lines are looked for, before the cause's own places.
        tensors: The variables that it is about.
    """

    summary: str
    evidence: str
    fix: str | Sequence[str] | None = None
    advice: bool = False
    places: Sequence[str] = ()
    blame: Sequence[Blame] = ()
    tensors: Collection[str] = ()


@dataclass(frozen=True)
class Cause:
    """Describe one reason why a program does not train the same model on several devices.

    Attributes:
        code: The stable kebab-case code. `texts/<code>.md` holds all its texts.
        search: Looks at a case; returns None where the cause is not seen.
        by_design: Whether every user of tf.distribute gets this difference: alone it makes the verdict `by-design`.
        runs_that_ended: Whether it is also looked for where the program raised or hung.
        completed: Whether it is looked for where the program ran to the end.
        advice: Whether the same model is trained all the same, so that it is reported and does not decide.
        behind: Looks at a case after the loss of one example was found to depend on the other examples of its replica. The
            reference then does all that a replica does with its own examples, and this cause with it.
        blame: Where the user's lines to blame are looked for; the first query that finds some tells the stage.
    """

    code: str
    search: Callable[[Case], Sign | None]
    by_design: bool = False
    runs_that_ended: bool = False
    completed: bool = True
    advice: bool = False
    behind: Callable[[Case], Sign | None] | None = None
    blame: Sequence[Blame] = ()

    @property
    def text(self) -> CauseText:
        """Return the texts of this cause."""
        return read(self.code)

    @property
    def url(self) -> str:
        """Return the address of its page."""
        return url_of(self.code)

    def fix(self, *headings: str) -> str:
        """Return the fixes under these headings as plain text."""
        return "\n".join(plain(self.text.fixes[heading]) for heading in headings)

    def look(self, case: Case) -> Finding | None:
        """Return the finding if this cause is seen in the case."""
        if not (self.runs_that_ended if case.has_ended_early else self.completed):
            return None
        return self._finding(self.search(case), case)

    def look_behind(self, case: Case) -> Finding | None:
        """Return the finding if this cause is seen behind a loss of one example that depends on the others."""
        return None if self.behind is None or case.has(self.code) else self._finding(self.behind(case), case)

    def _finding(self, sign: Sign | None, case: Case) -> Finding | None:
        if sign is None:
            return None
        headings = [sign.fix or GENERAL] if sign.fix is None or isinstance(sign.fix, str) else sign.fix
        fix = self.fix(*headings) if any(_BY_CORE in heading for heading in headings) else _suited(self.fix(*headings), case)
        stage, locations = locate((*sign.blame, *self.blame), case, sign.places, sign.tensors)
        return Finding(
            self.code,
            sign.summary,
            sign.evidence,
            fix,
            self.by_design,
            advice=self.advice or sign.advice,
            stage=stage,
            locations=locations,
            fixes=tuple(headings),
        )


def _suited(fix: str, case: Case) -> str:
    """Return a fix as it suits the program: what is for `fit` first where it uses `fit`, and nothing that it does already."""
    lines = fix.splitlines()
    by_core = [line for line in lines if f"{_BY_CORE}(model)" in line and not line.startswith("    ")]
    others = [line for line in lines if line not in by_core]
    if case.facts.distributed and by_core:
        return "\n".join([_IS_CONTAINED, *others])
    if not case.facts.compiled or case.facts.own_train_step or not by_core or not any(_OF_A_STEP in line for line in others):
        return fix
    return "\n".join([*(line.replace("Or use", "Use", 1) for line in by_core), "Or, in a training step of your own:", *others])


_BY_CORE, _OF_A_STEP = "gd.distributed", "get_replica_context()"
_IS_CONTAINED = (
    "The program has gpudist's own fix for this already: gd.distributed. So the finding may be wrong, or gpudist_core: please "
    "report it, with the folder that `--traces DIR` writes. What else is known:"
)


def steps_in_words(fits: Sequence[Fit]) -> str:
    """Return `step 3`, or `4 steps (3 to 9)`."""
    steps = sorted({fit.step for fit in fits})
    return f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps ({steps[0]} to {steps[-1]})"


def as_factor(factor: float) -> str:
    """Return a factor with four decimals, or as `1 + 2.5e-08` where they do not tell it from 1."""
    return f"{factor:.4f}" if f"{factor:.4f}" != "1.0000" else f"1 {'-' if factor < 1 else '+'} {abs(factor - 1):.2g}"


def numbers(values: Iterable[object]) -> str:
    """Return `3, 3, 3 and 1`."""
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def error_line(text: str | None, otherwise: str) -> str:
    """Return the line that says what went wrong: the last of a traceback, the first if a process ended without one."""
    # TensorFlow names the operation after the error.
    lines = [line.strip() for line in (text or "").splitlines() if line.strip() and not line.strip().startswith("[[")]
    if not lines:
        return otherwise
    return lines[0] if lines[0].startswith("The process of ") else lines[-1]


def names_in_words(names: Sequence[str], most: int = 2) -> str:
    """Return the first names, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
