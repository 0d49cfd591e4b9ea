"""A strategy with fewer replicas than there are devices, or none."""

from __future__ import annotations

from emulate.topology import Topology
from emulate.verify.case import Case
from emulate.verify.causes.cause import Cause, Sign

_DEFAULT = "_DefaultDistributionStrategy"
"""What TensorFlow calls it when a program makes none."""


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
        case.cut(0, "every host trains a model of its own")
    name = ", ".join(sorted(strategies)) or "no strategy"
    who = name if strategies else "The default strategy"
    where = f" on each of {topology.num_hosts} hosts" if topology.num_hosts > 1 else ""
    evidence = f"{who} has num_replicas_in_sync = {have}{where}, {topology} has {wanted} devices"
    fix = _fix(case, strategies)
    if topology.num_hosts > 1:
        return Sign(f"Each of the {topology.num_hosts} hosts trains a model of its own ({name}).", evidence, fix)
    return Sign(f"{have} of {wanted} devices train ({name}); the others are idle.", evidence, fix)


def _without_servers(topology: Topology, strategies: set[str]) -> Sign | None:
    """The coordinator trains by itself, whatever workers and servers there are."""
    if any("ParameterServer" in name for name in strategies):
        return None
    name = ", ".join(sorted(strategies)) or "no strategy"
    return Sign(
        f"No worker and no parameter server of {topology} is used: the coordinator trains alone ({name}).",
        f"The program made {name}, and no ParameterServerStrategy",
        _OF_SERVERS.format(without=str(topology).split("+")[0]),
    )


def _fix(case: Case, strategies: set[str]) -> str | None:
    if case.outcome.hides:
        return _HIDDEN.format(how=case.outcome.hides)
    return None if strategies else _OF_A_SCOPE


_HIDDEN = (
    "Let the program see the GPUs that are to train ({how}). Where it is meant to train on fewer, verify the topology that it "
    "is meant for."
)
_OF_A_SCOPE = (
    "Make a strategy, and in its scope the model and its optimizer:\n"
    "    strategy = tf.distribute.MirroredStrategy()  # on several hosts MultiWorkerMirroredStrategy()\n"
    "    with strategy.scope():\n"
    "        model = build_model()\n"
    "        model.compile(...)  # fit goes on as it is; a loop of one's own calls strategy.run\n"
    "Batches are split among the replicas: give fit, or the dataset, the rows of all."
)
_OF_SERVERS = (
    "Verify it on {without}. For workers and parameter servers make "
    "tf.distribute.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver()), and let a "
    "tf.distribute.coordinator.ClusterCoordinator, or fit, schedule the steps."
)

REPLICAS_MISSING = Cause(
    code="replicas-missing",
    title="devices that do not train",
    meaning="The strategy has fewer replicas than the topology has devices: a strategy for one host on several hosts (each "
    "trains a model of its own and nobody notices), a device list written by hand, GPUs that the program hides, no strategy at "
    "all; or workers and parameter servers that no ParameterServerStrategy uses.",
    evidence="num_replicas_in_sync of the strategy that the program made, against the devices of the topology.",
    fix="On several hosts use tf.distribute.MultiWorkerMirroredStrategy(); on one, MirroredStrategy() without a device list. "
    "Assert it: assert strategy.num_replicas_in_sync == EXPECTED",
    search=_search,
    runs_that_ended=True,
)
