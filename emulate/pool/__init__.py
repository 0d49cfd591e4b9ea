"""Keep clusters between jobs: hosts run job after job, each scope on hosts of its own."""

from emulate.pool.lease import Lease
from emulate.pool.loop import Reset
from emulate.pool.pool import Pool, Statistics
from emulate.pool.round import HostResult
from emulate.pool.upstream import before_runtime, keep_meeting

__all__ = ["HostResult", "Lease", "Pool", "Reset", "Statistics", "before_runtime", "keep_meeting"]
