"""Detect a strategy with fewer replicas than devices, or no strategy."""

from __future__ import annotations

from emulate.topology import Topology
from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign
from emulate.verify.lines import Blame

_DEFAULT = "_DefaultDistributionStrategy"
"""TensorFlow's name of the default strategy, if a program creates none."""


def _search(case: Case) -> Sign | None:
    topology = case.untouched.topology
    strategies = {str(event["name"]) for _, event in case.untouched.of("strategy")} - {_DEFAULT}
    if not case.untouched.of("step"):
        return None
    if topology.num_ps:
        return _without_servers(topology, strategies)
    wanted, have = topology.num_replicas, case.num_replicas
    if have >= wanted:
        return None
    if topology.num_hosts > 1:
        case.cut(0, "every host trains its own model")
    name = ", ".join(sorted(strategies)) or "no strategy"
    who = name if strategies else "The default strategy"
    where = f" on each of {topology.num_hosts} hosts" if topology.num_hosts > 1 else ""
    evidence = f"{who} has num_replicas_in_sync = {have}{where}; {topology} has {wanted} devices"
    evidence += f"; the program hides GPUs ({case.outcome.hides})" if case.outcome.hides else ""
    fix = _fix(case, strategies)
    if topology.num_hosts > 1:
        return Sign(f"Each of the {topology.num_hosts} hosts trains its own model ({name}).", evidence, fix)
    return Sign(f"Only {have} of {wanted} devices train ({name}); the others are idle.", evidence, fix)


def _without_servers(topology: Topology, strategies: set[str]) -> Sign | None:
    """Check whether the coordinator trains alone, whatever workers and servers there are."""
    if any("ParameterServer" in name for name in strategies):
        return None
    name = ", ".join(sorted(strategies)) or "no strategy"
    return Sign(
        f"No worker and no parameter server of {topology} is used: the coordinator trains alone ({name}).",
        f"The program created {name}, but no ParameterServerStrategy",
        _OF_SERVERS,
    )


def _fix(case: Case, strategies: set[str]) -> str | None:
    if case.outcome.hides:
        return _HIDDEN
    return None if strategies else _OF_A_SCOPE


_HIDDEN = "If the program hides GPUs"
_OF_A_SCOPE = "If there is no strategy"
_OF_SERVERS = "If no parameter server is used"

# The first that the program makes: TensorFlow makes others for itself in its scope.
_MADE = Blame("start", lambda case: case.lines.made("strategy")[::-1])

REPLICAS_MISSING = Cause("replicas-missing", _search, runs_that_ended=True, blame=(_MADE,))
