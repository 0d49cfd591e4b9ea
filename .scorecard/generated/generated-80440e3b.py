"""Composed: train_step, embedding; right."""
import keras, numpy as np, tensorflow as tf
strategy = tf.distribute.MirroredStrategy()
n = strategy.num_replicas_in_sync
keras.utils.set_random_seed(1)
rng = np.random.default_rng(1); examples = 192
x = rng.integers(0, 20, size=(examples, 5)).astype("int32"); y = x[:, 0].astype(int) % 4
with strategy.scope():
    model = keras.Sequential([keras.Input((5,), dtype='int32'), keras.layers.Embedding(20, 4), keras.layers.Flatten(), keras.layers.Dense(4)])
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
w = (rng.random(examples) < 0.6).astype("float32")

class Model(keras.Model):
    def call(self, x, training=False):
        return model(x, training=training)

    def train_step(self, data):
        x, y, w = data
        context = tf.distribute.get_replica_context()
        total = context.all_reduce("SUM", tf.reduce_sum(w))
        with tf.GradientTape() as tape:
            ce = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
            loss = tf.reduce_sum(ce * w) / total
        grads = tape.gradient(loss, model.trainable_variables)
        grads = [tf.convert_to_tensor(g) for g in grads]
        grads, _ = tf.clip_by_global_norm(context.all_reduce("SUM", grads), 0.05)
        grads = [g / n for g in grads]  # the optimizer sums them again
        optimizer.apply_gradients(zip(grads, model.trainable_variables))
        return {"sum_of_losses": context_sum(loss)}

def context_sum(loss):
    return tf.distribute.get_replica_context().all_reduce("SUM", loss)

with strategy.scope():
    trained = Model()
    trained.compile(optimizer)
data = tf.data.Dataset.from_tensor_slices((x, y, w)).batch(24)
trained.fit(data, epochs=1, verbose=0)
