"""Predict how fast and at what price a program trains on machines that are not here."""

from emulate.plan.collectives import BandwidthTable, Between, Inside, Ring, all_reduce_seconds, parse_between, parse_inside
from emulate.plan.forecast import Forecast, Row, make_forecast
from emulate.plan.machines import Machine, find_machine, machine_names, machine_of
from emulate.plan.memory import MemoryUse, StepMemory, memory_use, parse_memory
from emulate.plan.model import ALL_REDUCE, LOCAL_SERVERS, SERVERS, Estimate, StepModel, Work
from emulate.plan.recorded import (
    Gradient,
    InputRate,
    Measured,
    Recorded,
    check_all_reduce,
    parse_measured,
    parse_rate,
    read_recorded,
)

__all__ = [
    "ALL_REDUCE",
    "LOCAL_SERVERS",
    "SERVERS",
    "BandwidthTable",
    "Between",
    "Estimate",
    "Forecast",
    "Gradient",
    "InputRate",
    "Inside",
    "Machine",
    "Measured",
    "MemoryUse",
    "Recorded",
    "Ring",
    "Row",
    "StepMemory",
    "StepModel",
    "Work",
    "all_reduce_seconds",
    "check_all_reduce",
    "find_machine",
    "machine_names",
    "machine_of",
    "make_forecast",
    "memory_use",
    "parse_between",
    "parse_inside",
    "parse_measured",
    "parse_memory",
    "parse_rate",
    "read_recorded",
]
