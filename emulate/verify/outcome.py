"""Describe how a run ended."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Outcome:
    """Describe how the topology's run ended.

    Attributes:
        failure: The program's own traceback where it raised.
        raised: By host the traceback of what it raised.
        suspect: Of a hung run the code of the cause that the hang judge sees.
        where: Of a hung run what each host was doing.
        hung: `hang` or `timeout` where it had to be ended.
        hosts: By host how it ended: returned, raised, exited, killed, or ended (by us).
        codes: Exit codes, negative for a signal, of hosts that ended by themselves.
        stacks: Python stacks of the hosts that hung.
        reference_failure: The reference's traceback where it raised too.
        collectives: By host the collectives that its program has, each as often as it has it.
        saved: By checkpoint or model that was written, the hosts that did.
        cut: Hosts, of either run, whose process ended before what they had recorded was written.
        hides: How the program hides GPUs from itself.
    """

    failure: str | None = None
    raised: Mapping[int, str] = field(default_factory=dict)
    hung: str | None = None
    hosts: Mapping[int, str] = field(default_factory=dict)
    codes: Mapping[int, int | None] = field(default_factory=dict)
    stacks: Mapping[int, str] = field(default_factory=dict)
    reference_failure: str | None = None
    suspect: str | None = None
    where: str = ""
    collectives: Mapping[int, Sequence[str]] = field(default_factory=dict)
    saved: Mapping[str, Collection[int]] = field(default_factory=dict)
    cut: Collection[int] = ()
    hides: str | None = None
