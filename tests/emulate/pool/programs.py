"""Small programs of many kinds, each of which says in a digest what it computed, to the bit."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import Any

from emulate.cluster import HostContext


def digest(*values: Any) -> str:
    import numpy as np

    text = hashlib.sha256()
    for value in values:
        text.update(np.asarray(value).tobytes() if not isinstance(value, str) else value.encode())
    return text.hexdigest()[:16]


def strategy_of(context: HostContext) -> Any:
    import tensorflow as tf

    if context.topology.num_hosts > 1:
        return tf.distribute.MultiWorkerMirroredStrategy()
    return tf.distribute.MirroredStrategy() if context.topology.num_devices > 1 else tf.distribute.get_strategy()


def data(rows: int = 16) -> Any:
    import numpy as np

    generator = np.random.default_rng(3)
    return generator.normal(size=(rows, 6)).astype("float32"), generator.normal(size=(rows, 1)).astype("float32")


def build() -> Any:
    import keras

    return keras.Sequential(
        [keras.layers.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
    )


def keras_fit(context: HostContext) -> Any:
    """Keras's fit on one device of each host, with dropout and shuffled rows."""
    import keras

    keras.utils.set_random_seed(7)
    model = build()
    model.compile("adam", "mse")
    history = model.fit(*data(), batch_size=4, epochs=2, verbose=0)
    return digest(*model.get_weights(), history.history["loss"]), [layer.name for layer in model.layers]


def custom_loop(context: HostContext) -> Any:
    """A loop of one's own under the topology's strategy."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(11)
    strategy = strategy_of(context)
    with strategy.scope():
        model = build()
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(model.trainable_variables)

    def pipeline(input_context: Any) -> Any:
        rows = tf.data.Dataset.from_tensor_slices(data()).shuffle(16, seed=5)
        rows = rows.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
        return rows.batch(input_context.get_per_replica_batch_size(8), drop_remainder=True)

    def replica(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((model(x, training=True) - y) ** 2) / 8
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True))
        return loss

    @tf.function
    def step(x: Any, y: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(replica, args=(x, y)), axis=None)

    losses = [float(step(x, y)) for x, y in strategy.distribute_datasets_from_function(pipeline)]
    return digest(*[variable.numpy() for variable in model.variables], losses), [layer.name for layer in model.layers]


def tensorflow_random(context: HostContext) -> Any:
    """Every generator of TensorFlow, after a seed."""
    import tensorflow as tf

    tf.random.set_seed(5)
    drawn = [tf.random.normal([3]), tf.random.uniform([3], seed=2), tf.random.Generator.from_seed(3).normal([2])]
    function = tf.function(lambda: tf.random.normal([4]))
    drawn += [function(), function()]
    drawn += list(tf.data.Dataset.range(8).shuffle(8).batch(8))
    drawn.append(tf.nn.dropout(tf.ones([20]), 0.5))
    return digest(*[one.numpy() for one in drawn])


def other_generators(context: HostContext) -> Any:
    """Python's, NumPy's and Keras's generators."""
    import random

    import keras
    import numpy as np

    keras.utils.set_random_seed(21)
    first = keras.random.normal([3])
    return digest(
        first, np.random.rand(3), [random.random() for _ in range(3)], keras.layers.Dropout(0.5)(first, training=True)
    )


def compiled(context: HostContext) -> Any:
    """A function compiled by XLA."""
    import tensorflow as tf

    function = tf.function(
        lambda x: tf.nn.softmax(tf.matmul(x, x) + tf.random.stateless_normal([4, 4], [1, 2])), jit_compile=True
    )
    return digest(function(tf.reshape(tf.range(16.0), [4, 4])).numpy())


_kept: dict[str, Any] = {}


def kept_function(context: HostContext) -> Any:
    """A tf.function that its module keeps, with the state of the random operations in its trace."""
    import tensorflow as tf

    if not _kept:
        _kept["function"] = tf.function(lambda: tf.random.normal([3]))
    tf.random.set_seed(8)
    return digest(_kept["function"]().numpy(), _kept["function"]().numpy())


def names(context: HostContext) -> Any:
    """What TensorFlow and Keras call things."""
    import keras
    import tensorflow as tf

    model = build()
    with tf.Graph().as_default() as graph:
        tf.compat.v1.placeholder(tf.float32)
    return [layer.name for layer in model.layers], model.name, keras.Model().name, [op.name for op in graph.get_operations()]


def settings(context: HostContext) -> Any:
    """What a program finds."""
    import logging
    import random
    import signal
    import sys
    import threading
    import warnings

    import keras
    import numpy as np
    import tensorflow as tf

    return (
        sorted(name for name in os.environ if name != "TMPDIR"),
        os.getcwd(),
        list(sys.argv),
        [thread.name for thread in threading.enumerate()],
        len(warnings.filters),
        logging.root.level,
        [repr(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)],
        keras.config.floatx(),
        keras.config.dtype_policy().name,
        tf.config.functions_run_eagerly(),
        tf.config.get_soft_device_placement(),
        np.geterr()["divide"],
        len(tf.config.list_logical_devices("GPU")),
        random.getstate()[0],
        tf.distribute.has_strategy(),
        os.listdir(os.environ["TMPDIR"]),
    )


def untidy(context: HostContext) -> Any:
    """Changes a great deal that can be put back, and ends with an ordinary exception on one host alone."""
    import logging
    import random
    import signal
    import sys
    import tempfile
    import warnings

    import keras
    import numpy as np
    import tensorflow as tf

    os.environ["SOMETHING"] = "else"
    os.environ.pop("HOME", None)
    os.chdir("/")
    sys.argv.append("--more")
    sys.path.insert(0, "/nowhere")
    os.close(tempfile.mkstemp()[0])
    warnings.simplefilter("error")
    logging.getLogger().setLevel(logging.DEBUG)
    logging.getLogger("mine").addHandler(logging.NullHandler())
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("mixed_bfloat16")
    keras.saving.get_custom_objects()["mine"] = len
    tf.config.run_functions_eagerly(True)
    tf.config.set_soft_device_placement(False)
    tf.config.experimental.enable_op_determinism()
    np.seterr(all="raise")
    np.random.seed(1)
    random.seed(1)
    keras.utils.set_random_seed(99)
    tf.random.set_seed(42)
    strategy_of(context)
    model = build()
    model(data()[0])
    tf.random.normal([7])
    if context.topology.num_hosts == 1:
        raise RuntimeError("as programs do")
    return None


PROBES: tuple[Callable[[HostContext], Any], ...] = (
    keras_fit,
    custom_loop,
    tensorflow_random,
    other_generators,
    compiled,
    kept_function,
    names,
    settings,
)
