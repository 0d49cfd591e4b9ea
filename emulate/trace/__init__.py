"""Write what a run records, and read it: with NumPy alone, on any machine."""

from emulate.trace.examples import entries_of_examples, joined, num_rows, parts_of, row_names, row_positions
from emulate.trace.facts import TABLE, Facts
from emulate.trace.files import TraceWriter, check_intact
from emulate.trace.format import (
    SO_FAR,
    Array,
    Report,
    Shard,
    Step,
    StoredArray,
    Trace,
    Variable,
    digest,
    local_slice,
    part_of,
)

__all__ = [
    "SO_FAR",
    "TABLE",
    "Array",
    "Facts",
    "Report",
    "Shard",
    "Step",
    "StoredArray",
    "Trace",
    "TraceWriter",
    "Variable",
    "check_intact",
    "digest",
    "entries_of_examples",
    "joined",
    "local_slice",
    "num_rows",
    "part_of",
    "parts_of",
    "row_names",
    "row_positions",
]
