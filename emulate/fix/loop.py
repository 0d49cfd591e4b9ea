"""Apply edits one after the other, verify each, and keep those that remove a cause and bring nothing new."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from emulate.errors import UsageError
from emulate.fix.edits import CORE, EDITS, PLAIN, Proposal, Site, propose
from emulate.fix.names import Names
from emulate.fix.patch import Edited, unified_diff
from emulate.fix.source import Source
from emulate.program import Program
from emulate.verify import Finding, Verdict, trains_alike, verify

MOST_TRIES = 8
"""So many edits are verified for one finding."""
MOST_EDITS = 8
"""So many edits are made in one program."""
_ONE_DEVICE_IS_WRONG = ("unseeded-randomness", "unseeded-hosts")
"""Causes that the reference has, too: their fix must change what one device trains."""
_NO_EDIT = "gpudist has no edit for {} yet; its fix in words: {}"
_NOT_PROVEN = "No edit for {} was proven ({}); its fix in words: {}"


@dataclass(frozen=True)
class Fix:
    """Describe an edit that removed a cause.

    Attributes:
        code: The cause's.
        words: What the edit does.
        place: The line of the finding, `train.py:33`, in the program with the edits before this one.
        patch: Its unified diff, which follows those of the edits before it.
        form: `plain` or `core`.
        verdict_after: The verdict on the program with this edit and those before it.
        proven: Whether the program with all edits trains the same model as the unedited program does on one device.
    """

    code: str
    words: str
    place: str
    patch: str
    form: str
    verdict_after: str
    proven: bool = False


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
    """

    before: Verdict
    after: Verdict
    fixes: tuple[Fix, ...] = ()
    not_fixed: tuple[str, ...] = ()
    files: dict[Path, Edited] = field(default_factory=dict)
    verifications: int = 1

    @property
    def exit_code(self) -> int:
        """Return 0 if the program is right or was made right, else that of the verdict that is left."""
        return self.after.exit_code

    @property
    def changes_one_device(self) -> bool:
        """Return whether one device trains in another way with the edits: it does with a seed that was missing."""
        return any(one.code in _ONE_DEVICE_IS_WRONG for one in self.fixes)

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
    if program.file is None or program.file.suffix != ".py":
        raise UsageError(
            f"gpudist fix edits Python files. Received: program={program.name!r}. Name a .py file, or edit by hand: "
            "gpudist verify names the line and the fix."
        )
    with tempfile.TemporaryDirectory(prefix="gpudist-fix-") as folder:
        return _Search(program, topology, form, tell, options, Path(folder)).run()


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

    def run(self) -> FixReport:
        """Make edits until the verdict is well, or none helps."""
        self.tell("the program as it stands")
        before = current = self._verify({})
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
        return FixReport(before, current, tuple(fixes), left, self.files, self.verifications)

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
                texts = {**{file: edited.after for file, edited in self.files.items()}, candidate.file: candidate.text}
                verdict = self._verify(texts)
                reason = self._refusal(finding.code, current, verdict)
                if reason is None:
                    return (self._keep(candidate, verdict), verdict), []
                refused.append(reason)
            tried = "; ".join(f"edit {number}: {reason}" for number, reason in enumerate(refused, 1))
            not_fixed.append(_NOT_PROVEN.format(finding.code, tried or "none fits the line", finding.fix))
        return None, not_fixed

    def _candidates(self, finding: Finding) -> Iterator[_Candidate]:
        """Yield the edited files that may remove a cause: plain TensorFlow first, and each text once."""
        assert self.program.file is not None
        places = [(Path.cwd() / one.file, one.line) for one in finding.locations] or [(self.program.file, 0)]
        own = [(file, line) for file, line in places if self._is_own(file)]
        candidates = [one for file, line in own for one in self._at(finding, file, line)]
        seen = set()
        for form in (PLAIN, CORE) if self.form is None else (self.form,):
            for one in candidates:
                if one.proposal.form == form and one.text not in seen:
                    seen.add(one.text)
                    yield one

    def _at(self, finding: Finding, file: Path, line: int) -> Iterator[_Candidate]:
        text = self.files[file].after if file in self.files else file.read_bytes()
        source = Source(text, file)
        site = Site(source, Names.of(source), line, finding.fixes)
        for proposal in propose(finding.code, site):
            location = f"{file.name}:{line}" if line else file.name
            yield _Candidate(finding.code, location, file, source.apply(proposal.changes), proposal)

    def _is_own(self, file: Path) -> bool:
        """Return whether a file is the program's, and no installed package's."""
        folders = (Path.cwd(), self.program.folder)
        return file.suffix == ".py" and any(file.is_relative_to(one) for one in folders) and "site-packages" not in file.parts

    def _verify(self, texts: dict[Path, bytes]) -> Verdict:
        self.verifications += 1
        program = replace(self.program, edits=tuple(texts.items()))
        return verify(program, self.topology, traces=self.folder / str(self.verifications), **self.options)

    def _refusal(self, code: str, current: Verdict, verdict: Verdict) -> str | None:
        """Return why an edit is not kept: it leaves the cause, brings another, or changes what one device trains."""
        before, after = _open(current), _open(verdict)
        if not verdict.is_equivalent and (verdict.exit_code != 1 or not after < before):
            return f"{verdict.verdict} with {', '.join(sorted({word for _, word in after}))}"
        first, last = (self.folder / str(number) / "reference" for number in (1, self.verifications))
        if code not in _ONE_DEVICE_IS_WRONG and not trains_alike(first, last):
            return "it changes what one device trains"
        return None

    def _keep(self, candidate: _Candidate, verdict: Verdict) -> Fix:
        """Take an edit over into the files."""
        file = candidate.file
        known = self.files.get(file)
        before = file.read_bytes() if known is None else known.after
        self.files[file] = Edited(before if known is None else known.before, candidate.text)
        patch = unified_diff(file, before, candidate.text)
        proposal = candidate.proposal
        return Fix(candidate.code, proposal.words, candidate.location, patch, proposal.form, verdict.verdict)


def _deciding(verdict: Verdict) -> list[Finding]:
    """Return the findings that decide, in the order in which to fix them; each cause of several topologies once."""
    findings = [cause for run in verdict.runs for cause in run.causes if not (cause.allowed or cause.advice)]
    return list({(one.code, one.locations): one for one in findings}.values())


def _open(verdict: Verdict) -> set[tuple[str, str]]:
    """Return what decides on which topology; of one that could not be compared, that."""
    deciding = {(run.topology, code) for run in verdict.runs for code in run.deciding}
    return deciding | {(run.topology, run.verdict) for run in verdict.runs if not run.deciding and run.verdict not in _WELL}


_WELL = ("equivalent", "by-design")
