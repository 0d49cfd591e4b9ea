"""Composed: eager, conv; missing-all-reduce."""

import keras, numpy as np, tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
n = strategy.num_replicas_in_sync
keras.utils.set_random_seed(1)
rng = np.random.default_rng(1)
examples = 192
x = rng.normal(size=(examples, 6, 6, 1)).astype("float32")
y = (np.abs(x[:, 0, 0, 0]) * 2).astype("int64") % 4
with strategy.scope():
    model = keras.Sequential(
        [keras.Input((6, 6, 1)), keras.layers.Conv2D(3, 3, activation="relu"), keras.layers.Flatten(), keras.layers.Dense(4)]
    )
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
w = (rng.random(examples) < 0.6).astype("float32")


def train(batch):
    def step(x, y, w):
        context = tf.distribute.get_replica_context()
        total = context.all_reduce("SUM", tf.reduce_sum(w))
        with tf.GradientTape() as tape:
            ce = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
            loss = tf.reduce_sum(ce * w) / total
        grads = tape.gradient(loss, model.trainable_variables)
        grads, _ = tf.clip_by_global_norm(context.all_reduce("SUM", grads), 0.05)
        grads = [g / n for g in grads]  # the optimizer sums them again
        for g, v in zip(grads, model.trainable_variables):
            v.assign_sub(0.1 * g)  # BUG
        return loss

    losses = strategy.run(step, args=batch)
    return strategy.reduce("SUM", losses, axis=None)


data = tf.data.Dataset.from_tensor_slices((x, y, w))
data = strategy.experimental_distribute_dataset(data.batch(24))
for batch in data:
    loss = train(batch)
    print(float(loss))
