"""Detect random numbers without a seed, and random numbers that are equal on replicas or hosts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from emulate.trace import Step, Trace
from emulate.verify.case import Case
from emulate.verify.causes.cause import GENERAL, Cause, Sign
from emulate.verify.compared_runs import complete
from emulate.verify.gradients import StepOfAll
from emulate.verify.lines import made, operations
from emulate.verify.result import trace_of

_OF_OTHER_DRAWS = "If the random numbers are not those of Dropout"
_OF_RACES = "If all generators have a seed and the examples differ"


def _search_unseeded(case: Case) -> Sign | None:
    if not case.has("unexplained") and case.check_that_it_repeats():
        return None
    what = case.repeat_apart
    if what is None:
        return None
    return Sign(
        f"Two runs of the program on one device differ in {what}, although all known generators have a seed.",
        f"Two runs on 1x1 with the same seed differ in {what}, so gpudist cannot compare a run on several devices",
        [GENERAL, _OF_RACES] if "of the examples" in what else None,
        then=case.explain_start,
    )


def _search_dropout(case: Case) -> Sign | None:
    sign = _identical_in(case, case.untouched)
    if sign is None:
        return None
    own = trace_of(case.lab.vary_hosts(case.pair, "seeds"))  # hosts that are not seeded alike by us
    return None if own is not None and _identical_in(case, own) is None else sign


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
                f"In {len(same)} of {len(shared)} steps with random numbers all {number} {who} drew bit for bit the same "
                f"ones (digest {min(same[0])}); independent draws never agree",
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
        f"In {len(alike)} of {len(drawing)} steps with random numbers some replicas drew bit for bit the same "
        f"ones (first replicas {who}, digest {digest}); independent draws never agree. Replicas with another "
        "number of examples draw other numbers",
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
    # How many batches of a generator Keras's fit loses depends on time: then no two of its runs are alike.
    unless=("framework-limit",),
    blame=(made("examples", "generator", seeded=False),),
)

IDENTICAL_DROPOUT = Cause(
    "identical-dropout", _search_dropout, by_design=True, blame=(made("loss", "Dropout"), operations("loss", "draw"))
)


_MOST = 0.5
"""Streams of an augmentation move on at each step, those of a shuffle once an epoch; and most rows become others."""


def _search_augmentation(case: Case) -> Sign | None:
    ledger, trace = case.ledger, case.untouched
    if trace.num_hosts < 2 or ledger is None or ledger.grows or ledger.first_apart is None or ledger.identical_hosts:
        return None
    seen = ledger.samples.seen
    if ledger.foreign <= _MOST * seen:
        return None
    drawn = _stream(trace) or _stage(trace)
    if drawn is None:
        return None
    return Sign(
        "Every host draws the same random numbers for its examples: example i of every host's share gets the same ones.",
        f"{drawn}; the hosts take different examples, and {ledger.foreign} of {seen} have contents that one device never had",
    )


def _stream(trace: Trace) -> str | None:
    """Return a generator that all hosts seed the same and draw from in most steps."""
    by_host = [event["streams"] for _, event in trace.of("streams")]
    if len(by_host) < trace.num_hosts:
        return None
    for name, first in by_host[0].items():
        others = [streams.get(name) for streams in by_host]
        alike = [stream for stream in others if stream is not None and stream["seed"] == first["seed"]]
        if len(alike) < len(others):
            continue
        if all(stream.get("builds") for stream in alike):
            return f"{name} has the same seed on all {len(by_host)} hosts and draws while each of them makes its dataset"
        if all(stream["looks"] and stream["moved"] > _MOST * stream["looks"] for stream in alike):
            moved = min(stream["moved"] for stream in alike)
            return f"{name} has the same seed on all {len(by_host)} hosts and advanced in {moved} of {first['looks']} steps"
    return None


def _stage(trace: Trace) -> str | None:
    """Return a function of the pipeline that draws the same on all hosts, from its arguments or from the program's seeds."""
    seeded = {host for host, event in trace.of("seeded") if event["generator"] == "tensorflow"}
    drawing = {host: event.get("drawing", ()) for host, event in trace.of("program")}
    if len(drawing) < trace.num_hosts:
        return None
    common = [stage for stage in drawing[0] if all(stage in stages for stages in drawing.values())]
    for stage in common:
        if stage.get("function"):
            return f"{stage['stage']} draws by the position in the host's share, equally on all hosts"
        if len(seeded) == trace.num_hosts:
            seeds = ", ".join(f"({first}, {second})" for first, second in stage["seeds"][:2])
            more = " ..." if len(stage["seeds"]) > 2 else ""
            return f"{stage['stage']} draws with the seeds {seeds}{more} on all {len(drawing)} hosts"
    return None


IDENTICAL_AUGMENTATION = Cause(
    "identical-augmentation",
    _search_augmentation,
    unless=("unseeded-randomness", "unseeded-hosts"),
    blame=(made("examples", "generator", seeded=True), made("examples", "map")),
)
