"""The private names of TensorFlow and Keras that checkpoints rest on; a failure here says that upstream has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

OnHosts = Callable[..., list[Any]]


def names_there() -> list[bool]:
    import keras
    import tensorflow as tf

    from gpudist_core.upstream import key_value, run_state

    tf.random.set_seed(4)
    tf.random.uniform([])
    kept = run_state.op_seeds()
    first = float(tf.random.uniform([]))
    run_state.restore_op_seeds(kept)
    again = float(tf.random.uniform([]))
    model = keras.Sequential([keras.Input((1,)), keras.Sequential([keras.layers.Dense(1)])])
    model.compile("sgd", "mse")
    epochs: list[int] = []

    class Begin(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            run_state.begin_at(model, 2)

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            epochs.append(epoch)

    model.fit(tf.ones([2, 1]), tf.ones([2, 1]), epochs=4, verbose=0, callbacks=[Begin()])
    return [
        first == again,
        run_state.keras_global_generator(make=True) is run_state.keras_global_generator(),
        len(run_state.flat_layers(model)) >= 3,
        epochs == [2, 3],
        key_value.is_available(),
    ]


def store_there(host_count: int) -> list[Any]:
    import json
    import os

    import tensorflow as tf

    from gpudist_core.upstream import key_value

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    host = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    assert strategy.num_replicas_in_sync == host_count
    return [
        key_value.is_available(),
        key_value.put(f"mine/{host}", "a b"),
        key_value.put(f"mine/{host}", "other"),
        key_value.get(f"mine/{1 - host}", 20),
        key_value.get("nobody's", 0.05),
    ]


def test_states_that_have_no_public_name_are_where_they_were(on_hosts: OnHosts) -> None:
    assert on_hosts("1x1", names_there)[0] == [True, True, True, True, False]


def test_hosts_have_a_store(on_hosts: OnHosts) -> None:
    assert on_hosts("2x1", store_there, 2) == [[True, True, False, "a b", None]] * 2
