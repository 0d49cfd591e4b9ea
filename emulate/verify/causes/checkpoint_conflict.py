"""Detect checkpoints that hosts overwrite for each other."""

from __future__ import annotations

from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign, names_in_words, numbers
from emulate.verify.lines import made


def _search(case: Case) -> Sign | None:
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

CHECKPOINT_CONFLICT = Cause("checkpoint-conflict", _search, runs_that_ended=True, advice=True, blame=(made("ending", "save"),))
