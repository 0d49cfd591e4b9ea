"""Define the interface of a cause, and read its texts.

Each cause has one Markdown file in `texts/`, which the command and the documentation share.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from emulate.verify.arithmetic import Fit
from emulate.verify.case import Case
from emulate.verify.compare import Point
from emulate.verify.compared_runs import complete
from emulate.verify.gradients import names_of
from emulate.verify.lines import Blame, locate
from emulate.verify.verdict import Finding, url_of

TEXTS = Path(__file__).with_name("texts")
GENERAL = ""
"""Heading of the fix for most programs, which comes first."""
WRONG, RIGHT, EVIDENCE, FIX, EDIT, LINKS = SECTIONS = (
    "Wrong",
    "Right",
    "How gpudist recognizes it",
    "How to fix it",
    "Edit",
    "See also",
)
_FENCE = "```"
_LINK = re.compile(r"\[([^\]]+)\]\((https?://[^)]+)\)")


@dataclass(frozen=True)
class CauseText:
    """Hold the text of a cause in Markdown; `plain` turns it into text for a terminal.

    Attributes:
        title: A few words.
        meaning: What goes wrong, and why.
        wrong: Code that has the cause; empty where a few lines cannot show it.
        right: The same code without the cause.
        evidence: How gpudist recognizes it.
        fixes: The general fix under `GENERAL`, then others by the heading that says when they suit.
        links: Issues and documentation elsewhere.
        edit: What `gpudist fix` does; empty where it has no edit.
    """

    title: str
    meaning: str
    evidence: str
    wrong: str = ""
    right: str = ""
    fixes: Mapping[str, str] = field(default_factory=dict)
    links: str = ""
    edit: str = ""


@cache
def read_text(code: str) -> CauseText:
    """Return the text of the cause with this code."""
    return parse_text((TEXTS / f"{code}.md").read_text(encoding="utf-8"))


def parse_text(markdown: str) -> CauseText:
    """Return the parts of a cause's file.

    Args:
        markdown: A title, the meaning, and the sections of `SECTIONS` in this order; the evidence and the fix are required.

    Returns:
        The parts.

    Raises:
        ValueError: When there is no title, or a section is unknown or in the wrong place.
    """
    title, _, body = markdown.partition("\n")
    (_, meaning), *sections = _split_at_headings(body, "## ")
    names = [name for name, _ in sections]
    if not title.startswith("# ") or names != [name for name in SECTIONS if name in names]:
        raise ValueError(f"A title and some of {SECTIONS} must come in this order. Received: {title!r}, {names}.")
    of = dict(sections)
    return CauseText(
        title=title.removeprefix("# "),
        meaning=meaning,
        evidence=of[EVIDENCE],
        wrong=code_of(of.get(WRONG, "")),
        right=code_of(of.get(RIGHT, "")),
        fixes=dict(_split_at_headings(of[FIX], "### ")),
        links=of.get(LINKS, ""),
        edit=of.get(EDIT, ""),
    )


def _split_at_headings(markdown: str, mark: str) -> list[tuple[str, str]]:
    """Return (heading, text) of each part that such a heading begins; the text before the first has the heading `GENERAL`."""
    parts: list[tuple[str, list[str]]] = [(GENERAL, [])]
    is_code = False
    for line in markdown.splitlines():
        is_code ^= line.startswith(_FENCE)
        if line.startswith(mark) and not is_code:  # a comment of Python begins with "# " too
            parts.append((line.removeprefix(mark).strip(), []))
        else:
            parts[-1][1].append(line)
    return [(heading, "\n".join(lines).strip()) for heading, lines in parts]


def code_of(markdown: str) -> str:
    """Return the code of a section without its fences."""
    return "\n".join(line for line in markdown.splitlines() if not line.startswith(_FENCE))


def plain_text(markdown: str) -> str:
    """Return Markdown as text: a line for each paragraph, code indented by four spaces, `name: address` for a link."""
    return "\n".join(_plain_lines(markdown))


def _plain_lines(markdown: str) -> Iterator[str]:
    paragraph: list[str] = []
    is_code = False
    for line in [*markdown.splitlines(), ""]:
        is_fence = line.startswith(_FENCE)
        if paragraph and (is_fence or not line.strip() or line.startswith("- ")):
            yield _LINK.sub(r"\1 <\2>", " ".join(paragraph))
            paragraph = []
        if is_fence:
            is_code = not is_code
        elif is_code:
            yield ("    " + line).rstrip()
        elif line.strip():
            paragraph.append(line.strip())


OF_GROUPS = (
    "One device has the gradients of this run if it does what each replica does with its own examples, and adds up the "
    "results. The sum depends on which replica has which examples"
)
"""The evidence where `Case.is_of_groups`."""


@dataclass(frozen=True)
class Sign:
    """Describe a cause as gpudist saw it in a case.

    Attributes:
        summary: One sentence; empty where no cause is named, and only what hides others is put out of the way.
        evidence: The numbers.
        fix: Headings of the fixes that suit this case, as the cause's file has them. None: the general fix.
        advice: Whether the same model is trained all the same.
        places: Lines to blame that the search itself knows, `train.py:9` say.
        blame: Where else lines are looked for, before the cause's own places.
        tensors: The variables that it is about.
        then: Takes what it explains out of the case. A search itself changes nothing, so that others see the same state.
    """

    summary: str = ""
    evidence: str = ""
    fix: str | Sequence[str] | None = None
    advice: bool = False
    places: Sequence[str] = ()
    blame: Sequence[Blame] = ()
    tensors: Collection[str] = ()
    then: Callable[[], object] | None = None


@dataclass(frozen=True)
class Cause:
    """Describe one reason why a program does not train the same model on several devices.

    Attributes:
        code: The stable kebab-case code. `texts/<code>.md` holds all its texts.
        search: Looks at a case and does not change it; returns None where the cause is not seen.
        unless: Codes of causes that explain what it sees: beside them it is not told.
        by_design: Whether every user of tf.distribute gets this difference: alone it makes the verdict `by-design`.
        runs_that_ended: Whether it is also looked for where the program raised or hung.
        completed: Whether it is looked for where the program ran to the end.
        advice: Whether the same model is trained all the same, so that it is reported and does not decide.
        blame: Where the user's lines to blame are looked for; the first query that finds some tells the stage.
    """

    code: str
    search: Callable[[Case], Sign | None] = lambda case: None
    unless: Collection[str] = ()
    by_design: bool = False
    runs_that_ended: bool = False
    completed: bool = True
    advice: bool = False
    blame: Sequence[Blame] = ()

    @property
    def text(self) -> CauseText:
        """Return the texts of this cause."""
        return read_text(self.code)

    @property
    def url(self) -> str:
        """Return the address of its page."""
        return url_of(self.code)

    def fix(self, *headings: str) -> str:
        """Return the fixes under these headings as plain text."""
        return "\n".join(plain_text(self.text.fixes[heading]) for heading in headings)

    def is_open(self, case: Case) -> bool:
        """Return whether it may still be there: not found yet, nor is what explains it."""
        told = {finding.code for finding in case.found if finding.advice or not self.advice}
        decided = {finding.code for finding in case.found if not finding.advice}
        is_asked = self.runs_that_ended if case.has_ended_early else self.completed
        return is_asked and self.code not in told and decided.isdisjoint(self.unless)

    def found(self, sign: Sign, case: Case) -> Finding:
        """Return the finding for what was seen of this cause."""
        headings = [sign.fix or GENERAL] if sign.fix is None or isinstance(sign.fix, str) else sign.fix
        fix = self.fix(*headings) if any(_BY_CORE in heading for heading in headings) else _suited(self.fix(*headings), case)
        stage, locations = locate((*sign.blame, *self.blame), case.lines, sign.places, sign.tensors)
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


@dataclass(frozen=True)
class Group:
    """Hold causes that are looked for at one state of a case: their order means nothing.

    Attributes:
        applies: Whether they are looked for.
    """

    causes: Sequence[Cause]
    applies: Callable[[Case], bool] = lambda case: True

    def ask(self, case: Case) -> bool:
        """Tell the case what is seen of these causes, and take out what they explain; return whether that changes anything."""
        asked = [cause for cause in self.causes if cause.is_open(case)]
        if not asked or not self.applies(case):
            return False
        signs = [(cause, sign) for cause in asked if (sign := cause.search(case)) is not None]
        decided = {cause.code for cause, sign in signs if sign.summary and not (sign.advice or cause.advice)}
        told = [(cause, sign) for cause, sign in signs if decided.isdisjoint(cause.unless)]
        if not told:
            return False
        findings, before = [cause.found(sign, case) for cause, sign in told if sign.summary], case.state
        case.found += [replace(finding, allowed=finding.code in case.allow) for finding in findings]
        for _, sign in told:
            if sign.then is not None:
                sign.then()
        return bool(findings) or case.state != before


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


NUMBERS_MEAN_NOTHING = ("replicas-missing", "missing-all-reduce", "replicas-disagree", "empty-shard", "nan")
"""Codes of causes beside which the arithmetic of later steps says nothing of its own."""


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


def names_in_words(names: Sequence[str], most: int = 2) -> str:
    """Return the first names, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def is_assigned(case: Case, point: Point) -> bool:
    """Return whether a point belongs to a variable that the step assigns: the program's, or an untrained one of a layer."""
    key = point.measure.key
    if key.kind != "weight":
        return key.kind == "variable"
    steps = complete(case.base.runs.reference, key.optimizer)
    return bool(steps) and key.tensor not in names_of(steps[0]) and key.tensor not in case.facts.batchnorm
