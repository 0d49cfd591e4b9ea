"""Record a program while it runs, and write the trace."""

from emulate.probe.batch_norm import CENTERED, SYNCHRONIZED, by_share, rows_of_shares, splits_of
from emulate.probe.functions import count_operations, counts_the_batch, evaluate, fixed_batches, is_eager, refusal
from emulate.probe.paths import Paths
from emulate.probe.plan import IN_32_BITS, SAME_ON_ONE_DEVICE, TAPES_JOINED, Follow, ProbePlan, Replay
from emulate.probe.probe import Probe
from emulate.probe.progress_monitor import Pulse
from emulate.probe.replay import common_input
from emulate.probe.trace import FORMAT, Report, Step, StoredArray, Trace, Variable, digest
from emulate.probe.trace_files import TraceWriter, check_intact

__all__ = [
    "CENTERED",
    "FORMAT",
    "IN_32_BITS",
    "SAME_ON_ONE_DEVICE",
    "SYNCHRONIZED",
    "TAPES_JOINED",
    "Follow",
    "Paths",
    "Probe",
    "ProbePlan",
    "Pulse",
    "Replay",
    "Report",
    "Step",
    "StoredArray",
    "Trace",
    "TraceWriter",
    "Variable",
    "by_share",
    "check_intact",
    "common_input",
    "count_operations",
    "counts_the_batch",
    "digest",
    "evaluate",
    "fixed_batches",
    "is_eager",
    "refusal",
    "rows_of_shares",
    "splits_of",
]
