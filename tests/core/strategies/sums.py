"""What the tests of strategies run on them; imported on hosts."""

from __future__ import annotations

from typing import Any


def split_cpu(number: int) -> None:
    """What a user does on a machine without GPUs."""
    import tensorflow as tf

    parts = [tf.config.LogicalDeviceConfiguration() for _ in range(number)]
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], parts)


def total(strategy: Any, repeats: int = 0) -> list[float]:
    """The sum of 1, 2, ... over the replicas, as each of this host's has it; with repeats in a loop of the function."""
    import tensorflow as tf

    def replica() -> Any:
        context = tf.distribute.get_replica_context()
        return context.all_reduce("SUM", tf.cast(context.replica_id_in_sync_group + 1, tf.float32))

    def step() -> Any:
        return tf.stack(strategy.experimental_local_results(strategy.run(replica)))

    def several() -> Any:
        start = (tf.constant(0), tf.zeros([len(strategy.extended.worker_devices)]))
        _, sums = tf.while_loop(lambda i, _: i < repeats, lambda i, sums: (i + 1, sums + step()), start)
        return sums / repeats

    return [float(value) for value in tf.function(several if repeats else step, autograph=False)()]


def trained(strategy: Any, steps: int = 5) -> Any:
    """A function that trains some steps more, on all rows of the same batch; it returns the weights."""
    import numpy as np
    import tensorflow as tf

    with strategy.scope():
        kernel = tf.Variable(tf.zeros([3]), aggregation=tf.VariableAggregation.SUM)
    number = strategy.num_replicas_in_sync
    rows = np.arange(24, dtype=np.float32).reshape(8, 3) / 24

    def replica() -> None:
        context = tf.distribute.get_replica_context()
        mine = tf.constant(rows)[context.replica_id_in_sync_group :: number]
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((tf.linalg.matvec(mine, kernel.read_value()) - 1.0) ** 2) / 8
        gradient = context.all_reduce("SUM", tape.gradient(loss, kernel))
        kernel.assign_sub(0.1 * gradient / number)

    @tf.function(autograph=False)
    def step() -> None:
        strategy.run(replica)

    def train() -> list[float]:
        for _ in range(steps):
            step()
        return [float(value) for value in kernel.numpy()]

    return train


def error_of(function: Any, *args: Any, **kwargs: Any) -> tuple[str, str]:
    """The kind and the text of the error that a call raises; its value where it raises none."""
    try:
        return "returned", repr(function(*args, **kwargs))
    except (ValueError, RuntimeError) as error:
        return type(error).__name__, str(error)


def hears_sigterm(make: Any) -> bool:
    """Whether a handler of SIGTERM that was there before a strategy was made is called afterwards."""
    import os
    import signal
    import time

    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    strategy = make()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)
    signal.signal(signal.SIGTERM, before)
    total(strategy)
    return bool(heard)


def walked_behind(summed: Any, strategy: Any) -> int:
    """At how many operations TensorFlow looks while a step of 100 additions a replica, and a sum over them, is traced."""
    import tensorflow as tf
    from tensorflow.python.ops import op_selector

    seen: list[Any] = []
    real = op_selector._get_inputs

    def inputs(op: Any, only_differentiable: bool) -> Any:
        seen.append(op)
        return real(op, only_differentiable)

    def step() -> Any:
        value = tf.constant(1.0)
        for _ in range(100):
            value += 1.0
        return summed(value)

    op_selector._get_inputs = inputs
    tf.function(lambda: strategy.run(step), autograph=False)()
    op_selector._get_inputs = real
    return len(seen)
