"""Random layers whose draws belong to the row draw for each row what one device draws for it."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.core.conftest import OnHosts

ROWS = 4
"""Three replicas have two rows, one and one."""


def _layers() -> dict[str, tuple[Any, tuple[int, ...]]]:
    from keras import layers

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
