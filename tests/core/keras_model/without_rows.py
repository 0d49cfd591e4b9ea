"""Models of every layer of Keras with a kernel of its own, trained where a replica has no rows of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.core.keras_model.run import Run, strategy

BATCH = 8
SHAPES = {"sequences": (8, 4), "images": (8, 8, 4), "volumes": (6, 6, 6, 2), "recurrent": (4, 6), "waves": (64,)}


def trained(kind: str, way: str, rows: int) -> list[Any]:
    """The weights of a model whose branches are the layers of a kind, after an epoch.

    Args:
        kind: One of `SHAPES`.
        way: `alone` for Keras on one device, `fit` for Keras's fit on this process's topology, `step` for `TrainStep`.
        rows: Of the epoch; where one is left for the last batch, one replica has it and the others have none.
    """
    import keras

    import gpudist_core as gd

    where = None if way == "alone" else strategy()
    x = np.random.default_rng(1).normal(size=(rows, *SHAPES[kind])).astype("float32")
    y = x.reshape(rows, -1)[:, :1]
    with Run(where).scope():
        keras.utils.set_random_seed(0)
        model, optimizer = _model(kind), keras.optimizers.SGD(0.01)
        if way == "step":
            step = gd.TrainStep(model, optimizer, "mse")
        else:
            model = Run(where).ours(model)
            model.compile(optimizer, "mse")
    if way == "step":
        for batch in gd.Pipeline.from_arrays((x, y), global_batch_size=BATCH).distribute(where):
            step(batch)
    else:
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    return [variable.numpy() for variable in model.weights if variable.dtype == "float32"]


def _model(kind: str) -> Any:
    import keras

    inputs = keras.Input(SHAPES[kind])
    trained_below = keras.layers.Dense(SHAPES[kind][-1])(inputs)  # a gradient is taken of what the layers take
    outputs = [layer(trained_below) for layer in _layers()[kind]]
    flat = [keras.layers.LayerNormalization()(keras.layers.Flatten()(output)) for output in outputs]
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(flat)))


def _layers() -> dict[str, list[Any]]:
    import tensorflow as tf
    from keras import layers, ops

    def kernels(n: int) -> list[Any]:
        def of(name: str, *args: Any, **options: Any) -> Any:
            return getattr(layers, name.format(n))(*args, **options)

        return [
            *(of(name, 2, padding=padding) for name in ("MaxPooling{}D", "AveragePooling{}D") for padding in ("valid", "same")),
            of("MaxPooling{}D", 3, 1),
            *(
                of(name, 3)
                for name in ("AdaptiveMaxPooling{}D", "AdaptiveAveragePooling{}D")
                if hasattr(layers, name.format(n))
            ),
            *(of(name) for name in ("GlobalMaxPooling{}D", "GlobalAveragePooling{}D")),
            *(of(name, 3, 3) for name in ("Conv{}D", "Conv{}DTranspose")),
            of("Conv{}D", 2, 2, dilation_rate=2),
            of("Conv{}D", 2, 3, groups=2, activation="relu"),
            *(of(name, *args) for name, args in (("UpSampling{}D", (2,)), ("ZeroPadding{}D", (1,)), ("Cropping{}D", (1,)))),
            *(of(name, *args) for name, args in (("SeparableConv{}D", (2, 3)), ("DepthwiseConv{}D", (3,))) if n < 3),
            layers.BatchNormalization(),
            layers.GroupNormalization(2),
        ]

    def function(call: Callable[[Any], Any]) -> Any:
        return layers.Lambda(call)

    def attention(layer: Any) -> Any:
        return _with_itself()(layer)

    return {
        "sequences": [
            *kernels(1),
            *(layers.LayerNormalization(), layers.RMSNormalization(), layers.UnitNormalization(), layers.Softmax()),
            *(attention(layers.MultiHeadAttention(2, 2)), attention(layers.GroupQueryAttention(2, 2, 1))),
            *(attention(layers.Attention(use_scale=True)), attention(layers.AdditiveAttention())),
            *(layers.EinsumDense("abc,cd->abd", (8, 3)), layers.PReLU(), function(lambda x: tf.nn.pool(x, [2], "MAX"))),
            function(lambda x: ops.pad(x, [[0, 0], [2, 1], [0, 0]], mode="symmetric")),
        ],
        "images": [
            *kernels(2),
            *(layers.UpSampling2D(2, interpolation="bilinear"), layers.Resizing(5, 5), layers.PReLU()),
            layers.SpectralNormalization(layers.Conv2D(2, 3)),
            *(layers.TimeDistributed(layer) for layer in (layers.MaxPooling1D(), layers.Conv1D(2, 3))),
            function(lambda x: tf.nn.max_pool_with_argmax(x, 2, 2, "SAME")[0]),
            function(lambda x: tf.nn.pool(x, [2, 2], "MAX", dilations=[2, 2])),
            function(lambda x: tf.compat.v1.nn.max_pool(x, [1, 2, 2, 1], [1, 2, 2, 1], [[0, 0], [1, 1], [1, 1], [0, 0]])),
            function(lambda x: tf.raw_ops.MaxPoolV2(input=x, ksize=[1, 2, 2, 1], strides=[1, 2, 2, 1], padding="SAME")),
            function(lambda x: tf.pad(x, [[0, 0], [2, 2], [1, 1], [0, 0]], "REFLECT")),
            function(lambda x: tf.image.extract_patches(x, [1, 2, 2, 1], [1, 2, 2, 1], [1] * 4, "VALID")),
            *(function(lambda x: tf.nn.lrn(x)), function(lambda x: tf.nn.space_to_depth(x, 2))),
        ],
        "volumes": kernels(3),
        "recurrent": [
            *(layer(3, return_sequences=True) for layer in (layers.LSTM, layers.GRU, layers.SimpleRNN)),
            *(layers.Bidirectional(layers.LSTM(3)), layers.RNN([layers.GRUCell(3), layers.LSTMCell(2)])),
            *(_in_order(layers.Masking(), layer(2)) for layer in (layers.LSTM, layers.GRU)),
            _in_order(layers.Reshape((2, 4, 3)), layers.ConvLSTM1D(2, 2)),
            _in_order(function(lambda x: tf.cast(tf.abs(x[..., 0]), tf.int32) % 5), layers.Embedding(5, 3), layers.LSTM(2)),
            function(lambda x: _ctc(x)),
        ],
        "waves": [layers.MelSpectrogram(fft_length=16, sequence_stride=8, num_mel_bins=4, sampling_rate=100, max_freq=40)],
    }


def _with_itself() -> Any:
    import keras

    class WithItself(keras.layers.Layer):
        def __init__(self, layer: Any) -> None:
            super().__init__()
            self.layer = layer

        def build(self, shape: Any) -> None:
            takes_one = isinstance(self.layer, (keras.layers.Attention, keras.layers.AdditiveAttention))
            self.layer.build([shape, shape]) if takes_one else self.layer.build(shape, shape)

        def call(self, x: Any) -> Any:
            takes_one = isinstance(self.layer, (keras.layers.Attention, keras.layers.AdditiveAttention))
            return self.layer([x, x]) if takes_one else self.layer(x, x)

    return WithItself


def _in_order(*parts: Any) -> Any:
    import keras

    return keras.Sequential(list(parts))


def _ctc(x: Any) -> Any:
    import keras
    import tensorflow as tf

    return keras.losses.ctc(tf.ones((tf.shape(x)[0], 2), tf.int32), x)[:, None]
