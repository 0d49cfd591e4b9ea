"""Detect files that several runs of a verification change, and checkpoints that hosts overwrite for each other."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign, names_in_words, numbers
from emulate.verify.lines import made
from emulate.verify.recorded import differing, initial
from emulate.verify.result import Met

_OF_HDF5 = re.compile(r"unable to (?:un)?lock file|unable to truncate a file which is already open", re.IGNORECASE)
"""HDF5's errors about a file that another process has open. They do not name the file."""


def _search_shared(case: Case) -> Sign | None:
    if not case.met.paths and not _met_with_faults(case):
        return None
    if case.has_ended_early:
        return _of_an_end(case)
    return _of_one_device(case) or _of_the_topology(case) or _of_faults(case)


def _of_one_device(case: Case) -> Sign | None:
    """Check whether runs on one device differ that should be equal."""
    met, again = Met.together(case.meet_alone()), case.repeat()
    if again is None:
        return _sign_of_paths(met.read, "the second run on one device did not reach its end")
    if what := differing(case.plain, again):
        return _sign_of_paths(met.found, f"two runs on one device with the same seed differ in {what}")
    if what := case.drifted(again):
        return _sign_of_paths(met.read, f"two runs on one device with the same seed differ in {what}")
    begun = map(initial, case.lab.measure_noise(case.pair))
    if any(weights and weights != initial(case.reference) for weights in begun):  # evaluated ones have none
        return _sign_of_paths(met.found, "several runs on one device with the same seed start with different weights")
    return None


def _of_the_topology(case: Case) -> Sign | None:
    """Check whether the topology's run differs in what a file decides: its start, or its result."""
    first, harmless = case.comparison.first, _harmless(case)
    found, read = ([path for path in paths if path not in harmless] for paths in (case.met.found, case.met.read))
    if first is not None and first.kind == "initial-weight":
        return _sign_of_paths(found, "this run starts with other weights than the run on one device")
    if first is not None and first.kind == "final-weight":
        return _sign_of_paths(read, "all steps agree with those of one device, but the final weights differ")
    made, wanted = case.untouched.num_steps, case.plain.num_steps
    if made != wanted and not (case.ledger and case.ledger.grows):
        return _sign_of_paths(found, f"this run makes {made} steps, the run on one device {wanted}")
    return None


def _harmless(case: Case) -> set[str]:
    """Return paths that only one of two equal runs on one device found."""
    first, again = (set(met.found) for met in (*case.meet_alone(), Met(), Met())[:2])
    return first ^ again


def _of_faults(case: Case) -> Sign | None:
    if case.recovery is None or case.recovery.result != "different":
        return None
    paths = [path for path in _met_with_faults(case) if path not in _harmless(case)]
    return _sign_of_paths(paths, "the run with faults ends with another result than the run without them")


def _met_with_faults(case: Case) -> Sequence[str]:
    lives = case.recovery.lives.runs if case.recovery is not None else []
    return list(dict.fromkeys(path for life in lives for path in life.met.found))


def _of_an_end(case: Case) -> Sign | None:
    """Check whether the program raised over a file, or hung with hosts that started from different runs' files."""
    failure = case.outcome.failure or ""
    if failure:
        named = [path for path in case.met.paths if os.path.basename(path) in failure]
        return _sign_of_paths(
            named or (case.met.paths if _OF_HDF5.search(failure) else ()), "the program raised an error about such a file"
        )
    begun = {tuple(sorted(weights.items())) for weights in initial(case.untouched)}
    return _sign_of_paths(case.met.found, "hosts started with different weights") if len(begun) > 1 else None


def _sign_of_paths(paths: Sequence[str], what: str) -> Sign | None:
    if not paths:
        return None
    return Sign(
        f"Runs of the verification change each other's files: {names_in_words(paths)}.",
        f"{paths[0]} is outside of the working directory and the program's folder, where each run has its own "
        f"copy; several runs write it at the same time; {what}. The runs leave these files behind "
        f"({names_in_words(paths)}): delete them, or restore what was there before",
    )


SHARED_FILES = Cause("shared-files", _search_shared, runs_that_ended=True)


def _search_checkpoints(case: Case) -> Sign | None:
    shared = {path: sorted(hosts) for path, hosts in case.outcome.saved.items() if len(hosts) > 1}
    if not shared:
        return None
    paths = sorted(shared)
    failed = ""
    if case.outcome.failure and any(word in case.outcome.failure for word in ("checkpoint", "Checkpoint", *paths)):
        failed = "; the program raised an error while it saved"
    return Sign(
        f"Several hosts write the same checkpoint: {names_in_words(paths, 1)}.",
        f"hosts {numbers(shared[paths[0]])} wrote {paths[0]}"
        + (f", {len(paths)} such paths in all" if len(paths) > 1 else "")
        + failed,
        _OF_A_MODEL if all(path.endswith((".keras", ".h5")) for path in paths) else None,
    )


_OF_A_MODEL = "With model.save"

CHECKPOINT_CONFLICT = Cause(
    "checkpoint-conflict", _search_checkpoints, runs_that_ended=True, advice=True, blame=(made("ending", "save"),)
)
