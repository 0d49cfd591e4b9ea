"""Measure what a program made of its weights after its last step: averages, or the best ones."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from emulate.probe.trace import StoredArray, Trace
from emulate.verify.arrays import aligned, eps_of, is_numeric
from emulate.verify.compared_runs import Runs, as_many_steps, complete
from emulate.verify.gradients import weight_of
from emulate.verify.measure import Measure, measure, same_shape
from emulate.verify.noise import Key


def changed_in_the_end(trace: Trace) -> list[str]:
    """Return trained variables whose values the program replaced after all steps."""
    return list(dict.fromkeys([*(name for _, event in trace.of("left") for name in event["changed"]), *_unseen_updates(trace)]))


def _unseen_updates(trace: Trace) -> list[str]:
    """Return variables that are updated outside of the steps and whose last update nobody saw."""
    steps = (local for name in trace.optimizers for step in complete(trace, name) for local in step.values())
    return list(dict.fromkeys(name for step in steps for name in step.outside if name not in step.weights))


def ends_of_hosts(trace: Trace) -> dict[str, dict[int, str | None]]:
    """Return, with several hosts, each host's digest of its final value of them; None without one."""
    if trace.num_hosts < 2:
        return {}
    changed = {(host, event["replica"]): event["changed"] for host, event in trace.of("left")}
    ends: dict[str, dict[int, str | None]] = {name: {} for name in changed_in_the_end(trace)}
    for place, variables in trace.variables("left").items():
        for name, by_host in ends.items():
            by_host.setdefault(place[0], variables[name].digest if name in changed[place] and name in variables else None)
    return ends


def left_to_compare(runs: Runs) -> list[str]:
    """Return those that one of the runs has changed, if both ended after equally many steps."""
    if not all(any(True for _ in trace.of("left")) for trace in (runs.topology, runs.reference)) or not as_many_steps(runs):
        return []
    changed = dict.fromkeys([*changed_in_the_end(runs.reference), *changed_in_the_end(runs.topology)])
    unseen = {*_unseen_updates(runs.reference), *_unseen_updates(runs.topology)}
    return [name for name in changed if name not in unseen]


def final_weights(runs: Runs) -> Iterator[Measure]:
    """Yield the measures of what the program made of its weights after the last step: averages, or the best ones."""
    names = left_to_compare(runs)
    ended = [_ended_with(trace, names) for trace in (runs.topology, runs.reference, *runs.others)] if names else []
    step = max((len(runs.pairs(name)) for name in runs.optimizers), default=0)
    for name in names:
        ours, theirs, *beside = [weights.get(name) for weights in ended]
        if ours is None or theirs is None or not is_numeric(theirs) or not same_shape([ours, theirs]):
            continue
        first, second, *noise = aligned([ours, theirs, *(theirs if array is None else array for array in beside)])
        key, eps, many = Key("final-weight", "", name), eps_of(theirs.dtype), len(runs.noise)
        yield measure(key, step, first, second, noise[:many], noise[many:], eps=eps)


def _ended_with(trace: Trace, names: Collection[str]) -> dict[str, StoredArray]:
    """Return the final values of these variables on the first replica of the first host."""
    steps = [all_steps[-1] for name in trace.optimizers if (all_steps := complete(trace, name))]
    trained = {name: array for step in steps for name in names if (array := weight_of(step, name)) is not None}
    first = next(iter(trace.variables("left").values()), {})
    changed = next((event["changed"] for _, event in trace.of("left")), ())
    return trained | {n: v.array for n, v in first.items() if n in changed and n in names and v.array is not None}
