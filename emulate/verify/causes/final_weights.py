"""Weights that the program makes itself after its last step."""

from __future__ import annotations

from emulate.verify.arithmetic import ROUND
from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign, names_in_words, numbers
from emulate.verify.measure import changed_in_the_end, ends_of_hosts


def _search(case: Case) -> Sign | None:
    left = case.left()
    out = [point for point in left if point.measure.key.kind == "final-weight"]
    if len(out) < len(left):
        return None
    if not out:
        return _hosts_apart(case)
    case.explain(lambda point: point.measure.key.kind == "final-weight")
    names, runs, first = [p.measure.key.tensor for p in out], case.base.runs, out[0]
    changing = [set(changed_in_the_end(trace)) & set(names) for trace in (runs.topology, runs.reference)]
    if not all(changing):
        where = "here, and not on one device" if changing[0] else "on one device, and not here"
        what = f"When all steps are made the program puts other values in the place of {names_in_words(names)} {where}."
    else:
        factors = [point.factor for point in out]
        is_one = all(abs(factor - factors[0]) <= ROUND * abs(factors[0]) for factor in factors)
        times = f", but {factors[0]:.4g} times that" if is_one else ""
        what = f"What the program makes of {names_in_words(names)} in the end is not what it makes on one device{times}."
    m = first.measure
    return Sign(
        what,
        f"the weights agree after each of the {first.step} steps; in the end {m.key.tensor} is {m.value:.6g}, "
        f"{m.reference_value:.6g} on one device ({first.ratio:.0f} times the noise floor)",
    )


def _hosts_apart(case: Case) -> Sign | None:
    """What the first host puts in the place of its weights is right, and another host puts something else there."""
    ends = ends_of_hosts(case.untouched)
    apart = [name for name, hosts in ends.items() if len({end for end in hosts.values() if end is not None}) > 1]
    if not apart:
        return None
    known: dict[str, list[str]] = {}
    for host, end in ends[apart[0]].items():
        known.setdefault(end or "", []).append(f"host {host}")
    groups = numbers([f"({', '.join(hosts[:4])}{', ...' if hosts[4:] else ''})" for hosts in list(known.values())[:4]])
    return Sign(
        f"When all steps are made the hosts put different values in the place of {names_in_words(apart)}.",
        f"bits of {apart[0]} in the end: {groups} agree among themselves only; after the last step, all did",
    )


FINAL_WEIGHTS = Cause(
    code="final-weights",
    title="other weights put in the place of the trained ones",
    meaning="The program trains as on one device, and then puts something else in the place of the weights: an average over "
    "the steps, the best of some epochs, weights scaled, rounded or pruned. That is other than on one device: made of one "
    "replica's numbers, added up over the replicas, or chosen by a number that is not the same.",
    evidence="The weights agree after every step, and not those with which the program ends.",
    fix="Make it of what is the same on all replicas, once for all. A variable for an average is made in the strategy's scope "
    "and assigned outside of Strategy.run, or with an aggregation that does not count replicas:\n"
    "    average = tf.Variable(w, trainable=False, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)\n"
    "    average.assign(decay * average + (1 - decay) * w)\n"
    "What is chosen by a loss or a metric needs that number summed over all replicas and hosts. Keras's optimizers keep such "
    "an average themselves (use_ema=True), gpudist_core's steps too.",
    search=_search,
)
