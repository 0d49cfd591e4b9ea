"""What a step cannot do it refuses in words: the rule, what was received, what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.core.conftest import OnHosts
from tests.core.steps import training


def _messages(make_calls: Callable[[], dict[str, Callable[[], Any]]]) -> dict[str, str]:
    """What each call raises."""
    said = {}
    for name, call in make_calls().items():
        try:
            call()
            said[name] = "nothing"
        except Exception as error:
            within = re.search("\x1b\\[1m(.*)\x1b\\[0m", str(error))  # what Keras says of the layer that was called
            said[name] = f"{type(error).__name__}: {within[1] if within else error}"
    return said


def _of_three(model, x, y):  # type: ignore[no-untyped-def]
    return model(x) - y


def _calls() -> dict[str, Callable[[], Any]]:
    import keras
    import tensorflow as tf

    from gpudist_core.replicas import per_replica
    from gpudist_core.steps import TrainStep

    where = training.strategy()

    def make() -> Any:
        return keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])

    with where.scope():
        model, optimizer = make(), keras.optimizers.SGD(0.1)
        normalized = keras.Sequential([keras.Input((64,)), keras.layers.BatchNormalization(), keras.layers.Dense(10)])
        keeping = keras.Sequential([keras.Input((64,)), keras.layers.SpectralNormalization(keras.layers.Dense(10))])
        single = keras.Sequential([keras.Input((64,)), keras.layers.Dense(1)])
        active = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10, activity_regularizer="l2")])
    adapted = keras.layers.Normalization()
    adapted.adapt(np.ones((2, 64), "float32"))
    with where.scope():
        with_adapted = keras.Sequential([keras.Input((64,)), adapted, keras.layers.Dense(10)])
        of_adapted = keras.optimizers.SGD(0.1)
    beside_values = keras.metrics.Mean(name="mean")
    foreign = tf.Variable(1.0, name="foreign")
    outside, other, beside = make(), keras.optimizers.SGD(0.1), keras.metrics.SparseCategoricalAccuracy()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    step = TrainStep(model, optimizer, loss)
    images, labels = training.digits(12)
    batch = next(training.batches(where, images, labels, size=12))

    def in_another_scope() -> Any:
        with tf.distribute.OneDeviceStrategy("CPU:0").scope():
            step(batch)

    def compiled(kind: Any) -> Any:
        with where.scope():
            fresh = keras.optimizers.SGD(0.1)
        TrainStep(kind, fresh, loss, jit_compile=True)(batch)

    def grown_meanwhile() -> Any:
        with where.scope():
            grown, fresh = make(), keras.optimizers.SGD(0.1)
        one = TrainStep(grown, fresh, loss)
        one(batch)
        grown.add(keras.layers.Dense(10))
        one(next(training.batches(where, images, labels, size=5)))

    def restored_unbuilt() -> Any:
        with where.scope():
            late, fresh = keras.Sequential([keras.layers.Dense(10)], name="late"), keras.optimizers.SGD(0.1)
        TrainStep(late, fresh, loss, accumulate=2).restore({"pending": 1, "accumulators": {}, "accumulate": 2})

    per_column = per_replica(where, [tf.ones([6, 2]), tf.ones([6, 2])])
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        alone = TrainStep(make(), keras.optimizers.SGD(0.1), loss)

    return {
        "two clippings": lambda: TrainStep(model, optimizer, loss, clip_norm=1.0, clip_value=1.0),
        "negative clipping": lambda: TrainStep(model, optimizer, loss, clip_norm=-1.0),
        "several bounds": lambda: TrainStep(model, optimizer, loss, clip_norm=[1.0, 2.0]),
        "a bound in letters": lambda: TrainStep(model, optimizer, loss, clip_norm="1"),
        "no model": lambda: TrainStep(None, optimizer, loss),
        "nothing known to train": lambda: TrainStep(len, optimizer, loss),
        "a metric by name": lambda: TrainStep(model, optimizer, loss, metrics=["accuracy"]),
        "one metric": lambda: TrainStep(model, optimizer, loss, metrics=keras.metrics.Mean(name="mean")),
        "a metric of values": lambda: TrainStep(model, optimizer, loss, metrics=[beside_values]),
        "names of variables": lambda: TrainStep(model, optimizer, loss, variables=["kernel"]),
        "other variables meanwhile": grown_meanwhile,
        "restored before it is built": restored_unbuilt,
        "losses of classes": lambda: TrainStep(model, optimizer, lambda y, y_pred: tf.reduce_mean(y_pred, 0))(batch),
        "no state": lambda: step.restore({}),
        "a state of servers": lambda: step.restore({"pending": 1, "sums": {}, "accumulate": 2}),
        "a state in letters": lambda: step.restore({"pending": "x"}),
        "losses without gradients": lambda: TrainStep(model, optimizer, lambda y, p: tf.argmax(p, -1))(batch),
        "losses of nothing": lambda: TrainStep(model, optimizer, lambda y, y_pred: None)(batch),
        "losses in a dict": lambda: TrainStep(model, optimizer, lambda y, p: {"loss": tf.reduce_sum(p, -1)})(batch),
        "no targets": lambda: step((batch[0], None)),
        "weights in a dict": lambda: step((*batch, {"label": batch[1]})),
        "no batches": lambda: step.several(None),
        "weights of another form": lambda: step((*batch, per_column)),
        "parts for others": lambda: alone(batch),
        "no accumulation": lambda: TrainStep(model, optimizer, loss, accumulate=0),
        "half a batch": lambda: TrainStep(model, optimizer, loss, accumulate=1.5),
        "an optimizer that accumulates": lambda: TrainStep(
            model, keras.optimizers.SGD(0.1, gradient_accumulation_steps=3), loss, accumulate=3
        ),
        "an optimizer that accumulates within": lambda: TrainStep(
            model, keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)), loss
        ),
        "no loss": lambda: TrainStep(model, optimizer, None),
        "an unknown loss": lambda: TrainStep(model, optimizer, "nonsense"),
        "a loss that compares rows": lambda: TrainStep(model, optimizer, keras.losses.Circle()),
        "a loss over all rows, by name": lambda: TrainStep(model, optimizer, "dice"),
        "a loss of three": lambda: TrainStep(model, optimizer, _of_three),
        "unknown draws": lambda: TrainStep(model, optimizer, loss, draws="column"),
        "an adapted layer outside": lambda: TrainStep(with_adapted, of_adapted, loss)(batch),
        "model outside": lambda: TrainStep(outside, optimizer, loss, strategy=where),
        "optimizer outside": lambda: TrainStep(model, other, loss),
        "metric outside": lambda: TrainStep(model, optimizer, loss, metrics=[beside]),
        "variable outside": lambda: TrainStep(model, optimizer, loss, variables=[*model.trainable_variables, foreign]),
        "made inside run": lambda: where.run(lambda: TrainStep(model, optimizer, loss)),
        "plain batch": lambda: step((images, labels)),
        "no pair": lambda: step(batch[0]),
        "no batch": lambda: step.several([]),
        "another strategy": in_another_scope,
        "inside run": lambda: where.run(lambda: step(batch)),
        "compiled normalization": lambda: compiled(normalized),
        "compiled mean": lambda: compiled(keeping),
        "compiled activity": lambda: compiled(active),
        "compiled variables": lambda: TrainStep(model, optimizer, loss, jit_compile=True, variables=model.trainable_variables),
        "compiled draws": lambda: TrainStep(model, optimizer, loss, jit_compile=True, draws="row"),
        "no optimizer of Keras": lambda: TrainStep(model, tf.compat.v1.train.GradientDescentOptimizer(0.1), loss),
        "nothing to train": lambda: TrainStep(model, optimizer, loss, variables=[])(batch),
        "one number": lambda: TrainStep(model, optimizer, lambda y, y_pred: tf.reduce_mean(loss(y, y_pred)))(batch),
        "a sum": lambda: TrainStep(model, optimizer, keras.losses.MeanSquaredError("sum", name="squares")),
        "rows twice": lambda: TrainStep(single, optimizer, lambda y, y_pred: tf.cast(y, "float32") - y_pred)(batch),
        "counted once": lambda: tf.function(lambda: TrainStep(model, optimizer, loss, accumulate=2)(batch))(),
        "another accumulation": lambda: step.restore({"pending": 3, "accumulators": {}}),
    }


def test_every_refusal_says_the_rule_what_was_received_and_what_to_do(on_hosts: OnHosts) -> None:
    (said,) = on_hosts("1x2", _messages, _calls)
    accumulating = (
        "An optimizer for a TrainStep must not have gradient_accumulation_steps. Received: gradient_accumulation_steps=3. "
        "Leave gradient_accumulation_steps out of the optimizer, and pass the step accumulate=...: it takes the mean over "
        "the examples of these batches."
    )
    expected = {
        "two clippings": "At most one kind of clipping can be used. Received: clip_norm=1.0, clip_value=1.0.",
        "negative clipping": "A bound for gradients must be a positive number. Received: clip_norm=-1.0. Leave it out for no "
        "clipping.",
        "a bound in letters": "A bound for gradients must be a positive number. Received: clip_norm='1'. Leave it out for no "
        "clipping.",
        "no model": "model must be a Keras model, or a callable with trainable_variables. Received: model=None. Pass an "
        "instance, or name the variables to train: variables=[...].",
        "nothing known to train": "model must be a Keras model, or a callable with trainable_variables. Received: "
        "model=<built-in function len>. Pass an instance, or name the variables to train: variables=[...].",
        "a metric by name": "metrics must be a list of Keras metrics that take (y, y_pred, sample_weight). Received: "
        "metrics=['accuracy']. Create them in the strategy's scope: metrics=[keras.metrics.SparseCategoricalAccuracy()].",
        "one metric": "metrics must be a list of Keras metrics that take (y, y_pred, sample_weight). Received: metrics=<Mean "
        "name=mean>. Create them in the strategy's scope: metrics=[keras.metrics.SparseCategoricalAccuracy()].",
        "a metric of values": "metrics must be a list of Keras metrics that take (y, y_pred, sample_weight). Received: "
        "metrics=[<Mean name=mean>]. Create them in the strategy's scope: metrics=[keras.metrics.SparseCategoricalAccuracy()].",
        "names of variables": "variables must be a list of variables. Received: variables=['kernel']. Pass the variables to "
        "train: variables=model.trainable_variables.",
        "other variables meanwhile": "A step must train the variables that were trainable at its first call. Received: "
        "trained=2, trainable=4. Make another step after `trainable` changes.",
        "restored before it is built": "A model must be built before its accumulated gradients are restored. Received: "
        "pending=1, model='late'. Build it in the strategy's scope: model.build(shape), or call it with some examples.",
        "losses of classes": "per_example_loss must return a loss for each example, so that examples weigh the same on every "
        "replica. Received: loss='shape (10,)'. Return the losses of the examples, without a mean or a sum over them.",
        "a state of servers": "Pending batches must be restored by what accumulated them: a TrainStep by a TrainStep. "
        "Received: pending=1, state=['accumulate', 'pending', 'sums']. Save after flush(), or restore it there.",
        "a state in letters": "state must be a result of TrainStep.state(). Received: state={'pending': 'x'}.",
        "losses without gradients": "At least one trained variable must have a gradient. Received: gradients='2 times None'. "
        "Compute the loss from the model's outputs with differentiable operations: no argmax, rounding or cast to integers.",
        "several bounds": "A bound for gradients must be a positive number. Received: clip_norm=[1.0, 2.0]. Leave it out for "
        "no clipping.",
        "losses in a dict": "per_example_loss must return one tensor with a loss for each example. Received: loss='dict'. "
        "Add the losses of an example.",
        "no targets": "No part of a batch may be None, except the weight. Received: y=None. If the loss needs no targets, "
        "pass (x, x) and ignore the first argument of the loss.",
        "weights in a dict": "The weights of a batch must be one tensor of shape (rows,) or of the shape of the losses. "
        "Received: weight='dict'. To weight several outputs, put the weights into y and multiply in the loss.",
        "no batches": "several needs a list of batches. Received: batches=None. For one batch, call the step itself.",
        "losses of nothing": "per_example_loss must return a loss for each example. Received: loss=None.",
        "no state": "state must be a result of TrainStep.state(). Received: state={}.",
        "weights of another form": "A weight or a mask must have one value for each example, or one for each of its losses. "
        "Received: weight_shape=(6, 2), losses_shape=(6,). Give it the shape (rows,), or that of the losses.",
        "parts for others": "A batch must have one part for each replica of the step's strategy on this host. Received: "
        "parts=2, replicas=1, strategy='OneDeviceStrategy'. Distribute it with the strategy that the model was made in.",
        "no accumulation": "accumulate must be a positive integer. Received: accumulate=0. 1 means no accumulation.",
        "half a batch": "accumulate must be a positive integer. Received: accumulate=1.5. 1 means no accumulation.",
        "an optimizer that accumulates": accumulating,
        "an optimizer that accumulates within": accumulating,
        "no loss": "A loss must be a function (y, y_pred) -> losses by example, a keras.losses.Loss or its name. Received: "
        "loss=None.",
        "an unknown loss": "The name of a loss must be one of Keras's. Received: loss='nonsense'. See keras.losses for their "
        "names, or pass a function.",
        "a loss that compares rows": "An example's loss must not depend on the other examples of its replica. Received: "
        "loss='circle'. In a custom loss compare them with those of all replicas: apply keras.losses.circle to "
        "tf.distribute.get_replica_context().all_gather(..., axis=0) of y and y_pred, and keep the values of the replica's "
        "own examples. The context is None while Keras builds the model.",
        "a loss over all rows, by name": "A loss must have a value for each example, so that it does not depend on the other "
        "examples of its replica. Received: loss='dice'. Leave the first axis out of its axes: keras.losses.Dice(axis=(1, 2, "
        "3)) for images.",
        "a loss of three": "A loss must take (y, y_pred): the targets and the model's output. Received: "
        "loss='_of_three(model, x, y)'. The step calls the model itself. The loss returns a value for each example.",
        "unknown draws": "draws must be 'replica' or 'row'. Received: draws='column'.",
        "an adapted layer outside": "nothing",
        "model outside": "The model must be made in the scope of the step's strategy. Received: variable='kernel', "
        "strategy='MirroredStrategy'. Make it under `with strategy.scope():`.",
        "metric outside": "The metric must be made in the scope of the step's strategy. Received: variable='total', "
        "strategy='MirroredStrategy'. Make it under `with strategy.scope():`.",
        "optimizer outside": "The optimizer must be made in the scope of the step's strategy. Received: variable='iteration', "
        "strategy='MirroredStrategy'. Make it under `with strategy.scope():`.",
        "variable outside": "The variable that is trained must be made in the scope of the step's strategy. Received: "
        "variable='foreign:0', strategy='MirroredStrategy'. Make it under `with strategy.scope():`.",
        "made inside run": "A step must be made outside Strategy.run. Received: strategy='MirroredStrategy'. Make it once, "
        "where you make the model and the optimizer, and call it with batches.",
        "plain batch": "A batch must hold one part for each replica. Received: batch=['ndarray', 'ndarray']. Use "
        "Pipeline.distribute(strategy) or strategy.experimental_distribute_dataset.",
        "no pair": "A batch must be (x, y) or (x, y, weight). Received: batch='PerReplica'. "
        "Put several inputs into one nested x.",
        "no batch": "several needs at least one batch. Received: batches=[]. Skip the call if there is no batch.",
        "another strategy": "A step must be used with the strategy that its model was made in. Received: "
        "strategy='OneDeviceStrategy', model_strategy='MirroredStrategy'. "
        "Leave the other strategy's scope, or make model, optimizer and step there.",
        "inside run": "A step must be called outside Strategy.run. Received: strategy='MirroredStrategy'. It calls run itself.",
        "compiled normalization": "A pass compiled by XLA cannot wait for other replicas, as synchronized BatchNormalization "
        "must. Received: layer='batch_normalization'. Leave jit_compile out, or use synchronize_batch_norm=False, whose "
        "result depends on the topology.",
        "compiled mean": "A pass compiled by XLA cannot synchronize replicas, which a layer that keeps a mean over its "
        "examples needs. Received: variable='sequential_2/spectral_normalization/vector_u'. Leave jit_compile out.",
        "compiled activity": "A pass compiled by XLA does not support losses of its inputs (activity regularizers, "
        "add_loss). Received: losses=1. Leave jit_compile out.",
        "compiled variables": "jit_compile=True can train the model's own variables only. Received: variables=2. Leave "
        "variables out.",
        "compiled draws": "A pass compiled by XLA does not know the other replicas' numbers of examples, which draws='row' "
        "needs. Received: draws='row'. Leave jit_compile out, or use draws='replica'.",
        "no optimizer of Keras": "optimizer must be a Keras 3 optimizer, but no MultiOptimizer. Received: "
        "optimizer='tensorflow: GradientDescentOptimizer'. Use one of keras.optimizers. For several optimizers in one model, "
        "make a TrainStep for each, with its `variables`.",
        "nothing to train": "A step needs at least one variable to train. Received: model='sequential'. Set trainable=True "
        "on a layer, or give variables=[...].",
        "one number": "per_example_loss must return a loss for each example, so that examples weigh the same on every "
        "replica. Received: loss='one number'. Return the losses of the examples, without a mean or a sum over them.",
        "a sum": "A loss must not use reduction='sum': a step computes the mean over the examples of all replicas. Received: "
        "loss='squares', reduction='sum'. Leave reduction out. If you need the sum, pass a function (y, y_pred) that returns "
        "the examples' losses times the global batch size.",
        "rows twice": "per_example_loss must return losses of each example, not of each pair of examples (y and y_pred were "
        "broadcast). Received: y_shape=(6,), y_pred_shape=(6, 1), losses_shape=(6, 6). Give y and y_pred the same shape in "
        "the loss: tf.squeeze(y_pred, -1), or y[:, tf.newaxis].",
        "counted once": "A step that accumulates must not be called in a tf.function, which would count the calls once, at "
        "tracing. Received: accumulate=2. Leave the tf.function out. step.several(batches) trains several batches in one "
        "compiled call.",
        "another accumulation": "The state must come from a TrainStep with the same accumulate. Received: pending=3, "
        "accumulate=1, accumulated_by=1. Restore it there.",
    }
    assert {name: text.removeprefix("UsageError: ") for name, text in said.items()} == expected


def _poisoned() -> dict[str, Any]:
    import keras

    from gpudist_core.steps import TrainStep

    where = training.strategy()
    images, labels = training.digits(12)
    images[7] = np.nan  # a row of the second replica
    batch = next(training.batches(where, images, labels, size=12))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    keras.config.set_dtype_policy("mixed_float16")
    with where.scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10, dtype="float32")])
        step = TrainStep(model, keras.optimizers.SGD(0.1), loss)
        checked = TrainStep(model, keras.optimizers.SGD(0.1), loss, check_finite=True)
    before = [v.numpy() for v in model.trainable_variables]
    step(batch)
    local = [[c.numpy() for c in where.experimental_local_results(v.value)] for v in model.trainable_variables]
    try:
        checked(batch)
        raised = "nothing"
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
    return {"before": before, "after": local, "scale": float(step.optimizer.dynamic_scale.numpy()), "raised": raised}


def test_a_gradient_that_is_not_finite_on_one_replica_is_skipped_on_all_or_named(on_hosts: OnHosts) -> None:
    (seen,) = on_hosts("1x2", _poisoned)
    assert seen["scale"] == 2.0**14
    for before, copies in zip(seen["before"], seen["after"], strict=True):
        for copy in copies:
            np.testing.assert_array_equal(copy, before)
    assert "gradient of" in seen["raised"]


def _refused() -> dict[str, Any]:
    """A batch of which one of two variables has a gradient that is not finite, in training that accumulates two."""
    import keras
    import tensorflow as tf

    import gpudist_core as gd

    class Two(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (keras.layers.Dense(1, use_bias=False, kernel_initializer="ones") for _ in range(2))

        def call(self, x: Any) -> Any:
            return tf.concat([self.first(x), tf.sqrt(self.second(x * x[:, -1:]))], 1)

    strategy = gd.make_strategy()
    with strategy.scope():
        model, optimizer, metric = Two(), keras.optimizers.Adam(0.1), keras.metrics.MeanSquaredError()
        model(np.ones((2, 3), "float32"))
    step = gd.TrainStep(model, optimizer, "mse", accumulate=2, metrics=[metric], check_finite=True)
    right, wrong = np.ones((4, 3), "float32"), np.ones((4, 3), "float32")
    wrong[3, -1] = 0.0  # the gradient of a square root at 0

    def train(x: Any) -> str:
        data = gd.Pipeline.from_arrays((x, np.full((4, 2), 3.0, "float32")), global_batch_size=4)
        try:
            for batch in data.distribute(strategy):
                step(batch)
        except tf.errors.InvalidArgumentError as error:
            return str(error)
        return ""

    def state() -> list[Any]:
        kept = [*model.trainable_variables, *optimizer.variables, *metric.variables]
        return [np.array(v.value.read_value()) for v in kept]

    errors = [train(right), train(right), train(right)]
    before, pending = state(), step.pending
    errors.append(train(wrong))
    after, dropped = state(), [step.pending, *(float(np.abs(v).sum()) for v in step.state()["accumulators"].get("sums", []))]
    errors += [train(right), train(right)]
    return {
        "errors": errors,
        "same": [bool((one == other).all()) for one, other in zip(before, after, strict=True)],
        "pending": [pending, *dropped, step.pending],
        "updates": int(np.array(optimizer.iterations.value.read_value())),
    }


@pytest.mark.parametrize("topology", ["1x2", "2x1"])
def test_a_batch_that_is_refused_changes_nothing_and_training_goes_on(on_hosts: OnHosts, topology: str) -> None:
    for seen in on_hosts(topology, _refused):
        assert [bool(error) for error in seen["errors"]] == [False, False, False, True, False, False]
        assert "gradient of" in seen["errors"][3]
        assert all(seen["same"])
        assert (seen["pending"], seen["updates"]) == ([1, 0, 0], 2)


@pytest.mark.parametrize("topology", ["1x2"])
def test_a_loss_that_is_one_number_is_warned_about(on_hosts: OnHosts, topology: str) -> None:
    def scalar_loss() -> list[str]:
        import warnings

        import tensorflow as tf

        from gpudist_core import share as shares
        from gpudist_core.upstream import patches

        patches.of_step.prepare()
        import keras

        where = training.strategy()

        def replica() -> Any:
            with shares.sharing(shares.Share(tf.constant(3))):
                return keras.losses.deserialize({"class_name": "MeanSquaredError", "config": {}})(
                    tf.ones([3, 1]), tf.zeros([3, 1])
                )

        def scalar() -> Any:
            class Total(keras.losses.Loss):
                def call(self, y_true: Any, y_pred: Any) -> Any:
                    return tf.reduce_mean(tf.square(y_true - y_pred))

            with shares.sharing(shares.Share(tf.constant(3))):
                return Total()(tf.ones([3, 1]), tf.zeros([3, 1]))

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            exact = where.experimental_local_results(tf.function(lambda: where.run(replica))())
            assert [float(v) for v in exact] == [0.5, 0.5]
            half = where.experimental_local_results(tf.function(lambda: where.run(scalar))())
            assert [float(v) for v in half] == [0.5, 0.5]
        return [str(w.message) for w in caught]

    (said,) = on_hosts(topology, scalar_loss)
    assert any(text.startswith("A loss must return one value for each example") for text in said)
