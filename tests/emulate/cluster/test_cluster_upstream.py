"""What is relied upon of TensorFlow's private parts; fails when upstream changes it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from emulate.cluster import HostContext, Preload
from tests.emulate.cluster.helpers import Ran


def test_the_runtime_counts_as_initialised_from_the_first_tensor_on_and_not_before(
    run: Callable[..., Ran], preload: Preload
) -> None:
    def entry(context: HostContext) -> Any:
        import tensorflow as tf

        from emulate.cluster.upstream import is_runtime_initialized

        before = is_runtime_initialized()
        tf.random.set_seed(0)
        tf.config.list_physical_devices()
        with tf.Graph().as_default():
            tf.ones([])
        between = is_runtime_initialized()
        tf.ones([])
        return before, between, is_runtime_initialized()

    assert run("1x1", entry, preload).values == [(False, False, True)]


def test_training_after_a_fork_imports_nothing_more(run: Callable[..., Ran], preload: Preload) -> None:
    """What is imported late is imported once for each host, and by one that may not be able to read it any more."""

    def entry(context: HostContext) -> list[str]:
        import sys

        import tensorflow as tf

        before = set(sys.modules)
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("sum", tf.ones([2])))
        with strategy.scope():
            layer = tf.keras.layers.Dense(1)
            optimizer = tf.keras.optimizers.SGD()

        @tf.function
        def step() -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(layer(tf.ones([2, 2])))
            optimizer.apply_gradients(
                zip(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables, strict=True)
            )

        strategy.run(step)
        return sorted(name for name in set(sys.modules) - before if "autograph_generated" not in name)

    assert run("2x1", entry, preload).values == [[], []]


def test_a_host_joins_the_collectives_once_their_leader_listens(run: Callable[..., Ran], preload: Preload) -> None:
    def entry(context: HostContext) -> Any:
        import time

        import tensorflow as tf

        from emulate.cluster import upstream

        waited: list[str | None] = []
        real = upstream._wait_until_listening

        def wait(address: str | None) -> None:
            waited.append(address)
            real(address)

        upstream._wait_until_listening = wait
        if context.host == 0:
            time.sleep(0.2)
        tf.distribute.MultiWorkerMirroredStrategy()
        return waited

    leader, other = run("2x1", entry, preload).values
    assert set(leader) == {None}
    (address,) = set(other)
    assert address.startswith("127.0.0.1:")


def test_matplotlib_is_loaded_by_the_host_that_draws_with_keras(
    run: Callable[..., Ran], preload: Preload, tmp_path: Path
) -> None:
    picture = str(tmp_path / "one.png")

    def entry(context: HostContext) -> Any:
        import importlib
        import os
        import sys

        import keras
        import numpy as np

        before = "matplotlib" in sys.modules
        keras.visualization.plot_image_gallery(np.zeros((1, 8, 8, 3)), path=picture)
        boxes = importlib.import_module("keras.src.visualization.plot_bounding_box_gallery")  # itself it needs OpenCV
        return before, os.path.getsize(picture) > 0, type(boxes.patches.Patch(color="red")).__module__

    assert run("1x1", entry, preload).values == [(False, True, "matplotlib.patches")]


def test_matplotlib_is_loaded_once_for_all_hosts_of_a_program_that_names_it(run: Callable[..., Ran]) -> None:
    with Preload(modules=("matplotlib.pyplot",)) as preload:
        assert run("1x1", lambda context: "matplotlib.pyplot" in sys.modules, preload).values == [True]
