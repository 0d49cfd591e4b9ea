"""The user's lines of a step: of operations of graphs and of eager code, in threads of replicas and through autograph."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from emulate.recorder.lines import stack_lines, walks
from emulate.recorder.lines.walks import ReplicaGraph, describe
from emulate.trace import Trace


def clips(*, compiled: bool) -> Callable[[], None]:
    """A loop that clips on each replica: its lines carry their names in a comment."""

    def program() -> None:
        import tensorflow as tf

        strategy = tf.distribute.MirroredStrategy()
        data = tf.data.Dataset.from_tensor_slices(tf.random.stateless_normal((16, 4), (1, 2)))
        data = strategy.experimental_distribute_dataset(data.batch(8))  # batch
        with strategy.scope():
            weight = tf.Variable(tf.ones((4, 1)))  # variable
            optimizer = tf.keras.optimizers.SGD(0.1, clipnorm=0.5)  # optimizer
            optimizer.build([weight])

        def step(x: Any) -> Any:
            strategy.num_replicas_in_sync  # noqa: B018  # count
            with tf.GradientTape() as tape:
                each = tf.square(x @ weight)
                if tf.reduce_sum(x) > -1e9:  # autograph converts this
                    each = each * 1.0
                loss = tf.reduce_mean(each)  # loss
            gradient = tape.gradient(loss, weight)  # tape
            gradient = tf.clip_by_norm(gradient, 0.1)  # clip
            optimizer.apply_gradients([(gradient, weight)])  # apply
            return loss * 2.0  # report

        def train(x: Any) -> Any:
            return strategy.reduce("SUM", strategy.run(step, args=(x,)), axis=None)  # reduce

        call = tf.function(train) if compiled else train
        for batch in data:
            call(batch)

    return program


LOOPS = {compiled: clips(compiled=compiled) for compiled in (True, False)}
SOURCE, FIRST = inspect.getsourcelines(clips)


def named(comment: str) -> int:
    return FIRST + next(number for number, line in enumerate(SOURCE) if line.rstrip().endswith(f"# {comment}"))


def lines_of(trace: Trace, stage: str, role: str) -> list[int]:
    entries = [entry for _, event in trace.of("lines") for entry in event["stages"].get(stage, ())]
    return list(dict.fromkeys(entry["line"] for entry in entries if role in entry["roles"]))


def made_at(trace: Trace, kind: str) -> list[Mapping[str, Any]]:
    return [event for _, event in trace.of("made") if event["kind"] == kind]


@pytest.mark.parametrize("topology", ["1x1", "1x2"])
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
def test_each_stage_has_the_lines_of_its_operations(recorded: Any, topology: str, compiled: bool) -> None:
    trace = recorded(LOOPS[compiled], topology, reference=topology == "1x1")
    assert lines_of(trace, "loss", "mean") == [named("loss")]
    assert lines_of(trace, "gradient", "tape") == [named("tape")]
    assert set(lines_of(trace, "given", "norm")) == {named("clip")}
    assert lines_of(trace, "update", "apply") == [named("apply")]
    assert lines_of(trace, "reported", "reduced") == [named("reduce")]
    assert made_at(trace, "optimizer")[0]["line"]["line"] == named("optimizer")
    assert made_at(trace, "optimizer")[0]["clips"]
    assert [(one["line"]["line"], one["in_step"]) for one in made_at(trace, "num_replicas")] == [(named("count"), True)]
    assert made_at(trace, "batch")[0]["line"] == {
        "file": __file__,
        "line": named("batch"),
        "text": "data = strategy.experimental_distribute_dataset(data.batch(8))  # batch",
    }


def contrasts() -> None:
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy()
    with strategy.scope():
        weight = tf.Variable(tf.ones((4, 2)))
        optimizer = tf.keras.optimizers.SGD(0.1)
        optimizer.build([weight])

    @tf.function
    def contrast(x: Any) -> Any:
        total = 0.0
        for i in tf.range(2):
            total += tf.reduce_sum(tf.square(x @ tf.transpose(x)))  # meets
            total += tf.cast(i, tf.float32)
        return total + tf.reduce_mean(x)  # decorated mean

    def step(x: Any) -> None:
        with tf.GradientTape() as tape:
            loss = contrast(x @ weight)
        optimizer.apply_gradients([(tape.gradient(loss, weight), weight)])

    data = tf.data.Dataset.from_tensor_slices(tf.random.stateless_normal((16, 4), (1, 2))).batch(8)
    for batch in strategy.experimental_distribute_dataset(data):
        tf.function(strategy.run)(step, args=(batch,))


def test_lines_of_a_loss_that_is_a_function_with_a_loop_are_those_inside(recorded: Any) -> None:
    source, first = inspect.getsourcelines(contrasts)
    inside = {
        name: first + next(n for n, line in enumerate(source) if line.endswith(f"# {name}\n"))
        for name in ("meets", "decorated mean")
    }
    trace = recorded(contrasts, "1x2")
    assert lines_of(trace, "loss", "mixes") == [inside["meets"]]
    assert lines_of(trace, "loss", "mean") == [inside["decorated mean"]]


def test_how_many_batches_are_skipped_and_taken_is_recorded_with_the_line(recorded: Any) -> None:
    def program() -> None:
        import numpy as np
        import tensorflow as tf

        strategy = tf.distribute.MirroredStrategy()
        with strategy.scope():
            weight = tf.Variable(tf.ones((4, 1)))
            optimizer = tf.keras.optimizers.SGD(0.1)
            optimizer.build([weight])

        def step(x: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(x @ weight)
            optimizer.apply_gradients([(tape.gradient(loss, weight), weight)])

        data = tf.data.Dataset.from_tensor_slices(tf.ones((16, 4))).batch(2)
        data = data.skip(np.int64(1)).skip(tf.constant(2, tf.int64)).take(count=3)
        for batch in strategy.experimental_distribute_dataset(data):
            tf.function(strategy.run)(step, args=(batch,))

    trace = recorded(program, "1x2")
    assert [event["count"] for event in made_at(trace, "skip") if "called" not in event] == [1, 2]
    assert [event["count"] for event in made_at(trace, "take") if "called" not in event] == [3]


def test_what_is_made_of_the_loss_for_a_report_has_its_line(recorded: Any) -> None:
    trace = recorded(LOOPS[True])
    assert lines_of(trace, "reported", "made") == [named("report")]


def keeps_tensors() -> None:
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy()
    with strategy.scope():
        weight = tf.Variable(tf.ones((4, 1)))
        optimizer = tf.keras.optimizers.SGD(0.1)
        optimizer.build([weight])
    kept = {}

    def step(x: Any) -> None:
        with tf.GradientTape() as tape:
            kept["x"] = tf.square(x)
            tf.distribute.get_replica_context().all_reduce("SUM", tf.ones([]))  # the other replica's turn
            loss = tf.reduce_sum((x + kept["x"]) @ weight)  # crosses
        optimizer.apply_gradients([(tape.gradient(loss, weight), weight)])

    data = tf.data.Dataset.from_tensor_slices(tf.ones((16, 4))).batch(8)
    for batch in strategy.experimental_distribute_dataset(data):
        tf.function(strategy.run)(step, args=(batch,))


def test_a_tensor_that_another_replica_has_made_is_seen_with_its_line(recorded: Any) -> None:
    trace = recorded(keeps_tensors, "1x2")
    (event, *_) = [event for _, event in trace.of("crossing")]
    assert (event["replica"], event["of"]) == (0, 1)
    assert event["lines"][0]["text"].endswith("# crosses")
    assert not recorded(LOOPS[True], "1x2").of("crossing")


def described(function: Callable[[Any], Any], rows: int = 4) -> ReplicaGraph:
    """The description of a function of so many examples."""
    import tensorflow as tf

    graph = tf.function(function).get_concrete_function(tf.TensorSpec([rows, 3])).graph
    return describe(graph, graph.outputs, [], set(map(walks.key_of, graph.inputs)), lambda operation: True)


def test_a_graph_with_identities_is_described_like_one_without() -> None:
    import tensorflow as tf

    square, identity = tf.square, tf.identity
    assert described(lambda x: identity(square(identity(x)))).content() == described(square).content()


def test_a_loop_over_the_examples_is_the_same_for_another_number_of_them() -> None:
    import tensorflow as tf

    small, large = (described(lambda x: tf.map_fn(tf.square, x), rows).operations for rows in (4, 8))
    assert "TensorListStack" in {kind for kind, *_ in small}
    assert small == large


def test_loops_of_functions_of_which_the_definition_alone_is_left_are_described_for_any_number_of_examples() -> None:
    import tensorflow as tf

    def gradient(logits: Any) -> Any:
        number = logits.shape[0]
        labels, lengths = tf.tile([[1, 2]], (number, 1)), tf.fill((number,), 2)
        with tf.GradientTape() as tape:
            tape.watch(logits)
            times = tf.tile(logits[:, None], (1, 5, 1))
            loss = tf.nn.ctc_loss(labels, times, lengths, tf.fill((number,), 5), logits_time_major=False)
        return tape.gradient(loss, logits)

    small, large = described(gradient), described(gradient, rows=8)
    kinds = [kind for kind, *_ in small.operations]
    assert kinds.count("TensorScatterUpdate") >= 2  # in the loops
    assert kinds == [kind for kind, *_ in large.operations]
    assert all(stack_lines.of_operation(op) == () for op in small.made if op.type == "TensorScatterUpdate")


def test_operations_of_a_loaded_model_have_no_line(tmp_path: Path) -> None:
    import tensorflow as tf

    class Model(tf.Module):  # type: ignore[misc]
        @tf.function(input_signature=[tf.TensorSpec([None, 3])])  # type: ignore[untyped-decorator]
        def __call__(self, x: Any) -> Any:
            return tf.tanh(x)

    tf.saved_model.save(Model(), tmp_path)
    of_model = {op.type: stack_lines.of_operation(op) for op in described(tf.saved_model.load(tmp_path)).made}
    assert of_model["Tanh"] == ()
