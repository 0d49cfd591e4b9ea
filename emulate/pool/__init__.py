"""Keep clusters warm between jobs, indistinguishable from fresh ones."""

from emulate.pool.keep import before_runtime, keep_meeting, keep_state, restore_state
from emulate.pool.lease import Lease
from emulate.pool.pool import Pool, Statistics
from emulate.pool.result import HostResult

__all__ = ["HostResult", "Lease", "Pool", "Statistics", "before_runtime", "keep_meeting", "keep_state", "restore_state"]
