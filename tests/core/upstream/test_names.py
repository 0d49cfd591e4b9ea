"""Each private name of Keras and TensorFlow that gpudist_core uses is there and means what it did; a failure names it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpudist_core import upstream
from tests.core.conftest import OnHosts
from tests.versions import since

PACKAGES = ("tensorflow.", "keras.")


def trainer() -> dict[str, bool]:
    import contextlib
    import inspect

    import keras
    import numpy as np
    import tensorflow as tf
    from keras.src.backend.tensorflow import trainer
    from keras.src.losses import loss
    from keras.src.metrics.reduction_metrics import Mean
    from keras.src.trainers import compile_utils, data_adapters
    from keras.src.trainers.data_adapters import py_dataset_adapter
    from keras.src.utils import rng_utils

    from gpudist_core.upstream import trainer as ours

    x, y = np.ones((4, 2), "float32"), np.zeros((4, 1), "float32")
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    before = ours.needs_build(model)
    ours.build(model, (tf.TensorSpec((2, 2)), tf.TensorSpec((2, 1))))
    keras.utils.set_random_seed(5)

    given: list[set[str]] = []

    class Epochs:
        """What `keras_model.sources.Epochs` is to Keras's loops."""

        num_batches = 2

        def __init__(self, **arguments: Any) -> None:
            given.append(set(arguments))

        def reset(self) -> None:
            pass

        def __iter__(self) -> Any:
            batches = iter([(x[:2], y[:2]), (x[2:], y[2:])])
            yield from (ours.epoch_item(step, step, batches) for step in range(2))

        def catch_stop_iteration(self) -> Any:
            return contextlib.nullcontext()

    trainer.TFEpochIterator, original = Epochs, trainer.TFEpochIterator
    steps = len(model.fit(x, y, batch_size=2, verbose=0, validation_data=(x, y), epochs=3).epoch)
    trainer.TFEpochIterator = original
    adapter = data_adapters.get_data_adapter(x=x, y=y, sample_weight=None, batch_size=2, shuffle=False, class_weight=None)
    callbacks = keras.callbacks.CallbackList([], model=model)
    arguments = {"x", "y", "sample_weight", "batch_size", "steps_per_epoch", "shuffle", "distribute_strategy"}
    sources = [inspect.getsource(one) for one in (trainer, compile_utils)]
    return {
        "trainer.TFEpochIterator": [arguments <= one for one in given] == [True, True] and "class_weight" in given[0],
        "what fit does with a TFEpochIterator": (steps, int(model.optimizer.iterations)) == (3, 6),
        "TensorFlowTrainer.train_step": ours.is_default(keras.Model, "train_step"),
        "TensorFlowTrainer.test_step": ours.is_default(keras.Model, "test_step"),
        "TensorFlowTrainer._maybe_symbolic_build": list(inspect.signature(model._maybe_symbolic_build).parameters)
        == ["iterator", "data_batch"],
        "Trainer._should_eval": list(inspect.signature(model._should_eval).parameters) == ["epoch", "validation_freq"],
        "TensorFlowTrainer._eval_epoch_iterator": "self._eval_epoch_iterator = TFEpochIterator(" in sources[0],
        "evaluate(_use_cached_eval_dataset)": "_use_cached_eval_dataset=True" in sources[0],
        "PyDatasetAdapter._finite_generator, OrderedEnqueuer._run": all(
            "random.shuffle(indices)" in inspect.getsource(one)
            for one in (py_dataset_adapter.PyDatasetAdapter._finite_generator, py_dataset_adapter.OrderedEnqueuer._run)
        ),
        "CallbackList.callbacks": "for callback in self.callbacks:" in inspect.getsource(type(callbacks).on_train_begin),
        "Trainer._compute_loss": "training" in inspect.signature(model._compute_loss).parameters,
        "Trainer._symbolic_build": "data_batch" in inspect.signature(model._symbolic_build).parameters,
        "Trainer._loss_tracker": isinstance(model._loss_tracker, keras.metrics.Mean),
        "Trainer._compile_metrics, _compile_loss": before and not ours.needs_build(model),
        "Layer._flatten_layers": model.layers[0] in model._flatten_layers(),
        "CompileMetrics.metrics": [metric.name for metric in ours.metrics_of(model)] == ["loss", "mae"],
        "loss.reduce_weighted_values": "reduce_weighted_values(" in inspect.getsource(loss.Loss.__call__),
        "loss.unscale_loss_for_distribution": all("loss_module.unscale_loss_for_distribution(" in text for text in sources),
        "loss.scale_loss_for_distribution": "scale_loss_for_distribution(" in inspect.getsource(loss.reduce_values)
        or "loss_module.scale_loss_for_distribution(" in sources[0],
        "loss.standardize_reduction": loss.standardize_reduction("sum") == "sum",
        "Mean.update_state": list(inspect.signature(Mean.update_state).parameters) == ["self", "values", "sample_weight"],
        "ArrayDataAdapter._inputs, _batch_size": ours.arrays_of(adapter) is not None and ours.arrays_of(adapter)[1] == 2,
        "CallbackList._async_train, _async_test, _async_predict": {"_async_train", "_async_test", "_async_predict"}
        <= set(vars(callbacks)),
        "rng_utils.get_random_seed": hasattr(rng_utils, "get_random_seed") is since("keras", "3.10") and ours.seed() == 5,
    }


def models() -> dict[str, bool]:
    import keras
    import tensorflow as tf

    from gpudist_core.upstream import losses as ours
    from gpudist_core.upstream import models as our_models
    from gpudist_core.upstream import patches, runtime

    where = tf.distribute.OneDeviceStrategy("CPU:0")
    with where.scope():
        inside = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    outside = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])

    class Mixin:
        pass

    @keras.saving.register_keras_serializable("own")
    class Own(keras.layers.Dense):
        pass

    own = keras.saving.serialize_keras_object(patches.mix_in(Own(2), Mixin))

    layer = patches.mix_in(keras.layers.Dense(2, name="kept"), Mixin)
    kept = keras.saving.serialize_keras_object(layer)
    masked = keras.layers.Embedding(3, 2, mask_zero=True)(tf.constant([[1, 0]]))
    scaling = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    return {
        "Model._distribute_strategy": inside._distribute_strategy is where and outside._distribute_strategy is None,
        "Variable.value": our_models.strategy_of(inside) is where,
        "LossScaleOptimizer.inner_optimizer": isinstance(scaling.inner_optimizer, keras.optimizers.SGD),
        "Optimizer.loss_scale_factor": hasattr(keras.optimizers.SGD(), "loss_scale_factor"),
        "backend.set_keras_mask": ours.mask_of(ours.masked(tf.ones([2]), "a mask")) == "a mask",
        "losses.LossFunctionWrapper": ours.of_function(tf.square).call(tf.ones([2]), tf.ones([2, 1])).shape.num_elements() == 2,
        "Variable._value": isinstance(inside.weights[0]._value, tf.Variable),
        "backend.get_keras_mask": tf.reduce_all(ours.mask_of(masked) == [[True, False]]).numpy(),
        "api_export.REGISTERED_OBJS_TO_NAMES": (kept["module"], kept["class_name"]) == ("keras.layers", "Dense"),
        "object_registration.GLOBAL_CUSTOM_NAMES": own["registered_name"] == "own>Own",
        "Layer._flatten_layers": len(runtime.flat_layers(inside)) >= 2,
    }


def layers() -> dict[str, bool]:
    import inspect

    import keras
    import tensorflow as tf
    from keras.src import backend
    from keras.src.backend.tensorflow import random

    from gpudist_core.upstream import randomness

    class Adding(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            self.add_loss(keras.ops.sum(x))
            return x

    layer = Adding()
    layer(tf.ones([2]))
    lists = [list(layer._losses), layer._get_own_losses()]
    known = _of_variables()
    layer._clear_losses()
    drawn: list[str] = []

    def watched(name: str) -> Callable[..., Any]:
        original = getattr(random, name)

        def draw(*args: Any, **kwargs: Any) -> Any:
            drawn.append(name)
            return original(*args, **kwargs)

        return draw

    for name in (*randomness.SHAPED, "dropout", "_cast_seed"):
        setattr(random, name, watched(name))
    keras.layers.Dropout(0.5, seed=1)(tf.ones([2, 2]), training=True)
    keras.layers.GaussianNoise(0.5, seed=1)(tf.ones([2, 2]), training=True)
    keras.random.uniform([2], seed=1)
    keras.random.truncated_normal([2], seed=1)
    keras.random.randint([2], 0, 3, seed=1)
    inner = keras.layers.BatchNormalization()
    inner.build((None, 2))
    return {
        "Layer._losses, _get_own_losses, _clear_losses": [len(one) for one in lists] == [1, 1] and not layer._losses,
        "backend.in_stateless_scope": backend.in_stateless_scope() is False,
        "keras.src.backend.tensorflow.random": {*randomness.SHAPED, "dropout", "_cast_seed"} <= set(drawn),
        "random.dropout": list(inspect.signature(inspect.unwrap(keras.random.dropout)).parameters)[:4]
        == ["inputs", "rate", "noise_shape", "seed"],
        "BatchNormalization._moments": list(inspect.signature(inner._moments).parameters) == ["inputs", "mask"],
        "BatchNormalization._reduction_axes": inner._reduction_axes == [0],
        **known,
    }


def _of_variables() -> dict[str, bool]:
    """How a layer's variables start and are assigned, and what draws besides Keras's random functions."""
    import keras
    import tensorflow as tf
    from keras.src import backend
    from keras.src.backend.common import global_state
    from keras.src.backend.tensorflow import image

    seen: list[Any] = []

    def watched(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append((name, global_state.get_global_attribute("current_call_ctx") is not None))
            return original(*args, **kwargs)

        setattr(owner, name, call)

    class Counting(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)

        def call(self, x: Any) -> Any:
            self.count.assign_add(1.0)
            return x

    watched(backend.Variable, "_direct_assign")
    watched(backend.Variable, "_initialize_with_initializer")
    watched(keras.layers.RNN, "call")
    augmenting = since("keras", "3.10")  # 3.8 has neither layer
    if augmenting:
        watched(image, "elastic_transform")
        watched(keras.layers.AugMix, "get_random_transformation")
    counting = Counting()
    counting(tf.ones([1, 2]))
    counting.count.assign(0.0)
    keras.layers.LSTM(1)(tf.ones([1, 2, 2]))
    images = tf.ones([1, 8, 8, 3])
    if augmenting:
        keras.layers.RandomElasticTransform(1.0)(images, training=True)
        keras.layers.AugMix((0, 1))(images, training=True)
    assigned = [in_a_call for name, in_a_call in seen if name == "_direct_assign"]
    names = {name for name, _ in seen}
    return {
        "Variable._direct_assign, current_call_ctx": assigned[:2] == [True, False],
        "Variable._initialize_with_initializer": "_initialize_with_initializer" in names,
        "RNN.call": "call" in names,
        "image.elastic_transform, AugMix.get_random_transformation": not augmenting
        or {"elastic_transform", "get_random_transformation"} <= names,
    }


def optimizers() -> dict[str, bool]:
    import inspect

    import keras
    from keras.src.backend.tensorflow.optimizer import TFOptimizer

    variable = keras.Variable([1.0])
    adam = keras.optimizers.Adam(use_ema=True, clipnorm=1.0)
    adam.build([variable])
    apply = inspect.getsource(keras.optimizers.Adam._backend_apply_gradients)
    return {
        "Optimizer._backend_apply_gradients": "_backend_update_step" in apply,
        "Optimizer._trainable_variables": adam._trainable_variables == [variable],
        "Optimizer._get_variable_index": adam._get_variable_index(variable) == 0,
        "Optimizer._model_variables_moving_average": len(adam._model_variables_moving_average) == 1,
        "TFOptimizer._all_reduce_sum_gradients": "_all_reduce_sum_gradients(grads_and_vars)"
        in inspect.getsource(TFOptimizer._backend_update_step),
        "LossScaleOptimizer._tf_apply": list(inspect.signature(keras.optimizers.LossScaleOptimizer._tf_apply).parameters)
        == ["self", "grads", "trainable_variables"],
    }


def tensorflow() -> dict[str, bool]:
    import tensorflow as tf

    from gpudist_core.upstream import datasets, strategies

    where = tf.distribute.OneDeviceStrategy("CPU:0")
    with where.scope():
        plain = strategies.plain_variable(lambda: tf.ones([2]), device="/CPU:0", name="plain")
        with strategies.unmirrored(tf.distribute.MirroredStrategy(["CPU:0"]), lambda device: tf.ones([2])):
            pass
    inside: list[bool] = []

    def note(value: Any) -> Any:
        inside.append(strategies.is_in_dataset_function())
        return tf.cast(value, tf.bool)

    rows = tf.data.Dataset.range(3)
    for made in (rows.map(note), rows.filter(note), rows.interleave(lambda value: rows.map(note))):
        assert made is not None
    in_datasets = list(inside)
    tf.function(note)(tf.constant(1))
    in_graph = inside[len(in_datasets) :]
    return {
        "variables.default_variable_creator_v2": isinstance(plain, tf.Variable) and not hasattr(plain, "distribute_strategy"),
        "the names of datasets' graphs": len(in_datasets) >= 3 and all(in_datasets) and in_graph == [False],
        "pywrap_tfe.TFE_ContextListDevices": strategies.memory_limits() == {},
        "_ShuffleDataset._seed, _seed2": datasets.shuffles_that_vary(rows.shuffle(3)) == ["unseeded"],
        "_ShuffleDataset._reshuffle_each_iteration": [
            datasets.shuffles_that_vary(rows.shuffle(3, seed=1, reshuffle_each_iteration=again)) for again in (True, False)
        ]
        == [["reshuffled"], []],
        "Dataset._inputs": datasets.shuffles_that_vary(rows.concatenate(rows.shuffle(3)).map(note)) == ["unseeded"],
    }


def mirrored() -> dict[str, bool]:
    import tensorflow as tf

    from gpudist_core.upstream import strategies

    where = tf.distribute.MirroredStrategy()
    made: list[str] = []

    def value(device: str) -> Any:
        made.append(device)
        return tf.fill([2], float(len(made)))

    with where.scope(), strategies.unmirrored(where, value):
        variable = tf.Variable(lambda: tf.zeros([2]))
    copies = [copy.numpy().tolist() for copy in where.experimental_local_results(variable)]
    named = [device.rpartition(":")[2] for device in made]
    return {"distribute_utils.create_mirrored_variable": copies == [[1.0, 1.0], [2.0, 2.0]] and named == ["0", "1"]}


def applies() -> dict[str, bool]:
    import tensorflow as tf

    from gpudist_core.upstream import optimizers as ours

    where = tf.distribute.MirroredStrategy()
    values = where.experimental_distribute_values_from_function(lambda context: tf.fill([1], context.replica_id_in_sync_group))
    seen: dict[int, list[Any]] = {}

    @tf.function
    def step(values: Any) -> None:
        def replica(value: Any, number: int) -> None:
            place = tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group)
            seen[int(place)] = [one is value for one in ours.arguments_of_run(place)]

        where.run(replica, args=(values,), kwargs={"number": 1})

    original = tf.distribute.Strategy.run
    with ours.of_run:
        step(values)
        outside = ours.arguments_of_run(0)
    return {
        "StrategyBase.run": seen == {0: [True], 1: [True]} and outside is None,
        "Patches": tf.distribute.Strategy.run is original,
    }


NAMES: dict[str, Callable[[], dict[str, bool]]] = {
    one.__name__: one for one in (trainer, models, layers, optimizers, tensorflow, mirrored, applies)
}


LISTED = re.findall(r"^    ([\w.]+)(?: since Keras ([\d.]+))?: ", str(upstream.__doc__), re.MULTILINE)


def _missing() -> list[str]:
    """The listed names that the installed versions lack, and those that are there although the list says since when."""
    return [name for name, version in LISTED if _is_there(name) is not (not version or since("keras", version))]


def _is_there(name: str) -> bool:
    import importlib
    import inspect

    *path, last = name.replace("tf.", "tensorflow.", 1).split(".") if name.startswith("tf.") else name.split(".")
    owner: Any = importlib.import_module(path[0])
    for place, part in enumerate(path[1:], 2):
        try:
            owner = getattr(owner, part, None) or importlib.import_module(".".join(path[:place]))
        except ModuleNotFoundError:
            return False
    if hasattr(owner, last):
        return True
    if not isinstance(owner, type):
        try:
            return importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:  # what would be its package is a module
            return False
    sources = [inspect.getsource(kind) for kind in owner.__mro__ if kind.__module__.startswith(PACKAGES)]
    return any(re.search(rf"self\.{last}\b", source) for source in sources)


def test_each_listed_name_is_there(on_hosts: OnHosts) -> None:
    assert len(LISTED) > 90
    assert on_hosts("1x1", _missing) == [[]]


def test_each_private_name_is_listed() -> None:
    names, paths = {name.rpartition(".")[2] for name, _ in LISTED}, [f"{name}." for name, _ in LISTED]
    unlisted = []
    for file in Path(str(upstream.__file__)).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("keras.src", "tensorflow.python")):
                imported = [f"{node.module}.{alias.name}." for alias in node.names]
                unlisted += [name for name in imported if not any(path.startswith(name) for path in paths)]
            elif isinstance(node, ast.Attribute) and re.match("_(?!_|gpudist_|getframe)", node.attr):
                is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
                unlisted += [f"{file.stem}: {ast.unparse(node)}"] if not is_own and node.attr not in names else []
    assert unlisted == []


@pytest.mark.parametrize("group", NAMES)
def test_names_are_there(on_hosts: OnHosts, group: str) -> None:
    (found,) = on_hosts("1x2", NAMES[group])
    assert [name for name, there in found.items() if not there] == []
