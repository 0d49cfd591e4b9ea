"""Detect why a run ended early: a host is gone or out of step, TensorFlow has a known limit, a fault was not recovered."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from emulate.faults import Preempt
from emulate.program import shorten_traceback
from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign, names_in_words, numbers
from emulate.verify.lines import made, raised, stopped, stuck
from emulate.verify.recovery import Recovery
from emulate.verify.result import NO_THREAD, Outcome, error_line

_LOST_PEER = re.compile(
    r"Connection reset by peer|tasks are unhealthy|failed to connect to all addresses|Socket closed|GOAWAY|heartbeat",
    re.IGNORECASE,
)
_MISMATCH = re.compile(
    r"Collective instance \d+ expected [^\n\"]*|Shape mismatch in the collective[^\n\"]*"
    r"|[^\n\"]*another member in the group expected[^\n\"]*",
    re.IGNORECASE,
)
_MORE_THREADS = "If the host could not start a thread"


def _steps(case: Case) -> dict[int, int]:
    """Return the number of steps of each host."""
    counts: dict[int, int] = {}
    for host, event in case.untouched.of("step"):
        counts[host] = max(counts.get(host, 0), int(event["step"]) + 1)
    return counts


def _where_hosts_are(case: Case) -> str:
    """Return what each host was doing, from the hang judge or from the steps and ends."""
    if case.outcome.where:
        return case.outcome.where
    steps = _steps(case)
    counts = {host: "1 step" if steps.get(host) == 1 else f"{steps.get(host, 0)} steps" for host in case.outcome.hosts}
    return "; ".join(f"host {host}: {how} after {counts[host]}" for host, how in sorted(case.outcome.hosts.items()))


def _gone(outcome: Outcome) -> list[int]:
    """Return the hosts that left by exit or signal, without an exception of the program."""
    return [host for host, how in sorted(outcome.hosts.items()) if how in ("exited", "killed")]


def _search_without_threads(case: Case) -> Sign | None:
    """Check whether the machine limits threads so that C++ ends a host's process, also one without peers."""
    outcome, gone = case.outcome, _gone(case.outcome)
    said = NO_THREAD.search(outcome.failure or "")
    if said is None or not gone:
        return None
    how = numbers(_how(outcome, host) for host in gone)
    summary = f"Host {numbers(gone)} left ({how}): the system refused to start more threads."
    return Sign(summary, f"its output says: {said.group().strip()}; {_where_hosts_are(case)}", _MORE_THREADS)


def _search_left(case: Case) -> Sign | None:
    outcome, gone = case.outcome, _gone(case.outcome)
    several = case.untouched.topology.num_hosts > 1
    lost_peer = bool(outcome.failure and _LOST_PEER.search(outcome.failure))
    if not several or not (outcome.suspect == "host-exited" or (gone and (outcome.hung == "hang" or outcome.failure))):
        return None
    how = [_how(outcome, host) for host in gone]
    who = f"Host {numbers(gone)} left" if gone else "A host left"
    peers = "; another host reports that it lost the connection" if lost_peer else ""
    return Sign(
        f"{who} ({numbers(how)}), but the other hosts still need it." if how else f"{who}.", _where_hosts_are(case) + peers
    )


def _how(outcome: Outcome, host: int) -> str:
    code = outcome.codes.get(host)
    if outcome.hosts.get(host) == "killed":
        return f"killed by signal {-(code or 0)}"
    return f"exit code {code}"


def _search_unequal(case: Case) -> Sign | None:
    steps = _steps(case)
    done = [host for host, how in case.outcome.hosts.items() if how == "returned"]
    by_itself = case.outcome.hung == "hang" and done and len(set(steps.values())) > 1 and not _gone(case.outcome)
    if case.outcome.suspect != "unequal-steps" and not by_itself:
        return None
    counted = ", ".join(f"host {host} {number}" for host, number in sorted(steps.items()))
    return Sign(
        "The hosts do not run the same number of steps: some have finished while others wait for their gradients.",
        _where_hosts_are(case) + (f" (recorded steps: {counted})" if len(set(steps.values())) > 1 else ""),
    )


def _search_order(case: Case) -> Sign | None:
    """Check whether hosts met in collectives of different shapes, each of which all hosts have, equally often."""
    said = _MISMATCH.search(case.outcome.failure or "")
    shapes = set(re.findall(r"shape (\[[\d, ]*\])", said.group())) if said else set()
    collectives = list(case.outcome.collectives.values())
    are_alike = bool(collectives) and all(Counter(of_host) == Counter(collectives[0]) for of_host in collectives)
    by_error = len(shapes) > 1 and are_alike and shapes <= {name[name.find("[") :] for name in collectives[0]}
    if case.outcome.suspect != "collective-order" and not by_error:
        return None
    every = f"every host has collective operations of the shapes {numbers(sorted(shapes))}; " if by_error else ""
    evidence = f"{every}TensorFlow says: {said.group().strip()}; {_where_hosts_are(case)}" if said else _where_hosts_are(case)
    return Sign("The hosts start the same collective operations in different orders.", evidence)


def _search_mismatch(case: Case) -> Sign | None:
    said = _MISMATCH.search(case.outcome.failure or "")
    if case.outcome.suspect != "collective-mismatch" and said is None:
        return None
    evidence = f"TensorFlow says: {said.group().strip()}; {_where_hosts_are(case)}" if said else _where_hosts_are(case)
    return Sign(
        "The hosts are in different collective operations, or in one with different shapes or types. None can complete.",
        evidence,
    )


def _suspected(code: str, summary: str) -> Callable[[Case], Sign | None]:
    """Return a search that relies on the hang judge."""
    return lambda case: Sign(summary, _where_hosts_are(case)) if case.outcome.suspect == code else None


_cause = functools.partial(Cause, runs_that_ended=True, completed=False)

HOST_EXITED = _cause(
    "host-exited",
    lambda case: _search_without_threads(case) or _search_left(case),
    blame=(made("ending", "exit"), stopped(), stuck()),
)

UNEQUAL_STEPS = _cause("unequal-steps", _search_unequal, blame=(stuck(), stopped()))

COLLECTIVE_MISMATCH = _cause("collective-mismatch", _search_mismatch, unless=("collective-order",), blame=(stuck(), stopped()))

COLLECTIVE_ORDER = _cause("collective-order", _search_order, blame=(stuck(), stopped()))

WAITS_FOR_DATA = _cause(
    "waits-for-data",
    _suspected("waits-for-data", "A host waits for data that do not come, and the other hosts wait for it."),
    blame=(stuck(),),
)

PYTHON_DEADLOCK = _cause(
    "python-deadlock",
    _suspected(
        "python-deadlock", "A host's threads wait for a lock, a queue or an event that none of them can release, fill or set."
    ),
    blame=(stuck(),),
)


@dataclass(frozen=True)
class Limit:
    """Describe a known error of TensorFlow or Keras.

    Attributes:
        patterns: All of them occur in the traceback of a program that has it.
        heading: What fails, as the heading in the cause's file has it; the fix stands there.
    """

    patterns: tuple[str, ...]
    heading: str


_LETTERS = 240
_NOT_DETERMINISTIC = (
    r"(?i)determinism is not yet supported|deterministic GPU implementation of .* available"
    r"|not (yet )?have a deterministic (\w+ )?implementation|would have been executed is not deterministic"
    r"|deterministic mode is not supported"
)
_OUT_OF_SCOPE = "A model, its optimizer or a trained variable was created outside of the strategy's scope, and others inside"
LIMITS = (
    Limit(
        (r"merge_call`? called while defining a new graph", r"_backend_apply_gradients|base_optimizer|Cond\.call"),
        "Keras 3's gradient_accumulation_steps and ema_overwrite_frequency call merge_call inside a "
        "condition, which strategies refuse",
    ),
    Limit(
        (r"merge_call`? called while defining a new graph",),
        "An optimizer applies gradients inside of a condition, a loop or a nested tf.function of the step, where strategies "
        "refuse merge_call",
    ),
    Limit(
        (r"Inputs to operation cond/\S*while\S* .*must have the same size and shape",),
        "The first call of a tf.function makes variables, and TensorFlow runs it in a condition, in which the gradient of a "
        "recurrent layer fails",
    ),
    Limit(
        (r"Inputs to operation AddN .*must have the same size and shape", r"\.fit\(|_symbolic_build"),
        "Keras 3's fit cannot build its metrics if the first batch, of training or of validation, is not "
        "a multiple of the number of replicas",
    ),
    Limit(
        (r"Value for attr 'T' of string is not in the list of allowed values", r"AddN", r"\.fit\(|_symbolic_build"),
        "Keras 3's fit cannot build its metrics if the model takes strings",
    ),
    Limit(
        (r"Unable to automatically build the model", r"does not have a `call\(\)` method implemented"),
        "Under a strategy Keras 3's fit first calls a model that is not built, and this one has no call()",
    ),
    Limit(
        (
            r"has DataType float\d+ not in list of allowed values: [^\n]*int\d+",
            r"Unable to automatically build the model|\.fit\(|_symbolic_build",
        ),
        "Under a strategy Keras 3's fit first calls a model with the mean of the replicas' inputs: floats in place of integers",
    ),
    Limit(
        (r"Attempt to convert a value \((PerReplica|DistributedVariable)|Invalid reduction dimension 0",),
        "Keras 3's fit and evaluate do not work under MultiWorkerMirroredStrategy (keras#20585)",
    ),
    Limit(
        (r"(float|int)\(\) argument must be a string,? .*not '(Mirrored|SyncOnRead|Distributed)Variable'",),
        "Python's float() and int() fail on a variable that a strategy keeps on several devices, such as "
        "Keras 3's learning rate",
    ),
    Limit(
        (r"Could not apply FILE based sharding: the dataset only has \d+ file",),
        "The strategy shards whole files, and there are fewer files than hosts",
    ),
    Limit(
        (r"Collective ops must be configured at program startup",),
        "MultiWorkerMirroredStrategy must be created before anything else that TensorFlow does in the process",
    ),
    Limit(
        (r"Mixing different tf\.distribute|inside \"with strategy\.scope|passed a variable created in this tf\.distribute",),
        _OUT_OF_SCOPE,
    ),
    Limit((r"AssertionError", r"_distributed_tf_update_step"), _OUT_OF_SCOPE),
    Limit(
        (r"Trying to access resource .* located in device .* from device",),
        "A step compiled by XLA (jit_compile=True) cannot reach variables of another device",
    ),
    Limit(
        (r"You must feed a value for placeholder tensor '(cond|while)",),
        "The strategy's collective all-reduce cannot run inside a condition or loop (optimizer variables "
        "created inside the tf.function, steps_per_execution)",
    ),
    Limit(
        (r"No OpKernel was registered to support Op 'Nccl",),
        "NCCL's all-reduce has no CPU kernel, so NcclAllReduce cannot be emulated",
    ),
    Limit(
        (
            r"IndexError: list index out of range",
            r"_get_static_batch_dim|batch_sizes_for_worker|rebatch|get_distributed_dataset",
        ),
        "A dataset whose elements are scalars cannot be distributed, because the strategy splits every "
        "element along its first axis",
    ),
    Limit((_NOT_DETERMINISTIC,), "On GPUs gpudist uses deterministic kernels, and TensorFlow has none for this operation"),
    Limit(
        (r"(?i)(when|if) determinism is enabled",),
        "On GPUs gpudist uses deterministic operations, and TensorFlow then refuses a random operation without a seed",
    ),
    Limit(
        (r"Cannot create a tensor proto whose content is larger than 2GB|larger than 2GB",),
        "A graph cannot hold a constant of 2 GB or more. An array that a tf.function or dataset.map uses from "
        "outside becomes one",
    ),
    Limit((r"has no attribute 'reset_states'",), "Keras 3 has no Metric.reset_states: this program was written for Keras 2"),
    Limit(
        (r"Binding inputs to tf.function failed .*'PerReplica' object has no attribute 'dtype'",),
        "In eager code strategy.run refuses a tf.function with an input_signature",
    ),
    Limit(
        (r"AttributeError: 'PerReplica' object has no attribute 'dtype'",),
        "The program computes, outside of strategy.run, with a value that each replica has its own copy of "
        "(an element of a distributed dataset, a result of strategy.run)",
    ),
    Limit((r"destinations can ?not be empty",), "The strategy cannot reduce a value that lies on no device"),
)


def _error_of(failure: str, limit: Limit) -> str:
    """Return the error that shows the fault, in one line: it ends where its brackets are closed."""
    lines = shorten_traceback(failure).splitlines()
    shows = [at for at, line in enumerate(lines) if any(re.search(pattern, line) for pattern in limit.patterns)]
    first = next((at for at in shows if "Error" in lines[at]), shows[-1] if shows else len(lines) - 1)
    text = ""
    for line in lines[first:]:
        text = f"{text} {line.strip()}".strip()
        if sum(map(text.count, "([{")) <= sum(map(text.count, ")]}")):
            break
    return text if len(text) <= _LETTERS else f"{text[: _LETTERS // 2]} ... {text[-_LETTERS // 2 :]}"


def _search_limit(case: Case) -> Sign | None:
    failure = case.outcome.failure
    if not failure:
        return None
    for limit in LIMITS:
        if all(re.search(pattern, failure) for pattern in limit.patterns):
            where = "also fails" if case.outcome.reference_failure else "does not fail"
            return Sign(f"{limit.heading}.", f"{_error_of(failure, limit)}\nOn one device the program {where}.", limit.heading)
    return None


FRAMEWORK_LIMIT = _cause("framework-limit", _search_limit, blame=(raised(),))


def _faults(recovery: Recovery) -> str:
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
    summary, text = "The program does not reach its end after a fault", f"{_faults(recovery)}; {_restarts(recovery)}"
    if recovery.at_odds:
        return Sign(
            f"{summary}: its hosts resumed from different steps.", f"{text}; {_each_resumed(recovery)}; then {how}", _AT_ODDS
        )
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
        f"{_faults(recovery)}; {_restarts(recovery)}; {len(names)} trained variables have their initial bits on "
        f"{'host' if len(hosts) == 1 else 'hosts'} {numbers(hosts)}; without the fault they have other values "
        f"{steps}",
    )


def _search_different(case: Case) -> Sign | None:
    recovery = case.recovery
    if recovery is None or recovery.result != "different":
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
            "After a fault the hosts resumed from different steps, and the program ends with a different result than "
            "without the fault.",
            f"{_faults(recovery)}; {_restarts(recovery)}; {_each_resumed(recovery)}; it differs {where}: {numbers}",
            _AT_ODDS,
        )
    return Sign(
        "After a fault the program ends with a different result than without it.",
        f"{_faults(recovery)}; {_restarts(recovery)}; it differs {where}: {numbers}",
        {"final-weight": _WHAT_IS_KEPT_BESIDE, "weight": _WHAT_UPDATES, "gradient": _WHERE_DATA_BEGIN}.get(first.kind),
    )


def _each_resumed(recovery: Recovery) -> str:
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
            f"{_faults(recovery)}; no restart; {optimizer} made {made} steps in all, {wanted} without the fault; the "
            "steps that both made agree",
            _ASKS_TO_BE_STARTED_AGAIN,
        )
    return Sign(
        f"After a fault the program runs {'fewer' if made < wanted else 'more'} steps than without it.",
        f"{_faults(recovery)}; {_restarts(recovery)}; {optimizer} made {made} steps in all, {wanted} without the "
        "fault; the steps that both made agree",
        _AS_MANY_STEPS,
    )


_WHAT_IS_KEPT_BESIDE = "If the final weights differ"
_WHAT_UPDATES = "If a weight differs first"
_WHERE_DATA_BEGIN = "If a gradient differs first"
_AS_MANY_STEPS = "If the number of steps differs"
_ASKS_TO_BE_STARTED_AGAIN = "If it ends after SIGTERM with exit code 0"
_AT_ODDS = "If the hosts resume from different steps"

NOT_RECOVERED = Cause("not-recovered", _search_not_recovered)

CHECKPOINT_NOT_RESTORED = Cause("checkpoint-not-restored", _search_not_restored, blame=(made("start", "restore"),))

RECOVERED_DIFFERENTLY = Cause("recovered-differently", _search_different, unless=("checkpoint-not-restored",))
