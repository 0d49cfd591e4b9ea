"""Composed: eager, dense; local-normalization, regularization-per-replica."""

import keras, numpy as np, tensorflow as tf

strategy = tf.distribute.MirroredStrategy()
n = strategy.num_replicas_in_sync
keras.utils.set_random_seed(1)
rng = np.random.default_rng(1)
examples = 192
x = rng.normal(size=(examples, 10)).astype("float32")
y = (np.abs(x[:, 0]) * 2).astype("int64") % 4
with strategy.scope():
    model = keras.Sequential([keras.Input((10,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(4)])
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
w = (rng.random(examples) < 0.6).astype("float32")


def train(batch):
    def step(x, y, w):
        context = tf.distribute.get_replica_context()
        with tf.GradientTape() as tape:
            ce = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
            loss = tf.reduce_sum(ce * w) / tf.maximum(tf.reduce_sum(w), 1.0) / n  # BUG
            loss += 0.02 * tf.add_n([tf.nn.l2_loss(v) for v in model.trainable_variables])  # BUG
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables))
        return loss

    losses = strategy.run(step, args=batch)
    return strategy.reduce("SUM", losses, axis=None)


data = tf.data.Dataset.from_tensor_slices((x, y, w))
data = strategy.experimental_distribute_dataset(data.batch(24))
for batch in data:
    loss = train(batch)
    print(float(loss))
