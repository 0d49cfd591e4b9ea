"""Run hosts as processes: the pre-loaded parent that forks them, their isolation, supervision and end."""

from emulate.cluster.cluster import Cluster
from emulate.cluster.context import HostContext
from emulate.cluster.environ import is_read_at_import
from emulate.cluster.gpus import ask_before_waiting
from emulate.cluster.hang import Follower, Hang, HangJudge, HostState, explain_hang
from emulate.cluster.host import describe, note_no_route
from emulate.cluster.isolation import describe_isolation, take_names
from emulate.cluster.lives import (
    TEMPORARY_FAILURE,
    Standstill,
    asks_to_go_on,
    first_cause,
    follows_from_a_peer,
    is_for_ever,
    leaves_in_order,
    next_life,
    patience_after,
)
from emulate.cluster.parent import Preload
from emulate.cluster.plan import (
    FIRST_PORT,
    ClusterPlan,
    HostOutcome,
    Owner,
    RemoteError,
    check_function,
    check_time_limit,
    checked_environment,
    roles_of,
)
from emulate.cluster.sigterm import first_sigterm
from emulate.cluster.supervision import RunningCluster
from emulate.cluster.threads import Thread, waits_for
from emulate.cluster.views import remove_tree

__all__ = [
    "FIRST_PORT",
    "TEMPORARY_FAILURE",
    "Cluster",
    "ClusterPlan",
    "Follower",
    "Hang",
    "HangJudge",
    "HostContext",
    "HostOutcome",
    "HostState",
    "Owner",
    "Preload",
    "RemoteError",
    "RunningCluster",
    "Standstill",
    "Thread",
    "ask_before_waiting",
    "asks_to_go_on",
    "check_function",
    "check_time_limit",
    "checked_environment",
    "describe",
    "describe_isolation",
    "explain_hang",
    "first_cause",
    "first_sigterm",
    "follows_from_a_peer",
    "is_for_ever",
    "is_read_at_import",
    "leaves_in_order",
    "next_life",
    "note_no_route",
    "patience_after",
    "remove_tree",
    "roles_of",
    "take_names",
    "waits_for",
]
