"""Detect random numbers without a seed, and random numbers that are equal everywhere."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from emulate.probe.trace import Step, Trace
from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign
from emulate.verify.compare import compare_enough
from emulate.verify.compared_runs import complete
from emulate.verify.gradients import StepOfAll
from emulate.verify.lines import made, operations
from emulate.verify.repeats import differing

_OF_OTHER_DRAWS = "If the random numbers are not those of Dropout"


def _search_unseeded(case: Case) -> Sign | None:
    may_differ = case.has("unexplained") or not case.seems_to_repeat
    if not may_differ or case.repeat is None:
        return None
    what = differing(case.plain, case.repeat) or drifted(case)
    if what is None:
        return None
    return Sign(
        f"Two runs of the program on one device differ in {what}, although all known generators have a seed.",
        f"Two runs on 1x1 with the same seed differ in {what}, so gpudist cannot compare a run on several devices",
    )


def drifted(case: Case) -> str | None:
    """Return other numbers from the same examples, weights and draws, beyond the effect of threads."""
    assert case.repeat is not None
    comparison = compare_enough(case.plain, case.repeat, case.noise)
    if comparison.is_equivalent_but_for_kinks or comparison.first is None:
        return None
    kinds = "losses" if comparison.first.kind == "loss" else f"{comparison.first.kind}s"
    return f"the {kinds} (first {comparison.first.tensor} in step {comparison.first.step})"


def _search_identical(case: Case) -> Sign | None:
    sign = _identical_in(case, case.untouched)
    if sign is None:
        return None
    own = case.with_own_seeds  # hosts that are not seeded alike by us
    is_ours = own is not None and own.status == "ok" and own.trace is not None and _identical_in(case, own.trace) is None
    return None if is_ours else sign


def _identical_in(case: Case, trace: Trace) -> Sign | None:
    """Check for draws of a run that are equal on replicas or hosts."""
    steps = [step for name in trace.optimizers for step in complete(trace, name)]
    where = f" ({', '.join(case.facts.dropout[:2])})" if case.facts.dropout else ""
    what = "mask" if case.facts.dropout else "numbers"
    kinds: tuple[tuple[str, str, Callable[[Step], int]], ...] = (
        ("replicas", "shard", lambda local: local.replica),
        ("hosts", "host's share", lambda local: local.host),
    )
    for who, part, owner in kinds:
        shared = [draws for step in steps if (draws := _shared(step, owner)) is not None]
        same = [draws for draws in shared if draws]
        if same:
            number = len({owner(local) for local in steps[0].values()})
            return _sign(
                case,
                f"All {who} draw the same random numbers{where}: example i of every {part} gets the same {what}.",
                (
                    f"In {len(same)} of {len(shared)} steps with random numbers all {number} {who} drew bit for bit the same "
                    f"ones (digest {min(same[0])}); independent draws never agree"
                ),
            )
    return _search_some(case, steps, where, what)


def _search_some(case: Case, steps: Sequence[StepOfAll], where: str, what: str) -> Sign | None:
    """Check for some replicas that draw the same: draws for a shard of another size have another shape."""
    drawing = [step for step in steps if any(map(_of_rows, step.values()))]
    alike = [groups for step in drawing if (groups := _groups(step))]
    if not alike:
        return None
    digest, group = min(alike[0].items(), key=lambda item: (-len(item[1]), item[1]))
    who = ", ".join(str(replica) for replica in group)
    return _sign(
        case,
        f"Replicas {who} draw the same random numbers{where}: example i of each of them gets the same {what}.",
        (
            f"In {len(alike)} of {len(drawing)} steps with random numbers some replicas drew bit for bit the same "
            f"ones (first replicas {who}, digest {digest}); independent draws never agree. Replicas with another "
            "number of examples draw other numbers"
        ),
    )


def _sign(case: Case, summary: str, evidence: str) -> Sign:
    """Return what was seen. A program without dropout has no mask to draw."""
    return Sign(summary, evidence, None if case.facts.dropout else _OF_OTHER_DRAWS)


def _of_rows(local: Step) -> list[str]:
    """Return the draws for examples: what is drawn for a batch as a whole is the same on one device, too."""
    return [draw for draw in dict.fromkeys(local.draws) if "=" not in draw]


def _groups(step: StepOfAll) -> dict[str, list[int]]:
    """Return the replicas of each draw that more than one replica made."""
    by_draw: dict[str, list[int]] = defaultdict(list)
    for replica, local in sorted(step.items()):
        for draw in _of_rows(local):
            by_draw[draw].append(replica)
    return {draw: replicas for draw, replicas in by_draw.items() if len(replicas) > 1}


def _shared(step: StepOfAll, owner: Callable[[Step], int]) -> set[str] | None:
    """Return the draws that all owners made; None with one owner, or if the first made none."""
    draws: dict[int, set[str]] = {}
    for _, local in sorted(step.items()):
        draws.setdefault(owner(local), set()).update(_of_rows(local))
    each = list(draws.values())
    return set.intersection(*each) if len(each) > 1 and each[0] else None


UNSEEDED = Cause(
    "unseeded-randomness",
    _search_unseeded,
    blame=(made("examples", "generator", seeded=False),),
)

IDENTICAL_DROPOUT = Cause(
    "identical-dropout",
    _search_identical,
    by_design=True,
    blame=(
        made("loss", "Dropout"),
        operations("loss", "draw"),
    ),
)
