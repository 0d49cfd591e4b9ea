"""The private names of TensorFlow and Keras that checkpoints rest on; a failure here says that upstream has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

OnHosts = Callable[..., list[Any]]


def names_there() -> list[bool]:
    import keras
    import tensorflow as tf

    from gpudist_core.upstream import key_value, runtime

    tf.random.set_seed(4)
    tf.random.uniform([])
    kept = runtime.op_seeds()
    first = float(tf.random.uniform([]))
    runtime.restore_op_seeds(kept)
    again = float(tf.random.uniform([]))
    model = keras.Sequential([keras.Input((1,)), keras.Sequential([keras.layers.Dense(1)])])
    model.compile("sgd", "mse")
    epochs: list[int] = []

    class Begin(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            runtime.begin_at(model, 2)

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            epochs.append(epoch)

    model.fit(tf.ones([2, 1]), tf.ones([2, 1]), epochs=4, verbose=0, callbacks=[Begin()])
    return [
        first == again,
        runtime.keras_global_generator(make=True) is runtime.keras_global_generator(),
        len(runtime.flat_layers(model)) >= 3,
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


def varied() -> dict[str, tuple[str, bool]]:
    """By kind of dataset: what is said to vary, and whether making iterators leads to the order of the fourth iteration."""
    import tensorflow as tf

    from gpudist_core.upstream import datasets

    def numbers() -> Any:
        return tf.data.Dataset.range(20)

    def shuffled() -> Any:
        return numbers().shuffle(20, seed=1)

    generator = tf.random.Generator.from_seed(1)
    kinds: dict[str, Callable[[], Any]] = {
        "fixed": lambda: numbers().map(lambda x: x + 1).cache().repeat(2).batch(4),
        "shuffled": shuffled,
        "and mapped": lambda: shuffled().map(lambda x: x + 1, num_parallel_calls=2).filter(lambda x: x > 2).take(12).skip(1),
        "and batched": lambda: shuffled().batch(3, num_parallel_calls=2).padded_batch(2, padded_shapes=[3]).prefetch(2),
        "and sharded": lambda: shuffled().shard(2, 0).batch(4).with_options(tf.data.Options()),
        "of a cache": lambda: (
            tf.data.Dataset.zip((numbers().cache(), numbers().repeat())).map(lambda a, b: a + b).shuffle(9, 2)
        ),
        "twice": lambda: shuffled().shuffle(9, seed=2),
        "repeated": lambda: shuffled().repeat(2),
        "cached": lambda: shuffled().cache(),
        "drawn": lambda: numbers().map(lambda x: generator.uniform([], 0, 99, tf.int64) + x),
        "generated": lambda: tf.data.Dataset.from_generator(
            lambda: iter(range(3)), output_signature=tf.TensorSpec([], tf.int64)
        ),
    }

    def order(dataset: Any) -> list[Any]:
        return [values.tolist() for values in dataset.as_numpy_iterator()]

    found = {}
    for name, make in kinds.items():
        read, passed = make(), make()
        fourth = [order(read) for _ in range(4)][-1]
        for _ in range(3):
            iter(passed)
        found[name] = datasets.what_varies(read), order(passed) == fourth
    return found


def test_making_an_iterator_draws_the_order_of_one_shuffle_and_what_is_not_known_is_said(on_hosts: OnHosts) -> None:
    [found] = on_hosts("1x1", varied)
    said = {name: what for name, (what, _) in found.items()}
    once = dict.fromkeys(["shuffled", "and mapped", "and batched", "and sharded", "of a cache"], "one shuffle")
    more = dict.fromkeys(["twice", "repeated", "cached", "drawn", "generated"], "more")
    assert said == {"fixed": "nothing"} | once | more
    assert all(alike for what, alike in found.values() if what != "more"), found
