"""Apply edits one after the other, verify each, and keep those that remove a cause and bring nothing new."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from emulate.cluster import Preload
from emulate.errors import UsageError
from emulate.fix.edits import EDITS, propose, without_shuffle
from emulate.fix.patch import Edited, as_notebook, as_python, line_in_python, unified_diff
from emulate.fix.source import CORE, PLAIN, Names, Proposal, Site, Source
from emulate.program import Program, is_notebook
from emulate.told import told
from emulate.verify import Finding, Fix, Verdict, changes_of_training, verify
from emulate.verify.result import error_line
from emulate.verify.verdict import Location

MOST_TRIES = 8
"""So many edits are verified for one finding."""
MOST_EDITS = 8
"""So many edits are made in one program."""
_EDITED = (".py", ".ipynb")
_ONE_DEVICE_IS_WRONG = ("unseeded-randomness", "unseeded-hosts")
"""Causes that the reference has, too: their fix must change what one device trains."""
_REPORTS = ("loss-report",)
"""A report may be right only because the training is wrong. So these causes are fixed after the others."""
_IN_COMPILE = "With Keras compile"
_IN_WORDS = "; its fix in words: "
_NO_EDIT = "gpudist has no edit for {} yet" + _IN_WORDS + "{}"
_NOT_PROVEN = "No edit for {} was proven ({})" + _IN_WORDS + "{}"
_NOTE = told("not-fixed")


@dataclass(frozen=True)
class FixReport:
    """Hold the result of `gpudist fix`.

    Attributes:
        before: The verdict on the program as it stands.
        after: The verdict with all edits; the same one where there is none.
        fixes: The edits, in the order in which they were made.
        not_fixed: For each cause that is left, why it is left, with its fix in words.
        files: The files that the edits change.
        verifications: How many there were.
        reorders: Whether with an edit another order of the same examples is drawn.
    """

    before: Verdict
    after: Verdict
    fixes: tuple[Fix, ...] = ()
    not_fixed: tuple[str, ...] = ()
    files: dict[Path, Edited] = field(default_factory=dict)
    verifications: int = 1
    reorders: bool = False

    @property
    def exit_code(self) -> int:
        """Return 0 if the program is right or was made right, else that of the verdict that is left."""
        return self.after.exit_code

    @property
    def verdict(self) -> Verdict:
        """Return the verdict on the program as it stands, with the edits and what became of the causes without one."""
        is_proven = bool(self.fixes) and self.after.is_equivalent
        why = [_NOTE(text.partition(_IN_WORDS)[0] + ".") for text in self.not_fixed]
        patch = self.patch if is_proven else ""
        return replace(self.before, fixes=self.fixes, patch=patch, notes=(*self.before.notes, *why))

    @property
    def changes_one_device(self) -> bool:
        """Return whether one device trains in another way with the edits: with a seed that was missing, or now at all."""
        return self.before.reference.status != "ok" or any(one.code in _ONE_DEVICE_IS_WRONG for one in self.fixes)

    @property
    def patch(self) -> str:
        """Return the diff of all edits together."""
        return "".join(unified_diff(file, edited.before, edited.after) for file, edited in self.files.items())

    def to_json(self) -> dict[str, Any]:
        """Return the object of `--json`."""
        return {
            "schema": "gpudist.fix/1",
            "verdict": self.after.verdict,
            "exit_code": self.exit_code,
            "program": self.before.program,
            "verifications": self.verifications,
            "reorders": self.reorders,
            "fixes": [vars(fix) for fix in self.fixes],
            "not_fixed": list(self.not_fixed),
            "before": self.before.to_json(),
            "after": self.after.to_json(),
        }


def fix(
    program: Program,
    topology: Sequence[Any],
    *,
    form: str | None = None,
    tell: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> FixReport:
    """Find edits that make a program train the same model as on one device, and prove them.

    Args:
        program: A script, a module or a function in a file.
        topology: On which topologies it must.
        form: `plain` for edits with TensorFlow and Keras alone, `core` for those with gpudist_core. None: plain ones first.
        tell: Is given a sentence before each verification.
        **options: Those of `emulate.verify.verify`.

    Returns:
        The edits that were kept, and the verdicts before and after.

    Raises:
        UsageError: When the program has no source file that can be edited.
    """
    if program.file is None or program.file.suffix not in _EDITED:
        raise UsageError(
            f"gpudist fix edits Python files and notebooks. Received: program={program.name!r}. Name one, or edit by hand: "
            "gpudist verify names the line and the fix."
        )
    given = options.get("preload")
    # One process imports TensorFlow for all verifications.
    parent = Preload(modules=("emulate.verify", *program.imports)) if given is None else nullcontext(given)
    with tempfile.TemporaryDirectory(prefix="gpudist-fix-") as folder, parent as preload:
        return _Search(program, topology, form, tell, {**options, "preload": preload}, Path(folder)).run()


@dataclass(frozen=True)
class _Candidate:
    code: str
    location: str
    file: Path
    text: bytes
    proposal: Proposal


@dataclass
class _Search:
    program: Program
    topology: Sequence[Any]
    form: str | None
    tell: Callable[[str], None]
    options: dict[str, Any]
    folder: Path
    files: dict[Path, Edited] = field(default_factory=dict)
    verifications: int = 0
    trains_on_one_device: bool = True
    reorders: bool = False

    def run(self) -> FixReport:
        """Make edits until the verdict is well, or none helps."""
        self.tell("the program as it stands")
        before = current = self._verify({})
        self.trains_on_one_device = before.reference.status == "ok"
        fixes: list[Fix] = []
        not_fixed: list[str] = []
        while not current.is_equivalent and len(fixes) < MOST_EDITS:
            made, not_fixed = self._next(current)
            if made is None:
                break
            one, current = made
            fixes.append(one)
        fixes = [replace(one, proven=current.is_equivalent) for one in fixes]
        left = () if current.is_equivalent else tuple(not_fixed)
        return FixReport(before, current, tuple(fixes), left, self.files, self.verifications, self.reorders)

    def _next(self, current: Verdict) -> tuple[tuple[Fix, Verdict] | None, list[str]]:
        """Return the first edit that helps, and why there is none for the causes before it."""
        not_fixed = []
        for finding in _deciding(current):
            if finding.code not in EDITS:
                not_fixed.append(_NO_EDIT.format(finding.code, finding.fix))
                continue
            refused = []
            for candidate in islice(self._candidates(finding), MOST_TRIES):
                self.tell(f"{candidate.location}: {candidate.proposal.words}")
                edited = {file: one.after for file, one in self.files.items()} | {candidate.file: candidate.text}
                verdict = self._verify(edited)
                reason = self._refusal(finding.code, current, verdict)
                if reason is None and (change := self._change_of_one_device(finding.code)) is not None:
                    change = self._change_in_order(edited, change)
                    reason = None if change is None else f"it changes what one device trains: {change}"
                    self.reorders |= change is None
                if reason is None:
                    return (self._keep(candidate, verdict), verdict), []
                refused.append(reason)
            tried = "; ".join(f"edit {number}: {reason}" for number, reason in enumerate(refused, 1))
            not_fixed.append(_NOT_PROVEN.format(finding.code, tried or "none fits the line", finding.fix))
        return None, not_fixed

    def _candidates(self, finding: Finding) -> Iterator[_Candidate]:
        """Yield the edited files that may remove a cause: plain TensorFlow first, and each text once."""
        assert self.program.file is not None
        places = finding.locations or (Location(str(self.program.file), 0, ""),)
        candidates = [one for place in places if self._is_own(Path.cwd() / place.file) for one in self._at(finding, place)]
        seen = set()
        for form in (PLAIN, CORE) if self.form is None else (self.form,):
            for one in candidates:
                if one.proposal.form == form and one.text not in seen:
                    seen.add(one.text)
                    yield one

    def _at(self, finding: Finding, place: Location) -> Iterator[_Candidate]:
        file, line = Path.cwd() / place.file, place.line
        content = self.files[file].after if file in self.files else file.read_bytes()
        python = as_python(file, content) if is_notebook(file) else content
        source = Source(python, file)
        name = f"{file.name}, cell {place.cell}" if place.cell else file.name
        at = line_in_python(python, place.cell, line) if place.cell else line
        names = replace(Names.of(source), is_called_outside=_IN_COMPILE in finding.fixes)
        for proposal in propose(finding.code, Site(source, names, at, finding.fixes)):
            edited = source.apply(proposal.changes)
            text = as_notebook(content, edited) if is_notebook(file) else edited
            yield _Candidate(finding.code, f"{name}:{line}" if line else name, file, text, proposal)

    def _is_own(self, file: Path) -> bool:
        """Return whether a file is the program's, and no installed package's."""
        below = [file.relative_to(one) for one in (Path.cwd(), self.program.folder) if file.is_relative_to(one)]
        return file.suffix in _EDITED and any("site-packages" not in path.parts for path in below)

    def _verify(self, texts: dict[Path, bytes], topology: Sequence[Any] = ()) -> Verdict:
        self.verifications += 1
        program = replace(self.program, edits=tuple(texts.items()))
        return verify(program, topology or self.topology, traces=self.folder / str(self.verifications), **self.options)

    def _refusal(self, code: str, current: Verdict, verdict: Verdict) -> str | None:
        """Return why an edit is not kept: it leaves the cause, or brings another."""
        before, after = _open(current), _open(verdict)
        others = {place for place in after - before if code in _REPORTS or place[1] not in _REPORTS} | (after & before)
        if not verdict.is_equivalent and (verdict.exit_code != 1 or not others < before):
            raised = [error_line(run.failure, "") for run in verdict.runs if run.failure]
            return f"{verdict.verdict} with {', '.join(raised[:1] or sorted({word for _, word in after}))}"
        return None

    def _change_of_one_device(self, code: str) -> str | None:
        """Return what the edit verified last changes in the training on one device, where it must change nothing."""
        is_compared = self.trains_on_one_device and code not in _ONE_DEVICE_IS_WRONG
        return self._change_between(1, self.verifications) if is_compared else None

    def _change_between(self, first: int, last: int) -> str | None:
        return changes_of_training(*(self.folder / str(number) / "reference" for number in (first, last)))

    def _change_in_order(self, edited: dict[Path, bytes], change: str) -> str | None:
        """Return what edits change in the training on one device where nothing shuffles, if that can be seen; else `change`."""
        assert self.program.file is not None
        originals = {file: self.files[file].before if file in self.files else file.read_bytes() for file in edited}
        texts = [{self.program.file: self.program.file.read_bytes()} | some for some in (originals, edited)]
        in_order = [{file: _in_order(file, text) for file, text in some.items()} for some in texts]
        if in_order == texts:
            return change
        self.tell("both on one device, without shuffling")
        alike = [self._verify(some, ["1x1"]).reference.status == "ok" for some in in_order]
        return self._change_between(self.verifications - 1, self.verifications) if all(alike) else change

    def _keep(self, candidate: _Candidate, verdict: Verdict) -> Fix:
        """Take an edit over into the files."""
        file = candidate.file
        known = self.files.get(file)
        before = file.read_bytes() if known is None else known.after
        self.files[file] = Edited(before if known is None else known.before, candidate.text)
        patch = unified_diff(file, before, candidate.text)
        proposal = candidate.proposal
        return Fix(candidate.code, proposal.words, candidate.location, patch, proposal.form, verdict.verdict)


def _in_order(file: Path, content: bytes) -> bytes:
    """Return a file in which nothing shuffles."""
    python = as_python(file, content) if is_notebook(file) else content
    source = Source(python, file)
    edited = source.apply(without_shuffle(source))
    return as_notebook(content, edited) if is_notebook(file) else edited


def _deciding(verdict: Verdict) -> list[Finding]:
    """Return the findings that decide, in the order in which to fix them; each cause of several topologies once."""
    findings = [cause for run in verdict.runs for cause in run.causes if not (cause.allowed or cause.advice)]
    return list({(one.code, one.locations): one for one in findings}.values())


def _open(verdict: Verdict) -> set[tuple[str, str]]:
    """Return what decides on which topology; of one that could not be compared, that."""
    deciding = {(run.topology, code) for run in verdict.runs for code in run.deciding}
    return deciding | {(run.topology, run.verdict) for run in verdict.runs if not run.deciding and run.verdict not in _WELL}


_WELL = ("equivalent", "by-design")
