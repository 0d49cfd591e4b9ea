"""Composed: fit, embedding; clip-before-reduce, uneven-batch."""
import keras, numpy as np, tensorflow as tf
strategy = tf.distribute.MirroredStrategy()
n = strategy.num_replicas_in_sync
keras.utils.set_random_seed(1)
rng = np.random.default_rng(1); examples = 197
x = rng.integers(0, 20, size=(examples, 5)).astype("int32"); y = x[:, 0].astype(int) % 4
with strategy.scope():
    model = keras.Sequential([keras.Input((5,), dtype='int32'), keras.layers.Embedding(20, 4), keras.layers.Flatten(), keras.layers.Dense(4, kernel_regularizer=keras.regularizers.L2(0.01))])
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.05)  # BUG
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(x, y, batch_size=24, epochs=1, shuffle=False, verbose=0)  # BUG
