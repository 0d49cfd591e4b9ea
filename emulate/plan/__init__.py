"""Predict how fast and at what price a program trains on machines that are not here."""

from emulate.plan.collectives import BandwidthTable, Ring, all_reduce_seconds
from emulate.plan.links import Between, Inside, parse_between, parse_inside
from emulate.plan.machines import Machine, find_machine, machine_of
from emulate.plan.model import ALL_REDUCE, LOCAL_SERVERS, SERVERS, Estimate, StepModel, Work

__all__ = [
    "ALL_REDUCE",
    "LOCAL_SERVERS",
    "SERVERS",
    "BandwidthTable",
    "Between",
    "Estimate",
    "Inside",
    "Machine",
    "Ring",
    "StepModel",
    "Work",
    "all_reduce_seconds",
    "find_machine",
    "machine_of",
    "parse_between",
    "parse_inside",
]
