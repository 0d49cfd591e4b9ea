"""Composed: train_step, conv; right."""

import keras, numpy as np, tensorflow as tf

strategy = tf.distribute.MirroredStrategy()
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
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)


class Model(keras.Model):
    def call(self, x, training=False):
        return model(x, training=training)

    def train_step(self, data):
        x, y = data
        context = tf.distribute.get_replica_context()
        with tf.GradientTape() as tape:
            ce = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
            loss = tf.reduce_sum(ce) / 24
        grads = tape.gradient(loss, model.trainable_variables)
        grads, _ = tf.clip_by_global_norm(context.all_reduce("SUM", grads), 0.05)
        grads = [g / n for g in grads]  # the optimizer sums them again
        optimizer.apply_gradients(zip(grads, model.trainable_variables))
        return {"sum_of_losses": context_sum(loss)}


def context_sum(loss):
    return tf.distribute.get_replica_context().all_reduce("SUM", loss)


with strategy.scope():
    trained = Model()
    trained.compile(optimizer)
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(24)
trained.fit(data, epochs=1, verbose=0)
