"""Inject faults into a host (kill, stop, preempt, slow, disconnect, fill-disk, missing, late) or the links between hosts."""

from emulate.faults.hooks import install
from emulate.faults.text import check_fired, check_for, needs_links, never_fired, parse, parse_all
from emulate.faults.triggers import Board, HostFaults, check_disk
from emulate.faults.values import (
    EXAMPLES,
    KINDS,
    PHASES,
    AtStep,
    Disconnect,
    Fault,
    FillDisk,
    Fired,
    Kill,
    Late,
    Link,
    Missing,
    Preempt,
    Slow,
    Stop,
)

__all__ = [
    "EXAMPLES",
    "KINDS",
    "PHASES",
    "AtStep",
    "Board",
    "Disconnect",
    "Fault",
    "FillDisk",
    "Fired",
    "HostFaults",
    "Kill",
    "Late",
    "Link",
    "Missing",
    "Preempt",
    "Slow",
    "Stop",
    "check_disk",
    "check_fired",
    "check_for",
    "install",
    "needs_links",
    "never_fired",
    "parse",
    "parse_all",
]
