"""Composed: eager, embedding; missing-all-reduce, samples-missing."""
import keras, numpy as np, tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
n = strategy.num_replicas_in_sync
keras.utils.set_random_seed(1)
rng = np.random.default_rng(1); examples = 192
x = rng.integers(0, 20, size=(examples, 5)).astype("int32"); y = x[:, 0].astype(int) % 4
with strategy.scope():
    model = keras.Sequential([keras.Input((5,), dtype='int32'), keras.layers.Embedding(20, 4), keras.layers.Flatten(), keras.layers.Dense(4)])
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)

def train(batch):
    def step(x, y):
        context = tf.distribute.get_replica_context()
        with tf.GradientTape() as tape:
            ce = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
            loss = tf.reduce_sum(ce) / 24
        grads = tape.gradient(loss, model.trainable_variables)
        grads = [tf.convert_to_tensor(g) for g in grads]
        grads, _ = tf.clip_by_global_norm(context.all_reduce("SUM", grads), 0.05)
        grads = [g / n for g in grads]  # the optimizer sums them again
        for g, v in zip(grads, model.trainable_variables):
            v.assign_sub(0.1 * g)  # BUG
        return loss
    losses = strategy.run(step, args=batch)
    return strategy.reduce("SUM", losses, axis=None)

data = tf.data.Dataset.from_tensor_slices((x, y))
data = data.shard(n, 0)  # BUG
data = strategy.experimental_distribute_dataset(data.batch(24))
for batch in data:
    loss = train(batch)
    print(float(loss))
