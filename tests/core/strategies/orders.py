"""Whether a compiled step still reads each variable before it updates it, once TensorFlow has optimized its graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

Pairs = set[tuple[str, str]]


def lost_orders(summed: Callable[[list[Any]], list[Any]]) -> int:
    """Reads and updates of one variable that have an order when a step of a critic is traced, and none when it is optimized.

    Args:
        summed: Adds up the replicas' gradients, in a replica.

    Returns:
        How many pairs.
    """
    import tensorflow as tf

    from tests.core.strategies.sums import split_cpu

    split_cpu(2)
    operation = tf.distribute.ReductionToOneDevice()
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=operation)
    with strategy.scope():
        shapes = [(6, 8), (8, 1)]
        weights = [tf.Variable(tf.ones(s), aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA) for s in shapes]

    def critic(x: Any) -> Any:
        return tf.reduce_mean(tf.tanh(x @ weights[0]) @ weights[1])  # linear in the last weights: their gradient needs them not

    def step(x: Any, share: Any) -> None:
        with tf.GradientTape() as tape:
            loss = (critic(x) - critic(x * 0.5)) * share
        for weight, gradient in zip(weights, summed(tape.gradient(loss, weights)), strict=True):
            weight.assign_sub(0.1 * gradient)

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([12, 6]), tf.TensorSpec([])])
    def train(x: Any, share: Any) -> None:
        strategy.run(step, (x, share))

    graph = train.get_concrete_function().graph
    as_traced = graph.as_graph_def()
    return len(_ordered(as_traced) - _ordered(_optimized(graph)))


def _optimized(graph: Any) -> Any:
    import tensorflow as tf
    from tensorflow.core.protobuf import config_pb2
    from tensorflow.python.grappler import tf_optimizer

    meta = tf.compat.v1.train.export_meta_graph(graph_def=graph.as_graph_def(), graph=graph)
    meta.collection_def["train_op"].node_list.value.extend(op.name for op in graph.control_outputs)
    config = config_pb2.ConfigProto()
    options = config.graph_options.rewrite_options
    options.optimizers.append("dependency")
    options.min_graph_nodes, options.meta_optimizer_iterations = -1, options.TWO
    return tf_optimizer.OptimizeGraph(config, meta)


def _ordered(graph: Any) -> Pairs:
    """Of each variable the pairs of a read and an update that one of them waits for."""
    after: dict[str, set[str]] = defaultdict(set)
    users: dict[str, list[str]] = defaultdict(list)
    kinds = {node.name: node.op for node in graph.node}
    for node in graph.node:
        for name in node.input:
            after[name.lstrip("^").split(":")[0]].add(node.name)
        if node.op in ("ReadVariableOp", "AssignSubVariableOp"):
            users[node.input[0].split(":")[0]].append(node.name)
    found: Pairs = set()
    for names in users.values():
        for first in names:
            reached = _reached(after, first)
            found |= {(first, other) for other in names if other in reached and kinds[other] != kinds[first]}
    return found


def _reached(after: dict[str, set[str]], first: str) -> set[str]:
    seen: set[str] = set()
    waiting = [first]
    while waiting:
        new = after[waiting.pop()] - seen
        seen |= new
        waiting.extend(new)
    return seen
