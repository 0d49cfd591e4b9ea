"""Cut what a replica does into the functions between its meetings with the other replicas."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from emulate.devices import upstream
from emulate.errors import UsageError

_CROSSES = (
    "What a virtual replica does before it meets the others must not depend on what it does afterwards. Received: a program in "
    "which the operation {name} does (a loop or a condition whose gradient is taken after a sum over the replicas). "
    "Verify it without --virtual."
)


@dataclass(frozen=True)
class ReplicaStage:
    """Hold one function of a replica, and the tensors of the replica's graph that it takes and gives."""

    function: Any
    inputs: list[Any]
    outputs: list[Any]


def cut(
    graph: Any,
    meetings: Sequence[int],
    given: Sequence[Any],
    placeholders: Sequence[Any],
    ends: Sequence[Any],
    must_run: set[str],
) -> list[ReplicaStage | None]:
    """Cut a replica's graph into stages.

    Args:
        graph: What the replica does.
        meetings: How many operations it had made before each meeting.
        given: What it brings to them.
        placeholders: The tensors that come from outside, or back from a meeting.
        ends: What it returns.
        must_run: Names of operations that are executed although nothing needs their results.

    Returns:
        A function for each stretch before, between and after the meetings; None where nothing is done.

    Raises:
        UsageError: When an earlier stage depends on a later one.
    """
    operations = graph.get_operations()
    outside = {tensor.op.name for tensor in placeholders}
    made = {op.name: bisect.bisect_right(meetings, place) for place, op in enumerate(operations)}
    stage_of = {name: stage for name, stage in made.items() if name not in outside}
    needed: list[dict[str, Any]] = [{} for _ in range(len(meetings) + 1)]
    bodies: list[list[Any]] = [[] for _ in needed]

    def need(tensor: Any, stage: int) -> None:
        source = stage_of.get(tensor.op.name)
        if source is not None and source != stage:
            needed[source][tensor.name] = tensor

    for op in (op for op in operations if op.name in stage_of):
        stage = stage_of[op.name]
        bodies[stage].append(op)
        for tensor in op.inputs:
            if stage_of.get(tensor.op.name, -1) > stage:
                raise UsageError(_CROSSES.format(name=op.name))
            need(tensor, stage)
    for tensor in (*given, *ends):
        need(tensor, len(needed))
    definition = graph.as_graph_def()
    return [
        _stage(graph, definition, body, list(outputs.values()), [op for op in body if op.name in must_run])
        for body, outputs in zip(bodies, needed, strict=True)
    ]


def _stage(graph: Any, whole: Any, body: Sequence[Any], outputs: list[Any], must_run: Sequence[Any]) -> ReplicaStage | None:
    """Return the function of some operations of a replica's graph."""
    import tensorflow as tf

    if not outputs and not must_run:
        return None
    own = {op.name for op in body}
    inputs = list({tensor.name: tensor for op in body for tensor in op.inputs if tensor.op.name not in own}.values())
    definition = tf.compat.v1.GraphDef(versions=whole.versions)
    for node in (node for node in whole.node if node.name in own):
        kept = definition.node.add()
        kept.CopyFrom(node)
        kept.device = ""  # all are on one device, whichever replica calls
        kept.attr.pop("_class", None)
        del kept.input[:]
        kept.input.extend(name for name in node.input if not name.startswith("^") or name[1:] in own)
    function = upstream.function_graph("virtual_stage")
    upstream.take_functions(function, graph)
    with function.as_default():
        places = [tf.compat.v1.placeholder(tensor.dtype, tensor.shape, "virtual_input") for tensor in inputs]
        for place, tensor in zip(places, inputs, strict=True):
            upstream.copy_handle_data(tensor, place)
        mapped = {tensor.name: place for tensor, place in zip(inputs, places, strict=True)}
        wanted = [*(tensor.name for tensor in outputs), *(op.name for op in must_run)]
        imported = tf.graph_util.import_graph_def(definition, mapped, return_elements=wanted, name="")
    function.inputs, function.outputs = places, imported[: len(outputs)]
    function.control_outputs = imported[len(outputs) :]
    return ReplicaStage(upstream.add_function(graph.outer_graph, function, keeps_apart=True), inputs, outputs)
