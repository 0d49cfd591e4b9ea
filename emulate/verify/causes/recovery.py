"""What becomes of a program that faults befell (`--fault`)."""

from __future__ import annotations

from emulate.faults import Preempt
from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign, error_line, names_in_words, numbers
from emulate.verify.recovery import Recovery


def _befell(recovery: Recovery) -> str:
    return "; ".join(str(fired) for fired in recovery.lives.fired)


def _restarts(recovery: Recovery) -> str:
    restarts = recovery.lives.restarts
    if not restarts:
        return "no restart"
    times = "1 restart" if restarts == 1 else f"{restarts} restarts"
    anew = [f"step {step}" if step else "the beginning" for step in recovery.went_on_from]
    return f"{times}, each of all hosts; it went on from {', then '.join(anew)}"


def _search_not_recovered(case: Case) -> Sign | None:
    recovery = case.recovery
    if recovery is None or recovery.has_ended:
        return None
    last = recovery.lives.last
    how = "it hung" if last.status == "hung" else f"it failed: {error_line(last.failure, 'without a word')}"
    where = f"; {last.where}" if last.where else ""
    summary, told = "The program does not come to its end after a fault", f"{_befell(recovery)}; {_restarts(recovery)}"
    if recovery.at_odds:
        return Sign(f"{summary}: its hosts went on from different steps.", f"{told}; {_each(recovery)}; then {how}", _AT_ODDS)
    is_left = not recovery.lives.restarts and last.status == "failed"
    return Sign(
        f"{summary}, though without one it does.", f"{told}; then {how}{where}", _NOT_STARTED_AGAIN if is_left else None
    )


def _search_not_restored(case: Case) -> Sign | None:
    recovery = case.recovery
    if recovery is None or recovery.result != "different" or not recovery.not_restored:
        return None
    names = list(recovery.not_restored)
    hosts = sorted({host for found in recovery.not_restored.values() for host in found})
    step = next(step for step in recovery.went_on_from if step)
    return Sign(
        f"The program goes on after step {step} with the initial values of {names_in_words(names)}: "
        "the checkpoint was not restored there.",
        f"{_befell(recovery)}; {_restarts(recovery)}; {len(names)} trained variables have the bits that they had at the "
        f"very beginning, on {'host' if len(hosts) == 1 else 'hosts'} {numbers(hosts)}; without the fault they have others "
        f"after step {step}",
    )


def _search_different(case: Case) -> Sign | None:
    recovery = case.recovery
    if recovery is None or recovery.result != "different" or case.has("checkpoint-not-restored"):
        return None
    first = recovery.comparison.first if recovery.comparison is not None else None
    if first is None:
        return _of_other_steps(recovery)
    where = f"from step {first.step} on, first the {first.kind} of {first.tensor}"
    if first.kind == "final-weight":
        where = f"in what the program makes of {first.tensor} when all {first.step} steps are made"
    numbers = f"{first.value!r} instead of {first.reference_value!r}"
    if recovery.at_odds:
        return Sign(
            "After a fault the hosts went on from different steps, and the program ends with another result than without.",
            f"{_befell(recovery)}; {_restarts(recovery)}; {_each(recovery)}; it differs {where}: {numbers}",
            _AT_ODDS,
        )
    return Sign(
        "After a fault the program comes to its end with another result than without.",
        f"{_befell(recovery)}; {_restarts(recovery)}; it differs {where}: {numbers}",
        {"final-weight": _WHAT_IS_KEPT_BESIDE, "weight": _WHAT_UPDATES}.get(first.kind),
    )


def _each(recovery: Recovery) -> str:
    """From which step each host went on."""
    steps = {host: f"step {step}" if step else "the beginning" for host, step in recovery.at_odds.items()}
    return ", ".join(f"host {host} from {step}" for host, step in steps.items())


_NOT_STARTED_AGAIN = (
    "It was not started again (--restarts 0): a program ends with a host that it loses, unless a scheduler starts all again. "
    "With --restarts 1 they are, and what it has saved decides."
)


def _of_other_steps(recovery: Recovery) -> Sign:
    """What was made is the same as without the fault, as far as it goes."""
    assert recovery.other_steps is not None
    optimizer, made, wanted = recovery.other_steps
    was_told = any(isinstance(one.fault, Preempt) for one in recovery.lives.fired)
    if was_told and made < wanted and not recovery.lives.restarts:
        return Sign(
            "Told to leave, the program ends as if it were done: with exit code 0, after which nobody starts it again.",
            f"{_befell(recovery)}; no restart; {optimizer} made {made} steps in all, {wanted} without the fault; those that "
            "both made agree",
            _ASKS_TO_BE_STARTED_AGAIN,
        )
    return Sign(
        f"After a fault the program {'ends before it has made all' if made < wanted else 'makes more'} of its steps.",
        f"{_befell(recovery)}; {_restarts(recovery)}; {optimizer} made {made} steps in all, {wanted} without the fault; those "
        "that both made agree",
        _AS_MANY_STEPS,
    )


_WHAT_IS_KEPT_BESIDE = (
    "All steps are the same, so what is put in the place of the weights in the end was not saved, or not restored: an average "
    "over the steps, the best weights that a callback keeps (Keras's EarlyStopping has them in memory alone). Put it into the "
    "checkpoint, as variables of a tf.Module say, or read it from a file that outlives the program, as ModelCheckpoint's."
)
_WHAT_UPDATES = (
    "The gradient of that step is the same, so weights, rows and draws are right; what makes an update of it is not: the "
    "optimizer's slots and its count of steps, a learning rate, averages. Put the optimizer into the checkpoint, and restore "
    "it after its variables are made (optimizer.build). What callbacks of fit change or count (ReduceLROnPlateau, a schedule "
    "of one's own) BackupAndRestore keeps only as far as it is in the model or its optimizer when it saves: put it last, and "
    "make the rate a function of optimizer.iterations. gpudist_core.Checkpoints keeps model, optimizer and position."
)
_AS_MANY_STEPS = (
    "Count the steps, or epochs, that are left when the program is started again: model.fit(..., initial_epoch=EPOCHS_DONE) "
    "beside epochs=EPOCHS, `for step in range(STEPS_DONE, STEPS)` in a loop of one's own. gpudist_core.Checkpoints tells them, "
    "and in fit goes on by itself. A program that decides to stop (early stopping) has to save what it decides by, too."
)
_ASKS_TO_BE_STARTED_AGAIN = (
    "Save, and end with another exit code than 0: 75 (EX_TEMPFAIL) asks to be started again, and is what "
    "gpudist_core.Checkpoints ends with; 143, that of SIGTERM itself, does too."
)
_AT_ODDS = (
    "Each host restores the newest checkpoint that it has itself, and one did not get to write its last. Let all restore the "
    "same step: the newest that every host has, or one host's in a folder that all read. gpudist_core.Checkpoints does."
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

CHECKPOINT_NOT_RESTORED = Cause(
    code="checkpoint-not-restored",
    title="weights that were not restored",
    meaning="After an interruption the program goes on in its data, or in its optimizer's count, and with the weights that "
    "it had at the very beginning: the checkpoint does not hold them, was read before they were made and matched nothing, "
    "or was read on some hosts only.",
    evidence="The weights right before the first step after a restart: bit for bit those before the very first step, where the "
    "run without the fault has others.",
    fix="Make all variables first (build the model and the optimizer), then restore on every host, and have it checked:\n"
    "    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, step=step)\n"
    "    checkpoint.restore(tf.train.latest_checkpoint(folder)).assert_existing_objects_matched()\n"
    "or gpudist_core.Checkpoints, which refuses what does not fit.",
    search=_search_not_restored,
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
