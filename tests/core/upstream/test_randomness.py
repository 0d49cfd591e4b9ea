"""Random layers whose draws belong to the row draw for each row what one device draws for it."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from tests.core.conftest import OnHosts
from tests.versions import since

ROWS = 4
"""Three replicas have two rows, one and one."""


def _drawing(draw: Any) -> Any:
    """A layer of one's own that multiplies by what it draws."""
    import keras

    class Drawing(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.seeds = keras.random.SeedGenerator(1)

        def call(self, x: Any, training: bool = False) -> Any:
            return x * draw(keras.ops.shape(x), self.seeds)

    return Drawing()


def _layers() -> dict[str, tuple[Any, tuple[int, ...]]]:
    from keras import layers, random

    image, line, vector = (8, 8, 3), (6, 4), (5,)
    return {
        "dropout": (lambda: layers.Dropout(0.5, seed=1), vector),
        "dropout by column": (lambda: layers.Dropout(0.5, noise_shape=(None, 1, 4), seed=1), line),
        "dropout, one mask": (lambda: layers.Dropout(0.5, noise_shape=(1, 6, 4), seed=1), line),
        "spatial dropout 1D": (lambda: layers.SpatialDropout1D(0.5, seed=1), line),
        "spatial dropout 2D": (lambda: layers.SpatialDropout2D(0.5, seed=1), image),
        "spatial dropout 3D": (lambda: layers.SpatialDropout3D(0.5, seed=1), (2, 2, 2, 3)),
        "noise": (lambda: layers.GaussianNoise(1.0, seed=1), vector),
        "gaussian dropout": (lambda: layers.GaussianDropout(0.5, seed=1), vector),
        "alpha dropout": (lambda: layers.AlphaDropout(0.5, seed=1), vector),
        "recurrent dropout": (lambda: layers.LSTM(3, dropout=0.5, seed=1, kernel_initializer="ones"), line),
        "flip": (lambda: layers.RandomFlip(seed=1), image),
        "rotation": (lambda: layers.RandomRotation(0.3, seed=1), image),
        "translation": (lambda: layers.RandomTranslation(0.3, 0.3, seed=1), image),
        "zoom": (lambda: layers.RandomZoom(0.3, seed=1), image),
        "contrast": (lambda: layers.RandomContrast(0.5, seed=1), image),
        "gamma": (lambda: _drawing(lambda shape, seed: random.gamma(shape, 2.0, seed=seed)), vector),
        "beta": (lambda: _drawing(lambda shape, seed: random.beta(shape, alpha=2.0, beta=np.float32(3), seed=seed)), vector),
        "binomial": (lambda: _drawing(lambda shape, seed: random.binomial(shape, 9, 0.5, seed=seed)), vector),
        "brightness": (lambda: layers.RandomBrightness(0.5, value_range=(0, 1), seed=1), image),
    }


def _drawn(rows: int, devices: int) -> dict[str, Any]:
    """What each layer gives, rows in order."""
    import keras
    import tensorflow as tf

    import gpudist_core as gd
    from gpudist_core import share as shares
    from gpudist_core.upstream import randomness

    strategy = tf.distribute.MirroredStrategy() if devices > 1 else tf.distribute.get_strategy()
    found = {}
    for name, (make, shape) in _layers().items():
        keras.utils.set_random_seed(7)
        x = np.random.default_rng(3).random((rows, *shape), np.float32)
        with strategy.scope():
            layer = make()
            layer.build((None, *shape))

        def on_replica(x: Any, layer: Any = layer) -> Any:
            with shares.sharing(shares.Share(shares.rows_of([x]))), randomness.drawing("row"):
                return layer(x, training=True)

        data = gd.Pipeline.from_arrays((x, np.zeros(rows)), global_batch_size=rows).distribute(strategy)
        step = tf.function(lambda x, run=on_replica: strategy.run(run, args=(x,)), autograph=False)
        parts = strategy.experimental_local_results(step(next(iter(data))[0]))
        found[name] = np.concatenate([np.asarray(part) for part in parts])
    return found


def test_a_row_is_drawn_alike_on_one_device_and_on_three_replicas(on_hosts: OnHosts) -> None:
    ((alone,), (shared,)) = on_hosts("1x1", _drawn, ROWS, 1), on_hosts("1x3", _drawn, ROWS, 3)
    for name, wanted in alone.items():
        np.testing.assert_allclose(shared[name], wanted, rtol=1e-4, atol=1e-5, err_msg=name)


def _refused() -> dict[str, str]:
    """Draws that are not of one row, by what draws them."""
    import tensorflow as tf
    from keras import layers, random

    from gpudist_core import share as shares
    from gpudist_core.upstream import randomness

    strategy = tf.distribute.MirroredStrategy()
    x, images = tf.ones([2, 5]), tf.ones([2, 8, 8, 3])
    calls = {
        "shuffle": lambda: random.shuffle(x, seed=1),
        "categorical": lambda: random.categorical(x, 2, seed=1),
        "gamma": lambda: random.gamma((2, 5), tf.ones([5]), seed=1),
        "beta": lambda: random.beta((2, 5), 1.0, beta=[1.0] * 5, seed=1),
    }
    if since("keras", "3.10"):  # 3.8 has neither layer
        elastic, mixed = layers.RandomElasticTransform(1.0), layers.AugMix((0, 1))
        calls |= {"elastic": lambda: elastic(images, training=True), "mixed": lambda: mixed(images, training=True)}
    found = {}
    for name, call in calls.items():

        def on_replica(call: Any = call) -> Any:
            with shares.sharing(shares.Share(shares.rows_of([x]))), randomness.drawing("row"):
                return call()

        try:
            tf.function(lambda run=on_replica: strategy.run(run), autograph=False)()
        except Exception as error:
            # Keras puts the arguments of the layer's call around it.
            text = re.search(r"draws='row' needs.*'replica'\.", str(error))
            found[name] = f"{type(error).__name__}: {text and text[0]}"
        tf.function(call, autograph=False)()  # outside a step it is what it was
    return found


def test_a_draw_that_is_not_of_one_row_is_refused(on_hosts: OnHosts) -> None:
    [found] = on_hosts("1x2", _refused)
    begin = "UsageError: draws='row' needs random numbers that belong to one example. Received: drawn='keras."
    layers = {
        "elastic": f"{begin}layers.RandomElasticTransform'. Do it in a Pipeline's map, or use draws='replica'.",
        "mixed": f"{begin}layers.AugMix'. Do it in a Pipeline's map, or use draws='replica'.",
    }
    assert found == {
        "shuffle": f"{begin}random.shuffle'. Do it in a Pipeline's map, or use draws='replica'.",
        "categorical": f"{begin}random.categorical'. Do it in a Pipeline's map, or use draws='replica'.",
        "gamma": f"{begin}random.gamma'. Pass scalars as parameters, or use draws='replica'.",
        "beta": f"{begin}random.beta'. Pass scalars as parameters, or use draws='replica'.",
        **(layers if since("keras", "3.10") else {}),
    }
