"""Composed: fit, dense; clip-before-reduce."""
import keras, numpy as np, tensorflow as tf
strategy = tf.distribute.MirroredStrategy()
n = strategy.num_replicas_in_sync
keras.utils.set_random_seed(1)
rng = np.random.default_rng(1); examples = 192
x = rng.normal(size=(examples, 10)).astype("float32"); y = (np.abs(x[:, 0]) * 2).astype(int) % 4
with strategy.scope():
    model = keras.Sequential([keras.Input((10,)), keras.layers.Dense(8, "tanh", kernel_regularizer=keras.regularizers.L2(0.01)), keras.layers.Dropout(0.3, seed=2), keras.layers.Dense(4, kernel_regularizer=keras.regularizers.L2(0.01))])
    optimizer = keras.optimizers.SGD(0.1, clipnorm=0.05)  # BUG
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(x, y, batch_size=24, epochs=1, shuffle=False, verbose=0)
