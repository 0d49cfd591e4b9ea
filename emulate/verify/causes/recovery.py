"""Describe how a program recovers from faults (`--fault`)."""

from __future__ import annotations

from emulate.faults import Preempt
from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign, error_line, names_in_words, numbers
from emulate.verify.lines import made
from emulate.verify.recovery import Recovery


def _befell(recovery: Recovery) -> str:
    return "; ".join(str(fired) for fired in recovery.lives.fired)


def _restarts(recovery: Recovery) -> str:
    restarts = recovery.lives.restarts
    if not restarts:
        return "no restart"
    times = "1 restart" if restarts == 1 else f"{restarts} restarts"
    return f"{times}, each of all hosts; it resumed {', then '.join(map(_resumed, recovery.went_on_from))}"


def _resumed(steps: int) -> str:
    return f"after {steps} step{'s' if steps > 1 else ''}" if steps else "from the beginning"


def _search_not_recovered(case: Case) -> Sign | None:
    recovery = case.recovery
    if recovery is None or recovery.has_ended:
        return None
    last = recovery.lives.last
    how = "it hung" if last.status == "hung" else f"it failed: {error_line(last.failure, 'without an error message')}"
    where = f"; {last.where}" if last.where else ""
    summary, text = "The program does not reach its end after a fault", f"{_befell(recovery)}; {_restarts(recovery)}"
    if recovery.at_odds:
        return Sign(f"{summary}: its hosts resumed from different steps.", f"{text}; {_each(recovery)}; then {how}", _AT_ODDS)
    is_left = not recovery.lives.restarts and last.status == "failed"
    return Sign(f"{summary}. Without the fault it does.", f"{text}; then {how}{where}", _NOT_STARTED_AGAIN if is_left else None)


def _search_not_restored(case: Case) -> Sign | None:
    recovery = case.recovery
    if recovery is None or recovery.result != "different" or not recovery.not_restored:
        return None
    names = list(recovery.not_restored)
    hosts = sorted({host for of_variable in recovery.not_restored.values() for host in of_variable})
    steps = _resumed(next(step for step in recovery.went_on_from if step))
    return Sign(
        (f"The program resumes {steps} with the initial values of {names_in_words(names)}: the checkpoint was not restored."),
        (
            f"{_befell(recovery)}; {_restarts(recovery)}; {len(names)} trained variables have their initial bits on "
            f"{'host' if len(hosts) == 1 else 'hosts'} {numbers(hosts)}; without the fault they have other values "
            f"{steps}"
        ),
    )


def _search_different(case: Case) -> Sign | None:
    recovery = case.recovery
    if recovery is None or recovery.result != "different" or case.has("checkpoint-not-restored"):
        return None
    first = recovery.comparison.first if recovery.comparison is not None else None
    if first is None:
        return _of_other_steps(recovery)
    where = f"from step {first.step} (counted from 0) on, first in the {first.kind} of {first.tensor}"
    if first.kind == "final-weight":
        where = f"in {first.tensor} at the end, after all {first.step} steps"
    numbers = f"{first.value!r} instead of {first.reference_value!r}"
    if recovery.at_odds:
        return Sign(
            (
                "After a fault the hosts resumed from different steps, and the program ends with a different result than "
                "without the fault."
            ),
            f"{_befell(recovery)}; {_restarts(recovery)}; {_each(recovery)}; it differs {where}: {numbers}",
            _AT_ODDS,
        )
    return Sign(
        "After a fault the program ends with a different result than without it.",
        f"{_befell(recovery)}; {_restarts(recovery)}; it differs {where}: {numbers}",
        {"final-weight": _WHAT_IS_KEPT_BESIDE, "weight": _WHAT_UPDATES}.get(first.kind),
    )


def _each(recovery: Recovery) -> str:
    """Return the step from which each host continued."""
    return ", ".join(f"host {host} {_resumed(steps)}" for host, steps in recovery.at_odds.items())


_NOT_STARTED_AGAIN = "If it was not started again"


def _of_other_steps(recovery: Recovery) -> Sign:
    """Report that the result is the same as without the fault, as far as it goes."""
    assert recovery.other_steps is not None
    optimizer, made, wanted = recovery.other_steps
    was_told = any(isinstance(firing.fault, Preempt) for firing in recovery.lives.fired)
    if was_told and made < wanted and not recovery.lives.restarts:
        return Sign(
            "After SIGTERM the program ends with exit code 0, as if it were finished. No scheduler starts it again.",
            (
                f"{_befell(recovery)}; no restart; {optimizer} made {made} steps in all, {wanted} without the fault; the "
                "steps that both made agree"
            ),
            _ASKS_TO_BE_STARTED_AGAIN,
        )
    return Sign(
        f"After a fault the program runs {'fewer' if made < wanted else 'more'} steps than without it.",
        (
            f"{_befell(recovery)}; {_restarts(recovery)}; {optimizer} made {made} steps in all, {wanted} without the "
            "fault; the steps that both made agree"
        ),
        _AS_MANY_STEPS,
    )


_WHAT_IS_KEPT_BESIDE = "If the final weights differ"
_WHAT_UPDATES = "If a weight differs first"
_AS_MANY_STEPS = "If the number of steps differs"
_ASKS_TO_BE_STARTED_AGAIN = "If it ends after SIGTERM with exit code 0"
_AT_ODDS = "If the hosts resume from different steps"

NOT_RECOVERED = Cause("not-recovered", _search_not_recovered)

CHECKPOINT_NOT_RESTORED = Cause("checkpoint-not-restored", _search_not_restored, blame=(made("start", "restore"),))

RECOVERED_DIFFERENTLY = Cause("recovered-differently", _search_different)
