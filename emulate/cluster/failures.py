"""Find the host whose end explains why a cluster failed: the first to raise has often only lost a peer."""

from __future__ import annotations

import re
from collections.abc import Sequence

from emulate.cluster.plan import HostOutcome

PEER_IS_GONE = re.compile(
    r"Socket closed|Connection reset by peer|tasks are unhealthy|failed to connect to all|GOAWAY|Connection refused"
    r"|heartbeat|Broken pipe|UNAVAILABLE|Collective ops is aborted by"
)
"""TensorFlow's errors on a host whose peer exited, or did something else than it."""
TEMPORARY_FAILURE = 75
"""The exit code (EX_TEMPFAIL) by which a program asks to be started again, as gpudist_core's Preempted does."""
PEER_SECONDS = 1.0
"""Seconds to wait, after such an error, for the end of the peer."""
SAVING_SECONDS = 10.0
"""Seconds for the other hosts to exit after one has exited normally."""

_CHATTER = re.compile(
    r"I\d{4} \d\d:\d\d:\d|/job:\w+/replica:\d+/task:\d+$|WARNING: All log messages before absl|E\d{4}.*failed call to cuInit"
)


def telling(text: str, most: int = 20) -> list[str]:
    """Return the last lines of a host's output, without TensorFlow's lines that report no problem."""
    return [line for line in text.splitlines() if line.strip() and not _CHATTER.match(line)][-most:]


def has_failed(outcome: HostOutcome) -> bool:
    """Return whether an outcome is a failure."""
    return outcome.status not in ("returned", "missing", "ended") and (outcome.status, outcome.code) != ("exited", 0)


def follows_from_a_peer(outcome: HostOutcome) -> bool:
    """Return whether a host raised because another was gone: the other host's end explains more."""
    return outcome.error is not None and bool(PEER_IS_GONE.search(outcome.error.traceback_text + outcome.error.message))


def leaves_in_order(outcome: HostOutcome) -> bool:
    """Return whether a host left to be restarted. Its peers leave too, once they have saved."""
    return outcome.status == "exited" and outcome.code == TEMPORARY_FAILURE


def patience_after(outcome: HostOutcome) -> float:
    """Return for how many seconds to wait for the ends of other hosts after one has failed."""
    if leaves_in_order(outcome):
        return SAVING_SECONDS
    return PEER_SECONDS if follows_from_a_peer(outcome) else 0.0


def first_cause(outcomes: Sequence[HostOutcome]) -> HostOutcome | None:
    """Return the failure that explains most: a host that left, else an error that is not about a peer, else the first."""
    failed = [outcome for outcome in outcomes if has_failed(outcome)]
    return min(failed, key=follows_from_a_peer, default=None)
