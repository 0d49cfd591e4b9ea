"""Print the peak of live bytes of a program's step, as RunMetadata shows it on the CPU with one inter-op thread.

Arguments: the program (a file or a module) and its own arguments. Its compiled step is named `train`, a batch `batch`.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1


def main() -> None:
    """Run the program, then its step once more in a session, whose metadata holds each allocation."""
    program = sys.argv[1]
    del sys.argv[0]
    names = runpy.run_path(program) if program.endswith(".py") else runpy.run_module(program, run_name="__main__")
    print(peak(metadata_of(names["train"], names["batch"])))


def metadata_of(step: Any, batch: Any) -> Any:
    """Return the RunMetadata of the second call of a step.

    Args:
        step: A tf.function.
        batch: Its argument.
    """
    concrete = step.get_concrete_function(batch)
    values = iter([np.asarray(tensor) for tensor in tf.nest.flatten(batch, expand_composites=True)])
    captured = {inner.name: outer for outer, inner in concrete.graph.captures}
    constants = {name: outer.numpy() for name, outer in captured.items() if outer.dtype != tf.resource}
    with tf.Graph().as_default(), v1.Session(config=_one_thread()) as session:
        given, feeds = {}, {}
        for inner in concrete.graph.inputs:
            if inner.name in constants:
                given[inner.name] = tf.constant(constants[inner.name])
            elif inner.name in captured:
                variable = next(one for one in concrete.graph.variables if one.handle is captured[inner.name])
                given[inner.name] = _variable(variable, len(given)).handle
            else:
                value = next(values)
                given[inner.name] = v1.placeholder(value.dtype, value.shape)
                feeds[given[inner.name]] = value
        tf.graph_util.import_graph_def(concrete.graph.as_graph_def(), given, name="step")
        graph = v1.get_default_graph()
        fetched = [graph.get_operation_by_name(f"step/{op.name}") for op in concrete.graph.control_outputs]
        session.run(v1.global_variables_initializer())
        session.run(fetched, feeds)
        metadata = v1.RunMetadata()
        options = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE, output_partition_graphs=True)
        session.run(fetched, feeds, options=options, run_metadata=metadata)
        return metadata


def _one_thread() -> Any:
    return v1.ConfigProto(inter_op_parallelism_threads=1, intra_op_parallelism_threads=1)


def _variable(variable: Any, number: int) -> Any:
    """Return a variable like another one, of ones: the values do not decide about memory."""
    initial = v1.ones_initializer()
    return v1.get_variable(f"v{number}", variable.shape, variable.dtype, initial, use_resource=True)


def peak(metadata: Any) -> int:
    """Return the largest sum of all buffers of a step that live at the same time, beside the variables.

    Where a step assigns a variable that is still read (copy on write), the new buffer outlives the step. The old one is from
    before the step: no record tells that it is freed after the last read.
    """
    read = _last_reads(metadata)
    events: list[tuple[int, int]] = []
    for node in (node for device in metadata.step_stats.dev_stats for node in device.node_stats):
        records = [(one.alloc_micros, one.alloc_bytes) for memory in node.memory for one in memory.allocation_records]
        left = sum(size for _, size in records)
        events += [*records, *([(max(records[0][0], read.get(node.node_name, 0)), -left)] if left else [])]
    return max(np.cumsum([size for _, size in sorted(events, key=lambda event: event[0])]))


def _last_reads(metadata: Any) -> dict[str, int]:
    """Return, for each operation, when the variable that it assigns was read for the last time, in microseconds."""
    nodes = {node.name: node for graph in metadata.partition_graphs for node in graph.node}
    stats = (node for device in metadata.step_stats.dev_stats for node in device.node_stats)
    ends = {one.node_name: one.all_start_micros + one.all_end_rel_micros for one in stats}
    last: dict[str, int] = {}
    for node in nodes.values():
        for origin in (nodes.get(name.lstrip("^").partition(":")[0]) for name in node.input):
            if origin is not None and origin.op == "ReadVariableOp":
                last[origin.input[0]] = max(last.get(origin.input[0], 0), ends.get(node.name, 0))
    return {name: last.get(node.input[0], 0) for name, node in nodes.items() if node.input}


if __name__ == "__main__":
    main()
