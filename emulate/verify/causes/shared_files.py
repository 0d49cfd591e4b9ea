"""Files that the runs of a verification take from each other."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from emulate.probe.trace import Trace
from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign, names_in_words
from emulate.verify.causes.randomness import differing, drifted, initial
from emulate.verify.meetings import Met

_OF_HDF5 = re.compile(r"unable to (?:un)?lock file|unable to truncate a file which is already open", re.IGNORECASE)
"""What HDF5 says of a file that another process has open; it does not name it."""


def _search(case: Case) -> Sign | None:
    if not case.met.paths and not _met_with_faults(case):
        return None
    if case.has_ended_early:
        return _of_an_end(case)
    return _of_one_device(case) or _of_the_topology(case) or _of_faults(case)


def _of_one_device(case: Case) -> Sign | None:
    """Runs on one device that should be the same are not."""
    met = Met.together(case.met_alone)
    if case.repeat is None:
        return _sign(met.read, "run once more on one device, the program did not come to its end")
    if what := differing(case.plain, case.repeat):
        return _sign(met.found, f"run twice on one device with the same seed, {what} differ")
    if what := drifted(case):
        return _sign(met.read, f"run twice on one device with the same seed, {what} differ")
    if any(initial(noise) != initial(case.reference) for noise in case.noise):
        return _sign(met.found, "run several times on one device with the same seed, the initial weights differ")
    return None


def _of_the_topology(case: Case) -> Sign | None:
    """The topology's run differs from those on one device in what a file decides: where it begins, or what it ends with."""
    first, harmless = case.comparison.first, _harmless(case)
    found, read = ([path for path in paths if path not in harmless] for paths in (case.met.found, case.met.read))
    if first is not None and first.kind == "initial-weight":
        return _sign(found, "this run begins with other weights than the one on one device")
    if first is not None and first.kind == "final-weight":
        return _sign(read, "all steps agree with those on one device, and the final weights differ")
    made, wanted = case.untouched.num_steps, case.plain.num_steps
    if made != wanted and not (case.ledger and case.ledger.grows):
        return _sign(found, f"this run makes {made} steps, the one on one device {wanted}")
    return None


def _harmless(case: Case) -> set[str]:
    """What one of two runs on one device found and the other did not, though they agree."""
    first, again = (set(met.found) for met in (*case.met_alone, Met(), Met())[:2])
    return first ^ again


def _of_faults(case: Case) -> Sign | None:
    if case.recovery is None or case.recovery.result != "different":
        return None
    found = [path for path in _met_with_faults(case) if path not in _harmless(case)]
    return _sign(found, "the run with faults ends with another result than the one without")


def _met_with_faults(case: Case) -> Sequence[str]:
    lives = case.recovery.lives.runs if case.recovery is not None else []
    return list(dict.fromkeys(path for life in lives for path in life.met.found))


def _of_an_end(case: Case) -> Sign | None:
    """The program raised over a file, or hung with hosts that began with what different runs had left."""
    failure = case.outcome.failure or ""
    if failure:
        named = [path for path in case.met.paths if os.path.basename(path) in failure]
        return _sign(named or (case.met.paths if _OF_HDF5.search(failure) else ()), "the program raised over such a file")
    begun = _begun(case.untouched)
    return _sign(case.met.found, "hosts began with different weights") if len(begun) > 1 else None


def _begun(trace: Trace) -> set[tuple[tuple[str, str], ...]]:
    return {tuple(sorted(weights.items())) for weights in initial(trace)}


def _sign(paths: Sequence[str], what: str) -> Sign | None:
    if not paths:
        return None
    return Sign(
        f"Runs of the verification change each other's files: {names_in_words(paths)}.",
        f"{paths[0]} lies outside of the working directory and the program's folder, of which each run has a view of its own; "
        f"several runs write it, and they go on at the same time; {what}",
        f"{_FIX}\nWhat lies there now is the runs' ({names_in_words(paths)}): delete it, or put back what was there before.",
    )


_FIX = (
    "Write below the working directory, where each run has files of its own: make the path relative, or take it from an "
    "argument or an environment variable, and give a relative one here:\n"
    '    folder = os.environ.get("CHECKPOINTS", "checkpoints")'
)

SHARED_FILES = Cause(
    code="shared-files",
    title="runs that change each other's files",
    meaning="The program writes files at a place that all runs of the verification share, outside of the working directory and "
    "its own folder, and goes on from what it finds there: a checkpoint, weights, a count of epochs. The runs are made at the "
    "same time and one after the other, so one begins with what another has left. Nothing is known of the program then: it is "
    "unverified, not divergent.",
    evidence="A run reads a file there that another run wrote during the verification, and runs that should be the same begin "
    "with other weights, have other rows or steps, or end otherwise; or the program raises over such a file.",
    fix=_FIX,
    search=_search,
    runs_that_ended=True,
)
