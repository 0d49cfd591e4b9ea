"""Say where the functions of a trace lie, and whether its steps can be evaluated by them.

In the folder `host-0/functions` of a trace:

- `state/0.float32.npy`: the first value of each variable that a function reads or assigns, by its number and type;
- `0/graph.pb`: a GraphDef with everything that the recorded tensors of a step are computed from;
- `0/function.json`: its records (kind, about, tensors), its captures (tensor, number of the variable), the tensors of the whole
  batch that it reads outside of `Strategy.run` (key, tensor), and its reductions over the replicas; or a refusal;
- `0/constants.npz`: captured tensors that are no variables, by their place in the captures.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from emulate.probe.trace import Trace

_NOT_IN_A_GRAPH = "its steps are made in eager code"
_CHANGED_ELSEWHERE = "another function of the program assigns variables that its step reads"
_ROWS_LEFT_OUT = "the examples of a step were not kept whole"


def folder_of(trace: Path) -> Path:
    """Return the folder of the functions of a run with one host."""
    return trace / "host-0" / "functions"


def state_of(functions: Path) -> Path:
    """Return the folder of the first values in the folder of the functions."""
    return functions / "state"


def described(trace: Path, number: int) -> dict[str, Any]:
    """Return what `function.json` says."""
    description: dict[str, Any] = json.loads((folder_of(trace) / str(number) / "function.json").read_text(encoding="utf-8"))
    return description


def fixed_batches(trace: Trace) -> set[int]:
    """Return the sizes of the batches for which the functions of a trace were made; nothing where they take any."""
    numbers = {event["function"] for _, event in trace.of("step")}
    records = [record for number in numbers for record in described(trace.directory, number)["records"]]
    inputs = (shape for record in records for key, _, _, shape in record["tensors"] if key[0] == "input")
    return {shape[0] for shape in inputs if shape and shape[0] is not None}


def counts_the_batch(trace: Trace) -> bool:
    """Return whether a step computes with a number that its function makes of the whole batch, outside of `Strategy.run`."""
    numbers = {event["function"] for _, event in trace.of("step") if "function" in event}
    return any(described(trace.directory, number).get("whole") for number in numbers)


def is_eager(trace: Trace) -> bool:
    """Return whether the program makes its steps in eager code."""
    events = trace.of("step")
    return trace.num_hosts == 1 and bool(events) and not any("function" in event for _, event in events)


def refusal(trace: Trace) -> str | None:
    """Return why the steps of a trace cannot be evaluated by functions; None where they can."""
    events = trace.of("step")
    numbers = {event["function"] for _, event in events if "function" in event}
    if trace.num_hosts != 1 or not events or any("function" not in event for _, event in events):
        return _NOT_IN_A_GRAPH
    functions = {number: described(trace.directory, number) for number in sorted(numbers)}
    if (why := next((function["refusal"] for function in functions.values() if "refusal" in function), None)) is not None:
        return str(why)
    # A function is cut with the assignments of the variables that it reads. Those of variables that only another one reads
    # (one function accumulates, another applies) are not evaluated, and neither is a function that makes no step.
    read = {number: {variable for _, variable in function["captures"]} for number, function in functions.items()}
    changes = [(event["variable"], event["function"]) for _, event in trace.of("changed-in-a-graph")]
    read_by_any = set().union(*read.values())
    if any(variable in read_by_any and variable not in read.get(function, ()) for variable, function in changes):
        return _CHANGED_ELSEWHERE
    steps = [step for name in trace.optimizers for replicas in trace.steps(name) for step in replicas.values()]
    are_whole = all(array is not None and array.is_complete for step in steps for array in step.inputs)
    return None if are_whole else _ROWS_LEFT_OUT
