"""Run hosts as processes: the pre-loaded parent that forks them, their isolation, supervision and end, and warm hosts."""

from emulate.cluster.cluster import Cluster
from emulate.cluster.context import HostContext
from emulate.cluster.environ import read_at_import
from emulate.cluster.hang import Hang, HangJudge
from emulate.cluster.isolation import describe_isolation, take_names
from emulate.cluster.parent import Preload
from emulate.cluster.plan import FIRST_PORT, ClusterPlan, HostOutcome
from emulate.cluster.pool import Lease, Pool
from emulate.cluster.restarts import (
    TEMPORARY_FAILURE,
    Standstill,
    asks_to_go_on,
    first_cause,
    first_sigterm,
    follows_from_a_peer,
    leaves_in_order,
    next_life,
    patience_after,
)
from emulate.cluster.session import HostResult
from emulate.cluster.supervision import RunningCluster
from emulate.cluster.upstream import before_runtime, keep_meeting
from emulate.cluster.views import remove_tree
from emulate.cluster.warm_host import Reset

__all__ = [
    "FIRST_PORT",
    "TEMPORARY_FAILURE",
    "Cluster",
    "ClusterPlan",
    "Hang",
    "HangJudge",
    "HostContext",
    "HostOutcome",
    "HostResult",
    "Lease",
    "Pool",
    "Preload",
    "Reset",
    "RunningCluster",
    "Standstill",
    "asks_to_go_on",
    "before_runtime",
    "describe_isolation",
    "first_cause",
    "first_sigterm",
    "follows_from_a_peer",
    "keep_meeting",
    "leaves_in_order",
    "next_life",
    "patience_after",
    "read_at_import",
    "remove_tree",
    "take_names",
]
