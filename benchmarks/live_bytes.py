"""Print the peak of live bytes of a program's step, as RunMetadata shows it on the CPU with one inter-op thread.

Arguments: the program (a file or a module) with its own arguments. It leaves its compiled step as `train` and a batch as `batch`.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterable
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
        options = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE)
        session.run(fetched, feeds, options=options, run_metadata=metadata)
        return metadata


def _one_thread() -> Any:
    return v1.ConfigProto(inter_op_parallelism_threads=1, intra_op_parallelism_threads=1)


def _variable(variable: Any, number: int) -> Any:
    """Return a variable like another one, of ones: the values do not decide about memory."""
    initial = v1.ones_initializer()
    return v1.get_variable(f"v{number}", variable.shape, variable.dtype, initial, use_resource=True)


def peak(metadata: Any) -> int:
    """Return the largest sum of all buffers that live at the same time.

    A buffer that outlives the step replaces that of a variable, which was there before: it is not counted twice.
    """
    nodes = (node for device in metadata.step_stats.dev_stats for node in device.node_stats)
    records = (list(_freed(memory.allocation_records)) for node in nodes for memory in node.memory)
    live = highest = 0
    for _, size in sorted((pair for some in records for pair in some), key=lambda pair: pair[0]):
        live += size
        highest = max(highest, live)
    return highest


def _freed(records: Iterable[Any]) -> Iterable[tuple[int, int]]:
    """Return time and bytes of the allocations that end within the step, and of their ends (negative)."""
    left = [-record.alloc_bytes for record in records if record.alloc_bytes < 0]
    for record in records:
        if record.alloc_bytes > 0:
            if record.alloc_bytes not in left:
                continue
            left.remove(record.alloc_bytes)
        yield record.alloc_micros, record.alloc_bytes


if __name__ == "__main__":
    main()
