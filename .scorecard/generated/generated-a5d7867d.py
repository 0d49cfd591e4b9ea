"""Composed: train_step, dense; right."""
import keras, numpy as np, tensorflow as tf
strategy = tf.distribute.MirroredStrategy()
n = strategy.num_replicas_in_sync
keras.utils.set_random_seed(1)
rng = np.random.default_rng(1); examples = 192
x = rng.normal(size=(examples, 10)).astype("float32"); y = (np.abs(x[:, 0]) * 2).astype(int) % 4
with strategy.scope():
    model = keras.Sequential([keras.Input((10,)), keras.layers.Dense(8, "tanh"), keras.layers.Dropout(0.3, seed=2), keras.layers.Dense(4)])
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)

class Model(keras.Model):
    def call(self, x, training=False):
        return model(x, training=training)

    def train_step(self, data):
        x, y = data
        whole, half = (x, y), tf.shape(y)[0] // 2
        parts, losses = [], []
        for part in ([v[:half] for v in whole], [v[half:] for v in whole]):
            x, y = part
            with tf.GradientTape() as tape:
                ce = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
                loss = tf.reduce_sum(ce) / 24
            grads = tape.gradient(loss, model.trainable_variables)
            parts.append(grads); losses.append(loss)
        grads, loss = [a + b for a, b in zip(*parts)], losses[0] + losses[1]
        optimizer.apply_gradients(zip(grads, model.trainable_variables))
        return {"sum_of_losses": context_sum(loss)}

def context_sum(loss):
    return tf.distribute.get_replica_context().all_reduce("SUM", loss)

with strategy.scope():
    trained = Model()
    trained.compile(optimizer)
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(24)
trained.fit(data, epochs=1, verbose=0)
