"""What the faults rest on in TensorFlow and Keras is there: these tests say when upstream changes it."""

from __future__ import annotations

import inspect

import keras
import pytest
import tensorflow as tf

from emulate import graph_functions, upstream
from emulate.upstream import KERAS_3, KERAS_PACKAGES, optimizers, steps_made


def test_strategies_run_optimizers_apply_and_collectives_start_where_they_are_wrapped() -> None:
    assert all(
        list(inspect.signature(cls.run).parameters)[:3] == ["self", "fn", "args"] for cls in graph_functions.strategy_classes()
    )
    launcher = graph_functions.collective_launcher()
    assert all(
        "input_tensor" in inspect.signature(getattr(launcher, name)).parameters for name in ("all_reduce", "_all_gather")
    )
    for package in ("tensorflow", *KERAS_PACKAGES.values()):
        pytest.importorskip(package.partition(".")[0])
        assert optimizers(package)
    assert [name for _, name in optimizers(KERAS_3)] == ["apply", "apply"]


def test_an_optimizer_says_how_many_steps_it_has_made() -> None:
    variable = tf.Variable(1.0)
    for optimizer in (keras.optimizers.SGD(), keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())):
        optimizer.build([variable])
        optimizer.apply([tf.constant(1.0)], [variable])  # without it Keras 3.10's LossScaleOptimizer does nothing
        assert steps_made(optimizer) == 1


def test_a_call_in_a_function_is_not_ordered_after_those_of_other_replicas() -> None:
    operations = []

    @tf.function
    def two() -> None:
        for _ in range(2):
            operation = tf.numpy_function(lambda: 0, [], tf.int64).op
            upstream.run_independently(operation)
            operations.append(operation)

    two.get_concrete_function()
    assert not operations[1].control_inputs


def test_a_checkpoint_of_tensorflow_passes_the_operation_before_which_it_is_half_written(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name = upstream.merge_of_checkpoint()
    original, seen = getattr(module, name), []
    monkeypatch.setattr(module, name, lambda *args, **kwargs: (seen.append(name), original(*args, **kwargs))[1])
    tf.train.Checkpoint(variable=tf.Variable(1.0)).save(f"{tmp_path}/checkpoint")
    assert seen


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # Keras 3.15 with NumPy 2, whose fault it is not
def test_keras_closes_its_file_of_weights_where_it_is_wrapped(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    [(cls, method)] = upstream.keras_savers()
    original, modes = getattr(cls, method), []
    monkeypatch.setattr(cls, method, lambda store: (modes.append(store.mode), original(store))[1])
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.save(f"{tmp_path}/model.keras")
    assert modes == ["w"]
