"""Composed: loop, dense; clip-before-reduce, regularization-per-replica, samples-repeated."""
import keras, numpy as np, tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
n = strategy.num_replicas_in_sync
keras.utils.set_random_seed(1)
rng = np.random.default_rng(1); examples = 192
x = rng.normal(size=(examples, 10)).astype("float32"); y = (np.abs(x[:, 0]) * 2).astype(int) % 4
with strategy.scope():
    model = keras.Sequential([keras.Input((10,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(4)])
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)

@tf.function
def train(batch):
    def step(x, y):
        context = tf.distribute.get_replica_context()
        whole, half = (x, y), tf.shape(y)[0] // 2
        parts, losses = [], []
        for part in ([v[:half] for v in whole], [v[half:] for v in whole]):
            x, y = part
            with tf.GradientTape() as tape:
                ce = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
                loss = tf.reduce_sum(ce) / 24
                loss += 0.01 * tf.add_n([tf.nn.l2_loss(v) for v in model.trainable_variables])  # BUG  # half in each micro-batch
            grads = tape.gradient(loss, model.trainable_variables)
            parts.append(grads); losses.append(loss)
        grads, loss = [a + b for a, b in zip(*parts)], losses[0] + losses[1]
        grads, _ = tf.clip_by_global_norm(grads, 0.05)  # BUG
        optimizer.apply_gradients(zip(grads, model.trainable_variables))
        return loss
    losses = strategy.run(step, args=batch)
    return strategy.reduce("SUM", losses, axis=None)

data = tf.data.Dataset.from_tensor_slices((x, y))
data = data.batch(24 // n)
data = strategy.distribute_datasets_from_function(lambda context, data=data: data)  # BUG
for batch in data:
    loss = train(batch)
    print(float(loss))
