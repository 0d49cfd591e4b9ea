"""What becomes of a program that faults befell (`--fault`)."""

from __future__ import annotations

from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign
from emulate.verify.recovery import Recovery


def _befell(recovery: Recovery) -> str:
    return "; ".join(str(fired) for fired in recovery.lives.fired)


def _restarts(recovery: Recovery) -> str:
    lives = recovery.lives
    if not lives.restarts:
        return "no restart"
    times = "1 restart" if lives.restarts == 1 else f"{lives.restarts} restarts"
    anew = [f"step {step}" if step else "the beginning" for step in lives.went_on_from]
    return f"{times}, each of all hosts; it went on from {', then '.join(anew)}"


def _search_not_recovered(case: Case) -> Sign | None:
    recovery = case.recovery
    if recovery is None or recovery.has_ended:
        return None
    last = recovery.lives.last
    how = "it hung" if last.status == "hung" else f"it failed: {_last_line(last.failure)}"
    where = f"; {last.where}" if last.where else ""
    return Sign(
        "The program does not come to its end after a fault, though without one it does.",
        f"{_befell(recovery)}; {_restarts(recovery)}; then {how}{where}",
    )


def _last_line(failure: str | None) -> str:
    lines = [line.strip() for line in (failure or "").splitlines() if line.strip()]
    return lines[-1] if lines else "without a word"


def _search_different(case: Case) -> Sign | None:
    recovery = case.recovery
    if recovery is None or recovery.result != "different":
        return None
    assert recovery.comparison is not None
    first = recovery.comparison.first
    assert first is not None
    where = f"from step {first.step} on, first the {first.kind} of {first.tensor}"
    numbers = f"{first.value!r} instead of {first.reference_value!r}"
    return Sign(
        "After a fault the program comes to its end with another result than without.",
        f"{_befell(recovery)}; {_restarts(recovery)}; it differs {where}: {numbers}",
    )


NOT_RECOVERED = Cause(
    code="not-recovered",
    title="the program does not survive a fault",
    meaning="With a fault that was asked for (--fault) the program does not come to its end, though all hosts were started "
    "again as a scheduler would, with the files they had written: it raises when it is started again, or waits for ever.",
    evidence="The same program on the same topology ends well without the fault; how the last start of it ended.",
    fix="Save checkpoints that are whole or not there (gpudist_core.Checkpoints, tf.train.CheckpointManager), restore the "
    "newest one at the start, and let nothing that an interrupted run leaves behind stop the next one: lock files, "
    "half-written files, folders that must not exist. A program told to leave (SIGTERM) saves and ends with exit code 75.",
    search=_search_not_recovered,
)

RECOVERED_DIFFERENTLY = Cause(
    code="recovered-differently",
    title="another result after a fault",
    meaning="The program survives the fault and ends with other weights than without it: part of its state was not saved, or "
    "not restored on all hosts. Weights without the optimizer's slots, the position in the data, the learning rate's step, "
    "random generators, a loss scale.",
    evidence="Gradients and weights of each step, those after the restart included, against the same program on the same "
    "topology without the fault. A difference that begins with a gradient right after the restart is the data or a random "
    "generator; one that begins with a weight is the optimizer.",
    fix="Save and restore everything that a step depends on: gpudist_core.Checkpoints keeps model, optimizer, random states "
    "and the position in a Pipeline. With tf.train.Checkpoint put optimizer, step and iterator into it beside the model.",
    search=_search_different,
)
